//! Where clients come.

use crate::ServiceError;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};

/// A place that clients connect to.
pub enum Listener {
    /// An address of the host.
    Tcp(TcpListener),
    /// A path.
    Unix(UnixListener),
}

/// A client's connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Listener {
    /// Listens at `ADDRESS:PORT`, or at a path (with a `/`) that only this user may connect to. A
    /// socket that a dead server left there is replaced.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub async fn bind(place: &str) -> Result<Self, ServiceError> {
        let failed = |source| ServiceError::Listen { place: place.to_owned(), source };
        if !place.contains('/') {
            return Ok(Self::Tcp(TcpListener::bind(place).await.map_err(failed)?));
        }
        let is_socket = fs::symlink_metadata(place).is_ok_and(|file| file.file_type().is_socket());
        if is_socket && UnixStream::connect(place).await.is_err() {
            fs::remove_file(place).map_err(failed)?;
        }
        let listener = UnixListener::bind(place).map_err(failed)?;
        fs::set_permissions(place, Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Self::Unix(listener))
    }

    /// Where it is, with the port that was chosen if none was named.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "tcp".to_owned(), |at| format!("http://{at}"))
            }
            Self::Unix(listener) => {
                let at = listener.local_addr().ok();
                let path = at.as_ref().and_then(|at| at.as_pathname());
                format!("unix://{}", path.unwrap_or(Path::new("")).display())
            }
        }
    }

    pub(crate) async fn accept(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}
