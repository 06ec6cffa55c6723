//! A cell that waits in a pool: who may take it, and when it ends without.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_agent::{FrameWriter, Kind};

use super::{End, Event, Shared};
use crate::control::{ControlReply, ControlRequest, Order};
use crate::{CellSpec, Record};

/// What was asked for; of a warm cell, that somebody may still ask.
#[derive(Clone)]
pub(crate) struct Warmth {
    spec: Arc<Mutex<CellSpec>>,
}

impl Warmth {
    pub fn of(spec: &CellSpec) -> Self {
        Self { spec: Arc::new(Mutex::new(spec.clone())) }
    }

    fn lock(&self) -> MutexGuard<'_, CellSpec> {
        self.spec.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the cell is made as, now.
    pub fn spec(&self) -> CellSpec {
        self.lock().clone()
    }

    /// Whether the cell waits for its program.
    pub fn is_warm(&self) -> bool {
        self.lock().warm.is_some()
    }

    /// Changes what is written down of the cell.
    pub fn rewrite(
        &self,
        record: &Record,
        change: impl FnOnce(&mut CellSpec),
    ) -> Result<(), String> {
        let mut own = self.lock();
        let mut new = own.clone();
        change(&mut new);
        record.write_spec(&new).map_err(|error| error.to_string())?;
        *own = new;
        Ok(())
    }

    /// Lets nobody take the cell any more; whether that was still possible.
    pub fn close(&self) -> bool {
        self.lock().warm.take().is_some()
    }

    /// Makes the cell what `spec` says; only the first can.
    fn claim(&self, spec: &CellSpec) -> Result<(), String> {
        let mut own = self.lock();
        if own.warm.is_none() || spec.warm.is_some() || own.id != spec.id {
            return Err("the cell is not to be taken".to_owned());
        }
        *own = spec.clone();
        Ok(())
    }
}

/// What a cell without a program can be asked.
pub(crate) fn is_for_warm(request: &ControlRequest) -> bool {
    matches!(
        request,
        ControlRequest::Take(_)
            | ControlRequest::Reserve { .. }
            | ControlRequest::Stop { .. }
            | ControlRequest::Counters
    )
}

/// Gives a cell that waits another key; only the first who asks with the one it has.
pub(crate) fn reserve(shared: &Shared, from: &str, to: String) -> Result<(), String> {
    let mut own = shared.warmth.lock();
    if own.warm.as_deref() != Some(from) {
        return Err("the cell is not to be taken".to_owned());
    }
    own.warm = Some(to);
    shared.record.write_spec(&own).map_err(|error| error.to_string())
}

/// Gives the cell to the client on `stream`, which is its operator from now on.
/// Returns the client's end of the session.
pub(crate) fn take(
    shared: &Shared,
    stream: &UnixStream,
    order: Order,
) -> Result<UnixStream, String> {
    let copy = || stream.try_clone().map_err(|error| format!("cannot copy a descriptor: {error}"));
    let (operator, session) = (copy()?, copy()?);
    shared.warmth.claim(&order.spec)?;
    let taken = shared.record.write_spec(&order.spec).map_err(|error| error.to_string());
    let told = taken.and_then(|()| {
        let reply = FrameWriter::new(stream).write_json(Kind::Reply, &ControlReply::Done);
        reply.map_err(|error| error.to_string())
    });
    if told.is_err() {
        // It is nobody's any more, neither the pool's nor the client's.
        let _ =
            shared.events.send(Event::Stop { signal: libc::SIGKILL as u8, grace: Duration::ZERO });
        return told.map(|()| session);
    }
    shared.output.hand_over(operator);
    let _ = shared.events.send(Event::Taken(Box::new(order)));
    Ok(session)
}

/// Waits for the end of the pool's stream, on which nothing comes.
pub(crate) fn watch_pool(shared: &Shared, mut pool: &UnixStream) {
    while matches!(pool.read(&mut [0; 64]), Ok(1..)) {}
    // A cell that was taken by then takes no notice.
    let _ = shared.events.send(Event::Abandoned);
}

/// Waits for the program of a warm cell; the cell's end when none comes.
pub(crate) fn wait(inbox: &Receiver<Event>, warmth: &Warmth) -> Result<Order, Box<End>> {
    let killed = |why: &str| Err(Box::new(End::killed(why.to_owned())));
    loop {
        match inbox.recv() {
            Ok(Event::Taken(order)) => return Ok(*order),
            Ok(Event::GuestKernel(how)) => return Err(Box::new(End::guest_died(&how))),
            // One that was taken just before gets its order.
            Ok(Event::Abandoned) if warmth.close() => {
                return killed("its pool is gone");
            }
            Ok(Event::Abandoned) => {}
            Ok(Event::Stop { .. }) => return killed("stopped"),
            Ok(Event::Panicked(what)) => return Err(Box::new(End::panicked(&what))),
            Ok(
                Event::Started { .. }
                | Event::Program(_)
                | Event::Booting
                | Event::Booted(_)
                | Event::CellEnded(_),
            ) => {}
            Err(_) => return killed("the supervisor lost its threads"),
        }
    }
}
