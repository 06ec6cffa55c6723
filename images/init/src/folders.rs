//! Host folders: 9P2000.L over vsock (kernel: Documentation/filesystems/9p.rst).

use std::os::fd::AsRawFd;

use exocell_agent::{FOLDER_PORT_BASE, FolderMount};
use nix::mount::{MsFlags, mount};

use crate::dev::make_mount_point;
use crate::error::{Context, InitError};
use crate::vsock;

/// The largest message, in bytes: fewer round trips for large files.
const MSIZE_BYTES: u32 = 128 * 1024;

/// Mounts every folder on its mount point, made if missing.
pub fn mount_all(folders: &[FolderMount]) -> Result<(), InitError> {
    (FOLDER_PORT_BASE..).zip(folders).try_for_each(|(port, folder)| mount_one(port, folder))
}

fn mount_one(port: u32, folder: &FolderMount) -> Result<(), InitError> {
    let target = folder.guest_path.as_str();
    make_mount_point(target)?;
    let stream =
        vsock::connect_host(port).context(|| format!("connecting to the folder for {target}"))?;
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_RDONLY, folder.read_only);
    let options = options(stream.as_raw_fd());
    mount(Some("exocell"), target, Some("9p"), flags, Some(options.as_str()))
        .context(|| format!("mounting the folder on {target}"))
}

/// The mount options; the kernel takes its own references to `fd`.
///
/// - `cache=mmap`: with `none` a shared writable mapping is refused (EINVAL), which
///   SQLite's WAL and several linkers need. File pages are cached while a file
///   is in use, names and attributes are not, so the host's changes are seen at
///   the next open, and ours reach the host at close or fsync.
/// - `access=any`: one attach for all guest users, because the host serves the
///   folder under one identity; modes and owners are still checked here.
fn options(fd: i32) -> String {
    format!(
        "trans=fd,rfdno={fd},wfdno={fd},version=9p2000.L,msize={MSIZE_BYTES},cache=mmap,access=any"
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_options_name_the_stream_twice_and_allow_shared_mappings() {
        let options = super::options(7);
        assert!(options.starts_with("trans=fd,rfdno=7,wfdno=7,version=9p2000.L,"));
        assert!(options.contains("cache=mmap"));
    }
}
