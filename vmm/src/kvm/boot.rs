//! What is in a machine's memory before its first instruction: the kernel, its init, and what they
//! are told by the x86/HVM direct boot protocol (PVH: Xen's docs/misc/pvh.pandoc), which Linux has
//! in arch/x86/platform/pvh.

use std::fs::File;
use std::os::fd::AsFd;

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};

use super::error::KvmError;
use super::memory::{
    COMMAND_LINE, COMMAND_LINE_BYTES_MAX, HIGH_MEMORY, LOW_END, MEMORY_MAP, MODULES, MP_TABLE,
    START_INFO,
};
use super::mptable;

const MAGIC: u32 = 0x336e_c578;
/// With a map of memory.
const VERSION: u32 = 1;
const RAM: u32 = 1;
const PAGE: u64 = 4096;

/// Puts kernel and init into `memory`, and tells the kernel of its machine; where it begins.
pub(super) fn load(
    memory: &GuestMemoryMmap,
    kernel: &mut File,
    initramfs: &File,
    arguments: &[String],
    vcpus: u8,
) -> Result<GuestAddress, KvmError> {
    let bytes = memory.iter().map(GuestMemoryRegion::len).sum();
    let too_few = || KvmError::Memory { bytes };
    let loaded = Elf::load(memory, None, kernel, Some(GuestAddress(HIGH_MEMORY)));
    let loaded = loaded.map_err(|error| match error {
        linux_loader::loader::Error::Elf(linux_loader::loader::elf::Error::ReadKernelImage) => {
            too_few()
        }
        error => KvmError::Kernel(error),
    })?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err(KvmError::NoEntry);
    };
    let init_bytes = initramfs.metadata().map_err(KvmError::host("read the initramfs"))?.len();
    let low_end = bytes.min(LOW_END);
    let init_at = low_end.checked_sub(init_bytes.next_multiple_of(PAGE)).ok_or_else(too_few)?;
    if init_at < loaded.kernel_end {
        return Err(too_few());
    }
    let mut source = initramfs.as_fd();
    memory
        .read_exact_volatile_from(GuestAddress(init_at), &mut source, init_bytes as usize)
        .map_err(KvmError::memory("filled with the initramfs"))?;
    let line = arguments.join(" ");
    if line.len() >= COMMAND_LINE_BYTES_MAX {
        return Err(KvmError::CommandLine { bytes: line.len() });
    }
    let written = KvmError::memory("written");
    memory
        .write_slice(&[line.as_bytes(), &[0]].concat(), GuestAddress(COMMAND_LINE))
        .and_then(|()| memory.write_slice(&mptable::table(vcpus), GuestAddress(MP_TABLE)))
        .map_err(written)?;
    tell(memory, init_at, init_bytes)?;
    Ok(entry)
}

/// The start of day structure.
fn tell(memory: &GuestMemoryMmap, init_at: u64, init_bytes: u64) -> Result<(), KvmError> {
    let ram = |addr, size| hvm_memmap_table_entry { addr, size, type_: RAM, reserved: 0 };
    let mut map = vec![ram(0, MP_TABLE)];
    for region in memory.iter() {
        let (start, bytes) = (region.start_addr().raw_value(), region.len());
        let from = start.max(HIGH_MEMORY);
        map.push(ram(from, start + bytes - from));
    }
    let info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        nr_modules: 1,
        modlist_paddr: MODULES,
        cmdline_paddr: COMMAND_LINE,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..hvm_start_info::default()
    };
    let module = hvm_modlist_entry { paddr: init_at, size: init_bytes, ..Default::default() };
    let mut parameters = BootParams::new(&info, GuestAddress(START_INFO));
    parameters.set_sections(&map, GuestAddress(MEMORY_MAP));
    parameters.set_modules(&[module], GuestAddress(MODULES));
    PvhBootConfigurator::write_bootparams(&parameters, memory).map_err(KvmError::memory("written"))
}
