//! The console itself: queue 0 towards the guest, queue 1 from it.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};
use vm_memory::GuestMemoryMmap;

use super::{ConsoleConfig, ConsoleMetrics};
use crate::devices::metrics::TransportMetrics;
use crate::devices::sys;
use crate::devices::transport::buffers::Chain;
use crate::devices::transport::{DEVICE_TOKENS, Device, Io, Ring};

const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
/// Bytes copied out of the guest and given to the sink in one piece.
const PIECE: usize = 4096;
/// Chains filled before the other devices get their turn.
const TURN_MAX: usize = 64;

/// A virtio-console device with a single port.
pub(crate) struct Console {
    output: Output,
    input: Option<UnixStream>,
    readable: bool,
    /// The guest has printed something, so its driver is up; while it comes up it
    /// throws input away (`in_intr` in Linux's virtio_console.c).
    spoke: bool,
    metrics: Arc<ConsoleMetrics>,
}

struct Output {
    sink: Box<dyn Write + Send>,
    room: u64,
    metrics: Arc<ConsoleMetrics>,
}

impl Output {
    fn request(&mut self, mut chain: Chain<'_>) -> u32 {
        let mut piece = [0; PIECE];
        while !chain.readable.is_empty() {
            let len = chain.readable.take(PIECE).copy_to(&mut piece);
            self.write(piece.get(..len).unwrap_or_default());
        }
        0
    }

    fn write(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(usize::try_from(self.room).unwrap_or(usize::MAX));
        let (kept, dropped) = bytes.split_at(kept);
        self.metrics.dropped_bytes.add(dropped.len() as u64);
        self.room -= kept.len() as u64;
        match self.sink.write_all(kept) {
            Ok(()) => self.metrics.output_bytes.add(kept.len() as u64),
            Err(_) => {
                self.metrics.sink_errors.inc();
                self.metrics.dropped_bytes.add(kept.len() as u64);
            }
        }
    }
}

impl Console {
    pub fn new(config: ConsoleConfig, metrics: Arc<ConsoleMetrics>) -> Self {
        let ConsoleConfig { sink, output_bytes_max, input } = config;
        let output = Output { sink, room: output_bytes_max, metrics: metrics.clone() };
        Self { output, input, readable: false, spoke: false, metrics }
    }

    fn feed(&mut self, io: &mut Io<'_, '_>) {
        let (Some(input), Some(ring)) = (&self.input, io.rings.get_mut(TO_GUEST)) else {
            return;
        };
        for _ in 0..TURN_MAX {
            if !(self.readable && self.spoke) {
                return ring.signal(io.mem);
            }
            match ring.pop(io.mem) {
                Some(chain) => self.readable = feed_one(input, ring, io.mem, chain, &self.metrics),
                // A doorbell tells us when the guest has room again.
                None if ring.arm(io.mem) => {}
                None => return ring.signal(io.mem),
            }
        }
        ring.ask_again();
        ring.signal(io.mem);
    }
}

/// Fills one chain, and says whether there may be more input.
fn feed_one(
    input: &UnixStream,
    ring: &mut Ring,
    mem: &GuestMemoryMmap,
    chain: Chain<'_>,
    metrics: &ConsoleMetrics,
) -> bool {
    if chain.writable.is_empty() {
        ring.push(mem, chain.head, 0);
        return true;
    }
    match sys::receive(input.as_fd(), chain.writable.slices()) {
        Ok(bytes @ 1..) => {
            metrics.input_bytes.add(bytes as u64);
            ring.push(mem, chain.head, bytes as u32);
            true
        }
        // Nothing now, or nothing ever again.
        _ => {
            ring.unpop();
            false
        }
    }
}

impl Device for Console {
    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        0
    }

    fn config(&self) -> &[u8] {
        &[]
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        match index {
            FROM_GUEST => {
                if let Some(ring) = io.rings.get_mut(index) {
                    ring.serve(io.mem, |chain| {
                        self.spoke = true;
                        self.output.request(chain)
                    });
                    let _ = self.output.sink.flush();
                }
                self.feed(io);
            }
            _ => self.feed(io),
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if let Some(input) = &self.input {
            let set = EventSet::IN | EventSet::EDGE_TRIGGERED;
            let _ = ops.add(Events::with_data(input, DEVICE_TOKENS, set));
        }
    }

    fn host_event(&mut self, _token: u32, _set: EventSet, io: Option<&mut Io<'_, '_>>) {
        self.readable = true;
        if let Some(io) = io {
            self.feed(io);
        }
    }

    fn disconnect(&mut self, ops: &mut EventOps<'_>) {
        if let Some(input) = self.input.take() {
            let _ = ops.remove(Events::empty(&input));
        }
    }
}
