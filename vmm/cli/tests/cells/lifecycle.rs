//! The verbs on cells that run: from `run -d` to `rm`.

use crate::common::cell::{self, Cell, pid, ps};
use crate::common::pty::OnTerminal;
use crate::common::{IMAGE, Started, eventually, exocell, finish, host, run, text, unique};

#[test]
fn a_detached_cell_is_listed_until_it_is_removed() {
    let name = unique("listed");
    let started = run(["run", "-d", "--name", &name, IMAGE, "sleep", "60"]).ok();
    let cell = Cell { name };
    let id = started.text();
    assert_eq!(id.len(), 32, "{id}");
    let listed = ps(&[]).into_iter().find(|row| row["id"] == id).expect("a row");
    assert_eq!(listed["state"], "running");
    assert_eq!(listed["name"], cell.name.as_str());
    assert_eq!(listed["strength"], "vm");
    assert!(run(["ps", "-q"]).ok().text().lines().any(|line| line == id));
    assert!(run(["ps"]).ok().text().contains(&id[..12]));
    cell.verb(&["kill"]).ok();
    assert!(!run(["ps", "-q"]).ok().text().contains(id));
    assert!(run(["ps", "-aq"]).ok().text().contains(id));
    assert!(run(["ps", "-a"]).ok().text().contains("exited (137)"));
    run(["rm", &id[..12]]).ok();
    assert!(!host::record(id).exists());
    assert!(cell::row(&cell.name).is_none());
}

#[test]
fn inspect_names_the_processes_that_there_are() {
    let cell = Cell::idle("inspect", &[]);
    let told = cell.inspect();
    assert_eq!(told["state"], "running");
    assert_eq!(told["strength"], "vm");
    let (supervisor, kernel) = (pid(&told, "supervisor_pid"), pid(&told, "guest_kernel_pid"));
    let namespace = host::namespace(supervisor).expect("a namespace of its own");
    let members = host::processes(&namespace);
    assert_eq!(members.first(), Some(&supervisor));
    assert!(members.contains(&kernel) && members.len() > 2, "{members:?}");
    assert!(
        host::command_line(kernel).contains("virtio_uml.device"),
        "{}",
        host::command_line(kernel)
    );
    cell.verb(&["stop", "-t", "0"]).ok();
    let told = cell.inspect();
    assert_eq!(told["state"], "exited");
    assert!(told["supervisor_pid"].is_null() && told["guest_kernel_pid"].is_null(), "{told}");
    eventually("its processes are gone", || host::processes(&namespace).is_empty());
}

#[test]
fn exec_has_the_programs_exit_code_and_streams() {
    let cell = Cell::idle("exec", &[]);
    assert_eq!(cell.shell("echo out; echo err >&2; exit 6").exited(6).stderr, "err\n");
    cell.shell("kill -9 $$").exited(137);
    run(["exec", &cell.name, "no-such-program"]).exited(127);
    run(["exec", &cell.name, "/etc"]).exited(126);
    let echoed = finish(&mut cell.exec(&["-i"], &["cat"]), b"typed").ok();
    assert_eq!(echoed.text(), "typed");
}

#[test]
fn exec_has_the_user_directory_and_environment_asked_for() {
    let cell = Cell::idle("exec-flags", &[]);
    let flags = ["-u", "daemon", "-w", "/usr", "-e", "A=b"];
    let ended = finish(&mut cell.exec(&flags, &["sh", "-c", "id -un; pwd; echo $A"]), b"").ok();
    assert_eq!(ended.text(), "daemon\n/usr\nb");
}

#[test]
fn exec_gives_a_terminal() {
    let cell = Cell::idle("exec-tty", &[]);
    let mut terminal = OnTerminal::start(&mut cell.exec(&["-it"], &["sh"]), 20, 70);
    terminal.type_in("stty size\n");
    terminal.await_text("20 70");
    terminal.type_in("exit 2\n");
    assert_eq!(terminal.finish(), 2);
}

#[test]
fn a_detached_exec_runs_on() {
    let cell = Cell::idle("exec-d", &[]);
    finish(&mut cell.exec(&["-d"], &["sh", "-c", "sleep 1; echo done > /tmp/mark"]), b"").ok();
    finish(&mut cell.exec(&["-d"], &["no-such-program"]), b"").exited(127);
    eventually("the mark is made", || cell.shell("cat /tmp/mark 2>/dev/null").text() == "done");
}

#[test]
fn many_execs_at_once_all_answer() {
    let cell = Cell::idle("exec-many", &[]);
    cell.answers_many_at_once();
}

#[test]
fn logs_keep_both_streams() {
    let cell = Cell::start("logs", &[], &["sh", "-c", "echo out; echo err >&2"]);
    cell.verb(&["wait"]).ok();
    let logs = cell.verb(&["logs"]).ok();
    assert_eq!((logs.text(), logs.stderr.as_str()), ("out", "err\n"));
    assert!(!cell.verb(&["logs", "--console"]).ok().stdout.is_empty());
}

#[test]
fn logs_follow_until_the_end() {
    let script = "for i in 1 2 3; do echo line $i; sleep 0.5; done; exit 3";
    let cell = Cell::start("follow", &[], &["sh", "-c", script]);
    let followed = cell.verb(&["logs", "-f"]).ok();
    let lines: Vec<&str> = followed.text().lines().collect();
    assert_eq!(lines.last(), Some(&"line 3"), "{lines:?}");
    assert_eq!(cell.state(), "exited");
}

#[test]
fn a_follower_has_no_hand_in_the_program() {
    let cell = Cell::start("watched", &["-i"], &["sh", "-c", "echo up; cat; echo end"]);
    let follower = Started::new(&mut exocell(["logs", "-f", &cell.name]));
    std::thread::sleep(std::time::Duration::from_secs(1));
    let pid = nix::unistd::Pid::from_raw(follower.pid());
    // Not SIGINT: whoever runs the tests in the background ignores that.
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let ended = follower.finish(crate::common::LIMIT).expect("it ends").exited(128 + 15);
    assert_eq!(ended.text(), "up");
    assert_eq!(cell.state(), "running");
    assert_eq!(cell.verb(&["logs"]).ok().text(), "up");
}

#[test]
fn a_cell_can_be_removed_while_it_starts() {
    for delay_ms in [0, 20, 60, 120] {
        let cell = Cell { name: unique("young") };
        let mut started =
            Started::new(&mut exocell(["run", "--name", &cell.name, IMAGE, "sleep", "60"]));
        started.close_stdin();
        eventually("there is a record", || cell::row(&cell.name).is_some());
        let supervisor = host::jailed_child(started.pid());
        let namespace = supervisor.and_then(host::namespace);
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        cell.verb(&["rm", "-f"]).ok();
        started.finish(crate::common::LIMIT).expect("run ends with its cell").exited(137);
        if let Some(namespace) = namespace {
            eventually("its processes are gone", || host::processes(&namespace).is_empty());
        }
        assert!(cell::row(&cell.name).is_none());
    }
}

#[test]
fn wait_tells_the_exit_code() {
    let cell = Cell::start("wait", &[], &["sh", "-c", "sleep 1; exit 11"]);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "11");
    assert_eq!(cell.verb(&["wait"]).ok().text(), "11");
}

#[test]
fn wait_tells_the_exit_code_of_a_cell_that_removes_itself() {
    let cell = Cell::start("wait-rm", &["--rm"], &["sh", "-c", "sleep 2; exit 12"]);
    assert_eq!(cell.verb(&["wait"]).ok().text(), "12");
    assert!(cell::row(&cell.name).is_none());
}

#[test]
fn stop_lets_the_program_end_by_itself() {
    let script = "trap 'echo bye; exit 21' TERM; echo up; while :; do sleep 0.1; done";
    let cell = Cell::start("stop", &[], &["sh", "-c", script]);
    eventually("the trap is set", || cell.verb(&["logs"]).text() == "up");
    cell.verb(&["stop", "-t", "60"]).ok();
    assert_eq!(cell.verb(&["logs"]).ok().text(), "up\nbye");
    assert_eq!(cell.inspect()["exit_code"], 21);
}

#[test]
fn stop_ends_a_program_that_does_not_listen() {
    let script = "trap '' TERM; echo up; while :; do sleep 1; done";
    let cell = Cell::start("stop-hard", &[], &["sh", "-c", script]);
    eventually("the trap is set", || cell.verb(&["logs"]).text() == "up");
    cell.verb(&["stop", "-t", "1"]).ok();
    let told = cell.inspect();
    assert_eq!((told["state"].as_str(), told["exit_code"].as_i64()), (Some("exited"), Some(137)));
}

#[test]
fn kill_sends_the_signal_asked_for() {
    let script = "trap 'echo usr1' USR1; echo up; while :; do sleep 0.1; done";
    let cell = Cell::start("kill", &[], &["sh", "-c", script]);
    eventually("the trap is set", || cell.verb(&["logs"]).text() == "up");
    cell.verb(&["kill", "-s", "USR1"]).ok();
    eventually("it was caught", || cell.verb(&["logs"]).text() == "up\nusr1");
    cell.verb(&["kill", "-s", "NOSUCH"]).exited(125).complains_of(&["NOSUCH", "signal"]);
    cell.verb(&["kill"]).ok();
    assert_eq!(cell.inspect()["exit_code"], 137);
}

#[test]
fn a_kill_runs_no_handler_of_another_signal() {
    let folder = tempfile::tempdir().unwrap();
    let shared = format!("{}:/shared", crate::common::text(folder.path()));
    let script =
        "trap 'echo term > /shared/term; exit 0' TERM; echo up; while :; do sleep 0.1; done";
    let cell = Cell::start("kill-only", &["-v", &shared], &["sh", "-c", script]);
    eventually("the trap is set", || cell.verb(&["logs"]).text() == "up");
    cell.verb(&["kill"]).ok();
    assert_eq!(cell.inspect()["exit_code"], 137);
    assert!(!folder.path().join("term").exists());
}

#[test]
fn rm_needs_force_for_a_running_cell() {
    let cell = Cell::idle("rm-force", &[]);
    let id = cell.inspect()["id"].as_str().unwrap().to_owned();
    cell.verb(&["rm"]).exited(125).complains_of(&["running", "rm -f"]);
    let namespace = host::namespace(cell.supervisor()).unwrap();
    cell.verb(&["rm", "-f"]).ok();
    assert!(!host::record(&id).exists());
    eventually("its processes are gone", || host::processes(&namespace).is_empty());
}

#[test]
fn a_name_is_taken_once() {
    let cell = Cell::idle("taken", &[]);
    let second = run(["run", "--rm", "--name", &cell.name, IMAGE, "true"]).exited(125);
    second.complains_of(&[&cell.name, "taken", "exocell rm"]);
    cell.shell("true").ok();
}

#[test]
fn every_verb_says_that_a_cell_is_unknown() {
    let name = unique("nobody");
    for verb in ["logs", "inspect", "stats", "wait", "stop", "kill", "rm"] {
        run([verb, &name]).exited(125).complains_of(&[&name, "no such cell", "ps -a"]);
    }
    run(["exec", &name, "true"]).exited(125).complains_of(&[&name, "no such cell"]);
    run(["cp", &format!("{name}:/etc/passwd"), "-"]).exited(125).complains_of(&["no such cell"]);
}

#[test]
fn an_ended_cell_takes_no_commands() {
    let cell = Cell::start("ended", &[], &["true"]);
    cell.verb(&["wait"]).ok();
    run(["exec", &cell.name, "true"]).exited(125).complains_of(&["exited", "running"]);
    cell.verb(&["kill"]).exited(125).complains_of(&["exited"]);
    cell.verb(&["stats"]).exited(125).complains_of(&["exited"]);
}

#[test]
fn stats_count_what_a_cell_uses() {
    let cell = Cell::idle("stats", &["--memory", "200m"]);
    cell.shell("dd if=/dev/urandom of=/root/x bs=1M count=20 && sync").ok();
    cell.shell("dd if=/root/x of=/dev/null bs=1M iflag=direct").ok();
    let told = cell.verb(&["stats", "--json"]).ok().json();
    let number = |path: &str| {
        told.pointer(path)
            .and_then(serde_json::Value::as_u64)
            .unwrap_or_else(|| panic!("{path} in {told}"))
    };
    assert_eq!(number("/counters/memory_limit_bytes"), 200 << 20);
    assert!((20 << 20..200 << 20).contains(&number("/counters/memory_allocated_bytes")), "{told}");
    assert!(number("/counters/block_read_bytes") >= 20 << 20, "{told}");
    assert!(number("/counters/disk_allocated_bytes") > 20 << 20, "{told}");
    assert!(number("/host/process_count") >= 3, "{told}");
    assert!(number("/host/cpu_ns") > 0, "{told}");
    assert!(told["guest_claims"].is_object(), "{told}");
    assert!(cell.verb(&["stats"]).ok().text().contains(&cell.name));
}

#[test]
fn cp_carries_files_both_ways() {
    let cell = Cell::idle("cp", &[]);
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("file"), dir.path().join("back"));
    std::fs::write(&from, "content").unwrap();
    run(["cp", text(&from), &cell.path("/root")]).ok();
    assert_eq!(cell.shell("cat /root/file").ok().text(), "content");
    run(["cp", &cell.path("/root/file"), text(&to)]).ok();
    assert_eq!(std::fs::read_to_string(&to).unwrap(), "content");
    for _ in 0..2 {
        run(["cp", text(&from), &cell.path("/root/renamed")]).ok();
        assert_eq!(cell.shell("cat /root/renamed").ok().text(), "content");
    }
}

#[test]
fn cp_carries_directories_both_ways() {
    let cell = Cell::idle("cp-dir", &[]);
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("tree");
    std::fs::create_dir_all(from.join("a/b")).unwrap();
    std::fs::write(from.join("a/b/file"), "deep").unwrap();
    std::os::unix::fs::symlink("b/file", from.join("a/link")).unwrap();
    run(["cp", text(&from), &cell.path("/root")]).ok();
    assert_eq!(cell.shell("cat /root/tree/a/link").ok().text(), "deep");
    run(["cp", text(&from), &cell.path("/root/new")]).ok();
    assert_eq!(cell.shell("cat /root/new/a/link").ok().text(), "deep");
    let back = dir.path().join("back");
    run(["cp", &cell.path("/root/tree"), text(&back)]).ok();
    assert_eq!(std::fs::read_to_string(back.join("a/b/file")).unwrap(), "deep");
    assert_eq!(std::fs::read_link(back.join("a/link")).unwrap().to_str(), Some("b/file"));
}

#[test]
fn cp_speaks_tar_on_standard_streams() {
    let cell = Cell::idle("cp-tar", &[]);
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_mode(0o640);
    builder.append_data(&mut header, "inner", &b"tarr"[..]).unwrap();
    let archive = builder.into_inner().unwrap();
    finish(&mut exocell(["cp", "-", &cell.path("/root")]), &archive).ok();
    assert_eq!(cell.shell("cat /root/inner; stat -c %a /root/inner").ok().text(), "tarr640");
    let out = run(["cp", &cell.path("/root/inner"), "-"]).ok();
    let mut archive = tar::Archive::new(out.stdout.as_slice());
    let paths: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().into_owned())
        .collect();
    assert_eq!(paths, [std::path::PathBuf::from("inner")]);
}

#[test]
fn cp_tells_of_pipes_and_skips_devices_and_sockets() {
    let cell = Cell::idle("cp-special", &[]);
    let socket = "import socket; socket.socket(socket.AF_UNIX).bind('/d/socket')";
    let script = format!("mkdir /d; mkfifo /d/pipe; mknod /d/zero c 1 5; python3 -c \"{socket}\"");
    cell.shell(&script).ok();
    let out = run(["cp", &cell.path("/d"), "-"]).ok();
    let mut archive = tar::Archive::new(out.stdout.as_slice());
    let entries = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.path().unwrap().display().to_string(), entry.header().entry_type())
    });
    let entries: Vec<_> = entries.collect();
    let directory = ("d".to_owned(), tar::EntryType::Directory);
    assert_eq!(entries, [directory, ("d/pipe".to_owned(), tar::EntryType::Fifo)]);
}

#[test]
fn cp_of_nothing_says_so() {
    let cell = Cell::idle("cp-none", &[]);
    let dir = tempfile::tempdir().unwrap();
    run(["cp", &cell.path("/no/such/file"), text(dir.path())])
        .exited(125)
        .complains_of(&["/no/such/file"]);
    run(["cp", "/no/such/file", &cell.path("/root")]).exited(125).complains_of(&["/no/such/file"]);
    run(["cp", "/a", "/b"]).exited(125).complains_of(&["CELL:PATH"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_cell_outlives_the_command_that_started_it() {
    let name = unique("orphan");
    let cell = Cell { name };
    let mut started =
        Started::new(&mut exocell(["run", "--name", &cell.name, IMAGE, "sleep", "60"]));
    eventually("it runs", || cell::row(&cell.name).is_some_and(|row| row["state"] == "running"));
    started.child.kill().unwrap();
    started.child.wait().unwrap();
    eventually("it answers", || cell.shell("true").code == 0);
    cell.verb(&["stop", "-t", "0"]).ok();
    assert_eq!(cell.state(), "exited");
}

#[test]
fn a_detached_cell_whose_program_is_missing_says_so() {
    let name = unique("missing");
    let ended = run(["run", "-d", "--rm", "--name", &name, IMAGE, "no-such-program"]).exited(127);
    ended.complains_of(&["no-such-program"]);
    assert!(cell::row(&name).is_none());
}

#[test]
fn a_paused_cell_stands_still_until_it_is_let_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let volume = format!("{}:/out", text(folder.path()));
    let script = "trap 'echo bye > /out/bye; exit 4' TERM; while :; do sleep 0.1; done";
    let cell = Cell::start("paused", &["-v", &volume], &["sh", "-c", script]);
    let supervisor = cell.supervisor();
    let guest = || {
        let all = host::processes(&host::namespace(supervisor).expect("a namespace of its own"));
        all.into_iter().filter(|pid| *pid != supervisor).collect::<Vec<_>>()
    };
    cell.verb(&["unpause"]).exited(125).complains_of(&["not paused"]);
    cell.verb(&["pause"]).ok();
    cell.verb(&["pause"]).exited(125).complains_of(&["already paused"]);
    let is_still = || guest().len() > 1 && guest().iter().all(|pid| host::is_stopped(*pid));
    eventually("all of it stands still", is_still);
    assert!(cell::row(&cell.name).is_some_and(|row| row["paused"] == true));
    assert!(
        run(["ps"]).ok().text().lines().any(|l| l.contains(&cell.name) && l.contains("paused"))
    );
    cell.shell("true").exited(125).complains_of(&["paused"]);
    run(["cp", &cell.path("/etc/hostname"), "-"]).exited(125).complains_of(&["paused"]);
    assert!(cell.verb(&["stats", "--json"]).ok().json()["guest_claims"].is_null());
    cell.verb(&["unpause"]).ok();
    cell.shell("true").ok();
    assert!(cell::row(&cell.name).is_some_and(|row| row["paused"] == false));
    cell.verb(&["pause"]).ok();
    // A signal lets it go on, and what it then wrote is there.
    cell.verb(&["stop", "-t", "60"]).ok();
    assert_eq!(cell.inspect()["exit_code"], 4);
    assert_eq!(std::fs::read_to_string(folder.path().join("bye")).unwrap(), "bye\n");
}

#[test]
fn a_supervisor_notes_its_start_and_its_end() {
    let cell = Cell::idle("noted", &[]);
    let noted = || cell.verb(&["logs", "--supervisor"]).ok().text().to_owned();
    let begun = noted();
    let id = cell.inspect()["id"].as_str().expect("an id").to_owned();
    for stage in ["began", "jailed", "guest kernel started", "guest ready", "program started"] {
        assert!(begun.lines().any(|line| line.contains(stage)), "no `{stage}` in: {begun}");
    }
    assert!(begun.contains("at_us=") && begun.contains(&id), "{begun}");
    cell.verb(&["stop", "-t", "0"]).ok();
    let ended = noted();
    assert!(ended.contains("stop asked for") && ended.contains("ended exit_code=137"), "{ended}");
}

#[test]
fn the_steps_of_a_start_are_told_to_whoever_asks() {
    let start = |flags: &[&str]| {
        let finished = run([flags, &["run", "--rm", IMAGE, "true"]].concat()).ok();
        finished.stderr.clone()
    };
    assert_eq!(start(&[]), "");
    assert_eq!(start(&["--log-level", "info"]), "");
    let steps = start(&["--log-level", "debug"]);
    assert!(steps.contains("DEBUG image opened took_us="), "{steps}");
    let objects = start(&["--log-level", "debug", "--log-format", "json"]);
    let objects = objects.lines().map(|line| serde_json::from_str(line).expect("an object"));
    let objects: Vec<serde_json::Value> = objects.collect();
    assert!(
        objects.iter().any(|object| {
            object["message"] == "supervisor started" && object["took_us"].is_u64()
        })
    );
    for (flag, value) in [("--log-level", "loud"), ("--log-format", "xml")] {
        let refused = run([flag, value, "ps"]).exited(125);
        assert!(refused.stderr.contains(flag) && refused.stderr.contains(value));
    }
}
