//! What the host sees of a cell: processes, open files, mounts, directories.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

/// A pid namespace, as /proc names it.
pub type Namespace = PathBuf;

pub fn namespace(pid: i32) -> Option<Namespace> {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
    let own = fs::read_link("/proc/self/ns/pid").expect("our own namespace");
    (link != own).then_some(link)
}

pub fn pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The processes of `namespace`, in the order of their pids inside it: the
/// supervisor, the guest kernel, its stubs.
pub fn processes(namespace: &Namespace) -> Vec<i32> {
    let mut found: Vec<(i32, i32)> = pids()
        .into_iter()
        .filter(|pid| self::namespace(*pid).as_ref() == Some(namespace))
        .filter_map(|pid| Some((inner_pid(pid)?, pid)))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

fn status(pid: i32, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim_start_matches(':').trim().to_owned())
}

fn inner_pid(pid: i32) -> Option<i32> {
    status(pid, "NSpid")?.split_ascii_whitespace().last()?.parse().ok()
}

/// The children of `pid`.
pub fn children(pid: i32) -> Vec<i32> {
    let is_child = |child: &i32| status(*child, "PPid").as_deref() == Some(&pid.to_string());
    pids().into_iter().filter(is_child).collect()
}

/// The first child of `pid` that lives in a pid namespace of its own.
pub fn jailed_child(pid: i32) -> Option<i32> {
    children(pid).into_iter().find(|child| namespace(*child).is_some())
}

/// Whether a signal has stopped `pid`. A thread in vfork(2) cannot stop before
/// the other lets it go; it does nothing meanwhile.
pub fn is_stopped(pid: i32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let states = tasks.map(|task| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        ["T (stopped)", "D (disk sleep)"].iter().any(|s| status.contains(&format!("State:\t{s}")))
    });
    let states: Vec<bool> = states.collect();
    !states.is_empty() && states.iter().all(|stands| *stands)
}

/// The CPU of each thread of `pid` that may run on one alone.
pub fn bound_threads(pid: i32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    // A list or a range of several is no number.
    ids.filter_map(|id| status(id, "Cpus_allowed_list")?.parse().ok()).collect()
}

/// What /proc/PID/cmdline holds, blanks for the zeros.
pub fn command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Whether a process's command line has `word` in it.
pub fn is_running(word: &str) -> bool {
    pids().into_iter().any(|pid| command_line(pid).contains(word))
}

/// A file by device and inode.
pub type FileId = (u64, u64);

/// The nameless files (guest memory, disks) that `pids` hold open.
pub fn nameless_files(pids: &[i32]) -> BTreeSet<FileId> {
    let mut found = BTreeSet::new();
    for pid in pids {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for entry in entries {
            if let Ok(data) = fs::metadata(entry.path())
                && data.is_file()
                && data.nlink() == 0
            {
                found.insert((data.dev(), data.ino()));
            }
        }
    }
    found
}

/// The nameless files of every process on the host.
pub fn all_nameless_files() -> BTreeSet<FileId> {
    nameless_files(&pids())
}

/// Whether a mount of ours names `word`.
pub fn is_mounted(word: &str) -> bool {
    fs::read_to_string("/proc/self/mountinfo").expect("mountinfo").contains(word)
}

/// The state root that the tests use.
pub fn state_root() -> PathBuf {
    match std::env::var_os("EXOCELL_ROOT") {
        Some(root) => root.into(),
        None => Path::new("/var/lib/exocell").to_owned(),
    }
}

/// The directory of the record of cell `id`.
pub fn record(id: &str) -> PathBuf {
    state_root().join("cells").join(id)
}

/// The names of the records there are.
pub fn records() -> BTreeSet<String> {
    let entries = fs::read_dir(state_root().join("cells")).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.path().is_dir());
    directories.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Sends SIGKILL; a process that is gone is fine.
pub fn kill(pid: i32) {
    send(pid, Signal::SIGKILL);
}

/// Sends a signal; a process that is gone is fine.
pub fn send(pid: i32, signal: Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal);
}

/// CPU time in user space that a process has used, in ticks of the clock; 0 when it is gone.
pub fn user_ticks(pid: i32) -> u64 {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before may hold anything but ends with the last bracket; see proc(5).
    let fields = line.rsplit_once(')').map_or("", |(_, fields)| fields);
    fields.split_ascii_whitespace().nth(11).and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

/// Whether there is a control group of cell `id`.
pub fn has_control_group(id: &str) -> bool {
    let places = ["/sys/fs/cgroup/memory/exocell", "/sys/fs/cgroup/exocell"];
    places.iter().any(|place| Path::new(place).join(id).exists())
}
