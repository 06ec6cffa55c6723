//! Tells the cache of compiled modules which build this is: what is compiled also depends on how
//! this crate rewrites modules before, so an entry of another build is none.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let (sources, lock) = (root.join("src"), root.join("../Cargo.lock"));
    let mut hash = DefaultHasher::new();
    add(&sources, &mut hash)?;
    fs::read(&lock)?.hash(&mut hash);
    println!("cargo::rerun-if-changed={}", sources.display());
    println!("cargo::rerun-if-changed={}", lock.display());
    println!("cargo::rustc-env=EXOCELL_EXOVISOR_BUILD={:016x}", hash.finish());
    Ok(())
}

/// Adds a file, or all files below a folder, in the order of their names.
fn add(path: &Path, hash: &mut DefaultHasher) -> io::Result<()> {
    if !path.is_dir() {
        fs::read(path)?.hash(hash);
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(path)? {
        entries.push(entry?.path());
    }
    entries.sort();
    entries.iter().try_for_each(|entry| add(entry, hash))
}
