//! Registries are reached by jailed processes: images are fetched and sent, logins tried.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use exocell_agent::printable;
use exocell_images::{
    ImageError, Looked, Progress, Pushed, Reference, Refusal, RegistryOptions, Store,
    registry_server,
};
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Running, Shown, Stage, Task};
use exocell_vmm::jail::{HostNetwork, ThreadClass};
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
/// The longest layer that is sent, in bytes, as it is packed.
const PACKED_BYTES_MAX: u64 = 64 << 30;
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
    /// Descriptors: the layer, an empty file for what it becomes, and the configuration.
    Push {
        reference: String,
        options: RegistryOptions,
    },
}

/// What it answers to the others.
#[derive(Serialize, Deserialize)]
enum Fetched {
    LoggedIn,
    Looked(Looked),
    Pushed(Pushed),
    Refused(Refusal),
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

/// Pushes an image of one layer, a tar file, as `reference`, in a jailed process. `store` is where
/// the packed layer lies meanwhile.
///
/// # Errors
/// The credentials do not do; what the registry refuses; the host's, where there is no room.
pub fn push(
    store: &Store,
    reference: &Reference,
    options: &RegistryOptions,
    (layer, config): (&File, &[u8]),
    progress: &mut dyn Progress,
) -> Result<Pushed, ImageError> {
    let (packed, mut document) = (store.scratch()?, store.scratch()?);
    let written = document.write_all(config).and_then(|()| document.rewind());
    written.map_err(|error| host("cannot write the configuration", error))?;
    let request = Fetch::Push { reference: reference.to_string(), options: options.clone() };
    let given = [layer, &packed, &document].into_iter().map(Given::file).collect();
    let mut order = fetching(given, TIME_MAX);
    order.limits.file_bytes = PACKED_BYTES_MAX;
    let answer = order.run(&request, |line| Step::hear(line, progress));
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
            registry_server(&socket, &reference, &options)?;
            return Ok(Vec::new());
        }
        Fetch::LogIn { registry, options } => {
            exocell_images::log_in(&registry, &options).map(|()| Fetched::LoggedIn)
        }
        Fetch::Look { reference, options } => {
            exocell_images::look(&read(reference)?, &options).map(Fetched::Looked)
        }
        Fetch::Push { reference, options } => {
            let reference = read(reference)?;
            let (layer, packed) = (File::from(task.take(0)?), File::from(task.take(1)?));
            let mut config = Vec::new();
            File::from(task.take(2)?).read_to_end(&mut config)?;
            let mut told = Teller::of(task);
            exocell_images::push(&reference, &options, &layer, packed, &config, &mut told)
                .map(Fetched::Pushed)
        }
    };
    let answer = done.unwrap_or_else(|error| Fetched::Refused(error.refusal()));
    serde_json::to_vec(&answer).map_err(|error| Fault::Jail(error.to_string()))
}
