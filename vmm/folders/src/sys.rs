//! The system calls of a serving thread, and the one that neither rustix nor
//! nix offers.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// Every system call that [`crate::serve`] makes, beside those of allocation and
/// of the thread's end: what a filter for its thread must allow. A filter may
/// answer ENOSYS to fchmodat2. The tests run under such a filter.
pub const SYSCALLS: &[libc::c_long] = &[
    // The stream.
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    // Finding and opening.
    libc::SYS_openat2,
    libc::SYS_openat,
    libc::SYS_close,
    // Looking.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_fstatfs,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    // Content.
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    // Names.
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat,
    libc::SYS_unlinkat,
    // Attributes.
    libc::SYS_fchmod,
    libc::SYS_fchmodat2,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
];

/// Changes the mode of the file behind `fd`, which may be an `O_PATH`
/// descriptor: `fchmodat2(2)`, Linux 6.6.
///
/// # Errors
/// ENOSYS where the host kernel (or its filter) does not offer it.
pub fn chmod(fd: impl AsFd, mode: u32) -> Result<(), Errno> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel reads one static NUL-terminated string and writes no
    // memory; `fd` is borrowed for the call. Needed because chmod of an O_PATH
    // descriptor is otherwise only possible through /proc, which the jail lacks.
    let result =
        unsafe { libc::syscall(libc::SYS_fchmodat2, fd, c"".as_ptr(), mode, libc::AT_EMPTY_PATH) };
    if result == 0 {
        return Ok(());
    }
    let errno = std::io::Error::last_os_error().raw_os_error();
    Err(errno.map_or(Errno::IO, Errno::from_raw_os_error))
}
