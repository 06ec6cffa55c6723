//! The agent's sessions over a socket pair, with this machine as the cell.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use exocell_agent::client::{self, ClientError, ExecEvent, ExecSession};
use exocell_agent::{Exec, FailureKind, FrameWriter, Kind, Reply, Request, TtySize};
use exocell_init::Agent;

/// One agent for all tests: it reaps every child of this process.
fn agent() -> &'static Arc<Agent> {
    static AGENT: OnceLock<Arc<Agent>> = OnceLock::new();
    AGENT.get_or_init(|| Agent::new().unwrap())
}

/// The host's end of a new stream.
fn stream() -> UnixStream {
    let (host, guest) = UnixStream::pair().unwrap();
    host.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    agent().serve(guest.into()).unwrap();
    host
}

fn shell(script: &str) -> Exec {
    Exec {
        args: ["/bin/sh", "-c", script].map(String::from).to_vec(),
        env: vec!["PATH=/usr/bin:/bin".into()],
        cwd: "/".into(),
        ..Exec::default()
    }
}

type Session = ExecSession<UnixStream, UnixStream>;

fn start(request: &Exec) -> Result<Session, ClientError> {
    let stream = stream();
    client::exec(stream.try_clone().unwrap(), stream, request)
}

/// Runs a program to its end: stdout, stderr, exit code.
fn run(request: &Exec) -> (String, String, u8) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = start(request).unwrap().output.pump(&mut out, &mut err).unwrap();
    (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), code)
}

fn failure(request: &Exec) -> (FailureKind, String) {
    match start(request).err().unwrap() {
        ClientError::Failed { kind, message } => (kind, message),
        other => panic!("{other}"),
    }
}

/// Reads standard output until it holds `text`.
fn wait_for(session: &mut Session, text: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(text) {
        match session.output.event().unwrap() {
            ExecEvent::Stdout(bytes) => seen.push_str(&String::from_utf8_lossy(&bytes)),
            other => panic!("{other:?} after {seen:?}"),
        }
    }
    seen
}

#[test]
fn output_and_exit_codes_are_exact() {
    let (out, err, code) = run(&shell("echo out; echo err >&2; exit 42"));
    assert_eq!((out.as_str(), err.as_str(), code), ("out\n", "err\n", 42));
    assert_eq!(run(&shell("kill -9 $$")).2, 137);
    assert_eq!(run(&shell("kill -34 $$")).2, 162);
    assert_eq!(run(&shell("exit 255")).2, 255);
}

#[test]
fn the_environment_is_the_hosts_with_home_and_host_name_added() {
    let mut request = shell("echo $HOME:$PATH; pwd; env | wc -l; ulimit -S -n >/dev/null; umask");
    request.cwd = "/usr".into();
    let (out, _, _) = run(&request);
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[..2], ["/root:/usr/bin:/bin", "/usr"]);
    // HOME, HOSTNAME, PATH and the shell's own PWD.
    assert_eq!(lines[2], "4");
}

#[test]
fn standard_input_arrives_whole_and_ends() {
    let mut request = shell("wc -c; cat");
    request.stdin = true;
    let mut session = start(&request).unwrap();
    let input = session.input.clone();
    let sender = std::thread::spawn(move || input.pump_stdin(&mut &vec![b'x'; 3 << 20][..]));
    let mut out = Vec::new();
    assert_eq!(session.output.pump(&mut out, &mut std::io::sink()).unwrap(), 0);
    assert_eq!(sender.join().unwrap().unwrap(), 3 << 20);
    assert_eq!(String::from_utf8(out).unwrap().trim(), (3 << 20).to_string());
    assert_eq!(run(&shell("cat; readlink /proc/self/fd/0")).0, "/dev/null\n");
}

#[test]
fn a_large_output_is_complete() {
    let (out, _, code) = run(&shell("head -c 5000000 /dev/zero | tr '\\0' y"));
    assert_eq!((out.len(), code), (5_000_000, 0));
}

#[test]
fn signals_reach_the_program_even_with_its_input_full() {
    let mut request = shell("trap 'echo got; exit 7' TERM; echo up; while :; do sleep 0.05; done");
    request.stdin = true;
    let mut session = start(&request).unwrap();
    wait_for(&mut session, "up");
    // More than the pipe holds, less than the agent queues.
    session.input.stdin(&vec![0; 200 * 1024]).unwrap();
    session.input.signal(15).unwrap();
    wait_for(&mut session, "got");
    assert_eq!(session.output.event().unwrap(), ExecEvent::Exited(7));
}

#[test]
fn signals_that_do_not_exist_are_ignored() {
    let mut request = shell("read line; echo $line");
    request.stdin = true;
    let mut session = start(&request).unwrap();
    session.input.signal(0).unwrap();
    session.input.signal(65).unwrap();
    session.input.stdin(b"still here\n").unwrap();
    wait_for(&mut session, "still here\n");
    assert_eq!(session.output.event().unwrap(), ExecEvent::Exited(0));
}

#[test]
fn a_terminal_is_real_and_resizes() {
    let mut request = shell("tty; stty size; read x; stty size; echo err >&2; cat; exit 5");
    request.tty = Some(TtySize { rows: 33, cols: 101 });
    request.stdin = true;
    let mut session = start(&request).unwrap();
    let seen = wait_for(&mut session, "33 101");
    assert!(seen.contains("/dev/pts/"), "{seen}");
    session.input.resize(TtySize { rows: 12, cols: 34 }).unwrap();
    session.input.stdin(b"\n").unwrap();
    wait_for(&mut session, "err\r\n");
    session.input.stdin_eof().unwrap();
    while session.output.event().unwrap() != ExecEvent::Exited(5) {}
}

#[test]
fn control_c_on_a_terminal_interrupts_the_foreground() {
    let mut request = shell("exec cat");
    request.tty = Some(TtySize { rows: 24, cols: 80 });
    request.stdin = true;
    let mut session = start(&request).unwrap();
    session.input.stdin(b"up\n").unwrap();
    // Once echoed by the terminal, once by cat, which therefore runs.
    wait_for(&mut session, "up\r\nup\r\n");
    session.input.stdin(b"\x03").unwrap();
    while session.output.event().unwrap() != ExecEvent::Exited(130) {}
}

#[test]
fn a_grandchild_that_holds_the_output_does_not_hold_the_session() {
    let before = Instant::now();
    let (out, _, code) = run(&shell("sleep 30 & echo started; exit 3"));
    assert_eq!((out.as_str(), code), ("started\n", 3));
    assert!(before.elapsed() < Duration::from_secs(5));
    let chatty = run(&shell("(while :; do echo noise; done) & echo $! ; exit 4"));
    assert_eq!(chatty.2, 4);
}

#[test]
fn a_host_that_leaves_does_not_end_the_program() {
    let directory = tempfile::tempdir().unwrap();
    let flag = directory.path().join("flag");
    let script = format!("sleep 0.3; seq 100000; echo done > {}", flag.display());
    drop(start(&shell(&script)).unwrap());
    let limit = Instant::now() + Duration::from_secs(10);
    while !flag.exists() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(flag.exists());
}

#[test]
fn programs_that_cannot_run_say_why() {
    let directory = tempfile::tempdir().unwrap();
    let make = |name: &str, content: &[u8], mode: u32| {
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Exec { args: vec![path.display().to_string()], ..shell("") }
    };
    let none = Exec { args: vec!["no-such-program".into()], ..shell("") };
    let path = Exec { args: vec!["/no/such/program".into()], ..shell("") };
    let folder = Exec { args: vec!["/usr".into()], ..shell("") };
    let interpreter = make("lost", b"#!/no/such/interpreter\n", 0o755);
    let cases = [
        (none, FailureKind::NotFound),
        (path, FailureKind::NotFound),
        (interpreter, FailureKind::NotFound),
        (folder, FailureKind::NotExecutable),
        (make("plain", b"echo hi", 0o644), FailureKind::NotExecutable),
        (make("headless", b"echo hi", 0o755), FailureKind::NotExecutable),
        (Exec { args: vec![], ..shell("") }, FailureKind::Invalid),
        (Exec { user: "no-such-user".into(), ..shell("") }, FailureKind::Invalid),
        (Exec { cwd: "relative".into(), ..shell("") }, FailureKind::Invalid),
        (Exec { cwd: "/etc/passwd/x".into(), ..shell("") }, FailureKind::Invalid),
        (shell("a\0b"), FailureKind::Invalid),
    ];
    for (request, expected) in cases {
        let (kind, message) = failure(&request);
        assert_eq!(kind, expected, "{:?}: {message}", request.args);
        assert!(message.len() > 10, "{message}");
    }
}

#[test]
fn a_missing_working_directory_is_made() {
    let directory = tempfile::tempdir().unwrap();
    let cwd = directory.path().join("a/b").display().to_string();
    let request = Exec { cwd: cwd.clone(), ..shell("pwd") };
    assert_eq!(run(&request).0.trim(), cwd);
}

#[test]
fn users_get_their_ids_and_can_reopen_their_streams() {
    let mut request = shell("id -u; id -g; id -G; echo again > /dev/stdout; echo $HOME");
    request.user = "12345:678".into();
    assert_eq!(run(&request).0, "12345\n678\n678\nagain\n/\n");
    request.user = "nobody".into();
    request.env.push("HOME=/given".into());
    let (out, _, _) = run(&request);
    assert!(out.starts_with("65534\n65534\n") && out.ends_with("/given\n"), "{out}");
}

#[test]
fn programs_start_as_session_leaders_with_default_signals() {
    let (out, _, _) =
        run(&shell("ps -o pid=,sid= -p $$; grep -E 'SigIgn|SigBlk' /proc/self/status"));
    let mut words = out.lines().next().unwrap().split_whitespace();
    assert_eq!(words.next(), words.next());
    let mask = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    // 32 and 33 are the C library's own: it lets nobody change them.
    let reserved = 3 << 31;
    assert_eq!((mask("SigBlk:"), mask("SigIgn:") & !reserved), (0, 0), "{out}");
    // The standard streams, and the directory that ls reads.
    assert_eq!(run(&shell("ls /proc/self/fd")).0, "0\n1\n2\n3\n");
}

#[test]
fn many_sessions_at_once_keep_their_exit_codes() {
    let workers: Vec<_> = (0..24u8)
        .map(|code| {
            let script = format!("(sleep 0.1 & true); sleep 0.0{}; exit {code}", code % 7);
            std::thread::spawn(move || (code, run(&shell(&script)).2))
        })
        .collect();
    for worker in workers {
        let (expected, got) = worker.join().unwrap();
        assert_eq!(expected, got);
    }
}

fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("tree/deep")).unwrap();
    fs::write(root.join("tree/deep/file"), vec![b'f'; 200_000]).unwrap();
    fs::set_permissions(root.join("tree/deep/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    std::os::unix::fs::chown(root.join("tree/deep/file"), Some(1234), Some(567)).unwrap();
    fs::set_permissions(root.join("tree/deep/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("/nowhere/at/all", root.join("tree/link")).unwrap();
    fs::write(root.join("tree").join("n".repeat(150)), "long name").unwrap();
    let _socket = UnixListener::bind(root.join("tree/socket")).unwrap();
}

#[test]
fn a_tree_survives_download_and_upload() {
    let directory = tempfile::tempdir().unwrap();
    make_tree(directory.path());
    let source = directory.path().join("tree").display().to_string();
    let mut archive = Vec::new();
    client::download(stream(), &stream_to_nowhere(), &source, &mut archive, 1).unwrap_err();
    let connection = stream();
    let bytes = client::download(&connection, &connection, &source, &mut archive, 1 << 30).unwrap();
    assert_eq!(bytes, archive.len() as u64);

    let target = directory.path().join("new/place").display().to_string();
    let connection = stream();
    client::upload(&connection, &connection, &target, &mut archive.as_slice()).unwrap();
    let copied = directory.path().join("new/place/tree");
    let file = fs::metadata(copied.join("deep/file")).unwrap();
    assert_eq!((file.len(), file.mode() & 0o7777), (200_000, 0o4751));
    assert_eq!((file.uid(), file.gid()), (1234, 567));
    let original = fs::metadata(directory.path().join("tree/deep/file")).unwrap();
    assert_eq!(file.mtime(), original.mtime());
    assert_eq!(fs::read_link(copied.join("link")).unwrap(), Path::new("/nowhere/at/all"));
    assert_eq!(fs::read_to_string(copied.join("n".repeat(150))).unwrap(), "long name");
    assert!(!copied.join("socket").exists());
}

/// A stream whose other end answers nothing.
fn stream_to_nowhere() -> UnixStream {
    UnixStream::pair().unwrap().0
}

#[test]
fn a_link_is_downloaded_as_a_link() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    symlink("/etc/passwd", &link).unwrap();
    let (connection, mut archive) = (stream(), Vec::new());
    let path = link.display().to_string();
    client::download(&connection, &connection, &path, &mut archive, 1 << 20).unwrap();
    let mut archive = tar::Archive::new(archive.as_slice());
    let entry = archive.entries().unwrap().next().unwrap().unwrap();
    assert_eq!(entry.path().unwrap(), Path::new("link"));
    assert_eq!(entry.link_name().unwrap().unwrap(), Path::new("/etc/passwd"));
}

#[test]
fn copies_that_cannot_be_made_say_why() {
    let missing = stream();
    let error =
        client::download(&missing, &missing, "/no/such", &mut std::io::sink(), 9).unwrap_err();
    assert!(matches!(error, ClientError::Failed { kind: FailureKind::NotFound, .. }), "{error}");
    let relative = stream();
    let error = client::download(&relative, &relative, "etc", &mut std::io::sink(), 9).unwrap_err();
    assert!(matches!(error, ClientError::Failed { kind: FailureKind::Invalid, .. }), "{error}");
    // Longer than the socket buffers: the agent listens on after it has failed.
    let broken = stream();
    let garbage = vec![b'x'; 4 << 20];
    let error = client::upload(&broken, &broken, "/tmp", &mut garbage.as_slice()).unwrap_err();
    assert!(matches!(error, ClientError::Failed { .. }), "{error}");
}

#[test]
fn a_program_that_does_not_read_its_input_still_gets_signals() {
    let connection = stream();
    let exec = Exec {
        stdin: true,
        ..shell("trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.01; done")
    };
    let mut session = client::exec(&connection, &connection, &exec).unwrap();
    assert!(
        matches!(session.output.event().unwrap(), ExecEvent::Stdout(text) if text == b"ready\n")
    );
    connection.set_nonblocking(true).unwrap();
    let mut writer = FrameWriter::new(&connection);
    while writer.write(Kind::Stdin, &[b'x'; 32 << 10]).is_ok() {}
    connection.set_nonblocking(false).unwrap();

    let beside = stream();
    client::signal(&beside, &beside, session.guest_pid, 10).unwrap();
    assert!(
        matches!(session.output.event().unwrap(), ExecEvent::Stdout(text) if text == b"caught\n")
    );
    assert!(matches!(session.output.event().unwrap(), ExecEvent::Exited(7)));
    for (pid, number) in [(1, 9), (u32::MAX, 9), (session.guest_pid, 0), (session.guest_pid, 65)] {
        let refused = stream();
        let error = client::signal(&refused, &refused, pid, number).unwrap_err();
        assert!(matches!(error, ClientError::Failed { kind: FailureKind::Invalid, .. }));
    }
}

#[test]
fn a_program_is_killed_with_all_of_its_group() {
    let connection = stream();
    let mut session =
        client::exec(&connection, &connection, &shell("sleep 4321 & echo ready; wait")).unwrap();
    assert!(
        matches!(session.output.event().unwrap(), ExecEvent::Stdout(text) if text == b"ready\n")
    );
    let beside = stream();
    client::kill_group(&beside, &beside, session.guest_pid).unwrap();
    // The sleeper had its output too: that is at its end.
    assert!(matches!(session.output.event().unwrap(), ExecEvent::Exited(137)));
    for pid in [0, 1, u32::MAX, session.guest_pid] {
        let refused = stream();
        client::kill_group(&refused, &refused, pid).unwrap_err();
    }
}

#[test]
fn stats_are_given_and_the_machine_is_left_alone() {
    let connection = stream();
    let stats = client::stats(&connection, &connection).unwrap();
    assert!(stats.memory_total_bytes > stats.memory_free_bytes && stats.uptime_ns > 0);
    for request in [
        Request::Shutdown { grace_ms: 0 },
        Request::Unmount { path: "/proc".into() },
        Request::Boot(Box::default()),
    ] {
        let connection = stream();
        let error = client::request(&connection, &connection, &request).unwrap_err();
        assert!(matches!(error, ClientError::Failed { kind: FailureKind::Invalid, .. }));
    }
}

#[test]
fn a_stream_that_is_no_conversation_is_closed() {
    let mut connection = stream();
    connection.write_all(&[0xff; 64]).unwrap();
    assert_eq!(connection.read(&mut [0; 16]).unwrap_or(0), 0);
    let connection = stream();
    FrameWriter::new(&connection).write_json(Kind::Reply, &Reply::Done).unwrap();
    assert_eq!((&connection).read(&mut [0; 16]).unwrap_or(0), 0);
    assert_eq!(run(&shell("echo alive")).0, "alive\n");
}
