//! A machine with protection keys, or one that runs virtual machines: an emulated one, under a host
//! kernel of its own, whose root is a folder that a test fills.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::compiled::Programs;
use super::{IMAGE, Started, finish, given, program, small, text};

const EMULATOR: &str = "qemu-system-x86_64";
/// An emulated machine is tens of times slower.
const LIMIT: Duration = Duration::from_secs(400);
/// What it runs is emulated once more.
const VIRTUAL_LIMIT: Duration = Duration::from_secs(1500);

/// The processor that is emulated. With SMAP an iret of a program fails (seen with QEMU 7.2).
const CPU: &str = "max,-smap";
/// What QEMU otherwise says that AMD made.
const INTEL: &str = "max,-smap,vendor=GenuineIntel";

/// One that runs virtual machines (AMD-V with nested paging).
const VIRTUAL: &str = "max,-smap,+svm,+npt";
/// Where the kernel of those is, on it.
const VIRTUAL_KERNEL: &str = "kvm-linux";

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

/// The emulator that `make test` names, in which virtual machines run, and the kernel for those.
fn with_virtual_machines() -> Option<(PathBuf, PathBuf)> {
    let named = |variable| std::env::var_os(variable).filter(|path| !path.is_empty());
    let found = named("EXOCELL_TEST_EMULATOR").zip(named("EXOCELL_TEST_KVM_KERNEL"));
    if found.is_none() {
        eprintln!(
            "skipped: no emulator of virtual machines (scripts/emulator), or no kernel for them \
             (exocell kernel build --platform kvm)"
        );
    }
    found.map(|(emulator, kernel)| (emulator.into(), kernel.into()))
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
    boot_with(&Machine::of(CPU), host_kernel, root)
}

/// What a host kernel says that met an instruction which it was changing. The emulator takes one
/// processor past it that another is at, seldom, and host kernels change theirs while they boot.
const PATCHED_IN_VAIN: &str = "Oops: int3";
const BOOTS_MAX: usize = 3;

/// What emulates, and what.
struct Machine<'a> {
    emulator: &'a Path,
    cpu: &'a str,
    limit: Duration,
}

fn boot_with(machine: &Machine<'_>, host_kernel: &Path, root: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("archive");
    pack(root, &archive);
    let mut said = String::new();
    for _ in 0..BOOTS_MAX {
        said = machine.emulate(host_kernel, &archive);
        if !said.contains(PATCHED_IN_VAIN) {
            break;
        }
    }
    said
}

impl Machine<'_> {
    fn of(cpu: &str) -> Machine<'_> {
        Machine { emulator: Path::new(EMULATOR), cpu, limit: LIMIT }
    }

    fn emulate(&self, host_kernel: &Path, archive: &Path) -> String {
        let mut emulator = Command::new(self.emulator);
        emulator
            .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", self.cpu, "-smp", "2"])
            .args(["-m", "2048", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-serial", "stdio", "-no-reboot", "-append"])
            .arg("console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable cryptomgr.notests")
            .arg("-kernel")
            .arg(host_kernel)
            .arg("-initrd")
            .arg(archive);
        let mut started = Started::new(&mut emulator);
        started.close_stdin();
        let ended = started.finish(self.limit);
        let ended = ended.unwrap_or_else(|| panic!("still running after {:?}", self.limit));
        ended.ok().text().replace('\r', "")
    }
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
    fill(dir.path(), cpu, test, files);
    passes(&boot_with(&Machine::of(cpu), &host_kernel, dir.path()));
}

/// Runs the calling test once more, on a machine that runs virtual machines: there [`is_inside`]
/// holds, and the command has the guest kernel for them, too. Emulated twice, a guest is hundreds of
/// times slower, so that a test asks for no time.
#[track_caller]
pub fn again_with_virtual_machines(test: &str, files: &[&Path]) {
    let Some((emulator, kernel)) = with_virtual_machines() else { return };
    let Some(host_kernel) = host_kernel() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut modules = host_kernel.clone().into_os_string();
    modules.push("-modules");
    for entry in fs::read_dir(&modules).expect("modules beside the host's kernel").flatten() {
        copy(entry.path(), root.join("modules").join(entry.file_name()));
    }
    copy(&kernel, root.join(VIRTUAL_KERNEL));
    fill(root, VIRTUAL, test, files);
    let machine = Machine { emulator: &emulator, cpu: VIRTUAL, limit: VIRTUAL_LIMIT };
    passes(&boot_with(&machine, &host_kernel, root));
}

/// Whether this is a machine of [`again`].
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

#[track_caller]
fn passes(said: &str) {
    assert!(said.contains("test result: ok. 1 passed"), "{said}");
    assert!(said.contains("/bin/sh ended with 0\n"), "{said}");
}

/// Makes the root of such a machine, whose shell runs `test`.
#[track_caller]
fn fill(root: &Path, cpu: &str, test: &str, files: &[&Path]) {
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
    let tree = small::tree_with(&["getent"]);
    let import = ["image", "import", &format!("{}/", text(tree.path())), "--tag", IMAGE];
    let mut importing = Command::new(program());
    importing.args(import).env("EXOCELL_ROOT", root.join("var/lib/exocell"));
    finish(&mut importing, b"").ok();
    let script = format!(
        "export PATH=/bin:/sbin {INSIDE}=1 EXOCELL_KERNEL=/linux EXOCELL_TEST_BIN=/exocell\n\
         export EXOCELL_KVM_KERNEL=/{VIRTUAL_KERNEL}\n\
         exec /test --exact {test} --nocapture\n"
    );
    fs::write(root.join("script"), script).unwrap();
    fs::write(root.join("command"), "/bin/sh /script\n").unwrap();
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
