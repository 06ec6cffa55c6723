//! Harnesses of agents, as they are on the package registry, with the adapters of the Python
//! package, or with clients of their own. Pinned by hash, kept under EXOCELL_CACHE.

use std::process::Command;
use std::time::Duration;

use crate::common::host::state_root;
use crate::common::{IMAGE, Started, given, program};

/// For one check and what it fetches, on a machine that is busy too.
const CHECK_LIMIT: Duration = Duration::from_secs(600);
const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/tests");

/// What the check of `name` prints.
#[track_caller]
fn check(name: &str) -> String {
    let mut command = Command::new("python3");
    command.args(["harnesses.py", name, IMAGE]).current_dir(TESTS);
    command.env("EXOCELL_COMMAND", program()).env("EXOCELL_ROOT", state_root());
    command.env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
    let ended = Started::new(&mut command).finish(CHECK_LIMIT);
    let ended = ended.unwrap_or_else(|| panic!("{name} still runs after {CHECK_LIMIT:?}"));
    ended.ok().text().to_owned()
}

#[test]
fn harbors_tasks_run_in_cells() {
    assert_eq!(check("harbor"), "oracle 5 of 5, scripted 4 of 5");
}

#[test]
fn inspects_sandboxes_are_cells() {
    assert_eq!(check("inspect"), "44 checks, 2 samples");
}

#[test]
fn deep_agents_work_in_cells_and_in_sandboxes_of_e2b() {
    assert_eq!(check("langchain"), "exocell\nlangchain-e2b");
}

#[test]
fn openais_agents_work_by_their_own_clients() {
    assert_eq!(check("openai_agents"), "DockerSandboxClient\nE2BSandboxClient");
}

#[test]
fn nemo_gyms_sandboxes_are_cells() {
    assert_eq!(check("nemo"), "nemo_gym");
}
