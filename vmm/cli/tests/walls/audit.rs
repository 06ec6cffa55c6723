//! `exocell bench audit`: what host processes of a cell have mapped is what its guest
//! kernel's page tables say, while programs do what they can to make it otherwise.

use serde_json::Value;

use crate::common::cell::Cell;
use crate::common::compiled::{FOLDER_IN_CELL, Programs};
use crate::common::{LIMIT, Started, run};

/// Mode, processors, Pager
const CELLS: [[&str; 3]; 6] = [
    ["aspace", "1", "off"],
    ["aspace", "2", "off"],
    ["aspace", "4", "off"],
    ["aspace", "2", "credit"],
    ["none", "1", "off"],
    ["none", "4", "credit"],
];
const SECONDS: &str = "4";
/// Looks at each cell while its programs change what is mapped.
const LOOKS_MIN: u64 = 20;

/// What an audit that found nothing says.
#[track_caller]
fn report(cell: &Cell, flags: &[&str]) -> Value {
    let report = run([&["bench", "audit", &cell.name], flags].concat()).ok().json();
    assert_eq!(report["findings"], serde_json::json!([]), "{report}");
    report
}

#[test]
fn what_is_mapped_is_what_page_tables_say_whatever_programs_do() {
    let programs = Programs::new().compile("churn", "churn", &["-static"]);
    let program = format!("{FOLDER_IN_CELL}/churn");
    for (seed, [mode, vcpus, pager]) in CELLS.iter().enumerate() {
        let flags = ["--intra", mode, "--cpus", vcpus, "--pager", pager, "--memory", "512m"];
        let cell = Cell::idle("audit", &[&flags[..], &["-v", &programs.volume()]].concat());
        let seed = seed.to_string();
        let churn = [&program, SECONDS, &seed, "6"];
        let place = format!("{mode}, {vcpus} vCPUs, {pager}");
        // How often it looks in a while is the host's to say: it goes on until that is enough.
        let mut look_count = 0;
        while look_count <= LOOKS_MIN {
            let churning = Started::new(&mut cell.exec(&["--user", "1000:1000"], &churn));
            let seen = report(&cell, &["--seconds", SECONDS, "--every-ms", "20"]);
            let ended = churning.finish(LIMIT).unwrap_or_else(|| panic!("no end: {place}")).ok();
            assert!(ended.text().contains(" steps, "), "{place}: {}", ended.text());
            for figure in ["process_count", "page_count"] {
                assert!(seen[figure].as_u64() > Some(20), "{place}: {seen}");
            }
            let looked = seen["look_count"].as_u64().filter(|count| *count > 0);
            look_count += looked.unwrap_or_else(|| panic!("{place}: no look in {seen}"));
        }
        report(&cell, &[]);
    }
}

#[test]
fn a_cell_at_work_passes() {
    for mode in ["aspace", "none"] {
        let cell = Cell::idle("audit", &["--intra", mode, "--cpus", "2"]);
        let script = "cd /root && for n in 1 2 3; do
git init -q r$n; seq 3000 | sort | sha256sum; python3 -c 'print(sum(range(100000)))'
echo 'int main(void) { return 0; }' > a.c && gcc -o a a.c && ./a; done > /dev/null";
        let working = Started::new(&mut cell.exec(&[], &["sh", "-c", script]));
        let seen = report(&cell, &["--seconds", "3", "--every-ms", "20"]);
        working.finish(LIMIT).expect("an end").ok();
        assert!(seen["page_count"].as_u64() > Some(100), "{mode}: {seen}");
    }
}

#[test]
fn who_is_no_running_cell_is_an_error() {
    run(["bench", "audit", "nobody"]).exited(125).complains_of(&["nobody"]);
}
