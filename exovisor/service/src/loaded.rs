//! The modules that are served at a moment, and whose they are.

use crate::ServiceError;
use crate::call::{Module, Shared};
use crate::metrics::Tenant;
use crate::server::Networks;
use crate::store::{ModuleEntry, ModuleStore, StoreError};
use exocell_exovisor::{Admission, Layers, Models, Priority, Scheduler};
use exocell_xgate::CapabilitySet;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// A tenant as the service knows it.
pub(crate) struct Account {
    pub tenant: exocell_exovisor::Tenant,
    key_sha256: String,
    denials: AtomicU64,
    /// What its calls changed in folders that they see privately; gone with the service.
    layers: Layers,
    /// One for each call that it may have at once.
    pub room: Semaphore,
}

/// What can be called. It never changes; another one takes its place.
#[derive(Default)]
pub(crate) struct Loaded {
    modules: BTreeMap<String, (ModuleEntry, Arc<Module>)>,
    /// Tenants without a module stay, and so do their figures.
    accounts: BTreeMap<String, Arc<Account>>,
}

/// What modules are loaded with.
pub(crate) struct Loader {
    pub store: ModuleStore,
    pub admission: Admission,
    pub models: Models,
    /// Calls that a tenant may have at once.
    pub calls_max: usize,
    pub networks: Networks,
}

impl Loader {
    /// What the store holds now. What is the same as `before` stays loaded. A module that cannot
    /// be had is left out, and the error is told.
    pub fn load(
        &self,
        before: &Loaded,
        scheduler: &Scheduler,
        mut refused: impl FnMut(ServiceError),
    ) -> Result<Loaded, StoreError> {
        let accounts = before.accounts.clone();
        let mut loaded = Loaded { accounts, modules: BTreeMap::new() };
        for entry in self.store.list()? {
            let name = entry.name.clone();
            let same = before.modules.get(&name).filter(|(known, _)| *known == entry);
            let module = match same {
                Some((_, module)) => Ok(Arc::clone(module)),
                None => self.module(&entry, &mut loaded, scheduler).map(Arc::new),
            };
            match module {
                Ok(module) => drop(loaded.modules.insert(name, (entry, module))),
                Err(error) => refused(error),
            }
        }
        Ok(loaded)
    }

    fn module(
        &self,
        entry: &ModuleEntry,
        loaded: &mut Loaded,
        scheduler: &Scheduler,
    ) -> Result<Module, ServiceError> {
        let account = self.account(&entry.tenant, loaded, scheduler)?;
        let caps = CapabilitySet::parse(&entry.caps, Path::new("/")).map_err(StoreError::from)?;
        let bytes = self.store.module(entry)?;
        let tenant = account.tenant.clone();
        let shared = Shared { layers: account.layers.clone(), models: self.models.clone() };
        let name = || entry.name.clone();
        let network = (self.networks)(&entry.name, &caps)
            .map_err(|message| ServiceError::Network { name: name(), message })?;
        Module::admit(&self.admission, tenant, &bytes, caps, shared, network)
            .map_err(|source| ServiceError::Module { name: name(), source })
    }

    fn account(
        &self,
        name: &str,
        loaded: &mut Loaded,
        scheduler: &Scheduler,
    ) -> Result<Arc<Account>, StoreError> {
        if let Some(account) = loaded.accounts.get(name) {
            return Ok(Arc::clone(account));
        }
        let account = Arc::new(Account {
            key_sha256: self.store.key_hash(name)?,
            tenant: scheduler.tenant(name, 1, Priority::Normal),
            denials: AtomicU64::new(0),
            layers: Layers::default(),
            room: Semaphore::new(self.calls_max),
        });
        loaded.accounts.insert(name.to_owned(), Arc::clone(&account));
        Ok(account)
    }
}

impl Loaded {
    /// The module of this name, and whose it is.
    pub fn module(&self, name: &str) -> Option<(&Arc<Module>, &Arc<Account>)> {
        let (entry, module) = self.modules.get(name)?;
        Some((module, self.accounts.get(&entry.tenant)?))
    }

    /// Whose key has this hash.
    pub fn owner(&self, hash: &str) -> Option<&Account> {
        self.accounts.values().find(|account| account.has(hash)).map(AsRef::as_ref)
    }

    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.values().map(AsRef::as_ref)
    }
}

impl Account {
    /// Whether the tenant's key has this hash.
    pub fn has(&self, hash: &str) -> bool {
        self.key_sha256 == hash
    }

    pub fn deny(&self) {
        self.denials.fetch_add(1, Ordering::Relaxed);
    }

    /// What it used until now.
    pub fn used(&self, scheduler: &Scheduler) -> Tenant<'_> {
        let name = self.tenant.name();
        let stats = scheduler.stats().into_iter().find(|(tenant, _)| tenant == name);
        let stats = stats.map(|(_, stats)| stats).unwrap_or_default();
        Tenant { name, stats, denials: self.denials.load(Ordering::Relaxed) }
    }
}
