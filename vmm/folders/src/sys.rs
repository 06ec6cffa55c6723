//! The one system call that neither rustix nor nix offers.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

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
    let result = unsafe {
        libc::syscall(
            libc::SYS_fchmodat2,
            fd,
            c"".as_ptr(),
            mode,
            libc::AT_EMPTY_PATH,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let errno = std::io::Error::last_os_error().raw_os_error();
    Err(errno.map_or(Errno::IO, Errno::from_raw_os_error))
}
