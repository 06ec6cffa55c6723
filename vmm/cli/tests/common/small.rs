//! A root file system of a few megabytes, where the base image's would cost time.

use std::fs;
use std::path::Path;

use super::given;

/// In its `/bin`.
pub const PROGRAMS: [&str; 11] =
    ["sh", "cat", "ln", "rm", "stat", "chmod", "chown", "sleep", "ls", "touch", "true"];
const LIBRARIES: [&str; 3] = ["libc.so.6", "libselinux.so.1", "libpcre2-8.so.0"];
const FROM: &str = "usr/lib/x86_64-linux-gnu";

/// The base image's shell, some programs and what they need; `/data`, `/src` and `/tmp`
/// are empty.
#[track_caller]
pub fn tree() -> tempfile::TempDir {
    tree_with(&[])
}

/// The same with more programs, which need no more libraries.
#[track_caller]
pub fn tree_with(more: &[&str]) -> tempfile::TempDir {
    let tree = tempfile::tempdir().expect("a folder");
    for folder in ["bin", "lib64", FROM, "data", "src", "tmp"] {
        fs::create_dir_all(tree.path().join(folder)).expect("a folder");
    }
    for program in PROGRAMS.iter().chain(more) {
        plant(tree.path(), &format!("usr/bin/{program}"), &format!("bin/{program}"));
    }
    for library in LIBRARIES {
        let path = format!("{FROM}/{library}");
        plant(tree.path(), &path, &path);
    }
    let loader = "ld-linux-x86-64.so.2";
    plant(tree.path(), &format!("{FROM}/{loader}"), &format!("lib64/{loader}"));
    tree
}

#[track_caller]
fn plant(tree: &Path, from: &str, to: &str) {
    let from = given("EXOCELL_TEST_BASE").join(from);
    // Links in the base's tree stay in their folder.
    let from = from.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    fs::copy(&from, tree.join(to)).unwrap_or_else(|error| panic!("{to}: {error}"));
}
