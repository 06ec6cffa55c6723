//! Building images: the instructions of a Dockerfile, carried out one after the other.
//!
//! ```text
//! Dockerfile ──> stages that are needed ──> steps ─┬─ in the cache ──────────────> its layer
//! context ─────────────────────────────────────────┼─ RUN: a cell, its changes ──> a layer
//!                                                  ├─ COPY, ADD, WORKDIR ────────> a layer
//!                                                  └─ others: the configuration
//! base image + layers ──> the image
//! ```
//! Read it in this order: [`Build::run`] here, `stage` (one stage and its steps), `cell` (a `RUN`),
//! `keep` (what is on disk), [`call`] (`POST /build`). No file of the context or of an image is
//! looked at in this process: [`exocell_cell::compose`] has jailed ones for that.

pub mod call;
mod cell;
mod configure;
mod document;
mod keep;
mod mounts;
mod scope;
mod stage;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exocell_cell::images::dockerfile::{self, Dockerfile, DockerfileError, Instruction, Stage};
use exocell_cell::images::{Digest, ImageError, Reference, Rootfs, Store};
use exocell_cell::networks::Networks;
use exocell_cell::signal::Signal;
use exocell_cell::{CellError, Layout, Record, end};

pub(crate) use configure::as_configured;
pub use configure::{as_started, changed};
use keep::Keep;
pub(crate) use keep::kept;
pub use keep::prune;
use scope::Arguments;
use stage::State;

use crate::admit::Defaults;
use crate::error::ApiError;

/// Why an image was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Dockerfile(#[from] DockerfileError),
    /// A program of a `RUN` has ended so.
    #[error("The command '{command}' returned a non-zero code: {code}")]
    Program { command: String, code: u8 },
    #[error(transparent)]
    Cell(#[from] CellError),
    #[error("{0}")]
    Refused(String),
    #[error("the build was cancelled")]
    Cancelled,
}

impl From<ImageError> for BuildError {
    fn from(error: ImageError) -> Self {
        Self::Cell(error.into())
    }
}

impl From<ApiError> for BuildError {
    fn from(error: ApiError) -> Self {
        Self::Refused(error.message)
    }
}

type Result<T> = std::result::Result<T, BuildError>;

/// A file that programs of a `RUN` are shown, and that is in no image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretFile {
    pub id: String,
    /// On the host.
    pub path: PathBuf,
}

/// What is built, and how.
#[derive(Debug)]
pub struct Options {
    /// The text of the Dockerfile.
    pub dockerfile: String,
    pub tags: Vec<Reference>,
    /// `--build-arg`
    pub arguments: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// The stage that is wanted; the last one without it.
    pub target: Option<String>,
    pub uses_cache: bool,
    /// Whether images are fetched that are there.
    pub pulls: bool,
    pub secrets: Vec<SecretFile>,
    /// What each cell may use.
    pub grant: Defaults,
    /// The network between cells that they are in.
    pub network: Option<String>,
    /// More lines of /etc/hosts in cells.
    pub hosts: Vec<(String, std::net::IpAddr)>,
    pub shm_bytes: Option<u64>,
    /// Files of the context that no step sees.
    pub hidden: Vec<String>,
    /// What is meant by names of images and stages, instead of those.
    pub named: BTreeMap<String, Named>,
}

/// A context with a name of its own (`--build-context`).
#[derive(Debug, Clone)]
pub enum Named {
    Image(String),
    /// An image that another build has made.
    Built(Arc<Built>),
    /// Files, as [`exocell_cell::compose::take`] took them.
    Files(Arc<Rootfs>),
}

impl Options {
    /// What the client means by the name of an image or a stage.
    fn meant(&self, name: &str) -> Option<&Named> {
        let whole = || self.named.get(name);
        whole().or_else(|| self.named.get(name.strip_suffix(":latest")?))
    }
}

/// The network between cells that a build is to be in whose client says `mode`. Where that is `none`,
/// nothing else of the network is left in `grant`.
///
/// # Errors
/// There is no such network, or it is the host's.
pub fn network(
    layout: &Layout,
    mode: Option<&str>,
    grant: &mut Defaults,
) -> std::result::Result<Option<String>, CellError> {
    match mode.unwrap_or_default() {
        "" | "default" | "bridge" => Ok(None),
        "none" => {
            grant.connect.clear();
            Ok(None)
        }
        "host" => Err(CellError::Usage(
            "a build has no network of the host's; use default, none, or a network between cells"
                .to_owned(),
        )),
        name => Ok(Some(Networks::of(layout).find(name)?.name)),
    }
}

/// A step that begins.
#[derive(Debug, Clone, Copy)]
pub struct Begun<'a> {
    /// Which of how many it is, from 1.
    pub of_all: (usize, usize),
    /// The same in its stage.
    pub of_stage: (usize, usize),
    /// What the stage is called, where there are several.
    pub stage: Option<&'a str>,
    /// The instruction.
    pub text: &'a str,
    /// Where it is in the Dockerfile, from 1; 0 where it is not from there.
    pub line: usize,
}

/// What whoever asked for a build is told, and does for it.
pub trait Client {
    /// Progress, in whole lines.
    fn say(&mut self, text: &str);
    fn begun(&mut self, step: &Begun<'_>) {
        let (at, count) = step.of_all;
        self.say(&format!("Step {at}/{count} : {}\n", step.text));
    }
    /// The step that began last is in the cache.
    fn cached(&mut self) {
        self.say(" ---> Using cache\n");
    }
    /// The step's program runs in this cell.
    fn runs(&mut self, cell: &str) {
        self.say(&format!(" ---> Running in {cell}\n"));
    }
    /// The step is done, and the image would be `id` now.
    fn done(&mut self, id: &str) {
        self.say(&format!(" ---> {id}\n"));
    }
    /// The secret `id`, where the client keeps it.
    ///
    /// # Errors
    /// It cannot be had; that there is none is no error.
    fn secret(&mut self, _id: &str) -> std::result::Result<Option<Vec<u8>>, CellError> {
        Ok(None)
    }
    /// What a program writes.
    fn output(&mut self, bytes: &[u8]);
    /// What a program writes to its standard error.
    fn complaint(&mut self, bytes: &[u8]) {
        self.output(bytes);
    }
    /// Fetches the image `name` into the store.
    ///
    /// # Errors
    /// It cannot be fetched.
    fn fetch(&mut self, name: &str) -> std::result::Result<(), CellError>;
}

/// Ends a build from another thread.
#[derive(Debug, Default)]
pub struct Stopper {
    is_stopped: AtomicBool,
    /// The cells that work for it now: a client of BuildKit's protocol may have steps side by side.
    cells: Mutex<Vec<Record>>,
}

impl Stopper {
    /// Ends the cell that works for the build, and has nothing begun after it. Blocks.
    pub fn stop(&self, layout: &Layout) {
        self.is_stopped.store(true, Ordering::SeqCst);
        for record in std::mem::take(&mut *self.cells()) {
            // One that has ended meanwhile is what was wanted.
            let _ = end::kill(layout, &record, Signal::KILL);
        }
    }

    fn cells(&self) -> MutexGuard<'_, Vec<Record>> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<()> {
        match self.is_stopped.load(Ordering::SeqCst) {
            true => Err(BuildError::Cancelled),
            false => Ok(()),
        }
    }

    /// Notes a cell that works now; it is ended at once where nobody waits any more.
    fn watch(&self, layout: &Layout, record: &Record) -> Result<()> {
        self.cells().push(record.clone());
        if self.is_stopped.load(Ordering::SeqCst) {
            self.stop(layout);
        }
        self.check()
    }

    /// Notes that a cell has done its work.
    fn let_go(&self, record: &Record) -> Result<()> {
        self.cells().retain(|other| other.id != record.id);
        self.check()
    }
}

/// One build.
pub struct Build<'a> {
    layout: &'a Layout,
    store: Store,
    keep: Keep,
    options: &'a Options,
    client: &'a mut dyn Client,
    stopper: &'a Stopper,
    /// What the context holds, as [`exocell_cell::compose::take`] took it.
    context: Option<&'a Rootfs>,
    arguments: Arguments,
    escape: char,
    /// Stages that are done, by their numbers.
    done: BTreeMap<usize, State>,
    steps: (usize, usize),
    /// The same in the stage that is built now, and what that is called.
    of_stage: (usize, usize),
    stage: Option<String>,
}

/// An image that is built, and kept nowhere yet.
#[derive(Debug)]
pub struct Built {
    store: Store,
    state: State,
}

impl Built {
    /// Keeps it in the store; its id.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn keep(&self, tags: &[Reference]) -> Result<Digest> {
        let record = self.state.lasting(&self.store)?;
        for tag in tags {
            self.store.tag(&record.id.to_string(), tag)?;
        }
        Ok(record.id)
    }

    /// Its files, for [`exocell_cell::compose::pack`].
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn files(&self) -> Result<Arc<Rootfs>> {
        self.state.clone().passing(&self.store).map(|(file, _)| file)
    }
}

impl<'a> Build<'a> {
    /// A build of `options` with the files in `context`.
    ///
    /// # Errors
    /// The state root cannot be written.
    pub fn new(
        layout: &'a Layout,
        options: &'a Options,
        context: Option<&'a Rootfs>,
        client: &'a mut dyn Client,
        stopper: &'a Stopper,
    ) -> Result<Self> {
        Ok(Self {
            layout,
            store: Store::open(layout.images())?,
            keep: Keep::open(layout)?,
            options,
            client,
            stopper,
            context,
            arguments: Arguments::new(options.arguments.clone()),
            escape: '\\',
            done: BTreeMap::new(),
            steps: (0, 0),
            of_stage: (0, 0),
            stage: None,
        })
    }

    /// Carries it out; the id of the image, which has its tags.
    ///
    /// # Errors
    /// Why there is none. What was done until then is in the cache.
    pub fn run(self) -> Result<Digest> {
        let tags = &self.options.tags;
        let stopper = self.stopper;
        let built = self.build()?;
        stopper.check()?;
        built.keep(tags)
    }

    /// Carries it out, without keeping the image.
    ///
    /// # Errors
    /// As of [`Build::run`].
    pub fn build(mut self) -> Result<Built> {
        let file = dockerfile::read(&self.options.dockerfile)?;
        self.escape = file.escape;
        for step in &file.globals {
            let Instruction::Arg(arguments) = &step.instruction else { continue };
            for (name, default) in arguments {
                let read = self.arguments.global(name, default.as_deref(), self.escape);
                read.map_err(|why| DockerfileError::new(step.line, why))?;
            }
        }
        let wanted = self.target(&file)?;
        let images = self.images(&file)?;
        let needed = needed(&file, &images, wanted)?;
        let extra = usize::from(!self.options.labels.is_empty());
        let count: usize = needed.iter().map(|at| 1 + file.stages[*at].steps.len()).sum();
        self.steps = (0, count + extra);
        let is_alone = needed.len() == 1;
        for at in needed {
            let stage = &file.stages[at];
            let name = || stage.name.clone().unwrap_or_else(|| format!("stage-{at}"));
            self.stage = (!is_alone).then(name);
            let extra = if at == wanted { extra } else { 0 };
            self.of_stage = (0, 1 + stage.steps.len() + extra);
            let state = self.stage(&file, &images, at)?;
            self.done.insert(at, state);
        }
        let mut state = self.done.remove(&wanted).ok_or(BuildError::Cancelled)?;
        self.label(&mut state)?;
        for name in self.arguments.unused() {
            self.client.say(&format!(
                "[Warning] the build argument {name} was not used: no ARG has that name\n"
            ));
        }
        Ok(Built { store: self.store, state })
    }

    /// The number of the stage that is wanted.
    fn target(&self, file: &Dockerfile) -> Result<usize> {
        let Some(target) = &self.options.target else { return Ok(file.stages.len() - 1) };
        let name = target.to_ascii_lowercase();
        let by_name = file.stages.iter().position(|stage| stage.name.as_deref() == Some(&name));
        let by_number = || target.parse().ok().filter(|at| *at < file.stages.len());
        by_name.or_else(by_number).ok_or_else(|| {
            BuildError::Refused(format!("target stage {target:?} could not be found"))
        })
    }

    /// The images that stages begin with, their variables put in.
    fn images(&self, file: &Dockerfile) -> Result<Vec<String>> {
        let read = |stage: &Stage| {
            let at = |why: String| DockerfileError::new(stage.line, why);
            let image = self.arguments.expand(&stage.image, self.escape).map_err(at)?;
            if image.is_empty() {
                let why = format!("FROM {}: the name of the image is empty", stage.image);
                return Err(at(why).into());
            }
            let platform = stage.platform.as_deref().unwrap_or_default();
            let platform = self.arguments.expand(platform, self.escape).map_err(at)?;
            check_platform(&platform).map_err(at)?;
            match self.options.meant(&image) {
                None | Some(Named::Built(_)) => Ok(image),
                Some(Named::Image(other)) => Ok(other.clone()),
                Some(Named::Files(_)) => {
                    let why = format!(
                        "FROM {image}: the client means a directory by that name; copy from it \
                         (COPY --from={image})"
                    );
                    Err(at(why).into())
                }
            }
        };
        file.stages.iter().map(read).collect()
    }
}

/// Whether an image for `platform` can be built here.
///
/// # Errors
/// Why it cannot.
pub fn check_platform(platform: &str) -> std::result::Result<(), String> {
    match platform {
        "" | "linux" | "linux/amd64" | "linux/x86_64" | "linux/amd64/v1" => Ok(()),
        other => Err(format!("--platform={other}: cells run linux/amd64 only")),
    }
}

/// The stage before `before` that `name` is, by name or by number.
fn stage_called(file: &Dockerfile, name: &str, before: usize) -> Option<usize> {
    let lower = name.to_ascii_lowercase();
    let earlier = &file.stages[..before];
    let by_name = earlier.iter().rposition(|stage| stage.name.as_deref() == Some(&lower));
    by_name.or_else(|| name.parse().ok().filter(|at| *at < before))
}

/// The stages that `wanted` needs, itself among them, in their order.
fn needed(file: &Dockerfile, images: &[String], wanted: usize) -> Result<BTreeSet<usize>> {
    let mut needed = BTreeSet::new();
    let mut waiting = vec![wanted];
    while let Some(at) = waiting.pop() {
        if !needed.insert(at) {
            continue;
        }
        let named = |name: &str| {
            let lower = name.to_ascii_lowercase();
            file.stages[..at].iter().rposition(|stage| stage.name.as_deref() == Some(&lower))
        };
        waiting.extend(named(&images[at]));
        for step in &file.stages[at].steps {
            for from in sources(&step.instruction) {
                if from.parse().is_ok_and(|number: usize| number >= at) {
                    let why = format!("--from={from}: a stage can take from earlier ones only");
                    return Err(DockerfileError::new(step.line, why).into());
                }
                waiting.extend(stage_called(file, from, at));
            }
        }
    }
    Ok(needed)
}

/// The stages and images that an instruction takes files from.
fn sources(instruction: &Instruction) -> Vec<&str> {
    match instruction {
        Instruction::Copy(transfer) => transfer.from.as_deref().into_iter().collect(),
        Instruction::Run { mounts, .. } => {
            let from = mounts.iter().filter_map(|mount| mount.options.get("from"));
            from.map(String::as_str).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stages_that_are_needed_are_built() {
        let text = "FROM a AS one\nFROM b AS two\nRUN x\nFROM one AS three\nCOPY --from=1 a /\n\
                    FROM c AS four\nRUN --mount=from=three,target=/x y\nFROM d";
        let file = dockerfile::read(text).unwrap();
        let images: Vec<_> = file.stages.iter().map(|stage| stage.image.clone()).collect();
        let of = |at| needed(&file, &images, at).map(|all| all.into_iter().collect::<Vec<_>>());
        assert_eq!(of(4).unwrap(), [4]);
        assert_eq!(of(3).unwrap(), [0, 1, 2, 3]);
        assert_eq!(of(2).unwrap(), [0, 1, 2]);
        let later = dockerfile::read("FROM a\nCOPY --from=1 a /\nFROM b").unwrap();
        assert!(needed(&later, &["a".to_owned(), "b".to_owned()], 0).is_err());
    }

    #[test]
    fn other_machines_are_refused() {
        assert!(check_platform("linux/amd64").is_ok() && check_platform("").is_ok());
        assert!(check_platform("linux/arm64").unwrap_err().contains("linux/arm64"));
    }
}
