//! One device in the event loop.
//!
//! ```text
//! Waiting --connect--> Serving --hang-up, broken message, refused kick--> Gone
//! ```
//! A server takes exactly one frontend; in `Gone` it holds nothing of the guest.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{MsgFlags, recv};
use std::os::fd::AsFd;
use vhost::vhost_user::message::MAX_MSG_SIZE;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::session::Session;
use super::{CallKind, DEVICE_TOKENS, Device, Io, MemoryFile};
use crate::devices::DeviceError;
use crate::devices::metrics::TransportMetrics;

const LISTENER: u32 = 0;
const CONTROL: u32 = 1;
const RESUME: u32 = 2;
const KICKS: u32 = 16;
/// A vhost-user header: request, flags, payload size; 4 bytes each.
const HEADER: usize = 12;

enum Phase<D: Device> {
    Waiting(UnixListener),
    Serving { control: UnixStream, handler: BackendReqHandler<Mutex<Session<D>>> },
    Gone,
}

/// A device with its socket, as a subscriber of the event loop.
pub(crate) struct Server<D: Device> {
    phase: Phase<D>,
    session: Arc<Mutex<Session<D>>>,
    resume: EventFd,
    metrics: Arc<TransportMetrics>,
}

impl<D: Device> Server<D> {
    /// Puts `device` behind `listener`, whose frontend is interrupted by `calls`.
    pub fn new(
        listener: UnixListener,
        device: D,
        memory: MemoryFile,
        calls: CallKind,
    ) -> Result<Self, DeviceError> {
        let host = DeviceError::host::<io::Error>;
        listener.set_nonblocking(true).map_err(host("prepare a device socket"))?;
        let resume = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(DeviceError::host("make a device event"))?;
        let metrics = device.transport();
        let session = Arc::new(Mutex::new(Session::new(device, memory, calls)));
        Ok(Self { phase: Phase::Waiting(listener), session, resume, metrics })
    }

    fn session(&self) -> MutexGuard<'_, Session<D>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(&mut self, ops: &mut EventOps<'_>) {
        let Phase::Waiting(listener) = &self.phase else {
            return;
        };
        let Ok((control, _)) = listener.accept() else {
            return;
        };
        let _ = ops.remove(Events::empty(listener));
        self.phase = Phase::Gone;
        if let Ok(copy) = control.try_clone()
            && ops.add(Events::with_data(&control, CONTROL, EventSet::IN)).is_ok()
        {
            let handler = BackendReqHandler::from_stream(copy, self.session.clone());
            self.phase = Phase::Serving { control, handler };
            self.metrics.connected.inc();
        }
    }

    fn message(&mut self, ops: &mut EventOps<'_>) {
        let Phase::Serving { control, handler } = &mut self.phase else {
            return;
        };
        let handled = match admit(control) {
            Ok(true) => handler.handle_request(),
            Ok(false) => return,
            Err(error) => Err(error),
        };
        match handled {
            Ok(()) => self.follow_kicks(ops),
            Err(Error::ReqHandlerError(_)) => self.metrics.control_faults.inc(),
            Err(error) => {
                if !matches!(error, Error::Disconnected) {
                    self.metrics.control_faults.inc();
                }
                self.close(ops);
            }
        }
    }

    /// Brings the watched doorbells in line with what the frontend has set.
    fn follow_kicks(&mut self, ops: &mut EventOps<'_>) {
        let mut session = self.session();
        for (index, ring) in (KICKS..).zip(session.rings.iter_mut()) {
            forget(ring.take_retired_kicks(), ops);
            let Some(kick) = ring.register_kick() else {
                continue;
            };
            // Edge-triggered: a guest's descriptor is watched but never read.
            let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
            if ops.add(Events::with_data(kick, index, events)).is_err() {
                ring.drop_kick();
                self.metrics.control_faults.inc();
            }
        }
        drop(session);
        self.ring_again();
    }

    fn kick(&mut self, index: usize, ops: &mut EventOps<'_>) {
        self.metrics.kicks.inc();
        self.with_io(ops, |device, io| device.queue_event(index, io));
    }

    fn resume(&mut self, ops: &mut EventOps<'_>) {
        let _ = self.resume.read();
        self.with_io(ops, |device, io| {
            for index in 0..io.rings.len() {
                if io.rings.get_mut(index).is_some_and(|ring| ring.take_again()) {
                    device.queue_event(index, io);
                }
            }
        });
    }

    fn with_io(&self, ops: &mut EventOps<'_>, work: impl FnOnce(&mut D, &mut Io<'_, '_>)) {
        let mut session = self.session();
        let Session { device, rings, memory, .. } = &mut *session;
        if let Some(memory) = memory {
            work(device, &mut Io { mem: &memory.guest, rings, ops });
        }
        drop(session);
        self.ring_again();
    }

    fn ring_again(&self) {
        if self.session().rings.iter().any(|ring| ring.wants_again()) {
            let _ = self.resume.write(1);
        }
    }

    fn host_event(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let mut session = self.session();
        let Session { device, rings, memory, .. } = &mut *session;
        let (token, set) = (events.data(), events.event_set());
        match memory {
            Some(memory) => {
                let mut io = Io { mem: &memory.guest, rings, ops };
                device.host_event(token, set, Some(&mut io));
            }
            None => device.host_event(token, set, None),
        }
        drop(session);
        self.ring_again();
    }

    fn close(&mut self, ops: &mut EventOps<'_>) {
        let Phase::Serving { control, .. } = &self.phase else {
            return;
        };
        let _ = ops.remove(Events::empty(control));
        self.phase = Phase::Gone;
        let mut session = self.session();
        session.device.disconnect(ops);
        session.reset();
        for ring in &mut session.rings {
            forget(ring.take_retired_kicks(), ops);
        }
        self.metrics.disconnected.inc();
    }
}

fn forget(kicks: Vec<File>, ops: &mut EventOps<'_>) {
    for kick in kicks {
        let _ = ops.remove(Events::empty(&kick));
    }
}

/// Whether a whole message is there and its answer will not make us wait.
///
/// The message handler reads and writes with blocking calls; a frontend that
/// sends half a message, or reads no answers, is cut off here instead of
/// holding up the loop.
fn admit(control: &UnixStream) -> Result<bool, Error> {
    let mut bytes = [0; HEADER + MAX_MSG_SIZE];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let seen = match recv(control.as_raw_fd(), &mut bytes, flags) {
        Ok(0) => return Err(Error::Disconnected),
        Ok(seen) => seen,
        Err(nix::Error::EAGAIN | nix::Error::EINTR) => return Ok(false),
        Err(_) => return Err(Error::Disconnected),
    };
    let size = bytes.get(8..HEADER).and_then(|size| size.try_into().ok());
    let size = u32::from_ne_bytes(size.unwrap_or_default()) as usize;
    if seen < HEADER || seen - HEADER < size {
        return Err(Error::PartialMessage);
    }
    let mut answer = [PollFd::new(control.as_fd(), PollFlags::POLLOUT)];
    match poll(&mut answer, PollTimeout::ZERO) {
        Ok(1) => Ok(true),
        _ => Err(Error::FrontendInternalError),
    }
}

impl<D: Device> MutEventSubscriber for Server<D> {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(ops),
            CONTROL => self.message(ops),
            RESUME => self.resume(ops),
            token if token < KICKS => {}
            token if token < DEVICE_TOKENS => self.kick((token - KICKS) as usize, ops),
            _ => self.host_event(events, ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Phase::Waiting(listener) = &self.phase {
            // Nothing is registered yet, so only a full epoll set can fail; the
            // frontend's connection then stays unanswered.
            let _ = ops.add(Events::with_data(listener, LISTENER, EventSet::IN));
        }
        let _ = ops.add(Events::with_data(&self.resume, RESUME, EventSet::IN));
        self.session().device.watch(ops);
    }
}
