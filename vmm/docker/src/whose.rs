//! Whose calls a connection's are: the operator's, or a cell's that was given the server's socket.
//!
//! Cells come by a socket of their own ([`exocell_cell::engine`]). What connects for a cell says
//! whose connection it is, before the cell's programs have a word.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::{CellSpec, Layout, engine};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::PeerPidfd;
use nix::sys::socket::{UnixAddr, getpeername, getsockopt};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};

use crate::caller::Caller;
use crate::error::{ApiResult, refused};
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
    /// that it is this server's, or that of a server of another state root. So is what nobody knows
    /// whose it is.
    Lost,
}

impl Whose {
    /// # Errors
    /// A cell's door does not say whose it is.
    pub async fn of(from: Side, stream: &mut UnixStream) -> io::Result<Self> {
        match from {
            Side::Cell => Ok(Self::Cell(greeting(stream).await?)),
            Side::Operator if is_operators(stream) => Ok(Self::Operator),
            Side::Operator => Ok(Self::Lost),
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
            Self::Lost => Err(refused(
                "the cell was given this socket when its server did not run, or is one of another \
                 state root: start the cell anew beside the server, on the server's state root; or \
                 the process that connected was gone, or in another pid namespace, so that nobody \
                 knows whose this call is",
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

/// Whether it is known that no cell's door has connected. What cannot be told is taken for a door:
/// the one who connected may be gone by now, and what it said is still to be read.
fn is_operators(stream: &UnixStream) -> bool {
    let address = getpeername::<UnixAddr>(stream.as_raw_fd());
    let is_marked = |address: &UnixAddr| {
        address.as_abstract().is_some_and(|name| name.starts_with(engine::MARK.as_bytes()))
    };
    if address.map_or(true, |address| is_marked(&address)) {
        return false;
    }
    // The doors of an earlier version have no mark.
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).filter(|pid| *pid > 0);
    let Some(pid) = pid else { return false };
    // A pid may be another's by now, this descriptor never is.
    let process = match getsockopt(stream, PeerPidfd) {
        Ok(process) => Some(process),
        // Linux before 6.5.
        Err(Errno::ENOPROTOOPT) => None,
        Err(_) => return false,
    };
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else { return false };
    let is_door = name.trim_end() == engine::DOOR
        && namespace(&pid.to_string()).is_none_or(|own| Some(own) != namespace("self"));
    !is_door && process.is_none_or(|process| is_alive(&process))
}

/// Whether a process has not ended. Its descriptor can be read once it has.
fn is_alive(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut ended, PollTimeout::ZERO), Ok(0))
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

    /// A listening socket, and what is said on a connection of which `client` is the end.
    async fn accepted(client: impl FnOnce(&std::path::Path)) -> Whose {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        client(&path);
        let (mut stream, _) = listener.accept().await.unwrap();
        Whose::of(Side::Operator, &mut stream).await.unwrap()
    }

    #[tokio::test]
    async fn who_cannot_be_told_is_not_the_operator() {
        // One that says something and has ended before anybody looks.
        let ended = |path: &std::path::Path| {
            let script = "import socket, sys; s = socket.socket(socket.AF_UNIX); \
                          s.connect(sys.argv[1]); s.sendall(b'POST /containers/create')";
            let mut python = std::process::Command::new("python3");
            assert!(python.args(["-c", script]).arg(path).status().unwrap().success());
        };
        assert!(matches!(accepted(ended).await, Whose::Lost));
        // A door's end, whatever its process is called, and when that is closed as well.
        for closes in [false, true] {
            let marked = |path: &std::path::Path| {
                use nix::sys::socket::{AddressFamily, SockFlag, SockType, bind, connect, socket};
                let (family, kind) = (AddressFamily::Unix, SockType::Stream);
                let end = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
                let name = format!("{}test-{}-{closes}", engine::MARK, std::process::id());
                bind(end.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes()).unwrap()).unwrap();
                connect(end.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
                match closes {
                    true => drop(end),
                    // Until the test's process ends.
                    false => std::mem::forget(end),
                }
            };
            assert!(matches!(accepted(marked).await, Whose::Lost), "{closes}");
        }
        let alive = |path: &std::path::Path| {
            std::mem::forget(std::os::unix::net::UnixStream::connect(path).unwrap());
        };
        assert!(matches!(accepted(alive).await, Whose::Operator));
    }
}
