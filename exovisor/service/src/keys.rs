//! Keys of tenants: 32 random bytes as text, of which only the hash is kept.

use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};

const KEY_BYTES: usize = 32;

/// A new key.
pub(crate) fn generate() -> io::Result<String> {
    let mut bytes = [0; KEY_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(hex(&bytes))
}

/// What is kept of a key. Hashes are compared, not keys, so the time it takes tells nothing.
pub(crate) fn hash(key: &str) -> String {
    sha256(key.as_bytes())
}

/// In hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_hashes_are_of_keys() {
        let [one, other] = [generate().unwrap(), generate().unwrap()];
        assert_eq!(one.len(), 2 * KEY_BYTES);
        assert_ne!(one, other);
        assert_eq!(hash(&one), hash(&one));
        assert_ne!(hash(&one), hash(&other));
        assert!(!hash(&one).contains(&one));
    }
}
