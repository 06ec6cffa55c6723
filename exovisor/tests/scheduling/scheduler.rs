//! Many isolates on few threads: what one does never reaches another.

use exocell_exovisor::{
    Admission, Call, CallLimits, CancelHandle, CancelReason, Function, Metering, Outcome, Policy,
    Pool, Priority, Report, Scheduler, SchedulerConfig, Slots, Spec, SubmitError, Submitter,
    Tenant, Value,
};
use exocell_xgate::CapabilitySet;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::{caps_with, table};

/// What the tests call: well-behaved functions and one of each kind of bad ones.
const MODULE: &str = r#"(module
  (memory (export "memory") 1 100)
  (table 1 funcref)
  (func $fib (export "fib") (param i32) (result i32)
    (if (result i32) (i32.lt_u (local.get 0) (i32.const 2))
      (then (local.get 0))
      (else (i32.add
        (call $fib (i32.sub (local.get 0) (i32.const 1)))
        (call $fib (i32.sub (local.get 0) (i32.const 2)))))))
  ;; Vectors, floats and integers live across every point of the loop.
  (func (export "mix") (param $n i32) (result i32)
    (local $v v128) (local $w v128) (local $f f64) (local $h i64) (local $i i32)
    (local.set $v (v128.const i32x4 1 2 3 4))
    (local.set $w (v128.const i32x4 5 7 11 13))
    (local.set $f (f64.const 1.5))
    (local.set $h (i64.const 0x9e3779b97f4a7c15))
    (loop $more
      (local.set $v (i32x4.add (i32x4.mul (local.get $v) (local.get $w)) (v128.const i32x4 1 1 1 1)))
      (local.set $w (v128.xor (local.get $w) (i32x4.shl (local.get $v) (i32.const 3))))
      (local.set $f (f64.add (f64.mul (local.get $f) (f64.const 0.999)) (f64.const 0.25)))
      (local.set $h (i64.rotl (i64.mul (local.get $h) (i64.const 0xff51afd7ed558ccd)) (i64.const 13)))
      (i32.store (i32.and (local.get $i) (i32.const 0xfffc)) (i32x4.extract_lane 2 (local.get $v)))
      (local.set $i (i32.add (local.get $i) (i32.const 1)))
      (br_if $more (i32.lt_u (local.get $i) (local.get $n))))
    (i32.xor
      (i32.xor (i32x4.extract_lane 0 (local.get $v)) (i32x4.extract_lane 3 (local.get $w)))
      (i32.xor (i32.wrap_i64 (local.get $h)) (i32.trunc_sat_f64_s (f64.mul (local.get $f) (f64.const 1e6))))))
  (func $deep (export "overflow") (result i32) (i32.add (call $deep) (i32.const 1)))
  ;; Down to a depth that fits, back up, for ever.
  (func $down (param i32) (result i32)
    (if (result i32) (local.get 0)
      (then (i32.add (call $down (i32.sub (local.get 0) (i32.const 1))) (i32.const 1)))
      (else (i32.const 0))))
  (func (export "depths") (param i32) (result i32) (local i32)
    (loop $more
      (local.set 1 (call $down (i32.const 500)))
      (br_if $more (local.tee 0 (i32.sub (local.get 0) (i32.const 1)))))
    (local.get 1))
  (func (export "nothing"))
  (func (export "spin") (loop $again (br $again)))
  (func (export "trap") (result i32) (i32.div_u (i32.const 1) (i32.const 0)))
  (func (export "spin-then-trap") (param $n i32) (result i32)
    (loop $more (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
    (i32.load (i32.const 0x7fff0000)))
  (func (export "bomb") (loop $more (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) unreachable)
)"#;

/// fib(20).
const FIB: (i32, i32) = (20, 6765);

struct World {
    admission: Admission,
    scheduler: Scheduler,
}

impl World {
    fn new(workers: usize, slice: Duration) -> Self {
        let pool = Pool { isolates: 3_000, stacks: 3_000, ..Pool::default() };
        let begun_max = 3_000;
        let config = SchedulerConfig { workers, slice, begun_max, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        Self { admission: Admission::new(Policy::pooled(pool)), scheduler }
    }

    fn tenant(&self, name: &str) -> Tenant {
        self.scheduler.tenant(name, 1, Priority::Normal)
    }

    fn function(&self, tenant: &Tenant, name: &str) -> Function {
        self.function_of(tenant, MODULE, name, Metering::Time)
    }

    fn function_of(&self, tenant: &Tenant, text: &str, name: &str, metering: Metering) -> Function {
        let caps = CapabilitySet::nothing();
        self.admission
            .admit_for(tenant.name(), text.as_bytes(), &caps, metering)
            .and_then(|admitted| admitted.function(tenant.name(), name))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn run(&self, tenant: &Tenant, function: &Function, arguments: &[Value]) -> Report {
        self.scheduler.run(tenant, call(function, arguments)).expect("it is taken")
    }
}

impl World {
    /// Something else that always wants the CPU, so that others are preempted.
    fn rivals(&self, count: usize) {
        let tenant = self.tenant("rival");
        let spin = self.function(&tenant, "spin");
        for _ in 0..count {
            self.scheduler.submit(&tenant, call(&spin, &[]), |_| {}).expect("it is taken");
        }
    }
}

fn limits() -> CallLimits {
    CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 }
}

fn call(function: &Function, arguments: &[Value]) -> Call {
    Call::new(function, arguments, limits())
}

fn soon() -> CallLimits {
    CallLimits { deadline: Some(Instant::now() + Duration::from_millis(50)), ..limits() }
}

const SHORT: Duration = Duration::from_micros(50);

#[test]
fn a_tenants_calls_do_not_take_the_pool_from_others() {
    let pool = Pool { isolates: 40, stacks: 40, ..Pool::default() };
    let begun_max = 20;
    let config =
        SchedulerConfig { workers: 2, slice: SHORT, begun_max, ..SchedulerConfig::default() };
    let scheduler = Scheduler::new(&config).expect("a scheduler");
    let world = World { admission: Admission::new(Policy::pooled(pool)), scheduler };
    // Each is preempted and keeps its instance, while the next begins.
    world.rivals(500);
    let tenant = world.tenant("a");
    let fib = world.function(&tenant, "fib");
    for _ in 0..20 {
        let report = world.run(&tenant, &fib, &[Value::I32(FIB.0)]);
        assert_eq!((report.outcome, report.results), (Outcome::Exited(0), vec![Value::I32(FIB.1)]));
    }
}

#[test]
fn preempted_code_computes_what_it_computes_undisturbed() {
    let quiet = World::new(1, Duration::from_secs(3600));
    let busy = World::new(3, SHORT);
    busy.rivals(3);
    let [alone, crowd] = [&quiet, &busy].map(|world| world.tenant("t"));
    for (name, argument) in [("fib", 27), ("mix", 3_000_000), ("depths", 2_000)] {
        let expected = quiet.run(&alone, &quiet.function(&alone, name), &[Value::I32(argument)]);
        assert_eq!((expected.outcome, expected.preemptions), (Outcome::Exited(0), 0), "{name}");
        let function = busy.function(&crowd, name);
        let (send, reports) = mpsc::channel();
        for _ in 0..8 {
            let send = send.clone();
            let done = move |report| drop(send.send(report));
            busy.scheduler.submit(&crowd, call(&function, &[Value::I32(argument)]), done).unwrap();
        }
        let reports: Vec<Report> = reports.iter().take(8).collect();
        assert!(reports.iter().all(|report| report.results == expected.results), "{name}");
        let preemptions: u64 = reports.iter().map(|report| report.preemptions).sum();
        assert!(preemptions > 10, "{name} was preempted {preemptions} times");
    }
}

#[test]
fn a_guest_traps_after_it_was_preempted() {
    let world = World::new(2, SHORT);
    world.rivals(3);
    let tenant = world.tenant("t");
    let function = world.function(&tenant, "spin-then-trap");
    let mut preemptions = 0;
    for _ in 0..20 {
        let report = world.run(&tenant, &function, &[Value::I32(3_000_000)]);
        assert!(matches!(&report.outcome, Outcome::Trap(text) if text.contains("out of bounds")));
        preemptions += report.preemptions;
    }
    assert!(preemptions > 0);
}

#[test]
fn a_stack_overflow_under_preemption_is_a_trap() {
    let world = World::new(2, SHORT);
    world.rivals(3);
    let tenant = world.tenant("t");
    let function = world.function(&tenant, "overflow");
    let (send, reports) = mpsc::channel();
    for _ in 0..500 {
        let send = send.clone();
        let done = move |report: Report| drop(send.send(report.outcome));
        world.scheduler.submit(&tenant, call(&function, &[]), done).unwrap();
    }
    for outcome in reports.iter().take(500) {
        assert!(matches!(&outcome, Outcome::Trap(text) if text.contains("stack")), "{outcome:?}");
    }
}

#[test]
fn deadlines_cpu_limits_and_stops_end_a_loop() {
    let world = World::new(2, Duration::from_millis(1));
    let tenant = world.tenant("t");
    let spin = world.function(&tenant, "spin");
    let limited = |limits| Call::new(&spin, &[], limits);
    let report = world.scheduler.run(&tenant, limited(soon())).unwrap();
    assert_eq!(report.outcome, Outcome::Ended(CancelReason::Deadline));
    let cpu = CallLimits { cpu_ns: Some(20_000_000), ..limits() };
    let report = world.scheduler.run(&tenant, limited(cpu)).unwrap();
    assert_eq!(report.outcome, Outcome::Ended(CancelReason::CpuTime));
    assert!(report.cpu >= Duration::from_millis(20), "{:?}", report.cpu);
    let (send, ended) = mpsc::channel();
    let done = move |report: Report| drop(send.send(report.outcome));
    let cancel = world.scheduler.submit(&tenant, limited(limits()), done).unwrap();
    assert!(ended.recv_timeout(Duration::from_millis(30)).is_err(), "it ends by itself");
    cancel.request(CancelReason::Revoked);
    assert_eq!(ended.recv().unwrap(), Outcome::Ended(CancelReason::Revoked));
}

#[test]
fn a_loop_in_the_start_section_can_be_ended() {
    let world = World::new(1, Duration::from_millis(1));
    let tenant = world.tenant("t");
    let text = r#"(module (func $s (loop $l (br $l))) (start $s) (func (export "f")))"#;
    let function = world.function_of(&tenant, text, "f", Metering::Time);
    let call = Call::new(&function, &[], soon());
    let report = world.scheduler.run(&tenant, call).unwrap();
    assert_eq!(report.outcome, Outcome::Ended(CancelReason::Deadline));
}

/// A trap, a stack overflow, an endless loop and a memory bomb, again and again, on one worker,
/// while another tenant's calls all succeed.
#[test]
fn what_one_tenant_does_does_not_reach_another() {
    for metering in Metering::ALL {
        let world = World::new(1, Duration::from_millis(1));
        let (bad, good) = (world.tenant("bad"), world.tenant("good"));
        let limits = || CallLimits { fuel: 10_000_000, ..soon() };
        for name in ["trap", "overflow", "spin", "bomb", "spin", "spin"] {
            let function = world.function_of(&bad, MODULE, name, metering);
            let call = Call::new(&function, &[], limits());
            world
                .scheduler
                .submit(&bad, call, |report| {
                    assert_ne!(report.outcome, Outcome::Exited(0));
                })
                .unwrap();
        }
        let function = world.function_of(&good, MODULE, "fib", metering);
        for _ in 0..50 {
            let call = Call::new(
                &function,
                &[Value::I32(FIB.0)],
                CallLimits { fuel: 10_000_000, ..self::limits() },
            );
            let report = world.scheduler.run(&good, call).unwrap();
            assert_eq!(report.outcome, Outcome::Exited(0), "{metering:?}");
            assert_eq!(report.results, [Value::I32(FIB.1)]);
        }
    }
}

#[test]
fn memory_and_fuel_end_what_exceeds_them() {
    let world = World::new(1, Duration::from_millis(1));
    let tenant = world.tenant("t");
    let bomb = world.function(&tenant, "bomb");
    let report = world.run(&tenant, &bomb, &[]);
    assert_eq!(report.outcome, Outcome::OutOfMemory { limit: 1 << 20 });
    let spin = world.function_of(&tenant, MODULE, "spin", Metering::Fuel);
    let limits = CallLimits { fuel: 1_000_000, ..limits() };
    let report = world.scheduler.run(&tenant, Call::new(&spin, &[], limits));
    assert_eq!(report.unwrap().outcome, Outcome::OutOfFuel);
}

#[test]
fn fuel_is_the_same_however_often_the_cpu_is_taken() {
    let needed = |slice| {
        let world = World::new(1, slice);
        world.rivals(1);
        let tenant = world.tenant("t");
        let fib = world.function_of(&tenant, MODULE, "fib", Metering::Fuel);
        let enough = |fuel| {
            let limits = CallLimits { fuel, ..limits() };
            let call = Call::new(&fib, &[Value::I32(16)], limits);
            world.scheduler.run(&tenant, call).unwrap().outcome == Outcome::Exited(0)
        };
        let (mut low, mut high) = (0, 10_000_000);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if enough(middle) { high = middle } else { low = middle }
        }
        high
    };
    assert_eq!(needed(Duration::from_millis(2)), needed(Duration::from_micros(20)));
}

#[test]
fn thousands_of_suspended_calls_are_ended_with_the_scheduler() {
    let world = World::new(2, SHORT);
    let tenant = world.tenant("t");
    let spin = world.function(&tenant, "spin");
    let (send, ended) = mpsc::channel();
    for _ in 0..2_000 {
        let send = send.clone();
        let done = move |report: Report| drop(send.send(report));
        world.scheduler.submit(&tenant, call(&spin, &[]), done).unwrap();
    }
    drop(send);
    // Calls of one tenant have their turns one after the other: when the last one was ended,
    // which a turn does, all others had one.
    let last = CallLimits { deadline: Some(Instant::now()), ..limits() };
    let last = world.scheduler.run(&tenant, Call::new(&spin, &[], last)).unwrap();
    assert_eq!(last.outcome, Outcome::Ended(CancelReason::Deadline));
    drop(world);
    let reports: Vec<Report> = ended.iter().collect();
    assert_eq!(reports.len(), 2_000);
    assert!(reports.iter().all(|report| report.outcome == Outcome::Ended(CancelReason::Stopped)));
    let suspended = reports.iter().filter(|report| report.preemptions > 0).count();
    assert!(suspended > 1_000, "{suspended} had been preempted");
}

#[test]
fn shares_follow_weights_and_the_slice_can_be_changed() {
    let world = World::new(1, Duration::from_millis(1));
    // Until all are there, one of a higher class has the worker.
    let first = world.scheduler.tenant("first", 1, Priority::High);
    let spin = world.function(&first, "spin");
    let barrier = world.scheduler.submit(&first, call(&spin, &[]), |_| {}).unwrap();
    let tenants = [
        ("four", 4, Priority::Normal),
        ("two", 2, Priority::Normal),
        ("one", 1, Priority::Normal),
        ("low", 100, Priority::Low),
    ]
    .map(|(name, weight, priority)| {
        let tenant = world.scheduler.tenant(name, weight, priority);
        let spin = world.function(&tenant, "spin");
        (tenant, spin)
    });
    // The first one's CPU limit says when it is over, however busy the machine is. It stops the
    // others before the worker can take one of them.
    let mut cpu_ns = Some(400_000_000);
    let (send_cancels, cancels) = mpsc::channel::<CancelHandle>();
    let mut cancels = Some(cancels);
    let calls = tenants.map(|(tenant, function)| {
        let call = Call::new(&function, &[], CallLimits { cpu_ns: cpu_ns.take(), ..limits() });
        let (send, ended) = mpsc::channel();
        let cancels = cancels.take();
        let done = move |report: Report| {
            cancels.iter().flatten().for_each(|cancel| cancel.request(CancelReason::Stopped));
            drop(send.send(report));
        };
        (world.scheduler.submit(&tenant, call, done).unwrap(), ended)
    });
    let [four, others @ ..] = calls;
    others.iter().for_each(|(cancel, _)| send_cancels.send(cancel.clone()).unwrap());
    drop(send_cancels);
    world.scheduler.set_slice(Duration::from_micros(500));
    barrier.request(CancelReason::Stopped);
    let four = four.1.recv().unwrap();
    let [two, one, low] = others.map(|(_, ended)| ended.recv().unwrap());
    assert_eq!(four.outcome, Outcome::Ended(CancelReason::CpuTime));
    let share = (four.cpu + two.cpu + one.cpu).as_secs_f64() / 7.0;
    for (report, weight) in [(four, 4.0), (two, 2.0), (one, 1.0)] {
        let error = report.cpu.as_secs_f64() / (share * weight) - 1.0;
        assert!(error.abs() < 0.1, "{report:?} for weight {weight}");
        assert!(report.preemptions > 5, "{report:?}");
    }
    assert!(low.cpu.as_secs_f64() < share / 2.0, "{low:?}");
}

#[test]
fn who_was_idle_does_not_wait_for_whole_slices() {
    let slice = Duration::from_millis(100);
    // Another program may have the CPU for so long.
    let lucky = (0..20).any(|_| {
        let world = World::new(1, slice);
        let rivals = ["one", "other"].map(|name| {
            let tenant = world.tenant(name);
            let (send, ended) = mpsc::channel();
            let done = move |report: Report| drop(send.send(report));
            let spin = call(&world.function(&tenant, "spin"), &[]);
            (world.scheduler.submit(&tenant, spin, done).unwrap(), ended)
        });
        let used = || world.scheduler.stats().iter().map(|(_, stats)| stats.cpu_ns).max().unwrap();
        // Both have had a turn, and one has just begun.
        while used() < 2 * slice.as_nanos() as u64 {}
        let comes = world.tenant("comes");
        let begun = Instant::now();
        let report = world.run(&comes, &world.function(&comes, "fib"), &[Value::I32(FIB.0)]);
        let took = begun.elapsed();
        assert_eq!(report.results, [Value::I32(FIB.1)]);
        rivals.iter().for_each(|(cancel, _)| cancel.request(CancelReason::Stopped));
        rivals.into_iter().for_each(|(_, ended)| drop(ended.recv().unwrap()));
        took < slice / 2
    });
    assert!(lucky);
}

#[test]
fn a_module_is_called_by_its_owner_only_and_with_its_types() {
    let world = World::new(1, Duration::from_millis(1));
    let (owner, other) = (world.tenant("owner"), world.tenant("other"));
    let fib = world.function(&owner, "fib");
    let stolen = world.scheduler.run(&other, call(&fib, &[Value::I32(1)]));
    assert!(matches!(stolen, Err(SubmitError::NotOwner { .. })));
    for arguments in [&[][..], &[Value::I64(1)], &[Value::I32(1), Value::I32(2)]] {
        let refused = world.scheduler.run(&owner, call(&fib, arguments));
        assert!(matches!(refused, Err(SubmitError::Arguments(_))), "{arguments:?}");
    }
}

#[test]
fn a_tenant_may_not_queue_without_end() {
    let config = SchedulerConfig { workers: 1, waiting_max: 10, ..SchedulerConfig::default() };
    let world = World { scheduler: Scheduler::new(&config).unwrap(), ..World::new(1, SHORT) };
    let tenant = world.tenant("t");
    let spin = world.function(&tenant, "spin");
    let results: Vec<_> =
        (0..20).map(|_| world.scheduler.submit(&tenant, call(&spin, &[]), |_| {})).collect();
    assert!(results[0].is_ok());
    assert!(matches!(results[19], Err(SubmitError::Full { waiting: 10, .. })));
}

#[test]
fn what_is_submitted_at_an_end_comes_in_order_and_counts() {
    let config = SchedulerConfig { workers: 1, waiting_max: 3, ..SchedulerConfig::default() };
    let world = World { scheduler: Scheduler::new(&config).unwrap(), ..World::new(1, SHORT) };
    let tenant = world.tenant("t");
    let fib = world.function(&tenant, "fib");
    let (send, receive) = mpsc::channel();
    let submitter = world.scheduler.submitter();
    let (again, of) = (fib.clone(), tenant.clone());
    let end = move |_| {
        let submit = |index: i32| {
            let send = send.clone();
            let done = move |report: Report| send.send(Ok((index, report.outcome))).unwrap();
            submitter.submit(&of, call(&again, &[Value::I32(index)]), done)
        };
        for index in 0..5 {
            if let Err(error) = submit(index) {
                send.send(Err((index, error))).unwrap();
            }
        }
    };
    world.scheduler.submit(&tenant, call(&fib, &[Value::I32(1)]), end).unwrap();
    let (mut ended, mut refused) = (Vec::new(), Vec::new());
    for told in receive {
        match told {
            Ok((index, outcome)) => {
                assert_eq!(outcome, Outcome::Exited(0));
                ended.push(index);
            }
            Err((index, error)) => {
                assert!(matches!(error, SubmitError::Full { waiting: 3, .. }), "{error}");
                refused.push(index);
            }
        }
    }
    assert_eq!((ended, refused), (vec![0, 1, 2], vec![3, 4]));
}

/// Calls one after the other, each submitted at the end of the one before: `short` ones as long as
/// `goes_on` says so, then `last`.
#[derive(Clone)]
struct InARow {
    submitter: Submitter,
    tenant: Tenant,
    short: Function,
    last: Function,
    goes_on: Arc<AtomicBool>,
    ended: Arc<AtomicU64>,
}

impl InARow {
    fn begin(world: &World, tenant: &Tenant, last: &str) -> Self {
        let [short, last] = ["fib", last].map(|name| world.function(tenant, name));
        let (submitter, tenant) = (world.scheduler.submitter(), tenant.clone());
        let (goes_on, ended) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let calls = Self { submitter, tenant, short, last, goes_on, ended };
        calls.clone().next();
        calls
    }

    fn next(self) {
        let again = self.clone();
        let end = move |_| {
            again.ended.fetch_add(1, Ordering::Relaxed);
            again.next();
        };
        let Self { submitter, tenant, short, last, .. } = &self;
        let submitted = if self.goes_on.load(Ordering::Relaxed) {
            submitter.submit(tenant, call(short, &[Value::I32(1)]), end)
        } else {
            submitter.submit(tenant, call(last, &[]), |_| {})
        };
        // The scheduler may be gone.
        drop(submitted);
    }

    fn wait_for(&self, ended: u64) {
        while self.ended.load(Ordering::Relaxed) < ended {
            std::thread::yield_now();
        }
    }
}

#[test]
fn calls_in_a_row_leave_the_worker_to_others_and_all_count() {
    let world = World::new(1, Duration::from_millis(1));
    let (calls, comes) = (world.tenant("calls"), world.tenant("comes"));
    let row = InARow::begin(&world, &calls, "nothing");
    let fib = world.function(&comes, "fib");
    for _ in 0..200 {
        row.wait_for(row.ended.load(Ordering::Relaxed) + 20);
        let report = world.run(&comes, &fib, &[Value::I32(FIB.0)]);
        assert_eq!(report.results, [Value::I32(FIB.1)]);
    }
    row.goes_on.store(false, Ordering::Relaxed);
    // After the last one of the row, because it is of the same tenant.
    let counted = || world.scheduler.stats()[0].1;
    while counted().calls < row.ended.load(Ordering::Relaxed) + 1 {
        std::thread::yield_now();
    }
    let ended = row.ended.load(Ordering::Relaxed);
    assert!(ended >= 4_000 && counted().calls == ended + 1, "{ended} of {:?}", counted());
    assert!(counted().cpu_ns >= ended * 100, "{:?}", counted());
}

#[test]
fn a_long_call_in_a_row_is_preempted_for_who_comes() {
    for _ in 0..20 {
        let world = World::new(1, Duration::from_millis(1));
        let (calls, comes) = (world.tenant("calls"), world.tenant("comes"));
        let fib = world.function(&comes, "fib");
        let row = InARow::begin(&world, &calls, "spin");
        row.wait_for(100);
        row.goes_on.store(false, Ordering::Relaxed);
        for _ in 0..5 {
            let report = world.run(&comes, &fib, &[Value::I32(FIB.0)]);
            assert_eq!(report.results, [Value::I32(FIB.1)]);
        }
        // All are counted but the one that does not end: it gives the worker up too.
        while world.scheduler.stats()[0].1.calls < row.ended.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn each_call_is_told_its_end_though_the_scheduler_goes() {
    /// Calls until it is refused, and counts what was taken and what was told.
    #[derive(Clone)]
    struct Chain {
        submitter: Submitter,
        tenant: Tenant,
        fib: Function,
        taken: Arc<AtomicUsize>,
        told: Arc<AtomicUsize>,
    }
    impl Chain {
        fn next(self) {
            let Self { submitter, tenant, fib, taken, .. } = &self;
            let again = self.clone();
            let end = move |_| {
                again.told.fetch_add(1, Ordering::Relaxed);
                again.next();
            };
            if submitter.submit(tenant, call(fib, &[Value::I32(1)]), end).is_ok() {
                taken.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    for _ in 0..20 {
        let world = World::new(2, SHORT);
        let tenant = world.tenant("t");
        let fib = world.function(&tenant, "fib");
        let (taken, told) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let submitter = world.scheduler.submitter();
        let chain = Chain { submitter, tenant, fib, taken, told };
        (0..4).for_each(|_| chain.clone().next());
        let (taken, told) = (Arc::clone(&chain.taken), Arc::clone(&chain.told));
        drop(chain);
        while told.load(Ordering::Relaxed) < 100 {
            std::thread::yield_now();
        }
        drop(world);
        assert_eq!(taken.load(Ordering::Relaxed), told.load(Ordering::Relaxed));
    }
}

#[test]
fn compact_slots_check_every_access() {
    let pool = Pool { slots: Slots::Compact, memory_bytes: 1 << 20, ..Pool::default() };
    let world = World { admission: Admission::new(Policy::pooled(pool)), ..World::new(2, SHORT) };
    let tenant = world.tenant("t");
    let function = world.function(&tenant, "spin-then-trap");
    let report = world.run(&tenant, &function, &[Value::I32(1_000)]);
    assert!(matches!(&report.outcome, Outcome::Trap(text) if text.contains("out of bounds")));
}

/// Reads from standard input until its end, and says how much there was.
const READER: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "read") (param i32) (result i32)
    (loop $more
      (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 100))
      (if (call $fd_read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)) (then unreachable))
      (local.set 0 (i32.add (local.get 0) (i32.load (i32.const 8))))
      (br_if $more (i32.load (i32.const 8))))
    (local.get 0)))"#;

/// A world with one worker, and a call that waits on the pipe whose other end is returned.
fn waiting(limits: CallLimits) -> (World, mpsc::Receiver<Report>, std::io::PipeWriter) {
    let world = World::new(1, Duration::from_millis(1));
    let tenant = world.tenant("reader");
    let caps = caps_with("");
    let table = table(&caps);
    let admitted =
        world.admission.admit_for("reader", READER.as_bytes(), &caps, Metering::Time).unwrap();
    let read = admitted.function("reader", "read").unwrap();
    let refused = world.scheduler.run(&tenant, Call::new(&read, &[Value::I32(0)], self::limits()));
    assert!(matches!(refused, Err(SubmitError::NeedsCapabilities)));
    let (stdin, feed) = std::io::pipe().unwrap();
    let spec = Spec { stdin: Some(OwnedFd::from(stdin)), ..Spec::default() };
    let attached = world.scheduler.attach(&table, "isolate", spec).unwrap();
    let (send, ended) = mpsc::channel();
    let call = Call::new(&read, &[Value::I32(0)], limits).with(attached);
    world.scheduler.submit(&tenant, call, move |report| drop(send.send(report))).unwrap();
    (world, ended, feed)
}

#[test]
fn a_call_that_waits_frees_its_worker() {
    let (world, ended, mut feed) = waiting(limits());
    let other = world.tenant("other");
    let fib = world.function(&other, "fib");
    for written in 0..5 {
        assert_eq!(world.run(&other, &fib, &[Value::I32(FIB.0)]).results, [Value::I32(FIB.1)]);
        assert!(ended.try_recv().is_err(), "it ended after {written} bytes");
        feed.write_all(b"x").unwrap();
    }
    drop(feed);
    assert_eq!(ended.recv().unwrap().results, [Value::I32(5)]);
}

#[test]
fn a_deadline_and_the_schedulers_end_reach_a_call_that_waits() {
    let (_world, ended, _feed) = waiting(soon());
    assert_eq!(ended.recv().unwrap().outcome, Outcome::Ended(CancelReason::Deadline));
    let (world, ended, _feed) = waiting(limits());
    // It has had its turn and waits.
    while world.scheduler.stats()[0].1.cpu_ns == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(world);
    assert_eq!(ended.recv().unwrap().outcome, Outcome::Ended(CancelReason::Stopped));
}
