//! Stages as a caller has them, and as what they confine would like to have them. Runs as root
//! and, where it is root, as an ordinary user too.
//!
//! A stage is started from the executable that wants it, so this is a program with a main of its
//! own: each test is an entry of [`TESTS`].

use std::fs;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use exocell_vmm::jail::stage::{
    Fault, Given, Limits, Order, Shown, Stage, StageError, Task, entered,
};
use exocell_vmm::jail::{HostNetwork, PathAccess, ThreadClass};

/// nobody of Debian.
const ORDINARY_ID: u32 = 65534;
/// The argument with which this program orders a stage that never ends, and waits.
const HOLD: &str = "hold-for-ever";
const MIB: u64 = 1 << 20;

macro_rules! tests {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn())),*] };
}

const TESTS: &[(&str, fn())] = tests![
    an_answer_comes_back_with_progress_and_output,
    inside_there_is_nothing,
    what_is_shown_can_be_read_and_no_more,
    below_a_directory_is_what_was_granted,
    from_outside_it_has_no_rights,
    who_is_at_fault_is_told_apart,
    limits_end_what_does_not_keep_to_them,
    one_that_is_killed_is_told,
    a_dead_warden_or_caller_leaves_nothing,
    many_threads_order_at_once,
    a_worker_speaks_until_it_is_let_go,
];

const STAGES: &[Stage] = &[
    stage("t-copy", copy),
    stage("t-look", look),
    stage("t-fault", fault),
    stage("t-hold", hold),
    stage("t-worker", worker),
    Stage { name: "t-below", class: ThreadClass::Folder, work: below },
];

const fn stage(name: &'static str, work: fn(&mut Task) -> Result<Vec<u8>, Fault>) -> Stage {
    Stage { name, class: ThreadClass::Stage, work }
}

fn main() -> ExitCode {
    if let Some(code) = entered(&[STAGES]) {
        return code.into();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == HOLD) {
        let order = order("t-hold", vec![]);
        let _ = order.run::<()>(&(), |line| println!("{line}"));
        return ExitCode::SUCCESS;
    }
    if arguments.iter().any(|argument| argument == "--list") {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted = arguments.iter().find(|argument| !argument.starts_with('-'));
    for (name, test) in TESTS {
        if wanted.is_none_or(|wanted| name.contains(wanted.as_str())) {
            test();
            println!("test {name} ... ok");
        }
    }
    match nix::unistd::geteuid().is_root() {
        true => again_as_an_ordinary_user(&arguments),
        false => ExitCode::SUCCESS,
    }
}

fn again_as_an_ordinary_user(arguments: &[String]) -> ExitCode {
    // Where the executable lies others may not come.
    let directory = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let copy = directory.path().join("stage");
    fs::copy("/proc/self/exe", &copy).unwrap();
    fs::set_permissions(&copy, mode(0o755)).unwrap();
    let status = Command::new(&copy)
        .args(arguments)
        .env("TMPDIR", "/tmp")
        .current_dir("/")
        .uid(ORDINARY_ID)
        .gid(ORDINARY_ID)
        .status()
        .unwrap();
    assert!(status.success(), "as an ordinary user: {status}");
    ExitCode::SUCCESS
}

fn mode(mode: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(mode)
}

fn order<'a>(stage: &'static str, given: Vec<Given<'a>>) -> Order<'a> {
    let deadline = Some(Instant::now() + Duration::from_secs(60));
    Order::new(stage, given, Limits { deadline, ..Limits::of_memory(64 * MIB) })
}

/// Copies its first file to its second, as often as it is asked to; answers with how much that was.
fn copy(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let times: usize = task.request()?;
    let mut from = fs::File::from(task.take(0)?);
    let mut to = fs::File::from(task.take(1)?);
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    for round in 0..times {
        to.write_all(&bytes)?;
        task.progress(&format!("round {round}"));
    }
    Ok((bytes.len() * times).to_string().into_bytes())
}

fn an_answer_comes_back_with_progress_and_output() {
    let (mut from, mut to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    from.write_all(b"abc").unwrap();
    from.rewind().unwrap();
    let mut lines = Vec::new();
    let mut order = order("t-copy", vec![Given::file(&from), Given::file(&to)]);
    order.limits.file_bytes = 100;
    let count: usize = order.run(&2, |line| lines.push(line.to_owned())).unwrap();
    assert_eq!((count, lines), (6, vec!["round 0".to_owned(), "round 1".to_owned()]));
    to.rewind().unwrap();
    assert_eq!(io::read_to_string(to).unwrap(), "abcabc");
}

/// Tries what a stage must not be able to; answers with what worked.
fn look(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let paths: Vec<String> = task.request()?;
    let mut open = Vec::new();
    open.extend(paths.into_iter().filter(|path| fs::read(path).is_ok()));
    let mut note = |what: &str, worked: bool| {
        if worked {
            open.push(what.to_owned());
        }
    };
    note("list /", fs::read_dir("/").is_ok());
    note("write /", fs::write("/x", "x").is_ok());
    note("connect", std::net::TcpStream::connect("127.0.0.1:1").is_ok());
    note("socket", std::net::UdpSocket::bind("127.0.0.1:0").is_ok());
    note("thread", std::thread::Builder::new().spawn(|| ()).is_ok());
    // SAFETY: fork(2) takes nothing; the child, were there one, ends at once.
    note(
        "fork",
        match unsafe { libc::fork() } {
            0 => unsafe { libc::_exit(0) },
            pid => pid > 0,
        },
    );
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at a place of the kernel's choice.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), 4096, executable, anonymous, -1, 0) };
    note("executable memory", mapped != libc::MAP_FAILED);
    let calls = [
        ("ptrace", libc::SYS_ptrace),
        ("unshare", libc::SYS_unshare),
        ("memfd_create", libc::SYS_memfd_create),
        ("keyctl", libc::SYS_keyctl),
        ("bpf", libc::SYS_bpf),
        ("io_uring_setup", libc::SYS_io_uring_setup),
        ("userfaultfd", libc::SYS_userfaultfd),
        ("perf_event_open", libc::SYS_perf_event_open),
        ("process_vm_readv", libc::SYS_process_vm_readv),
        ("openat", libc::SYS_openat),
        ("mount", libc::SYS_mount),
        ("setns", libc::SYS_setns),
        ("kill", libc::SYS_kill),
        ("setrlimit", libc::SYS_setrlimit),
        ("prlimit64", libc::SYS_prlimit64),
    ];
    for (name, number) in calls {
        // SAFETY: each fails on its arguments, all zero, if it is not refused before.
        let result = unsafe { libc::syscall(number, 0, 0, 0, 0, 0) };
        let refused = io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS);
        note(name, result != -1 || !refused);
    }
    Ok(serde_json::to_vec(&open).map_err(io::Error::from)?)
}

fn inside_there_is_nothing() {
    let paths = ["/etc/passwd", "/proc/self/status", "/proc/self/fd/0", "/dev/null", "/sys/kernel"];
    let found: Vec<String> = order("t-look", vec![]).run(&paths, |_| ()).unwrap();
    assert_eq!(found, Vec::<String>::new());
}

/// Opens what it is asked to, below the directory that it was given or, without one, anywhere.
fn below(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let (path, write): (String, bool) = task.request()?;
    let directory: Option<OwnedFd> = task.take(0).ok();
    let flags = if write { libc::O_CREAT | libc::O_WRONLY } else { libc::O_RDONLY };
    let flags = nix::fcntl::OFlag::from_bits_truncate(flags);
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
    let opened = match &directory {
        Some(directory) => nix::fcntl::openat(directory, path.as_str(), flags, mode),
        None => nix::fcntl::open(path.as_str(), flags, mode),
    };
    let answer = match opened {
        Ok(file) if write => fs::File::from(file).write_all(b"x").map(|()| String::new()),
        Ok(file) => io::read_to_string(fs::File::from(file)),
        Err(errno) => Err(errno.into()),
    };
    let answer = answer.map_err(|error| error.to_string());
    Ok(serde_json::to_vec(&answer).map_err(io::Error::from)?)
}

fn what_is_shown_can_be_read_and_no_more() {
    let mut order = order("t-below", vec![]);
    order.limits.file_bytes = 100;
    order.shown = ["/etc/passwd", "/etc/alternatives"].map(Shown::read_only).to_vec();
    let open = |path: &str, write: bool| -> Result<String, String> {
        order.run(&(path, write), |_| ()).unwrap()
    };
    assert_eq!(open("/etc/passwd", false), Ok(fs::read_to_string("/etc/passwd").unwrap()));
    assert!(open("/etc/passwd", true).is_err() && open("/etc/alternatives/x", true).is_err());
    assert!(open("/etc/hostname", false).is_err() && open("/etc/x", true).is_err());
}

fn below_a_directory_is_what_was_granted() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a"), "a").unwrap();
    let opened = fs::File::open(directory.path()).unwrap();
    let attempt = |path: &str, write: bool, access, keeps_id| -> Result<String, String> {
        let mut order = order("t-below", vec![Given::directory(&opened, access)]);
        (order.limits.file_bytes, order.keeps_id) = (100, keeps_id);
        order.run(&(path, write), |_| ()).unwrap()
    };
    assert_eq!(attempt("a", false, PathAccess::Read, true), Ok("a".to_owned()));
    assert_eq!(attempt("b", true, PathAccess::Write, true), Ok(String::new()));
    assert_eq!(fs::read(directory.path().join("b")).unwrap(), b"x");
    // Another user, where there is one to become.
    let is_root = nix::unistd::geteuid().is_root();
    assert_eq!(attempt("c", true, PathAccess::Write, false).is_err(), is_root);
    assert!(attempt("../etc/passwd", false, PathAccess::Write, true).is_err());
    if exocell_vmm::jail::landlock_abi().is_some() {
        assert!(attempt("d", true, PathAccess::Read, true).is_err());
    }
}

/// Says that it is there, and stays.
fn hold(task: &mut Task) -> Result<Vec<u8>, Fault> {
    task.progress("here");
    loop {
        let mut byte = [0];
        // Nothing comes; the caller's end is the end of this.
        if !matches!(task.stream().read(&mut byte), Ok(1..)) {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

/// The host's pids of processes of this name.
fn named(name: &str) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().next() == Some(&format!("Name:\t{name}")) && !status.contains("State:\tZ")
    };
    pids.filter(is).collect()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn from_outside_it_has_no_rights() {
    let running = order("t-hold", vec![]).start(&()).unwrap();
    wait_until("the stage", || named("t-hold").len() == 1);
    let pid = named("t-hold")[0];
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let has = |line: &str| assert!(status.lines().any(|found| found == line), "{line}: {status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        has(&format!("{set}:\t0000000000000000"));
    }
    has("NoNewPrivs:\t1");
    has("Seccomp:\t2");
    has("Threads:\t1");
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:\t")).unwrap();
    let is_root = nix::unistd::geteuid().is_root();
    assert!(!is_root || ids.split('\t').all(|id| id.parse::<u32>().unwrap() > 1_000_000), "{ids}");
    if is_root {
        for kind in ["user", "pid", "mnt", "net", "ipc", "uts"] {
            let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
            assert_ne!(of(&pid.to_string()), of("self"), "{kind}");
        }
        assert_eq!(fs::read_dir(format!("/proc/{pid}/root")).unwrap().count(), 0);
        // Twice the pipe of its words, the socket, and the warden's sign of life.
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        assert!(descriptors <= 5, "{descriptors}");
        assert_eq!(fs::read(format!("/proc/{pid}/environ")).unwrap(), b"");
    }
    drop(running);
    assert_eq!(named("t-hold"), Vec::<i32>::new());
}

/// Fails in the way that is asked for.
fn fault(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let how: String = task.request()?;
    match how.as_str() {
        "refuse" => Err(Fault::Input("no \x1b[31mred".to_owned())),
        "panic" => panic!("this is a \x1b[31mbug"),
        "abort" => std::process::abort(),
        "exit" => std::process::exit(3),
        "protocol" => {
            let _ = task.stream().write_all(&[9; 64]);
            Ok(Vec::new())
        }
        "memory" => {
            let mut held: Vec<Vec<u8>> = Vec::new();
            loop {
                held.push(vec![1; 1 << 20]);
            }
        }
        "stack" => Ok(vec![deep(0) as u8]),
        "spin" => loop {
            std::hint::spin_loop();
        },
        "answer" => Ok(vec![0; 2 << 20]),
        "sleep" => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        "write" => {
            let mut file = fs::File::from(task.take(0)?);
            loop {
                file.write_all(&[0; 4096])?;
            }
        }
        other => Err(Fault::Jail(other.to_owned())),
    }
}

#[allow(unconditional_recursion)]
fn deep(level: u64) -> u64 {
    let here = std::hint::black_box([level; 64]);
    deep(level + 1) + here[0]
}

fn failing(how: &str) -> StageError {
    order("t-fault", vec![]).run_for_bytes(&how, || (), |_| ()).unwrap_err()
}

fn who_is_at_fault_is_told_apart() {
    let error = failing("refuse");
    assert!(
        matches!(&error, StageError::Refused(words) if words == "no \\u{1b}[31mred"),
        "{error}"
    );
    for (how, words) in [
        ("panic", "ended with status 101"),
        ("abort", "was killed by signal"),
        ("exit", "ended with status 3"),
        ("protocol", "broke the protocol"),
        ("stack", "was killed by signal"),
    ] {
        let error = failing(how);
        assert!(matches!(error, StageError::Died { .. }), "{how}: {error}");
        let text = error.to_string();
        assert!(text.contains(words) && text.contains("`t-fault`"), "{how}: {text}");
        assert!(!text.contains('\x1b'), "{how}: {text}");
    }
    assert!(matches!(failing("unknown"), StageError::Start { .. }));
    let unknown = Order::new("t-unknown", vec![], Limits::of_memory(MIB));
    assert!(unknown.run::<()>(&(), |_| ()).is_err());
}

fn limits_end_what_does_not_keep_to_them() {
    assert!(matches!(failing("memory"), StageError::Memory { bytes, .. } if bytes == 64 * MIB));
    assert!(matches!(failing("answer"), StageError::Output { bytes, .. } if bytes == MIB));
    let file = tempfile::tempfile().unwrap();
    let mut writing = order("t-fault", vec![Given::file(&file)]);
    writing.limits.file_bytes = 100 << 10;
    let error = writing.run::<()>(&"write", |_| ()).unwrap_err();
    assert!(matches!(error, StageError::Output { bytes, .. } if bytes == 100 << 10), "{error}");
    assert_eq!(file.metadata().unwrap().len(), 100 << 10);
    for how in ["spin", "sleep"] {
        let mut late = order("t-fault", vec![]);
        late.limits.deadline = Some(Instant::now() + Duration::from_millis(200));
        let error = late.run::<()>(&how, |_| ()).unwrap_err();
        assert!(matches!(error, StageError::Deadline { .. }), "{how}: {error}");
    }
    assert_eq!(named("t-fault"), Vec::<i32>::new());
}

fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
}

fn one_that_is_killed_is_told() {
    let order = order("t-hold", vec![]);
    let killed = |_: &str| named("t-hold").into_iter().for_each(kill);
    let error = order.run::<()>(&(), killed).unwrap_err();
    assert!(error.to_string().contains("was killed by signal 9"), "{error}");
}

fn a_dead_warden_or_caller_leaves_nothing() {
    for of_warden in [true, false] {
        let mut caller =
            Command::new("/proc/self/exe").arg(HOLD).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0; 5];
        caller.stdout.take().unwrap().read_exact(&mut line).unwrap();
        assert_eq!(&line, b"here\n");
        let stage = named("t-hold");
        assert_eq!(stage.len(), 1);
        kill(if of_warden { parent(stage[0]) } else { caller.id() as i32 });
        wait_until("the stage's end", || !Path::new(&format!("/proc/{}", stage[0])).exists());
        let status = caller.wait().unwrap();
        assert_eq!(status.signal(), (!of_warden).then_some(libc::SIGKILL));
        assert_eq!(named("t-hold"), Vec::<i32>::new());
    }
}

fn parent(pid: i32) -> i32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t")).unwrap();
    parent.parse().unwrap()
}

fn many_threads_order_at_once() {
    let threads: Vec<_> = (0..8)
        .map(|_| {
            std::thread::spawn(|| {
                for _ in 0..8 {
                    let error = failing("refuse");
                    assert!(matches!(error, StageError::Refused(_)), "{error}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let zombies = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    assert_eq!(zombies, "");
}

/// Says again what it hears.
fn worker(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let mut bytes = [0; 64];
    loop {
        match task.stream().read(&mut bytes) {
            Ok(count @ 1..) => task.stream().write_all(&bytes[..count])?,
            _ => return Ok(Vec::new()),
        }
    }
}

fn a_worker_speaks_until_it_is_let_go() {
    let mut order = order("t-worker", vec![]);
    order.network = HostNetwork::Kept;
    let running = order.start(&()).unwrap();
    let mut stream = running.stream();
    for word in [b"one", b"two"] {
        stream.write_all(word).unwrap();
        let mut echo = [0; 3];
        stream.read_exact(&mut echo).unwrap();
        assert_eq!(&echo, word);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(running.wait(), "ended with status 0");
}
