//! Compiled modules on disk.
//!
//! An entry is named by the hash of the module and of all that decides how it is compiled, and
//! sealed with a key that only the user who runs us can read. Native code is loaded only if the
//! seal shows that we wrote it under this name: whoever can write to the folder but not read the
//! key can remove entries, no more.
//!
//! ```text
//! DIR/key          64 random bytes, mode 0600
//! DIR/NAME         HMAC-SHA256(key, NAME ‖ code), 32 bytes, then the code
//! ```

#![allow(unsafe_code)]

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use wasmtime::component::Component;
use wasmtime::{Engine, Module};

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file or the folder cannot be made or read.
    #[error("cannot use the module cache at {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What the host says.
        source: io::Error,
    },
    /// Others could read the key or replace entries.
    #[error("{path} belongs to another user or is open to others; remove it and it is made anew")]
    Exposed {
        /// Which.
        path: PathBuf,
    },
}

const SEAL_BYTES: usize = 32;
const KEY_BYTES: usize = 64;
/// Entries are removed, oldest first, when together they are larger.
const BYTES_MAX: u64 = 1 << 30;
/// Larger ones are not kept.
const ENTRY_BYTES_MAX: u64 = 256 << 20;

/// What is compiled: modules and components.
pub(crate) trait Code: Sized {
    fn compile(engine: &Engine, binary: &[u8]) -> wasmtime::Result<Self>;

    fn serialize(&self) -> wasmtime::Result<Vec<u8>>;

    /// # Safety
    /// `code` is what [`Code::serialize`] gave.
    unsafe fn deserialize(engine: &Engine, code: &[u8]) -> wasmtime::Result<Self>;
}

macro_rules! code {
    ($($type:ty),*) => {$(
        impl Code for $type {
            fn compile(engine: &Engine, binary: &[u8]) -> wasmtime::Result<Self> {
                Self::from_binary(engine, binary)
            }

            fn serialize(&self) -> wasmtime::Result<Vec<u8>> {
                Self::serialize(self)
            }

            unsafe fn deserialize(engine: &Engine, code: &[u8]) -> wasmtime::Result<Self> {
                // SAFETY: as the caller promises.
                unsafe { Self::deserialize(engine, code) }
            }
        }
    )*};
}

code!(Module, Component);

/// The cache in one folder.
pub struct Cache {
    dir: PathBuf,
    key: [u8; KEY_BYTES],
}

impl Cache {
    /// Opens the cache in `dir`; folder and key are made if they are not there.
    ///
    /// # Errors
    /// [`CacheError`], also when others have access.
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CacheError::Io { path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
        private(dir, &fs::metadata(dir).map_err(failed(dir))?, 0o022)?;
        let path = dir.join("key");
        make_key(&path).map_err(failed(&path))?;
        let mut file = File::open(&path).map_err(failed(&path))?;
        private(&path, &file.metadata().map_err(failed(&path))?, 0o077)?;
        let mut key = [0; KEY_BYTES];
        file.read_exact(&mut key).map_err(failed(&path))?;
        Ok(Self { dir: dir.to_owned(), key })
    }

    /// The compiled form of `binary`, if it is here and ours. An entry that is neither is removed.
    pub(crate) fn load<C: Code>(&self, engine: &Engine, binary: &[u8]) -> Option<C> {
        let name = name(engine, binary);
        let path = self.dir.join(&name);
        let entry = read(&path)?;
        let module = self.unsealed(&name, &entry).and_then(|code| {
            // SAFETY: the seal shows that `code` is what `Code::serialize` gave us for an
            // engine of this version and configuration; loading native code has no safe form.
            // One binary is either a module or a component, and the engine looks which.
            unsafe { C::deserialize(engine, code) }.ok()
        });
        if module.is_none() {
            // What cannot be removed is refused again the next time.
            let _ = fs::remove_file(&path);
        }
        module
    }

    /// Keeps the compiled form of `binary`. The cache is an optimization: what cannot be written
    /// is left out.
    pub(crate) fn store<C: Code>(&self, engine: &Engine, binary: &[u8], module: &C) {
        let Ok(code) = module.serialize() else { return };
        if code.len() as u64 > ENTRY_BYTES_MAX {
            return;
        }
        let name = name(engine, binary);
        let written = self.write(&name, &code);
        if written.is_ok() {
            self.evict(BYTES_MAX);
        }
    }

    fn write(&self, name: &str, code: &[u8]) -> io::Result<()> {
        let partial = self.dir.join(format!(".{name}.{}", std::process::id()));
        let seal = self.seal(name, code).finalize().into_bytes();
        let result = (|| {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&partial)?;
            file.write_all(&seal)?;
            file.write_all(code)?;
            fs::rename(&partial, self.dir.join(name))
        })();
        if result.is_err() {
            let _ = fs::remove_file(&partial);
        }
        result
    }

    fn unsealed<'a>(&self, name: &str, entry: &'a [u8]) -> Option<&'a [u8]> {
        let (seal, code) = entry.split_at_checked(SEAL_BYTES)?;
        self.seal(name, code).verify_slice(seal).ok()?;
        Some(code)
    }

    fn seal(&self, name: &str, code: &[u8]) -> Hmac<Sha256> {
        // Names have one length, so name and code cannot be told apart in two ways.
        let mut seal = <Hmac<Sha256> as Mac>::new((&self.key).into());
        seal.update(name.as_bytes());
        seal.update(code);
        seal
    }

    fn evict(&self, bytes_max: u64) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let entry = entry.ok().filter(|entry| entry.file_name() != "key")?;
                let metadata = entry.metadata().ok()?;
                Some((metadata.modified().ok()?, metadata.len(), entry.path()))
            })
            .collect();
        entries.sort();
        let mut bytes: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, entry, path) in entries {
            if bytes <= bytes_max {
                return;
            }
            // Another process may have been faster.
            let _ = fs::remove_file(path);
            bytes -= entry;
        }
    }
}

/// The name under which `engine`'s form of `binary` is kept.
fn name(engine: &Engine, binary: &[u8]) -> String {
    /// Feeds a hash instead of a hash table.
    struct Feed(Sha256);
    impl Hasher for Feed {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut feed = Feed(Sha256::new());
    // Version, target and every option that matters to compiled code.
    engine.precompile_compatibility_hash().hash(&mut feed);
    feed.0.update(Sha256::digest(binary));
    feed.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    let mut entry = Vec::new();
    file.take(ENTRY_BYTES_MAX + 1).read_to_end(&mut entry).ok()?;
    (entry.len() as u64 <= ENTRY_BYTES_MAX).then_some(entry)
}

fn private(path: &Path, metadata: &fs::Metadata, forbidden: u32) -> Result<(), CacheError> {
    let ours = metadata.uid() == nix::unistd::geteuid().as_raw();
    if ours && metadata.mode() & forbidden == 0 {
        return Ok(());
    }
    Err(CacheError::Exposed { path: path.to_owned() })
}

/// Makes the key unless there is one. A key that is only half written is never seen: it gets its
/// name when it is whole.
fn make_key(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let mut key = [0; KEY_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    let partial = path.with_file_name(format!(".key.{}", std::process::id()));
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(&key)?;
    // Of two processes that make it at once, the first one's key stays.
    let linked = match fs::hard_link(&partial, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    };
    fs::remove_file(&partial)?;
    linked
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use wasmtime::Config;

    const TEXT: &str = "(module (func (export \"f\") (result i32) (i32.const 42)))";

    struct World {
        dir: tempfile::TempDir,
        engine: Engine,
        binary: Vec<u8>,
    }

    /// A cache that holds one module.
    fn world() -> (World, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(&dir.path().join("modules")).unwrap();
        let engine = Engine::default();
        let binary = wat::parse_str(TEXT).unwrap();
        cache.store(&engine, &binary, &Module::new(&engine, &binary).unwrap());
        (World { dir, engine, binary }, cache)
    }

    fn load(cache: &Cache, engine: &Engine, binary: &[u8]) -> Option<Module> {
        cache.load(engine, binary)
    }

    fn entry(cache: &Cache) -> PathBuf {
        let entries = fs::read_dir(&cache.dir).unwrap().map(|entry| entry.unwrap().path());
        entries.into_iter().find(|path| !path.ends_with("key")).unwrap()
    }

    #[test]
    fn what_was_stored_is_loaded_and_runs() {
        let (world, _) = world();
        let cache = Cache::open(&world.dir.path().join("modules")).unwrap();
        let module = load(&cache, &world.engine, &world.binary).unwrap();
        let mut store = wasmtime::Store::new(&world.engine, ());
        let instance = wasmtime::Instance::new(&mut store, &module, &[]).unwrap();
        let f = instance.get_typed_func::<(), i32>(&mut store, "f").unwrap();
        assert_eq!(f.call(&mut store, ()).unwrap(), 42);
    }

    #[test]
    fn another_module_or_configuration_is_not_found() {
        let (world, cache) = world();
        let other = wat::parse_str("(module)").unwrap();
        assert!(load(&cache, &world.engine, &other).is_none());
        let fuel = Engine::new(Config::new().consume_fuel(true)).unwrap();
        assert!(load(&cache, &fuel, &world.binary).is_none());
    }

    #[test]
    fn a_component_is_kept_and_is_no_module() {
        let (world, cache) = world();
        let text = "(component (core module $m) (core instance (instantiate $m)))";
        let binary = wat::parse_str(text).unwrap();
        cache.store(&world.engine, &binary, &Component::new(&world.engine, &binary).unwrap());
        assert!(cache.load::<Component>(&world.engine, &binary).is_some());
        assert!(load(&cache, &world.engine, &binary).is_none());
        assert!(cache.load::<Component>(&world.engine, &world.binary).is_none());
    }

    #[test]
    fn a_changed_byte_anywhere_is_refused_and_the_entry_goes() {
        let (world, cache) = world();
        let path = entry(&cache);
        let whole = fs::read(&path).unwrap();
        for at in [0, SEAL_BYTES - 1, SEAL_BYTES, whole.len() / 2, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, changed).unwrap();
            assert!(load(&cache, &world.engine, &world.binary).is_none(), "byte {at}");
            assert!(!path.exists());
        }
        for length in [0, SEAL_BYTES - 1, SEAL_BYTES, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(load(&cache, &world.engine, &world.binary).is_none(), "{length} bytes");
        }
        fs::write(&path, &whole).unwrap();
        assert!(load(&cache, &world.engine, &world.binary).is_some());
    }

    #[test]
    fn an_entry_under_another_name_or_key_is_refused() {
        let (world, cache) = world();
        let other = wat::parse_str("(module (memory 1))").unwrap();
        fs::rename(entry(&cache), cache.dir.join(name(&world.engine, &other))).unwrap();
        assert!(load(&cache, &world.engine, &other).is_none());
        let (foreign, foreign_cache) = self::world();
        let name = entry(&foreign_cache);
        fs::copy(&name, cache.dir.join(name.file_name().unwrap())).unwrap();
        assert!(load(&cache, &foreign.engine, &foreign.binary).is_none());
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let (_world, cache) = world();
        let key = cache.dir.join("key");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(
            matches!(Cache::open(&cache.dir), Err(CacheError::Exposed { path }) if path == key)
        );
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(&cache.dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(Cache::open(&cache.dir), Err(CacheError::Exposed { .. })));
    }

    #[test]
    fn the_oldest_entries_go_first() {
        let (_world, cache) = world();
        let old = entry(&cache);
        let size = fs::metadata(&old).unwrap().len();
        let new = cache.dir.join("newer");
        fs::copy(&old, &new).unwrap();
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        File::options().write(true).open(&new).unwrap().set_modified(later).unwrap();
        cache.evict(size);
        assert!(!old.exists() && new.exists() && cache.dir.join("key").exists());
    }
}
