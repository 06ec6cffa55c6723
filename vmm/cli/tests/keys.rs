//! `--intra mpk`: the guest kernel beside hostile programs, on an emulated processor that
//! has protection keys, under a host kernel of its own.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::compiled::{FAULTS, FOLDER_IN_CELL, Programs};
use common::{IMAGE, Started, given, run};

/// An emulated machine is tens of times slower.
const LIMIT: Duration = Duration::from_secs(400);

/// A program that finds its functions as it calls them: the loader of libraries has
/// instructions that programs must not have, as they stand.
const LAZY: &str = r#"
#include <math.h>
#include <stdio.h>
int main(void) { printf("%.6f\n", pow(1.5, 2.5) + sin(1.25)); return 0; }
"#;

fn emulated_host() -> Option<PathBuf> {
    let found = std::env::var_os("EXOCELL_TEST_HOST").filter(|path| !path.is_empty());
    if found.is_none() {
        eprintln!("skipped: no kernel for an emulated host (scripts/emulated-host)");
    }
    found.map(PathBuf::from)
}

/// Packs a folder as `cpio`'s newc format, as kernels take it.
fn pack(folder: &Path, archive: &Path) {
    let script =
        format!("find . | LC_ALL=C sort | cpio --quiet -o -H newc > {}", archive.display());
    let status = Command::new("sh").arg("-c").arg(script).current_dir(folder).status();
    assert!(status.expect("sh").success(), "cpio is installed by scripts/setup");
}

fn folders(root: &Path, names: &[&str]) {
    for name in names {
        std::fs::create_dir_all(root.join(name)).expect("a folder");
    }
}

fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let (from, to) = (from.as_ref(), to.as_ref());
    std::fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}

/// The programs of the guest, with the libraries of the one that needs some.
fn guest_root(root: &Path, programs: &Programs) {
    folders(root, &["dev", "proc", "tmp", "lib64", "lib/x86_64-linux-gnu"]);
    copy(programs.path("emulated"), root.join("init"));
    copy(programs.path("keys"), root.join("keys"));
    std::fs::write(root.join("lazy.c"), LAZY).unwrap();
    let status = Command::new("gcc")
        .args(["-O0", "-no-pie", "-Wl,-z,lazy", "-o", "lazy", "lazy.c", "-lm"])
        .current_dir(root)
        .status();
    assert!(status.expect("gcc").success());
    copy("/lib64/ld-linux-x86-64.so.2", root.join("lib64/ld-linux-x86-64.so.2"));
    for library in ["libc.so.6", "libm.so.6"] {
        let place = Path::new("lib/x86_64-linux-gnu").join(library);
        copy(Path::new("/").join(&place), root.join(place));
    }
    std::fs::write(root.join("programs"), "/lazy\n/keys\n").unwrap();
}

fn host_root(root: &Path, programs: &Programs, vcpus: u32) {
    folders(root, &["dev", "proc", "tmp"]);
    copy(programs.path("emulated"), root.join("init"));
    let kernel = root.join("linux");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&kernel).arg(given("EXOCELL_TEST_KERNEL"));
    assert!(strip.status().expect("strip").success());
    let command = format!(
        "/linux mem=96M initrd=/guest ncpus={vcpus} con=null con0=fd:0,fd:1 console=tty0 \
         root=/dev/ram0 rdinit=/init panic=-1 quiet fused=mpk\n"
    );
    std::fs::write(root.join("command"), command).unwrap();
}

/// What the guest and its host say.
fn emulate(host: &Path, programs: &Programs, vcpus: u32) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("inside"), dir.path().join("outside"));
    guest_root(&inside, programs);
    host_root(&outside, programs, vcpus);
    pack(&inside, &outside.join("guest"));
    let archive = dir.path().join("archive");
    pack(&outside, &archive);
    let mut emulator = Command::new("qemu-system-x86_64");
    emulator
        .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"])
        .args(["-m", "1024", "-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-serial", "stdio", "-no-reboot", "-append"])
        .arg("console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable cryptomgr.notests")
        .arg("-kernel")
        .arg(host)
        .arg("-initrd")
        .arg(&archive);
    let mut started = Started::new(&mut emulator);
    started.close_stdin();
    let ended = started.finish(LIMIT).unwrap_or_else(|| panic!("still running after {LIMIT:?}"));
    ended.ok().text().replace('\r', "")
}

#[test]
fn attacks_on_the_guest_kernel_fail_with_protection_keys() {
    let Some(host) = emulated_host() else { return };
    let programs = Programs::new().compile("keys", "keys", &["-static", FAULTS]).compile(
        "emulated",
        "emulated",
        &["-static"],
    );
    for vcpus in [1, 2] {
        let said = emulate(&host, &programs, vcpus);
        // What the same sum is here
        assert!(said.contains("3.704661\n/lazy ended with 0\n"), "{vcpus} vCPUs: {said}");
        assert_eq!(said.matches(" held\n").count(), 18, "{vcpus} vCPUs: {said}");
        assert!(!said.contains("broken"), "{vcpus} vCPUs: {said}");
        assert!(said.contains("/keys ended with 0\n"), "{vcpus} vCPUs: {said}");
        // The guest kernel lives on, to its end.
        assert!(said.contains("/linux ended with 0\n"), "{vcpus} vCPUs: {said}");
    }
}

/// That the program sees an open kernel as one, and what the README says of `none`.
#[test]
fn without_keys_programs_read_the_guest_kernels_memory() {
    let programs = Programs::new().compile("keys", "keys", &["-static", FAULTS]);
    let program = format!("{FOLDER_IN_CELL}/keys");
    for (intra, is_open) in [("none", 1), ("aspace", 0)] {
        let flags = ["run", "--rm", "--intra", intra, "-v", &programs.volume()];
        run([&flags[..], &[IMAGE, &program, "read_memory"]].concat()).exited(is_open);
    }
}

#[test]
fn a_host_without_protection_keys_is_told_what_to_choose() {
    if keys_are_here() {
        return;
    }
    let refused = run(["run", "--rm", "--intra", "mpk", IMAGE, "true"]);
    refused.exited(125).complains_of(&["--intra mpk", "protection keys", "aspace"]);
}

fn keys_are_here() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "ospke")
}
