//! Containers that do not run: their files stay, and they are started again.

use std::fs;
use std::path::Path;

use crate::common::docker::Server;
use crate::common::small::PROGRAMS;
use crate::common::{eventually, finish, text};

/// A server, and a small image of its own.
struct Small {
    server: Server,
    image: String,
}

impl Small {
    fn start() -> Self {
        let server = Server::start();
        let image = server.small();
        Self { server, image }
    }
}

impl std::ops::Deref for Small {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl std::ops::DerefMut for Small {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

/// A container that says what it finds in /data/file and then adds a line to it.
fn create(server: &Small, flags: &[&str]) {
    let script = "cat /data/file; echo run >> /data/file";
    let fixed = ["create", "--network", "none", "--name", "c"];
    server.docker(&[&fixed[..], flags, &[&server.image, "sh", "-c", script]].concat()).ok();
}

#[track_caller]
fn put(server: &Server, folder: &Path, content: &str) {
    fs::write(folder.join("file"), content).unwrap();
    server.docker(&["cp", text(&folder.join("file")), "c:/data/file"]).ok();
}

#[test]
fn an_ended_container_is_started_again_with_its_files() {
    let server = Small::start();
    let host = tempfile::tempdir().unwrap();
    create(&server, &[]);
    put(&server, host.path(), "before the start\n");
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "before the start");
    let back = host.path().join("back");
    server.docker(&["cp", "c:/data/file", text(&back)]).ok();
    assert_eq!(fs::read_to_string(&back).unwrap(), "before the start\nrun\n");
    assert_eq!(server.inspect("c", "{{.State.Status}} {{.State.ExitCode}}"), "exited 0");
    put(&server, host.path(), "after the end\n");
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "after the end");
    let logged = server.docker(&["logs", "c"]).ok();
    assert_eq!(logged.text(), "before the start\nafter the end", "the log goes on");
    let packed = server.docker(&["export", "c"]).ok();
    let mut archive = tar::Archive::new(packed.stdout.as_slice());
    let names = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned());
    assert!(names.into_iter().any(|name| name.ends_with("data/file")));
    server.docker(&["rm", "c"]).ok();
    assert_eq!((server.files(), server.disks(), server.records()), (vec![], vec![], vec![]));
}

#[test]
fn a_restart_keeps_files_after_a_kill_too() {
    let mut server = Small::start();
    let run = ["run", "-d", "--network", "none", "--name", "c", &server.image, "sleep", "infinity"];
    server.docker(&run).ok();
    let add = ["exec", "c", "sh", "-c", "echo kept >> /data/file"];
    server.docker(&add).ok();
    let pid = || server.inspect("c", "{{.State.Pid}}");
    let before = pid();
    server.docker(&["restart", "-t", "0", "c"]).ok();
    assert_ne!(pid(), before, "the cell is another one");
    assert_eq!(server.docker(&["exec", "c", "cat", "/data/file"]).ok().text(), "kept");
    // What was written and not yet on the disk is lost with a killed supervisor.
    let pid = nix::unistd::Pid::from_raw(pid().parse().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("it has ended", || server.inspect("c", "{{.State.Status}}") == "exited");
    server.kill();
    server.resume();
    server.docker(&["start", "c"]).ok();
    assert_eq!(server.docker(&["exec", "c", "cat", "/data/file"]).ok().text(), "kept");
    server.docker(&["rm", "-f", "c"]).ok();
    assert_eq!((server.files(), server.disks()), (vec![], vec![]));
}

#[test]
fn one_that_removes_itself_takes_files_and_leaves_none() {
    let server = Small::start();
    let host = tempfile::tempdir().unwrap();
    create(&server, &["--rm"]);
    assert_eq!(server.disks(), Vec::<String>::new(), "nobody needs one yet");
    put(&server, host.path(), "before the start\n");
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "before the start");
    eventually("--rm leaves nothing", || server.files().is_empty() && server.disks().is_empty());
}

#[test]
fn a_cell_that_was_not_made_through_the_api_goes_on_if_it_has_a_disk() {
    let server = Small::start();
    let host = tempfile::tempdir().unwrap();
    let end = ["run", "--name", "own", &server.image, "sh", "-c", "echo x >> /kept; exit 3"];
    finish(&mut server.exocell(&end), b"").exited(3);
    server.docker(&["start", "-a", "own"]).exited(3);
    server.docker(&["cp", "own:/kept", text(host.path())]).ok();
    assert_eq!(fs::read_to_string(host.path().join("kept")).unwrap(), "x\nx\n");
    // What a secret was is not written down.
    let flags = ["run", "--name", "bare", "--secret", "K=v@a.test", "--allow-net", "a.test:80"];
    finish(&mut server.exocell(&[&flags[..], &[&server.image, "true"]].concat()), b"").ok();
    for args in [&["start", "bare"][..], &["cp", "bare:/data", text(host.path())]] {
        let refused = server.docker(args).exited(1);
        assert!(refused.stderr.contains("its disk ended with it"), "{}", refused.stderr);
    }
}

#[test]
fn a_start_that_fails_leaves_the_container_as_it_was() {
    let server = Small::start();
    let host = tempfile::tempdir().unwrap();
    let shared = host.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let mount = format!("type=bind,source={},target=/src", text(&shared));
    create(&server, &["--mount", &mount]);
    put(&server, host.path(), "kept\n");
    server.docker(&["start", "-a", "c"]).ok();
    fs::remove_dir(&shared).unwrap();
    let refused = server.docker(&["start", "c"]).exited(1);
    assert!(refused.stderr.contains("shared"), "{}", refused.stderr);
    fs::create_dir(&shared).unwrap();
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "kept\nrun");
}

#[test]
fn a_container_that_removes_itself_does_so_where_its_start_fails() {
    let server = Small::start();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let publish = format!("{}:80", taken.local_addr().unwrap());
    let run = ["run", "--rm", "-p", &publish, &server.image, "true"];
    let refused = server.docker(&run).exited(125);
    assert!(refused.stderr.contains("cannot listen"), "{}", refused.stderr);
    assert_eq!(server.docker(&["ps", "-aq"]).ok().text(), "");
    assert!(server.files().is_empty() && server.disks().is_empty());
}

#[test]
fn a_saved_image_is_loaded_and_runs() {
    let server = Small::start();
    let host = tempfile::tempdir().unwrap();
    let archive = host.path().join("saved.tar");
    let other = server.image("other");
    server.docker(&["tag", &server.image, &other]).ok();
    server.docker(&["save", "-o", text(&archive), &server.image, &other]).ok();
    server.docker(&["rmi", &server.image, &other]).ok();
    server.docker(&["load", "-i", text(&archive)]).ok();
    let mut programs = PROGRAMS;
    programs.sort_unstable();
    for image in [&server.image, &other] {
        let listed = server.docker(&["run", "--rm", "--network", "none", image, "ls", "/bin"]).ok();
        assert_eq!(listed.text(), programs.join("\n"));
    }
    server.docker(&["rmi", &other]).ok();
    let missing = server.docker(&["save", "no/such:image"]).exited(1);
    assert!(missing.stderr.contains("no/such:image"), "{}", missing.stderr);
}

#[test]
fn an_image_goes_when_its_last_name_does_and_nobody_uses_it() {
    let server = Small::start();
    let other = server.image("other");
    let tagged = format!("Untagged: {other}");
    let run = ["run", "-d", "--network", "none", "--name", "c", &server.image, "sleep", "infinity"];
    server.docker(&run).ok();
    // One of several names goes though the image is in use, the last one does not.
    server.docker(&["tag", &server.image, &other]).ok();
    assert_eq!(server.docker(&["rmi", &other]).ok().text(), tagged);
    let refused = server.docker(&["rmi", &server.image]).exited(1);
    assert!(refused.stderr.contains("is using its referenced image"), "{}", refused.stderr);
    server.docker(&["rm", "-f", "c"]).ok();
    // A container that has ended and removes itself holds nothing up.
    for _ in 0..3 {
        server.docker(&["run", "--rm", "--network", "none", &server.image, "ls"]).ok();
        server.docker(&["tag", &server.image, &other]).ok();
        server.docker(&["rmi", &other]).ok();
    }
    let id = server.docker(&["inspect", "--format", "{{.Id}}", &server.image]).ok();
    server.docker(&["run", "--rm", "--network", "none", &server.image, "ls"]).ok();
    let removed = server.docker(&["rmi", &server.image]).ok();
    assert!(removed.text().contains(&format!("Deleted: {}", id.text())), "{}", removed.text());
}
