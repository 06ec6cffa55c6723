//! Templates that clients make: `POST /v3/templates`, files, `POST /v2/templates/…/builds/…`.
//!
//! ```text
//! request ─> a build waits ─> archives of files (signed URLs) ─> start: steps ─> a Dockerfile
//!   ─> exocell_docker::build, in a thread ─> the image exocell-e2b/TENANT/NAME
//! ```
//! An archive is a file of the build's context ([`archives`]), which a stage of its own unpacks: no
//! byte of it is looked at here ([`recipe`]). `log` is what a build says, `turns` whose is next.

pub mod archives;
mod known;
mod log;
mod recipe;
mod turns;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use exocell_cell::agent::printable_lines;
use exocell_cell::images::Store;
use exocell_cell::logging::tracing::info;
use exocell_cell::{CellError, compose, now_ms};
use exocell_docker::build::{self, Build as Building, Client, Stopper};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::blocking::blocking;
use crate::bounds::Bounds;
use crate::error::{Problem, Result};
use crate::http::{Call, Query, Response, empty, json_reply, stamp};
use crate::keys::{self, Tenant};
use crate::options::Options;
use crate::template::{self, own_image};
use known::{Build, Known, Stage};
use log::Line;
use recipe::{Recipe, Steps};
use turns::Turns;

/// How long one may run.
const BUILD_MAX: Duration = Duration::from_secs(3600);
/// Lines of one answer.
const PAGE: usize = 1000;
const TAGS_MAX: usize = 16;
const MIB: u64 = 1 << 20;

/// Labels of a template's image: what its sandboxes have, where it is less than the server gives.
pub const CPUS: &str = "exocell.e2b.cpus";
pub const MEMORY_MB: &str = "exocell.e2b.memory_mb";
pub use recipe::{LABEL_USER, LABEL_WORKDIR};

/// All builds of a server.
pub struct Builds {
    options: Arc<Options>,
    /// Opened once: who only looks does not wait for who writes.
    pub store: Arc<Store>,
    bounds: Arc<Bounds>,
    known: Known,
    turns: Arc<Turns>,
    /// By which URLs are signed, until the server ends.
    secret: String,
}

impl Builds {
    /// # Errors
    /// The host gives no random bytes, or the images cannot be used.
    pub fn new(options: &Arc<Options>, bounds: &Arc<Bounds>) -> io::Result<Self> {
        let store = Store::open(options.layout.images()).map_err(io::Error::other)?;
        Ok(Self {
            store: Arc::new(store),
            options: options.clone(),
            bounds: bounds.clone(),
            known: Known::default(),
            turns: Arc::default(),
            secret: keys::random()?,
        })
    }

    /// Forgets what nobody has come back for.
    pub async fn tidy(&self) {
        self.known.tidy(now_ms());
        let (root, wanted) = (archives::root(self), self.known.wanted());
        let swept = blocking(move || {
            archives::sweep(&root, &wanted, SystemTime::now());
            Ok(())
        });
        // Another time.
        let _ = swept.await;
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
pub async fn request(builds: &Arc<Builds>, tenant: &Tenant, call: Call) -> Result<Response> {
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
    let defaults = &builds.options.defaults;
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
    let log = builds.bounds.log_bytes.none(&tenant.name);
    let build = Build::new(&tenant.name, name, tags, labels, log);
    builds.known.add(id, build)?;
    Ok(json_reply(StatusCode::ACCEPTED, &told))
}

/// `POST /v2/templates/{name}/builds/{id}`: begins it.
pub async fn start(
    builds: &Arc<Builds>,
    tenant: &Tenant,
    (name, id): (&str, &str),
    call: Call,
) -> Result<Response> {
    let build = builds.known.find(tenant, name, id)?;
    let wanted: Steps = call.json().await?;
    let recipe = Recipe::read(&wanted)?;
    let mut paths = Vec::new();
    for hash in &recipe.archives {
        archives::check_hash(hash)?;
        let path = archives::path(builds, &tenant.name, hash);
        if !archives::renew(&path) {
            return Err(Problem::invalid(format!("the files {hash} were not sent")));
        }
        paths.push(path);
    }
    let base = template::find(&builds.options, &builds.store, tenant, &recipe.from).await?;
    {
        let mut told = build.told();
        if told.stage != Stage::Waiting {
            return Err(Problem::conflict(format!("build {id} was started already")));
        }
        told.stage = Stage::Building;
        // It is the first to say so.
        let _ = build.archives.set(paths);
    }
    let (builds, tenant) = (builds.clone(), tenant.clone());
    tokio::spawn(async move {
        let Some(_turn) = builds.turns.take(&tenant.name).await else {
            return build.end(Stage::Failed("the build was not begun".to_owned()));
        };
        let (own, at) = (builds.clone(), build.clone());
        let stopper = Arc::new(Stopper::default());
        let stopping = stopper.clone();
        let mut work = tokio::task::spawn_blocking(move || {
            carry_out(&own, &tenant, &at, &recipe, &base.id, &stopper)
        });
        let ended = match timeout(BUILD_MAX, &mut work).await {
            Ok(ended) => ended,
            Err(_) => {
                let layout = builds.options.layout.clone();
                let _ = tokio::task::spawn_blocking(move || stopping.stop(&layout)).await;
                work.await
            }
        };
        match ended {
            Ok(Ok(image)) => {
                info!(template = build.name, tenant = build.tenant, image, "built");
                build.end(Stage::Ready);
                // They are in the image, and in what is kept of its steps.
                let wanted = builds.known.wanted();
                let own = build.archives.get().into_iter().flatten();
                let over: Vec<_> = own.filter(|it| !wanted.contains(it)).cloned().collect();
                let removed = blocking(move || {
                    over.iter().for_each(|path| drop(fs::remove_file(path)));
                    Ok(())
                });
                // What stays is forgotten later.
                let _ = removed.await;
            }
            Ok(Err(why)) => build.end(Stage::Failed(why)),
            Err(_) => build.end(Stage::Failed("the build failed".to_owned())),
        }
    });
    Ok(empty(StatusCode::ACCEPTED))
}

/// Builds the image; its id.
fn carry_out(
    builds: &Builds,
    tenant: &Tenant,
    build: &Arc<Build>,
    recipe: &Recipe,
    base: &str,
    stopper: &Stopper,
) -> std::result::Result<String, String> {
    let layout = &builds.options.layout;
    let store = &builds.store;
    let paths = build.archives.get().map_or(&[][..], Vec::as_slice);
    let context = compose::take(store, |to| context(paths, to));
    let context = context.map_err(|error| error.to_string())?;
    let mut grant = builds.options.defaults.clone();
    grant.connect = builds.options.grant(tenant).to_vec();
    let labels = build.labels.iter().cloned().chain(recipe.labels.clone()).collect();
    let options = build::Options {
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
    let image = built.map_err(|error| error.to_string())?;
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

impl Client for Listener {
    fn say(&mut self, text: &str) {
        let mut told = self.0.told();
        told.log.flush();
        text.lines().for_each(|line| told.log.say(line));
    }

    fn output(&mut self, bytes: &[u8]) {
        self.0.told().log.output(bytes);
    }

    fn fetch(&mut self, name: &str) -> std::result::Result<(), CellError> {
        Err(CellError::Usage(format!(
            "the image {name} is not in the store, and nothing is pulled"
        )))
    }
}

/// `GET /templates/{name}/builds/{id}/status`
pub fn status(
    builds: &Builds,
    tenant: &Tenant,
    (name, id): (&str, &str),
    query: &Query,
) -> Result<Response> {
    let build = builds.known.find(tenant, name, id)?;
    let from = query.number("logsOffset")?.unwrap_or(0) as usize;
    let limit = query.number("limit")?.unwrap_or(PAGE as u64).min(PAGE as u64) as usize;
    let told = build.told();
    let entry = |(at_ms, line): &Line| json!({ "timestamp": stamp(*at_ms), "message": line, "level": "info" });
    let lines = told.log.lines().iter().skip(from).take(limit);
    let entries: Vec<Value> = lines.map(entry).collect();
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
pub async fn alias(builds: &Builds, tenant: &Tenant, name: &str) -> Result<Response> {
    template::find(&builds.options, &builds.store, tenant, name).await?;
    Ok(json_reply(StatusCode::OK, &json!({ "templateID": name, "public": false })))
}
