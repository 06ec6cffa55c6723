//! `make dist`: each package installs on a system that has nothing of ours and no compiler,
//! and a cell runs from it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use common::{Finished, finish, given, text};
use tempfile::TempDir;

/// What a new user does on the clean system, after the package is there. The base image has a
/// compiler, which goes first. `/state` is memory, as all else that is written.
const FIRST_CELL: &str = r#"
export EXOCELL_ROOT=/state
rm -f /usr/bin/*gcc* /usr/bin/cc /usr/bin/c++* /usr/bin/*g++* /usr/bin/ld /usr/bin/ld.* /usr/bin/make
exocell version
exocell doctor
exocell kernel status
mkdir -p /tree/bin
cp -L /bin/sh /bin/echo /bin/uname /tree/bin/
for library in $(ldd /bin/sh /bin/echo /bin/uname | grep -o '/[^ ]*\.so[^ ]*' | sort -u); do
    mkdir -p "/tree$(dirname "$library")" && cp -L "$library" "/tree$library"
done
exocell image import /tree --tag first
exocell run --rm first sh -c 'echo hello from $(uname -r)'
"#;

/// The most that a program of a package may have, in bytes, without symbols.
const PROGRAM_BYTES_MAX: &[(&str, u64)] =
    &[("exocell", 62_000_000), ("exocell-static", 63_000_000), ("exocell-init", 2_200_000)];

/// What a wheel has for Python: the client, entry points of the adapters, and configurations.
const IN_A_WHEEL: &str = r#"
import importlib.metadata, importlib.resources, exocell
exocell.Sandbox
told = importlib.metadata.distribution("exocell")
groups = {point.group for point in told.entry_points}
assert groups == {"console_scripts", "inspect_ai", "nemo_gym.sandbox_providers"}, groups
extras = told.metadata.get_all("Provides-Extra")
assert extras == ["deepagents", "harbor", "inspect", "nemo"], extras
configs = importlib.resources.files("exocell") / "configs"
assert {file.name for file in configs.iterdir()} == {"mini-swe-agent.yaml", "swe-rex.yaml"}
"#;

/// The packages, made of what was built.
static DIST: LazyLock<TempDir> = LazyLock::new(|| {
    let out = tempfile::tempdir().expect("a temporary directory");
    let mut dist = Command::new("../../scripts/dist");
    dist.arg(out.path());
    finish(&mut dist, b"").ok();
    out
});

fn package(ending: &str) -> PathBuf {
    let all = fs::read_dir(DIST.path()).expect("the folder").map(|entry| entry.expect("it").path());
    let mut fitting = all.filter(|path| text(path).ends_with(ending));
    fitting.next().unwrap_or_else(|| panic!("no package {ending}"))
}

/// Runs `script` on the base image as the host's root file system, with `given` as /given there.
#[track_caller]
fn on_a_clean_system(given_there: &Path, script: &str) -> Finished {
    let work = tempfile::tempdir().expect("a temporary directory");
    let enter = r#"set -eu
mount -t tmpfs memory "$0"
cd "$0"
mkdir above work root
mount -t overlay -o "lowerdir=$1,upperdir=above,workdir=work" overlay root
cd root
mkdir -p given state .before
for name in proc sys dev; do mount --rbind "/$name" "$name"; done
mount -t tmpfs memory state
mount -t tmpfs memory tmp
cp -r "$2" given/
pivot_root . .before
umount -l .before
exec sh -euc "$3""#;
    let mut inside = Command::new("unshare");
    inside.args(["--mount", "--propagation", "private", "sh", "-c", enter, text(work.path())]);
    inside.args([&given("EXOCELL_TEST_BASE"), given_there]).arg(script);
    inside
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root");
    finish(&mut inside, b"").ok()
}

#[track_caller]
fn greets(ended: &Finished) {
    assert!(ended.text().ends_with("-exocell"), "{}", ended.text());
    assert!(ended.text().contains("hello from "), "{}", ended.text());
}

#[test]
fn the_debian_package_installs_and_a_cell_runs() {
    let install = "dpkg --install /given/*.deb > /dev/null
        test -e /lib/systemd/system/exocell-docker.socket
        test -e /usr/share/man/man1/exocell-run.1.gz
        test -e /usr/share/bash-completion/completions/exocell\n";
    let remove = "dpkg --purge exocell > /dev/null; ! test -e /usr/lib/exocell";
    let ended = on_a_clean_system(&package(".deb"), &[install, FIRST_CELL, remove].concat());
    greets(&ended);
}

#[test]
fn the_tarball_installs_and_a_cell_runs() {
    let install = "cd /tmp; tar -xf /given/*.tar.gz; cd exocell-*; ./install.sh; cd /\n";
    let remove = "/tmp/exocell-*/install.sh --remove > /dev/null; ! test -e /usr/local/lib/exocell";
    let ended = on_a_clean_system(&package(".tar.gz"), &[install, FIRST_CELL, remove].concat());
    greets(&ended);
}

/// With the machine's Python, and no program but those that a cell needs.
#[test]
fn the_wheel_installs_and_a_cell_runs() {
    let work = tempfile::tempdir().expect("a temporary directory");
    let place = work.path().join("venv");
    let run = |words: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        finish(&mut command, b"").ok()
    };
    run(&["python3", "-m", "venv", "--without-pip", text(&place)]);
    let python = place.join("bin/python");
    let words = ["pip3", "--python", text(&python), "install", "--quiet", "--no-index"];
    run(&[&words[..], &[text(&package(".whl"))]].concat());
    let tree = work.path().join("tree");
    common::guest::tiny_tree(&tree);
    let tools = work.path().join("tools");
    fs::create_dir(&tools).expect("a folder");
    std::os::unix::fs::symlink("/usr/sbin/mkfs.ext4", tools.join("mkfs.ext4")).expect("a link");
    let exocell = |words: &[&str]| {
        let mut command = Command::new(place.join("bin/exocell"));
        command.args(words).env_clear().env("PATH", &tools);
        finish(command.env("EXOCELL_ROOT", work.path().join("root")), b"").ok()
    };
    exocell(&["image", "import", text(&tree), "--tag", "tiny"]);
    assert_eq!(
        exocell(&["run", "--rm", "tiny", "sh", "-c", "echo from a wheel"]).text(),
        "from a wheel"
    );
    run(&[text(&python), "-c", IN_A_WHEEL]);
}

/// No program of a package grows unnoticed: what a new dependency takes is weighed when it comes.
#[test]
fn the_command_is_small() {
    let list = Command::new("tar").arg("-tvzf").arg(package(".tar.gz")).output().expect("tar runs");
    let list = String::from_utf8(list.stdout).expect("UTF-8");
    let bytes = |program: &str| -> u64 {
        let ending = format!("/usr/lib/exocell/{program}");
        let mut lines = list.lines().filter(|line| line.ends_with(&ending));
        let line = lines.next().unwrap_or_else(|| panic!("no {program}: {list}"));
        line.split_whitespace().nth(2).and_then(|size| size.parse().ok()).expect("a size")
    };
    for (program, most) in PROGRAM_BYTES_MAX {
        let bytes = bytes(program);
        assert!(bytes <= *most, "{program} has {bytes} bytes; the most is {most}");
    }
}

/// What is linked in is listed, and each file is what its checksum says.
#[test]
fn checksums_and_the_bill_of_materials_are_right() {
    let mut check = Command::new("sha256sum");
    finish(check.args(["--check", "--strict", "SHA256SUMS"]).current_dir(DIST.path()), b"").ok();
    let bill: serde_json::Value =
        serde_json::from_slice(&fs::read(package(".spdx.json")).expect("the bill")).expect("JSON");
    let names: Vec<_> = bill["packages"].as_array().expect("packages").iter().collect();
    let has = |name: &str| names.iter().any(|package| package["name"] == name);
    assert!(has("wasmtime") && has("linux") && has("exocell-init"));
    assert!(!has("proptest") && !has("libfuzzer-sys"), "only what is shipped");
}
