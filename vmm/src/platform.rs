//! What runs a guest: user-mode Linux as a process ([`crate::para`]), or a virtual machine of the
//! host's KVM ([`crate::kvm`]). Each takes the same [`GuestKernel`] and turns a fresh child of the
//! supervisor inside the jail into it, so that the supervisor sees one process either way: it has
//! the guest's memory, connects to the devices' sockets, ends with the guest, and can be stopped,
//! continued and killed by signals.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};

use exocell_pager::Mode;
use nix::unistd::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::intra::Intra;
use crate::jail::{Group, JailError};
use crate::limits::Limits;
use crate::memory::GuestMemory;

/// The files of a jail's root, by name.
pub const KERNEL_FILE: &str = "linux";
pub const INITRAMFS_FILE: &str = "initramfs";

/// What every guest kernel is told: words of its command line.
pub(crate) const COMMON_ARGUMENTS: [&str; 8] = [
    "console=hvc0",
    "loglevel=4",
    "panic=-1",
    // Mounts wait for RCU; a tick is 10 ms.
    "rcupdate.rcu_expedited=1",
    // Kinds of objects of one size share pages.
    "slab_merge",
    // No interface is there before somebody makes it.
    "fb_tunnels=none",
    "dummy.numdummies=0",
    "ifb.numifbs=0",
];

/// Runs guests.
pub trait Platform: Send + Sync {
    /// Its name.
    fn kind(&self) -> PlatformKind;

    /// Turns the calling process into the guest; returns only on failure. The process must be a
    /// fresh child inside the jail, with one thread.
    fn become_guest(&self, guest: &GuestKernel<'_>) -> GuestKernelError;
}

/// The name of a platform, as a cell's specification has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlatformKind {
    /// Linux for arch/um, a process without privileges: runs everywhere.
    #[default]
    Para,
    /// A virtual machine of the host's KVM, where the host has VT-x or AMD-V.
    Kvm,
}

impl PlatformKind {
    pub const ALL: [Self; 2] = [Self::Para, Self::Kvm];

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Para => "para",
            Self::Kvm => "kvm",
        }
    }
}

impl std::fmt::Display for PlatformKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for PlatformKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("{text} is no platform; choose para or kvm"))
    }
}

/// The virtio device ids (virtio 1.3, section 5) that a guest may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum VirtioId {
    Net = 1,
    Block = 2,
    Console = 3,
    Entropy = 4,
    Vsock = 19,
    Fs = 26,
}

/// A device socket in the jail's root.
#[derive(Debug, Clone)]
pub struct DeviceSocket {
    pub name: String,
    pub id: VirtioId,
}

impl VirtioId {
    /// Entries of each queue, a power of 2. A guest kernel keeps a page of memory
    /// for each entry of a queue of input, whether anything comes or not.
    pub(crate) fn queue_size(self) -> u16 {
        match self {
            Self::Console | Self::Entropy => 8,
            Self::Vsock => 64,
            Self::Net | Self::Block | Self::Fs => 256,
        }
    }
}

/// The pages of a disk that its guest maps, as they are in the host's page cache: all guests of an
/// image have the same.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// What the guest calls the disk.
    pub disk: &'a str,
    /// Its length in bytes, whole pages.
    pub bytes: u64,
    pub files: &'a [File],
    /// Where each piece begins, in bytes, and the file whose bytes it has at the same place.
    pub pieces: &'a [(u64, usize)],
}

/// What a guest kernel is started with.
#[derive(Debug)]
pub struct GuestKernel<'a> {
    pub memory: &'a GuestMemory,
    pub vcpus: u32,
    pub pager: Mode,
    /// Whether it asks the host for pieces of 64 KB; with a Pager.
    pub blocks: bool,
    /// Mappings that the host allows each of its processes, where that is known.
    pub mappings_max: Option<u64>,
    /// Where it asks for credit; with [`Mode::Credit`].
    pub lender: Option<BorrowedFd<'a>>,
    pub intra: Intra,
    pub devices: &'a [DeviceSocket],
    /// The image of its first disk, if it may map that.
    pub image: Option<Image<'a>>,
    /// Receives the guest kernel's console.
    pub console: BorrowedFd<'a>,
    /// The id inside the user namespace that it runs as.
    pub identity: u32,
    pub limits: Limits,
    /// What counts and bounds its memory, where the host has that.
    pub group: Option<&'a Group>,
}

impl GuestKernel<'_> {
    /// Bounds the calling process, gives it the console, and takes its privileges.
    pub(crate) fn confine(&self) -> Result<(), GuestKernelError> {
        nix::unistd::dup2_stdout(self.console).map_err(|errno| call("dup2", errno))?;
        nix::unistd::dup2_stderr(self.console).map_err(|errno| call("dup2", errno))?;
        self.group.map_or(Ok(()), Group::join).map_err(GuestKernelError::Group)?;
        self.limits.apply().map_err(|errno| call("setrlimit", errno))?;
        if self.identity != 0 {
            nix::unistd::setgroups(&[]).map_err(|errno| call("setgroups", errno))?;
            nix::unistd::setgid(Gid::from_raw(self.identity))
                .map_err(|errno| call("setgid", errno))?;
            nix::unistd::setuid(Uid::from_raw(self.identity))
                .map_err(|errno| call("setuid", errno))?;
        }
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)
            .map_err(|errno| call("prctl", errno))
    }

    /// Sizes of the kernel's tables of names and inodes: a quarter of what it would take, which is
    /// a share of all memory.
    pub(crate) fn table_arguments(&self) -> [String; 2] {
        let bytes = self.memory.bytes();
        [format!("dhash_entries={}", bytes >> 15), format!("ihash_entries={}", bytes >> 16)]
    }
}

/// A file of the jail's root.
pub(crate) fn jail_file(name: &str) -> Result<File, GuestKernelError> {
    File::open(format!("/{name}")).map_err(GuestKernelError::Files)
}

/// For `map_err`.
pub(crate) fn call(call: &'static str, errno: nix::errno::Errno) -> GuestKernelError {
    GuestKernelError::Call { call, source: errno.into() }
}

/// Why the guest kernel process did not start.
#[derive(Debug, thiserror::Error)]
pub enum GuestKernelError {
    #[error("the guest kernel's {call} failed: {source}")]
    Call { call: &'static str, source: io::Error },
    #[error("the guest kernel's files are not in the jail: {0}")]
    Files(io::Error),
    #[error("the guest kernel cannot join its control group: {0}")]
    Group(io::Error),
    #[error(transparent)]
    Jail(#[from] JailError),
    /// What only one platform knows.
    #[error(transparent)]
    Platform(Box<dyn std::error::Error + Send + Sync>),
}

/// Leaves `keep` open beyond execve(2).
pub(crate) fn keep_open(keep: impl AsFd) -> Result<(), GuestKernelError> {
    let flags = nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty());
    nix::fcntl::fcntl(keep, flags).map_err(|errno| call("fcntl", errno)).map(drop)
}

/// Closes every descriptor but the standard ones and `kept`, in a process that goes on as the guest
/// and never comes back to who owns them.
///
/// # Errors
/// The host's (close_range(2)).
pub(crate) fn close_all_but(kept: &[RawFd]) -> io::Result<()> {
    let mut kept: Vec<u32> = kept.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    kept.extend([0, 1, 2]);
    kept.sort_unstable();
    let mut from = 0;
    for next in kept.into_iter().chain([u32::MAX]) {
        if from < next {
            // SAFETY: close_range takes integers. Owners of what it closes are never used again:
            // the process goes on with `kept` alone, and ends without dropping them. Needed
            // because nothing is executed that would close them.
            if unsafe { libc::close_range(from, next - 1, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        from = next.saturating_add(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_read_as_they_are_written_and_others_refused() {
        for kind in PlatformKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("xen".parse::<PlatformKind>().unwrap_err().contains("choose para or kvm"));
    }
}
