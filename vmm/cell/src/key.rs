//! The key of a server's HTTP clients, where there is one for all of them.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use exocell_images::private;
use sha2::{Digest, Sha256};

use crate::granted::Links;
use crate::{CellError, Layout};

const KEY_BYTES: usize = 32;
/// The longest file of a key, in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// The hash of the key in the file `path`, which is made where there is none; only its owner
/// may read it.
///
/// # Errors
/// The host's; a key of less than 32 characters, which could be guessed; a file that a cell can
/// have made, or may change, or that is none.
pub fn read_or_make(layout: &Layout, path: &Path) -> Result<Key, CellError> {
    let failed = || CellError::host(format!("cannot keep the key in {}", path.display()));
    let links = Links::outside(layout);
    let text = match links.untouched(path, FILE_BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let place = links.untouched_place(path).map_err(failed())?;
            made(&place).map_err(failed())?
        }
        text => text.map_err(failed())?,
    };
    match text.trim() {
        "" => Err(failed()(io::Error::other("it is empty; remove it, and a key is made"))),
        key if key.len() < KEY_BYTES => {
            let why = format!("it has {} characters; use at least {KEY_BYTES}", key.len());
            Err(failed()(io::Error::other(why)))
        }
        key => Ok(Key::of(key)),
    }
}

/// A new key at `path`, or that of another server which has just made one there.
fn made(path: &PathBuf) -> io::Result<String> {
    let text = random()?;
    match private::make(path, format!("{text}\n").as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs::read_to_string(path),
        made => made.map(|()| text),
    }
}

/// A key, of which only the hash is kept.
#[derive(Debug, Clone, Copy)]
pub struct Key([u8; 32]);

impl Key {
    pub fn of(key: &str) -> Self {
        Self(Sha256::digest(key.as_bytes()).into())
    }

    /// Whether `key` is this one. Hashes are compared, so the time it takes tells nothing.
    pub fn is(&self, key: &str) -> bool {
        self.0 == <[u8; 32]>::from(Sha256::digest(key.as_bytes()))
    }
}

/// 256 random bits in hexadecimal.
///
/// # Errors
/// The host gives none.
pub fn random() -> io::Result<String> {
    let mut bytes = [0; KEY_BYTES];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_key_is_made_once_and_whole() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let layout = Layout::new(base.join("root"));
        let path = base.join("key");
        let key = read_or_make(&layout, &path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(key.is(text.trim()) && text.trim().len() == 64);
        assert!(read_or_make(&layout, &path).unwrap().is(text.trim()));
        // The operator's own link.
        symlink(&path, base.join("link")).unwrap();
        assert!(read_or_make(&layout, &base.join("link")).unwrap().is(text.trim()));
        assert_eq!(made(&path).unwrap(), text);
        let refused = |text: &str| {
            fs::write(&path, text).unwrap();
            read_or_make(&layout, &path).unwrap_err().to_string()
        };
        assert!(refused("").contains("remove it, and a key is made"));
        assert!(refused("short").contains("at least 32"));
        assert_eq!(fs::read_dir(&base).unwrap().count(), 2);
        // Nothing is waited for.
        let pipe = base.join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let told = read_or_make(&layout, &pipe).unwrap_err().to_string();
        assert!(told.contains("not a file"), "{told}");
        assert!(read_or_make(&layout, &base.join("no/key")).is_err());
    }
}
