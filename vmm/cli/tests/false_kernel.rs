//! What holds when the guest kernel itself is the enemy, or just broken: a
//! program of the test's stands in its place.

mod common;

use common::Finished;
use common::guest::PrivateRoot;

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
    let ended = root.run([&fixed[..], &flags, &[common::guest::TINY, "true"]].concat()).exited(125);
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
