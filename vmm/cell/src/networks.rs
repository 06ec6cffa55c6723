//! Networks between cells, as their operator makes them, and how a cell comes to be in one.
//!
//! ```text
//! ROOT/switches/NAME/network.json   what it is
//!                    switch.sock    its switch, as long as it has members (`switches`)
//!                    lock           held by the process of the switch
//! ```
//! A cell that starts joins before it exists: its plan holds the connection to the switch.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exocell_images::private;
use exocell_network::switch::{self, Addresses, Join, Member, Port, Reserved, Subnet};
use exocell_xgate::NetworkName;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde::{Deserialize, Serialize};

use crate::{CellError, Layout, logging, now_ms};

/// The verb of the command whose process has a network's switch.
pub const VERB: &str = "switch-network";
/// That of the command that makes one and ends.
pub const SPAWN_VERB: &str = "switch-network-apart";
/// What a switch's process says once it listens.
pub(crate) const READY: u8 = b's';

const FILE: &str = "network.json";
pub(crate) const SOCKET: &str = "switch.sock";
/// What the socket is called while the members of a switch that was killed come back.
pub(crate) const EARLY_SOCKET: &str = ".switch.sock";
pub(crate) const LOCK: &str = "lock";
/// Names that mean something else where a network is named.
const RESERVED: [&str; 4] = ["none", "bridge", "host", "default"];
/// Addresses that are no network's (IANA's registry): this host, the loopback, one link alone, the
/// link of cells.
const OTHERS: [(Ipv4Addr, u8); 4] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
];
/// The first of groups' addresses and of those that are set aside.
const GROUPS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 0);
/// Networks at once.
const NETWORKS_MAX: usize = 512;
/// Bytes of all labels and options of one.
const NOTES_BYTES_MAX: usize = 64 << 10;
/// Bytes of its file.
const FILE_BYTES_MAX: u64 = 512 << 10;
/// How long a switch is waited for that another process starts or ends.
const SWITCH_MAX: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// A network between cells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    pub version: u32,
    /// 256 random bits in hexadecimal.
    pub id: String,
    pub name: String,
    pub addresses: Addresses,
    /// Whether its members have no other way out, whatever their rules say.
    #[serde(default)]
    pub internal: bool,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What its maker noted of it beside; nothing acts on them.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
    /// Addresses that no cell gets, by what its maker calls them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reserved: BTreeMap<String, Ipv4Addr>,
    /// The cell that had it made, behind those that had that made; none of an operator's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made_by: Vec<String>,
    /// Milliseconds since the epoch.
    pub created_ms: u64,
}

/// A network that is wanted.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    pub name: String,
    pub subnet: Option<Subnet>,
    pub gateway: Option<Ipv4Addr>,
    pub range: Option<Subnet>,
    pub reserved: BTreeMap<String, Ipv4Addr>,
    pub internal: bool,
    pub labels: BTreeMap<String, String>,
    pub options: BTreeMap<String, String>,
    pub made_by: Vec<String>,
}

/// A cell's place in a network, as its spec has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    /// The network's name.
    pub network: String,
    /// What the others may call it there, beside its name and the first part of its id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// What it calls others there: a name of its own, and whose it stands for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub links: BTreeMap<String, String>,
    /// The address that it is to have; any without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Ipv4Addr>,
    /// What its client notes of it for a driver of its own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

impl Attachment {
    /// In `network`, and no more.
    #[must_use]
    pub fn plain(network: &str) -> Self {
        Self {
            network: network.to_owned(),
            aliases: Vec::new(),
            links: BTreeMap::new(),
            address: None,
            options: BTreeMap::new(),
        }
    }

    /// The cell's end in the network, that it has just joined.
    pub(crate) fn linked(&self, port: Port) -> Port {
        let lower = |(own, other): (&String, &String)| {
            (own.to_ascii_lowercase(), other.to_ascii_lowercase())
        };
        port.with_links(self.links.iter().map(lower).collect())
    }

    /// A member `id`, called `name`, of the network.
    #[must_use]
    pub fn join(&self, id: &str, name: &str) -> Join {
        let short = id.get(..12).unwrap_or(id);
        let mut names: Vec<String> = Vec::new();
        for own in [name, short].into_iter().chain(self.aliases.iter().map(String::as_str)) {
            let own = own.to_ascii_lowercase();
            if !own.is_empty() && !names.contains(&own) {
                names.push(own);
            }
        }
        Join { cell: id.to_owned(), names, address: self.address }
    }
}

/// All networks of a state root.
#[derive(Debug, Clone)]
pub struct Networks {
    root: PathBuf,
    state: PathBuf,
}

impl Networks {
    pub const VERSION: u32 = 1;

    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        Self { root: layout.switches(), state: layout.root().to_owned() }
    }

    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Makes one, with a subnet that no other has where none is named.
    ///
    /// # Errors
    /// The name is taken or is none; the subnet overlaps another's; the host's.
    pub fn create(&self, wanted: Wanted) -> Result<Network, CellError> {
        let name: NetworkName = wanted.name.parse().map_err(CellError::Usage)?;
        if RESERVED.contains(&name.as_str()) {
            return Err(CellError::Usage(format!(
                "{name} is what other things are called where networks are named; choose another \
                 name"
            )));
        }
        let notes = wanted.labels.iter().chain(&wanted.options);
        if notes.map(|(key, value)| key.len() + value.len()).sum::<usize>() > NOTES_BYTES_MAX {
            return Err(CellError::Usage(format!(
                "labels and options of a network have at most {NOTES_BYTES_MAX} bytes"
            )));
        }
        let failed = || CellError::host(format!("cannot make the network {name}"));
        private::folder(&self.root).map_err(failed())?;
        let lock = private::options().write(true).create(true).open(self.root.join(".lock"));
        let lock = lock.map_err(failed())?;
        lock.lock().map_err(failed())?;
        let others = self.all()?;
        if others.iter().any(|other| other.name == name.as_str()) {
            return Err(CellError::Usage(format!(
                "network with name {name} already exists; exocell network rm {name} removes it"
            )));
        }
        if others.len() >= NETWORKS_MAX {
            return Err(CellError::Usage(format!(
                "there are {NETWORKS_MAX} networks, which is the most; exocell network prune \
                 removes those that no cell uses"
            )));
        }
        let subnet = subnet(wanted.subnet, &others)?;
        let mut addresses =
            Addresses::new(subnet, wanted.gateway, wanted.range).map_err(CellError::Usage)?;
        let reserved: Vec<Ipv4Addr> = wanted.reserved.values().copied().collect();
        addresses.reserved = Reserved::of(&reserved).ok_or_else(|| {
            CellError::Usage(format!("at most {} addresses can be set aside", Reserved::MAX))
        })?;
        let network = Network {
            version: Self::VERSION,
            id: new_id().map_err(failed())?,
            name: name.to_string(),
            addresses,
            internal: wanted.internal,
            reserved: wanted.reserved,
            labels: wanted.labels,
            options: wanted.options,
            made_by: wanted.made_by,
            created_ms: now_ms(),
        };
        self.write(&network).map_err(failed())?;
        Ok(network)
    }

    /// All of it is there at once, or nothing.
    fn write(&self, network: &Network) -> io::Result<()> {
        let (path, draft) = (self.directory(&network.name), self.root.join(".new"));
        match fs::remove_dir_all(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => private::folder(&draft)?,
        }
        let mut file = private::create(draft.join(FILE))?;
        serde_json::to_writer(&mut file, network)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    }

    /// All of them, by name.
    ///
    /// # Errors
    /// The host's, or that the file of one is damaged.
    pub fn all(&self) -> Result<Vec<Network>, CellError> {
        let failed = CellError::host(format!("cannot read {}", self.root.display()));
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        let found = names.iter().map(|name| self.read(name));
        found.filter_map(Result::transpose).collect()
    }

    /// The network in directory `name`; `None` where there is none.
    fn read(&self, name: &str) -> Result<Option<Network>, CellError> {
        let path = self.directory(name).join(FILE);
        let damaged = |reason: String| {
            CellError::Usage(format!(
                "the network {name} is damaged ({}: {reason}); remove its folder and make it again",
                path.display()
            ))
        };
        let mut text = String::new();
        match File::open(&path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(damaged(error.to_string())),
            Ok(_) => {}
        }
        let network: Network =
            serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        match network.version {
            Self::VERSION => Ok(Some(network)),
            version => Err(damaged(format!("it has version {version}"))),
        }
    }

    /// The network that `key` names: its name, its id, or the beginning of one id alone.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub fn find(&self, key: &str) -> Result<Network, CellError> {
        let mut all = self.all()?;
        if let Some(at) = all.iter().position(|network| network.name == key || network.id == key) {
            return Ok(all.swap_remove(at));
        }
        all.retain(|network| !key.is_empty() && network.id.starts_with(key));
        match (all.pop(), all.is_empty()) {
            (Some(network), true) => Ok(network),
            (Some(_), false) => {
                Err(CellError::Usage(format!("{key} begins the ids of several networks")))
            }
            (None, _) => Err(CellError::Usage(format!(
                "network {key} not found (exocell network ls lists them)"
            ))),
        }
    }

    /// Removes a network, whoever is in it.
    pub(crate) fn remove(&self, network: &Network) -> Result<(), CellError> {
        let path = self.directory(&network.name);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(CellError::host(format!("cannot remove {}", path.display()))),
        }
    }

    /// Who is connected to the network's switch.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn connected(&self, network: &Network) -> Result<Vec<Member>, CellError> {
        match self.connect(&network.name) {
            Ok(socket) => match switch::list(&socket) {
                Err(error) if is_ending(&error) => Ok(Vec::new()),
                listed => listed.map_err(CellError::host(format!(
                    "cannot ask the switch of the network {}",
                    network.name
                ))),
            },
            Err(error) if is_absent(&error) => Ok(Vec::new()),
            Err(error) => {
                let what = format!("cannot reach the switch of the network {}", network.name);
                Err(CellError::host(what)(error))
            }
        }
    }

    /// Has the members of a network call a cell as `wanted` says from now on.
    ///
    /// # Errors
    /// The switch refuses it, or does not answer.
    pub(crate) fn rename(&self, network: &str, wanted: Join) -> Result<(), CellError> {
        match self
            .connect(network)
            .and_then(|socket| switch::rename(&socket, &wanted.cell, wanted.names))
        {
            // Nobody is in it.
            Err(error) if is_absent(&error) || is_ending(&error) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(CellError::Usage(format!("network {network}: {error}")))
            }
            renamed => renamed.map_err(CellError::host(format!(
                "cannot tell the network {network} of the cell's name"
            ))),
        }
    }

    /// Makes a cell a member, and starts the network's switch where there is none.
    ///
    /// # Errors
    /// The switch refuses it, or the host.
    pub fn join(&self, network: &Network, wanted: &Join) -> Result<Port, CellError> {
        let name = &network.name;
        let until = Instant::now() + SWITCH_MAX;
        loop {
            let joined = self
                .connect(name)
                .and_then(|socket| switch::join(socket, name, network.addresses, wanted.clone()));
            match joined {
                Ok(port) => return Ok(port),
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    return Err(CellError::Usage(format!("network {name}: {error}")));
                }
                Err(error) if is_absent(&error) && Instant::now() < until => {
                    self.start(name)?;
                }
                Err(error) if is_ending(&error) && Instant::now() < until => {
                    std::thread::sleep(LOOK);
                }
                Err(error) => {
                    return Err(CellError::host(format!("cannot join the network {name}"))(error));
                }
            }
        }
    }

    /// Makes a cell a member of a switch that others cannot reach yet.
    ///
    /// # Errors
    /// The switch refuses it, or the host.
    pub(crate) fn join_early(&self, network: &Network, wanted: Join) -> io::Result<Port> {
        let socket = self.connect_by(&network.name, EARLY_SOCKET)?;
        switch::join(socket, &network.name, network.addresses, wanted)
    }

    /// A connection to the network's switch.
    fn connect(&self, name: &str) -> io::Result<OwnedFd> {
        self.connect_by(name, SOCKET)
    }

    fn connect_by(&self, name: &str, socket_name: &str) -> io::Result<OwnedFd> {
        // A socket's path is at most 107 bytes; through the directory's descriptor it always fits.
        let directory = File::open(self.directory(name))?;
        let short = format!("/proc/self/fd/{}/{socket_name}", directory.as_raw_fd());
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        connect(socket.as_raw_fd(), &UnixAddr::new(short.as_str())?)?;
        Ok(socket)
    }

    /// Starts a process with the switch, which is nobody's child; returns once it listens.
    fn start(&self, name: &str) -> Result<(), CellError> {
        let failed = || CellError::host(format!("cannot start the switch of the network {name}"));
        let root = self.state.canonicalize().map_err(failed())?;
        let mut command = Command::new("/proc/self/exe");
        command.envs(logging::environment());
        command.arg("--root").arg(root).args([SPAWN_VERB, name]);
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
        match status.map_err(failed())? {
            status if status.success() => Ok(()),
            status => Err(failed()(io::Error::other(status.to_string()))),
        }
    }
}

/// 256 random bits in hexadecimal.
fn new_id() -> io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Whether nobody listens: there never was a switch, or it is gone.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Whether the switch that was reached has just ended.
fn is_ending(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// The subnet of a new network: the one that is `wanted`, or the first of the usual ones that is
/// free.
fn subnet(wanted: Option<Subnet>, others: &[Network]) -> Result<Subnet, CellError> {
    let taken =
        |subnet: &Subnet| others.iter().find(|other| other.addresses.subnet.overlaps(*subnet));
    if let Some(subnet) = wanted {
        let mut others = OTHERS.iter().filter_map(|(base, prefix)| Subnet::around(*base, *prefix));
        if subnet.base() >= GROUPS || others.any(|other| other.overlaps(subnet)) {
            return Err(CellError::Usage(format!(
                "the addresses of {subnet} mean something else in a cell; choose another subnet, \
                 like 172.28.0.0/16"
            )));
        }
        return match taken(&subnet) {
            None => Ok(subnet),
            Some(other) => Err(CellError::Usage(format!(
                "Pool overlaps with other one on this address space: {subnet} with {} of the \
                 network {}; choose another subnet",
                other.addresses.subnet, other.name
            ))),
        };
    }
    // 172.18 to 172.31, then parts of 192.168 and of 10 (RFC 1918), as docker has them.
    let large = (18..32).map(|second| (Ipv4Addr::new(172, second, 0, 0), 16));
    let middle = (0..16).map(|third| (Ipv4Addr::new(192, 168, third * 16, 0), 20));
    let small = (0..=255)
        .flat_map(|second| (0..=255).map(move |third| (Ipv4Addr::new(10, second, third, 0), 24)));
    let all = large.chain(middle).chain(small);
    let mut free = all.filter_map(|(base, prefix)| Subnet::around(base, prefix));
    free.find(|subnet| taken(subnet).is_none()).ok_or_else(|| {
        CellError::Usage("no subnet is free; name one (--subnet), or remove networks".to_owned())
    })
}

/// Starts the process of a switch as a child of this one, which is to end; returns once it
/// listens.
///
/// # Errors
/// The host's.
pub fn start_apart(layout: &Layout, name: &str) -> Result<(), CellError> {
    let failed = || CellError::host(format!("cannot start the switch of the network {name}"));
    let mut command = Command::new("/proc/self/exe");
    command.arg("--root").arg(layout.root()).args([VERB, name]);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed())?;
    let mut said = [0; 1];
    match child.stdout.take().map(|mut stdout| stdout.read_exact(&mut said)) {
        Some(Ok(())) if said == [READY] => Ok(()),
        _ => Err(failed()(io::Error::other("it ended"))),
    }
}

#[cfg(test)]
mod tests;
