//! The build's steps on a source of a few lines, whose make rules copy a finished program.
//! The real kernel is built by `make kernel`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use exocell_kernel::{BuildOptions, Kernel, KernelError, Recipe, Step, build};
use sha2::{Digest, Sha256};

const MAKEFILE: &str = "\
allnoconfig:
\tgrep -v CONFIG_LOST $(KCONFIG_ALLCONFIG) > .config
linux:
\t@if grep -q BREAK greeting; then echo 'greeting is broken' >&2; exit 1; fi
\tmkdir -p include/config
\techo 1.0-fake > include/config/kernel.release
\tcp /bin/true linux
";

/// Links a kernel of two parts, with what is between them.
const LINKING_MAKEFILE: &str = "\
.PHONY: linux
allnoconfig:
\tcp $(KCONFIG_ALLCONFIG) .config
linux:
\tmkdir -p include/config
\techo 1.0-fake > include/config/kernel.release
\tgcc -nostdlib -static -Wl,-e,_sinittext -o linux first.S $(wildcard kernel/exocell_pad.S) last.S
";
const FIRST: &str = ".globl _sinittext, keyed_signal_open, keyed_left, keyed_left_to_step\n\
    .globl keyed_gate_open, keyed_xrstor\n\
    .set keyed_signal_open, 8\n.set keyed_left, 8\n.set keyed_left_to_step, 8\n\
    .set keyed_gate_open, 8\n.set keyed_xrstor, 8\n\
    _sinittext:\n wrgsbase %rax\n";
const LAST: &str = ".globl last, __start_rodata, _sexittext, _eexittext\n\
    .balign 16\nlast: ret\n__start_rodata: _sexittext: _eexittext:\n";

/// A patch that replaces `from` by `to` in the one-line file `greeting`.
fn patch(from: &str, to: &str) -> String {
    format!(
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n\
         From: A <a@example.invalid>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\nSubject: [PATCH] greet\n\n---\n\
         diff --git a/greeting b/greeting\n--- a/greeting\n+++ b/greeting\n@@ -1 +1 @@\n-{from}\n+{to}\n"
    )
}

/// A state root and a tarball `fake-1.0/{Makefile,greeting}`.
struct Bench {
    folder: tempfile::TempDir,
    sha256: String,
}

impl Bench {
    fn new() -> Self {
        Self::of(&[("Makefile", MAKEFILE)])
    }

    /// A kernel that begins with this code.
    fn linking(code: &str) -> Self {
        let first = format!("{FIRST}{code}");
        let files = [("Makefile", LINKING_MAKEFILE), ("first.S", &first), ("last.S", LAST)];
        Self::of(&[&files[..], &[("kernel/Makefile", "")]].concat())
    }

    fn of(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let tree = folder.path().join("fake-1.0");
        for (name, text) in files {
            let file = tree.join(name);
            fs::create_dir_all(file.parent().expect("a folder")).expect("create");
            fs::write(file, text).expect("write");
        }
        fs::write(tree.join("greeting"), "hello\n").expect("write");
        let mut tar = Command::new("tar");
        tar.current_dir(folder.path()).args(["-cJf", "fake.tar.xz", "fake-1.0"]);
        assert!(tar.status().expect("run tar").success());
        let hash = Sha256::digest(fs::read(folder.path().join("fake.tar.xz")).expect("read"));
        let sha256 = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder, sha256 }
    }

    fn options(&self, patch: &str, config: &str) -> BuildOptions {
        let pin = format!(
            "version = \"1.0\"\n[[tarball]]\nname = \"fake.tar.xz\"\nsha256 = \"{}\"\n",
            self.sha256
        );
        let files = [
            ("KERNEL", pin.as_str()),
            ("series", "1.patch\n"),
            ("1.patch", patch),
            ("config/a.config", config),
        ];
        let tarball = Some(self.folder.path().join("fake.tar.xz"));
        BuildOptions { recipe: Recipe::from_files(files), tarball, jobs: 2 }
    }

    fn build(&self, options: &BuildOptions) -> (Result<Kernel, KernelError>, Vec<Step>) {
        let mut steps = Vec::new();
        let result = build(self.folder.path(), options, &mut |progress| steps.push(progress.step));
        (result, steps)
    }

    fn kernels(&self) -> PathBuf {
        self.folder.path().join("kernels")
    }

    /// What lies in the cache, without the lock and the logs.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.kernels()).expect("list");
        let names =
            entries.map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "lock" && name != "failed.log").collect()
    }
}

fn is_executable(path: &Path) -> bool {
    Command::new(path).status().is_ok_and(|status| status.success())
}

#[test]
fn a_kernel_is_built_once_and_then_found() {
    let bench = Bench::new();
    let options = bench.options(&patch("hello", "good day"), "CONFIG_A=y\n");
    let (kernel, steps) = bench.build(&options);
    let kernel = kernel.expect("built");
    assert_eq!(
        steps,
        [Step::Fetch, Step::Unpack, Step::Patch, Step::Configure, Step::Compile, Step::Install]
    );
    assert_eq!(
        (kernel.manifest.version.as_str(), kernel.manifest.hash.as_str()),
        ("1.0-fake", options.recipe.hash().as_str())
    );
    assert!(is_executable(&kernel.path));
    assert!(fs::read_to_string(&kernel.log).expect("log").contains("Applying: greet"));
    assert_eq!(fs::read_to_string(&kernel.config).expect("config").trim(), "CONFIG_A=y");
    let (again, steps) = bench.build(&options);
    assert_eq!((again.expect("found"), steps), (kernel, vec![]));
    assert_eq!(bench.left(), [options.recipe.hash()]);
}

#[test]
fn a_patch_that_does_not_apply_names_itself_and_leaves_only_the_log() {
    let bench = Bench::new();
    let (result, _) = bench.build(&bench.options(&patch("farewell", "good day"), "CONFIG_A=y\n"));
    let error = result.expect_err("does not apply");
    assert!(matches!(error, KernelError::Step { step: Step::Patch, .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("1.patch")
            && text.contains("failed.log")
            && text.contains("patch does not apply"),
        "{text}"
    );
    assert!(bench.left().is_empty());
    assert!(bench.kernels().join("failed.log").exists());
}

#[test]
fn a_symbol_that_did_not_survive_fails_the_build() {
    let bench = Bench::new();
    let (result, steps) =
        bench.build(&bench.options(&patch("hello", "x"), "CONFIG_A=y\nCONFIG_LOST=y\n"));
    let error = result.expect_err("lost symbol").to_string();
    assert!(
        error.contains("CONFIG_LOST: wanted y, found n") && !error.contains("CONFIG_A"),
        "{error}"
    );
    assert_eq!(steps.last(), Some(&Step::Configure));
}

#[test]
fn a_compiler_error_is_shown_and_the_next_build_is_clean() {
    let bench = Bench::new();
    let (result, _) = bench.build(&bench.options(&patch("hello", "BREAK"), "CONFIG_A=y\n"));
    let error = result.expect_err("does not compile").to_string();
    assert!(error.contains("step 'compile'") && error.contains("greeting is broken"), "{error}");
    let (result, _) = bench.build(&bench.options(&patch("hello", "whole"), "CONFIG_A=y\n"));
    result.expect("the failure left nothing in the way");
    assert!(!bench.kernels().join("failed.log").exists());
}

#[test]
fn a_tarball_that_was_changed_is_refused_before_it_is_unpacked() {
    let bench = Bench::new();
    let options = bench.options(&patch("hello", "x"), "CONFIG_A=y\n");
    fs::write(bench.folder.path().join("fake.tar.xz"), "other").expect("write");
    let (result, steps) = bench.build(&options);
    assert!(matches!(result, Err(KernelError::UnknownTarball { .. })), "{result:?}");
    assert_eq!(steps, [Step::Fetch]);
}

#[test]
fn two_builders_at_once_make_one_kernel() {
    let bench = Bench::new();
    let options = bench.options(&patch("hello", "x"), "CONFIG_A=y\n");
    let compiled = std::thread::scope(|scope| {
        let builders = [(); 2].map(|()| scope.spawn(|| bench.build(&options)));
        let results = builders.map(|builder| builder.join().expect("no panic"));
        results.iter().for_each(|(kernel, _)| assert!(kernel.is_ok(), "{kernel:?}"));
        results.iter().filter(|(_, steps)| steps.contains(&Step::Compile)).count()
    });
    assert_eq!(compiled, 1);
}

#[test]
fn a_kernel_whose_text_could_change_keys_gets_another_layout() {
    // A call over a distance that reads as XRSTOR from its second byte on.
    let call = ".balign 16, 0x90\n .skip 12, 0x90\n call last\n .skip 0x28ae0f, 0xcc\n";
    let bench = Bench::linking(call);
    let (kernel, _) = bench.build(&bench.options(&patch("hello", "good day"), "CONFIG_A=y\n"));
    let kernel = kernel.expect("built");
    let log = fs::read_to_string(&kernel.log).expect("log");
    assert!(log.contains("layout 1 of 8: could change keys at _sinittext+0x"), "{log}");
    assert!(!log.contains("layout 2 of 8"), "{log}");
    // It has what is an instruction, and keeps its first layout where that is all.
    let bench = Bench::linking("wrpkru\n");
    let (kernel, _) = bench.build(&bench.options(&patch("hello", "good day"), "CONFIG_A=y\n"));
    let log = fs::read_to_string(kernel.expect("built").log).expect("log");
    assert!(log.contains("objdump") && !log.contains("layout 1"), "{log}");
}

#[test]
fn a_kernel_that_could_change_keys_in_each_layout_is_no_kernel() {
    let bench = Bench::linking("mov $0xef010f, %eax\n");
    let (result, _) = bench.build(&bench.options(&patch("hello", "good day"), "CONFIG_A=y\n"));
    let error = result.expect_err("no layout is good").to_string();
    assert!(error.contains("in each of 8 layouts") && error.contains("_sinittext+0x"), "{error}");
    assert_eq!(bench.left(), Vec::<String>::new());
}
