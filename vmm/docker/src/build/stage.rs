//! One stage: where it begins, and its steps.

use std::fs::File;
use std::sync::Arc;

use exocell_cell::compose::{self, Below};
use exocell_cell::images::compose::{Copied, Copy, Layer, Selection};
use exocell_cell::images::dockerfile::{
    self, Dockerfile, DockerfileError, Instruction, Scope, Step, Transfer,
};
use exocell_cell::images::{Digest, ImageRecord, Rootfs, Store};
use exocell_cell::{clock, now_ms};
use serde_json::json;

use super::configure::Configuring;
use super::document::Document;
use super::keep::Entry;
use super::scope::Declared;
use super::{Begun, Build, BuildError, Named, Result, stage_called};

/// Layers over an image file before all of them are made one: each is a descriptor of the process
/// that reads them.
const PENDING_MAX: usize = 64;

/// An image that is being made.
#[derive(Debug, Clone)]
pub struct State {
    pub document: Document,
    /// The image that the stage began with; none for `scratch`.
    base: Option<Digest>,
    /// The image below, and its record; in use as long as it is held.
    file: Option<(Arc<Rootfs>, ImageRecord)>,
    /// What is over it.
    pending: Vec<(Layer, Arc<File>)>,
    declared: Declared,
    /// Whether this stage has said what its program is given.
    says_cmd: bool,
    /// Instructions that the image has for this stage.
    triggers: Vec<String>,
}

impl State {
    fn scratch() -> Self {
        Self {
            document: Document::empty(),
            base: None,
            file: None,
            pending: Vec::new(),
            declared: Declared::default(),
            says_cmd: false,
            triggers: Vec::new(),
        }
    }

    fn of_image(store: &Store, name: &str) -> Result<Self> {
        let record = store.resolve(name)?;
        let file = store.open_rootfs(&record)?;
        let text = store.inspect(&record.id.to_string())?;
        let document = Document::read(&text).map_err(BuildError::Refused)?;
        let (base, file) = (Some(record.id), Some((Arc::new(file), record)));
        Ok(Self { document, base, file, ..Self::scratch() })
    }

    /// Hands the files below to `work`.
    fn below<T>(&self, work: impl FnOnce(Below<'_>) -> Result<T>) -> Result<T> {
        let layers = self.pending.iter().map(|(layer, file)| {
            let file = file.try_clone();
            file.map(|file| (layer.clone(), file))
                .map_err(exocell_cell::CellError::host("cannot share a layer"))
        });
        let layers = layers.collect::<std::result::Result<Vec<_>, _>>()?;
        let base = self.file.as_ref().map(|(file, _)| file.as_ref());
        work(Below { base, layers: &layers })
    }

    /// The image as it is now, for cells and to copy from; it goes with its last user.
    pub fn passing(&mut self, store: &Store) -> Result<(Arc<Rootfs>, ImageRecord)> {
        if let Some(file) = self.file.clone().filter(|_| self.pending.is_empty()) {
            // How the program is run is what the document says now, not what that image says.
            return Ok(file);
        }
        let text = self.document.text();
        let made = self.below(|below| Ok(compose::passing(store, &text, below)?))?;
        let made = (Arc::new(made.1), made.0);
        self.pending.clear();
        self.file = Some(made.clone());
        Ok(made)
    }

    pub fn lasting(&self, store: &Store) -> Result<ImageRecord> {
        let text = self.document.text();
        self.below(|below| Ok(compose::lasting(store, &text, below, None)?))
    }

    fn add(&mut self, store: &Store, layer: Layer, file: File) -> Result<()> {
        self.pending.push((layer, Arc::new(file)));
        if self.pending.len() > PENDING_MAX {
            self.passing(store)?;
        }
        Ok(())
    }

    pub fn declared(&self) -> &Declared {
        &self.declared
    }

    fn env(&self) -> Vec<String> {
        self.document.env()
    }
}

impl Build<'_> {
    fn announce(&mut self, text: &str, line: usize) {
        self.steps.0 += 1;
        self.of_stage.0 += 1;
        self.client.begun(&Begun {
            of_all: self.steps,
            of_stage: self.of_stage,
            stage: self.stage.as_deref(),
            text,
            line,
        });
    }

    /// Carries one stage out.
    pub(super) fn stage(
        &mut self,
        file: &Dockerfile,
        images: &[String],
        at: usize,
    ) -> Result<State> {
        let stage = &file.stages[at];
        self.stopper.check()?;
        self.announce(&stage.text, stage.line);
        let mut state = self.begin(file, &images[at], at)?;
        self.client.done(&state.document.id().short());
        let triggers = std::mem::take(&mut state.triggers);
        if !triggers.is_empty() {
            self.steps.1 += triggers.len();
            self.of_stage.1 += triggers.len();
            self.client.say(&format!("# Executing {} build triggers\n", triggers.len()));
        }
        for text in &triggers {
            let mut step = dockerfile::instruction(text)?;
            step.line = stage.line;
            self.step(file, at, &mut state, &step)?;
        }
        for step in &stage.steps {
            self.step(file, at, &mut state, step)?;
        }
        Ok(state)
    }

    fn begin(&mut self, file: &Dockerfile, image: &str, at: usize) -> Result<State> {
        let lower = image.to_ascii_lowercase();
        let named = file.stages[..at].iter().rposition(|s| s.name.as_deref() == Some(&lower));
        let made = match self.options.meant(image) {
            Some(Named::Built(built)) => Some(&built.state),
            _ => named.and_then(|at| self.done.get(&at)),
        };
        let mut state = match made {
            Some(earlier) => {
                State { declared: Declared::default(), says_cmd: false, ..earlier.clone() }
            }
            None if image == "scratch" => State::scratch(),
            None => self.image(image)?,
        };
        state.triggers = state.document.take_triggers();
        Ok(state)
    }

    /// An image of the store, fetched if it is not there.
    fn image(&mut self, name: &str) -> Result<State> {
        if self.options.pulls || self.store.resolve(name).is_err() {
            self.client.fetch(name)?;
        }
        State::of_image(&self.store, name)
    }

    fn step(&mut self, file: &Dockerfile, at: usize, state: &mut State, step: &Step) -> Result<()> {
        self.stopper.check()?;
        self.announce(&step.text, step.line);
        self.instruction(file, at, state, &step.instruction).map_err(|error| match error {
            BuildError::Refused(why) => DockerfileError::new(step.line, why).into(),
            other => other,
        })?;
        self.client.done(&state.document.id().short());
        Ok(())
    }

    fn instruction(
        &mut self,
        file: &Dockerfile,
        at: usize,
        state: &mut State,
        instruction: &Instruction,
    ) -> Result<()> {
        match instruction {
            Instruction::Run { program, heredocs, mounts, network } => {
                self.run_step(file, at, state, program, heredocs, mounts, network.as_deref())
            }
            Instruction::Copy(transfer) => self.transfer(file, at, state, transfer, false),
            Instruction::Add(transfer) => self.transfer(file, at, state, transfer, true),
            Instruction::Workdir(path) => self.workdir(state, path),
            Instruction::Arg(arguments) => {
                for (name, default) in arguments {
                    let default = default.as_deref().map(|text| self.expand(state, text));
                    state.declared.declare(&mut self.arguments, name, default.transpose()?);
                }
                Ok(())
            }
            other => {
                let said = self.configure(state, other)?;
                self.note(state, &said)
            }
        }
    }

    /// A word with its variables put in.
    pub(super) fn expand(&self, state: &State, text: &str) -> Result<String> {
        let env = state.env();
        let variables = |name: &str| state.declared.value(&env, name);
        let scope = Scope { variables: &variables, escape: self.escape };
        scope.expand(text).map_err(BuildError::Refused)
    }

    fn expand_all(&self, state: &State, texts: &[String]) -> Result<Vec<String>> {
        texts.iter().map(|text| self.expand(state, text)).collect()
    }

    /// An instruction that changes the configuration alone; how the history tells of it.
    fn configure(&self, state: &mut State, instruction: &Instruction) -> Result<String> {
        let State { document, declared, says_cmd, .. } = state;
        let variables = |env: &[String], name: &str| declared.value(env, name);
        Configuring { document, says_cmd, variables: &variables, escape: self.escape }
            .carry_out(instruction)
    }

    /// Labels that the client gave.
    pub(super) fn label(&mut self, state: &mut State) -> Result<()> {
        let labels: Vec<_> = self.options.labels.clone().into_iter().collect();
        if labels.is_empty() {
            return Ok(());
        }
        let told: String = labels.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        self.announce(&format!("LABEL{told}"), 0);
        for (name, value) in labels {
            state.document.add("Labels", &name, json!(value));
        }
        self.note(state, &format!("LABEL{told}"))?;
        self.client.done(&state.document.id().short());
        Ok(())
    }

    /// A step without a layer: it has the time that it had when it was first done.
    fn note(&mut self, state: &mut State, said: &str) -> Result<()> {
        let key = key(state, &[said.as_bytes()]);
        if let Some((entry, _)) = self.cached(key).filter(|(entry, _)| entry.layer.is_none()) {
            self.client.cached();
            state.document.note(said, &entry.created, None);
            return Ok(());
        }
        let created = clock::rfc3339_ms(now_ms());
        self.keep.note(key, &Entry::new(state.base, created.clone(), None))?;
        state.document.note(said, &created, None);
        Ok(())
    }

    fn cached(&self, key: Digest) -> Option<(Entry, Option<File>)> {
        self.options.uses_cache.then(|| self.keep.find(key)).flatten()
    }

    /// A step with a layer: that of the cache, or what `make` writes to a file.
    pub(super) fn layer(
        &mut self,
        state: &mut State,
        said: &str,
        key: Digest,
        make: impl FnOnce(&mut Self, &mut State, &File) -> Result<Option<Layer>>,
    ) -> Result<()> {
        if let Some(kept) = self.cached(key) {
            return self.take_kept(state, said, kept);
        }
        let draft = self.keep.draft()?;
        let layer = make(self, state, draft.as_file())?;
        let created = clock::rfc3339_ms(now_ms());
        let diff_id = layer.as_ref().map(|layer| layer.diff_id);
        self.stopper.check()?;
        if let Some(layer) = layer.clone() {
            let file = self.keep.settle(draft, &layer)?;
            state.add(&self.store, layer, file)?;
        }
        self.keep.note(key, &Entry::new(state.base, created.clone(), layer))?;
        state.document.note(said, &created, diff_id);
        Ok(())
    }

    fn take_kept(
        &mut self,
        state: &mut State,
        said: &str,
        (entry, file): (Entry, Option<File>),
    ) -> Result<()> {
        self.client.cached();
        let diff_id = entry.layer.as_ref().map(|layer| layer.diff_id);
        if let (Some(layer), Some(file)) = (entry.layer, file) {
            state.add(&self.store, layer, file)?;
        }
        state.document.note(said, &entry.created, diff_id);
        Ok(())
    }

    /// The stage that `from` names, by all that was done for it.
    fn stage_id(&self, file: &Dockerfile, at: usize, from: &str) -> Option<Digest> {
        let is_stage = self.options.meant(from).is_none();
        let at = is_stage.then(|| stage_called(file, from, at)).flatten()?;
        self.done.get(&at).map(|state| state.document.id())
    }

    fn workdir(&mut self, state: &mut State, path: &str) -> Result<()> {
        let said = self.configure(state, &Instruction::Workdir(path.to_owned()))?;
        let path = state.document.string("WorkingDir");
        let key = key(state, &[said.as_bytes()]);
        self.layer(state, &said, key, |build, state, to| {
            let copy = Copy {
                selection: Selection::default(),
                to: format!("{}/", path.trim_end_matches('/')),
                owner: None,
                mode: None,
                unpacks: false,
                time_s: (now_ms() / 1000) as i64,
            };
            let made =
                state.below(|below| Ok(compose::copy(&build.store, &copy, None, below, to)?))?;
            Ok(match made {
                Copied::Layer(layer) => Some(layer),
                Copied::Nothing => None,
            })
        })
    }

    fn transfer(
        &mut self,
        file: &Dockerfile,
        at: usize,
        state: &mut State,
        transfer: &Transfer,
        unpacks: bool,
    ) -> Result<()> {
        let sources = self.expand_all(state, &transfer.sources)?;
        if let Some(out) = sources.iter().find(|source| climbs(source)) {
            let (what, whole) = match transfer.from {
                None => ("context", "build with a directory above as the context, and -f"),
                Some(_) => ("stage or image that it is from", "name a path in it"),
            };
            return Err(BuildError::Refused(format!(
                "{} {out}: forbidden path outside the build {what}; {whole}",
                if unpacks { "ADD" } else { "COPY" }
            )));
        }
        let to = self.expand(state, &transfer.to)?;
        let owner = transfer.owner.as_ref().map(|text| self.expand(state, text)).transpose()?;
        let mode = transfer.mode.as_ref().map(|text| self.expand(state, text)).transpose()?;
        let mode = mode.map(|text| mode_of(&text)).transpose()?;
        let inline = transfer.heredocs.iter().map(|document| {
            let env = state.env();
            let variables = |name: &str| state.declared.value(&env, name);
            let scope = Scope { variables: &variables, escape: self.escape };
            let content = match document.expands {
                true => scope.fill(&document.content).map_err(BuildError::Refused)?,
                false => document.content.clone(),
            };
            Ok((document.name.clone(), content))
        });
        let selection = Selection {
            inline: inline.collect::<Result<_>>()?,
            keeps_owner: transfer.from.is_some(),
            hidden: match transfer.from {
                None => self.options.hidden.clone(),
                Some(_) => Vec::new(),
            },
            sources,
        };
        let name = if unpacks { "ADD" } else { "COPY" };
        let shown = [
            transfer.from.as_ref().map(|from| format!("--from={from}")),
            owner.as_ref().map(|owner| format!("--chown={owner}")),
            mode.map(|mode| format!("--chmod={mode:o}")),
        ];
        let words = shown.into_iter().flatten();
        let words = words.chain(selection.sources.iter().cloned());
        let words = words.chain(selection.inline.iter().map(|(name, _)| format!("<<{name}")));
        let words: Vec<String> = words.chain([to.clone()]).collect();
        let said = format!("{name} {}", words.join(" "));
        let copy = Copy {
            selection,
            to: absolute(&state.document, &to),
            owner,
            mode,
            unpacks,
            time_s: (now_ms() / 1000) as i64,
        };
        // A stage has the same files as long as the same was done for it. So what was once copied
        // from it is found without its files, which take seconds to be put together.
        let stage = transfer.from.as_ref().and_then(|from| self.stage_id(file, at, from));
        let by_stage = stage.map(|id| {
            let parts = [said.as_bytes(), copy.to.as_bytes(), b"stage", id.as_bytes()];
            key(state, &[&parts[..], &sources_of(&copy.selection)].concat())
        });
        if let Some(kept) = by_stage.and_then(|key| self.cached(key)) {
            return self.take_kept(state, &said, kept);
        }
        let source = match &transfer.from {
            _ if copy.selection.sources.is_empty() => None,
            Some(from) => Some(self.source(file, at, from)?),
            None => Some(self.context()?),
        };
        let content = compose::hash(&copy.selection, source.as_deref())?;
        let key = key(state, &[said.as_bytes(), copy.to.as_bytes(), content.as_bytes()]);
        self.layer(state, &said, key, |build, state, to| {
            let store = &build.store;
            let made = state
                .below(|below| Ok(compose::copy(store, &copy, source.as_deref(), below, to)?))?;
            match made {
                Copied::Layer(layer) => Ok(Some(layer)),
                Copied::Nothing => Ok(None),
            }
        })?;
        match (by_stage, self.keep.find(key)) {
            (Some(by_stage), Some((entry, _))) => Ok(self.keep.note(by_stage, &entry)?),
            _ => Ok(()),
        }
    }

    pub(super) fn context(&self) -> Result<Arc<Rootfs>> {
        let none = "the build has no context: give a directory, or an archive of one";
        let context = self.context.ok_or_else(|| BuildError::Refused(none.to_owned()))?;
        Ok(Arc::new(context.try_clone()?))
    }

    /// The files of a stage or an image.
    pub(super) fn source(
        &mut self,
        file: &Dockerfile,
        at: usize,
        from: &str,
    ) -> Result<Arc<Rootfs>> {
        let image = match self.options.meant(from) {
            Some(Named::Files(files)) => return Ok(files.clone()),
            Some(Named::Built(built)) => return built.files(),
            Some(Named::Image(image)) => Some(image.as_str()),
            None => None,
        };
        if image.is_none()
            && let Some(at) = stage_called(file, from, at)
            && let Some(mut state) = self.done.remove(&at)
        {
            let made = state.passing(&self.store);
            self.done.insert(at, state);
            return made.map(|(file, _)| file);
        }
        let mut state = self.image(image.unwrap_or(from)).map_err(|error| match error {
            BuildError::Cancelled => error,
            error => BuildError::Refused(format!(
                "invalid from flag value {from}: there is neither a stage of that name before this \
                 one nor an image: {error}"
            )),
        })?;
        state.passing(&self.store).map(|(file, _)| file)
    }
}

/// Whether a path leads out of where it begins.
fn climbs(path: &str) -> bool {
    let mut depth = 0_i32;
    path.split('/').any(|part| {
        match part {
            "" | "." => {}
            ".." => depth -= 1,
            _ => depth += 1,
        }
        depth < 0
    })
}

fn sources_of(selection: &Selection) -> Vec<&[u8]> {
    selection.sources.iter().map(|source| source.as_bytes()).collect()
}

/// What a step depends on: the image before it, which has all steps before in its history, and
/// `parts`.
pub(super) fn key(state: &State, parts: &[&[u8]]) -> Digest {
    let mut bytes = state.document.id().as_bytes().to_vec();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(*part);
    }
    Digest::of(&bytes)
}

/// A path of the image, from its working directory on; a slash at the end stays.
pub(super) fn absolute(document: &Document, path: &str) -> String {
    let whole = match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("{}/{path}", document.string("WorkingDir")),
    };
    let mut names: Vec<&str> = Vec::new();
    for name in whole.split('/') {
        match name {
            "" | "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    let is_directory = path.ends_with('/') || matches!(path, "." | "..") || path.ends_with("/.");
    let end = if is_directory && !names.is_empty() { "/" } else { "" };
    format!("/{}{end}", names.join("/"))
}

fn mode_of(text: &str) -> Result<u16> {
    let mode = u16::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| BuildError::Refused(format!("--chmod={text}: give an octal number")))
}
