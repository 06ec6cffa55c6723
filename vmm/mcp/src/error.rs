//! What can go wrong: for the operator, and for a client.

use std::io;

use rmcp::handler::server::tool::IntoCallToolResult;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{doing}: {error}")]
    Host { doing: String, error: io::Error },
    #[error("the client did not begin as the protocol says: {0}")]
    Client(String),
    #[error(transparent)]
    Key(#[from] exocell_cell::CellError),
}

impl ServeError {
    /// Says what was being done.
    pub fn host(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |error| Self::Host { doing, error }
    }
}

/// Why a call came to nothing, in words for whoever called: an agent reads them and tries
/// something else, so they name the thing and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

impl Refusal {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl From<exocell_cell::CellError> for Refusal {
    fn from(error: exocell_cell::CellError) -> Self {
        Self(error.to_string())
    }
}

impl From<exocell_cell::agent::client::ClientError> for Refusal {
    fn from(error: exocell_cell::agent::client::ClientError) -> Self {
        Self(error.to_string())
    }
}

impl IntoCallToolResult for Refusal {
    fn into_call_tool_result(self) -> Result<CallToolResponse, rmcp::ErrorData> {
        Ok(CallToolResult::error(vec![ContentBlock::text(self.0)]).into())
    }
}

/// Runs what may block on a thread that may.
///
/// # Errors
/// Those of `work`.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(Refusal::new(format!("the call failed: {error}"))))
}
