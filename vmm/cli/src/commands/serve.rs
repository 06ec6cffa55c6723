//! `exocell serve`: the Docker Engine API over cells, and modules over HTTP.

use exocell_cell::intra::Intra;
use exocell_cell::plan::VCPUS_MAX;
use exocell_cell::xgate::{Endpoint, parse_bytes};
use exocell_cell::{CellError, Layout, relayed};
use exocell_docker::{Defaults, Options, host_memory, serve as serve_docker};
use exocell_service::{Limits, Networks, Pool, Service, ServiceError};
use std::path::Path;

use super::module;
use super::run::network_rule;
use crate::args::ServeArgs;
use crate::show::say;

/// A container's memory where nobody says, on a host that has four times it.
const MEMORY_BYTES: u64 = 2 << 30;

/// One front on this thread; if there are two, the other on its own.
pub fn serve(layout: &Layout, args: &ServeArgs) -> Result<u8, CellError> {
    match (&args.docker, &args.http) {
        (Some(socket), None) => docker(layout, args, socket),
        (None, Some(place)) => http(service(layout, args)?, place, args.metrics.as_deref()),
        (Some(socket), Some(place)) => {
            let (service, place) = (service(layout, args)?, place.clone());
            let metrics = args.metrics.clone();
            std::thread::spawn(move || {
                if let Err(error) = http(service, &place, metrics.as_deref()) {
                    eprintln!("exocell: {error}");
                    std::process::exit(125);
                }
            });
            docker(layout, args, socket)
        }
        (None, None) => Err(CellError::Usage("say --docker or --http".to_owned())),
    }
}

fn service(layout: &Layout, args: &ServeArgs) -> Result<Service, CellError> {
    let refused = |error: ServiceError| CellError::Usage(error.to_string());
    let pool = Pool { isolates: args.isolates, stacks: args.isolates, ..Pool::default() };
    let decisions = layout.networks();
    let networks: Networks = Box::new(move |module, caps| {
        relayed::of_this_process(caps, &decisions.join(module)).map_err(|error| error.to_string())
    });
    Service::new(&module::store(layout)?, pool, Limits::default(), networks).map_err(refused)
}

fn http(service: Service, place: &str, metrics: Option<&str>) -> Result<u8, CellError> {
    let served = service.run(place, metrics, |place| say!("exocell serves {place}"));
    served.map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
}

fn docker(layout: &Layout, args: &ServeArgs, socket: &Path) -> Result<u8, CellError> {
    let size = |flag: &str, text: &str| {
        parse_bytes(text).map_err(|error| CellError::Usage(format!("{flag}: {error}")))
    };
    let memory_bytes = match &args.memory {
        Some(text) => size("--memory", text)?,
        None => MEMORY_BYTES.min(host_memory() / 2),
    };
    let host = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let defaults = Defaults {
        memory_bytes,
        disk_bytes: size("--disk", &args.disk)?,
        vcpus: host.min(VCPUS_MAX),
        processes: args.pids_limit,
        intra: Intra::preferred().map_err(CellError::Usage)?,
        connect: rules(&args.allow_net)?,
    };
    let socket = std::path::absolute(socket).map_err(CellError::host("cannot listen"))?;
    let options = Options { layout: layout.clone(), socket, defaults };
    let ready = || say!("exocell serves unix://{}", options.socket.display());
    serve_docker(&options, ready).map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
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
