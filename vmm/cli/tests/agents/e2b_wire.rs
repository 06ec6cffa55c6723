//! What E2B's clients tell by the bytes alone: how a connection ends, and what a host is called.

use std::io::{ErrorKind, Read, Write};

use serde_json::json;

use super::e2b_server::{hear, message, stream_head, visit};
use crate::common::e2b::Server;

/// A web server that answers with the name that it was called by.
const NAMED: &str = r#"
import http.server, os
class Named(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(("called " + dict(self.headers.items())["Host"] + ".\n").encode())
server = http.server.HTTPServer(("", 8000), Named)
os.write(1, b"up\n")
server.serve_forever()
"#;

/// A call of Connect's that starts `args` in a sandbox, and a stream with its answer.
fn begin(server: &Server, own: &(String, String), args: &[&str]) -> std::net::TcpStream {
    let wanted = json!({ "process": { "cmd": args[0], "args": &args[1..] }, "stdin": false });
    let body = message(&wanted);
    let mut stream = server.connect();
    let head = stream_head(own, "process.Process/Start", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
    stream
}

/// Clients ask whether a sandbox is there still when a connection was broken off, and not when an
/// answer has a wrong form.
#[test]
fn a_command_whose_sandbox_is_killed_is_broken_off() {
    let server = Server::start();
    let own = server.sandbox();
    let mut stream = begin(&server, &own, &["/bin/sleep", "600"]);
    hear(&mut stream, "start");
    assert_eq!(server.call(&format!("DELETE /sandboxes/{}", own.0), &[], b"").status, 204);
    let error = stream.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}

#[test]
fn programs_are_told_the_host_that_their_client_says() {
    let server = Server::start();
    // The gateway of MCP servers is the client's own to start.
    let body = json!({
        "templateID": "base", "mcp": { "none": {} },
        "network": { "maskRequestHost": "masked.example:${PORT}" },
    });
    let made = server.call("POST /v2/sandboxes", &[], body.to_string().as_bytes());
    assert_eq!(made.status, 201, "{}", made.text());
    let text = |name: &str| made.json()[name].as_str().expect("a text").to_owned();
    let own = (text("sandboxID"), text("envdAccessToken"));
    let mut program = begin(&server, &own, &["/usr/bin/python3", "-u", "-c", NAMED]);
    // "up\n"
    hear(&mut program, "dXAK");
    hear(&mut visit(&server, &own.0, 8000, ""), "called masked.example:8000.");
    let line = format!("PUT /sandboxes/{}/network", own.0);
    assert_eq!(server.call(&line, &[], b"{}").status, 204);
    hear(&mut visit(&server, &own.0, 8000, ""), "called x.");
    for wrong in ["", "two words", "line\nX-More: 1", "user@host", "a/b", &"x".repeat(300)] {
        let body = json!({ "templateID": "base", "network": { "maskRequestHost": wrong } });
        let answer = server.call("POST /v2/sandboxes", &[], body.to_string().as_bytes());
        assert_eq!(answer.status, 400, "{wrong:?}: {}", answer.text());
        assert!(answer.text().contains("maskRequestHost"), "{}", answer.text());
    }
}

#[test]
fn where_files_are_put_is_said_as_a_proxy_with_tls_has_it() {
    let server = Server::start();
    let url = |proto: &str| {
        let line = format!("GET /templates/x/files/{}", "0".repeat(64));
        let answer = server.call(&line, &[("X-Forwarded-Proto", proto)], b"");
        answer.json()["url"].as_str().expect("a URL").to_owned()
    };
    assert!(url("https").starts_with("https://x/e2b/archives/"), "{}", url("https"));
    assert!(url("http").starts_with("http://x/"), "{}", url("http"));
    assert!(url("javascript").starts_with("http://x/"), "{}", url("javascript"));
}
