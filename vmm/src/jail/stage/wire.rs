//! What goes over the control socket: frames of a kind, a length and so many bytes.
//!
//! The caller sends one, the request, with the descriptors; the stage sends lines of progress and
//! then an answer or a refusal. A worker's caller may send more, and a worker too ([`Link`]). What the stage sends is an allegation: its length is checked
//! against a bound before room is made for it.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Descriptors of one request (unix(7), SCM_MAX_FD).
const DESCRIPTORS_MAX: usize = 253;
/// A request's length.
pub(super) const REQUEST_BYTES_MAX: usize = 4 << 20;
/// Kind and length.
pub(super) const HEAD_BYTES: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Request = 1,
    /// Confined, about to work. It has no bytes.
    Begun = 2,
    Progress = 3,
    Answer = 4,
    Fault = 5,
}

impl Kind {
    pub fn of(byte: u8) -> Option<Self> {
        let kinds = [Self::Request, Self::Begun, Self::Progress, Self::Answer, Self::Fault];
        kinds.into_iter().find(|kind| *kind as u8 == byte)
    }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "a frame is too long")
}

/// A frame's kind byte and length.
pub(super) fn head(bytes: [u8; HEAD_BYTES]) -> (u8, usize) {
    let [kind, length @ ..] = bytes;
    (kind, u32::from_le_bytes(length) as usize)
}

pub(super) fn send(mut to: &UnixStream, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| too_long())?;
    let mut head = vec![kind as u8];
    head.extend(length.to_le_bytes());
    to.write_all(&head)?;
    to.write_all(bytes)
}

/// Sends `descriptors` on a byte of their own, then the request.
pub(super) fn send_request(
    to: &UnixStream,
    descriptors: &[BorrowedFd<'_>],
    request: &[u8],
) -> io::Result<()> {
    if request.len() > REQUEST_BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return Err(too_long());
    }
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let with = [ControlMessage::ScmRights(&raw)];
    let with = if raw.is_empty() { &[][..] } else { &with };
    sendmsg::<()>(to.as_raw_fd(), &[IoSlice::new(&[0])], with, MsgFlags::MSG_NOSIGNAL, None)?;
    send(to, Kind::Request, request)
}

/// Messages, with descriptors, between a worker and its caller.
///
/// Either side takes what the other says for an allegation: the length of a message is bounded,
/// its form is checked, and descriptors that come with it are the receiver's to use or close.
#[derive(Debug)]
pub struct Link(UnixStream);

impl Link {
    /// Over one end of a pair of sockets.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        stream.try_clone().map(Self)
    }

    /// # Errors
    /// The other side is gone, or has not read for as long as [`Link::wait_at_most`] says.
    pub fn send(
        &self,
        descriptors: &[BorrowedFd<'_>],
        message: &impl serde::Serialize,
    ) -> io::Result<()> {
        send_request(&self.0, descriptors, &serde_json::to_vec(message)?)
    }

    /// Waits for a message; `None` if the other side is gone.
    ///
    /// # Errors
    /// The host's, and `InvalidData` for what is of another form.
    pub fn receive<T: serde::de::DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        match receive_request(&self.0) {
            Ok((descriptors, message)) => {
                Ok(Some((serde_json::from_slice(&message)?, descriptors)))
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Bounds how long a message may wait for the other side to read.
    ///
    /// # Errors
    /// The host's.
    pub fn wait_at_most(&self, time: std::time::Duration) -> io::Result<()> {
        self.0.set_write_timeout(Some(time))
    }

    /// Ends it for both sides; who waits for a message sees that.
    pub fn end(&self) {
        // One that has ended already is ended.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// What [`send_request`] sent.
pub(super) fn receive_request(mut from: &UnixStream) -> io::Result<(Vec<OwnedFd>, Vec<u8>)> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(from.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = part {
            // SAFETY: the kernel has just made these for us (unix(7), SCM_RIGHTS), and nothing
            // else owns them. Needed because recvmsg gives numbers.
            descriptors.extend(received.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }));
        }
    }
    let mut bytes = [0; HEAD_BYTES];
    from.read_exact(&mut bytes)?;
    let (kind, length) = head(bytes);
    if kind != Kind::Request as u8 || length > REQUEST_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut request = vec![0; length];
    from.read_exact(&mut request)?;
    Ok((descriptors, request))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn a_request_arrives_with_its_descriptors_in_order() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| {
            std::fs::write(directory.path().join(name), name).unwrap();
            File::open(directory.path().join(name)).unwrap()
        });
        let given: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_request(&ours, &given, b"do it").unwrap();
        let (received, request) = receive_request(&theirs).unwrap();
        assert_eq!(request, b"do it");
        let read = |fd| io::read_to_string(File::from(fd)).unwrap();
        assert_eq!(received.into_iter().map(read).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn a_caller_that_is_gone_is_no_request() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        assert!(receive_request(&theirs).is_err());
        assert!(send_request(&theirs, &[], &vec![0; REQUEST_BYTES_MAX + 1]).is_err());
    }
}
