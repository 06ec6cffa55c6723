//! The control group that holds every program, and this process stays out of.

use std::fs::{self, File, OpenOptions};
use std::io;

use crate::error::{Context, InitError};

const ROOT: &str = "/sys/fs/cgroup";
const PROGRAMS: &str = "/sys/fs/cgroup/cell";

/// Makes the group, limited to `count_max` processes and threads (kernel:
/// Documentation/admin-guide/cgroup-v2.rst, pids); its `cgroup.procs`, opened.
pub fn set_up(count_max: u64) -> Result<File, InitError> {
    make(count_max).context(|| "limiting the cell's processes")
}

fn make(count_max: u64) -> io::Result<File> {
    fs::write(format!("{ROOT}/cgroup.subtree_control"), "+pids")?;
    fs::create_dir_all(PROGRAMS)?;
    fs::write(format!("{PROGRAMS}/pids.max"), count_max.to_string())?;
    OpenOptions::new().write(true).open(format!("{PROGRAMS}/cgroup.procs"))
}

/// Has the guest kernel take back `bytes` of memory that programs can do without; it
/// fails with `WouldBlock` where there is less (the same, memory.reclaim).
pub fn reclaim(bytes: u64) -> io::Result<()> {
    fs::write(format!("{ROOT}/memory.reclaim"), bytes.to_string())
}

/// Processes and threads of the cell's programs.
pub fn process_count() -> u64 {
    let current = fs::read_to_string(format!("{PROGRAMS}/pids.current"));
    current.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
