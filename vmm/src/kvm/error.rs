//! Why a virtual machine does not start.

use std::io;

use crate::platform::GuestKernelError;

/// A machine could not be made, or its kernel not be put into it.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The host has no KVM that runs guests on its processor.
    #[error("the host's KVM cannot be used: {0}; choose the platform para (see `exocell doctor`)")]
    Unusable(String),
    /// A guest asks for what this platform has not; the text names it and what to do.
    #[error("{0}")]
    NotThere(String),
    /// A call of the interface to KVM (Linux: Documentation/virt/kvm/api.rst).
    #[error("KVM's {call} failed: {source}")]
    Call { call: &'static str, source: io::Error },
    /// The guest kernel's file.
    #[error(
        "the guest kernel cannot be loaded: {0}; it has to be of `exocell kernel build --platform kvm`"
    )]
    Kernel(linux_loader::loader::Error),
    /// An ELF file without the entry that is used.
    #[error(
        "the guest kernel has no PVH entry; it has to be of `exocell kernel build --platform kvm`"
    )]
    NoEntry,
    /// Kernel and first programs do not fit.
    #[error(
        "{bytes} bytes of memory are too few for the kernel and its init; grant more (--memory)"
    )]
    Memory { bytes: u64 },
    /// Each device is a word of it.
    #[error("{bytes} bytes of command line are too many for the guest kernel; grant fewer folders")]
    CommandLine { bytes: usize },
    /// What the guest is started by cannot be written to its memory.
    #[error("the guest's memory cannot be {what}: {source}")]
    GuestMemory { what: &'static str, source: io::Error },
    /// A device's back end did not answer as it is to.
    #[error("the device {name}: {source}")]
    Device { name: String, source: vhost::Error },
    /// Its socket.
    #[error("the device {name} cannot be reached: {source}")]
    Unreached { name: String, source: io::Error },
    /// A thread or event of the host.
    #[error("cannot {what}: {source}")]
    Host { what: &'static str, source: io::Error },
}

impl From<KvmError> for GuestKernelError {
    fn from(error: KvmError) -> Self {
        Self::Platform(Box::new(error))
    }
}

impl KvmError {
    /// A [`KvmError::Call`]; for `map_err`.
    pub(super) fn call(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Call { call, source: error.into() }
    }

    /// A [`KvmError::Host`]; for `map_err`.
    pub(super) fn host(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { what, source }
    }

    /// A [`KvmError::GuestMemory`]; for `map_err`.
    pub(super) fn memory<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |error| Self::GuestMemory { what, source: io::Error::other(error) }
    }
}
