//! Connections, and which request goes where.

use crate::ServiceError;
use crate::call::{self, Done, Work};
use crate::engine::Engine;
use crate::guests::Guests;
use crate::http::{self, Answer, Limits, Over, Request};
use crate::keys;
use crate::lines::{Ask, Lines, WorkerRules};
use crate::listener::{Bound, Listener};
use crate::loaded::{Callable, ListedModule, ListedTenant, Listing, Loaded};
use crate::metrics::{self, Place, Tenant};
use crate::places::{Permit, Places};
use crate::runner::Runner;
use crate::store::{ModuleEntry, ModuleStore, StoreError};
use exocell_exovisor::{Network, Pool};
use exocell_xgate::CapabilitySet;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Threads that serve clients.
const CLIENT_THREADS: usize = 2;
/// How long a connection that was told to go may take until the next one is.
const ROOM_TIME: Duration = Duration::from_millis(20);

/// For whom a listener is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// Tenants: calls, and each its own figures.
    Calls,
    /// The operator: the figures of all.
    Metrics,
}

/// What becomes of a request.
struct Reply {
    answer: Answer,
    /// Of a client with a tenant's key: its place among the calls that the tenant may have at once.
    _place: Option<Permit>,
    has_key: bool,
}

impl From<Answer> for Reply {
    /// To a client that has shown no key.
    fn from(answer: Answer) -> Self {
        Self { answer, _place: None, has_key: false }
    }
}

/// Answers clients. It knows keys, names and bounds, and nothing of what modules are.
pub struct Gateway {
    loaded: RwLock<Arc<Loaded>>,
    runner: Arc<dyn Runner>,
    limits: Limits,
    place: Place,
    places: Places,
}

impl Gateway {
    fn over(runner: Arc<dyn Runner>, limits: Limits, pool: &Pool) -> Self {
        let place = Place { slots: pool.slots, isolates: pool.isolates };
        let places = Places::new(limits.connections);
        Self { loaded: RwLock::default(), runner, limits, place, places }
    }

    /// Serves this from now on; a call that runs is not touched.
    pub fn list(&self, listing: Listing) {
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        *loaded = Arc::new(Loaded::of(listing, &loaded));
    }

    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves clients until the future is dropped.
    pub async fn serve(self: &Arc<Self>, listener: Listener, front: Front) {
        let room = Arc::new(Semaphore::new(self.limits.connections));
        let guests = Arc::new(Guests::default());
        loop {
            let Ok(mut stream) = listener.accept().await else {
                // Out of descriptors, most likely; some come back as clients go.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let permit = loop {
                match Arc::clone(&room).try_acquire_owned() {
                    Ok(permit) => break permit,
                    // Where all of them answer, the next client waits, and others with it.
                    Err(_full) => guests.make_room(),
                }
                let came = timeout(ROOM_TIME, Arc::clone(&room).acquire_owned()).await;
                if let Ok(Ok(permit)) = came {
                    break permit;
                }
            };
            let (gateway, guests) = (Arc::clone(self), Arc::clone(&guests));
            tokio::spawn(async move {
                gateway.attend(&mut stream, front, &guests).await;
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
        self.attend(stream, front, &Guests::default()).await;
    }

    async fn attend(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        front: Front,
        guests: &Guests,
    ) {
        let mut buffer = Vec::new();
        loop {
            let wait = guests.wait();
            let read = tokio::select! {
                read = http::read(stream, &mut buffer, &self.limits) => read,
                () = wait.told_to_go() => return,
            };
            drop(wait);
            match read {
                Ok(mut request) => {
                    let reply = self.answer(&mut request, front).await;
                    // Who asks on and on and takes no answers must have a key.
                    let keep = request.keep_alive && (reply.has_key || front == Front::Metrics);
                    if !http::write(stream, &reply.answer, keep, &self.limits).await || !keep {
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

    async fn answer(&self, request: &mut Request, front: Front) -> Reply {
        let path = std::mem::take(&mut request.path);
        let method = std::mem::take(&mut request.method);
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        match (front, method.as_str(), &parts[..]) {
            (Front::Metrics, "GET", ["metrics"]) => self.metrics().into(),
            (Front::Metrics, _, _) => {
                Answer::error(404, "there is nothing here; try GET /metrics").into()
            }
            (Front::Calls, "GET", ["v1", "stats"]) => self.stats(request),
            (Front::Calls, "POST", ["v1", "call", module, function]) => {
                let function = (*function).to_owned();
                let call = |body| Ok(Work::Call { function, body });
                self.permitted(request, module, call).await
            }
            (Front::Calls, "POST", ["v1", "run", name]) => {
                let (query, as_json) = (request.query.clone(), request.wants_json);
                let command = |stdin| {
                    let args = arguments(&query)?;
                    let args = std::iter::once((*name).to_owned()).chain(args).collect();
                    Ok(Work::Run { args, stdin, as_json })
                };
                self.permitted(request, name, command).await
            }
            (Front::Calls, _, ["v1", "stats"] | ["v1", "call", _, _] | ["v1", "run", _]) => {
                Answer::error(405, "another method is needed").into()
            }
            _ => Answer::error(
                404,
                "there is nothing here; try /v1/run/MODULE or /v1/call/MODULE/FUNCTION",
            )
            .into(),
        }
    }

    /// What becomes of `work`, if the key is one of the module's tenant and that has room. A wrong
    /// key hears the same whether the module exists or not.
    async fn permitted(
        &self,
        request: &mut Request,
        name: &str,
        work: impl FnOnce(Vec<u8>) -> Result<Work, &'static str>,
    ) -> Reply {
        let (loaded, hash) = (self.loaded(), hash(request));
        let Some(callable) = loaded.module(name) else { return wrong_key().into() };
        let owner = &callable.owner;
        // What strangers try is not counted as the tenant's.
        if !hash.is_some_and(|hash| owner.has(&hash)) {
            return wrong_key().into();
        }
        let work = work(std::mem::take(&mut request.body));
        let (answer, place) = match (work, self.places.take(&owner.held, loaded.tenants())) {
            (Err(message), _) => (Answer::error(400, message), None),
            (_, None) => {
                let message = "this tenant has too many calls at once; call again";
                (Answer::error(429, message), None)
            }
            (Ok(work), Some(place)) => {
                let Done { answer, spent } = self.runner.run(callable, work).await;
                if let Some(spent) = spent {
                    owner.count(spent);
                }
                (answer, Some(place))
            }
        };
        if answer.is_denial() {
            owner.deny();
        }
        Reply { answer, _place: place, has_key: true }
    }

    fn stats(&self, request: &Request) -> Reply {
        let loaded = self.loaded();
        match hash(request).and_then(|hash| loaded.owner(&hash)) {
            Some(account) => {
                let answer = Answer::json(200, &metrics::json(&account.used(), self.place));
                Reply { answer, _place: None, has_key: true }
            }
            None => Answer::error(401, "a key of a tenant is needed").into(),
        }
    }

    fn metrics(&self) -> Answer {
        let loaded = self.loaded();
        let tenants: Vec<Tenant<'_>> = loaded.accounts().map(|account| account.used()).collect();
        Answer::text(metrics::prometheus(&tenants, self.place))
    }
}

/// All of the process that listens.
pub struct Reception {
    runtime: tokio::runtime::Runtime,
    /// Who answers its clients.
    pub gateway: Arc<Gateway>,
    /// Its way to the workers.
    pub lines: Arc<Lines>,
}

impl Reception {
    /// Workers that have such a pool each are asked for by `ask`, which must not wait.
    ///
    /// # Errors
    /// No threads, no descriptors.
    pub fn new(
        rules: WorkerRules,
        limits: Limits,
        pool: &Pool,
        ask: Box<dyn Fn(Ask) + Send + Sync>,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(CLIENT_THREADS)
            .thread_name("http")
            .enable_all()
            .build()?;
        let lines = Lines::new(rules, &limits, runtime.handle().clone(), ask);
        let runner = Arc::clone(&lines) as Arc<dyn Runner>;
        let gateway = Arc::new(Gateway::over(runner, limits, pool));
        Ok(Self { runtime, gateway, lines })
    }

    /// Lets clients of `calls` in and, for the operator, of `metrics`, until the process ends.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub fn run(self, calls: Bound, metrics: Option<Bound>) -> Result<(), ServiceError> {
        let Self { runtime, gateway, .. } = self;
        runtime.block_on(async {
            if let Some(bound) = metrics {
                let (gateway, listener) = (Arc::clone(&gateway), Listener::of(bound)?);
                tokio::spawn(async move { gateway.serve(listener, Front::Metrics).await });
            }
            gateway.serve(Listener::of(calls)?, Front::Calls).await;
            Ok(())
        })
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

/// Makes the network that a module of this name has by its table, if it has one.
pub type Networks =
    Box<dyn Fn(&str, &CapabilitySet) -> Result<Option<Arc<dyn Network>>, String> + Send + Sync>;

/// All modules of a store, compiled and run by this process: for tests and the fuzzing of clients.
/// What serves tenants has workers ([`Reception`]).
pub struct Service {
    gateway: Arc<Gateway>,
    here: Arc<Here>,
    store: ModuleStore,
    networks: Networks,
    known: Mutex<BTreeMap<String, (ModuleEntry, ListedModule)>>,
}

/// Modules that this process runs, by number.
struct Here {
    engine: Engine,
    modules: RwLock<Vec<Arc<call::Module>>>,
}

impl Runner for Here {
    fn run<'a>(
        &'a self,
        callable: &'a Callable,
        work: Work,
    ) -> Pin<Box<dyn Future<Output = Done> + Send + 'a>> {
        let modules = self.modules.read().unwrap_or_else(PoisonError::into_inner);
        let module = modules.get(callable.id as usize).cloned();
        drop(modules);
        let (send, told) = tokio::sync::oneshot::channel();
        if let Some(module) = module {
            // A client that went does not want to be told.
            self.engine.begin(&module, work, Box::new(move |done| drop(send.send(done))));
        }
        let ended = || Answer::error(500, "the service is shutting down").into();
        Box::pin(async move { told.await.unwrap_or_else(|_dropped| ended()) })
    }
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
        let engine = Engine::new(pool.clone(), limits.output_bytes, true)?;
        let here = Arc::new(Here { engine, modules: RwLock::default() });
        let runner = Arc::clone(&here) as Arc<dyn Runner>;
        let gateway = Arc::new(Gateway::over(runner, limits, &pool));
        let (store, known) = (store.clone(), Mutex::default());
        let service = Self { gateway, here, store, networks, known };
        let mut refused = None;
        service.reload(|error| {
            refused.get_or_insert(error);
        })?;
        match refused {
            Some(error) => Err(error),
            None => Ok(service),
        }
    }

    /// Serves what the store holds by now; a call that runs is not touched. A module that cannot
    /// be served is told to `refused` and left out.
    ///
    /// # Errors
    /// [`StoreError`]; then all is as it was.
    pub fn reload(&self, mut refused: impl FnMut(ServiceError)) -> Result<(), StoreError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut listing, mut now) = (Listing::default(), BTreeMap::new());
        let kept = self.store.list()?;
        kept.damaged.into_iter().for_each(|error| refused(error.into()));
        for entry in kept.entries {
            let same = known.get(&entry.name).filter(|(before, _)| *before == entry);
            let listed = match same {
                Some((_, listed)) => Ok(listed.clone()),
                None => self.load(&entry),
            };
            match listed {
                Ok(listed) => {
                    let key_sha256 = self.store.key_hash(&entry.tenant)?;
                    listing.tenants.push(ListedTenant { name: entry.tenant.clone(), key_sha256 });
                    listing.modules.push(listed.clone());
                    now.insert(entry.name.clone(), (entry, listed));
                }
                Err(error) => refused(error),
            }
        }
        *known = now;
        self.gateway.list(listing);
        Ok(())
    }

    fn load(&self, entry: &ModuleEntry) -> Result<ListedModule, ServiceError> {
        let caps = CapabilitySet::parse(&entry.caps, Path::new("/")).map_err(StoreError::from)?;
        let bytes = self.store.module(entry)?;
        let name = || entry.name.clone();
        let network = (self.networks)(&entry.name, &caps)
            .map_err(|message| ServiceError::Network { name: name(), message })?;
        let deadline = call::deadline(&caps);
        let module = self.here.engine.admit(&entry.tenant, &bytes, caps, network);
        let module = module.map_err(|source| ServiceError::Module { name: name(), source })?;
        let mut modules = self.here.modules.write().unwrap_or_else(PoisonError::into_inner);
        let id = modules.len() as u32;
        modules.push(Arc::new(module));
        Ok(ListedModule { name: name(), tenant: entry.tenant.clone(), id, deadline })
    }

    /// Serves clients until the future is dropped.
    pub async fn serve(&self, listener: Listener, front: Front) {
        self.gateway.serve(listener, front).await;
    }

    /// Answers one client's requests until it goes, or is told why it must.
    pub async fn client(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        front: Front,
    ) {
        self.gateway.client(stream, front).await;
    }
}
