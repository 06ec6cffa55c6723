//! What keeps a run from beginning or from ending with a report.

use std::io;
use std::path::PathBuf;

/// Why there is no run. What goes wrong with one instance is in its log.
#[derive(Debug, thiserror::Error)]
pub enum SwebenchError {
    #[error("cannot {what} {}: {source}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not what a {what} looks like: {reason}", path.display())]
    Form { what: &'static str, path: PathBuf, reason: String },
    #[error("{} ends neither in .json nor in .jsonl; name a file that does", .0.display())]
    Suffix(PathBuf),
    #[error("the dataset has no instance {0}; -i takes an instance_id of it")]
    UnknownInstance(String),
    #[error("there is a prediction for {0}, of which the dataset knows nothing")]
    UnknownPrediction(String),
    #[error("{name:?} cannot be a folder's name, and {what} becomes one")]
    Name { what: &'static str, name: String },
    #[error("another run has {}; wait for it, or choose another --run-id", .0.display())]
    Busy(PathBuf),
}

impl SwebenchError {
    /// For `map_err`: the failure to do `what` to the file at `path`.
    pub(crate) fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }
}
