//! The process of a network's switch: it lets members in by a socket, and has the switch itself in
//! a jail.
//!
//! ```text
//! the first that joins ──> this process (holds ROOT/switches/NAME/lock) ──> jailed: the switch
//!                            └── cells that were in it when the one before was killed: in again
//! ```
//! It ends when the network has had no member for a few seconds.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use exocell_images::private;
use exocell_network::switch::{Join, Member, Port, Settings, Switch};
use exocell_vmm::jail::ThreadClass;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, Task};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};

use crate::control::{Client, ControlReply, ControlRequest};
use crate::launch::Request;
use crate::networks::{Attachment, EARLY_SOCKET, LOCK, Network, Networks, READY, SOCKET};
use crate::record::{Record, State};
use crate::{CellError, CellSpec, Layout};

/// The switch itself.
pub(crate) const SWITCH: Stage = Stage { name: "switch", class: ThreadClass::Switch, work: switch };
/// What it may take of memory, in bytes: what waits for members, and the members themselves.
const SWITCH_BYTES: u64 = 512 << 20;
/// How long the end of the switch before is waited for.
const END_MAX: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);
/// How long the members of a switch that was killed are waited for.
const REVIVAL_MAX: Duration = Duration::from_secs(4);
/// How long a cell may take from joining to its record, or from that's removal to leaving.
const SETTLED_MAX: Duration = Duration::from_millis(500);

fn switch(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let settings: Settings = task.request()?;
    let listener = UnixListener::from(task.take(0)?);
    Switch::new(settings, listener).run()?;
    Ok(Vec::new())
}

/// The body of the process of a switch: serves the network `name` until nobody is in it. Says a
/// byte on standard output once members can come. The caller must have one thread.
///
/// # Errors
/// There is no such network; the host's.
pub fn serve(layout: &Layout, name: &str) -> Result<(), CellError> {
    Request::begin().close_foreign();
    // The leader of a group, as a shell may make it, has a session already.
    let _ = nix::unistd::setsid();
    let failed = || CellError::host(format!("cannot serve the network {name}"));
    std::env::set_current_dir("/").map_err(failed())?;
    let networks = Networks::of(layout);
    let network = networks.find(name)?;
    let path = networks.directory(&network.name);
    let lock = private::options().write(true).create(true).truncate(false).open(path.join(LOCK));
    let lock = lock.map_err(failed())?;
    if !takes(&lock).map_err(failed())? {
        // Another process serves it.
        return ready().map_err(failed());
    }
    let directory = File::open(&path).map_err(failed())?;
    let listener = listen_in(&directory).map_err(failed())?;
    let open_files = Limits { open_files: u64::MAX, ..Limits::of_memory(SWITCH_BYTES) };
    let settings = Settings { addresses: network.addresses };
    let running = Order::new(SWITCH.name, vec![Given::file(&listener)], open_files)
        .start(&settings)
        .map_err(|error| CellError::Usage(error.to_string()))?;
    drop(listener);
    let _ = nix::sys::prctl::set_name(c"exocell-network");
    // Members of the switch before have their addresses before anyone else can ask for one.
    revive(layout, &networks, &network);
    let sockets = [EARLY_SOCKET, SOCKET].map(|name| socket_in(&directory, name));
    fs::rename(&sockets[0], &sockets[1]).map_err(failed())?;
    ready().map_err(failed())?;
    let how = running.wait();
    // By its directory: another network may have been made at the same place.
    let _ = fs::remove_file(&sockets[1]);
    drop(lock);
    match how.ends_with("status 0") {
        true => Ok(()),
        false => Err(failed()(io::Error::other(how))),
    }
}

fn ready() -> io::Result<()> {
    io::stdout().write_all(&[READY]).and_then(|()| io::stdout().flush())?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    Ok(nix::unistd::dup2_stdout(&null)?)
}

/// Whether this process is the network's now; one that ends has it for a moment more.
fn takes(lock: &File) -> io::Result<bool> {
    let until = Instant::now() + END_MAX;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(true),
            Err(fs::TryLockError::Error(error)) => return Err(error),
            Err(fs::TryLockError::WouldBlock) if Instant::now() > until => return Ok(false),
            Err(fs::TryLockError::WouldBlock) => std::thread::sleep(LOOK),
        }
    }
}

/// A socket's path is at most 107 bytes; through the directory's descriptor it always fits.
fn socket_in(directory: &File, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())
}

fn listen_in(directory: &File) -> io::Result<OwnedFd> {
    let short = socket_in(directory, EARLY_SOCKET);
    match fs::remove_file(&short) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(short.as_str())?)?;
    listen(&listener, Backlog::new(128)?)?;
    Ok(listener)
}

/// Has running cells in again that were members of a switch that was killed, each at its address.
fn revive(layout: &Layout, networks: &Networks, network: &Network) {
    let Ok(records) = Record::all(layout) else { return };
    let until = Instant::now() + REVIVAL_MAX;
    for (record, spec, status) in records {
        let Some(own) = spec.networks.iter().find(|own| own.network == network.name) else {
            continue;
        };
        if status.state != State::Running || Instant::now() > until {
            continue;
        }
        if let Some(address) = address_lost(&record, &network.name) {
            let wanted = Join { address: Some(address), ..own.join(&spec.id, &spec.name) };
            // One that cannot be in again is as it was: without its network.
            if let Ok(port) = networks.join_early(network, wanted) {
                let _ = hand_over(network, &record, own.clone(), port);
            }
        }
    }
}

/// The address that the cell had in the network, where its supervisor says that it has no way there
/// any more.
fn address_lost(record: &Record, network: &str) -> Option<Ipv4Addr> {
    let asked = Client::connect(record).and_then(|client| client.ask(&ControlRequest::Networks));
    match asked {
        Ok(ControlReply::Networks { lost }) => lost.get(network).copied(),
        _ => None,
    }
}

/// Gives a running cell's supervisor its end in the network.
fn hand_over(
    network: &Network,
    record: &Record,
    own: Attachment,
    port: Port,
) -> Result<(), CellError> {
    let (addresses, address) = (network.addresses, port.address());
    let own = Attachment { network: network.name.clone(), ..own };
    let request = ControlRequest::Join { own, addresses, address };
    Client::connect(record)?.pass(&request, &[port.into_socket()])
}

/// The cells that are in the network now. One that has ended is none of them, though its supervisor
/// may not have gone yet.
///
/// # Errors
/// Its switch does not answer.
pub fn members(layout: &Layout, network: &Network) -> Result<Vec<Member>, CellError> {
    let until = Instant::now() + SETTLED_MAX;
    loop {
        let mut members = Networks::of(layout).connected(network)?;
        let mut is_settled = true;
        members.retain(|member| match Record::at(layout, &member.cell).look(layout) {
            Ok(Some((_, status))) => status.state != State::Exited,
            // It is about to begin, or has just been removed.
            Ok(None) => {
                is_settled = false;
                true
            }
            Err(_) => true,
        });
        if is_settled || Instant::now() > until {
            return Ok(members);
        }
        std::thread::sleep(LOOK);
    }
}

/// Removes a network that no cell is in.
///
/// # Errors
/// One is; the host's.
pub fn remove(layout: &Layout, network: &Network) -> Result<(), CellError> {
    match members(layout, network)?.len() {
        0 => Networks::of(layout).remove(network),
        count => Err(CellError::Usage(format!(
            "network {} has active endpoints: {count} cells are in it; end them, or exocell network \
             disconnect",
            network.name
        ))),
    }
}

/// Puts a running cell into one more network, as `own` says.
///
/// # Errors
/// It has no network device, or is stopped; its switch refuses it; the host's.
pub fn connect(
    layout: &Layout,
    record: &Record,
    spec: &CellSpec,
    own: Attachment,
) -> Result<(), CellError> {
    let networks = Networks::of(layout);
    let network = networks.find(&own.network)?;
    if spec.networks.iter().any(|other| other.network == network.name) {
        return Err(CellError::Usage(format!(
            "endpoint with name {} already exists in network {}",
            spec.name, network.name
        )));
    }
    let port = networks.join(&network, &own.join(&spec.id, &spec.name))?;
    hand_over(&network, record, own, port)
}

/// Gives a cell another name; who shares a network with it calls it by that from now on.
///
/// # Errors
/// The name is none, or another's; the host's.
pub fn rename(layout: &Layout, id: &str, name: &str) -> Result<(), CellError> {
    Record::rename(layout, id, name)?;
    let (record, spec, status) = Record::find(layout, id)?;
    if status.state == State::Exited {
        return Ok(());
    }
    let networks = Networks::of(layout);
    spec.networks
        .iter()
        .try_for_each(|own| networks.rename(&own.network, own.join(&record.id, &spec.name)))
}
