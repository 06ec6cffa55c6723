//! The control groups of programs, which this process stays out of: what freezes, limits or fills
//! them leaves init alone. They are reached by descriptors, and lie nowhere in the file system:
//! programs mount what their own namespace shows of them, which begins with their container's group.
//!
//! ```text
//! / ── init
//! └─ programs (how many processes all of them may be)
//!    ├─ cell: the cell's own program
//!    └─ c1, c2: the containers beside it
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use exocell_agent::oci::{DeviceRule, Resources};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::error::{Context, InitError};
use crate::sys::bpf;
use crate::{device_filter, own_proc};

const ROOT: &str = "/sys/fs/cgroup";
const PROGRAMS: &str = "programs";
/// The group of the cell's own program.
const OWN: &str = "cell";
/// What a group's own files limit, as far as the kernel has it.
const CONTROLLERS: [&str; 5] = ["cpuset", "cpu", "io", "memory", "pids"];
/// How often it is looked whether the group is empty.
const POLL: Duration = Duration::from_millis(5);
/// More than its files say, in bytes.
const SAYS_BYTES_MAX: usize = 512;
/// Of a list of processes and of counters, in bytes.
const LISTED_BYTES_MAX: u64 = 256 << 10;
/// Levels of groups that programs may have made below their own and that are removed with it.
const GROUPS_DEPTH_MAX: usize = 16;
/// Docker's period, in microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// The group that holds those of all containers (kernel: Documentation/admin-guide/cgroup-v2.rst).
pub struct Groups {
    directory: File,
    events: File,
}

impl Groups {
    /// Makes it, limited to `count_max` processes and threads, and in it the group of the cell's own
    /// program; takes the file system away.
    pub fn make(count_max: u64) -> Result<(Self, Group), InitError> {
        let made = Self::try_make(count_max).context(|| "limiting the cell's processes")?;
        umount2(ROOT, MntFlags::MNT_DETACH).context(|| "taking the control groups away")?;
        Ok(made)
    }

    fn try_make(count_max: u64) -> io::Result<(Self, Group)> {
        let root = File::open(ROOT)?;
        divide(&root)?;
        let directory = make_below(&root, PROGRAMS)?;
        divide(&directory)?;
        write(&directory, "pids.max", &count_max.to_string())?;
        let groups = Self { events: open(&directory, "cgroup.events")?, directory };
        let reclaim = open_with(&root, "memory.reclaim", OFlag::O_WRONLY).ok();
        let own = Group { reclaim, ..groups.make_one(OWN)? };
        own.write("pids.max", &count_max.to_string())?;
        Ok((groups, own))
    }

    /// Makes the group of one more container, which is called `name`.
    pub fn add(&self, name: &str) -> Result<Group, InitError> {
        self.make_one(name).context(|| format!("making the control group {name}"))
    }

    fn make_one(&self, name: &str) -> io::Result<Group> {
        let directory = make_below(&self.directory, name)?;
        Ok(Group {
            path: format!("/{PROGRAMS}/{name}"),
            procs: open_with(&directory, "cgroup.procs", OFlag::O_WRONLY)?,
            divided: open(&directory, "cgroup.subtree_control")?,
            events: open(&directory, "cgroup.events")?,
            memory_events: open(&directory, "memory.events").ok(),
            current: open(&directory, "pids.current")?,
            reclaim: None,
            filter: Mutex::default(),
            directory,
        })
    }

    /// Removes the group `name`, in which nothing runs, and those that programs have made in it.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let directory = open(&self.directory, name)?;
        for _ in 0..GROUPS_DEPTH_MAX {
            remove_below(&directory, GROUPS_DEPTH_MAX);
            match unlinkat(&self.directory, name, UnlinkatFlags::RemoveDir) {
                Err(Errno::EBUSY) => {}
                done => return Ok(done?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Waits until no process is in any of them, at most `limit`; whether none is.
    pub fn empty_within(&self, limit: Duration) -> bool {
        empties_within(&self.events, limit)
    }
}

/// Removes the groups below `directory` that have none below themselves any more, the deepest
/// first, so many levels down.
fn remove_below(directory: &File, depth: usize) {
    let Ok(copy) = open(directory, ".") else { return };
    let Ok(mut entries) = Dir::from_fd(copy.into()) else { return };
    let is_group = |entry: &nix::dir::Entry| entry.file_type() == Some(nix::dir::Type::Directory);
    let names: Vec<_> = entries.iter().flatten().filter(is_group).collect();
    for entry in names {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        if let (Ok(below), true) = (open(directory, name.as_str()), depth > 0) {
            remove_below(&below, depth - 1);
        }
        let _ = unlinkat(directory, name.as_str(), UnlinkatFlags::RemoveDir);
    }
}

/// Lets the groups below `directory` have limits, as far as the kernel has them.
fn divide(directory: &File) -> io::Result<()> {
    let known = said(&open(directory, "cgroup.controllers")?);
    let has = |name: &&str| known.split_whitespace().any(|known| known == *name);
    let wanted: Vec<String> =
        CONTROLLERS.iter().filter(|name| has(name)).map(|name| format!("+{name}")).collect();
    write(directory, "cgroup.subtree_control", &wanted.join(" "))
}

/// Adds the processes in the group `directory` and in those below, so many levels down.
fn collect_pids(directory: &File, depth: usize, pids: &mut Vec<i32>) {
    let mut text = String::new();
    let listed = open(directory, "cgroup.procs")
        .and_then(|file| file.take(LISTED_BYTES_MAX).read_to_string(&mut text));
    if listed.is_ok() {
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    let Ok(copy) = open(directory, ".") else { return };
    let Ok(mut entries) = Dir::from_fd(copy.into()) else { return };
    for entry in entries.iter().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_below =
            entry.file_type() == Some(nix::dir::Type::Directory) && !name.starts_with('.');
        if let (true, true, Ok(below)) = (is_below, depth > 0, open(directory, &name)) {
            collect_pids(&below, depth - 1, pids);
        }
    }
}

fn make_below(directory: &File, name: &str) -> io::Result<File> {
    match mkdirat(directory, name, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(Errno::EEXIST) => open(directory, name),
        Err(errno) => Err(errno.into()),
    }
}

fn open(directory: &File, name: &str) -> io::Result<File> {
    open_with(directory, name, OFlag::O_RDONLY)
}

fn open_with(directory: &File, name: &str, how: OFlag) -> io::Result<File> {
    Ok(openat(directory.as_fd(), name, how | OFlag::O_CLOEXEC, Mode::empty())?.into())
}

fn write(directory: &File, file: &str, value: &str) -> io::Result<()> {
    open_with(directory, file, OFlag::O_WRONLY)?.write_all(value.as_bytes())
}

/// Waits until a group whose `cgroup.events` this is has no process.
fn empties_within(events: &File, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    while !said(events).lines().any(|line| line == "populated 0") {
        if Instant::now() >= until {
            return false;
        }
        sleep(POLL);
    }
    true
}

/// The group of one container.
pub struct Group {
    /// As init's namespace shows it.
    path: String,
    /// `cgroup.procs`, by which a process joins.
    pub procs: File,
    /// Its directory.
    directory: File,
    /// `cgroup.subtree_control`.
    divided: File,
    events: File,
    memory_events: Option<File>,
    current: File,
    /// Of the cell's own: all of the guest's memory.
    reclaim: Option<File>,
    /// The program that says which devices its processes may use; `None` where that is every one.
    filter: Mutex<Option<OwnedFd>>,
}

impl Group {
    /// Limits it as `resources` say.
    ///
    /// # Errors
    /// Names the file that does not take its value.
    pub fn limit(&self, resources: &Resources) -> Result<(), InitError> {
        for (file, value) in values(resources) {
            let plain = |c: char| c.is_ascii_lowercase() || c == '.' || c == '_';
            if !file.chars().all(plain) || file.starts_with("cgroup.") {
                return Err(InitError::invalid(format!("{file} is no limit of a control group")));
            }
            self.write(&file, &value).context(|| format!("setting {file} to {value:?}"))?;
        }
        Ok(())
    }

    /// Lets its processes, and those of groups below, use the devices that `rules` allow beside
    /// those that every program may use, and no others.
    ///
    /// # Errors
    /// A rule says nothing that can be done, or the kernel has no such filters.
    pub fn admit_devices(&self, rules: &[DeviceRule]) -> Result<(), InitError> {
        let program = device_filter::program(rules).map_err(InitError::invalid)?;
        let mut filter = self.filter.lock().unwrap_or_else(PoisonError::into_inner);
        let admit = || -> nix::Result<Option<OwnedFd>> {
            let loaded = program.as_deref().map(bpf::load_device_filter).transpose()?;
            match (&loaded, &*filter) {
                (Some(new), old) => bpf::attach(&self.directory, new, old.as_ref())?,
                (None, Some(old)) => bpf::detach(&self.directory, old)?,
                (None, None) => {}
            }
            Ok(loaded)
        };
        *filter = admit().context(|| "limiting the program's devices")?;
        Ok(())
    }

    /// Says that programs may have `bytes` of memory, unless they have more now: the kernel would
    /// end some of them to make it so.
    pub fn tell_memory(&self, bytes: u64) -> io::Result<()> {
        let current = open(&self.directory, "memory.current")?;
        let used = said(&current).trim().parse().unwrap_or(u64::MAX);
        if used < bytes { self.write("memory.max", &bytes.to_string()) } else { Ok(()) }
    }

    fn write(&self, file: &str, value: &str) -> io::Result<()> {
        write(&self.directory, file, value)
    }

    /// What its file `name` says, and those of the groups below do not; nothing where it does not
    /// say it.
    pub fn says(&self, name: &str) -> String {
        let mut text = String::new();
        let read = open(&self.directory, name)
            .and_then(|file| file.take(LISTED_BYTES_MAX).read_to_string(&mut text));
        // A kernel without it says nothing.
        let _ = read;
        text
    }

    /// Stops every process in it, and in the groups below, or lets them go on; returns when it is
    /// so, or `limit` has passed.
    pub fn freeze(&self, frozen: bool, limit: Duration) -> io::Result<bool> {
        self.write("cgroup.freeze", if frozen { "1" } else { "0" })?;
        let wanted = if frozen { "frozen 1" } else { "frozen 0" };
        let until = Instant::now() + limit;
        while !said(&self.events).lines().any(|line| line == wanted) {
            if Instant::now() >= until {
                return Ok(false);
            }
            sleep(POLL);
        }
        Ok(true)
    }

    /// The processes in it and in the groups below, as this process knows them.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        collect_pids(&self.directory, GROUPS_DEPTH_MAX, &mut pids);
        pids
    }

    /// Ends every process in it, and in the groups below.
    pub fn kill(&self) -> io::Result<()> {
        self.write("cgroup.kill", "1")
    }

    /// The `cgroup.procs` of the group below it that process `pid` is in, where programs have made
    /// groups that are limited: no process may be above them.
    pub fn procs_beside(&self, pid: i32) -> Option<File> {
        if said(&self.divided).trim().is_empty() {
            return None;
        }
        let groups = own_proc::read(&format!("{pid}/cgroup"));
        let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let below = path.strip_prefix(&self.path)?.strip_prefix('/')?;
        open_with(&self.directory, &format!("{below}/cgroup.procs"), OFlag::O_WRONLY).ok()
    }

    /// How many of its processes the kernel has ended for lack of memory.
    pub fn oom_kills(&self) -> u64 {
        let said = self.memory_events.as_ref().map(said).unwrap_or_default();
        let count = said.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Has the guest kernel take back `bytes` of memory that programs can do without; it
    /// fails with `WouldBlock` where there is less (memory.reclaim).
    pub fn reclaim(&self, bytes: u64) -> io::Result<()> {
        let file = self.reclaim.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        file.write_all_at(bytes.to_string().as_bytes(), 0)
    }

    /// Processes and threads in it.
    pub fn process_count(&self) -> u64 {
        said(&self.current).trim().parse().unwrap_or(0)
    }

    /// Waits until no process is in it, at most `limit`; whether none is.
    pub fn empties_within(&self, limit: Duration) -> bool {
        empties_within(&self.events, limit)
    }
}

/// What is to be written to which file.
fn values(resources: &Resources) -> Vec<(String, String)> {
    let mut values = Vec::new();
    let mut set = |file: &str, value: Option<String>| {
        values.extend(value.map(|value| (file.to_owned(), value)));
    };
    let amount = |bytes: i64| match u64::try_from(bytes) {
        Ok(bytes) => bytes.to_string(),
        Err(_) => "max".to_owned(),
    };
    if let Some(memory) = &resources.memory {
        set("memory.max", memory.limit.map(amount));
        set("memory.low", memory.reservation.map(amount));
    }
    if let Some(cpu) = &resources.cpu {
        let period = cpu.period.filter(|period| *period > 0).unwrap_or(CPU_PERIOD_US);
        let quota = cpu.quota.filter(|quota| *quota != 0);
        set("cpu.max", quota.map(|quota| format!("{} {period}", amount(quota))));
        let shares = cpu.shares.filter(|shares| *shares > 0);
        set("cpu.weight", shares.map(|shares| weight(shares).to_string()));
        set("cpuset.cpus", cpu.cpus.clone().filter(|cpus| !cpus.is_empty()));
    }
    if let Some(pids) = &resources.pids {
        set("pids.max", Some(amount(pids.limit)).filter(|_| pids.limit != 0));
    }
    values.extend(resources.unified.clone());
    values
}

/// Shares of the first version's as a weight, by the formula of the runtime specification.
fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// What one of the group's files says now.
fn said(file: &File) -> String {
    let mut bytes = [0; SAYS_BYTES_MAX];
    let count = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(bytes.get(..count).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_agent::oci::{Cpu, Memory, Pids};

    #[test]
    fn limits_are_what_the_files_take() {
        let text = |values: Vec<(String, String)>| {
            values.iter().map(|(file, value)| format!("{file}={value}")).collect::<Vec<_>>()
        };
        let cpu = Cpu { shares: Some(1024), quota: Some(50_000), ..Cpu::default() };
        let resources = Resources {
            memory: Some(Memory { limit: Some(5), reservation: Some(-1) }),
            cpu: Some(cpu),
            pids: Some(Pids { limit: 0 }),
            unified: [("memory.high".to_owned(), "4".to_owned())].into(),
            ..Resources::default()
        };
        let expected = [
            "memory.max=5",
            "memory.low=max",
            "cpu.max=50000 100000",
            "cpu.weight=39",
            "memory.high=4",
        ];
        assert_eq!(text(values(&resources)), expected);
        let none = Cpu { quota: Some(-1), period: Some(1000), ..Cpu::default() };
        let resources = Resources { cpu: Some(none), ..Resources::default() };
        assert_eq!(text(values(&resources)), ["cpu.max=max 1000"]);
        assert_eq!((weight(2), weight(262_144)), (1, 10_000));
    }
}
