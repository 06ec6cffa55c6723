//! A sandbox' cell: how it is described, launched, and made ready for commands.
//!
//! The cell's own program is a shell that waits for ever: commands run beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use exocell_cell::agent::files::{self, FileAction, FileRequest};
use exocell_cell::agent::{Kind, Reply, client};
use exocell_cell::logging::tracing::{debug, warn};
use exocell_cell::settings::Settings;
use exocell_cell::signal::Signal;
use exocell_cell::{CellSpec, Record, Strength, end, now_ms};
use exocell_docker::frames::read_frame;
use exocell_docker::launcher::{self, Start};
use hyper::StatusCode;
use serde_json::json;
use tokio::net::UnixStream;

use crate::blocking::blocking;
use crate::builds::{CPUS, LABEL_USER, LABEL_WORKDIR, MEMORY_MB};
use crate::error::{Problem, Result};
use crate::keys::POOL;
use crate::note::{Note, USER};
use crate::sandbox::{Sandbox, listened};
use crate::state::Server;
use crate::template::Found;

/// When another try makes sense where a sandbox could not start, in seconds.
const RETRY_AFTER: u64 = 5;
/// The label of a cell that is a sandbox, with its tenant.
const LABEL: &str = "exocell.e2b.tenant";
/// The label of a cell that waits to be one, with its template's name.
pub const LABEL_POOL: &str = "exocell.e2b.pool";

/// A sandbox of `found` of which nobody has said anything yet.
///
/// # Errors
/// The host gives no random bytes.
pub fn bare(server: &Server, found: Found) -> Result<Note> {
    let defaults = &server.options.defaults;
    let label = |name: &str| found.config.labels.get(name)?.parse::<u64>().ok();
    Ok(Note {
        id: CellSpec::new_id()?,
        tenant: POOL.to_owned(),
        user: found.config.labels.get(LABEL_USER).map_or(USER, String::as_str).to_owned(),
        workdir: found.config.labels.get(LABEL_WORKDIR).cloned(),
        started_ms: now_ms(),
        vcpus: label(CPUS).map_or(defaults.vcpus, |cpus| defaults.vcpus.min(cpus as u32).max(1)),
        memory_bytes: match label(MEMORY_MB) {
            Some(mib) if mib > 0 => defaults.memory_bytes.min(mib.saturating_mul(1 << 20)),
            _ => defaults.memory_bytes,
        },
        disk_bytes: defaults.disk_bytes,
        template: found.id,
        alias: found.alias,
        image_env: found.config.env,
        ..Note::default()
    })
}

/// Starts a cell, and has it ready for commands. One of no tenant's ends with the session.
pub async fn boot(server: &Arc<Server>, note: Note) -> Result<(Arc<Sandbox>, UnixStream)> {
    let id = note.id.clone();
    let started = async {
        let session = launch(server, &note).await?;
        let record = Record::at(server.layout(), &note.id);
        let sandbox = Sandbox::new(record, note, &server.bounds);
        sandbox.ask(|guest| client::account(guest, guest, USER)).await?;
        let (own, note) = (sandbox.clone(), sandbox.note());
        sandbox.work(move || identify(&own, &note)).await?;
        Ok((sandbox, session))
    };
    match started.await {
        Ok(started) => Ok(started),
        Err(error) => {
            let layout = server.layout().clone();
            blocking(move || {
                if let Ok((record, _, status)) = Record::find(&layout, &id) {
                    let _ = end::kill(&layout, &record, Signal::KILL);
                    let _ = end::remove(&layout, &record, &status, true);
                }
                Ok(())
            })
            .await?;
            Err(error)
        }
    }
}

/// Writes down for programs that they are in a sandbox, and in which, where E2B's envd does.
fn identify(sandbox: &Sandbox, note: &Note) -> Result<()> {
    for (name, text) in [
        ("SANDBOX", "true"),
        ("SANDBOX_ID", &note.id),
        ("TEMPLATE_ID", note.alias.as_ref().unwrap_or(&note.template)),
    ] {
        let request = FileRequest {
            user: "0".to_owned(),
            path: format!("/run/e2b/.E2B_{name}"),
            action: FileAction::Write { metadata: BTreeMap::new() },
        };
        let guest = sandbox.guest()?;
        if let Err(error) = files::write(&guest, &guest, &request, &mut text.as_bytes()) {
            // The image has something else there.
            debug!(sandbox = sandbox.id, path = request.path, "not written: {error}");
        }
    }
    Ok(())
}

/// Launches the cell and waits until its program runs; the session.
async fn launch(server: &Arc<Server>, note: &Note) -> Result<UnixStream> {
    let spec = spec(server, note);
    let layout = server.layout().clone();
    let launched = blocking(move || {
        launcher::launch(&layout, &Start::Cell(&spec)).map_err(|error| match error.status {
            StatusCode::NOT_FOUND => error.into(),
            // The table is the server's own: what is wrong with it is nothing of the client's.
            _ => {
                warn!("a sandbox does not start: {}", error.message);
                let words = "the server cannot start a sandbox now; try again later";
                Problem::unavailable(words).after(RETRY_AFTER)
            }
        })
    });
    let session = launched.await?;
    let mut session = listened(session)?;
    loop {
        let frame = read_frame(&mut session).await.ok().flatten();
        let lost = || Problem::internal("the sandbox ended before it was ready");
        let frame = frame.ok_or_else(lost)?;
        if frame.kind != Kind::Reply {
            continue;
        }
        return match frame.json::<Reply>() {
            Ok(Reply::Started { .. }) => Ok(session),
            Ok(Reply::Failed { message, .. }) => Err(Problem::invalid(format!(
                "the template cannot be a sandbox, which needs /bin/sh in its image: {}",
                client::cleaned(&message)
            ))),
            _ => Err(lost()),
        };
    }
}

/// What the operator reads of a cell that is a sandbox.
pub fn labels(note: &Note) -> BTreeMap<String, String> {
    match note.tenant.as_str() {
        POOL => [(LABEL_POOL.to_owned(), note.alias.clone().unwrap_or_default())].into(),
        tenant => [(LABEL.to_owned(), tenant.to_owned())].into(),
    }
}

fn spec(server: &Server, note: &Note) -> CellSpec {
    let image = note.template.clone();
    let defaults = &server.options.defaults;
    let mut table = json!({
        "version": 1,
        "memory": { "limit": note.memory_bytes.to_string() },
        "cpu": { "count": note.vcpus },
        "disk": { "size": note.disk_bytes.to_string() },
        "processes": { "max": defaults.processes },
        "clock": {}, "random": {}, "stdio": {},
    });
    if !note.rules.is_empty() {
        table["network"] = json!({ "connect": note.rules, "listen": [] });
    }
    CellSpec {
        version: CellSpec::VERSION,
        name: format!("e2b-{}", &note.id[..12]),
        id: note.id.clone(),
        strength: Strength::Vm,
        image_id: Some(image.clone()),
        image,
        entrypoint: Some(Vec::new()),
        command: vec!["/bin/sh".to_owned()],
        env: Vec::new(),
        working_dir: Some("/".to_owned()),
        user: Some("0".to_owned()),
        hostname: Some("e2b".to_owned()),
        settings: Settings { init: true, ..Settings::default() },
        tty: false,
        // It reads this for ever.
        stdin: true,
        remove: true,
        read_only: false,
        publish: Vec::new(),
        within: None,
        networks: Vec::new(),
        // So that its rules can change.
        has_link: !server.options.defaults.connect.is_empty(),
        pager: exocell_cell::pager::Mode::default(),
        memory_guarantee: None,
        intra: defaults.intra,
        platform: exocell_cell::platform::PlatformKind::default(),
        disk: None,
        keeps_disk: false,
        keeps_no_log: false,
        labels: labels(note),
        stop_signal: None,
        stop_seconds: None,
        restart: exocell_cell::policy::Policy::No,
        restarts: 0,
        health: Some(exocell_cell::images::Healthcheck {
            test: vec!["NONE".to_owned()],
            ..Default::default()
        }),
        idle: false,
        depot: None,
        plug: false,
        tied: note.tenant == POOL,
        warm: None,
        capabilities: table.to_string(),
        changes: exocell_cell::changes::Changes::default(),
        locations: Vec::new(),
        fills: Vec::new(),
        copies: BTreeMap::new(),
        created_ms: note.started_ms,
    }
}
