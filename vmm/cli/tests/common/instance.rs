//! An instance as SWE-bench has them, made of two releases of a package: the
//! earlier one is the repository, the later one's sources are the patch and
//! its tests the tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, Weak};

use serde_json::{Value, json};

use super::{Finished, finish, given, pip, program, text};

const EARLIER: &str = include_str!("../swebench/earlier.txt");
const LATER: &str = include_str!("../swebench/later.txt");
const TOOLS: &str = include_str!("../projects/tools.txt");
const IMAGE: &str = "swebench/cachetools:latest";
/// Of the base image's tree, what no test of the instance needs.
const NOT_NEEDED: [&str; 4] = ["usr/include", "usr/lib/gcc", "usr/share/perl", "usr/share/python3"];

/// The tests that the patch makes pass, and some that pass before and after.
const FIXED: [&str; 3] = [
    "tests/test_mru.py::MRUCacheTest::test_evict__with_access",
    "tests/test_mru.py::MRUCacheTest::test_evict__with_delete",
    "tests/test_mru.py::MRUCacheTest::test_evict__writes_only",
];
const KEPT: [&str; 2] =
    ["tests/test_mru.py::MRUCacheTest::test_defaults", "tests/test_mru.py::MRUCacheTest::test_pop"];

/// A state root with the instance's image; tests that run at once share it.
pub struct Instance {
    pub root: tempfile::TempDir,
    /// What solves it.
    pub patch: String,
    tests: String,
}

impl Instance {
    pub fn get() -> Arc<Self> {
        static SHARED: Mutex<Weak<Instance>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self::new());
            *shared = Arc::downgrade(&made);
            made
        })
    }

    fn new() -> Self {
        let (earlier, later) = (release(EARLIER), release(LATER));
        let root = tempfile::tempdir().expect("a state root");
        let tree = tempfile::tempdir_in(earlier.parent().expect("a folder")).expect("a folder");
        plant(&tree.path().join("root"), &earlier);
        let own = Self {
            root,
            patch: diff(&earlier, &later, "src"),
            tests: diff(&earlier, &later, "tests"),
        };
        let folder = format!("{}/", text(&tree.path().join("root")));
        finish(&mut own.exocell(&["image", "import", &folder, "--tag", IMAGE]), b"").ok();
        own
    }

    /// `exocell ARGS` on the instance's state root.
    pub fn exocell(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("--root").arg(self.root.path()).args(args);
        command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
        command
    }

    /// A dataset's row.
    pub fn row(&self, id: &str) -> Value {
        let mark = "EOF_OF_THE_TESTS";
        let script = format!(
            "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit status\n\
             git apply -v - <<'{mark}'\n{}{mark}\n: '>>>>> Start Test Output'\n\
             python3 -m pytest -rA tests/test_mru.py\n: '>>>>> End Test Output'\n\
             git checkout -- tests\n",
            self.tests
        );
        json!({
            "repo": "tkem/cachetools", "instance_id": id, "base_commit": "HEAD",
            "patch": self.patch, "test_patch": self.tests, "problem_statement": "", "version": "5.4",
            "FAIL_TO_PASS": json!(FIXED).to_string(), "PASS_TO_PASS": json!(KEPT).to_string(),
            "image": IMAGE, "eval_script": script, "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail", "image_assets": "",
        })
    }

    /// The records of cells.
    pub fn records(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root.path().join("cells")).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.starts_with('.')).collect()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        for id in self.records() {
            finish(&mut self.exocell(&["rm", "-f", &id]), b"");
        }
    }
}

/// The unpacked release that `pins` names.
fn release(pins: &str) -> PathBuf {
    let kept = pip::kept("swebench", pins, |work| {
        let list = pip::list(work, "pins.txt", pins);
        let download = ["download", "--no-binary", ":all:", "-d", text(work), "-r", text(&list)];
        pip::pip(&download);
        for archive in fs::read_dir(work).expect("a folder").flatten() {
            if archive.file_name().to_string_lossy().ends_with(".tar.gz") {
                let release = work.join("release");
                fs::create_dir(&release).expect("a folder");
                let strip = ["--strip-components", "1", "-C", text(&release), "-xf"];
                ran(Command::new("tar").args(strip).arg(archive.path()));
            }
        }
    });
    kept.join("release")
}

#[track_caller]
fn ran(command: &mut Command) -> Finished {
    finish(command, b"").ok()
}

/// Makes the image's tree: the base image's, the tools, and the repository at
/// /testbed. What is the base image's is linked, not copied.
fn plant(root: &Path, release: &Path) {
    ran(Command::new("cp").args(["-al", text(&given("EXOCELL_TEST_BASE").join(".")), text(root)]));
    for folder in NOT_NEEDED {
        let _ = fs::remove_dir_all(root.join(folder));
    }
    let tools = pip::wheels("swebench-tools", TOOLS);
    ran(Command::new("cp").args(["-r", text(&tools), text(&root.join("opt/tools"))]));
    let packages = root.join("usr/lib/python3/dist-packages/tools.pth");
    fs::write(packages, "/opt/tools\n/testbed/src\n").expect("a list of paths");
    let testbed = root.join("testbed");
    ran(Command::new("cp").args(["-r", text(release), text(&testbed)]));
    for words in [&["init", "-q"][..], &["add", "-A"], &["commit", "-q", "-m", "release"]] {
        let who = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
        ran(Command::new("git").arg("-C").arg(&testbed).args(who).args(words));
    }
    symlink("python3", root.join("usr/bin/python")).expect("a link");
}

/// What the later release changed in `folder`, as a patch of the repository.
fn diff(earlier: &Path, later: &Path, folder: &str) -> String {
    let words = ["diff", "--no-index", "--no-prefix", "--", text(earlier), text(later)];
    let whole = finish(Command::new("git").args(words), b"").exited(1);
    let clean = |path: &Path| text(path).trim_start_matches('/').to_owned();
    let plain = whole.text().replace(&clean(earlier), "a").replace(&clean(later), "b");
    let sections = plain.split_inclusive('\n').fold(Vec::<String>::new(), |mut found, line| {
        if line.starts_with("diff --git ") || found.is_empty() {
            found.push(String::new());
        }
        found.last_mut().expect("a section").push_str(line);
        found
    });
    let mine = format!("diff --git a/{folder}/");
    let parts = sections.into_iter().filter(|section| section.starts_with(&mine));
    let mut patch = parts.filter(|section| !section.contains(".egg-info/")).collect::<String>();
    if !patch.ends_with('\n') {
        patch.push('\n');
    }
    patch
}
