//! The test suites of real projects: in a cell they end as they end natively.
//!
//! "Natively" is the base image's own tree under `bwrap`, so both runs have the
//! same Python and the same programs and differ in the kernel below them.
//! Sources and tools come from the package registry that `pip` is configured
//! for, pinned by hash, and are kept under EXOCELL_CACHE.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{IMAGE, exocell, given, pip, text};

const SOURCES: &str = include_str!("../projects/sources.txt");
const TOOLS: &str = include_str!("../projects/tools.txt");
/// For one suite, on a machine that is busy too.
const SUITE_LIMIT: Duration = Duration::from_secs(600);

/// Where both runs see the project and the tools.
const PROJECT_AT: &str = "/mnt";
const TOOLS_AT: &str = "/opt";
const ENVIRONMENT: [(&str, &str); 4] = [
    ("PATH", "/usr/bin:/bin"),
    ("HOME", "/root"),
    ("PYTHONPATH", "/mnt/src:/opt"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
];
const SUITE: [&str; 8] =
    ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=short"];

#[test]
fn itsdangerous_passes_its_own_tests() {
    assert!(passed("itsdangerous-2.2.0") > 290);
}

#[test]
fn click_passes_its_own_tests() {
    assert!(passed("click-8.5.1") > 2400);
}

/// Runs the suite natively and in a cell, which must end alike, with nothing
/// failed; how many tests passed.
fn passed(project: &str) -> u32 {
    let cache = fetched();
    let (source, tools) = (cache.join(project), cache.join("tools"));
    let native = Ending::of(&mut natively(&source, &tools));
    let cell = Ending::of(&mut in_a_cell(&source, &tools));
    assert_eq!(native, cell, "{project}: natively and in a cell");
    assert_eq!(native.code, 0, "{project}: {native:?}");
    native.counts.split_once(" passed").and_then(|(count, _)| count.parse().ok()).expect("a count")
}

fn natively(source: &Path, tools: &Path) -> Command {
    let mut command = Command::new("bwrap");
    command.args(["--unshare-all", "--die-with-parent", "--clearenv", "--chdir", PROJECT_AT]);
    command.args(["--ro-bind", text(&given("EXOCELL_TEST_BASE")), "/"]);
    command.args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/root"]);
    command.args(["--ro-bind", text(source), PROJECT_AT, "--ro-bind", text(tools), TOOLS_AT]);
    command.args(ENVIRONMENT.iter().flat_map(|(name, value)| ["--setenv", name, value]));
    command.args(SUITE);
    command
}

fn in_a_cell(source: &Path, tools: &Path) -> Command {
    let mut command = exocell(["run", "--rm", "-m", "512m", "-w", PROJECT_AT]);
    for (host, guest) in [(source, PROJECT_AT), (tools, TOOLS_AT)] {
        command.args(["-v", &format!("{}:{guest}:ro", text(host))]);
    }
    for (name, value) in ENVIRONMENT {
        command.args(["-e", &format!("{name}={value}")]);
    }
    command.arg(IMAGE).args(SUITE);
    command
}

/// How a suite ended, by its own account.
#[derive(Debug, PartialEq)]
struct Ending {
    code: i32,
    /// As in "297 passed, 2 skipped".
    counts: String,
    failures: Vec<String>,
}

impl Ending {
    fn of(command: &mut Command) -> Self {
        let shown = format!("{command:?}");
        let finished = crate::common::Started::new(command)
            .finish(SUITE_LIMIT)
            .unwrap_or_else(|| panic!("still running after {SUITE_LIMIT:?}: {shown}"));
        let last = finished.text().lines().last().unwrap_or_default();
        let (counts, _) = last.split_once(" in ").unwrap_or_else(|| {
            panic!("no summary in: {}\n{}\n{shown}", finished.text(), finished.stderr)
        });
        let named = |line: &&str| line.starts_with("FAILED ") || line.starts_with("ERROR ");
        let failures = finished.text().lines().filter(named).map(str::to_owned).collect();
        Self { code: finished.code, counts: counts.to_owned(), failures }
    }
}

/// The directory that holds each source package unpacked and `tools`; fetched
/// once for a set of pins.
fn fetched() -> PathBuf {
    pip::kept("projects", &[SOURCES, TOOLS].concat(), fetch)
}

fn fetch(work: &Path) {
    let sources = pip::list(work, "sources.txt", SOURCES);
    let archives = work.join("archives");
    let download = ["download", "--no-binary", ":all:", "-d", text(&archives)];
    pip::pip(&[&download[..], &["-r", text(&sources)]].concat());
    pip::install(&pip::list(work, "tools.txt", TOOLS), &work.join("tools"));
    for archive in fs::read_dir(&archives).expect("archives").flatten() {
        let archive = archive.path();
        let unpacked = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(work).status();
        assert!(unpacked.expect("tar runs").success(), "cannot unpack {}", archive.display());
    }
}
