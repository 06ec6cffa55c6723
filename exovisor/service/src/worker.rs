//! A worker: the process that runs the modules of one tenant, or of all.
//!
//! It is told which modules it has by whoever started it, and what to do with them by the process
//! that listens, on another socket ([`crate::wire`]). Both know modules by number.

use crate::ServiceError;
use crate::call::{Done, Module, Work};
use crate::engine::Engine;
use crate::http::Answer;
use crate::wire::{self, Frames, REQUEST_BYTES_MAX};
use exocell_exovisor::{AdmissionError, Compiled, Jailed, Network, Pool};
use exocell_xgate::CapabilitySet;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a worker is set up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// Its pool.
    pub pool: Pool,
    /// Bytes of a command's standard output.
    pub output_bytes: usize,
    /// Whether it is the only worker.
    pub is_only: bool,
}

/// A module as its worker is told of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModuleOrder {
    /// By which requests name it.
    pub id: u32,
    /// Whose it is.
    pub tenant: String,
    /// Its capability table, as JSON.
    pub caps: String,
}

/// Modules, and calls that run.
pub struct Worker {
    engine: Engine,
    known: Mutex<Known>,
    incoming: Mutex<Incoming>,
    /// Where answers go.
    answers: Mutex<UnixStream>,
}

/// What has come and was not begun.
struct Incoming {
    from: UnixStream,
    frames: Frames,
    /// Why nothing more comes.
    end: Option<io::Result<()>>,
}

impl Incoming {
    /// What there is now, without waiting.
    fn take(&mut self) -> Vec<(u64, u32, Work)> {
        let mut requests = Vec::new();
        if self.end.is_none() {
            self.end = self.read(&mut requests).err().map(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => Ok(()),
                _ => Err(error),
            });
            if self.end.is_some() {
                // All that wait here hear of it.
                let _ = self.from.shutdown(Shutdown::Both);
            }
        }
        requests
    }

    fn read(&mut self, requests: &mut Vec<(u64, u32, Work)>) -> io::Result<()> {
        match recv(self.from.as_raw_fd(), self.frames.room(), MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.frames.came(count),
            // Another thread was first.
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let broken = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        while let Some(frame) = self.frames.next(REQUEST_BYTES_MAX).map_err(broken)? {
            requests.push(wire::read_request(frame).map_err(broken)?);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Known {
    /// Those that cannot be called have a reason.
    modules: HashMap<u32, Result<Arc<Module>, Answered>>,
    /// Requests that came before their module.
    parked: HashMap<u32, Vec<(u64, Work)>>,
}

/// A status and words, for a module that is not there.
type Answered = (u16, String);

impl Worker {
    /// For requests that come over `requests`.
    ///
    /// # Errors
    /// [`ServiceError`]: no threads, no descriptors.
    pub fn new(config: &WorkerConfig, requests: &UnixStream) -> Result<Arc<Self>, ServiceError> {
        let engine = Engine::new(config.pool.clone(), config.output_bytes, config.is_only)?;
        let socket = || requests.try_clone().map_err(ServiceError::Worker);
        let incoming = Incoming { from: socket()?, frames: Frames::default(), end: None };
        Ok(Arc::new(Self {
            engine,
            known: Mutex::default(),
            incoming: Mutex::new(incoming),
            answers: Mutex::new(socket()?),
        }))
    }

    /// Takes a module that was compiled elsewhere, for requests that name it from now on or have
    /// named it already. One that cannot be had is an error for these.
    pub fn load(
        self: &Arc<Self>,
        order: &ModuleOrder,
        compiled: &Compiled,
        jailed: &Jailed,
        network: Option<Arc<dyn Network>>,
    ) {
        let read = |text: &str| CapabilitySet::parse(text, std::path::Path::new("/"));
        let caps = read(&order.caps)
            .map_err(|error| AdmissionError::Engine { message: error.to_string() });
        let module =
            caps.and_then(|caps| self.engine.load(&order.tenant, compiled, jailed, caps, network));
        let module = module.map(Arc::new).map_err(|error| (500, error.to_string()));
        self.put(order.id, module);
    }

    /// A module that could not be had, and why.
    pub fn refuse(self: &Arc<Self>, id: u32, why: String) {
        self.put(id, Err((500, why)));
    }

    /// Lets go of a module. Its calls that run go on.
    pub fn forget(self: &Arc<Self>, id: u32) {
        self.put(id, Err((404, "the module was removed".to_owned())));
    }

    fn put(self: &Arc<Self>, id: u32, module: Result<Arc<Module>, Answered>) {
        let mut known = self.known();
        known.modules.insert(id, module.clone());
        let parked = known.parked.remove(&id).unwrap_or_default();
        drop(known);
        for (number, work) in parked {
            self.begin(number, &module, work);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what is asked, until nobody is left to ask: the threads that run calls wait for
    /// requests, and this one while they have something to do.
    ///
    /// # Errors
    /// The socket's, and `InvalidData` for what is no request.
    pub fn serve(self: &Arc<Self>, requests: &UnixStream) -> io::Result<()> {
        let worker = Arc::downgrade(self);
        let take = move || {
            if let Some(worker) = worker.upgrade() {
                let came = worker.incoming().take();
                came.into_iter().for_each(|(number, id, work)| worker.take(number, id, work));
            }
        };
        self.engine.attend(requests.as_fd(), Box::new(take), || self.incoming().end.is_some())?;
        self.incoming().end.take().unwrap_or(Ok(()))
    }

    fn incoming(&self) -> MutexGuard<'_, Incoming> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, number: u64, id: u32, work: Work) {
        let mut known = self.known();
        match known.modules.get(&id).cloned() {
            Some(module) => {
                drop(known);
                self.begin(number, &module, work);
            }
            None => known.parked.entry(id).or_default().push((number, work)),
        }
    }

    fn begin(self: &Arc<Self>, number: u64, module: &Result<Arc<Module>, Answered>, work: Work) {
        match module {
            Ok(module) => {
                let worker = Arc::clone(self);
                let told = Box::new(move |done: Done| worker.answer(number, &done));
                self.engine.begin(module, work, told);
            }
            Err((status, why)) => self.answer(number, &Answer::error(*status, why).into()),
        }
    }

    fn answer(&self, number: u64, done: &Done) {
        let bytes = wire::answer(number, done);
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        // Who does not listen any more is seen to be gone where requests come from.
        let _ = answers.write_all(&bytes);
    }
}
