//! Networks of containers: published ports, and what the server grants.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::Duration;

use crate::common::docker::Server;
use crate::common::lan::{Lan, PEER};
use crate::common::servers::Web;
use crate::common::{Finished, IMAGE, eventually, finish};

/// What a server in a container answers at `address`.
fn get(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn publish(server: &Server, name: &str, flags: &[&str]) -> Finished {
    let run = ["run", "-d", "--name", name];
    let serve = ["python3", "-m", "http.server", "80", "--directory", "/etc"];
    server.docker(&[&run, flags, &[IMAGE], &serve].concat())
}

#[test]
fn a_published_port_leads_into_the_container() {
    let _lan = Lan::new();
    let server = Server::start();
    publish(&server, "fixed", &["-p", "8080:80"]).ok();
    assert_eq!(server.docker(&["port", "fixed", "80"]).ok().text(), "127.0.0.1:8080");
    let ports = server.docker(&["ps", "--format", "{{.Ports}}"]).ok();
    assert_eq!(ports.text(), "127.0.0.1:8080->80/tcp");
    let answers = |address: &str| get(address).is_ok_and(|answer| answer.contains("200 OK"));
    eventually("the server answers", || answers("127.0.0.1:8080"));
    assert!(TcpStream::connect("192.31.196.1:8080").is_err(), "only on the loopback");

    publish(&server, "open", &["-p", "192.31.196.1::80"]).ok();
    let address = server.docker(&["port", "open", "80"]).ok().text().to_owned();
    assert!(address.starts_with("192.31.196.1:") && !address.ends_with(":0"), "{address}");
    eventually("the server answers", || answers(&address));

    let taken = publish(&server, "late", &["-p", "8080:80"]).exited(125);
    assert!(taken.stderr.contains("cannot listen on 127.0.0.1:8080"), "{}", taken.stderr);
    server.docker(&["stop", "-t", "0", "fixed"]).ok();
    assert_eq!(server.inspect("fixed", "{{len .NetworkSettings.Ports}}"), "0");
    assert!(TcpStream::connect("127.0.0.1:8080").is_err(), "it ends with the container");
}

/// Says everything it hears in capitals.
const ECHO: &str = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                    s.bind(('', 53))\nwhile True:\n d, a = s.recvfrom(65535)\n s.sendto(d.upper(), a)";

/// What comes back from `address` for `said`.
fn ask(socket: &UdpSocket, address: &str, said: &[u8]) -> Option<Vec<u8>> {
    socket.set_read_timeout(Some(Duration::from_millis(500))).expect("a time");
    socket.send_to(said, address).ok()?;
    let mut heard = vec![0; 65_535];
    let (bytes, from) = socket.recv_from(&mut heard).ok()?;
    heard.truncate(bytes);
    (from.to_string() == address).then_some(heard)
}

#[test]
fn a_published_port_leads_datagrams_into_the_container() {
    let _lan = Lan::new();
    let server = Server::start();
    let run = |name: &str, flags: &[&str]| {
        let fixed = ["run", "-d", "--name", name];
        server.docker(&[&fixed[..], flags, &[IMAGE, "python3", "-c", ECHO]].concat()).ok();
    };
    run("fixed", &["-p", "5353:53/udp", "-p", "5353:53"]);
    let ports = server.docker(&["port", "fixed"]).ok();
    assert_eq!(ports.text(), "53/tcp -> 127.0.0.1:5353\n53/udp -> 127.0.0.1:5353");
    let row = server.docker(&["ps", "--format", "{{.Ports}}"]).ok();
    assert!(row.text().contains("127.0.0.1:5353->53/udp"), "{}", row.text());
    let callers = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    for caller in &callers {
        eventually("the container answers", || {
            ask(caller, "127.0.0.1:5353", b"hello").as_deref() == Some(b"HELLO")
        });
    }
    let large = vec![b'x'; 60_000];
    eventually("a large one comes back", || {
        ask(&callers[0], "127.0.0.1:5353", &large).is_some_and(|heard| heard.len() == large.len())
    });
    run("open", &["-P", "--expose", "53/udp"]);
    let address = server.docker(&["port", "open", "53/udp"]).ok().text().to_owned();
    eventually("it answers", || ask(&callers[0], &address, b"a").as_deref() == Some(b"A"));
    server.docker(&["rm", "-f", "fixed"]).ok();
    assert_eq!(ask(&callers[0], "127.0.0.1:5353", b"hello"), None);

    let mut own = server.exocell(&["run", "-d", "--name", "own", "-p", "5354:53/udp", IMAGE]);
    finish(own.args(["python3", "-c", ECHO]), b"").ok();
    let port = finish(&mut server.exocell(&["port", "own", "53/udp"]), b"").ok();
    assert_eq!(port.text(), "127.0.0.1:5354");
    eventually("it answers", || ask(&callers[1], "127.0.0.1:5354", b"b").as_deref() == Some(b"B"));
}

#[test]
fn of_a_range_of_ports_a_container_has_the_first_that_is_free() {
    let _lan = Lan::new();
    let server = Server::start();
    for (name, address) in [("one", "127.0.0.1:8000"), ("two", "127.0.0.1:8001")] {
        publish(&server, name, &["-p", "8000-8001:80"]).ok();
        assert_eq!(server.docker(&["port", name, "80"]).ok().text(), address);
    }
    let full = publish(&server, "three", &["-p", "8000-8001:80"]).exited(125);
    assert!(full.stderr.contains("none of 127.0.0.1:8000-8001 is free"), "{}", full.stderr);
    publish(&server, "pairs", &["-p", "8010-8011:80-81"]).ok();
    let ports = server.docker(&["port", "pairs"]).ok();
    assert_eq!(ports.text(), "80/tcp -> 127.0.0.1:8010\n81/tcp -> 127.0.0.1:8011");
}

#[test]
fn a_container_reaches_the_host_where_a_rule_grants_its_name() {
    let _lan = Lan::new();
    let _web = Web::new("127.0.0.1:8099", "of the host");
    let _other = Web::new("127.0.0.1:8100", "not granted");
    let server = Server::with(&["--allow-net", "host.docker.internal:8099"]);
    let fetch = |flags: &[&str], at: &str| {
        let program = format!(
            "import urllib.request as u; print(u.urlopen('http://{at}/', timeout=20).read())"
        );
        let run = ["run", "--rm"];
        server.docker(&[&run[..], flags, &[IMAGE, "python3", "-c", &program]].concat())
    };
    let add = ["--add-host", "host.docker.internal:host-gateway"];
    for flags in [&[][..], &add] {
        let heard = fetch(flags, "host.docker.internal:8099").ok();
        assert_eq!(heard.text(), "b'of the host'");
        fetch(flags, "host.docker.internal:8100").exited(1);
    }
    fetch(&[], "127.0.0.1:8099").exited(1);
    let wide = Server::with(&["--allow-net", "*:8099"]);
    let told = wide.docker(&[&["create"][..], &add, &[IMAGE, "true"]].concat()).ok();
    assert!(told.stderr.contains("--allow-net host.docker.internal:PORT"), "{}", told.stderr);
    let program = "import urllib.request as u; u.urlopen('http://host.docker.internal:8099/')";
    wide.docker(&["run", "--rm", IMAGE, "python3", "-c", program]).exited(1);
}

#[test]
fn a_container_reaches_what_the_server_grants() {
    let lan = Lan::new();
    let web = lan.at_peer(|| Web::new(&format!("{PEER}:80"), "hello"));
    let server = Server::with(&["--allow-net", "peer.test:80"]);
    let fetch = |flags: &[&str], host: &str| {
        let program = format!(
            "import urllib.request as u; print(u.urlopen('http://{host}/', timeout=20).read())"
        );
        let run = ["run", "--rm"];
        server.docker(&[&run[..], flags, &[IMAGE, "python3", "-c", &program]].concat())
    };
    assert_eq!(fetch(&[], "peer.test").ok().text(), "b'hello'");
    assert!(fetch(&[], "other.test").exited(1).stderr.contains("Name or service not known"));
    fetch(&["--network", "none"], "peer.test").exited(1);
    assert_eq!(web.asked().len(), 1);
}
