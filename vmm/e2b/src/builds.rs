//! Templates that clients make: `POST /v3/templates`, files, `POST /v2/templates/…/builds/…`.
//!
//! ```text
//! request ─> a build waits ─> archives of files (signed URLs) ─> start: steps ─> a Dockerfile
//!   ─> exocell_docker::build, in a thread ─> the image exocell-e2b/TENANT/NAME
//! ```
//! An archive is a file of the build's context, which a stage of its own unpacks: no byte of it is
//! looked at here ([`recipe`]).

mod recipe;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use exocell_cell::agent::printable_lines;
use exocell_cell::images::{Reference, Store, private};
use exocell_cell::logging::tracing::info;
use exocell_cell::{CellError, compose, now_ms};
use exocell_docker::build::{Build as Building, Client, Options, Stopper};
use http_body_util::BodyExt;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::calls::stamp;
use crate::error::{Problem, Result};
use crate::http::{Call, PAUSE_MAX, Query, Response, empty, json_reply};
use crate::keys::{self, Tenant};
use crate::sandbox::blocking;
use crate::state::Server;
use crate::template::{self, own_image};
use recipe::{Recipe, Steps};

/// Builds that are remembered, of all tenants, and of one that have not ended.
const BUILDS_MAX: usize = 1000;
const OPEN_MAX: usize = 8;
/// Builds that run at once.
const RUNNING_MAX: usize = 2;
/// How long one may run.
const BUILD_MAX: Duration = Duration::from_secs(3600);
/// Lines of a build that are kept, and bytes of one.
const LINES_MAX: usize = 20_000;
const LINE_BYTES_MAX: usize = 4096;
/// Lines of one answer.
const PAGE: usize = 1000;
/// Bytes of one archive, and how long archives that no build has taken are kept.
const ARCHIVE_BYTES_MAX: u64 = 4 << 30;
const ARCHIVE_KEPT: Duration = Duration::from_secs(24 * 3600);
/// How long a client may take to begin to send one.
const URL_SECONDS: u64 = 3600;
const TAGS_MAX: usize = 16;
const MIB: u64 = 1 << 20;

/// Labels of a template's image: what its sandboxes have, where it is less than the server gives.
pub const CPUS: &str = "exocell.e2b.cpus";
pub const MEMORY_MB: &str = "exocell.e2b.memory_mb";
pub use recipe::{LABEL_USER, LABEL_WORKDIR};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Waiting,
    Building,
    Ready,
    /// Why, and at which step.
    Failed(String),
}

#[derive(Debug, Default)]
struct Told {
    stage: Stage,
    /// When, and what.
    lines: Vec<(u64, String)>,
    /// The end of what a program has written, before its line is whole.
    rest: Vec<u8>,
}

/// One build.
struct Build {
    tenant: String,
    name: String,
    tags: Vec<Reference>,
    labels: Vec<(String, String)>,
    begun_ms: u64,
    told: Mutex<Told>,
}

impl Build {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_open(&self) -> bool {
        matches!(self.told().stage, Stage::Waiting | Stage::Building)
    }

    fn say(&self, line: &str) {
        let mut told = self.told();
        if told.lines.len() >= LINES_MAX {
            return;
        }
        let mut line = printable_lines(line.trim_end()).to_string();
        if line.len() > LINE_BYTES_MAX {
            let end = (0..=LINE_BYTES_MAX).rev().find(|at| line.is_char_boundary(*at));
            line.truncate(end.unwrap_or(0));
        }
        told.lines.push((now_ms(), line));
    }

    fn end(&self, stage: Stage) {
        self.told().stage = stage;
    }
}

/// All builds of a server.
pub struct Builds {
    all: Mutex<HashMap<String, Arc<Build>>>,
    running: Semaphore,
    /// By which URLs are signed, until the server ends.
    secret: String,
}

impl Builds {
    /// # Errors
    /// The host gives no random bytes.
    pub fn new() -> io::Result<Self> {
        let secret = keys::random()?;
        Ok(Self { all: Mutex::default(), running: Semaphore::new(RUNNING_MAX), secret })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Build>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, tenant: &Tenant, template: &str, id: &str) -> Result<Arc<Build>> {
        let found = self.lock().get(id).cloned();
        found
            .filter(|build| build.tenant == tenant.name && build.name == template)
            .ok_or_else(|| Problem::not_found(format!("build {id:?} was not found")))
    }

    /// Remembers `build` in the place of the oldest that has ended.
    fn add(&self, id: String, build: Build) -> Result<()> {
        let mut all = self.lock();
        let open = all.values().filter(|it| it.tenant == build.tenant && it.is_open()).count();
        if open >= OPEN_MAX {
            return Err(Problem::exhausted(format!(
                "{OPEN_MAX} builds of this key have not ended; wait for one"
            )));
        }
        if all.len() >= BUILDS_MAX {
            let ended = all.iter().filter(|(_, it)| !it.is_open());
            let oldest = ended.min_by_key(|(_, it)| it.begun_ms).map(|(id, _)| id.clone());
            let oldest = oldest.ok_or_else(|| Problem::exhausted("there are too many builds"))?;
            all.remove(&oldest);
        }
        all.insert(id, Arc::new(build));
        Ok(())
    }

    fn signature(&self, tenant: &str, hash: &str, expires: u64) -> String {
        keys::hash(&format!("{}:{tenant}:{hash}:{expires}", self.secret))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wanted {
    name: Option<String>,
    alias: Option<String>,
    tags: Option<Vec<String>>,
    cpu_count: Option<u64>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
    #[serde(rename = "minFreeDiskMB", alias = "minFreeDiskMb")]
    free_disk_mb: Option<u64>,
    #[serde(rename = "teamID")]
    _team: Option<Value>,
}

/// `POST /v3/templates`
pub async fn request(server: &Arc<Server>, tenant: &Tenant, call: Call) -> Result<Response> {
    let wanted: Wanted = call.json().await?;
    let named = wanted.name.or(wanted.alias).unwrap_or_default();
    let (name, tag) = named.split_once(':').unwrap_or((&named, ""));
    let mut texts = wanted.tags.unwrap_or_default();
    texts.extend((!tag.is_empty()).then(|| tag.to_owned()));
    if texts.len() > TAGS_MAX {
        return Err(Problem::invalid(format!("a template has at most {TAGS_MAX} tags")));
    }
    let mut tags = vec![own_image(&tenant.name, name)?];
    for tag in &texts {
        tags.push(own_image(&tenant.name, &format!("{name}:{tag}"))?);
    }
    let defaults = &server.options.defaults;
    let mut labels = Vec::new();
    for (what, value, most, label) in [
        ("cpuCount", wanted.cpu_count, u64::from(defaults.vcpus), Some(CPUS)),
        ("memoryMB", wanted.memory_mb, defaults.memory_bytes / MIB, Some(MEMORY_MB)),
        ("minFreeDiskMB", wanted.free_disk_mb, defaults.disk_bytes / MIB, None),
    ] {
        match value {
            Some(value) if value == 0 || value > most => {
                return Err(Problem::invalid(format!(
                    "{what}: {value} is not within the {most} that a sandbox has on this server"
                )));
            }
            Some(value) => labels.extend(label.map(|label| (label.to_owned(), value.to_string()))),
            None => {}
        }
    }
    let random = keys::random().map_err(|error| Problem::internal(error.to_string()))?;
    // In the form of a UUID, which clients take it for.
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &random[range]);
    let id = format!("{a}-{b}-{c}-{d}-{e}");
    let name = name.to_owned();
    let told = json!({
        "templateID": name, "buildID": id, "public": false, "names": [name], "tags": texts,
        "aliases": [name],
    });
    let build = Build {
        tenant: tenant.name.clone(),
        name,
        tags,
        labels,
        begun_ms: now_ms(),
        told: Mutex::default(),
    };
    server.builds.add(id, build)?;
    Ok(json_reply(StatusCode::ACCEPTED, &told))
}

fn check_hash(hash: &str) -> Result<()> {
    match hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => Ok(()),
        false => Err(Problem::invalid("a hash of files has 64 hexadecimal digits")),
    }
}

/// Where the archive `hash` of a tenant is.
fn archive(server: &Server, tenant: &str, hash: &str) -> PathBuf {
    server.layout().root().join("e2b/archives").join(tenant).join(hash.to_ascii_lowercase())
}

/// `GET /templates/{name}/files/{hash}`: where the archive is to be put.
pub fn file(server: &Server, tenant: &Tenant, hash: &str, host: Option<&str>) -> Result<Response> {
    check_hash(hash)?;
    let present = archive(server, &tenant.name, hash).exists();
    let expires = now_ms() / 1000 + URL_SECONDS;
    let signature = server.builds.signature(&tenant.name, hash, expires);
    let host = host.map_or_else(|| format!("127.0.0.1:{}", server.options.port), str::to_owned);
    let url = format!(
        "http://{host}/e2b/archives/{}/{hash}?expires={expires}&signature={signature}",
        tenant.name
    );
    Ok(json_reply(StatusCode::CREATED, &json!({ "present": present, "url": url })))
}

/// `PUT /e2b/archives/{tenant}/{hash}`, by a URL that was signed.
pub async fn upload(
    server: &Arc<Server>,
    tenant: &str,
    hash: &str,
    query: &Query,
    call: Call,
) -> Result<Response> {
    check_hash(hash)?;
    let expires = query.number("expires")?.unwrap_or(0);
    let own = server.builds.signature(tenant, hash, expires);
    let given = query.get("signature").unwrap_or_default();
    if !keys::same(&own, given) || expires < now_ms() / 1000 {
        return Err(Problem::unauthorized("the URL is not signed, or its time is over"));
    }
    let path = archive(server, tenant, hash);
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull => {
            Problem::new(StatusCode::INSUFFICIENT_STORAGE, error.to_string())
        }
        _ => Problem::internal(format!("cannot keep the archive: {error}")),
    };
    let folder = path.parent().map(PathBuf::from).unwrap_or_default();
    let mut file = blocking(move || {
        private::folder(&folder).map_err(failed)?;
        sweep(&folder);
        tempfile::NamedTempFile::new_in(&folder).map_err(failed)
    })
    .await?;
    let (mut body, mut count) = (call.body.open(), 0);
    while let Some(open) = &mut body {
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
        let frame = match timeout(PAUSE_MAX, open.frame()).await.map_err(late)? {
            None => break,
            Some(frame) => frame.map_err(|error| Problem::invalid(error.to_string()))?,
        };
        let Ok(data) = frame.into_data() else { continue };
        count += data.len() as u64;
        if count > ARCHIVE_BYTES_MAX {
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the archive is too long"));
        }
        file = blocking(move || {
            file.write_all(&data).map_err(failed)?;
            Ok(file)
        })
        .await?;
    }
    blocking(move || {
        file.persist(path).map_err(|error| failed(error.error))?;
        Ok(empty(StatusCode::OK))
    })
    .await
}

/// Removes archives that no build has taken for long, and what was left by clients that went.
fn sweep(folder: &std::path::Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let modified = entry.metadata().and_then(|data| data.modified());
        let age = modified.ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        if age.is_some_and(|age| age > ARCHIVE_KEPT) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// `POST /v2/templates/{name}/builds/{id}`: begins it.
pub async fn start(
    server: &Arc<Server>,
    tenant: &Tenant,
    (name, id): (&str, &str),
    call: Call,
) -> Result<Response> {
    let build = server.builds.find(tenant, name, id)?;
    let wanted: Steps = call.json().await?;
    let recipe = Recipe::read(&wanted)?;
    for hash in &recipe.archives {
        check_hash(hash)?;
        if !archive(server, &tenant.name, hash).exists() {
            return Err(Problem::invalid(format!("the files {hash} were not sent")));
        }
    }
    let base = template::find(server, tenant, &recipe.from).await?;
    {
        let mut told = build.told();
        if told.stage != Stage::Waiting {
            return Err(Problem::conflict(format!("build {id} was started already")));
        }
        told.stage = Stage::Building;
    }
    let (server, tenant) = (server.clone(), tenant.clone());
    tokio::spawn(async move {
        let Ok(_turn) = server.builds.running.acquire().await else { return };
        let (own, at) = (server.clone(), build.clone());
        let stopper = Arc::new(Stopper::default());
        let stopping = stopper.clone();
        let mut work = tokio::task::spawn_blocking(move || {
            carry_out(&own, &tenant, &at, &recipe, &base.id, &stopper)
        });
        let ended = match timeout(BUILD_MAX, &mut work).await {
            Ok(ended) => ended,
            Err(_) => {
                let layout = server.layout().clone();
                let _ = tokio::task::spawn_blocking(move || stopping.stop(&layout)).await;
                work.await
            }
        };
        match ended {
            Ok(Ok(image)) => {
                info!(template = build.name, tenant = build.tenant, image, "built");
                build.end(Stage::Ready);
            }
            Ok(Err(why)) => build.end(Stage::Failed(why)),
            Err(_) => build.end(Stage::Failed("the build failed".to_owned())),
        }
    });
    Ok(empty(StatusCode::ACCEPTED))
}

/// Builds the image; its id.
fn carry_out(
    server: &Server,
    tenant: &Tenant,
    build: &Arc<Build>,
    recipe: &Recipe,
    base: &str,
    stopper: &Stopper,
) -> std::result::Result<String, String> {
    let layout = server.layout();
    let store = Store::open(layout.images()).map_err(|error| error.to_string())?;
    let paths: Vec<PathBuf> =
        recipe.archives.iter().map(|hash| archive(server, &tenant.name, hash)).collect();
    let context = compose::take(&store, |to| context(&paths, to));
    let context = context.map_err(|error| error.to_string())?;
    let mut grant = server.options.defaults.clone();
    grant.connect = server.options.grant(tenant).to_vec();
    let labels = build.labels.iter().cloned().chain(recipe.labels.clone()).collect();
    let options = Options {
        dockerfile: recipe.dockerfile(base),
        tags: build.tags.clone(),
        arguments: Default::default(),
        labels,
        target: None,
        uses_cache: !recipe.force,
        pulls: false,
        secrets: Vec::new(),
        grant,
        network: None,
        hosts: Vec::new(),
        shm_bytes: None,
        hidden: Vec::new(),
        named: std::collections::BTreeMap::new(),
    };
    let mut client = Listener(build.clone());
    let built = Building::new(layout, &options, Some(&context), &mut client, stopper)
        .and_then(Building::run);
    client.flush();
    let image = built.map_err(|error| error.to_string())?;
    // They are in the image, and in what is kept of its steps.
    paths.iter().for_each(|path| drop(fs::remove_file(path)));
    Ok(image.to_string())
}

/// The build's context: each archive is a file of it, as it is.
fn context(paths: &[PathBuf], to: impl Write) -> io::Result<()> {
    let mut archive = tar::Builder::new(to);
    for (at, path) in paths.iter().enumerate() {
        archive.append_file(recipe::archive_name(at), &mut File::open(path)?)?;
    }
    archive.into_inner()?.flush()
}

/// Takes down what a build says.
struct Listener(Arc<Build>);

impl Listener {
    fn flush(&self) {
        let rest = std::mem::take(&mut self.0.told().rest);
        if !rest.is_empty() {
            self.0.say(&String::from_utf8_lossy(&rest));
        }
    }
}

impl Client for Listener {
    fn say(&mut self, text: &str) {
        self.flush();
        text.lines().for_each(|line| self.0.say(line));
    }

    fn output(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.0.told().rest.extend(piece);
            if piece.ends_with(b"\n") || self.0.told().rest.len() > LINE_BYTES_MAX {
                self.flush();
            }
        }
    }

    fn fetch(&mut self, name: &str) -> std::result::Result<(), CellError> {
        Err(CellError::Usage(format!(
            "the image {name} is not in the store, and nothing is pulled"
        )))
    }
}

/// `GET /templates/{name}/builds/{id}/status`
pub fn status(
    server: &Server,
    tenant: &Tenant,
    (name, id): (&str, &str),
    query: &Query,
) -> Result<Response> {
    let build = server.builds.find(tenant, name, id)?;
    let from = query.number("logsOffset")?.unwrap_or(0) as usize;
    let limit = query.number("limit")?.unwrap_or(PAGE as u64).min(PAGE as u64) as usize;
    let told = build.told();
    let entry = |(at_ms, line): &(u64, String)| json!({ "timestamp": stamp(*at_ms), "message": line, "level": "info" });
    let entries: Vec<Value> = told.lines.iter().skip(from).take(limit).map(entry).collect();
    let word = match &told.stage {
        Stage::Waiting => "waiting",
        Stage::Building => "building",
        Stage::Ready => "ready",
        Stage::Failed(_) => "error",
    };
    let mut shown = json!({
        "templateID": name, "buildID": id, "status": word, "logs": [], "logEntries": entries,
    });
    if let Stage::Failed(why) = &told.stage {
        shown["reason"] = json!({ "message": printable_lines(why), "logEntries": [] });
    }
    Ok(json_reply(StatusCode::OK, &shown))
}

/// `GET /templates/aliases/{name}`
pub async fn alias(server: &Arc<Server>, tenant: &Tenant, name: &str) -> Result<Response> {
    template::find(server, tenant, name).await?;
    Ok(json_reply(StatusCode::OK, &json!({ "templateID": name, "public": false })))
}
