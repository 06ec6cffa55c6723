//! Which ports of a sandbox are open on this host; `expose` opens them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::task::JoinHandle;

use crate::error::Refusal;

/// Ports of one sandbox that may be open.
const PORTS_MAX: usize = 16;

/// The open ports of a sandbox.
#[derive(Default)]
pub struct Ports(Mutex<BTreeMap<u16, (SocketAddr, JoinHandle<()>)>>);

impl Ports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, (SocketAddr, JoinHandle<()>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which ports are open, and where.
    pub fn open(&self) -> Vec<(u16, SocketAddr)> {
        self.lock().iter().map(|(port, (at, _))| (*port, *at)).collect()
    }

    /// Notes that `port` is open at `at`, where the task that `serve` begins serves it; one that is
    /// open already stays where it is.
    ///
    /// # Errors
    /// Too many are open.
    pub fn add(
        &self,
        port: u16,
        at: SocketAddr,
        serve: impl FnOnce() -> JoinHandle<()>,
    ) -> Result<SocketAddr, Refusal> {
        let mut open = self.lock();
        if let Some((at, _)) = open.get(&port) {
            return Ok(*at);
        }
        if open.len() >= PORTS_MAX {
            return Err(Refusal::new(format!("a sandbox has at most {PORTS_MAX} ports open")));
        }
        open.insert(port, (at, serve()));
        Ok(at)
    }

    pub fn close(&self) {
        std::mem::take(&mut *self.lock()).into_values().for_each(|(_, task)| task.abort());
    }
}

impl Drop for Ports {
    fn drop(&mut self) {
        self.close();
    }
}
