//! From a request's arguments to a call, and from its report to an answer.

use crate::http::Answer;
use crate::streams::{self, Output};
use exocell_exovisor::{
    AdmissionError, Admitted, Call, CallLimits, Function, Layers, Models, Network, Outcome, Report,
    Scheduler, Spec, SubmitError, Tenant, Value,
};
use exocell_xgate::{CapabilitySet, Table, format_bytes};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For a module whose table names no deadline.
const DEADLINE: Duration = Duration::from_secs(10);
const HOLDER: &str = "isolate";
const TABLE_SLOTS: u32 = 64;
/// What a command's module exports.
const COMMAND: &str = "_start";
/// Of what standard output may be long, standard error is one of so many parts.
const STDERR_PART: usize = 16;

/// What a module is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// One of its functions, with what the body says: a JSON array of numbers.
    Call { function: String, body: Vec<u8> },
    /// It is run as a command with these arguments, of which the first is its name.
    Run {
        args: Vec<String>,
        stdin: Vec<u8>,
        /// Whether all of the answer is to be JSON.
        as_json: bool,
    },
}

/// What became of it.
#[derive(Debug)]
pub(crate) struct Done {
    pub answer: Answer,
    /// `None` if no call began.
    pub spent: Option<Spent>,
}

/// What a call came to, for its tenant's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spent {
    pub ending: Ending,
    pub cpu_ns: u64,
    pub preemptions: u64,
}

/// How a call ended, as far as figures tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Exited = 1,
    Trap = 2,
    Limit = 3,
    Ended = 4,
}

impl Ending {
    pub fn of(code: u8) -> Option<Self> {
        [Self::Exited, Self::Trap, Self::Limit, Self::Ended]
            .into_iter()
            .find(|one| *one as u8 == code)
    }
}

impl From<Answer> for Done {
    fn from(answer: Answer) -> Self {
        Self { answer, spent: None }
    }
}

impl Spent {
    fn of(report: &Report) -> Self {
        let ending = match report.outcome {
            Outcome::Exited(_) => Ending::Exited,
            Outcome::Trap(_) => Ending::Trap,
            Outcome::OutOfMemory { .. } | Outcome::OutOfFuel => Ending::Limit,
            Outcome::Ended(_) => Ending::Ended,
        };
        let cpu_ns = u64::try_from(report.cpu.as_nanos()).unwrap_or(u64::MAX);
        Self { ending, cpu_ns, preemptions: report.preemptions }
    }
}

/// Who waits for it; called once, on whatever thread.
pub(crate) type Told = Box<dyn FnOnce(Done) + Send>;

/// A module that can be called.
pub(crate) struct Module {
    tenant: Tenant,
    admitted: Admitted,
    caps: CapabilitySet,
    table: Table,
    shared: Shared,
    /// What its calls reach others through; it goes with the module.
    network: Option<Arc<dyn Network>>,
    /// Those of its functions that were called.
    found: Mutex<HashMap<String, Function>>,
}

/// What a call finds that those before it left: a tenant's changes, and models.
#[derive(Clone)]
pub(crate) struct Shared {
    pub layers: Layers,
    pub models: Models,
}

/// How long a call may take; the service waits no longer for its answer.
pub fn deadline(caps: &CapabilitySet) -> Duration {
    caps.deadline().unwrap_or(DEADLINE)
}

impl Module {
    /// # Errors
    /// The table's, if it grants too much of something.
    pub fn new(
        admitted: Admitted,
        tenant: Tenant,
        caps: CapabilitySet,
        shared: Shared,
        network: Option<Arc<dyn Network>>,
    ) -> Result<Self, AdmissionError> {
        let mut table = Table::new(TABLE_SLOTS);
        caps.install(&mut table, HOLDER)
            .map_err(|error| AdmissionError::Engine { message: error.to_string() })?;
        Ok(Self { tenant, admitted, caps, table, shared, network, found: Mutex::default() })
    }

    fn function(&self, name: &str) -> Result<Function, AdmissionError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = found.get(name) {
            return Ok(function.clone());
        }
        let function = self.admitted.function(self.tenant.name(), name)?;
        found.insert(name.to_owned(), function.clone());
        Ok(function)
    }

    fn limits(&self) -> CallLimits {
        CallLimits {
            memory_bytes: self.caps.memory_bytes().unwrap_or(0),
            deadline: Instant::now().checked_add(deadline(&self.caps)),
            cpu_ns: None,
            threads: self.caps.process_max().unwrap_or(1).saturating_sub(1),
            fuel: self.caps.fuel().unwrap_or(0),
        }
    }

    /// Begins `work`, of whose standard output `output_bytes` are answered, and tells `told` when
    /// it is done; at once if it cannot begin.
    pub fn begin(&self, scheduler: &Scheduler, work: Work, output_bytes: usize, told: Told) {
        match work {
            Work::Call { function, body } => self.call(scheduler, &function, &body, told),
            Work::Run { args, stdin, as_json } => {
                self.run(scheduler, Run { args, stdin, as_json, output_bytes }, told);
            }
        }
    }

    fn call(&self, scheduler: &Scheduler, name: &str, body: &[u8], told: Told) {
        let prepared = || -> Result<_, Answer> {
            let function = self.function(name);
            let function = function.map_err(|error| Answer::error(404, &error.to_string()))?;
            let numbers: Vec<serde_json::Number> =
                serde_json::from_slice(body).map_err(|error| {
                    Answer::error(400, &format!("the body is no array of numbers: {error}"))
                })?;
            let arguments = function.parse(&numbers.iter().map(text).collect::<Vec<_>>());
            let arguments = arguments.map_err(|error| Answer::error(400, &error.to_string()))?;
            Ok((function, arguments))
        };
        match prepared() {
            Ok((function, arguments)) => {
                self.submit(scheduler, &function, &arguments, Spec::default(), told, called);
            }
            Err(refused) => told(refused.into()),
        }
    }

    fn run(&self, scheduler: &Scheduler, run: Run, told: Told) {
        let Ok(function) = self.admitted.function(self.tenant.name(), COMMAND) else {
            let refused = "this module is no command: it exports no `_start`";
            return told(Answer::error(404, refused).into());
        };
        match run.opened() {
            Ok((spec, stdout, stderr)) => {
                let answer = move |report: &Report| match (stdout.written(), stderr.written()) {
                    (Ok(stdout), Ok(stderr)) => ran(report, stdout, &stderr.0, &run),
                    (Err(error), _) | (_, Err(error)) => no_streams(&error),
                };
                self.submit(scheduler, &function, &[], spec, told, answer);
            }
            Err(error) => told(no_streams(&error).into()),
        }
    }

    /// Queues a call; `answer` makes something of its report.
    fn submit(
        &self,
        scheduler: &Scheduler,
        function: &Function,
        arguments: &[Value],
        spec: Spec,
        told: Told,
        answer: impl FnOnce(&Report) -> Answer + Send + 'static,
    ) {
        let mut call = Call::new(function, arguments, self.limits());
        if function.uses_host() {
            let Shared { layers, models } = self.shared.clone();
            let spec = Spec { layers, models, network: self.network.clone(), ..spec };
            call = match scheduler.attach(&self.table, HOLDER, spec) {
                Ok(attached) => call.with(attached),
                Err(error) => return told(Answer::error(500, &error.to_string()).into()),
            };
        }
        // Who is told of a call that is not taken is the one who would be told of its end.
        let told = Arc::new(Mutex::new(Some(told)));
        let teller = Arc::clone(&told);
        let tell = move |done: Done| {
            let told = teller.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(told) = told {
                told(done);
            }
        };
        let done = move |report: Report| {
            let spent = Some(Spent::of(&report));
            tell(Done { answer: answer(&report), spent });
        };
        if let Err(error) = scheduler.submit(&self.tenant, call, done) {
            let status = if matches!(error, SubmitError::Full { .. }) { 429 } else { 400 };
            let told = told.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(told) = told {
                told(Answer::error(status, &error.to_string()).into());
            }
        }
    }
}

fn no_streams(error: &io::Error) -> Answer {
    Answer::error(500, &format!("no streams: {error}"))
}

/// What a client wants a command to be run with.
struct Run {
    args: Vec<String>,
    stdin: Vec<u8>,
    /// Of standard output, in bytes.
    output_bytes: usize,
    /// Whether all of the answer is to be JSON.
    as_json: bool,
}

impl Run {
    fn opened(&self) -> io::Result<(Spec, Output, Output)> {
        let stdout = Output::new(self.output_bytes)?;
        let stderr = Output::new(self.output_bytes / STDERR_PART)?;
        let spec = Spec {
            args: self.args.clone(),
            stdin: Some(streams::input(&self.stdin)?),
            stdout: Some(stdout.end()?),
            stderr: Some(stderr.end()?),
            ..Spec::default()
        };
        Ok((spec, stdout, stderr))
    }
}

fn text(number: &serde_json::Number) -> String {
    number.to_string()
}

fn outcome(outcome: &Outcome) -> Json {
    match outcome {
        Outcome::Exited(code) => json!({ "exited": code }),
        Outcome::Trap(why) => json!({ "trap": why }),
        Outcome::OutOfMemory { limit } => json!({ "out_of_memory": format_bytes(*limit) }),
        Outcome::OutOfFuel => json!("out_of_fuel"),
        Outcome::Ended(cause) => json!({ "ended": format!("{cause:?}").to_lowercase() }),
    }
}

fn cpu_us(report: &Report) -> f64 {
    report.cpu.as_nanos() as f64 / 1e3
}

fn called(report: &Report) -> Answer {
    let results: Vec<Json> = report.results.iter().map(|value| json(*value)).collect();
    let (outcome, cpu_us) = (outcome(&report.outcome), cpu_us(report));
    Answer::json(200, &json!({ "outcome": outcome, "results": results, "cpu_us": cpu_us }))
}

/// The output of a command that succeeded as it is, and of one that failed with all there is to
/// say about it.
fn ran(report: &Report, (stdout, is_all): (Vec<u8>, bool), stderr: &[u8], run: &Run) -> Answer {
    if !is_all {
        let most = format_bytes(run.output_bytes as u64);
        return Answer::error(500, &format!("the command wrote more than {most}"));
    }
    let succeeded = report.outcome == Outcome::Exited(0);
    if succeeded && !run.as_json {
        return Answer::output(stdout);
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let told = json!({
        "outcome": outcome(&report.outcome), "stdout": text(&stdout), "stderr": text(stderr),
        "cpu_us": cpu_us(report),
    });
    Answer::json(if succeeded { 200 } else { 500 }, &told)
}

/// Infinities and NaN, which JSON has no numbers for, are text.
fn json(value: Value) -> Json {
    let float = |value: f64, text: String| match serde_json::Number::from_f64(value) {
        Some(number) => Json::Number(number),
        None => Json::String(text),
    };
    match value {
        Value::I32(value) => json!(value),
        Value::I64(value) => json!(value),
        Value::F32(value) => float(f64::from(value), value.to_string()),
        Value::F64(value) => float(value, value.to_string()),
    }
}
