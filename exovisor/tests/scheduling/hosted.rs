//! The CPU is taken from guests that spend their time in host code: it comes back to them by
//! another way.

use exocell_exovisor::{
    Admission, Call, CallLimits, CancelReason, Metering, Outcome, Policy, Pool, Priority, Report,
    Scheduler, SchedulerConfig, Spec, Value,
};
use exocell_xgate::CapabilitySet;
use std::time::{Duration, Instant};

use crate::common::{caps_with, table};

/// Each loop is all but entirely in host code.
const MODULE: &str = r#"(module
  (import "env" "sin" (func $sin (param f64) (result f64)))
  (import "env" "MAP" (func $map (param i32 i32 i32 i32)))
  (import "wasi_snapshot_preview1" "path_open"
    (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (memory (export "memory") 16)
  (table (export "__indirect_function_table") 1 funcref)
  (elem (i32.const 0) $fill-once)
  (func $fill-once (param i32) (memory.fill (i32.const 0) (i32.const 7) (i32.const 0x100000)))
  (func (export "fill") (param $n i32) (result i32)
    (loop $more
      (call $fill-once (i32.const 0))
      (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
    (i32.load8_u (i32.const 0xfffff)))
  (func (export "map") (param $n i32) (result i32)
    (call $map (i32.const 0) (i32.const 0) (local.get $n) (i32.const 1))
    (i32.load8_u (i32.const 0xfffff)))
  ;; Integers and floats live across the call.
  (func (export "sines") (param $n i32) (result f64)
    (local $sum f64) (local $square f64) (local $hash i64)
    (loop $more
      (local.set $square (f64.add (local.get $square) (f64.convert_i32_u (local.get $n))))
      (local.set $hash (i64.add (i64.mul (local.get $hash) (i64.const 31)) (i64.extend_i32_u (local.get $n))))
      (local.set $sum (f64.add (local.get $sum) (call $sin (f64.convert_i32_u (local.get $n)))))
      (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
    (f64.add (local.get $sum)
      (f64.add (local.get $square) (f64.convert_i64_s (local.get $hash)))))
  ;; Some of the arguments of each call are on the stack.
  (func (export "open") (param $n i32) (result i32)
    (local $sum i32)
    (loop $more
      (local.set $sum (i32.add (local.get $sum) (call $open
        (i32.const 99) (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 0)
        (i64.const 0) (i64.const 0) (i32.const 0) (i32.const 8))))
      (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
    (local.get $sum))
  (func (export "spin") (param i32) (result i32) (loop $again (br $again)) (i32.const 0)))"#;

/// One operation on 64 MiB of fresh pages.
const WHOLE: &str = r#"(module
  (memory 1024)
  (func (export "fill") (param $value i32) (result i32)
    (memory.fill (i32.const 0) (local.get $value) (i32.const 0x4000000))
    (i32.load8_u (i32.const 0x3ffffff)))
  (func (export "copy") (param $value i32) (result i32)
    (i32.store8 (i32.const 0) (local.get $value))
    (memory.copy (i32.const 0x2000000) (i32.const 0) (i32.const 0x2000000))
    (i32.load8_u (i32.const 0x2000000)))
  (func (export "spin") (param i32) (result i32) (loop $again (br $again)) (i32.const 0)))"#;

const OWNER: &str = "a";

fn caps() -> CapabilitySet {
    let folder = "[[folder]]\nhost = \"/usr\"\nguest = \"/data\"\nrights = [\"read\"]";
    caps_with(&format!("[processes]\nmax = 4\n{folder}"))
}

fn call(name: &str, argument: i32, scheduler: &Scheduler, deadline: Option<Duration>) -> Call {
    // The engines are the process's, so that all tests share a pool.
    let admission = Admission::new(Policy::pooled(Pool::default()));
    let caps = caps();
    let function = admission
        .admit_for(OWNER, MODULE.as_bytes(), &caps, Metering::Time)
        .and_then(|admitted| admitted.function(OWNER, name))
        .unwrap_or_else(|error| panic!("{error}"));
    let deadline = deadline.map(|deadline| Instant::now() + deadline);
    let limits = CallLimits { memory_bytes: 2 << 20, deadline, cpu_ns: None, threads: 0, fuel: 0 };
    let attached = scheduler.attach(&table(&caps), "isolate", Spec::default());
    Call::new(&function, &[Value::I32(argument)], limits).with(attached.expect("it opens"))
}

/// A call on one worker beside another that always wants the CPU.
fn contended(name: &str, argument: i32, slice: Duration) -> Report {
    let config = SchedulerConfig { workers: 1, slice, ..SchedulerConfig::default() };
    let scheduler = Scheduler::new(&config).expect("a scheduler");
    let [rival, own] = ["rival", "own"].map(|_| scheduler.tenant(OWNER, 1, Priority::Normal));
    let spin = call("spin", 0, &scheduler, None);
    scheduler.submit(&rival, spin, |_| {}).expect("it is taken");
    let call = call(name, argument, &scheduler, None);
    scheduler.run(&own, call).expect("it is taken")
}

#[test]
fn loops_over_bulk_operations_are_preempted() {
    for name in ["fill", "map"] {
        let report = contended(name, 20_000, Duration::from_millis(1));
        let result = (report.outcome, report.results);
        assert_eq!(result, (Outcome::Exited(0), vec![Value::I32(7)]), "{name}");
        // Twenty gigabytes take any memory fifty milliseconds and more, the timer looks every four.
        assert!(report.preemptions >= 10, "{name}: {}", report.preemptions);
    }
}

#[test]
fn one_long_operation_is_preempted() {
    let scheduler = Scheduler::new(&SchedulerConfig {
        workers: 1,
        slice: Duration::from_micros(100),
        ..SchedulerConfig::default()
    });
    let scheduler = scheduler.expect("a scheduler");
    let [rival, own] = ["rival", "own"].map(|_| scheduler.tenant(OWNER, 1, Priority::Normal));
    let admission = Admission::new(Policy::pooled(Pool::default()));
    let call = |name| {
        let function = admission
            .admit_for(OWNER, WHOLE.as_bytes(), &CapabilitySet::nothing(), Metering::Time)
            .and_then(|admitted| admitted.function(OWNER, name))
            .unwrap_or_else(|error| panic!("{error}"));
        let memory_bytes = 64 << 20;
        let limits = CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
        Call::new(&function, &[Value::I32(7)], limits)
    };
    scheduler.submit(&rival, call("spin"), |_| {}).expect("it is taken");
    for name in ["fill", "copy"] {
        let report = scheduler.run(&own, call(name)).expect("it is taken");
        let result = (report.outcome, report.results);
        assert_eq!(result, (Outcome::Exited(0), vec![Value::I32(7)]), "{name}");
        // It takes any memory milliseconds, in which the timer looks every 400 us. As one
        // operation it would end first.
        assert!(report.preemptions >= 5, "{name}: {}", report.preemptions);
    }
}

#[test]
fn calls_with_arguments_on_the_stack_are_preempted() {
    const COUNT: i32 = 300_000;
    const BADF: i32 = 8;
    let report = contended("open", COUNT, Duration::from_micros(200));
    let result = (report.outcome, report.results);
    assert_eq!(result, (Outcome::Exited(0), vec![Value::I32(COUNT * BADF)]));
}

#[test]
fn what_lives_across_a_host_call_survives_preemption() {
    const COUNT: i32 = 1_000_000;
    let (mut sum, mut square, mut hash) = (0.0, 0.0, 0i64);
    for n in (1..=COUNT).rev() {
        square += f64::from(n);
        hash = hash.wrapping_mul(31).wrapping_add(i64::from(n));
        sum += f64::from(n).sin();
    }
    let expected = sum + (square + hash as f64);
    let report = contended("sines", COUNT, Duration::from_micros(50));
    assert_eq!(report.results, [Value::F64(expected)], "{:?}", report.outcome);
    assert!(report.preemptions >= 10, "{}", report.preemptions);
}

#[test]
fn loops_over_bulk_operations_end_when_they_are_told_to() {
    let scheduler = Scheduler::new(&SchedulerConfig::default()).expect("a scheduler");
    let tenant = scheduler.tenant(OWNER, 1, Priority::Normal);
    for name in ["fill", "map"].repeat(10) {
        let call = call(name, i32::MAX, &scheduler, Some(Duration::from_millis(5)));
        let report = scheduler.run(&tenant, call).expect("it is taken");
        assert_eq!(report.outcome, Outcome::Ended(CancelReason::Deadline), "{name}");
    }
}

/// The loop's function is the host's too: no code of the program runs meanwhile.
#[test]
fn loops_over_functions_of_the_host_end_and_are_shared() {
    const LOOP: &str = r#"(module
      (import "env" "MAP" (func $map (param i32 i32 i32 i32)))
      (import "env" "free" (func $free (param i32)))
      (import "env" "memory" (memory 1 2 shared))
      (table (export "__indirect_function_table") 1 funcref)
      (elem (i32.const 0) func $free)
      (func (export "go") (param i32) (result i32)
        (call $map (i32.const 0) (i32.const 0) (i32.const -1) (i32.const 0)) (i32.const 0)))"#;
    let config = SchedulerConfig { workers: 1, ..SchedulerConfig::default() };
    let scheduler = Scheduler::new(&config).expect("a scheduler");
    let [looping, other] =
        ["looping", "other"].map(|_| scheduler.tenant(OWNER, 1, Priority::Normal));
    let caps = caps();
    let admission = Admission::new(Policy::pooled(Pool::default()));
    let function = admission
        .admit_for(OWNER, LOOP.as_bytes(), &caps, Metering::Time)
        .and_then(|admitted| admitted.function(OWNER, "go"))
        .unwrap_or_else(|error| panic!("{error}"));
    let deadline = Some(Instant::now() + Duration::from_secs(1));
    let limits = CallLimits { memory_bytes: 2 << 20, deadline, cpu_ns: None, threads: 0, fuel: 0 };
    let attached = scheduler.attach(&table(&caps), "isolate", Spec::default()).expect("it opens");
    let looped = Call::new(&function, &[Value::I32(0)], limits).with(attached);
    let (send, ended) = std::sync::mpsc::channel();
    let told = move |report: Report| drop(send.send(report.outcome));
    scheduler.submit(&looping, looped, told).expect("it is taken");
    // On the only worker, while the loop has it.
    let beside = scheduler.run(&other, call("fill", 1, &scheduler, None)).expect("it is taken");
    assert_eq!(beside.outcome, Outcome::Exited(0));
    assert!(ended.try_recv().is_err(), "the loop had ended before");
    assert_eq!(ended.recv().expect("it ends"), Outcome::Ended(CancelReason::Deadline));
}
