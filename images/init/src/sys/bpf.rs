//! bpf(2), as far as the device filter needs it ([`crate::device_filter`]).

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `struct bpf_insn` (linux/bpf.h).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    pub code: u8,
    /// The destination in the lower half, the source in the upper one.
    pub registers: u8,
    pub offset: i16,
    pub immediate: i32,
}

const LOAD: libc::c_long = 5;
const ATTACH: libc::c_long = 8;
const DETACH: libc::c_long = 9;
const PROGRAM_OF_DEVICES: u32 = 15;
const ATTACHED_TO_DEVICES: u32 = 6;
/// Groups below may have programs of their own, and all have to agree.
const ALLOW_MULTI: u32 = 2;
const REPLACE: u32 = 4;

/// The beginning of `union bpf_attr`, for a program.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log: [u32; 2],
    log_buffer: u64,
    version: u32,
    flags: u32,
}

/// The beginning of `union bpf_attr`, for where it is attached.
#[repr(C)]
struct Attach {
    group: u32,
    program: u32,
    kind: u32,
    flags: u32,
    replaced: u32,
}

fn call<T>(command: libc::c_long, attributes: &T) -> nix::Result<i32> {
    let at = std::ptr::from_ref(attributes);
    // SAFETY: bpf reads so many bytes of a live structure of the command's layout, and what that
    // points to, which the callers keep for the length of the call. Needed for lack of a wrapper.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, at, size_of::<T>()) };
    Errno::result(done).map(|number| number as i32)
}

/// Has the kernel check a program for [`attach`].
pub fn load_device_filter(program: &[Instruction]) -> nix::Result<OwnedFd> {
    let attributes = Load {
        kind: PROGRAM_OF_DEVICES,
        count: u32::try_from(program.len()).map_err(|_| Errno::E2BIG)?,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log: [0; 2],
        log_buffer: 0,
        version: 0,
        flags: 0,
    };
    let loaded = call(LOAD, &attributes)?;
    // SAFETY: the call just returned this descriptor, closed on exec, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(loaded) })
}

/// Has `program` decide for the control group `group`, in the stead of `replaced`.
pub fn attach(group: &File, program: &OwnedFd, replaced: Option<&OwnedFd>) -> nix::Result<()> {
    let flags = ALLOW_MULTI | replaced.map_or(0, |_| REPLACE);
    call(ATTACH, &attached(group, program, replaced, flags)?).map(drop)
}

/// Has `program` decide nothing for `group` any more.
pub fn detach(group: &File, program: &OwnedFd) -> nix::Result<()> {
    call(DETACH, &attached(group, program, None, 0)?).map(drop)
}

fn attached(
    group: &File,
    program: &OwnedFd,
    replaced: Option<&OwnedFd>,
    flags: u32,
) -> nix::Result<Attach> {
    let number = |fd: i32| u32::try_from(fd).map_err(|_| Errno::EBADF);
    Ok(Attach {
        group: number(group.as_raw_fd())?,
        program: number(program.as_raw_fd())?,
        kind: ATTACHED_TO_DEVICES,
        flags,
        replaced: replaced.map_or(Ok(0), |replaced| number(replaced.as_raw_fd()))?,
    })
}
