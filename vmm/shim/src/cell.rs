//! The cell of a pod: made for the first container, ended after the last.
//!
//! It runs no program of its own (`CellSpec::idle`). Its session is the shim's; when the shim is
//! gone, however it ended, the cell ends and removes its record.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use exocell_cell::agent::{FrameReader, Kind, Reply};
use exocell_cell::control::Client;
use exocell_cell::{CellSpec, Layout, Record, end};
use serde_json::json;
use tracing::warn;

use crate::cgroups::Home;
use crate::config::Config;
use crate::depot::Depot;
use crate::error::{Result, ShimError};
use crate::group::Group;
use crate::launch;
use crate::netns::{self, Found};
use crate::spec::Wanted;

/// How long a guest may take to be ready: more than its supervisor gives it.
const READY_MAX: Duration = Duration::from_secs(90);

/// What the CRI plugin says of all containers of a pod together, with the pod's first.
const POD_MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
const POD_CPU_QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
const POD_CPU_PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";

/// A cell that runs.
pub struct Cell {
    pub layout: Layout,
    pub record: Record,
    /// The host's pid of its supervisor, which is the first process of namespaces of its own.
    pub pid: u32,
    /// Bytes that its guest has.
    pub memory_bytes: u64,
    pub depot: Depot,
    home: Option<Home>,
    /// It ends when this is closed.
    session: UnixStream,
    is_plugged: Mutex<bool>,
}

impl Cell {
    /// Boots the cell of `group`, whose first container is `wanted`, over `depot`.
    ///
    /// # Errors
    /// Why there is none.
    pub fn boot(
        group: &Group,
        namespace: &str,
        wanted: &Wanted,
        depot: Depot,
        config: &Config,
    ) -> Result<Self> {
        let layout = config.layout();
        let (memory_bytes, processors) = size(wanted, config);
        let table = json!({
            "version": 1,
            "memory": { "limit": memory_bytes.to_string() },
            "cpu": { "count": processors },
            "processes": { "max": config.processes },
            "clock": {}, "random": {}, "stdio": {},
        });
        let spec = CellSpec {
            id: group.cell_id().to_owned(),
            name: format!("{namespace}.{}.{}", group.id, &group.cell_id()[..6]),
            depot: Some(depot.path().to_owned()),
            plug: true,
            labels: [
                ("containerd.namespace".to_owned(), namespace.to_owned()),
                ("containerd.id".to_owned(), group.id.clone()),
            ]
            .into(),
            ..CellSpec::idle(&format!("containerd:{}", group.id), table.to_string())?
        };
        let home = Home::make(&wanted.cgroups_path)?;
        let folders = home.as_ref().map_or(&[][..], Home::folders);
        let session = launch::launch(&layout, &spec, folders)
            .and_then(|session| await_ready(&session).map(|()| session));
        let session = session.inspect_err(|_| {
            if let Some(home) = &home {
                home.remove();
            }
        })?;
        let (record, _, status) = Record::find(&layout, &spec.id)?;
        let pid = u32::try_from(status.supervisor_pid).unwrap_or(0);
        Ok(Self {
            layout,
            record,
            pid,
            memory_bytes,
            depot,
            home,
            session,
            is_plugged: Mutex::new(false),
        })
    }

    /// Has its guest be in the network of the namespace at `path`, or of its supervisor's own, if
    /// there is one. Once: what containers of a pod come later find it.
    ///
    /// # Errors
    /// The network cannot be a guest's.
    pub fn plug(&self, path: Option<&Path>) -> Result<()> {
        let mut is_plugged = self.is_plugged.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_plugged {
            return Ok(());
        }
        let path = path.map(Path::to_owned).or_else(|| netns::of_process(self.pid));
        if let Some(Found { setup, device }) =
            path.and_then(|path| netns::find(&path).transpose()).transpose()?
        {
            Client::connect(&self.record)?.plug(setup, &device)?;
            *is_plugged = true;
        }
        Ok(())
    }

    /// Ends it, in order where its guest answers; returns when nothing is left of it.
    pub fn end(&self) {
        let _ = self.session.shutdown(std::net::Shutdown::Both);
        // One that removes itself goes without being asked; this waits for it, and settles what a
        // supervisor that was killed has left.
        remove(&self.layout, &self.record.id);
        if let Some(home) = &self.home {
            home.remove();
        }
    }
}

/// Removes the cell `id`, whatever it does; nothing where there is none.
pub fn remove(layout: &Layout, id: &str) {
    let Ok((record, _, _)) = Record::find(layout, id) else { return };
    let ended = end::stop(layout, &record, Duration::ZERO);
    let removed = ended.and_then(|()| match Record::find(layout, id) {
        Ok((record, _, status)) => end::remove(layout, &record, &status, true),
        Err(_) => Ok(()),
    });
    if let Err(error) = removed {
        warn!(id, %error, "the cell is not removed");
    }
}

/// Memory and processors of a cell: the pod's, or those of the container; the configuration's where
/// neither has a limit.
fn size(wanted: &Wanted, config: &Config) -> (u64, u32) {
    let pod = |name: &str| wanted.annotations.get(name).and_then(|text| text.parse::<i64>().ok());
    let positive =
        |amount: Option<i64>| amount.and_then(|own| u64::try_from(own).ok()).filter(|own| *own > 0);
    let own = wanted.spec.linux.resources.as_ref();
    let memory = own.and_then(|own| own.memory.as_ref()?.limit);
    let memory = positive(pod(POD_MEMORY)).or(positive(memory));
    let cpu = own.and_then(|own| own.cpu.as_ref());
    let quota = positive(pod(POD_CPU_QUOTA)).or(positive(cpu.and_then(|cpu| cpu.quota)));
    let period = positive(pod(POD_CPU_PERIOD)).or(cpu.and_then(|cpu| cpu.period));
    let count = quota.map(|quota| quota.div_ceil(period.filter(|own| *own > 0).unwrap_or(100_000)));
    (config.memory_bytes(memory), config.processors(count))
}

/// Waits until the guest can have containers.
fn await_ready(session: &UnixStream) -> Result<()> {
    session
        .set_read_timeout(Some(READY_MAX))
        .map_err(ShimError::host("cannot wait for the cell"))?;
    let mut frames = FrameReader::new(session);
    loop {
        let frame = frames.read().map_err(ShimError::host("the cell did not come up"))?;
        let Some(frame) = frame else {
            return Err(ShimError::internal("the cell ended before it was up"));
        };
        if frame.kind != Kind::Reply {
            continue;
        }
        match frame.json::<Reply>() {
            Ok(Reply::Started { .. }) => return Ok(()),
            Ok(Reply::Failed { message, .. }) => {
                return Err(ShimError::internal(format!("the cell did not come up: {message}")));
            }
            _ => return Err(ShimError::internal("the cell ended before it was up")),
        }
    }
}
