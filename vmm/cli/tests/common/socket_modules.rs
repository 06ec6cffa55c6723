//! Modules that talk to others, as text.

use std::path::PathBuf;

use tempfile::TempDir;

/// The host and the port are in data at 900 and 1000, what is sent at 2048, received at 4096.
/// `$look-up` leaves the address where it is described at 0; results are at 48 and 52.
const PRELUDE: &str = r#"
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (import "wasi_snapshot_preview1" "sock_open" (func $open (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_bind" (func $bind (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_listen" (func $listen (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_accept" (func $accept (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_connect" (func $connect (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_recv" (func $recv (param i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_send" (func $send (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_shutdown" (func $shutdown (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_getaddrinfo" (func $getaddrinfo (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\10\00\00\00\04\00\00\00")
  (data (i32.const 32) "\00\10\00\00\00\04\00\00")
  ;; One result at 512, its address at 640, the octets at 704; the hint at 600 wants IPv4 streams.
  (data (i32.const 60) "\00\02\00\00")
  (data (i32.const 524) "\80\02\00\00")
  (data (i32.const 602) "\01\02")
  (data (i32.const 648) "\c0\02\00\00")
  (global $fd (mut i32) (i32.const 0))
  (func $must (param $errno i32)
    (if (local.get $errno) (then (call $exit (local.get $errno)))))
  (func $look-up (param $length i32)
    (call $must (call $getaddrinfo (i32.const 900) (local.get $length) (i32.const 1000) (i32.const 0)
      (i32.const 600) (i32.const 60) (i32.const 1) (i32.const 64)))
    (i32.store (i32.const 16) (i32.load (i32.const 706))))
  (func $socket
    (call $must (call $open (i32.const 1) (i32.const 2) (i32.const 48)))
    (global.set $fd (i32.load (i32.const 48))))
  (func $say (param $count i32)
    (i32.store (i32.const 40) (i32.const 2048)) (i32.store (i32.const 44) (local.get $count))
    (call $must (call $send (global.get $fd) (i32.const 40) (i32.const 1) (i32.const 0) (i32.const 52))))
  ;; Prints what comes next; how many bytes that was.
  (func $hear (result i32)
    (call $must (call $recv (global.get $fd) (i32.const 32) (i32.const 1) (i32.const 0) (i32.const 48) (i32.const 52)))
    (i32.store (i32.const 40) (i32.const 4096)) (i32.store (i32.const 44) (i32.load (i32.const 48)))
    (call $must (call $fd_write (i32.const 1) (i32.const 40) (i32.const 1) (i32.const 52)))
    (i32.load (i32.const 48)))
  (func $hear-all (loop $more (br_if $more (call $hear))))
"#;

/// A module that connects to `port` of `host`, says `words` and then does what `body` does.
pub fn client(host: &str, port: u16, words: &str, body: &str) -> (TempDir, PathBuf) {
    let said = words.replace('\r', "\\0d").replace('\n', "\\0a");
    let (host_len, len) = (host.len(), words.len());
    module(&format!(
        r#"(data (i32.const 900) "{host}") (data (i32.const 2048) "{said}")
        (func (export "_start")
          (call $look-up (i32.const {host_len})) (call $socket)
          (call $must (call $connect (global.get $fd) (i32.const 0) (i32.const {port})))
          (call $say (i32.const {len})) {body})"#
    ))
}

/// A module with these functions beside those of the prelude.
pub fn module(body: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("module.wat");
    std::fs::write(&path, format!("(module {PRELUDE} {body})")).unwrap();
    (dir, path)
}
