//! Sleeping, so that it can be interrupted.
//!
//! wasmtime-wasi sleeps with the whole thread when the one thing a module waits for is a
//! relative timeout; no deadline would wake it.

use std::time::Duration;
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p1::types::{
    Errno, Event, EventFdReadwrite, Eventrwflags, Eventtype, Subclockflags, Subscription,
    SubscriptionU, Userdata,
};
use wasmtime_wasi::p1::wasi_snapshot_preview1 as p1;
use wiggle::{GuestMemory, GuestPtr};

/// `poll_oneoff` of preview 1.
pub(crate) async fn poll_oneoff(
    wasi: &mut WasiP1Ctx,
    memory: &mut GuestMemory<'_>,
    wanted: i32,
    events: i32,
    count: i32,
    out: i32,
) -> wasmtime::Result<i32> {
    let timeout = (count == 1).then(|| timeout(memory, wanted)).flatten();
    let Some((userdata, timeout)) = timeout else {
        return p1::poll_oneoff(wasi, memory, wanted, events, count, out).await;
    };
    tokio::time::sleep(timeout).await;
    let (error, type_) = (Errno::Success, Eventtype::Clock);
    let fd_readwrite = EventFdReadwrite { nbytes: 0, flags: Eventrwflags::empty() };
    let event = Event { userdata, error, type_, fd_readwrite };
    memory.write(GuestPtr::new(events as u32), event)?;
    memory.write(GuestPtr::new(out as u32), 1u32)?;
    Ok(Errno::Success as i32)
}

/// The one relative timeout that is waited for. What cannot be read is left to wasmtime-wasi,
/// which has the right error for it.
fn timeout(memory: &GuestMemory<'_>, wanted: i32) -> Option<(Userdata, Duration)> {
    let wanted: Subscription = memory.read(GuestPtr::new(wanted as u32)).ok()?;
    match wanted.u {
        SubscriptionU::Clock(clock)
            if !clock.flags.contains(Subclockflags::SUBSCRIPTION_CLOCK_ABSTIME) =>
        {
            Some((wanted.userdata, Duration::from_nanos(clock.timeout)))
        }
        _ => None,
    }
}
