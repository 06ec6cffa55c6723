//! What a guest kernel writes into the Pager's ring.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use exocell_pager::ring::{RING_BYTES, Ring};
use exocell_pager::{Account, Backing, Credit, allocated_bytes};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::Input;

const PAGE_BYTES: u64 = 4096;
const MEMORY_PAGES: u64 = 1 << 16;
const LIMIT_PAGES: u64 = 64;
const ENTRIES_AT: u64 = 128;
const ENTRY_BYTES: u64 = 32;

/// Pieces of the ring are written, and what waits is served, turn by turn: the guest
/// gets no page without credit, and no credit beyond its limit.
pub fn ring(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory = File::from(memfd_create("guest", MFdFlags::empty()).expect("a memory file"));
    memory.set_len(MEMORY_PAGES * PAGE_BYTES).expect("its size");
    let account = Account::new(0, LIMIT_PAGES * PAGE_BYTES);
    let credit = Credit::new(account.clone(), None);
    let mut backing = Backing::new(memory.try_clone().expect("dup"), credit).expect("a backing");
    let mut ring = Ring::new().expect("a ring");
    while !input.is_empty() {
        for _ in 0..input.u8() % 8 {
            let at = u64::from(input.u16()) % RING_BYTES as u64;
            let length = usize::from(input.u8()).min(RING_BYTES - at as usize);
            ring.memory().write_all_at(input.take(length), at).expect("it is written");
        }
        loop {
            let result = ring.serve(&mut backing);
            let (granted, held) =
                (account.granted.load(Ordering::Relaxed), allocated_bytes(&memory));
            let (bound, held) = (backing.figures().bound * PAGE_BYTES, held.expect("its blocks"));
            assert!(held == bound && bound <= granted && granted <= LIMIT_PAGES * PAGE_BYTES);
            match result {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return,
            }
        }
    }
}

/// As `ring` reads it: requests from entry 0 on, then the count of them, in one step.
fn written(requests: &[[u64; 3]]) -> Vec<u8> {
    let mut bytes = vec![requests.len() as u8 + 1];
    let mut write = |at: u64, piece: &[u8]| {
        bytes.extend_from_slice(&(at as u16).to_le_bytes());
        bytes.push(piece.len() as u8);
        bytes.extend_from_slice(piece);
    };
    for (index, words) in requests.iter().enumerate() {
        let piece: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        write(ENTRIES_AT + index as u64 * ENTRY_BYTES, &piece);
    }
    write(0, &(requests.len() as u32).to_ne_bytes());
    bytes
}

/// Binding within the credit and beyond it; credit itself; more turns than one.
pub fn seeds() -> Vec<Vec<u8>> {
    let (ask, give, bind, unbind) = (1, 2, 4, 5);
    vec![
        written(&[[bind, 3, 16], [bind, 10, 60], [unbind, 0, 8], [bind, 100, 48]]),
        written(&[[ask, 0, 100], [give, 0, 30], [bind, 0, 20], [give, 0, 100], [unbind, 0, 64]]),
        written(&[[unbind, 0, 32_768], [unbind, 32_768, 32_768], [unbind, 0, 1], [bind, 9, 1]]),
    ]
}
