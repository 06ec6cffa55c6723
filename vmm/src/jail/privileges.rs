//! Capabilities (capabilities(7)).

use std::io;

/// One of linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// Files are given to others.
    Chown = 0,
    /// Files of a mapped owner are read and written whatever their mode says.
    DacOverride = 1,
    /// The owner's operations on such files.
    Fowner = 3,
    /// Group bits of directories are set for groups that are not one's own.
    Fsetid = 4,
}

/// Empties the bounding set of the calling thread, as far as it may: no capability that it gives
/// up comes back.
pub fn forgo_capabilities() {
    // Up to the last one that this host has.
    for capability in 0..64 {
        // SAFETY: prctl(2) PR_CAPBSET_DROP takes an integer. Needed because nix has no word for it.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
}

/// Gives up all capabilities that the calling thread has, but `kept`.
///
/// # Errors
/// capset(2): it has not all of `kept`.
pub fn keep_capabilities(kept: &[Capability]) -> io::Result<()> {
    /// `struct __user_cap_header_struct` of linux/capability.h.
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    /// _LINUX_CAPABILITY_VERSION_3: a low and a high word of three sets each.
    const VERSION: u32 = 0x2008_0522;
    let low = kept.iter().fold(0, |bits, one| bits | 1 << (*one as u32));
    let header = Header { version: VERSION, pid: 0 };
    let (inheritable, high) = (0_u32, [0_u32; 3]);
    let sets = [low, low, inheritable, high[0], high[1], high[2]];
    // SAFETY: header and sets have the sizes of their version and outlive the call, which changes
    // this thread's credentials only. Needed because nix has no word for it.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
