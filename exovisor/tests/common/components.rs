//! Components, written as text or made of programs for preview 1.

use super::table;
use exocell_exovisor::{Admission, AdmissionError, Isolate, Outcome, Policy, Ready, Spec};
use exocell_xgate::{CapabilitySet, Table};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use wasi_preview1_component_adapter_provider as adapter;
use wit_component::ComponentEncoder;

/// Opens every program here. `$say` writes one byte to standard output and answers with the
/// errno, `$ask` reads one from standard input; `$open` opens the file `file` of the first folder
/// and leaves its descriptor at 100.
const PROGRAM: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_readdir" (func $fd_readdir (param i32 i32 i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_open" (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_filestat_get" (func $stat (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $args_sizes (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "environ_sizes_get" (func $environ_sizes (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "environ_get" (func $environ (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "clock_time_get" (func $time (param i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "file")
  (func $bytes (param $fd i32) (param $from i32) (param $length i32) (result i32)
    (i32.store (i32.const 16) (local.get $from)) (i32.store (i32.const 20) (local.get $length))
    (call $fd_write (local.get $fd) (i32.const 16) (i32.const 1) (i32.const 24)))
  (func $say (param $byte i32) (result i32)
    (i32.store8 (i32.const 32) (local.get $byte))
    (call $bytes (i32.const 1) (i32.const 32) (i32.const 1)))
  (func $read (param $fd i32) (result i32)
    (i32.store (i32.const 16) (i32.const 40)) (i32.store (i32.const 20) (i32.const 1))
    (call $fd_read (local.get $fd) (i32.const 16) (i32.const 1) (i32.const 24)))
  (func $ask (result i32) (drop (call $read (i32.const 0))) (i32.load8_u (i32.const 40)))
  (func $open (param $flags i32) (param $rights i64) (result i32)
    (call $path_open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 4) (local.get $flags)
      (local.get $rights) (i64.const 0) (i32.const 0) (i32.const 100)))
"#;

/// A program for preview 1 with `_start` as its body, as a component.
pub fn program(body: &str) -> Vec<u8> {
    let text = format!("{PROGRAM} (func (export \"_start\") (local $n i32) {body}))");
    let module = wat::parse_str(text).expect("the program is well-formed");
    let name = adapter::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME;
    let translator = adapter::WASI_SNAPSHOT_PREVIEW1_COMMAND_ADAPTER;
    let encoder = ComponentEncoder::default().module(&module);
    let encoder = encoder.and_then(|encoder| encoder.adapter(name, translator));
    encoder.and_then(|mut encoder| encoder.encode()).expect("it becomes a component")
}

/// A component of its own: `items`, among them a core instance `$main` whose function `run`
/// answers with 0 or 1.
pub fn command(items: &str) -> String {
    format!(
        r#"(component {items}
          (func $run (result (result)) (canon lift (core func $main "run")))
          (instance $run (export "run" (func $run)))
          (export "wasi:cli/run@0.2.0" (instance $run)))"#
    )
}

/// One whose only module has `fields`, and `body` in `run`.
pub fn single(fields: &str, body: &str) -> String {
    command(&format!(
        r#"(core module $m {fields} (func (export "run") (result i32) {body}))
           (core instance $main (instantiate $m))"#
    ))
}

pub fn admit_in(
    policy: Policy,
    component: &[u8],
    caps: &CapabilitySet,
) -> Result<exocell_exovisor::Admitted, AdmissionError> {
    Admission::new(policy).admit(component, caps)
}

pub fn ready(component: &[u8], caps: &CapabilitySet, table: &Table, spec: Spec) -> Ready {
    let admitted = admit_in(Policy::default(), component, caps);
    let admitted = admitted.unwrap_or_else(|error| panic!("{error}"));
    Isolate::prepare(&admitted, table, "isolate", spec).expect("it can be prepared")
}

pub fn run(component: impl AsRef<[u8]>, caps: &CapabilitySet) -> Outcome {
    ready(component.as_ref(), caps, &table(caps), Spec::default()).run()
}

/// Runs with `input` on standard input and answers with what came out.
pub fn run_with_streams(
    component: impl AsRef<[u8]>,
    caps: &CapabilitySet,
    spec: Spec,
    input: &[u8],
) -> (Outcome, Vec<u8>) {
    let (stdin, mut feed) = std::io::pipe().expect("a pipe");
    let (mut drain, stdout) = std::io::pipe().expect("a pipe");
    feed.write_all(input).expect("it fits the pipe");
    drop(feed);
    let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
    let spec = Spec { stdin, stdout, ..spec };
    let outcome = ready(component.as_ref(), caps, &table(caps), spec).run();
    let mut output = Vec::new();
    drain.read_to_end(&mut output).expect("it can be read");
    (outcome, output)
}
