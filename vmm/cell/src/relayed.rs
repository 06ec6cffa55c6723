//! Networks of isolates: relays on threads, and what host functions ask them.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use exocell_exovisor::{self as exovisor, Done, NetworkError};
use exocell_network::Policy;
use exocell_network::dialer::protocol::Failure;
use exocell_network::dialer::{Dialer, Hosts, sys};
use exocell_network::relay::{self, Parts, Relay, Requests};
use exocell_network::stack::Published;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Running, Stage, Task};
use exocell_vmm::jail::{HostNetwork, ThreadClass};
use exocell_xgate::{CapabilitySet, NetworkScope, Protocol};
use serde::{Deserialize, Serialize};

use crate::CellError;
use crate::network::{Log, Written, log};
use crate::supervisor::thread;

/// What a dialer of its own process may have open, and use of memory, in bytes.
const DIALER_FILES: u64 = 4096;
const DIALER_BYTES: u64 = 256 << 20;

/// What an isolate's sockets reach others through.
struct Relayed(Requests);

fn error(failure: Failure) -> NetworkError {
    match failure {
        Failure::Denied => NetworkError::Denied,
        Failure::Refused => NetworkError::Refused,
        Failure::Unreachable | Failure::NotOffered => NetworkError::Unreachable,
        Failure::Busy => NetworkError::Busy,
    }
}

fn connection(connection: relay::Connection) -> exovisor::Connection {
    let relay::Connection { socket, peer, was_reset } = connection;
    exovisor::Connection { socket, peer, was_reset }
}

impl exovisor::Network for Relayed {
    fn look_up(&self, name: &str, done: Done<Vec<IpAddr>>) {
        self.0.lookup(name.to_owned(), Box::new(move |found| done(found.map_err(error))));
    }

    fn connect(&self, protocol: Protocol, peer: SocketAddr, done: Done<exovisor::Connection>) {
        let done = Box::new(move |made: Result<_, _>| done(made.map(connection).map_err(error)));
        self.0.connect(protocol, peer, done);
    }

    fn listen(&self, port: u16, arrived: exovisor::Arrived, done: Done<()>) {
        let arrived = Box::new(move |caller| arrived(connection(caller)));
        self.0.listen(port, arrived, Box::new(move |result| done(result.map_err(error))));
    }
}

/// A relay that is made and does not run yet.
pub(crate) struct Relaying {
    requests: Requests,
    relay: Relay,
    log: Log,
    written: Written,
}

impl Relaying {
    /// Over `channel` to a dialer; what it decides goes into `log`.
    pub fn new(
        policy: Policy,
        channel: OwnedFd,
        published: Vec<Published>,
        log: Log,
    ) -> Result<Self, CellError> {
        let (requests, orders) =
            relay::orders().map_err(CellError::host("cannot make the isolate's network"))?;
        let (entries, written) = log::waiting();
        let audit = Box::new(entries);
        let relay = Relay::new(Parts { policy, channel, published, audit, orders });
        Ok(Self { requests, relay, log, written })
    }

    pub fn requests(&self) -> Requests {
        self.requests.clone()
    }

    pub fn network(&self) -> Arc<dyn exovisor::Network> {
        Arc::new(Relayed(self.requests()))
    }

    /// Runs until nobody else has requests. Its threads end then, and what was decided is written
    /// down.
    pub fn start(self) -> Result<Vec<JoinHandle<()>>, CellError> {
        let Self { relay, log, written, .. } = self;
        Ok(vec![
            // Without a relay, sockets end and requests are refused.
            thread("network", move || drop(relay.run()))?,
            thread("audit", move || log.write(&written))?,
        ])
    }
}

/// The process that dials for the modules of a service's worker. It has the host's network and
/// nothing else, and holds each peer against the table itself.
pub const DIALER: Stage = Stage { name: "dialer", class: ThreadClass::Dialer, work: dial };

#[derive(Serialize, Deserialize)]
struct Dialing {
    /// The capability table, as JSON.
    caps: String,
    /// The texts of the host's files.
    hosts: String,
    resolv_conf: String,
}

/// Starts a dialer for what `caps` grants of the network; it lives until what is given here is
/// dropped. The other end of the channel is a worker's ([`of_channel`]). `None` where nothing is
/// granted.
///
/// # Errors
/// [`CellError`] if it cannot be started.
pub fn start_dialer(caps: &CapabilitySet) -> Result<Option<(Running, OwnedFd)>, CellError> {
    if !caps.network().is_some_and(NetworkScope::grants_anything) {
        return Ok(None);
    }
    let (channel, theirs) = sys::channel().map_err(CellError::host("cannot make a channel"))?;
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let request = Dialing {
        caps: caps.to_json(),
        hosts: read("/etc/hosts"),
        resolv_conf: read("/etc/resolv.conf"),
    };
    let limits = Limits { open_files: DIALER_FILES, ..Limits::of_memory(DIALER_BYTES) };
    let order = Order::new(DIALER.name, vec![Given::file(&theirs)], limits);
    // Echoes are a matter of the group that it has (ping_group_range).
    let order = Order { network: HostNetwork::Kept, keeps_id: true, ..order };
    let running = order.start(&request);
    let running = running.map_err(|error| CellError::Module(error.to_string()))?;
    Ok(Some((running, channel)))
}

fn dial(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let Dialing { caps, hosts, resolv_conf } = task.request()?;
    let caps = CapabilitySet::parse(&caps, Path::new("/"))
        .map_err(|error| Fault::Jail(error.to_string()))?;
    let policy = Policy::new(caps.network().cloned().unwrap_or_default());
    let dialer = Dialer::new(task.take(0)?, policy, Hosts::parse(&hosts, &resolv_conf));
    Ok(dialer.run().map(|()| Vec::new())?)
}

/// The network that `caps` grants to a module of this process, which is a service's worker, over
/// `channel` to its dialer. It lives as long as somebody holds it; what it decides is written into
/// `directory`.
///
/// # Errors
/// The host's, where there are no more descriptors or threads.
pub fn of_channel(
    caps: &CapabilitySet,
    channel: OwnedFd,
    directory: &Path,
) -> Result<Arc<dyn exovisor::Network>, CellError> {
    let policy = Policy::new(caps.network().cloned().unwrap_or_default());
    let relaying = Relaying::new(policy, channel, Vec::new(), Log::within(directory))?;
    let network = relaying.network();
    relaying.start()?;
    Ok(network)
}
