//! The control group that holds every program, and this process stays out of: what freezes, limits
//! or fills it leaves init alone. It is reached by descriptors, and lies nowhere in the file system:
//! programs mount what their own namespace shows of it, which begins with this group.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use exocell_agent::oci::Resources;
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;

use crate::error::{Context, InitError};
use crate::own_proc;

const ROOT: &str = "/sys/fs/cgroup";
const PROGRAMS: &str = "/sys/fs/cgroup/cell";
/// Its path, as init's namespace shows it.
const NAME: &str = "/cell";
/// What the group's own files limit, as far as the kernel has it.
const CONTROLLERS: [&str; 5] = ["cpuset", "cpu", "io", "memory", "pids"];
/// How often it is looked whether the group is empty.
const POLL: Duration = Duration::from_millis(5);
/// More than its files say, in bytes.
const SAYS_BYTES_MAX: usize = 512;
/// Docker's period, in microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// The group (kernel: Documentation/admin-guide/cgroup-v2.rst).
pub struct Group {
    /// `cgroup.procs`, by which a process joins.
    pub procs: File,
    /// Its directory.
    directory: File,
    /// `cgroup.subtree_control`.
    divided: File,
    events: File,
    memory_events: Option<File>,
    current: File,
    reclaim: Option<File>,
}

impl Group {
    /// Makes the group, limited to `count_max` processes and threads, and takes the file system
    /// away.
    pub fn make(count_max: u64) -> Result<Self, InitError> {
        let group = Self::try_make(count_max).context(|| "limiting the cell's processes")?;
        umount2(ROOT, MntFlags::MNT_DETACH).context(|| "taking the control groups away")?;
        Ok(group)
    }

    fn try_make(count_max: u64) -> io::Result<Self> {
        let known = fs::read_to_string(format!("{ROOT}/cgroup.controllers"))?;
        let has = |name: &&str| known.split_whitespace().any(|known| known == *name);
        let wanted: Vec<String> =
            CONTROLLERS.iter().filter(|name| has(name)).map(|name| format!("+{name}")).collect();
        fs::write(format!("{ROOT}/cgroup.subtree_control"), wanted.join(" "))?;
        fs::create_dir_all(PROGRAMS)?;
        fs::write(format!("{PROGRAMS}/pids.max"), count_max.to_string())?;
        let to_write = |path: String| OpenOptions::new().write(true).open(path);
        Ok(Self {
            procs: to_write(format!("{PROGRAMS}/cgroup.procs"))?,
            directory: File::open(PROGRAMS)?,
            divided: File::open(format!("{PROGRAMS}/cgroup.subtree_control"))?,
            events: File::open(format!("{PROGRAMS}/cgroup.events"))?,
            memory_events: File::open(format!("{PROGRAMS}/memory.events")).ok(),
            current: File::open(format!("{PROGRAMS}/pids.current"))?,
            reclaim: to_write(format!("{ROOT}/memory.reclaim")).ok(),
        })
    }

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

    /// Says that programs may have `bytes` of memory, unless they have more now: the kernel would
    /// end some of them to make it so.
    pub fn tell_memory(&self, bytes: u64) -> io::Result<()> {
        let current = openat(
            self.directory.as_fd(),
            "memory.current",
            OFlag::O_RDONLY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        let used = said(&current.into()).trim().parse().unwrap_or(u64::MAX);
        if used < bytes { self.write("memory.max", &bytes.to_string()) } else { Ok(()) }
    }

    fn write(&self, file: &str, value: &str) -> io::Result<()> {
        File::from(self.open(file)?).write_all(value.as_bytes())
    }

    fn open(&self, file: &str) -> nix::Result<OwnedFd> {
        openat(self.directory.as_fd(), file, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())
    }

    /// The `cgroup.procs` of the group below it that process `pid` is in, where programs have made
    /// groups that are limited: no process may be above them.
    pub fn procs_beside(&self, pid: i32) -> Option<File> {
        if said(&self.divided).trim().is_empty() {
            return None;
        }
        let groups = own_proc::read(&format!("{pid}/cgroup"));
        let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let below = path.strip_prefix(NAME)?.strip_prefix('/')?;
        self.open(&format!("{below}/cgroup.procs")).ok().map(File::from)
    }

    /// How many of its processes the kernel has ended for lack of memory.
    pub fn oom_kills(&self) -> u64 {
        let said = self.memory_events.as_ref().map(said).unwrap_or_default();
        crate::stats::number(&said, "oom_kill")
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
        let until = Instant::now() + limit;
        while !said(&self.events).lines().any(|line| line == "populated 0") {
            if Instant::now() >= until {
                return false;
            }
            sleep(POLL);
        }
        true
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
