//! Memories in slots of each kind: they end where they end, and begin as they should.

use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority, Report,
    Scheduler, SchedulerConfig, Slots, Tenant, Value,
};
use exocell_xgate::CapabilitySet;

const PAGE: i32 = 64 << 10;
/// Pages of the largest memory.
const PAGES_MAX: i32 = 16;

struct World {
    scheduler: Scheduler,
    tenant: Tenant,
    admission: Admission,
}

impl World {
    /// With one slot.
    fn new(slots: Slots) -> Self {
        let memory_bytes = (PAGES_MAX * PAGE) as usize;
        let pool = Pool { isolates: 1, stacks: 1, memory_bytes, slots, ..Pool::default() };
        let scheduler = Scheduler::new(&SchedulerConfig { workers: 1, ..Default::default() });
        let scheduler = scheduler.expect("a scheduler");
        let tenant = scheduler.tenant("t", 1, Priority::Normal);
        Self { scheduler, tenant, admission: Admission::new(Policy::pooled(pool)) }
    }

    fn function(&self, text: &str, metering: Metering) -> Function {
        self.admission
            .admit_for("t", text.as_bytes(), &CapabilitySet::nothing(), metering)
            .and_then(|admitted| admitted.function("t", "run"))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn call(&self, function: &Function, arguments: &[i32]) -> Report {
        let limits = CallLimits {
            memory_bytes: (PAGES_MAX * PAGE) as u64,
            deadline: None,
            cpu_ns: None,
            threads: 0,
            fuel: 10_000_000,
        };
        let arguments: Vec<Value> = arguments.iter().copied().map(Value::I32).collect();
        self.scheduler.run(&self.tenant, Call::new(function, &arguments, limits)).unwrap()
    }
}

/// A memory that grows by some pages, then one access at an address; `limits` are its pages.
fn access(limits: &str, access: &str) -> String {
    format!(
        "(module (memory {limits}) (func (export \"run\") (param $pages i32) (param $at i32)
          (drop (memory.grow (local.get $pages))) {access}))"
    )
}

/// Accesses at `$at`, and how many bytes from there on they reach.
const ACCESSES: [(&str, i32); 6] = [
    ("(drop (i32.load8_u (local.get $at)))", 1),
    ("(i32.store (local.get $at) (i32.const 7))", 4),
    ("(i64.store offset=8 (local.get $at) (i64.const 7))", 16),
    ("(drop (v128.load offset=65536 (local.get $at)))", 65552),
    ("(drop (i32.atomic.rmw.add (local.get $at) (i32.const 1)))", 4),
    ("(memory.fill (local.get $at) (i32.const 7) (i32.const 100))", 100),
];

#[test]
fn accesses_beyond_the_end_of_a_memory_trap() {
    for slots in [Slots::Guarded, Slots::Compact] {
        let world = World::new(slots);
        for (limits, pages) in [("0", 0), ("0 4", 0), ("1", 1), ("1 16", 1), ("2 2", 2)] {
            for (text, reach) in ACCESSES {
                for metering in Metering::ALL {
                    let function = world.function(&access(limits, text), metering);
                    for grown in [0, 1] {
                        let fixed = limits == "2 2";
                        let end = (pages + if fixed { 0 } else { grown }) * PAGE;
                        for at in [end - reach, end - reach + 4, end, end + PAGE, -16, -400] {
                            let inside = at >= 0 && at <= end - reach;
                            let outcome = world.call(&function, &[grown, at]).outcome;
                            let right = match &outcome {
                                Outcome::Exited(0) => inside,
                                Outcome::Trap(why) => !inside && why.contains("out of bounds"),
                                _ => false,
                            };
                            assert!(
                                right,
                                "{slots:?} {metering:?} {limits} {text} {at} {outcome:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_one_call_writes_the_next_one_does_not_find() {
    let write = access("1", "(i32.store (local.get $at) (i32.const 7))");
    // The sum of all words of the largest memory.
    let sum = format!(
        "(module (memory 0) (func (export \"run\") (result i32) (local $at i32) (local $sum i32)
          (drop (memory.grow (i32.const {PAGES_MAX})))
          (loop $more
            (local.set $sum (i32.add (local.get $sum) (i32.load (local.get $at))))
            (br_if $more (i32.lt_u
              (local.tee $at (i32.add (local.get $at) (i32.const 4)))
              (i32.const {}))))
          (local.get $sum)))",
        PAGES_MAX * PAGE
    );
    for slots in [Slots::Guarded, Slots::Compact] {
        let world = World::new(slots);
        let [write, sum] = [&write, &sum].map(|text| world.function(text, Metering::Time));
        for at in (0..PAGES_MAX * PAGE).step_by(4096) {
            // Most of these addresses are beyond its end.
            for grown in [0, 3] {
                world.call(&write, &[grown, at]);
            }
        }
        let report = world.call(&sum, &[]);
        assert_eq!((report.outcome, report.results), (Outcome::Exited(0), vec![Value::I32(0)]));
    }
}
