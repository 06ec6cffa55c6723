//! What a running isolate can do, and how it ends.

use exocell_exovisor::{CancelReason, Outcome, Spec};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::common::{PRELUDE, caps, caps_with, ready, run, run_with_streams, table};

/// Ends with `body` as `_start`.
fn module(body: &str) -> String {
    format!("{PRELUDE} (func (export \"_start\") (local $n i32) {body}))")
}

/// Writes the 5 bytes at 16 to standard output.
const HELLO: &str = r#"
  (i64.store (i32.const 16) (i64.const 0x6f6c6c6568))
  (i32.store (i32.const 0) (i32.const 16)) (i32.store (i32.const 4) (i32.const 5))
  (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))"#;

#[test]
fn hello_reaches_standard_output() {
    let (outcome, output) = run_with_streams(&module(HELLO), &caps_with(""), Spec::default(), b"");
    assert_eq!((outcome, output.as_str()), (Outcome::Exited(0), "hello"));
}

#[test]
fn standard_input_is_read_up_to_its_end() {
    let echo = r#"
      (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 100))
      (loop $more
        (drop (call $fd_read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
        (local.set $n (i32.load (i32.const 8)))
        (if (local.get $n) (then
          (i32.store (i32.const 4) (local.get $n))
          (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
          (i32.store (i32.const 4) (i32.const 100))
          (br $more))))"#;
    let input = "a line that is longer than one buffer of a hundred bytes, so it takes two reads: "
        .repeat(3);
    let (outcome, output) =
        run_with_streams(&module(echo), &caps_with(""), Spec::default(), input.as_bytes());
    assert_eq!((outcome, output), (Outcome::Exited(0), input));
}

#[test]
fn streams_are_not_attached_without_stdio() {
    let folder =
        "[memory]\nlimit = \"1M\"\n[[folder]]\nhost = \"/usr\"\nguest = \"/\"\nrights = [\"read\"]";
    let (outcome, output) = run_with_streams(&module(HELLO), &caps(folder), Spec::default(), b"");
    assert_eq!((outcome, output.as_str()), (Outcome::Exited(0), ""));
}

#[test]
fn arguments_and_environment_arrive_as_given() {
    let text = r#"(module
      (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "environ_get" (func $env (param i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
      (memory (export "memory") 1)
      (func (export "_start")
        (drop (call $args (i32.const 100) (i32.const 200)))
        (drop (call $env (i32.const 100) (i32.const 206)))
        (i32.store (i32.const 0) (i32.const 200)) (i32.store (i32.const 4) (i32.const 10))
        (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))"#;
    let spec = Spec {
        args: vec!["prog".to_owned(), String::new()],
        env: vec![("A".to_owned(), "b".to_owned())],
        ..Spec::default()
    };
    let (outcome, output) = run_with_streams(text, &caps_with(""), spec, b"");
    assert_eq!((outcome, output.as_str()), (Outcome::Exited(0), "prog\0\0A=b\0"));
}

#[test]
fn several_things_are_waited_for_at_once() {
    let text = r#"(module
      (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
      (memory (export "memory") 1)
      ;; Two times of the monotonic clock, a millisecond from now.
      (func (export "_start")
        (i32.store (i32.const 16) (i32.const 1)) (i64.store (i32.const 24) (i64.const 1000000))
        (i32.store (i32.const 64) (i32.const 1)) (i64.store (i32.const 72) (i64.const 1000000))
        (call $exit (call $poll (i32.const 0) (i32.const 200) (i32.const 2) (i32.const 400)))))"#;
    assert_eq!(run(text, &caps_with("[clock]")), Outcome::Exited(0));
}

#[test]
fn exit_codes_arrive() {
    for (code, status) in [(0, 0), (7, 7), (255, 255), (256, 0)] {
        let outcome = run(&module(&format!("(call $exit (i32.const {code}))")), &caps_with(""));
        assert_eq!((outcome.exit_code(), &outcome), (status, &Outcome::Exited(code)));
    }
}

fn trap(body: &str) -> String {
    match run(&module(body), &caps_with("")) {
        Outcome::Trap(text) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn traps_are_named() {
    assert!(trap("unreachable").contains("unreachable"));
    assert!(trap("(drop (i32.load (i32.const -4)))").contains("out of bounds"));
    assert!(trap("(drop (i32.div_u (i32.const 1) (local.get $n)))").contains("divide by zero"));
    let deep = format!("{PRELUDE} (func $f (export \"_start\") (call $f)))");
    let outcome = run(&deep, &caps_with(""));
    assert!(matches!(&outcome, Outcome::Trap(text) if text.contains("stack")), "{outcome:?}");
    assert_eq!(outcome.exit_code(), 134);
}

#[test]
fn a_bad_pointer_to_a_hostcall_traps() {
    let body = "(drop (call $fd_write (i32.const 1) (i32.const -8) (i32.const 1) (i32.const 8)))";
    assert!(!trap(body).is_empty());
}

#[test]
fn a_loop_ends_at_the_deadline() {
    let begin = Instant::now();
    let caps = caps_with("[time]\ndeadline = \"200ms\"");
    assert_eq!(run(&module("(loop $l (br $l))"), &caps), Outcome::Ended(CancelReason::Deadline));
    assert!(begin.elapsed() >= Duration::from_millis(200));
}

#[test]
fn waiting_for_input_ends_at_the_deadline() {
    let body = r#"(i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 9))
      (loop $l (drop (call $fd_read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8))) (br $l))"#;
    let caps = caps_with("[time]\ndeadline = \"200ms\"");
    let (stdin, mut feed) = std::io::pipe().unwrap();
    // Something to read first: what epoll told of then must not be believed for ever.
    std::io::Write::write_all(&mut feed, b"some").unwrap();
    let spec = Spec { stdin: Some(OwnedFd::from(stdin)), ..Spec::default() };
    let outcome = ready(&module(body), &caps, &table(&caps), spec).run();
    assert_eq!(outcome, Outcome::Ended(CancelReason::Deadline));
    drop(feed);
}

#[test]
fn a_full_pipe_ends_at_the_deadline() {
    let body = format!("{HELLO} (i32.store (i32.const 4) (i32.const 4096))
      (loop $l (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))) (br $l))");
    let caps = caps_with("[time]\ndeadline = \"200ms\"");
    let (drain, stdout) = std::io::pipe().unwrap();
    let spec = Spec { stdout: Some(OwnedFd::from(stdout)), ..Spec::default() };
    let outcome = ready(&module(&body), &caps, &table(&caps), spec).run();
    assert_eq!(outcome, Outcome::Ended(CancelReason::Deadline));
    drop(drain);
}

/// Sleeps so many nanoseconds, then exits with the number of events and the event's type.
fn sleep(nanos: i64) -> String {
    format!(
        r#"(module
      (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
      (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
      (memory (export "memory") 1)
      (func (export "_start")
        (i64.store (i32.const 0) (i64.const 0x55))
        (i32.store (i32.const 16) (i32.const 1))
        (i64.store (i32.const 24) (i64.const {nanos}))
        (drop (call $poll (i32.const 0) (i32.const 104) (i32.const 1) (i32.const 200)))
        (call $exit (i32.add (i32.load (i32.const 104)) (i32.load (i32.const 200))))))"#
    )
}

#[test]
fn a_sleep_lasts_as_long_as_it_should() {
    let begin = Instant::now();
    assert_eq!(run(&sleep(50_000_000), &caps_with("[clock]")), Outcome::Exited(0x55 + 1));
    assert!(begin.elapsed() >= Duration::from_millis(50));
}

#[test]
fn sleeping_ends_at_the_deadline() {
    let caps = caps_with("[clock]\n[time]\ndeadline = \"200ms\"");
    assert_eq!(run(&sleep(3_600_000_000_000), &caps), Outcome::Ended(CancelReason::Deadline));
}

#[test]
fn stopping_works_before_and_during_a_run() {
    let caps = caps_with("");
    let early = ready(&module("(loop $l (br $l))"), &caps, &table(&caps), Spec::default());
    early.cancel_handle().request(CancelReason::Revoked);
    early.cancel_handle().request(CancelReason::Stopped);
    assert_eq!(early.run(), Outcome::Ended(CancelReason::Revoked));
    let running = ready(&module("(loop $l (br $l))"), &caps, &table(&caps), Spec::default());
    let cancel = running.cancel_handle();
    let stop = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        cancel.request(CancelReason::Stopped);
    });
    assert_eq!(running.run(), Outcome::Ended(CancelReason::Stopped));
    stop.join().unwrap();
}

#[test]
fn memory_beyond_the_limit_is_refused() {
    let caps = caps_with("");
    // Growing fails for the program to see: 15 more pages fit 1 MiB, not 16.
    let grow =
        "(local.set $n (memory.grow (i32.const 15))) (call $exit (memory.grow (i32.const 1)))";
    assert_eq!(run(&module(grow), &caps), Outcome::Exited(-1));
    let bomb =
        "(loop $l (br_if $l (i32.ge_s (memory.grow (i32.const 1)) (i32.const 0)))) unreachable";
    assert_eq!(run(&module(bomb), &caps), Outcome::OutOfMemory { limit: 1 << 20 });
    let large = r#"(module (memory (export "memory") 17) (func (export "_start")))"#;
    let outcome = run(large, &caps);
    assert_eq!((outcome.exit_code(), outcome), (137, Outcome::OutOfMemory { limit: 1 << 20 }));
}

#[test]
fn fuel_runs_out() {
    let caps = caps_with("[fuel]\ninstructions = 100000");
    assert_eq!(run(&module("(loop $l (br $l))"), &caps), Outcome::OutOfFuel);
    assert_eq!(run(&module(""), &caps), Outcome::Exited(0));
}

#[test]
fn memory_must_be_granted() {
    let caps = caps("[stdio]");
    let admitted = crate::common::admit(&module(""), &caps).unwrap();
    let error =
        exocell_exovisor::Isolate::prepare(&admitted, &table(&caps), "isolate", Spec::default());
    let error = error.err().expect("it is refused").to_string();
    assert_eq!(error, "isolate has no capability `memory`, without which an isolate does not run");
}
