//! A `RUN`: a cell on the image so far, and what it has changed when its program has ended.
//!
//! ```text
//! image ──> cell, program ── ends ──> its disk ──> cell without a program ──> changes: a layer
//! ```

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;

use exocell_cell::agent::client::{self, ClientError, cleaned};
use exocell_cell::agent::{FailureKind, FrameReader, Kind, Reply, TRANSFER_MAX};
use exocell_cell::compose;
use exocell_cell::control::Client as Control;
use exocell_cell::images::Healthcheck;
use exocell_cell::images::compose::Layer;
use exocell_cell::images::dockerfile::{Dockerfile, Heredoc, Mount, Program};
use exocell_cell::networks::Attachment;
use exocell_cell::settings::Settings;
use exocell_cell::{CellError, CellSpec, Record};
use serde_json::{Value, json};

use super::keep::LABEL;
use super::mounts::{Mounts, SCRIPTS};
use super::stage::{State, key};
use super::{Build, BuildError, Result};
use crate::launcher::{self, Start};
use crate::reach;

/// A guest cannot fill the host with one step.
const LAYER_BYTES_MAX: u64 = 64 << 30;

/// What a `RUN` starts.
struct Run {
    words: Vec<String>,
    env: Vec<String>,
    mounts: Mounts,
    network: bool,
}

impl Build<'_> {
    #[expect(clippy::too_many_arguments, reason = "the parts of one instruction")]
    pub(super) fn run_step(
        &mut self,
        file: &Dockerfile,
        at: usize,
        state: &mut State,
        program: &Program,
        heredocs: &[Heredoc],
        mounts: &[Mount],
        network: Option<&str>,
    ) -> Result<()> {
        let (mut mounts, binds) = self.mounts(file, at, state, mounts)?;
        let (words, scripts) = words(state, program, heredocs);
        let image_env = state.document.words("Env");
        let (args, counted) = state.declared().of_program(&self.arguments, &image_env);
        let said = format!("RUN {}", shown(&words));
        let documents = heredocs.iter().map(|document| document.content.clone());
        let parts = json!([
            words,
            documents.collect::<Vec<_>>(),
            mounts.key,
            counted,
            network.unwrap_or_default(),
        ]);
        let network = network != Some("none");
        let key = key(state, &[said.as_bytes(), parts.to_string().as_bytes()]);
        self.layer(state, &said, key, |build, state, to| {
            build.lay_out(&mut mounts, binds)?;
            if !scripts.is_empty() {
                build.scripts(&mut mounts, &scripts)?;
            }
            let env = image_env.into_iter().chain(args).collect();
            build.run_in_cell(state, Run { words, env, mounts, network }, to).map(Some)
        })
    }

    fn run_in_cell(&mut self, state: &mut State, run: Run, to: &File) -> Result<Layer> {
        let (_file, image) = state.passing(&self.store)?;
        let id = CellSpec::new_id()?;
        let disk = self.keep.work().join(format!("{id}.ext4"));
        let spec = self.spec(state, &run, &image.id.to_string(), id, &disk)?;
        self.client.runs(&spec.id[..12]);
        let ended = self.follow(&spec);
        let changes = match ended {
            Ok(0) => self.changes(&spec, run.mounts.targets(), to),
            Ok(code) => Err(BuildError::Program { command: shown(&run.words), code }),
            Err(error) => Err(error),
        };
        // What cannot be removed now goes with the build.
        let _ = fs::remove_file(&disk);
        changes
    }

    /// The cell of a program.
    fn spec(
        &self,
        state: &State,
        run: &Run,
        image: &str,
        id: String,
        disk: &Path,
    ) -> Result<CellSpec> {
        let document = &state.document;
        let given = |text: String, default: &str| {
            Some(if text.is_empty() { default.to_owned() } else { text })
        };
        let settings = Settings {
            tmpfs: run.mounts.memory.clone(),
            shm_bytes: self.options.shm_bytes,
            hosts: self.options.hosts.clone(),
            ..Settings::default()
        };
        let none = Healthcheck { test: vec!["NONE".to_owned()], ..Healthcheck::default() };
        let networks: Vec<&String> = self.options.network.iter().filter(|_| run.network).collect();
        let caps = self.table(run.network, &networks, &run.mounts.folders);
        Ok(CellSpec {
            name: format!("build-{}", &id[..12]),
            id,
            entrypoint: Some(Vec::new()),
            command: run.words.clone(),
            env: run.env.clone(),
            working_dir: given(document.string("WorkingDir"), "/"),
            user: given(document.string("User"), "0"),
            settings,
            intra: self.options.grant.intra,
            labels: [(LABEL.to_owned(), String::new())].into(),
            health: Some(none),
            disk: Some(disk.to_owned()),
            networks: networks.iter().map(|name| Attachment::plain(name)).collect(),
            has_link: !networks.is_empty(),
            copies: run.mounts.copies.clone(),
            idle: false,
            tied: true,
            ..reach::bare(image, &caps)?
        })
    }

    fn table(&self, network: bool, networks: &[&String], folders: &[Value]) -> Value {
        let grant = &self.options.grant;
        let mut table = json!({
            "version": 1,
            "memory": { "limit": grant.memory_bytes.to_string() },
            "cpu": { "count": grant.vcpus },
            "disk": { "size": grant.disk_bytes.to_string() },
            "processes": { "max": grant.processes },
            "clock": {}, "random": {}, "stdio": {},
            "folder": folders,
        });
        if network && !(grant.connect.is_empty() && networks.is_empty()) {
            table["network"] = json!({ "connect": grant.connect, "listen": [] });
        }
        if !networks.is_empty() {
            table["network"]["join"] = json!(networks);
        }
        table
    }

    /// Runs the cell to its program's end; the exit code.
    fn follow(&mut self, spec: &CellSpec) -> Result<u8> {
        let session = launcher::launch(self.layout, &Start::Cell(spec))?;
        let (record, _, _) = Record::find(self.layout, &spec.id)?;
        let watched = self.stopper.watch(self.layout, &record);
        let ended = watched.and_then(|()| self.pump(&session));
        drop(session);
        let unwatched = self.stopper.let_go(&record);
        record.await_release();
        unwatched?;
        ended
    }

    fn pump(&mut self, session: &UnixStream) -> Result<u8> {
        let mut frames = FrameReader::new(session);
        let lost = || {
            let why = "the cell of the step ended early: it was killed, or its memory was not \
                       enough for the guest's kernel (-m)";
            BuildError::Refused(why.to_owned())
        };
        loop {
            let frame = frames.read().ok().flatten().ok_or_else(lost)?;
            match frame.kind {
                Kind::Stdout => self.client.output(&frame.payload),
                Kind::Stderr => self.client.complaint(&frame.payload),
                Kind::Reply => match frame.json::<Reply>() {
                    Ok(Reply::Started { .. }) => {}
                    Ok(Reply::Exited { code, out_of_memory }) => {
                        if out_of_memory {
                            let why = "[Warning] a program was ended for lack of memory (-m)\n";
                            self.client.say(why);
                        }
                        return Ok(code);
                    }
                    Ok(Reply::Failed { kind, message }) => {
                        let what = match kind {
                            FailureKind::NotFound => "no such program: ",
                            _ => "",
                        };
                        return Err(BuildError::Refused(format!("{what}{}", cleaned(&message))));
                    }
                    Ok(_) | Err(_) => return Err(lost()),
                },
                Kind::Time => {}
                _ => return Err(lost()),
            }
        }
    }

    /// Keeps what the cell has left on its disk as a layer.
    fn changes(&mut self, spec: &CellSpec, left_out: Vec<String>, to: &File) -> Result<Layer> {
        let bare = self.table(false, &[], &[]);
        let idle = CellSpec {
            disk: spec.disk.clone(),
            labels: spec.labels.clone(),
            intra: spec.intra,
            tied: true,
            ..reach::bare(&spec.image, &bare)?
        };
        let session = launcher::launch(self.layout, &Start::Cell(&idle))?;
        let (record, _, _) = Record::find(self.layout, &idle.id)?;
        let watched = self.stopper.watch(self.layout, &record);
        let kept = watched.and_then(|()| {
            match FrameReader::new(&session).expect::<Reply>(Kind::Reply) {
                Ok(Reply::Started { .. }) => {}
                Ok(Reply::Failed { message, .. }) => {
                    return Err(BuildError::Refused(cleaned(&message)));
                }
                Ok(_) | Err(_) => {
                    let why = "the cell that reads a step's changes did not come up";
                    return Err(BuildError::Refused(why.to_owned()));
                }
            }
            let guest = Control::connect(&record)?.guest_stream()?.within(TRANSFER_MAX);
            let kept = compose::keep(to, |mut write| {
                let sent = client::download_changes(
                    &guest,
                    &guest,
                    &left_out,
                    &mut write,
                    LAYER_BYTES_MAX,
                );
                sent.map(drop).map_err(|error| match error {
                    ClientError::Local(error) => error,
                    error => std::io::Error::other(error),
                })
            });
            kept.map_err(CellError::from).map_err(BuildError::from)
        });
        drop(session);
        let unwatched = self.stopper.let_go(&record);
        record.await_release();
        unwatched?;
        kept
    }
}

/// A command as it is shown.
fn shown(words: &[String]) -> String {
    words.join(" ")
}

/// What is started, and the documents that are files for it.
fn words<'h>(
    state: &State,
    program: &Program,
    heredocs: &'h [Heredoc],
) -> (Vec<String>, Vec<&'h Heredoc>) {
    let Program::Line(line) = program else { return (state.document.program(program), Vec::new()) };
    match heredocs {
        [] => (state.document.program(program), Vec::new()),
        // Nothing but a document: it is the script.
        [only] if !line.contains(char::is_whitespace) => match only.content.starts_with("#!") {
            true => (vec![format!("{SCRIPTS}/0")], vec![only]),
            false => (state.document.program(&Program::Line(only.content.clone())), Vec::new()),
        },
        // The shell reads them itself.
        several => {
            let mut text = line.clone();
            for document in several {
                text.push('\n');
                text.push_str(&document.content);
                text.push_str(&document.name);
            }
            text.push('\n');
            (state.document.program(&Program::Line(text)), Vec::new())
        }
    }
}
