//! Descriptors that pass from one process to another (unix(7), SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};

/// Sends `descriptor` along with one byte.
pub(crate) fn send_descriptor(stream: &UnixStream, descriptor: &impl AsFd) -> io::Result<()> {
    let descriptors = [descriptor.as_fd().as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let byte = [IoSlice::new(&[0])];
    sendmsg::<UnixAddr>(stream.as_raw_fd(), &byte, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Waits for a descriptor that is sent in that way.
pub(crate) fn receive_descriptor(stream: &UnixStream) -> io::Result<OwnedFd> {
    match receive_answer(stream)? {
        Some(Ok(descriptor)) => Ok(descriptor),
        None | Some(Err(_)) => Err(io::Error::other("no descriptor came")),
    }
}

/// Waits for a descriptor, or for another byte without one; `None` at the end of the stream.
pub(crate) fn receive_answer(stream: &UnixStream) -> io::Result<Option<Result<OwnedFd, u8>>> {
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(stream.as_raw_fd(), &mut data, Some(&mut space), flags)?;
    let bytes = message.bytes;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control
            && let Some(descriptor) = descriptors.first()
        {
            // SAFETY: the kernel just installed this descriptor for us, and
            // nothing else owns it.
            return Ok(Some(Ok(unsafe { OwnedFd::from_raw_fd(*descriptor) })));
        }
    }
    Ok((bytes > 0).then_some(Err(byte[0])))
}
