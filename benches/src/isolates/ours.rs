//! The exovisor under the same load: N tenants, each with one call at a time.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use exocell_exovisor::{
    Admission, Call, CallLimits, CancelHandle, CancelReason, Function, Metering, Outcome, Policy,
    Pool, Priority, Report, Scheduler, SchedulerConfig, Submitter, Tenant, Value,
};
use exocell_xgate::CapabilitySet;

use super::guests;
use crate::BenchError;

/// A scheduler, and tenants with a function each.
pub struct Ours {
    scheduler: Scheduler,
    function: Function,
    spin: Function,
    tenants: Vec<Tenant>,
}

/// The owner of all modules here.
const OWNER: &str = "bench";
/// Longer than any measurement; it is there because deadlines are part of the cost.
const DEADLINE: Duration = Duration::from_secs(600);

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: "exocell".to_owned(), why: why.to_string() }
}

impl Ours {
    /// Admits `text`, whose function `run` is called.
    pub fn new(
        text: &str,
        metering: Metering,
        tenants: usize,
        workers: usize,
        slice: Duration,
    ) -> Result<Self, BenchError> {
        Self::with(text, metering, tenants, workers, slice, |_| {})
    }

    /// The same with the code that others make of `text`: recursion is not unrolled.
    pub fn as_written(
        text: &str,
        metering: Metering,
        tenants: usize,
        workers: usize,
        slice: Duration,
    ) -> Result<Self, BenchError> {
        Self::with(text, metering, tenants, workers, slice, |policy| {
            policy.inline_recursion = false
        })
    }

    /// The same with another policy.
    pub fn with(
        text: &str,
        metering: Metering,
        tenants: usize,
        workers: usize,
        slice: Duration,
        change: impl FnOnce(&mut Policy),
    ) -> Result<Self, BenchError> {
        // Only calls that have begun hold an isolate: one a worker, and those preempted.
        let isolates = u32::try_from(tenants + workers + 16).map_err(failed)?;
        let pool = Pool { isolates, stacks: isolates, ..Pool::default() };
        let config = SchedulerConfig { workers, slice, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).map_err(failed)?;
        let mut policy = Policy::pooled(pool);
        change(&mut policy);
        let admission = Admission::new(policy);
        let admit = |text: &str| {
            admission
                .admit_for(OWNER, text.as_bytes(), &CapabilitySet::nothing(), metering)
                .and_then(|admitted| admitted.function(OWNER, "run"))
                .map_err(failed)
        };
        let (function, spin) = (admit(text)?, admit(guests::SPIN)?);
        let tenant = |_| scheduler.tenant(OWNER, 1, Priority::Normal);
        let tenants = (0..tenants).map(tenant).collect();
        Ok(Self { scheduler, function, spin, tenants })
    }

    /// `calls` calls, spread over the tenants, each with a deadline.
    pub fn serve(&self, calls: u64, argument: i32) -> Result<(), BenchError> {
        let load = Arc::new(Load {
            left: AtomicI64::new(i64::try_from(calls).map_err(failed)?),
            submitter: self.scheduler.submitter(),
            function: self.function.clone(),
            argument,
        });
        let (send, ended) = mpsc::channel();
        for tenant in &self.tenants {
            let chain =
                Chain { load: Arc::clone(&load), tenant: tenant.clone(), failed: send.clone() };
            next(&Arc::new(chain));
        }
        drop(send);
        // Each chain of calls drops its sender at its end.
        match ended.recv() {
            Ok(why) => Err(failed(why)),
            Err(mpsc::RecvError) => Ok(()),
        }
    }

    /// One call of the first tenant, and its report.
    pub fn call(&self, argument: i32) -> Result<Report, BenchError> {
        let tenant = self.tenants.first().ok_or_else(|| failed("there is no tenant"))?;
        let report = self.scheduler.run(tenant, call(&self.function, argument, DEADLINE));
        let report = report.map_err(failed)?;
        match report.outcome {
            Outcome::Exited(_) => Ok(report),
            other => Err(failed(format!("{other:?}"))),
        }
    }

    /// Keeps the CPU wanted by another tenant until it is dropped.
    pub fn rival(&self) -> Result<Rival, BenchError> {
        let tenant = self.tenants.get(1).ok_or_else(|| failed("there is no second tenant"))?;
        let call = call(&self.spin, 0, DEADLINE);
        let cancel = self.scheduler.submit(tenant, call, |_| {}).map_err(failed)?;
        Ok(Rival(cancel))
    }

    /// Endless calls of tenants with these weights, for a time.
    pub fn spin_for(
        &self,
        weights: &[u32],
        priority: Priority,
        span: Duration,
    ) -> Result<Vec<Report>, BenchError> {
        let ended: Vec<mpsc::Receiver<Report>> = weights
            .iter()
            .map(|weight| {
                let tenant = self.scheduler.tenant(OWNER, *weight, priority);
                let (send, ended) = mpsc::channel();
                let done = move |report| drop(send.send(report));
                self.scheduler.submit(&tenant, call(&self.spin, 0, span), done)?;
                Ok(ended)
            })
            .collect::<Result<_, exocell_exovisor::SubmitError>>()
            .map_err(failed)?;
        ended.iter().map(|ended| ended.recv().map_err(failed)).collect()
    }
}

/// Ends the rival's call when it goes.
pub struct Rival(CancelHandle);

impl Drop for Rival {
    fn drop(&mut self) {
        self.0.request(CancelReason::Stopped);
    }
}

struct Load {
    left: AtomicI64,
    submitter: Submitter,
    function: Function,
    argument: i32,
}

fn call(function: &Function, argument: i32, deadline: Duration) -> Call {
    let limits = CallLimits {
        memory_bytes: 64 << 20,
        deadline: Some(Instant::now() + deadline),
        cpu_ns: None,
        fuel: u64::MAX,
        threads: 0,
    };
    Call::new(function, &[Value::I32(argument)], limits)
}

/// Calls of one tenant, one after the other. What a call needs is here and not cloned for each:
/// counters that all tenants share would cost as much as the measured call.
struct Chain {
    load: Arc<Load>,
    tenant: Tenant,
    failed: mpsc::Sender<String>,
}

/// Submits the next call of a chain, whose end submits the one after it.
fn next(chain: &Arc<Chain>) {
    let Load { left, submitter, function, argument } = &*chain.load;
    if left.fetch_sub(1, Ordering::Relaxed) <= 0 {
        return;
    }
    let again = Arc::clone(chain);
    let done = move |report: Report| match report.outcome {
        Outcome::Exited(_) => next(&again),
        other => drop(again.failed.send(format!("{other:?}"))),
    };
    let call = call(function, *argument, DEADLINE);
    if let Err(error) = submitter.submit(&chain.tenant, call, done) {
        drop(chain.failed.send(error.to_string()));
    }
}
