//! The kernel's file systems of the new root, laid out as docker does; what a program has for
//! itself is mounted with it ([`crate::mounts`]).

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};

use exocell_agent::oci::{Device, DeviceKind};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::{AtFlags, statat};

use crate::error::{Context, InitError};
use crate::nodes::NODES;
use crate::own_proc;
use crate::stats::meminfo_bytes;

const LINKS: [(&str, &str); 6] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("/proc/kcore", "/dev/core"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// A file system to mount.
struct Mount {
    kind: &'static str,
    target: &'static str,
    flags: MsFlags,
    data: &'static str,
}

const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

const SYS: Mount = Mount { kind: "sysfs", target: "/sys", flags: SAFE, data: "" };
const KERNEL: [Mount; 2] =
    [SYS, Mount { kind: "cgroup2", target: "/sys/fs/cgroup", flags: SAFE, data: "nsdelegate" }];
const TERMINALS: Mount = Mount {
    kind: "devpts",
    target: "/dev/pts",
    flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
    data: "newinstance,ptmxmode=0666,mode=0620,gid=5",
};

/// Files in memory, with so many 16ths of what they may take all together.
struct InMemory {
    target: &'static str,
    flags: MsFlags,
    mode: &'static str,
    share: u64,
}

const WITHOUT_DEVICES: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

const DEV: InMemory = InMemory { target: "/dev", flags: MsFlags::MS_NOSUID, mode: "755", share: 1 };
/// What programs expect to write to, over a read-only root.
const SCRATCH: [InMemory; 2] = [
    InMemory { target: "/tmp", flags: WITHOUT_DEVICES, mode: "1777", share: 4 },
    InMemory { target: "/run", flags: WITHOUT_DEVICES, mode: "755", share: 1 },
];
/// With less, not even devices have their nodes.
const IN_MEMORY_KIB_MIN: u64 = 1024;
/// What they leave at least, where there is that much.
const LEFT_KIB_MIN: u64 = 8 << 10;

/// Mounts them all, in the root this process is in. It is over `image`, and cannot be written where
/// there is none.
pub fn mount_all(image: Option<&File>) -> Result<(), InitError> {
    KERNEL.iter().try_for_each(Mount::mount)?;
    mount_devices().and_then(|all_kib| mount_scratch(image, all_kib))
}

/// The same for the root of a container beside the cell's own program: what it shares with that is
/// mounted once more, and the rest is as much as if it were alone.
pub fn mount_beside(image: Option<&File>) -> Result<(), InitError> {
    SYS.mount()?;
    mount_devices().and_then(|all_kib| mount_scratch(image, all_kib))
}

/// The same for a root of the depot, over whose /tmp and /run there is what its specification says.
pub fn mount_in_depot() -> Result<(), InitError> {
    SYS.mount()?;
    mount_devices().map(drop)
}

/// How much all files in memory may take, in KiB.
fn mount_devices() -> Result<u64, InitError> {
    let all_kib = in_memory_kib(&own_proc::read("meminfo"));
    DEV.mount(all_kib)?;
    make_nodes()?;
    TERMINALS.mount()?;
    Ok(all_kib)
}

fn mount_scratch(image: Option<&File>, all_kib: u64) -> Result<(), InitError> {
    match image {
        None => SCRATCH.iter().try_for_each(|own| own.mount(all_kib)),
        Some(image) => make_tmp(image),
    }
}

/// What all files in memory may take: what they hold stays when programs are ended, and a
/// guest kernel that has no memory and nobody left to end is the cell's end. So an 8th of
/// the memory, or what one more program takes, is never theirs.
fn in_memory_kib(meminfo: &str) -> u64 {
    let kib = |name| meminfo_bytes(meminfo, name) >> 10;
    let left = (kib("MemTotal") / 8).max(LEFT_KIB_MIN);
    kib("MemAvailable").saturating_sub(left).max(IN_MEMORY_KIB_MIN)
}

/// Makes /tmp if the image has none: few programs do without. Where the container has removed the
/// image's, it stays removed.
fn make_tmp(image: &File) -> Result<(), InitError> {
    let of_image = statat(image, "tmp", AtFlags::SYMLINK_NOFOLLOW);
    if of_image.is_ok() || fs::symlink_metadata("/tmp").is_ok() {
        return Ok(());
    }
    make_mount_point("/tmp")?;
    set_mode("/tmp", 0o1777)
}

fn set_mode(path: &str, mode: u32) -> Result<(), InitError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .context(|| format!("setting the mode of {path}"))
}

impl Mount {
    fn mount(&self) -> Result<(), InitError> {
        let Self { kind, target, flags, data } = self;
        make_mount_point(target)?;
        mount(Some(*kind), *target, Some(*kind), *flags, Some(*data))
            .context(|| format!("mounting {kind} on {target}"))
    }
}

impl InMemory {
    fn mount(&self, all_kib: u64) -> Result<(), InitError> {
        let Self { target, flags, mode, share } = self;
        make_mount_point(target)?;
        let data = format!("mode={mode},size={}k", all_kib * share / 16);
        mount(Some("tmpfs"), *target, Some("tmpfs"), *flags, Some(data.as_str()))
            .context(|| format!("mounting tmpfs on {target}"))
    }
}

/// Makes the directory `target` if it is missing.
///
/// # Errors
/// On a read-only root that lacks it, with the remedy.
pub fn make_mount_point(target: &str) -> Result<(), InitError> {
    fs::create_dir_all(target).map_err(|error| match error.raw_os_error() {
        Some(libc::EROFS) => InitError::invalid(format!(
            "the image has no directory {target} and its root is read-only; add the directory \
             to the image or let the cell write"
        )),
        _ => InitError::io(format!("making the directory {target}"), &error),
    })
}

fn make_nodes() -> Result<(), InitError> {
    make_mount_point("/dev/net")?;
    for (name, major, minor) in NODES {
        make_node(&format!("/dev/{name}"), SFlag::S_IFCHR, makedev(major, minor), 0o666)?;
    }
    for (to, from) in LINKS {
        symlink(to, from).context(|| format!("linking {from}"))?;
    }
    Ok(())
}

fn make_node(path: &str, kind: SFlag, device: u64, mode: u32) -> Result<(), InitError> {
    mknod(path, kind, Mode::from_bits_truncate(mode), device)
        .context(|| format!("making {path}"))?;
    // The mode again, since mknod takes the umask off it.
    set_mode(path, mode)
}

/// Makes the nodes of a program's own devices, but for those that are there.
pub fn make_devices(devices: &[Device]) -> Result<(), InitError> {
    for Device { path, kind, major, minor, file_mode } in devices {
        let kind = match kind {
            DeviceKind::Block => SFlag::S_IFBLK,
            DeviceKind::Character => SFlag::S_IFCHR,
        };
        if fs::symlink_metadata(path).is_err() {
            if let Some((folder, _)) = path.rsplit_once('/') {
                make_mount_point(folder)?;
            }
            make_node(path, kind, makedev((*major).into(), (*minor).into()), *file_mode)?;
        }
    }
    Ok(())
}

/// Makes what the kernel shows of its devices read-only, once it is set up: who gets at this
/// process's files finds no driver to take from it. A program's own mount is as it is asked for.
pub fn seal() -> Result<(), InitError> {
    let flags = SAFE | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(None::<&str>, "/sys", None::<&str>, flags, None::<&str>)
        .context(|| "making /sys read-only")
}

/// Mounts devtmpfs on the initramfs's /dev, to reach the disks and the log.
pub fn mount_early() -> nix::Result<()> {
    match nix::unistd::mkdir("/dev", Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    mount(Some("devtmpfs"), "/dev", Some("devtmpfs"), MsFlags::empty(), None::<&str>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_memory_leave_an_8th_of_it_and_what_is_in_use() {
        let meminfo = "MemTotal: 80000 kB\nMemFree: 1 kB\nMemAvailable: 70000 kB\n";
        assert_eq!(in_memory_kib(meminfo), 60_000);
        assert_eq!(in_memory_kib("MemTotal: 40000 kB\nMemAvailable: 28000 kB\n"), 19_808);
        assert_eq!(in_memory_kib("MemTotal: 80000 kB\nMemAvailable: 9 kB\n"), IN_MEMORY_KIB_MIN);
        let shares = [&DEV].into_iter().chain(&SCRATCH).map(|own| own.share);
        // The rest is for /dev/shm.
        assert_eq!(shares.sum::<u64>(), 6);
    }
}
