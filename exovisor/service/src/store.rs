//! Modules and tenants on disk: `NAME.wasm`, `NAME.json`, and `tenants/TENANT.json`.

use crate::keys;
use exocell_exovisor::Metering;
use exocell_xgate::{CapabilitySet, CapsError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Changes of the store that are further apart have different times.
const CHANGES_APART: Duration = Duration::from_secs(1);
/// What is being written has a name that ends so, and a number.
const PARTIAL: &str = "partial-";
/// Longest name of a module or a tenant, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Why the store refuses something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A name that could be mistaken for a path or a flag.
    #[error(
        "`{0}` is no name: lower-case letters, digits, `-`, `_` and `.`, a letter or digit first, at most 64"
    )]
    Name(String),
    /// There is one of that name.
    #[error("there is a module {0} already; exocell module rm {0} removes it")]
    Taken(String),
    /// There is none of that name.
    #[error("there is no module {0}; exocell module ls lists them")]
    NotFound(String),
    /// There is no tenant of that name.
    #[error("there is no tenant {0}: exocell module add --tenant {0} makes one")]
    NoTenant(String),
    /// It has modules, and whoever added the first was stopped before it had a key.
    #[error("the tenant {0} has no key: exocell module key {0} makes one")]
    NoKey(String),
    /// Its capability table is wrong.
    #[error(transparent)]
    Caps(#[from] CapsError),
    /// The table lacks what nothing runs without.
    #[error("the capability table grants no `memory`, without which no module runs")]
    NoMemory,
    /// A file of the store is damaged.
    #[error("{path} is damaged ({why}); {remedy}")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// What to do about it.
        remedy: String,
    },
    /// The disk.
    #[error("{path}: {source}")]
    Host {
        /// Which file.
        path: PathBuf,
        /// What the host says.
        source: io::Error,
    },
}

/// A module as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleEntry {
    /// What it is called under.
    pub name: String,
    /// Whose it is.
    pub tenant: String,
    /// Length of the binary or text.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
    /// Its capability table, as JSON.
    pub caps: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    key_sha256: String,
}

/// What the store holds.
#[derive(Debug, Default)]
pub struct Kept {
    /// By name.
    pub entries: Vec<ModuleEntry>,
    /// [`StoreError::Damaged`] for each module that cannot be read. The others have nothing of it.
    pub damaged: Vec<StoreError>,
}

/// What became of adding a module.
#[derive(Debug)]
pub struct Added {
    /// The tenant's key, if it had none: it is not kept and cannot be shown again.
    pub key: Option<String>,
}

/// The store below one directory, which only its owner can read.
#[derive(Clone, Debug)]
pub struct ModuleStore {
    dir: PathBuf,
}

impl ModuleStore {
    /// Opens or makes the store in `dir`.
    ///
    /// # Errors
    /// [`StoreError::Host`].
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let tenants = dir.join("tenants");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&tenants)
            .map_err(|source| StoreError::Host { path: tenants, source })?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Keeps a module of `tenant`, with the capabilities of its calls. Nobody looks into it here:
    /// it was checked in a jail before, and each worker has it checked again.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing is kept.
    pub fn add(
        &self,
        name: &str,
        tenant: &str,
        module: &[u8],
        caps: &CapabilitySet,
    ) -> Result<Added, StoreError> {
        check_name(name)?;
        check_name(tenant)?;
        let _lock = self.lock()?;
        if self.json(name).exists() {
            return Err(StoreError::Taken(name.to_owned()));
        }
        caps.memory_bytes().ok_or(StoreError::NoMemory)?;
        let entry = ModuleEntry {
            name: name.to_owned(),
            tenant: tenant.to_owned(),
            bytes: module.len() as u64,
            sha256: keys::sha256(module),
            caps: caps.to_json(),
        };
        let is_new = !self.tenant(tenant).exists();
        let added = write(&self.wasm(name), module).and_then(|()| {
            write_json(&self.json(name), &entry)?;
            // Last: whoever is stopped before that leaves a module that wants a key, and no key that
            // nobody was told.
            let key = if is_new { Some(self.make_key(tenant)?) } else { None };
            Ok(Added { key })
        });
        if added.is_err() {
            let key = is_new.then(|| self.tenant(tenant));
            for path in [self.json(name), self.wasm(name)].into_iter().chain(key) {
                let _ = fs::remove_file(path);
            }
        }
        added
    }

    /// Another key for a tenant; the one that it had is none any more.
    ///
    /// # Errors
    /// [`StoreError::NoTenant`], [`StoreError::Host`].
    pub fn rekey(&self, tenant: &str) -> Result<String, StoreError> {
        check_name(tenant)?;
        let _lock = self.lock()?;
        let is_tenants = |module: &ModuleEntry| module.tenant == tenant;
        if !self.tenant(tenant).exists() && !self.list()?.entries.iter().any(is_tenants) {
            return Err(StoreError::NoTenant(tenant.to_owned()));
        }
        self.make_key(tenant)
    }

    fn make_key(&self, tenant: &str) -> Result<String, StoreError> {
        let path = self.tenant(tenant);
        let key =
            keys::generate().map_err(|source| StoreError::Host { path: path.clone(), source })?;
        write_json(&path, &TenantEntry { key_sha256: keys::hash(&key) })?;
        // A service looks when this directory was changed.
        let failed = |source| StoreError::Host { path: self.dir.clone(), source };
        let dir = File::open(&self.dir).map_err(failed)?;
        dir.set_modified(SystemTime::now()).map_err(failed)?;
        Ok(key)
    }

    /// Waits until nobody else changes the store, and removes what such as died have left.
    fn lock(&self) -> Result<File, StoreError> {
        let path = self.dir.join("lock");
        let failed = |source| StoreError::Host { path: path.clone(), source };
        let mut options = OpenOptions::new();
        let open = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(failed)?;
        file.lock().map_err(failed)?;
        for dir in [self.dir.clone(), self.dir.join("tenants")] {
            let failed = |source| StoreError::Host { path: dir.clone(), source };
            for left in fs::read_dir(&dir).map_err(failed)? {
                let left = left.map_err(failed)?.path();
                let ending = left.extension().and_then(|ending| ending.to_str());
                if ending.is_some_and(|ending| ending.starts_with(PARTIAL)) {
                    let _ = fs::remove_file(left);
                }
            }
        }
        Ok(file)
    }

    /// All modules.
    ///
    /// # Errors
    /// [`StoreError::Host`].
    pub fn list(&self) -> Result<Kept, StoreError> {
        let failed = |source| StoreError::Host { path: self.dir.clone(), source };
        let mut kept = Kept::default();
        for file in fs::read_dir(&self.dir).map_err(failed)? {
            let path = file.map_err(failed)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            match read_json::<ModuleEntry>(&path, || again(&name)) {
                Ok(entry) if entry.name == name => kept.entries.push(entry),
                Ok(_) => kept.damaged.push(StoreError::Damaged {
                    remedy: again(&name),
                    why: "it is another module's".to_owned(),
                    path,
                }),
                // Removed meanwhile.
                Err(StoreError::Host { source, .. })
                    if source.kind() == io::ErrorKind::NotFound => {}
                Err(damaged @ StoreError::Damaged { .. }) => kept.damaged.push(damaged),
                Err(error) => return Err(error),
            }
        }
        kept.entries.sort_by(|one, other| one.name.cmp(&other.name));
        kept.damaged.sort_by_key(ToString::to_string);
        Ok(kept)
    }

    /// Removes a module. Its tenant keeps the key.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::Host`].
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        // Without the entry the binary is nothing, so the entry goes first.
        let removed = [self.json(name), self.wasm(name)].map(|path| match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(StoreError::Host { path, source }),
            Ok(()) => Ok(true),
        });
        let [entry, binary] = removed;
        match entry? | binary? {
            true => Ok(()),
            false => Err(StoreError::NotFound(name.to_owned())),
        }
    }

    /// A module's bytes.
    pub(crate) fn module(&self, entry: &ModuleEntry) -> Result<Vec<u8>, StoreError> {
        let path = self.wasm(&entry.name);
        let failed = |source| StoreError::Host { path: path.clone(), source };
        let module = fs::read(&path).map_err(failed)?;
        if keys::sha256(&module) != entry.sha256 {
            let (why, remedy) = ("it is not what was added".to_owned(), again(&entry.name));
            return Err(StoreError::Damaged { path, why, remedy });
        }
        Ok(module)
    }

    /// Where a module's bytes lie, in which nobody looks outside a jail.
    #[must_use]
    pub fn path_of(&self, entry: &ModuleEntry) -> PathBuf {
        self.wasm(&entry.name)
    }

    /// When a module was last added or removed; `None` if that is unknown, or so short ago that
    /// another change might have the same time.
    #[must_use]
    pub fn changed(&self) -> Option<SystemTime> {
        let changed = fs::metadata(&self.dir).and_then(|dir| dir.modified()).ok()?;
        let settled = changed.elapsed().is_ok_and(|age| age > CHANGES_APART);
        settled.then_some(changed)
    }

    /// The hash of a tenant's key.
    ///
    /// # Errors
    /// [`StoreError`]: it has none, or the disk.
    pub fn key_hash(&self, tenant: &str) -> Result<String, StoreError> {
        let remedy = || format!("exocell module key {tenant} makes another key");
        match read_json::<TenantEntry>(&self.tenant(tenant), remedy) {
            Ok(entry) => Ok(entry.key_sha256),
            Err(StoreError::Host { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Err(StoreError::NoKey(tenant.to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    fn json(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    fn wasm(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.wasm"))
    }

    fn tenant(&self, name: &str) -> PathBuf {
        self.dir.join("tenants").join(format!("{name}.json"))
    }
}

/// Fuel if it is granted, else CPU time.
pub(crate) fn metering(caps: &CapabilitySet) -> Metering {
    Metering::of(caps)
}

fn check_name(name: &str) -> Result<(), StoreError> {
    let good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if first && name.len() <= NAME_BYTES_MAX && name.bytes().all(good) {
        return Ok(());
    }
    Err(StoreError::Name(name.chars().take(NAME_BYTES_MAX).collect()))
}

/// What to do about a module that is damaged.
fn again(name: &str) -> String {
    format!("exocell module rm {name} removes it; add it again then")
}

fn read_json<T: DeserializeOwned>(
    path: &Path,
    remedy: impl FnOnce() -> String,
) -> Result<T, StoreError> {
    let text =
        fs::read(path).map_err(|source| StoreError::Host { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|error| StoreError::Damaged {
        path: path.to_owned(),
        why: error.to_string(),
        remedy: remedy(),
    })
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    let failed =
        |error: serde_json::Error| StoreError::Host { path: path.to_owned(), source: error.into() };
    write(path, &serde_json::to_vec(value).map_err(failed)?)
}

/// Whole or not at all, after an end of the host too: under another name first.
fn write(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let partial = path.with_extension(format!("{PARTIAL}{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&partial, path));
    written.map_err(|source| {
        let _ = fs::remove_file(&partial);
        StoreError::Host { path: path.to_owned(), source }
    })
}
