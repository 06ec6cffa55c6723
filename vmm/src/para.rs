//! The `para` platform: Linux for arch/um, run as a process without privileges.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use exocell_pager::Mode;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::personality::{self, Persona};
use nix::unistd::{Gid, Uid};

use crate::intra::Intra;
use crate::jail::filter::steady;
use crate::jail::{self, Group, JailError, PathAccess, PathGrant, ThreadClass};
use crate::limits::Limits;
use crate::memory::GuestMemory;

/// The files of a jail's root, by name.
pub const KERNEL_FILE: &str = "linux";
pub const INITRAMFS_FILE: &str = "initramfs";

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

impl DeviceSocket {
    /// How the guest kernel is told of the device, its `number`th.
    fn argument(&self, number: usize) -> String {
        let Self { name, id } = self;
        format!("virtio_uml.device=/{name}:{}:{number}:{}", *id as u32, id.queue_size())
    }
}

impl VirtioId {
    /// Entries of each queue, a power of 2. A guest kernel keeps a page of memory
    /// for each entry of a queue of input, whether anything comes or not.
    fn queue_size(self) -> u16 {
        match self {
            Self::Console | Self::Entropy => 8,
            Self::Vsock => 64,
            Self::Net | Self::Block | Self::Fs => 256,
        }
    }
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
    /// Receives the guest kernel's console.
    pub console: BorrowedFd<'a>,
    /// The id inside the user namespace that it runs as.
    pub identity: u32,
    pub limits: Limits,
    /// What counts and bounds its memory, where the host has that.
    pub group: Option<&'a Group>,
}

impl GuestKernel<'_> {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            KERNEL_FILE.to_owned(),
            format!("mem={}", self.memory.bytes()),
            format!("physmem_fd={}", self.memory.file().as_raw_fd()),
            format!("ncpus={}", self.vcpus),
            format!("initrd=/{INITRAMFS_FILE}"),
            "seccomp=on".to_owned(),
            // It wants a directory for its pid file; any that exists will do.
            "uml_dir=/".to_owned(),
            "con=null".to_owned(),
            // Standard error carries the first messages and the last (a panic),
            // the virtio console all between.
            "stderr=1".to_owned(),
            "console=hvc0".to_owned(),
            "loglevel=4".to_owned(),
            "panic=-1".to_owned(),
            // Mounts wait for RCU; a tick is 10 ms.
            "rcupdate.rcu_expedited=1".to_owned(),
            // Kinds of objects of one size share pages.
            "slab_merge".to_owned(),
            // A quarter of what the kernel would take for its tables of names and
            // inodes, which is a share of all memory.
            format!("dhash_entries={}", self.memory.bytes() >> 15),
            format!("ihash_entries={}", self.memory.bytes() >> 16),
            // What was sent is freed with the next packet, not by an interrupt for each
            // (drivers/net/virtio_net.c, start_xmit): the device has taken it at once.
            "virtio_net.napi_tx=0".to_owned(),
            // No interface is there before somebody makes it.
            "fb_tunnels=none".to_owned(),
            "dummy.numdummies=0".to_owned(),
            "ifb.numifbs=0".to_owned(),
        ];
        // A kernel without the Pager would hand these words to its init.
        if self.pager != Mode::Off {
            arguments.push(format!("pager={}", self.pager));
        }
        if self.blocks {
            arguments.push("pager_blocks".to_owned());
        }
        if let Some(mappings) = self.mappings_max {
            arguments.push(format!("host_maps={mappings}"));
        }
        if let Some(lender) = self.lender {
            arguments.push(format!("pager_fd={}", lender.as_raw_fd()));
        }
        arguments.extend(self.intra.argument().map(str::to_owned));
        arguments.extend(
            self.devices.iter().enumerate().map(|(number, device)| device.argument(number)),
        );
        arguments
    }

    /// Turns the calling process into the guest kernel; returns only on
    /// failure. The process must be a fresh child inside the jail.
    pub fn exec(&self) -> GuestKernelError {
        match self.confine() {
            Ok(calls) => self.exec_confined(&calls),
            Err(error) => error,
        }
    }

    /// What it may call once it runs programs comes back as a file.
    fn confine(&self) -> Result<File, GuestKernelError> {
        let call =
            |call, errno: nix::errno::Errno| GuestKernelError::Call { call, source: errno.into() };
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
            .map_err(|errno| call("prctl", errno))?;
        personality::set(Persona::ADDR_NO_RANDOMIZE).map_err(|errno| call("personality", errno))?;
        close_on_exec_from(3).map_err(GuestKernelError::Files)?;
        for kept in [Some(self.memory.file().as_fd()), self.lender].into_iter().flatten() {
            let flags = nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty());
            nix::fcntl::fcntl(kept, flags).map_err(|errno| call("fcntl", errno))?;
        }
        let open = |name: &str| File::open(format!("/{name}"));
        let kernel = open(KERNEL_FILE).map_err(GuestKernelError::Files)?;
        let initramfs = open(INITRAMFS_FILE).map_err(GuestKernelError::Files)?;
        jail::restrict_paths(&[
            PathGrant { at: kernel.as_fd(), access: PathAccess::Execute },
            PathGrant { at: initramfs.as_fd(), access: PathAccess::Read },
        ])?;
        let calls = self.steady_calls()?;
        jail::restrict_calls(ThreadClass::GuestKernel)?;
        Ok(calls)
    }

    fn steady_calls(&self) -> Result<File, GuestKernelError> {
        let memory = self.memory.file().as_raw_fd();
        let program = steady::program(self.intra, self.pager != Mode::Off, memory)?;
        let mut file =
            memfd_create(c"calls", MFdFlags::MFD_ALLOW_SEALING).map(File::from).map_err(
                |errno| GuestKernelError::Call { call: "memfd_create", source: errno.into() },
            )?;
        file.write_all(&program).map_err(GuestKernelError::Files)?;
        let seals = nix::fcntl::SealFlag::all();
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_ADD_SEALS(seals))
            .map_err(|errno| GuestKernelError::Call { call: "fcntl", source: errno.into() })?;
        Ok(file)
    }

    fn exec_confined(&self, calls: &File) -> GuestKernelError {
        let text = |argument: String| CString::new(argument).unwrap_or_default();
        let calls = format!("calls_fd={}", calls.as_raw_fd());
        let arguments = self.arguments().into_iter().chain([calls]);
        let arguments: Vec<CString> = arguments.map(text).collect();
        let path = text(format!("/{KERNEL_FILE}"));
        // The guest kernel finds the top of its address space by its highest
        // environment string (arch/um: get_top_address).
        let environment = [text("HOME=/".to_owned())];
        match nix::unistd::execve(&path, &arguments, &environment) {
            Ok(never) => match never {},
            Err(errno) => GuestKernelError::Call { call: "execve", source: errno.into() },
        }
    }
}

/// Marks every descriptor from `first` on to be closed by execve(2).
fn close_on_exec_from(first: libc::c_uint) -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    // SAFETY: close_range takes integers; with CLOEXEC it closes nothing now,
    // so no owner's descriptor goes away under it. Needed because nix does not
    // wrap it.
    match unsafe { libc::close_range(first, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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
}
