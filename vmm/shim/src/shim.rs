//! The containers of one shim, and their cell.
//!
//! ```text
//! Create ──> first of a pod: the cell boots ──> its place in the depot ──> room in the guest
//! Start, Exec, Kill, … ──> the container ──> streams to the guest's agent
//! Delete ──> the room is taken away, its files are whole ──> last of a pod: the cell ends
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use containerd_shim_protos::api::{CreateTaskRequest, Mount};
use containerd_shim_protos::events::task::{
    TaskCreate, TaskDelete, TaskExit, TaskIO, TaskOOM, TaskStart,
};
use containerd_shim_protos::protobuf::MessageField;
use exocell_cell::agent::{Start, client};
use exocell_cell::control::Contain;
use exocell_cell::end;
use exocell_cell::inside::Inside;
use tracing::warn;

use crate::args::Args;
use crate::bundle::Bundle;
use crate::cell::Cell;
use crate::config::Config;
use crate::depot::{Depot, Place};
use crate::error::{Result, ShimError};
use crate::events::{Events, timestamp};
use crate::group::{self, Group};
use crate::hooks::{self, Told};
use crate::netns;
use crate::process::{Ended, Process, Program, Stage};
use crate::refusal::refused;
use crate::spec::Wanted;
use crate::stdio::Stdio;

/// The longest name of a host (sethostname(2)).
const HOSTNAME_MAX: usize = 64;
/// How long other programs of a container may take to end with its own.
const OTHERS_MAX: Duration = Duration::from_secs(2);
/// How long a program whose end was told may take to be over.
const OVER_MAX: Duration = Duration::from_secs(1);
/// How long a guest may take to stop programs, or to say what they use.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How long the last events may take.
const FAREWELL_MAX: Duration = Duration::from_secs(3);

/// All that a shim has.
pub struct Shim {
    namespace: String,
    group: Group,
    pub events: Events,
    /// One is made or deleted at a time.
    changing: Mutex<()>,
    cell: Mutex<Option<Arc<Cell>>>,
    containers: Mutex<BTreeMap<String, Arc<Container>>>,
    is_over: (Mutex<bool>, Condvar),
}

/// A container of the cell's guest.
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub cell: Arc<Cell>,
    pub main: Arc<Process>,
    pub execs: Mutex<BTreeMap<String, Arc<Process>>>,
    pub is_paused: AtomicBool,
    wanted: Wanted,
    /// Both are there until it is deleted.
    room: Mutex<Option<(Arc<Inside>, Place)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shim {
    pub fn new(args: &Args, group: Group, events: Events) -> Self {
        Self {
            namespace: args.namespace.clone(),
            group,
            events,
            changing: Mutex::default(),
            cell: Mutex::default(),
            containers: Mutex::default(),
            is_over: Default::default(),
        }
    }

    /// Waits until the shim was shut down and containerd knows of all that happened.
    pub fn wait_for_shutdown(&self) {
        let mut over = lock(&self.is_over.0);
        while !*over {
            over = self.is_over.1.wait(over).unwrap_or_else(PoisonError::into_inner);
        }
        self.events.flush(FAREWELL_MAX);
    }

    /// Shuts the shim down if it has no container, or `now`.
    pub fn shut_down(&self, now: bool) {
        if !now && !lock(&self.containers).is_empty() {
            return;
        }
        if let Some(cell) = lock(&self.cell).take() {
            cell.end();
        }
        *lock(&self.is_over.0) = true;
        self.is_over.1.notify_all();
    }

    /// # Errors
    /// There is none of that id.
    pub fn find(&self, id: &str) -> Result<Arc<Container>> {
        let none = || ShimError::not_found(format!("container {id} does not exist"));
        lock(&self.containers).get(id).cloned().ok_or_else(none)
    }

    /// Makes a container that is ready to start; the pid that stands for it.
    ///
    /// # Errors
    /// It is there already, or cannot be made.
    pub fn create(&self, request: &CreateTaskRequest) -> Result<u32> {
        let _changing = lock(&self.changing);
        let id = request.id.clone();
        if lock(&self.containers).contains_key(&id) {
            return Err(ShimError::exists(format!("container {id} exists")));
        }
        if !request.checkpoint.is_empty() || !request.parent_checkpoint.is_empty() {
            return Err(ShimError::unimplemented("a cell is not started from a checkpoint"));
        }
        if let Some(options) = request.options.as_ref()
            && !options.value.is_empty()
        {
            return Err(refused(
                format_args!("the runtime's options ({})", options.type_url),
                "say it in /etc/exocell/containerd.toml",
            ));
        }
        let config = Config::read()?;
        let bundle = Bundle::read(request.bundle.as_ref(), &config)?;
        check(request, &bundle.wanted)?;
        let made = self.make(request, bundle, &config);
        let made = made.and_then(|own| own.run_hooks(When::Created).map(|()| own));
        let container = made.inspect_err(|_| {
            // A cell that has no container is of no use.
            if lock(&self.containers).is_empty()
                && let Some(cell) = lock(&self.cell).take()
            {
                cell.end();
            }
        })?;
        let pid = container.cell.pid;
        self.events.send(&TaskCreate {
            container_id: id.clone(),
            bundle: request.bundle.clone(),
            rootfs: request.rootfs.clone(),
            io: MessageField::some(TaskIO {
                stdin: request.stdin.clone(),
                stdout: request.stdout.clone(),
                stderr: request.stderr.clone(),
                terminal: request.terminal,
                ..TaskIO::default()
            }),
            pid,
            ..TaskCreate::default()
        });
        lock(&self.containers).insert(id, Arc::new(container));
        Ok(pid)
    }

    fn make(
        &self,
        request: &CreateTaskRequest,
        bundle: Bundle,
        config: &Config,
    ) -> Result<Container> {
        let (cell, place) = self.place(&bundle, &request.rootfs, config)?;
        if let Some(pid) = bundle.wanted.shares_with.iter().find(|pid| **pid != cell.pid) {
            return Err(refused(
                format_args!("a namespace of process {pid}"),
                "only those of its own pod can be shared",
            ));
        }
        let contained = |id: &str| group::hash(&[&self.namespace, id]);
        let shares_with = match bundle.wanted.shares_with.is_empty() {
            true => None,
            false => Some(contained(&self.group.id)),
        };
        let wanted = Contain {
            id: contained(&request.id),
            shares_with,
            hostname: match bundle.wanted.hostname.as_str() {
                "" => request.id.chars().take(HOSTNAME_MAX).collect(),
                name => name.to_owned(),
            },
            domain_name: String::new(),
            read_only: false,
            keeps_files: false,
            files: 1,
            depot: Some(place.name.clone()),
            shares_pids: bundle.wanted.shares_pids,
        };
        let inside = Inside::begin(&cell.record, wanted)?;
        let stdio = Stdio {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        Ok(Container {
            id: request.id.clone(),
            bundle: bundle.path,
            cell,
            main: Arc::new(Process::new(stdio)),
            execs: Mutex::default(),
            is_paused: AtomicBool::new(false),
            wanted: bundle.wanted,
            room: Mutex::new(Some((Arc::new(inside), place))),
        })
    }

    /// The cell, booted for the first container, and the container's place in its depot.
    fn place(
        &self,
        bundle: &Bundle,
        rootfs: &[Mount],
        config: &Config,
    ) -> Result<(Arc<Cell>, Place)> {
        let mut own = lock(&self.cell);
        if let Some(cell) = own.as_ref() {
            let place = cell.depot.add(bundle, rootfs)?;
            return Ok((cell.clone(), place));
        }
        let depot = Depot::make(&self.group.depot())?;
        let place = depot.add(bundle, rootfs)?;
        let cell = Cell::boot(&self.group, &self.namespace, &bundle.wanted, depot, config)?;
        Ok((own.insert(Arc::new(cell)).clone(), place))
    }

    /// Starts the program of a container.
    ///
    /// # Errors
    /// It was started before, or cannot be.
    pub fn start(self: &Arc<Self>, id: &str) -> Result<u32> {
        let container = self.find(id)?;
        let pid = container.cell.pid;
        let wanted = &container.wanted;
        let start =
            Start { spec: wanted.spec.clone(), stdin: false, filter: wanted.filter.clone() };
        let started = |_| {
            self.events.send(&TaskStart { container_id: id.to_owned(), pid, ..Default::default() });
        };
        let (shim, own) = (self.clone(), container.clone());
        let finished = move |ended: Ended| {
            own.await_execs();
            if ended.out_of_memory {
                shim.events.send(&TaskOOM { container_id: own.id.clone(), ..Default::default() });
            }
            shim.tell_exit(&own.id, &own.id, pid, ended);
        };
        let program = Program::Start(Box::new(start));
        let inside = container.inside()?;
        // By now whoever makes networks has made it.
        let plugged = container.cell.plug(container.wanted.network.as_deref());
        plugged.inspect_err(|_| container.main.fail())?;
        container.main.start(&inside, (&self.namespace, id), program, started, finished)?;
        if let Err(error) = container.run_hooks(When::Started) {
            // As the specification has it: the container runs all the same.
            warn!(id, %error, "a hook failed");
        }
        Ok(pid)
    }

    /// Tells of the end of a program: `exec_id` is the container's id for its own.
    pub fn tell_exit(&self, id: &str, exec_id: &str, pid: u32, ended: Ended) {
        self.events.send(&TaskExit {
            container_id: id.to_owned(),
            id: exec_id.to_owned(),
            pid,
            exit_status: ended.code,
            exited_at: MessageField::some(timestamp(ended.at)),
            ..TaskExit::default()
        });
    }

    /// The containerd namespace that its containers are in.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Sends a container's program, or `all` of its programs, a signal.
    ///
    /// # Errors
    /// It does not run; or the guest does not answer, unless the signal ends its cell.
    pub fn kill(&self, id: &str, number: u8, all: bool) -> Result<()> {
        let container = self.find(id)?;
        if let Some(ended) = container.main.end_before_start(number) {
            self.tell_exit(id, id, container.cell.pid, ended);
            return Ok(());
        }
        if container.main.stage() == Stage::Stopped {
            return Err(ShimError::not_found("process already finished"));
        }
        let inside = container.inside()?;
        let sent = match all {
            false => container.main.signal(&inside, number),
            true => inside.patient(ANSWER_MAX).map_err(ShimError::from).and_then(|stream| {
                container.main.give_up_later();
                Ok(client::signal_all(&stream, &stream, number)?)
            }),
        };
        let is_kill = i32::from(number) == nix::libc::SIGKILL;
        match sent {
            // A guest that does not do it is ended as a whole: what is killed is over.
            Err(error) if is_kill && container.main.wait_within(OVER_MAX).is_none() => {
                warn!(id, %error, "the guest does not end the program; its cell is ended");
                let cell = &container.cell;
                Ok(end::stop(&cell.layout, &cell.record, Duration::ZERO)?)
            }
            Err(_) if is_kill => Ok(()),
            sent => sent,
        }
    }

    /// Stops a container's programs where they are, or lets them go on.
    ///
    /// # Errors
    /// It does not run, or the guest does not answer.
    pub fn pause(&self, id: &str, pause: bool) -> Result<()> {
        let container = self.find(id)?;
        container.check_running()?;
        let stream = container.inside()?.patient(ANSWER_MAX)?;
        client::freeze(&stream, &stream, pause)?;
        container.is_paused.store(pause, Ordering::Relaxed);
        Ok(())
    }

    /// Removes a container that does not run, and with the last one the cell; how it ended.
    ///
    /// # Errors
    /// It runs.
    pub fn delete(&self, id: &str) -> Result<(u32, Ended)> {
        let _changing = lock(&self.changing);
        let container = self.find(id)?;
        let runs = || ShimError::state(format!("container {id} runs; stop it first"));
        let ended = container.main.ended_or_never_started().ok_or_else(runs)?;
        let is_last = {
            let mut containers = lock(&self.containers);
            containers.remove(id);
            containers.is_empty()
        };
        let room = lock(&container.room).take();
        if let Some((inside, place)) = room {
            // Execs that are about to begin still hold it; they are told that it is over.
            if let Ok(inside) = Arc::try_unwrap(inside) {
                inside.end();
            }
            if is_last && let Some(cell) = lock(&self.cell).take() {
                cell.end();
            }
            drop(place);
        }
        if let Err(error) = container.run_hooks(When::Stopped) {
            warn!(id, %error, "a hook failed");
        }
        self.events.send(&TaskDelete {
            container_id: id.to_owned(),
            pid: container.cell.pid,
            exit_status: ended.code,
            exited_at: MessageField::some(timestamp(ended.at)),
            ..TaskDelete::default()
        });
        Ok((container.cell.pid, ended))
    }
}

/// What containerd says beside the bundle has to be the same.
fn check(request: &CreateTaskRequest, wanted: &Wanted) -> Result<()> {
    if request.terminal != wanted.spec.process.terminal {
        return Err(ShimError::invalid("the bundle and containerd do not agree on a terminal"));
    }
    let Some(path) = &wanted.network else { return Ok(()) };
    match netns::is_own(path)? {
        false => Ok(()),
        true => Err(refused(
            "the host's network (hostNetwork)",
            "a cell is apart from the host; give the container a namespace of its own",
        )),
    }
}

/// When hooks run.
#[derive(Debug, Clone, Copy)]
enum When {
    Created,
    Started,
    Stopped,
}

impl Container {
    /// The room that it has in the guest.
    ///
    /// # Errors
    /// It has been deleted.
    pub fn inside(&self) -> Result<Arc<Inside>> {
        let gone = || ShimError::not_found(format!("container {} is deleted", self.id));
        lock(&self.room).as_ref().map(|(inside, _)| inside.clone()).ok_or_else(gone)
    }

    fn run_hooks(&self, when: When) -> Result<()> {
        let all = &self.wanted.hooks;
        let told = |status| Told {
            id: &self.id,
            status,
            pid: self.cell.pid,
            bundle: &self.bundle,
            annotations: &self.wanted.annotations,
        };
        match when {
            When::Created => {
                hooks::run(all.prestart.iter().chain(&all.create_runtime), &told("created"))
            }
            When::Started => hooks::run(&all.poststart, &told("running")),
            When::Stopped => hooks::run(&all.poststop, &told("stopped")),
        }
    }

    /// # Errors
    /// Its program does not run.
    pub fn check_running(&self) -> Result<()> {
        match self.main.stage() {
            Stage::Running => Ok(()),
            _ => Err(ShimError::state(format!("container {} does not run", self.id))),
        }
    }

    /// One of its programs: its own where `exec_id` is empty.
    ///
    /// # Errors
    /// There is none of that id.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>> {
        if exec_id.is_empty() {
            return Ok(self.main.clone());
        }
        let none = || ShimError::not_found(format!("exec {exec_id} does not exist"));
        lock(&self.execs).get(exec_id).cloned().ok_or_else(none)
    }

    /// What a program of an exec is in is the container's: it has ended with that, and is told of
    /// first.
    fn await_execs(&self) {
        let until = std::time::Instant::now() + OTHERS_MAX;
        let execs: Vec<_> = lock(&self.execs).values().cloned().collect();
        for exec in execs.iter().filter(|exec| exec.stage() == Stage::Running) {
            exec.wait_within(until.saturating_duration_since(std::time::Instant::now()));
        }
    }
}
