//! From a request's arguments to a call, and from its report to an answer.

use crate::http::Answer;
use crate::store::metering;
use crate::streams::{self, Output};
use exocell_exovisor::{
    Admission, AdmissionError, Admitted, Call, CallLimits, Function, Layers, Models, Network,
    Outcome, Report, Scheduler, Spec, SubmitError, Tenant, Value,
};
use exocell_xgate::{CapabilitySet, Table, format_bytes};
use serde_json::{Value as Json, json};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For a module whose table names no deadline.
const DEADLINE: Duration = Duration::from_secs(10);
const HOLDER: &str = "isolate";
const TABLE_SLOTS: u32 = 64;
/// What a command's module exports.
const COMMAND: &str = "_start";
/// Of what standard output may be long, standard error is one of so many parts.
const STDERR_PART: usize = 16;

/// A module that can be called.
pub(crate) struct Module {
    pub tenant: Tenant,
    admitted: Admitted,
    caps: CapabilitySet,
    table: Table,
    shared: Shared,
    /// What its calls reach others through; it goes with the module.
    network: Option<Arc<dyn Network>>,
}

/// What a call finds that those before it left: a tenant's changes, and models.
#[derive(Clone)]
pub(crate) struct Shared {
    pub layers: Layers,
    pub models: Models,
}

impl Module {
    pub fn admit(
        admission: &Admission,
        tenant: Tenant,
        bytes: &[u8],
        caps: CapabilitySet,
        shared: Shared,
        network: Option<Arc<dyn Network>>,
    ) -> Result<Self, AdmissionError> {
        let admitted = admission.admit_for(tenant.name(), bytes, &caps, metering(&caps))?;
        let mut table = Table::new(TABLE_SLOTS);
        caps.install(&mut table, HOLDER)
            .map_err(|error| AdmissionError::Engine { message: error.to_string() })?;
        Ok(Self { tenant, admitted, caps, table, shared, network })
    }

    fn limits(&self) -> CallLimits {
        let wait = self.caps.deadline().unwrap_or(DEADLINE);
        CallLimits {
            memory_bytes: self.caps.memory_bytes().unwrap_or(0),
            deadline: Instant::now().checked_add(wait),
            cpu_ns: None,
            threads: self.caps.process_max().unwrap_or(1).saturating_sub(1),
            fuel: self.caps.fuel().unwrap_or(0),
        }
    }

    /// Calls a function with what the body says: a JSON array of numbers.
    pub async fn call(&self, scheduler: &Scheduler, name: &str, body: &[u8]) -> Answer {
        let function = match self.admitted.function(self.tenant.name(), name) {
            Ok(function) => function,
            Err(error) => return Answer::error(404, &error.to_string()),
        };
        let numbers: Vec<serde_json::Number> = match serde_json::from_slice(body) {
            Ok(numbers) => numbers,
            Err(error) => {
                return Answer::error(400, &format!("the body is no array of numbers: {error}"));
            }
        };
        let arguments = match function.parse(&numbers.iter().map(text).collect::<Vec<_>>()) {
            Ok(arguments) => arguments,
            Err(error) => return Answer::error(400, &error.to_string()),
        };
        match self.report(scheduler, &function, &arguments, Spec::default()).await {
            Ok(report) => called(&report),
            Err(refused) => refused,
        }
    }

    /// Runs it as a command with these arguments, of which the first is its name.
    pub async fn run(&self, scheduler: &Scheduler, run: Run<'_>) -> Answer {
        let Ok(function) = self.admitted.function(self.tenant.name(), COMMAND) else {
            return Answer::error(404, "this module is no command: it exports no `_start`");
        };
        let broken = |error: io::Error| Answer::error(500, &format!("no streams: {error}"));
        let (spec, stdout, stderr) = match run.opened() {
            Ok(opened) => opened,
            Err(error) => return broken(error),
        };
        let report = match self.report(scheduler, &function, &[], spec).await {
            Ok(report) => report,
            Err(refused) => return refused,
        };
        match (stdout.written(), stderr.written()) {
            (Ok(stdout), Ok(stderr)) => ran(&report, stdout, &stderr.0, &run),
            (Err(error), _) | (_, Err(error)) => broken(error),
        }
    }

    /// What becomes of a call.
    async fn report(
        &self,
        scheduler: &Scheduler,
        function: &Function,
        arguments: &[Value],
        spec: Spec,
    ) -> Result<Report, Answer> {
        let Shared { layers, models } = self.shared.clone();
        let spec = Spec { layers, models, network: self.network.clone(), ..spec };
        let attached = scheduler
            .attach(&self.table, HOLDER, spec)
            .map_err(|error| Answer::error(500, &error.to_string()))?;
        let call = Call::new(function, arguments, self.limits()).with(attached);
        let (send, ended) = tokio::sync::oneshot::channel();
        // A client that went does not want to be told.
        let done = move |report| drop(send.send(report));
        scheduler.submit(&self.tenant, call, done).map_err(|error| match error {
            SubmitError::Full { .. } => Answer::error(429, &error.to_string()),
            _ => Answer::error(400, &error.to_string()),
        })?;
        ended.await.map_err(|_dropped| Answer::error(500, "the service is shutting down"))
    }
}

/// What a client wants a command to be run with.
pub(crate) struct Run<'a> {
    pub args: Vec<String>,
    pub stdin: &'a [u8],
    /// Of standard output, in bytes.
    pub output_bytes: usize,
    /// Whether all of the answer is to be JSON.
    pub as_json: bool,
}

impl Run<'_> {
    fn opened(&self) -> io::Result<(Spec, Output, Output)> {
        let stdout = Output::new(self.output_bytes)?;
        let stderr = Output::new(self.output_bytes / STDERR_PART)?;
        let spec = Spec {
            args: self.args.clone(),
            stdin: Some(streams::input(self.stdin)?),
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
fn ran(report: &Report, (stdout, is_all): (Vec<u8>, bool), stderr: &[u8], run: &Run<'_>) -> Answer {
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
