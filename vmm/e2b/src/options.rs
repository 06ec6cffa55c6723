//! What a server is started with.

use std::collections::BTreeMap;
use std::path::PathBuf;

use exocell_cell::Layout;
use exocell_docker::Defaults;

use crate::error::{Problem, Result};
use crate::keys::Tenant;

/// Seconds of a sandbox whose client names none.
const TIMEOUT_DEFAULT: u64 = 300;

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Options {
    pub layout: Layout,
    /// `ADDRESS:PORT`.
    pub address: String,
    /// What a sandbox is given; its rules of the network are the most that any may have.
    pub defaults: Defaults,
    /// Names of templates, and their images.
    pub templates: BTreeMap<String, String>,
    /// Below which sandboxes are found by host, with a port if it is not the protocol's.
    pub domain: Option<String>,
    /// The file of tenants' keys.
    pub keys: Option<PathBuf>,
    /// Sandboxes at once.
    pub sandboxes_max: usize,
    /// The longest time that a client may give a sandbox, in seconds.
    pub timeout_max: u64,
    /// How many cells of a template wait for a sandbox to be asked for.
    pub pool: BTreeMap<String, usize>,
    /// Of the address, once it is known.
    pub port: u16,
}

impl Options {
    /// The seconds that a client wants.
    ///
    /// # Errors
    /// 400: more than it may have.
    pub fn timeout_of(&self, wanted: Option<u64>) -> Result<u64> {
        let most = self.timeout_max;
        match wanted.unwrap_or(TIMEOUT_DEFAULT.min(most)) {
            seconds if seconds > most => Err(Problem::invalid(format!(
                "timeout: {seconds} seconds are more than the {most} that a sandbox may have"
            ))),
            seconds => Ok(seconds),
        }
    }

    pub fn timeout_default_ms(&self) -> u64 {
        TIMEOUT_DEFAULT.min(self.timeout_max) * 1000
    }

    /// What sandboxes of `tenant` may have of the network.
    pub fn grant<'a>(&'a self, tenant: &'a Tenant) -> &'a [String] {
        tenant.allow_net.as_deref().unwrap_or(&self.defaults.connect)
    }

    /// What clients are told to look for sandboxes at.
    pub fn domain(&self) -> String {
        self.domain.clone().unwrap_or_else(|| format!("localhost:{}", self.port))
    }
}
