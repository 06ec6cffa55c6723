//! The record of a cell on disk, and the truth about it after any crash.
//!
//! ```text
//!            supervisor ready           program ended, stop, deadline
//!  created ───────────────────> running ─────────────────────────────> exited
//!     │                            │                                     │
//!     └── set-up failed ───────────┴── supervisor killed (lock is free) ─┤
//!                                                                        v
//!      ┌──────────── begun again (exocell start, docker start) ─────────┤
//!      v                                          removed (--rm, exocell rm)
//!   created
//! ```
//! `created` and `running` are claims of the supervisor; they hold only while
//! it holds the record's lock. Whoever finds the lock free writes `exited`, and where nothing can
//! be written says so all the same: a look needs no room on the disk.
//! Only the holder of that lock changes or removes the record, and the lock's
//! file goes last: who finds none has found a record in removal.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::control::{Client, ControlRequest};
use crate::events::{Action, Event, Log};
use crate::health::{Condition, Health};
use crate::limits::Limits;
use crate::networks::Attachment;
use crate::policy::Policy;
use crate::supervisor::fault;
use crate::{CellError, CellSpec, Layout};
use exocell_images::private;

pub use crate::events::StartTimes;

/// Where a cell stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Created,
    Running,
    Exited,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Exited => "exited",
        }
    }

    /// Whether the lifecycle allows this step. A new account of the same state is none.
    fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Created | Self::Running | Self::Exited)
            | (Self::Running, Self::Running | Self::Exited)
            | (Self::Exited, Self::Exited | Self::Created) => true,
            (Self::Running, Self::Created) | (Self::Exited, Self::Running) => false,
        }
    }
}

/// The supervisor's account of its cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    pub state: State,
    /// In the host's pid namespace; 0 before there is one.
    pub supervisor_pid: i32,
    /// In the cell's pid namespace; 0 where there is none.
    pub guest_kernel_inner_pid: i32,
    /// Milliseconds since the epoch.
    pub started_ms: u64,
    pub finished_ms: u64,
    /// When its program began the last time, where it begins anew; 0 if it never did.
    #[serde(default)]
    pub started_before_ms: u64,
    pub exit_code: Option<u8>,
    /// Why it ended, when that was not its program's own end.
    pub reason: Option<String>,
    /// Whether the guest's kernel ended a process of the cell for lack of memory.
    #[serde(default)]
    pub out_of_memory: bool,
    /// Whether the cell had the time that its table gives it. Its restart policy gives it no more.
    #[serde(default)]
    pub deadline_passed: bool,
    pub times: StartTimes,
    /// How many processes the host had ended for lack of memory when the cell began.
    #[serde(default)]
    pub(crate) host_oom_kills: u64,
}

/// How many processes the host has ended for lack of memory (proc_vmstat(5), oom_kill).
pub(crate) fn host_oom_kills() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

impl Default for Status {
    fn default() -> Self {
        Self {
            state: State::Created,
            supervisor_pid: 0,
            guest_kernel_inner_pid: 0,
            started_ms: 0,
            finished_ms: 0,
            started_before_ms: 0,
            exit_code: None,
            reason: None,
            out_of_memory: false,
            deadline_passed: false,
            times: StartTimes::default(),
            host_oom_kills: 0,
        }
    }
}

impl Status {
    /// Of a cell that did not come up.
    pub(crate) fn failed(error: &CellError) -> Self {
        Self {
            state: State::Exited,
            finished_ms: crate::now_ms(),
            exit_code: Some(error.exit_code()),
            reason: Some(error.to_string()),
            deadline_passed: matches!(error, CellError::Deadline),
            ..Self::default()
        }
    }
}

/// Proof that the holder's cell is alive: an flock(2) that the supervisor
/// inherits and the host's kernel releases at its death.
pub type Lease = File;

/// The right to make records: one process at a time.
pub(crate) struct Registry {
    _lock: File,
}

impl Registry {
    fn open(layout: &Layout) -> Result<File, CellError> {
        let directory = layout.cells();
        let failed = || format!("cannot use {}", directory.display());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(CellError::host(failed()))?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        options.open(directory.join(".lock")).map_err(CellError::host(failed()))
    }

    pub(crate) fn lock(layout: &Layout) -> Result<Self, CellError> {
        let file = Self::open(layout)?;
        file.lock().map_err(CellError::host("cannot lock the list of cells"))?;
        Ok(Self { _lock: file })
    }

    /// `None` when someone else has it.
    fn try_lock(layout: &Layout) -> Result<Option<Self>, CellError> {
        let file = Self::open(layout)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _lock: file })),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => {
                Err(CellError::host("cannot lock the list of cells")(error))
            }
        }
    }
}

/// Held by whoever gives a name away without a record: nobody else does meanwhile.
pub struct Names {
    _registry: Registry,
}

impl Names {
    /// # Errors
    /// The host's.
    pub fn hold(layout: &Layout) -> Result<Self, CellError> {
        Registry::lock(layout).map(|registry| Self { _registry: registry })
    }
}

/// A container that was made and not started: no cell yet, but its name is taken.
#[derive(Deserialize)]
struct Waiting {
    spec: Named,
    started: bool,
}

#[derive(Deserialize)]
struct Named {
    id: String,
    name: String,
}

impl Waiting {
    fn all(layout: &Layout) -> impl Iterator<Item = Named> {
        let files = fs::read_dir(layout.containers()).into_iter().flatten().flatten();
        let files = files.map(|entry| entry.path());
        let read =
            |path: PathBuf| -> Option<Self> { serde_json::from_slice(&fs::read(path).ok()?).ok() };
        let whole = |path: &PathBuf| path.extension().is_some_and(|end| end == "json");
        files.filter(whole).filter_map(read).filter(|one| !one.started).map(|one| one.spec)
    }
}

/// Whether a cell may be called `name`, which has the id `own` if it has one: of `records`, and
/// of the containers that are no cells yet, no other is. The registry is to be held.
///
/// # Errors
/// [`CellError::NameTaken`].
pub(crate) fn check_name_free(
    layout: &Layout,
    records: &[(Record, CellSpec, Status)],
    name: &str,
    own: &str,
) -> Result<(), CellError> {
    let has_record = records.iter().any(|(other, known, _)| known.name == name && other.id != own);
    if has_record || Waiting::all(layout).any(|other| other.name == name && other.id != own) {
        return Err(CellError::NameTaken(name.to_owned()));
    }
    Ok(())
}

/// One cell's directory.
#[derive(Debug, Clone)]
pub struct Record {
    pub id: String,
    directory: PathBuf,
    events: Log,
}

impl Record {
    /// What is known of the health of a cell that is looked after.
    const HEALTH: &str = "health.json";
    /// A file that a running cell has while it is paused.
    pub const PAUSED: &str = "paused";
    /// The ending of files that tell what the cell took of the host's disk by a folder, since it
    /// was started by hand.
    pub(crate) const TAKEN: &str = "taken";
    /// The private overlay of a cell that can start again.
    pub(crate) const DISK: &str = "disk.ext4";
    /// Room that a record keeps for the end of its cell, which may come on a full disk.
    const SPARE: &str = ".status.spare";
    /// An end with its reason is shorter.
    const SPARE_BYTES: usize = 4096;

    /// Makes the directory of a new cell and takes its lease. The record of a
    /// cell with that id that has ended becomes that of the new one, its log with it.
    pub fn create(layout: &Layout, spec: &CellSpec) -> Result<(Self, Lease), CellError> {
        let record = Self::at(layout, &spec.id);
        let _registry = Registry::lock(layout)?;
        let others = Self::all(layout)?;
        check_name_free(layout, &others, &spec.name, &spec.id)?;
        if others.iter().any(|(known, _, _)| known.id == spec.id) {
            return record.begin_again(spec);
        }
        DirBuilder::new()
            .mode(0o700)
            .create(&record.directory)
            .map_err(CellError::host(format!("cannot make {}", record.directory.display())))?;
        record.fill(spec).inspect_err(|_| {
            // The first error is the one to tell; what is left is swept later.
            let _ = record.remove();
        })
    }

    fn fill(&self, spec: &CellSpec) -> Result<(Self, Lease), CellError> {
        let mut options = OpenOptions::new();
        let lease = options
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(self.path("lock"))
            .and_then(|file| file.lock().map(|()| file))
            .map_err(CellError::host(format!("cannot lock {}", self.directory.display())))?;
        self.write("spec.json", spec)?;
        self.write_status(&Status::default())?;
        self.keep_spare()?;
        Ok((self.clone(), lease))
    }

    fn begin_again(&self, spec: &CellSpec) -> Result<(Self, Lease), CellError> {
        let alive = || CellError::WrongState {
            id: spec.id[..12].to_owned(),
            state: State::Running.name(),
            remedy: "wait for its end",
        };
        let lease = self.try_lease()?.ok_or_else(alive)?;
        for file in ["control.sock", Self::PAUSED, Self::HEALTH, fault::FILE] {
            // Of a supervisor that was killed; mostly there are none.
            let _ = fs::remove_file(self.path(file));
        }
        if spec.restarts == 0 {
            // Started by hand.
            let _ = fs::remove_file(self.path(Self::STOPPED));
            self.forget_taken();
        }
        self.keep_spare()?;
        let before = self.read::<Status>("status.json").unwrap_or_default();
        if before.state == State::Running {
            // Its end is known and could not be written yet.
            self.write_status(&Status { state: State::Exited, ..before.clone() })?;
        }
        let started_before_ms = before.started_ms.max(before.started_before_ms);
        // Readers take the specification first: none may see the new one with the end of the run
        // before, which would be the end of a cell that has no restart left.
        self.write_status(&Status { started_before_ms, ..Status::default() })?;
        self.write_spec(spec)?;
        Ok((self.clone(), lease))
    }

    fn forget_taken(&self) {
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        for file in files.map(|entry| entry.path()) {
            if file.extension().is_some_and(|ending| ending == Self::TAKEN) {
                let _ = fs::remove_file(file);
            }
        }
    }

    /// That of cell `id`, whether there is one or not.
    pub fn at(layout: &Layout, id: &str) -> Self {
        Self { id: id.to_owned(), directory: layout.cells().join(id), events: Log::of(layout) }
    }

    /// Whether there is a record of cell `id`, in whatever state.
    pub fn exists(layout: &Layout, id: &str) -> bool {
        Self::at(layout, id).directory.exists()
    }

    /// Every record, oldest first; dead cells are settled on the way. What is wrong with one keeps
    /// nobody from the others.
    pub fn all(layout: &Layout) -> Result<Vec<(Self, CellSpec, Status)>, CellError> {
        let entries = match fs::read_dir(layout.cells()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(CellError::host(format!("cannot list {}", layout.cells().display()))(
                    error,
                ));
            }
        };
        let mut found = Vec::new();
        for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
            let record = Self::at(layout, &entry.file_name().to_string_lossy());
            match record.settle(layout) {
                Ok(Some((spec, status))) => found.push((record, spec, status)),
                Ok(None) => {}
                // All would be missing from the list then.
                Err(error) if is_of_this_process(&error) => return Err(error),
                Err(_) => {}
            }
        }
        found.sort_by_key(|(_, spec, _)| spec.created_ms);
        Ok(found)
    }

    /// The record whose name, id or unambiguous id prefix is `key`.
    pub fn find(layout: &Layout, key: &str) -> Result<(Self, CellSpec, Status), CellError> {
        let mut all = Self::all(layout)?;
        // An id before a name: a name may be what another's id is.
        let by_name = || all.iter().position(|(_, spec, _)| spec.name == key);
        let exact = all.iter().position(|(record, _, _)| record.id == key);
        if let Some(exact) = exact.or_else(by_name) {
            return Ok(all.swap_remove(exact));
        }
        all.retain(|(record, _, _)| !key.is_empty() && record.id.starts_with(key));
        match all.len() {
            1 => Ok(all.remove(0)),
            // One of another version is in no list.
            0 if CellSpec::is_id(key) => match Self::at(layout, key).read_spec() {
                Err(error @ CellError::Version { .. }) => Err(error),
                // The list leaves out what cannot be read.
                _ => Self::at(layout, key)
                    .settle(layout)
                    .and_then(|_| Err(CellError::NoSuchCell(key.to_owned()))),
            },
            _ => Err(CellError::NoSuchCell(key.to_owned())),
        }
    }

    /// Gives cell `id` another name.
    pub fn rename(layout: &Layout, id: &str, name: &str) -> Result<(), CellError> {
        CellSpec::check_name(name)?;
        let _registry = Registry::lock(layout)?;
        check_name_free(layout, &Self::all(layout)?, name, "")?;
        let (record, spec, _) = Self::find(layout, id)?;
        match record.try_lease()? {
            Some(_lease) => record.write_spec(&CellSpec { name: name.to_owned(), ..spec }),
            None => {
                let request = ControlRequest::Rename { name: name.to_owned() };
                Client::connect(&record)?.ask(&request).map(drop)
            }
        }
    }

    /// The caller holds the lease.
    pub(crate) fn write_spec(&self, spec: &CellSpec) -> Result<(), CellError> {
        self.write("spec.json", spec)
    }

    /// Has the cell start again as `policy` says from now on.
    ///
    /// # Errors
    /// The supervisor's refusal, and the host's.
    pub fn set_restart(&self, spec: &CellSpec, policy: Policy) -> Result<(), CellError> {
        CellSpec { restart: policy, ..spec.clone() }.check_restart()?;
        match self.try_lease()? {
            // What else was changed of it stays so.
            Some(_lease) => self.write_spec(&CellSpec { restart: policy, ..self.read_spec()? }),
            None => {
                let request = ControlRequest::Restart { policy };
                Client::connect(self)?.ask(&request).map(drop)
            }
        }
    }

    /// Has a cell that has ended be in `networks` at its next start, and in no others.
    ///
    /// # Errors
    /// It runs; the host's.
    pub fn set_networks(&self, networks: &[Attachment]) -> Result<(), CellError> {
        let Some(_lease) = self.try_lease()? else {
            return Err(CellError::Usage(format!("the cell {} is being started", self.id)));
        };
        let mut spec = self.read_spec()?;
        spec.changes.join = Some(networks.iter().map(|own| own.network.clone()).collect());
        spec.networks = networks.to_vec();
        self.write_spec(&spec)
    }

    /// Has the cell keep to `limits`: its programs, if it runs, and its next start. The caller has
    /// seen to it that it can start so.
    ///
    /// # Errors
    /// It cannot have them; the supervisor's and the guest's refusal; the host's.
    pub fn set_limits(&self, limits: &Limits) -> Result<(), CellError> {
        match self.try_lease()? {
            Some(_lease) => {
                let mut spec = self.read_spec()?;
                limits.apply(&mut spec)?;
                self.write_spec(&spec)
            }
            None => {
                let request = ControlRequest::Limit(limits.clone());
                Client::connect(self)?.ask(&request).map(drop)
            }
        }
    }

    /// The cell alone as it stands, settled; `None`: the record is gone.
    ///
    /// # Errors
    /// As [`Self::all`]'s.
    pub fn look(&self, layout: &Layout) -> Result<Option<(CellSpec, Status)>, CellError> {
        self.settle(layout)
    }

    /// The right to change the record, when nobody else has it.
    pub(crate) fn lease(&self) -> Result<Option<Lease>, CellError> {
        self.try_lease()
    }

    /// Reads the record; where its supervisor is dead, writes that down first and clears what it
    /// left, as far as the disk takes it: the answer is the same. `None`: the record is gone.
    fn settle(&self, layout: &Layout) -> Result<Option<(CellSpec, Status)>, CellError> {
        let (spec, mut status) = match (self.read_spec(), self.read::<Status>("status.json")) {
            (Ok(spec), Ok(status)) => (spec, status),
            (Err(CellError::Version { .. }), _) => return Ok(None),
            (Err(error), _) | (_, Err(error)) => return self.settle_damaged(layout, error),
        };
        if status.state == State::Exited && !spec.remove {
            return Ok(Some((spec, status)));
        }
        let Some(_lease) = self.try_lease()? else { return Ok(Some((spec, status))) };
        if spec.remove && self.remove().is_ok() {
            return Ok(None);
        }
        // The supervisor may have settled it between our two looks.
        match self.read::<Status>("status.json") {
            Ok(now) if now.state == State::Exited => return Ok(Some((spec, now))),
            Ok(now) => status = now,
            Err(_) => return Ok(None),
        }
        exocell_vmm::jail::group::remove(&self.id);
        status.state = State::Exited;
        status.exit_code = Some(128 + libc::SIGKILL as u8);
        status.reason = Some(self.death(&status));
        status.finished_ms = crate::now_ms();
        // The next to look finds the same out.
        let _ = self.write_status(&status);
        let _ = fs::remove_file(self.path("control.sock"));
        Ok(Some((spec, status)))
    }

    /// Writes down why the operator killed the supervisor, which is gone.
    pub(crate) fn explain_kill(&self, why: &str) -> Result<(), CellError> {
        let Some(_lease) = self.try_lease()? else { return Ok(()) };
        let mut status: Status = self.read("status.json")?;
        if status.state != State::Exited {
            status.finished_ms = crate::now_ms();
        }
        status.state = State::Exited;
        status.exit_code = Some(128 + libc::SIGKILL as u8);
        status.reason = Some(why.to_owned());
        self.write_status(&status)?;
        let _ = fs::remove_file(self.path("control.sock"));
        Ok(())
    }

    /// How a supervisor ended that did not say so, as far as that can be known.
    fn death(&self, status: &Status) -> String {
        if let Some(signal) = fault::noted(&self.directory) {
            return format!("the supervisor failed by {signal}, which is a fault of Exocell's");
        }
        match host_oom_kills().saturating_sub(status.host_oom_kills) {
            0 => "the supervisor was killed by SIGKILL".to_owned(),
            count => format!(
                "the supervisor was killed by SIGKILL, perhaps for lack of memory: the host ended \
                 {count} processes for that since the cell began"
            ),
        }
    }

    /// A directory without a readable spec or status: a cell that died while
    /// its record was made or removed (swept), or whose files were tampered
    /// with.
    fn settle_damaged<T>(&self, layout: &Layout, error: CellError) -> Result<Option<T>, CellError> {
        // Whoever holds the registry may be making this very record.
        let Some(_registry) = Registry::try_lock(layout)? else { return Ok(None) };
        if !self.directory.exists()
            || self.path("spec.json").exists() && self.path("status.json").exists()
        {
            return Ok(None);
        }
        match self.try_lease() {
            Ok(Some(_lease)) => self.remove().map(|()| None),
            Ok(None) if self.path("lock").exists() => Ok(None),
            // Whoever made or removed it got no further than this.
            Ok(None) => self.remove().map(|()| None),
            Err(_) => Err(error),
        }
    }

    /// The lease, when nobody holds it and the record is not in removal.
    fn try_lease(&self) -> Result<Option<Lease>, CellError> {
        let file = match OpenOptions::new().write(true).open(self.path("lock")) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let failed = format!("cannot open {}", self.path("lock").display());
                return Err(CellError::host(failed)(error));
            }
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => {
                Err(CellError::host("cannot lock a cell's record")(error))
            }
        }
    }

    /// Whether the cell, which runs, is paused.
    pub fn is_paused(&self) -> bool {
        self.path(Self::PAUSED).exists()
    }

    /// What the checks of a cell in this state say; `None` where there are none. One that does not
    /// run is not well, as docker has it.
    pub fn health(&self, state: State) -> Option<Health> {
        let mut health: Health = self.read(Self::HEALTH).ok()?;
        if state == State::Exited {
            health.status = Condition::Unhealthy;
        }
        Some(health)
    }

    /// The caller is the cell's supervisor.
    pub(crate) fn write_health(&self, health: &Health) -> Result<(), CellError> {
        self.write(Self::HEALTH, health)
    }

    /// Where a cell that can start again has its private overlay.
    pub fn disk(&self) -> PathBuf {
        self.path(Self::DISK)
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// This record for a process whose working directory it is.
    pub fn from_within(&self) -> Self {
        let (id, events) = (self.id.clone(), self.events.clone());
        Self { id, directory: PathBuf::from("."), events }
    }

    /// This record for a process that will not see the state root.
    pub(crate) fn with_open_events(&self) -> Result<Self, CellError> {
        let events = self.events.opened();
        let events = events.map_err(CellError::host("cannot open the log of events"))?;
        Ok(Self { events, ..self.clone() })
    }

    /// Writes down for whoever follows the events that `action` happened to the cell.
    pub(crate) fn tell(&self, action: Action) {
        if let Ok(spec) = self.read_spec() {
            self.events.add(&self.event(action, &spec));
        }
    }

    fn event(&self, action: Action, spec: &CellSpec) -> Event {
        Event::new(action, self.id.clone(), spec.name.clone(), spec.image.clone())
    }

    /// The same of a step of the lifecycle: `status` is what stands in the record now.
    fn tell_step(&self, spec: &CellSpec, status: &Status) {
        let event = |action| self.event(action, spec);
        match status.state {
            State::Created => self.events.add(&event(Action::Create)),
            State::Running => {
                self.events.add(&Event { times: Some(status.times), ..event(Action::Start) });
            }
            State::Exited => {
                if status.out_of_memory {
                    self.events.add(&event(Action::Oom));
                }
                let (exit_code, reason) = (status.exit_code, status.reason.clone());
                self.events.add(&Event { exit_code, reason, ..event(Action::Exit) });
            }
        }
    }

    /// Replaces the account of the cell. The caller holds the lease.
    ///
    /// # Errors
    /// [`CellError::Step`] if the lifecycle has no step from what stands there to this one's
    /// state, and the host's.
    pub fn write_status(&self, status: &Status) -> Result<(), CellError> {
        // A new record, or a damaged one, has no state yet.
        let before = self.read::<Status>("status.json").ok().map(|before| before.state);
        if let Some(before) = before.filter(|before| !before.may_become(status.state)) {
            let (from, to) = (before.name(), status.state.name());
            return Err(CellError::Step { id: self.id.clone(), from, to });
        }
        match self.write("status.json", status) {
            Err(error) if status.state == State::Exited => {
                self.write_over_spare(status).map_err(|_| error)?;
            }
            written => written?,
        }
        if before != Some(status.state)
            && let Ok(spec) = self.read_spec()
        {
            self.tell_step(&spec, status);
        }
        Ok(())
    }

    fn write<T: Serialize>(&self, file: &'static str, value: &T) -> Result<(), CellError> {
        let text = self.text(file, value)?;
        let temporary = self.path(&format!(".{file}.new"));
        private::create(&temporary)
            .and_then(|mut new| new.write_all(&text))
            .and_then(|()| fs::rename(&temporary, self.path(file)))
            .inspect_err(|_| drop(fs::remove_file(&temporary)))
            .map_err(CellError::host(format!("cannot write {}", self.path(file).display())))
    }

    fn text<T: Serialize>(&self, file: &'static str, value: &T) -> Result<Vec<u8>, CellError> {
        serde_json::to_vec_pretty(value).map_err(|error| self.damaged(file, error))
    }

    /// Sees to it that there is room for the end.
    fn keep_spare(&self) -> Result<(), CellError> {
        let (spare, temporary) = (self.path(Self::SPARE), self.path(".spare.new"));
        if spare.exists() {
            return Ok(());
        }
        // A file with a hole in it would keep nothing.
        private::create(&temporary)
            .and_then(|mut new| new.write_all(&[b' '; Self::SPARE_BYTES]))
            .and_then(|()| fs::rename(&temporary, &spare))
            .inspect_err(|_| drop(fs::remove_file(&temporary)))
            .map_err(CellError::host(format!("cannot write {}", spare.display())))
    }

    /// Writes an end over the room that was kept for it, where there is no other.
    fn write_over_spare(&self, status: &Status) -> Result<(), CellError> {
        let mut text = self.text("status.json", status)?;
        if text.len() > Self::SPARE_BYTES {
            let reason = status.reason.as_ref().map(|reason| reason.chars().take(500).collect());
            text = self.text("status.json", &Status { reason, ..status.clone() })?;
        }
        let spare = self.path(Self::SPARE);
        // What is behind it are blanks, which JSON may have there.
        OpenOptions::new()
            .write(true)
            .open(&spare)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&spare, self.path("status.json")))
            .map_err(CellError::host(format!("cannot write {}", spare.display())))?;
        // What stood there before has made room.
        let _ = self.keep_spare();
        Ok(())
    }

    fn read<T: DeserializeOwned>(&self, file: &'static str) -> Result<T, CellError> {
        let text = fs::read(self.path(file)).map_err(|error| self.damaged(file, error))?;
        serde_json::from_slice(&text).map_err(|error| self.damaged(file, error))
    }

    /// Reads the specification, if it is of the version that this program knows.
    fn read_spec(&self) -> Result<CellSpec, CellError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = self.read("spec.json")?;
        if version != CellSpec::VERSION {
            let id = self.id.clone();
            return Err(CellError::Version { id, version, known: CellSpec::VERSION });
        }
        self.read("spec.json")
    }

    fn damaged(&self, file: &'static str, error: impl std::fmt::Display) -> CellError {
        CellError::Record { id: self.id.clone(), file, reason: error.to_string() }
    }

    /// Whether the cell's supervisor lives.
    pub fn is_held(&self) -> bool {
        matches!(self.try_lease(), Ok(None)) && self.path("lock").exists()
    }

    /// Waits until the cell's supervisor is gone.
    pub fn await_release(&self) {
        if let Ok(lock) = File::open(self.path("lock")) {
            // Released by the host's kernel, whatever becomes of the holder.
            let _ = lock.lock_shared();
        }
    }

    /// Deletes the record of a dead cell. `false`: its supervisor still lives.
    pub fn retire(&self) -> Result<bool, CellError> {
        match self.try_lease()? {
            Some(_lease) => {
                self.tell(Action::Remove);
                self.remove().map(|()| true)
            }
            None => Ok(!self.path("lock").exists()),
        }
    }

    /// The caller holds the lease, or knows that nobody does.
    pub(crate) fn remove(&self) -> Result<(), CellError> {
        exocell_vmm::jail::group::remove(&self.id);
        self.clear()?;
        gone(fs::remove_dir(&self.directory)).map_err(self.cannot_remove())
    }

    /// Deletes all files of the record, the lock last.
    pub(crate) fn clear(&self) -> Result<(), CellError> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) => return gone(Err(error)).map_err(self.cannot_remove()),
        };
        for entry in entries.flatten().filter(|entry| entry.file_name() != "lock") {
            gone(fs::remove_file(entry.path())).map_err(self.cannot_remove())?;
        }
        gone(fs::remove_file(self.path("lock"))).map_err(self.cannot_remove())
    }

    fn cannot_remove(&self) -> impl FnOnce(io::Error) -> CellError {
        CellError::host(format!("cannot remove the record of {}", self.id))
    }
}

/// Whether the fault is that this process may open no more, which says nothing of a record.
fn is_of_this_process(error: &CellError) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    match error {
        CellError::Host { source, .. } => {
            source.raw_os_error().is_some_and(|code| codes.contains(&code))
        }
        _ => false,
    }
}

/// What somebody else has removed is removed.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> CellSpec {
        serde_json::from_value(serde_json::json!({
            "version": 1, "id": "0123456789abcdef0123456789abcdef", "name": "c", "strength": "vm",
            "image": "i", "entrypoint": null, "command": [], "env": [], "working_dir": null,
            "user": null, "hostname": null, "tty": false, "stdin": false, "remove": false,
            "read_only": false, "capabilities": "{\"version\": 1}", "created_ms": 0,
        }))
        .unwrap()
    }

    fn status(state: State) -> Status {
        Status { state, ..Status::default() }
    }

    #[test]
    fn a_record_takes_only_the_steps_of_the_lifecycle() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path().to_owned());
        let (record, lease) = Record::create(&layout, &spec()).unwrap();
        for state in [State::Created, State::Running, State::Running, State::Exited] {
            record.write_status(&status(state)).unwrap();
        }
        let refused = record.write_status(&status(State::Running)).unwrap_err();
        assert!(matches!(refused, CellError::Step { from: "exited", to: "running", .. }));
        let (_, _, now) = Record::find(&layout, "c").unwrap();
        assert_eq!(now.state, State::Exited);
        // An id is one cell's, whatever another is called.
        let other = CellSpec { id: "f".repeat(32), name: spec().id, ..spec() };
        let _other = Record::create(&layout, &other).unwrap();
        assert_eq!(Record::find(&layout, &spec().id).unwrap().0.id, spec().id);
        drop(lease);
        let (record, _lease) = Record::create(&layout, &spec()).unwrap();
        record.write_status(&status(State::Running)).unwrap();
        assert!(record.write_status(&status(State::Created)).is_err());
    }

    /// Its last run would be taken for its end.
    #[test]
    fn nobody_sees_a_cell_that_begins_again_as_ended_in_that_run() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path().to_owned());
        let (record, mut lease) = Record::create(&layout, &spec()).unwrap();
        std::thread::scope(|scope| {
            let runs = scope.spawn(|| {
                for run in 1..=300 {
                    // Ends of odd runs are told from those of even ones.
                    let exit_code = Some((run - 1) as u8 % 2);
                    record.write_status(&Status { exit_code, ..status(State::Exited) }).unwrap();
                    drop(lease);
                    lease = again(&layout, run);
                }
                lease
            });
            while !runs.is_finished() {
                let (spec, now) = record.look(&layout).unwrap().unwrap();
                // The status is that of a later run where this thread stood still for a while.
                if now.state == State::Exited
                    && record.read_spec().unwrap().restarts == spec.restarts
                {
                    assert_eq!(now.exit_code, Some(spec.restarts as u8 % 2));
                }
            }
        });
    }

    fn again(layout: &Layout, restarts: u32) -> Lease {
        let spec = CellSpec { restarts, ..spec() };
        loop {
            // Who looks holds the record for a moment.
            match Record::create(layout, &spec) {
                Ok((_, lease)) => return lease,
                Err(CellError::WrongState { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// What cannot be written here is a folder where the file should be: root may write all else.
    #[test]
    fn an_end_that_cannot_be_written_is_found_and_harms_no_other_record() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path().to_owned());
        let (record, lease) = Record::create(&layout, &spec()).unwrap();
        record.write_status(&status(State::Running)).unwrap();
        let other = CellSpec { id: "f".repeat(32), name: "other".into(), ..spec() };
        let (other, _other) = Record::create(&layout, &other).unwrap();
        drop(lease);
        fs::create_dir(record.path(".status.json.new")).unwrap();
        fs::remove_file(record.path(Record::SPARE)).unwrap();
        for _ in 0..2 {
            let all = Record::all(&layout).unwrap();
            assert_eq!(all.len(), 2);
            let (_, _, found) = Record::find(&layout, "c").unwrap();
            assert_eq!((found.state, found.exit_code), (State::Exited, Some(137)));
        }
        assert_eq!(record.read::<Status>("status.json").unwrap().state, State::Running);
        // With the room that a record keeps, it is written after all, more than once.
        for code in [3, 4] {
            record.keep_spare().unwrap();
            let end = Status { exit_code: Some(code), ..status(State::Exited) };
            record.write_status(&end).unwrap();
            let (_, _, found) = Record::find(&layout, "c").unwrap();
            assert_eq!((found.state, found.exit_code), (State::Exited, Some(code)));
            assert!(record.path(Record::SPARE).exists());
        }
        let long = Status { reason: Some("x".repeat(9000)), ..status(State::Exited) };
        record.write_status(&long).unwrap();
        assert_eq!(Record::all(&layout).unwrap().len(), 2);
        // A record that cannot even be opened is nobody else's trouble.
        fs::remove_file(record.path("lock")).unwrap();
        std::os::unix::fs::symlink("lock", record.path("lock")).unwrap();
        fs::remove_file(record.path("spec.json")).unwrap();
        let all = Record::all(&layout).unwrap();
        assert_eq!(all.iter().map(|(one, _, _)| &one.id).collect::<Vec<_>>(), [&other.id]);
        assert!(!matches!(Record::find(&layout, &record.id), Err(CellError::NoSuchCell(_))));
    }

    #[test]
    fn a_cell_of_another_version_is_named_and_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path().to_owned());
        let (record, lease) = Record::create(&layout, &spec()).unwrap();
        drop(lease);
        let later = CellSpec { version: CellSpec::VERSION + 1, ..spec() };
        record.write_spec(&later).unwrap();
        assert!(Record::all(&layout).unwrap().is_empty());
        let told = Record::find(&layout, &later.id).unwrap_err().to_string();
        assert!(told.contains("another version") && told.contains("version 2"), "{told}");
        assert!(matches!(Record::find(&layout, "other"), Err(CellError::NoSuchCell(_))));
        assert!(record.path("spec.json").exists());
    }
}
