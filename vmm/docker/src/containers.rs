//! Containers on disk. A container is a cell once it was started, and the
//! cell's record is the truth about it. What a record has no place for (and
//! all of a container that was not started) is in a file of the server's own:
//!
//! ```text
//! ROOT/docker/containers/ID.json   what was asked for; replaced by rename
//! ROOT/docker/disks/ID.ext4        its disk, which outlives its cells
//! ROOT/docker/volumes/NAME         a volume's files
//! ROOT/docker/volume-notes/NAME.json  its labels
//! ROOT/docker/lock                 held by the server; says where it listens
//! ROOT/docker/cells.sock           where cells come that have the server's socket
//! ```
//! A file whose container was `started` and has no record any more is the
//! file of a container that is gone; whoever finds it removes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use exocell_cell::granted::{Links, Location};
use exocell_cell::health::Health;
use exocell_cell::images::{Store, private};
use exocell_cell::policy::Policy;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, CellSpec, Layout, Record, State, Status, Strength, plan};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::admit::MountPoint;
use crate::error::{ApiError, ApiResult};
use crate::notes::Notes;
use crate::ports;
use crate::shelf::{self, Held, Shelf};
use crate::wire::{Config, Names};

/// Counts what is written, for the names of files that are not whole yet.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// Volumes of one server.
const VOLUMES_MAX: usize = 1024;

/// What is kept of a container.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Container {
    pub version: u32,
    /// The cell that it is or will be.
    pub spec: CellSpec,
    /// Under `Config`, merged with the image's.
    pub config: Config,
    /// `HostConfig` as the client sent it.
    pub host: Value,
    pub image_id: String,
    pub mounts: Vec<MountPoint>,
    pub warnings: Vec<String>,
    /// Rows and columns of its terminal.
    pub tty_size: Option<(u16, u16)>,
    /// What its client notes of the default network, for a driver of its own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Whether there is, or was, a cell.
    pub started: bool,
    /// The cell that had it made, behind those that had that made; none of an operator's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made_by: Vec<String>,
    /// Whether it was made without the API: `config` is what it looks like then.
    #[serde(skip)]
    pub is_cell: bool,
    /// Its program and arguments, where a part of them is the image's.
    #[serde(skip)]
    pub words: Option<Vec<String>>,
}

impl Container {
    pub const VERSION: u32 = 1;

    /// The container that a cell looks like which was not made through the API.
    pub fn of_cell(spec: CellSpec, shelf: &Shelf) -> Self {
        let config = Config {
            hostname: spec.hostname.clone().unwrap_or_else(|| short(&spec.id).to_owned()),
            tty: spec.tty,
            open_stdin: spec.stdin,
            env: plan::environment(&[], &spec.env, spec.tty),
            image: spec.image.clone(),
            working_dir: spec.working_dir.clone().unwrap_or_else(|| "/".to_owned()),
            stop_timeout: spec.stop_seconds.and_then(|seconds| i64::try_from(seconds).ok()),
            ..Config::of_spec(&spec)
        };
        Self {
            version: Self::VERSION,
            host: host_of(&spec),
            image_id: spec.image_id.clone().unwrap_or_default(),
            mounts: shelf.mounts_of(&spec),
            warnings: Vec::new(),
            tty_size: None,
            options: BTreeMap::new(),
            started: true,
            made_by: Vec::new(),
            is_cell: true,
            words: None,
            config,
            spec,
        }
    }

    pub fn id(&self) -> &str {
        &self.spec.id
    }

    /// Whether it can go on after its end.
    ///
    /// # Errors
    /// 409 when its disk ended with it: it was not made through the API, or removes
    /// itself.
    pub fn goes_on(&self) -> ApiResult<()> {
        match self.spec.can_start_again() {
            Ok(()) => Ok(()),
            Err(_) => Err(ApiError::conflict(format!(
                "container {} is not running, and its disk ended with it; make a new one (docker run)",
                self.id()
            ))),
        }
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Takes the id of the warm cell that it is to be.
    pub fn become_cell(&mut self, id: String) {
        if self.spec.hostname.is_none() {
            short(&id).clone_into(&mut self.config.hostname);
        }
        self.spec.id = id;
    }
}

/// What `HostConfig` shows of a cell that was not made through the API.
fn host_of(spec: &CellSpec) -> Value {
    let caps =
        CapabilitySet::parse(&spec.changes.applied(&spec.capabilities).to_string(), Path::new("/"));
    let caps = caps.ok();
    let caps = caps.as_ref();
    let mode = match (&spec.within, spec.networks.first()) {
        (Some(within), _) => format!("container:{}", within.cell),
        (None, Some(own)) => own.network.clone(),
        (None, None) if caps.is_some_and(|caps| caps.network().is_some()) => "bridge".to_owned(),
        (None, None) => "none".to_owned(),
    };
    let quota = spec
        .settings
        .cpu
        .map(|time| time.quota_us.saturating_mul(1_000_000_000) / time.period_us.max(1));
    json!({
        "NetworkMode": mode, "AutoRemove": spec.remove, "Memory": caps.and_then(CapabilitySet::memory_bytes),
        "NanoCpus": quota, "PidsLimit": caps.and_then(CapabilitySet::process_max), "ReadonlyRootfs": spec.read_only,
        "Privileged": spec.settings.privileged, "PortBindings": ports::settings(&spec.publish, &Names::new()),
        "CapAdd": spec.settings.cap_add, "CapDrop": spec.settings.cap_drop,
        "LogConfig": { "Type": if spec.keeps_no_log { "none" } else { "json-file" }, "Config": {} },
        "RestartPolicy": restart_policy(spec.restart),
    })
}

/// As `HostConfig` shows it.
pub fn restart_policy(policy: Policy) -> Value {
    json!({ "Name": policy.name(), "MaximumRetryCount": policy.retries() })
}

/// How much of an id clients show.
const SHORT_DIGITS: usize = 12;

/// The first 12 digits of an id, as clients show it.
pub fn short(id: &str) -> &str {
    id.get(..SHORT_DIGITS).unwrap_or(id)
}

/// A container and its cell, if it has one.
#[derive(Debug, Clone)]
pub struct Seen {
    pub container: Container,
    pub cell: Option<(Record, Status)>,
}

impl Seen {
    pub fn id(&self) -> &str {
        self.container.id()
    }

    /// Whether its program runs or is about to.
    pub fn is_running(&self) -> bool {
        self.status().is_some_and(|status| status.state != State::Exited)
    }

    pub fn status(&self) -> Option<&Status> {
        self.cell.as_ref().map(|(_, status)| status)
    }

    /// Whether it has ended and is about to start again by its policy.
    pub fn is_restarting(&self) -> bool {
        let spec = &self.container.spec;
        self.cell.as_ref().is_some_and(|(record, status)| record.is_restarting(spec, status))
    }

    /// What its disk takes on the host's.
    pub fn disk_bytes(&self) -> u64 {
        let cell = self.cell.as_ref().map(|(record, _)| record.disk());
        let disk = self.container.spec.disk.clone().or(cell);
        let found = disk.and_then(|disk| fs::metadata(disk).ok());
        found.map_or(0, |found| found.blocks().saturating_mul(512))
    }

    pub fn is_paused(&self) -> bool {
        self.is_running() && self.cell.as_ref().is_some_and(|(record, _)| record.is_paused())
    }

    /// What its checks say, if there are any.
    pub fn health(&self) -> Option<Health> {
        let (record, status) = self.cell.as_ref()?;
        record.health(status.state)
    }

    /// As [`Seen::running`], for what needs the guest's answer.
    ///
    /// # Errors
    /// 409 when it is paused, too.
    pub fn awake(&self) -> ApiResult<(&Record, &Status)> {
        if self.is_paused() {
            return Err(ApiError::conflict(format!(
                "Container {} is paused, unpause the container before exec",
                self.id()
            )));
        }
        self.running()
    }

    /// The API's word for where it stands.
    pub fn state(&self) -> &'static str {
        match self.status().map(|status| status.state) {
            None => "created",
            Some(State::Exited) if self.is_restarting() => "restarting",
            Some(State::Exited) => "exited",
            Some(State::Created | State::Running) if self.is_paused() => "paused",
            Some(State::Created | State::Running) => "running",
        }
    }

    /// The cell's record.
    ///
    /// # Errors
    /// 409 when it does not run.
    pub fn running(&self) -> ApiResult<(&Record, &Status)> {
        match &self.cell {
            Some((record, status)) if status.state != State::Exited => Ok((record, status)),
            _ if self.is_restarting() => Err(ApiError::conflict(format!(
                "Container {} is restarting, wait until the container is running",
                self.id()
            ))),
            _ => Err(ApiError::conflict(format!("container {} is not running", self.id()))),
        }
    }
}

/// The containers of one state root.
#[derive(Debug, Clone)]
pub struct Containers {
    layout: Layout,
}

impl Containers {
    /// Those of a state root that its server has opened.
    pub fn of(layout: &Layout) -> Self {
        Self { layout: layout.clone() }
    }

    /// Opens them for the one server of a state root: makes their directories
    /// and removes what a server before has left half written.
    pub fn open(layout: &Layout) -> io::Result<Self> {
        let containers = Self::of(layout);
        for folder in [containers.directory(), containers.volumes(), containers.disks()] {
            private::folder(&folder)?;
        }
        for entry in fs::read_dir(containers.directory())?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(".new") {
                fs::remove_file(entry.path())?;
            }
        }
        // Archives that an earlier version had taken, in files with names.
        for entry in fs::read_dir(Self::root(layout))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(".tmp") {
                fs::remove_file(entry.path())?;
            }
        }
        for entry in fs::read_dir(containers.disks())?.flatten() {
            let known = |id: &str| containers.path(id).exists();
            let path = entry.path();
            if !path.file_stem().and_then(|id| id.to_str()).is_some_and(known) {
                fs::remove_file(path)?;
            }
        }
        containers.sweep_volumes();
        Ok(containers)
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the server's own files lie.
    pub fn root(layout: &Layout) -> PathBuf {
        shelf::root(layout)
    }

    fn directory(&self) -> PathBuf {
        self.layout.containers()
    }

    pub fn shelf(&self) -> Shelf {
        Shelf::of(&self.layout)
    }

    pub fn volumes(&self) -> PathBuf {
        self.shelf().folder()
    }

    fn disks(&self) -> PathBuf {
        Self::root(&self.layout).join("disks")
    }

    /// Where the disk of container `id` lies.
    pub fn disk(&self, id: &str) -> PathBuf {
        self.disks().join(format!("{id}.ext4"))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.directory().join(format!("{id}.json"))
    }

    /// Whether `id` is a container of which something is kept.
    pub fn has_file(&self, id: &str) -> bool {
        // What cannot be looked at is to be read, and that says why not.
        self.path(id).try_exists().unwrap_or(true)
    }

    /// Who had the container `id` made; none where that is not one, or an operator's.
    pub fn maker_of(&self, id: &str) -> Vec<String> {
        let text = fs::read(self.path(id)).unwrap_or_default();
        let found = serde_json::from_slice::<Container>(&text);
        found.map_or_else(|_| Vec::new(), |container| container.made_by)
    }

    /// Writes a container down, new or changed.
    pub fn write(&self, container: &Container) -> ApiResult<()> {
        let path = self.path(container.id());
        // Of a name of its own: another call may be writing the same container.
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let new = path.with_extension(format!("{number}.new"));
        let text = serde_json::to_vec_pretty(container)
            .map_err(|error| ApiError::internal(format!("cannot write a container: {error}")))?;
        let written = private::create(&new)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| {
            ApiError::internal(format!("cannot write {}: {error}", path.display()))
        })
    }

    /// Forgets what is kept of a container. One that is gone already is fine.
    pub fn forget(&self, id: &str) -> ApiResult<()> {
        // The disk last: what is left of a kill in between is swept by the next server.
        for path in [self.path(id), self.disk(id)] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(ApiError::internal(format!(
                        "cannot remove the container {id}: {error}"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the file of container `id`.
    pub fn read(&self, id: &str) -> Result<Container, CellError> {
        let path = self.path(id);
        let what = || format!("cannot read {}", path.display());
        let text = fs::read(&path).map_err(CellError::host(what()))?;
        serde_json::from_slice(&text)
            .map_err(|error| CellError::host(what())(io::Error::other(error)))
    }

    /// Every container, oldest first: files of the server's and cells beside.
    pub fn all(&self) -> ApiResult<Vec<Seen>> {
        // Files first: a cell that is launched in between has one already.
        let mut files = self.files()?;
        let (mut found, mut gone) = (Vec::new(), Vec::new());
        let shelf = self.shelf();
        // A cell that waits in a pool is nobody's container yet, and one without a
        // program shows another one's files.
        let mut cells = Record::all(&self.layout)?;
        cells.retain(|(_, spec, _)| spec.warm.is_none() && !spec.idle);
        for (record, spec, status) in cells {
            let container = match files.remove(&record.id) {
                // It may have been given another name or policy beside its server.
                Some(mut container) => {
                    container.spec.name = spec.name;
                    container.spec.restarts = spec.restarts;
                    // What was revoked of it, and which networks it was taken out of, is so for its
                    // next start, too.
                    container.spec.changes = spec.changes;
                    container.spec.networks = spec.networks;
                    if container.spec.restart != spec.restart {
                        container.host["RestartPolicy"] = restart_policy(spec.restart);
                        container.spec.restart = spec.restart;
                    }
                    container
                }
                None => {
                    let words = self.words(&spec);
                    Container { words, ..Container::of_cell(spec, &shelf) }
                }
            };
            found.push(Seen { container, cell: Some((record, status)) });
        }
        for container in files.into_values() {
            if !container.started {
                found.push(Seen { container, cell: None });
            } else if !Record::exists(&self.layout, container.id()) {
                self.forget(container.id())?;
                gone.push(container);
            }
        }
        let of_gone = gone.iter().filter(|gone| gone.spec.remove).flat_map(|gone| &gone.mounts);
        let of_gone: BTreeSet<&str> = of_gone.filter_map(|own| own.volume.as_deref()).collect();
        for name in of_gone {
            if shelf.notes(name).ends_with_owner {
                // What is left is swept by the next server.
                let _ = self.discard_volume(name, Duration::ZERO);
            }
        }
        found.sort_by_key(|seen| seen.container.spec.created_ms);
        Ok(found)
    }

    /// What a cell runs of which its image says a part.
    fn words(&self, spec: &CellSpec) -> Option<Vec<String>> {
        if spec.strength != Strength::Vm || spec.entrypoint.is_some() {
            return None;
        }
        let image = Store::open(self.layout.images()).ok()?.resolve(spec.image_name()).ok()?;
        Some(plan::words(spec, &image.config))
    }

    fn files(&self) -> ApiResult<BTreeMap<String, Container>> {
        let entries = match fs::read_dir(self.directory()) {
            // There never was a server.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries.map_err(|error| {
                ApiError::internal(format!("cannot list the containers: {error}"))
            })?,
        };
        let mut found = BTreeMap::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")) else {
                continue;
            };
            // One that is removed at this moment is no container any more.
            if let Ok(container) = self.read(id) {
                found.insert(id.to_owned(), container);
            }
        }
        Ok(found)
    }

    /// The cell of container `id` as it stands.
    pub fn look(&self, id: &str) -> ApiResult<Option<(Record, CellSpec, Status)>> {
        let record = Record::at(&self.layout, id);
        Ok(record.look(&self.layout)?.map(|(spec, status)| (record, spec, status)))
    }

    /// The container whose name, id or unambiguous id prefix is `key`.
    pub fn find(&self, key: &str) -> ApiResult<Seen> {
        let key = key.strip_prefix('/').unwrap_or(key);
        let mut all = self.all()?;
        // An id before a name: a name may be what another's id is.
        let exact = all.iter().position(|seen| seen.id() == key);
        let by_name = || all.iter().position(|seen| seen.container.name() == key);
        if let Some(at) = exact.or_else(by_name) {
            return Ok(all.swap_remove(at));
        }
        all.retain(|seen| !key.is_empty() && seen.id().starts_with(key));
        match all.len() {
            0 => Err(ApiError::no_such_container(key)),
            1 => Ok(all.remove(0)),
            _ => Err(ApiError::bad_request(format!(
                "multiple IDs found with provided prefix: {key}"
            ))),
        }
    }

    /// # Errors
    /// 409 when a container or cell is called `name`, in words that clients
    /// know.
    pub fn check_free(&self, name: &str) -> ApiResult<()> {
        let all = self.all()?;
        // Who names it by the beginning of its id, as lists show it, is to find that one.
        let begins_id = |id: &str| name.len() >= SHORT_DIGITS && id.starts_with(name);
        if let Some(seen) = all.iter().find(|seen| begins_id(seen.id())) {
            return Err(ApiError::conflict(format!(
                "Conflict. The container name \"/{name}\" is how the id of container \"{}\" begins; \
                 choose another name.",
                seen.container.name()
            )));
        }
        match all.iter().find(|seen| seen.container.name() == name) {
            None => Ok(()),
            Some(seen) => Err(ApiError::conflict(format!(
                "Conflict. The container name \"/{name}\" is already in use by container \"{}\". \
                 You have to remove (or rename) that container to be able to reuse that name.",
                seen.id()
            ))),
        }
    }

    /// # Errors
    /// 409 where the volumes called `names` are not there, and would be too many with the others.
    pub fn check_volumes(&self, names: &[&str]) -> ApiResult<()> {
        let volumes = self.volumes();
        let is_new = |name: &&&str| !volumes.join(name).exists();
        let new: BTreeSet<&&str> = names.iter().filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        let there = fs::read_dir(&volumes).map_or(0, Iterator::count);
        match there + new.len() > VOLUMES_MAX {
            false => Ok(()),
            true => Err(ApiError::conflict(format!(
                "there are {there} volumes, and may be {VOLUMES_MAX}; remove some (docker volume rm)"
            ))),
        }
    }

    /// Makes the folders of a container that are to be made, and finds all of them, once: they stay
    /// what they are then, whatever takes their places. Its volumes are there until what this
    /// returns is dropped, by when the container is to be written down.
    pub fn prepare(&self, container: &mut Container) -> ApiResult<Vec<Held>> {
        let mut held = Vec::new();
        if !container.spec.locations.is_empty() {
            return Ok(held);
        }
        let mounts = &container.mounts;
        let volumes: Vec<&str> = mounts.iter().filter_map(|m| m.volume.as_deref()).collect();
        self.check_volumes(&volumes)?;
        let caps = CapabilitySet::parse(&container.spec.capabilities, Path::new("/"));
        let caps = caps.map_err(CellError::from)?;
        let shelf = self.shelf();
        for mount in mounts {
            let Some(name) = mount.volume.as_deref() else { continue };
            let notes = match mount.is_anonymous {
                true => Notes::of(&container.spec.id, container.spec.remove),
                false => Notes::new(mount.labels.clone(), false),
            };
            let notes = Notes { made_by: container.made_by.clone(), ..notes };
            held.push(shelf.make(name, &notes).map_err(|error| {
                ApiError::internal(format!("cannot make the volume {name}: {error}"))
            })?);
        }
        let links = Links::of(&self.layout, &caps);
        let found = mounts.iter().map(|mount| prepare(&links, &shelf, mount));
        container.spec.locations = found.collect::<ApiResult<_>>()?;
        Ok(held)
    }
}

fn prepare(links: &Links<'_>, shelf: &Shelf, mount: &MountPoint) -> ApiResult<Location> {
    let shown = mount.source.display();
    if let (Some(name), false) = (&mount.volume, mount.subpath.is_empty()) {
        let below = Path::new(&mount.subpath);
        return links.locate_within(&mount.source, &shelf.path(name), below).map_err(|error| {
            let subpath = &mount.subpath;
            ApiError::bad_request(format!("cannot mount {subpath} of the volume {name}: {error}"))
        });
    }
    // Said now: a start that fails is no answer to who asked for the container.
    let can_be = |kind: fs::FileType| kind.is_dir() || kind.is_file() || kind.is_socket();
    if fs::metadata(&mount.source).is_ok_and(|there| !can_be(there.file_type())) {
        return Err(ApiError::unsupported(
            format!("the bind mount of {shown}, which is no folder, regular file or socket,"),
            "mount the folder that it lies in",
        ));
    }
    links.locate(&mount.source, mount.make).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ApiError::bad_request(format!(
            "invalid mount config: bind source path does not exist: {shown} ({error})"
        )),
        _ => ApiError::bad_request(format!("invalid mount config: {shown}: {error}")),
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::reach;
    use std::os::unix::fs::symlink;

    /// The containers of a fresh state root in `root`, one of them `name`, which was never started.
    pub fn with_one(root: &Path, name: &str) -> Containers {
        let layout = Layout::new(root);
        private::folder(&Containers::root(&layout)).unwrap();
        let containers = Containers::open(&layout).unwrap();
        let bare = reach::bare("an image", &json!({ "version": 1 })).unwrap();
        let spec =
            CellSpec { name: name.to_owned(), stdin: true, idle: false, remove: false, ..bare };
        let container =
            Container { started: false, ..Container::of_cell(spec, &containers.shelf()) };
        containers.write(&container).unwrap();
        containers
    }

    #[test]
    fn a_container_that_was_not_started_has_its_name() {
        let root = tempfile::tempdir().unwrap();
        let containers = with_one(root.path(), "quiet");
        let own = containers.find("quiet").unwrap().container.spec;
        let id = "0123456789abcdef0123456789abcdef".to_owned();
        let other = CellSpec { id, ..own.clone() };
        let make = |spec: &CellSpec| Record::create(containers.layout(), spec).map(drop);
        assert!(matches!(make(&other), Err(CellError::NameTaken(name)) if name == "quiet"));
        make(&CellSpec { name: "loud".to_owned(), ..other }).unwrap();
        assert!(Record::rename(containers.layout(), "loud", "quiet").is_err());
        assert_eq!(containers.check_free("loud").unwrap_err().status.as_u16(), 409);
        // It is the cell of that name itself.
        make(&own).unwrap();
    }

    #[test]
    fn no_name_is_how_anothers_id_begins() {
        let root = tempfile::tempdir().unwrap();
        let containers = with_one(root.path(), "quiet");
        let id = containers.find("quiet").unwrap().id().to_owned();
        for name in [short(&id), &id[..20], &id] {
            assert_eq!(containers.check_free(name).unwrap_err().status.as_u16(), 409, "{name}");
        }
        // Short words are how some id or other begins.
        containers.check_free(&id[..4]).unwrap();
    }

    #[test]
    fn one_container_may_be_written_by_several_at_once() {
        let root = tempfile::tempdir().unwrap();
        let containers = with_one(root.path(), "quiet");
        let container = containers.find("quiet").unwrap().container;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| containers.write(&container).unwrap()));
            }
        });
        assert_eq!(fs::read_dir(containers.directory()).unwrap().count(), 1);
    }

    /// One with `source` as a folder that it may write, made where `make` says so.
    fn container(source: &Path, make: bool) -> Container {
        let folder = json!({ "host": source, "guest": "/d", "rights": ["read", "write"] });
        let table = json!({ "version": 1, "folder": [folder] }).to_string();
        let spec = serde_json::from_value(json!({
            "version": 1, "id": "0123456789abcdef", "name": "c", "strength": "vm", "image": "i",
            "entrypoint": null, "command": [], "env": [], "working_dir": null, "user": null,
            "hostname": null, "tty": false, "stdin": false, "remove": false, "read_only": false,
            "capabilities": table, "created_ms": 0,
        }));
        let shelf = Shelf::of(&Layout::new(source));
        let mut container = Container::of_cell(spec.unwrap(), &shelf);
        let (source, target) = (source.to_owned(), "/d".to_owned());
        container.mounts = vec![MountPoint {
            volume: None,
            source,
            target,
            writable: true,
            make,
            ..MountPoint::default()
        }];
        container
    }

    #[test]
    fn folders_are_made_and_found_once() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let containers = Containers::open(&Layout::new(base.join("root"))).unwrap();
        let (source, host) = (base.join("app/data"), base.join("host"));
        fs::create_dir(&host).unwrap();
        let status = |source: &Path| {
            let refused = containers.prepare(&mut container(source, false));
            refused.unwrap_err().status.as_u16()
        };
        assert_eq!(status(&source), 400);
        fs::write(base.join("file"), "").unwrap();
        containers.prepare(&mut container(&base.join("file"), false)).unwrap();
        let mut container = container(&source, true);
        containers.prepare(&mut container).unwrap();
        assert!(source.is_dir());
        let found = container.spec.locations.clone();
        assert_eq!(found.len(), 1);
        // What a cell puts in its place, the next start neither makes nor looks at.
        fs::remove_dir(&source).unwrap();
        symlink(host.join("made"), &source).unwrap();
        containers.prepare(&mut container).unwrap();
        assert_eq!(container.spec.locations, found);
        assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
    }
}
