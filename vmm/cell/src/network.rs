//! A cell's network, from the grant to the running halves: what the plan
//! opens, the dialer that the supervisor forks, the changes that it takes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use exocell_agent::{AUTHORITY_BUNDLE, AUTHORITY_CERTIFICATE, NetworkSetup};
use exocell_network::authority::Authority;
use exocell_network::dialer::{Dialer, Hosts, sys};
use exocell_network::secrets::SECRETS_MAX;
use exocell_network::stack::{Changes, Parts, Published, Stack};
use exocell_network::{Policy, Secret, Secrets, link};
use exocell_vmm::devices::NetConfig;
use exocell_vmm::jail::{self, ThreadClass};
use exocell_xgate::{CapabilitySet, Endpoint, NetworkScope, Protocol};
use nix::unistd::{ForkResult, fork};
use serde::{Deserialize, Serialize};

use crate::relayed::Relaying;
use crate::{CellError, CellSpec};
pub use log::{LOGS, Log, Written};

pub(crate) mod log;

/// Names a file of certificates by which the hosts of secrets over TLS are
/// verified, instead of those that browsers trust.
pub const ROOTS_VARIABLE: &str = "EXOCELL_TLS_ROOTS";

/// A port of the host that leads to one of the cell: `[[ADDRESS:]PORT:]PORT`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    pub host: SocketAddr,
    pub guest_port: u16,
}

impl FromStr for Publish {
    type Err = String;

    /// Reads `8080:80`, `0.0.0.0:8080:80`, `[::1]:8080:80` or `80`; without an address it is the
    /// host's loopback, and without a port of the host, or with 0, any that is free.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not [[ADDRESS:]HOST_PORT:]CELL_PORT, like 8080:80");
        if text.ends_with("/udp") {
            return Err(format!("`{text}`: only TCP ports are published; leave out /udp"));
        }
        let bare = text.strip_suffix("/tcp").unwrap_or(text);
        let (front, guest) = bare.rsplit_once(':').unwrap_or(("0", bare));
        let (address, port) = match front.rsplit_once(':') {
            Some((address, port)) => {
                let address = address.trim_start_matches('[').trim_end_matches(']');
                (address.parse::<IpAddr>().map_err(|_| wrong())?, port)
            }
            None => (Ipv4Addr::LOCALHOST.into(), front),
        };
        let guest_port: u16 = guest.parse().map_err(|_| wrong())?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        if guest_port == 0 {
            Err(wrong())
        } else {
            Ok(Self { host: (address, port).into(), guest_port })
        }
    }
}

impl Publish {
    /// With a port of the host that is free just now, where none is named.
    ///
    /// # Errors
    /// [`CellError::Host`] where there is none at this address.
    pub fn named(self) -> Result<Self, CellError> {
        if self.host.port() != 0 {
            return Ok(self);
        }
        let free = std::net::TcpListener::bind(self.host).and_then(|one| one.local_addr());
        let host =
            free.map_err(CellError::host(format!("no port of {} is free", self.host.ip())))?;
        Ok(Self { host, ..self })
    }
}

/// What the plan found and opened for a cell with a network.
pub struct PlannedNetwork {
    scope: NetworkScope,
    hosts: Hosts,
    published: Vec<Published>,
    secrets: Secrets,
    authority: Option<Authority>,
}

impl PlannedNetwork {
    /// `None` where nothing is granted: such a cell has no network device.
    pub fn new(
        spec: &CellSpec,
        caps: &CapabilitySet,
        secrets: Vec<Secret>,
    ) -> Result<Option<Self>, CellError> {
        let scope = caps.network().cloned().unwrap_or_default();
        check_secrets(&secrets, &scope)?;
        let published: Result<Vec<Published>, CellError> =
            spec.publish.iter().map(|publish| listen(publish, &scope)).collect();
        let published = published?;
        if !scope.grants_anything() {
            return Ok(None);
        }
        let secrets = Secrets::new(secrets);
        let roots = std::env::var_os(ROOTS_VARIABLE).filter(|path| !path.is_empty());
        let authority = Authority::new(&secrets, roots.as_ref().map(Path::new))
            .map_err(|error| CellError::Usage(format!("--secret: {error}")))?;
        Ok(Some(Self { scope, hosts: Hosts::of_host(), published, secrets, authority }))
    }

    /// How the guest sets its end of the link up.
    pub fn setup(&self) -> NetworkSetup {
        NetworkSetup {
            authority: self.authority.as_ref().map(|own| own.certificate().to_owned()),
            interface: "eth0".to_owned(),
            address_v4: link::GUEST_V4,
            address_v6: link::GUEST_V6,
            name_server: link::STACK_V4,
        }
    }
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

fn listen(publish: &Publish, scope: &NetworkScope) -> Result<Published, CellError> {
    let guest_port = publish.guest_port;
    if !scope.listen.iter().any(|ports| ports.permits(guest_port)) {
        return Err(CellError::Usage(format!(
            "port {guest_port} may not be published; add it to network.listen of the table"
        )));
    }
    let failed = || format!("cannot listen on {}", publish.host);
    let listener = TcpListener::bind(publish.host).map_err(CellError::host(failed()))?;
    listener.set_nonblocking(true).map_err(CellError::host(failed()))?;
    Ok(Published { listener, guest_port })
}

/// A network whose dialer runs, before its device is there.
pub struct Network {
    scope: NetworkScope,
    channel: OwnedFd,
    published: Vec<Published>,
    secrets: Secrets,
    authority: Option<Authority>,
}

/// Forks the dialer and leaves the host's network. To be called while the
/// caller has one thread and is still in that network.
pub fn start(planned: PlannedNetwork) -> Result<Network, CellError> {
    let PlannedNetwork { scope, hosts, published, secrets, authority } = planned;
    let (channel, theirs) = sys::channel().map_err(CellError::host("cannot make a channel"))?;
    let policy = Policy::new(scope.clone());
    // SAFETY: the caller has one thread, so the child may do what any process
    // may. Needed because the dialer must stay in a network that its parent
    // leaves, and must be of the cell's pid namespace, whose end is its own.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { .. }) => drop(theirs),
        Ok(ForkResult::Child) => {
            let code = std::panic::catch_unwind(|| dial(theirs, policy, hosts)).unwrap_or(125);
            // SAFETY: _exit ends the process without running the parent's
            // destructors and exit handlers, which are not the child's to run.
            unsafe { libc::_exit(code) }
        }
        Err(errno) => return Err(CellError::host("cannot fork the dialer")(errno.into())),
    }
    jail::leave_network()?;
    Ok(Network { scope, channel, published, secrets, authority })
}

/// The body of the dialer's process.
fn dial(channel: OwnedFd, policy: Policy, hosts: Hosts) -> i32 {
    let confined = || -> Result<OwnedFd, CellError> {
        nix::sys::prctl::set_name(c"dialer")
            .map_err(|errno| CellError::host("cannot name the dialer")(errno.into()))?;
        let channel = sys::keep_only(channel).map_err(CellError::host("cannot close"))?;
        jail::restrict_to_sockets(&[])?;
        jail::restrict_calls(ThreadClass::Dialer)?;
        Ok(channel)
    };
    // Nobody is left to hear why; the supervisor finds the channel closed.
    match confined().map(|channel| Dialer::new(channel, policy, hosts).run()) {
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
}

impl Network {
    /// The device's other end, the control over it, and the decisions that a
    /// [`Log`] writes down.
    pub fn link(self) -> Result<(NetConfig, Control, Written), CellError> {
        let failed = "cannot make the network's stack";
        let (changer, changes) = Changes::pair().map_err(CellError::host(failed))?;
        let (entries, written) = log::waiting();
        let Self { scope, channel, published, secrets, authority } = self;
        let kept = secrets.clone();
        let stack = Stack::new(Parts {
            policy: Policy::new(scope.clone()),
            channel,
            published,
            audit: Box::new(entries),
            changes,
            secrets,
            authority,
        });
        let link = Box::new(stack.map_err(CellError::host(failed))?);
        let config = NetConfig { link, mtu: link::MTU };
        let change = Box::new(move |policy| changer.change(policy));
        let control = Control { scope: Mutex::new(scope), secrets: kept, change };
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
        Ok((relaying, Control { scope: Mutex::new(scope), secrets, change }))
    }
}

impl Control {
    /// Permits no more of anything; what is open is cut.
    pub fn end(&self) {
        self.put(NetworkScope::default());
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

    fn put(&self, scope: NetworkScope) {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&scope);
        (self.change)(Policy::new(scope));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_published_on_the_loopback_unless_said_otherwise() {
        for (text, host, guest_port) in [
            ("8080:80", "127.0.0.1:8080", 80),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80),
            ("[::1]:0:80/tcp", "[::1]:0", 80),
            ("80", "127.0.0.1:0", 80),
        ] {
            let host = host.parse().unwrap();
            assert_eq!(text.parse(), Ok(Publish { host, guest_port }), "{text}");
        }
        for text in ["x", "x:80", "80:0", "80:x", "host:80:80", "80:80/udp", ""] {
            assert!(text.parse::<Publish>().is_err(), "{text}");
        }
    }

    fn control(rules: &[&str]) -> Control {
        let connect = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let scope = NetworkScope { connect, ..NetworkScope::default() };
        let secrets = Secrets::default();
        Control { scope: Mutex::new(scope), secrets, change: Box::new(drop) }
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
