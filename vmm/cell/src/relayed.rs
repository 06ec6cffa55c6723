//! Networks of isolates: relays on threads, and what host functions ask them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use exocell_exovisor::{self as exovisor, Done, NetworkError};
use exocell_network::Policy;
use exocell_network::audit::Entry;
use exocell_network::dialer::protocol::Failure;
use exocell_network::dialer::{Dialer, Hosts, sys};
use exocell_network::relay::{self, Parts, Relay, Requests};
use exocell_network::stack::Published;
use exocell_xgate::{CapabilitySet, Protocol};

use crate::CellError;
use crate::network::{Log, WAITING_MAX, Waiting};
use crate::supervisor::thread;
use exocell_images::private;

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
    written: Receiver<Entry>,
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
        let (entries, written) = sync_channel(WAITING_MAX);
        let audit = Box::new(Waiting::new(entries));
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

/// The network that a table grants to modules of this process, which dials itself: for a service,
/// whose process is in the host's network. `None` where nothing of it is granted. It lives as
/// long as somebody holds it; what it decides is written into `directory`.
///
/// # Errors
/// The host's, where there are no more descriptors or threads.
pub fn of_this_process(
    caps: &CapabilitySet,
    directory: &Path,
) -> Result<Option<Arc<dyn exovisor::Network>>, CellError> {
    let Some(scope) = caps.network().filter(|scope| scope.grants_anything()) else {
        return Ok(None);
    };
    let failed = |error: io::Error| {
        CellError::host(format!("cannot make a network for {}", directory.display()))(error)
    };
    private::folder(directory).map_err(failed)?;
    let (channel, theirs) = sys::channel().map_err(failed)?;
    let policy = Policy::new(scope.clone());
    let dialer = Dialer::new(theirs, policy.clone(), Hosts::of_host());
    // Without a dialer, connections are refused.
    thread("dialer", move || drop(dialer.run()))?;
    let relaying = Relaying::new(policy, channel, Vec::new(), Log::within(directory))?;
    let network = relaying.network();
    relaying.start()?;
    Ok(Some(network))
}
