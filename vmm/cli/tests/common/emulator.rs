//! A machine with protection keys: an emulated one, under a host kernel of its own, whose
//! root is a folder that a test fills.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::compiled::Programs;
use super::{IMAGE, Started, finish, given, program, small, text};

/// An emulated machine is tens of times slower.
const LIMIT: Duration = Duration::from_secs(400);

/// The processor that is emulated. With SMAP an iret of a program fails (seen with QEMU 7.2).
const CPU: &str = "max,-smap";
/// What QEMU otherwise says that AMD made.
const INTEL: &str = "max,-smap,vendor=GenuineIntel";

/// What the test executable of [`again`] finds set there.
const INSIDE: &str = "EXOCELL_TEST_INSIDE";
/// Where its files are.
pub const FILES_INSIDE: &str = "/files";
/// The host's programs there.
const TOOLS: [&str; 4] = ["/bin/sh", "/bin/rm", "/bin/true", "/sbin/mkfs.ext4"];

/// The host kernel that `make test` names, if it found one.
pub fn host_kernel() -> Option<PathBuf> {
    let found = std::env::var_os("EXOCELL_TEST_HOST").filter(|path| !path.is_empty());
    if found.is_none() {
        eprintln!("skipped: no kernel for an emulated host (scripts/emulated-host)");
    }
    found.map(PathBuf::from)
}

/// Whether this machine has the keys, be it emulated or not.
pub fn keys_are_here() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "ospke")
}

/// Packs a folder as `cpio`'s newc format, as kernels take it.
pub fn pack(folder: &Path, archive: &Path) {
    let script =
        format!("find . | LC_ALL=C sort | cpio --quiet -o -H newc > {}", archive.display());
    let status = Command::new("sh").arg("-c").arg(script).current_dir(folder).status();
    assert!(status.expect("sh").success(), "cpio is installed by scripts/setup");
}

pub fn folders(root: &Path, names: &[&str]) {
    for name in names {
        fs::create_dir_all(root.join(name)).expect("a folder");
    }
}

pub fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let (from, to) = (from.as_ref(), to.as_ref());
    fs::create_dir_all(to.parent().expect("a file in a folder")).expect("a folder");
    fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}

/// A copy without what only debuggers read.
pub fn strip(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(to.as_ref()).arg(from.as_ref());
    assert!(strip.status().expect("strip").success());
}

/// The first program of such a machine, which runs what `/command` says, a line each.
pub fn first_program() -> Programs {
    Programs::new().compile("emulated", "emulated", &["-static"])
}

/// What is written to the console of an emulated machine with this root, to its end.
pub fn boot(host_kernel: &Path, root: &Path) -> String {
    boot_with(CPU, host_kernel, root)
}

/// What a host kernel says that met an instruction which it was changing. The emulator takes one
/// processor past it that another is at, seldom, and host kernels change theirs while they boot.
const PATCHED_IN_VAIN: &str = "Oops: int3";
const BOOTS_MAX: usize = 3;

fn boot_with(cpu: &str, host_kernel: &Path, root: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("archive");
    pack(root, &archive);
    let mut said = String::new();
    for _ in 0..BOOTS_MAX {
        said = emulate(cpu, host_kernel, &archive);
        if !said.contains(PATCHED_IN_VAIN) {
            break;
        }
    }
    said
}

fn emulate(cpu: &str, host_kernel: &Path, archive: &Path) -> String {
    let mut emulator = Command::new("qemu-system-x86_64");
    emulator
        .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", cpu, "-smp", "2"])
        .args(["-m", "2048", "-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-serial", "stdio", "-no-reboot", "-append"])
        .arg("console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable cryptomgr.notests")
        .arg("-kernel")
        .arg(host_kernel)
        .arg("-initrd")
        .arg(archive);
    let mut started = Started::new(&mut emulator);
    started.close_stdin();
    let ended = started.finish(LIMIT).unwrap_or_else(|| panic!("still running after {LIMIT:?}"));
    ended.ok().text().replace('\r', "")
}

/// Runs the calling test, by its whole name, once more on a machine that has keys, with `files` of this
/// one ([`file_inside`]). There the command is installed, with an image of a shell and little
/// else under the name of the base image.
#[track_caller]
pub fn again(test: &str, files: &[&Path]) {
    again_with(CPU, test, files);
}

/// The same on a machine whose processor says that Intel made it, with the benchmarks beside the
/// command.
#[track_caller]
pub fn again_on_intel(test: &str) {
    again_with(INTEL, test, &[]);
}

#[track_caller]
fn again_with(cpu: &str, test: &str, files: &[&Path]) {
    // First, or the test would be skipped there and so pass here.
    assert!(std::env::var_os(INSIDE).is_none(), "this emulator has no protection keys");
    let Some(host_kernel) = host_kernel() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    folders(root, &["dev", "proc", "sys", "tmp", "whole", "var/lib/exocell"]);
    copy(first_program().path("emulated"), root.join("init"));
    let this_test = std::env::current_exe().expect("the test's own executable");
    let benches = program().with_file_name("exocell-bench");
    let benches = (cpu == INTEL).then_some((&*benches, "exocell-bench"));
    let always = [(&*program(), "exocell"), (&*this_test, "test")];
    for (from, to) in always.into_iter().chain(benches) {
        libraries(from, root);
        strip(from, root.join(to));
    }
    for tool in TOOLS {
        libraries(Path::new(tool), root);
        copy(tool, root.join(&tool[1..]));
    }
    copy(given("EXOCELL_INIT"), root.join("exocell-init"));
    copy(given("EXOCELL_TEST_KERNEL"), root.join("linux"));
    let files_inside = root.join(&FILES_INSIDE[1..]);
    for file in files {
        copy(file, files_inside.join(file.file_name().expect("a file")));
    }
    let tree = small::tree();
    let import = ["image", "import", &format!("{}/", text(tree.path())), "--tag", IMAGE];
    let mut importing = Command::new(program());
    importing.args(import).env("EXOCELL_ROOT", root.join("var/lib/exocell"));
    finish(&mut importing, b"").ok();
    let script = format!(
        "export PATH=/bin:/sbin {INSIDE}=1 EXOCELL_KERNEL=/linux EXOCELL_TEST_BIN=/exocell\n\
         exec /test --exact {test} --nocapture\n"
    );
    fs::write(root.join("script"), script).unwrap();
    fs::write(root.join("command"), "/bin/sh /script\n").unwrap();
    let said = boot_with(cpu, &host_kernel, root);
    assert!(said.contains("test result: ok. 1 passed"), "{said}");
    assert!(said.contains("/bin/sh ended with 0\n"), "{said}");
}

/// A file of [`again`], on the machine that is meant.
pub fn file_inside(name: &str) -> Option<PathBuf> {
    std::env::var_os(INSIDE).map(|_| Path::new(FILES_INSIDE).join(name))
}

/// Copies what a program is linked with to where it finds that.
fn libraries(program: &Path, root: &Path) {
    let listed = finish(Command::new("ldd").arg(program), b"").ok();
    let paths: BTreeSet<&str> =
        listed.text().split_whitespace().filter(|word| word.starts_with('/')).collect();
    for path in paths {
        copy(path, root.join(&path[1..]));
    }
}
