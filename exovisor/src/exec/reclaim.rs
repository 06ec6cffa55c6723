//! The end of a large memory, a piece at a time.
//!
//! To free a page takes the host some 0.4 us, and the engine gives back a memory in one call of
//! the host, which no signal ends: 64 MiB keep a worker for some 7 ms. So the call itself gives
//! back its memory before its instance goes, on its own account, and others run
//! between two pieces. The engine then finds nothing that is worth mentioning. Pieces are as long
//! as there is little to free in them: each that frees a page is told to all processors, which
//! takes some 10 us where the host is virtual itself.

use crate::exec::module::AdmittedModule;
use crate::hostcalls::state::State;
use crate::memory::dirty_pages::{Refused, Reset, Search};
use crate::memory::zero::{self, decommit as decommit_pages, stretch, write_over};
use crate::preempt;
use crate::preempt::cancel::CancelHandle;
use std::future::poll_fn;
use std::ops::Range;
use std::task::Poll;
use wasmtime::{Extern, Instance, Memory, SharedMemory, Store};

/// What is given back at once, in bytes that were touched: some 20 us. What others wait for it at
/// the worst is in the 99th percentile of their calls; shorter pieces cost the call itself more.
pub(crate) const PIECE_BYTES: usize = 128 << 10;
/// Less than this is left to the engine, in bytes.
const WORTH_BYTES: usize = 256 << 10;

/// Gives back the memories of an instance that runs no more, but for what their slots keep.
pub(crate) async fn decommit(
    module: &AdmittedModule,
    instance: &Instance,
    store: &mut Store<State>,
) {
    let kept_bytes = module.host.kept_bytes;
    let worth_it = kept_bytes.saturating_add(WORTH_BYTES) as u64;
    if store.data().limits.bytes() <= worth_it {
        return;
    }
    let cancel = store.data().cancel.clone();
    for export in &module.memories {
        let memory = instance.get_module_export(&mut *store, export);
        let Some(memory) = memory.and_then(Extern::into_memory) else { continue };
        let mut left = kept_bytes..memory.data_size(&*store);
        while !left.is_empty() {
            let Some(bytes) = memory.data_mut(&mut *store).get_mut(left.clone()) else { break };
            let length = stretch(bytes.as_ptr_range(), PIECE_BYTES);
            decommit_pages(&mut bytes[..length]);
            left.start += length;
            unless_over(&cancel).await;
        }
    }
}

/// Makes `range` of a shared memory zero; false if it is not all inside, and then nothing is
/// written. The first `kept_bytes` of what was written to are written over, and their pages stay.
pub(crate) async fn zero(
    memory: &SharedMemory,
    range: Range<usize>,
    kept_bytes: usize,
    cancel: &CancelHandle,
) -> bool {
    let Some(bytes) = memory.data().get(range.clone()) else { return false };
    let Range { start, end } = bytes.as_ptr_range();
    let (mut left, mut kept_bytes) = (range.clone(), kept_bytes);
    let mut search = Search::new(start.cast()..end.cast(), 0);
    while kept_bytes > 0
        && let Some(Ok(part)) = search.next()
        && part.bytes() <= kept_bytes
    {
        let Some(bytes) = memory.data().get(range.clone()) else { return false };
        write_over(bytes, &part);
        kept_bytes -= part.bytes();
        left.start = range.start + search.looked_at();
        unless_over(cancel).await;
    }
    loop {
        let Some(bytes) = memory.data().get(left.clone()) else { return false };
        if bytes.is_empty() {
            return true;
        }
        let addresses = bytes.as_ptr_range();
        let length = stretch(addresses.start.cast()..addresses.end.cast(), PIECE_BYTES);
        zero::zero(memory, left.start..left.start + length);
        left.start += length;
        unless_over(cancel).await;
    }
}

/// Makes a memory that begins with `image` as it began, if at most `bytes_max` were written to and
/// the host says where; false if not, and nothing is known of its content then.
pub(crate) async fn reset(
    memory: Memory,
    store: &mut Store<State>,
    image: &[u8],
    bytes_max: usize,
) -> bool {
    let mut reset = Reset::new(memory.data(&*store), image, bytes_max);
    loop {
        match reset.go_on(memory.data_mut(&mut *store), image) {
            Ok(true) => return true,
            Ok(false) => {
                let cancel = store.data().cancel.clone();
                unless_over(&cancel).await;
            }
            Err(Refused) => return false,
        }
    }
}

/// Goes on at once, or in the isolate's next time slice if this one is over.
async fn unless_over(cancel: &CancelHandle) {
    if cancel.wasm().is_some_and(|wasm| wasm.is_due(preempt::now_ns())) {
        next_slice().await;
    }
}

/// Goes on in the next time slice.
pub(crate) async fn next_slice() {
    let mut waits = true;
    poll_fn(|context| {
        if !std::mem::take(&mut waits) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::call;
    use crate::exec::module::Link;
    use crate::policy::{Metering, Policy, Pool};
    use crate::program::Admission;
    use exocell_xgate::CapabilitySet;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Waker};
    use wasmtime::{Config, Engine, MemoryType};

    /// How often a future waits before it is done.
    fn waits(future: impl Future) -> usize {
        let (mut future, mut waits) = (pin!(future), 0);
        let mut context = Context::from_waker(Waker::noop());
        while future.as_mut().poll(&mut context).is_pending() {
            waits += 1;
        }
        waits
    }

    #[test]
    fn others_have_their_turn_after_each_piece() {
        const BYTES: usize = 1 << 20;
        let admission = Admission::new(Policy::pooled(Pool::default()));
        let text = r#"(module (memory 16) (func (export "run")))"#;
        let caps = CapabilitySet::nothing();
        let admitted = admission.admit_for("a", text.as_bytes(), &caps, Metering::Time).unwrap();
        let module = admitted.module().unwrap();
        let Link::Single(instance) = &module.link else { panic!("it has no threads") };
        for (over, expected) in
            [(false, 0), (true, (BYTES - module.host.kept_bytes) / PIECE_BYTES + 1)]
        {
            let cancel = CancelHandle::new(Some(Arc::clone(&module.code)), None);
            let state = State::new(None, cancel.clone(), BYTES as u64, None);
            let mut store = call::store(&module.host, state, 0).unwrap();
            let instance = preempt::instantiate(instance, &mut store).unwrap();
            let memory = instance.get_module_export(&mut store, &module.memories[0]).unwrap();
            let memory = memory.into_memory().unwrap();
            memory.data_mut(&mut store).fill(7);
            if over {
                cancel.shorten_slice(0, false);
            }
            assert_eq!(waits(decommit(module, &instance, &mut store)), expected);
            let (kept, gone) = memory.data(&store).split_at(module.host.kept_bytes);
            assert!(kept.iter().all(|byte| *byte == 7) && gone.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn what_is_not_all_inside_is_refused() {
        let engine = Engine::new(Config::new().shared_memory(true)).unwrap();
        let memory = SharedMemory::new(&engine, MemoryType::shared(1, 1)).unwrap();
        let cancel = CancelHandle::new(None, None);
        for (range, inside) in [(0..65536, true), (7..7, true), (1..65537, false)] {
            for kept_bytes in [0, 65536] {
                let zeroed = async {
                    assert_eq!(zero(&memory, range.clone(), kept_bytes, &cancel).await, inside);
                };
                assert_eq!(waits(zeroed), 0);
            }
        }
    }
}
