//! A cell's network, from the grant to the running halves: what the plan
//! opens, the dialer that the supervisor forks, the changes that it takes.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use exocell_agent::{AUTHORITY_BUNDLE, AUTHORITY_CERTIFICATE, JoinedAddress, NetworkSetup};
use exocell_network::authority::Authority;
use exocell_network::dialer::{Dialer, Hosts, sys};
use exocell_network::secrets::SECRETS_MAX;
use exocell_network::stack::{Changes, Parts, Published, Stack};
use exocell_network::switch::{Port, Ports};
use exocell_network::{Policy, Secret, Secrets, address, link};
use exocell_vmm::devices::NetConfig;
use exocell_vmm::jail::{self, ThreadClass};
use exocell_xgate::{CapabilitySet, Endpoint, NamePattern, NetworkScope, Protocol};
use nix::unistd::{ForkResult, fork};

use crate::networks::{self, Attachment, Networks};
use crate::relayed::Relaying;
use crate::{CellError, CellSpec, Layout, Strength};
pub use exocell_network::link::HOST_NAME;
use joined::Joined;
pub use log::{LOGS, Log, Written};
use publish::Listening;
pub use publish::{Publish, range};

/// Whether who may reach `own` may have `wanted` as a rule of its own. A rule opens the operator's
/// host, its link and its cloud's metadata only where it names them: by `*` and by `0.0.0.0/0`
/// nobody may, and who has no more than these does not get there by naming them.
pub fn covers(own: &NamePattern, wanted: &NamePattern) -> bool {
    own.contains(wanted)
        && match wanted {
            NamePattern::Name(name) => name != HOST_NAME || own == wanted,
            NamePattern::Net { base, .. } => {
                let base = address::plain(*base);
                let is_opened = match address::class(base) {
                    Some(_) => address::names(wanted, base),
                    // An address is the host's where nobody can tell.
                    None => address::names(wanted, base) && sys::is_own(base).unwrap_or(true),
                };
                !is_opened || address::names(own, base)
            }
            _ => true,
        }
}

mod joined;
pub(crate) mod log;
mod publish;

/// Names a file of certificates by which the hosts of secrets over TLS are
/// verified, instead of those that browsers trust.
pub const ROOTS_VARIABLE: &str = "EXOCELL_TLS_ROOTS";

/// What the plan found and opened for a cell with a network.
pub struct PlannedNetwork {
    scope: NetworkScope,
    hosts: Hosts,
    published: Vec<Published>,
    doors: Vec<(UdpSocket, u16)>,
    secrets: Secrets,
    authority: Option<Authority>,
    search: Vec<String>,
    dns_options: Vec<String>,
    /// To the switches of its networks between cells.
    ports: Vec<Port>,
}

impl PlannedNetwork {
    /// `None` where nothing is granted, and no link is wanted all the same: such a cell has no network
    /// device.
    pub fn new(
        layout: &Layout,
        spec: &CellSpec,
        caps: &CapabilitySet,
        secrets: Vec<Secret>,
    ) -> Result<Option<Self>, CellError> {
        let mut scope = caps.network().cloned().unwrap_or_default();
        let joined = own_networks(layout, spec, &scope)?;
        if !joined.is_empty() && joined.iter().all(|(network, _)| network.internal) {
            (scope.connect, scope.resolve) = (Vec::new(), Vec::new());
        }
        check_secrets(&secrets, &scope)?;
        let (mut published, mut doors) = (Vec::new(), Vec::new());
        for publish in &spec.publish {
            match publish.listen(&scope)? {
                Listening::Streams(listener) => {
                    published.push(Published { listener, guest_port: publish.guest_port });
                }
                Listening::Datagrams(socket) => doors.push((socket, publish.guest_port)),
            }
        }
        if spec.strength == Strength::Isolate && !doors.is_empty() {
            return Err(CellError::Usage(
                "an isolate takes callers by TCP only; leave out ports with /udp".to_owned(),
            ));
        }
        if !scope.grants_anything() && !spec.has_link {
            return Ok(None);
        }
        let secrets = Secrets::new(secrets);
        let roots = std::env::var_os(ROOTS_VARIABLE).filter(|path| !path.is_empty());
        let authority = Authority::new(&secrets, roots.as_ref().map(Path::new))
            .map_err(|error| CellError::Usage(format!("--secret: {error}")))?;
        let settings = &spec.settings;
        let join = |(network, own): &(networks::Network, &Attachment)| {
            let port = Networks::of(layout).join(network, &own.join(&spec.id, &spec.name))?;
            Ok::<Port, CellError>(own.linked(port))
        };
        let ports = joined.iter().map(join).collect::<Result<_, _>>()?;
        Ok(Some(Self {
            scope,
            hosts: Hosts::of_host().with_servers(&settings.dns),
            published,
            doors,
            secrets,
            authority,
            search: settings.dns_search.clone(),
            dns_options: settings.dns_options.clone(),
            ports,
        }))
    }

    /// How the guest sets its end of the link up.
    pub fn setup(&self) -> NetworkSetup {
        NetworkSetup {
            authority: self.authority.as_ref().map(|own| own.certificate().to_owned()),
            interface: "eth0".to_owned(),
            address_v4: link::GUEST_V4,
            address_v6: link::GUEST_V6,
            mtu: None,
            name_server: link::STACK_V4,
            search: self.search.clone(),
            dns_options: self.dns_options.clone(),
            joined: self.ports.iter().map(joined).collect(),
            to_loopback: false,
        }
    }
}

pub(crate) fn joined(port: &Port) -> JoinedAddress {
    JoinedAddress { address: port.address(), prefix: port.addresses().subnet.prefix() }
}

/// The networks between cells that it is to be in.
fn own_networks<'a>(
    layout: &Layout,
    spec: &'a CellSpec,
    scope: &NetworkScope,
) -> Result<Vec<(networks::Network, &'a Attachment)>, CellError> {
    let networks = Networks::of(layout);
    let find = |own: &'a Attachment| {
        let network = networks.find(&own.network)?;
        if !scope.join.iter().any(|granted| granted.as_str() == network.name) {
            return Err(CellError::Usage(format!(
                "the cell may not be in the network {0}; add {0} to network.join of the table",
                network.name
            )));
        }
        Ok((network, own))
    };
    spec.networks.iter().map(find).collect()
}

/// The address of a cell's interface, as docker shows it: the same in every cell, since there is no
/// Ethernet beyond its link.
#[must_use]
pub fn mac_address() -> String {
    exocell_vmm::devices::net::MAC.map(|byte| format!("{byte:02x}")).join(":")
}

/// The variables by which the usual libraries find the certificates that a cell
/// with an authority of its own trusts.
pub fn authority_environment() -> Vec<String> {
    let bundle = ["SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO"];
    let bundle = bundle.map(|name| format!("{name}={AUTHORITY_BUNDLE}"));
    // Node adds these to its own.
    let more = format!("NODE_EXTRA_CA_CERTS={AUTHORITY_CERTIFICATE}");
    bundle.into_iter().chain([more]).collect()
}

/// A secret for a server that the cell may not talk to is of no use; nor is one where
/// nothing is read, or where two protocols are.
fn check_secrets(secrets: &[Secret], scope: &NetworkScope) -> Result<(), CellError> {
    if secrets.len() > SECRETS_MAX {
        return Err(CellError::Usage(format!("a cell has at most {SECRETS_MAX} secrets")));
    }
    let policy = Policy::new(scope.clone());
    let useless = |s: &&Secret| policy.permits_name(Protocol::Tcp, &s.host, s.port).is_err();
    if let Some(Secret { name, host, port, .. }) = secrets.iter().find(useless) {
        return Err(CellError::Usage(format!(
            "the secret {name} is for {host}:{port}, which no rule permits; \
             add --allow-net {host}:{port}"
        )));
    }
    for Secret { name, host, port, tls, .. } in secrets {
        let is_other = |s: &&Secret| (&s.host, s.port) == (host, *port) && s.tls != *tls;
        if let Some(other) = secrets.iter().find(is_other) {
            return Err(CellError::Usage(format!(
                "the secrets {name} and {} are for {host}:{port}, one over TLS and one not; \
                 write https:// in both or in neither",
                other.name
            )));
        }
    }
    check_raw(secrets.iter(), &policy).map_err(CellError::Usage)
}

/// Of what is raw nothing is read, so no secret can be put in.
fn check_raw<'a>(
    mut secrets: impl Iterator<Item = &'a Secret>,
    policy: &Policy,
) -> Result<(), String> {
    match secrets.find(|secret| policy.is_raw(&secret.host, secret.port)) {
        None => Ok(()),
        Some(Secret { name, host, port, .. }) => Err(format!(
            "the secret {name} is for {host}:{port}, which a rule grants as /raw: nothing is \
             read there, so it would never be put in; leave out /raw, or the secret"
        )),
    }
}

/// A network whose dialer runs, before its device is there.
pub struct Network {
    scope: NetworkScope,
    channel: OwnedFd,
    published: Vec<Published>,
    /// The guest's ports of datagrams, whose sockets the dialer has.
    doors: Vec<u16>,
    secrets: Secrets,
    authority: Option<Authority>,
    ports: Vec<Port>,
}

/// Forks the dialer and leaves the host's network. To be called while the
/// caller has one thread and is still in that network.
pub fn start(planned: PlannedNetwork) -> Result<Network, CellError> {
    let PlannedNetwork { scope, hosts, published, doors, secrets, authority, ports, .. } = planned;
    let (sockets, doors) = doors.into_iter().unzip();
    let (channel, theirs) = sys::channel().map_err(CellError::host("cannot make a channel"))?;
    let policy = Policy::new(scope.clone());
    // SAFETY: the caller has one thread, so the child may do what any process
    // may. Needed because the dialer must stay in a network that its parent
    // leaves, and must be of the cell's pid namespace, whose end is its own.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { .. }) => drop(theirs),
        Ok(ForkResult::Child) => {
            let dial = || dial(theirs, sockets, policy, hosts);
            let code = std::panic::catch_unwind(dial).unwrap_or(125);
            // SAFETY: _exit ends the process without running the parent's
            // destructors and exit handlers, which are not the child's to run.
            unsafe { libc::_exit(code) }
        }
        Err(errno) => return Err(CellError::host("cannot fork the dialer")(errno.into())),
    }
    jail::leave_network()?;
    Ok(Network { scope, channel, published, doors, secrets, authority, ports })
}

/// The body of the dialer's process.
fn dial(channel: OwnedFd, sockets: Vec<UdpSocket>, policy: Policy, hosts: Hosts) -> i32 {
    let confined = || -> Result<(OwnedFd, Vec<UdpSocket>), CellError> {
        nix::sys::prctl::set_name(c"dialer")
            .map_err(|errno| CellError::host("cannot name the dialer")(errno.into()))?;
        let kept = [channel].into_iter().chain(sockets.into_iter().map(OwnedFd::from)).collect();
        let mut kept = sys::keep_only(kept).map_err(CellError::host("cannot close"))?.into_iter();
        let channel = kept.next().ok_or_else(|| CellError::Guest("no channel".to_owned()))?;
        jail::restrict_to_sockets(&[])?;
        jail::restrict_calls(ThreadClass::Dialer)?;
        Ok((channel, kept.map(UdpSocket::from).collect()))
    };
    let run = |(channel, sockets)| Dialer::new(channel, policy, hosts).with_doors(sockets).run();
    // Nobody is left to hear why; the supervisor finds the channel closed.
    match confined().map(run) {
        Ok(Ok(())) => 0,
        _ => 125,
    }
}

/// The running network, as the operator's commands reach it.
pub struct Control {
    scope: Mutex<NetworkScope>,
    secrets: Secrets,
    /// Puts new rules in the place of those before.
    change: Box<dyn Fn(Policy) + Send + Sync>,
    /// Which networks between cells a guest is in, each at its place.
    joined: Joined,
}

impl Network {
    /// The device's other end, the control over it, and the decisions that a
    /// [`Log`] writes down.
    pub fn link(self) -> Result<(NetConfig, Control, Written), CellError> {
        let failed = "cannot make the network's stack";
        let (changer, changes) = Changes::pair().map_err(CellError::host(failed))?;
        let (entries, written) = log::waiting();
        let Self { scope, channel, published, doors, secrets, authority, ports } = self;
        let joined = Joined::new(changer.clone(), &ports);
        let kept = secrets.clone();
        let stack = Stack::new(Parts {
            policy: Policy::new(scope.clone()),
            channel,
            published,
            doors,
            audit: Box::new(entries),
            changes,
            secrets,
            authority,
            ports: Ports::new(ports),
        });
        let link = Box::new(stack.map_err(CellError::host(failed))?);
        let config = NetConfig { link, mtu: link::MTU, leaves_checksums: true };
        let change = Box::new(move |policy| changer.change(policy));
        let control = Control { scope: Mutex::new(scope), secrets: kept, change, joined };
        Ok((config, control, written))
    }

    /// The same for an isolate: its relay, and the control over it, which ask it for things.
    pub(crate) fn relay(self) -> Result<(Relaying, Control), CellError> {
        let Self { scope, channel, published, .. } = self;
        let policy = Policy::new(scope.clone());
        let relaying = Relaying::new(policy, channel, published, Log::here())?;
        let requests = relaying.requests();
        let change = Box::new(move |policy| requests.change(policy));
        // Isolates get no secrets.
        let secrets = Secrets::default();
        let joined = Joined::default();
        Ok((relaying, Control { scope: Mutex::new(scope), secrets, change, joined }))
    }
}

impl Control {
    /// Permits no more of anything; what is open is cut.
    pub fn end(&self) {
        self.put(NetworkScope::default());
        self.joined.leave_all();
    }

    /// Adds and removes rules; the scope that holds from now on.
    pub fn change(&self, allow: &[String], deny: &[String]) -> Result<NetworkScope, String> {
        let read = |texts: &[String]| -> Result<Vec<Endpoint>, String> {
            texts.iter().map(|text| text.parse()).collect()
        };
        let (allow, deny) = (read(allow)?, read(deny)?);
        let mut scope = self.scope.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for rule in &deny {
            let before = scope.connect.len();
            scope.connect.retain(|own| !rule.takes_away(own));
            if scope.connect.len() == before {
                return Err(format!("no rule lies within {rule}; the rules are: {scope}"));
            }
        }
        for rule in allow {
            if !scope.connect.contains(&rule) {
                scope.connect.push(rule);
            }
        }
        if scope.connect.len() > CapabilitySet::RULES_MAX {
            return Err(format!("more than {} rules", CapabilitySet::RULES_MAX));
        }
        check_raw(self.secrets.iter(), &Policy::new(scope.clone()))?;
        self.put(scope.clone());
        Ok(scope)
    }

    /// Puts a guest into a network; at which place.
    ///
    /// # Errors
    /// It is in too many.
    pub(crate) fn join(&self, port: Port) -> Result<u32, String> {
        self.joined.join(port)
    }

    /// Takes it out of one; at which place it was, if it was in it.
    pub(crate) fn leave(&self, network: &str) -> Option<u32> {
        self.joined.leave(network)
    }

    /// Takes it out of the network at `place`.
    pub(crate) fn leave_place(&self, place: u32) {
        self.joined.leave_place(place);
    }

    /// The networks whose switch has ended, and the guest's address in each.
    pub(crate) fn lost(&self) -> BTreeMap<String, Ipv4Addr> {
        self.joined.lost()
    }

    fn put(&self, scope: NetworkScope) {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&scope);
        (self.change)(Policy::new(scope));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(rules: &[&str]) -> Control {
        let connect = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let scope = NetworkScope { connect, ..NetworkScope::default() };
        let secrets = Secrets::default();
        let joined = Joined::default();
        Control { scope: Mutex::new(scope), secrets, change: Box::new(drop), joined }
    }

    fn secret(text: &str) -> Secret {
        Secret::read(text, "exocell-secret-1".into(), |_| None).unwrap()
    }

    #[test]
    fn secrets_and_raw_rules_exclude_each_other() {
        let check = |secrets: &[&str], rules: &[&str]| {
            let secrets: Vec<Secret> = secrets.iter().map(|text| secret(text)).collect();
            let error = check_secrets(&secrets, &control(rules).scope.into_inner().unwrap());
            error.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(check(&["K=v@a.test"], &["a.test:80", "a.test:22/raw"]), "");
        let told = check(&["K=v@https://a.test"], &["a.test:443", "*.test:1-65535/raw"]);
        assert!(told.contains("the secret K is for a.test:443, which a rule grants as /raw"));
        let told = check(&["K=v@https://a.test", "L=w@a.test:443"], &["a.test:443"]);
        assert!(told.contains("K and L") && told.contains("one over TLS"), "{told}");

        let mut running = control(&["a.test:443"]);
        running.secrets = Secrets::new(vec![secret("K=v@https://a.test")]);
        let told = running.change(&["a.test:443/raw".to_owned()], &[]).unwrap_err();
        assert!(told.contains("leave out /raw"), "{told}");
        running.change(&["a.test:22/raw".to_owned()], &[]).unwrap();
    }

    #[test]
    fn denying_a_host_denies_what_is_raw_too() {
        let control = control(&["a.test:22/raw", "a.test:22", "a.test:80/raw"]);
        let rules = |allow: &[&str], deny: &[&str]| {
            let texts =
                |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<String>>();
            let scope = control.change(&texts(allow), &texts(deny)).unwrap();
            scope.connect.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(rules(&[], &["a.test:22/raw"]), ["a.test:22", "a.test:80/raw"]);
        assert_eq!(rules(&["b.test:1"], &["a.test:1-65535"]), ["b.test:1"]);
    }

    #[test]
    fn rules_come_and_go_while_a_cell_runs() {
        let control = control(&["a.test:80", "a.test:443", "b.test:443"]);
        let texts = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let scope = control.change(&texts(&["c.test:1"]), &texts(&["a.test:1-65535"])).unwrap();
        let rules: Vec<String> = scope.connect.iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["b.test:443", "c.test:1"]);
        assert!(control.change(&[], &texts(&["b.test:1"])).is_err(), "not within it");
        assert!(control.change(&texts(&["nonsense"]), &[]).is_err());
        control.end();
        assert_eq!(*control.scope.lock().unwrap(), NetworkScope::default());
    }
}
