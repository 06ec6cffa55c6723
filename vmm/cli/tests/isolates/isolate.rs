//! Wasm modules under the same verbs and the same table.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::common::cell::{self, Cell};
use crate::common::{Finished, eventually, run, text, unique};

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
    let import = r#"(import "wasi_snapshot_preview1" "sock_shutdown"
        (func $f (param i32 i32) (result i32)))"#;
    let body = "(drop (call $f (i32.const 0) (i32.const 0)))";
    run_module(&[], import, body).exited(125).complains_of(&["sock_shutdown", "network"]);
}

#[test]
fn an_import_that_nobody_has_traps_when_it_is_called() {
    let import = r#"(import "env" "launch_missiles" (func $f))"#;
    run_module(&[], import, "(call $f)").exited(134).complains_of(&["env.launch_missiles"]);
    run_module(&[], import, "").exited(0);
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
    assert_eq!((told(0, "tier"), told(0, "granted")), ("1'".into(), true.into()));
    assert_eq!((told(1, "tier"), told(1, "granted")), ("1'".into(), true.into()));
    assert_eq!(told(1, "needs"), serde_json::json!(["stdio", "folder"]));
    assert_eq!((told(2, "tier"), told(2, "granted")), ("unknown".into(), false.into()));

    let table = run(["caps", "explain", "--caps", text(&nothing), text(&path)]).ok();
    let lines: Vec<Vec<&str>> =
        table.text().lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["proc_exit", "1'", "pure", "yes", "nothing"]);
    assert_eq!(lines[2], ["fd_write", "1'", "write", "no", "stdio", "or", "folder"]);
    assert!(table.text().contains("nobody has env.launch_missiles"), "{}", table.text());

    std::fs::write(&path, "garbage").unwrap();
    run(["caps", "explain", text(&path)]).exited(125).complains_of(&["not a Wasm module"]);
}

/// Its threads write, and the first waits until both have: on a word that they wake it by.
const THREADS: &str = r#"(module
  (import "env" "memory" (memory 1 2 shared))
  (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (data (i32.const 16) "thread ")
  (func (export "wasi_thread_start") (param i32 i32)
    (i32.store (local.get 1) (i32.const 16))
    (i32.store offset=4 (local.get 1) (i32.const 7))
    (drop (call $write (i32.const 1) (local.get 1) (i32.const 1) (i32.const 512)))
    (drop (i32.atomic.rmw.add (i32.const 0) (i32.const 1)))
    (drop (memory.atomic.notify (i32.const 0) (i32.const 1))))
  (func (export "_start")
    (drop (call $spawn (i32.const 64)))
    (drop (call $spawn (i32.const 128)))
    (loop $more
      (drop (memory.atomic.wait32 (i32.const 0) (i32.const 0) (i64.const -1)))
      (drop (memory.atomic.wait32 (i32.const 0) (i32.const 1) (i64.const -1)))
      (br_if $more (i32.ne (i32.atomic.load (i32.const 0)) (i32.const 2))))))"#;

#[test]
fn a_module_with_threads_runs_in_its_jail() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("threads.wat");
    std::fs::write(&path, THREADS).unwrap();
    let finished = run(["run", "--rm", "--strength", "isolate", text(&path)]).ok();
    assert_eq!(finished.text(), "thread thread ");
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
    cell.verb(&["pause"]).exited(125).complains_of(&["isolate"]);
    assert!(cell::row(&cell.name).is_some_and(|row| row["paused"] == false));
    cell.verb(&["kill"]).ok();
    let told = cell.inspect();
    assert_eq!((told["state"].as_str(), told["exit_code"].as_i64()), (Some("exited"), Some(137)));
}

#[test]
fn a_layer_over_a_folder_is_the_cells_own() {
    let folder = TempDir::new().unwrap();
    let volume = format!("{}:/data:overlay", folder.path().display());
    let imports = format!(
        r#"{PROC_EXIT} (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))"#
    );
    // A file that must not be there, and is made.
    let make = "(call $open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 5)
        (i64.const 64) (i64.const 0) (i32.const 0) (i32.const 16))";
    let name = "(i32.store8 (i32.const 0) (i32.const 102))";
    let body = format!("{name} (call $exit {make})");
    for _ in 0..2 {
        run_module(&["-v", &volume], &imports, &body).exited(0);
    }
    // Within one cell the second making finds it.
    let twice = format!("{name} (drop {make}) (call $exit {make})");
    run_module(&["-v", &volume], &imports, &twice).exited(20);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let table = folder.path().join("table.toml");
    std::fs::write(
        &table,
        "version = 1\n[disk]\nsize = \"8M\"\n[[folder]]\nhost = \"/f\"\nguest = \"/f\"\nrights = [\"read\", \"overlay\"]",
    )
    .unwrap();
    let told = run(["caps", "explain", text(&table)]).ok();
    assert!(told.text().contains("may change a layer of its own over it"), "{}", told.text());
    assert!(told.text().contains("what its layers over folders hold"), "{}", told.text());
    run(["run", "--rm", "-v", &volume, "exocell/base:latest", "true"])
        .exited(125)
        .complains_of(&["/data", "is for isolates"]);
}

#[test]
fn inference_needs_a_model_of_the_table() {
    let dir = TempDir::new().unwrap();
    let model = dir.path().join("m.onnx");
    std::fs::write(&model, "no model").unwrap();
    let import =
        r#"(import "wasi_ephemeral_nn" "compute" (func $compute (param i32) (result i32)))"#;
    let body = "(drop (call $compute (i32.const 0)))";
    run_module(&[], import, body).exited(125).complains_of(&["`compute`", "`model`"]);
    let cap = format!("model=m:{}", model.display());
    run_module(&["--cap", &cap], import, body).exited(125).complains_of(&["m.onnx", "not an ONNX"]);

    let (_module_dir, path) = module(import, body);
    let table = dir.path().join("table.toml");
    let text_of =
        "version = 1\n[memory]\nlimit = \"8M\"\n[[model]]\nname = \"m\"\nfile = \"m.onnx\"";
    std::fs::write(&table, text_of).unwrap();
    let rows = run(["caps", "explain", "--json", "--caps", text(&table), text(&path)]).ok().json();
    assert_eq!((&rows[0]["tier"], &rows[0]["granted"]), (&"2'".into(), &true.into()));
    assert_eq!(rows[0]["needs"], serde_json::json!(["model"]));
    let told = run(["caps", "explain", text(&table)]).ok();
    assert!(told.text().contains("model:m"), "{}", told.text());
}

/// What runs a module's native code has next to nothing, should it be taken over.
#[test]
fn the_process_of_an_isolate_has_few_capabilities_and_bounded_memory() {
    let (_dir, path) = module("", FOREVER);
    let cell = Cell { name: unique("bounded") };
    run(["run", "-d", "-m", "16m", "--name", &cell.name, text(&path)]).ok();
    let of = |file: &str| {
        std::fs::read_to_string(format!("/proc/{}/{file}", cell.supervisor())).unwrap()
    };
    let status = of("status");
    let set = |name: &str| {
        let bits = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(bits.trim(), 16).unwrap()
    };
    // CAP_DAC_OVERRIDE and CAP_FOWNER.
    assert_eq!((set("CapEff:"), set("CapPrm:"), set("CapBnd:")), (0b1010, 0b1010, 0), "{status}");
    let limits = of("limits");
    let data = limits.lines().find_map(|line| line.strip_prefix("Max data size")).unwrap();
    let data: u64 = data.split_whitespace().next().unwrap().parse().unwrap();
    assert!(data < 1 << 30, "{limits}");
    run(["kill", &cell.name]).ok();
}
