//! Guest memory that comes from the host page for page, and goes back.

use std::process::Command;

use crate::common::cell::Cell;
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::docker::Server;
use crate::common::{IMAGE, LIMIT, Started, finish, run, until};

const MIB: u64 = 1 << 20;
const PROGRAM: &str = "pages";
/// What a program takes for a moment.
const BURST: &str = "python3 -c 'len(bytearray(200 << 20))'";
/// Takes memory in small pieces until there is no more.
const EATER: &str = "python3 -c 'x = [bytearray(1 << 16) for _ in range(8192)]'";
/// The Pager's, each with all that it promises.
const MODES: [&str; 2] = ["eager", "credit"];
/// Ways in which a program takes memory until there is none left.
const WAYS: [&str; 4] = ["anonymous", "tables", "slab", "forks"];

fn compiled() -> Programs {
    Programs::new().compile("pages", PROGRAM, &["-static"])
}

fn cell(word: &str, mode: &str) -> Cell {
    Cell::idle(word, &["--pager", mode, "--memory", "320m"])
}

/// A figure of the host's own.
#[track_caller]
fn counter(cell: &Cell, name: &str) -> u64 {
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    stats["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"))
}

#[track_caller]
fn claim(cell: &Cell, name: &str) -> u64 {
    let stats = cell.verb(&["stats", "--json"]).ok().json();
    stats["guest_claims"]["pager"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"))
}

/// Changes the limit; a slow machine takes more than one look for it.
#[track_caller]
fn apply(cell: &Cell, limit: &str) {
    let applied = || cell.verb(&["update", "--memory", limit]).ok().text().contains("applied");
    assert!(until(LIMIT, applied), "{}", cell.verb(&["stats", "--json"]).ok().text());
}

#[test]
fn what_programs_free_goes_back_at_once() {
    for mode in MODES {
        let cell = cell(mode, mode);
        cell.shell(BURST).ok();
        assert!(claim(&cell, "unbind_bytes") > 200 * MIB);
        let held = counter(&cell, "memory_allocated_bytes");
        assert!(held < 100 * MIB, "{mode}: the host still holds {held} bytes");
    }
}

/// Nobody asked for a Pager.
#[test]
fn memory_goes_back_by_itself_in_every_mode_by_every_door() {
    let given_back = |stats: &serde_json::Value| {
        let held = stats["counters"]["memory_allocated_bytes"].as_u64().expect("bytes");
        let unbound = stats["guest_claims"]["pager"]["unbind_bytes"].as_u64().expect("bytes");
        unbound > 200 * MIB && held < 100 * MIB
    };
    for intra in ["aspace", "none"] {
        let cell = Cell::idle("unasked", &["--memory", "320m", "--intra", intra]);
        cell.shell(BURST).ok();
        let stats = cell.verb(&["stats", "--json"]).ok().json();
        assert!(given_back(&stats), "{intra}: {stats}");
    }
    let server = Server::start();
    let flags = ["run", "-d", "--network", "none", "-m", "320m", "--name", "unasked"];
    server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    server.docker(&["exec", "unasked", "sh", "-c", BURST]).ok();
    let stats = finish(&mut server.exocell(&["stats", "--json", "unasked"]), b"").ok().json();
    assert!(given_back(&stats), "docker: {stats}");
}

/// Pages that are bound, but on the CPUs' lists, are for a guest that works.
#[test]
fn a_guest_that_rests_holds_no_free_pages() {
    let look = "import time\n\
                while int(open('/proc/pager').read().split('per_cpu ')[1].split()[0]): time.sleep(0.2)";
    for mode in MODES {
        let cell = cell("rests", mode);
        // The last to touch the lists may be one who frees, or one who fills them.
        for _ in 0..4 {
            finish(&mut cell.exec(&[], &["python3", "-c", look]), b"").ok();
        }
    }
}

/// What is in memory of a file goes while nobody reads it, and comes back from the disk.
#[test]
fn what_nobody_reads_goes_by_and_by() {
    let cell = cell("cold", "cold");
    let file = "/var/tmp/cold";
    cell.shell(&format!(
        "head -c 64M /dev/urandom > {file}; sync; sha256sum < {file} > {file}.sum"
    ))
    .ok();
    let held = || counter(&cell, "memory_allocated_bytes");
    let full = held();
    assert!(until(LIMIT, || held() + 8 * MIB < full), "still {} of {full} bytes", held());
    cell.shell(&format!("sha256sum < {file} | cmp - {file}.sum")).ok();
}

#[test]
fn without_the_pager_the_host_holds_the_highest_demand() {
    let cell = cell("off", "off");
    cell.shell(BURST).ok();
    let held = counter(&cell, "memory_allocated_bytes");
    assert!(held > 200 * MIB, "the host holds only {held} bytes");
    cell.verb(&["update", "--memory", "64m"]).complains_of(&["--pager"]);
}

#[test]
fn no_page_is_stale_shared_or_dirty() {
    let programs = compiled();
    let (volume, program) = (programs.volume(), format!("{FOLDER_IN_CELL}/{PROGRAM}"));
    let modes_and_vcpus = MODES.into_iter().flat_map(|mode| ["1", "2", "4"].map(|n| (mode, n)));
    for (mode, vcpus) in modes_and_vcpus {
        let flags = ["--cpus", vcpus, "--pager", mode, "--memory", "256m", "--volume", &volume];
        let words = [IMAGE, &program, "2", "150000000", "4"];
        let ended = run([&["run", "--rm"], &flags[..], &words].concat()).ok();
        let report = ended.text();
        assert!(report.ends_with("pages: ok"), "{mode}, {vcpus} vCPUs: {report}");
        assert_eq!(report.matches("pages were right").count(), 4, "{report}");
    }
}

/// 81,920 pages with a hole behind each, where the host allows a process 65,530 mappings by
/// default.
const PIECES: &str = "\
import mmap
m = mmap.mmap(-1, 640 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages = range(0, len(m), 4096)
for at in pages: m[at:at + 4] = (at >> 12).to_bytes(4, 'little')
for at in pages[::2]: m.madvise(mmap.MADV_DONTNEED, at, 4096)
for _ in range(2):
    for at in pages[1::2]: assert m[at:at + 4] == (at >> 12).to_bytes(4, 'little')
for at in pages[::2]: assert m[at] == 0";

/// The same by another process, which takes away every other page of a file that is mapped.
const HOLES: &str = "\
import mmap, os
size, none = 44000 << 12, mmap.mmap(-1, 55000 << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
file = os.memfd_create('shared')
os.ftruncate(file, size)
shared = mmap.mmap(file, size)
for at in range(0, size, 4096): shared[at] = 1
none.madvise(mmap.MADV_RANDOM)
assert not any(none[at] for at in range(0, len(none), 4096))
assert all(shared[at] for at in range(0, size, 4096))
ready, told = os.pipe()
if os.fork() == 0:
    for at in range(0, size, 8192): shared.madvise(mmap.MADV_REMOVE, at, 4096)
    os.write(told, b'.')
    os._exit(0)
os.read(ready, 1)
assert [shared[at] for at in range(0, size, 4096)] == [0, 1] * 22000";

/// A fault takes all of a new group; the host has what was written to.
#[test]
fn what_a_program_leaves_out_of_a_group_costs_the_host_nothing() {
    let sparse = "import mmap, time\n\
                  private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n\
                  memory = mmap.mmap(-1, 64 << 20, flags=private)\n\
                  for at in range(0, 64 << 20, 1 << 16): memory[at + (5 << 12)] = 1\n\
                  pages = int(open(\"/proc/self/statm\").read().split()[1])\n\
                  print(pages, flush=True)\n\
                  time.sleep(1000)";
    for intra in ["aspace", "none"] {
        let cell = Cell::idle("groups", &["--memory", "320m", "--intra", intra]);
        cell.shell("python3 -c 'import mmap, time'").ok();
        let before = counter(&cell, "memory_allocated_bytes");
        let line = format!(
            "python3 -c '{sparse}' > /dev/shm/pages &\n\
             until grep -q . /dev/shm/pages; do sleep 0.1; done; cat /dev/shm/pages"
        );
        let pages: u64 = cell.shell(&line).ok().text().trim().parse().expect("pages");
        let held = counter(&cell, "memory_allocated_bytes") - before;
        assert!(pages * 4096 >= 64 * MIB, "{intra}: only {pages} pages");
        assert!(held < 24 * MIB, "{intra}: {held} bytes");
    }
}

#[test]
fn memory_may_be_in_more_pieces_than_the_host_maps() {
    for (intra, vcpus) in [("aspace", "1"), ("aspace", "2"), ("none", "1")] {
        let flags = ["--intra", intra, "--cpus", vcpus, "--memory", "768m"];
        let words = [IMAGE, "python3", "-c", PIECES];
        run([&["run", "--rm"], &flags[..], &words].concat()).ok();
    }
}

#[test]
fn memory_may_be_divided_by_others_beyond_what_the_host_maps() {
    for (intra, vcpus) in [("aspace", "1"), ("aspace", "2"), ("none", "1")] {
        let flags = ["--intra", intra, "--cpus", vcpus, "--memory", "768m", "--user", "1000:1000"];
        let words = [IMAGE, "python3", "-c", HOLES];
        run([&["run", "--rm"], &flags[..], &words].concat()).ok();
    }
}

#[test]
fn the_program_that_looks_for_such_pages_finds_them() {
    let programs = compiled();
    let look = |misdeed: &[&str]| {
        let words = [&["1", "20000000", "2"], misdeed].concat();
        finish(Command::new(programs.path(PROGRAM)).args(words), b"")
    };
    look(&[]).ok();
    assert!(look(&["dirty"]).exited(1).text().contains("WRONG not zero"));
    assert!(look(&["shared"]).exited(1).text().contains("WRONG not ours"));
}

#[test]
fn the_limit_of_a_running_cell_changes_both_ways() {
    MODES.into_iter().for_each(limit_changes_both_ways);
}

#[track_caller]
fn limit_changes_both_ways(mode: &str) {
    let cell = cell("limit", mode);
    apply(&cell, "96m");
    assert_eq!(counter(&cell, "memory_limit_bytes"), 96 * MIB);
    // The guest's own OOM killer ends what wants more; the cell lives on.
    cell.shell(EATER).exited(137);
    assert!(counter(&cell, "memory_allocated_bytes") <= 96 * MIB);
    apply(&cell, "320m");
    cell.shell(BURST).ok();
    cell.verb(&["update", "--memory", "321m"]).complains_of(&["granted", "--memory"]);
    cell.verb(&["update", "--memory", "1m"]).complains_of(&["too few"]);
}

#[test]
fn a_limit_below_what_programs_use_is_kept_once_they_are_gone() {
    MODES.into_iter().for_each(limit_is_kept_later);
}

#[track_caller]
fn limit_is_kept_later(mode: &str) {
    let cell = cell("converge", mode);
    let holder = "x = b'x' * (200 << 20); open('/tmp/held', 'w').close(); input()";
    let mut held = Started::new(&mut cell.exec(&["-i"], &["python3", "-c", holder]));
    cell.shell("until [ -e /tmp/held ]; do sleep 0.1; done").ok();
    let told = cell.verb(&["update", "--memory", "128m"]).ok();
    assert!(told.text().contains("converging"), "{}", told.text());
    // Nobody is killed for a limit alone.
    cell.shell("echo alive; cat /usr/bin/* > /dev/null; ls -lR /usr/lib > /dev/null").ok();
    held.write(b"end\n");
    held.finish(LIMIT).expect("the holder ends").ok();
    let kept = || claim(&cell, "withheld_bytes") == claim(&cell, "withheld_target_bytes");
    assert!(until(LIMIT, kept), "{}", cell.verb(&["stats", "--json"]).ok().text());
    assert!(counter(&cell, "memory_allocated_bytes") <= 128 * MIB);
}

#[test]
fn memory_that_runs_out_is_the_guests_own_affair() {
    MODES.into_iter().for_each(memory_runs_out);
}

#[track_caller]
fn memory_runs_out(mode: &str) {
    let programs = Programs::new().compile("exhaust", "exhaust", &["-static"]);
    let volume = programs.volume();
    // It lowers its parent's oom_score_adj.
    let flags = ["--privileged", "--pager", mode, "--memory", "96m", "--volume", &volume];
    let cell = Cell::idle("exhaust", &flags);
    for (turn, way) in WAYS.into_iter().enumerate() {
        let ended = cell.shell(&format!("{FOLDER_IN_CELL}/exhaust {way}")).ok();
        assert_eq!(ended.text(), "oom", "{way}");
        assert_eq!(cell.shell("echo alive").ok().text(), "alive", "after {way}");
        let console = cell.verb(&["logs", "--console"]).ok();
        let reports = console.text().matches("ut of memory: Killed").count();
        assert!(reports > turn, "{way}: {}", console.text());
    }
    assert!(counter(&cell, "memory_allocated_bytes") <= 96 * MIB);
}

#[test]
fn files_in_memory_leave_some_to_programs() {
    MODES.into_iter().for_each(files_leave_some);
}

#[track_caller]
fn files_leave_some(mode: &str) {
    let cell = Cell::idle("tmpfs", &["--privileged", "--pager", mode, "--memory", "96m"]);
    cell.shell("mkdir /mnt/own && mount -t tmpfs -o size=100% none /mnt/own").ok();
    for at in ["/dev/shm", "/mnt/own"] {
        let full = cell.shell(&format!("cat /dev/zero > {at}/all")).exited(1);
        assert!(full.stderr.contains("No space left"), "{at}: {}", full.stderr);
        assert_eq!(cell.shell("echo alive").ok().text(), "alive");
    }
    cell.shell("rm /dev/shm/all /mnt/own/all").ok();
    // Memory that is shared without a file system can outlive programs too (shmget).
    let fill = "at = mmap.mmap(-1, 72 << 20); [at.write(bytes(1 << 16)) for _ in range(1152)]";
    cell.shell(&format!("python3 -c 'import mmap; {fill}'")).exited(128 + 7);
    assert_eq!(cell.shell("echo alive").ok().text(), "alive");
    assert!(counter(&cell, "memory_allocated_bytes") <= 96 * MIB);
}

/// The file systems in memory that a cell begins with, all of them full.
#[test]
fn files_in_memory_leave_some_to_programs_without_the_pager_too() {
    for memory in ["48m", "96m"] {
        let cell = Cell::idle("small", &["--pager", "off", "--memory", memory, "--read-only"]);
        for at in ["/dev", "/dev/shm", "/tmp", "/run"] {
            let full = cell.shell(&format!("cat /dev/zero > {at}/all")).exited(1);
            assert!(full.stderr.contains("No space left"), "{memory}, {at}: {}", full.stderr);
        }
        // What little is left may not be enough for an exec either, whose end that is then.
        assert_ne!(cell.shell(EATER).code, 0, "{memory}");
        let alive = cell.shell("echo alive");
        if alive.code != 0 {
            let console = cell.verb(&["logs", "--console"]).ok();
            panic!("{memory}: {} {} {}", alive.stderr, cell.inspect(), console.text());
        }
    }
}

/// His program at least: where what is left then is enough, the cell lives on.
#[test]
fn whoever_fills_all_memory_with_files_ends_his_own_cell_at_most() {
    let cell = Cell::idle("filled", &["--privileged", "--pager", "off", "--memory", "64m"]);
    let neighbour = Cell::idle("neighbour", &["--pager", "off", "--memory", "64m"]);
    cell.shell("mkdir /mnt/own && mount -t tmpfs -o size=100% none /mnt/own").ok();
    assert_ne!(cell.shell("cat /dev/zero > /mnt/own/all").code, 0);
    let is_over = || cell.state() == "exited" || cell.shell("echo alive").code == 0;
    assert!(until(LIMIT, is_over), "{}", cell.inspect());
    if cell.state() == "exited" {
        assert_eq!(cell.inspect()["exit_code"], 137);
    }
    let console = cell.verb(&["logs", "--console"]).ok();
    assert!(console.text().contains("ut of memory: Killed"), "{}", console.text());
    assert_eq!(neighbour.shell("echo alive").ok().text(), "alive");
}
