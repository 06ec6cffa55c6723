//! The sandboxes of a server, and the life of each.
//!
//! ```text
//! exocell run -i --rm --name mcp-… FLAGS IMAGE cat <── standard input: held open here
//! ```
//! `cat` ends when its input does, and the cell ends with it. A program of the cell may have stopped
//! `cat`; so the command is tied: it ends with this server, also by a kill, and its cell with it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_cell::agent::Patient;
use exocell_cell::control::Client;
use exocell_cell::{CellSpec, Layout, Record, key, now_ms, plan};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use crate::error::{Refusal, blocking};
use crate::ports::Ports;

/// What a cell says when it runs, for it says what it hears.
const READY: &str = "ready\n";
/// How long a cell may take to run. An image is unpacked in it, which may be large.
const START_MAX: Duration = Duration::from_secs(120);
/// How long a cell may take to end by itself, and then to be gone.
const END_MAX: Duration = Duration::from_secs(5);
/// How much is kept of what a command says as it fails.
const WORDS_MAX: u64 = 16 << 10;

/// What sandboxes are made of.
#[derive(Debug, Clone)]
pub struct Recipe {
    pub layout: Layout,
    /// The command itself.
    pub executable: PathBuf,
    /// Images that a client may name; the first where it names none.
    pub images: Vec<String>,
    /// For `exocell run`.
    pub flags: Vec<String>,
    /// Sandboxes at once.
    pub sandboxes_max: usize,
}

/// All sandboxes of a server.
pub struct Sandboxes {
    recipe: Recipe,
    /// `None` while one is being made: its place is taken.
    all: Mutex<BTreeMap<String, Option<Arc<Sandbox>>>>,
}

/// One sandbox.
pub struct Sandbox {
    pub id: String,
    pub image: String,
    pub made_ms: u64,
    pub ports: Ports,
    layout: Layout,
    run: tokio::sync::Mutex<Run>,
}

struct Run {
    child: Child,
    input: Option<ChildStdin>,
}

impl Sandboxes {
    pub fn new(recipe: Recipe) -> Arc<Self> {
        Arc::new(Self { recipe, all: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Option<Arc<Sandbox>>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn images(&self) -> &[String] {
        &self.recipe.images
    }

    /// Makes one, of `image` if one is named.
    ///
    /// # Errors
    /// There are as many as there may be, the image is none of the operator's, and what
    /// `exocell run` says.
    pub async fn make(self: &Arc<Self>, image: Option<String>) -> Result<Arc<Sandbox>, Refusal> {
        let image = match image {
            None => self.recipe.images.first().cloned().unwrap_or_default(),
            Some(image) if self.recipe.images.contains(&image) => image,
            Some(image) => {
                let all = self.recipe.images.join(", ");
                return Err(Refusal::new(format!(
                    "sandboxes are not made of {image:?}; the images are: {all}"
                )));
            }
        };
        self.sweep().await;
        let id = self.place()?;
        let own = self.clone();
        // On a task of its own: a client that hangs up leaves nothing half made.
        let (name, image_of) = (id.clone(), image.clone());
        let made = tokio::spawn(async move {
            let made = Sandbox::start(&own.recipe, &name, &image_of).await;
            let mut all = own.lock();
            match &made {
                Ok(sandbox) => drop(all.insert(name, Some(sandbox.clone()))),
                Err(_) => drop(all.remove(&name)),
            }
            made
        });
        made.await.unwrap_or_else(|error| Err(Refusal::new(format!("the call failed: {error}"))))
    }

    /// An id that nobody has, whose place is taken.
    fn place(&self) -> Result<String, Refusal> {
        let random = key::random().map_err(|error| Refusal::new(format!("no id: {error}")))?;
        let id = format!("mcp-{}", random.get(..12).unwrap_or(&random));
        let (mut all, most) = (self.lock(), self.recipe.sandboxes_max);
        if all.len() >= most {
            return Err(Refusal::new(format!(
                "there are {most} sandboxes, which is as many as there may be at once; \
                 kill one that is not needed"
            )));
        }
        all.insert(id.clone(), None);
        Ok(id)
    }

    /// Those that run, the oldest first.
    pub async fn running(&self) -> Vec<Arc<Sandbox>> {
        self.sweep().await;
        let mut all: Vec<_> = self.lock().values().flatten().cloned().collect();
        all.sort_by_key(|sandbox| sandbox.made_ms);
        all
    }

    /// Forgets those whose cells have ended.
    async fn sweep(&self) {
        let all: Vec<_> = self.lock().values().flatten().cloned().collect();
        for sandbox in all {
            if sandbox.is_over().await {
                self.lock().remove(&sandbox.id);
            }
        }
    }

    /// The sandbox `id`.
    ///
    /// # Errors
    /// There is none.
    pub async fn find(&self, id: &str) -> Result<Arc<Sandbox>, Refusal> {
        let found = self.lock().get(id).cloned().flatten();
        match found {
            Some(sandbox) if !sandbox.is_over().await => Ok(sandbox),
            Some(_) => {
                self.lock().remove(id);
                Err(Refusal::new(format!("the sandbox {id} has ended; make another")))
            }
            None => Err(Refusal::new(format!(
                "there is no sandbox {id:?}; list_sandboxes tells which there are"
            ))),
        }
    }

    /// Ends the sandbox `id`.
    ///
    /// # Errors
    /// There is none, or it does not end.
    pub async fn kill(&self, id: &str) -> Result<(), Refusal> {
        let sandbox = self.find(id).await?;
        sandbox.end().await?;
        self.lock().remove(id);
        Ok(())
    }

    /// Ends all of them.
    pub async fn end(&self) {
        let all: Vec<_> = std::mem::take(&mut *self.lock()).into_values().flatten().collect();
        for sandbox in &all {
            sandbox.run.lock().await.input = None;
        }
        for sandbox in &all {
            // What does not end now ends with the server.
            let _ = sandbox.end().await;
        }
    }
}

impl Sandbox {
    async fn start(recipe: &Recipe, id: &str, image: &str) -> Result<Arc<Self>, Refusal> {
        let mut command = Command::new(&recipe.executable);
        command.arg("run").arg("--root").arg(recipe.layout.root());
        command.args(["--rm", "-i", "--tied", "--name", id, "--label", "exocell.mcp"]);
        command.args(&recipe.flags).args(["--entrypoint", "/bin/sh", image, "-c", "cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Refusal::new(format!("cannot run exocell: {error}")))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(mut input), Some(output)) = (input, output) else {
            return Err(Refusal::new("the cell has no standard streams"));
        };
        let mut back = String::new();
        let heard = timeout(START_MAX, async {
            input.write_all(READY.as_bytes()).await?;
            BufReader::new(output.take(READY.len() as u64)).read_line(&mut back).await
        });
        let in_time = heard.await.is_ok();
        if back != READY {
            return Err(match in_time {
                true => Refusal::new(last_words(child).await),
                false => Refusal::new(format!("{image} did not start within {START_MAX:?}")),
            });
        }
        Ok(Arc::new(Self {
            id: id.to_owned(),
            image: image.to_owned(),
            made_ms: now_ms(),
            ports: Ports::default(),
            layout: recipe.layout.clone(),
            run: tokio::sync::Mutex::new(Run { child, input: Some(input) }),
        }))
    }

    async fn is_over(&self) -> bool {
        let mut run = self.run.lock().await;
        !matches!(run.child.try_wait(), Ok(None))
    }

    /// Ends it, and all that runs in it.
    async fn end(&self) -> Result<(), Refusal> {
        self.ports.close();
        let mut run = self.run.lock().await;
        run.input = None;
        if timeout(END_MAX, run.child.wait()).await.is_ok() {
            return Ok(());
        }
        // What was to end it was stopped in there: the cell is tied to its command.
        let _ = run.child.start_kill();
        match timeout(END_MAX, run.child.wait()).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Refusal::new(format!("the sandbox {} does not end", self.id))),
        }
    }

    /// A stream to the guest, which has its time to answer, and what the cell was made with.
    /// Blocks.
    pub fn guest(&self) -> Result<(Patient, CellSpec), Refusal> {
        let (record, spec, _) = Record::find(&self.layout, &self.id)?;
        Ok((Client::connect(&record)?.guest_stream()?, spec))
    }

    /// The environment of a command, with `own` of its own. Blocks.
    pub fn environment(&self, spec: &CellSpec, own: &[String]) -> Vec<String> {
        plan::environment_beside(&self.layout, spec, own, false)
    }

    /// Asks the guest something on a thread that may block.
    pub async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        ask: impl FnOnce(Patient, CellSpec) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let own = self.clone();
        blocking(move || {
            let (guest, spec) = own.guest()?;
            ask(guest, spec)
        })
        .await
    }
}

/// What the command said before it ended.
async fn last_words(mut child: Child) -> String {
    let mut words = Vec::new();
    if let Some(errors) = child.stderr.take() {
        // What could be read is told.
        let _ = timeout(END_MAX, errors.take(WORDS_MAX).read_to_end(&mut words)).await;
    }
    let words = String::from_utf8_lossy(&words);
    match words.trim().trim_start_matches("exocell: ") {
        "" => "the sandbox ended at once".to_owned(),
        words => words.to_owned(),
    }
}
