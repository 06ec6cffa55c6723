//! How a call is made: a store, an instance and a future, in an arena where it can be hibernated.

use crate::exec::call::{self, CallLimits, Function};
use crate::exec::outcome::Outcome;
use crate::exec::reclaim;
use crate::exec::reuse::{InstantiateError, PooledInstance};
use crate::memory::call_arena::{CallArena, Fingerprint};
use crate::sched::task::{Fiber, Plan, Work, ended, over};

impl Plan {
    /// Of a module without threads. It has an arena of its own where calls can be hibernated.
    pub fn start_alone(self) -> Fiber {
        let usual = self.function.usual_fingerprint();
        let arena = if usual.is_some() { CallArena::take() } else { None };
        let Some(mut arena) = arena else {
            return self.make().map_or_else(never_began, Fiber::new);
        };
        let (made, fingerprint) = arena.scope(|| self.make());
        match made {
            Ok(work) => Fiber::in_arena(work, arena, Some(fingerprint) == usual),
            Err(failed) => never_began(failed),
        }
    }

    /// The store, the instance and the call, which has not begun.
    fn make(self) -> Result<Work, InstantiateError> {
        let Self { function, arguments, state, fuel, .. } = self;
        let mut made = PooledInstance::of(&function.module, state, fuel)?;
        Ok(Box::pin(async move {
            let PooledInstance { store, instance, reset_info } = &mut made;
            let entries = reset_info.as_mut().map(|reset_info| &mut reset_info.entries);
            let result = call::run(&function, instance, store, entries, &arguments).await;
            let ended = ended(store.data(), result);
            let is_new = function.module.reuse.is_some()
                && matches!(ended.0, Outcome::Exited(_))
                && made.reset(&function.module).await;
            let left = if is_new { made.keep(&function.module) } else { Some(made) };
            if let Some(PooledInstance { mut store, instance, .. }) = left {
                reclaim::decommit(&function.module, &instance, &mut store).await;
            }
            ended
        }))
    }
}

/// A call that could not be made.
fn never_began(failed: InstantiateError) -> Fiber {
    over(failed.outcome())
}

impl Function {
    /// What calls of the module allocate in their arenas, all of it theirs alone; `None` where
    /// calls are never hibernated, or it is not so.
    fn usual_fingerprint(&self) -> Option<Fingerprint> {
        let module = &self.module;
        module
            .host
            .compact
            .then(|| *module.usual_fingerprint.get_or_init(|| self.try_arena()))
            .flatten()
    }

    /// Makes a call twice and drops it. What the engine makes once, it makes the first time.
    fn try_arena(&self) -> Option<Fingerprint> {
        let mut usual = None;
        for _ in 0..2 {
            let mut arena = CallArena::take()?;
            let plan = self.plan();
            let (made, fingerprint) = arena.scope(|| plan.make());
            let was_made = made.is_ok();
            drop(made);
            usual = (was_made && arena.is_empty()).then_some(fingerprint);
        }
        usual
    }

    /// Of a call that does not run.
    fn plan(&self) -> Plan {
        let (memory_bytes, fuel) = (u64::MAX, u64::MAX);
        let limits = CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads: 0, fuel };
        let state = call::state(self, &limits, None);
        Plan { function: self.clone(), arguments: Vec::new(), state, fuel, group: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::call::Value;
    use crate::memory::compact_pool;
    use crate::policy::{Metering, Policy, Pool, Slots};
    use crate::program::Admission;
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
                let usual = function.usual_fingerprint();
                assert!(usual.is_some(), "{text} {metering:?}");
                let made: Vec<_> = (0..20)
                    .map(|_| {
                        let (mut arena, plan) = (CallArena::take().unwrap(), function.plan());
                        let (work, fingerprint) = arena.scope(|| plan.make().ok().unwrap());
                        assert_eq!(Some(fingerprint), usual, "{text} {metering:?}");
                        (work, arena)
                    })
                    .collect();
                for (work, arena) in made {
                    assert!(!arena.is_empty());
                    drop(work);
                    assert!(arena.is_empty(), "{text} {metering:?}");
                }
            }
        }
    }

    #[test]
    fn a_call_that_cannot_be_made_leaves_its_room() {
        let text = r#"(module (memory 1) (data (i32.const 65536) "x") (func (export "run")))"#;
        let function = function(&admission(), text, Metering::Time);
        assert!(function.usual_fingerprint().is_none());
        let (mut arena, plan) = (CallArena::take().unwrap(), function.plan());
        let (made, _) = arena.scope(|| plan.make());
        assert!(made.is_err() && !arena.is_empty());
        let fiber = never_began(made.err().unwrap());
        assert!(arena.is_empty());
        drop(fiber);
    }

    #[test]
    fn arenas_of_hibernated_calls_are_the_hosts() {
        const CALLS: usize = 64;
        let slice = Duration::from_micros(50);
        let config = SchedulerConfig { workers: 1, slice, resident_max: 0, ..Default::default() };
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
        // Calls of one tenant begin in order: when this one is over, all have had a time slice.
        let last = CallLimits { deadline: Some(Instant::now()), ..limits };
        scheduler.run(&tenant, call(last)).unwrap();
        scheduler.shared.close();
        scheduler.workers.drain(..).for_each(|worker| worker.join().unwrap());
        let tasks = scheduler.shared.drain();
        let is_packed = |fiber: &mut Fiber| {
            let arena = fiber.arena().unwrap();
            !arena.is_empty() && compact_pool::resident(&arena, usize::MAX).next().is_none()
        };
        let packed = tasks.iter().filter(|task| task.body().fiber().is_some_and(is_packed)).count();
        // The last ones that were preempted wait until they are sixteen.
        assert!(packed > CALLS / 2, "{packed} of {}", tasks.len());
        tasks.iter().for_each(|task| task.abandon());
    }
}
