//! `--intra mpk`: the guest kernel beside hostile programs, on an emulated processor that
//! has protection keys, under a host kernel of its own.

use std::path::Path;
use std::process::Command;

use crate::common::cell::Cell;
use crate::common::compiled::{FAULTS, FOLDER_IN_CELL, Programs};
use crate::common::emulator::{
    again, boot, copy, first_program, folders, host_kernel, keys_are_here, pack, strip,
};
use crate::common::{IMAGE, given, run};

/// A program that finds its functions as it calls them: the loader of libraries has
/// instructions that programs must not have, as they stand.
const LAZY: &str = r#"
#include <math.h>
#include <stdio.h>
int main(void) { printf("%.6f\n", pow(1.5, 2.5) + sin(1.25)); return 0; }
"#;

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
    folders(root, &["dev", "proc", "sys", "tmp", "whole"]);
    copy(programs.path("emulated"), root.join("init"));
    strip(given("EXOCELL_TEST_KERNEL"), root.join("linux"));
    let command = format!(
        "/linux mem=96M initrd=/guest ncpus={vcpus} con=null con0=fd:0,fd:1 console=tty0 \
         root=/dev/ram0 rdinit=/init panic=-1 quiet fused=mpk\n"
    );
    std::fs::write(root.join("command"), command).unwrap();
}

/// What the guest and its host say.
fn emulate(host_kernel: &Path, programs: &Programs, vcpus: u32) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("inside"), dir.path().join("outside"));
    guest_root(&inside, programs);
    host_root(&outside, programs, vcpus);
    pack(&inside, &outside.join("guest"));
    boot(host_kernel, &outside)
}

#[test]
fn attacks_on_the_guest_kernel_fail_with_protection_keys() {
    let Some(host) = host_kernel() else { return };
    let programs = first_program().compile("keys", "keys", &["-static", FAULTS]);
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

/// That the program sees an open kernel as one, and what docs/src/security/inside-a-cell.md
/// says of `none`.
#[test]
fn without_keys_programs_read_the_guest_kernels_memory() {
    let programs = Programs::new().compile("keys", "keys", &["-static", FAULTS]);
    let program = format!("{FOLDER_IN_CELL}/keys");
    for (intra, is_open) in [("none", 1), ("aspace", 0)] {
        let flags = ["run", "--rm", "--intra", intra, "-v", &programs.volume()];
        run([&flags[..], &[IMAGE, &program, "read_memory"]].concat()).exited(is_open);
    }
}

/// The whole way, from the command to programs.
#[test]
fn cells_have_protection_keys_where_they_are_asked_for() {
    if !keys_are_here() {
        return again("keys::cells_have_protection_keys_where_they_are_asked_for", &[]);
    }
    let cell = Cell::idle("keys", &["--cpus", "2", "--intra", "mpk"]);
    assert_eq!(cell.inspect()["spec"]["intra"], "mpk");
    let script = "for n in 1 2 3 4; do cat /proc/self/comm & done; wait; ls / > /ls; cat /ls";
    let listed = cell.shell(script).ok();
    assert_eq!(listed.text().matches("cat\n").count(), 4, "{}", listed.text());
    assert!(listed.text().lines().any(|name| name == "usr"), "{}", listed.text());
    let gates = cell.shell("cat /proc/gates").ok();
    let gated = gates.text().lines().find_map(|line| line.strip_prefix("calls_gated "));
    assert!(gated.is_some_and(|count| count != "0"), "{}", gates.text());
}

#[test]
fn a_host_without_protection_keys_is_told_what_to_choose() {
    if keys_are_here() {
        return;
    }
    let refused = run(["run", "--rm", "--intra", "mpk", IMAGE, "true"]);
    refused.exited(125).complains_of(&["--intra mpk", "protection keys", "aspace"]);
}
