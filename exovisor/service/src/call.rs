//! From a request's arguments to a call, and from its report to an answer.

use crate::http::Answer;
use crate::store::metering;
use exocell_exovisor::{
    Admission, AdmissionError, Admitted, Call, CallLimits, Layers, Models, Network, Outcome,
    Report, Scheduler, Spec, SubmitError, Tenant, Value,
};
use exocell_xgate::{CapabilitySet, Table, format_bytes};
use serde_json::{Value as Json, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For a module whose table names no deadline.
const DEADLINE: Duration = Duration::from_secs(10);
const HOLDER: &str = "isolate";
const TABLE_SLOTS: u32 = 64;

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
        let Shared { layers, models } = self.shared.clone();
        let spec = Spec { layers, models, network: self.network.clone(), ..Spec::default() };
        let attached = match scheduler.attach(&self.table, HOLDER, spec) {
            Ok(attached) => attached,
            Err(error) => return Answer::error(500, &error.to_string()),
        };
        let call = Call::new(&function, &arguments, self.limits()).with(attached);
        let (send, ended) = tokio::sync::oneshot::channel();
        // A client that went does not want to be told.
        let done = move |report| drop(send.send(report));
        match scheduler.submit(&self.tenant, call, done) {
            Ok(_stopper) => {}
            Err(error @ SubmitError::Full { .. }) => return Answer::error(429, &error.to_string()),
            Err(error) => return Answer::error(400, &error.to_string()),
        }
        match ended.await {
            Ok(report) => answer(&report),
            Err(_dropped) => Answer::error(500, "the service is shutting down"),
        }
    }
}

fn text(number: &serde_json::Number) -> String {
    number.to_string()
}

fn answer(report: &Report) -> Answer {
    let outcome = match &report.outcome {
        Outcome::Exited(code) => json!({ "exited": code }),
        Outcome::Trap(why) => json!({ "trap": why }),
        Outcome::OutOfMemory { limit } => json!({ "out_of_memory": format_bytes(*limit) }),
        Outcome::OutOfFuel => json!("out_of_fuel"),
        Outcome::Ended(cause) => json!({ "ended": format!("{cause:?}").to_lowercase() }),
    };
    let results: Vec<Json> = report.results.iter().map(|value| json(*value)).collect();
    let cpu_us = report.cpu.as_nanos() as f64 / 1e3;
    Answer::json(200, &json!({ "outcome": outcome, "results": results, "cpu_us": cpu_us }))
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
