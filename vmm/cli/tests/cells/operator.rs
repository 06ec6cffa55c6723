//! The operator's way into a cell, whatever its programs do, its root's too.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::Signal;

use crate::common::cell::{Cell, pid};
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::{
    Finished, LIMIT, Started, eventually, exocell, finish, host, run, text, unique,
};

/// What an operator asks of a running cell; each has to work.
fn everything_works(cell: &Cell) {
    answers(cell);
    let image = unique("image");
    run(["commit", &cell.name, &image]).ok();
    run(["image", "rm", &image]).ok();
}

/// The same, but for what copies the whole of it.
fn answers(cell: &Cell) {
    assert_eq!(cell.shell("echo here").ok().text(), "here");
    let copied = run(["cp", &cell.path("/etc/hostname"), "-"]).ok();
    assert!(!copied.stdout.is_empty());
    let stats = run(["stats", "--json", &cell.name]).ok().json();
    assert!(stats["guest_claims"]["uptime_ns"].as_u64() > Some(0), "{stats}");
}

/// Runs Python as `user` in the background until it says `ready`.
fn misbehave(cell: &Cell, user: &str, script: &str) -> Started {
    let started = Started::new(&mut cell.exec(&["-u", user], &["python3", "-c", script]));
    eventually("the program is at it", || cell.shell("test -e /tmp/ready").code == 0);
    started
}

/// Every port and every way by which a program may reach the host, or play it.
const VSOCK: &str = r#"
import errno, os, socket, sys, time
def stream(): 
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); s.settimeout(0.2); return s
won = []
def reach(cid, port, own=None):
    s = stream()
    try:
        if own is not None: s.bind((socket.VMADDR_CID_ANY, own))
        s.connect((cid, port)); won.append((cid, port, s))
    except OSError: pass
for cid in (0, 1, 2, 3, 4):
    for port in [1, 1023, 1024, 1025, 5640, 5641, 9999]: reach(cid, port)
if os.getuid() == 0:
    for own in range(1, 200): reach(2, 5640, own)
for cid in (socket.VMADDR_CID_ANY, 2, 3):
    s = stream()
    try:
        s.bind((cid, 1024)); s.listen(); won.append(("bound", cid, s))
    except OSError: pass
open("/tmp/won", "w").write(repr([w[:2] for w in won]))
open("/tmp/ready", "w").close()
end = time.time() + 600
held = []
while time.time() < end:
    for cid, port in ((2, 5640), (2, 1024), (2, 7), (1, 1024), (3, 1024)):
        s = stream()
        s.setblocking(False)
        try: s.connect((cid, port))
        except OSError: pass
        held.append(s)
    if len(held) > 1500: held.clear()
"#;

#[test]
fn programs_cannot_use_up_the_operators_streams_nor_a_folders() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), "still there").expect("a file");
    let volume = format!("{}:/f", text(folder.path()));
    for user in ["1000", "0"] {
        let cell = Cell::idle("vsock", &["-v", &volume]);
        let _flood = misbehave(&cell, user, VSOCK);
        assert_eq!(cell.shell("cat /tmp/won").ok().text(), "[]", "as {user}");
        for _ in 0..3 {
            answers(&cell);
            assert_eq!(cell.shell("cat /f/file").ok().text(), "still there");
        }
        cell.verb(&["stop", "-t", "5"]).ok();
    }
}

/// A program that does `what` to process 1 with all that root may.
fn at_pid_1(what: &str) -> String {
    format!(
        r#"
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
{what}
open("/tmp/ready", "w").close()
time.sleep(600)
"#
    )
}

#[test]
fn the_cells_root_cannot_stop_trace_or_starve_its_init() {
    let misdeeds = [
        // PTRACE_ATTACH, which stops what it attaches to.
        "assert libc.ptrace(16, 1, 0, 0) == 0",
        "for s in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM): os.kill(1, s)",
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "for name in ('cgroup.freeze', 'pids.max'):\n  \
           try: open('/sys/fs/cgroup/' + name, 'w').write('1')\n  \
           except OSError: pass",
    ];
    for misdeed in misdeeds {
        // With all that its kernel has to give: the program is process 1, and init is not there.
        let cell = Cell::idle("init", &["--privileged"]);
        let _held = misbehave(&cell, "0", &at_pid_1(misdeed));
        everything_works(&cell);
        cell.verb(&["stop", "-t", "1"]).ok();
    }
}

/// Linux leaves others a twentieth of the time then: too little to copy a whole cell in a test.
#[test]
fn real_time_programs_do_not_starve_init() {
    let misdeed = "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\n\
                   for _ in range(4):\n  \
                     if os.fork() == 0:\n    \
                       while True: pass\n\
                   os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))";
    let cell = Cell::idle("real", &["--privileged"]);
    let _held = misbehave(&cell, "0", &at_pid_1(misdeed));
    answers(&cell);
    cell.verb(&["stop", "-t", "1"]).ok();
}

#[test]
fn a_fork_bomb_leaves_the_operators_commands_alone() {
    let cell = Cell::idle("bomb", &["--pids-limit", "200"]);
    let bomb = "import os\nopen('/tmp/ready', 'w').close()\nwhile True:\n  \
                try: os.fork()\n  except OSError: pass";
    let _bomb = misbehave(&cell, "1000", bomb);
    eventually("the bomb has gone off", || {
        let stats = run(["stats", "--json", &cell.name]).ok().json();
        stats["guest_claims"]["process_count"].as_u64() >= Some(150)
    });
    for _ in 0..3 {
        // What a shell would fork for, the bomb has.
        run(["exec", &cell.name, "true"]).ok();
        let stats = run(["stats", "--json", &cell.name]).ok().json();
        assert!(stats["guest_claims"]["process_count"].as_u64() >= Some(150), "{stats}");
    }
    cell.verb(&["stop", "-t", "1"]).ok();
}

#[test]
fn programs_do_not_see_init() {
    let cell = Cell::idle("hidden", &["--privileged"]);
    let seen = cell.shell("cat /proc/[0-9]*/comm").ok();
    assert!(
        seen.text().lines().all(|comm| comm != "kthreadd" && comm != "init"),
        "{}",
        seen.text()
    );
    // What it was when init and its programs shared a namespace: the agent's threads.
    assert_eq!(cell.shell("cat /proc/1/comm; ls /proc/1/task | wc -l").ok().text(), "sleep\n1");
    assert_eq!(cell.shell("ls -A /proc/1/fd | wc -l").ok().text(), "3", "its streams alone");
    // Under the program's own file systems lie no others that would show it, or limit it.
    let below = "umount /sys/fs/cgroup && ls -A /sys/fs/cgroup | wc -l; \
                 umount /proc && ls -A /proc | wc -l";
    assert_eq!(cell.shell(below).ok().text(), "0\n0");
    assert_eq!(cell.shell("echo here").ok().text(), "here");
}

/// A process that is to be the operator's program has nothing that its cell's root would have
/// from it; and root's lease on the program's file keeps it for a moment only.
#[test]
fn a_program_that_begins_has_nothing_of_inits() {
    let programs = Programs::new().compile("thief", "thief", &["-static"]);
    let rights: [(&[&str], &str); 3] = [
        (&[], "took 0, strange 0"),
        (&["--cap-add", "SYS_PTRACE"], ", strange 0"),
        (&["--privileged"], ", strange 0"),
    ];
    for (flags, expected) in rights {
        let volume = programs.volume();
        let cell = Cell::idle("thief", &[flags, &["-v", &volume]].concat());
        let script = format!("{FOLDER_IN_CELL}/thief /usr/bin/true > /tmp/took");
        let _thief = Started::new(&mut cell.exec(&[], &["sh", "-c", &script]));
        eventually("it lies in wait", || cell.shell("grep -q ready /tmp/took").code == 0);
        run(["exec", &cell.name, "true"]).ok();
        eventually("it has tried", || cell.shell("grep -q took /tmp/took").code == 0);
        let took = cell.shell("grep took /tmp/took").ok();
        assert!(took.text().ends_with(expected), "{flags:?}: {}", took.text());
        everything_works(&cell);
    }
}

/// An image may name its working directory, and /proc has links to what a process holds.
#[test]
fn the_first_programs_directory_is_within_its_cell() {
    for number in 3..16 {
        let cwd = format!("/proc/self/fd/{number}");
        let began = run(["run", "--rm", "-w", &cwd, crate::common::IMAGE, "ls", "-A", "."]);
        assert!(began.code >= 125, "{cwd}: {}", began.text());
        assert!(began.stderr.contains(&cwd), "{cwd}: {}", began.stderr);
    }
}

/// The operator's programs are in the namespaces that the cell was given, whatever its first
/// program has made of its own.
#[test]
fn a_first_program_that_leaves_its_namespaces_is_not_followed() {
    let flags = ["-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector"];
    let programs = Programs::new().compile("leaver", "leaver", &flags);
    let (volume, leaver) = (programs.volume(), format!("{FOLDER_IN_CELL}/leaver"));
    for turn in 0..6 {
        let cell = Cell::start("leaver", &["-u", "1000", "-v", &volume], &[&leaver]);
        // Whose namespaces a user's are is seen by one who may trace anything.
        let left = "set -e; theirs=$(readlink /proc/1/ns/mnt); \
                    test \"$theirs\" != \"$(readlink /proc/self/ns/mnt)\"";
        eventually("it has left", || {
            let look = ["exec", "--privileged", "-u", "0", &cell.name, "sh", "-c", left];
            run(look).code == 0
        });
        let own = "cat /proc/self/uid_map; stat -c %u /";
        let told = run(["exec", "-u", "0", &cell.name, "sh", "-c", own]).ok();
        let told = told.text();
        let told: Vec<&str> = told.split_whitespace().collect();
        assert_eq!(told, ["0", "0", "4294967295", "0"], "turn {turn}");
    }
}

/// What a user puts in a file's place while it is copied is not read by its rights.
#[test]
fn copies_read_what_they_found_and_no_link_in_its_place() {
    let programs = Programs::new().compile("swapper", "swapper", &["-static"]);
    let cell = Cell::idle("swapper", &["--cpus", "2", "-v", &programs.volume()]);
    cell.shell("echo top:secret:line >> /etc/shadow").ok();
    let swapper = format!("{FOLDER_IN_CELL}/swapper");
    let _swaps = Started::new(&mut cell.exec(&["-u", "1000"], &[&swapper]));
    eventually("it swaps", || cell.shell("test -e /tmp/ready").code == 0);
    for turn in 0..8 {
        let copied = run(["cp", &cell.path("/tmp/f"), "-"]).ok();
        let secret = b"top:secret:line";
        let leaks = copied.stdout.windows(secret.len()).any(|part| part == secret);
        assert!(!leaks, "turn {turn}");
    }
}

#[test]
fn an_id_that_the_kernel_takes_for_none_is_refused() {
    for user in ["4294967295", "1000:4294967295", "2147483648"] {
        let refused = run(["run", "--rm", "-u", user, crate::common::IMAGE, "id"]).exited(125);
        refused.complains_of(&["ids are from 0 to 2147483647"]);
    }
}

/// A lease that is kept, again and again.
#[test]
fn a_lease_on_a_program_does_not_keep_the_operator_from_it() {
    let lease = "import fcntl, os, signal, time\n\
                 signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
                 held = os.open('/usr/bin/true', os.O_RDONLY)\n\
                 fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
                 open('/tmp/ready', 'w').close()\n\
                 time.sleep(600)";
    let cell = Cell::idle("lease", &[]);
    let _held = misbehave(&cell, "0", lease);
    run(["exec", &cell.name, "true"]).ok();
    answers(&cell);
}

/// One that the kernel is told not to break: its root may.
#[test]
fn a_program_that_cannot_begin_is_told_of_with_the_reason() {
    let lease = "import fcntl, os, signal, time\n\
                 open('/proc/sys/fs/lease-break-time', 'w').write('600')\n\
                 signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
                 held = os.open('/usr/bin/true', os.O_RDONLY)\n\
                 fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
                 open('/tmp/ready', 'w').close()\n\
                 time.sleep(600)";
    let cell = Cell::idle("lease", &["--privileged"]);
    let _held = misbehave(&cell, "0", lease);
    let late = run(["exec", &cell.name, "true"]).exited(125);
    late.complains_of(&["true", "did not start within", "lease"]);
    answers(&cell);
}

/// No process may be above groups that are limited.
#[test]
fn groups_that_programs_make_do_not_keep_the_operator_out() {
    let divide = "cd /sys/fs/cgroup && mkdir own && echo 1 > own/cgroup.procs && \
                  echo +pids > cgroup.subtree_control && echo divided > /tmp/done; sleep 600";
    let cell = Cell::start("groups", &["--privileged"], &["sh", "-c", divide]);
    eventually("the groups are divided", || {
        let done = cell.path("/tmp/done");
        run(["cp", &done, "-"]).code == 0
    });
    assert_eq!(cell.shell("cat /proc/self/cgroup").ok().text(), "0::/own");
    everything_works(&cell);
}

#[test]
fn orphans_find_a_parent_that_reaps_them() {
    let script = "sh -c 'sleep 0.1 & sh -c \"exit 0\" &'; sleep 0.5; \
                  grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l";
    assert_eq!(crate::common::shell(&[], script).ok().text(), "0");
}

#[test]
fn the_end_that_a_cells_root_makes_is_told_as_that() {
    let reboot = "import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)";
    let name = unique("reboot");
    let _guard = Cell { name: name.clone() };
    let flags =
        ["run", "--privileged", "--name", &name, crate::common::IMAGE, "python3", "-c", reboot];
    let ended = run(flags).exited(125);
    ended.complains_of(&["root ended all of its programs", "reboot(2)"]);
    let told = run(["inspect", "--json", &name]).ok().one();
    assert!(told["reason"].as_str().is_some_and(|why| why.contains("reboot(2)")), "{told}");
}

/// Each command against a guest that never says a word.
#[test]
fn a_guest_that_does_not_answer_costs_each_command_a_bounded_time() {
    let cell = Cell::idle("silent", &["--pager", "eager"]);
    let other = tempfile::tempdir().expect("a folder");
    let told = cell.inspect();
    host::send(pid(&told, "guest_kernel_pid"), Signal::SIGSTOP);
    let (name, path) = (cell.name.clone(), cell.path("/etc/hostname"));
    let image = unique("never");
    let silent: [(&[&str], i32, &str); 9] = [
        (&["exec", &name, "true"], 125, "did not answer within 10 s"),
        (&["exec", "-d", &name, "true"], 125, "did not answer within 10 s"),
        (&["cp", &path, text(other.path())], 125, "did not answer within 30 s"),
        (&["cp", "/etc/hostname", &path], 125, "did not answer within"),
        (&["commit", &name, &image], 125, "did not answer within 30 s"),
        (&["kill", "-s", "USR1", &name], 125, "did not answer in time"),
        (&["update", "--memory", "64m", &name], 125, "did not answer"),
        (&["stats", "--json", &name], 0, ""),
        (&["inspect", &name], 0, ""),
    ];
    let started: Vec<_> =
        silent.iter().map(|(args, ..)| Started::new(&mut exocell(*args))).collect();
    let ended: Vec<Finished> =
        started.into_iter().map(|one| one.finish(LIMIT).expect("it ends")).collect();
    for ((args, code, words), ended) in silent.iter().zip(ended) {
        assert_eq!(ended.code, *code, "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(words), "{args:?}: {}", ended.stderr);
    }
    run(["logs", &name]).ok();
    let mut waiting = Started::new(&mut exocell(["wait", &name]));
    waiting.close_stdin();
    cell.verb(&["stop", "-t", "1"]).ok();
    assert_eq!(waiting.finish(LIMIT).expect("it ends with the cell").ok().text(), "137");
    finish(&mut exocell(["rm", &name]), b"").ok();
}

/// Each figure of each cell is a line with its labels, after what the figure is.
#[test]
fn figures_are_there_for_prometheus() {
    let root = PrivateRoot::with_image();
    root.run(["run", "-d", "--name", "counted", TINY, "sleep", "100"]).ok();
    root.run(["run", "--name", "over", TINY, "true"]).ok();
    let said = root.run(["metrics"]).ok();
    for line in ["exocell_cells{state=\"running\"} 1", "exocell_cells{state=\"exited\"} 1"] {
        assert!(said.text().lines().any(|own| own == line), "{line}: {}", said.text());
    }
    for name in ["container_cpu_usage_seconds_total", "container_memory_working_set_bytes"] {
        let mut lines = said.text().lines();
        let kind = lines.position(|line| line.starts_with(&format!("# TYPE {name} ")));
        assert!(kind.is_some(), "{}", said.text());
        let (labels, value) = lines.next().unwrap().split_once("} ").unwrap();
        assert!(labels.starts_with(&format!("{name}{{id=\"/exocell/")), "{labels}");
        assert!(labels.contains("name=\"counted\"") && labels.contains(TINY), "{labels}");
        assert!(value.parse::<f64>().unwrap() > 0.0, "{value}");
    }
    assert!(!said.text().contains("\"over\""), "{}", said.text());
    root.run(["rm", "-f", "counted", "over"]).ok();
}

/// Who follows the events hears of each step, and of cells that are gone.
#[test]
fn events_tell_what_becomes_of_cells() {
    let root = PrivateRoot::with_image();
    let mut follower = root.exocell(["events", "--since", "1h", "--json"]);
    let mut follower = follower.stdout(Stdio::piped()).spawn().expect("exocell events");
    let heard = BufReader::new(follower.stdout.take().expect("a pipe")).lines();
    root.run(["run", "--rm", "--name", "one", TINY, "sh", "-c", "exit 3"]).exited(3);
    root.run(["run", "-d", "--name", "two", TINY, "sleep", "100"]).ok();
    root.run(["pause", "two"]).ok();
    root.run(["unpause", "two"]).ok();
    let two = root.run(["inspect", "two"]).ok().one();
    host::kill(two["supervisor_pid"].as_i64().expect("a pid") as i32);
    assert_eq!(root.run(["wait", "two"]).ok().text(), "137");
    let words = ["events", "--since", "1h", "--until", "0s", "--format"];
    let all = root.run([&words[..], &["{{.name}} {{.action}} {{.exit_code}}"]].concat()).ok();
    let lines: Vec<&str> = all.text().lines().map(str::trim_end).collect();
    let wanted = [
        "one create",
        "one start",
        "one exit 3",
        "two create",
        "two start",
        "two pause",
        "two unpause",
        "two exit 137",
    ];
    assert_eq!(lines, wanted);
    let exits = ["json", "--filter", "event=exit", "--filter", "cell=two"];
    let exit = root.run([&words[..], &exits].concat()).ok().json();
    assert!(exit["reason"].as_str().expect("a reason").contains("SIGKILL"), "{exit}");
    let start = root.run([&words[..], &["json", "-f", "event=start", "-f", "cell=two"]].concat());
    assert!(start.ok().json()["times"]["guest_ready_us"].as_u64() > Some(0));
    root.run(["events", "--filter", "nonsense=1"]).exited(125).complains_of(&["event"]);
    root.run(["rm", "two"]).ok();
    let heard: Vec<_> = heard.take(wanted.len()).collect();
    assert!(heard.iter().all(Result::is_ok), "{heard:?}");
    follower.kill().and_then(|()| follower.wait()).expect("it ends");
}

/// A program that the kernel started by itself would be a file of the cell's, run as root outside
/// of the namespaces and limits of the cell's programs.
#[test]
fn the_kernel_starts_no_program_by_itself() {
    let helper = "printf '#!/bin/sh\\nid > /tmp/started-by-kernel\\n' > /sbin/request-key; \
                  chmod 755 /sbin/request-key; ln -f /sbin/request-key /sbin/bridge-stp";
    let crash = "echo '|/sbin/request-key' > /proc/sys/kernel/core_pattern; \
                 sh -c 'ulimit -c unlimited; kill -SEGV $$'";
    let bridge = "ip link add br9 type bridge; ip link set br9 type bridge stp_state 1";
    let request = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); \
                   print(libc.syscall(249, b'user', b'x', b'callout', 0))";
    let cell = Cell::idle("upcall", &["--privileged"]);
    cell.shell(helper).ok();
    let asked = finish(&mut cell.exec(&["-u", "nobody"], &["python3", "-c", request]), b"").ok();
    assert_eq!(asked.text(), "-1");
    cell.shell(crash);
    cell.shell(bridge).ok();
    cell.shell("sleep 0.5; ls /tmp/started-by-kernel").exited(2);
}
