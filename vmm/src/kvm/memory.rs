//! Where things are in a machine's physical memory, and its memory slots: one memory file, all of
//! it below the devices where it fits there.

use std::os::fd::AsRawFd;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{
    Address, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

use super::error::KvmError;
use crate::memory::GuestMemory;

/// What the kernel is started by (boot.rs), all in the lowest 640 KiB.
pub(super) const START_INFO: u64 = 0x6000;
pub(super) const MEMORY_MAP: u64 = 0x7000;
pub(super) const MODULES: u64 = 0x8000;
pub(super) const COMMAND_LINE: u64 = 0x2_0000;
pub(super) const COMMAND_LINE_BYTES_MAX: usize = 2048;
/// The last KiB of base memory, where an MP table is looked for (Intel MultiProcessor
/// Specification 1.4, section 4).
pub(super) const MP_TABLE: u64 = 0x9_fc00;
/// A PC has no memory from here to 1 MiB.
pub(super) const HIGH_MEMORY: u64 = 0x10_0000;
/// A PC's firmware leaves a word here when it is to start again without a test of memory.
pub(super) const RESET_MODE: u64 = 0x472;

/// Memory ends below here and goes on at 4 GiB: between are devices and interrupt controllers.
pub(super) const LOW_END: u64 = 0xc000_0000;
const HIGH_START: u64 = 1 << 32;
/// The first device; each has a page.
pub(super) const DEVICES: u64 = 0xd000_0000;
pub(super) const DEVICE_BYTES: u64 = 0x1000;
/// Pages that KVM needs on Intel's processors to run code of 16 bits.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TASK_STATE: usize = 0xfffb_d000;

/// Maps a guest's memory as its machine has it.
pub(super) fn map(memory: &GuestMemory) -> Result<GuestMemoryMmap, KvmError> {
    let low = memory.bytes().min(LOW_END);
    let parts = [(0, low, 0), (HIGH_START, memory.bytes() - low, low)];
    let mut ranges = Vec::new();
    for (start, bytes, offset) in parts.into_iter().filter(|(_, bytes, _)| *bytes > 0) {
        let file = memory.file().try_clone().map_err(KvmError::host("keep the memory file"))?;
        let file = FileOffset::new(file, offset);
        ranges.push((GuestAddress(start), bytes as usize, Some(file)));
    }
    GuestMemoryMmap::from_ranges_with_files(&ranges).map_err(KvmError::memory("mapped"))
}

/// Gives the machine its memory.
pub(super) fn give(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), KvmError> {
    vm.set_identity_map_address(IDENTITY_MAP)
        .map_err(KvmError::call("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(TASK_STATE).map_err(KvmError::call("KVM_SET_TSS_ADDR"))?;
    for (slot, region) in (0..).zip(memory.iter()) {
        let address = region
            .get_host_address(MemoryRegionAddress(0))
            .map_err(KvmError::memory("found where it is mapped"))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: address as u64,
        };
        // SAFETY: the range is a whole mapping that the machine's owner keeps as long as it keeps
        // the machine, and regions of one map do not overlap. Needed to give a guest memory.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(KvmError::call("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(())
}

/// The same for back ends of devices. To them an address of ours is the guest's own, so that
/// nothing has to be translated.
pub(super) fn regions(memory: &GuestMemoryMmap) -> Vec<VhostUserMemoryRegionInfo> {
    let region = |region: &vm_memory::GuestRegionMmap| {
        let file = region.file_offset()?;
        Some(VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.start_addr().raw_value(),
            mmap_offset: file.start(),
            mmap_handle: file.file().as_raw_fd(),
        })
    };
    memory.iter().filter_map(region).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_leaves_room_for_devices() {
        let regions = |bytes| {
            let memory = GuestMemory::new(bytes).unwrap();
            let mapped = map(&memory).unwrap();
            let found = regions(&mapped);
            let of = |r: &VhostUserMemoryRegionInfo| {
                (r.guest_phys_addr, r.memory_size, r.mmap_offset, r.userspace_addr)
            };
            found.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(regions(64 << 20), [(0, 64 << 20, 0, 0)]);
        assert_eq!(
            regions(LOW_END + (1 << 20)),
            [(0, LOW_END, 0, 0), (1 << 32, 1 << 20, LOW_END, 1 << 32)]
        );
    }
}
