//! The calls of a client: `moby.buildkit.v1.Control`, and `moby.buildkit.v1.frontend.LLBBridge` by
//! which buildx steers its builds.
//!
//! ```text
//! Control.Solve ─────────────────────── waits ──────────────────────> outputs ──> answer
//!     LLBBridge.Ping, LLBBridge.Solve ──> image-0    Return(image-0) ─┘
//! Control.Status <── steps, what programs say
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use exocell_cell::agent::printable_lines;
use exocell_cell::images::Digest;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Handle;

use super::answers;
use super::attributes::Asked;
use super::jobs::{Guard, Job, Jobs};
use super::{attributes, contexts, outputs, work};
use crate::build::{self, Named, kept};
use crate::control_messages::{
    Cache, CacheEntry, Capability, Definition, Evaluate, Exporter, Health, Info, Input, Nothing,
    Op, Outcome, Platform, Pong, Prune, Reference, Return, Solve, Solved, Source, StatusOf, Step,
    Stepped, Usage, UsageOf, UsageRecord, Version, Worker, Workers,
};
use crate::grpc::server::{Call, Service, unknown};
use crate::grpc::{Code, Result, Status, said};
use crate::progress::of_time;
use crate::session;
use crate::session::messages::Chunk;
use crate::state::Server;

/// What reads Dockerfiles.
const FRONTEND: &str = "dockerfile.v0";
/// By which name calls of `LLBBridge` name their build.
const BUILD: &str = "buildkit-controlapi-buildid";
/// A cache that is kept in the image.
const INLINE: &str = "inline";
/// What is on its way in a session within the connection.
const TUNNEL_BYTES: usize = 32 << 10;
/// The one place where builds run.
const WORKER: &str = "exocell";
/// What may be asked of [`FRONTEND`], by BuildKit's names.
const OF_FRONTENDS: [&str; 8] = [
    "solve.base",
    "return",
    "returnmap",
    "proto.refarray",
    "frontend.caps",
    "gateway.solve.metadata",
    "gateway.evaluate",
    "reference.output",
];
/// What may be in builds.
const OF_STEPS: [&str; 3] = ["source.local", "source.image", "exporter.multiple"];

/// What answers one client.
pub struct Control {
    server: Arc<Server>,
    handle: Handle,
    jobs: Jobs,
}

impl Service for Control {
    async fn call(&self, call: &mut Call) -> Result<()> {
        let (service, method) =
            call.path.trim_start_matches('/').split_once('/').unwrap_or_default();
        match (service, method) {
            ("moby.buildkit.v1.Control", "Solve") => self.solve(call).await,
            ("moby.buildkit.v1.Control", "Status") => self.status(call).await,
            ("moby.buildkit.v1.Control", "Session") => self.session(call).await,
            ("moby.buildkit.v1.Control", "ListWorkers") => {
                call.reply().send(&Workers { workers: vec![worker()] }).await
            }
            ("moby.buildkit.v1.Control", "Info") => {
                call.reply().send(&Info { version: Some(version()) }).await
            }
            ("moby.buildkit.v1.Control", "DiskUsage") => self.usage(call).await,
            ("moby.buildkit.v1.Control", "Prune") => self.prune(call).await,
            ("moby.buildkit.v1.Control", "ListenBuildHistory" | "UpdateBuildHistory") => {
                Err(Status::unsupported("a history of builds", "read the output of a build"))
            }
            ("moby.buildkit.v1.frontend.LLBBridge", method) => match method {
                "Ping" => {
                    self.of_call(call).await?;
                    call.reply().send(&pong()).await
                }
                "Solve" => self.step(call).await,
                "Return" => self.returned(call).await,
                "Evaluate" => self.evaluate(call).await,
                _ => Err(Status::unsupported(
                    format!("LLBBridge.{method}"),
                    "build from a Dockerfile, which is read here",
                )),
            },
            ("grpc.health.v1.Health", "Check") => call.reply().send(&Health { status: 1 }).await,
            _ => Err(unknown(&call.path)),
        }
    }
}

impl Control {
    pub fn new(server: Arc<Server>) -> Self {
        Self { server, handle: Handle::current(), jobs: Jobs::default() }
    }

    /// The build that a call of `LLBBridge` is about.
    async fn of_call(&self, call: &Call) -> Result<Arc<Job>> {
        self.jobs.wait(said(&call.head, BUILD).unwrap_or_default()).await
    }

    async fn solve(&self, call: &mut Call) -> Result<()> {
        let asked: Solve = call.message().await?;
        let outputs = check(&asked)?;
        let job = self.jobs.open(&asked.reference, &asked.session)?;
        let is_inline = |cache: &Cache| cache.exports.iter().any(|entry| entry.kind == INLINE);
        if asked.cache.as_ref().is_some_and(is_inline) {
            job.warn("the image holds no cache (BUILDKIT_INLINE_CACHE): what is built here is found again here");
        }
        let layout = self.server.layout().clone();
        let _guard = Guard { job: job.clone(), layout, handle: self.handle.clone() };
        let said = tokio::select! {
            said = self.solved(&job, asked, outputs) => said,
            () = self.session_ends(&job) => {
                Err(Status::new(Code::Cancelled, "the build's session has ended"))
            }
            () = call.reply().gone() => Err(Status::new(Code::Cancelled, "nobody waits any more")),
        };
        call.reply().send(&Solved { said: said? }).await
    }

    async fn solved(
        &self,
        job: &Arc<Job>,
        asked: Solve,
        outputs: Vec<outputs::Output>,
    ) -> Result<BTreeMap<String, String>> {
        let image = match asked.frontend.as_str() {
            // The client steers it.
            "" => job.returned().await?,
            _ => {
                let imports = asked.cache.map(|cache| cache.imports).unwrap_or_default();
                Some(self.image(job, asked.attributes, imports, &asked.inputs).await?)
            }
        };
        match image {
            Some(image) if !outputs.is_empty() => self.outputs(job, image, outputs).await,
            // It stays in the cache.
            Some(image) => job.take(&image).map(|_| BTreeMap::new()),
            None => Ok(BTreeMap::new()),
        }
    }

    /// Waits until the build's session, if it has one, was there and is gone.
    async fn session_ends(&self, job: &Job) {
        match self.server.sessions.wait(&job.session).await {
            Ok(session) => session.gone().await,
            Err(_) => std::future::pending().await,
        }
    }

    /// Builds an image for `job`; its name there.
    async fn image(
        &self,
        job: &Arc<Job>,
        attributes: BTreeMap<String, String>,
        imports: Vec<CacheEntry>,
        inputs: &BTreeMap<String, Definition>,
    ) -> Result<String> {
        let asked = attributes::read(&self.server, &attributes, &imports);
        let asked = asked.and_then(|asked| self.with_inputs(asked, inputs));
        let asked = asked.inspect_err(|status| job.fail(status))?;
        let built = self.apart(job, move |client| {
            work::build(client, asked, &format!("{} built", client.job.name))
        });
        let built = built.await.and_then(|built| self.jobs.keep(job, built));
        built.inspect_err(|status| job.fail(status))
    }

    /// Has names of contexts mean the images of other builds that the client says.
    fn with_inputs(
        &self,
        mut asked: Asked,
        inputs: &BTreeMap<String, Definition>,
    ) -> Result<Asked> {
        for (name, input) in &asked.inputs {
            let unknown = || {
                Status::unsupported(
                    format!("the context {name} in BuildKit's own form (LLB)"),
                    "name an image of a build of the same client, a directory or an image",
                )
            };
            let identifier = inputs.get(input).and_then(identified).ok_or_else(unknown)?;
            let built = self.jobs.made(&identifier).ok_or_else(unknown)?;
            asked.options.named.insert(name.clone(), Named::Built(built));
        }
        match inputs.keys().find(|input| !asked.inputs.values().any(|own| own == *input)) {
            None => Ok(asked),
            Some(input) => Err(Status::unsupported(
                format!("the input {input} in BuildKit's own form (LLB)"),
                "build from a directory",
            )),
        }
    }

    async fn outputs(
        &self,
        job: &Arc<Job>,
        image: String,
        outputs: Vec<outputs::Output>,
    ) -> Result<BTreeMap<String, String>> {
        self.apart(job, move |client| {
            let built = client.job.take(&image)?;
            outputs::make(client, &built, &outputs, &format!("{} put out", client.job.name))
        })
        .await
    }

    /// Runs `work` on a thread of its own, which may wait for the client.
    async fn apart<T: Send + 'static>(
        &self,
        job: &Arc<Job>,
        work: impl FnOnce(&contexts::Client<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let session = self.server.sessions.wait(&job.session).await?;
        let (server, handle, job) = (self.server.clone(), self.handle.clone(), job.clone());
        let done = self.server.at_its_pace(move |_| {
            let (job, session) = (&*job, &session);
            Ok(work(&contexts::Client { server: &server, handle: &handle, job, session }))
        });
        done.await.map_err(|error| Status::new(Code::Internal, error.message))?
    }

    /// A session within this connection: its bytes come as messages.
    async fn session(&self, call: &mut Call) -> Result<()> {
        let named = session::Named::of(&call.head).map_err(Status::invalid)?;
        let (ours, theirs) = tokio::io::duplex(TUNNEL_BYTES);
        let (mut read, mut write) = tokio::io::split(ours);
        let (messages, reply) = call.endless();
        let up = async {
            while let Some(chunk) = messages.next::<Chunk>().await? {
                write.write_all(&chunk.data).await.map_err(cut_off)?;
            }
            Ok(())
        };
        let down = async {
            loop {
                let mut data = vec![0; TUNNEL_BYTES];
                let count = read.read(&mut data).await.map_err(cut_off)?;
                data.truncate(count);
                if count == 0 {
                    return Ok(());
                }
                reply.send(&Chunk { data }).await?;
            }
        };
        tokio::select! {
            ended = up => ended,
            ended = down => ended,
            () = answers(&self.server, named, theirs) => Ok(()),
        }
    }

    async fn status(&self, call: &mut Call) -> Result<()> {
        let asked: StatusOf = call.message().await?;
        let job = self.jobs.wait(&asked.reference).await?;
        let mut ear = job.journal.hear().ok_or_else(|| {
            Status::new(Code::AlreadyExists, "somebody is told of this build already")
        })?;
        loop {
            let reply = call.reply();
            let update = tokio::select! {
                update = ear.next() => update,
                () = reply.gone() => None,
            };
            match update {
                Some(update) => reply.send(&update).await?,
                None => break,
            }
        }
        self.jobs.forget(&job);
        Ok(())
    }

    async fn step(&self, call: &mut Call) -> Result<()> {
        let job = self.of_call(call).await?;
        let asked: Step = call.message().await?;
        let checked = check_frontend(&asked.frontend, asked.definition.as_ref());
        let checked = checked.and_then(|()| match asked.policies.iter().all(Vec::is_empty) {
            true => Ok(()),
            false => Err(no_policies()),
        });
        checked.inspect_err(|status| job.fail(status))?;
        let image = tokio::select! {
            image = self.image(&job, asked.attributes, asked.imports, &asked.inputs) => image,
            () = call.reply().gone() => {
                job.cancel(self.server.layout(), &self.handle);
                Err(Status::new(Code::Cancelled, "nobody waits any more"))
            }
        };
        let id = image?;
        let definition = Some(defined(&job.identifier(&id)));
        let image = Some(Reference { id, definition });
        let result = Some(Outcome { image, ..Outcome::default() });
        call.reply().send(&Stepped { result }).await
    }

    async fn returned(&self, call: &mut Call) -> Result<()> {
        let job = self.of_call(call).await?;
        let Return { result, error } = call.message().await?;
        job.return_with(match error {
            Some(error) => Err(Status::new(Code::Unknown, printable_lines(&error.message))),
            None => one_image(result.unwrap_or_default()),
        });
        call.reply().send(&Nothing {}).await
    }

    async fn evaluate(&self, call: &mut Call) -> Result<()> {
        let job = self.of_call(call).await?;
        let asked: Evaluate = call.message().await?;
        // What has a name is built.
        job.check(&asked.reference)?;
        call.reply().send(&Nothing {}).await
    }

    /// `docker buildx du`
    async fn usage(&self, call: &mut Call) -> Result<()> {
        let UsageOf { filters, age } = call.message().await?;
        if filters.iter().any(|filter| !filter.is_empty()) || age != 0 {
            return Err(Status::unsupported("a filter of what builds keep", "list all of it"));
        }
        let records = self.blocking(|server| Ok(records(server))).await?;
        call.reply().send(&Usage { records }).await
    }

    /// `docker builder prune`
    async fn prune(&self, call: &mut Call) -> Result<()> {
        let asked: Prune = call.message().await?;
        let keeps = asked.keep_time != 0
            || asked.reserved != 0
            || asked.used_max != 0
            || asked.free_min != 0
            || asked.filters.iter().any(|filter| !filter.is_empty());
        if keeps {
            return Err(Status::unsupported(
                "keeping a part of what builds have left",
                "remove all of it (docker builder prune)",
            ));
        }
        let gone = self.blocking(|server| {
            let before = records(server);
            build::prune(server.layout())
                .map_err(|error| Status::new(Code::FailedPrecondition, error.to_string()))?;
            let after: Vec<String> = records(server).into_iter().map(|record| record.id).collect();
            Ok(before.into_iter().filter(|record| !after.contains(&record.id)).collect::<Vec<_>>())
        });
        for record in gone.await? {
            call.reply().send(&record).await?;
        }
        Ok(())
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Server) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let done = self.server.at_its_pace(move |server| Ok(work(server))).await;
        done.map_err(|error| Status::new(Code::Internal, error.message))?
    }
}

fn cut_off(error: std::io::Error) -> Status {
    Status::new(Code::Unavailable, format!("the session has ended: {error}"))
}

fn no_policies() -> Status {
    Status::unsupported("a policy for sources", "leave it out")
}

/// Looks at all that a build asks for beside its attributes.
fn check(asked: &Solve) -> Result<Vec<outputs::Output>> {
    if !asked.frontend.is_empty() || asked.definition.as_ref().is_some_and(|d| !d.steps.is_empty())
    {
        check_frontend(&asked.frontend, asked.definition.as_ref())?;
    }
    if let Some(wanted) = asked.entitlements.iter().find(|wanted| !wanted.is_empty()) {
        let (what, remedy) = match wanted.as_str() {
            "network.host" => (
                "the host's network for a build (--network host)".to_owned(),
                "use none, or default: what exocell serve --allow-net grants",
            ),
            other => (format!("--allow {other}"), "leave it out: a step has what a cell has"),
        };
        return Err(Status::unsupported(what, remedy));
    }
    let says = |policy: &Option<Vec<u8>>| policy.as_ref().is_some_and(|own| !own.is_empty());
    if says(&asked.policy) || !asked.policy_session.is_empty() {
        return Err(no_policies());
    }
    if asked.exports_by_session || asked.proxy_network {
        return Err(Status::unsupported(
            "an exporter of the session, or a network of a proxy",
            "leave it out",
        ));
    }
    if let Some(cache) = &asked.cache {
        // What goes into the image itself is done without, in words.
        let kinds = cache.exports.iter().map(|entry| entry.kind.as_str());
        let kinds = kinds.filter(|kind| *kind != INLINE);
        let old = Some("registry").filter(|_| !cache.to.is_empty());
        if let Some(kind) = kinds.chain(old).next() {
            return Err(Status::unsupported(
                format!("--cache-to type={kind}"),
                "leave it out: what is built here is found again here",
            ));
        }
    }
    let old =
        Exporter { kind: asked.exporter.clone(), attributes: asked.exporter_attributes.clone() };
    match (asked.exporters.is_empty(), old.kind.is_empty()) {
        (true, false) => outputs::read(&[old]),
        _ => outputs::read(&asked.exporters),
    }
}

fn check_frontend(frontend: &str, definition: Option<&Definition>) -> Result<()> {
    if definition.is_some_and(|definition| !definition.steps.is_empty()) || frontend.is_empty() {
        return Err(Status::unsupported(
            "a build in BuildKit's own form (LLB)",
            "build from a Dockerfile",
        ));
    }
    match frontend == FRONTEND {
        true => Ok(()),
        false => Err(Status::unsupported(
            format!("the frontend {frontend}"),
            "build from a Dockerfile, and leave BUILDKIT_SYNTAX out",
        )),
    }
}

/// An image of a build, as other builds name it: a source, and the end of its definition.
fn defined(identifier: &str) -> Definition {
    let source = Some(Source { identifier: identifier.to_owned() });
    let source = Op { source, ..Op::default() }.encode_to_vec();
    let digest = Digest::of(&source).to_string();
    let inputs = vec![Input { digest: digest.clone() }];
    let end = Op { inputs, ..Op::default() }.encode_to_vec();
    Definition { steps: vec![source, end], notes: BTreeMap::from([(digest, Nothing {})]) }
}

/// What the definition is of, if it is one of those.
fn identified(definition: &Definition) -> Option<String> {
    let sources = definition.steps.iter().filter_map(|step| Op::decode(&step[..]).ok());
    let mut sources = sources.filter_map(|op| op.source).map(|source| source.identifier);
    sources.next().filter(|_| sources.next().is_none() && definition.steps.len() == 2)
}

/// The image that a client has come to; none, where it only asked what there is.
fn one_image(outcome: Outcome) -> Result<Option<String>> {
    if outcome.several.is_some_and(|several| !several.all.is_empty()) {
        return Err(Status::unsupported("an image of several platforms", "build linux/amd64"));
    }
    let named = outcome.image.map(|image| image.id).unwrap_or(outcome.named);
    Ok(Some(named).filter(|name| !name.is_empty()))
}

fn version() -> Version {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Version { package: WORKER.to_owned(), version, revision: String::new() }
}

fn worker() -> Worker {
    Worker {
        id: WORKER.to_owned(),
        platforms: vec![Platform { architecture: "amd64".to_owned(), os: "linux".to_owned() }],
        version: Some(version()),
        ..Worker::default()
    }
}

fn pong() -> Pong {
    let all = |names: &[&str]| {
        names.iter().map(|id| Capability { id: (*id).to_owned(), is_there: true }).collect()
    };
    Pong { of_frontends: all(&OF_FRONTENDS), of_steps: all(&OF_STEPS), workers: vec![worker()] }
}

/// What builds keep, in the client's form.
fn records(server: &Server) -> Vec<UsageRecord> {
    let all = kept(server.layout()).into_iter().map(|own| UsageRecord {
        id: own.id,
        mutable: own.kind != "regular",
        bytes: i64::try_from(own.bytes).unwrap_or(i64::MAX),
        created: Some(of_time(own.used)),
        used: Some(of_time(own.used)),
        uses: 1,
        kind: own.kind.to_owned(),
        ..UsageRecord::default()
    });
    all.collect()
}
