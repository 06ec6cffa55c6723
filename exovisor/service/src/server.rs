//! Connections, and which request goes where.

use crate::call::{Module, Run};
use crate::http::{self, Answer, Limits, Over, Request};
use crate::keys;
use crate::listener::Listener;
use crate::loaded::{Account, Loaded, Loader};
use crate::metrics::{self, Place, Tenant};
use crate::store::{ModuleStore, StoreError};
use exocell_exovisor::{
    Admission, AdmissionError, Network, Policy, Pool, Scheduler, SchedulerConfig, SchedulerError,
};
use exocell_xgate::CapabilitySet;
use percent_encoding::percent_decode_str;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

/// How often it looks whether modules came or went.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Why there is no service.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The modules cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// One of them is not admitted any more.
    #[error("module {name}: {source}")]
    Module {
        /// Which.
        name: String,
        /// Why.
        source: AdmissionError,
    },
    /// The network of one of them cannot be made.
    #[error("module {name}: {message}")]
    Network {
        /// Which.
        name: String,
        /// Why.
        message: String,
    },
    /// It cannot be listened there.
    #[error("cannot listen at {place}: {source}")]
    Listen {
        /// Where.
        place: String,
        /// Why.
        source: std::io::Error,
    },
    /// No workers.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
}

/// For whom a listener is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// Tenants: calls, and each its own figures.
    Calls,
    /// The operator: the figures of all.
    Metrics,
}

/// Makes the network that a module of this name has by its table, if it has one.
pub type Networks =
    Box<dyn Fn(&str, &CapabilitySet) -> Result<Option<Arc<dyn Network>>, String> + Send + Sync>;

/// All modules of a store, ready to be called.
pub struct Service {
    loader: Loader,
    loaded: RwLock<Arc<Loaded>>,
    scheduler: Scheduler,
    limits: Limits,
    place: Place,
}

impl Service {
    /// Admits every module of `store`, into a pool of these sizes.
    ///
    /// # Errors
    /// [`ServiceError`] names the first module that cannot be served.
    pub fn new(
        store: &ModuleStore,
        pool: Pool,
        limits: Limits,
        networks: Networks,
    ) -> Result<Self, ServiceError> {
        // A tenant may use up half of the pool and of the connections, and no more.
        let half = |all: usize| (all / 2).max(1);
        let begun_max = half(pool.isolates as usize);
        let place = Place { slots: pool.slots, isolates: pool.isolates };
        let scheduler =
            Scheduler::new(&SchedulerConfig { begun_max, ..SchedulerConfig::default() })?;
        let loader = Loader {
            store: store.clone(),
            admission: Admission::new(Policy::pooled(pool)),
            models: exocell_exovisor::Models::default(),
            calls_max: half(limits.connections),
            networks,
        };
        let mut refused = None;
        let loaded = loader.load(&Loaded::default(), &scheduler, |error| {
            refused.get_or_insert(error);
        })?;
        match refused {
            Some(error) => Err(error),
            None => {
                let loaded = RwLock::new(Arc::new(loaded));
                Ok(Self { loader, loaded, scheduler, limits, place })
            }
        }
    }

    /// Serves what the store holds by now; a call that runs is not touched. A module that cannot
    /// be served is told to `refused` and left out.
    ///
    /// # Errors
    /// [`StoreError`]; then all is as it was.
    pub fn reload(&self, refused: impl FnMut(ServiceError)) -> Result<(), StoreError> {
        let loaded = self.loader.load(&self.loaded(), &self.scheduler, refused)?;
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(loaded);
        Ok(())
    }

    /// Listens at `calls` and, for the operator, at `metrics` (see [`Listener::bind`]) and serves
    /// until the process ends; modules that are added or removed meanwhile are, too. `ready` is
    /// told where, once clients may come.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub fn run(
        self,
        calls: &str,
        metrics: Option<&str>,
        ready: impl Fn(&str),
    ) -> Result<(), ServiceError> {
        let failed = |source| ServiceError::Listen { place: calls.to_owned(), source };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(failed)?;
        let service = Arc::new(self);
        runtime.block_on(async {
            if let Some(place) = metrics {
                let (service, listener) = (Arc::clone(&service), Listener::bind(place).await?);
                ready(&listener.place());
                tokio::spawn(async move { service.serve(listener, Front::Metrics).await });
            }
            let listener = Listener::bind(calls).await?;
            let reloading = Arc::clone(&service);
            let thread = std::thread::Builder::new().name("modules".to_owned());
            thread.spawn(move || reloading.keep_loaded()).map_err(failed)?;
            ready(&listener.place());
            service.serve(listener, Front::Calls).await;
            Ok(())
        })
    }

    fn keep_loaded(&self) {
        let mut known = None;
        loop {
            std::thread::sleep(RELOAD_INTERVAL);
            let changed = self.loader.store.changed();
            if changed.is_some() && changed == known {
                continue;
            }
            let told = |error: ServiceError| eprintln!("exocell: not served: {error}");
            match self.reload(told) {
                Ok(()) => known = changed,
                Err(error) => eprintln!("exocell: {error}"),
            }
        }
    }

    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves clients until the future is dropped.
    pub async fn serve(self: &Arc<Self>, listener: Listener, front: Front) {
        let room = Arc::new(Semaphore::new(self.limits.connections));
        loop {
            // It is never closed.
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let Ok(mut stream) = listener.accept().await else {
                // Out of descriptors, most likely; some come back as clients go.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let service = Arc::clone(self);
            tokio::spawn(async move {
                service.client(&mut stream, front).await;
                drop(permit);
            });
        }
    }

    /// Answers one client's requests until it goes, or is told why it must.
    pub async fn client(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        front: Front,
    ) {
        let mut buffer = Vec::new();
        loop {
            match http::read(stream, &mut buffer, &self.limits).await {
                Ok(request) => {
                    let answer = self.answer(&request, front).await;
                    let keep = request.keep_alive;
                    if !http::write(stream, &answer, keep, &self.limits).await || !keep {
                        return;
                    }
                }
                Err(Over::Gone) => return,
                Err(Over::Refused(answer)) => {
                    http::write(stream, &answer, false, &self.limits).await;
                    return;
                }
            }
        }
    }

    async fn answer(&self, request: &Request, front: Front) -> Answer {
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match (front, request.method.as_str(), &parts[..]) {
            (Front::Metrics, "GET", ["metrics"]) => self.metrics(),
            (Front::Metrics, _, _) => Answer::error(404, "there is nothing here; try GET /metrics"),
            (Front::Calls, "GET", ["v1", "stats"]) => self.stats(request),
            (Front::Calls, "POST", ["v1", "call", module, function]) => {
                let call = async |module: &Module| {
                    module.call(&self.scheduler, function, &request.body).await
                };
                self.permitted(request, module, call).await
            }
            (Front::Calls, "POST", ["v1", "run", name]) => {
                let command = async |module: &Module| self.command(request, name, module).await;
                self.permitted(request, name, command).await
            }
            (Front::Calls, _, ["v1", "stats"] | ["v1", "call", _, _] | ["v1", "run", _]) => {
                Answer::error(405, "another method is needed")
            }
            _ => Answer::error(
                404,
                "there is nothing here; try /v1/run/MODULE or /v1/call/MODULE/FUNCTION",
            ),
        }
    }

    async fn command(&self, request: &Request, name: &str, module: &Module) -> Answer {
        match arguments(&request.query) {
            Ok(args) => {
                let run = Run {
                    args: std::iter::once(name.to_owned()).chain(args).collect(),
                    stdin: &request.body,
                    output_bytes: self.limits.output_bytes,
                    as_json: request.wants_json,
                };
                module.run(&self.scheduler, run).await
            }
            Err(message) => Answer::error(400, message),
        }
    }

    /// What `answer` says, if the key is one of the module's tenant and that has room. A wrong key
    /// hears the same whether the module exists or not.
    async fn permitted(
        &self,
        request: &Request,
        name: &str,
        answer: impl AsyncFnOnce(&Module) -> Answer,
    ) -> Answer {
        let (loaded, hash) = (self.loaded(), hash(request));
        let Some((module, owner)) = loaded.module(name) else { return wrong_key() };
        if !hash.is_some_and(|hash| owner.has(&hash)) {
            owner.deny();
            return wrong_key();
        }
        let answer = match owner.room.try_acquire() {
            Ok(_place) => answer(module).await,
            Err(_full) => Answer::error(429, "this tenant has too many calls at once; call again"),
        };
        if answer.is_denial() {
            owner.deny();
        }
        answer
    }

    fn stats(&self, request: &Request) -> Answer {
        let loaded = self.loaded();
        match hash(request).and_then(|hash| loaded.owner(&hash)) {
            Some(account) => {
                Answer::json(200, &metrics::json(&account.used(&self.scheduler), self.place))
            }
            None => Answer::error(401, "a key of a tenant is needed"),
        }
    }

    fn metrics(&self) -> Answer {
        let loaded = self.loaded();
        let used = |account| Account::used(account, &self.scheduler);
        let tenants: Vec<Tenant<'_>> = loaded.accounts().map(used).collect();
        Answer::text(metrics::prometheus(&tenants, self.place))
    }
}

/// The arguments of a query: `arg=A&arg=B`, percent-encoded.
fn arguments(query: &str) -> Result<Vec<String>, &'static str> {
    let mut arguments = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let value = pair.strip_prefix("arg=").ok_or("a query has arguments only: ?arg=A&arg=B")?;
        // A plus is a blank in a query.
        let value = value.replace('+', " ");
        let value =
            percent_decode_str(&value).decode_utf8().map_err(|_| "an argument is no UTF-8")?;
        if value.contains('\0') {
            return Err("an argument has a zero byte in it");
        }
        arguments.push(value.into_owned());
    }
    Ok(arguments)
}

/// Of the request's key.
fn hash(request: &Request) -> Option<String> {
    request.key.as_deref().map(keys::hash)
}

fn wrong_key() -> Answer {
    Answer::error(401, "the key is not one of the module's tenant")
}
