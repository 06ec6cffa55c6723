//! `exocell bench`: the rows that scripts read, of the machine and of a cell.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::emulator;
use common::guest::{PrivateRoot, TINY};
use common::host::{self, Namespace};
use common::{LIMIT, Started, eventually, run, text, until};
use serde_json::Value;
use tempfile::TempDir;

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

/// The rows of `exocell bench colorguard`, one turn each.
fn slots() -> Vec<Value> {
    let ended = run(["bench", "colorguard", "--peers", "none", "--rounds", "1", "--json"]).ok();
    ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

fn row<'a>(rows: &'a [Value], bench: &str, subject: &str) -> &'a Value {
    let found = rows.iter().find(|row| row["bench"] == bench && row["subject"] == subject);
    found.unwrap_or_else(|| panic!("{bench} {subject} is measured"))
}

#[test]
fn slots_of_isolates_are_measured() {
    let rows = slots();
    let min = |bench: &str, subject: &str| row(&rows, bench, subject)["min"].as_f64().unwrap();
    let bytes = |subject| min("colorguard_address_bytes", subject);
    let (guarded, compact) = (bytes("exocell"), bytes("exocell-compact"));
    // The largest memory is 64 MiB.
    assert!(compact >= f64::from(64 << 20) && compact < guarded, "{guarded} {compact}");
    let slots = |subject| min("colorguard_slots", subject);
    assert!(slots("exocell") >= 1000.0 && slots("exocell-compact") > slots("exocell"));
    for bench in ["colorguard_call", "colorguard_matmul"] {
        assert!(min(bench, "exocell") > 0.0 && min(bench, "exocell-compact") > 0.0);
    }
}

#[test]
fn slots_share_guards_where_there_are_protection_keys() {
    let rows = slots();
    let guarded = row(&rows, "colorguard_address_bytes", "exocell");
    if guarded["params"]["keys"] != "yes" {
        let again = "slots_share_guards_where_there_are_protection_keys";
        return emulator::again_on_intel(again);
    }
    // Of a slot of its own, 4 GiB and a guard, a tenth at most.
    assert!(guarded["min"].as_f64().unwrap() < f64::from(410 << 20), "{guarded}");
    let doctor = run(["doctor"]);
    let says =
        doctor.text().lines().any(|line| line.starts_with("colorguard  ") && line.contains("yes"));
    assert!(says, "{}", doctor.text());
}

#[test]
fn the_service_is_measured_beside_another_build() {
    let before = common::program();
    let words = ["bench", "service", "--tenants", "2", "--connections", "1,3", "--seconds", "1"];
    let more = ["--rounds", "1", "--json", "--before", before.to_str().unwrap()];
    let ended = run([&words[..], &more].concat()).ok();
    let rows: Vec<Value> =
        ended.text().lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect();
    for subject in ["before", "worker-a-tenant", "worker-shared"] {
        for bench in ["service_calls", "service_cpu"] {
            let mine = rows.iter().filter(|row| row["bench"] == bench && row["subject"] == subject);
            let loads: Vec<_> = mine
                .map(|row| {
                    assert!(row["min"].as_f64().unwrap() > 0.0, "{row}");
                    row["params"]["connections"].as_str().unwrap()
                })
                .collect();
            assert_eq!(loads, ["1", "3"], "{bench} {subject}");
        }
        let bytes = row(&rows, "service_worker_pss", subject)["min"].as_f64().unwrap();
        assert!(bytes > 100_000.0, "{subject} {bytes}");
        row(&rows, "service_call_pss", subject);
    }
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
    let words = ["oversubscription", "--cells", "4", "--seconds", "4"];
    let (rows, folder) = with_csv(&[&words[..], &sizes].concat());
    let figure =
        |bench: &str, subject: &str| lowest(&rows, &format!("oversubscription/{bench}"), subject);
    let held = |subject| figure("held_max", subject) / f64::from(1 << 20);
    assert!(held("budget") <= 448.0, "{} MiB", held("budget"));
    assert!(held("no-return") > 448.0, "only {} MiB: no load for this", held("no-return"));
    assert_eq!(figure("within_ended_well", "budget"), 2.0, "{rows:?}");
    assert_eq!(figure("cells_alive", "budget"), 4.0, "{rows:?}");
    let mut points = Vec::new();
    for subject in ["budget", "pager", "no-return"] {
        let columns = columns(&folder, &format!("oversubscription-{subject}.csv"));
        let (at, all) = (&columns["t_s"], &columns["held_bytes"]);
        assert!(at.is_sorted() && at[at.len() - 1] > 4.0, "{at:?}");
        assert_eq!(all.iter().copied().fold(0.0, f64::max), figure("held_max", subject));
        let of_cells =
            |look: usize| (0..4).map(|n| columns[&format!("cell_{n}_bytes")][look]).sum::<f64>();
        assert!(all.iter().enumerate().all(|(look, all)| of_cells(look) == *all), "{columns:?}");
        points.push(at.len());
    }
    draws(&folder, "oversubscription.svg", &points);
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

/// Runs a benchmark that writes its samples; its rows, and the folder.
#[track_caller]
fn with_csv(words: &[&str]) -> (Vec<Value>, TempDir) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let csv = ["--csv", text(folder.path()), "--json"];
    let ended = run([&["bench"], words, &csv].concat()).ok();
    let lines = ended.text().lines();
    (lines.map(|line| serde_json::from_str(line).expect("a JSON line")).collect(), folder)
}

/// The columns of a file of samples, by name; what is left out is no number.
#[track_caller]
fn columns(folder: &TempDir, file: &str) -> HashMap<String, Vec<f64>> {
    let text = fs::read_to_string(folder.path().join(file)).expect(file);
    let mut lines = text.lines().map(|line| line.split(','));
    let names: Vec<&str> = lines.next().expect("a head").collect();
    let lines: Vec<Vec<f64>> =
        lines.map(|line| line.map(|word| word.parse().unwrap_or(f64::NAN)).collect()).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.len() == names.len()), "{file}");
    let column = |at: usize| lines.iter().map(|line| line[at]).collect();
    names.iter().enumerate().map(|(at, name)| ((*name).to_owned(), column(at))).collect()
}

#[track_caller]
fn lowest(rows: &[Value], bench: &str, subject: &str) -> f64 {
    let row = rows.iter().find(|row| row["bench"] == bench && row["subject"] == subject);
    row.and_then(|row| row["min"].as_f64())
        .unwrap_or_else(|| panic!("{bench}, {subject}: {rows:?}"))
}

/// Asserts that a chart has so many lines, each of as many points as it should.
#[track_caller]
fn draws(folder: &TempDir, file: &str, points: &[usize]) {
    let chart = fs::read_to_string(folder.path().join(file)).expect(file);
    assert!(chart.starts_with("<svg") && chart.ends_with("</svg>\n"), "{file}");
    let lines = chart.lines().filter_map(|line| line.strip_prefix("<polyline points=\""));
    let drawn: Vec<usize> = lines
        .map(|line| line.split('"').next().map_or(0, |points| points.split(' ').count()))
        .collect();
    assert_eq!(drawn, points, "{file}");
}

const SUBJECTS: [&str; 7] =
    ["pager", "pager-2m", "pager-credit", "pager-cold", "reporting-0", "reporting-9", "no-return"];

#[test]
fn figures_of_elasticity_are_those_of_the_samples_that_are_written() {
    let (rows, folder) = with_csv(&["elasticity", "--seconds", "3"]);
    let mut points = Vec::new();
    for subject in SUBJECTS {
        let columns = columns(&folder, &format!("bursty-{subject}.csv"));
        let (at, held, used) = (&columns["t_s"], &columns["held_bytes"], &columns["used_bytes"]);
        assert!(at.is_sorted() && at[0] == 0.0 && at[at.len() - 1] > 3.0, "{at:?}");
        let over = |held: &[f64]| -> Vec<f64> {
            held.iter().zip(used).map(|(h, u)| (h / u - 1.0) * 100.0).collect()
        };
        let (overheads, lasting) = (over(held), over(&columns["held_throughout_bytes"]));
        let told = |what: &str| lowest(&rows, &format!("bursty/overhead_{what}_percent"), subject);
        let holds = |what: &str, of: &[usize]| {
            let of = |values: &[f64]| -> Vec<f64> { of.iter().map(|at| values[*at]).collect() };
            let mean = of(&overheads).iter().sum::<f64>() / of(&overheads).len() as f64;
            let mut lasting = of(&lasting);
            lasting.sort_unstable_by(f64::total_cmp);
            let p99 = lasting[(lasting.len() as f64 * 0.99) as usize];
            let max = lasting[lasting.len() - 1];
            for (name, value) in [("mean", mean), ("p99", p99), ("max", max)] {
                let name = format!("{name}{what}");
                let told = told(&name);
                assert!(
                    (told - value).abs() < 0.01,
                    "{subject}: {name} {told}, of samples {value}"
                );
            }
        };
        holds("", &(0..at.len()).collect::<Vec<_>>());
        let begins = |at: &[f64]| at[0].floor() != at[1].floor();
        let firsts = at.windows(2).enumerate().filter(|(_, pair)| begins(pair));
        let firsts: Vec<usize> =
            std::iter::once(0).chain(firsts.map(|(index, _)| index + 1)).collect();
        assert!(firsts.len() > 3, "{firsts:?}");
        holds("_1hz", &firsts);
        points.push(at.len());
    }
    draws(&folder, "bursty-overhead.svg", &points);
    // What was used comes last, in the first of the runs.
    draws(&folder, "bursty.svg", &[&points[..], &points[..1]].concat());
}

#[test]
fn figures_of_reclaim_are_those_of_the_rounds_that_are_written() {
    let (rows, folder) = with_csv(&["reclaim", "--region-mib", "64", "--rounds", "3"]);
    for subject in ["pager", "pager-credit", "no-return"] {
        let columns = columns(&folder, &format!("reclaim-64-{subject}.csv"));
        assert_eq!(columns["round"], [1.0, 2.0, 3.0]);
        for name in ["fault_ns", "munmap_ns", "dontneed_other_ns"] {
            let least = columns[name].iter().copied().fold(f64::MAX, f64::min);
            assert_eq!(least, lowest(&rows, &format!("reclaim/{name}"), subject));
        }
        let is_ours = subject != "no-return";
        for name in ["bind_ns", "unbind_coalesced_ns", "unbind_isolated_ns"] {
            assert!(columns[name].iter().all(|ns| *ns > 0.0) == is_ours, "{subject}: {columns:?}");
        }
        if is_ours {
            let slowest = columns["munmap_ns"].iter().copied().fold(0.0, f64::max);
            let told = lowest(&rows, "reclaim/reclaim_gb_s", subject);
            assert!((told - 4096.0 / slowest).abs() < 0.002, "{told}, {columns:?}");
        }
    }
    draws(&folder, "reclaim-64.svg", &[3, 3]);
}
