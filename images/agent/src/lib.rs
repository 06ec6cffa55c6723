//! The protocol between a cell's supervisor (host) and its guest init.
//!
//! Every conversation is one vsock stream. The host speaks first with a
//! [`Kind::Request`] frame; the guest answers with the frames the request
//! calls for, and either side closes the stream to end it. There are two ways
//! a stream begins:
//!
//! - the guest init connects to the host's [`CONTROL_PORT`] once, when it is
//!   up; the host sends [`Request::Boot`] on it and gets [`Reply::Ready`];
//! - the host connects to the guest's [`AGENT_PORT`] for every session after
//!   that, one stream each.
//!
//! A frame is `kind: u8`, `length: u32` little endian, `length` bytes. A frame
//! longer than [`FRAME_BYTES_MAX`] is an error: the peer is hostile until the
//! frame is checked. Requests, which come from the operator's side only, may have
//! [`REQUEST_BYTES_MAX`].
//!
//! | request    | host then sends                        | guest sends |
//! |------------|----------------------------------------|-------------|
//! | `Boot`     |                                        | `Reply(GoesOn)`*, `Reply(Ready)` |
//! | `Within`   | the request that is meant              | as that |
//! | `Contain`  |                                        | `Reply(Done)` |
//! | `Discard`  |                                        | `Reply(Done)` |
//! | `Forget`   |                                        | `Reply(Done)` |
//! | `Start`    | as `Exec`                              | as `Exec` |
//! | `Exec`     | `Stdin`* `StdinEof` `Resize` `Signal`  | `Reply(Started)`, `Stdout`/`Stderr`*, `Reply(Exited)` |
//! | `Upload`   | `Data`* `DataEof` (a tar stream)       | `Reply(Done)` |
//! | `Download` |                                        | `Data`* `DataEof` (a tar stream) |
//! | `Stats`    |                                        | `Reply(Stats)` |
//! | `Usage`    |                                        | `Reply(Usage)` |
//! | `Plug`     |                                        | `Reply(Done)` |
//! | `Freeze`   |                                        | `Reply(Done)` |
//! | `SignalAll` |                                       | `Reply(Done)` |
//! | `Memory`   |                                        | `Reply(Done)` |
//! | `GiveBack` |                                        | `Reply(Done)` |
//! | `DropCold` |                                        | `Reply(Done)` |
//! | `Unmount`  |                                        | `Reply(Done)` |
//! | `Socket`   | [`SOCKET_OPEN`], then a program's bytes | `Reply(Done)`, then a program's bytes |
//! | `CloseSocket` |                                     | `Reply(Done)` |
//! | `Signal`   |                                        | `Reply(Done)` |
//! | `File`     | `Data`* `DataEof` to write a file       | `Reply(Entry)` or `Reply(Done)`, `Data`* ([`files`]) |
//! | `Account`  |                                        | `Reply(Done)` |
//! | `Dial`     | bytes                                  | `Reply(Done)`, then bytes |
//! | `Follow`   | as `Exec`                              | as `Exec` |
//! | `Shutdown` |                                        | `Reply(Done)`, then the guest powers off |
//!
//! Any of them may end with `Reply(Failed)` instead.
#![forbid(unsafe_code)]

pub mod client;
mod entry;
pub mod files;
mod frame;
mod message;
pub mod oci;
mod patience;
mod text;

pub use frame::{Frame, FrameError, FrameReader, FrameWriter, Kind};
pub use message::{
    Boot, BootTimes, Contain, ContainerUsage, Exec, FailureKind, FileCopy, FolderMount, GateStats,
    GuestStats, IsolatesSetup, JoinedAddress, NetworkSetup, PagerStats, Pressure, Reply, Request,
    SocketFile, Start, TtySize,
};
pub use patience::{ANSWER_MAX, Patient, TRANSFER_MAX};
pub use text::{printable, printable_lines};

/// The vsock port on the host (CID 2) that the guest init connects to once.
pub const CONTROL_PORT: u32 = 1024;
/// The vsock port in the guest that serves sessions.
pub const AGENT_PORT: u32 = 1024;
/// Containers that may be in a guest at once beside the cell's own.
pub const CONTAINERS_MAX: usize = 16;
/// Sockets of the host that a cell may have.
pub const SOCKETS_MAX: usize = 8;
/// What the host says, as the only byte without a frame, when it has connected a program's
/// connection.
pub const SOCKET_OPEN: u8 = b'+';
/// Of so many programs of a container the pids are told.
pub const PIDS_MAX: usize = 4096;
/// The directory of a depot's container that is its root.
pub const DEPOT_ROOT: &str = "root";
/// The name of the one file in a folder that is one file.
pub const FOLDER_FILE: &str = "file";
/// The context id of every guest: cells do not see each other.
pub const GUEST_CID: u64 = 3;
/// A guest whose TLS to some hosts is opened has a file system of its own here.
pub const AUTHORITY_FOLDER: &str = "/run/exocell/tls";
/// The certificate of the authority that answers as those hosts.
pub const AUTHORITY_CERTIFICATE: &str = "/run/exocell/tls/authority.pem";
/// The image's trusted certificates and that one.
pub const AUTHORITY_BUNDLE: &str = "/run/exocell/tls/trusted.pem";
/// A guest that may start isolates has a file system of its own here, which cannot be written.
pub const ISOLATES_FOLDER: &str = "/run/exocell/isolates";
/// The capability table that the tables of those isolates are derived from.
pub const ISOLATES_TABLE: &str = "/run/exocell/isolates/caps.json";
/// A file for each isolate that may run at once; who runs has one locked (flock(2)).
pub const ISOLATES_PLACES: &str = "/run/exocell/isolates/places";
/// The directory of the command that starts them, the last of each program's PATH.
pub const ISOLATES_BIN: &str = "/run/exocell/bin";
/// A guest that may start isolates has copies of its grant's models here, if there are any.
pub const ISOLATES_MODELS: &str = "/run/exocell/models";
/// The largest payload of a frame, in bytes, but for those of [`REQUEST_BYTES_MAX`].
pub const FRAME_BYTES_MAX: usize = 64 * 1024;
/// The largest payload of a request of the operator's side. A program's arguments and environment
/// may have 2 MiB together (execve(2)), and JSON may take more bytes for them.
pub const REQUEST_BYTES_MAX: usize = 8 << 20;
