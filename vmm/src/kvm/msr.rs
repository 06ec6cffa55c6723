//! Which registers of the model (MSRs) a guest reaches: those listed here, each with its reason. All
//! others are a fault in the guest (#GP), whatever the host's KVM would do with them (Linux:
//! Documentation/virt/kvm/api.rst, KVM_X86_SET_MSR_FILTER). Those of the local APIC in x2APIC mode
//! are KVM's own and not filtered.

use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};

use super::error::KvmError;

/// Registers that a guest reads and writes, as far as KVM lets it.
struct Reached {
    first: u32,
    last: u32,
    #[cfg_attr(not(test), allow(dead_code))]
    why: &'static str,
}

const fn one(register: u32, why: &'static str) -> Reached {
    Reached { first: register, last: register, why }
}

const fn some(first: u32, last: u32, why: &'static str) -> Reached {
    Reached { first, last, why }
}

const REACHED: &[Reached] = &[
    one(0x10, "the time stamp counter, with an offset of the guest's own"),
    some(0x11, 0x12, "KVM's clock, by its old numbers"),
    one(0x17, "the platform, which KVM says is none"),
    one(0x1b, "where the local APIC is"),
    one(0x2a, "power-on settings, which KVM makes up"),
    one(0x3a, "what firmware left on: KVM's word"),
    one(0x3b, "the offset of the time stamp counter"),
    some(0x48, 0x49, "speculation: the guest protects itself"),
    one(0x8b, "the revision of microcode"),
    one(0xcd, "the speed of a bus, which KVM makes up"),
    one(0xce, "the platform: faults at CPUID are possible"),
    one(0xe1, "how long a processor may wait"),
    one(0xfe, "how many types of memory there are"),
    one(0x10a, "which attacks the processor withstands"),
    one(0x10b, "flushes the cache of the processor that it runs on"),
    one(0x122, "transactions, off"),
    one(0x140, "faults at CPUID"),
    some(0x174, 0x176, "system calls"),
    some(0x179, 0x17b, "machine checks of its own"),
    one(0x1a0, "features of the processor, of its own"),
    some(0x1c4, 0x1c5, "registers that are saved when they are used"),
    one(0x1d9, "steps from branch to branch"),
    some(0x200, 0x2ff, "types of memory; machine checks between"),
    some(0x400, 0x47f, "machine checks of its own"),
    some(0x6a0, 0x6a2, "shadow stacks"),
    some(0x6a4, 0x6a8, "shadow stacks"),
    one(0x6e0, "the timer's deadline"),
    one(0xda0, "which state of a task is saved"),
    some(0x4b56_4d00, 0x4b56_4d08, "KVM's clock, and what it tells of lost time"),
    some(0xc000_0080, 0xc000_0084, "modes of the processor, system calls"),
    some(0xc000_0100, 0xc000_0103, "segments, the number of the processor"),
    one(0xc001_0010, "settings of an AMD processor: KVM's word"),
    one(0xc001_0015, "the same"),
    one(0xc001_001f, "the same"),
    one(0xc001_0055, "the same"),
    one(0xc001_0058, "where a bus has its settings: nowhere"),
    one(0xc001_011f, "speculation, by KVM's own word"),
    some(0xc001_0140, 0xc001_0141, "known errors of an AMD processor"),
    some(0xc001_1021, 0xc001_1023, "settings of an AMD processor: KVM's word"),
    some(0xc001_1029, 0xc001_102a, "the same"),
];

/// Where they are: first register and how many, a multiple of 8.
const PARTS: [(u32, u32); 5] = [
    (0, 0x1000),
    (0x4b56_4d00, 0x10),
    (0xc000_0000, 0x200),
    (0xc001_0000, 0x200),
    (0xc001_1000, 0x40),
];

/// A bit for each register of a part.
fn bitmap((first, count): (u32, u32)) -> Vec<u8> {
    let mut bits = vec![0; count as usize / 8];
    for register in REACHED.iter().flat_map(|reached| reached.first..=reached.last) {
        let Some(place) = register.checked_sub(first) else { continue };
        if let Some(byte) = bits.get_mut(place as usize / 8) {
            *byte |= 1 << (place % 8);
        }
    }
    bits
}

/// Has the machine's processors reach no others.
pub(super) fn filter(vm: &VmFd) -> Result<(), KvmError> {
    let bitmaps = PARTS.map(bitmap);
    let ranges: Vec<_> = PARTS
        .iter()
        .zip(&bitmaps)
        .map(|((base, msr_count), bitmap)| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: *base,
            msr_count: *msr_count,
            bitmap,
        })
        .collect();
    vm.set_msr_filter(MsrFilterDefaultAction::DENY, &ranges)
        .map_err(KvmError::call("KVM_X86_SET_MSR_FILTER"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_reached(register: u32) -> bool {
        PARTS.iter().any(|part| {
            let place = register.wrapping_sub(part.0);
            place < part.1 && bitmap(*part)[place as usize / 8] & 1 << (place % 8) != 0
        })
    }

    #[test]
    fn what_is_reached_is_in_a_part_and_has_a_reason() {
        for Reached { first, last, why } in REACHED {
            assert!(first <= last && !why.is_empty(), "{first:#x}");
            assert!((*first..=*last).all(is_reached), "{first:#x}");
        }
        // One bitmap is 1536 bytes at most.
        assert!(PARTS.iter().all(|(_, count)| count % 8 == 0 && count / 8 <= 0x600));
    }

    #[test]
    fn what_tells_of_the_host_or_is_of_its_hardware_is_not_reached() {
        for (register, what) in [
            (0xc1, "a counter"),
            (0x186, "what it counts"),
            (0x38f, "which counters count"),
            (0x309, "a fixed counter"),
            (0xc001_0000, "what an AMD processor counts"),
            (0xc001_0201, "a counter"),
            (0xc000_0302, "counters"),
            (0xe7, "how busy the processor is"),
            (0x198, "the processor's state"),
            (0x19c, "its temperature"),
            (0x606, "its energy"),
            (0x1c8, "branches"),
            (0x560, "traces"),
            (0x480, "VMX"),
            (0xc001_0114, "SVM"),
            (0xc001_0117, "SVM"),
            (0xc000_0104, "the ratio of the time stamp counter for guests"),
            (0x79, "new microcode"),
            (0xc001_0020, "new microcode"),
            (0xc90, "shares of caches"),
            (0x4000_0000, "another hypervisor's interface"),
        ] {
            assert!(!is_reached(register), "{what}");
        }
    }
}
