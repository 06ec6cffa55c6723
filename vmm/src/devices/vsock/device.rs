//! Packets between the table of streams and the rings: queue 0 towards the
//! guest, 1 from it, 2 for events that this device never has.

use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};

use super::handle::{self, Dial, Dials};
use super::packet::HEADER_BYTES;
use super::table::Table;
use super::{GUEST_CID, VsockConfig, VsockHandle, VsockMetrics};
use crate::devices::DeviceError;
use crate::devices::metrics::TransportMetrics;
use crate::devices::transport::{DEVICE_TOKENS, Device, Io};

const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
const QUEUES: usize = 3;
/// Packets sent to the guest before the other devices get their turn.
const TURN_MAX: usize = 256;

/// A virtio-vsock device.
pub(crate) struct Vsock {
    table: Table,
    dials: Dials,
    config: [u8; 8],
    metrics: Arc<VsockMetrics>,
}

impl Vsock {
    pub fn new(
        config: VsockConfig,
        metrics: Arc<VsockMetrics>,
    ) -> Result<(Self, VsockHandle), DeviceError> {
        let (handle, dials) = handle::pair().map_err(DeviceError::host("make a vsock event"))?;
        let table = Table::new(config, metrics.clone());
        Ok((Self { table, dials, config: GUEST_CID.to_le_bytes(), metrics }, handle))
    }

    fn take_packets(&mut self, io: &mut Io<'_, '_>) {
        if let Some(ring) = io.rings.get_mut(FROM_GUEST) {
            ring.serve(io.mem, |chain| self.table.packet(chain, io.ops));
        }
    }

    fn give_packets(&mut self, io: &mut Io<'_, '_>) {
        let Some(ring) = io.rings.get_mut(TO_GUEST) else {
            return;
        };
        for _ in 0..TURN_MAX {
            if !self.table.has_output() {
                return ring.signal(io.mem);
            }
            let Some(chain) = ring.pop(io.mem) else {
                // A doorbell tells us when the guest has room again.
                match ring.arm(io.mem) {
                    true => continue,
                    false => return ring.signal(io.mem),
                }
            };
            if chain.writable.len() <= HEADER_BYTES {
                self.metrics.transport.malformed_chains.inc();
                ring.push(io.mem, chain.head, 0);
                continue;
            }
            match self.table.fill(chain.writable, io.ops) {
                Some(written) => ring.push(io.mem, chain.head, written),
                None => ring.unpop(),
            }
        }
        ring.ask_again();
        ring.signal(io.mem);
    }

    fn dial(&mut self, io: Option<&mut Io<'_, '_>>) {
        let _ = self.dials.event.read();
        match io {
            Some(io) => {
                for dial in self.dials.waiting.try_iter() {
                    match dial {
                        Dial::Open { port, stream, name } => {
                            self.table.dial(port, stream, name, io.ops);
                        }
                        Dial::HandOver { name, to, former } => {
                            self.table.hand_over(name, to, io.ops);
                            // Its end would have been the stream's.
                            drop(former);
                        }
                    }
                }
            }
            // Without a guest every request is refused: its stream is dropped.
            None => self.dials.waiting.try_iter().for_each(|_| self.metrics.refused.inc()),
        }
    }
}

impl Device for Vsock {
    fn queues(&self) -> usize {
        QUEUES
    }

    fn features(&self) -> u64 {
        // VIRTIO_VSOCK_F_STREAM (virtio 1.2, 5.10.3).
        1
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        if index == FROM_GUEST {
            self.take_packets(io);
        }
        self.give_packets(io);
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops.add(Events::with_data(&*self.dials.event, DEVICE_TOKENS, EventSet::IN));
    }

    fn host_event(&mut self, token: u32, set: EventSet, io: Option<&mut Io<'_, '_>>) {
        match (token, io) {
            (DEVICE_TOKENS, None) => self.dial(None),
            (DEVICE_TOKENS, Some(io)) => {
                self.dial(Some(io));
                self.give_packets(io);
            }
            (_, None) => {}
            (_, Some(io)) => {
                self.table.host_event(token, set, io.ops);
                self.give_packets(io);
            }
        }
    }

    fn disconnect(&mut self, ops: &mut EventOps<'_>) {
        self.table.clear(ops);
    }
}
