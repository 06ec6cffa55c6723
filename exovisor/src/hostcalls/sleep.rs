//! Waiting that holds nothing and that can be interrupted.
//!
//! wasmtime-wasi sleeps with the whole thread when the one thing a module waits for is a
//! relative timeout; no deadline would wake it.

use std::future::poll_fn;
use std::task;
use std::time::Duration;
use wasmtime_wasi::p1::types::{
    Errno, Event, EventFdReadwrite, Eventrwflags, Eventtype, Subclockflags, Subscription,
    SubscriptionU, Userdata,
};
use wiggle::{GuestMemory, GuestPtr};

/// The arguments of `poll_oneoff`.
#[derive(Clone, Copy)]
pub(crate) struct Poll {
    pub wanted: i32,
    pub events: i32,
    pub count: i32,
    pub out: i32,
}

/// The one thing that is waited for, where it is a relative timeout.
pub(crate) struct Timeout {
    userdata: Userdata,
    after: Duration,
}

impl Poll {
    /// The one relative timeout that is waited for. What cannot be read is left to
    /// wasmtime-wasi, which has the right error for it.
    pub fn timeout(self, memory: &GuestMemory<'_>) -> Option<Timeout> {
        if self.count != 1 {
            return None;
        }
        let wanted: Subscription = memory.read(GuestPtr::new(self.wanted as u32)).ok()?;
        match wanted.u {
            SubscriptionU::Clock(clock)
                if !clock.flags.contains(Subclockflags::SUBSCRIPTION_CLOCK_ABSTIME) =>
            {
                let after = Duration::from_nanos(clock.timeout);
                Some(Timeout { userdata: wanted.userdata, after })
            }
            _ => None,
        }
    }
}

impl Timeout {
    /// Sleeps, and tells the module that its time has come.
    pub async fn wait(self, asked: Poll, memory: &mut GuestMemory<'_>) -> wasmtime::Result<i32> {
        tokio::time::sleep(self.after).await;
        let (error, type_) = (Errno::Success, Eventtype::Clock);
        let fd_readwrite = EventFdReadwrite { nbytes: 0, flags: Eventrwflags::empty() };
        let event = Event { userdata: self.userdata, error, type_, fd_readwrite };
        memory.write(GuestPtr::new(asked.events as u32), event)?;
        memory.write(GuestPtr::new(asked.out as u32), 1u32)?;
        Ok(Errno::Success as i32)
    }
}

/// Lets all others go first, once.
pub(crate) async fn give_way() {
    let mut given = false;
    poll_fn(|context| {
        if std::mem::replace(&mut given, true) {
            return task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        task::Poll::Pending
    })
    .await;
}
