//! The Docker server of a state root, as far as cells are concerned that are given its socket.
//!
//! ```text
//! operator's clients ── the socket that the operator named ──> server: the operator's rights
//! a cell's programs ── its door ── ROOT/docker/cells.sock, the cell's id ──> server: the cell's
//! ```
//! A cell is never connected to the first one: whoever reaches that has the operator's power.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use exocell_images::walk::Found;

use crate::Layout;

/// The longest path of a socket in the server's note, with its scheme.
const NOTE_BYTES_MAX: u64 = 4 << 10;
/// The name of the socket for cells, in [`folder`].
pub const CELLS_SOCKET: &str = "cells.sock";
/// What a process is called that connects for a cell.
pub const DOOR: &str = "door";
/// What the abstract address of its end of a connection begins with. A server sees that as long as
/// it has the connection, whatever became of the process meanwhile.
pub const MARK: &str = "exocell-door-";

/// Where the server's own files lie.
#[must_use]
pub fn folder(layout: &Layout) -> PathBuf {
    layout.root().join("docker")
}

/// The file that the server holds, and which says where it listens.
#[must_use]
pub fn lock(layout: &Layout) -> PathBuf {
    folder(layout).join("lock")
}

/// What the server notes of a socket.
#[must_use]
pub fn note(socket: &Path) -> String {
    let path = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    format!("unix://{}\n", path.display())
}

/// Whether `found` is the socket of the server of this state root, which may have ended.
pub(crate) fn is_socket_of(layout: &Layout, found: &Found) -> bool {
    let mut note = String::new();
    let read = fs::File::open(lock(layout))
        .and_then(|lock| lock.take(NOTE_BYTES_MAX).read_to_string(&mut note));
    let path = note.trim().strip_prefix("unix://");
    let Some(path) = path.filter(|_| read.is_ok()) else { return false };
    let own = found.metadata();
    fs::metadata(path).is_ok_and(|said| (said.dev(), said.ino()) == (own.dev(), own.ino()))
}
