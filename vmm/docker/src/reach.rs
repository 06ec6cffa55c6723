//! Reaching into a container's files, whether its program runs or not. For one
//! that does not run a cell without a program is started on its disk:
//!
//! ```text
//! running      ──> its cell
//! created, ended ──> idle cell on ROOT/docker/disks/ID.ext4 ── hangs up ──> disk is whole
//! ```

use std::sync::Arc;

use exocell_cell::agent::{FrameReader, Kind, Patient, Reply, TRANSFER_MAX};
use exocell_cell::control::Client;
use exocell_cell::{CellSpec, Layout, Record, warm};
use serde_json::{Value, json};
use tokio::sync::OwnedMutexGuard;

use crate::containers::{Container, Seen};
use crate::error::{ApiError, ApiResult};
use crate::launcher::{self, Start};
use crate::live::Idle;
use crate::place::Place;
use crate::starts;
use crate::state::Server;

/// A cell whose guest gives and takes files. To be dropped by a thread that may
/// block: an idle one ends with it.
pub struct Reach {
    pub record: Record,
    idle: Option<Arc<Idle>>,
}

impl Drop for Reach {
    fn drop(&mut self) {
        if let Some(idle) = &self.idle {
            idle.end();
        }
    }
}

impl Reach {
    /// A stream to the guest. Blocks.
    pub fn guest(&self) -> ApiResult<Patient> {
        Ok(Client::connect(&self.record)?.guest_stream()?.within(TRANSFER_MAX))
    }

    /// The cell's id where it is the container's own, whose program runs.
    pub fn running(&self) -> Option<&str> {
        self.idle.is_none().then_some(self.record.id.as_str())
    }

    /// Why what was done here failed: `error`, or who wanted the container itself.
    pub fn failure(&self, error: ApiError) -> ApiError {
        match self.idle.as_ref().is_some_and(|idle| idle.has_ended()) {
            true => ApiError::conflict(
                "the container is being started or removed; look at its files after that",
            ),
            false => error,
        }
    }
}

/// Reaches into container `key` for the client at `place`.
///
/// # Errors
/// 409 when it is paused, or has ended and kept no disk.
pub async fn container(server: &Arc<Server>, key: &str, place: &Place) -> ApiResult<Reach> {
    let live = server.live(server.find(key).await?.id());
    let seen = server.find(&live.id).await?;
    if seen.is_running() {
        return Ok(Reach { record: seen.awake()?.0.clone(), idle: None });
    }
    let (held, seen) = loop {
        let held = tokio::select! {
            held = live.changing.clone().lock_owned() => held,
            // No cell is begun for nobody.
            () = place.gone() => return Err(ApiError::bad_request("the client is gone")),
        };
        // It may have been started while we waited.
        let seen = server.find(&live.id).await?;
        if seen.is_running() {
            return Ok(Reach { record: seen.awake()?.0.clone(), idle: None });
        }
        if seen.is_restarting() {
            return Err(ApiError::conflict(format!(
                "Container {} is restarting, wait until the container is running",
                seen.id()
            )));
        }
        if !live.is_claimed() {
            break (held, seen);
        }
        // Behind whoever wants the container itself.
        drop(held);
    };
    server
        .blocking(move |server| {
            let mut container = on_disk(server, seen)?;
            let _held = server.containers.prepare(&mut container)?;
            let mut shown = container.spec.showing(container.spec.disk.clone())?;
            if starts::check_start(&server.containers, &container).is_err() {
                // Its own files are there still, and nothing of the host's.
                let mut table: Value = serde_json::from_str(&shown.capabilities)
                    .map_err(|e| ApiError::internal(format!("the container's grant: {e}")))?;
                table["folder"] = json!([]);
                (shown.capabilities, shown.locations) = (table.to_string(), Vec::new());
                shown.fills.clear();
            }
            let reach = begin(server.layout(), &shown, Some(held))?;
            if let Some(idle) = &reach.idle {
                live.show(idle);
            }
            Ok(reach)
        })
        .await
}

/// The container, with a disk that the next cell will find. One that removes
/// itself has none before somebody puts files into it.
fn on_disk(server: &Server, seen: Seen) -> ApiResult<Container> {
    if seen.container.spec.within.is_some() {
        return Err(ApiError::conflict(format!(
            "container {} has its files in the guest of the container whose network it has, while \
             it runs; start it",
            seen.id()
        )));
    }
    if seen.cell.is_some() {
        seen.container.goes_on()?;
    }
    let mut container = seen.container;
    if container.spec.keeps_disk {
        container.spec.disk = seen.cell.map(|(record, _)| record.disk());
    } else if container.spec.disk.is_none() && !container.spec.read_only {
        // A warm cell that was kept for it has another.
        warm::release(server.layout(), container.id())?;
        container.spec.disk = Some(server.containers.disk(container.id()));
        server.containers.write(&container)?;
    }
    Ok(container)
}

pub(crate) fn bare(image: &str, caps: &Value) -> ApiResult<CellSpec> {
    Ok(CellSpec::idle(image, caps.to_string())?)
}

fn begin(layout: &Layout, spec: &CellSpec, held: Option<OwnedMutexGuard<()>>) -> ApiResult<Reach> {
    let session = launcher::launch(layout, &Start::Cell(spec))?;
    let (record, _, _) = Record::find(layout, &spec.id)?;
    let began = FrameReader::new(&session).expect::<Reply>(Kind::Reply);
    let ends = record.clone();
    let idle = Idle::new(held, move || {
        drop(session);
        ends.await_release();
    });
    let reach = Reach { record, idle: Some(Arc::new(idle)) };
    match began {
        Ok(Reply::Started { .. }) => Ok(reach),
        Ok(Reply::Failed { message, .. }) => Err(ApiError::internal(message)),
        Ok(_) | Err(_) => Err(ApiError::internal("the cell for its files did not come up")),
    }
}
