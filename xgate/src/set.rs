//! A grant, read and checked: what an operator gives to one cell.

use crate::capability::is_plain;
use crate::{
    Capability, CapsError, FolderScope, Handle, Kind, NetworkScope, Quota, Rights, Scope, Table,
    TableError,
};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// The network part of a grant.
pub type Network = NetworkScope;

/// Processors of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// vCPUs, 1 to 64.
    pub count: u32,
    /// Share against other cells, 1 to 10,000 (cgroup v2 `cpu.weight`).
    pub weight: u32,
}

impl Cpu {
    /// Most vCPUs of a cell.
    pub const COUNT_MAX: u32 = 64;
    /// Largest weight.
    pub const WEIGHT_MAX: u32 = 10_000;
    /// The weight that cgroups start with.
    pub const WEIGHT_DEFAULT: u32 = 100;
}

/// A folder of the host that a cell sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    /// Absolute path on the host, without `..`. It may hold symbolic links and need not exist.
    pub host: PathBuf,
    /// Absolute path in the guest, without `..`.
    pub guest: PathBuf,
    /// READ, EXECUTE, and WRITE or OVERLAY; READ is always there.
    pub rights: Rights,
}

impl Folder {
    /// Checks a folder. A relative host path starts at `base`.
    pub(crate) fn new(
        host: &Path,
        guest: &Path,
        rights: Rights,
        base: &Path,
        key: &str,
    ) -> Result<Self, CapsError> {
        let value = |message: String| CapsError::Value { key: key.to_owned(), message };
        if !rights.contains(Rights::READ) {
            return Err(value(format!("{} needs the right `read`", host.display())));
        }
        if rights.contains(Rights::WRITE | Rights::OVERLAY) {
            return Err(value(format!(
                "{} has `write` and `overlay`; changes go to the folder or to a layer over it",
                host.display()
            )));
        }
        let host = plain(&base.join(host)).map_err(value)?;
        let guest: PathBuf = guest.components().filter(|part| *part != Component::CurDir).collect();
        if !is_plain(&guest) || guest.to_str().is_none_or(|text| text.contains('\0')) {
            return Err(value(format!(
                "{} is not an absolute guest path without `..`",
                guest.display()
            )));
        }
        Ok(Self { host, guest, rights })
    }

    /// Name of its capability in a table.
    #[must_use]
    pub fn name(&self) -> String {
        format!("folder:{}", self.guest.display())
    }

    /// Its scope in a table.
    #[must_use]
    pub fn scope(&self) -> FolderScope {
        FolderScope { host: self.host.clone(), guest: self.guest.clone() }
    }
}

/// A model that an isolate may compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// What the isolate calls it.
    pub name: String,
    /// Absolute path on the host, without `..`.
    pub file: PathBuf,
}

impl Model {
    /// Longest name, in bytes.
    pub const NAME_BYTES_MAX: usize = 64;

    /// Checks a model. A relative host path starts at `base`.
    pub(crate) fn new(name: &str, file: &Path, base: &Path, key: &str) -> Result<Self, CapsError> {
        let plain_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if name.is_empty() || name.len() > Self::NAME_BYTES_MAX || !name.chars().all(plain_letter) {
            let message = format!(
                "`{}` is no name: letters, digits, `-`, `_` and `.`, at most 64",
                name.escape_default()
            );
            return Err(value(key, message));
        }
        let file = plain(&base.join(file)).map_err(|message| value(key, message))?;
        Ok(Self { name: name.to_owned(), file })
    }

    /// Name of its capability in a table.
    #[must_use]
    pub fn capability(&self) -> String {
        format!("model:{}", self.name)
    }

    /// What a copy of its file is called, whatever its own name is.
    #[must_use]
    pub fn file_name(&self) -> String {
        format!("{}.onnx", self.name)
    }
}

/// Makes a host path absolute and plain. A link on it is followed by whoever opens it, and not here:
/// so there is no `..` after one.
fn plain(path: &Path) -> Result<PathBuf, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let absolute = std::path::absolute(path).map_err(failed)?;
    let mut plain = PathBuf::new();
    for part in absolute.components() {
        if part != Component::ParentDir {
            plain.push(part);
            continue;
        }
        let about = plain.symlink_metadata().map_err(failed)?;
        if !about.is_dir() {
            return Err(format!(
                "{}: there is a `..` after {}, which is a link or no directory; name what is meant \
                 without it",
                path.display(),
                plain.display()
            ));
        }
        plain.pop();
    }
    Ok(plain)
}

/// What a cell may do. Everything that is absent is denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapabilitySet {
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) cpu: Option<Cpu>,
    pub(crate) disk_bytes: Option<u64>,
    pub(crate) process_max: Option<u32>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) fuel: Option<u64>,
    pub(crate) clock: bool,
    pub(crate) random: bool,
    pub(crate) stdio: bool,
    pub(crate) network: Option<Network>,
    pub(crate) devices: Option<BTreeSet<String>>,
    pub(crate) spawn_max: Option<u32>,
    pub(crate) folders: Vec<Folder>,
    pub(crate) models: Vec<Model>,
}

/// What a cell gets when neither a file nor a flag says otherwise: 256 MiB of memory, one
/// vCPU, 1 GiB of private disk, 512 processes, clock, random and stdio. No network, no folders.
impl Default for CapabilitySet {
    fn default() -> Self {
        Self {
            memory_bytes: Some(256 << 20),
            cpu: Some(Cpu { count: 1, weight: Cpu::WEIGHT_DEFAULT }),
            disk_bytes: Some(1 << 30),
            process_max: Some(512),
            clock: true,
            random: true,
            stdio: true,
            ..Self::nothing()
        }
    }
}

impl CapabilitySet {
    /// Most folders of one grant.
    pub const FOLDERS_MAX: usize = 256;
    /// Most rules in one network list.
    pub const RULES_MAX: usize = 1024;
    /// Most networks between cells of one grant.
    pub const JOINED_MAX: usize = 32;
    /// Most models of one grant.
    pub const MODELS_MAX: usize = 16;
    /// Most devices of one grant.
    pub const DEVICES_MAX: usize = 64;

    /// The grant of nothing.
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            memory_bytes: None,
            cpu: None,
            disk_bytes: None,
            process_max: None,
            deadline: None,
            fuel: None,
            clock: false,
            random: false,
            stdio: false,
            network: None,
            devices: None,
            spawn_max: None,
            folders: Vec::new(),
            models: Vec::new(),
        }
    }

    /// Memory, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }

    /// Processors.
    #[must_use]
    pub fn cpu(&self) -> Option<Cpu> {
        self.cpu
    }

    /// vCPUs; 0 if none are granted.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        self.cpu.map_or(0, |cpu| cpu.count)
    }

    /// Weight of the processors, as in cgroup v2; 0 if none are granted.
    #[must_use]
    pub fn cpu_weight(&self) -> u32 {
        self.cpu.map_or(0, |cpu| cpu.weight)
    }

    /// Private writable storage, in bytes.
    #[must_use]
    pub fn disk_bytes(&self) -> Option<u64> {
        self.disk_bytes
    }

    /// Processes and threads alive at once.
    #[must_use]
    pub fn process_max(&self) -> Option<u32> {
        self.process_max
    }

    /// Wall time from start to the forced end. `None` is no deadline.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// Instructions an isolate may execute. `None` is not metered.
    #[must_use]
    pub fn fuel(&self) -> Option<u64> {
        self.fuel
    }

    /// Whether clocks may be read.
    #[must_use]
    pub fn clock(&self) -> bool {
        self.clock
    }

    /// Whether random bytes are given.
    #[must_use]
    pub fn random(&self) -> bool {
        self.random
    }

    /// Whether the standard streams are given.
    #[must_use]
    pub fn stdio(&self) -> bool {
        self.stdio
    }

    /// Network rules.
    #[must_use]
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// Names of devices.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().flatten().map(String::as_str)
    }

    /// Isolates or cells it may start inside.
    #[must_use]
    pub fn spawn_max(&self) -> u32 {
        self.spawn_max.unwrap_or(0)
    }

    /// Folders of the host, in the order they were written.
    #[must_use]
    pub fn folders(&self) -> &[Folder] {
        &self.folders
    }

    /// Models, in the order they were written.
    #[must_use]
    pub fn models(&self) -> &[Model] {
        &self.models
    }

    /// The same with the folders at `hosts`, in the order of [`Self::folders`].
    #[must_use]
    pub fn with_folder_hosts(mut self, hosts: impl IntoIterator<Item = PathBuf>) -> Self {
        self.folders.iter_mut().zip(hosts).for_each(|(folder, host)| folder.host = host);
        self
    }

    /// The same with the models' files at `files`, in the order of [`Self::models`].
    #[must_use]
    pub fn with_model_files(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.models.iter_mut().zip(files).for_each(|(model, file)| model.file = file);
        self
    }

    /// Whether anything of this kind is granted.
    #[must_use]
    pub fn grants(&self, kind: Kind) -> bool {
        self.capabilities("").iter().any(|capability| capability.kind() == kind)
    }

    /// The memory limit, for a planner that cannot do without.
    ///
    /// # Errors
    /// [`CapsError::Missing`] says what to add to the file.
    pub fn require_memory_bytes(&self) -> Result<u64, CapsError> {
        self.memory_bytes.ok_or_else(|| missing("memory", "`[memory]` with `limit = \"256M\"`"))
    }

    /// The processors, for a planner that cannot do without.
    ///
    /// # Errors
    /// [`CapsError::Missing`] says what to add to the file.
    pub fn require_cpu(&self) -> Result<Cpu, CapsError> {
        self.cpu.ok_or_else(|| missing("cpu", "`[cpu]` with `count = 1`"))
    }

    /// The process limit, for a planner that cannot do without.
    ///
    /// # Errors
    /// [`CapsError::Missing`] says what to add to the file.
    pub fn require_process_max(&self) -> Result<u32, CapsError> {
        self.process_max.ok_or_else(|| missing("processes", "`[processes]` with `max = 512`"))
    }

    /// Puts every capability of the grant into `table`, all or none, and answers with their
    /// handles; [`Table::find`] gives them by name.
    ///
    /// # Errors
    /// [`TableError::Full`].
    pub fn install(&self, table: &mut Table, holder: &str) -> Result<Vec<Handle>, TableError> {
        let mut handles = Vec::new();
        for capability in self.capabilities(holder) {
            match table.insert(capability) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    handles.drain(..).for_each(|handle| drop(table.revoke(handle)));
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    /// Each capability of the grant, as it goes into a table.
    pub(crate) fn capabilities(&self, holder: &str) -> Vec<Capability> {
        let make = |kind: Kind, rights, scope, quota| {
            Capability::new(kind.name(), holder, kind, rights, scope, quota)
        };
        let counted = |kind, amount: Option<u64>| {
            amount.map(|amount| make(kind, Rights::USE, Scope::Whole, Quota(amount)))
        };
        let plain = |kind, granted: bool| counted(kind, granted.then_some(u64::MAX));
        let cpu = self.cpu.map(|cpu| {
            make(Kind::Cpu, Rights::USE, Scope::Weight(cpu.weight), Quota(u64::from(cpu.count)))
        });
        let network = self.network.as_ref().map(|network| {
            make(Kind::Network, network.rights(), Scope::Network(network.clone()), Quota::UNCOUNTED)
        });
        let devices = self.devices.as_ref().map(|names| {
            make(Kind::Device, Rights::USE, Scope::Names(names.clone()), Quota::UNCOUNTED)
        });
        let folders = self.folders.iter().map(|folder| {
            let scope = Scope::Folder(folder.scope());
            Capability::new(
                &folder.name(),
                holder,
                Kind::Folder,
                folder.rights,
                scope,
                Quota::UNCOUNTED,
            )
        });
        let single = [
            counted(Kind::Memory, self.memory_bytes),
            cpu,
            counted(Kind::Disk, self.disk_bytes),
            counted(Kind::Processes, self.process_max.map(u64::from)),
            counted(Kind::Time, self.deadline.map(nanos)),
            counted(Kind::Fuel, self.fuel),
            plain(Kind::Clock, self.clock),
            plain(Kind::Random, self.random),
            plain(Kind::Stdio, self.stdio),
            network,
            devices,
            counted(Kind::Spawn, self.spawn_max.map(u64::from)),
        ];
        let models = self.models.iter().map(|model| {
            let scope = Scope::File(model.file.clone());
            let (name, quota) = (model.capability(), Quota::UNCOUNTED);
            Capability::new(&name, holder, Kind::Model, Rights::USE, scope, quota)
        });
        single.into_iter().flatten().chain(folders).chain(models).collect()
    }

    /// Checks what no single value shows.
    pub(crate) fn checked(self) -> Result<Self, CapsError> {
        positive("memory.limit", self.memory_bytes)?;
        within("cpu.count", self.cpu.map(|cpu| cpu.count), Cpu::COUNT_MAX)?;
        within("cpu.weight", self.cpu.map(|cpu| cpu.weight), Cpu::WEIGHT_MAX)?;
        positive("processes.max", self.process_max.map(u64::from))?;
        positive("time.deadline", self.deadline.map(nanos))?;
        let network = self.network.as_ref();
        at_most(
            "network.connect",
            network.map_or(0, |network| network.connect.len()),
            Self::RULES_MAX,
        )?;
        at_most(
            "network.listen",
            network.map_or(0, |network| network.listen.len()),
            Self::RULES_MAX,
        )?;
        at_most(
            "network.resolve",
            network.map_or(0, |network| network.resolve.len()),
            Self::RULES_MAX,
        )?;
        at_most("network.join", network.map_or(0, |own| own.join.len()), Self::JOINED_MAX)?;
        positive(
            "network.connections",
            network.and_then(|own| own.connections_max.map(u64::from)),
        )?;
        positive("network.rate", network.and_then(|own| own.rate_bytes))?;
        at_most("device.names", self.devices().count(), Self::DEVICES_MAX)?;
        at_most("folder", self.folders.len(), Self::FOLDERS_MAX)?;
        at_most("model", self.models.len(), Self::MODELS_MAX)?;
        self.check_guest_paths()?;
        self.check_model_names()?;
        self.check_overlays()?;
        Ok(self)
    }

    /// A layer takes memory of the host, so something must bound it.
    fn check_overlays(&self) -> Result<(), CapsError> {
        let overlaid = self.folders.iter().find(|folder| folder.rights.contains(Rights::OVERLAY));
        match overlaid {
            Some(folder) if self.disk_bytes.is_none() => Err(value(
                "folder",
                format!(
                    "the layer over {} needs `[disk]` with `size = \"64M\"`, its limit",
                    folder.guest.display()
                ),
            )),
            _ => Ok(()),
        }
    }

    fn check_guest_paths(&self) -> Result<(), CapsError> {
        let mut seen = BTreeSet::new();
        match self.folders.iter().find(|folder| !seen.insert(&folder.guest)) {
            None => Ok(()),
            Some(twice) => Err(value(
                "folder",
                format!(
                    "two folders have the guest path {}; give each its own",
                    twice.guest.display()
                ),
            )),
        }
    }

    fn check_model_names(&self) -> Result<(), CapsError> {
        let mut seen = BTreeSet::new();
        match self.models.iter().find(|model| !seen.insert(&model.name)) {
            None => Ok(()),
            Some(twice) => {
                let message =
                    format!("two models are called {}; give each its own name", twice.name);
                Err(value("model", message))
            }
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn value(key: &str, message: String) -> CapsError {
    CapsError::Value { key: key.to_owned(), message }
}

fn missing(capability: &str, remedy: &str) -> CapsError {
    CapsError::Missing { capability: capability.to_owned(), remedy: remedy.to_owned() }
}

fn positive(key: &str, amount: Option<u64>) -> Result<(), CapsError> {
    match amount {
        Some(0) => Err(value(
            key,
            "must be more than 0; leave the section out to grant nothing".to_owned(),
        )),
        _ => Ok(()),
    }
}

fn within(key: &str, amount: Option<u32>, max: u32) -> Result<(), CapsError> {
    match amount.is_none_or(|amount| (1..=max).contains(&amount)) {
        true => Ok(()),
        false => Err(value(key, format!("must lie between 1 and {max}"))),
    }
}

fn at_most(key: &str, count: usize, max: usize) -> Result<(), CapsError> {
    match count <= max {
        true => Ok(()),
        false => Err(value(key, format!("has {count} entries; the limit is {max}"))),
    }
}
