//! What can go wrong: for the operator who starts the server, and for a page's call.

use std::io;

use exocell_cell::CellError;
use exocell_cell::agent::client::ClientError;
use hyper::StatusCode;

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{doing}: {error}")]
    Host { doing: String, error: io::Error },
    #[error(transparent)]
    Key(#[from] CellError),
    #[error(
        "--ui {0}: others can reach this address, and without a key whoever can may end all cells; \
         say --ui-key FILE, or an address such as 127.0.0.1:7070"
    )]
    Open(String),
}

impl ServeError {
    /// Says what was being done.
    pub fn host(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |error| Self::Host { doing, error }
    }
}

/// Why a call is not answered: the status, and words for whoever looks at the page.
#[derive(Debug)]
pub struct Refusal {
    pub status: StatusCode,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Refusal>;

impl Refusal {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }
}

impl From<CellError> for Refusal {
    fn from(error: CellError) -> Self {
        let status = match error {
            CellError::NoSuchCell(_) => StatusCode::NOT_FOUND,
            CellError::WrongState { .. } | CellError::Usage(_) => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ClientError> for Refusal {
    fn from(error: ClientError) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, error.to_string())
    }
}

/// Runs what may block on a thread that may.
///
/// # Errors
/// Those of `work`.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Refusal::internal(format!("the call failed: {error}"))))
}
