//! Whole programs of a tenant, run under limits beside a neighbour's calls.

mod author;

use crate::Input;
use author::Signature;
use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority, Scheduler,
    SchedulerConfig, Tenant, Value,
};
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
/// Bytes of a seed, and how many seeds.
const SEED_BYTES: usize = 600;
const SEEDS: u64 = 8;

struct World {
    admission: Admission,
    scheduler: Scheduler,
    bad: Tenant,
    good: Tenant,
    fib: Function,
}

impl World {
    fn shared() -> &'static Self {
        static WORLD: OnceLock<World> = OnceLock::new();
        WORLD.get_or_init(Self::new)
    }

    fn new() -> Self {
        let pool = Pool { isolates: 64, stacks: 64, ..Pool::default() };
        let admission = Admission::new(Policy::pooled(pool));
        let config = SchedulerConfig { workers: 2, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        let [bad, good] = [BAD, GOOD].map(|name| scheduler.tenant(name, 1, Priority::Normal));
        let caps = CapabilitySet::nothing();
        let fib = admission
            .admit_for(GOOD, FIB.as_bytes(), &caps, Metering::Time)
            .and_then(|admitted| admitted.function(GOOD, "fib"))
            .expect("the neighbour's module is admitted");
        Self { admission, scheduler, bad, good, fib }
    }
}

fn limits(cpu: Duration) -> CallLimits {
    CallLimits {
        memory_bytes: 1 << 20,
        deadline: Some(Instant::now() + Duration::from_secs(60)),
        cpu_ns: u64::try_from(cpu.as_nanos()).ok(),
        threads: 0,
        fuel: 100_000,
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

/// A program written after these bytes: all of its functions are called at once, and the
/// neighbour's beside them.
pub fn run(bytes: &[u8]) {
    for outcome in outcomes(bytes) {
        let host = matches!(&outcome, Outcome::Trap(why) if why.contains("host function failed"));
        assert!(!host, "a program reached into the host");
    }
}

fn outcomes(bytes: &[u8]) -> Vec<Outcome> {
    let world = World::shared();
    let mut input = Input::new(bytes);
    let metering = Metering::ALL[usize::from(input.u8()) % Metering::ALL.len()];
    let (text, signatures) = author::program(&mut input);
    let caps = CapabilitySet::nothing();
    let admitted = world
        .admission
        .admit_for(BAD, text.as_bytes(), &caps, metering)
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (send, ended) = mpsc::channel();
    for (index, Signature { parameters, .. }) in signatures.iter().enumerate() {
        let function = admitted.function(BAD, &index.to_string()).expect("it is exported");
        let arguments: Vec<Value> = parameters.chars().map(|ty| argument(ty, &mut input)).collect();
        let call = Call::new(&function, &arguments, limits(Duration::from_millis(2)));
        let send = send.clone();
        let done = move |report: exocell_exovisor::Report| drop(send.send(report.outcome));
        world.scheduler.submit(&world.bad, call, done).expect("it is taken");
    }
    drop(send);
    let call = Call::new(&world.fib, &[Value::I32(PAIR.0)], limits(Duration::from_secs(60)));
    let good = world.scheduler.run(&world.good, call).expect("it is taken");
    assert_eq!((good.outcome, good.results), (Outcome::Exited(0), vec![Value::I32(PAIR.1)]));
    ended.iter().collect()
}

/// Entropy, the same every time.
pub fn seeds() -> Vec<Vec<u8>> {
    (1..=SEEDS).map(|seed| entropy(seed, SEED_BYTES)).collect()
}

/// xorshift64* (S. Vigna, 2014).
fn entropy(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    };
    (0..count).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many modules; the environment may ask for more of them.
    fn count() -> u64 {
        let asked = std::env::var("EXOCELL_RANDOM_MODULES").ok();
        asked.map_or(200, |count| count.parse().expect("a number of modules"))
    }

    #[test]
    fn programs_end_in_all_ways() {
        let ways = [
            |outcome: &Outcome| matches!(outcome, Outcome::Exited(0)),
            |outcome: &Outcome| matches!(outcome, Outcome::Trap(_)),
            |outcome: &Outcome| !matches!(outcome, Outcome::Exited(_) | Outcome::Trap(_)),
        ];
        let mut ended = [0; 3];
        for seed in 0..count() {
            for outcome in outcomes(&entropy(seed + 1_000, SEED_BYTES)) {
                let way = ways.iter().position(|way| way(&outcome));
                ended[way.unwrap_or_else(|| panic!("{outcome:?}"))] += 1;
            }
        }
        println!("returned, trapped, ended: {ended:?}");
        assert!(ended.iter().all(|ended| *ended > 10), "{ended:?}");
    }
}
