//! A call on the calling thread, without a scheduler.

use crate::preempt::cancel::CancelHandle;
use crate::preempt::{self, Allowance, TimeSlice};
use std::future::poll_fn;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Runs a call of guest code on this thread until it is done, whatever signals come. A cancelled
/// call is done soon.
///
/// # Errors
/// When its end cannot be watched for.
pub(crate) fn drive<T>(
    call: impl Future<Output = T>,
    runtime: &Runtime,
    cancel: &CancelHandle,
    deadline: Option<Duration>,
) -> std::io::Result<T> {
    preempt::unblock()?;
    let watch = cancel.watch(deadline)?;
    cancel.runs_on(preempt::this_thread());
    let mut call = Box::pin(call);
    let result = runtime.block_on(poll_fn(|cx| {
        loop {
            let time_slice =
                cancel.wasm().map(|wasm| TimeSlice::begin(wasm, 0, Allowance::ENDLESS));
            let poll = call.as_mut().poll(cx);
            drop(time_slice);
            // A signal came: either it was ended, which the next poll tells it, or not.
            if poll.is_pending() && preempt::left() {
                continue;
            }
            return poll;
        }
    }));
    cancel.runs_on(0);
    drop((watch, call));
    Ok(result)
}
