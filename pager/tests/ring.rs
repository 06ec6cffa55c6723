//! The Pager's ring with a second process as the guest: a program in C that has nothing
//! but the header, the ring, the doorbell and its memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use exocell_pager::ring::{ENTRIES, PAGES_MAX, Ring, RingError};
use exocell_pager::{Account, Backing, Credit, Figures, Member, Standing, allocated_bytes};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use tempfile::TempDir;

const PAGE: u64 = 4096;
const MEMORY_PAGES: u64 = 1 << 17;
const LIMIT_PAGES: u64 = 1024;
/// Nothing takes longer, on a machine that is busy too.
const LIMIT: Duration = Duration::from_secs(60);

/// The C header's names.
const ASK: u64 = 1;
const GIVE: u64 = 2;
const BIND: u64 = 4;
const UNBIND: u64 = 5;

/// The guest's process and what the host has for it.
struct Guest {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    memory: File,
    ring: Ring,
    backing: Backing,
    _folder: TempDir,
}

impl Guest {
    fn new(member: Option<Member>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let program = compile(folder.path());
        let memory = File::from(memfd_create("guest", MFdFlags::empty()).expect("a memory file"));
        memory.set_len(MEMORY_PAGES * PAGE).expect("its size");
        let ring = Ring::new().expect("a ring");
        let credit = Credit::new(Account::new(0, LIMIT_PAGES * PAGE), member);
        let backing = Backing::new(memory.try_clone().expect("dup"), credit).expect("a backing");
        let fds = [ring.memory().as_fd(), ring.doorbell(), memory.as_fd()];
        let mut command = Command::new(program);
        command.args(fds.map(inherited)).arg((MEMORY_PAGES * PAGE).to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output, memory, ring, backing, _folder: folder }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("it listens");
    }

    fn hear(&mut self) -> u64 {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it answers");
        line.trim().parse().expect("a number")
    }

    /// Serves what it rings for, once; the turns that took.
    fn serve(&mut self) -> Result<u32, RingError> {
        assert!(self.ring.await_ring(LIMIT)?, "the doorbell is rung");
        let mut turns = 1;
        while self.ring.serve(&mut self.backing)? {
            turns += 1;
        }
        Ok(turns)
    }

    /// The answer to one request.
    fn ask(&mut self, kind: u64, first: u64, pages: u64) -> u64 {
        self.tell(&format!("put {kind} {first} {pages}"));
        self.serve().expect("it keeps to the protocol");
        self.hear()
    }

    /// What was in a page that the guest wrote to.
    fn touch(&mut self, page: u64) -> u64 {
        self.tell(&format!("touch {page}"));
        self.hear()
    }

    fn held_pages(&self) -> u64 {
        allocated_bytes(&self.memory).expect("its blocks") / PAGE
    }

    /// What the host says when it serves what breaks the protocol.
    fn broken(&mut self, line: &str) -> String {
        self.tell(line);
        let error = self.serve().expect_err("it is refused");
        assert!(matches!(error, RingError::Broken(_)), "{error}");
        error.to_string()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compile(folder: &Path) -> std::path::PathBuf {
    let program = folder.join("guest");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root.join("include"));
    gcc.arg("-o").arg(&program).arg(root.join("tests/guest/guest.c"));
    assert!(gcc.status().expect("gcc is there").success());
    program
}

/// A descriptor as an argument; the next child has it too.
fn inherited(fd: BorrowedFd) -> String {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).expect("fcntl");
    fd.as_raw_fd().to_string()
}

#[test]
fn pages_are_bound_and_unbound_and_counted() {
    let mut guest = Guest::new(None);
    assert_eq!(guest.ask(BIND, 16, 32), 32);
    assert_eq!(guest.held_pages(), 32);
    assert_eq!((guest.touch(20), guest.touch(20)), (0, 7));
    assert_eq!(guest.held_pages(), 32);
    assert_eq!(guest.ask(UNBIND, 16, 8), 8);
    assert_eq!(guest.held_pages(), 24);
    // A page that comes back is another one.
    assert_eq!((guest.ask(BIND, 16, 8), guest.touch(20)), (8, 0));
    let told = Figures { bound: 32, peak: 32, binds: 40, unbinds: 8, refused: 0 };
    assert_eq!(guest.backing.figures(), told);
}

#[test]
fn a_limit_is_refused_and_everything_left_as_it_was() {
    let mut guest = Guest::new(None);
    assert_eq!(guest.ask(BIND, 0, LIMIT_PAGES - 8), LIMIT_PAGES - 8);
    assert_eq!(guest.ask(BIND, 5000, 9), 0);
    assert_eq!((guest.held_pages(), guest.backing.figures().refused), (LIMIT_PAGES - 8, 1));
    // Credit comes of the same account: what is touched within it is no surprise.
    assert_eq!(guest.ask(ASK, 0, 100), 8);
    assert_eq!(guest.touch(6000), 0);
    assert!(guest.backing.check().expect("its blocks").is_ok());
    // What is bound costs credit, whatever the guest says.
    assert_eq!(guest.ask(GIVE, 0, 5000), 0);
    assert_eq!(guest.ask(BIND, 5000, 9), 0);
    // And what was touched without any is noticed.
    let told = guest.backing.check().expect("its blocks").expect_err("a page too many");
    assert!(told.to_string().contains("were granted"), "{told}");
    assert_eq!(guest.ask(UNBIND, 6000, 1), 1);
    assert_eq!(guest.ask(UNBIND, 0, 1), 1);
    assert_eq!(guest.ask(BIND, 5000, 9), 9);
    assert!(guest.backing.check().expect("its blocks").is_ok());
}

#[test]
fn a_batch_needs_one_ring_and_takes_turns() {
    let mut guest = Guest::new(None);
    guest.tell(&format!("many {ENTRIES} {BIND} 0 1"));
    assert_eq!(guest.serve().expect("it keeps to the protocol"), 1);
    assert_eq!(guest.hear(), u64::from(ENTRIES));
    assert_eq!(guest.held_pages(), u64::from(ENTRIES));
    // Around the end of the ring, more than once.
    for _ in 0..5 {
        guest.tell(&format!("many 100 {UNBIND} 0 1"));
        guest.serve().expect("it keeps to the protocol");
        assert_eq!(guest.hear(), 100);
    }
    assert_eq!(guest.held_pages(), u64::from(ENTRIES) - 100);
    // What would keep others waiting is done in turns.
    guest.tell(&format!("many 4 {UNBIND} 0 {PAGES_MAX}"));
    assert_eq!(guest.serve().expect("it keeps to the protocol"), 2);
    assert_eq!(guest.hear(), 4 * PAGES_MAX);
    assert_eq!((guest.held_pages(), guest.backing.figures().bound), (0, 0));
}

#[test]
fn credit_is_of_the_budget_of_all_cells() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("budget");
    Standing::set(&path, 64 * PAGE).expect("a budget");
    let mut first = Guest::new(Member::join(&path, 0, 0).expect("a budget"));
    let mut second = Guest::new(Member::join(&path, 0, 0).expect("a budget"));
    assert_eq!(first.ask(BIND, 0, 60), 60);
    assert_eq!(second.ask(BIND, 0, 8), 0);
    assert_eq!(first.ask(UNBIND, 0, 60), 60);
    assert_eq!(second.ask(BIND, 0, 8), 8);
    drop(first);
    let left = Standing::read(&path).expect("a budget").expect("it was set").left();
    assert_eq!(left, 56 * PAGE);
}

#[test]
fn who_breaks_the_protocol_is_told_apart() {
    for (line, words) in [
        (format!("skip {}", ENTRIES + 1), "more requests than entries"),
        ("put 3 0 1".to_owned(), "an unknown request"),
        (format!("put {BIND} {MEMORY_PAGES} 1"), "not in its memory"),
        (format!("put {UNBIND} 0 {}", PAGES_MAX + 1), "too long"),
        (format!("put {ASK} 1 1"), "an unknown request"),
    ] {
        let mut guest = Guest::new(None);
        assert_eq!(guest.ask(BIND, 1, 1), 1);
        let told = guest.broken(&line);
        assert!(told.contains(words), "{line}: {told}");
        assert_eq!(guest.held_pages(), 1);
    }
}
