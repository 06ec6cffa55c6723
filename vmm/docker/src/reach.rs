//! Reaching into a container's files, whether its program runs or not. For one
//! that does not run a cell without a program is started on its disk:
//!
//! ```text
//! running      ──> its cell
//! created, ended ──> idle cell on ROOT/docker/disks/ID.ext4 ── hangs up ──> disk is whole
//! an image     ──> idle cell on a disk that goes with it
//! ```

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use exocell_cell::agent::{FrameReader, Kind, Patient, Reply, TRANSFER_MAX};
use exocell_cell::control::Client;
use exocell_cell::{CellSpec, Record, Strength, now_ms, warm};
use serde_json::{Value, json};
use tokio::sync::OwnedMutexGuard;

use crate::containers::{Container, Seen};
use crate::error::{ApiError, ApiResult};
use crate::launcher::{self, Start};
use crate::state::Server;

/// What a cell gets that only shows an image's files.
const IMAGE_MEMORY: &str = "256M";
const IMAGE_DISK: &str = "64M";

/// A cell whose guest gives and takes files. To be dropped by a thread that may
/// block: an idle one ends with it.
pub struct Reach {
    pub record: Record,
    idle: Option<Idle>,
}

/// Keeps an idle cell alive, and its container from being started meanwhile.
struct Idle {
    session: Option<UnixStream>,
    _held: Option<OwnedMutexGuard<()>>,
}

impl Drop for Reach {
    fn drop(&mut self) {
        if let Some(idle) = &mut self.idle {
            idle.session = None;
            self.record.await_release();
        }
    }
}

impl Reach {
    /// A stream to the guest. Blocks.
    pub fn guest(&self) -> ApiResult<Patient> {
        Ok(Client::connect(&self.record)?.guest_stream()?.within(TRANSFER_MAX))
    }
}

/// Reaches into container `key`.
///
/// # Errors
/// 409 when it is paused, or has ended and kept no disk.
pub async fn container(server: &Arc<Server>, key: &str) -> ApiResult<Reach> {
    let live = server.live(server.find(key).await?.id());
    let seen = server.find(&live.id).await?;
    if seen.is_running() {
        return Ok(Reach { record: seen.awake()?.0.clone(), idle: None });
    }
    let held = live.changing.clone().lock_owned().await;
    // It may have been started while we waited.
    let seen = server.find(&live.id).await?;
    if seen.is_running() {
        return Ok(Reach { record: seen.awake()?.0.clone(), idle: None });
    }
    server
        .blocking(move |server| {
            let mut container = on_disk(server, seen)?;
            server.containers.prepare(&mut container)?;
            begin(server, &idle(&container)?, Some(held))
        })
        .await
}

/// The container, with a disk that the next cell will find. One that removes
/// itself has none before somebody puts files into it.
fn on_disk(server: &Server, seen: Seen) -> ApiResult<Container> {
    if seen.cell.is_some() {
        seen.container.goes_on()?;
    }
    let mut container = seen.container;
    if container.spec.disk.is_none() && !container.spec.read_only {
        // A warm cell that was kept for it has another.
        warm::release(server.layout(), container.id())?;
        container.spec.disk = Some(server.containers.disk(container.id()));
        server.containers.write(&container)?;
    }
    Ok(container)
}

/// The cell that shows the files of `container`: what it may, but no network.
fn idle(container: &Container) -> ApiResult<CellSpec> {
    let broken = |error: serde_json::Error| ApiError::internal(format!("its grant: {error}"));
    let mut caps: Value = serde_json::from_str(&container.spec.capabilities).map_err(broken)?;
    if let Some(sections) = caps.as_object_mut() {
        sections.remove("network");
    }
    let (disk, locations) = (container.spec.disk.clone(), container.spec.locations.clone());
    Ok(CellSpec { disk, locations, ..bare(&container.spec.image, &caps)? })
}

pub(crate) fn bare(image: &str, caps: &Value) -> ApiResult<CellSpec> {
    let id = CellSpec::new_id()?;
    Ok(CellSpec {
        version: CellSpec::VERSION,
        name: format!("files-{}", &id[..12]),
        id,
        strength: Strength::Vm,
        image: image.to_owned(),
        entrypoint: None,
        command: Vec::new(),
        env: Vec::new(),
        working_dir: None,
        user: None,
        hostname: None,
        settings: exocell_cell::settings::Settings::default(),
        tty: false,
        stdin: false,
        remove: true,
        read_only: false,
        publish: Vec::new(),
        pager: exocell_cell::pager::Mode::Off,
        memory_guarantee: None,
        intra: exocell_cell::intra::Intra::default(),
        disk: None,
        idle: true,
        warm: None,
        locations: Vec::new(),
        capabilities: caps.to_string(),
        created_ms: now_ms(),
    })
}

/// Reaches into the image `id`. Blocks.
pub fn image(server: &Server, id: &str) -> ApiResult<Reach> {
    let caps = json!({
        "version": 1, "memory": { "limit": IMAGE_MEMORY }, "cpu": { "count": 1 },
        "disk": { "size": IMAGE_DISK }, "processes": { "max": 64 },
        "clock": {}, "random": {}, "stdio": {},
    });
    begin(server, &bare(id, &caps)?, None)
}

fn begin(server: &Server, spec: &CellSpec, held: Option<OwnedMutexGuard<()>>) -> ApiResult<Reach> {
    let session = launcher::launch(server.layout(), &Start::Idle(spec))?;
    let (record, _, _) = Record::find(server.layout(), &spec.id)?;
    let began = FrameReader::new(&session).expect::<Reply>(Kind::Reply);
    let idle = Some(Idle { session: Some(session), _held: held });
    let reach = Reach { record, idle };
    match began {
        Ok(Reply::Started { .. }) => Ok(reach),
        Ok(Reply::Failed { message, .. }) => Err(ApiError::internal(message)),
        Ok(_) | Err(_) => Err(ApiError::internal("the cell for its files did not come up")),
    }
}
