//! A device's back end, reached by vhost-user: the very one that serves guests of `para`
//! ([`crate::devices`]). Doorbells are ioeventfds and interrupts irqfds, so that neither comes to
//! this process.

use std::os::unix::net::UnixStream;

use kvm_ioctls::{IoEventAddress, VmFd};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{
    Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::error::KvmError;
use super::memory::{DEVICE_BYTES, DEVICES};
use super::mmio::{Backend, NOTIFY, Queue, Registers};
use crate::platform::DeviceSocket;

/// Bytes of configuration that a device has at most.
const CONFIG_BYTES: u32 = 256;
const QUEUES_MAX: u64 = 64;
/// Pins of the interrupt controller that the guest kernel has numbers for without being told more,
/// and that are no device's of every PC. Devices share them where there are more: interrupts are
/// edges, and each device on a pin looks for itself.
const PINS: [u32; 9] = [5, 6, 7, 9, 10, 11, 12, 14, 15];

/// A back end and its events.
pub(super) struct Served {
    frontend: Frontend,
    features: u64,
    config: Vec<u8>,
    /// One for each queue.
    kicks: Vec<EventFd>,
    call: EventFd,
}

/// The device that is the `number`th of its machine.
pub(super) fn attach(
    vm: &VmFd,
    regions: &[VhostUserMemoryRegionInfo],
    socket: &DeviceSocket,
    number: usize,
) -> Result<Registers<Served>, KvmError> {
    let name = || socket.name.clone();
    let stream = UnixStream::connect(format!("/{}", socket.name))
        .map_err(|source| KvmError::Unreached { name: name(), source })?;
    let (frontend, features, config, queues) =
        negotiate(stream, regions).map_err(|source| KvmError::Device { name: name(), source })?;
    let event =
        || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(KvmError::host("make an event"));
    let call = event()?;
    vm.register_irqfd(&call, pin(number)).map_err(KvmError::call("KVM_IRQFD"))?;
    let mut kicks = Vec::new();
    for queue in 0..queues {
        let kick = event()?;
        let at = IoEventAddress::Mmio(address(number) + NOTIFY);
        vm.register_ioevent(&kick, &at, queue).map_err(KvmError::call("KVM_IOEVENTFD"))?;
        kicks.push(kick);
    }
    let served = Served { frontend, features, config, kicks, call };
    Ok(Registers::new(served, socket.id as u32, socket.id.queue_size()))
}

fn negotiate(
    stream: UnixStream,
    regions: &[VhostUserMemoryRegionInfo],
) -> Result<(Frontend, u64, Vec<u8>, u32), vhost::Error> {
    let mut frontend = Frontend::from_stream(stream, QUEUES_MAX);
    frontend.set_owner()?;
    let features = frontend.get_features()?;
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK;
    let agreed = frontend.get_protocol_features()? & wanted;
    frontend.set_protocol_features(agreed)?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let queues = frontend.get_queue_num()?.min(QUEUES_MAX) as u32;
    let empty = [0; CONFIG_BYTES as usize];
    let (_, config) =
        frontend.get_config(0, CONFIG_BYTES, VhostUserConfigFlags::empty(), &empty)?;
    frontend.set_mem_table(regions)?;
    Ok((frontend, features, config, queues))
}

/// Where its registers are.
fn address(number: usize) -> u64 {
    DEVICES + number as u64 * DEVICE_BYTES
}

fn pin(number: usize) -> u32 {
    PINS[number % PINS.len()]
}

/// How the guest kernel is told of it.
pub(super) fn argument(number: usize) -> String {
    format!("virtio_mmio.device=4K@{:#x}:{}", address(number), pin(number))
}

impl Backend for Served {
    fn features(&self) -> u64 {
        self.features & !VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queues(&self) -> usize {
        self.kicks.len()
    }

    fn start(&mut self, features: u64, queues: &[(usize, Queue)]) -> Result<(), vhost::Error> {
        let own = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.frontend.set_features(features | own)?;
        for (index, queue) in queues {
            let kick = self.kicks.get(*index).ok_or(vhost::Error::InvalidQueue)?;
            self.frontend.set_vring_num(*index, queue.size)?;
            let layout = VringConfigData {
                queue_max_size: queue.size,
                queue_size: queue.size,
                flags: 0,
                desc_table_addr: queue.descriptors,
                used_ring_addr: queue.used,
                avail_ring_addr: queue.available,
                log_addr: None,
            };
            self.frontend.set_vring_addr(*index, &layout)?;
            self.frontend.set_vring_base(*index, 0)?;
            self.frontend.set_vring_call(*index, &self.call)?;
            self.frontend.set_vring_kick(*index, kick)?;
            self.frontend.set_vring_enable(*index, true)?;
        }
        Ok(())
    }

    fn stop(&mut self, queues: &[(usize, Queue)]) -> Result<(), vhost::Error> {
        for (index, _) in queues {
            self.frontend.set_vring_enable(*index, false)?;
            self.frontend.get_vring_base(*index)?;
        }
        Ok(())
    }
}
