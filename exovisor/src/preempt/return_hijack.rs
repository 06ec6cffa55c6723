//! The way back from host code into a guest whose time slice is over.
//!
//! A signal that finds host code cannot suspend it. But before compiled code calls the host it
//! writes down where the call returns to, and that place is on the guest's own stack: the return
//! address is changed, so that the host comes back into [`leave_returning`], which leaves as
//! interrupted code does and then goes on where the call was to return to. So no loop over
//! host calls, bulk memory operations among them, keeps the CPU for longer than one of them.

#![allow(unsafe_code)]

use crate::preempt::WasmContext;
use crate::preempt::code::CodeMap;
use crate::preempt::signal::leave_returning;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a context of an instance begins with (`VMContext` of wasmtime-environ 48).
#[repr(C)]
struct InstanceContext {
    magic: u32,
    store: *const StoreContext,
}

/// What the context of a store begins with (`VMStoreContext` of wasmtime-environ 48,
/// `vmtypes.rs`): three counters, the stack's limit and the heap of the garbage collector, then
/// frame and return address of the last call of the host.
#[repr(C)]
struct StoreContext {
    counters: [u64; 3],
    stack_limit: usize,
    heap: [usize; 2],
    exit_frame: usize,
    exit_pc: usize,
}

/// Return addresses that were changed, and what they were. A call is in host code twice at most,
/// when a loop of the host calls it back.
#[derive(Default)]
pub(super) struct ReturnHijacks([ReturnHijack; 2]);

#[derive(Default)]
struct ReturnHijack {
    /// Where the return address lies; 0 if this one is not in use.
    place: AtomicUsize,
    pc: AtomicUsize,
}

impl ReturnHijacks {
    /// What the return address at `place` was; it is forgotten.
    fn take(&self, place: usize) -> Option<usize> {
        let found = self.0.iter().find(|hijack| hijack.place.load(Ordering::Acquire) == place)?;
        let pc = found.pc.load(Ordering::Relaxed);
        found.place.store(0, Ordering::Release);
        Some(pc)
    }

    /// Keeps `pc`, instead of what was kept of the same place; false if there is no room.
    fn add(&self, place: usize, pc: usize) -> bool {
        let find = |preempt_requested| {
            self.0.iter().find(|one| one.place.load(Ordering::Acquire) == preempt_requested)
        };
        let Some(hijack) = find(place).or_else(|| find(0)) else { return false };
        hijack.pc.store(pc, Ordering::Relaxed);
        hijack.place.store(place, Ordering::Release);
        true
    }
}

/// Lets host code that `wasm` called come back into [`leave_returning`]; false if it was not
/// called by the guest. `stack_pointer` is where the interrupted host code has its stack.
///
/// # Safety
/// `instance` is the context of a live instance whose store only the calling thread uses, which
/// is interrupted.
pub(super) unsafe fn hijack_return(
    wasm: &WasmContext,
    instance: *mut u8,
    stack_pointer: usize,
) -> bool {
    // SAFETY: as the caller promises. What it says is checked below before it is relied on.
    let (frame, pc) = unsafe { last_call(instance) };
    let Some(place) = live_return(frame, stack_pointer) else { return false };
    // SAFETY: the frame is of a call that has not returned, so it is on a mapped stack. The
    // return address lies above the frame pointer that the call saved.
    let back = unsafe { (place as *const usize).read_volatile() };
    if back == leave_returning as *const () as usize {
        return true;
    }
    if !returns_to(&wasm.code, back, pc) || !wasm.hijacks.add(place, pc) {
        return false;
    }
    // SAFETY: it is the return address of a frame of this thread that is still there: where the
    // call came from was written down with it, and is in the guest's code. There is no other way
    // to learn of the host's return, since host code cannot be interrupted.
    unsafe { (place as *mut usize).write_volatile(leave_returning as *const () as usize) };
    true
}

/// Where the host's call returns to that came back into [`leave_returning`]. Not from where it
/// left the stack pointer, `stack_pointer`: a call takes arguments off the stack that did not fit
/// into registers.
///
/// # Safety
/// As of [`hijack_return`]; no code of the guest has run since the call returned.
pub(super) unsafe fn hijacked_return(
    wasm: &WasmContext,
    instance: *mut u8,
    stack_pointer: usize,
) -> Option<usize> {
    // SAFETY: as the caller promises.
    let (frame, _) = unsafe { last_call(instance) };
    let place = frame.checked_add(size_of::<usize>())?;
    if place >= stack_pointer {
        return None;
    }
    wasm.hijacks.take(place)
}

/// Frame and return address of the last call of the host.
///
/// # Safety
/// `instance` is the context of a live instance whose store only the calling thread uses.
unsafe fn last_call(instance: *mut u8) -> (usize, usize) {
    // SAFETY: the contexts live as long as the instance and begin as above.
    unsafe {
        let store = (&raw const (*instance.cast::<InstanceContext>()).store).read_volatile();
        let exit_frame = (&raw const (*store).exit_frame).read_volatile();
        (exit_frame, (&raw const (*store).exit_pc).read_volatile())
    }
}

/// Where a frame's return address lies, if the frame is not over.
fn live_return(frame: usize, stack_pointer: usize) -> Option<usize> {
    let place = frame.checked_add(size_of::<usize>())?;
    (frame != 0 && frame.is_multiple_of(size_of::<usize>()) && stack_pointer <= place)
        .then_some(place)
}

/// Whether a return address is the one that was written down, and in the guest's code.
fn returns_to(code: &CodeMap, back: usize, pc: usize) -> bool {
    back == pc && code.contains(pc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preempt::hook::instance_of;
    use wasmtime::{Caller, Engine, Func, Instance, Module, Store};

    #[test]
    fn the_forms_are_those_of_the_engine() {
        let text = r#"(module (import "" "look" (func $look)) (func (export "run") (call $look)))"#;
        let engine = Engine::default();
        let module = Module::new(&engine, text).unwrap();
        let text = module.text().as_ptr().addr();
        let text = text..text + module.text().len();
        // What the host finds of its own call: an address to return to in the module's code.
        let look = move |mut caller: Caller<'_, usize>| {
            let instance = *caller.data() as *const InstanceContext;
            // SAFETY: as in `divert`; the instance is the caller.
            let (frame, pc) =
                unsafe { ((*(*instance).store).exit_frame, (*(*instance).store).exit_pc) };
            let here = (&raw const frame).addr();
            let place = live_return(frame, here).unwrap();
            // SAFETY: as in `divert`.
            assert_eq!(unsafe { *(place as *const usize) }, pc);
            assert!(text.contains(&pc));
            *caller.data_mut() = 0;
        };
        let mut store = Store::new(&engine, 0);
        let look = Func::wrap(&mut store, look);
        let instance = Instance::new(&mut store, &module, &[look.into()]).unwrap();
        let run = instance.get_typed_func::<(), ()>(&mut store, "run").unwrap();
        *store.data_mut() = instance_of(run.func(), &mut store).unwrap().as_ptr().addr();
        run.call(&mut store, ()).unwrap();
        assert_eq!(*store.data(), 0);
    }

    #[test]
    fn a_detour_is_taken_once_and_by_its_place() {
        let hijacks = ReturnHijacks::default();
        assert!(hijacks.add(16, 1) && hijacks.add(32, 2) && !hijacks.add(48, 3));
        assert_eq!(
            (hijacks.take(32), hijacks.take(32), hijacks.take(16)),
            (Some(2), None, Some(1))
        );
        assert!(hijacks.add(48, 3) && hijacks.add(48, 4));
        assert_eq!((hijacks.take(48), hijacks.take(48)), (Some(4), None));
    }

    #[test]
    fn frames_that_are_over_are_left_alone() {
        assert_eq!(live_return(4096, 4000), Some(4104));
        assert_eq!(live_return(4096, 4104), Some(4104));
        for (frame, stack_pointer) in [(4096, 4105), (0, 0), (4097, 0), (usize::MAX, 0)] {
            assert_eq!(live_return(frame, stack_pointer), None, "{frame} {stack_pointer}");
        }
    }
}
