//! What people type who know docker: the same words do the same, or say what to type instead.

use std::fs;

use serde_json::Value;

use crate::common::cell::{self, Cell};
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::pty::OnTerminal;
use crate::common::{IMAGE, LIMIT, Started, eventually, exocell, finish, run, shell, text, unique};

/// An image's name that goes with the test.
struct Named(String);

impl Drop for Named {
    fn drop(&mut self) {
        run(["image", "rm", "-f", &self.0]);
    }
}

#[test]
fn arguments_are_as_long_as_linux_takes_them() {
    let cell = Cell::idle("long", &[]);
    // One may have 128 KiB, all together 2 MiB.
    let long = "x".repeat(120_000);
    let words: Vec<&str> = std::iter::repeat_n(long.as_str(), 10).collect();
    let script = "echo $# ${#1} ${#10} ${#LONG}";
    let variable = format!("LONG={long}");
    let exec = [&["exec", "-e", &variable, &cell.name, "sh", "-c", script, "sh"], &words[..]];
    assert_eq!(run(exec.concat()).ok().text(), "10 120000 120000 120000");
    let begin = ["run", "--rm", "-e", &variable, IMAGE, "sh", "-c", script, "sh"];
    assert_eq!(run([&begin, &words[..]].concat()).ok().text(), "10 120000 120000 120000");
}

#[test]
fn logs_are_chosen_by_lines_and_times() {
    let script = "echo one; echo two >&2; printf three; sleep infinity";
    let cell = Cell::start("log-lines", &[], &["sh", "-c", script]);
    let logs = |flags: &[&str]| run([&["logs"], flags, &[&cell.name]].concat());
    eventually("it has written", || logs(&[]).text() == "one\nthree");
    let last = logs(&["--tail", "2"]).ok();
    assert_eq!((last.text(), last.stderr.as_str()), ("three", "two\n"));
    assert_eq!(logs(&["-n", "0"]).ok().text(), "");
    assert_eq!(logs(&["--tail=-1"]).ok().text(), "one\nthree");
    assert_eq!(logs(&["--since", "2000-01-01", "--tail", "all"]).ok().text(), "one\nthree");
    assert_eq!(logs(&["--until", "2000-01-01T00:00:00Z"]).ok().stdout, b"");
    assert_eq!(logs(&["--since", "24h", "--until", "1"]).ok().stdout, b"");
    let stamped = logs(&["-t", "--tail", "3"]).ok();
    let line = stamped.text().lines().next().unwrap().to_owned();
    let (time, word) = line.split_once(' ').unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z') && word == "one", "{line}");
    logs(&["--tail", "few"]).exited(125).complains_of(&["--tail", "few"]);
    logs(&["--since", "soon"]).exited(125).complains_of(&["--since", "soon"]);
    run(["logs", "--console", "-t", &cell.name]).exited(125);
}

#[test]
fn a_log_is_followed_from_a_line_on() {
    let script =
        "echo one; echo two; until test -e /go; do sleep 0.1; done; echo three; printf end";
    let cell = Cell::start("log-follow", &[], &["sh", "-c", script]);
    eventually("it has written", || cell.verb(&["logs"]).text() == "one\ntwo");
    let follower = Started::new(&mut exocell(["logs", "-f", "--tail", "1", &cell.name]));
    let stopper = Started::new(&mut exocell(["logs", "-f", "--until", "0", &cell.name]));
    assert_eq!(stopper.finish(LIMIT).expect("it ends").ok().stdout, b"");
    cell.shell("touch /go").ok();
    let heard = follower.finish(LIMIT).expect("it ends").ok();
    assert_eq!(heard.text(), "two\nthree\nend");
}

#[test]
fn a_cell_starts_again_with_its_disk_and_its_folders() {
    let folder = tempfile::tempdir().unwrap();
    let volume = format!("{}:/shared", text(folder.path()));
    let script = "echo run >> /count; cat /count; cat /shared/f; sleep infinity";
    fs::write(folder.path().join("f"), "of the host\n").unwrap();
    let cell = Cell::start("again", &["-v", &volume, "-e", "A=1"], &["sh", "-c", script]);
    eventually("it runs", || cell.verb(&["logs"]).text() == "run\nof the host");
    // One that runs is started.
    cell.verb(&["start"]).ok();
    cell.verb(&["stop", "-t", "0"]).ok();
    assert_eq!(cell.verb(&["start"]).ok().text(), cell.name);
    let logged = || cell.verb(&["logs", "--tail", "3"]).text().to_owned();
    eventually("it runs again", || logged() == "run\nrun\nof the host");
    assert_eq!(
        cell.shell("echo $A; cat /proc/1/environ | tr '\\0' '\\n' | grep ^A=").ok().text(),
        "1\nA=1"
    );
    assert_eq!(cell.verb(&["restart", "-t", "0"]).ok().text(), cell.name);
    eventually("it runs a third time", || logged() == "run\nrun\nof the host");
    assert_eq!(cell.shell("grep -c run /count").ok().text(), "3");
    assert_eq!(cell.state(), "running");
}

#[test]
fn an_ended_program_is_started_and_heard() {
    let name = unique("heard");
    run(["run", "-i", "--name", &name, IMAGE, "sh", "-c", "read x; echo got $x; exit 4"]).exited(4);
    let heard = finish(&mut exocell(["start", "-ai", &name]), b"word\n").exited(4);
    assert_eq!(heard.text(), "got word");
    run(["rm", &name]).ok();
}

#[test]
fn what_is_revoked_stays_so_and_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let volume = format!("{}:/shared", text(folder.path()));
    let flags = ["-v", &volume, "--allow-net", "a.test:443", "--pager", "eager", "-m", "256m"];
    let cell = Cell::idle("revoked", &flags);
    cell.shell("test -d /shared && echo x > /shared/f").ok();
    let update = ["update", "--revoke", "folder:/shared", "--allow-net", "b.test:80"];
    run([&update[..], &["--memory", "128m", &cell.name]].concat()).ok();
    let holds = cell.inspect()["capabilities"].clone();
    assert_eq!(holds["folder"], serde_json::json!([]));
    let rules: Vec<&str> =
        holds["network"]["connect"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(rules, ["a.test:443", "b.test:80"]);
    assert_eq!(holds["memory"]["limit"], (128 << 20).to_string());
    // A name that is given meanwhile keeps what was noted.
    let name = unique("renamed");
    run(["rename", &cell.name, &name]).ok();
    assert_eq!(run(["inspect", "-f", "{{json .capabilities.folder}}", &name]).ok().text(), "[]");
    run(["rename", &name, &cell.name]).ok();
    cell.verb(&["restart", "-t", "0"]).ok();
    cell.shell("test ! -e /shared/f").ok();
}

#[test]
fn what_cannot_start_again_says_why() {
    let with_secret = unique("secret");
    let flags = ["--secret", "K=v@a.test", "--allow-net", "a.test:80"];
    let begin = ["run", "--name", &with_secret];
    run([&begin, &flags[..], &[IMAGE, "true"]].concat()).ok();
    run(["start", &with_secret]).exited(125).complains_of(&["secret", "exocell run"]);
    run(["rm", &with_secret]).ok();
    let removed = Cell::idle("rm-again", &["--rm"]);
    removed.verb(&["restart"]).exited(125).complains_of(&["--rm", "exocell run"]);
    assert_eq!(removed.state(), "running", "it was not stopped for nothing");
}

#[test]
fn a_terminal_is_left_and_come_back_to() {
    let name = unique("left");
    let begin = ["run", "-it", "--rm", "--name", &name, IMAGE, "sh"];
    let mut terminal = OnTerminal::start(&mut exocell(begin), 24, 80);
    terminal.type_in("echo $((40 + 2))\n");
    terminal.await_text("42");
    terminal.type_in("\x10\x11");
    assert_eq!(terminal.finish(), 0);
    assert!(terminal.shown().contains("exocell attach"), "{}", terminal.shown());
    assert_eq!(cell::row(&name).expect("it goes on")["state"], "running");
    let mut again = OnTerminal::start(&mut exocell(["attach", &name]), 30, 90);
    again.type_in("echo $((50 + 3)); stty size\n");
    again.await_text("53");
    again.await_text("30 90");
    again.type_in("exit 7\n");
    assert_eq!(again.finish(), 7);
    eventually("it has removed itself", || cell::row(&name).is_none());
}

#[test]
fn attach_hears_the_program_and_passes_signals_on() {
    let script = "trap 'echo caught; exit 3' TERM; until test -e /go; do sleep 0.1; done; echo up; \
                  while :; do sleep 0.1; done";
    let cell = Cell::start("attach", &[], &["sh", "-c", script]);
    let attached = Started::new(&mut exocell(["attach", &cell.name]));
    let pid = nix::unistd::Pid::from_raw(attached.pid());
    eventually("it passes signals on", || blocks_sigterm(attached.pid()));
    cell.shell("touch /go").ok();
    eventually("it is up", || cell.verb(&["logs"]).text() == "up");
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let heard = attached.finish(LIMIT).expect("it ends").exited(3);
    assert!(heard.text().ends_with("caught"), "{}", heard.text());
    cell.verb(&["attach"]).exited(125).complains_of(&["exited"]);
}

/// Whether the process waits for SIGTERM instead of ending by it (proc_pid_status(5), SigBlk).
fn blocks_sigterm(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << 14) != 0)
}

#[test]
fn names_labels_and_processes() {
    let ids = tempfile::tempdir().unwrap();
    let file = ids.path().join("id");
    let flags = ["-l", "team=red", "--label", "plain", "--cidfile", text(&file)];
    let cell = Cell::idle("labels", &flags);
    let id = fs::read_to_string(&file).unwrap();
    assert_eq!(cell.inspect()["id"], id);
    let second = unique("second");
    let refused = run(["run", "--rm", "--name", &second, "--cidfile", text(&file), IMAGE, "true"]);
    refused.exited(125).complains_of(&["--cidfile", text(&file)]);
    let listed = |flags: &[&str]| run([&["ps", "-q", "--no-trunc"], flags].concat()).ok();
    let own = format!("name={}", cell.name);
    assert_eq!(listed(&["--filter", "label=team=red", "-f", &own]).text(), id);
    assert_eq!(listed(&["--filter", "label=team=blue", "-f", &own]).text(), "");
    assert_eq!(listed(&["-f", "status=running", "-f", &own]).text(), id);
    assert_eq!(listed(&["-f", "status=exited", "-f", &own]).text(), "");
    assert_eq!(listed(&["-f", &format!("ancestor={IMAGE}"), "-f", &own]).text(), id);
    run(["ps", "--filter", "colour=red"]).exited(125).complains_of(&["--filter", "label"]);
    let shown = |template: &str| run(["ps", "-f", &own, "--format", template]).ok();
    assert_eq!(shown("{{.Names}} {{.Image}}").text(), format!("{} {IMAGE}", cell.name));
    assert_eq!(shown("{{.ID}}").text(), &id[..12]);
    assert!(shown("{{.Status}}").text().starts_with("Up "));
    let table = shown("table {{.Names}}\\t{{.State}}");
    assert!(table.text().starts_with("NAMES") && table.text().contains("running"));
    let refused = run(["ps", "--format", "{{range .}}"]).exited(125);
    refused.complains_of(&["--format", "--json and jq"]);
    let top = cell.verb(&["top"]).ok();
    assert!(top.text().contains("sleep infinity"), "{}", top.text());
    run(["top", &cell.name, "-eo", "args"]).ok();
    let state = cell.verb(&["inspect", "--format", "{{.State.Status}} {{.Config.Image}}"]).ok();
    assert_eq!(state.text(), format!("running {IMAGE}"));
    let shown = |template: &str| cell.verb(&["inspect", "-f", template]).ok().text().to_owned();
    assert_eq!(shown("{{range .Mounts}}{{.Source}}{{end}}{{.NetworkSettings.IPAddress}}"), "");
    assert_eq!(shown("{{index .Config.Labels \"team\"}} {{len .Name | ne 0}}"), "red true");
    assert_eq!(shown("{{join .Config.Cmd \" \"}} {{.State.Running}}"), "sleep infinity true");
    assert!(shown("{{if .HostConfig.Memory}}limited{{end}}") == "limited");
    for (words, told) in [
        (&["rnu", IMAGE][..], "did you mean `run`"),
        (&["volume", "create", "--opt", "type=nfs", "x"], "--opt type=nfs"),
        (&["volume", "create", "-d", "nfs", "x"], "--driver nfs"),
    ] {
        run(words.iter().copied()).exited(125).complains_of(&[told]);
    }
    let net = unique("net");
    run(["network", "create", &net]).ok();
    let refused = run(["network", "connect", &net, &cell.name]);
    run(["network", "rm", &net]).ok();
    refused.exited(125).complains_of(&["without a network", "--network"]);
    let taken = unique("taken");
    let _other = Named(taken.clone());
    let other = Cell::idle("other", &[]);
    run(["rename", &other.name, &cell.name]).exited(125).complains_of(&["taken"]);
    run(["rename", &other.name, "-bad"]).exited(125);
}

#[test]
fn the_last_cells_are_listed() {
    let root = PrivateRoot::with_image();
    for name in ["a", "b", "c"] {
        root.run(["run", "--name", name, TINY, "true"]).ok();
    }
    let names = |flags: &[&str]| {
        root.run([&["ps", "--format", "{{.Names}}"], flags].concat()).ok().text().to_owned()
    };
    assert_eq!(names(&[]), "");
    assert_eq!(names(&["-n", "2"]), "b\nc");
    assert_eq!(names(&["-l"]), "c");
    assert_eq!(names(&["-a", "-f", "exited=0"]), "a\nb\nc");
    assert_eq!(names(&["-a", "-f", "exited=1"]), "");
    let df = root.run(["system", "df"]).ok();
    assert!(df.text().contains("cells") && df.text().contains("images"), "{}", df.text());
    root.run(["system", "prune"]).exited(125).complains_of(&["--force"]);
    let pruned = root.run(["system", "prune", "-f"]).ok();
    assert!(pruned.text().contains("3 cells removed"), "{}", pruned.text());
    assert_eq!(names(&["-a"]), "");
    assert!(root.run(["image", "ls"]).text().contains(TINY));
    root.run(["system", "prune", "-af"]).ok();
    assert!(!root.run(["image", "ls"]).text().contains(TINY));
    root.holds_no_cells();
}

#[test]
fn a_stop_begins_with_the_signal_that_was_named() {
    let script = "trap 'echo usr1; exit 5' USR1; echo up; while :; do sleep 0.1; done";
    let flags = ["--stop-signal", "USR1", "--stop-timeout", "60"];
    let cell = Cell::start("stop-signal", &flags, &["sh", "-c", script]);
    eventually("it is up", || cell.verb(&["logs"]).text() == "up");
    cell.verb(&["stop"]).ok();
    assert_eq!(cell.verb(&["logs"]).text(), "up\nusr1");
    assert_eq!(cell.inspect()["exit_code"], 5);
    run(["run", "--rm", "--stop-signal", "LOUD", IMAGE, "true"]).exited(125);
}

#[test]
fn mounts_are_taken_in_dockers_words() {
    let root = PrivateRoot::with_image();
    let folder = root.dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("f"), "bound").unwrap();
    let bind = format!("type=bind,source={},target=/b,readonly", text(&folder));
    let flags = [
        "--mount",
        &bind,
        "--mount",
        "type=volume,source=data,target=/v",
        "--mount",
        "type=tmpfs,target=/t,tmpfs-size=1m",
    ];
    let script = "cat /b/f; ! (echo x > /b/x) 2>/dev/null && echo x > /v/kept && echo x > /t/x";
    assert_eq!(root.run_cell(&flags, &["sh", "-c", script]).ok().text(), "bound");
    let again = ["--mount", "source=data,target=/v,ro"];
    root.run_cell(&again, &["cat", "/v/kept"]).ok();
    // A word is a volume's name, as `src` is that of a folder here.
    let volume = ["-v", "data:/v:ro"];
    root.run_cell(&volume, &["cat", "/v/kept"]).ok();
    root.run_cell(&["-v", "src:/v"], &["sh", "-c", "test -d /v -a ! -e /v/common"]).ok();
    root.run_cell(&["--mount", "type=bind,source=/x"], &["true"]).exited(125);
    root.holds_no_cells();
}

#[test]
fn words_after_the_image_are_the_programs() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("seen"), "").unwrap();
    let volume = format!("{}:/x", text(folder.path()));
    let ls = ["run", "--rm=true", "-i=false", "--entrypoint", "ls", IMAGE];
    let granted = run([&ls[..], &["-v", &volume, "/x"]].concat()).exited(2);
    assert!(granted.stderr.contains("cannot access '/x'"), "{}", granted.stderr);
    let grep = ["run", "--rm", "--entrypoint", "grep", IMAGE, "-e", "root", "/etc/passwd"];
    assert!(run(grep).ok().text().starts_with("root:x:0:0:"));
    let cell = Cell::start("words", &["-it", "-m", "1g", "-m", "256m"], &["sleep", "infinity"]);
    cell.shell("test $(awk '/^MemTotal/ { print $2 }' /proc/meminfo) -lt 262144").ok();
    assert_eq!(run(["exec", &cell.name, "id", "-u"]).ok().text(), "0");
    let told = run(["inspect", "-f", "{{.State.Running}} {{.State.Paused}}", &cell.name]);
    assert_eq!(told.ok().text(), "true false");
}

#[test]
fn one_that_fails_does_not_keep_the_others() {
    let cells = [Cell::idle("one", &[]), Cell::idle("two", &[])];
    let names = ["no-such-cell", &cells[0].name, &cells[1].name];
    for verb in [&["stop", "-t", "0"][..], &["start"], &["pause"], &["unpause"], &["kill"]] {
        let told = run([verb, &names[..]].concat()).exited(125);
        assert_eq!(told.text(), names[1..].join("\n"), "{verb:?}");
        told.complains_of(&["no-such-cell"]);
    }
    let gone = run([&["rm", "-f"], &names[..]].concat());
    assert_eq!(gone.ok().text(), names[1..].join("\n"), "by force one that is not there is fine");
    run(["rm", "no-such-cell"]).exited(125).complains_of(&["no-such-cell"]);
}

#[test]
fn what_is_in_a_directory_is_copied_into_another() {
    let cell = Cell::idle("contents", &[]);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("one"), "1").unwrap();
    let inside = format!("{}/.", text(folder.path()));
    for target in ["/srv", "/srv/", "/made/here"] {
        run(["cp", &inside, &cell.path(target)]).ok();
    }
    let script = "cat /srv/one /made/here/one; ls -A /srv /made/here | grep -c one";
    assert_eq!(cell.shell(script).ok().text(), "112");
}

#[test]
fn a_program_of_exec_ends_when_its_time_is_over() {
    let cell = Cell::idle("late", &[]);
    let exec = |flags: &[&str], script: &str| {
        run([&["exec"], flags, &[&cell.name, "sh", "-c", script]].concat())
    };
    let late = exec(&["--timeout", "1s"], "echo begun; exec sleep 1000").exited(137);
    assert_eq!(late.text(), "begun");
    late.complains_of(&["--timeout"]);
    exec(&["--timeout", "1h"], "exit 7").exited(7);
    exec(&["-d", "--timeout", "1s"], "true").exited(125);
}

#[test]
fn volumes_are_made_listed_and_removed() {
    let root = PrivateRoot::with_image();
    let lines = |args: &[&str]| root.run([&["volume"], args].concat()).ok().text().to_owned();
    assert_eq!(lines(&["create", "--label", "kind=cache", "kept"]), "kept");
    let nameless = lines(&["create"]);
    let flags = ["run", "--name", "user", "-v", "kept:/v", TINY, "sh", "-c", "echo x > /v/file"];
    root.run(flags).ok();
    assert_eq!(lines(&["ls", "-q"]).lines().count(), 2);
    assert_eq!(lines(&["ls", "-q", "-f", "dangling=true"]), nameless);
    assert_eq!(lines(&["ls", "-f", "label=kind", "--format", "{{.Name}}"]), "kept");
    let found = root.run(["volume", "inspect", "kept"]).ok().json();
    assert_eq!(found[0]["cells"], serde_json::json!(["user"]));
    let file = std::path::Path::new(found[0]["path"].as_str().expect("a path")).join("file");
    assert_eq!(fs::read_to_string(&file).unwrap(), "x\n");
    root.run(["volume", "rm", "kept"]).exited(125).complains_of(&["kept", "user", "exocell rm"]);
    // Those with names stay, and those that a cell has.
    assert!(lines(&["prune", "-f"]).contains(&nameless));
    assert!(!lines(&["prune", "-f", "--all"]).contains("kept"));
    root.run(["rm", "user"]).ok();
    assert!(!lines(&["prune", "-f", "-a", "--filter", "label!=kind"]).contains("kept"));
    assert_eq!(lines(&["rm", "kept"]), "kept");
    assert!(!file.exists());
    root.run(["volume", "rm", "kept"]).exited(125).complains_of(&["no such volume"]);
    root.run(["volume", "rm", "-f", "kept"]).ok();
    root.run(["volume", "rm", "../docker"]).exited(125).complains_of(&["no such volume"]);
    // What a cell had made for itself goes with it, though nobody waits for its end.
    root.run(["run", "-d", "--rm", "-v", "/own", TINY, "true"]).ok();
    eventually("no volume is left", || lines(&["ls", "-q"]).is_empty());
    root.run(["volume", "create", "-d", "nfs", "far"]).exited(125).complains_of(&["nfs", "local"]);
}

#[test]
fn a_volume_stays_where_a_cell_is_being_started_with_it() {
    let root = PrivateRoot::with_image();
    for turn in 0..8 {
        let mut command =
            root.exocell(["run", "--rm", "-v", "r:/v", TINY, "sh", "-c", "echo x > /v/file"]);
        let mut cell = Started::new(&mut command);
        cell.close_stdin();
        // At another moment of the start each time.
        std::thread::sleep(std::time::Duration::from_millis(turn * 20));
        let removed = root.run(["volume", "rm", "r"]);
        cell.finish(LIMIT).expect("it ends").ok();
        let file = root.path().join("docker/volumes/r/file");
        assert!(file.exists(), "turn {turn}: {}", removed.stderr);
        if turn % 2 == 0 {
            root.run(["volume", "rm", "r"]).ok();
        }
    }
}

#[test]
fn what_is_wrong_is_named_by_its_flag() {
    for (flags, words) in [
        (&["--cpus", "99"][..], &["99", "--cpus"][..]),
        (&["-m", "99999g"], &["--memory"]),
        (&["-v", "/tmp:/proc"], &["/proc", "--volume"]),
        (&["-v", "/tmp:/sys/x"], &["/sys", "--volume"]),
        (&["-v", "/tmp:/dev"], &["/dev", "--volume"]),
        (&["-v", "/no/such:/x"], &["/no/such", "--volume"]),
        (&["-u", "nobody-there"], &["nobody-there", "--user"]),
        (&["--restart", "always"], &["--restart", "--rm"]),
        (&["--network", "host"], &["--network", "--allow-net"]),
        (&["--platform", "linux/arm64"], &["--platform", "amd64"]),
        (&["--gpus", "all"], &["--gpus"]),
        (&["--dns", "192.0.2.1"], &["--dns"]),
    ] {
        let ended = run([&["run", "--rm"], flags, &[IMAGE, "true"]].concat());
        ended.exited(125).complains_of(words);
    }
    run(["run", "--rm", "--restart", "no", "--network", "none", IMAGE, "true"]).ok();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let published = format!("{port}:80");
    let ended = run(["run", "--rm", "-p", &published, IMAGE, "true"]).exited(125);
    ended.complains_of(&[&port, "--publish"]);
    run(["create", IMAGE]).exited(125).complains_of(&["create", "run -d"]);
}

#[test]
fn a_directory_is_made_for_run_and_not_for_exec() {
    let cell = Cell::idle("workdir", &["-w", "/made"]);
    assert_eq!(cell.shell("pwd").ok().text(), "/made");
    let refused = finish(&mut cell.exec(&["-w", "/missing"], &["pwd"]), b"");
    refused.exited(126).complains_of(&["/missing", "--workdir"]);
    cell.shell("test ! -e /missing").ok();
    assert_eq!(finish(&mut cell.exec(&["-w", "/usr"], &["pwd"]), b"").ok().text(), "/usr");
}

#[test]
fn images_are_named_saved_and_loaded() {
    let root = PrivateRoot::with_image();
    let listed =
        |flags: &[&str]| root.run([&["image", "ls"], flags].concat()).ok().text().to_owned();
    let id = listed(&["-q", "--no-trunc"]);
    assert!(id.starts_with("sha256:"), "{id}");
    assert_eq!(listed(&["-q"]), &id[7..19]);
    root.run(["image", "tag", TINY, "me/tiny:1"]).ok();
    root.run(["tag", TINY, "me/tiny:2"]).ok();
    assert_eq!(listed(&["-q", "--filter", "reference=me/*"]), &id[7..19]);
    assert_eq!(listed(&["-q", "me/other"]), "");
    let named = listed(&["--format", "{{.Repository}}:{{.Tag}} {{.ID}}"]);
    assert!(named.lines().any(|line| line == format!("me/tiny:1 {}", &id[7..19])), "{named}");
    root.run(["images", "--filter", "colour=red"]).exited(125).complains_of(&["--filter"]);
    let archive = root.dir.path().join("saved.tar");
    root.run(["image", "save", "-o", text(&archive), "me/tiny:1", "me/tiny:2"]).ok();
    root.run(["image", "rm", "me/tiny:1", "no/such", "me/tiny:2"])
        .exited(125)
        .complains_of(&["no/such"]);
    root.run(["rmi", "-f", "me/tiny:1", TINY]).ok();
    assert_eq!(listed(&["-q"]), "");
    let loaded = root.run(["load", "-i", text(&archive)]).ok();
    assert_eq!(loaded.text(), "Loaded image: me/tiny:1\nLoaded image: me/tiny:2");
    let ended = root.run(["run", "--rm", "me/tiny:2", "sh", "-c", "echo hi"]).ok();
    assert_eq!(ended.text(), "hi");
    // An import takes the names too.
    root.run(["rmi", "me/tiny:1", "me/tiny:2"]).ok();
    root.run(["image", "import", text(&archive)]).ok();
    assert!(listed(&[]).contains("me/tiny:1, me/tiny:2"), "{}", listed(&[]));
    let shown = root.run(["image", "inspect", "me/tiny:1"]).ok().json();
    assert_eq!(shown[0]["architecture"], "amd64");
    let format = ["image", "inspect", "-f", "{{.Architecture}}", "me/tiny:1"];
    assert_eq!(root.run(format).ok().text(), "amd64");
    root.run(["image", "history", "me/tiny:1"]).ok();
    root.run(["image", "prune", "-a"]).exited(125).complains_of(&["--force"]);
    root.run(["image", "prune", "-a", "-f"]).ok();
    assert_eq!(listed(&["-q"]), "");
}

#[test]
fn all_of_a_cell_is_copied() {
    let root = PrivateRoot::with_image();
    root.run(["run", "-d", "--name", "all", TINY, "sleep", "infinity"]).ok();
    let to = root.dir.path().join("all");
    root.run(["cp", "all:/", text(&to)]).ok();
    assert!(to.join("usr/bin/sh").exists() && to.join("etc/hostname").exists());
    // Something that is no file is not replaced by one.
    let pipe = root.dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let refused = root.run(["cp", "all:/etc/hostname", text(&pipe)]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("a device, a pipe or a socket"), "{}", refused.stderr);
    assert!(!std::fs::symlink_metadata(&pipe).unwrap().is_file());
    root.run(["rm", "-f", "all"]).ok();
}

#[test]
fn completion_shows_what_help_shows() {
    let script = run(["completion", "bash"]).ok();
    assert!(script.text().contains("exocell__restart") || script.text().contains("restart"));
    assert!(!script.text().contains("launch-container"));
    let shown = run(["version"]).ok();
    assert!(shown.text().starts_with("exocell ") && shown.text().contains("guest kernel"));
    shell(&[], "true").ok();
}
