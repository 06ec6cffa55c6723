//! What moves: streams, timers, and the rules.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{Expiration, TimerSetTimeFlags};

use super::Stack;
use super::flow::{Flow, Stage};
use super::rate::Rate;
use super::stream::After;
use crate::audit::{Decision, Entry};
use crate::dialer::protocol::Request;
use crate::policy::Policy;
use crate::switch::Port;

/// How long a flow of datagrams may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long an answer is waited for, on the host's side.
const ASKING_MAX: Duration = Duration::from_secs(120);
/// How often silence is looked for.
const SWEEP: Duration = Duration::from_secs(5);
/// When streams that have used up the cell's rate get another turn.
const SLOWED: Duration = Duration::from_millis(10);

/// What a running stack is told.
#[derive(Debug)]
enum Change {
    /// New rules.
    Policy(Policy),
    /// What is at a place of its networks from now on.
    Port(usize, Option<Port>),
}

/// Changes for a running stack; its end is a [`Changer`].
pub struct Changes {
    waiting: Receiver<Change>,
    event: Arc<EventFd>,
}

/// Tells a running stack of changes; from any thread.
#[derive(Clone, Debug)]
pub struct Changer {
    changes: Sender<Change>,
    event: Arc<EventFd>,
}

impl Changes {
    /// Both ends.
    ///
    /// # Errors
    /// The host's, where there are no more descriptors.
    pub fn pair() -> std::io::Result<(Changer, Self)> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let event = Arc::new(EventFd::from_flags(flags)?);
        let (changes, waiting) = channel();
        Ok((Changer { changes, event: event.clone() }, Self { waiting, event }))
    }

    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }
}

impl Changer {
    /// Puts `policy` in the place of the one before; open flows that it does
    /// not permit are cut.
    pub fn change(&self, policy: Policy) {
        self.tell(Change::Policy(policy));
    }

    /// Puts the cell's end in a network at `place`, or nothing, in the stead of what was there.
    pub fn change_port(&self, place: usize, port: Option<Port>) {
        self.tell(Change::Port(place, port));
    }

    fn tell(&self, change: Change) {
        // A stack that is gone has nothing to cut.
        if self.changes.send(change).is_ok() {
            let _ = self.event.write(1);
        }
    }
}

impl Stack {
    pub(super) fn stream_event(&mut self, slot: usize, set: EventSet) {
        let Some(flow) = self.flows.get(slot) else { return };
        flow.wants_turn = true;
        if let Stage::Stream(stream) = &mut flow.stage {
            let ended = EventSet::HANG_UP | EventSet::ERROR;
            stream.readable |= set.intersects(EventSet::IN | EventSet::READ_HANG_UP | ended);
            stream.writable |= set.intersects(EventSet::OUT | ended);
        }
    }

    /// Gives all flows their turns; whether one of them goes on at once.
    pub(super) fn work(&mut self, ops: &mut EventOps<'_>) -> bool {
        if !std::mem::replace(&mut self.begun, true) {
            self.begin(ops);
        }
        if std::mem::take(&mut self.wants_replies) {
            self.replies(ops);
        }
        let came = self.take_from_ports(ops);
        let now = Instant::now();
        self.rate.fill(now);
        let mut due = now + SWEEP;
        let mut more = self.wants_replies || came;
        let mut slots = self.flows.all();
        // Who could say nothing because the outbox was full is the first now.
        let first = slots.partition_point(|slot| *slot < self.first_slot);
        slots.rotate_left(first);
        let mut silent = None;
        for slot in slots {
            if self.outbox.is_full() {
                silent = silent.or(Some(slot));
            }
            due = self.work_on(slot, now, ops).map_or(due, |at| due.min(at));
            more |= self.flows.get(slot).is_some_and(|flow| flow.wants_turn);
        }
        self.first_slot = silent.unwrap_or(0);
        self.arm(due);
        // A full outbox is what the others wait for.
        more && !self.outbox.is_full()
    }

    /// Looks at what has come before the guest did.
    fn begin(&mut self, ops: &mut EventOps<'_>) {
        self.change(ops);
        for index in 0..self.published.len() {
            self.accept(index, ops);
        }
    }

    /// Gives one flow its turn; when it wants the next one.
    fn work_on(&mut self, slot: usize, now: Instant, ops: &mut EventOps<'_>) -> Option<Instant> {
        let stack_now = self.now();
        let flow = self.flows.get(slot)?;
        let silence = match flow.stage {
            Stage::Asking { .. } => ASKING_MAX,
            _ => SILENCE_MAX,
        };
        let wants_turn =
            std::mem::take(&mut flow.wants_turn) || flow.due.is_some_and(|at| at <= now);
        let Stage::Stream(stream) = &mut flow.stage else {
            if now.saturating_duration_since(flow.moved) > silence {
                self.end(slot, Decision::Closed, "", ops);
            }
            return None;
        };
        if !wants_turn {
            return flow.due;
        }
        let after = stream.turn(stack_now, &mut self.outbox, &mut self.rate);
        for name in stream.given() {
            let entry = Entry::new("secret", Decision::Allowed, &flow.target);
            self.audit.record(entry.by(flow.key.protocol, flow.port).because(name));
        }
        let reason = match &after {
            After::Misused(unlike) => Some((Decision::Cut, unlike.to_string())),
            After::Over => Some((Decision::Closed, String::new())),
            After::Slowed | After::Again | After::Idle => None,
        };
        if let Some((decision, reason)) = reason {
            self.end(slot, decision, &reason, ops);
            return None;
        }
        // With bytes left it goes on when the others have had their turns, and the outbox room.
        flow.wants_turn = after == After::Again;
        let timer = stream.due(stack_now).map(|at| {
            let wait = at.total_micros().saturating_sub(stack_now.total_micros()).max(0);
            now + Duration::from_micros(wait as u64)
        });
        let slowed = (after == After::Slowed).then(|| now + SLOWED);
        flow.due = timer.into_iter().chain(slowed).chain(stream.silent_until()).min();
        flow.due
    }

    /// Ends a flow on both sides and writes that down.
    pub(super) fn end(
        &mut self,
        slot: usize,
        decision: Decision,
        reason: &str,
        ops: &mut EventOps<'_>,
    ) {
        let (now, id) = (self.now(), self.flows.id(slot));
        let Some(mut flow) = self.flows.remove(slot) else { return };
        let event = if flow.inbound { "listen" } else { "connect" };
        let mut entry = Entry::new(event, decision, &flow.target).by(flow.key.protocol, flow.port);
        entry.peer = flow.peer.map(|peer| peer.at);
        entry.bytes = Some(flow.bytes());
        self.audit.record(entry.because(reason));
        match &mut flow.stage {
            Stage::Stream(stream) => {
                let _ = ops.remove(Events::empty(&stream.host()));
                stream.abort(now, &mut self.outbox);
            }
            Stage::Asking { .. } | Stage::Datagrams => self.dialer.say(&Request::Close { id }),
        }
    }

    fn arm(&mut self, due: Instant) {
        let now = Instant::now();
        if self.armed.is_some_and(|at| now < at && at <= due) {
            return;
        }
        // A timer of nothing is a timer that is off.
        let wait = due.saturating_duration_since(now).max(Duration::from_micros(50));
        let wait = Expiration::OneShot(TimeSpec::from_duration(wait));
        if self.timer.set(wait, TimerSetTimeFlags::empty()).is_ok() {
            self.armed = Some(due);
        }
    }

    /// Takes the newest rules and cuts what they do not permit.
    pub(super) fn change(&mut self, ops: &mut EventOps<'_>) {
        let _ = self.changes.event.read();
        let mut newest = None;
        let waiting: Vec<Change> = self.changes.waiting.try_iter().collect();
        for change in waiting {
            match change {
                Change::Policy(policy) => newest = Some(policy),
                Change::Port(place, port) => self.change_port(place, port, ops),
            }
        }
        let Some(policy) = newest else { return };
        self.rate = Rate::new(policy.scope().rate_bytes, Instant::now());
        self.policy = policy;
        self.dialer.say(&Request::Policy { rules: self.policy.to_text() });
        self.unpublish(ops);
        for slot in self.flows.all() {
            let Some(flow) = self.flows.get(slot) else { continue };
            let peer = flow.peer;
            let kept = match (flow.inbound, peer) {
                (true, _) => is_published(&self.policy, flow),
                // The rules are asked when the dialer's answer comes.
                (false, None) => true,
                (false, Some(peer)) => {
                    let (protocol, port) = (flow.key.protocol, flow.port);
                    let permitted = self.policy.permits(protocol, &flow.target, peer, port);
                    permitted.is_ok() && self.policy.guards_no_less(flow.is_raw, &flow.target, port)
                }
            };
            if !kept {
                self.end(slot, Decision::Cut, "no longer permitted", ops);
            }
        }
    }
}

fn is_published(policy: &Policy, flow: &Flow) -> bool {
    policy.scope().listen.iter().any(|ports| ports.permits(flow.port))
}
