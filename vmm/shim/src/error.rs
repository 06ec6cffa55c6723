//! What is told to containerd when something cannot be done: a code of its protocol, and words.

use containerd_shim_protos::ttrpc::{self, Code, get_status};
use exocell_cell::CellError;
use exocell_cell::agent::FailureKind;
use exocell_cell::agent::client::ClientError;

/// An error, with the code that containerd and its clients tell errors apart by.
#[derive(Debug)]
pub struct ShimError {
    code: Code,
    message: String,
}

pub type Result<T> = std::result::Result<T, ShimError>;

impl ShimError {
    fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// There is none of that id.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NOT_FOUND, message)
    }

    pub fn exists(message: impl Into<String>) -> Self {
        Self::new(Code::ALREADY_EXISTS, message)
    }

    /// Not in this state.
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(Code::FAILED_PRECONDITION, message)
    }

    /// What was asked for is wrong, or is nothing that a cell does.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::INVALID_ARGUMENT, message)
    }

    /// There is no such thing (containerd's ErrNotImplemented).
    pub fn unimplemented(message: impl Into<String>) -> Self {
        Self::new(Code::UNIMPLEMENTED, message)
    }

    /// The host, or the cell, failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::UNKNOWN, message)
    }

    /// For `map_err`: what was being done when the host failed.
    pub fn host<E: std::fmt::Display>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |error| Self::internal(format!("{what}: {error}"))
    }

    /// A program that was not started, in the words by which docker's daemon tells why.
    pub fn not_started(error: &ClientError) -> Self {
        let words = match error {
            ClientError::Failed { kind: FailureKind::NotFound, .. } => {
                ": executable file not found in $PATH"
            }
            ClientError::Failed { kind: FailureKind::NotExecutable, .. } => ": permission denied",
            _ => "",
        };
        Self::internal(format!("cannot start the program: {error}{words}"))
    }
}

impl std::fmt::Display for ShimError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<CellError> for ShimError {
    fn from(error: CellError) -> Self {
        match &error {
            CellError::Usage(_) | CellError::Caps(_) => Self::invalid(error.to_string()),
            _ => Self::internal(error.to_string()),
        }
    }
}

impl From<ClientError> for ShimError {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::Failed { kind: FailureKind::Invalid, message } => Self::invalid(message),
            _ => Self::internal(format!("the cell's guest: {error}")),
        }
    }
}

impl From<ShimError> for ttrpc::Error {
    fn from(error: ShimError) -> Self {
        Self::RpcStatus(get_status(error.code, error.message))
    }
}
