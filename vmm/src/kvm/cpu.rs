//! A virtual processor before its first instruction: what it says that it can, and its registers.
//!
//! # What a guest is told of its processor
//! All that KVM offers (KVM_GET_SUPPORTED_CPUID), less what is listed in [`POLICY`], each with its
//! reason. Which registers of the model (MSRs) it reaches is a list of its own (msr.rs); none is asked
//! of this process.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuFd};
use vm_memory::{Address, GuestAddress};

use super::error::KvmError;
use super::memory::START_INFO;

/// A register of a leaf.
#[derive(Debug, Clone, Copy)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
    /// All of them: the leaf says nothing.
    Every,
}

/// Bits that a guest does not see, and why.
struct Hidden {
    leaf: u32,
    register: Register,
    bits: u32,
    #[cfg_attr(not(test), allow(dead_code))]
    why: &'static str,
}

const fn bit(number: u32) -> u32 {
    1 << number
}

use Register::{Eax, Ebx, Ecx, Edx, Every};

const POLICY: &[Hidden] = &[
    Hidden { leaf: 1, register: Ecx, bits: bit(3), why: "MWAIT keeps a processor of the host" },
    Hidden { leaf: 1, register: Ecx, bits: bit(5) | bit(6), why: "VMX and SMX: no nesting" },
    Hidden { leaf: 1, register: Ecx, bits: bit(15), why: "PDCM: no counters" },
    Hidden { leaf: 1, register: Edx, bits: bit(21), why: "branch traces tell of the host" },
    Hidden { leaf: 5, register: Every, bits: !0, why: "MWAIT" },
    Hidden { leaf: 6, register: Eax, bits: !bit(2), why: "no sensors; the timer never stops" },
    Hidden { leaf: 6, register: Ecx, bits: !0, why: "no frequencies" },
    Hidden { leaf: 7, register: Ebx, bits: bit(2), why: "SGX has memory of its own" },
    Hidden { leaf: 7, register: Ebx, bits: bit(4) | bit(11), why: "TSX leaks" },
    Hidden { leaf: 7, register: Ebx, bits: bit(12) | bit(15), why: "caches are the host's" },
    Hidden { leaf: 7, register: Ebx, bits: bit(25), why: "traces tell of the host" },
    Hidden { leaf: 0xa, register: Every, bits: !0, why: "counters tell of the host" },
    Hidden { leaf: 0xf, register: Every, bits: !0, why: "caches are the host's" },
    Hidden { leaf: 0x10, register: Every, bits: !0, why: "caches are the host's" },
    Hidden { leaf: 0x12, register: Every, bits: !0, why: "SGX" },
    Hidden { leaf: 0x14, register: Every, bits: !0, why: "traces tell of the host" },
    Hidden { leaf: 0x8000_0001, register: Ecx, bits: bit(2), why: "SVM: no nesting" },
    Hidden { leaf: 0x8000_0001, register: Ecx, bits: bit(10), why: "sampling of instructions" },
    Hidden { leaf: 0x8000_0001, register: Ecx, bits: bit(23) | bit(24), why: "counters" },
    Hidden { leaf: 0x8000_000a, register: Every, bits: !0, why: "SVM" },
    Hidden { leaf: 0x8000_001b, register: Every, bits: !0, why: "sampling of instructions" },
    Hidden { leaf: 0x8000_0022, register: Every, bits: !0, why: "counters" },
];

/// A machine's own: there is a hypervisor, and the timer has deadlines.
const SET_ECX: u32 = bit(31) | bit(24);
const TOPOLOGY: [u32; 2] = [0xb, 0x1f];

/// What the host's KVM lets guests have, less what ours are not told of.
pub(super) fn offered(kvm: &Kvm) -> Result<CpuId, KvmError> {
    let mut offered = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::call("KVM_GET_SUPPORTED_CPUID"))?;
    offered.as_mut_slice().iter_mut().for_each(hide);
    Ok(offered)
}

fn hide(entry: &mut kvm_cpuid_entry2) {
    for hidden in POLICY.iter().filter(|hidden| hidden.leaf == entry.function) {
        let registers: &mut [&mut u32] = match hidden.register {
            Eax => &mut [&mut entry.eax],
            Ebx => &mut [&mut entry.ebx],
            Ecx => &mut [&mut entry.ecx],
            Edx => &mut [&mut entry.edx],
            Every => &mut [&mut entry.eax, &mut entry.ebx, &mut entry.ecx, &mut entry.edx],
        };
        registers.iter_mut().for_each(|register| **register &= !hidden.bits);
    }
}

/// The same as processor `id` of `vcpus` says it: each is a package of its own.
fn of(offered: &CpuId, id: u8, vcpus: u8) -> CpuId {
    let mut own = offered.clone();
    for entry in own.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ecx |= SET_ECX;
                // Its APIC's number, and how many there are in its package.
                entry.ebx = entry.ebx & 0xffff | u32::from(id) << 24 | 1 << 16;
                // More than one thread in a package.
                entry.edx &= if vcpus > 1 { !bit(28) } else { !0 };
            }
            // Caches are shared with nobody.
            4 => entry.eax &= !(0xfff << 14),
            leaf if TOPOLOGY.contains(&leaf) => {
                (entry.eax, entry.edx) = (0, u32::from(id));
                // The level of threads has one; that of cores ends the list.
                entry.ebx = u32::from(entry.index == 0);
                entry.ecx = entry.index | u32::from(entry.index == 0) << 8;
            }
            _ => {}
        }
    }
    own
}

/// Makes `vcpu` the processor `id` of `vcpus`; the first one begins at `entry`, the others wait
/// until it calls them.
pub(super) fn set_up(
    vcpu: &VcpuFd,
    offered: &CpuId,
    (id, vcpus): (u8, u8),
    entry: GuestAddress,
) -> Result<(), KvmError> {
    vcpu.set_cpuid2(&of(offered, id, vcpus)).map_err(KvmError::call("KVM_SET_CPUID2"))?;
    set_local_interrupts(vcpu)?;
    if id > 0 {
        return Ok(());
    }
    let mut sregs = vcpu.get_sregs().map_err(KvmError::call("KVM_GET_SREGS"))?;
    // 32 bits, flat, no paging (PVH, "state at entry").
    let flat = |type_| kvm_segment {
        limit: u32::MAX,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        type_,
        ..kvm_segment::default()
    };
    let (code, data) = (flat(0xb), flat(0x3));
    sregs.cs = code;
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = data;
    }
    sregs.tr = kvm_segment { limit: 0x67, present: 1, type_: 0xb, ..kvm_segment::default() };
    // Protection is on; what says so of the coprocessor is always set.
    (sregs.cr0, sregs.cr4, sregs.efer) = (0x11, 0, 0);
    vcpu.set_sregs(&sregs).map_err(KvmError::call("KVM_SET_SREGS"))?;
    let regs =
        kvm_regs { rip: entry.raw_value(), rbx: START_INFO, rflags: 2, ..kvm_regs::default() };
    vcpu.set_regs(&regs).map_err(KvmError::call("KVM_SET_REGS"))
}

/// The local APIC's pins as a PC's firmware leaves them: the old interrupt controller at the first,
/// NMIs at the second.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), KvmError> {
    const PINS: [(usize, u32); 2] = [(0x350, 7), (0x360, 4)];
    let mut lapic = vcpu.get_lapic().map_err(KvmError::call("KVM_GET_LAPIC"))?;
    for (at, mode) in PINS {
        let Some(register) = lapic.regs.get_mut(at..at + 4) else { continue };
        // Delivery mode, and not masked.
        for (to, from) in register.iter_mut().zip((mode << 8).to_le_bytes()) {
            *to = from as _;
        }
    }
    vcpu.set_lapic(&lapic).map_err(KvmError::call("KVM_SET_LAPIC"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_hidden_has_a_reason_and_is_gone_and_all_else_stays() {
        assert!(POLICY.iter().all(|hidden| !hidden.why.is_empty()));
        let full = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            eax: !0,
            ebx: !0,
            ecx: !0,
            edx: !0,
            ..kvm_cpuid_entry2::default()
        };
        let mut entry = full(1, 0);
        hide(&mut entry);
        assert_eq!(entry.ecx & (bit(3) | bit(5)), 0);
        assert_ne!(entry.ecx & bit(21), 0, "x2APIC");
        let mut entry = full(0xa, 0);
        hide(&mut entry);
        assert_eq!((entry.eax, entry.ebx, entry.ecx, entry.edx), (0, 0, 0, 0));
        let mut entry = full(2, 0);
        hide(&mut entry);
        assert_eq!(entry.eax, !0);
    }

    #[test]
    fn each_processor_says_its_own_number() {
        let entry = |function, index| kvm_cpuid_entry2 { function, index, ..Default::default() };
        let offered = CpuId::from_entries(&[entry(1, 0), entry(0xb, 0), entry(0xb, 1)]).unwrap();
        let own = of(&offered, 3, 4);
        let [one, threads, cores] = own.as_slice() else { panic!("three leaves") };
        assert_eq!((one.ebx >> 24, one.ecx), (3, SET_ECX));
        assert_eq!((threads.edx, threads.ebx, threads.ecx), (3, 1, 0x100));
        assert_eq!((cores.edx, cores.ebx, cores.ecx), (3, 0, 1));
    }
}
