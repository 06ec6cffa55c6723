//! Helpers for running modules written as text.

// Each test file uses some of them.
#![allow(dead_code)]

pub mod components;
pub mod network;

use exocell_exovisor::{
    Admission, AdmissionError, Admitted, Isolate, Outcome, Policy, Ready, Spec,
};
use exocell_xgate::{CapabilitySet, Table};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;

/// Opens every module here: the imports the tests use, one page of memory.
pub const PRELUDE: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
"#;

/// The same with the imports for folders. `$open` answers with the errno and leaves the
/// descriptor at 100.
pub const FILES: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_renumber" (func $renumber (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_open" (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "file../file")
  (func $open (param $path i32) (param $length i32) (param $flags i32) (param $rights i64) (result i32)
    (call $path_open (i32.const 3) (i32.const 0) (local.get $path) (local.get $length)
      (local.get $flags) (local.get $rights) (i64.const 0) (i32.const 0) (i32.const 100)))
"#;

pub fn caps(toml: &str) -> CapabilitySet {
    let text = format!("version = 1\n{toml}");
    CapabilitySet::parse(&text, Path::new("/")).expect("the test's grant is right")
}

/// Memory of 1 MiB and the standard streams, plus `more`.
pub fn caps_with(more: &str) -> CapabilitySet {
    caps(&format!("[memory]\nlimit = \"1M\"\n[stdio]\n{more}"))
}

pub fn admit(text: &str, caps: &CapabilitySet) -> Result<Admitted, AdmissionError> {
    Admission::new(Policy::default()).admit(text.as_bytes(), caps)
}

pub fn table(caps: &CapabilitySet) -> Table {
    let mut table = Table::new(64);
    caps.install(&mut table, "isolate").expect("there is room");
    table
}

pub fn ready(text: &str, caps: &CapabilitySet, table: &Table, spec: Spec) -> Ready {
    let admitted = admit(text, caps).unwrap_or_else(|error| panic!("{error}"));
    Isolate::prepare(&admitted, table, "isolate", spec).expect("it can be prepared")
}

pub fn run(text: &str, caps: &CapabilitySet) -> Outcome {
    ready(text, caps, &table(caps), Spec::default()).run()
}

/// Runs with `input` on standard input and answers with what came out.
pub fn run_with_streams(
    text: &str,
    caps: &CapabilitySet,
    spec: Spec,
    input: &[u8],
) -> (Outcome, String) {
    let (stdin, mut feed) = std::io::pipe().expect("a pipe");
    let (mut drain, stdout) = std::io::pipe().expect("a pipe");
    feed.write_all(input).expect("it fits the pipe");
    drop(feed);
    let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
    let outcome = ready(text, caps, &table(caps), Spec { stdin, stdout, ..spec }).run();
    let mut output = String::new();
    drain.read_to_string(&mut output).expect("it is text");
    (outcome, output)
}
