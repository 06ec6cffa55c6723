//! Sessions of clients that build: what they send of their files, and the messages it comes in.

use std::io;

use exocell_docker::grpc::frames::{Deframer, framed};
use exocell_docker::session::messages::{DATA, ERROR, FINISH, Packet, STAT, Stat};
use exocell_docker::session::transfer::{Line, receive};
use prost::Message;

/// Bytes of all files of a transfer.
const BYTES_MAX: u64 = 1 << 20;
/// Bytes of one message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A client that has said all that it says.
struct Said(Deframer);

impl Line for Said {
    fn receive(&mut self) -> io::Result<Option<Packet>> {
        let Some(message) = self.0.take().map_err(io::Error::other)? else { return Ok(None) };
        Packet::decode(message).map(Some).map_err(io::Error::other)
    }

    fn send(&mut self, _packet: &Packet) -> io::Result<()> {
        Ok(())
    }
}

/// Counts what is written.
#[derive(Default)]
struct Counted(u64);

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Messages of a transfer of files.
pub fn files(bytes: &[u8]) {
    let mut said = Deframer::new(MESSAGE_BYTES_MAX);
    said.push(bytes);
    let (mut written, mut told) = (Counted::default(), 0);
    let mut tell = |bytes| told += bytes;
    let _ = receive(&mut Said(said), &mut written, BYTES_MAX, &mut tell);
    assert!(told <= bytes.len() as u64, "more was told than was sent");
    // Heads and ends of files, and names that are too long for them.
    assert!(written.0 <= 256 * bytes.len() as u64 + (1 << 16), "a stream that grows without end");
}

/// Transfers of files, directories, links and attributes.
pub fn file_seeds() -> Vec<Vec<u8>> {
    let stat = |path: &str, mode, size, link: &str| {
        let attributes = [("user.a".to_owned(), b"b".to_vec())].into();
        let (path, link) = (path.into(), link.into());
        let stat = Stat { path, mode, size, link, attributes, ..Stat::default() };
        Packet { kind: STAT, stat: Some(stat), ..Packet::default() }
    };
    let data =
        |id, data: &[u8]| Packet { kind: DATA, id, data: data.to_vec(), ..Packet::default() };
    let whole = [
        stat("a", 0o644, 3, ""),
        stat("d", 1 << 31 | 0o755, 0, ""),
        stat("d/b", 0o4755, 4, ""),
        stat("d/c", 0o644, 0, "a"),
        stat("l", 1 << 27 | 0o777, 0, "d/../a"),
        Packet::of(STAT, 0),
        data(2, b"of b"),
        data(0, b"o"),
        data(0, b"fa"),
        data(0, b""),
        data(2, b""),
        Packet::of(FINISH, 0),
    ];
    let failed = [stat("a", 0o644, 1, ""), Packet { kind: ERROR, ..data(0, b"no disk") }];
    let joined = |packets: &[Packet]| packets.iter().flat_map(framed).collect();
    vec![joined(&whole), joined(&failed)]
}
