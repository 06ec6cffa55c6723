//! `poll_oneoff` where a socket is among what is waited for.
//!
//! wasmtime-wasi knows nothing of sockets, so all of such a set is waited for here: sockets,
//! clocks and the standard streams. Files are always ready.

use super::socket::{Readiness, Socket, Way};
use crate::hostcalls::context::HostState;
use crate::hostcalls::guest::{get, put};
use crate::hostcalls::sleep::Poll;
use crate::hostcalls::stdio::Stream;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task;
use std::time::Duration;
use tokio::sync::MutexGuard;
use wasmtime_wasi::p1::types::{
    Errno, Event, EventFdReadwrite, Eventrwflags, Eventtype, Subclockflags, Subscription,
    SubscriptionClock, SubscriptionU,
};
use wasmtime_wasi::p1::wasi_snapshot_preview1::WasiSnapshotPreview1 as _;
use wasmtime_wasi::p2::Pollable as _;
use wiggle::GuestMemory;

/// What one call waits for at most.
const WANTED_MAX: u32 = 4096;
/// Bytes of a subscription and of an event.
const WANTED_BYTES: u32 = 48;
const EVENT_BYTES: u32 = 32;

/// What is waited for, where a socket is among it.
pub(crate) struct Asked(Vec<(Subscription, Source)>);

enum Source {
    Clock(Duration),
    Socket(Arc<Socket>, Way),
    Stream(Stream),
    Ready,
    Unknown(Errno),
}

fn descriptor(wanted: &Subscription) -> Option<(u32, Way)> {
    match &wanted.u {
        SubscriptionU::FdRead(read) => Some((read.file_descriptor.into(), Way::In)),
        SubscriptionU::FdWrite(write) => Some((write.file_descriptor.into(), Way::Out)),
        SubscriptionU::Clock(_) => None,
    }
}

impl Asked {
    /// What `poll` is about. `None` where no socket is among it, or where it cannot be read: then
    /// it is wasmtime-wasi's, which has the right error for it.
    pub fn read(
        poll: Poll,
        host_state: &mut HostState,
        memory: &mut GuestMemory<'_>,
    ) -> Option<Self> {
        let (start, count) = (poll.wanted as u32, poll.count as u32);
        if host_state.sockets.open.is_empty() || count > WANTED_MAX {
            return None;
        }
        let place = |index: u32| start.checked_add(index.checked_mul(WANTED_BYTES)?);
        let wanted: Option<Vec<Subscription>> =
            (0..count).map(|index| get(memory, place(index)?).ok()).collect();
        let wanted = wanted?;
        let is_socket = |fd: u32| host_state.sockets.get(fd).is_some();
        if !wanted.iter().filter_map(descriptor).any(|(fd, _)| is_socket(fd)) {
            return None;
        }
        let with_source = |wanted: Subscription| {
            let source = Source::of(&wanted, host_state, memory);
            (wanted, source)
        };
        Some(Self(wanted.into_iter().map(with_source).collect()))
    }
}

impl Source {
    fn of(wanted: &Subscription, host_state: &mut HostState, memory: &mut GuestMemory<'_>) -> Self {
        let (fd, way) = match (&wanted.u, descriptor(wanted)) {
            (SubscriptionU::Clock(clock), _) => {
                return match until(clock, host_state, memory) {
                    Ok(wait) => Self::Clock(wait),
                    Err(errno) => Self::Unknown(errno),
                };
            }
            (_, Some(descriptor)) => descriptor,
            (_, None) => return Self::Unknown(Errno::Inval),
        };
        if !host_state.gate.holds(fd) {
            return Self::Unknown(Errno::Notcapable);
        }
        if let Some(socket) = host_state.sockets.get(fd) {
            return Self::Socket(socket, way);
        }
        match usize::try_from(fd).ok().and_then(|fd| host_state.streams.get(fd)) {
            Some(Some(stream)) => Self::Stream(stream.clone()),
            // A stream that is not attached is at its end.
            _ => Self::Ready,
        }
    }
}

/// How long it is until a clock shows the time that is waited for.
fn until(
    clock: &SubscriptionClock,
    host_state: &mut HostState,
    memory: &mut GuestMemory<'_>,
) -> Result<Duration, Errno> {
    let wait = match clock.flags.contains(Subclockflags::SUBSCRIPTION_CLOCK_ABSTIME) {
        true => {
            let now = host_state.wasi.clock_time_get(memory, clock.id, clock.precision);
            clock.timeout.saturating_sub(now.map_err(|_| Errno::Inval)?)
        }
        false => clock.timeout,
    };
    Ok(Duration::from_nanos(wait))
}

type Waiting = Pin<Box<dyn Future<Output = Result<Readiness, Errno>> + Send>>;

fn waiting(source: Source) -> Waiting {
    Box::pin(async move {
        match source {
            Source::Clock(wait) => {
                tokio::time::sleep(wait).await;
                Ok(Readiness::default())
            }
            Source::Socket(socket, way) => socket.ready(way).await,
            Source::Stream(mut stream) => {
                stream.ready().await;
                Ok(Readiness { bytes: 1, is_ended: false })
            }
            Source::Ready => Ok(Readiness { bytes: 1, is_ended: false }),
            Source::Unknown(errno) => Err(errno),
        }
    })
}

/// Waits for any of it, and writes down all that has come by then; `reach` is nobody's meanwhile.
pub(crate) async fn wait(
    Asked(asked): Asked,
    host_state: MutexGuard<'_, HostState>,
    poll: Poll,
    memory: &mut GuestMemory<'_>,
) -> i32 {
    drop(host_state);
    let (wanted, sources): (Vec<Subscription>, Vec<Source>) = asked.into_iter().unzip();
    let mut all: Vec<Waiting> = sources.into_iter().map(waiting).collect();
    let come = poll_fn(|context| {
        let told = |waiting: &mut Waiting| match waiting.as_mut().poll(context) {
            task::Poll::Ready(result) => Some(result),
            task::Poll::Pending => None,
        };
        let told: Vec<Option<Result<Readiness, Errno>>> = all.iter_mut().map(told).collect();
        match told.iter().any(Option::is_some) {
            true => task::Poll::Ready(told),
            false => task::Poll::Pending,
        }
    });
    let come = come.await.into_iter().zip(wanted);
    let events = come.filter_map(|(result, wanted)| Some(event(&wanted, result?)));
    match write(&events.collect::<Vec<_>>(), poll, memory) {
        Ok(()) => i32::from(u16::from(Errno::Success)),
        Err(errno) => i32::from(u16::from(errno)),
    }
}

fn event(wanted: &Subscription, result: Result<Readiness, Errno>) -> Event {
    let (error, Readiness { bytes, is_ended }) = match result {
        Ok(readiness) => (Errno::Success, readiness),
        Err(errno) => (errno, Readiness::default()),
    };
    let type_ = match wanted.u {
        SubscriptionU::Clock(_) => Eventtype::Clock,
        SubscriptionU::FdRead(_) => Eventtype::FdRead,
        SubscriptionU::FdWrite(_) => Eventtype::FdWrite,
    };
    let mut flags = Eventrwflags::empty();
    flags.set(Eventrwflags::FD_READWRITE_HANGUP, is_ended);
    let fd_readwrite = EventFdReadwrite { nbytes: bytes, flags };
    Event { userdata: wanted.userdata, error, type_, fd_readwrite }
}

fn write(events: &[Event], poll: Poll, memory: &mut GuestMemory<'_>) -> Result<(), Errno> {
    let mut at = i64::from(poll.events as u32);
    for event in events {
        put(memory, at, event.clone())?;
        at += i64::from(EVENT_BYTES);
    }
    put(memory, poll.out.into(), events.len() as u32)
}
