//! A tenant that does nothing wrong, and whose calls must all succeed.

use exocell_exovisor::{
    Admission, Admitted, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority,
    Scheduler, SchedulerConfig, Tenant, Value,
};
use exocell_xgate::CapabilitySet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const FIB: &str = r#"(module
  (memory 1) (data (i32.const 8) "\07")
  (func $fib (export "fib") (param i32) (result i32)
    (if (result i32) (i32.lt_u (local.get 0) (i32.const 2))
      (then (local.get 0))
      (else (i32.add
        (call $fib (i32.sub (local.get 0) (i32.const 1)))
        (call $fib (i32.sub (local.get 0) (i32.const 2)))))))
  ;; Its memory is as it was at the beginning of each call.
  (func (export "check") (param i32) (result i32)
    (if (i32.ne (i32.load (i32.const 8)) (i32.const 7)) (then unreachable))
    (i32.store (i32.const 8) (i32.const 1))
    (call $fib (local.get 0))))"#;
/// An argument and the result for it.
const PAIR: (i32, i32) = (17, 1597);
/// Calls that have to succeed beside each misdeed.
const CALLS: u64 = 25;
const WORKERS: usize = 2;

/// The neighbour, and the scheduler it shares.
pub struct Neighbour {
    pub scheduler: Scheduler,
    pub admission: Admission,
    /// Its module.
    pub admitted: Admitted,
    pub fib: Function,
    check: Function,
    tenant: Tenant,
}

/// Ends the neighbour's thread when the test ends, in whatever way.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Neighbour {
    pub fn new() -> Self {
        let pool = Pool { isolates: 600, stacks: 600, ..Pool::default() };
        let admission = Admission::new(Policy::pooled(pool));
        let config = SchedulerConfig { workers: WORKERS, begun_max: 100, ..Default::default() };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        let tenant = scheduler.tenant("good", 1, Priority::Normal);
        let admitted = admission
            .admit_for("good", FIB.as_bytes(), &CapabilitySet::nothing(), Metering::Time)
            .expect("it is admitted");
        let [fib, check] =
            ["fib", "check"].map(|name| admitted.function("good", name).expect("it is exported"));
        Self { scheduler, admission, admitted, fib, check, tenant }
    }

    pub fn tenant(&self, name: &str) -> Tenant {
        self.scheduler.tenant(name, 1, Priority::Normal)
    }

    pub fn function(&self, owner: &str, text: &str, caps: &CapabilitySet, name: &str) -> Function {
        self.admission
            .admit_for(owner, text.as_bytes(), caps, Metering::Time)
            .and_then(|admitted| admitted.function(owner, name))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Repeats `misdeed` until the neighbour has had its calls, each of which succeeded.
    pub fn beside(&self, mut misdeed: impl FnMut()) {
        let (had, over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let neighbour = scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    self.call();
                    had.fetch_add(1, Ordering::Release);
                }
            });
            loop {
                misdeed();
                if neighbour.is_finished() || had.load(Ordering::Acquire) >= CALLS {
                    break;
                }
            }
            over.store(true, Ordering::Release);
            if let Err(panic) = neighbour.join() {
                std::panic::resume_unwind(panic);
            }
        });
        // All is as before: nothing was left behind that takes workers or slots.
        (0..CALLS).for_each(|_| self.call());
    }

    fn call(&self) {
        let limits =
            CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
        let call = Call::new(&self.check, &[Value::I32(PAIR.0)], limits);
        let report = self.scheduler.run(&self.tenant, call).expect("it is taken");
        assert_eq!(
            (report.outcome, report.results),
            (Outcome::Exited(0), vec![Value::I32(PAIR.1)])
        );
    }
}

/// A tenant for each module, with its function `run`.
pub fn crowd(
    neighbour: &Neighbour,
    texts: &[String],
    caps: &CapabilitySet,
) -> Vec<(Tenant, Function)> {
    let one = |(index, text): (usize, &String)| {
        let name = format!("bad {index}");
        (neighbour.tenant(&name), neighbour.function(&name, text, caps, "run"))
    };
    texts.iter().enumerate().map(one).collect()
}
