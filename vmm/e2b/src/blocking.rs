//! Work that may block, beside the tasks.

use crate::error::{Problem, Result};

/// Runs `work` on a thread that may block.
///
/// # Errors
/// Its own.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(Problem::internal(format!("the call failed: {error}"))))
}
