//! The machine's processors and interrupts, as a PC without ACPI tells them (Intel MultiProcessor
//! Specification 1.4, section 4).

use super::memory::MP_TABLE;

/// The interrupt controller for devices, and its pins; KVM's own.
pub(super) const PINS: u8 = 24;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
/// Of the local APIC, and of the other one.
const LOCAL_VERSION: u8 = 0x14;
const IO_VERSION: u8 = 0x11;
const REVISION: u8 = 4;

const POINTER_BYTES: usize = 16;
const HEADER_BYTES: usize = 44;
/// The only bus is ISA: interrupts are edges, and high.
const BUS: u8 = 0;
/// Kinds of entries.
const PROCESSOR: u8 = 0;
const BUS_ENTRY: u8 = 1;
const IO_APIC_ENTRY: u8 = 2;
const SOURCE: u8 = 3;
const LOCAL_SOURCE: u8 = 4;
/// Kinds of interrupts.
const VECTORED: u8 = 0;
const NMI: u8 = 1;
const EXTERNAL: u8 = 3;
/// Every local APIC.
const ALL: u8 = 0xff;

/// The table of a machine with so many processors, for [`MP_TABLE`].
pub(super) fn table(vcpus: u8) -> Vec<u8> {
    let io_apic = vcpus;
    let mut entries: Vec<Vec<u8>> = Vec::new();
    for id in 0..vcpus {
        // Enabled; the first one boots.
        let flags = 1 | u8::from(id == 0) << 1;
        let mut entry = vec![PROCESSOR, id, LOCAL_VERSION, flags];
        // What it is and can is known better from CPUID.
        entry.resize(20, 0);
        entries.push(entry);
    }
    entries.push([&[BUS_ENTRY, BUS][..], b"ISA   "].concat());
    let address = IO_APIC.to_le_bytes();
    entries.push([&[IO_APIC_ENTRY, io_apic, IO_VERSION, 1][..], &address].concat());
    entries.extend((0..PINS).map(|pin| vec![SOURCE, VECTORED, 0, 0, BUS, pin, io_apic, pin]));
    entries.push(vec![LOCAL_SOURCE, EXTERNAL, 0, 0, BUS, 0, 0, 0]);
    entries.push(vec![LOCAL_SOURCE, NMI, 0, 0, BUS, 0, ALL, 1]);

    let body = entries.concat();
    let mut header = b"PCMP".to_vec();
    header.extend(((HEADER_BYTES + body.len()) as u16).to_le_bytes());
    header.extend([REVISION, 0]);
    header.extend(b"EXOCELL MACHINE     ");
    header.extend([0; 6]);
    header.extend((entries.len() as u16).to_le_bytes());
    header.extend(LOCAL_APIC.to_le_bytes());
    header.extend([0; 4]);
    let mut configuration = [header, body].concat();
    configuration[7] = checksum(&configuration);

    let mut pointer = b"_MP_".to_vec();
    pointer.extend((MP_TABLE as u32 + POINTER_BYTES as u32).to_le_bytes());
    pointer.extend([1, REVISION, 0]);
    pointer.resize(POINTER_BYTES, 0);
    pointer[10] = checksum(&pointer);
    [pointer, configuration].concat()
}

/// What makes the sum of all bytes 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::memory::HIGH_MEMORY;

    #[test]
    fn sums_and_lengths_are_right_and_all_fits_below_the_first_megabyte() {
        for vcpus in [1, 2, 16] {
            let table = table(vcpus);
            let (pointer, configuration) = table.split_at(POINTER_BYTES);
            for part in [pointer, configuration] {
                assert_eq!(part.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            }
            let length = u16::from_le_bytes([configuration[4], configuration[5]]);
            assert_eq!(usize::from(length), configuration.len());
            let count = u16::from_le_bytes([configuration[34], configuration[35]]);
            assert_eq!(count, u16::from(vcpus) + 1 + 1 + u16::from(PINS) + 2);
            // The rest of base memory is one KiB.
            assert!(table.len() <= 1024 && MP_TABLE + 1024 <= HIGH_MEMORY, "{}", table.len());
        }
    }
}
