//! A state root of a test's own, with a tiny image in it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::{Finished, finish, given, program, text};

/// The name of the tiny image.
pub const TINY: &str = "tiny:latest";
/// What is in it: a shell and a few programs, with the libraries they need.
const PROGRAMS: [&str; 8] = ["sh", "dash", "cat", "sleep", "true", "dd", "id", "mkdir"];

/// A state root with this machine's guest kernel and nothing else.
pub struct PrivateRoot {
    pub dir: TempDir,
}

impl PrivateRoot {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let root = Self { dir };
        fs::create_dir(root.path()).expect("the state root");
        let kernel = given("EXOCELL_TEST_KERNEL");
        let kernels = kernel.parent().and_then(Path::parent).expect("ROOT/kernels/HASH/linux");
        std::os::unix::fs::symlink(kernels, root.path().join("kernels")).expect("a link");
        root
    }

    /// One that holds [`TINY`].
    pub fn with_image() -> Self {
        let root = Self::new();
        let tree = root.dir.path().join("tree");
        tiny_tree(&tree);
        root.run(["image", "import", text(&tree), "--tag", TINY]).ok();
        root
    }

    /// The same, whose guest kernel is the C program `source`.
    pub fn with_kernel(source: &str) -> Self {
        let root = Self::with_image();
        let real =
            given("EXOCELL_TEST_KERNEL").parent().expect("ROOT/kernels/HASH/linux").to_owned();
        let kernels = root.path().join("kernels");
        fs::remove_file(&kernels).expect("the link");
        let directory = kernels.join(real.file_name().expect("a hash"));
        fs::create_dir_all(&directory).expect("a directory");
        fs::copy(real.join("manifest.json"), directory.join("manifest.json")).expect("a copy");
        let (file, kernel) = (root.dir.path().join("kernel.c"), directory.join("linux"));
        fs::write(&file, source).expect("the source");
        let words = ["-static", "-O1", "-o", text(&kernel), text(&file)];
        assert!(Command::new("gcc").args(words).status().expect("gcc runs").success(), "gcc");
        // The store knows its kernels by their size.
        let size = fs::metadata(real.join("linux")).expect("the real one").len();
        let opened = fs::File::options().write(true).open(&kernel);
        opened.and_then(|file| file.set_len(size)).expect("padding");
        root
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub fn exocell<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(program());
        command.args(args).env("EXOCELL_ROOT", self.path());
        command
    }

    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Finished {
        finish(&mut self.exocell(args), b"")
    }

    /// `exocell run --rm FLAGS TINY COMMAND`.
    #[track_caller]
    pub fn run_cell(&self, flags: &[&str], command: &[&str]) -> Finished {
        self.run([&["run", "--rm"], flags, &[TINY], command].concat())
    }

    /// Asserts that no cell left a record here.
    #[track_caller]
    pub fn holds_no_cells(&self) {
        let entries = fs::read_dir(self.path().join("cells")).into_iter().flatten().flatten();
        let left: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// Copies a small part of the base image's tree to `tree`.
pub fn tiny_tree(tree: &Path) {
    let base = given("EXOCELL_TEST_BASE");
    let library = "usr/lib/x86_64-linux-gnu";
    for directory in ["usr/bin", "usr/lib64", library, "tmp", "proc", "sys", "dev", "etc"] {
        fs::create_dir_all(tree.join(directory)).expect("a directory");
    }
    for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        std::os::unix::fs::symlink(target, tree.join(link)).expect("a link");
    }
    let copy = |path: &str| {
        fs::copy(base.join(path), tree.join(path))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    };
    PROGRAMS.iter().for_each(|program| copy(&format!("usr/bin/{program}")));
    for name in ["libc.so.6", "libselinux.so.1", "libpcre2-8.so.0", "ld-linux-x86-64.so.2"] {
        copy(&format!("{library}/{name}"));
    }
    std::os::unix::fs::symlink(
        "../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        tree.join("usr/lib64/ld-linux-x86-64.so.2"),
    )
    .expect("the loader's link");
}
