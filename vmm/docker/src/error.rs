//! Errors: of the server, and of one call in the API's form.

use std::io;

use exocell_cell::CellError;
use exocell_cell::archive::ArchiveError;
use exocell_cell::images::{Fault, ImageError};
use hyper::StatusCode;

/// Why the server could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{what}: {source}")]
    Host { what: String, source: io::Error },
    #[error("{0} is being served already; stop that server or choose another socket")]
    Taken(String),
    #[error("{0} is there and is no socket; choose another path, or remove it")]
    NoSocket(String),
    #[error(
        "no socket was handed over (LISTEN_FDS); fd:// is for a socket unit of systemd, elsewhere \
         name the socket's path"
    )]
    NotGiven,
    #[error(
        "the state root {root} is being served already, {by}; stop that server, or give this one \
         another root (--root)"
    )]
    RootTaken { root: String, by: String },
    #[error(transparent)]
    Cell(#[from] CellError),
}

impl ServeError {
    /// A closure for `map_err` that says what was being done.
    pub(crate) fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source }
    }
}

/// A refused call: a status and the `message` of the API's error form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
}

/// The outcome of a call.
pub type ApiResult<T> = Result<T, ApiError>;

/// What a cell is refused, in words.
pub fn refused(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, message)
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    /// Something that cells do not have; `remedy` says what to do instead.
    pub fn unsupported(what: impl std::fmt::Display, remedy: &str) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, format!("{what} is not supported; {remedy}"))
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The docker command and docker-py know a missing container by these words.
    pub fn no_such_container(key: &str) -> Self {
        Self::not_found(format!("No such container: {key}"))
    }
}

impl From<CellError> for ApiError {
    fn from(error: CellError) -> Self {
        let status = match &error {
            CellError::NoSuchCell(key) => return Self::no_such_container(key),
            CellError::Image(_) => StatusCode::OK,
            CellError::NameTaken(_) | CellError::WrongState { .. } => StatusCode::CONFLICT,
            CellError::Usage(_) | CellError::Caps(_) | CellError::Program { .. } => {
                StatusCode::BAD_REQUEST
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        match error {
            CellError::Image(error) => error.into(),
            error => Self::new(status, error.to_string()),
        }
    }
}

impl From<ArchiveError> for ApiError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Refused(words) => Self::bad_request(words),
            ArchiveError::Io(error) => Self::internal(error.to_string()),
        }
    }
}

impl From<ImageError> for ApiError {
    fn from(error: ImageError) -> Self {
        let status = match &error {
            // The docker command pulls an image when it reads these words.
            ImageError::NotFound { name } => {
                return Self::not_found(format!("No such image: {name}"));
            }
            ImageError::NotInRegistry { .. } => StatusCode::NOT_FOUND,
            ImageError::BadReference { .. }
            | ImageError::AmbiguousId { .. }
            | ImageError::NotAnImage { .. }
            | ImageError::Malformed { .. } => StatusCode::BAD_REQUEST,
            ImageError::InUse { .. } | ImageError::SeveralTags { .. } => StatusCode::CONFLICT,
            ImageError::Unauthorized { .. } => StatusCode::FORBIDDEN,
            ImageError::Refused(refusal) => match refusal.fault {
                Fault::Image => StatusCode::BAD_REQUEST,
                Fault::NotInRegistry => StatusCode::NOT_FOUND,
                Fault::Unauthorized => StatusCode::FORBIDDEN,
                Fault::Other => StatusCode::INTERNAL_SERVER_ERROR,
            },
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_look_for_is_said() {
        let error = ApiError::from(CellError::NoSuchCell("x".to_owned()));
        assert_eq!((error.status.as_u16(), error.message.as_str()), (404, "No such container: x"));
        let missing = ImageError::NotFound { name: "y".to_owned() };
        let error = ApiError::from(CellError::from(missing));
        assert_eq!((error.status.as_u16(), error.message.as_str()), (404, "No such image: y"));
        let error = ApiError::from(CellError::NameTaken("z".to_owned()));
        assert_eq!(error.status.as_u16(), 409);
    }
}
