//! `exocell bench`: the rows that scripts read, of the machine and of a cell.

mod common;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::guest::{PrivateRoot, TINY};
use common::host::{self, Namespace};
use common::{LIMIT, Started, eventually, run, text, until};
use serde_json::Value;

#[test]
fn micro_prints_a_row_for_each_measurement_and_subject() {
    let words = ["bench", "micro", "--only", "null_syscall,fork_exit"];
    let ended =
        run([&words[..], &["--peers", "native,para-none", "--rounds", "1", "--json"]].concat())
            .ok();
    let rows: Vec<Value> =
        ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    let of = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    let names: Vec<_> = rows.iter().map(|row| (of(row, "bench"), of(row, "subject"))).collect();
    let pair = |bench: &str, subject: &str| (bench.to_owned(), subject.to_owned());
    assert_eq!(
        names,
        [
            pair("null_syscall", "native"),
            pair("null_syscall", "para-aspace"),
            pair("null_syscall", "para-none"),
            pair("fork_exit", "native"),
            pair("fork_exit", "para-aspace"),
            pair("fork_exit", "para-none"),
        ]
    );
    for row in &rows {
        let (min, median) = (row["min"].as_f64().unwrap(), row["median"].as_f64().unwrap());
        assert!(min > 0.0 && min <= median && row["n"].as_u64() > Some(0), "{row}");
        assert_eq!((of(row, "unit").as_str(), &row["params"]["cpus"]), ("ns", &Value::from("1")));
    }
}

#[test]
fn isolates_that_live_at_once_are_counted() {
    let words = ["bench", "isolates", "--live", "300", "--tenants", "2", "--calls", "20"];
    let ended = run([&words[..], &["--peers", "none", "--rounds", "1", "--json"]].concat()).ok();
    let rows: Vec<Value> =
        ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    let row = |bench: &str| rows.iter().find(|row| row["bench"] == bench).expect("it is measured");
    for bench in ["isolate_bytes_none", "isolate_bytes_written"] {
        let bytes = row(bench)["min"].as_f64().unwrap();
        assert!((1_000.0..100_000.0).contains(&bytes), "{}", row(bench));
        assert_eq!(row(bench)["params"]["live"], "300");
    }
    assert_eq!(row("sfib_fresh")["params"]["tenants"], "2");
}

#[test]
fn a_measurement_that_is_not_there_is_named_with_those_that_are() {
    let words = ["bench", "micro", "--only", "nul_syscall", "--peers", "none"];
    run(words).exited(125).complains_of(&["nul_syscall", "null_syscall", "fork_exec"]);
}

#[test]
fn a_plot_is_drawn_of_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plot.svg");
    let words = ["bench", "micro", "--only", "null_syscall", "--peers", "none", "--rounds", "1"];
    let table = run([&words[..], &["--plot", text(&file)]].concat()).ok();
    assert!(table.text().contains("null_syscall") && table.text().contains("para-aspace"));
    let plot = fs::read_to_string(&file).unwrap();
    assert!(plot.starts_with("<svg") && plot.contains("null_syscall"), "{plot}");
}

#[test]
fn the_network_is_measured_in_both_directions() {
    let words = ["bench", "network", "--only", "tcp_out_8,tcp_in_1,connection,round_trip"];
    let ended = run([&words[..], &["--peers", "native", "--rounds", "1", "--json"]].concat()).ok();
    let rows: Vec<Value> =
        ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    for bench in ["tcp_out_8", "tcp_in_1", "connection", "round_trip"] {
        for subject in ["native", "para-aspace"] {
            let row = rows.iter().find(|row| row["bench"] == bench && row["subject"] == subject);
            let row = row.unwrap_or_else(|| panic!("{bench} of {subject}: {}", ended.stderr));
            assert!(row["min"].as_f64() > Some(0.0) && row["n"] == 1, "{row}");
        }
    }
}

/// Four cells of 384 MiB on 448 MiB, of which 64 are not guaranteed to anyone.
#[test]
fn cells_share_what_is_a_fraction_of_their_limits() {
    let sizes = ["--memory-mib", "384", "--guarantee-mib", "96", "--budget-mib", "448"];
    let words = ["bench", "oversubscription", "--cells", "4", "--seconds", "4", "--json"];
    let ended = run([&words[..], &sizes].concat()).ok();
    let rows: Vec<Value> =
        ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    let figure = |bench: &str, subject: &str| {
        let row = rows.iter().find(|row| row["bench"] == bench && row["subject"] == subject);
        row.and_then(|row| row["min"].as_f64()).unwrap_or_else(|| panic!("{bench}: {rows:?}"))
    };
    let held = |subject| figure("oversubscription/held_max", subject) / f64::from(1 << 20);
    assert!(held("budget") <= 448.0, "{} MiB", held("budget"));
    assert!(held("no-return") > 448.0, "only {} MiB: no load for this", held("no-return"));
    assert_eq!(figure("oversubscription/within_ended_well", "budget"), 2.0, "{}", ended.stderr);
    assert_eq!(figure("oversubscription/cells_alive", "budget"), 4.0, "{}", ended.stderr);
}

/// Each is killed while all its cells are there.
#[test]
fn a_killed_benchmark_leaves_no_cell() {
    let root = PrivateRoot::with_image();
    for (words, cells) in [
        (&["elasticity", "--seconds", "60"][..], 1),
        (&["reclaim", "--region-mib", "64", "--rounds", "1000"], 1),
        (&["oversubscription", "--cells", "2", "--seconds", "60"], 2),
        (&["density", "--cells", "2"], 2),
    ] {
        let mut bench = Started::new(&mut root.exocell([&["bench"], words, &BARE].concat()));
        let mut spaces = Vec::new();
        let started = until(LIMIT, || {
            spaces = cells_of(&bench);
            spaces.len() == cells || bench.child.try_wait().expect("waitpid").is_some()
        });
        assert!(
            started && spaces.len() == cells,
            "{words:?}: {:?}",
            bench.finish(LIMIT).map(|ended| ended.stderr)
        );
        // Until samplers and loads run, too.
        thread::sleep(Duration::from_secs(2));
        drop(bench);
        for space in spaces {
            eventually("its cells end", || host::processes(&space).is_empty());
        }
        eventually("its samplers end", || !host::is_running(text(&root.path().join("bench"))));
        eventually("their records go", || records(&root.path()).is_empty());
    }
    // A folder of its own is the next run's to sweep.
    let words = ["bench", "oversubscription", "--cells", "2", "--seconds", "1"];
    root.run([&words[..], &BARE].concat()).ok();
    let left = names(&root.path().join("bench"));
    assert!(left.iter().all(|name| name.starts_with("elastic-")), "{left:?}");
}

const BARE: [&str; 4] = ["--image", TINY, "--peers", "none"];

/// The pid namespaces of the cells that a running benchmark has.
fn cells_of(bench: &Started) -> Vec<Namespace> {
    let commands = host::children(bench.pid());
    let supervisors = commands.into_iter().filter_map(host::jailed_child);
    supervisors.filter_map(host::namespace).collect()
}

/// The records of cells below a state root, those of roots of a benchmark's own too.
fn records(root: &Path) -> Vec<String> {
    let own = names(&root.join("bench")).into_iter().map(|name| root.join("bench").join(name));
    let roots = std::iter::once(root.to_owned()).chain(own);
    let all = roots.flat_map(|root| names(&root.join("cells")));
    all.filter(|name| !name.starts_with('.')).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
