//! docker-py, as it is on the package registry, against `exocell serve
//! --docker`. It is fetched pinned by hash and kept under EXOCELL_CACHE.

use std::process::Command;

use crate::common::docker::Server;
use crate::common::{IMAGE, finish, pip, text};

const PINS: &str = include_str!("../docker/pins.txt");
const CLIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/docker/client.py");

#[test]
fn docker_py_does_what_harnesses_do() {
    let packages = pip::wheels("docker-py", PINS);
    let server = Server::start();
    let mut client = Command::new("python3");
    client.args([CLIENT, IMAGE]).env("DOCKER_HOST", server.url());
    client.env("PYTHONPATH", text(&packages)).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finish(&mut client, b"").ok();
    assert_eq!(told.text().lines().count(), 4, "{}", told.text());
}
