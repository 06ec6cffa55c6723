//! Where modules run: a scheduler, and what was loaded.

use crate::ServiceError;
use crate::call::{Module, Shared, Told, Work};
use exocell_exovisor::{
    Admission, AdmissionError, Admitted, Compiled, Jailed, Layers, Models, Network, Policy, Pool,
    Priority, Scheduler, SchedulerConfig, Take, Tenant,
};
use exocell_xgate::CapabilitySet;
use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// What runs the modules of one tenant or of several.
pub(crate) struct Engine {
    scheduler: Scheduler,
    admission: Admission,
    models: Models,
    output_bytes: usize,
    tenants: Mutex<HashMap<String, Known>>,
}

/// A tenant of this engine.
#[derive(Clone)]
struct Known {
    tenant: Tenant,
    /// What its calls changed in folders that they see privately; gone with the engine.
    layers: Layers,
}

impl Engine {
    /// # Errors
    /// [`ServiceError::Scheduler`].
    pub fn new(pool: Pool, output_bytes: usize, has_machine: bool) -> Result<Self, ServiceError> {
        // A tenant may use up half of the pool, and no more.
        let begun_max = half(pool.isolates as usize);
        let own_processors = has_machine;
        let config = SchedulerConfig { begun_max, own_processors, ..SchedulerConfig::default() };
        Ok(Self {
            scheduler: Scheduler::new(&config)?,
            admission: Admission::new(Policy::pooled(pool)),
            models: Models::default(),
            output_bytes,
            tenants: Mutex::default(),
        })
    }

    /// Checks and compiles a module in this process.
    ///
    /// # Errors
    /// [`AdmissionError`].
    pub fn admit(
        &self,
        tenant: &str,
        bytes: &[u8],
        caps: CapabilitySet,
        network: Option<Arc<dyn Network>>,
    ) -> Result<Module, AdmissionError> {
        let metering = crate::store::metering(&caps);
        let admitted = self.admission.admit_for(tenant, bytes, &caps, metering)?;
        self.module(tenant, admitted, caps, network)
    }

    /// Loads what another process compiled.
    ///
    /// # Errors
    /// [`AdmissionError`].
    pub fn load(
        &self,
        tenant: &str,
        compiled: &Compiled,
        jailed: &Jailed,
        caps: CapabilitySet,
        network: Option<Arc<dyn Network>>,
    ) -> Result<Module, AdmissionError> {
        let admitted = self.admission.load(tenant, compiled, jailed)?;
        self.module(tenant, admitted, caps, network)
    }

    fn module(
        &self,
        tenant: &str,
        admitted: Admitted,
        caps: CapabilitySet,
        network: Option<Arc<dyn Network>>,
    ) -> Result<Module, AdmissionError> {
        let Known { tenant, layers } = self.tenant(tenant);
        let shared = Shared { layers, models: self.models.clone() };
        Module::new(admitted, tenant, caps, shared, network)
    }

    fn tenant(&self, name: &str) -> Known {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Known {
            tenant: self.scheduler.tenant(name, 1, Priority::Normal),
            layers: Layers::default(),
        };
        tenants.entry(name.to_owned()).or_insert_with(new).clone()
    }

    /// Has calls come in at `from` ([`Scheduler::attend`]).
    ///
    /// # Errors
    /// The host's.
    pub fn attend(
        &self,
        from: BorrowedFd<'_>,
        take: Take,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        self.scheduler.attend(from, take, is_over)
    }

    /// Begins `work` of `module`; `told` hears of its end.
    pub fn begin(&self, module: &Module, work: Work, told: Told) {
        module.begin(&self.scheduler, work, self.output_bytes, told);
    }
}

/// What one tenant may have of something.
fn half(all: usize) -> usize {
    (all / 2).max(1)
}
