//! Why there is no service.

use crate::store::StoreError;
use exocell_exovisor::{AdmissionError, SchedulerError};

/// Why there is no service.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The modules cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// One of them is not admitted any more.
    #[error("module {name}: {source}")]
    Module {
        /// Which.
        name: String,
        /// Why.
        source: AdmissionError,
    },
    /// The network of one of them cannot be made.
    #[error("module {name}: {message}")]
    Network {
        /// Which.
        name: String,
        /// Why.
        message: String,
    },
    /// It cannot be listened there.
    #[error("cannot listen at {place}: {source}")]
    Listen {
        /// Where.
        place: String,
        /// Why.
        source: std::io::Error,
    },
    /// No threads that run calls.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// A worker has no socket.
    #[error("cannot use the socket of a worker: {0}")]
    Worker(std::io::Error),
}
