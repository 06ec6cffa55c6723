//! Where a guest kernel's page tables and records are: the section `.um_audit` of its
//! executable, which `arch/x86/um/audit.c` of the patched kernel fills.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::BenchError;

const SECTION: &[u8] = b".um_audit";
const VERSION: u64 = 2;

macro_rules! layout {
    ($($field:ident)*) => {
        /// Addresses of variables, offsets of members and bits, in the order of `struct layout`.
        #[derive(Debug, Clone, Copy)]
        pub struct Layout {
            $(pub $field: u64,)*
        }

        impl Layout {
            /// Out of the words of the section.
            fn of(words: &[u64]) -> Option<Self> {
                let mut words = words.iter().copied();
                let layout = Self { $($field: words.next()?,)* };
                (words.next().is_none() && layout.version == VERSION).then_some(layout)
            }
        }
    };
}

layout! {
    version
    all_mapped fused physmem reserved task_size stub_start gate_rooms texts pages image image_fd
    next pid mm runs nr is_partial
    stub queued asked ctl tail done
    pgd sync_from sync_to
    nr_texts_lists node phys addr copy sizeof_page
    is_present is_none_present needs_sync write no_exec used dirty
    gates_start gates_end
}

impl Layout {
    /// Of the executable of a guest kernel.
    ///
    /// # Errors
    /// It can't be read, or it is none that says where things are.
    pub fn of_kernel(path: &Path) -> Result<Self, BenchError> {
        let file = File::open(path).map_err(BenchError::host(path.display()))?;
        let words = section(&file).map_err(BenchError::host(path.display()))?;
        words.and_then(|words| Self::of(&words)).ok_or_else(|| {
            BenchError::unlike(&path.display().to_string(), "guest kernel that can be audited")
        })
    }
}

/// A number of `N` bytes at `at`.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut whole = [0; 8];
    whole[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(whole))
}

/// The words of our section of an ELF file (elf(5)), if it has one.
fn section(file: &File) -> std::io::Result<Option<Vec<u64>>> {
    let mut head = [0; 64];
    file.read_exact_at(&mut head, 0)?;
    let (Some(table), Some(size), Some(count), Some(names)) = (
        number::<8>(&head, 40),
        number::<2>(&head, 58),
        number::<2>(&head, 60),
        number::<2>(&head, 62),
    ) else {
        return Ok(None);
    };
    let entry = |index: u64| -> std::io::Result<[u8; 64]> {
        let mut entry = [0; 64];
        file.read_exact_at(&mut entry, table + index * size)?;
        Ok(entry)
    };
    let offset = |entry: &[u8; 64]| number::<8>(entry, 24).unwrap_or(0);
    let length = |entry: &[u8; 64]| number::<8>(entry, 32).unwrap_or(0);
    let names = offset(&entry(names)?);
    for index in 0..count {
        let entry = entry(index)?;
        let mut name = [0; SECTION.len() + 1];
        file.read_exact_at(&mut name, names + number::<4>(&entry, 0).unwrap_or(0))?;
        if name[..SECTION.len()] == *SECTION && name[SECTION.len()] == 0 && length(&entry) < 4096 {
            let mut bytes = vec![0; length(&entry) as usize];
            file.read_exact_at(&mut bytes, offset(&entry))?;
            return Ok(Some(words(&bytes)));
        }
    }
    Ok(None)
}

/// The little-endian words of `bytes`.
pub fn words(bytes: &[u8]) -> Vec<u64> {
    let whole = bytes.chunks_exact(8);
    whole.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect()
}
