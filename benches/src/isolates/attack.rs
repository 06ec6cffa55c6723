//! How long one tenant's short calls take, alone and beside tenants that do their worst.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority, Report,
    Scheduler, SchedulerConfig, Submitter, Tenant, Value,
};
use exocell_random_modules::{FUNCTIONS, entropy, module};
use exocell_xgate::CapabilitySet;

use super::{OURS, guests};
use crate::BenchError;
use crate::options::Options;
use crate::row::{Row, Unit};

const GOOD: &str = "good";
/// fib(20), some 35 us.
const ARGUMENT: i32 = 20;
/// Calls of a round, and the time between two.
const CALLS: usize = 500;
const PAUSE: Duration = Duration::from_millis(1);
/// Calls that each attacker has at once.
const AT_ONCE: usize = 8;
/// What never ends is ended after this.
const DEADLINE: Duration = Duration::from_millis(50);
/// Random modules that one attacker calls in turn, and what each is made of, in bytes.
const RANDOM_MODULES: u64 = 300;
const ENTROPY_BYTES: usize = 2_000;

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: OURS.to_owned(), why: why.to_string() }
}

/// 99 of 100 calls took no longer: alone, beside each attacker, beside all of them, beside one
/// whose modules are random, in turn; one sample a round.
pub fn measure(options: &Options) -> Result<Vec<Row>, BenchError> {
    let admission = Admission::new(Policy::pooled(Pool::default()));
    let good = admit(&admission, GOOD, guests::SFIB)?;
    let attacks = guests::ATTACKS.iter().map(|(name, text)| {
        let function = admit(&admission, name, text)?;
        Ok(Attack { name, calls: vec![(function, vec![Value::I32(1)])] })
    });
    let attacks: Vec<Attack> = attacks.collect::<Result<_, BenchError>>()?;
    let random = [Attack { name: "random", calls: random(&admission) }];
    let mut settings = vec![("none", &attacks[..0])];
    settings.extend(attacks.chunks(1).zip(guests::ATTACKS).map(|(one, (name, _))| (name, one)));
    settings.extend([("all", &attacks[..]), ("random", &random[..])]);
    let mut samples = vec![Vec::new(); settings.len()];
    for _ in 0..options.rounds {
        for ((_, attacks), samples) in settings.iter().zip(&mut samples) {
            samples.push(p99_ns(round(&good, attacks)?)?);
        }
    }
    let row = |((name, attacks), samples): (&(&str, &[Attack]), &Vec<f64>)| {
        let subject = if attacks.is_empty() { "exocell-alone" } else { "exocell-attacked" };
        let params = [("calls", CALLS.to_string()), ("attackers", (*name).to_owned())];
        Row::of(format!("call_p99_{name}"), subject, Unit::Ns, samples, &params)
    };
    Ok(settings.iter().zip(&samples).filter_map(row).collect())
}

/// What a tenant calls, again and again.
struct Attack {
    name: &'static str,
    calls: Vec<(Function, Vec<Value>)>,
}

/// All functions of those random modules that are admitted.
fn random(admission: &Admission) -> Vec<(Function, Vec<Value>)> {
    let caps = CapabilitySet::nothing();
    let admit = |seed| {
        let binary = module(&entropy(seed, ENTROPY_BYTES))?;
        admission.admit_for("random", &binary, &caps, Metering::Time).ok()
    };
    let zero = |ty| match ty {
        'i' => Value::I32(0),
        'I' => Value::I64(0),
        'f' => Value::F32(0.0),
        _ => Value::F64(0.0),
    };
    let mut calls = Vec::new();
    for admitted in (1..=RANDOM_MODULES).filter_map(admit) {
        for (name, parameters) in FUNCTIONS {
            let function = admitted.function("random", name);
            let arguments = parameters.chars().map(zero).collect();
            calls.extend(function.ok().map(|function| (function, arguments)));
        }
    }
    calls
}

fn p99_ns(mut times: Vec<Duration>) -> Result<f64, BenchError> {
    times.sort_unstable();
    let at = times.len() * 99 / 100;
    times.get(at).map(|time| time.as_nanos() as f64).ok_or_else(|| failed("no call was made"))
}

/// From each call's submission to its end. One processor is left for the caller: under a
/// real-time priority attackers would keep it from calling for ever.
fn round(good: &Function, attacks: &[Attack]) -> Result<Vec<Duration>, BenchError> {
    let config = SchedulerConfig::default();
    let workers = config.workers.saturating_sub(1).max(1);
    let scheduler = Scheduler::new(&SchedulerConfig { workers, ..config }).map_err(failed)?;
    let tenant = scheduler.tenant(GOOD, 1, Priority::Normal);
    for Attack { name, calls } in attacks {
        let attacker = Attacker {
            submitter: scheduler.submitter(),
            tenant: scheduler.tenant(name, 1, Priority::Normal),
            calls: Arc::new(calls.clone()),
            next: 0,
        };
        (0..AT_ONCE).for_each(|next| Attacker { next, ..attacker.clone() }.attack());
    }
    let (send, ended) = mpsc::channel();
    for _ in 0..CALLS {
        std::thread::sleep(PAUSE);
        let (send, begun) = (send.clone(), Instant::now());
        let done = move |report: Report| drop(send.send((report.outcome, begun.elapsed())));
        let limits = limits(Duration::from_secs(60));
        let call = Call::new(good, &[Value::I32(ARGUMENT)], limits);
        scheduler.submit(&tenant, call, done).map_err(failed)?;
    }
    drop(send);
    let right = |(outcome, took): (Outcome, Duration)| match outcome {
        Outcome::Exited(0) => Ok(took),
        other => Err(failed(format!("a call that is right ended with {other:?}"))),
    };
    ended.iter().map(right).collect()
}

fn admit(admission: &Admission, owner: &str, text: &str) -> Result<Function, BenchError> {
    let caps = CapabilitySet::parse("version = 1\n[processes]\nmax = 64", "/".as_ref());
    let caps = caps.map_err(failed)?;
    admission
        .admit_for(owner, text.as_bytes(), &caps, Metering::Time)
        .and_then(|admitted| admitted.function(owner, "run"))
        .map_err(failed)
}

fn limits(deadline: Duration) -> CallLimits {
    CallLimits {
        memory_bytes: 16 << 20,
        deadline: Some(Instant::now() + deadline),
        cpu_ns: None,
        threads: 63,
        fuel: 0,
    }
}

#[derive(Clone)]
struct Attacker {
    submitter: Submitter,
    tenant: Tenant,
    calls: Arc<Vec<(Function, Vec<Value>)>>,
    next: usize,
}

impl Attacker {
    /// Calls, and the next one when that has ended.
    fn attack(self) {
        let Some((function, arguments)) = self.calls.get(self.next % self.calls.len().max(1))
        else {
            return;
        };
        let call = Call::new(function, arguments, limits(DEADLINE));
        let again = Self { next: self.next + AT_ONCE, ..self.clone() };
        // Refused once the scheduler closes, which is the end of it.
        let _ = self.submitter.submit(&self.tenant, call, move |_| again.attack());
    }
}
