//! Calls in instances that served others.

use super::*;
use crate::exec::call::{CallLimits, Function, Value};
use crate::exec::outcome::Outcome;
use crate::memory::dirty_pages;
use crate::policy::{Metering, Policy, Pool, Slots};
use crate::program::Admission;
use crate::sched::{Call, Priority, Report, Scheduler, SchedulerConfig};
use exocell_xgate::CapabilitySet;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Answers with what it finds, all in one number, and leaves nothing as it was.
const CHANGES: &str = r#"(module (memory 3) (data (i32.const 8) "\01") (data (i32.const 70000) "\02")
  (table 2 funcref) (elem (i32.const 0) $start)
  (global $i (mut i32) (i32.const 4)) (global $l (mut i64) (i64.const 8))
  (global $f (mut f32) (f32.const 16)) (global $d (mut f64) (f64.const 32))
  (global $v (mut v128) (v128.const i32x4 64 0 0 0)) (global $started (mut i32) (i32.const 0))
  (func $start (global.set $started (i32.add (global.get $started) (i32.const 128))))
  (start $start)
  (func (export "run") (param i32) (result i32)
    (local $found i32)
    (local.set $found (i32.add (i32.load8_u (i32.const 8)) (i32.load8_u (i32.const 70000))))
    (local.set $found (i32.add (local.get $found) (i32.load (i32.const 196604))))
    (local.set $found (i32.add (local.get $found) (global.get $i)))
    (local.set $found (i32.add (local.get $found) (i32.wrap_i64 (global.get $l))))
    (local.set $found (i32.add (local.get $found) (i32.trunc_f32_u (global.get $f))))
    (local.set $found (i32.add (local.get $found) (i32.trunc_f64_u (global.get $d))))
    (local.set $found (i32.add (local.get $found) (i32x4.extract_lane 0 (global.get $v))))
    (local.set $found (i32.add (local.get $found) (global.get $started)))
    (i64.store (i32.const 4) (i64.const -1)) (i64.store (i32.const 69996) (i64.const -1))
    (i32.store (i32.const 196604) (i32.const 4096))
    (global.set $i (local.get 0)) (global.set $l (i64.const 3)) (global.set $f (f32.const 3))
    (global.set $d (f64.const 3)) (global.set $v (v128.const i32x4 3 3 3 3))
    (local.get $found)))"#;
const FOUND: i32 = 255;

/// What runs calls, one after the other.
struct Host {
    admission: Admission,
    scheduler: Scheduler,
}

impl Host {
    fn new(pool: Pool) -> Self {
        let config = SchedulerConfig { workers: 1, ..Default::default() };
        let admission = Admission::new(Policy::pooled(pool));
        Self { admission, scheduler: Scheduler::new(&config).unwrap() }
    }

    fn function(&self, text: &str, metering: Metering) -> Function {
        let caps = CapabilitySet::nothing();
        let admitted = self.admission.admit_for("t", text.as_bytes(), &caps, metering).unwrap();
        admitted.function("t", "run").unwrap()
    }

    fn threaded(&self, metering: Metering) -> Function {
        let caps =
            CapabilitySet::parse("version = 1\n[processes]\nmax = 9", Path::new("/")).unwrap();
        let admitted = self.admission.admit_for("t", THREADS.as_bytes(), &caps, metering);
        admitted.unwrap().function("t", "run").unwrap()
    }

    fn call(&self, function: &Function, memory_bytes: u64) -> Report {
        let tenant = self.scheduler.tenant("t", 1, Priority::Normal);
        let limits =
            CallLimits { memory_bytes, deadline: None, cpu_ns: None, threads: 1, fuel: 1_000_000 };
        self.scheduler.run(&tenant, Call::new(function, &[Value::I32(7)], limits)).unwrap()
    }
}

fn kept(function: &Function) -> usize {
    match (&function.module.link, &function.module.reuse) {
        (Link::Threaded(template), _) => template.kept(),
        (_, reuse) => reuse.as_ref().map_or(0, |reuse| reuse.kept.count()),
    }
}

fn count(function: &Function) -> usize {
    function.module.host.instance_cache.count.load(Ordering::Relaxed)
}

/// Whether this host keeps what has a memory that is not small.
fn keeps() -> bool {
    dirty_pages::can_be_found()
}

#[test]
fn a_call_finds_the_instance_as_new_that_another_has_used() {
    let host = Host::new(Pool::default());
    for metering in Metering::ALL {
        let function = host.function(CHANGES, metering);
        for _ in 0..5 {
            let report = host.call(&function, 1 << 20);
            assert_eq!(
                (report.outcome, report.results),
                (Outcome::Exited(0), vec![Value::I32(FOUND)])
            );
            assert_eq!(kept(&function), usize::from(keeps()), "{metering:?}");
        }
    }
}

#[test]
fn others_epochs_do_not_keep_an_instance_from_being_made() {
    let host = Host::new(Pool { kept: 0, ..Pool::default() });
    let text = r#"(module (memory 1) (data (offset (i32.add (i32.const 4) (i32.const 8))) "x")
      (func (export "run") (param i32)))"#;
    let function = host.function(text, Metering::Epoch);
    let engine = &function.module.host.engine;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                engine.increment_epoch();
            }
        });
        let outcomes: Vec<Outcome> =
            (0..2_000).map(|_| host.call(&function, 1 << 20).outcome).collect();
        over.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Exited(0)), "{outcomes:?}");
    });
}

#[test]
fn what_one_worker_kept_serves_another_that_has_none() {
    if !keeps() {
        return;
    }
    let host = Host::new(Pool::default());
    let function = host.function(CHANGES, Metering::Time);
    assert_eq!(host.call(&function, 1 << 20).outcome, Outcome::Exited(0));
    let reuse = function.module.reuse.as_ref().unwrap();
    for worker in [1, 0, 5] {
        set_worker(worker);
        let made = reuse.kept.take().unwrap();
        assert!(reuse.kept.take().is_none());
        assert!(reuse.kept.keep(made).is_none());
        assert_eq!(kept(&function), 1);
    }
}

#[test]
fn what_cannot_be_made_as_new_is_not_kept() {
    let host = Host::new(Pool::default());
    let table = r#"(table 1 funcref) (elem declare func 0)"#;
    for (code, outcome) in [
        ("(drop (memory.grow (i32.const 1)))", Outcome::Exited(0)),
        ("(memory.fill (i32.const 0) (i32.const 1) (i32.const 65537))", Outcome::Exited(0)),
        ("(table.set (i32.const 0) (ref.func 0))", Outcome::Exited(0)),
        ("unreachable", Outcome::Trap("wasm trap: wasm `unreachable` instruction executed".into())),
        ("(loop (br 0))", Outcome::OutOfFuel),
    ] {
        let text =
            format!(r#"(module (memory 2 4) {table} (func (export "run") (param i32) {code}))"#);
        let function = host.function(&text, Metering::Fuel);
        for _ in 0..2 {
            assert_eq!(host.call(&function, 1 << 20).outcome, outcome);
            assert_eq!((kept(&function), count(&function)), (0, 0), "{code}");
        }
    }
    for pool in [
        Pool { slots: Slots::Compact, ..Pool::default() },
        Pool { keep_resident_bytes: 0, ..Pool::default() },
        Pool { kept: 0, ..Pool::default() },
    ] {
        let host = Host::new(Pool { memory_bytes: 1 << 20, isolates: 10, stacks: 10, ..pool });
        let function = host.function(CHANGES, Metering::Time);
        for _ in 0..2 {
            assert_eq!(host.call(&function, 1 << 20).results, [Value::I32(FOUND)]);
            assert_eq!(kept(&function), 0);
        }
    }
}

#[test]
fn a_kept_instance_counts_for_whom_it_serves() {
    let host = Host::new(Pool::default());
    let function = host.function(CHANGES, Metering::Time);
    for memory_bytes in [1 << 20, 3 << 16, 1 << 20] {
        let report = host.call(&function, memory_bytes);
        // Its table counts, too.
        let outcome = match memory_bytes {
            0x3_0000 => Outcome::OutOfMemory { limit: memory_bytes },
            _ => Outcome::Exited(0),
        };
        assert_eq!(report.outcome, outcome);
    }
    let grows = r#"(module (memory 1) (func (export "run") (param i32) (result i32)
      (memory.grow (local.get 0))))"#;
    let function = host.function(grows, Metering::Time);
    for (pages, result) in [(8, 1), (7, -1), (8, 1)] {
        let report = host.call(&function, pages << 16);
        assert_eq!(report.results, [Value::I32(result)], "{pages}");
    }
}

#[test]
fn no_more_are_kept_than_there_is_room_for() {
    if !keeps() {
        return;
    }
    let host = Host::new(Pool { isolates: 4, stacks: 1, kept: 9, ..Pool::default() });
    let functions = [(); 5].map(|()| host.function(CHANGES, Metering::Time));
    for (index, function) in functions.iter().enumerate() {
        assert_eq!(host.call(function, 1 << 20).outcome, Outcome::Exited(0));
        assert_eq!(count(function), (index + 1).min(2));
        assert_eq!(kept(function), 1);
    }
    let all: Vec<usize> = functions.iter().map(kept).collect();
    assert_eq!(all, [0, 0, 0, 1, 1], "the oldest go first");
}

#[test]
fn what_is_kept_is_not_in_the_way_and_goes_with_its_module() {
    if !keeps() {
        return;
    }
    let host = Host::new(Pool { isolates: 2, stacks: 2, kept: 1, ..Pool::default() });
    let [first, second] = [(); 2].map(|()| host.function(CHANGES, Metering::Time));
    assert_eq!(host.call(&first, 1 << 20).outcome, Outcome::Exited(0));
    assert_eq!((kept(&first), count(&second)), (1, 1));
    let limits =
        CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
    let make = || PooledInstance::of(&second.module, call::state(&second, &limits, None), 0);
    let both = [make(), make()];
    assert!(both.iter().all(Result::is_ok));
    assert_eq!((kept(&first), count(&second)), (0, 0));
    assert!(make().is_err());
    drop(both);
    assert_eq!(host.call(&first, 1 << 20).outcome, Outcome::Exited(0));
    assert_eq!(count(&second), 1);
    drop(first);
    assert_eq!(count(&second), 0);
}

/// Starts a thread, waits for it and answers with what its memory began with, as linkers make it.
const THREADS: &str = r#"(module (import "env" "memory" (memory 1 2 shared))
  (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
  (data $first "\ff")
  (func $start
    (if (i32.eqz (i32.atomic.rmw.cmpxchg (i32.const 0) (i32.const 0) (i32.const 1)))
      (then (memory.init $first (i32.const 4) (i32.const 0) (i32.const 1))))
    (data.drop $first))
  (start $start)
  (func (export "wasi_thread_start") (param i32 i32)
    (i32.atomic.store (i32.const 8) (i32.const 1))
    (drop (memory.atomic.notify (i32.const 8) (i32.const 1))))
  (func (export "run") (param i32) (result i32)
    (if (i32.lt_s (call $spawn (i32.const 0)) (i32.const 0)) (then (return (i32.const 0))))
    (drop (memory.atomic.wait32 (i32.const 8) (i32.const 0) (i64.const -1)))
    (i32.load (i32.const 4))))"#;

#[test]
fn instances_of_threads_are_kept_with_their_memory() {
    let host = Host::new(Pool::default());
    for metering in Metering::ALL {
        let function = host.threaded(metering);
        let before = count(&function);
        for _ in 0..5 {
            let report = host.call(&function, 1 << 20);
            assert_eq!(report.results, [Value::I32(FOUND)], "{metering:?} {report:?}");
            // The thread's may still have been in use when the call was over.
            let kept = kept(&function);
            assert!(if keeps() { (1..=2).contains(&kept) } else { kept == 0 }, "{kept}");
            assert_eq!(count(&function), before + kept);
        }
        drop(function);
    }
}

#[test]
fn instances_of_threads_make_room_for_others() {
    if !keeps() {
        return;
    }
    let host = Host::new(Pool { isolates: 2, stacks: 2, kept: 1, ..Pool::default() });
    let [first, second] = [host.threaded(Metering::Time), host.threaded(Metering::Time)];
    for function in [&first, &second, &first] {
        assert_eq!(host.call(function, 1 << 20).results, [Value::I32(FOUND)]);
        assert_eq!((kept(function), count(function)), (1, 1));
    }
    let other = host.function(CHANGES, Metering::Time);
    assert_eq!(host.call(&other, 1 << 20).results, [Value::I32(FOUND)]);
    assert_eq!((kept(&first), kept(&second), kept(&other)), (0, 0, 1));
    assert_eq!(host.call(&second, 1 << 20).results, [Value::I32(FOUND)]);
    drop(second);
    assert_eq!(count(&first), 0);
}
