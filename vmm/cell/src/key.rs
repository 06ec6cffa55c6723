//! The key of a server's HTTP clients, where there is one for all of them.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use exocell_images::private;
use sha2::{Digest, Sha256};

use crate::CellError;

const KEY_BYTES: usize = 32;
/// The longest file of a key, in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// The hash of the key in the file `path`, which is made where there is none; only its owner
/// may read it.
///
/// # Errors
/// The host's; and a key of less than 32 characters, which could be guessed.
pub fn read_or_make(path: &Path) -> Result<Key, CellError> {
    let failed = || CellError::host(format!("cannot keep the key in {}", path.display()));
    let mut text = String::new();
    match fs::File::open(path) {
        Ok(file) => {
            file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed())?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            text = random().map_err(failed())?;
            private::create(path)
                .and_then(|mut file| file.write_all(format!("{text}\n").as_bytes()))
                .map_err(failed())?;
        }
        Err(error) => return Err(failed()(error)),
    }
    let key = text.trim();
    if key.len() < KEY_BYTES {
        let why = format!("it has {} characters; use at least {KEY_BYTES}", key.len());
        return Err(failed()(io::Error::other(why)));
    }
    Ok(Key::of(key))
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
