//! Many isolates in one process: what the host counts of them. Alone in its process, because
//! mappings are the process's.

use exocell_exovisor::{
    Admission, Call, CallLimits, Metering, Policy, Pool, Priority, Scheduler, SchedulerConfig,
    Slots, Value,
};
use exocell_xgate::CapabilitySet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const COUNT: usize = 500;

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Whether guard pages need no mappings here (Linux 6.13).
fn guards_are_markers() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    version >= (6, 13)
}

#[test]
fn isolates_in_compact_slots_need_no_mappings_of_their_own() {
    let pool = Pool {
        isolates: 1_000,
        stacks: 1_000,
        memory_bytes: 64 << 10,
        slots: Slots::Compact,
        ..Pool::default()
    };
    let config = SchedulerConfig {
        slice: Duration::from_micros(50),
        begun_max: COUNT + 1,
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::new(&config).unwrap();
    let tenant = scheduler.tenant("t", 1, Priority::Normal);
    let function = Admission::new(Policy::pooled(pool))
        .admit_for("t", ENDLESS.as_bytes(), &CapabilitySet::nothing(), Metering::Time)
        .unwrap()
        .function("t", "run")
        .unwrap();
    let limits =
        CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
    let call = |limits| Call::new(&function, &[Value::I32(7)], limits);
    let (send, ended) = mpsc::channel();
    let before = mappings();
    for _ in 0..COUNT {
        let send = send.clone();
        let done = move |report| drop(send.send(report));
        scheduler.submit(&tenant, call(limits.clone()), done).unwrap();
    }
    // Calls of one tenant begin in order: when this one has ended, all have begun.
    let last = CallLimits { deadline: Some(Instant::now()), ..limits };
    scheduler.run(&tenant, call(last)).unwrap();
    let more = mappings().saturating_sub(before);
    assert!(ended.try_recv().is_err(), "all are alive");
    let most = if guards_are_markers() { COUNT / 5 } else { 3 * COUNT };
    assert!(more < most, "{COUNT} isolates took {more} mappings");
    drop((scheduler, send));
    assert_eq!(ended.iter().count(), COUNT);
}

/// Writes to its memory, and never ends.
const ENDLESS: &str = r#"(module (memory 1) (func (export "run") (param i32) (result i32)
  (i32.store (i32.const 128) (local.get 0)) (loop $l (br $l)) (i32.const 0)))"#;
