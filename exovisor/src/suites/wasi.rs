//! Programs of wasi-testsuite (preview 1) and wasi-threads, run as `exocell run` runs them.
//!
//! They are others' work and built ones, so they are not in this repository: `scripts/setup
//! --suites` fetches them, pinned by commit, and their content is pinned here. Without them the
//! tests say that they are skipped.

use super::expected::{self, Failures};
use crate::{Admission, Isolate, Outcome, Policy, Spec};
use exocell_xgate::{CapabilitySet, Table};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use wit_component::ComponentEncoder;

/// The commit that `scripts/setup --suites` fetches, and the content of its programs.
const COMMIT: &str = "3db7f5d1bf71ef31024aa153807e2f243b2e6d24";
const CONTENT: &str = "b67f6410502c95bf10177b87471d59c18c308218c3c7204061ec18dcd3809f49";

const PREVIEW_1: [&str; 3] = [
    "tests/assemblyscript/testsuite/wasm32-wasip1",
    "tests/c/testsuite/wasm32-wasip1",
    "tests/rust/testsuite/wasm32-wasip1",
];
const THREADS: [&str; 1] = ["tests/proposals/wasi-threads"];

/// What a test is run with and what must come of it (`doc/specification.md` there).
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Told {
    args: Vec<String>,
    env: HashMap<String, String>,
    dirs: Vec<String>,
    exit_code: i32,
    stdout: Option<String>,
}

#[test]
fn wasi_programs_pass() {
    compare("wasi/", &PREVIEW_1, Ok);
}

#[test]
fn wasi_threads_programs_pass() {
    compare("wasi-threads/", &THREADS, Ok);
}

#[test]
fn wasi_programs_pass_as_components() {
    compare("wasi-component/", &PREVIEW_1, component);
}

/// The same program with WASI 0.2: what preview 1 asks of it is translated inside the component.
fn component(module: Vec<u8>) -> Result<Vec<u8>, String> {
    let adapter = wasi_preview1_component_adapter_provider::WASI_SNAPSHOT_PREVIEW1_COMMAND_ADAPTER;
    let name = wasi_preview1_component_adapter_provider::WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME;
    let encoder = ComponentEncoder::default().module(&module);
    let encoder = encoder.and_then(|encoder| encoder.adapter(name, adapter));
    let component = encoder.and_then(|mut encoder| encoder.encode());
    component.map_err(|error| format!("{error:#}"))
}

/// What a program becomes before it is admitted.
type Wrap = fn(Vec<u8>) -> Result<Vec<u8>, String>;

fn compare(prefix: &str, folders: &[&str], wrap: Wrap) {
    let Some(suite) = suite() else { return };
    let mut found = BTreeMap::new();
    for folder in folders.iter().map(|folder| suite.join(folder)) {
        for program in programs(&folder) {
            let name = program.file_stem().unwrap_or_default().to_string_lossy();
            let failures = match run(&folder, &program, wrap) {
                Ok(()) => Failures::new(),
                Err(how) => Failures::from([(0, how)]),
            };
            found.insert(format!("{prefix}{name}"), failures);
        }
    }
    assert!(!found.is_empty(), "{} has no programs", suite.display());
    expected::compare(prefix, &found);
}

/// The suite's folder, if it was fetched.
fn suite() -> Option<PathBuf> {
    let cache = std::env::var_os("EXOCELL_CACHE").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(Path::new(&home).join(".cache/exocell"))
    })?;
    let suite = cache.join("wasi-testsuite").join(COMMIT);
    if !suite.exists() {
        println!("skipped: no {}; `scripts/setup --suites` fetches it", suite.display());
        return None;
    }
    let mut hash = Sha256::new();
    for folder in PREVIEW_1.iter().chain(&THREADS) {
        for file in files(&suite.join(folder)) {
            hash.update(file.strip_prefix(&suite).unwrap().as_os_str().as_encoded_bytes());
            hash.update(fs::read(&file).unwrap());
        }
    }
    let content: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(content, CONTENT, "{} is not what is pinned; remove it", suite.display());
    Some(suite)
}

/// All files below a folder, in order.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    paths.into_iter().flat_map(below).collect()
}

fn programs(folder: &Path) -> Vec<PathBuf> {
    let is_program = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "wasm");
    files(folder).into_iter().filter(is_program).collect()
}

fn run(folder: &Path, program: &Path, wrap: Wrap) -> Result<(), String> {
    let told = match fs::read_to_string(program.with_extension("json")) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| error.to_string())?,
        Err(_) => Told::default(),
    };
    let root = tempfile::tempdir().unwrap();
    for dir in &told.dirs {
        copy(&folder.join(dir), &root.path().join(dir));
    }
    let caps = caps(&told, root.path());
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (outcome, stdout, stderr) = ended(&wrap(fs::read(program).unwrap())?, &caps, &told, name)?;
    let printed = told.stdout.is_none_or(|wanted| wanted == stdout);
    if outcome == Outcome::Exited(told.exit_code) && printed {
        return Ok(());
    }
    Err(format!("{outcome:?}, {stdout:?}, {stderr:?}"))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in files(from) {
        let to = to.join(file.strip_prefix(from).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&file, &to).unwrap();
    }
}

/// Everything that programs of the suite ask for.
fn caps(told: &Told, root: &Path) -> CapabilitySet {
    let folder = |dir: &String| {
        let host = root.join(dir);
        let host = host.display();
        format!(
            "[[folder]]\nhost = \"{host}\"\nguest = \"/{dir}\"\nrights = [\"read\", \"write\"]\n"
        )
    };
    let folders: String = told.dirs.iter().map(folder).collect();
    let text = format!(
        "version = 1\n[memory]\nlimit = \"64M\"\n[processes]\nmax = 16\n[time]\n\
         deadline = \"20s\"\n[stdio]\n[clock]\n[random]\n[network]\nconnect = [\"127.0.0.1:1\"]\n\
         {folders}"
    );
    CapabilitySet::parse(&text, Path::new("/")).expect("the grant is right")
}

fn ended(
    program: &[u8],
    caps: &CapabilitySet,
    told: &Told,
    name: String,
) -> Result<(Outcome, String, String), String> {
    let admission = Admission::new(Policy::default());
    let admitted = admission.admit(program, caps).map_err(|error| error.to_string())?;
    let mut table = Table::new(64);
    caps.install(&mut table, "isolate").expect("there is room");
    // Some read until another thread ends them: there is nothing to read, and no end of it.
    let (stdin, _open) = std::io::pipe().unwrap();
    let (mut stdout, to_stdout) = std::io::pipe().unwrap();
    let (mut stderr, to_stderr) = std::io::pipe().unwrap();
    // Folders have absolute names here.
    let argument = |argument: &String| match told.dirs.contains(argument) {
        true => format!("/{argument}"),
        false => argument.clone(),
    };
    let spec = Spec {
        args: std::iter::once(name).chain(told.args.iter().map(argument)).collect(),
        env: told.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        stdin: Some(OwnedFd::from(stdin)),
        stdout: Some(OwnedFd::from(to_stdout)),
        stderr: Some(OwnedFd::from(to_stderr)),
        ..Spec::default()
    };
    let ready = Isolate::prepare(&admitted, &table, "isolate", spec);
    let outcome = ready.map_err(|error| error.to_string())?.run();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    stdout.read_to_end(&mut out).unwrap();
    stderr.read_to_end(&mut err).unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok((outcome, text(out), text(err)))
}
