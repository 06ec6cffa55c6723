//! What docker's users and clients ask for in their first week; the values are Docker's.

use crate::common::docker::Server;
use crate::common::{IMAGE, text};

#[test]
fn a_container_without_a_log_is_heard_and_not_written_down() {
    let server = Server::start();
    let heard = server.docker(&["run", "--name", "c", "--log-driver", "none", IMAGE, "echo", "hi"]);
    assert_eq!(heard.ok().text(), "hi");
    let refused = server.docker(&["logs", "c"]).exited(1).stderr;
    assert!(refused.contains("does not support reading"), "{refused}");
    assert_eq!(server.inspect("c", "{{.HostConfig.LogConfig.Type}}"), "none");
    let own = crate::common::finish(&mut server.exocell(&["logs", "c"]), b"").exited(125);
    own.complains_of(&["--log-driver none"]);
}

#[test]
fn a_driver_of_volumes_matters_where_there_are_any() {
    let server = Server::start();
    server.run(&["--volume-driver", "other"], &["true"]).ok();
    let refused = server.run(&["--volume-driver", "other", "-v", "v:/v"], &["true"]).exited(125);
    assert!(refused.stderr.contains("the volume driver other"), "{}", refused.stderr);
    server.run(&["--volume-driver", "local", "-v", "v:/v"], &["true"]).ok();
}

#[test]
fn nodes_that_a_program_makes_are_used_by_rule() {
    let server = Server::start();
    let script = "mknod /l b 7 3 && dd if=/l of=/dev/null count=1 2>&1 | tail -1";
    let without = server.run(&[], &["sh", "-c", script]);
    assert!(
        String::from_utf8_lossy(&without.stdout).contains("not permitted"),
        "{}",
        without.stderr
    );
    let flags = ["--device-cgroup-rule", "b 7:* rwm"];
    let with = server.run(&flags, &["sh", "-c", script]).ok();
    // There is nothing behind it.
    assert!(with.text().contains("No such device or address"), "{}", with.text());
    let refused = server.run(&["--device-cgroup-rule", "b 7"], &["true"]).exited(125);
    assert!(refused.stderr.contains("device cgroup"), "{}", refused.stderr);
}

#[test]
fn what_a_client_notes_of_a_network_and_its_endpoints_is_kept() {
    let server = Server::start();
    server.docker(&["network", "create", "a net"]).ok();
    let options = ["run", "-d", "--name", "c", "--network", "name=a net,driver-opt=own=1", IMAGE];
    let made = server.docker(&[&options[..], &["sleep", "infinity"]].concat()).ok();
    assert!(made.stderr.contains("DriverOpts"), "nothing comes of it: {}", made.stderr);
    let shown = "{{(index .NetworkSettings.Networks \"a net\").DriverOpts.own}}";
    assert_eq!(server.inspect("c", shown), "1");
    let options = ["create", "--name", "d", "--network", "name=bridge,driver-opt=own=2", IMAGE];
    server.docker(&[&options[..], &["true"]].concat()).ok();
    assert_eq!(server.inspect("d", "{{.NetworkSettings.Networks.bridge.DriverOpts.own}}"), "2");
    let own = "name=a net,driver-opt=com.docker.network.endpoint.ifname=x";
    let refused = server.docker(&["run", "--network", own, IMAGE, "true"]).exited(125);
    assert!(refused.stderr.contains("endpoint.ifname"), "{}", refused.stderr);
    for wrong in ["ends ", " begins", "a/b"] {
        server.docker(&["network", "create", wrong]).exited(1);
    }
}

#[test]
fn a_committed_image_says_who_made_it_of_what_and_why() {
    let server = Server::start();
    let (small, image) = (server.small(), server.image("signed"));
    server.docker(&["create", "--network", "none", "--name", "c", &small, "true"]).ok();
    server.docker(&["commit", "-a", "Ann", "-m", "why", "c", &image]).ok();
    assert_eq!(server.inspect(&image, "{{.Author}} {{.Comment}}"), "Ann why");
    assert_eq!(server.inspect(&image, "{{.Parent}}"), server.inspect(&small, "{{.Id}}"));
    let history = ["history", "--format", "{{.Comment}}", &image];
    assert!(server.docker(&history).ok().text().starts_with("why\n"));
}

#[test]
fn an_image_that_comes_back_is_the_one_that_was_saved() {
    let server = Server::start();
    let small = server.small();
    let place = tempfile::tempdir().expect("a folder");
    let archive = place.path().join("image.tar");
    server.docker(&["save", "-o", text(&archive), &small]).ok();
    let id = server.inspect(&small, "{{.Id}}");
    server.docker(&["load", "-i", text(&archive)]).ok();
    assert_eq!(server.inspect(&small, "{{.Id}}"), id);
    // Without the image its archive is another one.
    server.docker(&["rmi", "-f", &small]).ok();
    server.docker(&["load", "-i", text(&archive)]).ok();
    assert_ne!(server.inspect(&small, "{{.Id}}"), id);
    server.run(&[], &["true"]).ok();
}

#[test]
fn a_copy_from_outside_of_the_context_says_so() {
    let server = Server::start();
    let small = server.small();
    let context = tempfile::tempdir().expect("a context");
    for line in ["COPY ../x /x", "COPY a/../../x /x", "ADD ../x /x"] {
        let dockerfile = format!("FROM {small}\n{line}\n");
        std::fs::write(context.path().join("Dockerfile"), dockerfile).expect("a file");
        let refused = server.docker(&["build", text(context.path())]).exited(1).stderr;
        assert!(refused.contains("outside the build context"), "{refused}");
    }
}

#[test]
fn ports_that_an_image_exposes_are_told_and_filtered_by() {
    let server = Server::start();
    let run = ["run", "-d", "--network", "none", "--expose", "81", "--name", "c", IMAGE];
    server.docker(&[&run[..], &["sleep", "infinity"]].concat()).ok();
    let open = ["run", "-d", "-p", "80", "--name", "open", IMAGE, "sleep", "infinity"];
    server.docker(&open).ok();
    let listed = |filter: &str| {
        let ps = ["ps", "--filter", filter, "--format", "{{.Names}} {{.Ports}}"];
        server.docker(&ps).ok().text().to_owned()
    };
    assert_eq!(listed("expose=80-90/tcp").lines().count(), 2, "docker exposes what is published");
    assert_eq!(listed("expose=81"), "c 81/tcp");
    assert!(listed("publish=80").starts_with("open 127.0.0.1:"));
    assert_eq!(listed("publish=81"), "");
    let refused = server.docker(&["ps", "--filter", "publish=x"]).exited(1);
    assert!(refused.stderr.contains("is no port"), "{}", refused.stderr);
    assert_eq!(server.inspect("c", "{{json .NetworkSettings.Ports}}"), "{\"81/tcp\":null}");
}

#[test]
fn a_volume_that_is_gone_is_removed_by_force() {
    let server = Server::start();
    server.docker(&["volume", "rm", "-f", "gone"]).ok();
    server.docker(&["volume", "rm", "gone"]).exited(1);
}

#[test]
fn nothing_is_copied_into_a_root_that_cannot_be_written() {
    let server = Server::start();
    let place = tempfile::tempdir().expect("a folder");
    let file = place.path().join("file");
    std::fs::write(&file, "x").expect("a file");
    let fixed = ["create", "--read-only", "-v", "vol:/mnt", "--network", "none", "--name", "c"];
    server.docker(&[&fixed[..], &[IMAGE, "cat", "/mnt/file"]].concat()).ok();
    let refused = server.docker(&["cp", text(&file), "c:/etc/"]).exited(1).stderr;
    assert!(refused.contains("read-only"), "{refused}");
    server.docker(&["cp", text(&file), "c:/mnt/"]).ok();
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "x");
}
