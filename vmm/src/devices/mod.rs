//! The devices of a `vm` cell: vhost-user back ends for the guest kernel's
//! virtio_uml driver, all on one thread.
//!
//! ```text
//! DeviceLoop::new(memory) -> add_block, add_console, add_vsock, add_rng -> run
//! guest kernel --connect--> one socket per device: messages, memory, queues
//! ```
//! The loop is handed everything it needs: bound sockets, open files, the cell's
//! memory file. It opens no path. Start reading at `DeviceLoop`, then
//! `transport::server`, then a device's `device.rs`.
//!
//! What a guest does wrong is counted and costs it that request, that queue or
//! that device; it never stops the loop or another device.

pub mod block;
pub mod console;
mod error;
pub mod fs;
pub mod metrics;
pub mod net;
pub mod rng;
mod sys;
#[cfg(test)]
mod tests;
mod transport;
pub mod vsock;

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_manager::{EventManager, MutEventSubscriber, RemoteEndpoint, SubscriberOps};

pub use block::{BlockConfig, BlockMetrics, Contents, Pages, Window, Windows};
pub use console::{ConsoleConfig, ConsoleMetrics};
pub use error::DeviceError;
pub use fs::{FsConfig, FsMetrics};
pub use metrics::Metrics;
pub use net::{Link, NetConfig, NetMetrics};
pub use rng::RngMetrics;
pub use vsock::{StreamName, Successor, VsockConfig, VsockHandle, VsockListener, VsockMetrics};

use transport::{CallKind, Device, MemoryFile, Server};

use crate::platform::PlatformKind;

type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// All devices of one cell, before they run.
pub struct DeviceLoop {
    manager: EventManager<Subscriber>,
    memory: MemoryFile,
    calls: CallKind,
    stopped: Arc<AtomicBool>,
}

/// Ends a running [`DeviceLoop`]; may be cloned and used from any thread.
#[derive(Clone)]
pub struct DeviceStop {
    stopped: Arc<AtomicBool>,
    endpoint: RemoteEndpoint<Subscriber>,
}

impl DeviceStop {
    /// Makes [`DeviceLoop::run`] return soon; may be called at any time.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Only a loop that is gone already cannot be woken.
        let _ = self.endpoint.kick();
    }
}

impl DeviceLoop {
    /// A loop without devices for a cell whose memory is `memory`.
    ///
    /// # Errors
    /// [`DeviceError::MemoryNotSealed`] unless `memory` is a memfd sealed with
    /// `F_SEAL_SHRINK`: a guest that could shrink it would kill the loop.
    pub fn new(memory: &File) -> Result<Self, DeviceError> {
        Self::with(memory, CallKind::Stream)
    }

    /// The same for a machine of KVM ([`crate::kvm`]), which devices interrupt by events.
    ///
    /// # Errors
    /// As of [`DeviceLoop::new`].
    pub fn for_machine(memory: &File) -> Result<Self, DeviceError> {
        Self::with(memory, CallKind::Event)
    }

    /// The one or the other.
    ///
    /// # Errors
    /// As of [`DeviceLoop::new`].
    pub fn for_guest_of(platform: PlatformKind, memory: &File) -> Result<Self, DeviceError> {
        match platform {
            PlatformKind::Para => Self::new(memory),
            PlatformKind::Kvm => Self::for_machine(memory),
        }
    }

    fn with(memory: &File, calls: CallKind) -> Result<Self, DeviceError> {
        let memory = MemoryFile::new(memory)?;
        Ok(Self { manager: EventManager::new()?, memory, calls, stopped: Arc::default() })
    }

    /// Adds a disk behind `listener`.
    pub fn add_block(
        &mut self,
        listener: UnixListener,
        config: BlockConfig,
    ) -> Result<Arc<BlockMetrics>, DeviceError> {
        let metrics = Arc::<BlockMetrics>::default();
        self.add(listener, block::Block::new(config, metrics.clone())?)?;
        Ok(metrics)
    }

    /// Adds a console behind `listener`.
    pub fn add_console(
        &mut self,
        listener: UnixListener,
        config: ConsoleConfig,
    ) -> Result<Arc<ConsoleMetrics>, DeviceError> {
        let metrics = Arc::<ConsoleMetrics>::default();
        self.add(listener, console::Console::new(config, metrics.clone()))?;
        Ok(metrics)
    }

    /// Adds entropy behind `listener`.
    pub fn add_rng(&mut self, listener: UnixListener) -> Result<Arc<RngMetrics>, DeviceError> {
        let metrics = Arc::<RngMetrics>::default();
        self.add(listener, rng::Rng::new(metrics.clone()))?;
        Ok(metrics)
    }

    /// Adds a network interface behind `listener`.
    pub fn add_net(
        &mut self,
        listener: UnixListener,
        config: NetConfig,
    ) -> Result<Arc<NetMetrics>, DeviceError> {
        let metrics = Arc::<NetMetrics>::default();
        self.add(listener, net::Net::new(config, metrics.clone()))?;
        Ok(metrics)
    }

    /// Adds a folder behind `listener`.
    pub fn add_fs(
        &mut self,
        listener: UnixListener,
        config: FsConfig,
    ) -> Result<Arc<FsMetrics>, DeviceError> {
        let metrics = Arc::<FsMetrics>::default();
        self.add(listener, fs::Fs::new(config, metrics.clone()))?;
        Ok(metrics)
    }

    /// Adds vsock behind `listener`; the handle opens streams into the guest.
    pub fn add_vsock(
        &mut self,
        listener: UnixListener,
        config: VsockConfig,
    ) -> Result<(VsockHandle, Arc<VsockMetrics>), DeviceError> {
        let metrics = Arc::<VsockMetrics>::default();
        let (device, handle) = vsock::Vsock::new(config, metrics.clone())?;
        self.add(listener, device)?;
        Ok((handle, metrics))
    }

    fn add(&mut self, listener: UnixListener, device: impl Device) -> Result<(), DeviceError> {
        let server = Server::new(listener, device, self.memory, self.calls)?;
        self.manager.add_subscriber(Box::new(server));
        Ok(())
    }

    /// What ends [`Self::run`].
    pub fn stop_handle(&self) -> DeviceStop {
        DeviceStop { stopped: self.stopped.clone(), endpoint: self.manager.remote_endpoint() }
    }

    /// Serves the guest until [`DeviceStop::stop`]; give it a thread of its own.
    ///
    /// # Errors
    /// [`DeviceError::Loop`] when epoll itself fails.
    pub fn run(mut self) -> Result<(), DeviceError> {
        while !self.stopped.load(Ordering::Acquire) {
            match self.manager.run() {
                Ok(_) => {}
                Err(event_manager::Error::Epoll(error)) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
