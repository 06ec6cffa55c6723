//! The 44-byte header of every packet (virtio 1.2, 5.10.6).

use std::mem;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 44;
/// The most payload bytes of one packet (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
pub(super) const PAYLOAD_MAX: u32 = 64 * 1024;
/// The stream socket type; datagrams and seqpackets are not offered.
pub(super) const TYPE_STREAM: u16 = 1;

/// SHUTDOWN: the sender will receive no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// SHUTDOWN: the sender will send no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// What a packet says (`enum virtio_vsock_op`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    fn parse(op: u16) -> Option<Self> {
        Some(match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// A stream's two port numbers; its name, as the context ids are fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub guest: u32,
    pub host: u32,
}

/// A header from the guest, as it came; nothing in it is checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub source_cid: u64,
    pub target_cid: u64,
    pub ports: Ports,
    pub len: u32,
    pub kind: u16,
    /// `None` for an unknown number.
    pub op: Option<Op>,
    pub flags: u32,
    /// Bytes the guest can hold for this stream.
    pub buffer: u32,
    /// Bytes of this stream the guest's program has taken so far, modulo 2^32.
    pub taken: u32,
}

/// Reads little-endian fields one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn next<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *field
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.next())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.next())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.next())
    }
}

impl Header {
    /// Reads a header that the guest sent.
    pub fn from_guest(bytes: &[u8; HEADER_BYTES]) -> Self {
        let mut fields = Fields(bytes);
        Self {
            source_cid: fields.u64(),
            target_cid: fields.u64(),
            ports: Ports { guest: fields.u32(), host: fields.u32() },
            len: fields.u32(),
            kind: fields.u16(),
            op: Op::parse(fields.u16()),
            flags: fields.u32(),
            buffer: fields.u32(),
            taken: fields.u32(),
        }
    }
}

/// A header for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub ports: Ports,
    pub op: Op,
    pub len: u32,
    pub flags: u32,
    /// Bytes we hold for this stream at most.
    pub buffer: u32,
    /// Bytes of this stream the host program has taken so far, modulo 2^32.
    pub taken: u32,
}

impl Reply {
    /// The packet that ends, or refuses, a stream.
    pub fn reset(ports: Ports) -> Self {
        Self { ports, op: Op::Reset, len: 0, flags: 0, buffer: 0, taken: 0 }
    }

    /// The header as it goes into guest memory.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut rest = bytes.as_mut_slice();
        let mut put = |field: &[u8]| {
            let (to, next) = mem::take(&mut rest).split_at_mut(field.len());
            to.copy_from_slice(field);
            rest = next;
        };
        put(&super::HOST_CID.to_le_bytes());
        put(&super::GUEST_CID.to_le_bytes());
        put(&self.ports.host.to_le_bytes());
        put(&self.ports.guest.to_le_bytes());
        put(&self.len.to_le_bytes());
        put(&TYPE_STREAM.to_le_bytes());
        put(&(self.op as u16).to_le_bytes());
        put(&self.flags.to_le_bytes());
        put(&self.buffer.to_le_bytes());
        put(&self.taken.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_every_field_where_the_guest_looks() {
        let ports = Ports { guest: 0x1122_3344, host: 0x5566_7788 };
        let reply = Reply { ports, op: Op::Shutdown, len: 5, flags: 3, buffer: 7, taken: 9 };
        let seen = Header::from_guest(&reply.bytes());
        // The guest sees host and guest the other way round.
        assert_eq!(seen.ports, Ports { guest: ports.host, host: ports.guest });
        assert_eq!((seen.source_cid, seen.target_cid), (2, 3));
        assert_eq!((seen.kind, seen.op), (TYPE_STREAM, Some(Op::Shutdown)));
        assert_eq!((seen.len, seen.flags, seen.buffer, seen.taken), (5, 3, 7, 9));
    }

    #[test]
    fn unknown_operations_are_none() {
        for op in (0..=u16::MAX).filter(|op| !(1..=7).contains(op)) {
            assert_eq!(Op::parse(op), None);
        }
    }
}
