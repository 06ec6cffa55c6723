//! What a guest chose, on its way to a terminal.

use std::fs;
use std::io::{Read, Write};

use crate::common::cell::Cell;
use crate::common::docker::Server;
use crate::common::host::record;
use crate::common::{Finished, finish, run, text};

/// Moves the cursor, sets a title, colours by a C1 control, turns the direction, begins a line.
const HOSTILE: &str = "a\x1b[2J\x1b]0;owned\x07\u{9b}31m\u{202e}b\nexocell: all is well\u{200b}";
/// The same as octal escapes of printf(1).
const PRINTF: &str =
    r"a\033[2J\033]0;owned\007\302\23331m\342\200\256b\nexocell: all is well\342\200\213";

#[track_caller]
fn is_printable(what: &str, text: &str) {
    let raw = |c: char| {
        c.is_control() && c != '\n'
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
    };
    assert!(!text.contains(raw), "{what}: {text:?}");
}

#[track_caller]
fn shows(what: &str, finished: &Finished) {
    let out = String::from_utf8_lossy(&finished.stdout);
    is_printable(what, &out);
    is_printable(what, &finished.stderr);
    let shown = format!("{out}{}", finished.stderr);
    assert!(shown.contains("\\u001b[2J"), "{what} shows what it was: {shown}");
}

#[test]
fn no_text_of_a_table_reaches_a_terminal_raw() {
    let place = tempfile::tempdir().expect("a folder");
    let write = |name: &str, table: serde_json::Value| {
        let file = place.path().join(name);
        fs::write(&file, table.to_string()).expect("a table");
        text(&file).to_owned()
    };
    let key = write("key.json", serde_json::json!({ "version": 1, HOSTILE: 1 }));
    shows("caps check", &run(["caps", "check", &key]).exited(1));
    let folder = serde_json::json!({
        "host": text(place.path()), "guest": "/a\x1b[2Jb\u{202e}", "rights": ["read"],
    });
    let folder = write("folder.json", serde_json::json!({ "version": 1, "folder": [folder] }));
    is_printable("caps check", &run(["caps", "check", &folder]).stderr);
    for flags in [&["caps", "explain", &folder][..], &["caps", "explain", "--json", &folder]] {
        let explained = run(flags);
        is_printable("caps explain", &String::from_utf8_lossy(&explained.stdout));
        is_printable("caps explain", &explained.stderr);
    }
}

#[test]
fn nothing_that_a_guest_chose_reaches_a_terminal_raw() {
    let cell = Cell::idle("printable", &["--device", "/dev/kmsg"]);
    let say = format!("printf '<1>{PRINTF}' > /dev/kmsg");
    crate::common::eventually("the kernel says it", || {
        // A console is written out when more comes.
        cell.shell(&say).ok();
        cell.verb(&["logs", "--console"]).text().contains("owned")
    });
    shows("the console", &cell.verb(&["logs", "--console"]).ok());
    // A program's file that a copy trips over: a directory here, a file there.
    let name = HOSTILE.replace('/', "");
    cell.shell(&format!("mkdir -p /d && printf x > \"/d/$(printf '{PRINTF}')\"")).ok();
    let target = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(target.path().join("d").join(&name).join("full")).expect("a folder");
    let copied = run(["cp", &cell.path("/d"), text(target.path())]);
    assert_ne!(copied.code, 0, "a directory is not replaced by a file");
    is_printable("cp", &copied.stderr);
    // The agent's own words hold a name of the guest's choice.
    shows("exec", &cell.exec(&["-u", HOSTILE], &["true"]).output().map(finished).expect("it runs"));
    let id = cell.inspect()["id"].as_str().expect("an id").to_owned();
    fs::write(record(&id).join("network.log"), format!("{{\"host\":\"{HOSTILE}\"}}\n"))
        .expect("a log");
    shows("the network's log", &cell.verb(&["logs", "--network"]).ok());
}

/// What a module calls its imports is told when one that there is not is called.
#[test]
fn what_a_module_calls_things_reaches_a_terminal_escaped() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("names.wat");
    let module = r#"(module
        (import "wasi_snapshot_preview1" "\1b[2J\c2\9b31m\e2\80\ae" (func $f))
        (func (export "_start") (call $f)))"#;
    fs::write(&path, module).expect("a module");
    let ended = run(["run", "--rm", "--strength", "isolate", text(&path)]);
    assert_ne!(ended.code, 0);
    is_printable("run", &ended.stderr);
    assert!(ended.stderr.contains("[2J") && ended.stderr.contains("is not known"));
}

fn finished(output: std::process::Output) -> Finished {
    Finished {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// `docker top` prints what the image's own ps says.
#[test]
fn a_list_of_processes_is_made_printable_for_clients_of_the_docker_api() {
    let server = Server::start();
    let id = server.idle("top");
    let script = format!("#!/bin/sh\nprintf 'CMD\\n{PRINTF}\\n'\n");
    let install = "cat > /usr/local/bin/ps && chmod 755 /usr/local/bin/ps";
    let mut exec = server.command(&["exec", "-i", &id, "sh", "-c", install]);
    finish(&mut exec, script.as_bytes()).ok();
    let mut stream = server.connect();
    let request =
        format!("GET /containers/{id}/top HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("the server listens");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let body = answer.split("\r\n\r\n").nth(1).expect("a body").to_owned();
    let told: serde_json::Value =
        serde_json::from_str(&body).unwrap_or_else(|_| panic!("{answer}"));
    let shown = told["Processes"].to_string();
    assert!(shown.contains("owned"), "{told}");
    for process in told["Processes"].as_array().expect("processes") {
        is_printable("top", process[0].as_str().expect("a command"));
    }
}
