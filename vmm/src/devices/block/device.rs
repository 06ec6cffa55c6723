//! The disk itself.

use std::fs::File;
use std::io;
use std::sync::Arc;

use nix::fcntl::{FallocateFlags, fallocate};
use virtio_bindings::bindings::virtio_blk::*;

use super::request::*;
use super::reserve::Reserve;
use super::windows::{Windows, place};
use super::{BlockConfig, BlockMetrics, Contents};
use crate::devices::DeviceError;
use crate::devices::metrics::TransportMetrics;
use crate::devices::sys;
use crate::devices::transport::buffers::{Buffers, Chain, DESCRIPTORS_MAX};
use crate::devices::transport::{Device, Io};

/// `struct virtio_blk_config` up to and with `write_zeroes_may_unmap`.
const CONFIG_BYTES: usize = 60;
/// Sectors of a 4 KiB page, the unit in which a hole gives space back.
const PAGE_SECTORS: u32 = 8;

/// A virtio-blk device.
pub(crate) struct Block {
    contents: Contents,
    read_only: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// Sectors of `contents`, and of all that the guest can name.
    own: u64,
    capacity: u64,
    windows: Option<Windows>,
    reserve: Reserve,
    config: [u8; CONFIG_BYTES],
    metrics: Arc<BlockMetrics>,
}

impl Block {
    pub fn new(config: BlockConfig, metrics: Arc<BlockMetrics>) -> Result<Self, DeviceError> {
        let own = config.contents.sectors()?;
        // What can be changed is one file.
        let windows = config.windows.filter(|_| config.read_only);
        let capacity = windows.as_ref().map_or(own, |_| Windows::SECTORS);
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        id.iter_mut().zip(config.id.bytes()).for_each(|(to, from)| *to = from);
        Ok(Self {
            contents: config.contents,
            read_only: config.read_only,
            id,
            own,
            capacity,
            windows,
            reserve: Reserve::default(),
            config: config_space(capacity),
            metrics,
        })
    }

    /// Carries out one request, and returns the bytes written into its chain.
    pub(super) fn request(&self, mut chain: Chain<'_>) -> u32 {
        self.metrics.requests.inc();
        let (Some(header), Some(data_len)) =
            (chain.readable.take_array(), chain.writable.len().checked_sub(1))
        else {
            // Without a header or room for the status there is no answer.
            self.metrics.errors.inc();
            return 0;
        };
        let data = chain.writable.take(data_len);
        let result = self.execute(Header::parse(header), &mut chain.readable, data);
        if result.is_err() {
            self.metrics.errors.inc();
        }
        chain.writable.copy_from(&[status(result)]);
        result.unwrap_or(0) as u32 + 1
    }

    fn execute(
        &self,
        header: Header,
        from: &mut Buffers<'_>,
        to: Buffers<'_>,
    ) -> Result<usize, Failure> {
        match header.kind {
            VIRTIO_BLK_T_IN => self.read(header.sector, to),
            VIRTIO_BLK_T_GET_ID => Ok(to.copy_from(&self.id)),
            VIRTIO_BLK_T_FLUSH => self.flush(),
            VIRTIO_BLK_T_OUT => self.write(header.sector, from),
            VIRTIO_BLK_T_DISCARD => self.erase(from, 0),
            VIRTIO_BLK_T_WRITE_ZEROES => self.erase(from, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP),
            _ => Err(Failure::Unsupported),
        }
    }

    fn read(&self, sector: u64, mut to: Buffers<'_>) -> Result<usize, Failure> {
        let len = to.len();
        let at = locate(sector, len as u64, self.capacity)?;
        match place(at, self.windows.as_ref()) {
            None => {
                let at = locate(sector, len as u64, self.own)?;
                self.contents.read(at, &mut to).map_err(|_| Failure::Io)?;
            }
            Some((window, within)) => {
                let windows = self.windows.as_ref().ok_or(Failure::Io)?;
                let (contents, sectors) = windows.find(window).ok_or(Failure::Io)?;
                let at = locate(within / SECTOR, len as u64, sectors)?;
                contents.read(at, &mut to).map_err(|_| Failure::Io)?;
            }
        }
        self.metrics.read_bytes.add(len as u64);
        Ok(len)
    }

    fn write(&self, sector: u64, from: &mut Buffers<'_>) -> Result<usize, Failure> {
        let len = from.len() as u64;
        let mut at = locate(sector, len, self.capacity)?;
        let file = self.changeable()?;
        self.reserve.take(file, at, len).map_err(|_| Failure::Io)?;
        while !from.is_empty() {
            let done = sys::write_at(file, from.slices(), at).map_err(|_| Failure::Io)?;
            at += progress(done, from)?;
        }
        self.metrics.written_bytes.add(len);
        Ok(0)
    }

    fn flush(&self) -> Result<usize, Failure> {
        if let Ok(file) = self.changeable() {
            file.sync_data().map_err(|_| Failure::Io)?;
            self.metrics.flushes.inc();
        }
        Ok(0)
    }

    fn erase(&self, from: &mut Buffers<'_>, flags: u32) -> Result<usize, Failure> {
        self.changeable()?;
        let segments = from.len() / ERASE_SEGMENT;
        if segments > ERASE_SEGMENTS_MAX || !from.len().is_multiple_of(ERASE_SEGMENT) {
            return Err(Failure::Io);
        }
        while let Some(segment) = from.take_array() {
            self.erase_one(Erase::parse(segment), flags)?;
        }
        Ok(0)
    }

    fn erase_one(&self, erase: Erase, flags: u32) -> Result<(), Failure> {
        let len = u64::from(erase.sectors) * SECTOR;
        let at = locate(erase.sector, len, self.capacity)?;
        if erase.flags & !flags != 0 {
            return Err(Failure::Unsupported);
        }
        if erase.sectors > ERASE_SECTORS_MAX {
            return Err(Failure::Io);
        }
        if len > 0 {
            punch(self.changeable()?, at, len).map_err(|_| Failure::Io)?;
        }
        self.metrics.erased_bytes.add(len);
        Ok(())
    }

    /// The file, if it can be changed.
    fn changeable(&self) -> Result<&File, Failure> {
        self.contents.only().filter(|_| !self.read_only).ok_or(Failure::Io)
    }
}

/// Moves past what one host call did; nothing done means the file has shrunk.
fn progress(done: usize, buffers: &mut Buffers<'_>) -> Result<u64, Failure> {
    match done {
        0 => Err(Failure::Io),
        done => Ok(buffers.take(done).len() as u64),
    }
}

fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let (at, len) = (at.try_into().map_err(invalid)?, len.try_into().map_err(invalid)?);
    Ok(fallocate(file, flags, at, len)?)
}

/// Offsets as in Linux's `struct virtio_blk_config` (virtio 1.2, 5.2.4).
fn config_space(capacity: u64) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &capacity.to_le_bytes());
    put(12, &(DESCRIPTORS_MAX as u32 - 2).to_le_bytes()); // seg_max
    put(20, &(SECTOR as u32).to_le_bytes()); // blk_size
    put(34, &1_u16.to_le_bytes()); // num_queues
    put(36, &ERASE_SECTORS_MAX.to_le_bytes()); // max_discard_sectors
    put(40, &(ERASE_SEGMENTS_MAX as u32).to_le_bytes());
    put(44, &PAGE_SECTORS.to_le_bytes()); // discard_sector_alignment
    put(48, &ERASE_SECTORS_MAX.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &(ERASE_SEGMENTS_MAX as u32).to_le_bytes());
    put(56, &[1]); // write_zeroes_may_unmap
    config
}

impl Device for Block {
    fn queues(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        let changes = match self.read_only {
            true => 1 << VIRTIO_BLK_F_RO,
            false => 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES,
        };
        changes | 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        if let Some(ring) = io.rings.get_mut(index) {
            ring.serve(io.mem, |chain| self.request(chain));
        }
    }
}
