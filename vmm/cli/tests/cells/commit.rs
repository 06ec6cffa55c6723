//! `exocell commit`: what a cell made of its files is an image that cells start from.

use crate::common::cell::Cell;
use crate::common::{Finished, run, small, text, unique};

/// An image that is removed with its owner.
struct Image(String);

impl Drop for Image {
    fn drop(&mut self) {
        run(["image", "rm", &self.0]);
    }
}

/// `exocell run --rm FLAGS IMAGE sh -c SCRIPT`
#[track_caller]
fn shell(image: &Image, flags: &[&str], script: &str) -> Finished {
    run([&["run", "--rm"], flags, &[&image.0, "sh", "-c", script]].concat())
}

fn small() -> Image {
    let image = Image(format!("{}:1", unique("small")));
    let tree = small::tree();
    run(["image", "import", &format!("{}/", text(tree.path())), "--tag", &image.0]).ok();
    image
}

#[test]
fn a_template_holds_what_the_cell_made_and_nothing_that_was_mounted() {
    let base = small();
    let shared = tempfile::tempdir().expect("a folder");
    std::fs::write(shared.path().join("secret"), "of the host").expect("a file");
    let volume = format!("{}:/src:ro", text(shared.path()));
    let name = unique("commit");
    let cell = Cell { name: name.clone() };
    let own = ["-e", "OWN=1", "-w", "/data", "--label", "of=me"];
    let flags = [&["run", "-d", "--name", &name, "-v", &volume][..], &own].concat();
    run([&flags[..], &[&base.0, "sleep", "infinity"]].concat()).ok();
    let script = "echo made > /data/file && ln /data/file /data/second && ln -s file /data/link \
                  && chmod 640 /data/file && chown 7:8 /data/file && touch -d @-3600 /data/file \
                  && rm /bin/ls && cat /src/secret";
    assert_eq!(cell.shell(script).ok().text(), "of the host");
    let image = Image(format!("{}:1", unique("template")));
    let id = run(["commit", &name, &image.0]).ok().text().to_owned();
    assert!(id.starts_with("sha256:"), "{id}");
    let seen =
        shell(&image, &[], "cat /data/link; stat -c '%a %u %g %h %Y' /data/second; echo /src/*");
    // A layer has no time before 1970.
    assert_eq!(seen.ok().text(), "made\n640 7 8 2 0\n/src/*");
    shell(&image, &[], "test -e /bin/ls").exited(1);
    // It is started as the cell was.
    let document = run(["image", "inspect", &image.0]).ok().json();
    let config = &document[0]["config"];
    assert_eq!(config["Cmd"], serde_json::json!(["sleep", "infinity"]), "{document}");
    assert_eq!((&config["WorkingDir"], &config["Labels"]["of"]), (&"/data".into(), &"me".into()));
    assert_eq!(shell(&image, &[], "echo $OWN in $(pwd)").ok().text(), "1 in /data");
    // Cells of a template do not see each other's writes, nor the first cell's.
    cell.shell("echo later > /data/file").ok();
    shell(&image, &[], "echo own > /data/file").ok();
    assert_eq!(shell(&image, &[], "cat /data/file").ok().text(), "made");
    let change = ["commit", "-c", "ENV A=1", "-c", "CMD echo $A", &name, &image.0];
    run(change).ok();
    assert_eq!(run(["run", "--rm", &image.0]).ok().text(), "1");
    // Programs beside the cell's own have its image's environment, too.
    let beside = Cell { name: unique("beside") };
    run(["run", "-d", "--name", &beside.name, "--entrypoint", "", &image.0, "sleep", "infinity"])
        .ok();
    let told = run(["exec", &beside.name, "sh", "-c", "echo $A"]).ok();
    assert_eq!(told.text(), "1");
    drop(beside);
    let refused = run(["commit", "-c", "RUN x", &name, &image.0]).exited(125);
    refused.complains_of(&["--change", "CMD"]);
    let twice = run(["commit", &name, &image.0]).ok().text().to_owned();
    assert_ne!(id, twice, "another content is another image");
    run(["image", "rm", &id]);
}

#[test]
fn what_is_no_cell_or_has_no_name_is_refused() {
    let cell = Cell::idle("refused", &[]);
    run(["commit", "no-such-cell", "me/x:1"]).exited(125).complains_of(&["no-such-cell"]);
    run(["commit", &cell.name, "Not a name"]).exited(125).complains_of(&["Not a name"]);
}

#[test]
fn holes_are_committed_as_holes() {
    let cell = Cell::idle("holes", &[]);
    // 60 GiB with data in the middle.
    let script = "truncate -s 60G /root/long && \
                  echo data | dd of=/root/long bs=1M seek=30720 conv=notrunc status=none";
    cell.shell(script).ok();
    let image = Image(format!("{}:1", unique("holes")));
    run(["commit", &cell.name, &image.0]).ok();
    let script = "stat -c %s /root/long; tail -c +$(((30 << 30) + 1)) /root/long | head -c 4";
    let seen = shell(&image, &[], script).ok();
    assert_eq!(seen.text(), format!("{}\ndata", 60_u64 << 30));
}
