//! Clients that mean no good, against `exocell serve --docker`: whatever they
//! say, the next client is served.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::common::cell::pid;
use crate::common::docker::Server;
use crate::common::{IMAGE, eventually, finish, host};

/// What the server answers to `bytes`, up to its hanging up.
fn ask(server: &Server, bytes: &[u8]) -> String {
    let mut stream = server.connect();
    // One that is refused early may not want to hear the rest.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    hear(&mut stream)
}

fn hear(stream: &mut UnixStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    String::from_utf8_lossy(&heard).into_owned()
}

fn request(line: &str, body: &str) -> Vec<u8> {
    format!(
        "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A request that takes its connection over.
fn hijack(line: &str, body: &str) -> Vec<u8> {
    format!(
        "{line} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[track_caller]
fn still_serves(server: &Server) {
    let pong = ask(server, &request("GET /_ping", ""));
    assert!(pong.starts_with("HTTP/1.1 200") && pong.ends_with("OK"), "{pong}");
}

#[test]
fn a_body_that_is_refused_may_come_later() {
    let server = Server::start();
    let mut stream = server.connect();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
        .write_all(b"POST /build?squash=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\"}") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("the whole answer, before the body came");
        answer.push(byte[0]);
    }
    assert!(String::from_utf8_lossy(&answer).starts_with("HTTP/1.1 501"));
    stream.write_all(&[&b"{}"[..], &request("GET /_ping", "")].concat()).unwrap();
    let pong = hear(&mut stream);
    assert!(pong.starts_with("HTTP/1.1 200") && pong.ends_with("OK"), "{pong}");
}

#[test]
fn errors_come_in_the_apis_form() {
    let server = Server::start();
    for (line, body, status, word) in [
        ("GET /no/such/page", "", 404, "page not found"),
        ("GET /v1.99/info", "", 400, "too new"),
        ("GET /v1.12/info", "", 400, "too old"),
        ("GET /%ff", "", 400, "UTF-8"),
        ("PUT /_ping", "", 404, "page not found"),
        ("GET /containers/nobody/json", "", 404, "No such container: nobody"),
        ("POST /containers/nobody/pause", "", 404, "No such container"),
        ("GET /images/nothing/json", "", 404, "No such image"),
        ("GET /exec/x/json", "", 404, "No such exec instance"),
        ("GET /containers/json?filters=x", "", 400, "invalid filters"),
        ("GET /containers/json?limit=x", "", 400, "no number"),
        ("POST /containers/create", "{", 400, "cannot be read"),
        ("POST /containers/create", "[]", 400, "cannot be read"),
        ("POST /containers/create", r#"{"Image":"nothing"}"#, 404, "No such image: nothing"),
        ("POST /containers/create?name=a/b", r#"{"Image":"x"}"#, 400, "no name"),
        ("POST /auth", "{}", 400, "username"),
        ("POST /networks/create", "{}", 400, "not the name of a network"),
        ("GET /volumes/..", "", 404, "no such volume"),
        ("POST /volumes/create", r#"{"Name":"../x"}"#, 400, "no name"),
    ] {
        let answer = ask(&server, &request(line, body));
        let (head, text) = answer.split_once("\r\n\r\n").expect("a whole reply");
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
        assert!(head.to_ascii_lowercase().contains("api-version: 1."), "{line}: {answer}");
        let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
        let message = value["message"].as_str().expect("a message");
        assert!(message.contains(word), "{line}: {message}");
    }
}

#[test]
fn garbage_and_endless_requests_are_refused() {
    let server = Server::start();
    for garbage in
        [&b"\0\xff\xfe garbage\r\n\r\n"[..], b"GET\r\n\r\n", b"\x16\x03\x01\x02\0\x01", b""]
    {
        let answer = ask(&server, garbage);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    let long = format!("GET /_ping HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(1 << 20));
    let answer = ask(&server, long.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    let many = format!("GET /_ping HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: b\r\n".repeat(10_000));
    let answer = ask(&server, many.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    let head = "POST /containers/create HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut endless = server.connect();
    endless.write_all(head.as_bytes()).unwrap();
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    // It hangs up once it has heard too much.
    let sent = (0..1000).take_while(|_| endless.write_all(chunk.as_bytes()).is_ok()).count();
    let answer = hear(&mut endless);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(sent < 1000, "{sent} chunks were taken");
    let lie = "POST /containers/create HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{";
    let answer = ask(&server, lie.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    still_serves(&server);
}

#[test]
fn connections_that_are_left_open_hold_nothing_up() {
    let server = Server::start();
    let open: Vec<UnixStream> = (0..200).map(|_| server.connect()).collect();
    let half: Vec<UnixStream> = (0..50)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"GET /_ping HTT").unwrap();
            stream
        })
        .collect();
    let listeners: Vec<UnixStream> = (0..50)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(&hijack("GET /events", "")).unwrap();
            stream
        })
        .collect();
    still_serves(&server);
    drop((open, half, listeners));
    still_serves(&server);
}

#[test]
fn a_client_that_takes_over_and_stops_reading_does_not_keep_a_container_alive() {
    let server = Server::start();
    let script =
        "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done";
    let create = ["create", "--network", "none", "--name", "loud", IMAGE, "sh", "-c", script];
    server.docker(&create).ok();
    let mut stuck = server.connect();
    stuck.write_all(&hijack("POST /containers/loud/attach?stream=1&stdout=1", "")).unwrap();
    let mut head = [0; 12];
    stuck.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 101");
    server.docker(&["start", "loud"]).ok();
    let cell = server.cell("loud");
    // Its output is held up by now, as it would be by a pipe.
    server.docker(&["exec", "loud", "true"]).ok();
    server.docker(&["rm", "-f", "loud"]).ok();
    crate::common::docker::gone(&cell);
    eventually("it is forgotten", || server.docker(&["ps", "-aq"]).text().is_empty());
    still_serves(&server);
}

#[test]
fn a_half_open_exec_runs_on_and_is_told_of() {
    let server = Server::start();
    server.idle("x");
    let body = r#"{"Cmd":["sh","-c","sleep 1; exit 9"],"AttachStdout":true,"AttachStdin":true}"#;
    let made = ask(&server, &request("POST /containers/x/exec", body));
    let made: serde_json::Value =
        serde_json::from_str(made.split_once("\r\n\r\n").unwrap().1).unwrap();
    let id = made["Id"].as_str().unwrap();
    let mut client = server.connect();
    client.write_all(&hijack(&format!("POST /exec/{id}/start"), "{}")).unwrap();
    let mut head = [0; 12];
    client.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 101");
    let inspect = || {
        let answer = ask(&server, &request(&format!("GET /exec/{id}/json"), ""));
        serde_json::from_str::<serde_json::Value>(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    eventually("it has a pid in the guest", || {
        inspect()["Pid"].as_u64().is_some_and(|pid| pid > 1)
    });
    drop(client);
    eventually("it ends by itself", || inspect()["ExitCode"] == 9);
    assert_eq!(inspect()["Running"], false);
    let twice = ask(&server, &request(&format!("POST /exec/{id}/start"), "{}"));
    assert!(twice.starts_with("HTTP/1.1 409"), "{twice}");
}

#[test]
fn a_container_whose_guest_does_not_answer_is_stopped() {
    let server = Server::start();
    server.idle("deaf");
    let told = finish(&mut server.exocell(&["inspect", "--json", "deaf"]), b"").ok().one();
    host::send(pid(&told, "guest_kernel_pid"), Signal::SIGSTOP);
    server.docker(&["stop", "-t", "1", "deaf"]).ok();
    assert_eq!(server.inspect("deaf", "{{.State.Status}} {{.State.ExitCode}}"), "exited 137");
}

#[test]
fn clients_of_a_quiet_container_that_are_killed_leave_nothing_behind() {
    let server = Server::start();
    server.idle("quiet");
    let follow = request("GET /containers/quiet/logs?follow=1&stdout=1", "");
    let attach = hijack("POST /containers/quiet/attach?stream=1&stdout=1", "");
    // More than there are places.
    for _ in 0..600 {
        for (said, answer) in [(&follow, b"HTTP/1.1 200"), (&attach, b"HTTP/1.1 101")] {
            let mut client = server.connect();
            client.write_all(said).unwrap();
            let mut head = [0; 12];
            client.read_exact(&mut head).unwrap();
            assert_eq!(&head, answer);
        }
    }
    still_serves(&server);
    server.docker(&["exec", "quiet", "true"]).ok();
}

#[test]
fn a_reader_that_stops_does_not_keep_a_container_from_its_start_and_its_end() {
    let server = Server::start();
    server.docker(&["create", "--network", "none", "--name", "st", IMAGE, "true"]).ok();
    let stalled = || {
        let mut reader = server.connect();
        reader.write_all(&request("GET /containers/st/archive?path=/usr", "")).unwrap();
        let mut head = [0; 100];
        reader.read_exact(&mut head).unwrap();
        reader
    };
    let first = stalled();
    server.docker(&["start", "-a", "st"]).ok();
    let second = stalled();
    server.docker(&["rm", "-f", "st"]).ok();
    drop((first, second));
    still_serves(&server);
}
