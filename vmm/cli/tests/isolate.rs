//! Wasm modules under the same verbs and the same table.

mod common;

use std::path::PathBuf;

use common::cell::{self, Cell};
use common::{Finished, eventually, run, text, unique};
use tempfile::TempDir;

/// A module file whose `_start` is `body`, with `imports` before it.
fn module(imports: &str, body: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("module.wat");
    let source = format!(
        "(module {imports} (memory (export \"memory\") 1) (func (export \"_start\") {body}))"
    );
    std::fs::write(&path, source).unwrap();
    (dir, path)
}

const PROC_EXIT: &str = r#"(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))"#;
const FOREVER: &str = "(loop $again (br $again))";

fn run_module(flags: &[&str], imports: &str, body: &str) -> Finished {
    let (_dir, path) = module(imports, body);
    run([&["run", "--rm"], flags, &[text(&path)]].concat())
}

#[test]
fn exit_codes_are_the_modules_own() {
    run_module(&[], PROC_EXIT, "").exited(0);
    run_module(&[], PROC_EXIT, "(call $exit (i32.const 9))").exited(9);
}

#[test]
fn a_trap_is_told() {
    let ended = run_module(&[], "", "unreachable");
    assert_ne!(ended.code, 0);
    assert!(ended.stderr.contains("unreachable"), "{}", ended.stderr);
}

#[test]
fn what_is_no_module_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.wasm");
    std::fs::write(&path, "garbage").unwrap();
    let ended = run(["run", "--rm", text(&path)]).exited(125);
    ended.complains_of(&["bad.wasm", "not a Wasm module"]);
    std::fs::write(&path, b"\0asm\x01\0\0\0\xff").unwrap();
    run(["run", "--rm", text(&path)]).exited(125).complains_of(&["bad.wasm"]);
    run(["run", "--rm", "/no/such.wasm"]).exited(125).complains_of(&["/no/such.wasm"]);
}

#[test]
fn an_import_that_was_not_granted_is_refused_by_name() {
    let import = r#"(import "env" "launch_missiles" (func $f))"#;
    run_module(&[], import, "(call $f)").exited(125).complains_of(&["launch_missiles"]);
}

#[test]
fn a_modules_imports_are_explained() {
    let imports = r#"(import "wasi_snapshot_preview1" "proc_exit" (func (param i32)))
        (import "wasi_snapshot_preview1" "fd_write" (func (param i32 i32 i32 i32) (result i32)))
        (import "env" "launch_missiles" (func))"#;
    let (dir, path) = module(imports, "");
    let nothing = dir.path().join("nothing.toml");
    std::fs::write(&nothing, "version = 1\n").unwrap();

    let rows = run(["caps", "explain", "--json", text(&path)]).ok().json();
    let told = |index: usize, field: &str| rows[index][field].clone();
    assert_eq!(rows.as_array().map(Vec::len), Some(3));
    assert_eq!((told(0, "tier"), told(0, "granted")), ("own".into(), true.into()));
    assert_eq!((told(1, "tier"), told(1, "granted")), ("granted".into(), true.into()));
    assert_eq!(told(1, "needs"), serde_json::json!(["stdio", "folder"]));
    assert_eq!((told(2, "tier"), told(2, "granted")), ("unknown".into(), false.into()));

    let table = run(["caps", "explain", "--caps", text(&nothing), text(&path)]).ok();
    let lines: Vec<Vec<&str>> =
        table.text().lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["proc_exit", "own", "pure", "yes", "nothing"]);
    assert_eq!(lines[2], ["fd_write", "granted", "write", "no", "stdio", "or", "folder"]);
    assert!(lines[3].contains(&"env.launch_missiles"), "{}", table.text());

    std::fs::write(&path, "garbage").unwrap();
    run(["caps", "explain", text(&path)]).exited(125).complains_of(&["not a Wasm module"]);
}

#[test]
fn a_deadline_ends_an_endless_module() {
    run_module(&["--timeout", "1s"], "", FOREVER).exited(137).complains_of(&["deadline"]);
}

#[test]
fn a_running_isolate_is_listed_and_can_be_killed() {
    let (_dir, path) = module("", FOREVER);
    let cell = Cell { name: unique("isolate") };
    run(["run", "-d", "--name", &cell.name, text(&path)]).ok();
    eventually("it runs", || cell::row(&cell.name).is_some_and(|row| row["state"] == "running"));
    let told = cell.inspect();
    assert_eq!(told["strength"], "isolate");
    assert!(told["guest_kernel_pid"].is_null(), "{told}");
    assert!(cell.verb(&["stats", "--json"]).ok().json()["guest_claims"].is_null());
    run(["exec", &cell.name, "true"]).exited(125).complains_of(&["isolate"]);
    cell.verb(&["kill"]).ok();
    let told = cell.inspect();
    assert_eq!((told["state"].as_str(), told["exit_code"].as_i64()), (Some("exited"), Some(137)));
}
