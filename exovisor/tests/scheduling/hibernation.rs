//! Calls that are packed while they wait for their next turn.

use exocell_exovisor::{
    Admission, Call, CallLimits, CancelReason, Function, Metering, Outcome, Policy, Pool, Priority,
    Report, Scheduler, SchedulerConfig, Slots, SubmitError, Tenant, Value,
};
use exocell_xgate::CapabilitySet;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

const CALLS: i32 = 40;

/// `run(n)` fills memory that packs well, memory that does not, and leaves some alone; goes deep
/// down the stack again and again with live values on it; and answers with a sum over it all.
const MODULE: &str = r#"(module (memory 4 20)
  (global $seed (mut i32) (i32.const 1))
  (func $random (result i32)
    (global.set $seed (i32.add (i32.mul (global.get $seed) (i32.const 1664525)) (i32.const 1013904223)))
    (global.get $seed))
  (func $down (param $depth i32) (param $f f64) (result f64) (local $g f64) (local $i i32)
    (local.set $g (f64.mul (local.get $f) (f64.const 1.25)))
    (local.set $i (i32.const 300))
    (loop $more (br_if $more (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
    (if (result f64) (local.get $depth)
      (then (f64.add (local.get $g)
        (call $down (i32.sub (local.get $depth) (i32.const 1)) (f64.sub (local.get $g) (f64.const 3)))))
      (else (local.get $f))))
  (func (export "run") (param $n i32) (result i32) (local $i i32) (local $sum i32)
    (global.set $seed (local.get $n))
    (drop (memory.grow (i32.const 1)))
    (loop $sparse
      (i32.store (local.get $i) (i32.add (local.get $i) (local.get $n)))
      (br_if $sparse (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1000))) (i32.const 65000))))
    (local.set $i (i32.const 0x10000))
    (loop $dense
      (i32.store (local.get $i) (call $random))
      (br_if $dense (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 4))) (i32.const 0x14000))))
    (i32.store (i32.const 0x4fffc) (local.get $n))
    (local.set $i (i32.const 60))
    (loop $again
      (local.set $sum (i32.add (i32.mul (local.get $sum) (i32.const 31))
        (i32.trunc_sat_f64_s (call $down (i32.rem_u (i32.mul (local.get $i) (i32.const 7)) (i32.const 300))
          (f64.convert_i32_u (local.get $n))))))
      (br_if $again (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
    (loop $read
      (local.set $sum (i32.add (i32.mul (local.get $sum) (i32.const 31)) (i32.load (local.get $i))))
      (br_if $read (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 4))) (i32.const 0x50000))))
    (local.get $sum))
  (func (export "spin") (param i32) (result i32)
    (i32.store (i32.const 128) (local.get 0)) (loop $l (br $l)) (i32.const 0)))"#;

struct World {
    scheduler: Scheduler,
    admission: Admission,
    tenant: Tenant,
}

impl World {
    fn new(resident_max: usize) -> Self {
        let pool = Pool {
            isolates: 200,
            stacks: 200,
            memory_bytes: 2 << 20,
            slots: Slots::Compact,
            ..Pool::default()
        };
        let slice = Duration::from_micros(50);
        let config =
            SchedulerConfig { workers: 2, slice, resident_max, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).unwrap();
        let tenant = scheduler.tenant("t", 1, Priority::Normal);
        Self { scheduler, admission: Admission::new(Policy::pooled(pool)), tenant }
    }

    fn function(&self, name: &str) -> Function {
        let caps = CapabilitySet::nothing();
        let admitted = self.admission.admit_for("t", MODULE.as_bytes(), &caps, Metering::Time);
        admitted.unwrap().function("t", name).unwrap()
    }

    /// All calls at once; their reports, in the order of their arguments.
    fn all(&self, name: &str, limits: &CallLimits) -> Vec<Report> {
        let function = self.function(name);
        let submit = |n| self.submit(&function, n, limits.clone()).unwrap();
        let ends: Vec<Receiver<Report>> = (1..=CALLS).map(submit).collect();
        ends.into_iter().map(|end| end.recv().unwrap()).collect()
    }

    fn submit(
        &self,
        function: &Function,
        n: i32,
        limits: CallLimits,
    ) -> Result<Receiver<Report>, SubmitError> {
        let (send, end) = mpsc::channel();
        let call = Call::new(function, &[Value::I32(n)], limits);
        self.scheduler.submit(&self.tenant, call, move |report| drop(send.send(report)))?;
        Ok(end)
    }
}

fn limits() -> CallLimits {
    CallLimits { memory_bytes: 2 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 }
}

#[test]
fn a_call_goes_on_as_if_it_had_not_been_hibernated() {
    let [resident, hibernated] = [usize::MAX, 0].map(|max| World::new(max).all("run", &limits()));
    assert!(hibernated.iter().map(|report| report.preemptions).sum::<u64>() > 40);
    for (resident, hibernated) in resident.iter().zip(&hibernated) {
        assert_eq!((&hibernated.outcome, hibernated.results.len()), (&Outcome::Exited(0), 1));
        assert_eq!(resident.results, hibernated.results);
    }
}

#[test]
fn a_hibernated_call_is_ended_like_any_other() {
    let world = World::new(0);
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let late = world.all("spin", &CallLimits { deadline, ..limits() });
    assert!(late.iter().all(|report| report.outcome == Outcome::Ended(CancelReason::Deadline)));
    let spent = world.all("spin", &CallLimits { cpu_ns: Some(300_000), ..limits() });
    assert!(spent.iter().all(|report| report.outcome == Outcome::Ended(CancelReason::CpuTime)));
}

#[test]
fn the_end_of_the_scheduler_ends_hibernated_calls() {
    let world = World::new(0);
    let spin = world.function("spin");
    let submit = |n| world.submit(&spin, n, limits()).unwrap();
    let ends: Vec<_> = (1..=CALLS).map(submit).collect();
    // Calls of one tenant begin in order: when this one has ended, all have had a turn.
    let last = CallLimits { deadline: Some(Instant::now()), ..limits() };
    world.submit(&spin, 0, last).unwrap().recv().unwrap();
    drop(world);
    for end in ends {
        let report = end.recv().unwrap();
        assert_eq!(report.outcome, Outcome::Ended(CancelReason::Stopped));
        assert!(report.preemptions > 0);
    }
}
