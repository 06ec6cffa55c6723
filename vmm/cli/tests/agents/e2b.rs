//! E2B's SDKs, as they are on the package registries, against `exocell serve --e2b`. They are
//! fetched pinned by hash and kept under EXOCELL_CACHE.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::e2b::{Server, Small};
use crate::common::{eventually, finish, pip, text};

const PINS: &str = include_str!("../e2b/pins.txt");
const TOUR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2b/tour.py");
const TEMPLATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2b/templates.py");
const INTERPRETER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2b/interpreter.py");
const TOUR_JS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2b/tour.mjs");
const LOCK: &str = include_str!("../e2b/package-lock.json");
const PACKAGE: &str = include_str!("../e2b/package.json");

#[test]
fn the_sdk_for_python_is_given_a_tour() {
    let packages = pip::wheels("e2b", PINS);
    let small = Small::new();
    let server = Server::with(&["--template", &small.template()]);
    let mut client = server.client("python3");
    client.args([TOUR, &server.url()]);
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    let steps = "lists files signed_urls commands background pty watches ports pauses \
                 snapshots ends refused async";
    assert_eq!(told.text().split_whitespace().collect::<Vec<_>>().join(" "), steps);
    eventually("nothing is left", || server.records().is_empty() && server.notes().is_empty());
}

#[test]
fn the_sdk_for_python_builds_templates() {
    let packages = pip::wheels("e2b", PINS);
    let small = Small::new();
    let server = Server::with(&["--template", &small.template()]);
    let mut client = server.client("python3");
    client.arg(TEMPLATES);
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    let steps = "built started failed refused";
    assert_eq!(told.text().split_whitespace().collect::<Vec<_>>().join(" "), steps);
    eventually("nothing is left", || server.records().is_empty() && server.notes().is_empty());
}

/// The image is some minutes' work, so this one is run by hand.
#[test]
#[ignore = "needs the image exocell/code-interpreter, of images/code-interpreter"]
fn the_code_interpreter_is_given_a_tour() {
    let packages = pip::wheels("e2b", PINS);
    let server = Server::with(&[
        "--template",
        "code-interpreter-v1=exocell/code-interpreter",
        "--memory",
        "1g",
    ]);
    let mut client = server.client("python3");
    client.arg(INTERPRETER);
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    let steps = "results charts errors contexts async";
    assert_eq!(told.text().split_whitespace().collect::<Vec<_>>().join(" "), steps);
}

#[test]
fn the_sdk_for_javascript_is_given_a_tour() {
    let modules = pip::kept("e2b-npm", LOCK, |work: &Path| {
        fs::write(work.join("package.json"), PACKAGE).unwrap();
        fs::write(work.join("package-lock.json"), LOCK).unwrap();
        let mut npm = Command::new("npm");
        npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]).current_dir(work);
        finish(&mut npm, b"").ok();
    });
    // A module finds others below its own directory.
    let place = tempfile::tempdir().unwrap();
    fs::copy(TOUR_JS, place.path().join("tour.mjs")).unwrap();
    let links = place.path().join("node_modules");
    std::os::unix::fs::symlink(modules.join("node_modules"), links).unwrap();
    let server = Server::start();
    let mut client = server.client("node");
    client.arg(place.path().join("tour.mjs")).arg(server.url());
    let told = finish(&mut client, b"").ok();
    let steps = "sandbox files commands pty watch pause errors";
    assert_eq!(told.text().split_whitespace().collect::<Vec<_>>().join(" "), steps);
    eventually("nothing is left", || server.records().is_empty() && server.notes().is_empty());
}
