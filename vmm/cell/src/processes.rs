//! The processes of a cell as the host sees them.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use exocell_pager::ProcessMemory;
use exocell_vmm::jail::group;
use serde::Serialize;

/// A process in a cell's pid namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellProcess {
    pub pid: i32,
    /// In the cell's pid namespace.
    pub inner_pid: i32,
}

/// Every process that shares the pid namespace whose first is `supervisor`;
/// none when it is gone.
pub fn of_cell(supervisor: i32) -> Vec<CellProcess> {
    let Some(own) = namespace(supervisor) else { return Vec::new() };
    if namespace(std::process::id() as i32) == Some(own.clone()) {
        // A zombie, or a pid that was used again.
        return Vec::new();
    }
    numbered_entries()
        .filter(|pid| namespace(*pid).as_ref() == Some(&own))
        .filter_map(|pid| Some(CellProcess { pid, inner_pid: inner_pid(pid)? }))
        .collect()
}

/// The host's pid of `inner_pid` in the cell of `supervisor`.
pub fn host_pid(supervisor: i32, inner_pid: i32) -> Option<i32> {
    of_cell(supervisor).iter().find(|process| process.inner_pid == inner_pid).map(|p| p.pid)
}

/// The pid namespace of a process.
fn namespace(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

fn numbered_entries() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn inner_pid(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(PathBuf::from(format!("/proc/{pid}/status"))).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// What the processes of a cell use together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CellUse {
    pub process_count: usize,
    pub cpu_ns: u64,
    pub memory: ProcessMemory,
}

impl CellUse {
    /// Of several cells, each by its id and its first process. The processes of the host are looked
    /// through once for all of them.
    pub fn of_cells(cells: &[(&str, i32)]) -> Vec<Self> {
        let own = namespace(std::process::id() as i32);
        let place = |(_, supervisor): &(&str, i32)| {
            namespace(*supervisor).filter(|found| Some(found) != own.as_ref())
        };
        let places: Vec<Option<PathBuf>> = cells.iter().map(place).collect();
        let mut of: HashMap<&PathBuf, Vec<i32>> =
            places.iter().flatten().map(|place| (place, Vec::new())).collect();
        for pid in numbered_entries() {
            if let Some(known) = namespace(pid).and_then(|place| of.get_mut(&place)) {
                known.push(pid);
            }
        }
        let pids = |place: &Option<PathBuf>| place.as_ref().and_then(|place| of.get(place));
        let all = cells.iter().zip(&places);
        all.map(|((id, _), place)| Self::of(id, pids(place).into_iter().flatten().copied()))
            .collect()
    }

    /// Of the cell `id`, whose first process is `supervisor`. Where the cell has a control group,
    /// that counts the CPU time of guest processes that have ended, however they were reaped.
    pub fn of_cell(id: &str, supervisor: i32) -> Self {
        Self::of(id, of_cell(supervisor).into_iter().map(|process| process.pid))
    }

    fn of(id: &str, pids: impl IntoIterator<Item = i32>) -> Self {
        let grouped = group::cpu_ns(id);
        let mut total = Self { cpu_ns: grouped.unwrap_or(0), ..Self::default() };
        for pid in pids {
            total.process_count += 1;
            if grouped.is_none() || !group::holds(id, pid) {
                total.cpu_ns += cpu_ns(pid).unwrap_or(0);
            }
            total.memory = total.memory + ProcessMemory::of(pid).unwrap_or_default();
        }
        total
    }
}

/// User and system time of a process and of the children it reaped
/// (proc_pid_stat(5), fields 14 to 17).
fn cpu_ns(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, so fields count from its end.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let ticks: u64 = fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    Some(ticks * 1_000_000_000 / u64::try_from(per_second).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_namespace_is_never_taken_for_a_cell() {
        assert!(of_cell(std::process::id() as i32).is_empty());
        assert!(of_cell(i32::MAX).is_empty());
        let ids = [("x", std::process::id() as i32), ("y", i32::MAX)];
        assert!(CellUse::of_cells(&ids).iter().all(|one| one.process_count == 0));
    }
}
