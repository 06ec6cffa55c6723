//! A guest's devices while it runs: who serves which.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use exocell_agent::CONTROL_PORT;
use exocell_network::link;
use exocell_network::plug::PlugLink;
use exocell_vmm::devices::{
    BlockMetrics, ConsoleConfig, DeviceError, DeviceLoop, Metrics, NetConfig, VsockConfig,
    VsockHandle, VsockListener, Windows,
};
use exocell_vmm::jail::{self, ThreadClass};
use exocell_vmm::platform::PlatformKind;

use super::console::ConsoleLog;
use super::thread;
use crate::folder::Access;
use crate::plan::device::{self, Device};
use crate::{CellError, network};

/// What each device counts, by the device's name.
pub(super) type Counted = Vec<(String, Arc<dyn Metrics>)>;

/// All counts as they are now.
pub(super) fn told(counted: &Counted) -> BTreeMap<String, BTreeMap<String, u64>> {
    let of = |device: &Arc<dyn Metrics>| {
        let mut counts = BTreeMap::new();
        device.each(&mut |name, count| {
            counts.insert(name.to_owned(), count);
        });
        counts
    };
    counted.iter().map(|(name, device)| (name.clone(), of(device))).collect()
}

/// The devices of a guest on their thread.
pub(super) struct Devices {
    pub vsock: VsockHandle,
    pub blocks: Vec<Arc<BlockMetrics>>,
    pub counted: Counted,
    /// The private overlay's file.
    pub disk: Option<File>,
    /// Behind the image's disk.
    pub windows: Option<Windows>,
    /// For the network's own thread.
    pub network: Option<UnixListener>,
    pub folders: Vec<Access>,
}

fn failed(error: DeviceError) -> CellError {
    CellError::Guest(format!("its devices cannot start: {error}"))
}

impl Devices {
    /// Serves `planned`, each on its socket, to the guest of `platform` whose memory is `memory`.
    /// Its init says hello by a stream, one of at most `streams_max`.
    pub fn start(
        planned: Vec<(Device, UnixListener)>,
        (platform, memory): (PlatformKind, &File),
        console: ConsoleLog,
        hello: Sender<UnixStream>,
        streams_max: usize,
    ) -> Result<Self, CellError> {
        let greeted: VsockListener = Box::new(move |stream| {
            let _ = hello.send(stream);
        });
        let (mut console, mut greeted) = (Some(console), Some(greeted));
        let mut device_loop = DeviceLoop::for_guest_of(platform, memory).map_err(failed)?;
        let (mut blocks, mut folders, mut counted) = (Vec::new(), Vec::new(), Counted::new());
        let (mut vsock, mut network, mut disk, mut windows) = (None, None, None, None);
        for (device, listener) in planned {
            let name = device.name().to_owned();
            if let Some(file) = device::overlay(std::slice::from_ref(&device)) {
                disk = Some(file.try_clone().map_err(CellError::host("dup"))?);
            }
            let counts: Arc<dyn Metrics> = match device {
                Device::Block(config) => {
                    windows = windows.or_else(|| config.windows.clone());
                    let block = device_loop.add_block(listener, config).map_err(failed)?;
                    blocks.push(block.clone());
                    block
                }
                Device::Console => {
                    let Some(console) = console.take() else { continue };
                    let config = ConsoleConfig {
                        sink: Box::new(console),
                        // The log bounds itself, and wants what was said last.
                        output_bytes_max: u64::MAX,
                        input: None,
                    };
                    device_loop.add_console(listener, config).map_err(failed)?
                }
                Device::Entropy => device_loop.add_rng(listener).map_err(failed)?,
                Device::Vsock => {
                    let listeners = greeted.take().map(|greeted| (CONTROL_PORT, greeted));
                    let listeners = HashMap::from_iter(listeners);
                    let config = VsockConfig { listeners, connections_max: streams_max };
                    let (handle, counts) =
                        device_loop.add_vsock(listener, config).map_err(failed)?;
                    vsock = Some(handle);
                    counts
                }
                Device::Network => {
                    network = Some(listener);
                    continue;
                }
                Device::Folder(share) => {
                    folders.push(share.hand_over(&listener)?);
                    continue;
                }
            };
            counted.push((name, counts));
        }
        thread("devices", move || {
            if jail::restrict_calls(ThreadClass::Device).is_ok() {
                // Without its devices the guest ends, and that is reported.
                let _ = device_loop.run();
            }
        })?;
        let vsock = vsock.ok_or_else(|| CellError::Guest("it has no vsock device".to_owned()))?;
        Ok(Self { vsock, blocks, counted, disk, windows, network, folders })
    }
}

/// Starts the network device on a thread of its own: what a guest sends must
/// not hold its disks up.
pub(super) fn start_network(
    network: network::Network,
    listener: UnixListener,
    guest: (PlatformKind, &File),
) -> Result<(network::Control, network::Written, Arc<dyn Metrics>), CellError> {
    let (config, control, decisions) = network.link()?;
    Ok((control, decisions, serve_network(config, listener, guest)?))
}

/// The same for a device that is plugged into a network of the host's later.
pub(super) fn start_plug(
    link: PlugLink,
    listener: UnixListener,
    guest: (PlatformKind, &File),
) -> Result<Arc<dyn Metrics>, CellError> {
    let config = NetConfig { link: Box::new(link), mtu: link::MTU, leaves_checksums: false };
    serve_network(config, listener, guest)
}

fn serve_network(
    config: NetConfig,
    listener: UnixListener,
    (platform, memory): (PlatformKind, &File),
) -> Result<Arc<dyn Metrics>, CellError> {
    let failed =
        |error: DeviceError| CellError::Guest(format!("its network device cannot start: {error}"));
    let mut device_loop = DeviceLoop::for_guest_of(platform, memory).map_err(failed)?;
    let counted = device_loop.add_net(listener, config).map_err(failed)?;
    thread("network", move || {
        if jail::restrict_calls(ThreadClass::Network).is_ok() {
            // Without it the guest is offline, which it notices.
            let _ = device_loop.run();
        }
    })?;
    Ok(counted)
}
