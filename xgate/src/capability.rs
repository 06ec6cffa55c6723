//! One capability: what it is to, and what it covers.

use crate::{Endpoint, Handle, Kind, Live, NamePattern, NetworkName, PortRange, Protocol, Rights};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// How much of a resource may be used. The unit belongs to the kind: bytes for memory and
/// disk, vCPUs for cpu, a count for processes and spawn, nanoseconds for time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quota(pub u64);

impl Quota {
    /// For kinds that are not counted.
    pub const UNCOUNTED: Quota = Quota(u64::MAX);
}

/// Which part of its kind a capability covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of it: the kind has no parts.
    Whole,
    /// A tree of files.
    Folder(FolderScope),
    /// One file of the host.
    File(PathBuf),
    /// Peers and ports.
    Network(NetworkScope),
    /// Share of the processors against other cells, 1 to 10,000 (cgroup v2 `cpu.weight`).
    Weight(u32),
    /// Named things of the kind, such as devices. The empty set covers nothing.
    Names(BTreeSet<String>),
}

impl Scope {
    /// Whether everything `other` covers is covered by this scope.
    #[must_use]
    pub fn contains(&self, other: &Scope) -> bool {
        match (self, other) {
            (Self::Whole, Self::Whole) => true,
            (Self::Folder(own), Self::Folder(other)) => own.contains(other),
            (Self::File(own), Self::File(other)) => own == other,
            (Self::Network(own), Self::Network(other)) => own.contains(other),
            (Self::Weight(own), Self::Weight(other)) => own >= other,
            (Self::Names(own), Self::Names(other)) => own.is_superset(other),
            _ => false,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("all"),
            Self::Folder(folder) => {
                write!(f, "{} at {}", folder.host.display(), folder.guest.display())
            }
            Self::File(file) => write!(f, "{}", file.display()),
            Self::Network(network) => write!(f, "{network}"),
            Self::Weight(weight) => write!(f, "weight {weight}"),
            Self::Names(names) => write!(f, "{}", join(names)),
        }
    }
}

/// A folder of the host and where it is shown. Both paths are absolute and without `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderScope {
    /// The folder on the host.
    pub host: PathBuf,
    /// Where the guest finds it.
    pub guest: PathBuf,
}

impl FolderScope {
    /// Whether `other`'s host folder is this one or lies below it. Where the guest finds it
    /// gives no authority and may change.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        is_plain(&other.host) && other.host.starts_with(&self.host)
    }
}

/// Whether a path is absolute and has no `.` or `..` left.
pub(crate) fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

/// Peers to connect to, ports to listen on, names to resolve. Empty lists cover nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkScope {
    /// Peers that may be dialled.
    pub connect: Vec<Endpoint>,
    /// Ports that may be listened on.
    pub listen: Vec<PortRange>,
    /// Names that may be resolved to their addresses. A name to connect to needs no entry here.
    pub resolve: Vec<NamePattern>,
    /// Networks between cells that it may be in: there it reaches the others, and they reach it.
    pub join: Vec<NetworkName>,
    /// Connections at once, of all protocols; `None` leaves it to the cell.
    pub connections_max: Option<u32>,
    /// Bytes a second, each way; `None` is no limit.
    pub rate_bytes: Option<u64>,
}

impl NetworkScope {
    /// Whether it covers anything, beside saying how much of it.
    #[must_use]
    pub fn grants_anything(&self) -> bool {
        let Self { connect, listen, resolve, join, connections_max: _, rate_bytes: _ } = self;
        !(connect.is_empty() && listen.is_empty() && resolve.is_empty() && join.is_empty())
    }

    /// Whether each rule of `other` lies within one rule of this scope, and its limits too.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        self.lists_contain(other)
            && within(self.connections_max, other.connections_max)
            && within(self.rate_bytes, other.rate_bytes)
    }

    /// The same without the limits.
    pub(crate) fn lists_contain(&self, other: &Self) -> bool {
        let dial = |rule: &Endpoint| self.connect.iter().any(|own| own.contains(rule));
        let port = |rule: &PortRange| self.listen.iter().any(|own| own.contains(rule));
        let name = |rule: &NamePattern| self.resolve.iter().any(|own| own.contains(rule));
        other.connect.iter().all(dial)
            && other.listen.iter().all(port)
            && other.resolve.iter().all(name)
            && other.join.iter().all(|network| self.join.contains(network))
    }

    /// The rights that the lists that are not empty give.
    #[must_use]
    pub fn rights(&self) -> Rights {
        let mut rights = Rights::empty();
        rights.set(Rights::CONNECT, !self.connect.is_empty());
        rights.set(Rights::LISTEN, !self.listen.is_empty());
        rights.set(Rights::RESOLVE, !self.resolve.is_empty());
        rights.set(Rights::JOIN, !self.join.is_empty());
        rights
    }
}

impl fmt::Display for NetworkScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lists = [
            ("connect", join(&self.connect)),
            ("listen", join(&self.listen)),
            ("resolve", join(&self.resolve)),
            ("join", join(&self.join)),
        ];
        let lists = lists.iter().filter(|(_, list)| !list.is_empty());
        let text: Vec<String> = lists.map(|(verb, list)| format!("{verb} {list}")).collect();
        f.write_str(if text.is_empty() { "nothing" } else { "" })?;
        f.write_str(&text.join("; "))?;
        if let Some(max) = self.connections_max {
            write!(f, "; at most {max} connections")?;
        }
        if let Some(bytes) = self.rate_bytes {
            write!(f, "; at most {} a second", crate::format_bytes(bytes))?;
        }
        Ok(())
    }
}

/// Whether a limit is no looser than its parent's.
fn within<T: PartialOrd>(own: Option<T>, other: Option<T>) -> bool {
    own.is_none_or(|own| other.is_some_and(|other| other <= own))
}

fn join<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(", ")
}

/// What is asked of a capability.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// The capability as a whole.
    Whole,
    /// So much of the resource at once, in the kind's unit.
    Amount(u64),
    /// A path on the host, absolute and without `..`; symbolic links are the enforcer's duty.
    Path(&'a Path),
    /// A peer to talk to: a protocol, a name or an address, and a port (any for ICMP).
    Peer(Protocol, &'a str, u16),
    /// A port to listen on.
    Port(u16),
    /// A named thing: a host name to resolve, a network to join, a device.
    Name(&'a str),
}

/// A capability in a table.
#[derive(Clone, Debug)]
pub struct Capability {
    pub(crate) name: String,
    pub(crate) holder: String,
    pub(crate) kind: Kind,
    pub(crate) rights: Rights,
    pub(crate) scope: Scope,
    pub(crate) quota: Quota,
    pub(crate) parent: Option<Handle>,
    pub(crate) live: Live,
}

impl Capability {
    /// A capability that nothing was derived from yet, for [`Table::insert`](crate::Table::insert).
    #[must_use]
    pub fn new(
        name: &str,
        holder: &str,
        kind: Kind,
        rights: Rights,
        scope: Scope,
        quota: Quota,
    ) -> Self {
        let (name, holder) = (name.to_owned(), holder.to_owned());
        Self { name, holder, kind, rights, scope, quota, parent: None, live: Live::new() }
    }

    /// Name, unique per holder by convention: `memory`, `folder:/src`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Who holds it: a cell or an isolate.
    #[must_use]
    pub fn holder(&self) -> &str {
        &self.holder
    }

    /// What it is to.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What may be done with it.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.rights
    }

    /// Which part it covers.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// How much it covers.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// What it was derived from.
    #[must_use]
    pub fn parent(&self) -> Option<Handle> {
        self.parent
    }

    /// A token that goes off when this capability is revoked.
    #[must_use]
    pub fn live(&self) -> Live {
        self.live.clone()
    }

    /// The rule that `request` with `rights` breaks, if it breaks one.
    pub(crate) fn objection(&self, rights: Rights, request: &Request<'_>) -> Option<String> {
        let lacking = rights - self.rights;
        if !lacking.is_empty() {
            return Some(format!("it has the rights {}, not {lacking}", self.rights));
        }
        if self.covers(rights, request) { None } else { Some(self.outside(request)) }
    }

    fn covers(&self, rights: Rights, request: &Request<'_>) -> bool {
        match (request, &self.scope) {
            (Request::Whole, _) => true,
            (Request::Amount(amount), _) => *amount <= self.quota.0,
            (Request::Path(path), Scope::Folder(folder)) => {
                is_plain(path) && path.starts_with(&folder.host)
            }
            (Request::Peer(protocol, host, port), Scope::Network(network))
                if rights == Rights::CONNECT =>
            {
                network.connect.iter().any(|rule| {
                    rule.protocol == *protocol
                        && rule.host.permits(host)
                        && rule.ports.permits(*port)
                })
            }
            (Request::Port(port), Scope::Network(network)) if rights == Rights::LISTEN => {
                network.listen.iter().any(|rule| rule.permits(*port))
            }
            (Request::Name(name), Scope::Network(network)) if rights == Rights::RESOLVE => {
                network.resolve.iter().any(|rule| rule.permits(name))
            }
            (Request::Name(name), Scope::Network(network)) if rights == Rights::JOIN => {
                network.join.iter().any(|network| network.as_str() == *name)
            }
            (Request::Name(name), Scope::Names(names)) => names.contains(*name),
            _ => false,
        }
    }

    fn outside(&self, request: &Request<'_>) -> String {
        match request {
            Request::Whole => "it covers nothing".to_owned(),
            Request::Amount(amount) => {
                format!("its limit is {}, {amount} was asked for", self.quota.0)
            }
            Request::Path(path) => format!("{} is outside {}", path.display(), self.scope),
            Request::Peer(protocol, host, port) => {
                format!("{protocol} {host}:{port} is not in its list ({})", self.scope)
            }
            Request::Port(port) => format!("port {port} is not in its list ({})", self.scope),
            Request::Name(name) => format!("{name} is not in its list ({})", self.scope),
        }
    }
}
