//! Wasm isolates inside a `vm` cell: the same command, and a table that is derived from the
//! cell's.

#[path = "../../../../exovisor/models/tests/onnx/mod.rs"]
mod onnx;

use std::fs;

use crate::common::cell::{Cell, pid};
use crate::common::lan::{Lan, OTHER, PEER};
use crate::common::servers::Web;
use crate::common::socket_modules::client;
use crate::common::{Finished, IMAGE, LIMIT, Started, eventually, finish, run, shell, text};

/// Modules by name, as text.
const MODULES: [(&str, &str); 10] = [
    (
        "hello",
        r#"(import "wasi_snapshot_preview1" "fd_write"
             (func $write (param i32 i32 i32 i32) (result i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "\08\00\00\00\06\00\00\00hello\n")
           (func (export "_start")
             (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 64))))"#,
    ),
    (
        "nine",
        r#"(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
           (func (export "_start") (call $exit (i32.const 9)))"#,
    ),
    (
        "clock",
        r#"(import "wasi_snapshot_preview1" "clock_time_get"
             (func (param i32 i64 i32) (result i32)))
           (func (export "_start"))"#,
    ),
    (
        "socket",
        r#"(import "wasi_snapshot_preview1" "sock_shutdown"
             (func (param i32 i32) (result i32)))
           (func (export "_start"))"#,
    ),
    ("forever", r#"(func (export "_start") (loop $again (br $again)))"#),
    ("trap", r#"(func (export "_start") unreachable)"#),
    (
        "bomb",
        r#"(memory (export "memory") 1)
           (func (export "_start") (loop $again
             (if (i32.lt_s (memory.grow (i32.const 1)) (i32.const 0)) (then unreachable))
             (memory.fill (i32.mul (i32.sub (memory.size) (i32.const 1)) (i32.const 65536))
               (i32.const 1) (i32.const 65536))
             (br $again)))"#,
    ),
    // Copies its input to its output until that ends.
    (
        "echo",
        r#"(import "wasi_snapshot_preview1" "fd_read"
             (func $read (param i32 i32 i32 i32) (result i32)))
           (import "wasi_snapshot_preview1" "fd_write"
             (func $write (param i32 i32 i32 i32) (result i32)))
           (memory (export "memory") 1)
           (func (export "_start") (loop $again
             (i32.store (i32.const 0) (i32.const 64))
             (i32.store (i32.const 4) (i32.const 256))
             (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 4)))
             (if (i32.load (i32.const 4)) (then
               (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
               (br $again)))))"#,
    ),
    // Makes the file `f`, which must not be there, in its folder.
    (
        "make",
        r#"(import "wasi_snapshot_preview1" "path_open"
             (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
           (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "f")
           (func (export "_start") (call $exit (call $open (i32.const 3) (i32.const 0)
             (i32.const 0) (i32.const 1) (i32.const 5) (i64.const 64) (i64.const 0) (i32.const 0)
             (i32.const 16))))"#,
    ),
    // Ten times the last number that the model `layer` makes of 1 and 2.
    (
        "infer",
        r#"(import "wasi_ephemeral_nn" "load_by_name"
             (func $load (param i32 i32 i32) (result i32)))
           (import "wasi_ephemeral_nn" "init_execution_context"
             (func $init (param i32 i32) (result i32)))
           (import "wasi_ephemeral_nn" "set_input" (func $set (param i32 i32 i32) (result i32)))
           (import "wasi_ephemeral_nn" "compute" (func $compute (param i32) (result i32)))
           (import "wasi_ephemeral_nn" "get_output"
             (func $get (param i32 i32 i32 i32 i32) (result i32)))
           (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "layer")
           ;; Its dimensions lie at 96, floats, of 8 bytes at 104.
           (data (i32.const 64) "\60\00\00\00\02\00\00\00\01\00\00\00\68\00\00\00\08\00\00\00")
           (data (i32.const 96) "\01\00\00\00\02\00\00\00\00\00\80\3f\00\00\00\40")
           (func $do (param i32) (if (local.get 0) (then unreachable)))
           (func (export "_start")
             (call $do (call $load (i32.const 0) (i32.const 5) (i32.const 32)))
             (call $do (call $init (i32.load (i32.const 32)) (i32.const 36)))
             (call $do (call $set (i32.load (i32.const 36)) (i32.const 0) (i32.const 64)))
             (call $do (call $compute (i32.load (i32.const 36))))
             (call $do (call $get (i32.load (i32.const 36)) (i32.const 0) (i32.const 256)
               (i32.const 12) (i32.const 40)))
             (call $exit (i32.mul (i32.const 10) (i32.trunc_f32_s (f32.load (i32.const 264))))))"#,
    ),
];

/// An idle cell that may start two isolates, its modules in /modules.
fn cell(flags: &[&str]) -> Cell {
    let flags = [&["--cap", "spawn=2"], flags].concat();
    let cell = Cell::idle("inside", &flags);
    cell.shell("mkdir /modules").ok();
    for (name, text) in MODULES {
        let mut write = cell.exec(&["-i"], &["sh", "-c", &format!("cat > /modules/{name}.wat")]);
        finish(&mut write, format!("(module {text})").as_bytes()).ok();
    }
    cell
}

/// `exocell run --rm FLAGS MODULE` in the guest.
#[track_caller]
fn isolate(cell: &Cell, flags: &str, module: &str) -> Finished {
    cell.shell(&format!("exec exocell run --rm {flags} /modules/{module}.wat"))
}

#[test]
fn an_isolate_in_a_cell_says_and_ends_what_it_does_on_a_host() {
    let cell = cell(&[]);
    assert_eq!(isolate(&cell, "--strength isolate", "hello").ok().text(), "hello");
    isolate(&cell, "", "nine").exited(9);
    isolate(&cell, "", "trap").exited(134).complains_of(&["unreachable"]);
    isolate(&cell, "-m 32m", "bomb").exited(137).complains_of(&["memory limit of 32M"]);
    isolate(&cell, "--timeout 300ms", "forever").exited(137).complains_of(&["deadline"]);
}

#[test]
fn an_isolate_reaches_what_its_cell_does_if_it_asks_for_it() {
    let lan = Lan::new();
    let (granted, other) = lan.at_peer(|| {
        (Web::new(&format!("{PEER}:80"), "hello"), Web::new(&format!("{OTHER}:80"), "secret"))
    });
    let cell = cell(&["--allow-net", "peer.test:80", "--allow-net", "www.peer.test:80"]);
    let fetch = |host: &str, flags: &str| {
        let words = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let (_dir, path) = client(host, 80, &words, "(drop (call $hear))");
        let mut write = cell.exec(&["-i"], &["sh", "-c", "cat > /modules/fetch.wat"]);
        finish(&mut write, &fs::read(path).unwrap()).ok();
        isolate(&cell, flags, "fetch")
    };
    assert!(fetch("peer.test", "--allow-net peer.test:80").ok().text().ends_with("hello"));
    const ACCES: i32 = 2;
    fetch("www.peer.test", "--allow-net peer.test:80").exited(ACCES);
    fetch(PEER, "--allow-net peer.test:80").exited(ACCES);
    fetch("peer.test", "").exited(125).complains_of(&["sock_", "network"]);
    let more = ["the cell that it is in has", "(network)"];
    fetch("other.test", "--allow-net other.test:80").exited(125).complains_of(&more);
    assert_eq!((granted.asked().len(), other.asked().len()), (1, 0));
}

/// A cell's table without a clock.
const GRANT: &str = r#"
version = 1
[memory]
limit = "128M"
[cpu]
count = 1
[disk]
size = "64M"
[processes]
max = 128
[time]
deadline = "5m"
[stdio]
[spawn]
max = 2
[[folder]]
host = "HOST"
guest = "/src"
rights = ["read"]
"#;

#[test]
fn an_isolate_has_at_most_what_its_cell_has() {
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("cell.toml");
    fs::write(&table, GRANT.replace("HOST", text(dir.path()))).unwrap();
    let cell = cell(&["--caps", text(&table)]);
    let refused = |flags: &str, module: &str, words: &[&str]| {
        isolate(&cell, flags, module).exited(125).complains_of(words);
    };
    // The cell has no clock, so a module that wants one is refused, and a flag does not help.
    refused("", "clock", &["clock_time_get", "clock"]);
    refused("--cap clock", "clock", &["the cell that it is in has nothing (clock)"]);
    refused("", "socket", &["sock_shutdown", "network"]);
    refused("--allow-net a.test:80", "socket", &["the cell that it is in has nothing (network)"]);
    refused("-m 129m", "hello", &["129M", "the cell that it is in has 128M (memory)"]);
    refused("--timeout 6m", "hello", &["6m", "has 5m (time)"]);
    refused("-v /src:/here:rw", "hello", &["has read,overlay on /src", "(folder:/here)"]);
    // What is narrower works.
    isolate(&cell, "-m 16m --timeout 4m -v /src:/here:ro -v /modules:/m", "hello").ok();
    cell.shell("printf 'version = 1\\n[memory]\\nlimit = \"16M\"\\n' > /quiet.toml").ok();
    refused("--caps /quiet.toml", "hello", &["fd_write", "stdio"]);
    isolate(&cell, "--caps /quiet.toml", "nine").exited(9);
    cell.shell("printf 'version = 1\\n[memory]\\nlimit = \"1G\"\\n' > /large.toml").ok();
    let add = "exec exocell module add --tenant t --caps /large.toml nine /modules/nine.wat";
    cell.shell(add).exited(125).complains_of(&["1G", "has 128M (memory)"]);
    cell.shell("printf 'version = 1\\n[clock]\\n' > /clock.toml").ok();
    refused("--caps /clock.toml", "clock", &["(clock)"]);
}

#[test]
fn the_table_of_a_cell_is_told_and_cannot_be_written() {
    let cell = cell(&["-m", "128m"]);
    let told = cell.shell("exocell caps explain").ok();
    let first = told.text().lines().next().unwrap_or_default().to_owned();
    assert!(
        first.starts_with("the table of this cell, /run/exocell/isolates/caps.json"),
        "{first}"
    );
    assert!(told.text().contains("128M"), "{}", told.text());
    let denied = cell.shell("echo > /run/exocell/isolates/caps.json").exited(2);
    assert!(denied.stderr.contains("Read-only"), "{}", denied.stderr);
    cell.shell(&format!("exocell run {IMAGE} true")).exited(125).complains_of(&["vm cell"]);
}

#[test]
fn the_models_of_a_cell_and_those_that_lie_in_it_are_computed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.onnx");
    fs::write(&file, onnx::layer()).unwrap();
    let granted = format!("model=layer:{}", file.display());
    let cell = cell(&["--cap", &granted]);
    fs::remove_file(&file).unwrap();
    let place = "/run/exocell/models/layer.onnx";
    isolate(&cell, &format!("--cap model=layer:{place}"), "infer").exited(60);
    isolate(&cell, "", "infer").exited(125).complains_of(&["`load_by_name`", "`model`"]);
    assert!(cell.shell("exocell caps explain").ok().text().contains(place));
    let denied = cell.shell(&format!("cp {place} /modules/own.onnx; echo > {place}")).exited(2);
    assert!(denied.stderr.contains("Read-only"), "{}", denied.stderr);
    isolate(&cell, "--cap model=layer:/modules/own.onnx", "infer").exited(60);
    cell.verb(&["update", "--revoke", "model:layer"])
        .exited(125)
        .complains_of(&["model:layer", "exocell stop"]);
}

#[test]
fn a_model_that_is_none_keeps_a_cell_from_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let large = dir.path().join("large.onnx");
    fs::File::create(&large).unwrap().set_len((64 << 20) + 1).unwrap();
    let start = |file: &str| {
        run(["run", "--rm", "--cap", "spawn=1", "--cap", &format!("model=m:{file}"), IMAGE, "true"])
    };
    start(text(&large)).exited(125).complains_of(&["large.onnx", "model m", "64 MiB"]);
    start(text(dir.path())).exited(125).complains_of(&["model m", "is no file"]);
    start("/nowhere.onnx").exited(125).complains_of(&["/nowhere.onnx", "model m", "No such file"]);
}

#[test]
fn an_isolate_has_a_layer_of_its_own_over_what_its_cell_reads() {
    let dir = tempfile::tempdir().unwrap();
    let cell = cell(&["-v", &format!("{}:/src:ro", dir.path().display())]);
    isolate(&cell, "-v /src:/src:rw", "make").exited(125).complains_of(&["(folder:/src)"]);
    for folder in ["/src", "/src", "/modules"] {
        isolate(&cell, &format!("-v {folder}:/data:overlay"), "make").exited(0);
    }
    assert_eq!(cell.shell("ls /src; ls /modules | grep -x f").text(), "");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    isolate(&cell, "-v /modules:/data:rw", "make").exited(0);
    cell.shell("test -e /modules/f").ok();
}

/// Programs, mounts and locks in the guest, and records of its isolates.
fn left(cell: &Cell) -> String {
    let look = "ps -eo ppid,comm --no-headers | grep -vE '^ *(2|0) |(ps|sh|grep)$'; \
                cat /proc/mounts /proc/locks; ls /var/lib/exocell/cells";
    cell.shell(look).text().to_owned()
}

#[test]
fn what_one_isolate_does_does_not_reach_its_neighbour_and_nothing_is_left() {
    let cell = cell(&[]);
    isolate(&cell, "", "nine").exited(9);
    let before = left(&cell);
    let command = ["exocell", "run", "--rm", "-i", "--name", "neighbour", "/modules/echo.wat"];
    let mut neighbour = Started::new(&mut cell.exec(&["-i"], &command));
    neighbour.write(b"one\n");
    eventually("the neighbour runs", || cell.shell("exocell ps").text().contains("neighbour"));
    isolate(&cell, "", "trap").exited(134);
    isolate(&cell, "-m 32m", "bomb").exited(137);
    isolate(&cell, "--timeout 200ms", "forever").exited(137);
    neighbour.write(b"two\n");
    neighbour.close_stdin();
    assert_eq!(neighbour.finish(LIMIT).expect("it ends").ok().text(), "one\ntwo");
    assert_eq!(left(&cell), before);
}

#[test]
fn isolates_of_a_cell_are_counted_until_they_end_however_that_is() {
    let cell = cell(&[]);
    for name in ["first", "second"] {
        cell.shell(&format!("exocell run -d --name {name} /modules/forever.wat")).ok();
    }
    isolate(&cell, "", "nine").exited(125).complains_of(&["(2, spawn.max)"]);
    let told = cell.shell("exocell inspect --json first").ok().one();
    cell.shell(&format!("kill -9 {}", pid(&told, "supervisor_pid"))).ok();
    eventually("its place is free", || isolate(&cell, "", "nine").code == 9);
    isolate(&cell, "", "nine").exited(9);
    cell.shell("exocell rm -f first second").ok();
    assert_eq!(cell.shell("exocell ps -aq; cat /proc/locks").ok().text(), "");
}

/// Serves the module in the background, asks for it with the key and prints the answer.
const ASK: &str = r#"
key=$(exocell module add --tenant t hello /modules/hello.wat)
exocell serve --http 127.0.0.1:8080 > /served 2>&1 &
for name in first second; do exocell run -d --name $name /modules/forever.wat; done > /dev/null
exec python3 - "$key" <<'END'
import sys, time, urllib.error, urllib.request
head = {"Authorization": "Bearer " + sys.argv[1]}
for _ in range(600):
    try:
        ask = urllib.request.Request("http://127.0.0.1:8080/v1/run/hello", b"", head)
        print(urllib.request.urlopen(ask).read().decode(), end="")
        break
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ConnectionRefusedError): raise
        time.sleep(0.1)
END
"#;

#[test]
fn a_service_in_a_cell_serves_beside_all_isolates_that_it_may_start() {
    let cell = cell(&[]);
    assert_eq!(cell.shell(ASK).ok().text(), "hello");
    isolate(&cell, "", "nine").exited(125).complains_of(&["(2, spawn.max)"]);
}

#[test]
fn an_ordinary_user_of_a_cell_starts_isolates_too() {
    let cell = cell(&[]);
    let script = "HOME=/tmp exec exocell run --rm /modules/hello.wat";
    let mut exec = cell.exec(&["--user", "1000:1000"], &["sh", "-c", script]);
    assert_eq!(finish(&mut exec, b"").ok().text(), "hello");
}

#[test]
fn the_command_of_a_cell_is_found_without_a_path() {
    let cell = cell(&[]);
    let script = "exec env -i /run/exocell/bin/exocell run --rm /modules/hello.wat";
    assert_eq!(cell.shell(script).ok().text(), "hello");
}

#[test]
fn a_cell_whose_root_is_read_only_starts_isolates_from_memory() {
    let script = "echo '(module (func (export \"_start\")))' > /tmp/a.wat; \
                  EXOCELL_ROOT=/run/state exocell run --rm /tmp/a.wat; echo $?; \
                  EXOCELL_ROOT=/run/state exocell run --rm -v /usr:/usr /tmp/a.wat";
    let told = shell(&["--read-only", "--cap", "spawn=1"], script).exited(125);
    assert_eq!(told.text(), "0");
    told.complains_of(&["has read,overlay on / at /"]);
}

#[test]
fn a_cell_that_was_not_granted_isolates_has_nothing_for_them() {
    let told = shell(&[], "ls /run /sys/block; cat /proc/mounts; echo $PATH").ok();
    assert!(!told.text().contains("exocell") && !told.text().contains("vdc"), "{}", told.text());
    run(["run", "--rm", IMAGE, "exocell", "--version"]).exited(127);
    run(["run", "--rm", "--cap", "spawn=1", IMAGE, "exocell", "--version"]).ok();
}
