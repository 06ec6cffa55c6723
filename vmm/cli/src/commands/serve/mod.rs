//! `exocell serve`: the Docker Engine API and E2B's protocol over cells, modules over HTTP, and a
//! page that shows the cells.

use exocell_cell::intra::Intra;
use exocell_cell::plan::VCPUS_MAX;
use exocell_cell::xgate::{Endpoint, parse_bytes};
use exocell_cell::{CellError, Layout};
use exocell_docker::{Defaults, GIVEN, Options, host_memory, serve as serve_docker};
use exocell_service::{Bound, Pool, ServiceError, WorkerRules};
use exocell_ui::Key;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use super::run::network_rule;
use crate::args::{ServeArgs, Workers};
use crate::show::say;

mod keeper;
mod outfit;
mod stages;

pub use stages::STAGES;

/// The template that E2B's clients want where nobody says, and its image.
const TEMPLATE: &str = "base";
const BASE: &str = "exocell/base:latest";
/// A container's memory where nobody says, on a host that has four times it.
const MEMORY_BYTES: u64 = 2 << 30;

/// A front, and how it is served.
type Front<'a> = Box<dyn FnOnce() -> Result<u8, CellError> + Send + 'a>;

/// One front on this thread; if there are more, the others on their own.
pub fn serve(layout: &Layout, args: &ServeArgs) -> Result<u8, CellError> {
    let mut fronts: Vec<Front<'_>> = Vec::new();
    if let Some(socket) = &args.docker {
        fronts.push(Box::new(|| docker(layout, args, socket)));
    }
    if let Some(address) = &args.e2b {
        fronts.push(Box::new(|| e2b(layout, args, address)));
    }
    if let Some(place) = &args.http {
        fronts.push(Box::new(|| http(layout, args, place)));
    }
    if let Some(address) = &args.ui {
        fronts.push(Box::new(|| ui(layout, args, address)));
    }
    let mut fronts = fronts.into_iter();
    let own = fronts.next();
    let missing = || CellError::Usage("say --docker, --e2b, --http or --ui".to_owned());
    let own = own.ok_or_else(missing)?;
    std::thread::scope(|scope| {
        for other in fronts {
            scope.spawn(move || {
                if let Err(error) = other() {
                    crate::show::complain(&error);
                    std::process::exit(125);
                }
            });
        }
        own()
    })
}

fn http(layout: &Layout, args: &ServeArgs, place: &str) -> Result<u8, CellError> {
    let refused = |error: ServiceError| CellError::Usage(error.to_string());
    let calls = Bound::bind(place).map_err(refused)?;
    let metrics = args.metrics.as_deref().map(Bound::bind).transpose().map_err(refused)?;
    let pool = Pool { isolates: args.isolates, stacks: args.isolates, ..Pool::default() };
    let rules = WorkerRules {
        is_shared: args.workers == Workers::Shared,
        workers_max: args.workers_max as usize,
        idle: Duration::from_secs(args.worker_idle),
    };
    let ready = || {
        for bound in [metrics.as_ref(), Some(&calls)].into_iter().flatten() {
            say!("exocell serves {}", bound.place());
        }
    };
    keeper::serve(layout, pool, rules, &calls, metrics.as_ref(), ready)
}

fn docker(layout: &Layout, args: &ServeArgs, socket: &Path) -> Result<u8, CellError> {
    let defaults = defaults(args.memory.as_deref(), &args.disk, args.pids_limit, &args.allow_net)?;
    let socket = match socket == Path::new(GIVEN) {
        true => socket.to_owned(),
        false => std::path::absolute(socket).map_err(CellError::host("cannot listen"))?,
    };
    let options = Options { layout: layout.clone(), socket, defaults };
    let ready = |path: &Path| say!("exocell serves unix://{}", path.display());
    serve_docker(&options, ready).map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
}

fn e2b(layout: &Layout, args: &ServeArgs, address: &str) -> Result<u8, CellError> {
    let defaults = defaults(args.memory.as_deref(), &args.disk, args.pids_limit, &args.allow_net)?;
    let mut templates = BTreeMap::from([(TEMPLATE.to_owned(), BASE.to_owned())]);
    for text in &args.template {
        let pair =
            text.split_once('=').filter(|(name, image)| !name.is_empty() && !image.is_empty());
        let (name, image) = pair
            .ok_or_else(|| CellError::Usage(format!("--template: `{text}` is not NAME=IMAGE")))?;
        templates.insert(name.to_owned(), image.to_owned());
    }
    let pool = pool(&args.pool, &templates)?;
    let options = exocell_e2b::Options {
        layout: layout.clone(),
        address: address.to_owned(),
        defaults,
        templates,
        domain: args.e2b_domain.clone(),
        keys: args.e2b_keys.clone(),
        sandboxes_max: args.e2b_sandboxes as usize,
        timeout_max: args.e2b_timeout_max,
        pool,
        port: 0,
    };
    let ready = |at: SocketAddr, key: Option<&Path>| {
        if let Some(key) = key {
            crate::show::tell!("exocell: the key for E2B's clients is in {}", key.display());
        }
        say!("exocell serves http://{at}");
    };
    exocell_e2b::serve(options, ready).map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
}

fn ui(layout: &Layout, args: &ServeArgs, address: &str) -> Result<u8, CellError> {
    let options = exocell_ui::Options {
        layout: layout.clone(),
        address: address.to_owned(),
        key: args.ui_key.clone(),
        hosts: args.ui_host.clone(),
    };
    let ready = |at: SocketAddr, key: &Key| match key {
        Key::Own(key) => say!("exocell serves http://{at}/#{key}"),
        Key::File(path) => {
            crate::show::tell!("exocell: the page's key is in {}", path.display());
            say!("exocell serves http://{at}/");
        }
    };
    exocell_ui::serve(options, ready).map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
}

/// How many sandboxes of which template wait, as `--pool` says: the last word on one counts.
fn pool(
    texts: &[String],
    templates: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, usize>, CellError> {
    let mut all = BTreeMap::new();
    for text in texts {
        let (name, count) = match text.rsplit_once('=') {
            Some((name, count)) => (Some(name), count),
            None => (None, text.as_str()),
        };
        let wrong = || {
            CellError::Usage(format!("--pool: `{text}` is not [TEMPLATE=]N, with N up to 10000"))
        };
        let count = count.parse().ok().filter(|count| *count <= 10_000).ok_or_else(wrong)?;
        match name {
            Some("") => return Err(wrong()),
            Some(name) => drop(all.insert(name.to_owned(), count)),
            None => all.extend(templates.keys().map(|name| (name.clone(), count))),
        }
    }
    Ok(all)
}

/// What a cell gets where nobody names a limit.
pub(super) fn defaults(
    memory: Option<&str>,
    disk: &str,
    processes: u32,
    allow_net: &[String],
) -> Result<Defaults, CellError> {
    let size = |flag: &str, text: &str| {
        parse_bytes(text).map_err(|error| CellError::Usage(format!("{flag}: {error}")))
    };
    let memory_bytes = match memory {
        Some(text) => size("--memory", text)?,
        None => MEMORY_BYTES.min(host_memory() / 2),
    };
    let host = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    Ok(Defaults {
        memory_bytes,
        disk_bytes: size("--disk", disk)?,
        vcpus: host.min(VCPUS_MAX),
        processes,
        intra: Intra::preferred().map_err(CellError::Usage)?,
        connect: rules(allow_net)?,
    })
}

/// The rules of `--allow-net` as a capability table has them.
fn rules(texts: &[String]) -> Result<Vec<String>, CellError> {
    let read = |text: &String| {
        let rule = network_rule(text);
        match rule.parse::<Endpoint>() {
            Ok(_) => Ok(rule),
            Err(error) => Err(CellError::Usage(format!("--allow-net: {error}"))),
        }
    };
    texts.iter().map(read).collect()
}
