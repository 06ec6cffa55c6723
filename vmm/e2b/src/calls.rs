//! The calls on sandboxes that are there.

use std::sync::Arc;

use exocell_cell::agent::client;
use exocell_cell::clock::parse_ms;
use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::processes::CellUse;
use exocell_cell::{Record, now_ms};
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::create::told;
use crate::envd::VERSION;
use crate::error::{Problem, Result};
use crate::http::{Call, Query, Response, empty, json_reply, stamp};
use crate::keys::Tenant;
use crate::network::{self, Wanted};
use crate::note::{Note, OnTimeout};
use crate::sandbox::{PAUSED_MAX_MS, Sandbox};
use crate::state::Server;

/// Sandboxes of a page.
const PAGE_DEFAULT: u64 = 100;
const PAGE_MAX: u64 = 100;
const MIB: u64 = 1 << 20;

/// What is told of a sandbox.
fn shown(note: &Note) -> Value {
    let end_ms = match note.paused_ms {
        Some(since) => since.saturating_add(PAUSED_MAX_MS),
        None => note.deadline_ms,
    };
    let mut shown = json!({
        "sandboxID": note.id, "templateID": note.template, "clientID": "exocell",
        "startedAt": stamp(note.started_ms), "endAt": stamp(end_ms),
        "cpuCount": note.vcpus, "memoryMB": note.memory_bytes / MIB,
        "diskSizeMB": note.disk_bytes / MIB, "envdVersion": VERSION,
        "state": if note.paused_ms.is_some() { "paused" } else { "running" },
        "metadata": note.metadata,
    });
    if let Some(alias) = &note.alias {
        shown["alias"] = alias.as_str().into();
    }
    shown
}

/// `GET /sandboxes/{id}`
pub fn info(server: &Server, sandbox: &Sandbox) -> Response {
    let note = sandbox.note();
    let mut shown = shown(&note);
    shown["domain"] = server.options.domain().into();
    shown["envdAccessToken"] = note.access_token.as_str().into();
    shown["allowInternetAccess"] = json!(note.internet);
    let on_timeout = match note.on_timeout {
        OnTimeout::Kill => "kill",
        OnTimeout::Pause => "pause",
    };
    shown["lifecycle"] = json!({ "autoResume": note.auto_resume, "onTimeout": on_timeout });
    if note.paused_ms.is_some() {
        shown["pauseMode"] = "full".into();
    }
    if let Some(network) = &note.network {
        shown["network"] = network.clone();
    }
    json_reply(StatusCode::OK, &shown)
}

/// What a list is narrowed to.
struct Wish {
    states: Vec<String>,
    metadata: Vec<(String, String)>,
    template: Option<String>,
    after_ms: Option<u64>,
}

impl Wish {
    fn read(query: &Query, states: &[&str]) -> Result<Self> {
        let mut wanted: Vec<String> = query
            .all("state")
            .flat_map(|text| text.split(','))
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
            .collect();
        if let Some(wrong) = wanted.iter().find(|it| !["running", "paused"].contains(&it.as_str()))
        {
            return Err(Problem::invalid(format!(
                "state: {wrong:?} is none; say running or paused"
            )));
        }
        if wanted.is_empty() {
            wanted = states.iter().map(ToString::to_string).collect();
        }
        // A query in a query; names and values are quoted once more.
        let metadata = Query::read(query.get("metadata").unwrap_or_default());
        let unquoted = |text: &str| {
            percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
        };
        let after = query.get("startedAfter").map(|text| {
            parse_ms(text, now_ms()).map_err(|why| Problem::invalid(format!("startedAfter: {why}")))
        });
        Ok(Self {
            states: wanted,
            metadata: metadata.pairs().map(|(n, v)| (unquoted(n), unquoted(v))).collect(),
            template: query.get("template").map(str::to_owned),
            after_ms: after.transpose()?,
        })
    }

    fn takes(&self, note: &Note) -> bool {
        let state = if note.paused_ms.is_some() { "paused" } else { "running" };
        let has = |(name, value): &(String, String)| note.metadata.get(name) == Some(value);
        let of =
            |wanted: &String| [Some(&note.template), note.alias.as_ref()].contains(&Some(wanted));
        self.states.iter().any(|wanted| wanted == state)
            && self.metadata.iter().all(has)
            && self.template.as_ref().is_none_or(of)
            && self.after_ms.is_none_or(|after| note.started_ms >= after)
    }
}

/// `GET /sandboxes` and, in pages, `GET /v2/sandboxes`
pub fn list(server: &Server, tenant: &Tenant, query: &Query, paged: bool) -> Result<Response> {
    let wish = Wish::read(query, if paged { &["running", "paused"] } else { &["running"] })?;
    let own = server.all().into_iter().filter(|sandbox| sandbox.tenant() == tenant.name);
    let mut notes: Vec<Note> = own.map(|it| it.note()).filter(|note| wish.takes(note)).collect();
    let place = |note: &Note| (note.started_ms, note.id.clone());
    notes.sort_by_cached_key(place);
    match query.get("order") {
        None | Some("desc") => notes.reverse(),
        Some("asc") => {}
        Some(other) => {
            return Err(Problem::invalid(format!("order: {other:?} is not asc or desc")));
        }
    }
    if !paged {
        let all: Vec<Value> = notes.iter().map(shown).collect();
        return Ok(json_reply(StatusCode::OK, &all));
    }
    let limit = query.number("limit")?.unwrap_or(PAGE_DEFAULT);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(Problem::invalid(format!("limit: say 1 to {PAGE_MAX}")));
    }
    // The token is the last one of the page before.
    let from = match query.get("nextToken").filter(|token| !token.is_empty()) {
        None => 0,
        Some(token) => {
            let last = token.split_once('_').and_then(|(at, id)| Some((at.parse().ok()?, id)));
            let last: (u64, &str) = last.ok_or_else(|| Problem::invalid("nextToken is none"))?;
            let is_asc = query.get("order") == Some("asc");
            let seen = |note: &Note| {
                let own = (note.started_ms, note.id.as_str());
                if is_asc { own <= last } else { own >= last }
            };
            notes.partition_point(seen)
        }
    };
    let page: Vec<&Note> = notes.iter().skip(from).take(limit as usize).collect();
    let shown: Vec<Value> = page.iter().map(|note| shown(note)).collect();
    let mut response = json_reply(StatusCode::OK, &shown);
    if from + page.len() < notes.len()
        && let Some(last) = page.last()
        && let Ok(token) = HeaderValue::from_str(&format!("{}_{}", last.started_ms, last.id))
    {
        response.headers_mut().insert("x-next-token", token);
    }
    Ok(response)
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Time {
    timeout: Option<u64>,
    /// Of `refreshes`.
    duration: Option<u64>,
    /// Of `resume`.
    #[serde(rename = "autoPause")]
    auto_pause: Option<bool>,
    /// Of `connect`.
    memory: Option<bool>,
}

/// `POST /sandboxes/{id}/timeout`: its time begins anew.
pub async fn timeout(server: &Arc<Server>, sandbox: &Sandbox, call: Call) -> Result<Response> {
    let wanted: Time = call.json().await?;
    let seconds = server.options.timeout_of(wanted.timeout)?;
    move_deadline(server, sandbox, seconds, false).await
}

/// `POST /sandboxes/{id}/refreshes`: it has so long at least.
pub async fn refresh(server: &Arc<Server>, sandbox: &Sandbox, call: Call) -> Result<Response> {
    let wanted: Time = call.json().await?;
    let seconds = server.options.timeout_of(wanted.duration)?;
    move_deadline(server, sandbox, seconds, true).await
}

async fn move_deadline(
    server: &Arc<Server>,
    sandbox: &Sandbox,
    seconds: u64,
    only_later: bool,
) -> Result<Response> {
    let at = now_ms() + seconds * 1000;
    let note = sandbox.change(|note| {
        note.deadline_ms = if only_later { at.max(note.deadline_ms) } else { at };
    });
    server.write(note).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `DELETE /sandboxes/{id}`
pub async fn kill(server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> Result<Response> {
    sandbox.stop_saving();
    let _held = sandbox.changing.lock().await;
    // Another may have been faster.
    server.find(sandbox.tenant(), &sandbox.id)?;
    server.kill_held(sandbox).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Pause {
    memory: Option<bool>,
    /// The guest's agent has nothing to do with a pause here.
    #[serde(rename = "requireHealthyGuest")]
    _require_healthy_guest: Option<bool>,
}

/// `POST /sandboxes/{id}/pause`
pub async fn pause(server: &Arc<Server>, sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let wanted: Pause = call.json().await?;
    if wanted.memory == Some(false) {
        return Err(Problem::unsupported(
            "a pause that keeps files alone (memory: false)",
            "a paused sandbox keeps its programs, too",
        ));
    }
    // A snapshot that is being made comes first.
    let _saving = sandbox.saving.lock().await;
    let _held = sandbox.changing.lock().await;
    server.find(sandbox.tenant(), &sandbox.id)?;
    if sandbox.is_paused() {
        return Err(Problem::conflict(format!("sandbox {} is already paused", sandbox.id)));
    }
    server.pause_held(sandbox).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /sandboxes/{id}/connect`: it goes on if it is paused, and has so long at least.
pub async fn connect(server: &Arc<Server>, sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let wanted: Time = call.json().await?;
    if wanted.memory == Some(false) {
        return Err(Problem::unsupported(
            "to resume without memory (memory: false)",
            "start a new sandbox",
        ));
    }
    let seconds = server.options.timeout_of(wanted.timeout)?;
    let resumed = server.resume(sandbox, now_ms() + seconds * 1000).await?;
    if !resumed {
        move_deadline(server, sandbox, seconds, true).await?;
    }
    let status = if resumed { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json_reply(status, &told(server, &sandbox.note())))
}

/// `POST /sandboxes/{id}/resume`, as older clients have it
pub async fn resume(server: &Arc<Server>, sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let wanted: Time = call.json().await?;
    let seconds = server.options.timeout_of(wanted.timeout)?;
    if !server.resume(sandbox, now_ms() + seconds * 1000).await? {
        return Err(Problem::conflict(format!("sandbox {} is running", sandbox.id)));
    }
    if let Some(pauses) = wanted.auto_pause {
        let on_timeout = if pauses { OnTimeout::Pause } else { OnTimeout::Kill };
        server.write(sandbox.change(|note| note.on_timeout = on_timeout)).await?;
    }
    Ok(json_reply(StatusCode::CREATED, &told(server, &sandbox.note())))
}

/// `PUT /sandboxes/{id}/network`
pub async fn set_network(
    server: &Arc<Server>,
    tenant: &Tenant,
    sandbox: &Arc<Sandbox>,
    call: Call,
) -> Result<Response> {
    let asked: Value = call.json().await?;
    let wanted = Wanted::read(&asked)?;
    if wanted.allow_public_traffic.is_some() {
        return Err(Problem::invalid("allowPublicTraffic: it is said when a sandbox is made"));
    }
    let _held = sandbox.changing.lock().await;
    let internet = wanted.allow_internet_access;
    let rules = network::rules(server.options.grant(tenant), internet, &wanted)?;
    let (allow, deny) = network::change(&sandbox.note().rules, &rules);
    if !allow.is_empty() || !deny.is_empty() {
        let record = sandbox.record.clone();
        sandbox
            .work(move || {
                Ok(Client::connect(&record)?.ask(&ControlRequest::Network { allow, deny })?)
            })
            .await?;
    }
    let note = sandbox.change(|note| {
        (note.rules, note.internet, note.network) = (rules, internet, Some(asked));
    });
    server.write(note).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `GET /sandboxes/{id}/metrics`: what it uses now. Nothing is kept of before.
pub async fn metrics(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    query: &Query,
) -> Result<Response> {
    let now = now_ms() / 1000;
    let (start, end) = (query.number("start")?, query.number("end")?);
    if start.is_some_and(|start| start > now) || end.is_some_and(|end| end < now) {
        return Ok(json_reply(StatusCode::OK, &json!([])));
    }
    Ok(json_reply(StatusCode::OK, &json!([measure(server, sandbox).await?])))
}

/// `GET /sandboxes/metrics?sandbox_ids=…`
pub async fn metrics_of_all(
    server: &Arc<Server>,
    tenant: &Tenant,
    query: &Query,
) -> Result<Response> {
    let mut all = serde_json::Map::new();
    let ids = query.all("sandbox_ids").flat_map(|text| text.split(',')).take(PAGE_MAX as usize);
    for id in ids {
        if let Ok(sandbox) = server.find_begun(&tenant.name, id) {
            all.insert(id.to_owned(), measure(server, &sandbox).await?);
        }
    }
    Ok(json_reply(StatusCode::OK, &json!({ "sandboxes": all })))
}

async fn measure(server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> Result<Value> {
    let (layout, id) = (server.layout().clone(), sandbox.id.clone());
    let counted = sandbox.work(move || {
        let (record, _, status) = Record::find(&layout, &id)?;
        let counters = match Client::connect(&record)?.ask(&ControlRequest::Counters)? {
            ControlReply::Counters(counters) => counters,
            _ => return Err(Problem::internal("the supervisor broke the protocol")),
        };
        Ok((counters, CellUse::of_cell(&id, status.supervisor_pid).cpu_ns))
    });
    let (counters, cpu_ns) = counted.await?;
    // The guest of a paused one answers nobody.
    let inside = match sandbox.is_paused() {
        true => None,
        false => sandbox.ask(|guest| client::stats(guest, guest)).await.ok(),
    };
    let note = sandbox.note();
    let cache = inside.as_ref().map_or(0, |stats| stats.page_cache_bytes);
    let used = inside.as_ref().map_or(counters.memory_allocated_bytes, |stats| {
        stats.memory_total_bytes.saturating_sub(stats.memory_available_bytes)
    });
    let now = now_ms();
    Ok(json!({
        "timestamp": stamp(now), "timestampUnix": now / 1000, "cpuCount": note.vcpus,
        "cpuUsedPct": sandbox.cpu_percent(cpu_ns), "memUsed": used, "memTotal": note.memory_bytes,
        "memCache": cache.min(note.memory_bytes), "diskUsed": counters.disk_allocated_bytes,
        "diskTotal": note.disk_bytes,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_narrowed() {
        let note = Note {
            template: "sha256:1".into(),
            alias: Some("base".into()),
            metadata: [("a b".to_owned(), "c&d".to_owned())].into(),
            started_ms: 5_000,
            ..Note::default()
        };
        let takes = |query: &str| {
            Wish::read(&Query::read(query), &["running"]).map(|wish| wish.takes(&note)).unwrap()
        };
        assert!(takes("") && takes("state=running,paused") && !takes("state=paused"));
        // Quoted by the client, in a form, in a query.
        assert!(takes("metadata=a%252520b%3Dc%252526d") && !takes("metadata=a%3Db"));
        assert!(takes("metadata=a%2520b%3Dc%252526d"));
        assert!(takes("template=base") && takes("template=sha256:1") && !takes("template=x"));
        assert!(takes("startedAfter=1970-01-01T00:00:05Z"), "it says from when on");
        assert!(!takes("startedAfter=2020-01-01T00:00:00Z"));
        let wrong = |query: &str| Wish::read(&Query::read(query), &[]).is_err();
        assert!(wrong("state=gone") && wrong("startedAfter=soon"));
    }
}
