//! `--intra none`: programs of a cell in one address space with its guest kernel.

use std::process::Command;

use crate::common::cell::{Cell, pid};
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::{IMAGE, eventually, finish, host, run, shell};

const NONE: &[&str] = &["--intra", "none"];
const ASPACE: &[&str] = &["--intra", "aspace"];

/// Four processes compute the same, in general and floating point registers, while
/// a clock interrupts them and each other; then the sums are compared.
const REGISTERS: &str = r#"cd /root && cat > registers.c <<'C'
#include <signal.h>
#include <stdio.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile double noise;
static volatile int ticks;
static volatile unsigned long one = 1;
static void on_tick(int n) { (void)n; noise = noise * 1.5 + 3.25; ticks++; }
static double compute(void) {
    double a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    unsigned long x = one, y = 2, z = 3;
    for (int i = 0; i < 20000000; i++) {
        a = a * 0.5 + b; b = b * 0.25 + c; c = c * 0.125 + d;
        d = d * 0.5 + e; e = e * 0.25 + f; f = f * 0.5 + 1;
        x = x * 6364136223846793005UL + y; y ^= x >> 7; z += y * x;
    }
    return a + b + c + d + e + f + (double)(x ^ y ^ z);
}
int main(void) {
    struct itimerval often = { { 0, 1000 }, { 0, 1000 } };
    double first = compute(), sum;
    int pipes[2], right = 0;
    pipe(pipes);
    for (int n = 0; n < 4; n++)
        if (fork() == 0) {
            signal(SIGALRM, on_tick);
            setitimer(ITIMER_REAL, &often, 0);
            sum = compute();
            write(pipes[1], &sum, sizeof(sum));
            _exit(ticks == 0);
        }
    for (int n = 0, status; n < 4; n++)
        right += wait(&status) > 0 && status == 0 &&
                 read(pipes[0], &sum, sizeof(sum)) == sizeof(sum) && sum == first;
    printf("%d\n", right);
    return 0;
}
C
gcc -O1 -o registers registers.c && ./registers"#;

#[test]
fn registers_are_kept_while_processes_and_signals_take_turns() {
    for vcpus in ["1", "2"] {
        let words = [NONE, &["--cpus", vcpus]].concat();
        assert_eq!(shell(&words, REGISTERS).ok().text(), "4", "{vcpus} vCPUs");
    }
}

#[test]
fn programs_do_not_notice_that_their_calls_are_jumps() {
    let programs = Programs::new().compile("gates", "gates", &["-static"]).compile(
        "gates",
        "gates-pie",
        &["-static-pie"],
    );
    for program in ["gates", "gates-pie"] {
        let native = finish(&mut Command::new(programs.path(program)), b"").ok();
        assert!(native.text().lines().all(|line| line.ends_with(": ok")), "{}", native.text());
        let in_cell = format!("{FOLDER_IN_CELL}/{program}");
        for (vcpus, mode) in [("1", NONE), ("2", NONE), ("1", ASPACE), ("2", ASPACE)] {
            let fixed = ["run", "--rm", "--cpus", vcpus, "-v", &programs.volume()];
            let cell = run([&fixed, mode, &[IMAGE, &in_cell]].concat());
            assert_eq!(cell.ok().text(), native.text(), "{program}, {vcpus} vCPUs, {mode:?}");
        }
    }
}

#[test]
fn nearly_all_calls_of_real_programs_are_jumps() {
    let script = "cd /root && for n in 1 2 3; do
python3 -c 'import json, os; [os.stat(\"/etc\") for n in range(2000)]'
git init -q r$n && cd r$n && git config user.email a@b && git config user.name n
seq 500 | split -l 1 && git add . && git commit -qm first && git status && git log --stat && cd ..
echo 'int main(void) { return 0; }' > a.c && gcc -o a a.c && ./a
node -e 'for (let n = 0; n < 2000; n++) fs.statSync(\"/etc\")'
done > /dev/null";
    for mode in [NONE, ASPACE] {
        let cell = Cell::idle("gates", mode);
        cell.shell(script).ok();
        let stats = cell.verb(&["stats", "--json"]).ok().json();
        let gates = &stats["guest_claims"]["gates"];
        let count =
            |name: &str| gates[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"));
        assert!(count("gated_count") > 19 * count("trapped_count"), "{mode:?}: {gates}");
        assert!(count("site_count") > 50, "{mode:?}: {gates}");
    }
}

#[test]
fn programs_run_threads_processes_and_tools() {
    let script = "cd /root && python3 - <<'P'
import multiprocessing, subprocess, threading
seen = []
threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
with multiprocessing.Pool(3) as pool:
    total = sum(pool.map(abs, range(-20, 0)))
print(len(seen), total, subprocess.check_output(['echo', 'hi']))
P
git init -q r && cd r && git config user.email a@b && git config user.name n
echo one > f && git add f && git commit -qm first && git fsck 2>&1 && git log --format=%s
sqlite3 /root/a.db 'create table t(x); insert into t values (42); select x from t; pragma integrity_check'";
    assert_eq!(shell(NONE, script).ok().text(), "20 210 b'hi\\n'\nfirst\n42\nok");
}

#[test]
fn a_program_that_goes_wrong_ends_alone() {
    let cell = Cell::idle("none", NONE);
    let script = "python3 -c 'import ctypes; ctypes.string_at(8)'";
    cell.shell(script).exited(139);
    assert_eq!(cell.shell("echo on").ok().text(), "on");
}

#[test]
fn many_programs_at_once_all_answer() {
    let cell = Cell::idle("none", NONE);
    for _ in 0..3 {
        cell.answers_many_at_once();
    }
}

#[test]
fn the_memory_of_the_kernel_is_not_mapped_over() {
    // The first address of the guest kernel's image.
    let script = "python3 - <<'P'
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
at = libc.mmap(0x60000000, 4096, 3, 0x32, -1, 0)
print(at == ctypes.c_void_p(-1).value)
P";
    assert_eq!(shell(NONE, script).ok().text(), "True");
}

#[test]
fn it_is_shown_and_only_a_vm_has_it() {
    let cell = Cell::idle("none", NONE);
    assert_eq!(cell.inspect()["spec"]["intra"], "none");
    let default = Cell::idle("default", &[]);
    let expected = std::env::var("EXOCELL_INTRA").unwrap_or_else(|_| "aspace".to_owned());
    assert_eq!(default.inspect()["spec"]["intra"], expected);
    run(["run", "--rm", "--strength", "isolate", "--intra", "none", "module.wat"])
        .exited(125)
        .complains_of(&["isolate", "--intra"]);
}

#[test]
fn nothing_is_left_of_a_killed_guest_kernel() {
    let cell = Cell::idle("none", NONE);
    cell.shell("sleep 1000 & sleep 1000 & true").ok();
    let told = cell.inspect();
    let namespace = host::namespace(pid(&told, "supervisor_pid")).expect("a namespace of its own");
    assert!(host::processes(&namespace).len() > 3);
    host::kill(pid(&told, "guest_kernel_pid"));
    eventually("its processes are gone", || host::processes(&namespace).is_empty());
}

#[test]
fn the_loss_of_its_host_processes_ends_the_cell() {
    let cell = Cell::idle("none", NONE);
    let told = cell.inspect();
    let kernel = pid(&told, "guest_kernel_pid");
    let namespace = host::namespace(pid(&told, "supervisor_pid")).expect("a namespace of its own");
    let program = |pid: i32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let runs_the_kernel = |pid: &i32| *pid != kernel && program(*pid) == program(kernel);
    for process in host::processes(&namespace).into_iter().filter(runs_the_kernel) {
        host::kill(process);
    }
    eventually("the cell has ended", || cell.state() == "exited");
}
