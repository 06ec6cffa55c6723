//! The control group that holds every program, and this process stays out of: what freezes, limits
//! or fills it leaves init alone. It is reached by descriptors, whatever is mounted over its paths.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{Context, InitError};

const ROOT: &str = "/sys/fs/cgroup";
const PROGRAMS: &str = "/sys/fs/cgroup/cell";
/// How often it is looked whether the group is empty.
const POLL: Duration = Duration::from_millis(5);
/// More than its files say, in bytes.
const SAYS_BYTES_MAX: usize = 512;

/// The group (kernel: Documentation/admin-guide/cgroup-v2.rst).
pub struct Group {
    /// `cgroup.procs`, by which a process joins.
    pub procs: File,
    events: File,
    current: File,
    reclaim: Option<File>,
}

impl Group {
    /// Makes the group, limited to `count_max` processes and threads.
    pub fn make(count_max: u64) -> Result<Self, InitError> {
        Self::try_make(count_max).context(|| "limiting the cell's processes")
    }

    fn try_make(count_max: u64) -> io::Result<Self> {
        fs::write(format!("{ROOT}/cgroup.subtree_control"), "+pids")?;
        fs::create_dir_all(PROGRAMS)?;
        fs::write(format!("{PROGRAMS}/pids.max"), count_max.to_string())?;
        let to_write = |path: String| OpenOptions::new().write(true).open(path);
        Ok(Self {
            procs: to_write(format!("{PROGRAMS}/cgroup.procs"))?,
            events: File::open(format!("{PROGRAMS}/cgroup.events"))?,
            current: File::open(format!("{PROGRAMS}/pids.current"))?,
            reclaim: to_write(format!("{ROOT}/memory.reclaim")).ok(),
        })
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

/// What one of the group's files says now.
fn said(file: &File) -> String {
    let mut bytes = [0; SAYS_BYTES_MAX];
    let count = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(bytes.get(..count).unwrap_or_default()).into_owned()
}
