//! What the host has mapped for a process, and how a cell is made to stand meanwhile.

use std::fs;
use std::time::{Duration, Instant};

use exocell_cell::processes::{self, CellProcess};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::memory::{Access, Run};
use crate::BenchError;

/// A process stands within this, unless the host is not well.
const PATIENCE: Duration = Duration::from_secs(10);

/// The processes of a cell that map something for user code, and the guest kernel itself.
#[derive(Debug, Clone)]
pub struct Cell {
    supervisor: i32,
    pub kernel: i32,
}

/// Those that have been stopped go on when this is dropped.
#[derive(Debug)]
pub struct Stopped(Vec<i32>);

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            // One that is gone need not go on.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGCONT);
        }
    }
}

impl Cell {
    pub fn new(supervisor: i32, kernel_inner_pid: i32) -> Result<Self, BenchError> {
        let kernel = processes::host_pid(supervisor, kernel_inner_pid)
            .ok_or_else(|| BenchError::unlike("the cell", "guest kernel that runs"))?;
        Ok(Self { supervisor, kernel })
    }

    /// The guest kernel's children, which are the processes of guest address spaces.
    pub fn children(&self) -> Vec<CellProcess> {
        let all = processes::of_cell(self.supervisor).into_iter();
        all.filter(|process| parent(process.pid) == Some(self.kernel)).collect()
    }

    /// Makes the guest kernel stand: with `everywhere`, in each process of its own, too.
    pub fn stop(&self, everywhere: bool) -> Result<Stopped, BenchError> {
        let mut stopped = Stopped(vec![self.kernel]);
        stop(self.kernel)?;
        // It makes none any more, but each of its processes may make one until it stands.
        if !everywhere {
            return Ok(stopped);
        }
        loop {
            let new = |process: &CellProcess| !stopped.0.contains(&process.pid);
            let children: Vec<_> = self.children().into_iter().filter(new).collect();
            if children.is_empty() {
                return Ok(stopped);
            }
            for process in children {
                stopped.0.push(process.pid);
                stop(process.pid)?;
            }
        }
    }
}

/// Sends SIGSTOP and waits until all threads stand, or wait in vfork(2) for one that does.
fn stop(pid: i32) -> Result<(), BenchError> {
    // One that is gone stands.
    let _ = kill(Pid::from_raw(pid), Signal::SIGSTOP);
    let until = Instant::now() + PATIENCE;
    while !stands(pid) {
        if Instant::now() > until {
            return Err(BenchError::unlike(&format!("process {pid}"), "end of what it does"));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

fn stands(pid: i32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    stats.all(|stat| {
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        matches!(state, Some('T' | 'D' | 'Z' | 'X'))
    })
}

fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// A mapping of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub run: Run,
    /// Device and inode: 00:00 0 for what is no file.
    pub file: String,
    pub name: String,
}

/// The mappings of `pid`, in order; None if it is gone.
pub fn mappings(pid: i32) -> Option<Vec<Mapping>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    maps.lines().map(mapping).collect()
}

/// A line of proc_pid_maps(5).
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let access = words.next()?;
    let offset = words.next()?;
    let file = format!("{} {}", words.next()?, words.next()?);
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let run = Run {
        start: number(start)?,
        end: number(end)?,
        offset: number(offset)?,
        access: Access {
            read: access.contains('r'),
            write: access.contains('w'),
            execute: access.contains('x'),
        },
    };
    Some(Mapping { run, file, name: words.collect::<Vec<_>>().join(" ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_host_is_read() {
        let line = "5f100000-5f140000 r-xs 01a40000 00:01 1035 /memfd:exocell-guest (deleted)";
        let read = mapping(line).expect("a mapping");
        let access = Access { read: true, write: false, execute: true };
        let run = Run { start: 0x5f10_0000, end: 0x5f14_0000, offset: 0x1a4_0000, access };
        assert_eq!(read.run, run);
        assert_eq!((&*read.file, &*read.name), ("00:01 1035", "/memfd:exocell-guest (deleted)"));
        assert_eq!(mapping("no mapping"), None);
    }
}
