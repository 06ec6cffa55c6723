//! What is written down of each decision: one JSON object a line.

use std::net::SocketAddr;

use exocell_xgate::Protocol;
use serde::Serialize;

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    Allowed,
    /// By the policy.
    Denied,
    /// Permitted, but the peer or the host did not play along.
    Failed,
    /// A flow that was open is over.
    Closed,
    /// A flow that was open is cut: it is no longer permitted.
    Cut,
}

/// One decision.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Milliseconds since the epoch.
    pub time_ms: u64,
    /// `connect`, `listen`, `name`, `packet` or `secret`, whose name is the reason.
    pub event: &'static str,
    pub decision: Decision,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// The name, or the address, that was asked for.
    pub target: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Where it really led.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<SocketAddr>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Bytes from the guest and to it, of a flow that is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<(u64, u64)>,
}

impl Entry {
    /// An entry of now.
    pub fn new(event: &'static str, decision: Decision, target: impl ToString) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            time_ms: now.map_or(0, |since| since.as_millis() as u64),
            event,
            decision,
            protocol: None,
            target: target.to_string(),
            port: None,
            peer: None,
            reason: String::new(),
            bytes: None,
        }
    }

    pub fn by(mut self, protocol: Protocol, port: u16) -> Self {
        self.protocol = Some(protocol.to_string());
        self.port = (protocol != Protocol::Icmp).then_some(port);
        self
    }

    pub fn because(mut self, reason: impl ToString) -> Self {
        self.reason = reason.to_string();
        self
    }

    pub fn to(mut self, peer: SocketAddr) -> Self {
        self.peer = Some(peer);
        self
    }
}

/// Takes entries; called on the network thread, so it must not wait.
pub trait Audit: Send {
    fn record(&mut self, entry: Entry);
}

impl<F: FnMut(Entry) + Send> Audit for F {
    fn record(&mut self, entry: Entry) {
        self(entry);
    }
}
