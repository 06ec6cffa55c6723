//! One tenant's misdeeds, again and again, while another's calls go on: each of them succeeds.

#[path = "../common/mod.rs"]
mod common;
mod neighbour;

use common::{FILES, caps, caps_with, table};
use exocell_exovisor::{
    AdmissionError, Call, CallLimits, CancelReason, Outcome, Report, Spec, SubmitError, Value,
};
use exocell_xgate::CapabilitySet;
use neighbour::{Neighbour, crowd};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// `EBADF` and `ENOTCAPABLE` of WASI preview 1.
const BADF: i32 = 8;
const NOTCAPABLE: i32 = 76;

fn limits() -> CallLimits {
    let deadline = Some(Instant::now() + Duration::from_secs(60));
    CallLimits { memory_bytes: 1 << 20, deadline, cpu_ns: None, threads: 16, fuel: 0 }
}

/// Limits under which what never ends is ended soon.
fn soon() -> CallLimits {
    CallLimits { deadline: Some(Instant::now() + Duration::from_millis(40)), ..limits() }
}

/// Repeats `misdeed`, which is `run` of this module, until the neighbour has had its calls.
fn misdeed(body: &str, caps: &CapabilitySet, limits: fn() -> CallLimits, wanted: fn(&Outcome)) {
    let neighbour = Neighbour::new();
    let bad = neighbour.tenant("bad");
    let function = neighbour.function("bad", body, caps, "run");
    neighbour.beside(|| {
        let report = neighbour.scheduler.run(&bad, Call::new(&function, &[], limits()));
        wanted(&report.expect("it is taken").outcome);
    });
}

fn traps(outcome: &Outcome, words: &str) {
    assert!(matches!(outcome, Outcome::Trap(why) if why.contains(words)), "{outcome:?}");
}

fn is_late(outcome: &Outcome) {
    assert_eq!(*outcome, Outcome::Ended(CancelReason::Deadline));
}

#[test]
fn a_trap() {
    let body = r#"(module (func (export "run") (drop (i32.div_u (i32.const 1) (i32.const 0)))))"#;
    misdeed(body, &caps(""), limits, |outcome| traps(outcome, "divide by zero"));
}

#[test]
fn a_stack_overflow() {
    let body = r#"(module (func $deep (param i64) (result i64)
        (i64.add (call $deep (i64.add (local.get 0) (i64.const 1))) (local.get 0)))
      (func (export "run") (drop (call $deep (i64.const 0)))))"#;
    misdeed(body, &caps(""), limits, |outcome| traps(outcome, "stack"));
}

#[test]
fn an_infinite_loop() {
    let body = r#"(module (func (export "run") (loop $again (br $again))))"#;
    misdeed(body, &caps(""), soon, is_late);
    let little = || CallLimits { cpu_ns: Some(5_000_000), ..limits() };
    misdeed(body, &caps(""), little, |outcome| {
        assert_eq!(*outcome, Outcome::Ended(CancelReason::CpuTime));
    });
}

#[test]
fn an_infinite_loop_over_what_the_host_does() {
    let body = r#"(module (memory 8)
      (func (export "run")
        (loop $again (memory.fill (i32.const 0) (i32.const 1) (i32.const 0x80000)) (br $again))))"#;
    misdeed(body, &caps(""), soon, is_late);
}

#[test]
fn a_memory_bomb() {
    // Pages are touched as they come; a table grows beside them.
    let body = r#"(module (memory 1) (table 1 funcref)
      (func (export "run") (local $page i32)
        (loop $more
          (drop (table.grow 0 (ref.null func) (i32.const 100)))
          (local.set $page (memory.grow (i32.const 1)))
          (if (i32.eq (local.get $page) (i32.const -1)) (then unreachable))
          (i32.store (i32.shl (local.get $page) (i32.const 16)) (i32.const 1))
          (br $more))))"#;
    misdeed(body, &caps(""), limits, |outcome| {
        assert_eq!(*outcome, Outcome::OutOfMemory { limit: 1 << 20 });
    });
}

/// What each thread does, and what the call does with it.
fn threaded(thread: &str, run: &str) -> String {
    format!(
        r#"(module
      (import "env" "memory" (memory 1 4 shared))
      (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
      (func (export "wasi_thread_start") (param i32 i32) {thread})
      (func (export "run") {run}))"#
    )
}

const SLEEP: &str = r#"(drop (memory.atomic.wait32 (i32.const 64) (i32.const 0) (i64.const -1)))"#;

#[test]
fn a_fork_bomb_of_threads() {
    let twice = "(loop $again (drop (call $spawn (i32.const 0))) (drop (call $spawn (i32.const 0))) (br $again))";
    misdeed(&threaded(twice, twice), &caps("[processes]\nmax = 64"), soon, is_late);
}

#[test]
fn a_barrier_that_waits_for_more_threads_than_there_may_be() {
    let barrier = r#"(drop (i32.atomic.rmw.add (i32.const 0) (i32.const 1)))
      (loop $wait (if (i32.lt_u (i32.atomic.load (i32.const 0)) (i32.const 1000)) (then
        (drop (memory.atomic.wait32 (i32.const 64) (i32.const 0) (i64.const -1))) (br $wait))))"#;
    let start = "(loop $more (br_if $more (i32.gt_s (call $spawn (i32.const 0)) (i32.const 0))))";
    let text = threaded(barrier, &format!("{start} {barrier}"));
    misdeed(&text, &caps("[processes]\nmax = 64"), soon, is_late);
}

#[test]
fn an_atomic_wait_for_ever() {
    misdeed(&threaded("", SLEEP), &caps("[processes]\nmax = 64"), soon, is_late);
}

#[test]
fn threads_that_trap_and_loop_when_the_call_is_over() {
    let body = threaded(
        "(if (local.get 1) (then unreachable)) (loop $again (br $again))",
        "(drop (call $spawn (i32.const 0))) (drop (call $spawn (i32.const 1)))",
    );
    // Whether the trap or the end comes first is a matter of luck.
    misdeed(&body, &caps("[processes]\nmax = 64"), limits, |outcome| {
        assert!(matches!(outcome, Outcome::Exited(0) | Outcome::Trap(_)), "{outcome:?}");
    });
}

#[test]
fn a_module_of_another_tenant() {
    let neighbour = Neighbour::new();
    let bad = neighbour.tenant("bad");
    neighbour.beside(|| {
        let stolen = neighbour.admitted.function("bad", "fib");
        assert!(matches!(stolen, Err(AdmissionError::NotOwner { .. })));
        // Even with the function in its hands.
        let call = Call::new(&neighbour.fib, &[Value::I32(1)], limits());
        let refused = neighbour.scheduler.run(&bad, call);
        assert!(matches!(refused, Err(SubmitError::NotOwner { .. })));
    });
}

/// Answers with the sum of what is no EBADF, over descriptors from `$from` to `$to`: reads,
/// writes, and files opened below them.
fn forger() -> String {
    format!(
        r#"{FILES} (func (export "forge") (param $from i32) (param $to i32) (result i32) (local $wrong i32)
      (i32.store (i32.const 200) (i32.const 300)) (i32.store (i32.const 204) (i32.const 8))
      (loop $more
        (local.set $wrong (i32.add (local.get $wrong)
          (i32.ne (i32.const {BADF}) (call $fd_read (local.get $from) (i32.const 200) (i32.const 1) (i32.const 208)))))
        (local.set $wrong (i32.add (local.get $wrong)
          (i32.ne (i32.const {BADF}) (call $fd_write (local.get $from) (i32.const 200) (i32.const 1) (i32.const 208)))))
        (local.set $wrong (i32.add (local.get $wrong)
          (i32.ne (i32.const {BADF}) (call $path_open (local.get $from) (i32.const 0) (i32.const 0) (i32.const 4)
            (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 100)))))
        (local.set $from (i32.add (local.get $from) (i32.const 1)))
        (br_if $more (i32.ne (local.get $from) (local.get $to))))
      (local.get $wrong)))"#
    )
}

/// Reads the file `file` of its folder, says so, waits for a byte, reads again: 256 times the
/// errno of opening it plus that of the descriptor it had.
fn reader() -> String {
    format!(
        r#"{FILES} (func (export "read") (result i32)
      (drop (call $open (i32.const 0) (i32.const 4) (i32.const 0) (i64.const 2)))
      (i32.store (i32.const 200) (i32.const 300)) (i32.store (i32.const 204) (i32.const 1))
      (drop (call $fd_write (i32.const 1) (i32.const 200) (i32.const 1) (i32.const 208)))
      (drop (call $fd_read (i32.const 0) (i32.const 200) (i32.const 1) (i32.const 208)))
      (i32.add (call $fd_read (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208))
        (i32.mul (i32.const 256) (call $open (i32.const 0) (i32.const 4) (i32.const 0) (i64.const 2))))))"#
    )
}

/// A call of [`reader`] that waits, with the folder it has.
struct Reading {
    _folder: tempfile::TempDir,
    table: exocell_xgate::Table,
    feed: std::io::PipeWriter,
    ended: mpsc::Receiver<Report>,
}

impl Reading {
    fn start(neighbour: &Neighbour, owner: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "content").unwrap();
        let caps = caps_with(&format!(
            "[[folder]]\nhost = \"{}\"\nguest = \"/data\"\nrights = [\"read\"]",
            folder.path().display()
        ));
        let table = table(&caps);
        let read = neighbour.function(owner, &reader(), &caps, "read");
        let (stdin, feed) = std::io::pipe().unwrap();
        let (mut drain, stdout) = std::io::pipe().unwrap();
        let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
        let spec = Spec { stdin, stdout, ..Spec::default() };
        let attached = neighbour.scheduler.attach(&table, "isolate", spec).unwrap();
        let (send, ended) = mpsc::channel();
        let call = Call::new(&read, &[], limits()).with(attached);
        let done = move |report| drop(send.send(report));
        neighbour.scheduler.submit(&neighbour.tenant(owner), call, done).unwrap();
        drain.read_exact(&mut [0]).unwrap();
        Self { _folder: folder, table, feed, ended }
    }

    fn revoke(&mut self) {
        let handle = self.table.find("isolate", "folder:/data").expect("it was installed");
        assert_eq!(self.table.revoke(handle).unwrap().len(), 1);
    }

    fn finish(mut self) -> Vec<Value> {
        self.feed.write_all(b"x").unwrap();
        self.ended.recv().unwrap().results
    }
}

#[test]
fn a_forged_handle() {
    let neighbour = Neighbour::new();
    // It holds descriptors while others guess their numbers.
    let owner = Reading::start(&neighbour, "owner");
    let bad = neighbour.tenant("bad");
    let caps = caps_with("[[folder]]\nhost = \"/usr\"\nguest = \"/\"\nrights = [\"read\"]");
    let forge = neighbour.function("bad", &forger(), &caps, "forge");
    // The grant that it has to be admitted with is not there when it runs.
    let bare = caps_with("");
    neighbour.beside(|| {
        for range in [(3, 200), (1 << 20, (1 << 20) + 50), (i32::MAX - 50, i32::MIN), (-50, 0)] {
            let attached =
                neighbour.scheduler.attach(&table(&bare), "isolate", Spec::default()).unwrap();
            let arguments = [range.0, range.1].map(Value::I32);
            let call = Call::new(&forge, &arguments, limits()).with(attached);
            let report = neighbour.scheduler.run(&bad, call).unwrap();
            assert_eq!((report.outcome, report.results), (Outcome::Exited(0), vec![Value::I32(0)]));
        }
    });
    assert_eq!(owner.finish(), [Value::I32(0)]);
}

#[test]
fn a_capability_that_is_revoked_in_mid_run() {
    let neighbour = Neighbour::new();
    let mut round = 0;
    neighbour.beside(|| {
        round += 1;
        let (loser, keeper) = (format!("loser {round}"), format!("keeper {round}"));
        let mut loses = Reading::start(&neighbour, &loser);
        let keeps = Reading::start(&neighbour, &keeper);
        loses.revoke();
        assert_eq!(loses.finish(), [Value::I32(NOTCAPABLE + 256 * NOTCAPABLE)]);
        assert_eq!(keeps.finish(), [Value::I32(0)]);
    });
}

/// All of them at once, from tenants of their own.
#[test]
fn everything_at_once() {
    let neighbour = Neighbour::new();
    let texts = [
        r#"(module (func (export "run") unreachable))"#.to_owned(),
        r#"(module (func (export "run") (loop $again (br $again))))"#.to_owned(),
        r#"(module (func $f (export "run") (call $f)))"#.to_owned(),
        threaded(SLEEP, "(loop $again (drop (call $spawn (i32.const 0))) (br $again))"),
    ];
    let caps = caps("[processes]\nmax = 64");
    let crowd = crowd(&neighbour, &texts, &caps);
    neighbour.beside(|| {
        let (send, ended) = mpsc::channel();
        for (tenant, function) in &crowd {
            for _ in 0..5 {
                let send = send.clone();
                let done = move |report: Report| drop(send.send(report.outcome));
                let call = Call::new(function, &[], soon());
                neighbour.scheduler.submit(tenant, call, done).unwrap();
            }
        }
        drop(send);
        let outcomes: Vec<Outcome> = ended.iter().collect();
        assert_eq!(outcomes.len(), 5 * crowd.len());
        assert!(!outcomes.contains(&Outcome::Exited(0)), "{outcomes:?}");
    });
}
