//! Cells whose limits add up to more than there is: a budget, guarantees, and what
//! each gets of the rest.

use std::thread;
use std::time::Duration;

use exocell_cell::vmm::jail::group;
use exocell_cell::vmm::limits::Limits;
use serde_json::Value;

use crate::common::guest::{PrivateRoot, TINY};
use crate::common::{Finished, LIMIT, Started, until};

const MIB: u64 = 1 << 20;

/// A state root with a budget; its cells are removed when it goes.
struct Budget {
    root: PrivateRoot,
}

impl Budget {
    #[track_caller]
    fn new(size: &str) -> Self {
        let root = PrivateRoot::with_image();
        root.run(["budget", size]).ok();
        Self { root }
    }

    /// A cell that waits to be used.
    #[track_caller]
    fn cell(&self, name: &str, memory: &str, guarantee: &str) {
        self.start(name, memory, guarantee).ok();
    }

    fn start(&self, name: &str, memory: &str, guarantee: &str) -> Finished {
        let held = ["--shm-size", "128m"];
        let flags = ["--pager", "credit", "--memory", memory, "--memory-guarantee", guarantee];
        let words =
            [&["run", "-d", "--name", name], &flags[..], &held, &[TINY, "sleep", "infinity"]];
        self.root.run(words.concat())
    }

    fn shell(&self, cell: &str, script: &str) -> Finished {
        self.root.run(["exec", cell, "sh", "-c", script])
    }

    /// A script that runs while others do.
    fn begin(&self, cell: &str, script: &str) -> Started {
        Started::new(&mut self.root.exocell(["exec", cell, "sh", "-c", script]))
    }

    #[track_caller]
    fn standing(&self, name: &str) -> u64 {
        let standing: Value = self.root.run(["budget", "--json"]).ok().json();
        standing[name].as_u64().unwrap_or_else(|| panic!("no {name} in {standing}"))
    }

    #[track_caller]
    fn counter(&self, cell: &str, name: &str) -> u64 {
        let stats = self.root.run(["stats", "--json", cell]).ok().json();
        stats["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}"))
    }

    /// What the host holds for all of `cells`. Memory goes between them while one is asked after
    /// the other, so that each counts with the lesser of two answers.
    #[track_caller]
    fn held(&self, cells: &[&str]) -> u64 {
        let ask = || cells.iter().map(|cell| self.counter(cell, "memory_allocated_bytes"));
        let first: Vec<u64> = ask().collect();
        first.into_iter().zip(ask()).map(|(first, second)| first.min(second)).sum()
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        let names = self.root.run(["ps", "-aq"]);
        for name in names.text().lines() {
            self.root.run(["rm", "-f", name]);
        }
    }
}

/// A program that takes so much for a moment, long enough to be seen.
fn burst(mib: u64) -> String {
    format!("dd if=/dev/zero of=/dev/null bs={mib}M count=16")
}

#[test]
fn what_is_not_there_is_not_promised() {
    let budget = Budget::new("200m");
    budget.cell("first", "128m", "100m");
    assert_eq!(budget.standing("guaranteed_bytes"), 100 * MIB);
    let beside = match group::offered() {
        Ok(_) => Limits::new(128 << 20, 512).beside_bytes_max(),
        Err(_) => 0,
    };
    assert_eq!(budget.standing("beside_bytes_max"), beside);
    budget
        .start("second", "128m", "120m")
        .exited(125)
        .complains_of(&["budget", "--memory-guarantee"]);
    budget.start("second", "128m", "10m").exited(125).complains_of(&["choose 28 to 128 MiB"]);
    budget.start("second", "128m", "129m").exited(125).complains_of(&["choose 28 to 128 MiB"]);
    let eager = ["run", "--pager", "eager", "--memory-guarantee", "64m", TINY, "true"];
    budget.root.run(eager).exited(125).complains_of(&["--pager credit"]);
    budget.root.run(["budget", "much"]).exited(125).complains_of(&["off"]);
    assert_eq!(budget.standing("cell_count"), 1);
    budget.root.run(["rm", "-f", "first"]).ok();
    assert_eq!(budget.standing("left_bytes"), 200 * MIB);
}

#[test]
fn cells_without_a_credit_have_all_their_memory_set_aside() {
    let budget = Budget::new("310m");
    let start = |name, pager| {
        let flags = ["run", "-d", "--name", name, "--pager", pager, "--memory", "128m"];
        budget.root.run([&flags[..], &[TINY, "sleep", "infinity"]].concat())
    };
    start("plain", "off").ok();
    start("eager", "eager").ok();
    assert_eq!(budget.standing("guaranteed_bytes"), 256 * MIB);
    start("third", "off").exited(125).complains_of(&["budget", "--memory"]);
    budget.cell("credit", "128m", "40m");
    assert_eq!(budget.standing("guaranteed_bytes"), 296 * MIB);
    budget.root.run(["rm", "-f", "plain"]).ok();
    assert_eq!(budget.standing("guaranteed_bytes"), 168 * MIB);
    start("fourth", "off").ok();
}

#[test]
fn what_a_dead_supervisor_had_comes_back() {
    let budget = Budget::new("200m");
    budget.cell("dead", "160m", "64m");
    let filled = "dd if=/dev/zero of=/dev/shm/held bs=1M count=70";
    budget.shell("dead", filled).ok();
    assert!(budget.standing("granted_bytes") > 70 * MIB);
    assert_eq!(budget.counter("dead", "memory_guarantee_bytes"), 64 * MIB);
    let inspected = budget.root.run(["inspect", "--json", "dead"]).ok().one();
    let supervisor = inspected["supervisor_pid"].as_i64().expect("a pid") as i32;
    let pid = nix::unistd::Pid::from_raw(supervisor);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it lives");
    assert!(until(LIMIT, || budget.standing("cell_count") == 0));
    assert_eq!(budget.standing("left_bytes"), 200 * MIB);
}

/// Four cells of 160 MiB each on 320 MiB. A burst that finds nothing ends as a program
/// does in a guest without memory, and is made again.
#[test]
fn bursts_of_many_cells_fit_into_a_budget_that_their_limits_exceed() {
    let budget = Budget::new("320m");
    let cells = ["one", "two", "three", "four"];
    for cell in cells {
        budget.cell(cell, "160m", "48m");
    }
    let again = format!(
        "for i in 1 2 3 4 5 6; do until {} 2> /dev/null; do sleep 0.1; done; sleep 0.2; done",
        burst(80)
    );
    let mut bursts: Vec<Started> = cells.iter().map(|cell| budget.begin(cell, &again)).collect();
    let mut most = 0;
    while bursts.iter_mut().any(|burst| burst.child.try_wait().expect("waitpid").is_none()) {
        let held = budget.held(&cells);
        assert!(held <= 320 * MIB, "{held} bytes are held");
        most = most.max(held);
        thread::sleep(Duration::from_millis(20));
    }
    for (cell, burst) in cells.iter().zip(bursts) {
        let ended = burst.finish(LIMIT).expect("it ends");
        if ended.code != 0 {
            let console = budget.root.run(["logs", "--console", cell]).ok();
            panic!("{cell} ended with {}: {}{}", ended.code, ended.stderr, console.text());
        }
    }
    assert!(most > 128 * MIB, "at most {most} bytes were held at once");
    for cell in cells {
        budget.shell(cell, "echo alive").ok();
    }
}

#[test]
fn who_stays_within_its_guarantee_is_not_harmed_by_who_does_not() {
    let budget = Budget::new("256m");
    budget.cell("modest", "192m", "112m");
    budget.cell("greedy", "224m", "40m");
    let eats = format!("while true; do {}; done", burst(200));
    let greedy = budget.begin("greedy", &eats);
    let shell = format!("for i in 1 2 3 4 5 6 7 8 9 10; do {} || exit 1; done", burst(64));
    budget.shell("modest", &shell).ok();
    assert!(budget.held(&["modest", "greedy"]) <= 256 * MIB);
    drop(greedy);
    budget.shell("greedy", "echo alive").ok();
    let console = budget.root.run(["logs", "--console", "modest"]).ok();
    assert!(!console.text().contains("ut of memory"), "{}", console.text());
}

/// What one cell has in memory of files goes when another asks for its part.
#[test]
fn files_in_memory_make_room_for_a_neighbour() {
    let budget = Budget::new("256m");
    budget.cell("reader", "224m", "40m");
    budget.cell("asker", "224m", "40m");
    budget
        .shell(
            "reader",
            "dd if=/dev/zero of=/file bs=1M count=140 conv=fsync && cat /file > /dev/null",
        )
        .ok();
    let before = budget.counter("reader", "memory_allocated_bytes");
    assert!(before > 140 * MIB, "only {before} bytes are held");
    // On a busy machine the reader may take longer than a program waits.
    budget.shell("asker", &format!("until {}; do sleep 0.1; done", burst(80))).ok();
    let after = budget.counter("reader", "memory_allocated_bytes");
    assert!(after + 16 * MIB < before, "{before} bytes were held, {after} still are");
    budget.shell("reader", "cat /file > /dev/null").ok();
}
