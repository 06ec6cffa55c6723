//! Threads of an isolate: they share memory, ride on few workers, and end as one.

use exocell_exovisor::{
    Admission, Admitted, Call, CallLimits, CancelHandle, CancelReason, Function, Metering, Outcome,
    Policy, Pool, Priority, Report, Scheduler, SchedulerConfig, Tenant, Value,
};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::caps;

/// Words of memory: 0 counts threads that are done, 4 is the barrier's count, 8 its turn, 12 sums.
/// A thread's first word says what it does.
const MODULE: &str = r#"(module
  (import "env" "memory" (memory 1 16 shared))
  (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
  (import "env" "THREADS" (func $threads (result i32)))
  (table funcref (elem $add $barrier $trap $spin $sleep $count-up $grow $multiply))
  (type $work (func))
  (global $fresh (mut i32) (i32.const 0))
  ;; 1 in each instance that has begun, and was not used before.
  (global $begun (mut i32) (i32.const 0))
  (func $begin (global.set $begun (i32.add (global.get $begun) (i32.const 1))))
  (start $begin)
  (func $add (drop (i32.atomic.rmw.add (i32.const 12) (i32.const 1))))
  ;; All meet, `$parties` at a time, three times.
  (func $barrier (local $turn i32) (local $again i32)
    (local.set $again (i32.const 3))
    (loop $more
      (local.set $turn (i32.atomic.load (i32.const 8)))
      (if (i32.eq (i32.atomic.rmw.add (i32.const 4) (i32.const 1))
            (i32.sub (i32.atomic.load (i32.const 16)) (i32.const 1)))
        (then
          (i32.atomic.store (i32.const 4) (i32.const 0))
          (drop (i32.atomic.rmw.add (i32.const 8) (i32.const 1)))
          (drop (memory.atomic.notify (i32.const 8) (i32.const -1))))
        (else (loop $wait
          (br_if $wait (i32.eq (local.get $turn) (block (result i32)
            (drop (memory.atomic.wait32 (i32.const 8) (local.get $turn) (i64.const -1)))
            (i32.atomic.load (i32.const 8))))))))
      (br_if $more (local.tee $again (i32.sub (local.get $again) (i32.const 1))))))
  (func $trap (drop (i32.div_u (i32.const 1) (i32.const 0))))
  (func $spin (loop $again (br $again)))
  (func $sleep (drop (memory.atomic.wait32 (i32.const 64) (i32.const 0) (i64.const -1))))
  ;; Adds what the thread's own globals hold before they are changed: 1 in a fresh instance.
  (func $count-up (drop (i32.atomic.rmw.add (i32.const 12) (call $change))))
  (func $change (export "change") (result i32)
    (i32.add (global.get $fresh) (global.get $begun))
    (global.set $fresh (i32.const 40)) (global.set $begun (i32.const 50)))
  (func $grow (drop (memory.grow (i32.const 1))))
  (func $multiply (drop (call $spawn (i32.const 7))) (drop (call $spawn (i32.const 7))) (loop $again (br $again)))
  (func (export "wasi_thread_start") (param $id i32) (param $what i32)
    (if (i32.le_s (local.get $id) (i32.const 0)) (then unreachable))
    (call_indirect (type $work) (local.get $what))
    (drop (i32.atomic.rmw.add (i32.const 0) (i32.const 1)))
    (drop (memory.atomic.notify (i32.const 0) (i32.const 1))))
  (func $join (param $count i32) (local $done i32)
    (loop $more
      (local.set $done (i32.atomic.load (i32.const 0)))
      (if (i32.lt_u (local.get $done) (local.get $count))
        (then
          (drop (memory.atomic.wait32 (i32.const 0) (local.get $done) (i64.const -1)))
          (br $more)))))
  ;; Starts `$count` threads that do `$what` and waits for them.
  (func (export "all") (param $what i32) (param $count i32) (result i32) (local $left i32)
    (i32.atomic.store (i32.const 16) (local.get $count))
    (local.set $left (local.get $count))
    (loop $more
      (if (i32.lt_s (call $spawn (local.get $what)) (i32.const 0)) (then (return (i32.const -1))))
      (br_if $more (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
    (call $join (local.get $count))
    (i32.atomic.load (i32.const 12)))
  ;; One after the other.
  (func (export "each") (param $what i32) (param $count i32) (result i32) (local $done i32)
    (loop $more
      (if (i32.lt_s (call $spawn (local.get $what)) (i32.const 0)) (then (return (i32.const -1))))
      (call $join (local.tee $done (i32.add (local.get $done) (i32.const 1))))
      (br_if $more (i32.lt_u (local.get $done) (local.get $count))))
    (i32.atomic.load (i32.const 12)))
  (func (export "leave") (param $what i32) (result i32) (call $spawn (local.get $what)))
  (func (export "bomb") (param $what i32) (result i32) (local $started i32)
    (loop $more
      (if (i32.gt_s (call $spawn (local.get $what)) (i32.const 0))
        (then (local.set $started (i32.add (local.get $started) (i32.const 1))) (br $more))))
    (local.get $started))
  (func (export "wait32") (param $address i32) (param $expected i32) (param $timeout i64) (result i32)
    (memory.atomic.wait32 offset=4 (local.get $address) (local.get $expected) (local.get $timeout)))
  (func (export "wait64") (param $address i32) (param $expected i64) (param $timeout i64) (result i32)
    (memory.atomic.wait64 (local.get $address) (local.get $expected) (local.get $timeout)))
  (func (export "notify") (param $address i32) (param $count i32) (result i32)
    (memory.atomic.notify offset=4 (local.get $address) (local.get $count)))
  (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
  (func (export "threads") (result i32) (call $threads))
  ;; Writes all but the first page's words, after summing up what was there.
  (func (export "stain") (param $at i32) (result i32) (local $seen i32)
    (loop $more
      (local.set $seen (i32.or (local.get $seen) (i32.load (local.get $at))))
      (i32.store (local.get $at) (i32.const 77))
      (local.set $at (i32.add (local.get $at) (i32.const 4)))
      (br_if $more (i32.lt_u (local.get $at) (i32.shl (memory.size) (i32.const 16)))))
    (local.get $seen))
  ;; Zeros that a linker would write: 40,000 of them.
  (func (export "zeros") (param $at i32) (param $look i32) (result i32)
    (memory.fill (i32.const 0) (i32.const 77) (i32.const 65536))
    (memory.fill (local.get $at) (i32.const 0) (i32.const 40000))
    (i32.load8_u (local.get $look)))
  (func (export "spin") (loop $again (br $again)))
  (func (export "one") (result i32) (i32.const 1))
)"#;

const ADD: i32 = 0;
const BARRIER: i32 = 1;
const TRAP: i32 = 2;
const SPIN: i32 = 3;
const SLEEP: i32 = 4;
const COUNT_UP: i32 = 5;
const GROW: i32 = 6;
const MULTIPLY: i32 = 7;

struct World {
    scheduler: Scheduler,
    admission: Admission,
    tenant: Tenant,
    admitted: Admitted,
}

fn processes() -> exocell_xgate::CapabilitySet {
    caps("[processes]\nmax = 300")
}

impl World {
    fn metered(metering: Metering) -> Self {
        let pool = Pool { isolates: 1_000, stacks: 1_000, ..Pool::default() };
        let slice = Duration::from_micros(200);
        let config = SchedulerConfig { workers: 2, slice, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        let tenant = scheduler.tenant("a", 1, Priority::Normal);
        let admission = Admission::new(Policy::pooled(pool));
        let admitted = admission.admit_for("a", MODULE.as_bytes(), &processes(), metering);
        let admitted = admitted.unwrap_or_else(|error| panic!("{error}"));
        Self { scheduler, admission, tenant, admitted }
    }

    fn new() -> Self {
        Self::metered(Metering::Time)
    }

    fn function(&self, name: &str) -> Function {
        self.admitted.function("a", name).unwrap_or_else(|error| panic!("{error}"))
    }

    fn submit(&self, call: Call) -> (CancelHandle, mpsc::Receiver<Report>) {
        let (send, ended) = mpsc::channel();
        let done = move |report| drop(send.send(report));
        (self.scheduler.submit(&self.tenant, call, done).expect("it is taken"), ended)
    }

    fn run_with(&self, name: &str, arguments: &[i32], limits: CallLimits) -> Report {
        let arguments: Vec<Value> = arguments.iter().map(|value| Value::I32(*value)).collect();
        let call = Call::new(&self.function(name), &arguments, limits);
        self.submit(call).1.recv().expect("it ends")
    }

    fn run(&self, name: &str, arguments: &[i32]) -> Report {
        self.run_with(name, arguments, limits())
    }

    fn returns(&self, name: &str, arguments: &[Value]) -> Result<i32, Outcome> {
        let call = Call::new(&self.function(name), arguments, limits());
        returned(&self.submit(call).1.recv().expect("it ends"))
    }

    /// Whether another tenant's call succeeds.
    fn neighbour_is_well(&self) -> bool {
        let tenant = self.scheduler.tenant("b", 1, Priority::Normal);
        let text = r#"(module (func (export "f") (result i32) (i32.const 7)))"#;
        let caps = exocell_xgate::CapabilitySet::nothing();
        let admitted = self.admission.admit_for("b", text.as_bytes(), &caps, Metering::Time);
        let function = admitted.and_then(|admitted| admitted.function("b", "f")).unwrap();
        let report = self.scheduler.run(&tenant, Call::new(&function, &[], limits())).unwrap();
        returned(&report) == Ok(7)
    }
}

fn limits() -> CallLimits {
    let deadline = Some(Instant::now() + Duration::from_secs(60));
    CallLimits { memory_bytes: 1 << 20, deadline, cpu_ns: None, threads: 200, fuel: 100_000_000 }
}

fn soon() -> CallLimits {
    CallLimits { deadline: Some(Instant::now() + Duration::from_millis(100)), ..limits() }
}

fn returned(report: &Report) -> Result<i32, Outcome> {
    match (&report.outcome, &report.results[..]) {
        (Outcome::Exited(0), [Value::I32(value)]) => Ok(*value),
        (other, _) => Err(other.clone()),
    }
}

#[test]
fn threads_share_memory_in_every_metering_mode() {
    for metering in Metering::ALL {
        let world = World::metered(metering);
        assert_eq!(returned(&world.run("all", &[ADD, 100])), Ok(100), "{metering:?}");
    }
}

#[test]
fn a_barrier_works_with_more_threads_than_workers() {
    for metering in Metering::ALL {
        let world = World::metered(metering);
        assert_eq!(returned(&world.run("all", &[BARRIER, 64])), Ok(0), "{metering:?}");
        assert!(world.neighbour_is_well());
    }
}

#[test]
fn each_thread_begins_with_fresh_globals() {
    for metering in Metering::ALL {
        let world = World::metered(metering);
        assert_eq!(returned(&world.run("each", &[COUNT_UP, 20])), Ok(20));
    }
}

#[test]
fn a_call_finds_nothing_in_the_instances_of_the_one_before() {
    for metering in Metering::ALL {
        let world = World::metered(metering);
        for _ in 0..5 {
            assert_eq!(returned(&world.run("change", &[])), Ok(1), "{metering:?}");
            assert_eq!(returned(&world.run("all", &[COUNT_UP, 5])), Ok(5), "{metering:?}");
            assert_eq!(returned(&world.run("stain", &[0])), Ok(0));
        }
    }
}

#[test]
fn the_first_error_of_a_thread_is_the_isolates() {
    let world = World::new();
    // The call itself waits for threads that do not end.
    let report = world.run("all", &[TRAP, 5]);
    assert!(
        matches!(&report.outcome, Outcome::Trap(why) if why.contains("divide by zero")),
        "{report:?}"
    );
    assert!(world.neighbour_is_well());
}

#[test]
fn threads_end_with_the_call() {
    let world = World::new();
    for what in [SPIN, SLEEP, MULTIPLY] {
        assert_eq!(world.run("leave", &[what]).outcome, Outcome::Exited(0), "{what}");
    }
    // Nothing is left that would take the workers or their stacks.
    assert_eq!(returned(&world.run("all", &[ADD, 100])), Ok(100));
}

#[test]
fn an_endless_wait_is_ended_by_the_deadline() {
    let world = World::new();
    for what in [SLEEP, SPIN] {
        let report = world.run_with("all", &[what, 4], soon());
        assert_eq!(report.outcome, Outcome::Ended(CancelReason::Deadline), "{what}");
    }
    assert!(world.neighbour_is_well());
}

#[test]
fn a_stop_ends_all_threads() {
    let world = World::new();
    for what in [SLEEP, SPIN] {
        let arguments = [Value::I32(what), Value::I32(20)];
        let (cancel, ended) = world.submit(Call::new(&world.function("all"), &arguments, limits()));
        std::thread::sleep(Duration::from_millis(20));
        cancel.request(CancelReason::Stopped);
        assert_eq!(ended.recv().unwrap().outcome, Outcome::Ended(CancelReason::Stopped));
    }
}

#[test]
fn the_cpu_time_of_all_threads_counts() {
    let world = World::new();
    let limits = CallLimits { cpu_ns: Some(40_000_000), ..limits() };
    let report = world.run_with("all", &[SPIN, 8], limits);
    assert_eq!(report.outcome, Outcome::Ended(CancelReason::CpuTime));
    assert!(report.cpu >= Duration::from_millis(40), "{report:?}");
}

#[test]
fn threads_are_counted() {
    let world = World::new();
    assert_eq!(returned(&world.run("bomb", &[SLEEP])), Ok(200));
    assert_eq!(returned(&world.run("bomb", &[SPIN])), Ok(200));
    let few = CallLimits { threads: 3, ..limits() };
    assert_eq!(returned(&world.run_with("all", &[SLEEP, 4], few)), Ok(-1));
    assert!(world.neighbour_is_well());
}

#[test]
fn a_bomb_of_threads_leaves_others_alone() {
    let world = World::new();
    let arguments = [Value::I32(MULTIPLY), Value::I32(1)];
    let (cancel, ended) = world.submit(Call::new(&world.function("all"), &arguments, limits()));
    for _ in 0..20 {
        assert!(world.neighbour_is_well());
    }
    cancel.request(CancelReason::Stopped);
    assert_eq!(ended.recv().unwrap().outcome, Outcome::Ended(CancelReason::Stopped));
}

#[test]
fn waiting_answers_as_the_instruction_does() {
    let world = World::new();
    let wait32 = |address, expected, timeout| {
        world.returns("wait32", &[Value::I32(address), Value::I32(expected), Value::I64(timeout)])
    };
    assert_eq!(wait32(60, 1, -1), Ok(1), "another value");
    assert_eq!(wait32(60, 0, 1_000_000), Ok(2), "the time is over");
    assert_eq!(wait32(60, 0, 0), Ok(2));
    let wait64 =
        |address| world.returns("wait64", &[Value::I32(address), Value::I64(1), Value::I64(-1)]);
    assert_eq!(wait64(64), Ok(1));
    let notify = |address| world.returns("notify", &[Value::I32(address), Value::I32(1)]);
    assert_eq!(notify(60), Ok(0), "nobody waits");
    let traps = |result: Result<i32, Outcome>, words: &str| match result {
        Err(Outcome::Trap(why)) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    for result in [wait32(1, 0, 0), notify(1), wait64(4)] {
        traps(result, "unaligned atomic");
    }
    for result in [wait32(1 << 20, 0, 0), wait32(-4, 0, 0), notify(1 << 20), wait64(-8)] {
        traps(result, "out of bounds");
    }
}

#[test]
fn memory_is_limited_for_all_threads_together() {
    let world = World::new();
    let tight = CallLimits { memory_bytes: 4 << 16, ..limits() };
    assert_eq!(returned(&world.run_with("grow", &[3], tight.clone())), Ok(1));
    assert_eq!(returned(&world.run_with("grow", &[4], tight.clone())), Ok(-1));
    assert_eq!(returned(&world.run_with("all", &[GROW, 50], tight)), Ok(0));
    let none = CallLimits { memory_bytes: 1 << 15, ..limits() };
    let report = world.run_with("one", &[], none);
    assert_eq!(report.outcome, Outcome::OutOfMemory { limit: 1 << 15 });
}

#[test]
fn a_memory_is_new_though_it_was_used_before() {
    let world = World::new();
    for _ in 0..10 {
        assert_eq!(returned(&world.run("stain", &[0])), Ok(0));
        assert_eq!(returned(&world.run("all", &[ADD, 3])), Ok(3));
        // Nor does a call that was ended, or one that made it larger, leave something behind.
        assert_eq!(
            world.run_with("all", &[SPIN, 2], soon()).outcome,
            Outcome::Ended(CancelReason::Deadline)
        );
        assert_eq!(returned(&world.run("grow", &[3])), Ok(1));
        assert_eq!(returned(&world.run("grow", &[0])), Ok(1));
    }
}

#[test]
fn many_zeros_are_written_like_few() {
    let world = World::new();
    let zeros = |at, look| returned(&world.run("zeros", &[at, look]));
    for (at, look, seen) in [
        (0, 0, 0),
        (0, 39_999, 0),
        (0, 40_000, 77),
        (5_001, 5_000, 77),
        (5_001, 5_001, 0),
        (5_001, 8_192, 0),
        (5_001, 45_000, 0),
        (5_001, 45_001, 77),
        (25_536, 65_535, 0),
    ] {
        assert_eq!(zeros(at, look), Ok(seen), "{at} {look}");
    }
    for at in [25_537, 65_536, -1] {
        let traps =
            |outcome| matches!(&outcome, Outcome::Trap(why) if why.contains("out of bounds"));
        assert!(zeros(at, 0).is_err_and(traps), "{at}");
    }
}

#[test]
fn a_thread_without_a_beginning_is_an_error_that_names_it() {
    let world = World::new();
    for entry in ["", "(func (export \"wasi_thread_start\") (param i32))"] {
        let text = format!(
            r#"(module (import "env" "memory" (memory 1 1 shared))
            (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32))) {entry}
            (func (export "run") (drop (call $spawn (i32.const 0))) (loop $again (br $again))))"#
        );
        let admitted =
            world.admission.admit_for("a", text.as_bytes(), &processes(), Metering::Time);
        let function = admitted.and_then(|admitted| admitted.function("a", "run")).unwrap();
        let outcome = world.submit(Call::new(&function, &[], limits())).1.recv().unwrap().outcome;
        let names = |why: &str| why.contains("no function `wasi_thread_start`");
        assert!(matches!(&outcome, Outcome::Trap(why) if names(why)), "{outcome:?}");
    }
}

#[test]
fn threads_need_their_capability() {
    let admission = Admission::new(Policy::default());
    let caps = caps("[memory]\nlimit = \"1M\"");
    let refused = admission.admit_for("a", MODULE.as_bytes(), &caps, Metering::Time);
    let message = refused.err().map(|error| error.to_string());
    let expected = "import `THREADS` needs the capability `processes`, which is not granted";
    let others = "import `thread-spawn` needs the capability `processes`, which is not granted";
    assert!(
        message.as_deref() == Some(others) || message.as_deref() == Some(expected),
        "{message:?}"
    );
}

#[test]
fn an_idle_machine_is_worth_more_threads_than_a_busy_one() {
    let world = World::new();
    // Workers need a moment to fall asleep, and to take what there is.
    let becomes = |count| while returned(&world.run("threads", &[])) != Ok(count) {};
    becomes(2);
    let rivals: Vec<_> =
        (0..4).map(|_| world.submit(Call::new(&world.function("spin"), &[], limits()))).collect();
    becomes(1);
    rivals.iter().for_each(|(cancel, _)| cancel.request(CancelReason::Stopped));
}

#[test]
fn a_scheduler_goes_with_its_threads() {
    for what in [SLEEP, SPIN, BARRIER] {
        let world = World::new();
        let arguments = [Value::I32(what), Value::I32(100)];
        let (_, ended) = world.submit(Call::new(&world.function("all"), &arguments, limits()));
        std::thread::sleep(Duration::from_millis(5));
        drop(world);
        let outcome = ended.recv().expect("it is told").outcome;
        let over = outcome == Outcome::Exited(0) && what == BARRIER;
        assert!(over || outcome == Outcome::Ended(CancelReason::Stopped), "{outcome:?}");
    }
}

#[test]
fn a_shared_memory_of_ones_own_is_refused() {
    let admission = Admission::new(Policy::default());
    let text = r#"(module (memory 1 1 shared))"#;
    let refused = admission.admit_for("a", text.as_bytes(), &processes(), Metering::Time);
    assert!(refused.err().is_some_and(|error| error.to_string().contains("imported")));
}
