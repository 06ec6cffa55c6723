//! A descriptor chain as a folder's server wants it: a message and room for the answer.

use std::os::fd::BorrowedFd;

use exocell_folders::{Errno, Exchange, REPLY_HEAD_LEN};
use vm_memory::VolatileSlice;

use crate::devices::sys;
use crate::devices::transport::buffers::{Buffers, Chain};

/// One request of the guest's, in its memory.
pub struct Message<'m> {
    request: Buffers<'m>,
    head: Buffers<'m>,
    body: Buffers<'m>,
    filled: usize,
    written: usize,
}

impl<'m> Message<'m> {
    pub(crate) fn new(chain: Chain<'m>) -> Self {
        let Chain { readable, mut writable, .. } = chain;
        let head = writable.take(REPLY_HEAD_LEN);
        Self { request: readable, head, body: writable, filled: 0, written: 0 }
    }

    /// The same in memory that is nobody's but the caller's.
    pub fn of_slices(request: &'m mut [u8], reply: &'m mut [u8]) -> Self {
        let chain = Chain {
            head: 0,
            readable: Buffers::of(VolatileSlice::from(request)),
            writable: Buffers::of(VolatileSlice::from(reply)),
        };
        Self::new(chain)
    }

    /// Bytes that were written for the guest.
    pub fn written(&self) -> usize {
        self.written
    }
}

fn failed(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::INVAL, Errno::from_raw_os_error)
}

impl Exchange for Message<'_> {
    fn left(&self) -> usize {
        self.request.len()
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        self.request.take(into.len()).copy_to(into)
    }

    fn take_to(&mut self, file: BorrowedFd<'_>, offset: u64, count: usize) -> Result<usize, Errno> {
        let from = self.request.take(count);
        if from.is_empty() {
            return Ok(0);
        }
        sys::write_at(file, from.slices(), offset).map_err(|error| failed(&error))
    }

    fn room(&self) -> usize {
        self.body.len()
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        let put = self.body.take(bytes.len()).copy_from(bytes);
        self.filled += put;
        put
    }

    fn put_from(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        count: usize,
    ) -> Result<usize, Errno> {
        let into = self.body.take(count);
        if into.is_empty() {
            return Ok(0);
        }
        let read = sys::read_at(file, into.slices(), offset).map_err(|error| failed(&error))?;
        self.filled += read;
        Ok(read)
    }

    fn finish(&mut self, head: [u8; REPLY_HEAD_LEN]) {
        if self.head.copy_from(&head) == head.len() {
            self.written = head.len() + self.filled;
        }
    }
}
