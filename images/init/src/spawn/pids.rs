//! Where helpers leave the pids of the processes that they make: a page that they share with init,
//! and nobody else. It is there from the first program on, so that one more needs none.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

pub(super) const PAGE_BYTES: usize = 4096;
const PID_BYTES: usize = size_of::<libc::pid_t>();

/// The page, and which places in it are free.
struct Pids {
    page: File,
    free: Mutex<Vec<usize>>,
}

static PIDS: OnceLock<Pids> = OnceLock::new();

/// The place of one helper's. It is free again when this is dropped: then the helper is dead, or
/// ends without having made a process.
pub(super) struct PlaceOfPid {
    pids: &'static Pids,
    at: usize,
}

impl Pids {
    fn new() -> nix::Result<Self> {
        let page = File::from(memfd_create(c"pids", MFdFlags::MFD_CLOEXEC)?);
        let written = page.write_all_at(&[0; PAGE_BYTES], 0);
        written.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
        Ok(Self { page, free: Mutex::new((0..PAGE_BYTES).step_by(PID_BYTES).collect()) })
    }
}

impl PlaceOfPid {
    /// One that holds no pid.
    ///
    /// # Errors
    /// EAGAIN where 1,024 are in use.
    pub fn take() -> nix::Result<Self> {
        let pids = match PIDS.get() {
            Some(pids) => pids,
            // Of two at once one is kept.
            None => {
                let new = Pids::new()?;
                PIDS.get_or_init(|| new)
            }
        };
        let taken = pids.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let place = Self { pids, at: taken.ok_or(Errno::EAGAIN)? };
        match pids.page.write_all_at(&[0; PID_BYTES], place.at as u64) {
            Ok(()) => Ok(place),
            Err(_) => Err(Errno::EIO),
        }
    }

    pub fn page(&self) -> BorrowedFd<'_> {
        self.pids.page.as_fd()
    }

    /// Bytes from the page's beginning.
    pub fn at(&self) -> usize {
        self.at
    }

    /// What was left there.
    pub fn read(&self) -> Option<i32> {
        let mut pid = [0; PID_BYTES];
        self.pids.page.read_exact_at(&mut pid, self.at as u64).ok()?;
        Some(i32::from_ne_bytes(pid)).filter(|pid| *pid > 0)
    }
}

impl Drop for PlaceOfPid {
    fn drop(&mut self) {
        self.pids.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_one_helpers_until_it_is_given_back() {
        let (one, other) = (PlaceOfPid::take().unwrap(), PlaceOfPid::take().unwrap());
        assert_ne!(one.at(), other.at());
        one.pids.page.write_all_at(&7_i32.to_ne_bytes(), one.at() as u64).unwrap();
        assert_eq!((one.read(), other.read()), (Some(7), None));
        let at = one.at();
        drop(one);
        let again = PlaceOfPid::take().unwrap();
        assert_eq!((again.at(), again.read()), (at, None));
    }
}
