//! The layers of ARCHITECTURE.md, held against `cargo metadata`: each crate
//! may use the project crates named here, and no others.

use std::collections::{BTreeMap, BTreeSet};
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
    // Fuzzing reaches each reader of hostile bytes where it is.
    (
        "exocell-fuzz",
        &[
            "exocell-agent",
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
    // What sits on the cell reaches everything through it.
    (
        "exocell-benches",
        &["exocell-cell", "exocell-exovisor", "exocell-random-modules", "exocell-xgate"],
    ),
    ("exocell-docker", &["exocell-cell"]),
    ("exocell-swebench", &[]),
    (
        "exocell-cli",
        &[
            "exocell-benches",
            "exocell-cell",
            "exocell-docker",
            "exocell-service",
            "exocell-swebench",
        ],
    ),
    ("exocell-shim", &["exocell-cell"]),
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
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
}

type Crates = BTreeMap<String, BTreeSet<String>>;

/// Every workspace crate with the project crates it uses, tests included.
fn workspace() -> Crates {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).expect("cargo metadata");
    let of_project = |name: &String| name.starts_with("exocell-");
    let used = |package: &Package| {
        package.dependencies.iter().map(|used| used.name.clone()).filter(of_project).collect()
    };
    metadata.packages.iter().map(|package| (package.name.clone(), used(package))).collect()
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
