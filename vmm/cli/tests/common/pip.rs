//! Python packages, from the registry that `pip` is configured for, pinned by
//! hash and kept under EXOCELL_CACHE.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::text;

/// A directory below EXOCELL_CACHE/`kind` for what `pins` name; `fetch` fills
/// it once for a set of pins.
pub fn kept(kind: &str, pins: &str, fetch: impl FnOnce(&Path)) -> PathBuf {
    let cache = match std::env::var_os("EXOCELL_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/exocell")
        }
    }
    .join(kind);
    let key = Sha256::digest(pins);
    let key: String = key.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let place = cache.join(key);
    if !place.exists() {
        fs::create_dir_all(&cache).expect("a directory in EXOCELL_CACHE");
        let work = tempfile::tempdir_in(&cache).expect("a directory in EXOCELL_CACHE");
        fetch(work.path());
        // Another test may have been faster; its tree is the same.
        if fs::rename(work.path(), &place).is_err() {
            assert!(place.exists(), "cannot rename to {}", place.display());
        }
    }
    place
}

/// A directory with the wheels that `pins` name, for PYTHONPATH.
pub fn wheels(kind: &str, pins: &str) -> PathBuf {
    let fetch = |work: &Path| install(&list(work, "pins.txt", pins), &work.join("packages"));
    kept(kind, pins, fetch).join("packages")
}

/// `pins` as the file `name` in `work`.
pub fn list(work: &Path, name: &str, pins: &str) -> PathBuf {
    let path = work.join(name);
    fs::write(&path, pins).expect("a list of pins");
    path
}

/// Installs the wheels that the file `pins` names into `target`.
pub fn install(pins: &Path, target: &Path) {
    let wheels = ["install", "--only-binary", ":all:", "--no-compile", "--target"];
    pip(&[&wheels[..], &[text(target), "-r", text(pins)]].concat());
}

/// Runs `pip` as this machine has it configured; what it fetches must have the
/// hash that is pinned.
pub fn pip(words: &[&str]) {
    let (verb, rest) = words.split_first().expect("a verb");
    let output = Command::new("python3")
        .args(["-m", "pip", "--disable-pip-version-check", verb])
        .args(["--quiet", "--no-deps", "--require-hashes"])
        .args(rest)
        .output()
        .expect("python3 is installed by scripts/setup");
    assert!(
        output.status.success(),
        "cannot fetch what to test with; does this machine reach a Python package \
         registry (pip config list)? pip says: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}
