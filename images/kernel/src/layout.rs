//! Where the linker has put things, as far as protection keys go.
//!
//! User code shares an address space with the kernel's text and can jump to any byte of it. So a
//! kernel that boots with keys (`--intra mpk`) takes the instructions that change them out of its
//! text, but cannot where such bytes are a part of others: an address or a distance that happens to
//! look so. That kernel would panic. Another layout has other distances.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// What the boot of the kernel looks through, from one symbol to the other.
const SCANNED: [(&str, &str); 2] = [("_sinittext", "__start_rodata"), ("_sexittext", "_eexittext")];
/// Where the kernel changes keys itself, and how far from there.
const KNOWN: [(&str, i64); 5] = [
    ("keyed_signal_open", -3),
    ("keyed_left", -3),
    ("keyed_left_to_step", -3),
    ("keyed_gate_open", -3),
    ("keyed_xrstor", 1),
];
/// Bytes of the head of an ELF file, of a section's head and of a symbol (elf(5)).
const HEAD: usize = 64;
const SECTION: usize = 64;
const SYMBOL: usize = 24;
/// Types of sections.
const SYMBOLS: u32 = 2;
const NOBITS: u32 = 8;
/// The first number of a section that is none (elf(5), SHN_LORESERVE).
const RESERVED: u16 = 0xff00;

/// Bytes in the kernel's text that could change keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub address: u64,
    /// The symbol before it, and its address: an instruction begins there.
    pub function: String,
    pub start: u64,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:#x}", self.function, self.address.saturating_sub(self.start))
    }
}

/// All that the kernel would have to take out of its text. Empty for one that has no keys.
pub fn changes(elf: &[u8]) -> Vec<Change> {
    let symbols = symbols(elf).unwrap_or_default();
    let at = |name: &str| symbols.get(name).map(|symbol| symbol.at);
    let known: Vec<u64> =
        KNOWN.iter().filter_map(|(name, by)| at(name)?.checked_add_signed(*by)).collect();
    if known.len() != KNOWN.len() {
        return Vec::new();
    }
    let placed = symbols.iter().filter(|(_, symbol)| symbol.is_placed);
    let mut places: Vec<_> = placed.map(|(name, symbol)| (symbol.at, *name)).collect();
    places.sort_unstable();
    let mut found = Vec::new();
    for (from, to) in SCANNED.iter().filter_map(|(from, to)| Some((at(from)?, at(to)?))) {
        let Some(text) = loaded(elf, from..to) else { continue };
        for offset in (0..text.len()).filter(|offset| is_change(&text, *offset)) {
            let address = from + offset as u64;
            if known.contains(&address) {
                continue;
            }
            let before = places.partition_point(|(at, _)| *at <= address);
            let before = before.checked_sub(1).and_then(|at| places.get(at));
            let (start, function) = before.copied().unwrap_or((from, "?"));
            found.push(Change { address, function: function.to_owned(), start });
        }
    }
    found
}

/// Whether there is an instruction with its opcode at `address`, where instructions begin at
/// `starts`: up to two prefixes may be before it.
pub fn is_instruction(elf: &[u8], address: u64, starts: &[u64]) -> bool {
    let before = loaded(elf, address.saturating_sub(2)..address).unwrap_or_default();
    let prefixes = before.iter().rev().take_while(|byte| is_prefix(**byte)).count() as u64;
    (0..=prefixes).any(|count| starts.contains(&(address - count)))
}

/// The addresses in what `objdump -d` writes.
pub fn starts(listing: &str) -> Vec<u64> {
    let address = |line: &str| {
        let (address, _) = line.strip_prefix(' ')?.split_once(":\t")?;
        u64::from_str_radix(address.trim(), 16).ok()
    };
    listing.lines().filter_map(address).collect()
}

/// WRPKRU; XRSTOR, of which keys may be a part; WRGSBASE: as `find_key_change` of the kernel has it.
fn is_change(text: &[u8], at: usize) -> bool {
    match text.get(at..) {
        Some([0x0f, 0x01, 0xef, ..]) => true,
        Some([0x0f, 0xae, third, ..]) => match (third & 0xc0, third & 0x38) {
            (0xc0, 0x18) => {
                let before = text[..at].iter().rev().take_while(|byte| is_prefix(**byte));
                before.into_iter().any(|byte| *byte == 0xf3)
            }
            (0xc0, _) => false,
            (_, kind) => kind == 0x28,
        },
        _ => false,
    }
}

fn is_prefix(byte: u8) -> bool {
    byte & 0xf0 == 0x40
        || matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
}

struct Section {
    kind: u32,
    address: u64,
    /// Where its bytes are in the file.
    bytes: Range<usize>,
    link: usize,
}

fn number<const N: usize>(elf: &[u8], at: usize) -> Option<[u8; N]> {
    elf.get(at..)?.first_chunk().copied()
}

fn sections(elf: &[u8]) -> Option<Vec<Section>> {
    if !elf.starts_with(b"\x7fELF\x02\x01") || elf.len() < HEAD {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(number(elf, 40)?)).ok()?;
    let count = u16::from_le_bytes(number(elf, 60)?);
    let section = |index: u16| {
        let at = table.checked_add(usize::from(index) * SECTION)?;
        let size = |of: usize| -> Option<usize> {
            usize::try_from(u64::from_le_bytes(number(elf, at.checked_add(of)?)?)).ok()
        };
        let kind = u32::from_le_bytes(number(elf, at.checked_add(4)?)?);
        let start = size(24)?;
        let end = if kind == NOBITS { start } else { start.checked_add(size(32)?)? };
        let link = u32::from_le_bytes(number(elf, at.checked_add(40)?)?) as usize;
        Some(Section { kind, address: size(16)? as u64, bytes: start..end, link })
    };
    (0..count).map(section).collect()
}

struct Symbol {
    at: u64,
    /// Whether it is in a section, and no number.
    is_placed: bool,
}

/// All symbols that have a name, by it.
fn symbols(elf: &[u8]) -> Option<BTreeMap<&str, Symbol>> {
    let sections = sections(elf)?;
    let table = sections.iter().find(|section| section.kind == SYMBOLS)?;
    let names = elf.get(sections.get(table.link)?.bytes.clone())?;
    let mut symbols = BTreeMap::new();
    for symbol in elf.get(table.bytes.clone())?.chunks_exact(SYMBOL) {
        let name = u32::from_le_bytes(number(symbol, 0)?) as usize;
        let name = names.get(name..)?.split(|byte| *byte == 0).next()?;
        let name = std::str::from_utf8(name).ok()?;
        // No names of sections and files.
        if !name.is_empty() && !matches!(symbol.get(4)? & 0xf, 3 | 4) {
            let at = u64::from_le_bytes(number(symbol, 8)?);
            let is_placed = (1..RESERVED).contains(&u16::from_le_bytes(number(symbol, 6)?));
            symbols.insert(name, Symbol { at, is_placed });
        }
    }
    Some(symbols)
}

/// What is at these addresses; zeros where there is nothing.
fn loaded(elf: &[u8], range: Range<u64>) -> Option<Vec<u8>> {
    let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
    if len > elf.len() {
        return None;
    }
    let mut memory = vec![0; len];
    for section in sections(elf)?.iter().filter(|section| section.address != 0) {
        let bytes = elf.get(section.bytes.clone())?;
        let end = section.address.checked_add(bytes.len() as u64)?;
        let (from, to) = (section.address.max(range.start), end.min(range.end));
        if from < to {
            let within = |from: u64, base: u64| usize::try_from(from - base).ok();
            let (source, target) = (within(from, section.address)?, within(from, range.start)?);
            let count = within(to, from)?;
            memory
                .get_mut(target..target + count)?
                .copy_from_slice(bytes.get(source..source + count)?);
        }
    }
    Some(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x6000_1000;
    const EXIT: u64 = 0x6000_9000;

    /// A kernel with this text, this text of exits, and these symbols besides.
    fn elf(text: &[u8], exit: &[u8], more: &[(&str, u64)]) -> Vec<u8> {
        let mut symbols = vec![
            ("_sinittext", BASE),
            ("__start_rodata", BASE + text.len() as u64),
            ("_sexittext", EXIT),
            ("_eexittext", EXIT + exit.len() as u64),
        ];
        // Behind all.
        let far = [0x7000_0000; 5];
        symbols.extend(KNOWN.iter().zip(far).map(|((name, _), at)| (*name, at)));
        symbols.retain(|(name, _)| more.iter().all(|(other, _)| other != name));
        symbols.extend(more);
        let (mut names, mut table) = (vec![0], vec![0; SYMBOL]);
        for (name, at) in &symbols {
            table.extend((names.len() as u32).to_le_bytes());
            table.extend([0x12, 0, 1, 0]);
            table.extend(at.to_le_bytes());
            table.extend([0; 8]);
            names.extend(name.as_bytes());
            names.push(0);
        }
        let mut file = vec![0; HEAD];
        let mut heads = vec![0; SECTION];
        let parts = [(1, BASE, text), (1, EXIT, exit), (SYMBOLS, 0, &table), (3, 0, &names)];
        for (kind, address, bytes) in parts {
            let mut head = vec![0; SECTION];
            head[4..8].copy_from_slice(&kind.to_le_bytes());
            head[16..24].copy_from_slice(&address.to_le_bytes());
            head[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
            head[32..40].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            head[40..44].copy_from_slice(&4_u32.to_le_bytes());
            heads.extend(head);
            file.extend(bytes);
        }
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let at = file.len() as u64;
        file[40..48].copy_from_slice(&at.to_le_bytes());
        file[60..62].copy_from_slice(&5_u16.to_le_bytes());
        file.extend(heads);
        file
    }

    fn found(text: &[u8]) -> Vec<u64> {
        changes(&elf(text, &[], &[])).iter().map(|change| change.address - BASE).collect()
    }

    #[test]
    fn bytes_that_could_change_keys_are_found_at_any_place() {
        // call with a distance that has WRPKRU in it; XRSTOR by each way to name memory; XSAVE.
        assert_eq!(found(b"\x90\xe8\x0f\x01\xef\xff\x90"), [2]);
        assert_eq!(
            found(b"\x0f\xae\x2f\x0f\xae\x6f\x0f\xae\xaf\x0f\xae\xef\x0f\xae\x27"),
            [0, 3, 6]
        );
        // WRGSBASE has a prefix, with REX or without.
        assert_eq!(found(b"\x90\x0f\xae\xd8\xf3\x0f\xae\xd8\xf3\x48\x0f\xae\xdf"), [5, 10]);
        assert_eq!(found(b"\x0f\x01"), [0; 0]);
        assert_eq!(found(b""), [0; 0]);
        let exits = elf(b"", b"\x0f\x01\xef", &[]);
        let all = changes(&exits);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].address, all[0].to_string()), (EXIT, "_sexittext+0x0".to_owned()));
    }

    #[test]
    fn what_the_kernel_has_for_itself_is_left_to_it() {
        let text = b"\x0f\x01\xef\x48\x0f\xae\x29\x0f\x01\xef";
        let known = [("keyed_left", BASE + 3), ("keyed_xrstor", BASE + 3), ("f", BASE + 6)];
        let all = changes(&elf(text, &[], &known));
        let all: Vec<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(all, ["f+0x1"]);
        // A kernel without keys keeps its bytes.
        let name = KNOWN[0].0;
        let stock = elf(text, &[], &[]);
        let at = stock.windows(name.len()).position(|bytes| bytes == name.as_bytes()).unwrap();
        let mut stock = stock;
        stock[at] = b'_';
        assert_eq!(changes(&stock), []);
    }

    #[test]
    fn a_change_is_an_instruction_where_one_begins_before_its_opcode() {
        let file = elf(b"\xe8\x0f\x01\xef\xff\xf3\x48\x0f\xae\xd8", &[], &[]);
        let listing =
            "\n60001000 <f>:\n    60001000:\tcall 5fff0014\n    60001005:\twrgsbase %rax\n";
        let starts = starts(listing);
        assert_eq!(starts, [BASE, BASE + 5]);
        assert!(!is_instruction(&file, BASE + 1, &starts));
        assert!(is_instruction(&file, BASE + 7, &starts));
        // It is what is decoded from the function's start that counts.
        assert!(!is_instruction(&file, BASE + 7, &[BASE, BASE + 4]));
    }

    #[test]
    fn no_bytes_are_taken_for_a_kernel_that_are_none() {
        let good = elf(b"\x0f\x01\xef", &[], &[]);
        for len in 0..good.len() {
            changes(&good[..len]);
        }
        for at in 0..good.len() {
            let mut broken = good.clone();
            broken[at] = 0xff;
            changes(&broken);
        }
        assert_eq!(changes(b"#!/bin/sh"), []);
    }
}
