//! SWE-bench evaluations in cells: each instance's patch is applied and its
//! tests are run in a cell of its own, and the files that come of it have the
//! official harness's forms.
//!
//! Read it in this order: [`run`] -> `evaluate` (one instance) -> `cell` (how a
//! cell is driven) -> `grade` and `parsers` (the verdict) -> `report`.
//! `place` says where everything lies.
#![forbid(unsafe_code)]

mod cell;
mod dataset;
mod error;
mod evaluate;
mod failure;
mod grade;
mod parsers;
mod place;
mod plot;
mod report;
mod trace;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

pub use cell::Exocell;
pub use dataset::TextFile;
pub use error::SwebenchError;
pub use report::Report;
pub use trace::{Sample, Usage};

use dataset::{Instance, Predictions};
use evaluate::Evaluator;
use place::{Place, REPORT};

/// A run.
#[derive(Debug, Clone)]
pub struct Options {
    pub exocell: Exocell,
    /// Rows of instances, JSON or a JSON object a line.
    pub dataset: TextFile,
    /// `None` takes the dataset's own patches.
    pub predictions: Option<TextFile>,
    /// Only these instances; empty means all.
    pub only: Vec<String>,
    pub run_id: String,
    pub logs: PathBuf,
    pub report_dir: PathBuf,
    /// Instances at once.
    pub jobs: usize,
    /// For the tests of one instance.
    pub timeout: Duration,
    /// For `exocell run`.
    pub flags: Vec<String>,
}

/// An instance is over.
#[derive(Debug)]
pub struct Finished<'a> {
    pub instance_id: &'a str,
    /// Whether it is resolved, or why nobody knows.
    pub resolved: &'a Result<bool, String>,
    pub took: Duration,
    /// What its cell used; `None` where it got none.
    pub usage: Option<&'a Usage>,
    /// How many are over, of how many.
    pub done: usize,
    pub of: usize,
}

/// Evaluates every instance that has a prediction and no verdict yet; the
/// final report and its file, beside which lies a plot of what its cells used.
///
/// # Errors
/// A file cannot be used. What goes wrong with an instance goes into its log.
pub fn run(
    options: &Options,
    progress: &(dyn Fn(&Finished<'_>) + Sync),
) -> Result<(Report, PathBuf), SwebenchError> {
    dataset::check_name("a run's id", &options.run_id)?;
    let all = dataset::read_dataset(&options.dataset, &[])?;
    let chosen = dataset::read_dataset(&options.dataset, &options.only)?;
    let predictions = match &options.predictions {
        Some(file) => dataset::read_predictions(file)?,
        None => dataset::gold(&chosen),
    };
    let known = |id: &String| all.iter().any(|instance| instance.instance_id == *id);
    if let Some(unknown) = predictions.keys().find(|id| !known(id)) {
        return Err(SwebenchError::UnknownPrediction(unknown.clone()));
    }
    let place = Place::new(&options.logs, &options.run_id);
    let predicted = options.predictions.as_ref().map(|file| &file.path);
    let run = json!({ "dataset": options.dataset.path, "predictions": predicted });
    let _held = place.take(&(run.to_string() + "\n"))?;
    evaluate_all(options, &chosen, &predictions, &place, progress);
    let report = Report::of(&chosen, &predictions, &place);
    let path = write(options, &place, &predictions, &report)?;
    Ok((report, path))
}

/// `jobs` threads take instances until there are no more.
fn evaluate_all(
    options: &Options,
    chosen: &[Instance],
    predictions: &Predictions,
    place: &Place,
    progress: &(dyn Fn(&Finished<'_>) + Sync),
) {
    let pending: Vec<_> = chosen
        .iter()
        .filter_map(|instance| Some((instance, predictions.get(&instance.instance_id)?)))
        .filter(|(_, prediction)| prediction.patch().is_some())
        .filter(|(_, prediction)| !place.of(prediction).join(REPORT).exists())
        .collect();
    let evaluator = Evaluator {
        exocell: options.exocell.clone(),
        run_id: options.run_id.clone(),
        timeout: options.timeout,
        flags: options.flags.clone(),
    };
    let (next, done) = (AtomicUsize::new(0), Mutex::new(0));
    let work = || {
        while let Some((instance, prediction)) = pending.get(next.fetch_add(1, Ordering::Relaxed)) {
            let begun = Instant::now();
            let folder = place.of(prediction);
            let resolved = evaluator.evaluate(instance, prediction, &folder);
            let usage = Usage::read(&folder);
            let mut done = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *done += 1;
            progress(&Finished {
                instance_id: &instance.instance_id,
                resolved: &resolved,
                took: begun.elapsed(),
                usage: usage.as_ref(),
                done: *done,
                of: pending.len(),
            });
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.clamp(1, pending.len().max(1)) {
            scope.spawn(work);
        }
    });
}

fn write(
    options: &Options,
    place: &Place,
    predictions: &Predictions,
    report: &Report,
) -> Result<PathBuf, SwebenchError> {
    let model = predictions.values().next().map_or_else(|| "None".to_owned(), |own| own.model());
    let path = options.report_dir.join(format!("{model}.{}.json", options.run_id));
    let text = serde_json::to_string_pretty(report).unwrap_or_default() + "\n";
    std::fs::create_dir_all(&options.report_dir)
        .and_then(|()| place::write_whole(&path, &text))
        .map_err(SwebenchError::file("write", &path))?;
    let plot = path.with_extension("svg");
    place::write_whole(&plot, &plot::svg(&usages(predictions, place)))
        .map_err(SwebenchError::file("write", &plot))?;
    Ok(path)
}

/// What the cells of a run used, also those of an earlier try, by instance.
fn usages(predictions: &Predictions, place: &Place) -> Vec<(String, Usage)> {
    let usage =
        |(id, prediction): (&String, _)| Some((id.clone(), Usage::read(&place.of(prediction))?));
    predictions.iter().filter_map(usage).collect()
}
