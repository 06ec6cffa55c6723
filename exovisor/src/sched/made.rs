//! How a call is made: a store, an instance and a future, in a room where it can be dormant.

use crate::call::{self, CallLimits, Function};
use crate::dormant::Fiber;
use crate::isolate::Outcome;
use crate::reuse::{Made, Unmade};
use crate::rooms::{Room, Trace};
use crate::sched::Work;
use crate::sched::task::{Plan, ended, over, trap};
use crate::teardown;

impl Plan {
    /// Of a module without threads. It has a room of its own where calls can be dormant.
    pub fn start_alone(self) -> Fiber {
        let usual = self.function.usual_trace();
        let room = if usual.is_some() { Room::take() } else { None };
        let Some(mut room) = room else {
            return self.make().map_or_else(Unmade::over, Fiber::new);
        };
        let (made, trace) = room.furnish(|| self.make());
        match made {
            Ok(work) => Fiber::furnished(work, room, Some(trace) == usual),
            Err(unmade) => unmade.over(),
        }
    }

    /// The store, the instance and the call, which has not begun.
    fn make(self) -> Result<Work, Unmade> {
        let Self { function, arguments, state, fuel, .. } = self;
        let mut made = Made::of(&function.module, state, fuel)?;
        Ok(Box::pin(async move {
            let Made { store, instance, known } = &mut made;
            let entries = known.as_mut().map(|known| &mut known.entries);
            let result = call::run(&function, instance, store, entries, &arguments).await;
            let ended = ended(store.data(), result);
            let is_new = function.module.reuse.is_some()
                && matches!(ended.0, Outcome::Exited(_))
                && made.reset(&function.module).await;
            let left = if is_new { made.keep(&function.module) } else { Some(made) };
            if let Some(Made { mut store, instance, .. }) = left {
                teardown::give_back(&function.module, &instance, &mut store).await;
            }
            ended
        }))
    }
}

impl Unmade {
    /// What it means for the call.
    pub fn outcome(self) -> Outcome {
        match &self.store {
            Some(store) => call::outcome(store.data(), &self.error),
            None => trap(&self.error),
        }
    }

    fn over(self) -> Fiber {
        over(self.outcome())
    }
}

impl Function {
    /// What calls of the module allocate in their rooms, all of it theirs alone; `None` where
    /// calls are never dormant, or it is not so.
    fn usual_trace(&self) -> Option<Trace> {
        let module = &self.module;
        module.host.compact.then(|| *module.usual_trace.get_or_init(|| self.try_room())).flatten()
    }

    /// Makes a call twice and drops it. What the engine makes once, it makes the first time.
    fn try_room(&self) -> Option<Trace> {
        let mut usual = None;
        for _ in 0..2 {
            let mut room = Room::take()?;
            let plan = self.plan();
            let (made, trace) = room.furnish(|| plan.make());
            let was_made = made.is_ok();
            drop(made);
            usual = (was_made && room.is_empty()).then_some(trace);
        }
        usual
    }

    /// Of a call that does not run.
    fn plan(&self) -> Plan {
        let (memory_bytes, fuel) = (u64::MAX, u64::MAX);
        let limits = CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads: 0, fuel };
        let state = call::state(self, &limits, None);
        Plan { function: self.clone(), arguments: Vec::new(), state, fuel, team: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admission;
    use crate::arena;
    use crate::call::Value;
    use crate::policy::{Metering, Policy, Pool, Slots};
    use crate::sched::{Call, Priority, Scheduler, SchedulerConfig};
    use exocell_xgate::CapabilitySet;
    use std::time::{Duration, Instant};

    fn admission() -> Admission {
        let pool = Pool {
            isolates: 200,
            stacks: 200,
            memory_bytes: 1 << 20,
            slots: Slots::Compact,
            ..Pool::default()
        };
        Admission::new(Policy::pooled(pool))
    }

    fn function(admission: &Admission, text: &str, metering: Metering) -> Function {
        let caps = CapabilitySet::nothing();
        let admitted = admission.admit_for("t", text.as_bytes(), &caps, metering).unwrap();
        admitted.function("t", "run").unwrap()
    }

    /// A module of each kind that instances differ by.
    const MODULES: [&str; 5] = [
        r#"(module (func (export "run")))"#,
        r#"(module (memory 2) (data (i32.const 70000) "first content") (func (export "run")))"#,
        r#"(module (table 9 funcref) (elem (i32.const 1) $f $f) (func $f (export "run")))"#,
        r#"(module (import "env" "malloc" (func $m (param i32) (result i32)))
          (import "env" "nothing has this name" (func)) (memory 1) (func (export "run")))"#,
        r#"(module (global (mut i64) (i64.const 7)) (memory 1)
          (data (offset (i32.add (i32.const 4) (i32.const 8))) "x") (func $f)
          (func (export "run")) (start $f))"#,
    ];

    #[test]
    fn what_a_call_allocates_is_its_own_and_always_the_same() {
        for text in MODULES {
            for metering in Metering::ALL {
                let function = function(&admission(), text, metering);
                let usual = function.usual_trace();
                assert!(usual.is_some(), "{text} {metering:?}");
                let made: Vec<_> = (0..20)
                    .map(|_| {
                        let (mut room, plan) = (Room::take().unwrap(), function.plan());
                        let (work, trace) = room.furnish(|| plan.make().ok().unwrap());
                        assert_eq!(Some(trace), usual, "{text} {metering:?}");
                        (work, room)
                    })
                    .collect();
                for (work, room) in made {
                    assert!(!room.is_empty());
                    drop(work);
                    assert!(room.is_empty(), "{text} {metering:?}");
                }
            }
        }
    }

    #[test]
    fn a_call_that_cannot_be_made_leaves_its_room() {
        let text = r#"(module (memory 1) (data (i32.const 65536) "x") (func (export "run")))"#;
        let function = function(&admission(), text, Metering::Time);
        assert!(function.usual_trace().is_none());
        let (mut room, plan) = (Room::take().unwrap(), function.plan());
        let (made, _) = room.furnish(|| plan.make());
        assert!(made.is_err() && !room.is_empty());
        let fiber = made.err().unwrap().over();
        assert!(room.is_empty());
        drop(fiber);
    }

    #[test]
    fn rooms_of_dormant_calls_are_the_hosts() {
        const CALLS: usize = 64;
        let slice = Duration::from_micros(50);
        let config = SchedulerConfig { workers: 1, slice, awake_max: 0, ..Default::default() };
        let mut scheduler = Scheduler::new(&config).unwrap();
        let tenant = scheduler.tenant("t", 1, Priority::Normal);
        let text = r#"(module (memory 1) (func (export "run") (param i32)
          (i32.store (local.get 0) (i32.const 7)) (loop $l (br $l))))"#;
        let function = function(&admission(), text, Metering::Time);
        let limits =
            CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
        let call = |limits| Call::new(&function, &[Value::I32(8)], limits);
        for _ in 0..CALLS {
            scheduler.submit(&tenant, call(limits.clone()), |_| {}).unwrap();
        }
        // Calls of one tenant begin in order: when this one is over, all have had a turn.
        let last = CallLimits { deadline: Some(Instant::now()), ..limits };
        scheduler.run(&tenant, call(last)).unwrap();
        scheduler.shared.close();
        scheduler.workers.drain(..).for_each(|worker| worker.join().unwrap());
        let tasks = scheduler.shared.drain();
        let is_packed = |fiber: &mut Fiber| {
            let room = fiber.room().unwrap();
            !room.is_empty() && arena::resident(&room, usize::MAX).next().is_none()
        };
        let packed = tasks.iter().filter(|task| task.body().fiber().is_some_and(is_packed)).count();
        // The last ones that were preempted wait until they are sixteen.
        assert!(packed > CALLS / 2, "{packed} of {}", tasks.len());
        tasks.iter().for_each(|task| task.abandon());
    }
}
