//! The host functions of threads: `thread-spawn`, and what stands for atomic instructions.
//!
//! What runs the threads is not known here. They are reached through [`Threads`].

mod waits;

use crate::hostcalls::builtins::Heap;
use crate::hostcalls::state::State;
use crate::imports::{ATOMIC_NAMES, ATOMICS, ENV, THREADS};
use crate::preempt::cancel::{CancelHandle, Cancelled};
use crate::preempt::{self, WasmContext};
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use waits::{Waiting, Waits};
use wasmtime::{Caller, Linker, Result, SharedMemory, Trap, WaitResult, format_err};

/// What `memory.atomic.wait` answers (threads proposal, "Wait").
const WOKEN: i32 = 0;
const MISMATCH: i32 = 1;
const TIMED_OUT: i32 = 2;
/// What `thread-spawn` answers when there is no thread to be had; any negative number will do.
const REFUSED: i32 = -1;
/// How long a thread looks before it waits, in nanoseconds: about what it takes to leave a worker
/// and to come back to one.
const LOOK_NS: u64 = 3_000;

/// What the threads of one isolate share.
pub(crate) struct Shared {
    pub memory: SharedMemory,
    pub heap: Mutex<Heap>,
    waits: Waits,
}

impl Shared {
    /// Threads that share `memory` and have not begun.
    pub fn new(memory: SharedMemory) -> Self {
        Self { memory, heap: Mutex::default(), waits: Waits::default() }
    }

    /// Whether memory has grown as far as it may, so that the module wants it larger in vain.
    pub fn is_full(&self) -> bool {
        let limit = self.memory.ty().maximum();
        limit.is_some_and(|limit| self.memory.size() >= limit)
    }
}

/// The threads of one isolate.
pub(crate) trait Threads: Send + Sync {
    /// What they share.
    fn shared(&self) -> &Shared;

    /// Starts a thread with the guest's word for it and answers with its id; `None` if the
    /// isolate may have no more.
    fn spawn(self: Arc<Self>, start: i32) -> Option<i32>;

    /// How many threads are worth having at this moment, the caller among them.
    fn threads_now(&self) -> i32;

    /// Makes a part of the memory zero for a thread with this cancel handle; false if it is not all
    /// inside.
    fn zero<'a>(&'a self, range: Range<usize>, cancel: &'a CancelHandle) -> Zeroing<'a>;
}

/// A part of a memory that is being made zero; whether it is all inside.
pub(crate) type Zeroing<'a> = Pin<Box<dyn Future<Output = bool> + Send + 'a>>;

/// Defines them all.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap(THREADS, "thread-spawn", |caller: Caller<'_, State>, start: i32| {
        caller.data().threads.clone().and_then(|threads| threads.spawn(start)).unwrap_or(REFUSED)
    })?;
    linker.func_wrap(ENV, "THREADS", |caller: Caller<'_, State>| {
        caller.data().threads.as_ref().map_or(1, |threads| threads.threads_now())
    })?;
    let [wait32, wait64, notify, clear] = ATOMIC_NAMES;
    linker.func_wrap_async(
        ATOMICS,
        wait32,
        |caller: Caller<'_, State>, (address, expected, timeout, offset): (i32, i32, i64, i64)| {
            Box::new(wait(caller, address, Expected::Word(expected as u32), timeout, offset))
        },
    )?;
    linker.func_wrap_async(
        ATOMICS,
        wait64,
        |caller: Caller<'_, State>, (address, expected, timeout, offset): (i32, i64, i64, i64)| {
            Box::new(wait(caller, address, Expected::Double(expected as u64), timeout, offset))
        },
    )?;
    linker.func_wrap(
        ATOMICS,
        notify,
        |caller: Caller<'_, State>, address: i32, count: i32, offset: i64| -> Result<i32> {
            let threads = threads(&caller)?;
            let address = effective(address, offset)?;
            // Asked to wake nobody, it only checks the address.
            threads.shared().memory.atomic_notify(address, 0)?;
            Ok(threads.shared().waits.notify(address, count as u32) as i32)
        },
    )?;
    linker.func_wrap_async(
        ATOMICS,
        clear,
        |caller: Caller<'_, State>, (address, _, length): (i32, i32, i32)| {
            let start = address as u32 as usize;
            Box::new(zero(caller, start..start.saturating_add(length as u32 as usize)))
        },
    )?;
    Ok(())
}

#[derive(Clone, Copy)]
enum Expected {
    Word(u32),
    Double(u64),
}

impl Expected {
    /// Whether it is what memory holds; checks the address, too.
    fn is_at(self, memory: &SharedMemory, address: u64) -> Result<bool, Trap> {
        let now = Some(Duration::ZERO);
        let result = match self {
            Self::Word(word) => memory.atomic_wait32(address, word, now),
            Self::Double(double) => memory.atomic_wait64(address, double, now),
        };
        Ok(result? != WaitResult::Mismatch)
    }
}

async fn zero(caller: Caller<'_, State>, range: Range<usize>) -> Result<()> {
    let threads = threads(&caller)?;
    let zero = threads.zero(range, &caller.data().cancel).await;
    Ok(zero.then_some(()).ok_or(Trap::MemoryOutOfBounds)?)
}

async fn wait(
    caller: Caller<'_, State>,
    address: i32,
    expected: Expected,
    timeout: i64,
    offset: i64,
) -> Result<i32> {
    let threads = threads(&caller)?;
    let address = effective(address, offset)?;
    let Shared { memory, waits, .. } = threads.shared();
    let Some(waiting) = waits.enter(address, || expected.is_at(memory, address))? else {
        return Ok(MISMATCH);
    };
    let State { cancel, deadline, .. } = caller.data();
    if looks(&waiting, cancel) {
        return Ok(WOKEN);
    }
    // With a negative timeout the thread waits for ever.
    let timeout = u64::try_from(timeout).ok().map(Duration::from_nanos);
    let woken = async {
        match timeout {
            None => waiting.woken().await,
            Some(timeout) => {
                let _elapsed = tokio::time::timeout(timeout, waiting.woken()).await;
            }
        }
    };
    cancel
        .unless_cancelled(*deadline, woken)
        .await
        .map_err(|ended: Cancelled| wasmtime::Error::new(ended))?;
    Ok(if waiting.is_woken() { WOKEN } else { TIMED_OUT })
}

/// Looks a little before the thread leaves its worker, if nothing else wants that; whether
/// somebody has notified.
fn looks(waiting: &Waiting<'_>, cancel: &CancelHandle) -> bool {
    let end_ns = preempt::now_ns().saturating_add(LOOK_NS);
    let alone = || cancel.wasm().is_some_and(WasmContext::is_alone);
    waiting.look(|| alone() && preempt::now_ns() < end_ns)
}

fn threads(caller: &Caller<'_, State>) -> Result<Arc<dyn Threads>> {
    caller.data().threads.clone().ok_or_else(|| format_err!("the isolate was made without threads"))
}

fn effective(address: i32, offset: i64) -> Result<u64, Trap> {
    u64::from(address as u32).checked_add(offset as u64).ok_or(Trap::MemoryOutOfBounds)
}
