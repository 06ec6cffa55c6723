//! A host that is short of memory: what files left in the guests' goes back to it.
//!
//! The host's figures are files of the test, mounted over those of proc(5) for the
//! command that starts a cell and no one else.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::common::cell::Cell;
use crate::common::{IMAGE, LIMIT, exocell, finish, text, unique, until};

const MIB: u64 = 1 << 20;
/// What the host says that it has: no cell is granted more.
const TOTAL_KB: u64 = 8 << 20;
const FILE: &str = "/var/tmp/cold";

/// A host with as much memory, and programs that wait as long, as is said.
struct Host {
    dir: TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().expect("a temporary directory") };
        host.has_available(60);
        host.waited(Duration::ZERO);
        host
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn has_available(&self, percent: u32) {
        let available = TOTAL_KB / 100 * u64::from(percent);
        let memory =
            format!("MemTotal: {TOTAL_KB} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n");
        fs::write(self.file("meminfo"), memory).expect("it is written");
    }

    fn waited(&self, total: Duration) {
        let micros = total.as_micros();
        let waits = format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={micros}\n");
        fs::write(self.file("pressure"), waits).expect("it is written");
    }

    /// A cell on it, with a file of 64 MiB in its memory, and what is held for it.
    #[track_caller]
    fn cell(&self, mode: &str) -> (Cell, u64) {
        let cell = Cell { name: unique("pressed") };
        let words = ["run", "-d", "--name", &cell.name, "--pager", mode, "--memory", "320m"];
        let run = exocell([&words[..], &[IMAGE, "sleep", "infinity"]].concat());
        let mounts = "mount --bind $0/meminfo /proc/meminfo && \
                      mount --bind $0/pressure /proc/pressure/memory && exec \"$@\"";
        let mut inside = Command::new("unshare");
        inside.args(["--mount", "sh", "-c", mounts, text(self.dir.path())]);
        inside.arg(run.get_program()).args(run.get_args());
        finish(&mut inside, b"").ok();
        let fill =
            format!("head -c 64M /dev/urandom > {FILE}; sync; sha256sum < {FILE} > {FILE}.sum");
        cell.shell(&fill).ok();
        let held = held(&cell);
        assert!(held > 64 * MIB, "{mode}: only {held} bytes are held");
        (cell, held)
    }
}

#[track_caller]
fn held(cell: &Cell) -> u64 {
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    stats["counters"]["memory_allocated_bytes"].as_u64().expect("a number")
}

#[test]
fn what_files_left_in_memory_goes_while_the_host_has_little() {
    for mode in ["eager", "credit"] {
        let host = Host::new();
        let (cell, full) = host.cell(mode);
        host.has_available(4);
        assert!(
            until(LIMIT, || held(&cell) + 40 * MIB < full),
            "{mode}: {} of {full}",
            held(&cell)
        );
        host.has_available(60);
        cell.shell(&format!("sha256sum < {FILE} | cmp - {FILE}.sum")).ok();
    }
}

/// A control group that waits at a limit of its own is not the host's lack.
#[test]
fn what_files_left_in_memory_goes_while_the_hosts_programs_wait_for_some() {
    let host = Host::new();
    let (cell, full) = host.cell("eager");
    let mut waited = Duration::ZERO;
    let mut wait_more = |looks: u32| {
        for _ in 0..looks {
            waited += Duration::from_millis(50);
            host.waited(waited);
            thread::sleep(Duration::from_millis(100));
        }
    };
    wait_more(60);
    let left = held(&cell);
    assert!(left + 8 * MIB > full, "{left} of {full} bytes, though there is enough");
    host.has_available(40);
    let mut goes = || {
        wait_more(3);
        held(&cell) + 40 * MIB < full
    };
    assert!(until(LIMIT, &mut goes), "{} of {full}", held(&cell));
}
