//! The calls on images.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::commit;
use exocell_cell::images::{
    ImageConfig, ImageError, ImageRecord, ImportLimits, Note, Progress, ProgressEvent, Reference,
    Silent, Source, Store,
};
use exocell_cell::unpack::{self, Archive};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::archive::known;
use crate::build;
use crate::containers::Container;
use crate::error::{ApiError, ApiResult};
use crate::events::Event;
use crate::fields::{COMMIT_QUERY, says};
use crate::filters::{Filters, image_passes};
use crate::http::{Body, BodyReader, BodySender, Call, Response, empty, json as reply, stream};
use crate::place::Place;
use crate::reach;
use crate::registry;
use crate::shares;
use crate::state::Server;
use crate::target::Query;
use crate::wire::{Config, Create};

/// What the filters of a list may name.
const FILTERS: [&str; 6] = ["before", "dangling", "label", "reference", "since", "until"];
/// The longest archive that is taken, as it comes.
const ARCHIVE_BYTES_MAX: u64 = 64 << 30;
/// The document of an image that has nothing yet.
const NO_FILES: &str =
    r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
/// How often a client hears how far a download is, in bytes.
const STEP_BYTES: u64 = 4 << 20;
/// How often, and for how long each time, the end of a container is waited for whose guest is gone.
const ENDING_LOOKS: u32 = 40;
const ENDING_LOOK: Duration = Duration::from_millis(50);

pub(crate) fn tell(server: &Server, action: &str, id: &str, name: &str) {
    let attributes = BTreeMap::from([("name".to_owned(), name.to_owned())]);
    server.events.tell(Event::new("image", action, id, attributes));
}

fn created_s(image: &ImageRecord) -> u64 {
    image.imported
}

fn digests(image: &ImageRecord) -> Vec<String> {
    let Some(digest) = image.manifest else { return Vec::new() };
    let names = image.tags.iter().filter_map(|tag| tag.rsplit_once(':'));
    let mut found: Vec<_> = names.map(|(name, _)| format!("{name}@{digest}")).collect();
    found.dedup();
    found
}

/// `GET /images/json`
pub async fn list(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &FILTERS)?;
    let (until_ms, version) = (filters.until_ms()?, call.target.version);
    let caller = call.caller.clone();
    let rows = server.blocking(move |server| {
        let store = server.images()?;
        let made = |name: &str| {
            let others =
                filters.values(name).iter().map(|other| Ok(store.resolve(other)?.imported));
            others.collect::<ApiResult<Vec<u64>>>()
        };
        let (before, since) = (made("before")?, made("since")?);
        let passes = |image: &&ImageRecord| {
            until_ms.is_none_or(|until| image.imported.saturating_mul(1000) < until)
                && before.iter().all(|other| image.imported < *other)
                && since.iter().all(|other| image.imported > *other)
                && image_passes(image, &filters)
        };
        let all = store.list()?;
        let seen = all.iter().filter(|image| shares::sees(&caller, image));
        Ok(seen.filter(passes).map(|image| row(image, version)).collect::<Vec<_>>())
    });
    Ok(reply(StatusCode::OK, &rows.await?))
}

/// A row of `GET /images/json`, for clients of API 1.`version`.
pub fn row(image: &ImageRecord, version: u32) -> Value {
    let shown = json!({
        "Id": image.id.to_string(), "ParentId": "", "RepoTags": image.tags,
        "RepoDigests": digests(image), "Created": created_s(image), "Size": image.size_bytes,
        "SharedSize": -1, "Containers": -1, "Labels": image.config.labels,
    });
    with_virtual_size(shown, image, version)
}

/// Clients before API 1.44 are told a size by another name, too.
fn with_virtual_size(mut shown: Value, image: &ImageRecord, version: u32) -> Value {
    if version < 44 {
        shown["VirtualSize"] = image.size_bytes.into();
    }
    shown
}

/// The parts of an image's own document that are shown.
#[derive(Default, Deserialize)]
struct Document {
    #[serde(default)]
    author: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    config: Value,
    #[serde(default)]
    rootfs: Option<Rootfs>,
    #[serde(default)]
    history: Vec<History>,
}

#[derive(Deserialize)]
struct Rootfs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct History {
    created_by: String,
    comment: String,
}

fn document(store: &Store, name: &str) -> ApiResult<Document> {
    Ok(serde_json::from_str(&store.inspect(name)?).unwrap_or_default())
}

/// `GET /images/{name}/json`
pub async fn inspect(server: &Arc<Server>, name: String, call: &Call) -> ApiResult<Response> {
    let (version, caller) = (call.target.version, call.caller.clone());
    let shown = server.blocking(move |server| {
        let store = server.images()?;
        let image = store.resolve(&name)?;
        shares::check_sees(&caller, &image, &name)?;
        let document = document(&store, &name)?;
        // Of images from elsewhere it names none of this store.
        let parent = document.parent.filter(|id| store.resolve(id).is_ok()).unwrap_or_default();
        let comment = document.history.last().map(|step| step.comment.clone()).unwrap_or_default();
        let layers = document.rootfs.map(|rootfs| rootfs.diff_ids).unwrap_or_default();
        let tagged = exocell_cell::clock::rfc3339_ms(image.imported * 1000);
        let shown = json!({
            "Id": image.id.to_string(), "RepoTags": image.tags, "RepoDigests": digests(&image),
            "Parent": parent, "Comment": comment, "Author": document.author.unwrap_or_default(),
            "Created": image.created.clone().unwrap_or_else(|| tagged.clone()),
            "DockerVersion": "", "Config": config(&image.config, document.config),
            "Architecture": image.architecture, "Os": "linux", "Size": image.size_bytes,
            "GraphDriver": { "Name": "exocell", "Data": {} },
            "RootFS": { "Type": "layers", "Layers": layers },
            "Metadata": { "LastTagTime": tagged },
        });
        Ok(with_virtual_size(shown, &image, version))
    });
    Ok(reply(StatusCode::OK, &shown.await?))
}

/// The image's own configuration, complete.
fn config(image: &ImageConfig, own: Value) -> Value {
    let names = |names: &std::collections::BTreeSet<String>| match names.is_empty() {
        true => Value::Null,
        false => names.iter().map(|name| (name.clone(), json!({}))).collect(),
    };
    let mut shown = json!({
        "Hostname": "", "Domainname": "", "User": image.user, "AttachStdin": false,
        "AttachStdout": false, "AttachStderr": false, "Tty": false, "OpenStdin": false,
        "StdinOnce": false, "Env": image.env, "Cmd": image.cmd, "Image": "",
        "Volumes": names(&image.volumes), "ExposedPorts": names(&image.exposed_ports),
        "WorkingDir": image.working_dir, "Entrypoint": image.entrypoint, "OnBuild": null,
        "Labels": image.labels, "StopSignal": image.stop_signal,
    });
    let more = ["Healthcheck", "Shell", "OnBuild"];
    for name in more.into_iter().filter(|name| !own[*name].is_null()) {
        shown[name] = own[name].clone();
    }
    for name in ["Cmd", "Entrypoint"] {
        if shown[name].as_array().is_some_and(Vec::is_empty) {
            shown[name] = Value::Null;
        }
    }
    shown
}

/// `GET /images/{name}/history`
pub async fn history(server: &Arc<Server>, name: String, call: &Call) -> ApiResult<Response> {
    let caller = call.caller.clone();
    let rows = server.blocking(move |server| {
        let store = server.images()?;
        let image = store.resolve(&name)?;
        shares::check_sees(&caller, &image, &name)?;
        let mut steps = document(&store, &name)?.history;
        if steps.is_empty() {
            steps.push(History { comment: "imported".to_owned(), ..History::default() });
        }
        let last = steps.len() - 1;
        let rows = steps.iter().enumerate().rev().map(|(at, step)| {
            let whole = at == last;
            json!({
                "Id": if whole { image.id.to_string() } else { "<missing>".to_owned() },
                "Created": created_s(&image), "CreatedBy": step.created_by,
                "Tags": whole.then_some(&image.tags), "Comment": step.comment,
                // All layers are one file system here.
                "Size": if whole { image.size_bytes } else { 0 },
            })
        });
        Ok(rows.collect::<Vec<_>>())
    });
    Ok(reply(StatusCode::OK, &rows.await?))
}

/// `POST /images/{name}/tag`
pub async fn tag(server: &Arc<Server>, name: String, call: &Call) -> ApiResult<Response> {
    let query = &call.target.query;
    let repository = query.get("repo").ok_or_else(|| ApiError::bad_request("no repo is named"))?;
    let tag: Reference = match query.get("tag") {
        Some(tag) => format!("{repository}:{tag}").parse()?,
        None => repository.parse()?,
    };
    let shown = tag.to_string();
    let id = server.blocking(move |server| {
        let store = server.images()?;
        store.tag(&name, &tag)?;
        Ok(store.resolve(&name)?.id.to_string())
    });
    tell(server, "tag", &id.await?, &shown);
    Ok(empty(StatusCode::CREATED))
}

/// `POST /commit`: an image that is started as the container was, changed by the configuration in
/// the body and by instructions.
pub async fn commit(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let query = &call.target.query;
    let container = query.get("container").ok_or_else(|| ApiError::bad_request("no container"))?;
    let seen = server.find(container).await?;
    let tag = named(query)?;
    let changes = changes(query);
    let said = |name| query.get(name).unwrap_or_default().to_owned();
    let note = Note { author: said("author"), comment: said("comment"), parent: None };
    let place = call.place.clone();
    let wanted = of_body(call.json().await?)?;
    let container = seen.container.clone();
    let config =
        server.blocking(move |server| committed(&server.images()?, &container, &wanted, &changes));
    let config = config.await?;
    let shown = tag.as_ref().map_or_else(String::new, Reference::to_string);
    let config = (&config, &note);
    let made = match taken(server, seen.id(), &place, config, tag.as_ref()).await {
        // Its program has ended meanwhile: what it left is on its disk.
        Err(Taken { was_running: true, .. }) if has_ended(server, seen.id()).await => {
            taken(server, seen.id(), &place, config, tag.as_ref()).await
        }
        made => made,
    };
    let id = made.map_err(|taken| taken.error)?.id.to_string();
    tell(server, "commit", &id, &shown);
    Ok(reply(StatusCode::CREATED, &json!({ "Id": id })))
}

/// Why a container's files were not taken.
struct Taken {
    was_running: bool,
    error: ApiError,
}

/// Makes an image of what the files of container `key` are now.
async fn taken(
    server: &Arc<Server>,
    key: &str,
    place: &Place,
    config: (&ImageConfig, &Note),
    tag: Option<&Reference>,
) -> Result<ImageRecord, Taken> {
    let reach = reach::container(server, key, place).await;
    let reach = reach.map_err(|error| Taken { was_running: false, error })?;
    let was_running = reach.running().is_some();
    let (config, note, tag) = (config.0.clone(), config.1.clone(), tag.cloned());
    let made = server.blocking(move |server| {
        let config = (&config, &note);
        commit::commit(server.layout(), &reach.record, config, tag.as_ref(), &mut Silent)
            .map_err(|error| reach.failure(error.into()))
    });
    made.await.map_err(|error| Taken { was_running, error })
}

/// Whether the container does not run any more, or will not in a moment.
async fn has_ended(server: &Arc<Server>, key: &str) -> bool {
    let live = server.live(key);
    let mut life = live.life();
    for _ in 0..ENDING_LOOKS {
        if server.find(key).await.is_ok_and(|seen| !seen.is_running()) {
            return true;
        }
        let _ = timeout(ENDING_LOOK, life.changed()).await;
    }
    false
}

/// The configuration in the body of a commit; `null` is none.
fn of_body(mut body: Value) -> ApiResult<Config> {
    if let Some(fields) = body.as_object_mut() {
        fields.retain(|name, _| !COMMIT_QUERY.contains(&name.to_ascii_lowercase().as_str()));
    }
    let body = if body.is_null() { json!({}) } else { body };
    let Create { config, host_value, endpoints, .. } = Create::read(body)?;
    if says(&host_value) || !endpoints.is_empty() {
        return Err(ApiError::unsupported(
            "what the host gives a container, in an image",
            "leave HostConfig and NetworkingConfig out",
        ));
    }
    Ok(config)
}

/// How the image of a container is started: as that was, after changes.
fn committed(
    store: &Store,
    from: &Container,
    wanted: &Config,
    changes: &[String],
) -> ApiResult<ImageConfig> {
    let document = store.inspect(from.spec.image_name())?;
    let own = match from.is_cell {
        true => build::as_started(&document, &from.spec),
        false => build::as_configured(&document, &from.config),
    };
    let bad = |error: build::BuildError| ApiError::bad_request(error.to_string());
    let own = build::as_configured(&own.map_err(bad)?, wanted).map_err(bad)?;
    let changed = build::changed(&own, changes).map_err(bad)?;
    Ok(ImageConfig::of_document(&changed)?)
}

/// Repository and tag of a new image, if it is to have a name.
pub fn named(query: &Query) -> ApiResult<Option<Reference>> {
    let tag = match (query.get("repo"), query.get("tag")) {
        (Some(repo), Some(tag)) => Some(format!("{repo}:{tag}")),
        (repo, _) => repo.map(str::to_owned),
    };
    Ok(tag.map(|tag| tag.parse()).transpose()?)
}

/// Instructions that change a configuration.
fn changes(query: &Query) -> Vec<String> {
    query.all("changes").flat_map(str::lines).map(str::to_owned).collect()
}

/// `POST /images/create` with an archive of a root file system: `docker import`.
async fn import(server: &Arc<Server>, source: &str, call: Call) -> ApiResult<Response> {
    if source != "-" {
        return Err(ApiError::unsupported(
            format!("importing from {source}"),
            "fetch it, and send the archive (docker import -)",
        ));
    }
    let (tag, changes) = (named(&call.target.query)?, changes(&call.target.query));
    let comment = call.target.query.get("message").unwrap_or_default().to_owned();
    let note = Note { comment, ..Note::default() };
    let config = build::changed(NO_FILES, &changes);
    let config = config.map_err(|error| ApiError::bad_request(error.to_string()))?;
    let config = ImageConfig::of_document(&config)?;
    let shown = tag.as_ref().map_or_else(String::new, Reference::to_string);
    let body = BodyReader::new(call.body);
    let made = server.at_its_pace(move |server| {
        let (store, mut body) = (server.images()?, known(body)?.take(ARCHIVE_BYTES_MAX));
        let write = |mut to| io::copy(&mut body, &mut to).map(drop);
        Ok(unpack::import_layer(&store, (&config, &note), tag.as_ref(), &mut Silent, write)?)
    });
    let id = made.await?.id.to_string();
    tell(server, "import", &id, if shown.is_empty() { &id } else { &shown });
    Ok(reply(StatusCode::OK, &json!({ "status": id })))
}

/// `POST /images/create`: a pull, or an import.
pub async fn create(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let query = &call.target.query;
    if let Some(source) = query.get("fromSrc").map(str::to_owned) {
        return import(server, &source, call).await;
    }
    let Some(reference) = wanted(query)? else {
        return Err(ApiError::bad_request("no image is named (fromImage, fromSrc)"));
    };
    let mut options = registry::options(registry::credentials(&call)?);
    options.grant = call.caller.cell().map(|cell| exocell_cell::registry::grant(&cell.caps));
    let turn = server.shares.pull(&call.caller)?;
    let (sender, body) = Body::stream();
    server.begin(move |server| {
        let _turn = turn;
        let shown = reference.to_string();
        sender.line_now(&json!({ "status": format!("Pulling from {shown}"), "id": shown }));
        let source = Source::Registry { reference, options };
        match pull(server, &source, &sender) {
            Ok(image) => {
                tell(server, "pull", &shown, &shown);
                let id = image.id.to_string();
                sender.line_now(&json!({ "status": format!("Digest: {}", image.manifest.map_or(id, |d| d.to_string())) }));
                sender.line_now(
                    &json!({ "status": format!("Status: Downloaded image for {shown}") }),
                );
            }
            Err(error) => say_failure(&sender, &of_builder(&shown, error)),
        }
    })?;
    Ok(stream("application/json", body))
}

/// The image that is to be pulled.
pub fn wanted(query: &Query) -> ApiResult<Option<Reference>> {
    let Some(name) = query.get("fromImage") else { return Ok(None) };
    Ok(Some(match query.get("tag") {
        Some(tag) if tag.starts_with("sha256:") => format!("{name}@{tag}").parse()?,
        Some(tag) => format!("{name}:{tag}").parse()?,
        None => name.parse()?,
    }))
}

/// Whoever pulls BuildKit's image wants to build.
fn of_builder(name: &str, error: ApiError) -> ApiError {
    match name.contains("moby/buildkit") {
        false => error,
        true => ApiError {
            message: format!(
                "{}; to build use the default builder (docker buildx use default), which this \
                 server is",
                error.message
            ),
            ..error
        },
    }
}

pub(crate) fn say_failure(sender: &BodySender, error: &ApiError) {
    let code = error.status.as_u16();
    sender.line_now(&json!({
        "errorDetail": { "code": code, "message": error.message }, "error": error.message,
    }));
}

fn pull(server: &Server, source: &Source, sender: &BodySender) -> ApiResult<ImageRecord> {
    let limits = ImportLimits::default();
    Ok(unpack::import(&server.images()?, source, None, &limits, &mut Told::to(sender))?)
}

/// Tells a client how far an import is.
struct Told<'a> {
    sender: &'a BodySender,
    layer: String,
    done: u64,
    told: u64,
}

impl<'a> Told<'a> {
    fn to(sender: &'a BodySender) -> Self {
        Self { sender, layer: String::new(), done: 0, told: 0 }
    }
}

impl Progress for Told<'_> {
    fn event(&mut self, event: ProgressEvent<'_>) {
        match event {
            ProgressEvent::Layer { index, count, .. } => {
                self.layer = format!("layer {} of {count}", index + 1);
                self.sender.line_now(&json!({
                    "status": "Pulling fs layer", "progressDetail": {}, "id": self.layer,
                }));
            }
            ProgressEvent::Bytes(bytes) => {
                self.done += bytes;
                if self.done - self.told >= STEP_BYTES {
                    self.told = self.done;
                    self.sender.line_now(&json!({
                        "status": "Downloading", "progressDetail": { "current": self.done },
                        "id": self.layer,
                    }));
                }
            }
            ProgressEvent::Skipped { path, why } => {
                self.sender.line_now(&json!({ "status": format!("left out {path}: {why}") }));
            }
            _ => {}
        }
    }
}

/// `POST /images/load`: an archive of `docker save`, or an OCI layout in one.
pub async fn load(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let body = BodyReader::new(call.body);
    let archive = server.at_its_pace(move |server| spool(server, body)).await?;
    let (sender, body) = Body::stream();
    server.begin(move |server| match load_all(server, archive, &sender) {
        Ok(loaded) => loaded.iter().for_each(|name| {
            sender.line_now(&json!({ "stream": format!("Loaded image: {name}\n") }));
        }),
        Err(error) => say_failure(&sender, &error),
    })?;
    Ok(stream("application/json", body))
}

/// The body as it came, in a file without a name: whatever ends this process, it is gone then.
fn spool(server: &Server, body: BodyReader) -> ApiResult<Archive> {
    let failed =
        |error: io::Error| ApiError::bad_request(format!("the archive is not whole: {error}"));
    let full = |error: io::Error| ApiError::internal(format!("no room for the archive: {error}"));
    let mut file = server.images()?.scratch()?;
    let mut body = known(body)?.take(ARCHIVE_BYTES_MAX + 1);
    let bytes = io::copy(&mut body, &mut file).map_err(failed)?;
    if bytes > ARCHIVE_BYTES_MAX {
        let most = ARCHIVE_BYTES_MAX >> 30;
        return Err(ApiError::bad_request(format!(
            "the archive has more than {most} GiB, the most that is taken"
        )));
    }
    file.rewind().map_err(full)?;
    Ok(Archive::of_file(file, Path::new("the archive")))
}

fn load_all(server: &Server, mut archive: Archive, sender: &BodySender) -> ApiResult<Vec<String>> {
    let (store, limits) = (server.images()?, ImportLimits::default());
    let names = archive.names(&store, &limits)?;
    let mut loaded = Vec::new();
    if names.is_empty() {
        let image = archive.import(&store, None, &limits, &mut Told::to(sender))?;
        tell(server, "load", &image.id.to_string(), &image.id.to_string());
        return Ok(vec![image.id.to_string()]);
    }
    for name in names {
        let tag: Reference = name.parse().map_err(|error: ImageError| ApiError::from(error))?;
        let image = archive.import(&store, Some(&tag), &limits, &mut Told::to(sender))?;
        tell(server, "load", &image.id.to_string(), &name);
        loaded.push(tag.to_string());
    }
    Ok(loaded)
}
