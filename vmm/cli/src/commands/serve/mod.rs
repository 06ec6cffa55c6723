//! `exocell serve`: the Docker Engine API over cells, and modules over HTTP.

use exocell_cell::intra::Intra;
use exocell_cell::plan::VCPUS_MAX;
use exocell_cell::xgate::{Endpoint, parse_bytes};
use exocell_cell::{CellError, Layout};
use exocell_docker::{Defaults, GIVEN, Options, host_memory, serve as serve_docker};
use exocell_service::{Bound, Pool, ServiceError, WorkerRules};
use std::path::Path;
use std::time::Duration;

use super::run::network_rule;
use crate::args::{ServeArgs, Workers};
use crate::show::say;

mod keeper;
mod outfit;
mod stages;

pub use stages::STAGES;

/// A container's memory where nobody says, on a host that has four times it.
const MEMORY_BYTES: u64 = 2 << 30;

/// One front on this thread; if there are two, the other on its own.
pub fn serve(layout: &Layout, args: &ServeArgs) -> Result<u8, CellError> {
    match (&args.docker, &args.http) {
        (Some(socket), None) => docker(layout, args, socket),
        (None, Some(place)) => http(layout, args, place),
        (Some(socket), Some(place)) => std::thread::scope(|scope| {
            scope.spawn(|| {
                if let Err(error) = http(layout, args, place) {
                    eprintln!("exocell: {error}");
                    std::process::exit(125);
                }
            });
            docker(layout, args, socket)
        }),
        (None, None) => Err(CellError::Usage("say --docker or --http".to_owned())),
    }
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
