//! The answers to a frontend's messages.
//!
//! virtio_uml needs few of them: one memory region, kick eventfds, call sockets,
//! configuration reads, acknowledged requests. All else is refused.

use std::fs::File;
use std::io;

use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

use super::memory::{MappedMemory, MemoryFile};
use super::{CallKind, Device, Ring};

/// A device and what its frontend has set up so far.
pub(crate) struct Session<D> {
    pub device: D,
    pub rings: Vec<Ring>,
    pub memory: Option<MappedMemory>,
    allowed: MemoryFile,
    calls: CallKind,
}

impl<D: Device> Session<D> {
    pub fn new(device: D, allowed: MemoryFile, calls: CallKind) -> Self {
        let ring = || Ring::new(device.transport());
        let rings = (0..device.queues()).map(|_| ring()).collect();
        Self { device, rings, memory: None, allowed, calls }
    }

    /// Forgets the frontend and unmaps its memory.
    pub fn reset(&mut self) {
        self.rings.iter_mut().for_each(Ring::reset);
        self.memory = None;
    }

    fn ring(&mut self, index: impl Into<u32>) -> Result<&mut Ring> {
        let index: u32 = index.into();
        self.rings.get_mut(index as usize).ok_or_else(|| refuse("no such queue"))
    }

    fn offered(&self) -> u64 {
        self.device.features()
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }
}

/// An answer that fails the one message; other errors end the connection.
fn refuse(why: &'static str) -> Error {
    Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, why))
}

fn unsupported<T>() -> Result<T> {
    Err(refuse("not offered by this device"))
}

impl<D: Device> VhostUserBackendReqHandlerMut for Session<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(refuse("features that were not offered"));
        }
        let event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        self.rings.iter_mut().for_each(|ring| ring.set_event_idx(event_idx));
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.memory = MappedMemory::map(self.allowed, regions, files);
        match self.memory {
            Some(_) => Ok(None),
            None => Err(refuse("not the cell's memory file")),
        }
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index)?.set_size(num).map_err(|_| refuse("bad queue size"))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let memory = self.memory.as_ref().ok_or_else(|| refuse("no memory yet"))?;
        let find = |at| memory.translate(at).ok_or_else(|| refuse("queue outside memory"));
        let parts = [find(descriptor)?, find(available)?, find(used)?];
        let ring = self.rings.get_mut(index as usize).ok_or_else(|| refuse("no such queue"))?;
        ring.set_addresses(&memory.guest, parts).map_err(|_| refuse("queue outside memory"))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| refuse("bad queue index"))?;
        self.ring(index)?.set_base(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.ring(index)?.stop();
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index)?.set_kick(fd);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let calls = self.calls;
        self.ring(index)?.set_call(fd, calls).map_err(Error::ReqHandlerError)
    }

    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> Result<()> {
        self.ring(index).map(|_| ())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.set_enabled(enable);
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // Fields past the end read as zero, as for an older device.
        let mut answer = vec![0; size as usize];
        let config = self.device.config().get(offset as usize..).unwrap_or_default();
        answer.iter_mut().zip(config).for_each(|(to, from)| *to = *from);
        Ok(answer)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        unsupported()
    }

    fn set_backend_req_fd(&mut self, _: Backend) {}

    fn reset_device(&mut self) -> Result<()> {
        unsupported()
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported()
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unsupported()
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        unsupported()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        unsupported()
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        unsupported()
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        unsupported()
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported()
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unsupported()
    }
}
