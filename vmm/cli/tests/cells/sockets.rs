//! Unix sockets of the host in a cell: programs connect to who listens there, and to nobody else.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use tempfile::TempDir;

use crate::common::cell::Cell;
use crate::common::unix::Echo;
use crate::common::{Finished, IMAGE, Started, eventually, finish, host, run, shell, text};

/// What programs of the cell have to say it with.
const CLIENT: &str = r"
import os, socket, sys, threading
def to(path='/run/x.sock'):
    s = socket.socket(socket.AF_UNIX); s.connect(path); s.settimeout(60); return s
def rest(s):
    got = b''
    while True:
        more = s.recv(1 << 16)
        if not more: return got
        got += more
";

/// A place for a socket, and the flag that shares it.
fn place() -> (TempDir, std::path::PathBuf, String) {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("x.sock");
    let flag = format!("{}:/run/x.sock", text(&path));
    (dir, path, flag)
}

fn python(cell: &Cell, script: &str) -> Finished {
    finish(&mut cell.exec(&[], &["python3", "-c", &format!("{CLIENT}{script}")]), b"")
}

/// The processes that connect for the cell called `name`.
fn doors(name: &str) -> Vec<i32> {
    let is_door = |pid: &i32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let words = read("cmdline");
        read("comm") == b"door\n" && words.split(|byte| *byte == 0).any(|w| w == name.as_bytes())
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_door).collect()
}

#[test]
fn a_program_speaks_with_a_server_of_the_host() {
    let (_dir, path, flag) = place();
    let echo = Echo::new(&path);
    let cell = Cell::idle("socket", &["-v", &flag]);
    let said = python(&cell, "s = to(); s.sendall(b'hello'); print(s.recv(5).decode())").ok();
    assert_eq!(said.text(), "hello");
    // The server hears the end of what is said, and says the rest then.
    let script = "s = to(); s.sendall(b'x' * 100000); s.shutdown(socket.SHUT_WR); \
                  got = rest(s); print(len(got), set(got) == {120})";
    assert_eq!(python(&cell, script).ok().text(), "100000 True");
    // Much, both ways at once.
    let script = r"
s = to(); data = os.urandom(1 << 20) * 24
def say(): s.sendall(data); s.shutdown(socket.SHUT_WR)
threading.Thread(target=say).start()
print(rest(s) == data)";
    assert_eq!(python(&cell, script).ok().text(), "True");
    let script =
        "os.chdir('/run'); s = to('x.sock'); s.sendall(b'here'); print(s.recv(4).decode())";
    assert_eq!(python(&cell, script).ok().text(), "here");
    assert_eq!(echo.count.load(Ordering::Relaxed), 4);
}

#[test]
fn the_server_may_have_the_first_word_and_the_last() {
    let (_dir, path, flag) = place();
    let _server = Echo::by(&path, |mut stream| {
        stream.write_all(b"welcome").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut told = Vec::new();
        stream.read_to_end(&mut told).unwrap();
        assert_eq!(told, b"thanks");
    });
    let cell = Cell::idle("socket-first", &["-v", &flag]);
    // Its half is over, and it still hears.
    let script = "s = to(); print(rest(s).decode()); s.sendall(b'thanks'); s.close()";
    assert_eq!(python(&cell, script).ok().text(), "welcome");
}

#[test]
fn more_connections_than_there_is_room_for_wait_and_come() {
    let (_dir, path, flag) = place();
    let echo = Echo::new(&path);
    let cell = Cell::idle("socket-many", &["-v", &flag]);
    // None connects before all are about to.
    let script = r"
begun, answers = threading.Barrier(150), []
def one(at):
    s = socket.socket(socket.AF_UNIX); s.settimeout(100)
    begun.wait()
    s.connect('/run/x.sock')
    s.sendall(b'%04d' % at); answers.append(rest_of(s, 4) == b'%04d' % at)
def rest_of(s, count):
    got = b''
    while len(got) < count: got += s.recv(count - len(got))
    return got
threads = [threading.Thread(target=one, args=(at,)) for at in range(150)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(answers), all(answers))";
    assert_eq!(python(&cell, script).ok().text(), "150 True");
    assert_eq!(echo.count.load(Ordering::Relaxed), 150);
    // Those that stay open are as many as there is room for; one that ends makes room for one more.
    let script = r"
held = [to() for _ in range(64)]
[s.sendall(b'x') for s in held]; print(all(s.recv(1) == b'x' for s in held))
more = to(); more.sendall(b'y'); more.settimeout(1)
try: more.recv(1); print('came in')
except TimeoutError: print('waits')
held.pop().close(); more.settimeout(60); print(more.recv(1).decode())";
    assert_eq!(python(&cell, script).ok().text(), "True\nwaits\ny");
    // The operator has streams of its own all the time.
    cell.answers_many_at_once();
}

#[test]
fn a_server_that_is_gone_refuses_and_may_come_again() {
    let (_dir, path, flag) = place();
    let echo = Echo::new(&path);
    let cell = Cell::idle("socket-gone", &["-v", &flag]);
    let ask = "s = to(); s.sendall(b'ping'); print(s.recv(4).decode())";
    assert_eq!(python(&cell, ask).ok().text(), "ping");
    echo.end();
    // Closed at once: the guest has let the program in before the host could be asked.
    let refused = "s = to()\ntry: print(s.recv(4))\nexcept ConnectionResetError: print(b'')";
    assert_eq!(python(&cell, refused).ok().text(), "b''");
    let _again = Echo::new(&path);
    assert_eq!(python(&cell, ask).ok().text(), "ping");
    // What takes the name's place is not followed, whatever it leads to.
    let (_other, elsewhere, _) = place();
    let other = Echo::new(&elsewhere);
    fs::remove_file(&path).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert_eq!(python(&cell, refused).ok().text(), "b''");
    assert_eq!(other.count.load(Ordering::Relaxed), 0);
}

#[test]
fn a_revoked_socket_ends_its_connections_and_takes_none() {
    let (dir, path, flag) = place();
    let echo = Echo::new(&path);
    let also = dir.path().join("y.sock");
    let _other = Echo::new(&also);
    let second = format!("{}:/run/y.sock", text(&also));
    let cell = Cell::idle("socket-revoked", &["-v", &flag, "-v", &second]);
    assert_eq!(doors(&cell.name).len(), 2);
    let waits = format!(
        "{CLIENT}s = to(); s.sendall(b'x'); s.recv(1); print('in', flush=True); \
                         s.settimeout(None); print(rest(s)); \
                         \ntry: s.sendall(b'y'); print('said')\nexcept BrokenPipeError: print('over')"
    );
    let connected = Started::new(&mut cell.exec(&[], &["python3", "-c", &waits]));
    eventually("the program is in", || echo.count.load(Ordering::Relaxed) == 1);
    run(["update", "--revoke", "folder:/run/x.sock", &cell.name]).ok();
    let ended = connected.finish(crate::common::LIMIT).expect("it is told").ok();
    assert_eq!(ended.text(), "in\nb''\nover");
    let script = "
for path in ['/run/x.sock', '/run/y.sock']:
    try: s = to(path); s.sendall(b'z'); print(s.recv(1))
    except ConnectionRefusedError: print('refused')";
    assert_eq!(python(&cell, script).ok().text(), "refused\nb'z'");
    eventually("one process is left", || doors(&cell.name).len() == 1);
    assert_eq!(echo.count.load(Ordering::Relaxed), 1);
}

#[test]
fn what_connects_is_confined() {
    let (dir, path, flag) = place();
    let _echo = Echo::new(&path);
    fs::write(dir.path().join("secret"), "secret").unwrap();
    let cell = Cell::idle("socket-door", &["-v", &flag]);
    let [door] = doors(&cell.name)[..] else { panic!("one socket, one process") };
    let at = |file: &str| format!("/proc/{door}/{file}");
    let status = fs::read_to_string(at("status")).unwrap();
    assert!(status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1"), "{status}");
    if nix::unistd::geteuid().is_root() {
        // CAP_DAC_OVERRIDE: a root operator connects to everyone's sockets.
        assert!(status.contains("CapEff:\t0000000000000002"), "{status}");
    }
    assert_eq!(fs::read_dir(at("root/")).unwrap().count(), 0, "an empty root");
    let open = fs::read_dir(at("fd")).unwrap().count();
    assert_eq!(open, 5, "three of /dev/null, the directory, its line to the supervisor");
}

#[test]
fn the_server_is_told_when_the_cell_ends() {
    let (_dir, path, flag) = place();
    let (ended, ends) = channel();
    let _server = Echo::by(&path, move |mut stream| {
        stream.read_exact(&mut [0]).unwrap();
        ended.send("in").unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        ended.send("over").unwrap();
    });
    for by in ["kill", "supervisor"] {
        let cell = Cell::idle("socket-ended", &["-v", &flag]);
        let script = format!("{CLIENT}s = to(); s.sendall(b'x'); s.settimeout(None); s.recv(1)");
        let _held = Started::new(&mut cell.exec(&[], &["python3", "-c", &script]));
        assert_eq!(ends.recv_timeout(crate::common::LIMIT), Ok("in"));
        match by {
            "kill" => drop(run(["kill", &cell.name]).ok()),
            _ => host::kill(cell.supervisor()),
        }
        assert_eq!(ends.recv_timeout(crate::common::LIMIT), Ok("over"), "{by}");
        eventually("its door is gone", || doors(&cell.name).is_empty());
    }
}

#[test]
fn the_sockets_owner_and_mode_are_the_hosts() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (_dir, path, flag) = place();
    let echo = Echo::new(&path);
    let user = |cell: &Cell, id: &str| {
        let script = format!(
            "{CLIENT}\ntry: s = to(); s.sendall(b'x'); print(s.recv(1).decode())\n\
             except PermissionError: print('may not')"
        );
        finish(&mut cell.exec(&["--user", id], &["python3", "-c", &script]), b"").ok()
    };
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let cell = Cell::idle("socket-mode", &["-v", &flag]);
    assert_eq!(cell.shell("stat -c '%F %a %u %g' /run/x.sock").ok().text(), "socket 600 0 0");
    assert_eq!(user(&cell, "1000").text(), "may not");
    assert_eq!(user(&cell, "0").text(), "x");
    drop(cell);
    chown(&path, Some(1000), Some(2000)).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o660)).unwrap();
    let cell = Cell::idle("socket-owner", &["-v", &format!("{flag}:ro")]);
    assert_eq!(cell.shell("stat -c '%F %a %u %g' /run/x.sock").ok().text(), "socket 660 1000 2000");
    for (id, said) in [("1000", "x"), ("1001", "may not"), ("1001:2000", "x")] {
        assert_eq!(user(&cell, id).text(), said, "{id}");
    }
    assert_eq!(echo.count.load(Ordering::Relaxed), 3);
    // What a cell makes of the file is its own affair, and with :ro it makes nothing of it.
    cell.shell("chmod 666 /run/x.sock").exited(1);
    cell.shell("rm -f /run/x.sock").exited(1);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
}

#[test]
fn only_sockets_of_streams_are_shared() {
    let (_dir, path, flag) = place();
    let datagrams = UnixDatagram::bind(&path).unwrap();
    let fixed = ["run", "--rm", "-v", &flag, IMAGE, "true"];
    run(fixed).exited(125).complains_of(&["is a socket of datagrams", "streams", "--volume"]);
    drop(datagrams);
    fs::remove_file(&path).unwrap();
    // A server's that is not there is no mistake: it may come.
    drop(UnixListener::bind(&path).unwrap());
    let script = "stat -c %F /run/x.sock";
    assert_eq!(shell(&["-v", &flag], script).ok().text(), "socket");
    // An isolate has no sockets of the host's.
    let module = _dir.path().join("none.wat");
    fs::write(&module, r#"(module (func (export "_start")))"#).unwrap();
    let isolate = run(["run", "--rm", "-v", &flag, text(&module)]);
    isolate.exited(125).complains_of(&["is a socket of the host", "isolates cannot"]);
    // So many are too many for a cell.
    let sockets: Vec<String> = (0..9)
        .flat_map(|at| {
            let path = path.with_file_name(format!("{at}.sock"));
            drop(UnixListener::bind(&path).unwrap());
            ["-v".to_owned(), format!("{}:/run/{at}.sock", text(&path))]
        })
        .collect();
    let many: Vec<&str> = sockets.iter().map(String::as_str).collect();
    let fixed = [&["run", "--rm"], &many[..], &[IMAGE, "true"]].concat();
    run(fixed).exited(125).complains_of(&["9 sockets of the host", "8"]);
    // One in a folder is not one that was named: it connects programs of the cell only.
    let echo = Echo::new(&path.with_file_name("inside.sock"));
    let folder = format!("{}:/shared:ro", text(path.parent().unwrap()));
    let script = format!(
        "python3 -c \"{CLIENT}\ntry: to('/shared/inside.sock')\nexcept OSError as e: print(e.strerror)\""
    );
    assert_eq!(shell(&["-v", &folder], &script).ok().text(), "Connection refused");
    assert_eq!(echo.count.load(Ordering::Relaxed), 0);
}

#[test]
fn a_cell_that_starts_again_has_the_socket_of_a_server_that_came_again() {
    let (_dir, path, flag) = place();
    let ask =
        format!("{CLIENT}s = to(); s.sendall(b'ping'); print(s.recv(4).decode(), flush=True)");
    let name = crate::common::unique("socket-again");
    let echo = Echo::new(&path);
    let fixed = ["run", "--name", &name, "-v", &flag, IMAGE, "python3", "-c", &ask];
    assert_eq!(run(fixed).ok().text(), "ping");
    echo.end();
    let _again = Echo::new(&path);
    assert_eq!(run(["start", "-a", &name]).ok().text(), "ping");
    run(["rm", "-f", &name]).ok();
}

#[test]
fn descriptors_do_not_travel() {
    let (_dir, path, flag) = place();
    let (told, tells) = channel();
    let _server = Echo::by(&path, move |stream| told.send(received(&stream)).unwrap());
    let cell = Cell::idle("socket-rights", &["-v", &flag]);
    let script = "s = to(); socket.send_fds(s, [b'x'], [0]); s.shutdown(socket.SHUT_WR); rest(s)";
    python(&cell, script).ok();
    assert_eq!(tells.recv_timeout(crate::common::LIMIT), Ok((1, 0)), "a byte, and nothing with it");
}

/// How many bytes and descriptors come with one message.
fn received(stream: &UnixStream) -> (usize, usize) {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg};
    let (mut byte, mut space) = ([0; 8], nix::cmsg_space!([std::os::fd::RawFd; 4]));
    let mut data = [std::io::IoSliceMut::new(&mut byte)];
    let fd = std::os::fd::AsRawFd::as_raw_fd(stream);
    let message = recvmsg::<UnixAddr>(fd, &mut data, Some(&mut space), MsgFlags::empty()).unwrap();
    let rights = message.cmsgs().unwrap().map(|one| match one {
        ControlMessageOwned::ScmRights(found) => found.len(),
        _ => 0,
    });
    (message.bytes, rights.sum())
}

/// Some are gone before the host was asked, some while it answers.
#[test]
fn a_guest_that_hangs_up_early_harms_nobody() {
    let (_dir, path, flag) = place();
    let echo = Echo::new(&path);
    let cell = Cell::idle("socket-early", &["-v", &flag]);
    let script = r"
for _ in range(300):
    s = socket.socket(socket.AF_UNIX); s.connect('/run/x.sock'); s.close()
for _ in range(100):
    s = to(); s.sendall(b'x' * 70000); s.close()
s = to(); s.sendall(b'after'); print(s.recv(5).decode())";
    assert_eq!(python(&cell, script).ok().text(), "after");
    assert!(echo.count.load(Ordering::Relaxed) <= 401);
    eventually("no connection is left at the host", || connections(&path) == 0);
    cell.answers_many_at_once();
}

/// Connections whose server is at `path`.
fn connections(path: &Path) -> usize {
    let all = fs::read_to_string("/proc/net/unix").unwrap();
    // Column 6 is the state: 03 is connected (kernel: net/unix/af_unix.c, unix_seq_show).
    let is_open = |line: &&str| line.ends_with(text(path)) && line.split(' ').nth(5) == Some("03");
    all.lines().filter(is_open).count()
}
