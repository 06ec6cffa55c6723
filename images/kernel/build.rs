//! Embeds `guest-kernel-patches/` in the library, so that an installed program needs no checkout.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// From the package, a folder that cargo looks at whole.
const PATCHES: &str = "../../guest-kernel-patches";

fn main() {
    // A build directory may serve several checkouts, and what ran for one serves the next: all is
    // named from the package, which is asked for when this runs and when the table is compiled.
    println!("cargo::rerun-if-changed={PATCHES}");
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let root = package.join(PATCHES).canonicalize().expect("guest-kernel-patches is beside images");
    let mut files = vec![root.join("KERNEL"), root.join("series")];
    files.extend(files_with_extension(&root, "patch"));
    files.extend(files_with_extension(&root.join("config"), "config"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let write = |name, files: &[PathBuf]| {
        fs::write(out.join(name), table(&root, files)).expect("write a table of files");
    };
    write("embedded.rs", &files);
    // What only the kernel of the platform `kvm` has; it does not change the other one.
    let machine = root.join("kvm");
    let mut files = vec![machine.join("series"), machine.join("machine.config")];
    files.extend(files_with_extension(&machine, "patch"));
    write("machine.rs", &files);
}

/// The files of `folder` whose name ends in `.extension`, in name order.
fn files_with_extension(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("read a folder of guest-kernel-patches");
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("read a directory entry").path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    files
}

/// Rust source of a slice of (path below `root`, content), for a module of this package.
fn table(root: &Path, files: &[PathBuf]) -> String {
    let mut source = String::from("&[\n");
    for file in files {
        let name = file.strip_prefix(root).expect("files are below the root");
        let path = format!("/{PATCHES}/{}", name.display());
        let content = format!("include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), {path:?}))");
        writeln!(source, "    ({name:?}, {content}),").expect("write to a string");
    }
    source.push_str("]\n");
    source
}
