//! The control group of a guest's processes, where the host gives one.
//!
//! What a guest kernel has of the host beside its memory file, from page tables to pipes, is
//! counted by the host's memory controller alone. The guest kernel joins its group before it
//! executes anything, and its stubs are born there. The supervisor stays outside: what it reads
//! of images is nobody's alone.
//!
//! Both versions of control groups are known (kernel: Documentation/admin-guide/cgroup-v2.rst
//! and cgroup-v1/memory.rst). As with other runtimes, groups lie below one of Exocell's at the
//! top of the hierarchy, `exocell/CELL`. Where the operator's own group has a limit, cells stay
//! in it: that limit is his word on what they take.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where hosts have the controllers' file systems.
const MOUNTED: &str = "/sys/fs/cgroup";
/// The group above those of all cells.
const PARENT: &str = "exocell";
/// A limit from here on is none.
const UNLIMITED: u64 = 1 << 62;
/// How long the last processes of a group may take to end.
const EMPTY_MAX: Duration = Duration::from_secs(2);

/// Which controller it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    /// The file that says how many of a group's processes were ended for lack of memory.
    fn events(self) -> &'static str {
        match self {
            Self::One => "memory.oom_control",
            Self::Two => "memory.events",
        }
    }
}

/// How a process comes in. Where one that lives already moves as a whole, the host first waits
/// until nobody forks or ends (cgroup_threadgroup_rwsem), which takes it 5 to 11 ms; neither of
/// these needs that.
#[derive(Debug)]
enum Entry {
    /// Version 1: a thread moves itself by writing 0 here.
    Tasks(File),
    /// Version 2: it is born here (clone3(2), CLONE_INTO_CGROUP).
    Birth(File),
}

/// The group of one cell, held open.
#[derive(Debug)]
pub struct Group {
    name: String,
    parent: File,
    entry: Entry,
    limit: File,
    events: File,
    /// Bytes that all its processes may have of the host's memory, their memory file included,
    /// when it was made.
    pub bytes_max: u64,
}

impl Group {
    /// Makes the group `name`, whose processes may have `bytes_max` bytes of memory; `None`
    /// where the host has no such controller, or the caller may not use it.
    ///
    /// # Errors
    /// The host's, where there is a controller and a group cannot be made.
    pub fn make(name: &str, bytes_max: u64) -> io::Result<Option<Self>> {
        let Ok((version, parent)) = parent() else { return Ok(None) };
        let path = parent.join(name);
        match fs::create_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Self::open(version, &parent, name, bytes_max).map(Some).inspect_err(|_| {
            let _ = fs::remove_dir(&path);
        })
    }

    fn open(version: Version, parent: &Path, name: &str, bytes_max: u64) -> io::Result<Self> {
        let path = parent.join(name);
        fs::write(path.join(version.limit()), bytes_max.to_string())?;
        match version {
            // Not on every host: it counts what was swapped out.
            Version::One => {
                drop(fs::write(path.join("memory.memsw.limit_in_bytes"), bytes_max.to_string()))
            }
            // A guest without one of its processes is none, and one that is swapped out to make
            // room for more has more. No such file is there where the host does not swap.
            Version::Two => {
                fs::write(path.join("memory.oom.group"), "1")?;
                drop(fs::write(path.join("memory.swap.max"), "0"));
            }
        }
        Ok(Self {
            name: name.to_owned(),
            parent: File::open(parent)?,
            entry: match version {
                Version::One => Entry::Tasks(File::options().write(true).open(path.join("tasks"))?),
                Version::Two => Entry::Birth(File::open(&path)?),
            },
            limit: File::options().write(true).open(path.join(version.limit()))?,
            events: File::open(path.join(version.events()))?,
            bytes_max,
        })
    }

    /// Moves the calling process here, which must have one thread and come from [`super::fork_into`].
    pub(crate) fn join(&self) -> io::Result<()> {
        match &self.entry {
            Entry::Tasks(tasks) => {
                nix::unistd::write(tasks, b"0").map(drop).map_err(io::Error::from)
            }
            Entry::Birth(_) => Ok(()),
        }
    }

    /// The directory that a process is born into, where it cannot [`Self::join`] later.
    pub(super) fn birthplace(&self) -> Option<BorrowedFd<'_>> {
        match &self.entry {
            Entry::Tasks(_) => None,
            Entry::Birth(directory) => Some(directory.as_fd()),
        }
    }

    /// Changes what its processes may have.
    ///
    /// # Errors
    /// The host's; version 1 refuses less than they have and do not give back (EBUSY).
    pub fn limit(&self, bytes_max: u64) -> io::Result<()> {
        // The place in the file does not matter to it.
        nix::unistd::write(&self.limit, bytes_max.to_string().as_bytes())
            .map(drop)
            .map_err(io::Error::from)
    }

    /// How many of its processes the host has ended because the group had all that it may have.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let mut text = [0; 512];
        let mut events = &self.events;
        let read = events.seek(SeekFrom::Start(0)).and_then(|_| events.read(&mut text));
        let text = String::from_utf8_lossy(&text[..read.unwrap_or(0)]);
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// What [`Self::remove`] needs of a jail's path rules: removal of directories below it.
    #[must_use]
    pub fn parent(&self) -> BorrowedFd<'_> {
        self.parent.as_fd()
    }

    /// Removes the group once its processes are dead, which they must be about to be. What
    /// stays because they are not is for [`remove`].
    pub fn remove(&self) {
        let flag = nix::unistd::UnlinkatFlags::RemoveDir;
        once_empty(|| {
            nix::unistd::unlinkat(&self.parent, self.name.as_str(), flag).map_err(io::Error::from)
        });
    }
}

/// Removes the group that a dead cell has left; mostly there is none. Its lock may be free a
/// moment before its last process is gone.
pub fn remove(name: &str) {
    for place in [Path::new(MOUNTED).join("memory"), PathBuf::from(MOUNTED)] {
        once_empty(|| fs::remove_dir(place.join(PARENT).join(name)));
    }
}

/// CPU time of all processes that the group of the cell `name` has and had, in nanoseconds; `None`
/// where there is no such group, or the host counts CPU time by others (version 1).
#[must_use]
pub fn cpu_ns(name: &str) -> Option<u64> {
    let path = Path::new(MOUNTED).join(PARENT).join(name).join("cpu.stat");
    let text = fs::read_to_string(path).ok()?;
    let micros = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    micros.trim().parse::<u64>().ok()?.checked_mul(1000)
}

/// Whether the process `pid` is in the group of the cell `name` (version 2).
#[must_use]
pub fn holds(name: &str, pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let end = format!("/{PARENT}/{name}");
    text.lines().any(|line| line.starts_with("0::") && line.ends_with(&end))
}

fn once_empty(remove: impl Fn() -> io::Result<()>) {
    let until = Instant::now() + EMPTY_MAX;
    let busy = |error: &io::Error| error.kind() == io::ErrorKind::ResourceBusy;
    while remove().is_err_and(|error| busy(&error)) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether cells of the caller have groups; else why not.
///
/// # Errors
/// What is missing.
pub fn offered() -> Result<String, String> {
    match parent() {
        Ok((Version::One, _)) => {
            Ok("cells have a memory control group each (version 1)".to_owned())
        }
        Ok((Version::Two, _)) => {
            Ok("cells have a memory control group each (version 2)".to_owned())
        }
        Err(error) => Err(format!(
            "no memory control group can be made below {MOUNTED} ({error}); a hostile guest kernel \
             is bounded by resource limits alone; run as root on a host that delegates the memory \
             controller"
        )),
    }
}

/// Exocell's own group, made where there is none, in which the caller may make groups.
fn parent() -> io::Result<(Version, PathBuf)> {
    let found = own()?;
    nix::unistd::access(&found.1, nix::unistd::AccessFlags::W_OK)?;
    Ok(found)
}

/// Whether a group that the caller is in, or one above it, has a limit.
fn is_limited(version: Version) -> bool {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = |line: &str| match version {
        Version::One => line.split_once(":memory:").map(|(_, path)| path.to_owned()),
        Version::Two => line.strip_prefix("0::").map(str::to_owned),
    };
    let Some(own) = text.lines().find_map(own) else { return false };
    let mounted = match version {
        Version::One => Path::new(MOUNTED).join("memory"),
        Version::Two => PathBuf::from(MOUNTED),
    };
    let path = mounted.join(own.trim_start_matches('/'));
    let above = path.ancestors().take_while(|path| path.starts_with(&mounted));
    let limits = above.filter_map(|path| fs::read_to_string(path.join(version.limit())).ok());
    // Version 1 has no word for none: it is the most that there can be, in whole pages.
    limits.filter_map(|limit| limit.trim().parse().ok()).any(|limit: u64| limit < UNLIMITED)
}

fn own() -> io::Result<(Version, PathBuf)> {
    let limited = |version| match is_limited(version) {
        true => {
            Err(io::Error::other("the operator's own group has a limit, which holds for cells"))
        }
        false => Ok(()),
    };
    let one = Path::new(MOUNTED).join("memory");
    if one.join("memory.limit_in_bytes").exists() {
        limited(Version::One)?;
        return Ok((Version::One, made(&one)?));
    }
    let two = Path::new(MOUNTED);
    let controllers = fs::read_to_string(two.join("cgroup.controllers"))?;
    if !controllers.split_whitespace().any(|name| name == "memory") {
        return Err(io::Error::other("the host has no memory controller"));
    }
    limited(Version::Two)?;
    fs::write(two.join("cgroup.subtree_control"), "+memory")?;
    let parent = made(two)?;
    fs::write(parent.join("cgroup.subtree_control"), "+memory")?;
    Ok((Version::Two, parent))
}

fn made(place: &Path) -> io::Result<PathBuf> {
    let parent = place.join(PARENT);
    match fs::create_dir(&parent) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(()) | Err(_) => Ok(parent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_counts_from_nothing_and_goes_when_it_is_empty() {
        let name = format!("test-{}", std::process::id());
        // Without the privilege there is nothing to test; `offered` says so.
        let Some(group) = Group::make(&name, 64 << 20).unwrap() else { return };
        assert_eq!((group.oom_kills(), group.bytes_max), (0, 64 << 20));
        let (_, parent) = parent().unwrap();
        assert!(parent.join(&name).exists());
        group.limit(32 << 20).unwrap();
        let (version, _) = own().unwrap();
        assert_eq!(cpu_ns(&name).is_some(), version == Version::Two);
        assert!(!holds(&name, std::process::id().cast_signed()));
        let limit = fs::read_to_string(parent.join(&name).join(version.limit())).unwrap();
        assert_eq!(limit.trim(), (32 << 20).to_string());
        group.remove();
        assert!(!parent.join(&name).exists());
        remove(&name);
    }
}
