//! The host functions of threads: `thread-spawn`, and what stands for atomic instructions.

use crate::ending::{Ended, Stopper};
use crate::imports::{ENV, THREADS};
use crate::isolate::State;
use crate::preempt::{self, Guest};
use crate::rewrite::{ATOMIC_NAMES, ATOMICS};
use crate::threads::Team;
use crate::threads::waits::Waiting;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use wasmtime::{Caller, Linker, Result, Trap, WaitResult, format_err};

/// What `memory.atomic.wait` answers (threads proposal, "Wait").
const WOKEN: i32 = 0;
const MISMATCH: i32 = 1;
const TIMED_OUT: i32 = 2;
/// What `thread-spawn` answers when there is no thread to be had; any negative number will do.
const REFUSED: i32 = -1;
/// How long a thread looks before it waits, in nanoseconds: about what it takes to leave a worker
/// and to come back to one.
const LOOK_NS: u64 = 3_000;

/// Defines them all.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap(THREADS, "thread-spawn", |caller: Caller<'_, State>, start: i32| {
        caller.data().team.as_ref().and_then(|team| team.spawn(start)).unwrap_or(REFUSED)
    })?;
    linker.func_wrap(ENV, "THREADS", |caller: Caller<'_, State>| {
        caller.data().team.as_ref().map_or(1, |team| team.threads_now())
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
            let team = team(&caller)?;
            let address = effective(address, offset)?;
            // Asked to wake nobody, it only checks the address.
            team.memory().atomic_notify(address, 0)?;
            Ok(team.waits.notify(address, count as u32) as i32)
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
    fn is_at(self, team: &Team, address: u64) -> Result<bool, Trap> {
        let now = Some(Duration::ZERO);
        let result = match self {
            Self::Word(word) => team.memory().atomic_wait32(address, word, now),
            Self::Double(double) => team.memory().atomic_wait64(address, double, now),
        };
        Ok(result? != WaitResult::Mismatch)
    }
}

async fn zero(caller: Caller<'_, State>, range: Range<usize>) -> Result<()> {
    let team = team(&caller)?;
    let zero = team.zero(range, &caller.data().stopper).await;
    Ok(zero.then_some(()).ok_or(Trap::MemoryOutOfBounds)?)
}

async fn wait(
    caller: Caller<'_, State>,
    address: i32,
    expected: Expected,
    timeout: i64,
    offset: i64,
) -> Result<i32> {
    let team = team(&caller)?;
    let address = effective(address, offset)?;
    let Some(waiting) = team.waits.enter(address, || expected.is_at(&team, address))? else {
        return Ok(MISMATCH);
    };
    let State { stopper, deadline, .. } = caller.data();
    if looks(&waiting, stopper) {
        return Ok(WOKEN);
    }
    // A negative timeout is none.
    let timeout = u64::try_from(timeout).ok().map(Duration::from_nanos);
    let woken = async {
        match timeout {
            None => waiting.woken().await,
            Some(timeout) => {
                let _elapsed = tokio::time::timeout(timeout, waiting.woken()).await;
            }
        }
    };
    stopper
        .unless_ended(*deadline, woken)
        .await
        .map_err(|ended: Ended| wasmtime::Error::new(ended))?;
    Ok(if waiting.is_woken() { WOKEN } else { TIMED_OUT })
}

/// Looks a little before the thread leaves its worker, if nothing else wants that; whether
/// somebody has notified.
fn looks(waiting: &Waiting<'_>, stopper: &Stopper) -> bool {
    let end_ns = preempt::now_ns().saturating_add(LOOK_NS);
    let alone = || stopper.guest().is_some_and(Guest::is_alone);
    waiting.look(|| alone() && preempt::now_ns() < end_ns)
}

fn team(caller: &Caller<'_, State>) -> Result<Arc<Team>> {
    caller.data().team.clone().ok_or_else(|| format_err!("the isolate was made without threads"))
}

fn effective(address: i32, offset: i64) -> Result<u64, Trap> {
    u64::from(address as u32).checked_add(offset as u64).ok_or(Trap::MemoryOutOfBounds)
}
