//! One instance: a cell of its image, the patch, the tests, the verdict.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cell::{Cell, Exocell};
use crate::dataset::{Instance, Prediction};
use crate::grade;
use crate::parsers::{self, Parser};
use crate::place::{LOG, Log, REPORT, TEST_OUTPUT, USAGE, write_whole};
use crate::trace::{Usage, Watch};

/// Where the repository lies in an instance's image.
const FOLDER: &str = "/testbed";
const PATCH: &str = "/tmp/patch.diff";
const EVAL: &str = "/eval.sh";
/// The ways in which a patch may be applied; the first that works is taken.
const WAYS: [&[&str]; 4] = [
    &["git", "apply", "--verbose", PATCH],
    &["git", "apply", "--verbose", "--3way", PATCH],
    &["git", "apply", "--verbose", "--reject", PATCH],
    &["patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i", PATCH],
];

/// What every instance of a run is evaluated with.
pub struct Evaluator {
    pub exocell: Exocell,
    pub run_id: String,
    /// For the tests of one instance.
    pub timeout: Duration,
    /// For `exocell run`.
    pub flags: Vec<String>,
}

/// Why there is no verdict.
type Reason = String;

fn host(what: &'static str) -> impl Fn(io::Error) -> Reason {
    move |error| format!("cannot {what}: {error}")
}

impl Evaluator {
    /// Evaluates `prediction` and leaves its files in `folder`; whether it
    /// resolves the instance.
    ///
    /// # Errors
    /// The reason why there is no verdict, which the log tells too.
    pub fn evaluate(
        &self,
        instance: &Instance,
        prediction: &Prediction,
        folder: &Path,
    ) -> Result<bool, Reason> {
        let begun = Instant::now();
        fs::create_dir_all(folder).map_err(host("make the instance's folder"))?;
        // Of an earlier try; mostly there is none.
        let _ = fs::remove_file(folder.join(USAGE));
        let mut log = Log::create(&folder.join(LOG), begun).map_err(host("write the log"))?;
        let judged = self.judge(instance, prediction, folder, &mut log, begun);
        match &judged {
            Ok(resolved) => log.add(&format!("resolved: {resolved}")),
            Err(reason) => log.add(reason),
        }
        judged
    }

    fn judge(
        &self,
        instance: &Instance,
        prediction: &Prediction,
        folder: &Path,
        log: &mut Log,
        begun: Instant,
    ) -> Result<bool, Reason> {
        let parser = parsers::find(&instance.log_parser).ok_or_else(|| {
            format!("the log parser {} is not known; those of Python are", instance.log_parser)
        })?;
        if instance.has_assets() {
            return Err("the instance has image assets, which are not supported".to_owned());
        }
        let name = self.name(instance);
        let cell = Cell::start(&self.exocell, &name, &instance.image, &self.flags)?;
        let start_ms = begun.elapsed().as_millis() as u64;
        log.add(&format!("the cell {name} of {} runs", instance.image));
        let watch = Watch::begin(&self.exocell, &name, begun);
        let output = self.run_tests(instance, prediction, &cell, folder, log);
        let samples = watch.end();
        let wall_ms = begun.elapsed().as_millis() as u64;
        drop(cell);
        write_json(&folder.join(USAGE), &Usage::of(samples, start_ms, wall_ms))?;
        grade_output(instance, parser, &output?, folder)
    }

    /// The name of the instance's cell.
    fn name(&self, instance: &Instance) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
        let id = instance.instance_id.to_ascii_lowercase();
        format!("sweb.eval.{id}.{}", self.run_id).chars().map(plain).collect()
    }

    /// Applies the patch and runs the tests; what they print.
    fn run_tests(
        &self,
        instance: &Instance,
        prediction: &Prediction,
        cell: &Cell,
        folder: &Path,
        log: &mut Log,
    ) -> Result<String, Reason> {
        let patch = prediction.patch().unwrap_or_default();
        let script = eval_script(&instance.eval_script);
        for (name, path, content) in [("patch.diff", PATCH, patch), ("eval.sh", EVAL, &script)] {
            fs::write(folder.join(name), content).map_err(host("write into the run's folder"))?;
            cell.write(path, content).map_err(host("write into the cell"))?;
        }
        apply(cell, log)?;
        let before = diff(cell)?;
        log.add(&format!("git diff before:\n{before}"));
        let begun = Instant::now();
        // One stream, so that the marks stand where they belong.
        let words = ["/bin/bash", "-c", "exec /bin/bash \"$0\" 2>&1", EVAL];
        let ended = cell.exec(FOLDER, &words, b"", Some(self.timeout));
        let mut ended = ended.map_err(host("run the tests"))?;
        log.add(&format!("the tests took {:.2} s", begun.elapsed().as_secs_f64()));
        if ended.code.is_none() {
            let seconds = self.timeout.as_secs();
            ended.output += &format!("\n\nTimeout error: {seconds} seconds exceeded.");
        }
        fs::write(folder.join(TEST_OUTPUT), &ended.output).map_err(host("write the output"))?;
        if ended.code.is_none() {
            return Err(format!("the tests had not ended after {} s", self.timeout.as_secs()));
        }
        let after = diff(cell)?;
        log.add(&format!("git diff after:\n{after}"));
        Ok(ended.output)
    }
}

/// Applies the patch in the first way that works.
fn apply(cell: &Cell, log: &mut Log) -> Result<(), Reason> {
    let exec = |words: &[&str]| cell.exec(FOLDER, words, b"", None).map_err(host("apply a patch"));
    let mut last = String::new();
    for (at, way) in WAYS.iter().enumerate() {
        if at > 0 {
            // What failed may have left half of it.
            exec(&["/bin/bash", "-c", "git checkout -- . ; git clean -fd"])?;
        }
        let ended = exec(way)?;
        if ended.is_success() {
            log.add(&format!(">>>>> Applied Patch:\n{}", ended.output));
            return Ok(());
        }
        log.add(&format!("{} failed:\n{}", way.join(" "), ended.output));
        last = ended.output;
    }
    // Each way may fail and the patch be there.
    if exec(&["git", "apply", "--check", "--reverse", PATCH])?.is_success() {
        log.add(">>>>> Applied Patch: it is there already");
        return Ok(());
    }
    Err(format!(">>>>> Patch Apply Failed:\n{last}"))
}

fn diff(cell: &Cell) -> Result<String, Reason> {
    let words = ["git", "-c", "core.fileMode=false", "diff"];
    let ended = cell.exec(FOLDER, &words, b"", None).map_err(host("run git diff"))?;
    Ok(ended.output.trim().to_owned())
}

/// The script, with the tests' exit code told after their output.
fn eval_script(script: &str) -> String {
    let own = ["#!/bin/bash", "set -uxo pipefail"];
    let mut lines = own.map(str::to_owned).to_vec();
    let mut told = false;
    for line in script.trim().split('\n').filter(|line| !own.contains(line)) {
        if line.contains(grade::END) && !told {
            told = true;
            lines.push("EXOCELL_TEST_EXIT_CODE=$?".to_owned());
            lines.push(line.to_owned());
            lines.push(format!("echo \"{}: $EXOCELL_TEST_EXIT_CODE\"", grade::EXIT_CODE));
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n") + "\n"
}

fn grade_output(
    instance: &Instance,
    parser: Parser,
    output: &str,
    folder: &Path,
) -> Result<bool, Reason> {
    let report: Value = grade::report(instance, parser, output);
    write_json(&folder.join(REPORT), &report)?;
    Ok(report[&instance.instance_id]["resolved"] == true)
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), Reason> {
    let text = serde_json::to_string_pretty(value).map_err(|error| error.to_string())?;
    write_whole(path, &(text + "\n")).map_err(host("write a report"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_told_behind_the_output() {
        let script = "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'\n\
                      pytest\n: '>>>>> End Test Output'\ngit checkout x\n";
        let expected = "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'\n\
                        pytest\nEXOCELL_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n\
                        echo \">>>>> Test Exit Code: $EXOCELL_TEST_EXIT_CODE\"\ngit checkout x\n";
        assert_eq!(eval_script(script), expected);
        assert_eq!(eval_script("true"), "#!/bin/bash\nset -uxo pipefail\ntrue\n");
    }
}
