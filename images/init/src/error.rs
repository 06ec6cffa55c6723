//! The error of every request: what the host is told.

use std::fmt::Display;
use std::io;

use exocell_agent::{FailureKind, FrameError, Reply};
use nix::errno::Errno;

/// A request that was not done.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Goes to the host as [`Reply::Failed`].
    #[error("{message}")]
    Failed { kind: FailureKind, message: String },
    /// The stream to the host is broken: nobody is left to tell.
    #[error(transparent)]
    Stream(#[from] FrameError),
}

impl InitError {
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::Failed { kind: FailureKind::Invalid, message: message.into() }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::Failed { kind: FailureKind::NotFound, message: message.into() }
    }

    pub fn not_executable(message: impl Into<String>) -> Self {
        Self::Failed { kind: FailureKind::NotExecutable, message: message.into() }
    }

    pub fn guest(message: impl Into<String>) -> Self {
        Self::Failed { kind: FailureKind::Guest, message: message.into() }
    }

    /// `what` failed with `error`; the kind follows from the error number.
    pub fn io(what: impl Display, error: &io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => FailureKind::NotFound,
            io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::ReadOnlyFilesystem => FailureKind::Invalid,
            io::ErrorKind::AlreadyExists => FailureKind::Exists,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FailureKind::Full,
            _ => FailureKind::Guest,
        };
        Self::Failed { kind, message: format!("{what}: {error}") }
    }

    /// The reply that tells the host, or why it cannot be told.
    pub fn into_reply(self) -> Result<Reply, FrameError> {
        match self {
            Self::Failed { kind, message } => Ok(Reply::Failed { kind, message }),
            Self::Stream(error) => Err(error),
        }
    }
}

/// Names the operation that failed.
pub trait Context<T> {
    /// Turns the error into [`InitError::io`] about `what`.
    fn context<D: Display>(self, what: impl FnOnce() -> D) -> Result<T, InitError>;
}

impl<T> Context<T> for io::Result<T> {
    fn context<D: Display>(self, what: impl FnOnce() -> D) -> Result<T, InitError> {
        self.map_err(|error| InitError::io(what(), &error))
    }
}

impl<T> Context<T> for nix::Result<T> {
    fn context<D: Display>(self, what: impl FnOnce() -> D) -> Result<T, InitError> {
        self.map_err(|errno: Errno| InitError::io(what(), &errno.into()))
    }
}
