//! The Python package `exocell` against `exocell serve --docker`.

use std::process::Command;
use std::time::Duration;

use crate::common::docker::Server;
use crate::common::{IMAGE, Started, finish};

/// For the checker and what it fetches, on a machine that is busy too.
const CHECK_LIMIT: Duration = Duration::from_secs(600);
const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");

/// Runs the package's own tests in `module` against a server.
#[track_caller]
fn passes(module: &str) {
    let server = Server::start();
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest", "-v", module]).current_dir(format!("{PACKAGE}/tests"));
    tests.env("EXOCELL_HOST", server.url()).env("EXOCELL_IMAGE", IMAGE);
    tests.env("PYTHONPATH", PACKAGE).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut tests, b"").ok();
    assert!(told.stderr.ends_with("\nOK\n"), "{}", told.stderr);
    assert_eq!((server.files(), server.records()), (vec![], vec![]), "nothing is left");
}

/// Strictly, with the packages that the adapters adapt to.
#[test]
fn types_are_right() {
    let mut check = Command::new("python3");
    check.arg("strict.py").current_dir(format!("{PACKAGE}/tests"));
    let ended = Started::new(&mut check).finish(CHECK_LIMIT).expect("an end within the limit");
    assert_eq!(ended.ok().text(), "0 errors, 0 warnings, 0 informations");
}

#[test]
fn sandboxes_do_what_they_say() {
    passes("test_sandbox");
}

#[test]
fn sandboxes_of_an_event_loop_do_the_same() {
    passes("test_async");
}

#[test]
fn a_server_that_lies_is_found_out() {
    passes("test_hostile");
}

/// Trees, variables and hosts that a cell, an image or a task names.
#[test]
fn what_others_say_is_checked() {
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest", "-v", "test_untrusted"]).current_dir(format!("{PACKAGE}/tests"));
    tests.env("PYTHONPATH", PACKAGE).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut tests, b"").ok();
    assert!(told.stderr.ends_with("\nOK\n"), "{}", told.stderr);
}
