//! Registries are reached by jailed processes: images are fetched and sent, logins tried.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use exocell_agent::printable;
use exocell_images::compose::Layer;
use exocell_images::{
    Connection, Digest, Grant, ImageError, Judge, Looked, Progress, Pushed, Reference, Refusal,
    RegistryOptions, Store, registry_server,
};
use exocell_network::address::{self, Class};
use exocell_network::{Denied, Policy};
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Running, Shown, Stage, Task};
use exocell_vmm::jail::{HostNetwork, ThreadClass};
use exocell_xgate::{CapabilitySet, Protocol};
use serde::{Deserialize, Serialize};

use crate::jailed::{Step, TIME_MAX, Teller, another_answer, host, refused};

/// Reaches a registry.
pub const FETCH: Stage = Stage { name: "fetch", class: ThreadClass::Fetch, work: fetch };

/// What it may take of memory beside the executable itself.
const FETCH_MEMORY_BYTES: u64 = 256 << 20;
/// What is said of an image that is looked at.
const LOOKED_BYTES_MAX: usize = 1 << 20;
/// The longest that a look at a registry may take.
const LOOK_MAX: Duration = Duration::from_secs(90);
/// What finding the address of a registry takes (resolver(5), nsswitch.conf(5), gai.conf(5)).
const RESOLVER_FILES: [&str; 5] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf"];

/// What `fetch` is asked for.
#[derive(Serialize, Deserialize)]
enum Fetch {
    /// A descriptor: the socket of who asks for parts of the image.
    Serve {
        reference: String,
        options: RegistryOptions,
    },
    LogIn {
        registry: String,
        options: RegistryOptions,
    },
    Look {
        reference: String,
        options: RegistryOptions,
    },
    Present {
        reference: String,
        options: RegistryOptions,
        layers: Vec<Digest>,
    },
    /// Descriptors: the configuration, and the layers that `is_given` says, packed.
    Push {
        reference: String,
        options: RegistryOptions,
        layers: Vec<Layer>,
        is_given: Vec<bool>,
    },
}

/// What it answers to the others.
#[derive(Serialize, Deserialize)]
enum Fetched {
    LoggedIn,
    Looked(Looked),
    Present(Vec<bool>),
    Pushed(Pushed),
    Refused(Refusal),
}

/// What a cell may reach that has an image pulled: what its own rules of the network cover, at the
/// addresses to which its own programs would be let.
#[must_use]
pub fn grant(caps: &CapabilitySet) -> Grant {
    let rules = Policy::new(caps.network().cloned().unwrap_or_default()).to_text();
    let own = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|own| {
        let address = own.address?;
        let v4 = address.as_sockaddr_in().map(|at| IpAddr::V4(at.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|at| IpAddr::V6(at.ip())))
    });
    Grant { rules, own: own.collect() }
}

/// `options` with a judge of what they let whoever asks reach.
fn judged(options: RegistryOptions) -> RegistryOptions {
    let judge = match options.grant.clone() {
        Some(grant) => Judge::new(held(grant)),
        None => Judge::new(elsewhere),
    };
    RegistryOptions { judge: Some(judge), ..options }
}

/// A registry is reached by the rules; where it sends us, what is everybody's.
fn held(grant: Grant) -> impl Fn(&Connection<'_>) -> Result<(), String> + Send + Sync {
    let policy = Policy::from_text(&grant.rules).unwrap_or_default();
    move |to| {
        let is_own = |address: IpAddr| grant.own.contains(&address);
        let (host, port) = (to.host.trim_matches(['[', ']']), to.port);
        let permitted = match (to.is_registry, host.parse()) {
            (true, Ok(address)) => policy.permits_address(Protocol::Tcp, address, port, is_own),
            (true, Err(_)) => {
                let name = host.trim_end_matches('.').to_ascii_lowercase();
                policy.permits_address_of(Protocol::Tcp, &name, to.address, port, is_own)
            }
            (false, _) => {
                let reached = address::reached(to.address);
                match address::class(reached) {
                    Some(class) => Err(Denied::Special(reached, class)),
                    None if address::is_private(reached) => Err(Denied::Private(reached)),
                    None if is_own(reached) => Err(Denied::Own(reached)),
                    None => Ok(()),
                }
            }
        };
        permitted.map_err(|denied| denied.to_string())
    }
}

/// A registry that is not of this host does not send us to services of this host.
fn elsewhere(to: &Connection<'_>) -> Result<(), String> {
    let reached = address::reached(to.address);
    match address::class(reached) {
        Some(class @ (Class::Loopback | Class::LinkLocal | Class::Metadata))
            if !to.is_registry && !to.registry_is_here =>
        {
            Err(Denied::Special(reached, class).to_string())
        }
        _ => Ok(()),
    }
}

/// Tries the login in `options` at `registry`, a host with or without a port, in a jailed process.
///
/// # Errors
/// Its credentials are not taken; the network's.
pub fn log_in(registry: &str, options: &RegistryOptions) -> Result<(), ImageError> {
    let request = Fetch::LogIn { registry: registry.to_owned(), options: options.clone() };
    match fetched(&request)? {
        Fetched::LoggedIn => Ok(()),
        _ => Err(another_answer()),
    }
}

/// Looks at an image in its registry, in a jailed process.
///
/// # Errors
/// As of a pull.
pub fn look(reference: &Reference, options: &RegistryOptions) -> Result<Looked, ImageError> {
    let request = Fetch::Look { reference: reference.to_string(), options: options.clone() };
    match fetched(&request)? {
        Fetched::Looked(looked) => Ok(looked),
        _ => Err(another_answer()),
    }
}

/// Which of `layers` the registry of `reference` has, by a jailed process.
///
/// # Errors
/// The credentials do not do for a push; the network's.
pub fn present(
    reference: &Reference,
    options: &RegistryOptions,
    layers: &[Digest],
) -> Result<Vec<bool>, ImageError> {
    let (reference, layers) = (reference.to_string(), layers.to_vec());
    let count = layers.len();
    match fetched(&Fetch::Present { reference, options: options.clone(), layers })? {
        Fetched::Present(present) if present.len() == count => Ok(present),
        _ => Err(another_answer()),
    }
}

/// Pushes an image as `reference`, in a jailed process: its configuration, and its layers, the
/// lowest first, without a file those that the registry has.
///
/// # Errors
/// The credentials do not do; what the registry refuses; the host's, where there is no room.
pub fn push(
    store: &Store,
    reference: &Reference,
    options: &RegistryOptions,
    (layers, config): (&[(Layer, Option<File>)], &[u8]),
    progress: &mut dyn Progress,
) -> Result<Pushed, ImageError> {
    let mut document = store.scratch()?;
    let written = document.write_all(config).and_then(|()| document.rewind());
    written.map_err(|error| host("cannot write the configuration", error))?;
    let request = Fetch::Push {
        reference: reference.to_string(),
        options: options.clone(),
        layers: layers.iter().map(|(layer, _)| layer.clone()).collect(),
        is_given: layers.iter().map(|(_, file)| file.is_some()).collect(),
    };
    let files = layers.iter().filter_map(|(_, file)| file.as_ref());
    let given = [&document].into_iter().chain(files).map(Given::file).collect();
    let answer = fetching(given, TIME_MAX).run(&request, |line| Step::hear(line, progress));
    match answered(answer.map_err(|error| refused(&error))?)? {
        Fetched::Pushed(pushed) => Ok(pushed),
        _ => Err(another_answer()),
    }
}

fn fetched(request: &Fetch) -> Result<Fetched, ImageError> {
    let answer = fetching(Vec::new(), LOOK_MAX).run(request, |_| ());
    answered(answer.map_err(|error| refused(&error))?)
}

fn answered(answer: Fetched) -> Result<Fetched, ImageError> {
    match answer {
        Fetched::Refused(Refusal { fault, message }) => {
            let message = printable(&message).into_owned();
            Err(ImageError::Refused(Refusal { fault, message }))
        }
        answer => Ok(answer),
    }
}

/// A process that reaches registries, for so long.
fn fetching(given: Vec<Given<'_>>, time: Duration) -> Order<'_> {
    let limits = Limits {
        deadline: Some(Instant::now() + time),
        answer_bytes: LOOKED_BYTES_MAX,
        ..Limits::of_memory(FETCH_MEMORY_BYTES)
    };
    let mut order = Order::new(FETCH.name, given, limits);
    order.network = HostNetwork::Kept;
    let files = RESOLVER_FILES.iter().map(PathBuf::from);
    order.shown = files.filter(|file| file.is_file()).map(Shown::read_only).collect();
    order
}

/// Starts a process that answers what the other end of `socket` asks for of an image. It ends when
/// what is given here is dropped.
///
/// # Errors
/// It cannot be started.
pub fn start(
    socket: &UnixStream,
    reference: &Reference,
    options: &RegistryOptions,
) -> Result<Running, ImageError> {
    let request = Fetch::Serve { reference: reference.to_string(), options: options.clone() };
    let order = fetching(vec![Given::file(socket)], TIME_MAX);
    order.start(&request).map_err(|error| refused(&error))
}

/// What `fetch` does, until nobody asks any more.
fn fetch(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let read =
        |text: String| text.parse::<Reference>().map_err(|error| Fault::Jail(error.to_string()));
    let done = match task.request()? {
        Fetch::Serve { reference, options } => {
            let (reference, socket) = (read(reference)?, UnixStream::from(task.take(0)?));
            registry_server(&socket, &reference, &judged(options))?;
            return Ok(Vec::new());
        }
        Fetch::LogIn { registry, options } => {
            exocell_images::log_in(&registry, &judged(options)).map(|()| Fetched::LoggedIn)
        }
        Fetch::Look { reference, options } => {
            exocell_images::look(&read(reference)?, &judged(options)).map(Fetched::Looked)
        }
        Fetch::Present { reference, options, layers } => {
            exocell_images::present(&read(reference)?, &judged(options), &layers)
                .map(Fetched::Present)
        }
        Fetch::Push { reference, options, layers, is_given } => {
            let reference = read(reference)?;
            let mut config = Vec::new();
            File::from(task.take(0)?).read_to_end(&mut config)?;
            let mut next = 0;
            let mut files = Vec::new();
            for (layer, is_given) in layers.into_iter().zip(is_given) {
                next += usize::from(is_given);
                let file = is_given.then(|| task.take(next).map(File::from)).transpose()?;
                files.push((layer, file));
            }
            let mut told = Teller::of(task);
            let options = judged(options);
            exocell_images::push(&reference, &options, files, &config, &mut told)
                .map(Fetched::Pushed)
        }
    };
    let answer = done.unwrap_or_else(|error| Fetched::Refused(error.refusal()));
    serde_json::to_vec(&answer).map_err(|error| Fault::Jail(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to<'a>(is_registry: bool, host: &'a str, address: &str) -> Connection<'a> {
        let address = address.parse().unwrap();
        Connection { is_registry, registry_is_here: false, host, port: 443, address }
    }

    #[test]
    fn a_cells_pull_goes_where_its_own_programs_may() {
        let own = vec!["192.31.196.1".parse().unwrap()];
        let rules = "connect *:443\nconnect registry.example:443\nconnect 10.0.0.5:443\n";
        let judge = held(Grant { rules: rules.to_owned(), own });
        for (connection, permitted) in [
            (to(true, "any.example", "9.9.9.9"), true),
            (to(true, "any.example", "10.0.0.1"), false),
            (to(true, "registry.example", "10.0.0.1"), true),
            (to(true, "registry.example", "127.0.0.1"), false),
            (to(true, "registry.example", "192.31.196.1"), false),
            (to(true, "localhost", "127.0.0.1"), false),
            (to(true, "10.0.0.5", "10.0.0.5"), true),
            (to(true, "10.0.0.6", "10.0.0.6"), false),
            // Where the registry sends us is to be everybody's.
            (to(false, "cdn.example", "9.9.9.9"), true),
            (to(false, "registry.example", "10.0.0.1"), false),
            (to(false, "cdn.example", "169.254.169.254"), false),
            (to(false, "cdn.example", "192.31.196.1"), false),
        ] {
            assert_eq!(judge(&connection).is_ok(), permitted, "{connection:?}");
        }
    }

    #[test]
    fn a_registry_sends_an_operator_to_no_service_of_this_host() {
        assert!(elsewhere(&to(true, "localhost", "127.0.0.1")).is_ok());
        assert!(elsewhere(&to(false, "cdn.example", "10.0.0.1")).is_ok());
        for address in ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1"] {
            assert!(elsewhere(&to(false, "cdn.example", address)).is_err(), "{address}");
        }
        let here = Connection { registry_is_here: true, ..to(false, "localhost", "127.0.0.1") };
        assert!(elsewhere(&here).is_ok());
    }
}
