//! Many isolates in one process: what the host counts of them. Alone in its process, because
//! mappings are the process's.

use exocell_exovisor::{
    Admission, Call, CallLimits, Metering, Policy, Pool, Priority, Scheduler, SchedulerConfig,
    Slots, Value,
};
use exocell_xgate::CapabilitySet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;

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

/// What is resident of the mappings that hold all stacks, all memories and all stores, in bytes:
/// no others are as large.
fn slots_bytes() -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let kilobytes = |line: &str, name: &str| {
        let number = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
        number.parse::<usize>().ok()
    };
    let mut large = false;
    let mut resident = 0;
    for line in smaps.lines() {
        if let Some(size) = kilobytes(line, "Size:") {
            large = size >= 48 << 10;
        }
        resident += kilobytes(line, "Rss:").filter(|_| large).unwrap_or(0);
    }
    resident << 10
}

/// Mappings that isolates take while all of them live, of which `resident_max` wait for their next
/// turn without being hibernated, and what is resident of their slots.
fn cost_of_all(resident_max: usize) -> (usize, usize) {
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
        resident_max,
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
    let (after, resident) = (mappings(), slots_bytes());
    assert!(ended.try_recv().is_err(), "all are alive");
    drop((scheduler, send));
    assert_eq!(ended.iter().count(), COUNT);
    (after.saturating_sub(before), resident)
}

#[test]
fn isolates_in_compact_slots_need_no_mappings_of_their_own() {
    let (mappings, hibernated) = cost_of_all(0);
    let most = if guards_are_markers() { COUNT / 5 } else { 3 * COUNT };
    assert!(mappings < most, "{COUNT} isolates took {mappings} mappings");
    let (_, resident) = cost_of_all(usize::MAX);
    // A page of stack, a page of memory and two of the store each, but where a first turn is still
    // to write. Some of the others have yet to rest together.
    assert!(resident > COUNT * 15_000, "{resident} bytes");
    assert!(hibernated < resident / 3, "hibernated {hibernated}, resident {resident} bytes");
}

/// Writes to its memory, and never ends.
const ENDLESS: &str = r#"(module (memory 1) (func (export "run") (param i32) (result i32)
  (i32.store (i32.const 128) (local.get 0)) (loop $l (br $l)) (i32.const 0)))"#;
