//! Everyday Linux: what a program finds in a container, it finds in a cell. The values are docker's.

use crate::common::cell::Cell;
use crate::common::{Finished, IMAGE, eventually, run, shell, unique};

/// A line of proc_pid_status(5), as a number in hexadecimal.
fn mask(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
    u64::from_str_radix(line.trim(), 16).expect("a mask")
}

const DOCKERS: u64 = 0xa804_25fb;
const ALL: u64 = (1 << 41) - 1;

fn status(flags: &[&str]) -> Finished {
    shell(flags, "cat /proc/self/status").ok()
}

#[test]
fn the_program_is_the_first_process_of_what_it_sees() {
    assert_eq!(shell(&[], "echo $$; cat /proc/1/comm").ok().text(), "1\nsh");
    // Orphans are its children, and nothing else is there.
    let seen = shell(&[], "(sleep 5 &); sleep 0.1; ps -eo pid,ppid,comm --no-headers").ok();
    let rows: Vec<Vec<&str>> =
        seen.text().lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["1", "0", "sh"]);
    assert!(rows.iter().any(|row| row[1..] == ["1", "sleep"]), "{rows:?}");
    assert_eq!(rows.len(), 3, "{rows:?}");
}

#[test]
fn what_is_written_to_the_first_process_is_in_its_log() {
    let cell = Cell::idle("log", &[]);
    cell.shell("echo beside > /proc/1/fd/1").ok();
    assert_eq!(cell.verb(&["logs"]).ok().text(), "beside");
    cell.shell("cat /proc/1/comm; readlink /proc/1/ns/mnt > /tmp/theirs").ok();
    for kind in ["pid", "mnt", "ipc", "uts", "cgroup", "net"] {
        let same = format!("test $(readlink /proc/1/ns/{kind}) = $(readlink /proc/self/ns/{kind})");
        cell.shell(&same).ok();
    }
}

#[test]
fn the_control_group_is_its_own_root_and_says_the_limits() {
    let script = "cd /sys/fs/cgroup; cat /proc/self/cgroup memory.max cpu.max pids.max";
    let flags = ["-m", "512m", "--cpus", "1", "--pids-limit", "99"];
    assert_eq!(shell(&flags, script).ok().text(), "0::/\n536870912\n100000 100000\n99");
    assert_eq!(shell(&["--cpus", "0.5"], "cat /sys/fs/cgroup/cpu.max").ok().text(), "50000 100000");
    let script = "cat /sys/fs/cgroup/cpu.max; nproc; cat /sys/fs/cgroup/cgroup.controllers";
    let told = shell(&[], script).ok();
    assert!(told.text().starts_with("max 100000\n1\n"), "{}", told.text());
    for controller in ["cpuset", "cpu", "memory", "pids"] {
        assert!(told.text().contains(controller), "{}", told.text());
    }
    let weight = "cat /sys/fs/cgroup/cpu.weight /sys/fs/cgroup/memory.low";
    let flags = ["--cpu-shares", "512", "--memory-reservation", "8m"];
    assert_eq!(shell(&flags, weight).ok().text(), "20\n8388608");
    // Read-only, as docker has it; nobody is above.
    let script = "echo 1 > /sys/fs/cgroup/pids.max; ls -d /sys/fs/cgroup/cell";
    let refused = shell(&[], script);
    assert!(refused.stderr.contains("Read-only") && refused.code != 0, "{}", refused.stderr);
}

/// How much CPU time a loop gets of two seconds by the guest's own clock.
#[test]
fn half_a_processor_is_half_of_one() {
    let script = "import time\n\
        end = time.monotonic() + 2\n\
        while time.monotonic() < end: pass\n\
        print(time.process_time())";
    let used = run(["run", "--rm", "--cpus", "0.5", IMAGE, "python3", "-c", script]).ok();
    let seconds: f64 = used.text().parse().expect("seconds");
    assert!(seconds < 1.4, "{seconds} s of 2");
    let throttled = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; \
                     grep nr_throttled /sys/fs/cgroup/cpu.stat";
    let told = shell(&["--cpus", "0.1"], throttled).ok();
    assert_ne!(told.text(), "nr_throttled 0");
}

#[test]
fn capabilities_are_dockers_and_as_they_are_asked_for() {
    let sets = |flags: &[&str]| {
        let told = status(flags);
        ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"].map(|set| mask(told.text(), set))
    };
    assert_eq!(sets(&[]), [0, DOCKERS, DOCKERS, DOCKERS, 0]);
    assert_eq!(sets(&["--cap-drop", "ALL"]), [0; 5]);
    assert_eq!(sets(&["--cap-drop", "ALL", "--cap-add", "CHOWN"]), [0, 1, 1, 1, 0]);
    let more = DOCKERS | 1 << 21;
    assert_eq!(sets(&["--cap-add", "CAP_SYS_ADMIN"]), [0, more, more, more, 0]);
    assert_eq!(sets(&["-u", "1000"]), [0, 0, 0, DOCKERS, 0]);
    assert_eq!(sets(&["--privileged"]), [0, ALL, ALL, ALL, 0]);
    assert_eq!(sets(&["--privileged", "-u", "1000"]), [0, 0, 0, ALL, 0]);
    let refused = run(["run", "--rm", "--cap-add", "SYS_GOD", IMAGE, "true"]).exited(125);
    refused.complains_of(&["unknown capability", "CAP_SYS_GOD"]);
    // They are what is enforced, not only shown.
    shell(&["--cap-drop", "CHOWN"], "touch /x; chown 1 /x").exited(1);
    shell(&[], "mount -t tmpfs none /mnt").exited(32);
    shell(&["--cap-add", "SYS_ADMIN"], "mount -t tmpfs none /mnt").ok();
}

#[test]
fn privileges_groups_and_limits_are_as_asked_for() {
    let told = status(&["--security-opt", "no-new-privileges"]);
    assert!(told.text().contains("NoNewPrivs:\t1"), "{}", told.text());
    assert!(status(&[]).text().contains("NoNewPrivs:\t0"));
    let flags = ["-u", "1000", "--group-add", "4242", "--group-add", "audio"];
    assert_eq!(shell(&flags, "id -u; id -g; id -G").ok().text(), "1000\n0\n0 29 4242");
    let refused = shell(&["--group-add", "no-such-group"], "true").exited(125);
    refused.complains_of(&["no-such-group"]);
    let flags = ["--ulimit", "nofile=100:200", "--ulimit", "core=0"];
    assert_eq!(shell(&flags, "ulimit -Sn; ulimit -Hn; ulimit -c").ok().text(), "100\n200\n0");
    assert_eq!(shell(&[], "ulimit -n; umask").ok().text(), "1048576\n0022");
    let refused = shell(&["--ulimit", "files=1"], "true").exited(125);
    refused.complains_of(&["files", "nofile"]);
    let flags = ["--oom-score-adj", "300"];
    assert_eq!(shell(&flags, "cat /proc/self/oom_score_adj").ok().text(), "300");
}

#[test]
fn file_systems_in_memory_have_the_size_that_was_asked_for() {
    let size = "df -k --output=size,target /dev/shm | tail -1 | tr -s ' '";
    assert_eq!(shell(&[], size).ok().text().trim(), "65536 /dev/shm");
    assert_eq!(shell(&["--shm-size", "1g"], size).ok().text().trim(), "1048576 /dev/shm");
    let script = "stat -fc %T /t; stat -c %a /t; head -c 2m /dev/zero > /t/f; wc -c < /t/f; \
                  grep ' /t ' /proc/mounts";
    let told = shell(&["--tmpfs", "/t:size=1m"], script).ok();
    let lines: Vec<&str> = told.text().lines().collect();
    assert_eq!(lines[..3], ["tmpfs", "1777", "1048576"], "{}", told.stderr);
    for option in ["rw", "nosuid", "nodev", "noexec", "size=1024k"] {
        assert!(lines[3].contains(option), "{}", lines[3]);
    }
    let script = "touch /root/kept /usr/x";
    let refused = shell(&["--read-only", "--tmpfs", "/root:mode=700"], script).exited(1);
    assert!(refused.stderr.contains("/usr/x") && !refused.stderr.contains("kept"));
    shell(&["--tmpfs", "relative"], "true").exited(125).complains_of(&["relative"]);
}

#[test]
fn paths_are_masked_and_read_only_unless_it_is_privileged() {
    let write = "echo 1 > /proc/sys/vm/overcommit_memory";
    let refused = shell(&[], write);
    assert!(refused.stderr.contains("Read-only"), "{}", refused.stderr);
    shell(&["--privileged"], write).ok();
    shell(&["--security-opt", "systempaths=unconfined"], write).ok();
    // Where there is one, it is empty.
    let masked = "for f in /proc/kcore /proc/keys /proc/timer_list /proc/interrupts; do \
                  if [ -e $f ]; then head -c 1 $f | wc -c; else echo 0; fi; done; ls -A /sys/firmware";
    assert_eq!(shell(&[], masked).text(), "0\n0\n0\n0");
    let mounts = "grep -E '^(sysfs|cgroup) ' /proc/mounts";
    let told = shell(&[], mounts).ok();
    assert!(told.text().lines().all(|line| line.contains(" ro,")), "{}", told.text());
    let told = shell(&["--privileged"], mounts).ok();
    assert!(told.text().lines().all(|line| line.contains(" rw,")), "{}", told.text());
}

#[test]
fn names_and_settings_of_the_kernel_are_as_asked_for() {
    let flags = ["--hostname", "here", "--domainname", "example.org", "--add-host", "db:10.0.0.7"];
    let script = "hostname; cat /proc/sys/kernel/domainname; getent hosts db here";
    let told = shell(&flags, script).ok();
    let lines: Vec<&str> = told.text().lines().collect();
    assert_eq!(lines[..2], ["here", "example.org"]);
    assert!(
        lines[2].starts_with("10.0.0.7 ") && lines[3].contains("here.example.org"),
        "{lines:?}"
    );
    let flags = ["--sysctl", "net.core.somaxconn=1234", "--sysctl", "kernel.msgmax=4096"];
    let script = "cat /proc/sys/net/core/somaxconn /proc/sys/kernel/msgmax";
    assert_eq!(shell(&flags, script).ok().text(), "1234\n4096");
    let refused = shell(&["--sysctl", "net.core.nothing=1"], "true").exited(125);
    refused.complains_of(&["net.core.nothing"]);
    shell(&["--add-host", "db"], "true").exited(125).complains_of(&["NAME:ADDRESS"]);
}

#[test]
fn devices_of_its_own_kernel_are_there_when_they_are_asked_for() {
    let shown = "stat -c '%n %t:%T %F' /dev/loop3 /dev/own/tun";
    let flags = ["--device", "/dev/loop3", "--device", "/dev/net/tun:/dev/own/tun:rwm"];
    let told = shell(&flags, shown).ok();
    let expected = "/dev/loop3 7:3 block special file\n/dev/own/tun a:c8 character special file";
    assert_eq!(told.text(), expected);
    shell(&[], "ls /dev/loop3").exited(2);
    let flags =
        ["--device", "/dev/loop0", "--device", "/dev/loop-control", "--cap-add", "SYS_ADMIN"];
    let script = "truncate -s 1m /disk && mkfs.ext4 -q /disk && mount -o loop /disk /mnt && \
                  stat -fc %T /mnt";
    assert_eq!(shell(&flags, script).ok().text(), "ext2/ext3");
    let refused = shell(&["--device", "/dev/kvm"], "true").exited(125);
    refused.complains_of(&["--device", "no device of the host", "/dev/fuse"]);
}

#[test]
fn a_first_process_reaps_and_passes_signals_on() {
    let script = "cat /proc/1/comm; sh -c 'sleep 0.1 & exec true'; sleep 0.5; \
                  grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l; exit 7";
    let told = shell(&["--init"], script).exited(7);
    assert_eq!(told.text(), "docker-init\n0");
    shell(&["--init"], "kill -9 $$").exited(137);
    // Without one, the program is the first process: it cannot end itself by a signal.
    shell(&[], "kill -9 $$; exit 3").exited(3);
    let cell = Cell::start(
        "init",
        &["--init"],
        &["sh", "-c", "trap 'exit 5' USR1; echo set; while :; do sleep 0.1; done"],
    );
    eventually("the program takes the signal", || cell.verb(&["logs"]).ok().text() == "set");
    cell.verb(&["kill", "-s", "USR1"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text(), "5");
}

#[test]
fn an_operators_signal_ends_a_first_process_that_does_not_handle_it() {
    let cell = Cell::idle("signal", &[]);
    cell.verb(&["kill", "-s", "WINCH"]).ok();
    cell.shell("kill -TERM 1; kill -KILL 1; true").ok();
    cell.verb(&["kill", "-s", "TERM"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text(), "143");
    // One that waits for it is left to do what it does.
    let waits = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\n\
                 print('up', flush=True)\nsignal.sigwait({15})\nexit(4)";
    let cell = Cell::start("waits", &[], &["python3", "-c", waits]);
    crate::common::eventually("it waits", || cell.verb(&["logs"]).ok().text() == "up");
    cell.verb(&["kill", "-s", "TERM"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text(), "4");
}

#[test]
fn exec_has_the_programs_namespaces_and_limits() {
    let flags = ["--cap-drop", "ALL", "--ulimit", "nofile=64", "--tmpfs", "/t", "-w", "/usr"];
    let cell = Cell::idle("exec", &[&flags[..], &["--security-opt", "no-new-privileges"]].concat());
    let told = cell.shell("ulimit -n; pwd; cat /proc/self/cgroup; cat /proc/self/status").ok();
    let lines: Vec<&str> = told.text().lines().collect();
    assert_eq!(lines[..3], ["64", "/usr", "0::/"]);
    assert_eq!(mask(told.text(), "CapEff:"), 0);
    assert!(told.text().contains("NoNewPrivs:\t1"));
    let all = crate::common::finish(
        &mut cell.exec(&["--privileged"], &["cat", "/proc/self/status"]),
        b"",
    );
    assert_eq!(mask(all.ok().text(), "CapEff:"), ALL);
    cell.shell("echo here > /t/file").ok();
    assert!(!cell.verb(&["cp"]).stderr.is_empty());
    let copied = run(["cp", &cell.path("/t/file"), "-"]).ok();
    assert!(String::from_utf8_lossy(&copied.stdout).contains("here"));
}

/// Takes memory until there is none.
const HOG: &str = "l = []\nwhile True: l.append(bytearray(1 << 20))";

#[test]
fn a_program_that_had_too_little_memory_is_told_as_that() {
    let name = unique("hog");
    let _guard = Cell { name: name.clone() };
    let flags = ["run", "--json", "--name", &name, "-m", "96m", IMAGE, "python3", "-c", HOG];
    let ended = run(flags).exited(137);
    assert!(ended.stderr.contains("ran out of memory"), "{}", ended.stderr);
    let told = ended.stderr.lines().last().expect("JSON");
    let told: serde_json::Value = serde_json::from_str(told).expect("JSON");
    assert_eq!((&told["exit_code"], &told["out_of_memory"]), (&137.into(), &true.into()));
    let inspected = run(["inspect", "--json", &name]).ok().one();
    assert_eq!(inspected["out_of_memory"], true);
    assert!(inspected["reason"].as_str().is_some_and(|why| why.contains("memory")), "{inspected}");
    // Another end is not told so.
    let told = run(["run", "--rm", "--json", IMAGE, "sh", "-c", "exit 137"]).exited(137);
    assert!(told.stderr.contains("\"out_of_memory\":false"), "{}", told.stderr);
}

#[test]
fn an_isolate_has_none_of_it() {
    let refused =
        run(["run", "--rm", "--privileged", "--strength", "isolate", "x.wasm"]).exited(125);
    refused.complains_of(&["isolate has no guest kernel"]);
}

#[test]
fn update_changes_the_limits_of_a_cell_that_runs() {
    let cell = Cell::idle("limits", &[]);
    cell.verb(&["update", "--cpus", "0.5", "--pids-limit", "77"]).ok();
    let limits = cell.shell("cd /sys/fs/cgroup; cat cpu.max pids.max").ok();
    assert_eq!(limits.text(), "50000 100000\n77");
    for (flag, value) in [("--pids-limit", "999999"), ("--cpus", "17")] {
        cell.verb(&["update", flag, value]).exited(125).complains_of(&[value]);
    }
}
