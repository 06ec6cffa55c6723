//! The last word of a supervisor that the host's kernel ends for a fault of its own. Whoever finds
//! its record afterwards can tell that from a kill.

use std::fs;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::CellError;
use exocell_images::private;

/// In the record; the number of the signal as one byte, or nothing.
pub(crate) const FILE: &str = "fault";
/// The signals by which a program ends for what it did itself.
const SIGNALS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];

static NOTE: AtomicI32 = AtomicI32::new(-1);

/// Has such a signal written down in the working directory, the record.
pub(super) fn note() -> Result<(), CellError> {
    let failed = || format!("cannot make {FILE} in the cell's record");
    let file = private::create(FILE).map_err(CellError::host(failed()))?;
    NOTE.store(file.into_raw_fd(), Ordering::Relaxed);
    for signal in SIGNALS {
        // SAFETY: sigaction is plain data, for which zeroes are a valid value, and read for the
        // length of the call; the handler makes async-signal-safe calls only. With SA_RESETHAND the
        // fault happens again when it returns, and then ends the process. Needed because nix's
        // wrapper is as unsafe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = write_down as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_RESETHAND | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    Ok(())
}

extern "C" fn write_down(signal: i32) {
    let number = [signal as u8];
    // SAFETY: write reads a live local. What the supervisor forked is not the first process of its
    // pid namespace, and says nothing. Needed because std's write may do more than that.
    unsafe {
        if libc::getpid() == 1 {
            libc::write(NOTE.load(Ordering::Relaxed), number.as_ptr().cast(), 1);
        }
    }
}

/// The signal that a dead supervisor's record in `directory` tells of.
pub(crate) fn noted(directory: &Path) -> Option<String> {
    let number = *fs::read(directory.join(FILE)).ok()?.first()?;
    let signal = nix::sys::signal::Signal::try_from(i32::from(number)).ok()?;
    Some(signal.to_string())
}
