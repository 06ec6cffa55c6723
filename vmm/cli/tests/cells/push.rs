//! Images to a registry, by both doors: Debian's registry server on loopback, with a login.

use crate::common::docker::Server;
use crate::common::finish;
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::registry::Registry;

/// User and password, as `EXOCELL_REGISTRY_AUTH` has them.
const AUTH: &str = "user:secret";

#[test]
fn an_image_is_pushed_and_is_the_same_elsewhere() {
    let registry = Registry::start();
    let (here, there) = (PrivateRoot::with_image(), PrivateRoot::new());
    let name = format!("{}/team/tiny:1", registry.place);
    here.run(["image", "tag", TINY, &name]).ok();
    let refused = here.run(["push", &name]).exited(125);
    refused.complains_of(&[&registry.place, "credentials"]);
    let with = |root: &PrivateRoot, args: &[&str]| {
        finish(root.exocell(args).env("EXOCELL_REGISTRY_AUTH", AUTH), b"")
    };
    let digest = with(&here, &["push", &name]).ok().text().to_owned();
    assert!(digest.starts_with("sha256:"), "{digest}");
    let again = with(&here, &["image", "push", &name]).ok();
    assert_eq!(again.text(), digest);
    assert!(again.stderr.contains("had the layer already"), "{}", again.stderr);
    with(&there, &["image", "pull", &name]).ok();
    let by_digest = format!("{}/team/tiny@{digest}", registry.place);
    with(&there, &["image", "pull", &by_digest]).ok();
    let files = |root: &PrivateRoot| {
        root.run(["run", "--rm", &name, "sh", "-c", "echo /* /usr/*/* /usr/lib/*/*"])
            .ok()
            .text()
            .to_owned()
    };
    assert_eq!(files(&here), files(&there));
    let missing = format!("{}/team/none:1", registry.place);
    with(&here, &["push", &missing]).exited(125).complains_of(&["none"]);
}

#[test]
fn an_image_over_another_is_pushed_by_what_it_has_over_it() {
    let registry = Registry::start();
    let (here, there) = (PrivateRoot::with_image(), PrivateRoot::new());
    let name = |word: &str| format!("{}/team/{word}:1", registry.place);
    let with = |root: &PrivateRoot, args: &[&str]| {
        finish(root.exocell(args).env("EXOCELL_REGISTRY_AUTH", AUTH), b"").ok()
    };
    let (base, over) = (name("base"), name("over"));
    here.run(["image", "tag", TINY, &base]).ok();
    with(&here, &["push", &base]);
    let context = tempfile::tempdir().expect("a context");
    let file = |name: &str, content: &str| {
        std::fs::write(context.path().join(name), content).expect("a file");
    };
    file("own", "of it");
    file("Dockerfile", &format!("FROM {TINY}\nCOPY own /own\n"));
    here.run(["build", "-t", &over, crate::common::text(context.path())]).ok();
    // The first file is a layer of the same repository by now.
    let pushed = with(&here, &["push", &over]);
    assert!(!pushed.stderr.contains("had"), "{}", pushed.stderr);
    let again = with(&here, &["push", &over]);
    assert!(again.stderr.contains("had 2 of 2 layers already"), "{}", again.stderr);
    assert_eq!(again.text(), pushed.text());
    // One that is over it goes into the same repository with what it has alone.
    file("Dockerfile", &format!("FROM {over}\nCOPY own /more\n"));
    let more = format!("{}/team/over:2", registry.place);
    here.run(["build", "-t", &more, crate::common::text(context.path())]).ok();
    let pushed = with(&here, &["push", &more]);
    assert!(pushed.stderr.contains("had 2 of 3 layers already"), "{}", pushed.stderr);
    with(&there, &["image", "pull", &more]);
    let files = "cat /own /more; echo; echo /* /usr/*/*";
    let seen = |root: &PrivateRoot| {
        root.run(["run", "--rm", &more, "sh", "-c", files]).ok().text().to_owned()
    };
    assert!(seen(&there).starts_with("of itof it"));
    assert_eq!(seen(&here), seen(&there));
}

#[test]
fn the_docker_command_pushes() {
    let registry = Registry::start();
    let server = Server::start();
    let from = server.small();
    let names = ["1", "2"].map(|tag| format!("{}/d/small:{tag}", registry.place));
    for name in &names {
        server.docker(&["tag", &from, name]).ok();
    }
    let refused = server.docker(&["push", &names[0]]).exited(1);
    assert!(refused.stderr.contains("credentials"), "{}", refused.stderr);
    server.docker(&["login", "-u", "user", "-p", "secret", &registry.place]).ok();
    let pushed = server.docker(&["push", &names[0]]).ok();
    assert!(
        pushed.text().contains("Pushed") && pushed.text().contains("1: digest: sha256:"),
        "{}",
        pushed.text()
    );
    let all = format!("{}/d/small", registry.place);
    let pushed = server.docker(&["push", "-a", &all]).ok();
    assert!(pushed.text().contains("Layer already exists"), "{}", pushed.text());
    assert!(pushed.text().contains("2: digest: sha256:"), "{}", pushed.text());
    let nothing = format!("{}/d/nothing", registry.place);
    let refused = server.docker(&["push", &nothing]).exited(1);
    assert!(refused.stderr.contains("An image does not exist locally"), "{}", refused.stderr);
    for name in &names {
        server.docker(&["rmi", name]).ok();
        server.docker(&["pull", name]).ok();
        server.docker(&["rmi", name]).ok();
    }
}
