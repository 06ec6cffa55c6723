//! Whose calls a connection's are: the operator's, or a cell's that was given the server's socket.
//!
//! Cells come by a socket of their own ([`exocell_cell::engine`]). What connects for a cell says
//! whose connection it is, before the cell's programs have a word.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::{CellSpec, Layout, engine};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};

use crate::caller::{self, Caller};
use crate::error::ApiResult;
use crate::policy;
use crate::state::Server;

/// How long a cell's door may take to say whose it is.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);
/// The longest id of a cell.
const ID_BYTES_MAX: usize = 64;

/// The socket for cells. Nobody but the operator comes into the directory that it is in.
pub fn listen(layout: &Layout) -> io::Result<UnixListener> {
    // A socket's path is at most 107 bytes, and the root may be deeper than that.
    let folder = File::open(engine::folder(layout))?;
    let path = format!("/proc/self/fd/{}/{}", folder.as_raw_fd(), engine::CELLS_SOCKET);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(&path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Whose socket a client came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Operator,
    Cell,
}

/// Whose calls a connection's are.
#[derive(Debug, Clone)]
pub enum Whose {
    Operator,
    /// A cell's, by its id.
    Cell(String),
    /// A cell's that came by the operator's socket: it was given a socket of which nobody knew yet
    /// that it is this server's, or that of a server of another state root.
    Lost,
}

impl Whose {
    /// # Errors
    /// A cell's door does not say whose it is.
    pub async fn of(from: Side, stream: &mut UnixStream) -> io::Result<Self> {
        match from {
            Side::Cell => Ok(Self::Cell(greeting(stream).await?)),
            Side::Operator if is_door(stream) => Ok(Self::Lost),
            Side::Operator => Ok(Self::Operator),
        }
    }

    /// Who makes a call on it. Asked for each: what a cell has may change while it is connected.
    ///
    /// # Errors
    /// 403 for a cell that has ended, or that came in the operator's way.
    pub async fn caller(&self, server: &Arc<Server>) -> ApiResult<Caller> {
        match self {
            Self::Operator => Ok(Caller::default()),
            Self::Cell(id) => policy::caller(server, id).await,
            Self::Lost => Err(caller::refused(
                "the cell was given this socket when its server did not run, or is one of another \
                 state root: start the cell anew beside the server, on the server's state root",
            )),
        }
    }
}

/// The id that a cell's door says first.
async fn greeting(stream: &mut UnixStream) -> io::Result<String> {
    let line = async {
        let mut line = String::new();
        // What follows is its programs'.
        while line.len() <= ID_BYTES_MAX {
            match stream.read_u8().await? {
                b'\n' => break,
                byte => line.push(byte.into()),
            }
        }
        io::Result::Ok(line)
    };
    let read = tokio::time::timeout(GREETING_TIME_MAX, line).await;
    let id = read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    match CellSpec::is_id(&id) {
        true => Ok(id),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether a cell's door has connected: a process of that name in a user namespace of its own.
fn is_door(stream: &UnixStream) -> bool {
    let Some(pid) = stream.peer_cred().ok().and_then(|peer| peer.pid()) else { return false };
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    name.trim_end() == engine::DOOR && namespace(&pid.to_string()) != namespace("self")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_connection_of_a_cells_is_what_its_door_says_and_nothing_else() {
        let id = "0123456789abcdef".repeat(4);
        for (said, wanted) in [
            (format!("{id}\nGET / HTTP/1.1\r\n"), true),
            (format!("{id}x\n"), false),
            ("\n".to_owned(), false),
            (format!("{}\n", id.to_uppercase()), false),
            ("GET /containers/json HTTP/1.1\r\n\r\n".to_owned(), false),
            (id.clone(), false),
        ] {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(said.as_bytes()).await.unwrap();
            theirs.shutdown().await.unwrap();
            let whose = Whose::of(Side::Cell, &mut ours).await;
            match (wanted, whose) {
                (true, Ok(Whose::Cell(found))) => {
                    assert_eq!(found, id);
                    let mut rest = String::new();
                    ours.read_to_string(&mut rest).await.unwrap();
                    assert!(rest.starts_with("GET /"), "nothing of the cell's was read: {rest}");
                }
                (false, Err(_)) => {}
                (_, other) => panic!("{said:?}: {other:?}"),
            }
        }
        // Who comes by the operator's socket is the operator, and says nothing first.
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        assert!(matches!(Whose::of(Side::Operator, &mut ours).await, Ok(Whose::Operator)));
    }
}
