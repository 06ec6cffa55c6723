//! Cells that have ended: their files go in and out, and become images, as those of running ones.

use std::io::Read;
use std::process::Stdio;

use crate::common::cell::Cell;
use crate::common::{IMAGE, eventually, exocell, run, text, unique};

/// A cell that ran `script` and has ended.
#[track_caller]
fn ended(word: &str, flags: &[&str], script: &str) -> Cell {
    let cell = Cell { name: unique(word) };
    let fixed = ["run", "--name", &cell.name];
    run([&fixed[..], flags, &[IMAGE, "sh", "-c", script]].concat()).ok();
    cell
}

#[test]
fn files_go_in_and_out_of_a_cell_that_has_ended() {
    let place = tempfile::tempdir().expect("a folder");
    let cell = ended("ended-cp", &["--timeout", "60s"], "echo made > /root/made");
    let out = place.path().join("made");
    run(["cp", &cell.path("/root/made"), text(&out)]).ok();
    assert_eq!(std::fs::read_to_string(&out).expect("the file"), "made\n");
    std::fs::write(place.path().join("in"), "later").expect("a file");
    run(["cp", text(&place.path().join("in")), &cell.path("/root/")]).ok();
    let packed = run(["cp", &cell.path("/root/in"), "-"]).ok();
    assert!(packed.stdout.windows(5).any(|part| part == b"later"));
    assert_eq!(cell.state(), "exited", "it was not started");
    run(["cp", &cell.path("/none"), "-"]).exited(125).complains_of(&["/none"]);
    // It goes on with what came.
    run(["start", "-a", &cell.name]).ok();
    run(["cp", &cell.path("/root/in"), text(&place.path().join("back"))]).ok();
    assert_eq!(std::fs::read_to_string(place.path().join("back")).expect("the file"), "later");
}

#[test]
fn what_an_ended_cell_has_not_is_told() {
    let place = tempfile::tempdir().expect("a folder");
    let file = place.path().join("file");
    std::fs::write(&file, "x").expect("a file");
    let fixed = ended("ended-fixed", &["--read-only"], "true");
    run(["cp", &fixed.path("/etc/hostname"), "-"]).ok();
    let refused = run(["cp", text(&file), &fixed.path("/root/")]).exited(125);
    refused.complains_of(&["--read-only"]);
    let secret = ended(
        "ended-secret",
        &["--secret", "K=v@example.org", "--allow-net", "example.org:80"],
        "true",
    );
    let refused = run(["cp", &secret.path("/etc/hostname"), "-"]).exited(125);
    refused.complains_of(&["left no files", "secret"]);
    run(["cp", "nobody:/x", "-"]).exited(125).complains_of(&["nobody"]);
}

#[test]
fn an_ended_cell_becomes_an_image_with_author_and_message() {
    let cell = ended("ended-commit", &[], "echo made > /root/made");
    let image = format!("{}:1", unique("ended"));
    run(["commit", "-a", "Ann", "-m", "what it is", &cell.name, &image]).ok();
    let seen = run(["run", "--rm", &image, "cat", "/root/made"]);
    let document = run(["image", "inspect", &image]).ok().json();
    let history = run(["history", &image]).ok();
    run(["commit", "--pause", &cell.name]).exited(125).complains_of(&["--pause"]);
    run(["image", "rm", &image]).ok();
    assert_eq!(seen.ok().text(), "made");
    assert_eq!(document[0]["author"], "Ann", "{document}");
    assert!(history.text().contains("what it is"), "{}", history.text());
}

#[test]
fn a_disk_has_one_guest_at_a_time() {
    let cell = ended("ended-held", &[], "true");
    let mut reader = exocell(["cp", &cell.path("/usr"), "-"]);
    let mut reader = reader.stdout(Stdio::piped()).spawn().expect("exocell cp");
    // The rest is not read: the copy stays where it is.
    let stdout = reader.stdout.as_mut().expect("a pipe");
    stdout.read_exact(&mut [0]).expect("the first byte");
    run(["start", &cell.name]).exited(125).complains_of(&["being copied"]);
    reader.kill().expect("kill");
    reader.wait().expect("wait");
    eventually("the disk is free", || run(["start", &cell.name]).code == 0);
}
