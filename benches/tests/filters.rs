//! What a cell's threads really call, against what their filters allow: no
//! rule without a use or a reason, no refusal that nobody knows of.
//!
//! Needs EXOCELL_TEST_BIN, strace, and what `make test` prepares: the guest
//! kernel and the image `exocell/base:latest`.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use exocell_cell::processes;
use exocell_cell::vmm::jail::ThreadClass::{
    self, Compile, Control, Credit, Device, Dialer, Door, Folder, GuestKernel, Isolate, Network,
};
use support::trace::Trace;
use support::{Cell, exocell};

type List = &'static [(&'static [ThreadClass], &'static [&'static str], &'static str)];

/// Rules that the workload below need not reach, each with what does.
const RARE: List = &[
    (&[Dialer], &["bind"], "asks of addresses that no registry calls special; a test dials none"),
    (
        &[Device, Network, Folder, Credit, Control],
        &["brk", "madvise", "mmap", "mremap", "munmap", "mprotect"],
        "the allocator's choice",
    ),
    (
        &[Device, Network, Folder, Credit, Control],
        &["clock_gettime"],
        "hosts whose vDSO does not answer",
    ),
    (
        &[Device, Network, Folder, Credit, Control],
        &["clock_nanosleep", "sched_yield"],
        "waits under contention",
    ),
    (
        &[Device, Network, Folder, Credit, Control],
        &["restart_syscall", "rt_sigreturn"],
        "after a stop or a signal",
    ),
    (
        &[Device, Network, Folder, Credit, Control],
        &["getpid", "gettid", "tgkill", "exit_group"],
        "panics and aborts",
    ),
    (&[Device, Network, Folder, Credit, Control], &["getrandom"], "the first hash map of a thread"),
    (&[Control], &["pread64"], "another container whose image lies over others' files"),
    (
        &[Device, Network, Folder, Credit],
        &[
            "exit",
            "sigaltstack",
            "rt_sigprocmask",
            "set_robust_list",
            "rseq",
            "sched_getaffinity",
            "prctl",
        ],
        "start and end of a thread; these start before their filter and end with the process",
    ),
    (
        &[Device, Network, Folder, Credit, Control],
        &[
            "eventfd2",
            "fstat",
            "getsockopt",
            "newfstatat",
            "poll",
            "ppoll",
            "read",
            "readv",
            "recvmsg",
            "sendmsg",
            "shutdown",
            "statx",
            "write",
            "writev",
        ],
        "streams and files as the standard library handles them; one list for all threads",
    ),
    (
        &[Network],
        &["ioctl", "lseek", "sendto", "recvfrom"],
        "set up before its filter; streams, by who has the first word",
    ),
    (
        &[Dialer],
        &["brk", "madvise", "mmap", "mremap", "munmap", "clock_gettime", "futex", "getrandom"],
        "the allocator's choice, the host's vDSO, the first hash map",
    ),
    (&[Dialer], &["rt_sigreturn", "restart_syscall"], "after a stop"),
    (&[Dialer], &["exit_group"], "the end, which it does not outlive"),
    (&[Dialer], &["getsockopt"], "peers that do not answer at once"),
    (
        &[Door],
        &["brk", "madvise", "mmap", "mremap", "munmap", "rt_sigreturn", "restart_syscall"],
        "the allocator's choice; after a stop or a signal",
    ),
    (&[Door], &["exit_group"], "the end, which it does not outlive"),
    (&[Credit], &["close", "fcntl", "futex", "pread64", "pwrite64"], "a budget"),
    (&[Credit], &["kill"], "a guest kernel that takes more than its credit"),
    (&[Device], &["epoll_create1", "ioctl", "lseek"], "the loop is set up before its filter"),
    (&[Device], &["fallocate", "fdatasync"], "discard and flush, when the guest asks"),
    (
        &[Folder],
        &["fchmod", "fchmodat2", "fchown", "openat2", "pread64", "pwrite64", "renameat"],
        "isolates, which share this list",
    ),
    (
        &[Folder],
        &[
            "copy_file_range",
            "fallocate",
            "fdatasync",
            "fgetxattr",
            "flock",
            "fstatfs",
            "fsync",
            "ftruncate",
            "getxattr",
            "listxattr",
            "lseek",
            "mknodat",
            "removexattr",
            "setxattr",
        ],
        "when the guest's programs ask",
    ),
    (&[Folder], &["futex"], "one thread has nobody to wait for; the standard library has locks"),
    (&[Folder], &["accept4", "capget", "capset", "ioctl"], "set up before its filter; group bits"),
    (
        &[Control],
        &["epoll_create1", "epoll_ctl", "epoll_wait", "ioctl", "lseek", "rt_sigaction"],
        "isolates, which share this list: waits for streams, traps of the engine",
    ),
    (&[Control], &["fsync", "ftruncate"], "a log that reached its bound"),
    (&[Control], &["getdents64", "unlinkat"], "removing the record of --rm"),
    (
        &[Control],
        &["unlink", "kill", "setsockopt"],
        "the end, which a killed supervisor does not reach",
    ),
    (
        &[GuestKernel],
        &[
            "clock_gettime",
            "clock_nanosleep",
            "nanosleep",
            "sched_yield",
            "ppoll",
            "restart_syscall",
        ],
        "time and waits, by the host's vDSO and load",
    ),
    (&[GuestKernel], &["exit_group"], "a guest that powers off, a panic"),
    (&[GuestKernel], &["waitid"], "a stub that does not answer"),
    (&[GuestKernel], &["signalfd4"], "cells with --intra none, the stock kernel"),
    (&[GuestKernel], &["socketpair", "recvmsg"], "the stock kernel"),
    (&[GuestKernel], &["pkey_alloc", "pkey_mprotect"], "hosts with protection keys"),
    (&[GuestKernel], &["poll"], "the notification thread, which may sleep in it all the time"),
    (
        &[GuestKernel],
        &["sched_getaffinity", "sched_setaffinity"],
        "hosts with several CPUs, after the first ticks",
    ),
    (
        &[GuestKernel],
        &["epoll_create1", "unlink", "pread64", "getppid"],
        "start, by the libc it is built with",
    ),
    (&[GuestKernel], &["fallocate", "madvise"], "memory that goes back to the host"),
    (&[GuestKernel], &["fstat", "ftruncate"], "sizes, by the libc it is built with"),
];

/// Calls that the filters refuse and whose callers do without.
const REFUSED: List = &[
    (
        &[Control, GuestKernel, Isolate],
        &["clone3"],
        "libc falls back to clone, whose flags a filter can see",
    ),
    (&[Isolate], &["ioctl"], "asks whether a file is a terminal"),
    (&[GuestKernel], &["getuid"], "asks who it is; the answer does not matter"),
    (&[GuestKernel], &["readlink"], "asks for its own path"),
    (&[GuestKernel], &["setsid"], "it is in its supervisor's session, which ranks with its weight"),
    (
        &[GuestKernel],
        &["epoll_ctl", "getrandom", "openat"],
        "would undo set-up at its end, which then is the host's to do",
    ),
];

fn listed(list: List, class: ThreadClass, call: &str) -> bool {
    list.iter().any(|(of, calls, _)| of.contains(&class) && calls.contains(&call))
}

#[test]
fn rules_are_used_and_refusals_are_known() {
    let directory = tempfile::tempdir().unwrap();
    let shared = directory.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("file"), "from the host\n").unwrap();
    let log = directory.path().join("strace");
    workload(&shared, &log);
    let trace = Trace::read(&fs::read_to_string(&log).unwrap());

    let mut wrong = BTreeSet::new();
    // An isolate has no guest to ask for more; its list is the other two together.
    for class in [GuestKernel, Device, Network, Dialer, Folder, Door, Credit, Control] {
        for rule in class.rules() {
            let used = trace.used(class).contains(rule.name);
            let rare = listed(RARE, class, rule.name);
            if !used && !rare {
                wrong.insert(format!(
                    "{}: nothing uses {} ({})",
                    class.name(),
                    rule.name,
                    rule.why
                ));
            }
        }
        for call in trace.refused(class) {
            if !listed(REFUSED, class, &call) {
                wrong.insert(format!("{}: {call} was refused", class.name()));
            }
        }
    }
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "the filters and their use differ:\n{}", wrong.join("\n"));
}

/// A rule of theirs may be idle: their list is two others together. What they
/// need must be in it.
#[test]
fn isolates_do_without_what_their_list_refuses() {
    let directory = tempfile::tempdir().unwrap();
    let (shared, log) = (directory.path().join("shared"), directory.path().join("strace"));
    fs::create_dir(&shared).unwrap();
    let module = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/isolate.wat");
    let said = support::traced_isolate(&log, &shared, module);
    assert_eq!(said, "hello\n");
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0, "the module removes what it makes");

    let trace = Trace::of_isolate(&fs::read_to_string(&log).unwrap());
    let used = trace.used(Isolate);
    for call in ["read", "write", "openat2", "mkdirat", "renameat", "unlinkat", "epoll_wait"] {
        assert!(used.contains(call), "{call} was not traced: {used:?}");
    }
    let unknown = trace.refused(Isolate);
    let unknown: Vec<_> = unknown.iter().filter(|call| !listed(REFUSED, Isolate, call)).collect();
    assert!(unknown.is_empty(), "refused to isolates: {unknown:?}");

    // And so must what compiles them.
    let used = trace.used(Compile);
    for call in ["read", "write", "mmap", "mprotect", "sendto"] {
        assert!(used.contains(call), "{call} was not traced: {used:?}");
    }
    let unknown = trace.refused(Compile);
    let unknown: Vec<_> = unknown.iter().filter(|call| !listed(REFUSED, Compile, call)).collect();
    assert!(unknown.is_empty(), "refused to what compiles: {unknown:?}");
}

/// Everything an operator and a guest do in the course of a day.
fn workload(shared: &std::path::Path, log: &std::path::Path) {
    let path = shared.with_file_name("x.sock");
    let local = UnixListener::bind(&path).unwrap();
    let socket = format!("{}:/run/x.sock", path.display());
    let volume = format!("{}:/shared", shared.display());
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let named = ["localhost:PORT/raw", "127.0.0.1:PORT", "127.0.0.1:PORT/udp"]
        .map(|rule| rule.replace("PORT", &port.to_string()));
    let rules = named.iter().flat_map(|rule| ["--allow-net", rule.as_str()]);
    // In the other modes programs' calls are traced as the guest kernel's.
    let intra = ["--intra", "aspace"];
    let fixed = [
        "-v",
        &volume,
        "-v",
        &socket,
        "--cpus",
        "2",
        "--timeout",
        "5m",
        "--pager",
        "credit",
        "--privileged",
    ];
    let options: Vec<&str> = intra.into_iter().chain(fixed).chain(rules).collect();
    let cell = Cell::traced(log, &options);
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
    });
    cell.exec(&[], &["python3", "-c", &IN_THE_NETWORK.replace("PORT", &port.to_string())]);
    serving.join().unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = local.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
    });
    cell.exec(&[], &["python3", "-c", ON_THE_SOCKET]);
    answering.join().unwrap();
    // Nobody is there any more.
    cell.exec(&[], &["python3", "-c", ON_THE_SOCKET]);
    cell.exec(&[], &["sh", "-ec", IN_THE_FOLDER]);
    cell.exec(&[], &["sh", "-ec", IN_THE_GUEST]);
    cell.exec(&["--tty"], &["sh", "-c", "test -t 1 && stty size"]);
    let copy = shared.with_file_name("copy");
    exocell(&["cp", &format!("{}:/etc", cell.name()), copy.to_str().unwrap()]);
    exocell(&["cp", copy.to_str().unwrap(), &format!("{}:/tmp", cell.name())]);
    exocell(&["stats", cell.name()]);
    exocell(&["logs", cell.name()]);
    exocell(&["update", "--revoke", "folder:/shared", cell.name()]);
    // Ends it.
    exocell(&["kill", "--signal", "USR1", cell.name()]);
    cell.end();
}

const IN_THE_FOLDER: &str = "
cd /shared
ls -la; cat file; df .
echo more >> file; echo new > new; chmod 600 new; touch -d @0 new; chown 0:0 new
mkdir dir; ln new dir/hard; ln -s ../new dir/soft; readlink dir/soft; cat dir/soft
mv new dir/moved; truncate -s 5 dir/moved
dd if=/dev/zero of=big bs=64k count=16 conv=fsync 2> /dev/null
dd if=/dev/zero of=big bs=64k count=1 conv=notrunc,fdatasync 2> /dev/null
dd if=big of=/dev/null bs=1M 2> /dev/null
rm -r dir big
";

const ON_THE_SOCKET: &str = r"
import socket
stream = socket.socket(socket.AF_UNIX); stream.settimeout(60); stream.connect('/run/x.sock')
try: stream.sendall(b'x' * 300000); stream.shutdown(socket.SHUT_WR)
except OSError: pass
try:
    while stream.recv(65536): pass
except ConnectionResetError: pass
";

/// The first name that is asked for has the first address.
const IN_THE_NETWORK: &str = r"
import socket
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.sendto(b'\0\1\1\0\0\1\0\0\0\0\0\0\x09localhost\0\0\1\0\1', ('198.18.0.1', 53))
assert names.recv(512)[7] == 1
stream = socket.create_connection(('198.18.1.0', PORT), 30)
stream.sendall(b'x' * 300000); stream.shutdown(socket.SHUT_WR)
while stream.recv(65536): pass
try: socket.create_connection(('192.0.2.9', 9), 30)
except OSError as error: assert error.strerror == 'No route to host', error
";

/// Dropping caches provokes more reads; what is asserted is the trace.
const IN_THE_GUEST: &str = r"
dd if=/dev/zero of=/var/big bs=1M count=16 conv=fsync 2> /dev/null
sync; echo 3 > /proc/sys/vm/drop_caches
cat /var/big > /dev/null; rm /var/big; sync
python3 - <<'PYTHON'
import ctypes, mmap, os, signal, threading, time
libc = ctypes.CDLL(None); assert libc.inotify_add_watch(libc.inotify_init1(0), b'/shared', 0xfce) > 0; time.sleep(0.3)
threads = [threading.Thread(target=lambda: sum(range(10000))) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
area = mmap.mmap(-1, 8 << 20); area[:] = b'x' * len(area); area.close()
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
for _ in range(5):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
PYTHON
";

#[test]
fn every_thread_of_a_running_cell_is_confined() {
    let directory = tempfile::tempdir().unwrap();
    let volume = format!("{}:/shared", directory.path().display());
    let cell = Cell::started(&["-v", &volume, "--cpus", "2"]);
    cell.exec(&[], &["ls", "/shared"]);
    let threads = confined_threads(&cell);
    assert!(threads.len() >= 8, "supervisor, guest kernel and stubs, not {threads:?}");

    let fused = Cell::started(&["--intra", "none"]);
    fused.exec(&[], &["sh", "-c", "true & wait"]);
    assert!(confined_threads(&fused).len() >= 5, "the same without stubs");

    let endless = directory.path().join("endless.wat");
    fs::write(&endless, r#"(module (func (export "_start") (loop $on (br $on))))"#).unwrap();
    let isolate = Cell::of_module(&endless, &["-v", &volume, "--timeout", "5m"]);
    let threads = confined_threads(&isolate);
    assert!(threads.iter().any(|name| name.ends_with("isolate")), "not {threads:?}");
}

/// The threads of `cell`, each of which must be confined.
fn confined_threads(cell: &Cell) -> Vec<String> {
    let mut names = Vec::new();
    let processes = processes::of_cell(cell.supervisor_pid());
    for process in processes {
        for thread in fs::read_dir(format!("/proc/{}/task", process.pid)).unwrap().flatten() {
            let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
            let has = |line: &str| status.lines().any(|found| found == line);
            let name = status.lines().next().unwrap_or_default();
            assert!(has("Seccomp:\t2"), "a thread has no system call filter: {name}");
            assert!(has("NoNewPrivs:\t1"), "a thread may gain privileges: {name}");
            names.push(name.to_owned());
        }
    }
    names
}
