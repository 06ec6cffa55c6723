//! Containers that are warm cells of `exocell pool`.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use crate::common::docker::Server;
use crate::common::{IMAGE, eventually, finish};

/// A pool of one cell as the server makes them; it ends with the test.
struct Pool<'a> {
    server: &'a Server,
    child: Child,
    ids: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl<'a> Pool<'a> {
    fn start(server: &'a Server) -> Self {
        let cpus = std::thread::available_parallelism().expect("processors").to_string();
        let kind = ["-m", "256m", "--disk", "256m", "--cpus", &cpus, "--pids-limit", "4096"];
        let words = [&["pool", "--size", "1"][..], &kind, &[IMAGE]].concat();
        let mut child = server.exocell(&words).stdout(Stdio::piped()).spawn().expect("exocell");
        let ids = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { server, child, ids }
    }

    /// The next cell that the pool starts, once it waits.
    #[track_caller]
    fn next(&mut self) -> String {
        let id = self.ids.next().expect("the pool lives").expect("a line");
        eventually("the cell is warm", || {
            let shown = finish(&mut self.server.exocell(&["inspect", "--json", &id]), b"");
            let cell: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
            cell[0]["times"]["guest_ready_us"].as_u64() > Some(0)
        });
        id
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        // Both fail only for a child that was waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const CREATE: [&str; 4] = ["create", "--rm", "--network", "none"];

#[test]
fn a_container_is_a_warm_cell_where_one_fits() {
    let server = Server::start();
    let mut pool = Pool::start(&server);
    let warm = pool.next();
    assert_eq!(server.docker(&["ps", "-aq"]).ok().text(), "", "it is nobody's container yet");
    let other = server.run(&["-m", "128m"], &["hostname"]).ok().text().to_owned();
    assert_ne!(other, warm[..12], "one of another kind is a cell of its own");
    let own = server.run(&["-e", "A=b"], &["sh", "-c", "echo $A; hostname"]).ok();
    assert_eq!(own.text(), format!("b\n{}", &warm[..12]));
    eventually("--rm holds", || server.files().is_empty());
    assert_ne!(pool.next(), warm, "another takes its place");
}

#[test]
fn a_warm_cell_that_was_kept_goes_back_or_ends() {
    let server = Server::start();
    let mut pool = Pool::start(&server);
    let warm = pool.next();
    let create = [&CREATE[..], &["--name", "c", IMAGE, "cat", "/opt/given"]].concat();
    assert_eq!(server.docker(&create).ok().text(), warm);
    let second = [&CREATE[..], &["--name", "d", IMAGE, "true"]].concat();
    let second = server.docker(&second).ok().text().to_owned();
    assert_ne!(second, warm, "it is kept for one");
    // Files that come before the start lie on a disk that the warm cell has not.
    let host = tempfile::tempdir().unwrap();
    let given = host.path().join("given");
    std::fs::write(&given, "by the host").unwrap();
    server.docker(&["cp", crate::common::text(&given), "c:/opt/given"]).ok();
    assert_eq!(server.docker(&["start", "-a", "c"]).ok().text(), "by the host");
    let next = pool.next();
    let create = [&CREATE[..], &["--name", "e", IMAGE, "true"]].concat();
    assert_eq!(server.docker(&create).ok().text(), next);
    server.docker(&["rm", "d", "e"]).ok();
    eventually("what nobody starts ends", || !server.records().contains(&next));
    // A pool that is gone takes its cells along; the container is one like others.
    let last = pool.next();
    let create = [&CREATE[..], &["--name", "f", IMAGE, "echo", "later"]].concat();
    assert_eq!(server.docker(&create).ok().text(), last);
    drop(pool);
    eventually("the warm cell ends", || !server.records().contains(&last));
    assert_eq!(server.docker(&["start", "-a", "f"]).ok().text(), "later");
}
