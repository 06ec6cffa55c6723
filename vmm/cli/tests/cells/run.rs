//! `exocell run`: exit codes, streams, flags and limits, in real cells.

use std::process::Command;

use crate::common::pty::OnTerminal;
use crate::common::{IMAGE, exocell, finish, run, shell, text};
use crate::common::{cell, unique};

#[test]
fn exit_codes_are_the_programs_own() {
    shell(&[], "exit 0").exited(0);
    shell(&[], "exit 7").exited(7);
    // A first process cannot end itself by a signal (everyday.rs).
    shell(&[], "sh -c 'kill -TERM $$'; exit $?").exited(128 + 15);
    shell(&["--init"], "kill -KILL $$").exited(128 + 9);
}

#[test]
fn a_program_that_cannot_start_is_126_or_127() {
    let missing = run(["run", "--rm", IMAGE, "no-such-program"]).exited(127);
    missing.complains_of(&["no-such-program"]);
    let file = run(["run", "--rm", IMAGE, "/etc/passwd"]).exited(126);
    file.complains_of(&["/etc/passwd"]);
}

#[test]
fn a_wrong_command_line_is_125() {
    run(["run", "--no-such-flag", IMAGE]).exited(125);
    run(["run", "--rm", "--name", "-bad", IMAGE, "true"]).exited(125);
    run(["run", "--rm", "-u", "nobody-has-this-name", IMAGE, "true"]).exited(125);
}

#[test]
fn standard_input_reaches_the_program_only_when_asked() {
    let given = finish(&mut exocell(["run", "--rm", "-i", IMAGE, "cat"]), b"one\ntwo\n");
    assert_eq!(given.ok().text(), "one\ntwo");
    let withheld = finish(&mut exocell(["run", "--rm", IMAGE, "cat"]), b"one\n");
    assert_eq!(withheld.ok().text(), "");
}

#[test]
fn the_two_output_streams_stay_apart() {
    let ended = shell(&[], "echo out; echo err >&2").ok();
    assert_eq!(ended.text(), "out");
    assert_eq!(ended.stderr, "err\n");
}

#[test]
fn a_program_ends_that_nobody_reads() {
    let cell = cell::Cell::idle("unread", &[]);
    let talker =
        cell::Cell::start("unread-log", &[], &["sh", "-c", "while echo y; do sleep 0.1; done"]);
    let endless = [
        format!("run --rm {IMAGE} yes"),
        format!("run --rm {IMAGE} sh -c 'trap \"\" PIPE; while sleep 0.1; do echo y; done 2>&1'"),
        format!("exec {} yes", cell.name),
        format!("logs -f {}", talker.name),
    ];
    for program in endless {
        let bin = crate::common::program();
        let script = format!("set -o pipefail; {} {program} | head -n 1", text(&bin));
        let ended = finish(Command::new("bash").args(["-c", &script]), b"");
        assert_eq!((ended.text(), ended.code), ("y", 128 + 13), "{program}: {}", ended.stderr);
    }
}

#[test]
fn a_hundred_megabytes_come_through_intact() {
    const BYTES: usize = 100 << 20;
    let ended = run(["run", "--rm", IMAGE, "sh", "-c", "seq -w 0 99999999 | head -c 104857600"]);
    let ended = ended.ok();
    assert_eq!(ended.stdout.len(), BYTES);
    // Every line has nine bytes, so each block's content follows from its place.
    for (number, line) in ended.stdout.chunks_exact(9).enumerate() {
        if number % 1000 == 0 {
            assert_eq!(line, format!("{number:08}\n").as_bytes());
        }
    }
}

#[test]
fn a_large_input_comes_through_intact() {
    let input: Vec<u8> =
        (0..16u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let ended = finish(&mut exocell(["run", "--rm", "-i", IMAGE, "cat"]), &input).ok();
    assert!(ended.stdout == input, "{} bytes came back", ended.stdout.len());
}

#[test]
fn the_environment_is_what_the_flags_say() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "# comment\nFROM_FILE=1\nBOTH=file\n").unwrap();
    let flags =
        ["--env-file", text(file.path()), "-e", "BOTH=flag", "-e", "PASSED", "-e", "EMPTY="];
    let mut command = exocell([&["run", "--rm"], &flags[..], &[IMAGE, "env"]].concat());
    let ended = finish(command.env("PASSED", "through").env("SECRET", "no"), b"").ok();
    for line in ["FROM_FILE=1", "BOTH=flag", "PASSED=through", "EMPTY="] {
        assert!(ended.text().lines().any(|l| l == line), "{line} is missing in {}", ended.text());
    }
    assert!(!ended.text().contains("SECRET"), "{}", ended.text());
}

#[test]
fn directory_user_and_host_name_are_what_the_flags_say() {
    let ended = shell(&["-w", "/usr/lib", "-u", "nobody"], "pwd; id -u; id -g").ok();
    assert_eq!(ended.text(), "/usr/lib\n65534\n65534");
    assert_eq!(shell(&["-w", "/made/for/it"], "pwd").ok().text(), "/made/for/it");
    let ended =
        shell(&["-u", "1234:5678", "--hostname", "box"], "id -u; id -g; uname -n; echo $HOSTNAME")
            .ok();
    assert_eq!(ended.text(), "1234\n5678\nbox\nbox");
}

#[test]
fn an_entrypoint_comes_before_the_arguments() {
    let ended = run(["run", "--rm", "--entrypoint", "echo", IMAGE, "a", "-b"]).ok();
    assert_eq!(ended.text(), "a -b");
}

#[test]
fn a_read_only_root_takes_no_writes() {
    let ended = shell(&["--read-only"], "echo x > /root/x").exited(2);
    assert!(ended.stderr.contains("Read-only file system"), "{}", ended.stderr);
    shell(&[], "echo x > /root/x && cat /root/x").ok();
}

#[test]
fn cells_do_not_see_each_others_writes() {
    shell(&[], "echo x > /root/mark").ok();
    shell(&[], "test ! -e /root/mark").ok();
}

#[test]
fn without_t_there_is_no_terminal_and_with_t_there_is() {
    shell(&[], "tty").exited(1);
    let mut terminal =
        OnTerminal::start(&mut exocell(["run", "--rm", "-it", IMAGE, "sh"]), 33, 101);
    terminal.type_in("tty; stty size\n");
    terminal.await_text("/dev/pts/");
    terminal.await_text("33 101");
    terminal.resize(40, 120);
    terminal.type_in("sleep 0.3; stty size\n");
    terminal.await_text("40 120");
    terminal.type_in("exit 5\n");
    assert_eq!(terminal.finish(), 5);
}

#[test]
fn ctrl_c_on_a_terminal_interrupts_the_program() {
    let command = &mut exocell(["run", "--rm", "-it", IMAGE, "sh", "-c", "echo ready; sleep 60"]);
    let mut terminal = OnTerminal::start(command, 24, 80);
    terminal.await_text("ready");
    terminal.type_in("\x03");
    assert_eq!(terminal.finish(), 128 + 2);
}

#[test]
fn t_with_i_needs_a_terminal() {
    run(["run", "--rm", "-it", IMAGE, "true"]).exited(125).complains_of(&["terminal", "-t"]);
}

#[test]
fn a_signal_to_the_command_reaches_the_program() {
    let script = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.1; done";
    let mut command = exocell(["run", "--rm", IMAGE, "sh", "-c", script]);
    let mut started = crate::common::Started::new(&mut command);
    let name = started.pid();
    crate::common::eventually("the cell has a child", || {
        crate::common::host::jailed_child(name).is_some()
    });
    // The trap is set once the guest is up; a signal before that is not lost either.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let pid = nix::unistd::Pid::from_raw(name);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    started.close_stdin();
    let ended = started.finish(crate::common::LIMIT).expect("it ends").exited(9);
    assert_eq!(ended.text(), "ready\ncaught");
}

#[test]
fn a_reader_that_stops_reading_does_not_keep_the_cell() {
    let name = unique("stuck");
    let flags = ["run", "--name", &name, "--timeout", "3s", IMAGE, "yes"];
    let mut child = exocell(flags).stdout(std::process::Stdio::piped()).spawn().unwrap();
    crate::common::eventually("the cell has ended", || {
        cell::row(&name).is_some_and(|row| row["state"] == "exited")
    });
    drop(child.stdout.take());
    let status = crate::common::wait(&mut child, crate::common::LIMIT).expect("it ends");
    run(["rm", "-f", &name]).ok();
    assert_eq!(crate::common::code(status), 137);
}

#[test]
fn rm_leaves_no_record_and_without_it_there_is_one() {
    let name = unique("rm");
    run(["run", "--rm", "--name", &name, IMAGE, "true"]).ok();
    assert!(cell::row(&name).is_none());
    run(["run", "--name", &name, IMAGE, "sh", "-c", "exit 3"]).exited(3);
    let row = cell::row(&name).expect("a record");
    run(["rm", &name]).ok();
    assert_eq!((row["state"].as_str(), row["exit_code"].as_i64()), (Some("exited"), Some(3)));
    assert!(cell::row(&name).is_none());
}

#[test]
fn json_tells_the_end_on_standard_error() {
    let ended = shell(&["--json"], "exit 4").exited(4);
    let told: serde_json::Value = serde_json::from_str(ended.stderr.trim()).expect("JSON");
    assert_eq!(told["exit_code"], 4);
    assert_eq!(told["id"].as_str().map(str::len), Some(32));
    assert!(told["error"].is_null(), "{told}");
}

#[test]
fn a_deadline_ends_the_cell() {
    let ended = shell(&["--timeout", "2s"], "sleep 60").exited(137);
    ended.complains_of(&["deadline"]);
}

#[test]
fn too_much_memory_kills_the_program_and_not_the_cell() {
    let hungry = "python3 -c 'b = [bytearray(1 << 20) for n in range(300)]; print(len(b))'; echo code $?; echo alive";
    let ended = shell(&["--memory", "128m"], hungry).ok();
    assert!(ended.text().contains("code 137"), "{}", ended.text());
    assert!(ended.text().ends_with("alive"), "{}", ended.text());
    let enough = shell(&["--memory", "512m"], hungry).ok();
    assert!(enough.text().contains("code 0"), "{}", enough.text());
}

#[test]
fn the_memory_limit_is_what_the_guest_has() {
    let ended = shell(&["--memory", "100m"], "grep MemTotal /proc/meminfo").ok();
    let kib: u64 = ended.text().split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((70 << 10..100 << 10).contains(&kib), "{kib} KiB");
}

#[test]
fn the_process_limit_stops_forks() {
    let script = "for i in $(seq 100); do sleep 5 & done; wait";
    let ended = shell(&["--pids-limit", "20"], script);
    assert!(ended.stderr.contains("fork"), "{} {}", ended.code, ended.stderr);
    shell(&["--pids-limit", "200"], "for i in $(seq 100); do sleep 1 & done; wait").ok();
}

#[test]
fn the_guest_has_as_many_cpus_as_granted() {
    assert_eq!(shell(&[], "nproc").ok().text(), "1");
    assert_eq!(shell(&["--cpus", "2"], "nproc").ok().text(), "2");
}

#[test]
fn two_cpus_run_two_programs() {
    let script = "for i in 1 2 3 4; do (seq 1 200000 | sha256sum) & done; wait";
    let ended = shell(&["--cpus", "2"], script).ok();
    let sums: std::collections::BTreeSet<&str> = ended.text().lines().collect();
    assert_eq!((ended.text().lines().count(), sums.len()), (4, 1), "{}", ended.text());
}

#[test]
fn a_full_disk_is_the_programs_error() {
    let script = "dd if=/dev/zero of=/big bs=1M count=64; echo alive; rm /big; echo x > /small";
    let ended = shell(&["--disk", "32m"], script).ok();
    assert!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    assert_eq!(ended.text(), "alive");
}

#[test]
fn there_is_no_network_but_the_loopback() {
    let ended = shell(&[], "ls /sys/class/net").ok();
    assert_eq!(ended.text(), "lo");
    let dial = "import socket
server = socket.create_server(('127.0.0.1', 0))
print(socket.create_connection(server.getsockname()) is not None)
try: socket.create_connection(('192.0.2.1', 80), 5)
except OSError as error: print(error.strerror)";
    let ended = run(["run", "--rm", IMAGE, "python3", "-c", dial]).ok();
    assert_eq!(ended.text(), "True\nNetwork is unreachable");
}

#[test]
fn many_orphans_are_reaped() {
    let script = "for i in $(seq 200); do (true &) ; done; sleep 1; ls -d /proc/[0-9]* | wc -l";
    let left: u32 = shell(&[], script).ok().text().trim().parse().unwrap();
    assert!(left < 60, "{left} processes");
}

#[test]
fn settings_of_another_sandbox_are_a_cells_rights() {
    let place = tempfile::tempdir().unwrap();
    for folder in [".git/hooks", "secrets"] {
        std::fs::create_dir_all(place.path().join(folder)).unwrap();
    }
    std::fs::write(place.path().join("secrets/key"), "hidden").unwrap();
    let settings = place.path().join("settings.json");
    let said = r#"{"network":{"allowedDomains":["pypi.org"],"deniedDomains":[]},
        "filesystem":{"allowWrite":["."],"denyWrite":[],"denyRead":["secrets"]}}"#;
    std::fs::write(&settings, said).unwrap();
    let script = "pwd; echo new > new; echo bad 2> /dev/null > .git/hooks/pre-commit; \
        mv .git other 2> /dev/null; ls secrets; ls -d .git";
    let words = ["run", "--rm", "--srt", "settings.json", IMAGE, "sh", "-c", script];
    let told = finish(exocell(words).current_dir(place.path()), b"").ok();
    assert_eq!(told.text(), format!("{}\n.git", text(place.path())));
    assert_eq!(std::fs::read_to_string(place.path().join("new")).unwrap(), "new\n");
    assert!(!place.path().join(".git/hooks/pre-commit").exists());
    std::fs::write(&settings, r#"{"network":{"allowUnixSockets":["/run/x"]}}"#).unwrap();
    let refused = finish(exocell(words).current_dir(place.path()), b"");
    refused.exited(125).complains_of(&["--srt settings.json", "allowUnixSockets"]);
}

#[test]
fn a_deny_of_another_sandbox_beats_what_is_granted() {
    let place = tempfile::tempdir().unwrap();
    for folder in [".git/hooks", "keep/deep", "a/secrets", "sub/.vscode"] {
        std::fs::create_dir_all(place.path().join(folder)).unwrap();
    }
    std::fs::write(place.path().join("a/secrets/key"), "hidden").unwrap();
    let settings = place.path().join("settings.json");
    let said = r#"{"filesystem":{"allowWrite":[".","keep/deep"],"denyWrite":["keep"],
        "denyRead":["a/secrets"]}}"#;
    std::fs::write(&settings, said).unwrap();
    let script = "for at in keep keep/deep .git/hooks sub/.vscode . sub a; do \
        touch $at/new 2> /dev/null && echo $at; done; mv a b 2> /dev/null; \
        mv sub other 2> /dev/null; cat ?/secrets/key";
    let words = ["run", "--rm", "--srt", "settings.json", IMAGE, "sh", "-c", script];
    for _ in 0..2 {
        let told = finish(exocell(words).current_dir(place.path()), b"").exited(1);
        assert_eq!(told.text(), ".\nsub\na");
        assert!(place.path().join("a/secrets/key").exists());
    }
    for (said, word) in [
        (r#"{"filesystem":{"allowWrite":["."],"denyRead":[".."]}}"#, "allowRead"),
        (r#"{"filesystem":{"allowWrite":[".git/hooks"]}}"#, ".git/hooks"),
        (
            r#"{"network":{"allowedDomains":["*.a.org:443"],"deniedDomains":["b.a.org"]}}"#,
            "b.a.org",
        ),
    ] {
        std::fs::write(&settings, said).unwrap();
        let refused = finish(exocell(words).current_dir(place.path()), b"");
        refused.exited(125).complains_of(&["--srt settings.json", word]);
    }
}
