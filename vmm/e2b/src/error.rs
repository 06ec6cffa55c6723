//! A refused call, as either of the protocol's two parts tells of it: by an HTTP status, or by a
//! code of Connect's (connectrpc.com/docs/protocol, "Error codes").

use std::io;

use exocell_cell::CellError;
use exocell_cell::agent::FailureKind;
use exocell_cell::agent::client::ClientError;
use exocell_cell::images::ImageError;
use exocell_cell::logging::tracing::warn;
use exocell_docker::ApiError;
use hyper::StatusCode;

/// What a client sends and the server waits for cut off: no status of the standard's.
const CANCELED: u16 = 499;

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    pub status: StatusCode,
    pub message: String,
    /// What a program reads of it, where a status does not say enough.
    pub reason: Option<&'static str>,
    /// When another try makes sense, in seconds, where that is known.
    pub retry_after: Option<u64>,
}

pub type Result<T> = std::result::Result<T, Problem>;

impl Problem {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), reason: None, retry_after: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// More than may be at once; a later try may do.
    pub fn exhausted(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, message)
    }

    /// Something of the host's: its operator reads `why` in the log.
    pub fn hidden(why: impl std::fmt::Display) -> Self {
        warn!("a call failed: {why}");
        Self::internal("the server could not do this; who runs it finds the reason in its log")
    }

    /// Something that is not there; `remedy` says what to do instead.
    pub fn unsupported(what: impl std::fmt::Display, remedy: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, format!("{what} is not supported; {remedy}"))
    }

    /// For a client that has gone; nobody hears of it.
    pub fn canceled(message: impl Into<String>) -> Self {
        Self::new(StatusCode::from_u16(CANCELED).unwrap_or(StatusCode::BAD_REQUEST), message)
    }

    pub fn deadline(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub fn because(self, reason: &'static str) -> Self {
        Self { reason: Some(reason), ..self }
    }

    /// A later try makes sense in so many seconds.
    pub fn after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// Connect's name for it.
    pub fn code(&self) -> &'static str {
        match self.status.as_u16() {
            400 | 405 | 415 => "invalid_argument",
            401 => "unauthenticated",
            403 => "permission_denied",
            404 => "not_found",
            408 | 504 => "deadline_exceeded",
            409 => "already_exists",
            413 | 429 | 507 => "resource_exhausted",
            CANCELED => "canceled",
            501 => "unimplemented",
            502 | 503 => "unavailable",
            _ => "internal",
        }
    }

    /// The status that Connect has for that code.
    pub fn unary_status(&self) -> StatusCode {
        match self.code() {
            "invalid_argument" => StatusCode::BAD_REQUEST,
            "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
            "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "internal" => StatusCode::INTERNAL_SERVER_ERROR,
            _ => self.status,
        }
    }
}

impl From<ApiError> for Problem {
    /// What failed on the host names its paths and its operator's commands: the operator reads it,
    /// not a tenant.
    fn from(error: ApiError) -> Self {
        match error.status.is_server_error() {
            true => Self::hidden(error),
            false => Self::new(error.status, error.message),
        }
    }
}

impl From<CellError> for Problem {
    fn from(error: CellError) -> Self {
        ApiError::from(error).into()
    }
}

impl From<ImageError> for Problem {
    fn from(error: ImageError) -> Self {
        ApiError::from(error).into()
    }
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Self {
        let status = match &error {
            ClientError::Failed { kind, .. } => match kind {
                FailureKind::NotFound => StatusCode::NOT_FOUND,
                FailureKind::Invalid | FailureKind::NotExecutable => StatusCode::BAD_REQUEST,
                FailureKind::Exists => StatusCode::CONFLICT,
                FailureKind::Full => StatusCode::INSUFFICIENT_STORAGE,
                FailureKind::Guest => StatusCode::INTERNAL_SERVER_ERROR,
            },
            // What came from the client was cut short.
            ClientError::Local(_) => StatusCode::BAD_REQUEST,
            ClientError::TooMuch { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.to_string())
    }
}

/// Why the server could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{what}: {source}")]
    Host { what: String, source: io::Error },
    #[error(
        "the sandboxes of the state root {0} are being served already; stop that server, or give \
         this one another root (--root)"
    )]
    RootTaken(String),
    #[error("{0}")]
    Usage(String),
}

impl ServeError {
    /// A closure for `map_err` that says what was being done.
    pub(crate) fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_hosts_is_not_told() {
        let told: Problem = ApiError::internal("cannot open /srv/root/cells").into();
        assert!(told.status == 500 && !told.message.contains("/srv"), "{told}");
        let told: Problem = ApiError::bad_request("no such size").into();
        assert_eq!((told.status.as_u16(), told.message.as_str()), (400, "no such size"));
    }
}
