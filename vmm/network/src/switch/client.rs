//! Whoever connects to a switch: to become a member, or to hear who is one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};

use super::protocol::{Answer, Ask, MESSAGE_BYTES_MAX, message, read};
use super::{Addresses, CONNECTIONS_MAX, Join, Member, Port, port};

/// How long the switch may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

fn gone(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, what.to_owned())
}

/// The next message, which is no packet.
fn hear(socket: &OwnedFd, until: Instant) -> io::Result<Answer> {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let left = until.saturating_duration_since(Instant::now());
    let mut polled = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let patience = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
    if poll(&mut polled, patience)? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)?;
    match buffer.get(..length).and_then(read) {
        Some(answer) => Ok(answer),
        None if length == 0 => Err(gone("the network's switch has ended")),
        None => Err(io::Error::other("the network's switch is of another version")),
    }
}

/// Makes a cell a member of network `name`, by a new connection to its switch.
///
/// # Errors
/// The host's, where the switch does not answer: [`io::ErrorKind::ConnectionReset`] where it has
/// just ended. [`io::ErrorKind::InvalidInput`] has its refusal.
pub fn join(socket: OwnedFd, name: &str, addresses: Addresses, wanted: Join) -> io::Result<Port> {
    port::widen(&socket);
    port::send(&socket, &message(&Ask::Join(wanted)))?;
    match hear(&socket, Instant::now() + ANSWER_MAX)? {
        Answer::Joined { address } => Ok(Port::new(socket, name, addresses, address)),
        Answer::Refused { message } => Err(io::Error::new(io::ErrorKind::InvalidInput, message)),
        _ => Err(io::Error::other("the network's switch gave another answer")),
    }
}

/// Who is in the network, by a new connection to its switch.
///
/// # Errors
/// As those of [`join`].
pub fn list(socket: &OwnedFd) -> io::Result<Vec<Member>> {
    port::send(socket, &message(&Ask::List))?;
    let until = Instant::now() + ANSWER_MAX;
    let mut members = Vec::new();
    loop {
        match hear(socket, until)? {
            Answer::Member(member) if members.len() < CONNECTIONS_MAX => members.push(member),
            Answer::End => return Ok(members),
            _ => return Err(io::Error::other("the network's switch gave another answer")),
        }
    }
}

/// Has the others call a cell by `names` from now on, by a new connection to the switch.
///
/// # Errors
/// As those of [`join`].
pub fn rename(socket: &OwnedFd, cell: &str, names: Vec<String>) -> io::Result<()> {
    port::send(socket, &message(&Ask::Rename { cell: cell.to_owned(), names }))?;
    match hear(socket, Instant::now() + ANSWER_MAX)? {
        Answer::End => Ok(()),
        Answer::Refused { message } => Err(io::Error::new(io::ErrorKind::InvalidInput, message)),
        _ => Err(io::Error::other("the network's switch gave another answer")),
    }
}
