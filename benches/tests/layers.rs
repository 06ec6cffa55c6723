//! The layers of docs/src/internals/layers.md, held against `cargo metadata`: each crate
//! may use the project crates named here, and no others. Within a crate, no
//! top-level modules import each other in a circle. The tests change no feature of
//! what the command is built from.

#[path = "layers/modules.rs"]
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// Crate, and the project crates it may use. Lower layers come first.
const LAYERS: &[(&str, &[&str])] = &[
    // Leaves: they know nothing of the project.
    ("exocell-xgate-abi", &[]),
    ("exocell-pager", &[]),
    ("exocell-agent", &[]),
    ("exocell-images", &[]),
    ("exocell-kernel", &[]),
    ("exocell-folders", &[]),
    ("exocell-models", &[]),
    ("exocell-door", &[]),
    ("exocell-random-modules", &[]),
    // What runs in the guest speaks the protocol only.
    ("exocell-init", &["exocell-agent"]),
    ("exocell-xgate", &["exocell-xgate-abi"]),
    // The two strengths never know each other.
    ("exocell-vmm", &["exocell-xgate", "exocell-xgate-abi", "exocell-pager", "exocell-folders"]),
    (
        "exocell-exovisor",
        &["exocell-models", "exocell-xgate", "exocell-xgate-abi", "exocell-pager"],
    ),
    ("exocell-network", &["exocell-vmm", "exocell-xgate"]),
    ("exocell-service", &["exocell-exovisor", "exocell-xgate"]),
    // The cell joins them.
    (
        "exocell-cell",
        &[
            "exocell-agent",
            "exocell-exovisor",
            "exocell-folders",
            "exocell-images",
            "exocell-kernel",
            "exocell-network",
            "exocell-pager",
            "exocell-vmm",
            "exocell-xgate",
        ],
    ),
    // What sits on the cell reaches everything through it.
    (
        "exocell-benches",
        &["exocell-cell", "exocell-exovisor", "exocell-random-modules", "exocell-xgate"],
    ),
    ("exocell-docker", &["exocell-cell"]),
    // Fuzzing reaches each reader of hostile bytes where it is.
    (
        "exocell-fuzz",
        &[
            "exocell-agent",
            "exocell-docker",
            "exocell-exovisor",
            "exocell-folders",
            "exocell-images",
            "exocell-network",
            "exocell-pager",
            "exocell-random-modules",
            "exocell-service",
            "exocell-vmm",
            "exocell-xgate",
        ],
    ),
    // What starts a cell from a process with threads is the Docker server's.
    ("exocell-e2b", &["exocell-cell", "exocell-docker", "exocell-door"]),
    ("exocell-mcp", &["exocell-cell", "exocell-door"]),
    ("exocell-ui", &["exocell-cell", "exocell-door"]),
    ("exocell-shim", &["exocell-cell"]),
    ("exocell-swebench", &[]),
    (
        "exocell-cli",
        &[
            "exocell-benches",
            "exocell-cell",
            "exocell-docker",
            "exocell-e2b",
            "exocell-mcp",
            "exocell-service",
            "exocell-shim",
            "exocell-swebench",
            "exocell-ui",
        ],
    ),
];

/// Crates of which some top-level modules still import each other in a circle,
/// and how many. The numbers may only become smaller; where there is no circle
/// left, the line goes.
const CIRCLES: &[(&str, usize)] = &[
    ("exocell-benches", 6),
    ("exocell-cell", 13),
    ("exocell-docker", 2),
    ("exocell-e2b", 3),
    ("exocell-images", 2),
    ("exocell-init", 7),
    ("exocell-network", 2),
    ("exocell-vmm", 3),
];

/// The part of `cargo metadata` (format 1) that is read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
}

type Crates = BTreeMap<String, BTreeSet<String>>;

/// Every workspace crate with the project crates it uses, tests included.
fn workspace() -> Crates {
    let of_project = |name: &String| name.starts_with("exocell-");
    let used = |package: &Package| {
        package.dependencies.iter().map(|used| used.name.clone()).filter(of_project).collect()
    };
    metadata().packages.iter().map(|package| (package.name.clone(), used(package))).collect()
}

fn metadata() -> Metadata {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata")
}

/// The file that a crate's library begins with, or its program if it has none.
fn root_file(package: &Package) -> Option<PathBuf> {
    let of_kind = |kind: &str| {
        let is = |target: &&Target| target.kind.iter().any(|found| found == kind);
        package.targets.iter().find(is).map(|target| target.src_path.clone())
    };
    of_kind("lib").or_else(|| of_kind("bin"))
}

/// What `crates` do that the layers do not allow.
fn violations(crates: &Crates) -> Vec<String> {
    let allowed: BTreeMap<&str, &[&str]> = LAYERS.iter().copied().collect();
    let mut found = Vec::new();
    for (name, used) in crates {
        match allowed.get(name.as_str()) {
            None => {
                found.push(format!("{name} has no layer; give it one in benches/tests/layers.rs"))
            }
            Some(allowed) => found.extend(
                used.iter()
                    .filter(|other| *other != name && !allowed.contains(&other.as_str()))
                    .map(|other| format!("{name} may not use {other}")),
            ),
        }
    }
    found
}

#[test]
fn every_crate_keeps_to_its_layer() {
    let crates = workspace();
    assert!(crates.contains_key("exocell-cell"), "the workspace was not read: {crates:?}");
    assert_eq!(violations(&crates), Vec::<String>::new());
}

#[test]
fn no_modules_of_a_crate_import_each_other_in_a_circle() {
    let allowed: BTreeMap<&str, usize> = CIRCLES.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in &metadata().packages {
        let Some(root) = root_file(package) else { continue };
        let found = modules::in_cycles(&modules::graph(&root));
        let allowed = allowed.get(package.name.as_str()).copied().unwrap_or(0);
        let name = &package.name;
        if found.len() > allowed {
            wrong.push(format!("{name}: {allowed} modules may be in circles, not {found:?}"));
        } else if found.len() < allowed {
            wrong.push(format!("{name}: only {} are in circles; say so in CIRCLES", found.len()));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// The Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder");
    let below = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false => vec![path],
    };
    let files = entries.flat_map(|entry| below(entry.expect("it").path()));
    files.filter(|path| path.extension().is_some_and(|ending| ending == "rs")).collect()
}

/// The lines of `text` that set an allocator, but for tests.
fn allocators(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let sets = |pair: &&[&str]| pair[1] == "#[global_allocator]" && pair[0] != "#[cfg(test)]";
    lines.windows(2).filter(sets).count()
}

/// Whoever links a library would have its allocator unasked, and could have no other.
#[test]
fn libraries_set_no_allocator() {
    assert_eq!(allocators("\n#[global_allocator]\n#[cfg(test)]\n#[global_allocator]\n"), 1);
    let (mut read, mut setting) = (0, BTreeSet::new());
    for package in &metadata().packages {
        let of_kind = |kind: &'static str| {
            let is = move |target: &&Target| target.kind.iter().any(|found| found == kind);
            package.targets.iter().filter(is).map(|target| &target.src_path)
        };
        let programs: BTreeSet<&PathBuf> = of_kind("bin").collect();
        for folder in of_kind("lib").filter_map(|root| root.parent()) {
            for file in sources(folder).iter().filter(|file| !programs.contains(file)) {
                read += 1;
                let text = fs::read_to_string(file).expect("the file");
                setting.extend((allocators(&text) > 0).then(|| file.clone()));
            }
        }
    }
    assert!(read > 300, "only {read} files were read");
    assert_eq!(setting, BTreeSet::new());
}

/// Each crate that cargo would build with `args`, and its features, a line each.
fn features(args: &[&str]) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--prefix", "none", "--no-dedupe"])
        .args(["--format", "{p} {f}", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .args(args)
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

/// Else `make test` builds it, and all that stands on it, for a second time: minutes.
#[test]
fn what_the_command_is_built_from_has_the_same_features_in_the_tests() {
    let built = features(&["--package", "exocell-cli", "--edges", "normal,build"]);
    let everything = ["--workspace", "--exclude", "exocell-init"];
    let tested = features(&[&everything[..], &["--edges", "normal,build,dev"]].concat());
    assert!(built.len() > 100, "the tree was not read: {built:?}");
    assert_eq!(built.difference(&tested).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn a_crate_that_reaches_up_or_has_no_layer_is_found() {
    let uses = |name: &str, other: &str| (name.to_owned(), BTreeSet::from([other.to_owned()]));
    let crates = Crates::from([
        uses("exocell-vmm", "exocell-exovisor"),
        uses("exocell-folders", "exocell-cell"),
        uses("exocell-new", "exocell-cell"),
        uses("exocell-cli", "exocell-cell"),
    ]);
    assert_eq!(
        violations(&crates),
        [
            "exocell-folders may not use exocell-cell",
            "exocell-new has no layer; give it one in benches/tests/layers.rs",
            "exocell-vmm may not use exocell-exovisor",
        ]
    );
}

#[test]
fn the_layers_themselves_only_point_down() {
    for (index, (name, allowed)) in LAYERS.iter().enumerate() {
        for other in *allowed {
            let below = LAYERS.iter().take(index).any(|(lower, _)| lower == other);
            assert!(below, "{name} is allowed {other}, which is not below it");
        }
    }
}
