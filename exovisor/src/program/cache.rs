//! Compiled modules on disk.
//!
//! An entry is named by the hash of the module as it was brought, of all that decides how it is
//! compiled, and of this crate, and sealed with a key that only the user who runs us can read.
//! A user who can write to the folder but not read the key can remove entries, no more. The process
//! that keeps and finds entries does not look into them: they are opaque here, and are loaded in
//! the jail of an isolate ([`crate::Compiled`]).
//!
//! ```text
//! DIR/key          64 random bytes, mode 0600
//! DIR/NAME         the file, then HMAC-SHA256(key, NAME ‖ file), 32 bytes
//! ```

use crate::engine;
use crate::policy::{Metering, Policy};
use crate::program::compiled::{CODE_BYTES_MAX, Use};
use crate::program::sealed::Sealed;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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

const SEAL_BYTES: u64 = 32;
const KEY_BYTES: usize = 64;
/// Entries are removed, oldest first, when together they are larger.
const BYTES_MAX: u64 = 1 << 30;
/// What one entry is read and written in.
const PIECE_BYTES: usize = 64 << 10;
/// The contents of this crate and the versions of all others, hashed when it was built.
const BUILD: &str = env!("EXOCELL_EXOVISOR_BUILD");

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

    /// A copy of what is kept under `name`, if it is here and ours. An entry that is here and is
    /// not ours is removed.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<Sealed> {
        let path = self.dir.join(&name.0);
        let entry = File::open(&path).ok()?;
        let found = self.unsealed(name, &entry).ok().flatten();
        if found.is_none() {
            // What cannot be removed is refused again the next time.
            let _ = fs::remove_file(&path);
        }
        found
    }

    /// Keeps a file under `name`. The cache is an optimization: what cannot be written is left
    /// out.
    pub fn keep(&self, name: &Name, file: &Sealed) {
        if self.write(name, file).is_ok() {
            self.evict(BYTES_MAX);
        }
    }

    fn write(&self, name: &Name, file: &Sealed) -> io::Result<()> {
        let partial = self.dir.join(format!(".{}.{}", name.0, std::process::id()));
        let result = (|| {
            let mut entry = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&partial)?;
            let mut seal = self.seal(name);
            let (mut piece, mut at) = (vec![0; PIECE_BYTES], 0);
            loop {
                let count = file.file().read_at(&mut piece, at)?;
                let read = piece.get(..count).unwrap_or_default();
                if read.is_empty() {
                    break;
                }
                seal.update(read);
                entry.write_all(read)?;
                at += count as u64;
            }
            entry.write_all(&seal.finalize().into_bytes())?;
            fs::rename(&partial, self.dir.join(&name.0))
        })();
        if result.is_err() {
            let _ = fs::remove_file(&partial);
        }
        result
    }

    /// `None` if the seal is not ours.
    fn unsealed(&self, name: &Name, mut entry: &File) -> io::Result<Option<Sealed>> {
        let length = entry.metadata()?.len().checked_sub(SEAL_BYTES);
        let Some(length) = length.filter(|length| *length <= CODE_BYTES_MAX) else {
            return Ok(None);
        };
        let mut seal = self.seal(name);
        entry.rewind()?;
        // What is copied is what was looked at, whatever becomes of the entry.
        let found = Sealed::copy(entry.take(length), length, |piece| seal.update(piece))?;
        let mut written = Vec::new();
        entry.take(SEAL_BYTES).read_to_end(&mut written)?;
        Ok(seal.verify_slice(&written).ok().map(|()| found))
    }

    fn seal(&self, name: &Name) -> Hmac<Sha256> {
        // Names have one length, so name and contents cannot be told apart in two ways.
        let mut seal = <Hmac<Sha256> as Mac>::new((&self.key).into());
        seal.update(name.0.as_bytes());
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

/// What an entry is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl Name {
    /// The name for a module whose bytes have this SHA-256, compiled by this build on this
    /// machine. `None` if there is no such engine.
    #[must_use]
    pub fn new(
        policy: &Policy,
        metering: Metering,
        wanted: &Use,
        sha256: [u8; 32],
    ) -> Option<Self> {
        let engine = engine::compiler(policy, metering).ok()?;
        let mut feed = Feed(Sha256::new());
        // Version, target and every option that matters to compiled code.
        engine.precompile_compatibility_hash().hash(&mut feed);
        let ours = (BUILD, metering, wanted, policy.inline_recursion);
        feed.0.update(serde_json::to_vec(&ours).ok()?);
        feed.0.update(sha256);
        Some(Self(feed.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
    }
}

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

    const CODE: &[u8] = b"as if it were code";

    fn name(of: u8) -> Name {
        Name::new(&Policy::default(), Metering::Time, &Use::Command, [of; 32]).unwrap()
    }

    /// A cache that holds one file, under `name(1)`.
    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(&dir.path().join("modules")).unwrap();
        cache.keep(&name(1), &Sealed::copy(CODE, 100, |_| ()).unwrap());
        (dir, cache)
    }

    fn found(cache: &Cache, of: u8) -> Option<Vec<u8>> {
        Some(cache.find(&name(of))?.read().unwrap())
    }

    fn entry(cache: &Cache) -> PathBuf {
        let entries = fs::read_dir(&cache.dir).unwrap().map(|entry| entry.unwrap().path());
        entries.into_iter().find(|path| !path.ends_with("key")).unwrap()
    }

    #[test]
    fn what_was_kept_is_found_as_it_was() {
        let (dir, _) = cache();
        let cache = Cache::open(&dir.path().join("modules")).unwrap();
        assert_eq!(found(&cache, 1).unwrap(), CODE);
        assert_eq!(found(&cache, 2), None);
    }

    #[test]
    fn a_name_is_of_all_that_decides_what_the_code_is_like() {
        let (policy, of) = (Policy::default(), [1; 32]);
        let command = &Use::Command;
        let other = [
            Name::new(&policy, Metering::Fuel, command, of),
            Name::new(&policy, Metering::Time, &Use::Functions, of),
            Name::new(
                &Policy { inline_recursion: false, ..policy.clone() },
                Metering::Time,
                command,
                of,
            ),
            Name::new(&Policy { copy_on_write: true, ..policy }, Metering::Time, command, of),
        ];
        for other in other {
            assert_ne!(other.unwrap(), name(1));
        }
        assert_eq!(name(1), name(1));
    }

    #[test]
    fn a_changed_byte_anywhere_is_refused_and_the_entry_goes() {
        let (_dir, cache) = cache();
        let path = entry(&cache);
        let whole = fs::read(&path).unwrap();
        for at in [0, CODE.len() - 1, CODE.len(), whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, changed).unwrap();
            assert_eq!(found(&cache, 1), None, "byte {at}");
            assert!(!path.exists());
        }
        for length in [0, 31, 32, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(found(&cache, 1), None, "{length} bytes");
        }
        fs::write(&path, &whole).unwrap();
        assert!(found(&cache, 1).is_some());
    }

    #[test]
    fn an_entry_under_another_name_or_key_is_refused() {
        let (_dir, cache) = cache();
        fs::rename(entry(&cache), cache.dir.join(name(2).0)).unwrap();
        assert_eq!(found(&cache, 2), None);
        let (_foreign, foreign) = self::cache();
        fs::copy(entry(&foreign), cache.dir.join(name(1).0)).unwrap();
        assert_eq!(found(&cache, 1), None);
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let (_dir, cache) = cache();
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
        let (_dir, cache) = cache();
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
