//! Networks of containers: published ports, and what the server grants.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::docker::Server;
use common::lan::{Lan, PEER};
use common::servers::Web;
use common::{Finished, IMAGE, eventually};

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
