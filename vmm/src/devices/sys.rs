//! The host calls that take guest memory directly, and nothing else: the one
//! module of the devices with `unsafe` code.
//!
//! Guest memory is shared with a hostile guest, so it is only ever named to the
//! host kernel by pointer and length and never borrowed as a Rust slice.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// The most segments one call passes to the host; Linux's `UIO_MAXIOV`.
const SEGMENTS_MAX: usize = 1024;

/// Reads from `file` at `offset` bytes into guest memory (preadv(2)).
///
/// Returns the bytes read, fewer than asked at the end of the file; errors are
/// the host's.
pub(super) fn read_at(
    file: impl AsFd,
    into: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let file = file.as_fd();
    let segments = segments(into);
    let at = position(offset)?;
    // SAFETY: every segment lies inside a mapping that `into` keeps alive, and
    // the kernel writes only there. Needed: vm-memory has no positioned read.
    retry(|| unsafe {
        libc::preadv(file.as_raw_fd(), segments.as_ptr(), segments.len() as i32, at)
    })
}

/// Writes guest memory to `file` at `offset` bytes (pwritev(2)).
///
/// Returns the bytes written, fewer than asked where the disk fills up; errors
/// are the host's.
pub(super) fn write_at(
    file: impl AsFd,
    from: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let file = file.as_fd();
    let segments = segments(from);
    let at = position(offset)?;
    // SAFETY: every segment lies inside a mapping that `from` keeps alive; the
    // kernel only reads there. Needed: vm-memory has no positioned write.
    retry(|| unsafe {
        libc::pwritev(file.as_raw_fd(), segments.as_ptr(), segments.len() as i32, at)
    })
}

/// Receives from a socket into guest memory without waiting (recvmsg(2)).
///
/// Returns 0 at the end of the stream; `WouldBlock` when there is nothing yet.
pub(super) fn receive(socket: BorrowedFd<'_>, into: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut segments = segments(into);
    let mut message = message(&mut segments);
    // SAFETY: as for `read_at`; the header and its segment array outlive the
    // call. Needed: one call fills all segments, and MSG_DONTWAIT cannot be
    // undone by whoever holds the other end.
    retry(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Sends guest memory to a socket without waiting and without `SIGPIPE`
/// (sendmsg(2)).
///
/// Returns the bytes taken; `WouldBlock` when the socket is full.
pub(super) fn send(socket: BorrowedFd<'_>, from: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut segments = segments(from);
    let message = message(&mut segments);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: as for `write_at`; the header and its segment array outlive the
    // call. Needed for the same reasons as `receive`.
    retry(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
}

/// Fills guest memory with the host's random bytes (getrandom(2)), and returns
/// how many bytes it filled.
pub(super) fn random(into: &VolatileSlice<'_>) -> io::Result<usize> {
    let guard = into.ptr_guard_mut();
    // SAFETY: pointer and length describe a live mapping for as long as `guard`
    // lives. Needed: no safe wrapper fills memory that is not a Rust slice.
    retry(|| unsafe { libc::getrandom(guard.as_ptr().cast(), guard.len(), 0) })
}

fn segments(slices: &[VolatileSlice<'_>]) -> Vec<libc::iovec> {
    let segment = |slice: &VolatileSlice<'_>| libc::iovec {
        iov_base: slice.ptr_guard_mut().as_ptr().cast(),
        iov_len: slice.len(),
    };
    slices.iter().take(SEGMENTS_MAX).map(segment).collect()
}

fn message(segments: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no address, no segments, no control.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = segments.as_mut_ptr();
    message.msg_iovlen = segments.len();
    message
}

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
