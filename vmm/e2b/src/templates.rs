//! The templates that a tenant has: `GET /templates`, `GET /v2/templates`, and their tags.
//!
//! They are those that the operator maps to an image, as far as the tenant may have them, and the
//! tenant's own images. The store keeps no history: a template has one build, its image, and what is
//! counted of it elsewhere is 0 here.

use std::collections::BTreeMap;
use std::sync::Arc;

use exocell_cell::images::{ImageRecord, Store};
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::blocking::blocking;
use crate::builds::{CPUS, MEMORY_MB};
use crate::envd::VERSION;
use crate::error::{Problem, Result};
use crate::http::{Call, Query, Response, empty, json_reply, stamp};
use crate::keys::Tenant;
use crate::state::Server;
use crate::template::own_image;

const PAGE_MAX: u64 = 100;
const TAGS_MAX: usize = 16;
const TAG: &str = "latest";

/// A template of a tenant's, by its name.
struct Known {
    image: ImageRecord,
    /// Names by which it is not told, after the colon.
    tags: BTreeMap<String, ImageRecord>,
    is_public: bool,
}

/// All that `tenant` has.
fn of_tenant(server: &Server, store: &Store, tenant: &Tenant) -> Result<BTreeMap<String, Known>> {
    let mut all = BTreeMap::new();
    let may = |name: &String| tenant.templates.as_ref().is_none_or(|own| own.contains(name));
    for (name, image) in server.options.templates.iter().filter(|(name, _)| may(name)) {
        if let Ok(image) = store.resolve(image) {
            let known = Known { image, tags: BTreeMap::new(), is_public: true };
            all.insert(name.clone(), known);
        }
    }
    let prefix = own_image(&tenant.name, "x")?.to_string();
    let prefix = prefix.strip_suffix("x:latest").unwrap_or(&prefix);
    for image in store.list()? {
        for own in image.tags.iter().filter_map(|tag| tag.strip_prefix(prefix)) {
            let Some((name, tag)) = own.split_once(':') else { continue };
            let known = all.entry(name.to_owned()).or_insert_with(|| Known {
                image: image.clone(),
                tags: BTreeMap::new(),
                is_public: false,
            });
            if known.is_public {
                continue;
            }
            if tag == TAG {
                known.image = image.clone();
            }
            known.tags.insert(tag.to_owned(), image.clone());
        }
    }
    Ok(all)
}

/// A build is known by its image, in the form of a UUID.
fn build_id(image: &ImageRecord) -> String {
    let id = image.id.to_string();
    let hex: Vec<char> = id.trim_start_matches("sha256:").chars().take(32).collect();
    let part = |range: std::ops::Range<usize>| -> String {
        hex.get(range).unwrap_or_default().iter().collect()
    };
    [part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)].join("-")
}

fn shown(server: &Server, name: &str, known: &Known) -> Value {
    let defaults = &server.options.defaults;
    let label = |name: &str| known.image.config.labels.get(name)?.parse::<u64>().ok();
    let memory_mb = defaults.memory_bytes >> 20;
    let at = stamp(known.image.imported.saturating_mul(1000));
    json!({
        "templateID": name, "buildID": build_id(&known.image), "public": known.is_public,
        "aliases": [name], "names": [name], "createdAt": at, "updatedAt": at,
        "cpuCount": label(CPUS).unwrap_or(defaults.vcpus.into()).min(defaults.vcpus.into()),
        "memoryMB": label(MEMORY_MB).unwrap_or(memory_mb).min(memory_mb),
        "diskSizeMB": defaults.disk_bytes >> 20, "envdVersion": VERSION,
        "createdBy": null, "lastSpawnedAt": null, "spawnCount": 0, "buildCount": 1,
        "buildStatus": "ready",
    })
}

async fn all(server: &Arc<Server>, tenant: &Tenant) -> Result<BTreeMap<String, Known>> {
    let (server, tenant) = (server.clone(), tenant.clone());
    blocking(move || of_tenant(&server, &server.builds.store, &tenant)).await
}

/// `GET /templates` and, in pages, `GET /v2/templates`
pub async fn list(
    server: &Arc<Server>,
    tenant: &Tenant,
    query: &Query,
    paged: bool,
) -> Result<Response> {
    let all = all(server, tenant).await?;
    let limit = match paged {
        true => query.number("limit")?.unwrap_or(PAGE_MAX).clamp(1, PAGE_MAX) as usize,
        false => usize::MAX,
    };
    // The token is the last one of the page before.
    let after = query.get("nextToken").filter(|token| paged && !token.is_empty()).unwrap_or("");
    let mut rest = all.iter().filter(|(name, _)| name.as_str() > after);
    let page: Vec<_> = rest.by_ref().take(limit).collect();
    let told: Vec<Value> = page.iter().map(|(name, known)| shown(server, name, known)).collect();
    let mut response = json_reply(StatusCode::OK, &told);
    if rest.next().is_some()
        && let Some(token) = page.last().and_then(|(name, _)| HeaderValue::from_str(name).ok())
    {
        response.headers_mut().insert("x-next-token", token);
    }
    Ok(response)
}

fn missing(name: &str) -> Problem {
    Problem::not_found(format!("template {name:?} was not found"))
}

/// `GET /templates/{name}`
pub async fn info(server: &Arc<Server>, tenant: &Tenant, name: &str) -> Result<Response> {
    let all = all(server, tenant).await?;
    let known = all.get(name).ok_or_else(|| missing(name))?;
    let mut told = shown(server, name, known);
    let build = json!({
        "buildID": told["buildID"], "status": "ready", "createdAt": told["createdAt"],
        "updatedAt": told["createdAt"], "finishedAt": told["createdAt"],
        "cpuCount": told["cpuCount"], "memoryMB": told["memoryMB"],
        "diskSizeMB": told["diskSizeMB"], "envdVersion": VERSION,
    });
    told["builds"] = json!([build]);
    Ok(json_reply(StatusCode::OK, &told))
}

/// `GET /templates/{name}/tags`
pub async fn tags(server: &Arc<Server>, tenant: &Tenant, name: &str) -> Result<Response> {
    let all = all(server, tenant).await?;
    let known = all.get(name).ok_or_else(|| missing(name))?;
    let told = |(tag, image): (&String, &ImageRecord)| {
        let at = stamp(image.imported.saturating_mul(1000));
        json!({ "tag": tag, "buildID": build_id(image), "createdAt": at })
    };
    Ok(json_reply(StatusCode::OK, &known.tags.iter().map(told).collect::<Vec<_>>()))
}

/// Of a request that changes tags.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    target: Option<String>,
    name: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
}

impl Change {
    fn check(&self) -> Result<()> {
        match self.tags.len() {
            1..=TAGS_MAX => Ok(()),
            _ => Err(Problem::invalid(format!("name 1 to {TAGS_MAX} tags"))),
        }
    }
}

/// `POST /templates/tags`: more tags for the build that `target` names.
pub async fn assign(server: &Arc<Server>, tenant: &Tenant, call: Call) -> Result<Response> {
    let wanted: Change = call.json().await?;
    wanted.check()?;
    let target = wanted.target.clone().unwrap_or_default();
    let from = own_image(&tenant.name, &target).map_err(|_| missing(&target))?;
    let (name, _) = target.split_once(':').unwrap_or((&target, ""));
    let own = |tag: &String| own_image(&tenant.name, &format!("{name}:{tag}"));
    let new: Vec<_> = wanted.tags.iter().map(own).collect::<Result<_>>()?;
    let store = server.builds.store.clone();
    let tagged = blocking(move || {
        let image = store.resolve(&from.to_string())?;
        for tag in &new {
            store.tag(&image.id.to_string(), tag)?;
        }
        Ok(image)
    });
    let image = tagged.await.map_err(|error| match error.status {
        StatusCode::NOT_FOUND => missing(&target),
        _ => error,
    })?;
    let told = json!({ "tags": wanted.tags, "buildID": build_id(&image) });
    Ok(json_reply(StatusCode::CREATED, &told))
}

/// `DELETE /templates/tags`: the build stays while it has another.
pub async fn unassign(server: &Arc<Server>, tenant: &Tenant, call: Call) -> Result<Response> {
    let wanted: Change = call.json().await?;
    wanted.check()?;
    let name = wanted.name.unwrap_or_default();
    let own = |tag: &String| own_image(&tenant.name, &format!("{name}:{tag}"));
    let old: Vec<_> =
        wanted.tags.iter().map(own).collect::<Result<_>>().map_err(|_| missing(&name))?;
    let store = server.builds.store.clone();
    let removed = blocking(move || {
        for tag in &old {
            store.resolve(&tag.to_string())?;
        }
        for tag in &old {
            store.remove(&tag.to_string(), false)?;
        }
        Ok(())
    });
    removed.await.map_err(|error| match error.status {
        StatusCode::NOT_FOUND => missing(&format!("{name}:{}", wanted.tags.join(","))),
        _ => error,
    })?;
    Ok(empty(StatusCode::NO_CONTENT))
}
