//! Snapshots: the files of a sandbox as a template that its tenant has, and no other.
//!
//! A snapshot is an image of the store, called `exocell-e2b/TENANT/NAME`. Programs and memory are
//! not in it.

use std::sync::Arc;
use std::time::Duration;

use exocell_cell::commit::commit_until;
use exocell_cell::images::{ImageRecord, Note, Silent, Store};
use exocell_cell::logging::tracing::info;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::blocking::blocking;
use crate::error::{Problem, Result};
use crate::http::{Call, Query, Response, empty, json_reply};
use crate::keys::{self, Tenant};
use crate::sandbox::Sandbox;
use crate::state::Server;
use crate::template::own_image;

/// How long a guest may take to send its files.
const SENDING_MAX: Duration = Duration::from_secs(15 * 60);
/// Snapshots of a tenant.
const SNAPSHOTS_MAX: usize = 100;
const PAGE_MAX: u64 = 100;
/// The label of an image that is one, with the sandbox that it is of.
const LABEL: &str = "exocell.e2b.snapshot";
/// Characters of a name that is made up.
const NAME_CHARS: usize = 16;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    name: Option<String>,
    memory: Option<bool>,
}

/// `POST /sandboxes/{id}/snapshots`
pub async fn create(server: &Arc<Server>, sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let wanted: Wanted = call.json().await?;
    if wanted.memory == Some(true) {
        return Err(Problem::unsupported(
            "a snapshot with memory (memory: true)",
            "take one of the files alone (mode=\"filesystem\")",
        ));
    }
    // Others may end or pause it meanwhile, which breaks this off.
    let held = sandbox.saving.lock().await;
    let cutter = sandbox.save();
    if sandbox.is_paused() {
        return Err(Problem::conflict("the sandbox is paused; let it go on first"));
    }
    let name = match wanted.name {
        Some(name) => name,
        None => {
            let random = keys::random().map_err(|error| Problem::internal(error.to_string()))?;
            format!("snap-{}", &random[..NAME_CHARS])
        }
    };
    let tag = own_image(sandbox.tenant(), &name)?;
    let (layout, own) = (server.layout().clone(), sandbox.clone());
    let store = server.builds.store.clone();
    let (id, shown, own_cutter) = (sandbox.id.clone(), name.clone(), cutter.clone());
    let made = blocking(move || {
        let store = &*store;
        if of_tenant(store, own.tenant())?.len() >= SNAPSHOTS_MAX {
            return Err(Problem::exhausted(format!(
                "there are {SNAPSHOTS_MAX} snapshots of this key, as many as there may be; \
                 delete one"
            )));
        }
        let mut config = store.resolve(&own.note().template)?.config;
        config.labels.insert(LABEL.to_owned(), id);
        commit_until(
            &layout,
            &own.record,
            (&config, &Note::default()),
            Some(&tag),
            &mut Silent,
            &own_cutter,
        )?;
        Ok(())
    });
    let mut made = std::pin::pin!(made);
    let (made, is_late) = tokio::select! {
        made = &mut made => (made, false),
        () = tokio::time::sleep(SENDING_MAX) => {
            cutter.cut();
            (made.await, true)
        }
    };
    made.map_err(|error| match (is_late, cutter.is_cut()) {
        (true, _) => Problem::deadline(format!(
            "the sandbox did not send its files within {} min; keep less in it",
            SENDING_MAX.as_secs() / 60
        )),
        (false, true) => {
            Problem::conflict("the sandbox was ended or paused before its files were read")
        }
        _ => error,
    })?;
    drop(held);
    info!(sandbox = sandbox.id, snapshot = shown, "kept");
    Ok(json_reply(StatusCode::CREATED, &told(&shown)))
}

fn told(name: &str) -> Value {
    json!({ "snapshotID": name, "names": [name] })
}

/// The names of a tenant's snapshots, newest first, and the images that they are.
fn of_tenant(store: &Store, tenant: &str) -> Result<Vec<(String, ImageRecord)>> {
    let prefix = own_image(tenant, "x")?.to_string();
    let prefix = prefix.strip_suffix("x:latest").unwrap_or(&prefix).to_owned();
    let mut all = Vec::new();
    for image in store.list()? {
        let own = image.tags.iter().filter_map(|tag| tag.strip_prefix(&prefix));
        for name in own.filter(|_| image.config.labels.contains_key(LABEL)) {
            all.push((name.strip_suffix(":latest").unwrap_or(name).to_owned(), image.clone()));
        }
    }
    Ok(all)
}

/// `GET /snapshots`
pub async fn list(server: &Arc<Server>, tenant: &Tenant, query: &Query) -> Result<Response> {
    let (store, tenant) = (server.builds.store.clone(), tenant.name.clone());
    let all = blocking(move || of_tenant(&store, &tenant)).await?;
    let (sandbox, name) = (query.get("sandboxID"), query.get("name"));
    let passes = |(own, image): &&(String, ImageRecord)| {
        sandbox.is_none_or(|id| image.config.labels.get(LABEL).is_some_and(|it| it == id))
            && name.is_none_or(|name| name == own)
    };
    let names: Vec<&String> = all.iter().filter(passes).map(|(name, _)| name).collect();
    let limit = query.number("limit")?.unwrap_or(PAGE_MAX).clamp(1, PAGE_MAX) as usize;
    // The token is the last one of the page before.
    let from = match query.get("nextToken").filter(|token| !token.is_empty()) {
        None => 0,
        Some(last) => names.iter().position(|name| *name == last).map_or(names.len(), |at| at + 1),
    };
    let page: Vec<&&String> = names.iter().skip(from).take(limit).collect();
    let shown: Vec<Value> = page.iter().map(|name| told(name)).collect();
    let mut response = json_reply(StatusCode::OK, &shown);
    if from + page.len() < names.len()
        && let Some(token) = page.last().and_then(|name| HeaderValue::from_str(name).ok())
    {
        response.headers_mut().insert("x-next-token", token);
    }
    Ok(response)
}

/// `DELETE /templates/{name}`: a snapshot of the tenant's. Other templates are the operator's.
pub async fn remove(server: &Arc<Server>, tenant: &Tenant, name: &str) -> Result<Response> {
    let missing = || Problem::not_found(format!("template {name:?} was not found"));
    let image = own_image(&tenant.name, name).map_err(|_| missing())?.to_string();
    let store = server.builds.store.clone();
    let removed = blocking(move || {
        store.remove(&image, false)?;
        Ok(())
    });
    removed.await.map_err(|error| match error.status {
        StatusCode::NOT_FOUND => missing(),
        _ => error,
    })?;
    Ok(empty(StatusCode::NO_CONTENT))
}
