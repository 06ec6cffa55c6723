//! `POST /build`, the classic one: an archive of the context in, lines of JSON out; for those of
//! version 2 see [`super::trace`].

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use exocell_cell::agent::printable_lines;
use exocell_cell::images::dockerfile;
use exocell_cell::images::dockerfile::ignore::{self, Ignore};
use exocell_cell::images::{
    Credentials, ImportLimits, ProxyOptions, Reference, RegistryOptions, Rootfs, Silent, Source,
    Store,
};
use exocell_cell::settings::Settings;
use exocell_cell::{CellError, compose, plan, unpack};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{Build, BuildError, Client, Options, Stopper, check_platform, trace};
use crate::archive::known;
use crate::error::{ApiError, ApiResult};
use crate::events::Event;
use crate::http::{Body, BodyReader, BodySender, Call, Response, json as reply, stream};
use crate::progress::Journal;
use crate::state::Server;
use crate::target::Query;

/// The most that a context may be, in bytes.
pub const CONTEXT_BYTES_MAX: u64 = 64 << 30;
/// Bytes of the Dockerfile's path in it.
const PATH_BYTES_MAX: usize = 512;
const IGNORE: &str = ".dockerignore";
/// Tags of one image.
const TAGS_MAX: usize = 64;

/// What is done, or has nothing to do: cells of steps go in any case, and what a client has
/// already fetched is no use for layers that are made here.
const KNOWN: [&str; 22] = [
    "t",
    "dockerfile",
    "buildargs",
    "labels",
    "target",
    "nocache",
    "q",
    "rm",
    "forcerm",
    "pull",
    "networkmode",
    "memory",
    "memswap",
    "extrahosts",
    "shmsize",
    "platform",
    "version",
    "cachefrom",
    "remote",
    "isolation",
    "buildid",
    "session",
];

/// Reads what a client asks for, but for the Dockerfile's text.
///
/// # Errors
/// 400 for what makes no sense, 501 for what no build has, by its name.
fn options(query: &Query, server: &Server) -> ApiResult<Options> {
    for (name, value) in query.pairs() {
        let says = !matches!(value, "" | "0" | "false" | "null" | "[]" | "{}");
        if says && !KNOWN.contains(&name) {
            return Err(ApiError::unsupported(format!("the build option {name}"), "leave it out"));
        }
    }
    if let Some(remote) = query.get("remote").filter(|remote| *remote != "client-session") {
        return Err(ApiError::unsupported(
            format!("a context at {remote}"),
            "fetch it, and send it as an archive",
        ));
    }
    if query.get("remote").is_some() || query.get("session").is_some() {
        return Err(ApiError::unsupported(
            "a session beside the build",
            "send the context as an archive (DOCKER_BUILDKIT=0), or use POST /grpc",
        ));
    }
    if let Some(isolation) = query.get("isolation").filter(|isolation| *isolation != "default") {
        return Err(ApiError::unsupported(format!("isolation {isolation}"), "leave it out"));
    }
    check_platform(query.get("platform").unwrap_or_default()).map_err(ApiError::bad_request)?;
    let mut grant = server.defaults.clone();
    let mode = query.get("networkmode");
    if let Some(mode) = mode.filter(|mode| *mode == "host" || mode.starts_with("container:")) {
        return Err(ApiError::unsupported(
            format!("network {mode} for a build"),
            "use none, a network between containers, or default: what exocell serve --allow-net \
             grants",
        ));
    }
    let network = super::network(server.layout(), mode, &mut grant)?;
    if let Some(bytes) = query.number::<i64>("memory")?.filter(|bytes| *bytes > 0) {
        grant.memory_bytes = bytes.unsigned_abs();
        plan::check_memory(grant.memory_bytes)?;
    }
    let mut hosts = Settings::default();
    for host in query.all("extrahosts").filter(|host| !host.is_empty()) {
        hosts.add_host(host).map_err(ApiError::bad_request)?;
    }
    let tags = query.all("t").filter(|tag| !tag.is_empty()).map(str::parse::<Reference>);
    let tags = tags.collect::<Result<Vec<_>, _>>()?;
    if tags.len() > TAGS_MAX {
        return Err(ApiError::bad_request(format!("an image gets at most {TAGS_MAX} tags")));
    }
    Ok(Options {
        dockerfile: String::new(),
        tags,
        arguments: map(query, "buildargs")?,
        labels: map(query, "labels")?,
        target: query.get("target").map(str::to_owned),
        uses_cache: !query.flag("nocache") && has_cache(query, &server.images()?)?,
        pulls: query.flag("pull"),
        secrets: Vec::new(),
        grant,
        network,
        hosts: hosts.hosts,
        shm_bytes: query.number::<u64>("shmsize")?.filter(|bytes| *bytes > 0),
        hidden: Vec::new(),
        named: BTreeMap::new(),
    })
}

/// Whether there is one of the images that a client wants layers to be taken from; if it names none,
/// any layer does.
fn has_cache(query: &Query, store: &Store) -> ApiResult<bool> {
    let Some(text) = query.get("cachefrom") else { return Ok(true) };
    let names: Option<Vec<String>> = serde_json::from_str(text)
        .map_err(|error| ApiError::bad_request(format!("cachefrom: {error}")))?;
    let names = names.unwrap_or_default();
    Ok(names.is_empty() || names.iter().any(|name| store.resolve(name).is_ok()))
}

/// An object of strings; one that is null is not said.
fn map(query: &Query, name: &str) -> ApiResult<BTreeMap<String, String>> {
    let Some(text) = query.get(name) else { return Ok(BTreeMap::new()) };
    let read: Result<Option<BTreeMap<String, Option<String>>>, _> = serde_json::from_str(text);
    let read = read.map_err(|error| ApiError::bad_request(format!("{name}: {error}")))?;
    let said = read.unwrap_or_default().into_iter();
    Ok(said.filter_map(|(name, value)| Some((name, value?))).collect())
}

/// Answers the call.
///
/// # Errors
/// What is wrong with the request; what goes wrong later is in the stream.
pub async fn build(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let query = call.target.query.clone();
    let mut options = options(&query, server)?;
    let (quiet, path) =
        (query.flag("q"), query.get("dockerfile").unwrap_or("Dockerfile").to_owned());
    if path.len() > PATH_BYTES_MAX {
        return Err(ApiError::bad_request(format!(
            "the path of the Dockerfile has at most {PATH_BYTES_MAX} bytes"
        )));
    }
    let is_traced = query.get("version") == Some("2");
    let place = call.place.clone();
    let body = BodyReader::new(call.body);
    let taken = server.at_its_pace(move |server| context(server, body, &path)).await?;
    let Taken { context, dockerfile, hidden } = taken;
    (options.dockerfile, options.hidden) = (dockerfile, hidden);
    // Before the first line of the answer there is a status to say it with.
    dockerfile::read(&options.dockerfile)
        .map_err(|error| ApiError::bad_request(format!("dockerfile parse error: {error}")))?;
    let stopper = Arc::new(Stopper::default());
    let (ended, until) = oneshot::channel::<()>();
    let (watched, layout) = (stopper.clone(), server.layout().clone());
    tokio::spawn(async move {
        tokio::select! {
            () = place.gone() => {
                // A cell takes a moment to end.
                let _ = tokio::task::spawn_blocking(move || watched.stop(&layout)).await;
            }
            _ = until => {}
        }
    });
    let (sender, body) = Body::stream();
    if is_traced {
        let journal = Arc::new(Journal::default());
        let told = trace::pass_on(&journal, sender);
        let own = journal.clone();
        let begun = server.begin(move |server| {
            // One that is gone hears nothing.
            let _ = told.send(trace::carry_out(server, &options, &context, &stopper, &own));
            drop(ended);
        });
        begun.inspect_err(|_| journal.end())?;
        return Ok(stream("application/json", body));
    }
    server.begin(move |server| {
        carry_out(server, &options, &context, &stopper, &Told { sender, quiet });
        drop(ended);
    })?;
    Ok(stream("application/json", body))
}

/// What a client sent.
struct Taken {
    context: Rootfs,
    dockerfile: String,
    hidden: Vec<String>,
}

/// The files of the context, and the text of its Dockerfile. Clients send that and
/// `.dockerignore` in any case; where the latter leaves them out they are no files of the build.
fn context(server: &Server, body: BodyReader, path: &str) -> ApiResult<Taken> {
    let context = files(&server.images()?, body)?;
    let text = compose::text(&context, path, dockerfile::BYTES_MAX);
    let text = text.map_err(|error| ApiError::bad_request(error.to_string()))?;
    let text = text.ok_or_else(|| {
        ApiError::bad_request(format!("Cannot locate specified Dockerfile: {path}"))
    })?;
    let ignored = compose::text(&context, IGNORE, ignore::BYTES_MAX);
    let ignored = ignored.map_err(|error| ApiError::bad_request(error.to_string()))?;
    let ignored = Ignore::read(&ignored.unwrap_or_default()).map_err(ApiError::bad_request)?;
    let hidden = [path, IGNORE].into_iter().filter(|name| ignored.leaves_out(name));
    let hidden = hidden.map(str::to_owned).collect();
    Ok(Taken { context, dockerfile: text, hidden })
}

/// What an archive holds.
///
/// # Errors
/// What is wrong with it.
pub fn files(store: &Store, archive: impl io::Read + Send) -> ApiResult<Rootfs> {
    let mut archive = known(archive)?;
    let taken = compose::take(store, |mut to| {
        let mut most = io::Read::take(&mut archive, CONTEXT_BYTES_MAX + 1);
        match io::copy(&mut most, &mut to)? {
            bytes if bytes > CONTEXT_BYTES_MAX => {
                Err(io::Error::other(format!("it has more than {CONTEXT_BYTES_MAX} bytes")))
            }
            _ => Ok(()),
        }
    });
    taken.map_err(|error| ApiError::bad_request(error.to_string()))
}

fn carry_out(
    server: &Arc<Server>,
    options: &Options,
    context: &Rootfs,
    stopper: &Stopper,
    told: &Told,
) {
    let mut client = Streamed { server, told };
    let built = Build::new(server.layout(), options, Some(context), &mut client, stopper)
        .and_then(Build::run);
    match built {
        Ok(id) => {
            told.line(&json!({ "aux": { "ID": id.to_string() } }));
            if told.quiet {
                told.line(&json!({ "stream": format!("{id}\n") }));
                tell_tags(server, &options.tags, &id.to_string());
                return;
            }
            told.text(&format!("Successfully built {}\n", id.short()));
            for tag in &options.tags {
                told.text(&format!("Successfully tagged {tag}\n"));
            }
            tell_tags(server, &options.tags, &id.to_string());
        }
        Err(error) => {
            let message = printable_lines(&error.to_string()).into_owned();
            let mut detail = json!({ "message": message });
            if let BuildError::Program { code, .. } = error {
                detail["code"] = json!(code);
            }
            told.line(&json!({ "errorDetail": detail, "error": message }));
        }
    }
}

/// Tells that an image has got names.
pub fn tell_tags(server: &Server, tags: &[Reference], id: &str) {
    for tag in tags {
        let attributes = BTreeMap::from([("name".to_owned(), tag.to_string())]);
        server.events.tell(Event::new("image", "tag", id, attributes));
    }
}

/// The client's lines.
struct Told {
    sender: BodySender,
    quiet: bool,
}

impl Told {
    fn line(&self, value: &Value) {
        // One that is gone has the build stopped by another way.
        let _ = self.sender.line_now(value);
    }

    fn text(&self, text: &str) {
        self.line(&json!({ "stream": text }));
    }
}

struct Streamed<'a> {
    server: &'a Arc<Server>,
    told: &'a Told,
}

impl Client for Streamed<'_> {
    fn say(&mut self, text: &str) {
        if !self.told.quiet {
            self.told.text(&printable_lines(text));
        }
    }

    fn output(&mut self, bytes: &[u8]) {
        if !self.told.quiet {
            self.told.text(&String::from_utf8_lossy(bytes));
        }
    }

    /// In red, as dockerd has it.
    fn complaint(&mut self, bytes: &[u8]) {
        if !self.told.quiet {
            self.told.text(&format!("\x1b[91m{}\x1b[0m", String::from_utf8_lossy(bytes)));
        }
    }

    fn fetch(&mut self, name: &str) -> Result<(), CellError> {
        // With nobody's credentials: a Dockerfile names images of others.
        fetch(self.server, name, None)
    }
}

/// Fetches the image `name` into the store.
///
/// # Errors
/// It cannot be fetched.
pub fn fetch(
    server: &Server,
    name: &str,
    credentials: Option<Credentials>,
) -> Result<(), CellError> {
    let reference: Reference = name.parse()?;
    let store = Store::open(server.layout().images())?;
    let proxy = ProxyOptions::read(|name| std::env::var(name).ok());
    let options = RegistryOptions { credentials, proxy, ..RegistryOptions::default() };
    let source = Source::Registry { reference, options };
    unpack::import(&store, &source, None, &ImportLimits::default(), &mut Silent)?;
    Ok(())
}

/// `POST /build/prune`
pub async fn prune(server: &Arc<Server>) -> ApiResult<Response> {
    let freed = server.blocking(|server| Ok(super::prune(server.layout())?)).await?;
    Ok(reply(StatusCode::OK, &json!({ "CachesDeleted": [], "SpaceReclaimed": freed })))
}
