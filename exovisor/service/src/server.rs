//! Connections, and which request goes where.

use crate::call::Module;
use crate::http::{self, Answer, Limits, Over, Request};
use crate::keys;
use crate::metrics::{self, Tenant};
use crate::store::{ModuleStore, StoreError};
use exocell_exovisor::{
    Admission, AdmissionError, Policy, Pool, Priority, Scheduler, SchedulerConfig, SchedulerError,
};
use exocell_xgate::CapabilitySet;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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

/// Where clients come.
pub enum Listener {
    /// An address of the host.
    Tcp(TcpListener),
    /// A path.
    Unix(UnixListener),
}

impl Listener {
    /// Listens at `ADDRESS:PORT`, or at a path (with a `/`) that only this user may connect to. A
    /// socket that a dead server left there is replaced.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub async fn bind(place: &str) -> Result<Self, ServiceError> {
        let failed = |source| ServiceError::Listen { place: place.to_owned(), source };
        if !place.contains('/') {
            return Ok(Self::Tcp(TcpListener::bind(place).await.map_err(failed)?));
        }
        let is_socket = fs::symlink_metadata(place).is_ok_and(|file| file.file_type().is_socket());
        if is_socket && UnixStream::connect(place).await.is_err() {
            fs::remove_file(place).map_err(failed)?;
        }
        let listener = UnixListener::bind(place).map_err(failed)?;
        fs::set_permissions(place, Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Self::Unix(listener))
    }

    /// Where it is, with the port that was chosen if none was named.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "tcp".to_owned(), |at| format!("http://{at}"))
            }
            Self::Unix(listener) => {
                let at = listener.local_addr().ok();
                let path = at.as_ref().and_then(|at| at.as_pathname());
                format!("unix://{}", path.unwrap_or(Path::new("")).display())
            }
        }
    }
}

/// All modules of a store, ready to be called.
pub struct Service {
    modules: BTreeMap<String, Module>,
    tenants: BTreeMap<String, Account>,
    scheduler: Scheduler,
    limits: Limits,
}

struct Account {
    tenant: exocell_exovisor::Tenant,
    key_sha256: String,
    denials: AtomicU64,
}

impl Service {
    /// Admits every module of `store`, into a pool of these sizes.
    ///
    /// # Errors
    /// [`ServiceError`] names the first module that cannot be served.
    pub fn new(store: &ModuleStore, pool: Pool, limits: Limits) -> Result<Self, ServiceError> {
        // A tenant may use up half of the pool and no more.
        let begun_max = (pool.isolates as usize / 2).max(1);
        let config = SchedulerConfig { begun_max, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config)?;
        let admission = Admission::new(Policy::pooled(pool));
        let (mut modules, mut tenants) = (BTreeMap::new(), BTreeMap::<String, Account>::new());
        for entry in store.list()? {
            if !tenants.contains_key(&entry.tenant) {
                let tenant = scheduler.tenant(&entry.tenant, 1, Priority::Normal);
                let key_sha256 = store.key_hash(&entry.tenant)?;
                let account = Account { tenant, key_sha256, denials: AtomicU64::new(0) };
                tenants.insert(entry.tenant.clone(), account);
            }
            let Some(account) = tenants.get(&entry.tenant) else { continue };
            let caps =
                CapabilitySet::parse(&entry.caps, Path::new("/")).map_err(StoreError::from)?;
            let bytes = store.module(&entry.name)?;
            let module = Module::admit(&admission, account.tenant.clone(), &bytes, caps)
                .map_err(|source| ServiceError::Module { name: entry.name.clone(), source })?;
            modules.insert(entry.name, module);
        }
        Ok(Self { modules, tenants, scheduler, limits })
    }

    /// Listens at `place` (see [`Listener::bind`]) and serves until the process ends; `ready` is
    /// told where, once clients may come.
    ///
    /// # Errors
    /// [`ServiceError::Listen`].
    pub fn run(self, place: &str, ready: impl FnOnce(&str)) -> Result<(), ServiceError> {
        let failed = |source| ServiceError::Listen { place: place.to_owned(), source };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(failed)?;
        runtime.block_on(async {
            let listener = Listener::bind(place).await?;
            ready(&listener.place());
            Arc::new(self).serve(listener).await;
            Ok(())
        })
    }

    /// Serves clients until the future is dropped.
    pub async fn serve(self: &Arc<Self>, listener: Listener) {
        let room = Arc::new(Semaphore::new(self.limits.connections));
        loop {
            // It is never closed.
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let accepted = match &listener {
                Listener::Tcp(listener) => {
                    listener.accept().await.map(|(stream, _)| self.take(stream, permit))
                }
                Listener::Unix(listener) => {
                    listener.accept().await.map(|(stream, _)| self.take(stream, permit))
                }
            };
            if accepted.is_err() {
                // Out of descriptors, most likely; some come back as clients go.
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }

    fn take(
        self: &Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        permit: OwnedSemaphorePermit,
    ) {
        let service = Arc::clone(self);
        tokio::spawn(async move {
            service.connection(stream).await;
            drop(permit);
        });
    }

    async fn connection(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let mut buffer = Vec::new();
        loop {
            match http::read(&mut stream, &mut buffer, &self.limits).await {
                Ok(request) => {
                    let answer = self.answer(&request).await;
                    let keep = request.keep_alive;
                    if !http::write(&mut stream, &answer, keep, &self.limits).await || !keep {
                        return;
                    }
                }
                Err(Over::Gone) => return,
                Err(Over::Refused(answer)) => {
                    http::write(&mut stream, &answer, false, &self.limits).await;
                    return;
                }
            }
        }
    }

    async fn answer(&self, request: &Request) -> Answer {
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match (request.method.as_str(), &parts[..]) {
            ("GET", ["metrics"]) => self.metrics(),
            ("GET", ["v1", "stats"]) => match self.caller(request) {
                Some((name, account)) => {
                    Answer::json(200, &metrics::json(&self.used(name, account)))
                }
                None => Answer::error(401, "a key of a tenant is needed"),
            },
            ("POST", ["v1", "call", module, function]) => {
                self.call(request, module, function).await
            }
            (_, ["metrics"] | ["v1", "stats"] | ["v1", "call", _, _]) => {
                Answer::error(405, "another method is needed")
            }
            _ => Answer::error(404, "there is nothing here; try /v1/call/MODULE/FUNCTION"),
        }
    }

    /// Whose key the request has.
    fn caller(&self, request: &Request) -> Option<(&String, &Account)> {
        let hash = keys::hash(request.key.as_deref()?);
        self.tenants.iter().find(|(_, account)| account.key_sha256 == hash)
    }

    /// A wrong key hears the same whether the module exists or not.
    async fn call(&self, request: &Request, name: &str, function: &str) -> Answer {
        let module = self.modules.get(name);
        let owner = module.and_then(|module| self.tenants.get(module.tenant.name()));
        let hash = request.key.as_deref().map(keys::hash);
        match (module, owner) {
            (Some(module), Some(owner)) if hash.as_ref() == Some(&owner.key_sha256) => {
                let answer = module.call(&self.scheduler, function, &request.body).await;
                if answer.status != 200 {
                    owner.denials.fetch_add(1, Ordering::Relaxed);
                }
                answer
            }
            (_, owner) => {
                if let Some(owner) = owner {
                    owner.denials.fetch_add(1, Ordering::Relaxed);
                }
                Answer::error(401, "the key is not one of the module's tenant")
            }
        }
    }

    fn used<'a>(&self, name: &'a str, account: &Account) -> Tenant<'a> {
        let stats = self.scheduler.stats().into_iter().find(|(tenant, _)| tenant == name);
        let stats = stats.map(|(_, stats)| stats).unwrap_or_default();
        Tenant { name, stats, denials: account.denials.load(Ordering::Relaxed) }
    }

    fn metrics(&self) -> Answer {
        let tenants: Vec<Tenant<'_>> =
            self.tenants.iter().map(|(name, account)| self.used(name, account)).collect();
        Answer::text(metrics::prometheus(&tenants))
    }
}
