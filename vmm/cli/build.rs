//! How the command is linked: as small as its code allows. The linker is lld, rustc's own here.

use std::process::Command;

/// The first version of glibc that loads programs with packed relocations.
const PACKED_SINCE: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Generic code is compiled for many types, and much of it is the same in the end. Of functions
    // only: nobody compares their addresses.
    println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    if glibc().is_some_and(|version| version >= PACKED_SINCE) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// The version here, which what is linked here needs anyway.
fn glibc() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let (major, minor) =
        str::from_utf8(&said.stdout).ok()?.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
