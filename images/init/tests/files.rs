//! Files, ports and programs that outlive their host, with this machine as the cell.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use exocell_agent::client::{self, ClientError, ExecEvent, ExecOutput, receive_data};
use exocell_agent::files::{
    self, FileAction, FileChange, FileEntry, FileEvent, FileKind, FileRequest,
};
use exocell_agent::{Exec, FailureKind, FrameReader, FrameWriter, Kind, Reply, Request};
use exocell_init::Agent;
use rustix::fs::{Mode, OFlags, mkdirat, openat};

/// One agent for all tests: it reaps every child of this process.
fn agent() -> &'static Arc<Agent> {
    static AGENT: OnceLock<Arc<Agent>> = OnceLock::new();
    AGENT.get_or_init(|| Agent::new().unwrap())
}

/// The host's end of a new stream.
fn stream() -> UnixStream {
    let (host, guest) = UnixStream::pair().unwrap();
    host.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    agent().serve(guest.into()).unwrap();
    host
}

fn request(path: &Path, action: FileAction) -> FileRequest {
    FileRequest { user: String::new(), path: path.display().to_string(), action }
}

fn act(path: &Path, action: FileAction) -> Result<FileEntry, ClientError> {
    let stream = stream();
    files::act(&stream, &stream, &request(path, action))
}

fn write(path: &Path, content: &[u8]) -> Result<FileEntry, ClientError> {
    let (stream, metadata) = (stream(), [("k".to_owned(), "v 1".to_owned())].into());
    let wanted = request(path, FileAction::Write { metadata });
    files::write(&stream, &stream, &wanted, &mut &content[..])
}

fn refusal<T: std::fmt::Debug>(result: Result<T, ClientError>) -> FailureKind {
    match result.unwrap_err() {
        ClientError::Failed { kind, .. } => kind,
        other => panic!("{other}"),
    }
}

#[test]
fn a_file_is_written_told_of_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/deep/file.txt");
    let content = vec![7; 300_000];
    let told = write(&path, &content).unwrap();
    assert_eq!((told.name.as_str(), told.size, told.mode), ("file.txt", 300_000, 0o644));
    assert_eq!((told.kind, told.owner.as_str()), (Some(FileKind::File), "root"));
    assert_eq!(told, act(&path, FileAction::Stat).unwrap());
    let stream = stream();
    let (entry, mut rest) =
        files::read(&stream, &stream, &request(&path, FileAction::Read)).unwrap();
    assert_eq!(entry, told);
    let mut read = Vec::new();
    receive_data(&mut rest, &mut read, 1 << 20).unwrap();
    assert_eq!(read, content);
    // A shorter one leaves nothing of the longer.
    assert_eq!(write(&path, b"ab").unwrap().size, 2);
    assert_eq!(fs::read(&path).unwrap(), b"ab");
}

#[test]
fn what_is_no_file_is_neither_read_nor_written_nor_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let read = |path: &Path| {
        let stream = stream();
        files::read(&stream, &stream, &request(path, FileAction::Read)).map(|_| ())
    };
    assert_eq!(refusal(read(&pipe)), FailureKind::Invalid);
    assert_eq!(refusal(read(folder.path())), FailureKind::Invalid);
    assert_eq!(refusal(read(&folder.path().join("no"))), FailureKind::NotFound);
    assert_eq!(refusal(write(folder.path(), b"x")), FailureKind::Invalid);
    refusal(write(&pipe, b"x"));
    assert_eq!(refusal(write(Path::new("a\0b"), b"x")), FailureKind::Invalid);
    let long = "x".repeat(10_000);
    assert_eq!(refusal(act(Path::new(&long), FileAction::Stat)), FailureKind::Invalid);
}

#[test]
fn directories_are_made_listed_moved_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().join("top");
    act(&top.join("a/b"), FileAction::MakeDir).unwrap();
    assert_eq!(refusal(act(&top.join("a"), FileAction::MakeDir)), FailureKind::Exists);
    write(&top.join("a/line\nbreak"), b"1").unwrap();
    assert_eq!(refusal(act(&top.join("a/line\nbreak"), FileAction::MakeDir)), FailureKind::Invalid);
    symlink("/", top.join("root")).unwrap();
    symlink("nowhere", top.join("dangling")).unwrap();
    let list = |depth| {
        let stream = stream();
        let wanted = request(&top, FileAction::List { depth });
        files::list(&stream, &stream, &wanted).unwrap()
    };
    let names = |depth| list(depth).into_iter().map(|entry| entry.name).collect::<Vec<_>>();
    assert_eq!(names(1), ["a", "dangling", "root"]);
    assert_eq!(names(0), names(1));
    assert_eq!(names(2), ["a", "b", "line\nbreak", "dangling", "root"]);
    let [_, dangling, root] = &list(1)[..] else { panic!() };
    assert_eq!((dangling.kind, dangling.link.as_deref()), (None, Some("nowhere")));
    assert_eq!((root.kind, root.link.as_deref()), (Some(FileKind::Directory), Some("/")));
    let moved = act(&top.join("a"), FileAction::Move { to: top.join("x/y").display().to_string() });
    assert_eq!(moved.unwrap().path, top.join("x/y").display().to_string());
    assert_eq!(refusal(act(&top.join("a"), FileAction::Stat)), FailureKind::NotFound);
    for _ in 0..2 {
        let stream = stream();
        files::done(&stream, &stream, &request(&top, FileAction::Remove)).unwrap();
        assert!(!top.exists());
    }
    assert!(Path::new("/etc").exists());
}

#[test]
fn a_tree_is_removed_however_deep_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().join("top");
    fs::create_dir(&top).unwrap();
    // Not by a program: the agent reaps every child of this process.
    let mut here = std::os::fd::OwnedFd::from(fs::File::open(&top).unwrap());
    for _ in 0..700 {
        mkdirat(&here, "deep", Mode::RWXU).unwrap();
        here = openat(&here, "deep", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    let stream = stream();
    files::done(&stream, &stream, &request(&top, FileAction::Remove)).unwrap();
    assert!(!top.exists());
}

/// The host's end of a watch.
fn watch(path: &Path) -> FrameReader<UnixStream> {
    let stream = stream();
    let wanted = request(path, FileAction::Watch { recursive: true });
    FrameWriter::new(&stream).write_json(Kind::Request, &Request::File(wanted)).unwrap();
    let mut reader = FrameReader::new(stream);
    assert_eq!(reader.expect::<Reply>(Kind::Reply).unwrap(), Reply::Done);
    reader
}

#[test]
fn what_happens_in_a_directory_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::create_dir(path.join("old")).unwrap();
    let mut reader = watch(path);
    let mut await_event = |name: &str, change| loop {
        let frame = reader.read().unwrap().expect("an event");
        let event: FileEvent = serde_json::from_slice(&frame.payload).unwrap();
        if (event.name.as_str(), event.change) == (name, change) {
            return;
        }
    };
    fs::write(path.join("old/f"), "x").unwrap();
    await_event("old/f", FileChange::Created);
    await_event("old/f", FileChange::Written);
    fs::set_permissions(path.join("old/f"), fs::Permissions::from_mode(0o600)).unwrap();
    await_event("old/f", FileChange::Attributes);
    fs::create_dir_all(path.join("new/deep")).unwrap();
    await_event("new", FileChange::Created);
    await_event("new/deep", FileChange::Created);
    fs::write(path.join("new/deep/g"), "x").unwrap();
    await_event("new/deep/g", FileChange::Created);
    fs::rename(path.join("old/f"), path.join("new/f")).unwrap();
    await_event("old/f", FileChange::Renamed);
    await_event("new/f", FileChange::Created);
    fs::remove_dir_all(path.join("new")).unwrap();
    await_event("new", FileChange::Removed);
    fs::remove_dir_all(path).unwrap();
    await_event("", FileChange::Ended);
    assert!(reader.read().unwrap().is_none());
}

#[test]
fn only_a_directory_is_watched() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let stream = stream();
    let wanted = request(file.path(), FileAction::Watch { recursive: false });
    assert_eq!(refusal(files::done(&stream, &stream, &wanted)), FailureKind::Invalid);
}

#[test]
fn a_port_of_the_guest_is_reached_and_a_shut_one_is_not() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut heard = String::new();
        stream.read_to_string(&mut heard).unwrap();
        stream.write_all(heard.to_uppercase().as_bytes()).unwrap();
    });
    let mut own = stream();
    client::dial(&own, &own, port).unwrap();
    own.write_all(b"hello").unwrap();
    own.shutdown(std::net::Shutdown::Write).unwrap();
    let mut heard = String::new();
    own.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "HELLO");
    server.join().unwrap();
    let own = stream();
    assert_eq!(refusal(client::dial(&own, &own, port)), FailureKind::NotFound);
}

#[test]
fn a_program_is_followed_by_another_host() {
    let program = Exec {
        args: ["/bin/sh", "-c", "echo up; read a; echo $a; read b; echo $b; exit 5"]
            .map(String::from)
            .to_vec(),
        cwd: "/".into(),
        stdin: true,
        lasting: true,
        ..Exec::default()
    };
    let first = stream();
    let session = client::exec(first.try_clone().unwrap(), first, &program).unwrap();
    let pid = session.guest_pid;
    drop(session);
    let follow = |pid| {
        let own = stream();
        let wanted = Request::Follow { guest_pid: pid };
        let reply = client::request(&own, &own, &wanted)?;
        assert_eq!(reply, Reply::Started { guest_pid: pid });
        Ok::<_, ClientError>(own)
    };
    let second = follow(pid).unwrap();
    FrameWriter::new(&second).write(Kind::Stdin, b"one\n").unwrap();
    let mut output = ExecOutput::new(second);
    let mut heard = Vec::new();
    while !heard.ends_with(b"one\n") {
        match output.event().unwrap() {
            ExecEvent::Stdout(bytes) => heard.extend(bytes),
            other => panic!("{other:?}"),
        }
    }
    // One who comes takes the place of one who is there.
    let third = follow(pid).unwrap();
    FrameWriter::new(&third).write(Kind::Stdin, b"two\n").unwrap();
    let mut output = ExecOutput::new(third);
    assert_eq!(output.event().unwrap(), ExecEvent::Stdout(b"two\n".to_vec()));
    assert_eq!(output.event().unwrap(), ExecEvent::Exited(5));
    assert_eq!(refusal(follow(pid)), FailureKind::NotFound);
}
