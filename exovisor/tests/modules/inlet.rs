//! Calls that come in at a descriptor, where the threads that run calls wait.

use exocell_exovisor::{
    Admission, Call, CallLimits, CancelReason, Function, Metering, Outcome, Policy, Pool, Priority,
    Report, Scheduler, SchedulerConfig, Tenant, Value,
};
use exocell_xgate::CapabilitySet;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MODULE: &str = r#"(module
  (func (export "twice") (param i32) (result i32) (i32.add (local.get 0) (local.get 0)))
  (func (export "spin") (param i32) (result i32) (loop $again (br $again)) (i32.const 0)))"#;

/// What comes in, a byte a call.
const TWICE: u8 = b't';
const SPIN: u8 = b's';
/// One that ends at a deadline.
const SPIN_A_WHILE: u8 = b'w';

struct World {
    scheduler: Scheduler,
    tenant: Tenant,
    twice: Function,
    spin: Function,
}

fn call(function: &Function, deadline: Option<Instant>) -> Call {
    let limits = CallLimits { memory_bytes: 1 << 20, deadline, cpu_ns: None, threads: 0, fuel: 0 };
    Call::new(function, &[Value::I32(21)], limits)
}

impl World {
    fn new(workers: usize) -> Self {
        let config = SchedulerConfig { workers, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).unwrap();
        let tenant = scheduler.tenant("t", 1, Priority::Normal);
        let admission = Admission::new(Policy::pooled(Pool::default()));
        let caps = CapabilitySet::nothing();
        let admitted = admission.admit_for("t", MODULE.as_bytes(), &caps, Metering::Time).unwrap();
        let function = |name| admitted.function("t", name).unwrap();
        Self { twice: function("twice"), spin: function("spin"), scheduler, tenant }
    }

    /// What `body` does while calls come in from the socket that it is given, and reports go out.
    fn attended<T>(&self, body: impl FnOnce(UnixStream, &mpsc::Receiver<Report>) -> T) -> T {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let from = theirs.try_clone().unwrap();
        let (send, reports) = mpsc::channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let (submitter, tenant) = (self.scheduler.submitter(), self.tenant.clone());
        let (twice, spin, ended) = (self.twice.clone(), self.spin.clone(), Arc::clone(&is_over));
        let take = move || {
            let mut bytes = [0; 64];
            let count = match (&theirs).read(&mut bytes) {
                Ok(0) => {
                    ended.store(true, Ordering::Release);
                    0
                }
                Ok(count) => count,
                // Another thread was first.
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    0
                }
            };
            for byte in &bytes[..count] {
                let soon = || Instant::now() + Duration::from_millis(50);
                let call = match *byte {
                    TWICE => call(&twice, None),
                    SPIN => call(&spin, None),
                    _ => call(&spin, Some(soon())),
                };
                let send = send.clone();
                submitter.submit(&tenant, call, move |report| drop(send.send(report))).unwrap();
            }
        };
        std::thread::scope(|scope| {
            let attends = scope.spawn(|| {
                let is_over = || is_over.load(Ordering::Acquire);
                self.scheduler.attend(from.as_fd(), Box::new(take), is_over)
            });
            let result = body(ours, &reports);
            attends.join().unwrap().unwrap();
            result
        })
    }
}

#[track_caller]
fn is_twice(report: &Report) {
    assert_eq!(
        (&report.outcome, &report.results[..]),
        (&Outcome::Exited(0), &[Value::I32(42)][..])
    );
}

#[test]
fn calls_that_come_in_one_by_one_or_together_are_run() {
    for workers in [1, 3] {
        World::new(workers).attended(|mut ours, reports| {
            for _ in 0..100 {
                ours.write_all(&[TWICE]).unwrap();
                is_twice(&reports.recv().unwrap());
            }
            ours.write_all(&[TWICE; 500]).unwrap();
            reports.iter().take(500).for_each(|report| is_twice(&report));
        });
    }
}

#[test]
fn a_call_comes_in_while_all_workers_are_busy() {
    for workers in [1, 3] {
        let world = World::new(workers);
        world.attended(|mut ours, reports| {
            ours.write_all(&[SPIN; 4]).unwrap();
            for _ in 0..20 {
                ours.write_all(&[TWICE]).unwrap();
                is_twice(&reports.recv().unwrap());
            }
            ours.write_all(&[SPIN_A_WHILE]).unwrap();
            assert_eq!(reports.recv().unwrap().outcome, Outcome::Ended(CancelReason::Deadline));
            // What spins has its end with the scheduler.
        });
    }
}

#[test]
fn a_deadline_ends_a_call_that_nobody_waits_behind() {
    World::new(2).attended(|mut ours, reports| {
        for _ in 0..3 {
            ours.write_all(&[SPIN_A_WHILE]).unwrap();
            assert_eq!(reports.recv().unwrap().outcome, Outcome::Ended(CancelReason::Deadline));
        }
    });
}

#[test]
fn who_waits_for_calls_to_come_in_hears_of_others_too() {
    let world = World::new(2);
    world.attended(|mut ours, reports| {
        for _ in 0..100 {
            let call = call(&world.twice, None);
            is_twice(&world.scheduler.run(&world.tenant, call).unwrap());
            ours.write_all(&[TWICE]).unwrap();
            is_twice(&reports.recv().unwrap());
        }
    });
}

#[test]
fn there_is_one_place_where_calls_come_in() {
    let world = World::new(1);
    world.attended(|mut ours, reports| {
        ours.write_all(&[TWICE]).unwrap();
        is_twice(&reports.recv().unwrap());
        let (other, _) = UnixStream::pair().unwrap();
        let refused = world.scheduler.attend(other.as_fd(), Box::new(|| ()), || true);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::AlreadyExists);
    });
}
