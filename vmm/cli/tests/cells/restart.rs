//! Restart policies: cells that start again by themselves, and what ends that.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::cell::{Cell, ps};
use crate::common::docker::{Server, says};
use crate::common::host::state_root;
use crate::common::{IMAGE, eventually, finish, run, unique};

/// The process that starts a cell again, as the record in `folder` has it.
fn restarter(folder: &std::path::Path) -> Option<i32> {
    let pid: i32 = fs::read_to_string(folder.join("restarter")).ok()?.trim().parse().ok()?;
    alive(pid).then_some(pid)
}

/// Whether `pid` is a restarter that has not ended.
fn alive(pid: i32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    name.trim() == "exocell-restart" && !state.contains(") Z ")
}

fn folder(cell: &Cell) -> PathBuf {
    let id = cell.inspect()["id"].as_str().expect("an id").to_owned();
    state_root().join("cells").join(id)
}

fn count(cell: &Cell) -> u64 {
    cell.inspect()["restart_count"].as_u64().expect("a count")
}

fn kill9(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill -9");
}

/// Long enough for a start that is not to come.
fn a_while() {
    std::thread::sleep(Duration::from_millis(1500));
}

/// One that fails at once and waits for its next start.
fn restarting(cell: &Cell) {
    eventually("it waits for a while", || {
        let now = cell.inspect();
        now["restarting"] == true && now["restart_count"].as_u64() >= Some(4)
    });
}

#[test]
fn what_a_cell_takes_of_a_folder_is_counted_over_its_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let flag = format!("{}:/data", dir.path().display());
    let script = "n=$(ls /data | wc -l); mkdir /data/$n; for i in 1 2 3 4; do : > /data/$n/$i; done; \
                  dd if=/dev/zero of=/data/$n/z bs=1M count=3; : > /data/u; exec 3<> /data/u; \
                  rm /data/u; dd if=/dev/zero bs=1M count=3 >&3; exit 1";
    let flags = ["-v", &flag, "--restart", "on-failure:2"];
    let cell = Cell::start("taken", &flags, &["sh", "-c", script]);
    let made = || fs::read_dir(dir.path()).unwrap().count();
    let taken = || {
        let bytes = fs::read(folder(&cell).join("folder0.taken")).unwrap();
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        (number(0), number(8))
    };
    cell.verb(&["wait"]);
    assert_eq!((made(), count(&cell)), (3, 2));
    // What had no name at the end is gone.
    let (bytes, names) = taken();
    assert!((9 << 20..10 << 20).contains(&bytes), "{bytes}");
    assert_eq!(names, 3 * 6);
    // The operator's own start begins anew.
    cell.verb(&["start"]).ok();
    cell.verb(&["wait"]);
    assert_eq!((made(), taken().1), (6, 3 * 6));
}

#[test]
fn a_program_that_fails_is_started_again_so_often() {
    let script = "echo run; echo >> /runs; exit $(wc -l < /runs)";
    let cell = Cell::start("fails", &["--restart", "on-failure:2"], &["sh", "-c", script]);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "3", "its disk goes on");
    let now = cell.inspect();
    assert_eq!((&now["restart_count"], &now["restarting"]), (&2.into(), &false.into()));
    assert_eq!(now["state"], "exited");
    assert_eq!(cell.verb(&["logs"]).ok().text(), "run\nrun\nrun");
    eventually("its restarter ends", || restarter(&folder(&cell)).is_none());
    let cell = Cell { name: unique("shown") };
    let flags = ["run", "--name", &cell.name, "--restart", "on-failure:1", IMAGE];
    let ended = run([&flags[..], &["sh", "-c", "exit 5"]].concat()).exited(5);
    assert!(ended.stderr.contains("starts again"), "{}", ended.stderr);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "5");
    assert_eq!(count(&cell), 1);
    let fine = Cell::start("fine", &["--restart", "on-failure"], &["true"]);
    assert_eq!(fine.verb(&["wait"]).ok().text(), "0");
    a_while();
    assert_eq!(count(&fine), 0);
}

/// Whether the cell runs with another supervisor, in one look.
fn runs_anew(cell: &Cell, before: i32) -> bool {
    let now = cell.inspect();
    let supervisor = now["supervisor_pid"].as_i64();
    now["state"] == "running" && supervisor.is_some_and(|pid| pid != i64::from(before))
}

#[test]
fn one_in_anothers_guest_starts_again_with_that() {
    let other = Cell::idle("other", &["--restart", "on-failure"]);
    let network = format!("container:{}", other.name);
    let side = Cell::idle("side", &["--network", &network, "--restart", "always"]);
    let before = side.supervisor();
    // Its first starts find no guest.
    other.verb(&["stop", "-t", "0"]).ok();
    a_while();
    assert!(restarter(&folder(&side)).is_some());
    other.verb(&["start"]).ok();
    eventually("it is in the new guest", || runs_anew(&side, before));
    side.shell("true").ok();
    let counted = count(&side);
    assert!(counted > 1, "{counted}");
    side.verb(&["rm", "-f"]).ok();
}

/// The supervisor, which a guest may have taken over, can write who is to be ended.
#[test]
fn nobody_is_ended_but_the_cells_own_restarter() {
    let cell = Cell::idle("own", &["--restart", "always"]);
    let folder = folder(&cell);
    let own = restarter(&folder).expect("a restarter");
    let mut other = std::process::Command::new("sleep").arg("99").spawn().expect("sleep");
    fs::write(folder.join("restarter"), other.id().to_string()).expect("its file");
    cell.verb(&["stop", "-t", "0"]).exited(125).complains_of(&["cannot end the restarter"]);
    assert!(other.try_wait().expect("waitpid").is_none(), "another's process was ended");
    other.kill().expect("kill");
    other.wait().expect("waitpid");
    fs::write(folder.join("restarter"), own.to_string()).expect("its file");
    cell.verb(&["rm", "-f"]).ok();
}

#[test]
fn one_that_is_stopped_by_hand_stays_ended() {
    for verb in [&["stop", "-t", "0"][..], &["kill"], &["kill", "-s", "TERM"]] {
        let cell = Cell::idle("stopped", &["--restart", "always"]);
        let folder = folder(&cell);
        assert!(restarter(&folder).is_some());
        cell.verb(verb).ok();
        cell.verb(&["wait"]).ok();
        a_while();
        let now = cell.inspect();
        assert_eq!((&now["state"], &now["restarting"]), (&"exited".into(), &false.into()));
        assert!(restarter(&folder).is_none(), "{verb:?}");
        cell.verb(&["start"]).ok();
        assert_eq!(cell.state(), "running");
        let supervisor = cell.supervisor();
        kill9(supervisor);
        eventually("it runs again", || runs_anew(&cell, supervisor));
    }
}

#[test]
fn one_that_waits_for_its_next_start_is_listed_and_can_be_ended() {
    let cell = Cell::start("loop", &["--restart", "always"], &["sh", "-c", "exit 7"]);
    restarting(&cell);
    let name = format!("name={}", cell.name);
    let listed = run(["ps", "--filter", &name, "--format", "{{.Status}}"]).ok();
    let status = listed.text().to_owned();
    assert!(status.starts_with("Restarting") || status.starts_with("Up"), "{status}");
    eventually("it is listed", || {
        ps(&["--filter", &name, "--filter", "status=restarting"]).len() == 1
    });
    restarting(&cell);
    let refused = cell.verb(&["rm"]);
    assert_ne!(refused.code, 0);
    let folder = folder(&cell);
    let own = restarter(&folder).expect("a restarter");
    cell.verb(&["stop"]).ok();
    let stopped = count(&cell);
    assert!(!alive(own));
    a_while();
    assert_eq!(count(&cell), stopped);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "7");
    cell.verb(&["start"]).ok();
    restarting(&cell);
    let own = restarter(&folder).expect("a restarter");
    cell.verb(&["rm", "-f"]).ok();
    assert!(!alive(own) && !folder.exists());
    // One that runs, too.
    let cell = Cell::idle("removed", &["--restart", "unless-stopped"]);
    let folder = self::folder(&cell);
    let own = restarter(&folder).expect("a restarter");
    cell.verb(&["rm", "-f"]).ok();
    assert!(!alive(own) && !folder.exists());
}

#[test]
fn what_is_killed_leaves_a_record_that_tells_the_truth() {
    let cell = Cell::idle("killed", &["--restart", "always"]);
    let folder = folder(&cell);
    cell.shell("echo kept > /file; sync").ok();
    let before = cell.supervisor();
    kill9(before);
    eventually("it runs again", || runs_anew(&cell, before));
    assert_eq!(cell.shell("cat /file").ok().text(), "kept");
    assert_eq!(count(&cell), 1);
    // Without a restarter nobody starts it, and nobody says so.
    kill9(restarter(&folder).expect("a restarter"));
    eventually("the restarter is gone", || restarter(&folder).is_none());
    assert_eq!(cell.state(), "running");
    kill9(cell.supervisor());
    eventually("it has ended", || cell.state() == "exited");
    a_while();
    let now = cell.inspect();
    assert_eq!((&now["state"], &now["restarting"]), (&"exited".into(), &false.into()));
    cell.verb(&["start"]).ok();
    assert!(restarter(&folder).is_some());
    assert_eq!(count(&cell), 0);
}

#[test]
fn a_program_that_cannot_be_started_again_is_not_tried_for_ever() {
    let script = "mv /bin/env /bin/gone; exit 1";
    let flags = ["--restart", "always", "--entrypoint", "/bin/env"];
    let cell = Cell::start("gone", &flags, &["sh", "-c", script]);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "127");
    let now = cell.inspect();
    assert_eq!(now["restarting"], false);
    assert!(now["reason"].as_str().is_some_and(|why| why.contains("env")), "{now}");
    eventually("its restarter ends", || restarter(&folder(&cell)).is_none());
}

/// The time that a cell is granted is not granted anew by its own end.
#[test]
fn a_cell_whose_time_is_over_is_not_started_again() {
    let cell = Cell::idle("timed", &["--restart", "always", "--timeout", "1s"]);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "137");
    a_while();
    let now = cell.inspect();
    assert_eq!((&now["state"], &now["restarting"]), (&"exited".into(), &false.into()));
    assert!(now["reason"].as_str().is_some_and(|why| why.contains("deadline")), "{now}");
    eventually("its restarter ends", || restarter(&folder(&cell)).is_none());
}

#[test]
fn a_policy_is_changed_while_the_cell_runs() {
    let cell = Cell::idle("changed", &[]);
    cell.verb(&["update", "--restart", "always"]).ok();
    let before = cell.supervisor();
    kill9(before);
    eventually("it runs again", || runs_anew(&cell, before));
    assert_eq!(cell.inspect()["spec"]["restart"], "always");
    cell.verb(&["update", "--restart", "no"]).ok();
    assert!(restarter(&folder(&cell)).is_none());
    kill9(cell.supervisor());
    a_while();
    assert_eq!(cell.state(), "exited");
    cell.verb(&["update", "--restart", "on-failure:1"]).ok();
    cell.verb(&["start"]).ok();
    assert!(restarter(&folder(&cell)).is_some());
}

#[test]
fn what_cannot_start_again_is_refused_with_a_policy() {
    let with = |flags: &[&str]| {
        run([&["run", "-d", "--restart", "always"], flags, &[IMAGE, "true"]].concat()).exited(125)
    };
    with(&["--rm"]).complains_of(&["--restart", "--rm"]);
    let secret = ["--secret", "K=v@https://example.org", "--allow-net", "example.org:443"];
    with(&secret).complains_of(&["--restart", "secret"]);
    let isolate = run(["run", "--restart", "always", "x.wasm"]).exited(125);
    isolate.complains_of(&["--restart", "isolate"]);
    let wrong = run(["run", "--restart", "sometimes", IMAGE]).exited(125);
    assert!(wrong.stderr.contains("unknown policy"), "{}", wrong.stderr);
}

/// `docker run -d` with a policy.
fn kept(server: &Server, name: &str, policy: &str, command: &[&str]) {
    let flags = ["run", "-d", "--network", "none", "--name", name, "--restart", policy, IMAGE];
    let made = server.docker(&[&flags, command].concat()).ok();
    assert_eq!(made.stderr, "", "nothing is left out");
}

fn record(server: &Server, name: &str) -> PathBuf {
    server.root().join("cells").join(server.inspect(name, "{{.Id}}"))
}

/// A field of what `exocell inspect` says on the server's state root, with or without the server.
fn told(server: &Server, name: &str, field: &str) -> serde_json::Value {
    let inspected = finish(&mut server.exocell(&["inspect", "--json", name]), b"").ok();
    inspected.one()[field].clone()
}

#[test]
fn a_container_is_started_again_and_that_is_told() {
    let server = Server::start();
    kept(&server, "c", "on-failure:2", &["sh", "-c", "echo run; exit 3"]);
    let shown = "{{.RestartCount}} {{.State.Status}} {{.State.Restarting}} {{.State.ExitCode}}";
    says(&server, &["inspect", "--format", shown, "c"], "2 exited false 3");
    assert_eq!(server.docker(&["wait", "c"]).ok().text(), "3");
    assert_eq!(server.docker(&["logs", "c"]).ok().text(), "run\nrun\nrun");
    let policy =
        "{{.HostConfig.RestartPolicy.Name}} {{.HostConfig.RestartPolicy.MaximumRetryCount}}";
    assert_eq!(server.inspect("c", policy), "on-failure 2");
    let events = || {
        let until = (exocell_cell::now_ms() / 1000 + 1).to_string();
        let flags = ["events", "--since", "1", "--until", &until, "--filter", "container=c"];
        server.docker(&[&flags[..], &["--format", "{{.Action}}"]].concat()).ok().text().to_owned()
    };
    let wanted = "create\nattach\nstart\ndie\nstart\ndie\nstart\ndie";
    let plain = |text: String| text.replace("attach\n", "");
    eventually("all is told", || plain(events()) == plain(wanted.to_owned()));
    server.docker(&["rm", "c"]).ok();
}

#[test]
fn a_container_that_restarts_is_stopped_changed_and_removed() {
    let server = Server::start();
    kept(&server, "c", "always", &["sh", "-c", "exit 7"]);
    let waits = || {
        server.inspect("c", "{{.State.Restarting}}") == "true"
            && told(&server, "c", "restart_count").as_u64() >= Some(4)
    };
    eventually("it waits", waits);
    // It may run for a moment between two looks.
    eventually("its state is told", || {
        server.inspect("c", "{{.State.Running}} {{.State.Status}}") == "true restarting"
    });
    for words in [&["exec", "c", "true"][..], &["rm", "c"], &["cp", "c:/etc/passwd", "-"]] {
        eventually("it is refused", || server.docker(words).stderr.contains("restarting"));
    }
    let listed = ["ps", "--filter", "status=restarting", "--format", "{{.Status}}"];
    eventually("it is listed", || server.docker(&listed).text().starts_with("Restarting (7)"));
    let folder = record(&server, "c");
    server.docker(&["stop", "c"]).ok();
    assert!(restarter(&folder).is_none());
    assert_eq!(server.inspect("c", "{{.State.Status}} {{.State.ExitCode}}"), "exited 7");
    assert_eq!(server.docker(&["wait", "c"]).ok().text(), "7");
    server.docker(&["update", "--restart", "no", "c"]).ok();
    assert_eq!(server.inspect("c", "{{.HostConfig.RestartPolicy.Name}}"), "no");
    server.docker(&["update", "--memory", "64m", "--restart", "on-failure:1", "c"]).ok();
    let policy = "{{.HostConfig.Memory}} {{.HostConfig.RestartPolicy.Name}}";
    assert_eq!(server.inspect("c", policy), "67108864 on-failure");
    server.docker(&["rm", "c"]).ok();
    server.idle("later");
    server.docker(&["update", "--restart", "unless-stopped", "later"]).ok();
    let folder = record(&server, "later");
    let own = restarter(&folder).expect("a restarter");
    server.docker(&["rm", "-f", "later"]).ok();
    assert!(!alive(own) && !folder.exists());
    assert_eq!((server.records(), server.files()), (Vec::<String>::new(), Vec::new()));
}

#[test]
fn containers_start_again_without_a_server_and_with_the_next() {
    let mut server = Server::start();
    for (name, policy) in [("a", "always"), ("u", "unless-stopped"), ("s", "unless-stopped")] {
        kept(&server, name, policy, &["sleep", "infinity"]);
    }
    server.docker(&["stop", "-t", "0", "s"]).ok();
    let pid = |server: &Server, name: &str| told(server, name, "supervisor_pid").as_i64();
    server.kill();
    let before = pid(&server, "a").expect("a pid");
    kill9(before as i32);
    eventually("it runs again", || pid(&server, "a").is_some_and(|now| now != before));
    server.resume();
    assert_eq!(server.inspect("a", "{{.RestartCount}} {{.State.Running}}"), "1 true");
    // As after an end of the host: all is gone at once.
    let folders = ["a", "u"].map(|name| (name, record(&server, name)));
    server.kill();
    for (name, folder) in folders {
        kill9(restarter(&folder).expect("a restarter"));
        kill9(pid(&server, name).expect("a pid") as i32);
    }
    eventually("they ended", || {
        ["a", "u"].iter().all(|name| told(&server, name, "state") == "exited")
    });
    server.resume();
    for name in ["a", "u"] {
        says(&server, &["inspect", "--format", "{{.State.Running}}", name], "true");
    }
    assert_eq!(server.inspect("s", "{{.State.Running}}"), "false");
}

#[test]
fn a_policy_that_is_none_is_refused_by_the_api() {
    let server = Server::start();
    let refused = |flags: &[&str], word: &str| {
        let told = server.docker(&[&["create"], flags, &[IMAGE, "true"]].concat());
        assert!(told.code != 0 && told.stderr.contains(word), "{flags:?}: {}", told.stderr);
    };
    refused(&["--restart", "sometimes"], "restart policy");
    refused(&["--restart", "always:3"], "maximum retry count");
    refused(&["--rm", "--restart", "always"], "--restart");
}
