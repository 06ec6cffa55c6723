//! Guest memory: one sealed memory file, shared by the guest kernel, the
//! device back ends and the accounting.

use std::fs::File;
use std::io;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// The memory of one guest.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    bytes: u64,
}

impl GuestMemory {
    /// A memory file of `bytes`, none of it allocated yet. Its size is sealed:
    /// nobody who holds it can make another holder's access fault.
    ///
    /// # Errors
    /// The host's, for lack of descriptors or memory (memfd_create(2)).
    pub fn new(bytes: u64) -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"exocell-guest", flags)?);
        file.set_len(bytes)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self { file, bytes })
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
