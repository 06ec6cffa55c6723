//! What a guest kernel may take of the host beside its memory file.
//!
//! Two bounds, each of which holds against one that plays by no rule. Resource limits
//! (setrlimit(2)) hold everywhere, but per process, and not for what the host's kernel keeps
//! of a process: page tables, descriptors, pipes. A control group
//! ([`Group`](crate::jail::Group)) holds for all of it at once, where the host has the
//! controller and the operator is root.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Host threads that a guest kernel needs beside those of programs; for an ordinary user, who
/// has only one identity, the supervisor's are among them.
const OWN_THREADS_MAX: u64 = 256;
/// Descriptors of a guest kernel: devices, then two for each stub.
const OWN_DESCRIPTORS_MAX: u64 = 128;
/// Bytes of memory of its own, in each process. A guest kernel's data and heap, before it has
/// them in guest memory, are the most that it needs; while programs run it has none.
const PRIVATE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of the stack that the host makes for a process.
const STACK_BYTES_MAX: u64 = 256 << 10;
/// What the host's kernel keeps of one process of a guest that runs programs.
const PROCESS_BYTES: u64 = 128 << 10;
/// The same of the guest kernel, and a reserve.
const OWN_BYTES: u64 = 32 << 20;

/// The limits of one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    memory_bytes: u64,
    /// Host processes and threads that the guest kernel and its stubs may be at once. The
    /// host's kernel counts them by user and user namespace (RLIMIT_NPROC, kernel/ucount.c).
    pub processes_max: u64,
}

impl Limits {
    /// Of a guest with `memory_bytes` of memory and at most `programs_max` programs, each of
    /// which is a stub in stub mode; while it executes another program it is two.
    #[must_use]
    pub fn new(memory_bytes: u64, programs_max: u64) -> Self {
        let processes_max = programs_max.saturating_mul(2).saturating_add(OWN_THREADS_MAX);
        Self { memory_bytes, processes_max }
    }

    /// Bytes that the guest may take of the host beside its memory file, where it has a
    /// control group. Page tables of many processes that share much memory are most of it.
    #[must_use]
    pub fn beside_bytes_max(&self) -> u64 {
        let processes = self.processes_max.saturating_mul(PROCESS_BYTES);
        processes.saturating_add(OWN_BYTES).saturating_add(self.memory_bytes / 8)
    }

    /// Bytes that the guest may take of the host in all, where it has a control group.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        self.memory_bytes.saturating_add(self.beside_bytes_max())
    }

    /// Limits the calling process, and all that it makes; never above what the operator's
    /// own limits allow.
    pub(crate) fn apply(&self) -> nix::Result<()> {
        let processes = self.processes_max;
        let limits = [
            (Resource::RLIMIT_NPROC, processes),
            (Resource::RLIMIT_NOFILE, processes.saturating_mul(2) + OWN_DESCRIPTORS_MAX),
            (Resource::RLIMIT_DATA, PRIVATE_BYTES_MAX),
            (Resource::RLIMIT_STACK, STACK_BYTES_MAX),
            // What it writes beyond the end of its memory file is lost, and so is more than
            // that of any file that it makes.
            (Resource::RLIMIT_FSIZE, self.memory_bytes),
            (Resource::RLIMIT_SIGPENDING, processes.saturating_mul(4)),
            (Resource::RLIMIT_MSGQUEUE, 0),
            (Resource::RLIMIT_MEMLOCK, 0),
            (Resource::RLIMIT_CORE, 0),
        ];
        for (resource, limit) in limits {
            let (_, hard) = getrlimit(resource)?;
            let limit = limit.min(hard);
            setrlimit(resource, limit, limit)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_may_have_grows_with_what_it_was_granted() {
        let small = Limits::new(128 << 20, 20);
        assert_eq!(small.processes_max, 296);
        assert!(small.beside_bytes_max() < 128 << 20);
        let large = Limits::new(1 << 30, 512);
        assert!(large.beside_bytes_max() > small.beside_bytes_max());
        assert_eq!(large.bytes_max(), (1 << 30) + large.beside_bytes_max());
        assert_eq!(Limits::new(u64::MAX, u64::MAX).bytes_max(), u64::MAX);
    }
}
