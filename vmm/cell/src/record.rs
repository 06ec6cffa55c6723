//! The record of a cell on disk, and the truth about it after any crash.
//!
//! ```text
//!            supervisor ready           program ended, stop, deadline
//!  created ───────────────────> running ─────────────────────────────> exited
//!     │                            │                                     │
//!     └── set-up failed ───────────┴── supervisor killed (lock is free) ─┤
//!                                                                        v
//!      ┌──────────── begun again (a container's start) ─────────────────┤
//!      v                                          removed (--rm, exocell rm)
//!   created
//! ```
//! `created` and `running` are claims of the supervisor; they hold only while
//! it holds the record's lock. Whoever finds the lock free writes `exited`.
//! Only the holder of that lock changes or removes the record, and the lock's
//! file goes last: who finds none has found a record in removal.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::control::{Client, ControlRequest};
use crate::supervisor::fault;
use crate::{CellError, CellSpec, Layout};
use exocell_images::private;

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

    /// Whether the lifecycle allows this step.
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Created, Self::Running | Self::Exited)
            | (Self::Running, Self::Exited)
            | (Self::Exited, Self::Created) => true,
            (Self::Created, Self::Created)
            | (Self::Running, Self::Created | Self::Running)
            | (Self::Exited, Self::Running | Self::Exited) => false,
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
    pub exit_code: Option<u8>,
    /// Why it ended, when that was not its program's own end.
    pub reason: Option<String>,
    /// Whether the guest's kernel ended a process of the cell for lack of memory.
    #[serde(default)]
    pub out_of_memory: bool,
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

/// How the start went, in microseconds since the request.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct StartTimes {
    pub jailed_us: u64,
    pub kernel_started_us: u64,
    pub guest_ready_us: u64,
    pub program_started_us: u64,
    /// Guest kernel start to init, by the guest's own clock.
    pub guest_init_us: u64,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            state: State::Created,
            supervisor_pid: 0,
            guest_kernel_inner_pid: 0,
            started_ms: 0,
            finished_ms: 0,
            exit_code: None,
            reason: None,
            out_of_memory: false,
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

/// One cell's directory.
#[derive(Debug, Clone)]
pub struct Record {
    pub id: String,
    directory: PathBuf,
}

impl Record {
    /// A file that a running cell has while it is paused.
    pub const PAUSED: &str = "paused";

    /// Makes the directory of a new cell and takes its lease. The record of a
    /// cell with that id that has ended becomes that of the new one, its log with it.
    pub fn create(layout: &Layout, spec: &CellSpec) -> Result<(Self, Lease), CellError> {
        let record = Self::at(layout, &spec.id);
        let _registry = Registry::lock(layout)?;
        let others = Self::all(layout)?;
        if others.iter().any(|(r, known, _)| known.name == spec.name && r.id != spec.id) {
            return Err(CellError::NameTaken(spec.name.clone()));
        }
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
        Ok((self.clone(), lease))
    }

    fn begin_again(&self, spec: &CellSpec) -> Result<(Self, Lease), CellError> {
        let alive = || CellError::WrongState {
            id: spec.id[..12].to_owned(),
            state: State::Running.name(),
            remedy: "wait for its end",
        };
        let lease = self.try_lease()?.ok_or_else(alive)?;
        for file in ["control.sock", Self::PAUSED, fault::FILE] {
            // Of a supervisor that was killed; mostly there are none.
            let _ = fs::remove_file(self.path(file));
        }
        self.write_spec(spec)?;
        self.write_status(&Status::default())?;
        Ok((self.clone(), lease))
    }

    fn at(layout: &Layout, id: &str) -> Self {
        Self { id: id.to_owned(), directory: layout.cells().join(id) }
    }

    /// Whether there is a record of cell `id`, in whatever state.
    pub fn exists(layout: &Layout, id: &str) -> bool {
        Self::at(layout, id).directory.exists()
    }

    /// Every record, oldest first; dead cells are settled on the way.
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
            if let Some((spec, status)) = record.settle(layout)? {
                found.push((record, spec, status));
            }
        }
        found.sort_by_key(|(_, spec, _)| spec.created_ms);
        Ok(found)
    }

    /// The record whose name, id or unambiguous id prefix is `key`.
    pub fn find(layout: &Layout, key: &str) -> Result<(Self, CellSpec, Status), CellError> {
        let mut all = Self::all(layout)?;
        if let Some(exact) = all.iter().position(|(r, spec, _)| r.id == key || spec.name == key) {
            return Ok(all.swap_remove(exact));
        }
        all.retain(|(record, _, _)| !key.is_empty() && record.id.starts_with(key));
        match all.len() {
            1 => Ok(all.remove(0)),
            _ => Err(CellError::NoSuchCell(key.to_owned())),
        }
    }

    /// Gives cell `id` another name.
    pub fn rename(layout: &Layout, id: &str, name: &str) -> Result<(), CellError> {
        CellSpec::check_name(name)?;
        let _registry = Registry::lock(layout)?;
        if Self::all(layout)?.iter().any(|(_, known, _)| known.name == name) {
            return Err(CellError::NameTaken(name.to_owned()));
        }
        let (record, spec, _) = Self::find(layout, id)?;
        match record.try_lease()? {
            Some(_lease) => record.write_name(spec, name),
            None => {
                let request = ControlRequest::Rename { name: name.to_owned() };
                Client::connect(&record)?.ask(&request).map(drop)
            }
        }
    }

    /// The caller holds the lease.
    pub(crate) fn write_name(&self, spec: CellSpec, name: &str) -> Result<(), CellError> {
        self.write_spec(&CellSpec { name: name.to_owned(), ..spec })
    }

    /// The caller holds the lease.
    pub(crate) fn write_spec(&self, spec: &CellSpec) -> Result<(), CellError> {
        self.write("spec.json", spec)
    }

    /// Reads the record; where its supervisor is dead, writes that down first
    /// and clears what it left. `None`: the record is gone.
    fn settle(&self, layout: &Layout) -> Result<Option<(CellSpec, Status)>, CellError> {
        let (spec, mut status) = match (self.read("spec.json"), self.read::<Status>("status.json"))
        {
            (Ok(spec), Ok(status)) => (spec, status),
            (Err(error), _) | (_, Err(error)) => return self.settle_damaged(layout, error),
        };
        let spec: CellSpec = spec;
        if status.state == State::Exited && !spec.remove {
            return Ok(Some((spec, status)));
        }
        let Some(_lease) = self.try_lease()? else { return Ok(Some((spec, status))) };
        if spec.remove {
            self.remove()?;
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
        self.write_status(&status)?;
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

    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// This record for a process whose working directory it is.
    pub fn from_within(&self) -> Self {
        Self { id: self.id.clone(), directory: PathBuf::from(".") }
    }

    pub fn write_status(&self, status: &Status) -> Result<(), CellError> {
        self.write("status.json", status)
    }

    fn write<T: Serialize>(&self, file: &'static str, value: &T) -> Result<(), CellError> {
        let temporary = self.path(&format!(".{file}.new"));
        let text = serde_json::to_vec_pretty(value).map_err(|error| self.damaged(file, error))?;
        private::create(&temporary)
            .and_then(|mut new| new.write_all(&text))
            .and_then(|()| fs::rename(&temporary, self.path(file)))
            .map_err(CellError::host(format!("cannot write {}", self.path(file).display())))
    }

    fn read<T: DeserializeOwned>(&self, file: &'static str) -> Result<T, CellError> {
        let text = fs::read(self.path(file)).map_err(|error| self.damaged(file, error))?;
        serde_json::from_slice(&text).map_err(|error| self.damaged(file, error))
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
            Some(_lease) => self.remove().map(|()| true),
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

/// What somebody else has removed is removed.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
