//! How long one tenant's short calls take, alone and beside tenants that do their worst.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority, Report,
    Scheduler, SchedulerConfig, Submitter, Tenant, Value,
};
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

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: OURS.to_owned(), why: why.to_string() }
}

/// 99 of 100 calls took no longer: alone, beside each attacker, beside all of them, in turn; one
/// sample a round.
pub fn measure(options: &Options) -> Result<Vec<Row>, BenchError> {
    let all = &guests::ATTACKS[..];
    let mut settings = vec![("none", &all[..0])];
    settings.extend(all.chunks(1).filter_map(|one| Some((one.first()?.0, one))));
    settings.push(("all", all));
    let mut samples = vec![Vec::new(); settings.len()];
    for _ in 0..options.rounds {
        for ((_, attackers), samples) in settings.iter().zip(&mut samples) {
            samples.push(p99_ns(round(attackers)?)?);
        }
    }
    let row = |((name, attackers), samples): (&(&str, &[Attack]), &Vec<f64>)| {
        let subject = if attackers.is_empty() { "exocell-alone" } else { "exocell-attacked" };
        let params = [("calls", CALLS.to_string()), ("attackers", (*name).to_owned())];
        Row::of(format!("call_p99_{name}"), subject, Unit::Ns, samples, &params)
    };
    Ok(settings.iter().zip(&samples).filter_map(row).collect())
}

/// Name and module.
type Attack = (&'static str, &'static str);

fn p99_ns(mut times: Vec<Duration>) -> Result<f64, BenchError> {
    times.sort_unstable();
    let at = times.len() * 99 / 100;
    times.get(at).map(|time| time.as_nanos() as f64).ok_or_else(|| failed("no call was made"))
}

/// From each call's submission to its end. One processor is left for the caller: under a
/// real-time priority attackers would keep it from calling for ever.
fn round(attackers: &[Attack]) -> Result<Vec<Duration>, BenchError> {
    let config = SchedulerConfig::default();
    let workers = config.workers.saturating_sub(1).max(1);
    let scheduler = Scheduler::new(&SchedulerConfig { workers, ..config }).map_err(failed)?;
    let admission = Admission::new(Policy::pooled(Pool::default()));
    let function = admit(&admission, GOOD, guests::SFIB)?;
    let tenant = scheduler.tenant(GOOD, 1, Priority::Normal);
    for (name, text) in attackers {
        let function = admit(&admission, name, text)?;
        let attacker = Attacker {
            submitter: scheduler.submitter(),
            tenant: scheduler.tenant(name, 1, Priority::Normal),
            function,
        };
        (0..AT_ONCE).for_each(|_| attacker.clone().attack());
    }
    let (send, ended) = mpsc::channel();
    for _ in 0..CALLS {
        std::thread::sleep(PAUSE);
        let (send, begun) = (send.clone(), Instant::now());
        let done = move |report: Report| drop(send.send((report.outcome, begun.elapsed())));
        let limits = limits(Duration::from_secs(60));
        let call = Call::new(&function, &[Value::I32(ARGUMENT)], limits);
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
    function: Function,
}

impl Attacker {
    /// Calls, and again when that has ended.
    fn attack(self) {
        let call = Call::new(&self.function, &[Value::I32(1)], limits(DEADLINE));
        let again = self.clone();
        // Refused once the scheduler closes, which is the end of it.
        let _ = self.submitter.submit(&self.tenant, call, move |_| again.attack());
    }
}
