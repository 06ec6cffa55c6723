//! What the stack knows of one flow, and the table of all of them.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use exocell_xgate::Protocol;

use super::stream::Stream;
use crate::dialer::protocol::Id;
use crate::policy::{Peer, Target};

/// Datagrams that wait for their flow to be opened.
const EARLY_MAX: usize = 16;
/// Bytes that wait for all flows that are being opened, beside the little that each of them
/// needs; what comes beyond that is lost, as in any network.
const EARLY_BYTES_MAX: usize = 1 << 20;

/// A flow as its packets show it, from the guest's side. Echoes have the
/// number of their sender for the guest's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub protocol: Protocol,
    pub guest: SocketAddr,
    pub other: SocketAddr,
}

/// How far a flow got.
pub enum Stage {
    /// The dialer was asked; the packet that opened it, of datagrams what a refusal quotes of
    /// it, and datagrams meanwhile.
    Asking {
        first: Vec<u8>,
        early: VecDeque<Vec<u8>>,
    },
    Stream(Box<Stream>),
    /// Datagrams or echoes, which the dialer passes on.
    Datagrams,
}

/// One flow.
pub struct Flow {
    pub key: Key,
    /// What the guest means by the address; of a published port, its caller.
    pub target: Target,
    pub port: u16,
    pub peer: Option<Peer>,
    /// Whether it came from outside, by a published port.
    pub inbound: bool,
    /// The number of that, where it is one of datagrams.
    pub door: Option<u32>,
    /// Whether a name's guard lets everything through.
    pub is_raw: bool,
    pub stage: Stage,
    /// When something last moved.
    pub moved: Instant,
    pub bytes: (u64, u64),
    /// When smoltcp wants another turn.
    pub due: Option<Instant>,
    pub wants_turn: bool,
    generation: u16,
}

impl Flow {
    pub fn new(key: Key, target: Target, port: u16, stage: Stage) -> Self {
        Self {
            key,
            target,
            port,
            peer: None,
            inbound: false,
            door: None,
            is_raw: false,
            stage,
            moved: Instant::now(),
            bytes: (0, 0),
            due: None,
            wants_turn: false,
            generation: 0,
        }
    }

    /// Bytes of the guest that wait until it is opened.
    fn waiting(&self) -> usize {
        match &self.stage {
            Stage::Asking { first, early } => {
                first.len() + early.iter().map(Vec::len).sum::<usize>()
            }
            Stage::Stream(_) | Stage::Datagrams => 0,
        }
    }

    /// Bytes from the guest and to it.
    pub fn bytes(&self) -> (u64, u64) {
        match &self.stage {
            Stage::Stream(stream) => stream.bytes,
            _ => self.bytes,
        }
    }
}

/// All flows of a cell: bounded slots, each with a generation.
#[derive(Default)]
pub struct Flows {
    slots: Vec<Option<Flow>>,
    by_key: HashMap<Key, usize>,
    free: Vec<usize>,
    next_generation: u16,
}

impl Flows {
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// How many of them are callers of published ports of connections.
    pub fn callers(&self) -> usize {
        let is_caller = |flow: &&Flow| flow.inbound && flow.door.is_none();
        self.slots.iter().flatten().filter(is_caller).count()
    }

    /// How many of them are callers of published ports of datagrams. They count by themselves: one
    /// datagram makes one of them, and its source may be a lie.
    pub fn datagram_callers(&self) -> usize {
        self.slots.iter().flatten().filter(|flow| flow.door.is_some()).count()
    }

    /// The one of those that has said nothing for the longest time.
    pub fn longest_silent_caller(&self) -> Option<usize> {
        let callers = self.slots.iter().enumerate().filter_map(|(slot, flow)| {
            flow.as_ref().filter(|flow| flow.door.is_some()).map(|flow| (flow.moved, slot))
        });
        callers.min().map(|(_, slot)| slot)
    }

    /// All but the callers by datagrams.
    pub fn connections(&self) -> usize {
        self.len() - self.datagram_callers()
    }

    /// Whether `bytes` more may wait for flows that are being opened.
    pub fn may_wait(&self, bytes: usize) -> bool {
        let flows = self.slots.iter().flatten();
        flows.map(Flow::waiting).sum::<usize>() + bytes <= EARLY_BYTES_MAX
    }

    /// Keeps a datagram until the flow in `slot` is opened, where there is room for it.
    pub fn keep(&mut self, slot: usize, data: &[u8]) {
        if !self.may_wait(data.len()) {
            return;
        }
        if let Some(Flow { stage: Stage::Asking { early, .. }, .. }) = self.get(slot)
            && early.len() < EARLY_MAX
        {
            early.push_back(data.to_vec());
        }
    }

    /// Adds a flow; its slot.
    pub fn add(&mut self, mut flow: Flow) -> usize {
        self.next_generation = self.next_generation.wrapping_add(1);
        flow.generation = self.next_generation;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.by_key.insert(flow.key, slot);
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some(flow);
        }
        slot
    }

    pub fn find(&self, key: &Key) -> Option<usize> {
        self.by_key.get(key).copied()
    }

    /// The flow of a caller of a published port of datagrams.
    pub fn find_call(&self, door: u32, from: SocketAddr) -> Option<usize> {
        self.slots.iter().position(|flow| {
            flow.as_ref().is_some_and(|flow| {
                flow.door == Some(door) && flow.peer.is_some_and(|peer| peer.at == from)
            })
        })
    }

    pub fn get(&mut self, slot: usize) -> Option<&mut Flow> {
        self.slots.get_mut(slot)?.as_mut()
    }

    pub fn remove(&mut self, slot: usize) -> Option<Flow> {
        let flow = self.slots.get_mut(slot)?.take()?;
        self.by_key.remove(&flow.key);
        self.free.push(slot);
        Some(flow)
    }

    /// The number by which the dialer knows the flow in `slot`.
    pub fn id(&self, slot: usize) -> Id {
        let generation =
            self.slots.get(slot).and_then(Option::as_ref).map_or(0, |flow| flow.generation);
        u32::from(generation) << 16 | slot as u32 & 0xffff
    }

    /// The slot of a flow that still is the one meant.
    pub fn slot(&self, id: Id) -> Option<usize> {
        let slot = (id & 0xffff) as usize;
        (self.slots.get(slot)?.is_some() && self.id(slot) == id).then_some(slot)
    }

    /// The slots in use, in their order.
    pub fn all(&self) -> Vec<usize> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, flow)| flow.as_ref().map(|_| slot)).collect()
    }
}
