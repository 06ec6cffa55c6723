//! Where clients come.

use crate::ServiceError;
use std::fs::{self, Permissions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// How often it is looked whether a server that is there is about to be gone.
const LOOKS: u32 = 40;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// A socket that listens, before anybody is let in.
#[derive(Debug)]
pub enum Bound {
    /// An address of the host.
    Tcp(std::net::TcpListener),
    /// A path.
    Unix(std::os::unix::net::UnixListener),
}

impl Bound {
    /// Listens at `ADDRESS:PORT`, or at a path (with a `/`) that only this user may connect to. A
    /// socket that a dead server left there is replaced.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub fn bind(place: &str) -> Result<Self, ServiceError> {
        let failed = |source| ServiceError::Listen { place: place.to_owned(), source };
        if !place.contains('/') {
            return Ok(Self::Tcp(std::net::TcpListener::bind(place).map_err(failed)?));
        }
        let is_socket = fs::symlink_metadata(place).is_ok_and(|file| file.file_type().is_socket());
        if is_socket && !answers(place) {
            fs::remove_file(place).map_err(failed)?;
        }
        let listener = std::os::unix::net::UnixListener::bind(place).map_err(failed)?;
        fs::set_permissions(place, Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Self::Unix(listener))
    }

    /// What another process bound.
    #[must_use]
    pub fn of(socket: OwnedFd, is_tcp: bool) -> Self {
        if is_tcp { Self::Tcp(socket.into()) } else { Self::Unix(socket.into()) }
    }

    /// Whether it is an address.
    #[must_use]
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(_))
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
}

/// Whether somebody listens there. The jailed processes of a server that was killed do so for a
/// moment longer than it.
fn answers(place: &str) -> bool {
    (0..LOOKS).all(|look| {
        if look > 0 {
            std::thread::sleep(BETWEEN_LOOKS);
        }
        std::os::unix::net::UnixStream::connect(place).is_ok()
    })
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// A place that clients connect to.
pub enum Listener {
    /// An address of the host.
    Tcp(tokio::net::TcpListener),
    /// A path.
    Unix(tokio::net::UnixListener),
}

/// A client's connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Listener {
    /// Lets clients of `bound` in. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub fn of(bound: Bound) -> Result<Self, ServiceError> {
        let place = bound.place();
        let opened = match bound {
            Bound::Tcp(listener) => listener
                .set_nonblocking(true)
                .and_then(|()| tokio::net::TcpListener::from_std(listener))
                .map(Self::Tcp),
            Bound::Unix(listener) => listener
                .set_nonblocking(true)
                .and_then(|()| tokio::net::UnixListener::from_std(listener))
                .map(Self::Unix),
        };
        opened.map_err(|source| ServiceError::Listen { place, source })
    }

    pub(crate) async fn accept(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}
