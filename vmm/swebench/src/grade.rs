//! The verdict on an instance: what its tests printed, held against what they
//! must do.

use serde::Serialize;
use serde_json::{Value, json};

use crate::dataset::{EvalType, Instance};
use crate::failure::{self, Tier};
use crate::parsers::{Parser, Status, Verdicts};

/// What stands around the tests' output.
pub const START: &str = ">>>>> Start Test Output";
pub const END: &str = ">>>>> End Test Output";
/// What stands before the tests' exit code, after their output.
pub const EXIT_CODE: &str = ">>>>> Test Exit Code";
/// What tells in a log that there is nothing to read.
const VOID: [&str; 4] = [
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
];

/// How the tests of one kind ended.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Split {
    success: Vec<String>,
    failure: Vec<String>,
}

/// The content of `report.json` for a patch whose tests printed `log`.
pub fn report(instance: &Instance, parser: Parser, log: &str) -> Value {
    let mut own = json!({
        "patch_is_None": false, "patch_exists": true, "patch_successfully_applied": false,
        "resolved": false, "infra_failure": false,
    });
    match verdicts(parser, log) {
        Some(verdicts) => {
            let (fixed, kept) = split(instance, &verdicts);
            own["patch_successfully_applied"] = true.into();
            own["resolved"] = (fixed.failure.is_empty() && kept.failure.is_empty()).into();
            let none = Split::default();
            own["tests_status"] = json!({
                "FAIL_TO_PASS": fixed, "PASS_TO_PASS": kept,
                "FAIL_TO_FAIL": none, "PASS_TO_FAIL": none,
            });
        }
        None => {
            if let Some((reason, tier)) = failure::classify(log) {
                own["infra_failure"] = (tier == Tier::Environment).into();
                own["infra_failure_reason"] = reason.into();
            }
        }
    }
    json!({ &instance.instance_id: own })
}

/// The verdicts in `log`; `None` where the tests did not run, or where what
/// they say is not what their exit code says.
fn verdicts(parser: Parser, log: &str) -> Option<Verdicts> {
    if VOID.iter().any(|mark| log.contains(mark)) || !log.contains(END) {
        return None;
    }
    let output = log.split(START).nth(1)?.split(END).next()?;
    let mut verdicts = parser(output);
    if verdicts.is_empty() {
        verdicts = parser(log);
    }
    let failed = |status: &Status| matches!(status, Status::Failed | Status::Error);
    let silent_failure =
        exit_code(log).is_some_and(|code| code != 0) && !verdicts.values().any(failed);
    (!verdicts.is_empty() && !silent_failure).then_some(verdicts)
}

/// The exit code of the tests' program, where the log has it.
fn exit_code(log: &str) -> Option<i64> {
    let codes = log.split(EXIT_CODE).skip(1).filter_map(|rest| rest.strip_prefix(':'));
    codes.map(str::trim_start).find_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '-').unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

/// The tests that must come to pass, and those that must keep passing.
fn split(instance: &Instance, verdicts: &Verdicts) -> (Split, Split) {
    let fail_only = instance.eval_type == EvalType::FailOnly;
    let passes = |test: &str, skipping: bool| match look_up(test, verdicts) {
        status if fail_only => status != Some(Status::Failed),
        Some(Status::Passed | Status::ExpectedFailure) => true,
        // One that was skipped is no regression, and no solution.
        Some(Status::Skipped) => skipping,
        _ => false,
    };
    let sort = |tests: &[String], skipping: bool| {
        let (success, failure) = tests.iter().cloned().partition(|test| passes(test, skipping));
        Split { success, failure }
    };
    (sort(&instance.fail_to_pass, false), sort(&instance.pass_to_pass, true))
}

/// The verdict on `test`. Some names in datasets are cut off within their
/// parameter; those stand for what they begin, where all of it agrees.
fn look_up(test: &str, verdicts: &Verdicts) -> Option<Status> {
    let count = |bracket: char| test.matches(bracket).count();
    let exact = verdicts.get(test).copied();
    if exact.is_some() || count('[') <= count(']') {
        return exact;
    }
    let passes = |status: &Status| matches!(status, Status::Passed | Status::ExpectedFailure);
    let from = verdicts.range(test.to_owned()..);
    let mut same = from.take_while(|(name, _)| name.starts_with(test)).map(|(_, status)| *status);
    let first = same.next()?;
    same.all(|status| passes(&status) == passes(&first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parsers::find;

    fn instance(fixed: &[&str], kept: &[&str], kind: &str) -> Instance {
        let row = json!({
            "instance_id": "i", "image": "x", "eval_script": "", "log_parser": "parse_log_pytest",
            "eval_type": kind, "FAIL_TO_PASS": fixed, "PASS_TO_PASS": json!(kept).to_string(),
        });
        serde_json::from_value(row).expect("an instance")
    }

    fn graded(instance: &Instance, log: &str) -> Value {
        report(instance, find("parse_log_pytest").expect("a parser"), log)["i"].clone()
    }

    fn log(output: &str, code: i32) -> String {
        format!("before\n+ : '{START}'\n{output}\n+ : '{END}'\n{EXIT_CODE}: {code}\nafter\n")
    }

    #[test]
    fn what_must_pass_must_pass() {
        let plain = instance(&["a"], &["b"], "pass_and_fail");
        for (output, resolved) in [
            ("PASSED a\nPASSED b", true),
            ("PASSED a\nSKIPPED b", true),
            ("SKIPPED a\nPASSED b", false),
            ("XFAIL a\nXFAIL b", true),
            ("PASSED a\nFAILED b", false),
            ("PASSED a", false),
            ("ERROR a\nPASSED b", false),
        ] {
            assert_eq!(graded(&plain, &log(output, 0))["resolved"], resolved, "{output}");
        }
        let report = graded(&plain, &log("PASSED a\nFAILED b", 1));
        assert_eq!(report["tests_status"]["PASS_TO_PASS"]["failure"], json!(["b"]));
        let fail_only = instance(&["a"], &["b"], "fail_only");
        assert_eq!(graded(&fail_only, &log("PASSED c", 0))["resolved"], true);
        assert_eq!(graded(&fail_only, &log("FAILED a", 0))["resolved"], false);
    }

    #[test]
    fn a_log_that_says_nothing_resolves_nothing() {
        let plain = instance(&["a"], &[], "pass_and_fail");
        for text in [
            String::new(),
            log("nothing", 0),
            log("PASSED a", 1), // and no test failed
            "PASSED a".to_owned(),
            format!("{START}\nPASSED a"),
            format!(">>>>> Patch Apply Failed\n{}", log("PASSED a", 0)),
        ] {
            let report = graded(&plain, &text);
            assert_eq!(report["resolved"], false, "{text}");
            assert_eq!(report["patch_successfully_applied"], false, "{text}");
        }
        let report = graded(&plain, "Killed");
        let told = (&report["infra_failure"], &report["infra_failure_reason"]);
        assert_eq!(told, (&json!(true), &json!("out_of_memory")));
    }

    #[test]
    fn names_that_are_cut_off_stand_for_what_they_begin() {
        let cut = instance(&["t[log(x"], &[], "pass_and_fail");
        let resolved = |output: &str| graded(&cut, &log(output, 0))["resolved"] == true;
        assert!(resolved("PASSED t[log(x1)]\nXFAIL t[log(x2)]\nFAILED u"));
        assert!(!resolved("PASSED t[log(x1)]\nFAILED t[log(x2)]"));
        let whole = instance(&["t[a]"], &[], "pass_and_fail");
        assert_eq!(graded(&whole, &log("PASSED t[a]b", 0))["resolved"], false);
    }
}
