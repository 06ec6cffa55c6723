//! The folder's device itself: a queue of what is urgent (forgetting) and one of requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events};
use exocell_folders::Server;

use super::{END, FsConfig, FsMetrics, Message, TAG_LEN_MAX};
use crate::devices::metrics::TransportMetrics;
use crate::devices::transport::{DEVICE_TOKENS, Device, Io};

const QUEUES: usize = 2;
const CONTROL: u32 = DEVICE_TOKENS;

/// A virtio-fs device.
pub(crate) struct Fs {
    server: Server,
    control: UnixStream,
    gone: Box<dyn FnMut() + Send>,
    /// Tag and number of request queues (virtio 1.2, 5.11.4).
    config: [u8; TAG_LEN_MAX + 4],
    metrics: Arc<FsMetrics>,
}

impl Fs {
    pub fn new(config: FsConfig, metrics: Arc<FsMetrics>) -> Self {
        let FsConfig { server, tag, control, gone } = config;
        let _ = control.set_nonblocking(true);
        let mut config = [0; TAG_LEN_MAX + 4];
        config.iter_mut().take(TAG_LEN_MAX).zip(tag.bytes()).for_each(|(to, from)| *to = from);
        config[TAG_LEN_MAX..].copy_from_slice(&1_u32.to_le_bytes());
        Self { server, control, gone, config, metrics }
    }

    /// Does what it was told since it last looked. It never waits for that.
    fn told(&mut self) {
        let mut word = [0];
        match self.control.read(&mut word) {
            Ok(1) if word[0] == END => {
                self.server.end();
                // Who does not wait for the answer does not miss it.
                let _ = self.control.write(&word);
            }
            Ok(1) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => {
                self.server.finish();
                (self.gone)();
            }
        }
    }
}

impl Device for Fs {
    fn queues(&self) -> usize {
        QUEUES
    }

    fn features(&self) -> u64 {
        0
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn transport(&self) -> Arc<TransportMetrics> {
        self.metrics.transport.clone()
    }

    fn queue_event(&mut self, index: usize, io: &mut Io<'_, '_>) {
        if let Some(ring) = io.rings.get_mut(index) {
            ring.serve(io.mem, |chain| {
                // What the guest has put into the ring waits for nobody, so an end comes between.
                self.told();
                let mut message = Message::new(chain);
                self.server.serve(&mut message);
                message.written() as u32
            });
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        // Without it nobody could end access, so nothing is served.
        if ops.add(Events::with_data(&self.control, CONTROL, EventSet::IN)).is_err() {
            (self.gone)();
        }
    }

    fn host_event(&mut self, token: u32, _: EventSet, _: Option<&mut Io<'_, '_>>) {
        if token == CONTROL {
            self.told();
        }
    }

    fn disconnect(&mut self, _: &mut EventOps<'_>) {
        self.server.finish();
    }
}
