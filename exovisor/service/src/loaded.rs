//! The modules that are served at a moment, and whose they are.

use crate::call::{Ending, Spent};
use crate::metrics::{Stats, Tenant};
use crate::places::Held;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// All that may be called, as whoever listens is told of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// Those whose modules these are.
    pub tenants: Vec<ListedTenant>,
    /// Each of them is a tenant's of the list.
    pub modules: Vec<ListedModule>,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedTenant {
    /// Its name.
    pub name: String,
    /// What is kept of its key.
    pub key_sha256: String,
}

/// A module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedModule {
    /// What it is called under.
    pub name: String,
    /// Whose it is.
    pub tenant: String,
    /// By which its worker knows it. Another one of the same name has another.
    pub id: u32,
    /// How long a call of it may take.
    pub deadline: Duration,
}

/// A tenant as the service knows it.
pub(crate) struct Account {
    pub name: String,
    /// It may have another key since it was listed first.
    key_sha256: RwLock<String>,
    denials: AtomicU64,
    figures: Figures,
    /// Calls that it has at once, until their answers are taken.
    pub held: Held,
}

#[derive(Default)]
struct Figures {
    cpu_ns: AtomicU64,
    preemptions: AtomicU64,
    /// Calls by how they ended.
    exited: AtomicU64,
    traps: AtomicU64,
    limits: AtomicU64,
    ended: AtomicU64,
}

/// What can be called. It never changes; another one takes its place.
#[derive(Default)]
pub(crate) struct Loaded {
    modules: BTreeMap<String, Callable>,
    /// Tenants without a module stay, and so do their figures.
    accounts: BTreeMap<String, Arc<Account>>,
}

/// A module that can be called.
#[derive(Clone)]
pub(crate) struct Callable {
    pub id: u32,
    pub owner: Arc<Account>,
    pub deadline: Duration,
}

impl Loaded {
    /// What `listing` says, with the accounts that were there before.
    pub fn of(listing: Listing, before: &Self) -> Self {
        let mut accounts = before.accounts.clone();
        for ListedTenant { name, key_sha256 } in listing.tenants {
            if let Some(known) = accounts.get(&name) {
                known.set_key(key_sha256);
                continue;
            }
            accounts.entry(name.clone()).or_insert_with(|| {
                Arc::new(Account {
                    name,
                    key_sha256: RwLock::new(key_sha256),
                    denials: AtomicU64::new(0),
                    figures: Figures::default(),
                    held: Held::default(),
                })
            });
        }
        let callable = |module: ListedModule| {
            let ListedModule { name, tenant, id, deadline } = module;
            let owner = Arc::clone(accounts.get(&tenant)?);
            Some((name, Callable { id, owner, deadline }))
        };
        let modules = listing.modules.into_iter().filter_map(callable).collect();
        Self { modules, accounts }
    }

    /// The module of this name.
    pub fn module(&self, name: &str) -> Option<&Callable> {
        self.modules.get(name)
    }

    /// Whose key has this hash.
    pub fn owner(&self, hash: &str) -> Option<&Account> {
        self.accounts.values().find(|account| account.has(hash)).map(AsRef::as_ref)
    }

    /// How many there are.
    pub fn tenants(&self) -> usize {
        self.accounts.len()
    }

    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.values().map(AsRef::as_ref)
    }
}

impl Account {
    /// Whether the tenant's key has this hash.
    pub fn has(&self, hash: &str) -> bool {
        *self.key_sha256.read().unwrap_or_else(PoisonError::into_inner) == hash
    }

    fn set_key(&self, key_sha256: String) {
        *self.key_sha256.write().unwrap_or_else(PoisonError::into_inner) = key_sha256;
    }

    pub fn deny(&self) {
        self.denials.fetch_add(1, Ordering::Relaxed);
    }

    /// A call of its is over.
    pub fn count(&self, spent: Spent) {
        let Figures { cpu_ns, preemptions, exited, traps, limits, ended } = &self.figures;
        cpu_ns.fetch_add(spent.cpu_ns, Ordering::Relaxed);
        preemptions.fetch_add(spent.preemptions, Ordering::Relaxed);
        let calls = match spent.ending {
            Ending::Exited => exited,
            Ending::Trap => traps,
            Ending::Limit => limits,
            Ending::Ended => ended,
        };
        calls.fetch_add(1, Ordering::Relaxed);
    }

    /// What it used until now.
    pub fn used(&self) -> Tenant<'_> {
        let figure = |one: &AtomicU64| one.load(Ordering::Relaxed);
        let Figures { cpu_ns, preemptions, exited, traps, limits, ended } = &self.figures;
        let (traps, limits, ended) = (figure(traps), figure(limits), figure(ended));
        let stats = Stats {
            calls: figure(exited) + traps + limits + ended,
            cpu_ns: figure(cpu_ns),
            preemptions: figure(preemptions),
            traps,
            limits,
            ended,
        };
        Tenant { name: &self.name, stats, denials: figure(&self.denials) }
    }
}
