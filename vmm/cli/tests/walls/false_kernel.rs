//! What holds when the guest kernel itself is the enemy, or just broken: a
//! program of the test's stands in its place.

use exocell_cell::vmm::jail::group;
use exocell_cell::vmm::limits::Limits;

use crate::common::Finished;
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::host;

fn console(root: &PrivateRoot, name: &str) -> String {
    let shown: Finished = root.run(["logs", "--console", name]).ok();
    shown.text().to_owned()
}

#[test]
fn the_deadline_ends_a_guest_that_never_comes_up() {
    let root = PrivateRoot::with_kernel("int main(void) { for (;;) ; }");
    let ended = root.run_cell(&["--timeout", "1s"], &["true"]).exited(137);
    ended.complains_of(&["deadline"]);
    root.holds_no_cells();
}

#[test]
fn a_guest_kernel_cannot_make_processes_without_end() {
    let root = PrivateRoot::with_kernel(
        r#"#include <stdio.h>
#include <signal.h>
#include <unistd.h>
int main(void) {
    int made = 0;
    for (;;) {
        int pid = fork();
        if (pid < 0) break;
        if (pid == 0) for (;;) sleep(1000);
        made++;
    }
    fprintf(stderr, "made %d processes\n", made);
    return 0;
}"#,
    );
    let flags = ["--name", "forks", "--pids-limit", "20"];
    let fixed = ["run"];
    let ended = root.run([&fixed[..], &flags, &[TINY, "true"]].concat()).exited(125);
    ended.complains_of(&["did not boot"]);
    let console = console(&root, "forks");
    let made =
        console.lines().find_map(|line| line.strip_prefix("made ")?.strip_suffix(" processes"));
    let made: u32 = made.and_then(|made| made.parse().ok()).unwrap_or_else(|| panic!("{console}"));
    assert!((40..=300).contains(&made), "twice 20 and what a guest kernel needs, not {made}");
}

/// Whoever grants a guest memory believes nothing that its kernel says.
#[test]
fn a_guest_kernel_that_takes_more_than_its_credit_is_ended() {
    let misdeeds = [
        ("take();", "were granted"),
        ("say(2, ~0ull); take();", "were granted"),
        ("say(1, ~0ull); say(2, 32000); take();", "were granted"),
        ("close(lender); take();", "were granted"),
        ("write(lender, \"x\", 1);", "protocol"),
        ("say(3, 1);", "protocol"),
    ];
    for (misdeed, complaint) in misdeeds {
        let root = PrivateRoot::with_kernel(&KERNEL_WITH_CREDIT.replace("MISDEED", misdeed));
        let ended = root.run_cell(&["--pager", "credit", "--memory", "128m"], &["true"]);
        ended.exited(125).complains_of(&["did not boot", complaint]);
        root.holds_no_cells();
    }
}

const KERNEL_WITH_CREDIT: &str = r#"#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
static int memory = -1, lender = -1;
static void take(void) { fallocate(memory, FALLOC_FL_KEEP_SIZE, 0, 120 << 20); }
static void say(unsigned kind, unsigned long long pages) {
    struct { unsigned kind, zero; unsigned long long pages; } message = { kind, 0, pages };
    write(lender, &message, sizeof(message));
}
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        sscanf(argv[i], "physmem_fd=%d", &memory);
        sscanf(argv[i], "pager_fd=%d", &lender);
    }
    MISDEED
    for (;;) sleep(1);
}"#;

/// Where the host has a control group for it, nothing that a guest kernel can take escapes
/// from it.
#[test]
fn what_a_guest_kernel_takes_beside_its_memory_is_bounded() {
    if let Err(why) = group::offered() {
        return eprintln!("not tested: {why}");
    }
    let most = Limits::new(64 << 20, 20);
    for (what, take) in TAKEN {
        let source = format!("{TAKER}static long take(void) {{ {take} }}{TAKER_MAIN}");
        let root = PrivateRoot::with_kernel(&source);
        let flags = ["--name", "taker", "--memory", "64m", "--pids-limit", "20"];
        let fixed = ["run", "--timeout", "120s"];
        let ended = root.run([&fixed[..], &flags, &[TINY, "true"]].concat());
        let console = console(&root, "taker");
        let taken = console.lines().filter_map(taken_kib).max().unwrap_or(0);
        eprintln!("{what}: {} MiB; {}", taken >> 10, ended.stderr.trim());
        assert!(taken > 256, "{what}: {console}");
        // What a process had that was ended is there for others until the last one hears of it.
        assert!(taken << 10 <= most.bytes_max() * 5 / 4, "{what}: {console}");
        let why =
            if what == "processes" { "did not boot" } else { "all of the 141 MiB of the host" };
        ended.exited(125).complains_of(&["did not boot", why]);
        let record = root.run(["inspect", "--json", "taker"]).ok().one();
        let id = record["id"].as_str().expect("an id");
        assert!(!host::has_control_group(id), "{what}: the group of {id} stays");
    }
}

/// This holds without a control group, too.
#[test]
fn the_private_memory_of_a_guest_kernels_process_is_bounded() {
    let take = "return fill(MAP_PRIVATE | MAP_ANONYMOUS, -1);";
    let source = format!("{TAKER}static long take(void) {{ {take} }}{TAKER_ALONE}");
    let root = PrivateRoot::with_kernel(&source);
    root.run(["run", "--name", "taker", TINY, "true"]).exited(125).complains_of(&["did not boot"]);
    let console = console(&root, "taker");
    let taken: Option<u64> = console.lines().find_map(taken_kib);
    assert!(taken.is_some_and(|kib| kib <= 16 << 10), "{console}");
}

/// What reaches others that have its user id, or that nothing counts: the filter has an answer
/// before the host's rights are asked.
#[test]
fn a_guest_kernel_reaches_nothing_that_is_not_its_own() {
    let root = PrivateRoot::with_kernel(
        r#"#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
static void tried(const char *what, long result) {
    fprintf(stderr, "%s: %s\n", what, result < 0 ? strerror(errno) : "done");
}
int main(void) {
    struct rlimit one = { 1, 1 };
    int initramfs = open("/initramfs", O_RDONLY);
    tried("limits of its supervisor", prlimit(1, RLIMIT_NOFILE, &one, NULL));
    tried("a lease", fcntl(initramfs, F_SETLEASE, F_RDLCK));
    tried("a lock", fcntl(initramfs, F_OFD_SETLK, &(struct flock){ .l_type = F_RDLCK }));
    tried("a file of huge pages", memfd_create("huge", MFD_HUGETLB));
    tried("huge pages", (long)mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0));
    tried("a session", setsid());
    tried("strict calls", prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0));
    tried("its own limits", prlimit(0, RLIMIT_CORE, NULL, &one));
    return 0;
}"#,
    );
    root.run(["run", "--name", "reach", TINY, "true"]).exited(125).complains_of(&["did not boot"]);
    let console = console(&root, "reach");
    let tried: Vec<(&str, &str)> =
        console.lines().filter_map(|line| line.trim().split_once(": ")).collect();
    let refused: Vec<&str> = tried
        .iter()
        .filter(|(_, how)| *how == "Function not implemented")
        .map(|one| one.0)
        .collect();
    let reached: Vec<&str> =
        tried.iter().filter(|(_, how)| *how == "done").map(|one| one.0).collect();
    assert_eq!(reached, ["its own limits"], "{console}");
    assert_eq!(refused.len(), 7, "{console}");
}

fn taken_kib(line: &str) -> Option<u64> {
    line.trim().strip_prefix("took ")?.strip_suffix(" KiB")?.parse().ok()
}

/// What a guest kernel tries to have without an end, and how it takes some of it: KiB, or
/// nothing when there is no more.
const TAKEN: [(&str, &str); 7] = [
    ("private memory", "return fill(MAP_PRIVATE | MAP_ANONYMOUS, -1);"),
    ("shared memory", "return fill(MAP_SHARED | MAP_ANONYMOUS, -1);"),
    ("memory files", "return fill(MAP_SHARED, file());"),
    ("pipes", "return filled(pipe2(ends, O_NONBLOCK));"),
    ("sockets", "return filled(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends));"),
    ("page tables", "return tables();"),
    ("processes", "return sleeper();"),
];

const TAKER: &str = r#"#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#define MIB (1L << 20)
static int ends[2];
static long fill(int flags, int fd) {
    char *at = mmap(0, MIB, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) close(fd);
    if (at == MAP_FAILED) return 0;
    for (long i = 0; i < MIB; i += 4096) at[i] = 1;
    return MIB >> 10;
}
static int file(void) {
    int fd = memfd_create("taken", 0);
    if (fd >= 0 && ftruncate(fd, MIB)) { close(fd); return -1; }
    return fd;
}
static long filled(int failed) {
    static char data[65536];
    long bytes = 0, n;
    if (failed) return 0;
    while ((n = write(ends[1], data, sizeof(data))) > 0) bytes += n;
    return bytes >> 10;
}
/* Pages 2 MiB apart, each with a page table of its own */
static long tables(void) {
    static char *next = (char *)0x100000000000;
    static int page = -1;
    if (page < 0) page = file();
    for (int i = 0; i < 256; i++, next += 2 * MIB) {
        if (mmap(next, 4096, PROT_READ, MAP_SHARED | MAP_FIXED, page, 0) == MAP_FAILED) return 0;
        (void)*(volatile char *)next;
    }
    return MIB >> 10;
}
static long sleeper(void) {
    int pid = fork();
    if (pid == 0) for (;;) sleep(1000);
    return pid < 0 ? 0 : 32;
}
"#;

const TAKER_ALONE: &str = r#"
int main(void) {
    long taken = 0, more;
    while ((more = take()) > 0) taken += more;
    fprintf(stderr, "took %ld KiB\n", taken);
    return 1;
}"#;

/// Takes in one process after another, until no more can be made or one of them was ended.
const TAKER_MAIN: &str = r#"
static void ended(int signal) { write(2, "one was ended\n", 14); _exit(1); }
int main(void) {
    long *taken = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), more;
    int full[2], pid;
    char byte;
    if (taken == MAP_FAILED || pipe2(full, 0)) return 2;
    signal(SIGCHLD, ended);
    while ((pid = fork()) >= 0) {
        if (pid > 0) {
            read(full[0], &byte, 1);
            continue;
        }
        signal(SIGCHLD, SIG_DFL);
        while ((more = take()) > 0) {
            *taken += more;
            fprintf(stderr, "took %ld KiB\n", *taken);
        }
        write(full[1], "x", 1);
        for (;;) sleep(1000);
    }
    fprintf(stderr, "no more processes\n");
    return 1;
}"#;
