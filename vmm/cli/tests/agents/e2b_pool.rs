//! Sandboxes that have booted before anybody asks for them, and many that are asked for at once.

use std::fs;
use std::io::Write;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::common::e2b::{Server, Small, read};
use crate::common::{eventually, finish, pip, text};

const PINS: &str = include_str!("../e2b/pins.txt");
const BURST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2b/burst.py");
/// Sandboxes of the burst; more by hand.
const BURST_COUNT: usize = 40;

fn hash(key: &str) -> String {
    Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of keys, and more of each tenant's table.
fn keys(tenants: &[(&str, &str)]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (name, more) in tenants {
        let own = hash(&format!("key of {name}"));
        let table = format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = \"{own}\"\n{more}\n");
        file.as_file().write_all(table.as_bytes()).unwrap();
    }
    file
}

fn create(server: &Server, key: &str, body: &Value) -> Value {
    let body = body.to_string();
    let made = server.call("POST /v2/sandboxes", &[("X-API-KEY", key)], body.as_bytes());
    assert_eq!(made.status, 201, "{}", made.text());
    made.json()
}

/// The specs of the cells that wait, by id.
fn waiting(server: &Server) -> Vec<String> {
    let specs = server.records().into_iter().filter_map(|id| {
        let path = server.root().join("cells").join(&id).join("spec.json");
        let spec: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        spec["labels"]["exocell.e2b.pool"].is_string().then_some(id)
    });
    specs.collect()
}

/// A sandbox that waited by then. One is there a little before it can be taken.
fn take(server: &Server, key: &str, body: &Value) -> Value {
    let mut made = Value::Null;
    eventually("one that waits is taken", || {
        let before = waiting(server);
        made = create(server, key, body);
        let id = made["sandboxID"].as_str().unwrap();
        let was_there = before.iter().any(|own| own == id);
        if !was_there {
            let line = format!("DELETE /sandboxes/{id}");
            assert_eq!(server.call(&line, &[("X-API-KEY", key)], b"").status, 204);
        }
        was_there
    });
    made
}

/// The text of a file of a sandbox.
fn file(server: &Server, made: &Value, path: &str) -> String {
    let headers = [
        ("E2b-Sandbox-Id", made["sandboxID"].as_str().unwrap()),
        ("X-Access-Token", made["envdAccessToken"].as_str().unwrap()),
    ];
    let read = server.call(&format!("GET /files?path={path}"), &headers, b"");
    assert_eq!(read.status, 200, "{path}: {}", read.text());
    read.text()
}

#[test]
fn one_that_waits_is_taken_as_it_was_asked_for_and_the_rest_ends_with_the_server() {
    let small = Small::new();
    let flags = ["--template", &small.template(), "--pool", "small=2", "--e2b-sandboxes", "3"];
    let mut server = Server::with(&flags);
    eventually("two wait", || waiting(&server).len() == 2);
    let before = waiting(&server);
    assert!(server.notes().is_empty(), "they are nobody's");
    assert_eq!(server.call("GET /v2/sandboxes", &[], b"").json(), json!([]));
    for id in &before {
        assert_eq!(server.call(&format!("GET /sandboxes/{id}"), &[], b"").status, 404);
    }
    let key = server.key();
    let wanted = json!({
        "templateID": "small", "timeout": 77, "metadata": {"who": "ann"}, "envVars": {"A": "b"},
        "allow_internet_access": false, "network": {"allowPublicTraffic": false},
    });
    let made = take(&server, &key, &wanted);
    let id = made["sandboxID"].as_str().unwrap().to_owned();
    assert!(made["trafficAccessToken"].is_string());
    let info = server.call(&format!("GET /sandboxes/{id}"), &[], b"").json();
    assert_eq!((&info["metadata"], &info["alias"]), (&wanted["metadata"], &json!("small")));
    assert_eq!(info["allowInternetAccess"], json!(false));
    let own = (id.clone(), made["envdAccessToken"].as_str().unwrap().to_owned());
    let envs =
        server.call("GET /envs", &[("E2b-Sandbox-Id", &own.0), ("X-Access-Token", &own.1)], b"");
    assert_eq!(envs.json(), json!({"A": "b"}));
    for (name, text) in [("SANDBOX", "true"), ("SANDBOX_ID", id.as_str()), ("TEMPLATE_ID", "small")]
    {
        assert_eq!(file(&server, &made, &format!("/run/e2b/.E2B_{name}")), text);
    }
    // They count among the three that there may be.
    eventually("it is filled again", || waiting(&server).len() == 2);
    let others = [0, 1].map(|_| create(&server, &key, &json!({"templateID": "small"})));
    let tokens = others.iter().map(|it| it["envdAccessToken"].to_string());
    assert_eq!(tokens.collect::<std::collections::BTreeSet<_>>().len(), 2);
    eventually("there is no room for more", || {
        waiting(&server).is_empty() && server.records().len() == 3
    });
    let full = server.call("POST /sandboxes", &[], br#"{"templateID": "small"}"#);
    assert_eq!(full.status, 429, "{}", full.text());
    let last = others[1]["sandboxID"].as_str().unwrap();
    assert_eq!(server.call(&format!("DELETE /sandboxes/{last}"), &[], b"").status, 204);
    eventually("there is room for one", || waiting(&server).len() == 1);
    let one = waiting(&server).remove(0);
    // Another template needs the place of the one that waits.
    let base = create(&server, &key, &json!({"templateID": "base"}));
    eventually("it has gone", || !server.records().contains(&one));
    server.kill();
    eventually("three go on", || server.records().len() == 3);
    server.resume();
    assert_eq!(
        server.call(&format!("GET /sandboxes/{id}"), &[], b"").json()["endAt"],
        info["endAt"]
    );
    let gone = base["sandboxID"].as_str().unwrap();
    assert_eq!(server.call(&format!("DELETE /sandboxes/{gone}"), &[], b"").status, 204);
    eventually("the next server fills its own", || waiting(&server).len() == 1);
    let [own] = &waiting(&server)[..] else { panic!("one waits") };
    let own = own.clone();
    server.kill();
    eventually("who waits ends with its server", || !server.records().contains(&own));
    assert_eq!(server.records().len(), 2, "and nobody else");
    server.resume();
}

#[test]
fn the_pool_follows_its_template_and_its_tenant() {
    let (small, other) = (Small::new(), Small::new());
    let name = other.template().replace("small=", "");
    // Built anew under the same name.
    let file = keys(&[("ann", "[tenant.pool]\nsmall = 1"), ("bob", "")]);
    let server = Server::with(&["--template", &small.template(), "--e2b-keys", text(file.path())]);
    eventually("one waits", || waiting(&server).len() == 1);
    let anns = waiting(&server).remove(0);
    let bobs = create(&server, "key of bob", &json!({"templateID": "small"}));
    assert_ne!(bobs["sandboxID"], json!(anns), "it waits for another");
    let image = small.template().replace("small=", "");
    finish(&mut server.exocell(&["image", "tag", &name, &image]), b"").ok();
    eventually("the one of the old image is replaced", || {
        let now = waiting(&server);
        now.len() == 1 && now[0] != anns
    });
    take(&server, "key of ann", &json!({"templateID": "small"}));
}

#[test]
fn many_at_once_are_all_served_and_one_of_another_key_soon() {
    let packages = pip::wheels("e2b", PINS);
    let small = Small::new();
    let file = keys(&[("ann", ""), ("bob", "")]);
    let flags = ["--template", &small.template(), "--e2b-keys", text(file.path())];
    let server =
        Server::with(&[&flags[..], &["--e2b-sandboxes", "300", "--pool", "small=2"]].concat());
    let count = std::env::var("EXOCELL_E2B_BURST").ok().and_then(|text| text.parse().ok());
    let count: usize = count.unwrap_or(BURST_COUNT);
    let mut client = std::process::Command::new("python3");
    client.env("E2B_API_URL", server.url()).env("E2B_SANDBOX_URL", server.url());
    client.args([BURST, &count.to_string(), "key of ann", "key of bob"]);
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    assert_eq!(told.text(), "served");
    eventually("nothing is left but the pool", || {
        server.notes().is_empty() && server.records().len() == waiting(&server).len()
    });
}

#[test]
fn who_goes_away_while_it_waits_has_no_sandbox() {
    let small = Small::new();
    let server = Server::with(&["--template", &small.template()]);
    let body = br#"{"templateID": "small"}"#;
    let ask = || {
        let mut stream = server.connect();
        let head = format!(
            "POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {}\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n",
            server.key(),
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        stream
    };
    let gone: Vec<_> = (0..80).map(|_| ask()).collect();
    let mut stays = ask();
    drop(gone);
    assert_eq!(read(&mut stays).status, 201);
    let count = || server.call("GET /sandboxes", &[], b"").json().as_array().unwrap().len();
    assert!(count() < 60, "{} were made for nobody", count());
}
