//! Agents' own ways to containers, as they are on the package registry, against
//! `exocell serve --docker`: pinned by hash, kept under EXOCELL_CACHE.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::common::docker::Server;
use crate::common::host::state_root;
use crate::common::{Finished, IMAGE, eventually, finish, given, pip, program, text};

const PINS: &str = include_str!("../agents/pins.txt");
/// Configurations that the Python package ships.
const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/exocell/configs");
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/agents");
/// What stands for SWE-ReX's own script, which names this machine's Python.
const REMOTE: &str = "#!/bin/sh\nexec python3 -m swerex \"$@\"\n";

/// Runs `SCRIPTS/NAME IMAGE WORDS` against `server`.
#[track_caller]
fn agent(server: &Server, name: &str, words: &[&str]) -> Finished {
    let home = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("python3");
    command.arg(format!("{SCRIPTS}/{name}")).arg(IMAGE).args(words);
    command.env("DOCKER_HOST", server.url()).env("PYTHONPATH", pip::wheels("agents", PINS));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("HOME", home.path());
    command.env("MSWEA_SILENT_STARTUP", "1").env("DOCKER_CONFIG", home.path());
    finish(&mut command, b"").ok()
}

#[test]
fn mini_swe_agent_edits_tests_and_submits_in_a_cell() {
    let server = Server::start();
    let told = agent(&server, "mini.py", &[]);
    let submitted = "\nSubmitted\ndef double(n):\n    return 2 * n";
    assert!(told.text().ends_with(submitted), "{}", told.text());
    eventually("its container goes", || server.records().is_empty());
}

/// Without a server: by the command, as it takes docker's.
#[test]
fn mini_swe_agent_runs_by_the_configuration_that_is_shipped() {
    let home = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("python3");
    let config = format!("{CONFIGS}/mini-swe-agent.yaml");
    command.arg(format!("{SCRIPTS}/mini.py")).arg(IMAGE).arg(config);
    command.env("PYTHONPATH", pip::wheels("agents", PINS)).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("HOME", home.path()).env("MSWEA_SILENT_STARTUP", "1");
    let tools = program().parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(tools).chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(all).expect("a path"));
    command.env("EXOCELL_ROOT", state_root()).env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
    let told = finish(&mut command, b"").ok();
    let submitted = "\nSubmitted\ndef double(n):\n    return 2 * n";
    assert!(told.text().ends_with(submitted), "{}", told.text());
}

#[test]
fn swe_rex_runs_its_sessions_in_a_cell() {
    let server = Server::start();
    let tools = tempfile::tempdir().expect("a folder");
    let remote = tools.path().join("swerex-remote");
    fs::write(&remote, REMOTE).expect("a script");
    fs::set_permissions(&remote, fs::Permissions::from_mode(0o755)).expect("a mode");
    let packages = pip::wheels("agents", PINS);
    let config = format!("{CONFIGS}/swe-rex.yaml");
    let told = agent(&server, "rex.py", &[config.as_str(), text(&packages), text(tools.path())]);
    // It says on the same stream what it does.
    let wanted = ["a session keeps its state", "exit 3", "written and read", "no such file"];
    let said: Vec<_> = told.text().lines().filter(|line| wanted.contains(line)).collect();
    assert_eq!(said, wanted, "{}", told.text());
    eventually("its container goes", || server.records().is_empty());
}
