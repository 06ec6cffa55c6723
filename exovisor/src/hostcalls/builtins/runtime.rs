//! Memory, strings and the C++ runtime.

use crate::hostcalls::builtins::heap::{Found, Heap};
use crate::hostcalls::builtins::{memory, shared};
use crate::hostcalls::state::State;
use crate::imports::ENV;
use std::sync::PoisonError;
use wasmtime::{Caller, Extern, Linker, Result, bail};
use wiggle::{GuestMemory, GuestPtr};

/// Bytes that are copied at once.
const CHUNK_BYTES: u32 = 64 << 10;
const PAGE_BYTES: u64 = 64 << 10;

/// Names of `void *(size_t)`.
const ALLOCATES: [&str; 4] = ["malloc", "_Znwm", "_Znam", "__cxa_allocate_exception"];
/// Names of `void (void *)`.
const FREES: [&str; 3] = ["free", "_ZdlPv", "_ZdaPv"];
/// Names of `void (void *, size_t)`.
const FREES_SIZED: [&str; 2] = ["_ZdlPvm", "_ZdaPvm"];
/// Names of functions that end the program, and why.
const ENDS: [(&str, &str); 3] = [
    ("abort", "the program aborted"),
    ("_ZSt9terminatev", "the program ended by std::terminate"),
    ("__cxa_pure_virtual", "the program called a pure virtual function"),
];

pub(super) fn link(linker: &mut Linker<State>) -> Result<()> {
    link_memory(linker)?;
    link_heap(linker)?;
    for (name, why) in ENDS {
        linker.func_wrap(ENV, name, move || -> Result<()> { bail!("{why}") })?;
    }
    linker.func_wrap(ENV, "__cxa_throw", |_: i32, _: i32, _: i32| -> Result<()> {
        bail!("the program threw an exception that nothing catches")
    })?;
    Ok(())
}

fn link_memory(linker: &mut Linker<State>) -> Result<()> {
    for name in ["memcpy", "memmove"] {
        linker.func_wrap(
            ENV,
            name,
            |mut caller: Caller<'_, State>, to: i32, from: i32, count: i32| -> Result<i32> {
                let shared = shared(&caller);
                let mut memory = memory(&mut caller, shared.as_ref())?;
                copy(&mut memory, to as u32, from as u32, count as u32)?;
                Ok(to)
            },
        )?;
    }
    linker.func_wrap(
        ENV,
        "memset",
        |mut caller: Caller<'_, State>, to: i32, value: i32, count: i32| -> Result<i32> {
            let shared = shared(&caller);
            let mut memory = memory(&mut caller, shared.as_ref())?;
            fill(&mut memory, to as u32, value as u8, count as u32)?;
            Ok(to)
        },
    )?;
    linker.func_wrap(
        ENV,
        "memcmp",
        |mut caller: Caller<'_, State>, left: i32, right: i32, count: i32| -> Result<i32> {
            let shared = shared(&caller);
            let memory = memory(&mut caller, shared.as_ref())?;
            compare(&memory, left as u32, right as u32, count as u32)
        },
    )?;
    linker.func_wrap(ENV, "strlen", |mut caller: Caller<'_, State>, text: i32| -> Result<i32> {
        let shared = shared(&caller);
        length(&memory(&mut caller, shared.as_ref())?, text as u32)
    })?;
    Ok(())
}

fn link_heap(linker: &mut Linker<State>) -> Result<()> {
    for name in ALLOCATES {
        linker.func_wrap(ENV, name, |mut caller: Caller<'_, State>, bytes: i32| {
            allocate(&mut caller, bytes as u32)
        })?;
    }
    for name in FREES {
        linker.func_wrap(ENV, name, |mut caller: Caller<'_, State>, address: i32| {
            with_heap(&mut caller, |heap, memory| heap.free(memory, address as u32))
        })?;
    }
    for name in FREES_SIZED {
        linker.func_wrap(ENV, name, |mut caller: Caller<'_, State>, address: i32, _: i32| {
            with_heap(&mut caller, |heap, memory| heap.free(memory, address as u32))
        })?;
    }
    linker.func_wrap(ENV, "calloc", |mut caller: Caller<'_, State>, count: i32, size: i32| {
        let Some(bytes) = (count as u32).checked_mul(size as u32) else { return Ok(0) };
        let address = allocate(&mut caller, bytes)?;
        if address != 0 {
            let shared = shared(&caller);
            fill(&mut memory(&mut caller, shared.as_ref())?, address as u32, 0, bytes)?;
        }
        Ok(address)
    })?;
    linker.func_wrap(
        ENV,
        "realloc",
        |mut caller: Caller<'_, State>, address: i32, bytes: i32| {
            reallocate(&mut caller, address as u32, bytes as u32)
        },
    )?;
    Ok(())
}

/// The address of `bytes` bytes; 0 if there is no room.
fn allocate(caller: &mut Caller<'_, State>, bytes: u32) -> Result<i32> {
    loop {
        match with_heap(caller, |heap, memory| Ok(heap.find(memory, bytes)?))? {
            Found::At(address) => return Ok(address as i32),
            Found::TooLarge => return Ok(0),
            Found::Pages(pages) if grow(caller, pages)? => {}
            Found::Pages(_) => return Ok(0),
        }
    }
}

fn reallocate(caller: &mut Caller<'_, State>, address: u32, bytes: u32) -> Result<i32> {
    if address == 0 {
        return allocate(caller, bytes);
    }
    let room = with_heap(caller, |heap, memory| heap.room(memory, address))?;
    if bytes <= room {
        return Ok(address as i32);
    }
    let moved = allocate(caller, bytes)?;
    if moved != 0 {
        with_heap(caller, |heap, memory| {
            copy(memory, moved as u32, address, room)?;
            heap.free(memory, address)
        })?;
    }
    Ok(moved)
}

fn grow(caller: &mut Caller<'_, State>, pages: u32) -> Result<bool> {
    let pages = u64::from(pages);
    let start = match (shared(caller), caller.get_export("memory")) {
        (Some(shared), _) => shared.grow(pages),
        (None, Some(Extern::Memory(memory))) => memory.grow(&mut *caller, pages),
        _ => bail!("the module exports no memory named `memory`"),
    };
    // Only the limits refuse, and the program is told by a null.
    let Ok(start) = start else { return Ok(false) };
    let bytes = |pages: u64| u32::try_from(pages * PAGE_BYTES).unwrap_or(u32::MAX);
    let (start, end) = (bytes(start), bytes(start + pages));
    with_heap(caller, |heap, _| {
        heap.grown(start, end);
        Ok(())
    })?;
    Ok(true)
}

fn with_heap<T>(
    caller: &mut Caller<'_, State>,
    work: impl FnOnce(&mut Heap, &mut GuestMemory<'_>) -> Result<T>,
) -> Result<T> {
    if let Some(threads) = caller.data().threads.clone() {
        let shared = threads.shared();
        let mut heap = shared.heap.lock().unwrap_or_else(PoisonError::into_inner);
        return work(&mut heap, &mut GuestMemory::Shared(shared.memory.data()));
    }
    let mut heap = caller.data_mut().heap.take().unwrap_or_default();
    let result = memory(caller, None).and_then(|mut memory| work(&mut heap, &mut memory));
    caller.data_mut().heap = Some(heap);
    result
}

fn bytes(start: u32, count: u32) -> GuestPtr<[u8]> {
    GuestPtr::new((start, count))
}

/// Copies as if through a buffer, in the direction that does not overwrite what is still to come.
fn copy(memory: &mut GuestMemory<'_>, to: u32, from: u32, count: u32) -> Result<()> {
    let ends = to.checked_add(count).zip(from.checked_add(count));
    let Some((to_end, from_end)) = ends else { bail!("the copy reaches beyond the memory") };
    let mut left = count;
    while left > 0 {
        let size = left.min(CHUNK_BYTES);
        let (to, from) = match to <= from {
            true => (to_end - left, from_end - left),
            false => (to + left - size, from + left - size),
        };
        let chunk = memory.to_vec(bytes(from, size))?;
        memory.copy_from_slice(&chunk, bytes(to, size))?;
        left -= size;
    }
    Ok(())
}

fn fill(memory: &mut GuestMemory<'_>, to: u32, value: u8, count: u32) -> Result<()> {
    let chunk = vec![value; count.min(CHUNK_BYTES) as usize];
    let mut done = 0;
    while done < count {
        let size = (count - done).min(CHUNK_BYTES);
        let Some(start) = to.checked_add(done) else { bail!("the fill reaches beyond the memory") };
        memory
            .copy_from_slice(chunk.get(..size as usize).unwrap_or_default(), bytes(start, size))?;
        done += size;
    }
    Ok(())
}

fn compare(memory: &GuestMemory<'_>, left: u32, right: u32, count: u32) -> Result<i32> {
    let mut done = 0;
    while done < count {
        let size = (count - done).min(CHUNK_BYTES);
        let (left, right) = (left.checked_add(done), right.checked_add(done));
        let Some((left, right)) = left.zip(right) else { bail!("it reaches beyond the memory") };
        let (left, right) = (memory.as_cow(bytes(left, size))?, memory.as_cow(bytes(right, size))?);
        let differs = left.iter().zip(right.iter()).find(|(left, right)| left != right);
        if let Some((left, right)) = differs {
            return Ok(i32::from(*left) - i32::from(*right));
        }
        done += size;
    }
    Ok(0)
}

fn length(memory: &GuestMemory<'_>, text: u32) -> Result<i32> {
    let mut length = 0;
    loop {
        let Some(address) = text.checked_add(length) else { bail!("the string has no end") };
        if memory.read(GuestPtr::<u8>::new(address))? == 0 {
            return Ok(length as i32);
        }
        length += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_lies_outside_is_an_error() {
        let mut bytes = vec![1; 100];
        let mut memory = GuestMemory::Unshared(&mut bytes);
        assert!(copy(&mut memory, 90, 0, 20).is_err());
        assert!(copy(&mut memory, u32::MAX, 0, 20).is_err());
        assert!(fill(&mut memory, 90, 0, 20).is_err());
        assert!(compare(&memory, 0, 90, 20).is_err());
        assert!(length(&memory, 0).is_err());
    }

    proptest! {
        #[test]
        fn copies_overlap_as_they_should(to in 0usize..200_000, from in 0usize..200_000, count in 0usize..150_000) {
            let before: Vec<u8> = (0..400_000u32).map(|index| ((index * 31) >> 3) as u8).collect();
            let (mut expected, mut found) = (before.clone(), before);
            expected.copy_within(from..from + count, to);
            copy(&mut GuestMemory::Unshared(&mut found), to as u32, from as u32, count as u32).unwrap();
            prop_assert!(expected == found);
        }
    }
}
