//! What an isolate's host functions ask its relay for, from any thread.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use exocell_xgate::Protocol;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Connection;
use crate::dialer::protocol::Failure;
use crate::policy::Policy;

/// Takes what comes of an order, on the relay's thread: it must not wait.
pub type Done<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;
/// Takes the callers of a port, on the relay's thread: it must not wait.
pub type Arrived = Box<dyn Fn(Connection) + Send>;

pub(super) enum Order {
    Connect { protocol: Protocol, peer: SocketAddr, done: Done<Connection> },
    Lookup { name: String, done: Done<Vec<IpAddr>> },
    Listen { port: u16, arrived: Arrived, done: Done<()> },
    Rules(Policy),
    End,
}

/// The relay's end.
pub struct Orders {
    pub(super) waiting: Receiver<Order>,
    event: Arc<EventFd>,
}

/// The end of the host functions; the relay ends with the last one.
#[derive(Clone)]
pub struct Requests(Arc<Sending>);

struct Sending {
    orders: Sender<Order>,
    event: Arc<EventFd>,
}

/// Both ends.
///
/// # Errors
/// The host's, where there are no more descriptors.
pub fn orders() -> std::io::Result<(Requests, Orders)> {
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let event = Arc::new(EventFd::from_flags(flags)?);
    let (orders, waiting) = channel();
    let requests = Requests(Arc::new(Sending { orders, event: event.clone() }));
    Ok((requests, Orders { waiting, event }))
}

impl Orders {
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }
}

impl Sending {
    fn say(&self, order: Order) {
        // What a relay that is gone is asked for is dropped, and whoever waits hears that.
        if self.orders.send(order).is_ok() {
            let _ = self.event.write(1);
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.say(Order::End);
    }
}

impl Requests {
    /// Connects to `peer`, which may be an address that stands for a name.
    pub fn connect(&self, protocol: Protocol, peer: SocketAddr, done: Done<Connection>) {
        self.0.say(Order::Connect { protocol, peer, done });
    }

    /// The addresses of `name`, or those that stand for it.
    pub fn lookup(&self, name: String, done: Done<Vec<IpAddr>>) {
        self.0.say(Order::Lookup { name, done });
    }

    /// Takes the callers of a published port, from now on.
    pub fn listen(&self, port: u16, arrived: Arrived, done: Done<()>) {
        self.0.say(Order::Listen { port, arrived, done });
    }

    /// Puts `policy` in the place of the one before; what is open and not permitted is cut.
    pub fn change(&self, policy: Policy) {
        self.0.say(Order::Rules(policy));
    }
}
