//! What the jailed processes of `exocell serve --http` do: the front and the workers.

use exocell_cell::compile::jailed;
use exocell_cell::exovisor::Compiled;
use exocell_cell::relayed;
use exocell_cell::vmm::jail::stage::{Fault, Link, Stage, Task};
use exocell_cell::vmm::jail::{ThreadClass, restrict_calls};
use exocell_cell::xgate::CapabilitySet;
use exocell_service::{
    Ask, Bound, Gateway, Limits, Lines, Listing, ModuleOrder, Pool, Reception, Told, Worker,
    WorkerConfig, WorkerRules,
};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

/// Both of them.
pub const STAGES: &[Stage] = &[FRONT, WORKER];
/// The process that clients speak with.
pub const FRONT: Stage = Stage { name: "front", class: ThreadClass::Front, work: front };
/// A process that runs modules.
pub const WORKER: Stage = Stage { name: "worker", class: ThreadClass::WorkerLoading, work: worker };

/// What the front is told when it starts. It is given the socket for calls and, if there is one,
/// that for the operator.
#[derive(Serialize, Deserialize)]
pub struct FrontOrder {
    pub limits: Limits,
    pub rules: WorkerRules,
    pub pool: Pool,
    pub calls_are_tcp: bool,
    pub metrics_are_tcp: Option<bool>,
    pub listing: Listing,
}

/// What a worker is told while it runs.
#[derive(Serialize, Deserialize)]
pub enum WorkerOrder {
    /// A module, whose code comes with it, and the channel to its dialer if it has a network.
    Load {
        module: ModuleOrder,
        /// Where the network's decisions are written down.
        network: Option<PathBuf>,
    },
    /// It is no more.
    Forget { id: u32 },
}

fn front(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let order: FrontOrder = task.request()?;
    let FrontOrder { limits, rules, pool, calls_are_tcp, metrics_are_tcp, listing } = order;
    let calls = Bound::of(task.take(0)?, calls_are_tcp);
    let metrics = match metrics_are_tcp {
        Some(is_tcp) => Some(Bound::of(task.take(1)?, is_tcp)),
        None => None,
    };
    let asks = Mutex::new(task.link()?);
    let ask = move |ask: Ask| {
        let asks = asks.lock().unwrap_or_else(PoisonError::into_inner);
        // Without a keeper this process is about to end.
        let _ = asks.send(&[], &ask);
    };
    let reception = Reception::new(rules, limits, &pool, Box::new(ask))?;
    let (gateway, lines) = (Arc::clone(&reception.gateway), Arc::clone(&reception.lines));
    gateway.list(listing);
    let link = task.link()?;
    std::thread::Builder::new().name("keeper".to_owned()).spawn(move || {
        while let Ok(Some((message, descriptors))) = link.receive() {
            hear(message, descriptors, &lines, &gateway);
        }
        std::process::exit(0);
    })?;
    let served = reception.run(calls, metrics);
    served.map(|()| Vec::new()).map_err(|error| Fault::Jail(error.to_string()))
}

fn hear(message: Told, descriptors: Vec<OwnedFd>, lines: &Arc<Lines>, gateway: &Gateway) {
    match message {
        Told::Listing(listing) => gateway.list(listing),
        Told::Started { number, is_kept } => {
            let started = match descriptors.into_iter().next() {
                Some(socket) => lines.started(number, UnixStream::from(socket), is_kept),
                None => Err(std::io::ErrorKind::NotFound.into()),
            };
            if let Err(error) = started {
                lines.failed(number, &error.to_string());
            }
        }
        Told::Failed { number, why } => lines.failed(number, &why),
        Told::Ended { number, how } => lines.ended(number, &how),
        Told::Outdated { number } => lines.outdated(number),
    }
}

fn worker(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let config: WorkerConfig = task.request()?;
    let requests = UnixStream::from(task.take(0)?);
    let (send, made) = mpsc::channel();
    // All that this thread starts, and that is all there is but this one, has its filter.
    std::thread::Builder::new().name("requests".to_owned()).spawn(move || {
        let worker = restrict_calls(ThreadClass::Worker)
            .map_err(|error| error.to_string())
            .and_then(|()| Worker::new(&config, &requests).map_err(|error| error.to_string()));
        let kept = worker.as_ref().ok().cloned();
        let _ = send.send(worker);
        if let Some(worker) = kept
            && let Err(error) = worker.serve(&requests)
        {
            crate::show::tell!("requests: {error}");
        }
        std::process::exit(0);
    })?;
    let worker = made.recv().map_err(|error| Fault::Jail(error.to_string()))?;
    let worker = worker.map_err(Fault::Jail)?;
    let orders = task.link()?;
    obey(task, &orders, &worker)?;
    Ok(Vec::new())
}

fn obey(task: &Task, orders: &Link, worker: &Arc<Worker>) -> Result<(), Fault> {
    while let Some((order, descriptors)) = orders.receive()? {
        match order {
            WorkerOrder::Forget { id } => worker.forget(id),
            WorkerOrder::Load { module, network } => {
                let id = module.id;
                if let Err(why) = load(task, worker, &module, network, descriptors) {
                    worker.refuse(id, why);
                }
            }
        }
    }
    Ok(())
}

fn load(
    task: &Task,
    worker: &Arc<Worker>,
    module: &ModuleOrder,
    network: Option<PathBuf>,
    descriptors: Vec<OwnedFd>,
) -> Result<(), String> {
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or("a descriptor is missing");
    let compiled = Compiled::read(&File::from(next()?));
    let compiled = compiled.map_err(|error| format!("its compiled form: {error}"))?;
    let network = match network {
        None => None,
        Some(directory) => {
            let caps = CapabilitySet::parse(&module.caps, Path::new("/"));
            let caps = caps.map_err(|error| error.to_string())?;
            let network = relayed::of_channel(&caps, next()?, &directory);
            Some(network.map_err(|error| error.to_string())?)
        }
    };
    worker.load(module, &compiled, &jailed(task), network);
    Ok(())
}
