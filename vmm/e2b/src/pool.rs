//! Sandboxes that have booted before anybody asks for them, and whose template is ready.
//!
//! ```text
//! keep ── a spare turn of the queue ──> boots, as nobody's ─> start, ready ─> waits ─┐
//!   ^ refilled behind                       │ image changed, server gone: ends      │ create
//!   └───────────────────────────────────────┴──────── note, network, Settle <───────┘
//! ```
//! One that waits has run nothing of a client's, and knows nothing of any: it has the image's
//! files, the template's own programs, and its id. It has no note, and its cell is tied to the
//! server: it ends with it, however that ends. A request takes it only where it would have booted
//! the same: the same image by the same name, and where the template's programs have run by then
//! with the same network. What is the client's own (variables, metadata, time, tokens, rules of the
//! network) is said when it is taken; then the cell outlives the server as others do.

use std::sync::Arc;
use std::time::Duration;

use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::logging::tracing::{info, warn};
use exocell_cell::signal::Signal;
use exocell_cell::{Layout, Record, end};

use crate::beginning::Beginning;
use crate::blocking::blocking;
use crate::boot::{self, LABEL_POOL, labels};
use crate::envd::programs;
use crate::error::{Problem, Result};
use crate::keys::Tenant;
use crate::network;
use crate::note::Note;
use crate::queue::Turn;
use crate::sandbox::Sandbox;
use crate::state::Server;
use crate::template::{self, Found};
use crate::waiting::{Kind, Wanted};

/// Who took one has the machine to itself for so long before the next boots.
const HEADWAY: Duration = Duration::from_millis(100);
/// How often it is looked whether a template has changed.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Makes one that waits the sandbox that `note` describes, but for the id, which it keeps; `None`
/// where none is just such a one.
pub async fn take_over(server: &Arc<Server>, note: &Note) -> Option<Arc<Sandbox>> {
    loop {
        let (sandbox, rules) = server.pool.claim(note)?;
        match hand_over(server, &sandbox, &rules, note).await {
            Ok(()) => return Some(sandbox),
            Err(error) => {
                warn!(sandbox = sandbox.id, "cannot be taken from the pool: {error}");
                server.discard(&sandbox).await;
            }
        }
    }
}

async fn hand_over(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    rules: &[String],
    note: &Note,
) -> Result<()> {
    let note = Note { id: sandbox.id.clone(), ..note.clone() };
    let (allow, deny) = network::change(rules, &note.rules);
    if !sandbox.become_one(note.clone()) {
        return Err(Problem::internal("it is somebody's"));
    }
    let (notes, record, labels) = (server.notes.clone(), sandbox.record.clone(), labels(&note));
    blocking(move || {
        // The next server knows it from here on, or clears it away.
        notes
            .write(|| note)
            .map_err(|error| Problem::internal(format!("cannot write it down: {error}")))?;
        if !allow.is_empty() || !deny.is_empty() {
            Client::connect(&record)?.ask(&ControlRequest::Network { allow, deny })?;
        }
        Client::connect(&record)?.ask(&ControlRequest::Settle { labels })?;
        Ok(())
    })
    .await?;
    server.show(sandbox).await;
    if sandbox.has_ended() {
        return Err(Problem::unavailable("it ended meanwhile"));
    }
    if !sandbox.programs.is_empty() {
        programs::write_down(server, sandbox).await;
    }
    Ok(())
}

/// Ends one that waits, if there are more of all than the server has room for.
pub async fn make_room(server: &Arc<Server>) {
    while server.count() + server.pool.len() > server.options.sandboxes_max {
        let Some(sandbox) = server.pool.give_up() else { return };
        server.discard(&sandbox).await;
    }
}

/// Keeps as many as are wanted, until the server ends.
pub async fn keep(server: Arc<Server>) {
    let all = wishes(&server);
    if all.is_empty() {
        return;
    }
    loop {
        let wanted = resolve(&server, &all).await;
        for sandbox in server.pool.outdated(&wanted) {
            server.discard(&sandbox).await;
        }
        // One may have come while its place was taken.
        make_room(&server).await;
        let has_room = server.count() + server.pool.len() < server.options.sandboxes_max;
        if let Some(turn) = has_room.then(|| server.queue.spare()).flatten()
            && let Some(next) = server.pool.next(&wanted)
        {
            let (kind, found) = (next.kind.clone(), next.found.clone());
            let server = server.clone();
            tokio::spawn(async move {
                let booted = boot(&server, &kind, found, turn).await;
                if let Err(error) = &booted {
                    warn!(template = kind.name, "none for the pool: {error}");
                }
                let sandbox = booted.ok();
                server.pool.came(&kind, sandbox.clone().map(|own| (own.id.clone(), own)));
                // Its end may have come just before.
                if let Some(sandbox) = sandbox.filter(|it| it.has_ended())
                    && server.pool.forget(&sandbox.id)
                {
                    server.discard(&sandbox).await;
                }
            });
            continue;
        }
        tokio::select! {
            () = server.pool.changed.notified() => {}
            () = server.queue.idle() => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
        tokio::time::sleep(HEADWAY).await;
    }
}

/// Whose sandboxes of which templates are to wait, and how many.
fn wishes(server: &Server) -> Vec<(Tenant, Option<String>, String, usize)> {
    let (options, keys) = (&server.options, &server.keys);
    let mut all = Vec::new();
    let only = keys.only_one();
    for (name, count) in &options.pool {
        // Where there is one key, its own templates are meant as well.
        let (tenant, owner) = match only {
            Some(tenant) => (tenant.clone(), Some(tenant.name.clone())),
            None => (Tenant::nobody(), None),
        };
        all.push((tenant, owner, name.clone(), *count));
    }
    for tenant in keys.all() {
        for (name, count) in &tenant.pool {
            all.push((tenant.clone(), Some(tenant.name.clone()), name.clone(), *count));
        }
    }
    all.retain(|(.., count)| *count > 0);
    all
}

/// What these are by now; a template that there is not has none.
async fn resolve(
    server: &Server,
    all: &[(Tenant, Option<String>, String, usize)],
) -> Vec<Wanted<Found>> {
    let mut wanted = Vec::new();
    for (tenant, owner, name, count) in all {
        let Ok(found) = template::find(&server.options, &server.builds.store, tenant, name).await
        else {
            continue;
        };
        let runs = Beginning::of(&found.config).runs();
        let granted = network::rules(server.options.grant(tenant), None, &Default::default());
        let kind = Kind {
            owner: owner.clone(),
            name: name.clone(),
            image: found.id.clone(),
            runs,
            // Without programs of the template's, what is granted is said when it is taken.
            rules: if runs { granted.unwrap_or_default() } else { Vec::new() },
        };
        wanted.push(Wanted { kind, found, count: *count });
    }
    wanted
}

async fn boot(server: &Arc<Server>, kind: &Kind, found: Found, turn: Turn) -> Result<Arc<Sandbox>> {
    let beginning = Beginning::of(&found.config);
    let note = Note { rules: kind.rules.clone(), ..boot::bare(server, found)? };
    let (sandbox, session) = boot::boot(server, note).await?;
    server.follow(&sandbox, session);
    drop(turn);
    if let Err(error) = beginning.run(server, &sandbox).await {
        server.discard(&sandbox).await;
        return Err(error);
    }
    sandbox.begin();
    info!(sandbox = sandbox.id, template = kind.name, "waits in the pool");
    Ok(sandbox)
}

/// Ends what an earlier server has left. Blocks.
pub fn sweep(layout: &Layout) {
    for (record, spec, status) in Record::all(layout).unwrap_or_default() {
        if spec.tied && spec.labels.contains_key(LABEL_POOL) {
            // One that ends by itself needs no word.
            let _ = end::kill(layout, &record, Signal::KILL);
            record.await_release();
            let _ = end::remove(layout, &record, &status, true);
        }
    }
}
