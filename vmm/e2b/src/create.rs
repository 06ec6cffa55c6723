//! `POST /sandboxes` and `POST /v2/sandboxes`.
//!
//! ```text
//! request ─> fields: known, or refused by name ─> template ─> network within the grant ─> quota
//!   ─> its note is written ─> launcher: the cell ─> the user `user` ─> 201
//! ```
//! The cell's own program is a shell that waits for ever: commands run beside it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::agent::{Kind, Reply, client};
use exocell_cell::images::ImageConfig;
use exocell_cell::logging::tracing::info;
use exocell_cell::settings::Settings;
use exocell_cell::signal::Signal;
use exocell_cell::{CellSpec, Record, Strength, end, now_ms};
use exocell_docker::frames::read_frame;
use exocell_docker::launcher::{self, Start};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::blocking::blocking;
use crate::builds::{CPUS, LABEL_USER, LABEL_WORKDIR, MEMORY_MB};
use crate::envd::{VERSION, process};
use crate::error::{Problem, Result};
use crate::http::{Call, Response, json_reply, read_json};
use crate::keys::{self, Tenant};
use crate::network::{self, Wanted};
use crate::note::{Note, OnTimeout, USER};
use crate::pairs::check_pairs;
use crate::sandbox::{Sandbox, listened};
use crate::state::Server;
use crate::template;

/// The longest request: more than metadata, variables and rules of the network may have.
const BYTES_MAX: usize = 1 << 20;
/// The longest key of a request.
const KEY_BYTES_MAX: usize = 255;
/// Labels of an image, see [`Beginning`].
const START: &str = "exocell.e2b.start";
const READY: &str = "exocell.e2b.ready";
/// How long a sandbox may take to be ready, and how soon it is looked again.
const READY_MAX: Duration = Duration::from_secs(60);
const READY_AGAIN: Duration = Duration::from_millis(100);
/// The label of a cell that is a sandbox, with its tenant.
const LABEL: &str = "exocell.e2b.tenant";

/// A client's request; what it may say and is not there is refused by name.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Create {
    #[serde(rename = "templateID")]
    template_id: String,
    timeout: Option<u64>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(rename = "allow_internet_access", alias = "allowInternetAccess")]
    internet: Option<bool>,
    network: Option<Value>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    /// Every sandbox is.
    #[serde(rename = "secure")]
    _secure: Option<bool>,
    volume_mounts: Option<Vec<Value>>,
    mcp: Option<Value>,
    iam: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct AutoResume {
    #[serde(default)]
    enabled: bool,
}

impl Create {
    fn check(&self) -> Result<()> {
        let says = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        let remedy = "leave it out";
        match self {
            it if it.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) => {
                Err(Problem::unsupported("volumeMounts", "upload the files"))
            }
            it if says(&it.mcp) => Err(Problem::unsupported("mcp", remedy)),
            it if says(&it.iam) => Err(Problem::unsupported("iam", remedy)),
            it if it.auto_pause == Some(true) && it.auto_pause_memory == Some(false) => {
                Err(Problem::unsupported(
                    "a pause that keeps files alone (autoPauseMemory: false)",
                    "a paused sandbox keeps its programs, too",
                ))
            }
            _ => Ok(()),
        }?;
        for (name, pairs) in [("metadata", &self.metadata), ("envVars", &self.env_vars)] {
            check_pairs(name, pairs.as_ref())?;
        }
        Ok(())
    }
}

/// Answers the call.
pub async fn create(server: &Arc<Server>, tenant: &Tenant, mut call: Call) -> Result<Response> {
    let key = request_key(&call)?;
    let body = call.body.whole(BYTES_MAX, &mut call.held).await?;
    let hash = keys::hash(&String::from_utf8_lossy(&body));
    let wanted: Create = read_json(&body)?;
    drop((body, call.held));
    wanted.check()?;
    let request = key.map(|key| (key, hash));
    // A second one waits for the first, and finds what that has made.
    let _held = match &request {
        Some((key, _)) => Some(server.turn(&tenant.name, key).lock_owned().await),
        None => None,
    };
    if let Some(known) = known(server, tenant, request.as_ref())? {
        return Ok(json_reply(StatusCode::CREATED, &told(server, &known.note())));
    }
    let (note, beginning) = plan(server, tenant, wanted, request).await?;
    let _place = Place::take(server, tenant)?;
    let sandbox = start(server, note).await?;
    if let Err(error) = beginning.run(server, &sandbox).await {
        let _held = sandbox.changing.lock().await;
        server.kill_held(&sandbox).await?;
        return Err(error);
    }
    Ok(json_reply(StatusCode::CREATED, &told(server, &sandbox.note())))
}

fn request_key(call: &Call) -> Result<Option<String>> {
    let Some(key) = call.header("idempotency-key") else { return Ok(None) };
    match key.len() {
        1..=KEY_BYTES_MAX => Ok(Some(key.to_owned())),
        _ => Err(Problem::invalid(format!("Idempotency-Key has more than {KEY_BYTES_MAX} bytes"))),
    }
}

/// The sandbox that the same request has made before.
fn known(
    server: &Server,
    tenant: &Tenant,
    request: Option<&(String, String)>,
) -> Result<Option<Arc<Sandbox>>> {
    let Some((key, hash)) = request else { return Ok(None) };
    let of_key = |sandbox: &Arc<Sandbox>| {
        let made_by = sandbox.note().request;
        sandbox.tenant == tenant.name && made_by.is_some_and(|(own, _)| own == *key)
    };
    let Some(found) = server.all().into_iter().find(of_key) else { return Ok(None) };
    match found.note().request {
        Some((_, own)) if own == *hash => Ok(Some(found)),
        _ => Err(Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "this Idempotency-Key was used for another request",
        )
        .because("idempotency_request_mismatch")),
    }
}

/// A place among a tenant's sandboxes, until the sandbox is there.
struct Place<'a>(&'a Server, &'a str);

impl<'a> Place<'a> {
    fn take(server: &'a Server, tenant: &'a Tenant) -> Result<Self> {
        let mut starting = server.starting.lock().unwrap_or_else(|error| error.into_inner());
        let all = server.all();
        let own = all.iter().filter(|sandbox| sandbox.tenant == tenant.name).count();
        let begun: usize = starting.values().sum();
        let own_begun = starting.entry(tenant.name.clone()).or_default();
        let most = server.options.sandboxes_max;
        let own_most = tenant.sandboxes.unwrap_or(most).min(most);
        if own + *own_begun >= own_most {
            return Err(Problem::exhausted(format!(
                "there are {own_most} sandboxes of this key, as many as there may be; end one"
            ))
            .because("sandbox_capacity_unavailable"));
        }
        if all.len() + begun >= most {
            return Err(Problem::exhausted(format!(
                "there are {most} sandboxes, as many as the server has room for; try again later"
            ))
            .because("sandbox_capacity_unavailable"));
        }
        *own_begun += 1;
        Ok(Self(server, &tenant.name))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut starting = self.0.starting.lock().unwrap_or_else(|error| error.into_inner());
        if let Some(count) = starting.get_mut(self.1) {
            *count -= 1;
            if *count == 0 {
                starting.remove(self.1);
            }
        }
    }
}

/// What the sandbox is to be.
async fn plan(
    server: &Arc<Server>,
    tenant: &Tenant,
    wanted: Create,
    request: Option<(String, String)>,
) -> Result<(Note, Beginning)> {
    let seconds = server.options.timeout_of(wanted.timeout)?;
    let found = template::find(&server.options, tenant, &wanted.template_id).await?;
    let asked: Wanted = match &wanted.network {
        None | Some(Value::Null) => Wanted::default(),
        Some(network) => Wanted::read(network)?,
    };
    if asked.allow_internet_access.is_some() {
        return Err(Problem::invalid("network.allowInternetAccess: say allow_internet_access"));
    }
    let rules = network::rules(server.options.grant(tenant), wanted.internet, &asked)?;
    let token = || keys::random().map_err(|error| Problem::internal(error.to_string()));
    let (now, defaults) = (now_ms(), &server.options.defaults);
    let beginning = Beginning::of(&found.config);
    let label = |name: &str| found.config.labels.get(name)?.parse::<u64>().ok();
    let note = Note {
        id: CellSpec::new_id()?,
        tenant: tenant.name.clone(),
        template: found.id,
        alias: found.alias,
        metadata: wanted.metadata.unwrap_or_default(),
        image_env: found.config.env.clone(),
        env: wanted.env_vars.unwrap_or_default(),
        user: found.config.labels.get(LABEL_USER).map_or(USER, String::as_str).to_owned(),
        workdir: found.config.labels.get(LABEL_WORKDIR).cloned(),
        access_token: token()?,
        traffic_token: match asked.allow_public_traffic {
            Some(false) => Some(token()?),
            _ => None,
        },
        started_ms: now,
        deadline_ms: now + seconds * 1000,
        paused_ms: None,
        on_timeout: match wanted.auto_pause {
            Some(true) => OnTimeout::Pause,
            _ => OnTimeout::Kill,
        },
        auto_resume: wanted.auto_resume.is_some_and(|wanted| wanted.enabled),
        internet: wanted.internet,
        network: wanted.network.filter(|network| !network.is_null()),
        rules,
        vcpus: label(CPUS).map_or(defaults.vcpus, |cpus| defaults.vcpus.min(cpus as u32).max(1)),
        memory_bytes: match label(MEMORY_MB) {
            Some(mib) if mib > 0 => defaults.memory_bytes.min(mib.saturating_mul(1 << 20)),
            _ => defaults.memory_bytes,
        },
        disk_bytes: defaults.disk_bytes,
        request,
    };
    Ok((note, beginning))
}

/// What a template's image says of its sandboxes, in labels.
struct Beginning {
    /// What runs in the background from the start on.
    start: Option<String>,
    /// What is run again and again until it succeeds: then the sandbox is ready.
    ready: Option<String>,
}

impl Beginning {
    fn of(image: &ImageConfig) -> Self {
        let label = |name: &str| image.labels.get(name).filter(|text| !text.is_empty()).cloned();
        Self { start: label(START), ready: label(READY) }
    }

    async fn run(&self, server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> Result<()> {
        if let Some(line) = &self.start {
            process::begin(server, sandbox, line).await?;
        }
        let Some(line) = &self.ready else { return Ok(()) };
        let until = Instant::now() + READY_MAX;
        while process::run(server, sandbox, line).await? != 0 {
            if Instant::now() > until {
                return Err(Problem::internal(format!(
                    "the template's sandbox was not ready within {} s ({READY})",
                    READY_MAX.as_secs()
                )));
            }
            tokio::time::sleep(READY_AGAIN).await;
        }
        Ok(())
    }
}

/// Starts the cell, and has it ready for commands.
async fn start(server: &Arc<Server>, note: Note) -> Result<Arc<Sandbox>> {
    let (id, image) = (note.id.clone(), note.template.clone());
    server.write(note.clone()).await?;
    let started = async {
        let _turn = server.starts.acquire().await;
        let session = launch(server, &note, image).await?;
        let record = Record::at(server.layout(), &note.id);
        let sandbox = Sandbox::new(record, note, &server.bounds);
        sandbox.ask(|guest| client::account(guest, guest, USER)).await?;
        Ok((sandbox, session))
    };
    match started.await {
        Ok((sandbox, session)) => {
            info!(sandbox = sandbox.id, tenant = sandbox.tenant, "started");
            server.take(&sandbox, session);
            Ok(sandbox)
        }
        Err(error) => {
            let (notes, layout) = (server.notes.clone(), server.layout().clone());
            blocking(move || {
                if let Ok((record, _, status)) = Record::find(&layout, &id) {
                    let _ = end::kill(&layout, &record, Signal::KILL);
                    let _ = end::remove(&layout, &record, &status, true);
                }
                notes.remove(&id);
                Ok(())
            })
            .await?;
            Err(error)
        }
    }
}

/// Launches the cell and waits until its program runs; the session.
async fn launch(server: &Arc<Server>, note: &Note, image: String) -> Result<UnixStream> {
    let spec = spec(server, note, image);
    let layout = server.layout().clone();
    let session = blocking(move || Ok(launcher::launch(&layout, &Start::Cell(&spec))?)).await?;
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

fn spec(server: &Server, note: &Note, image: String) -> CellSpec {
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
        disk: None,
        keeps_disk: false,
        labels: [(LABEL.to_owned(), note.tenant.clone())].into(),
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
        tied: false,
        warm: None,
        capabilities: table.to_string(),
        changes: exocell_cell::changes::Changes::default(),
        locations: Vec::new(),
        fills: Vec::new(),
        copies: BTreeMap::new(),
        created_ms: note.started_ms,
    }
}

/// What a client is told of a sandbox that it may use.
pub fn told(server: &Server, note: &Note) -> Value {
    let mut told = json!({
        "sandboxID": note.id, "templateID": note.template, "clientID": "exocell",
        "envdVersion": VERSION, "envdAccessToken": note.access_token,
        "domain": server.options.domain(), "trafficAccessToken": note.traffic_token,
    });
    if let Some(alias) = &note.alias {
        told["alias"] = alias.as_str().into();
    }
    told
}
