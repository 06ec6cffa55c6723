//! `exocell swebench run` on an instance of SWE-bench's form.

use std::fs;

use serde_json::{Value, json};

use crate::common::host::{namespace, processes};
use crate::common::instance::Instance;
use crate::common::{Finished, Started, eventually, finish};

/// A patch that applies and solves nothing.
const OTHER: &str = "diff --git a/NEW b/NEW\nnew file mode 100644\n--- /dev/null\n+++ b/NEW\n\
                     @@ -0,0 +1 @@\n+new\n";
/// A patch that says of every test that it passed, and runs none.
const LIE: &str = "diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n--- /dev/null\n\
                   +++ b/conftest.py\n@@ -0,0 +1,4 @@\n+import os\n\
                   +for test in ('with_access', 'with_delete', 'writes_only'):\n\
                   +    print('PASSED tests/test_mru.py::MRUCacheTest::test_evict__' + test)\n\
                   +os._exit(1)\n";

/// A folder with a dataset and predictions, and what a run leaves there.
struct Evaluation<'a> {
    instance: &'a Instance,
    folder: tempfile::TempDir,
}

impl<'a> Evaluation<'a> {
    /// Rows, and a model's patch for each; `None` for one without prediction.
    fn new(instance: &'a Instance, rows: &[(Value, Option<&str>)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = |values: &mut dyn Iterator<Item = Value>| -> String {
            values.map(|value| value.to_string() + "\n").collect()
        };
        let dataset = lines(&mut rows.iter().map(|(row, _)| row.clone()));
        let predictions = lines(&mut rows.iter().filter_map(|(row, patch)| {
            let id = &row["instance_id"];
            patch.map(|patch| {
                json!({"instance_id": id, "model_patch": patch, "model_name_or_path": "a/b"})
            })
        }));
        fs::write(folder.path().join("dataset.jsonl"), dataset).unwrap();
        fs::write(folder.path().join("model.jsonl"), predictions).unwrap();
        Self { instance, folder }
    }

    fn command(&self, predictions: &str, flags: &[&str]) -> std::process::Command {
        let fixed = ["swebench", "run", "-m", "256m", "--disk", "256m", "--dataset"];
        let words = ["dataset.jsonl", "--predictions", predictions];
        let mut command = self.instance.exocell(&[&fixed[..], &words, flags].concat());
        command.current_dir(self.folder.path());
        command
    }

    #[track_caller]
    fn run(&self, predictions: &str, flags: &[&str]) -> Finished {
        finish(&mut self.command(predictions, flags), b"").ok()
    }

    fn read(&self, path: &str) -> String {
        let path = self.folder.path().join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.read(path)).expect("JSON")
    }
}

#[test]
fn the_right_patch_resolves_an_instance() {
    let instance = Instance::get();
    let evaluation = Evaluation::new(&instance, &[(instance.row("cache-1"), None)]);
    let said = evaluation.run("gold", &["--jobs", "2"]);
    let own = "logs/run_evaluation/run/gold/cache-1";
    let output = evaluation.read(&format!("{own}/test_output.txt"));
    assert!(said.stderr.contains("[1/1] cache-1: resolved"), "{}{output}", said.stderr);
    assert!(said.stderr.contains(" s CPU, ") && said.stderr.contains("MiB at most"));
    let report = &evaluation.json(&format!("{own}/report.json"))["cache-1"];
    let verdict = |kind: &str, way: &str| {
        report["tests_status"][kind][way].as_array().map(Vec::len).expect("a list")
    };
    assert_eq!((verdict("FAIL_TO_PASS", "success"), verdict("PASS_TO_PASS", "success")), (3, 2));
    assert_eq!((verdict("FAIL_TO_PASS", "failure"), verdict("PASS_TO_PASS", "failure")), (0, 0));
    assert_eq!(report["resolved"], true);
    assert_eq!(evaluation.read(&format!("{own}/patch.diff")), instance.patch);
    assert!(output.contains("Test Exit Code: 0"), "{output}");
    assert!(evaluation.read(&format!("{own}/run_instance.log")).contains("Applied Patch"));
    let usage = evaluation.json(&format!("{own}/cell.json"));
    let figure = |name: &str| usage[name].as_u64().expect("a figure");
    assert!(figure("host_bytes_max") > figure("guest_used_bytes_max") / 2, "{usage}");
    assert!(figure("cpu_ms") > 0 && !usage["samples"].as_array().unwrap().is_empty(), "{usage}");
    let plot = evaluation.read("gold.run.svg");
    assert!(plot.contains("cache-1: up in ") && plot.matches("<polyline").count() == 2, "{plot}");
    let last = evaluation.json("gold.run.json");
    assert_eq!(last["resolved_ids"], json!(["cache-1"]));
    assert_eq!(last["schema_version"], 2);
}

#[test]
fn every_other_end_is_told_apart() {
    let instance = Instance::get();
    let with = |id: &str, name: &str, value: &str| {
        let mut row = instance.row(id);
        row[name] = value.into();
        row
    };
    let rows = [
        (instance.row("right"), Some(&*instance.patch)),
        (instance.row("other"), Some(OTHER)),
        (instance.row("lie"), Some(LIE)),
        (instance.row("garbage"), Some("no patch")),
        (instance.row("empty"), Some("")),
        (instance.row("missing"), None),
        (with("image", "image", "no/such:image"), Some(OTHER)),
        (with("parser", "log_parser", "parse_log_jest"), Some(OTHER)),
    ];
    let evaluation = Evaluation::new(&instance, &rows);
    let flags = ["--jobs", "3", "--run-id", "r", "--report-dir", "out"];
    let said = evaluation.run("model.jsonl", &flags);
    assert!(said.text().contains("instances resolved: 1\n"), "{}{}", said.text(), said.stderr);
    let report = evaluation.json("out/a__b.r.json");
    for (name, expected) in [
        ("resolved_ids", json!(["right"])),
        ("unresolved_ids", json!(["lie", "other"])),
        ("error_ids", json!(["garbage", "image", "parser"])),
        ("empty_patch_ids", json!(["empty"])),
        ("incomplete_ids", json!(["missing"])),
        ("completed_ids", json!(["lie", "other", "right"])),
        ("failure_reasons", json!({})),
    ] {
        assert_eq!(report[name], expected, "{name} in {report}");
    }
    let log =
        |id: &str, name: &str| evaluation.read(&format!("logs/run_evaluation/r/a__b/{id}/{name}"));
    assert!(log("garbage", "run_instance.log").contains("Patch Apply Failed"));
    assert!(log("image", "run_instance.log").contains("no/such:image"));
    assert!(instance.records().iter().all(|id| !is_of(&instance, id, ".r")), "cells are left");

    // What has a verdict is not run again.
    let again =
        evaluation.run("model.jsonl", &[&flags[..], &["-i", "right", "-i", "garbage"]].concat());
    assert!(again.stderr.contains("[1/1] garbage"), "{}", again.stderr);
    assert_eq!(evaluation.json("out/a__b.r.json")["resolved_ids"], json!(["right"]));
}

#[test]
fn tests_that_do_not_end_are_ended() {
    let instance = Instance::get();
    let mut row = instance.row("slow");
    row["eval_script"] = "echo before\nsleep infinity\n: '>>>>> End Test Output'".into();
    let evaluation = Evaluation::new(&instance, &[(row, Some(OTHER))]);
    evaluation.run("model.jsonl", &["--timeout", "2s"]);
    let report = evaluation.json("a__b.run.json");
    assert_eq!(report["error_ids"], json!(["slow"]), "{report}");
    assert_eq!(report["failure_reasons"], json!({"slow": "tests_timed_out"}), "{report}");
    let output = evaluation.read("logs/run_evaluation/run/a__b/slow/test_output.txt");
    assert!(output.contains("\nbefore\n"), "{output}");
    assert!(output.ends_with("\n\nTimeout error: 2 seconds exceeded."), "{output}");
    let cell = finish(&mut instance.exocell(&["inspect", "sweb.eval.slow.run"]), b"");
    assert!(cell.code != 0, "its cell is left");
}

/// Whether the cell `id` belongs to the run whose name ends so.
fn is_of(instance: &Instance, id: &str, end: &str) -> bool {
    let shown = finish(&mut instance.exocell(&["inspect", "--json", id]), b"");
    serde_json::from_slice::<Value>(&shown.stdout)
        .is_ok_and(|cell| cell[0]["name"].as_str().is_some_and(|name| name.ends_with(end)))
}

/// Instances side by side.
const EIGHT: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

#[test]
fn a_killed_run_of_eight_leaves_no_cell_and_goes_on_later() {
    let instance = Instance::get();
    let mut rows = EIGHT.map(|id| (instance.row(id), Some(OTHER)));
    let wait = "touch /tmp/here\nsleep infinity";
    let with_wait = |row: &mut Value| row["eval_script"] = wait.into();
    rows.iter_mut().for_each(|(row, _)| with_wait(row));
    let evaluation = Evaluation::new(&instance, &rows);
    let flags = ["--jobs", "8", "--run-id", "killed"];
    let mut run = Started::new(&mut evaluation.command("model.jsonl", &flags));
    let cells = EIGHT.map(|id| format!("sweb.eval.{id}.killed"));
    let exec = |cell: &str, words: &[&str]| {
        finish(&mut instance.exocell(&[&["exec", cell][..], words].concat()), b"")
    };
    for cell in &cells {
        eventually("its tests run", || exec(cell, &["ls", "/tmp/here"]).code == 0);
    }
    let busy = finish(&mut evaluation.command("model.jsonl", &flags), b"").exited(125);
    assert!(busy.stderr.contains("another run has"), "{}", busy.stderr);
    let spaces = cells.each_ref().map(|cell| {
        let shown = finish(&mut instance.exocell(&["inspect", "--json", cell]), b"").ok().one();
        namespace(shown["supervisor_pid"].as_i64().expect("a pid") as i32).expect("a cell")
    });
    run.child.kill().expect("kill");
    run.child.wait().expect("wait");
    for space in &spaces {
        eventually("the cells end with the run", || processes(space).is_empty());
    }
    for cell in &cells {
        eventually("no record is left", || exec(cell, &["true"]).code != 0);
    }

    let rows = EIGHT.map(|id| (instance.row(id), Some(&*instance.patch)));
    let later = Evaluation::new(&instance, &rows);
    fs::copy(
        later.folder.path().join("dataset.jsonl"),
        evaluation.folder.path().join("dataset.jsonl"),
    )
    .unwrap();
    fs::copy(later.folder.path().join("model.jsonl"), evaluation.folder.path().join("model.jsonl"))
        .unwrap();
    evaluation.run("model.jsonl", &flags);
    let report = evaluation.json("a__b.killed.json");
    assert_eq!(report["resolved_ids"], json!(EIGHT), "{report}");
    assert_eq!(report["error_ids"], json!([]), "{report}");
}

#[test]
fn what_is_no_dataset_is_refused() {
    let instance = Instance::get();
    let evaluation = Evaluation::new(&instance, &[(instance.row("a"), None)]);
    let folder = evaluation.folder.path();
    let write = |name: &str, content: &str| fs::write(folder.join(name), content).unwrap();
    write("far.jsonl", r#"{"instance_id": "a", "model_name_or_path": "..", "model_patch": "x"}"#);
    write("other.json", r#"{"b": {"instance_id": "b", "model_patch": "x"}}"#);
    write("text.txt", "");
    write("bad.jsonl", "{}\n");
    for (predictions, flags, word) in [
        ("far.jsonl", &[][..], "cannot be a folder's name"),
        ("other.json", &[], "there is a prediction for b"),
        ("text.txt", &[], "neither in .json nor in .jsonl"),
        ("bad.jsonl", &[], "line 1: missing field `instance_id`"),
        ("none.json", &[], "cannot read none.json"),
        ("gold", &["-i", "b"], "no instance b"),
        ("gold", &["--run-id", "../x"], "cannot be a folder's name"),
        ("gold", &["--timeout", "soon"], "--timeout"),
    ] {
        let refused = finish(&mut evaluation.command(predictions, flags), b"").exited(125);
        refused.complains_of(&[word]);
    }
    assert!(!folder.join("logs").exists());
}
