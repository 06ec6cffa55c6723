//! Whole programs of a tenant, run under limits beside a neighbour's calls.

use crate::Input;
use exocell_exovisor::{
    Admission, AdmissionError, Call, CallLimits, Function, Metering, Outcome, Policy, Pool,
    Priority, Report, Scheduler, SchedulerConfig, Slots, Tenant, Value,
};
use exocell_random_modules::{FUNCTIONS, entropy, module};
use exocell_xgate::CapabilitySet;
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

const BAD: &str = "bad";
const GOOD: &str = "good";
/// What the neighbour calls, with an argument and the result for it.
const FIB: &str = r#"(module (memory 1) (data (i32.const 8) "\07")
  (func $fib (export "fib") (param i32) (result i32)
    (if (i32.ne (i32.load (i32.const 8)) (i32.const 7)) (then unreachable))
    (if (result i32) (i32.lt_u (local.get 0) (i32.const 2)) (then (local.get 0)) (else (i32.add
      (call $fib (i32.sub (local.get 0) (i32.const 1)))
      (call $fib (i32.sub (local.get 0) (i32.const 2))))))))"#;
const PAIR: (i32, i32) = (12, 144);
/// Turns are short, so that most programs are interrupted.
const SLICE: Duration = Duration::from_micros(100);
/// What a call of a program may use.
const CPU: Duration = Duration::from_millis(1);
const FUEL: u64 = 100_000;
const MEMORY_BYTES: u64 = 1 << 20;
/// Bytes of a seed, and how many seeds.
const SEED_BYTES: usize = 2_000;
const SEEDS: u64 = 8;

/// Two tenants on one scheduler, in slots of one kind.
struct World {
    admission: Admission,
    scheduler: Scheduler,
    bad: Tenant,
    good: Tenant,
    fib: Function,
}

impl World {
    fn shared(slots: Slots) -> &'static Self {
        static WORLDS: [OnceLock<World>; 2] = [const { OnceLock::new() }; 2];
        WORLDS[usize::from(slots == Slots::Compact)].get_or_init(|| Self::new(slots))
    }

    /// What is preempted in compact slots is hibernated until its next time slice.
    fn new(slots: Slots) -> Self {
        let pool = Pool { isolates: 64, stacks: 64, slots, ..Pool::default() };
        let admission = Admission::new(Policy::pooled(pool));
        let config = SchedulerConfig {
            workers: 2,
            slice: SLICE,
            resident_max: 0,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        let [bad, good] = [BAD, GOOD].map(|name| scheduler.tenant(name, 1, Priority::Normal));
        let caps = CapabilitySet::nothing();
        let fib = admission
            .admit_for(GOOD, FIB.as_bytes(), &caps, Metering::Time)
            .and_then(|admitted| admitted.function(GOOD, "fib"))
            .expect("the neighbour's module is admitted");
        Self { admission, scheduler, bad, good, fib }
    }

    /// The neighbour's call succeeds, whatever else runs.
    fn neighbours_call(&self) {
        let limits = limits(Duration::from_secs(60));
        let call = Call::new(&self.fib, &[Value::I32(PAIR.0)], limits);
        let good = self.scheduler.run(&self.good, call).expect("it is taken");
        assert_eq!((good.outcome, good.results), (Outcome::Exited(0), vec![Value::I32(PAIR.1)]));
    }
}

fn limits(cpu: Duration) -> CallLimits {
    CallLimits {
        memory_bytes: MEMORY_BYTES,
        deadline: Some(Instant::now() + Duration::from_secs(60)),
        cpu_ns: u64::try_from(cpu.as_nanos()).ok(),
        threads: 0,
        fuel: FUEL,
    }
}

fn argument(ty: char, input: &mut Input<'_>) -> Value {
    match ty {
        'i' => Value::I32(input.u32() as i32),
        'I' => Value::I64(i64::from(input.u32()) << 30),
        'f' => Value::F32(f32::from_bits(input.u32())),
        _ => Value::F64(f64::from(input.u32())),
    }
}

/// A program that these bytes describe: all of its functions are called at once, and the
/// neighbour's beside them. Those that return are called again: whatever ran in their instances
/// before, they answer the same.
pub fn run(bytes: &[u8]) {
    // That it is refused is an answer.
    let _ = outcomes(bytes);
}

/// How the calls ended, or why the module was refused; no calls if the bytes describe none.
fn outcomes(bytes: &[u8]) -> Result<Vec<Outcome>, AdmissionError> {
    let mut input = Input::new(bytes);
    let choice = usize::from(input.u8());
    let metering = Metering::ALL[choice % Metering::ALL.len()];
    let slots = if choice < 128 { Slots::Guarded } else { Slots::Compact };
    let arguments = FUNCTIONS.map(|(_, parameters)| {
        parameters.chars().map(|ty| argument(ty, &mut input)).collect::<Vec<_>>()
    });
    let Some(binary) = module(input.rest()) else { return Ok(Vec::new()) };
    let world = World::shared(slots);
    let caps = CapabilitySet::nothing();
    let admitted = world.admission.admit_for(BAD, &binary, &caps, metering)?;
    let (send, ended) = mpsc::channel();
    let calls = FUNCTIONS.iter().zip(arguments).map(|((name, _), arguments)| {
        (admitted.function(BAD, name).expect("it is exported"), arguments)
    });
    let calls: Vec<_> = calls.collect();
    for (index, (function, arguments)) in calls.iter().enumerate() {
        let send = send.clone();
        let done = move |report: Report| drop(send.send((index, report)));
        let call = Call::new(function, arguments, limits(CPU));
        world.scheduler.submit(&world.bad, call, done).expect("it is taken");
    }
    drop(send);
    world.neighbours_call();
    let ended: Vec<(usize, Report)> = ended.iter().collect();
    assert_eq!(ended.len(), FUNCTIONS.len(), "every call ends");
    for (index, report) in ended.iter().filter(|(_, report)| report.outcome.exit_code() == 0) {
        let (function, arguments) = &calls[*index];
        let call = Call::new(function, arguments, limits(1_000 * CPU));
        let again = world.scheduler.run(&world.bad, call).expect("it is taken");
        // Numbers that are none are not equal to themselves.
        let answer = |report: &Report| format!("{:?} {:?}", report.outcome, report.results);
        assert_eq!(answer(&again), answer(report), "the instance was not as new");
    }
    let outcomes: Vec<Outcome> = ended.into_iter().map(|(_, report)| report.outcome).collect();
    let failed = |outcome: &Outcome| match outcome {
        Outcome::Trap(why) => why.contains("host function failed"),
        _ => false,
    };
    assert!(!outcomes.iter().any(failed), "a program reached into the host");
    Ok(outcomes)
}

/// Entropy, the same every time.
pub fn seeds() -> Vec<Vec<u8>> {
    (1..=SEEDS).map(|seed| entropy(seed, SEED_BYTES)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Threads that admit modules and submit their calls.
    const THREADS: usize = 2;

    /// How many modules; the environment may ask for more of them.
    fn count() -> u64 {
        let asked = std::env::var("EXOCELL_RANDOM_MODULES").ok();
        asked.map_or(10_000, |count| count.parse().expect("a number of modules"))
    }

    /// How many calls ended in which way, and how many modules were refused.
    type Tally = BTreeMap<&'static str, u64>;

    fn way(outcome: &Outcome) -> &'static str {
        match outcome {
            Outcome::Exited(_) => "returned",
            Outcome::Trap(why) if why.contains("call stack exhausted") => "out of stack",
            Outcome::Trap(_) => "trapped",
            Outcome::OutOfMemory { .. } => "out of memory",
            Outcome::OutOfFuel => "out of fuel",
            Outcome::Ended(_) => "out of time",
        }
    }

    /// Runs modules until `next` has come to the end.
    fn tally(next: &AtomicU64, end: u64) -> Tally {
        let mut tally = Tally::new();
        let mut count = |way| *tally.entry(way).or_default() += 1;
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return tally;
            }
            match outcomes(&entropy(seed, SEED_BYTES)) {
                Ok(outcomes) => outcomes.iter().map(way).for_each(&mut count),
                Err(_) => count("refused"),
            }
        }
    }

    #[test]
    fn ten_thousand_random_modules_leave_a_neighbours_calls_alone() {
        let (next, count) = (AtomicU64::new(1), count());
        let mut all = Tally::new();
        std::thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| scope.spawn(|| tally(&next, count + 1)));
            for thread in threads {
                let tally = thread.join().expect("the neighbour's calls succeed");
                tally.into_iter().for_each(|(way, count)| *all.entry(way).or_default() += count);
            }
        });
        println!("{all:?}");
        let refused = all.remove("refused").unwrap_or_default();
        assert!(refused > 0 && refused < count / 10, "{refused} of {count} modules were refused");
        assert_eq!(all.values().sum::<u64>(), (count - refused) * FUNCTIONS.len() as u64);
        let ways =
            ["returned", "trapped", "out of stack", "out of memory", "out of fuel", "out of time"];
        for way in ways {
            let ended = all.get(way).copied().unwrap_or_default();
            assert!(ended > count / 50, "{way}: {ended} calls of {count} modules");
        }
    }
}
