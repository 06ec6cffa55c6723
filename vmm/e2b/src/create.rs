//! `POST /sandboxes` and `POST /v2/sandboxes`.
//!
//! ```text
//! request ─> fields: known, or refused by name ─> template ─> network within the grant ─> quota
//!   ├─> one of the pool's is just such a one: it is taken over ─> 201
//!   └─> its turn ─> its note is written ─> launcher: the cell ─> the user `user` ─> ready ─> 201
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use exocell_cell::logging::tracing::info;
use exocell_cell::now_ms;
use exocell_door::Work;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::beginning::Beginning;
use crate::blocking::blocking;
use crate::boot::{bare, boot};
use crate::envd::VERSION;
use crate::error::{Problem, Result};
use crate::http::{Call, Response, json_reply, read_json};
use crate::keys::{self, Tenant};
use crate::network::{self, Wanted};
use crate::note::{Note, OnTimeout};
use crate::pairs::check_pairs;
use crate::pool;
use crate::sandbox::Sandbox;
use crate::state::Server;
use crate::template;

/// The longest request: more than metadata, variables and rules of the network may have.
const BYTES_MAX: usize = 1 << 20;
/// The longest key of a request.
const KEY_BYTES_MAX: usize = 255;

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
    /// The client starts its gateway by itself, as a command of the sandbox.
    #[serde(rename = "mcp")]
    _mcp: Option<Value>,
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
        match self {
            it if it.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) => {
                Err(Problem::unsupported("volumeMounts", "upload the files"))
            }
            it if says(&it.iam) => Err(Problem::unsupported("iam", "leave it out")),
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
    let work = call.work.clone();
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
    let seconds = server.options.timeout_of(wanted.timeout)?;
    let (note, beginning) = plan(server, tenant, wanted, seconds, request).await?;
    let place = Place::take(server, tenant)?;
    let sandbox = begin(server, note, &beginning, &work, seconds, place).await?;
    Ok(json_reply(StatusCode::CREATED, &told(server, &sandbox.note())))
}

/// One of the pool's, or one that boots when it is its turn.
async fn begin(
    server: &Arc<Server>,
    note: Note,
    beginning: &Beginning,
    work: &Work,
    seconds: u64,
    place: Place<'_>,
) -> Result<Arc<Sandbox>> {
    if let Some(sandbox) = pool::take_over(server, &note).await {
        return Ok(sandbox);
    }
    let turn = tokio::select! {
        turn = server.queue.take(&note.tenant) => turn?,
        () = work.gone() => return Err(Problem::canceled("the client is gone")),
    };
    // Its time begins here.
    let now = now_ms();
    let note = Note { started_ms: now, deadline_ms: now + seconds * 1000, ..note };
    // One may have come meanwhile.
    if let Some(sandbox) = pool::take_over(server, &note).await {
        return Ok(sandbox);
    }
    pool::make_room(server).await;
    let sandbox = start(server, note).await?;
    // From here on it counts itself.
    drop((turn, place));
    if let Err(error) = beginning.run(server, &sandbox).await {
        let _held = sandbox.changing.lock().await;
        server.kill_held(&sandbox).await?;
        return Err(error);
    }
    sandbox.begin();
    Ok(sandbox)
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
        sandbox.tenant() == tenant.name
            && sandbox.has_begun()
            && made_by.is_some_and(|(own, _)| own == *key)
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
        let own = all.iter().filter(|sandbox| sandbox.tenant() == tenant.name).count();
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
    seconds: u64,
    request: Option<(String, String)>,
) -> Result<(Note, Beginning)> {
    let found =
        template::find(&server.options, &server.builds.store, tenant, &wanted.template_id).await?;
    let asked: Wanted = match &wanted.network {
        None | Some(Value::Null) => Wanted::default(),
        Some(network) => Wanted::read(network)?,
    };
    if asked.allow_internet_access.is_some() {
        return Err(Problem::invalid("network.allowInternetAccess: say allow_internet_access"));
    }
    let rules = network::rules(server.options.grant(tenant), wanted.internet, &asked)?;
    let token = || keys::random().map_err(|error| Problem::internal(error.to_string()));
    let beginning = Beginning::of(&found.config);
    let bare = bare(server, found)?;
    let note = Note {
        tenant: tenant.name.clone(),
        metadata: wanted.metadata.unwrap_or_default(),
        env: wanted.env_vars.unwrap_or_default(),
        access_token: token()?,
        traffic_token: match asked.allow_public_traffic {
            Some(false) => Some(token()?),
            _ => None,
        },
        deadline_ms: bare.started_ms + seconds * 1000,
        on_timeout: match wanted.auto_pause {
            Some(true) => OnTimeout::Pause,
            _ => OnTimeout::Kill,
        },
        auto_resume: wanted.auto_resume.is_some_and(|wanted| wanted.enabled),
        internet: wanted.internet,
        network: wanted.network.filter(|network| !network.is_null()),
        rules,
        request,
        ..bare
    };
    Ok((note, beginning))
}

/// Starts the cell of a tenant's sandbox, which is written down first.
async fn start(server: &Arc<Server>, note: Note) -> Result<Arc<Sandbox>> {
    let id = note.id.clone();
    server.write(note.clone()).await?;
    match boot(server, note).await {
        Ok((sandbox, session)) => {
            info!(sandbox = sandbox.id, tenant = sandbox.tenant(), "started");
            server.take(&sandbox, session).await;
            Ok(sandbox)
        }
        Err(error) => {
            let notes = server.notes.clone();
            blocking(move || {
                notes.remove(&id);
                Ok(())
            })
            .await?;
            Err(error)
        }
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
