//! System calls, faults, processes and bandwidths, by one static program.

use std::path::Path;
use std::process::Command;

use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::MicroArgs;
use crate::program::{Compiler, Program};
use crate::row::Row;
use crate::subject;
use crate::turns::{Run, Setting, choose, listed, may_be_realtime};

/// The sources in `benches/micro`.
const PROGRAM: Program = Program {
    name: "micro",
    compiler: Compiler::Gcc,
    sources: &[
        ("micro.h", include_str!("../micro/micro.h")),
        ("micro.c", include_str!("../micro/micro.c")),
        ("calls.c", include_str!("../micro/calls.c")),
        ("memory.c", include_str!("../micro/memory.c")),
        ("processes.c", include_str!("../micro/processes.c")),
        ("floors.c", include_str!("../micro/floors.c")),
        ("bandwidth.c", include_str!("../micro/bandwidth.c")),
    ],
};
/// Values that a subject gives in one turn.
const SAMPLES_PER_TURN: u32 = 3;
/// Enough for what is measured, and the same for every cell.
const MEMORY: &str = "512m";

/// Measures what `args` ask for; rows in the order of the program's list.
pub fn measure(args: &MicroArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let folder = PROGRAM.prepare(&exocell.cache())?;
    let wanted = choose(listed(list(&folder))?, &args.only)?;
    let subjects = subject::subjects(&args.options.peers, &args.options.kernel, exocell);
    let realtime = !args.fair && may_be_realtime();
    let mut rows = Vec::new();
    for needed in [1, 2] {
        let group: Vec<_> = wanted.iter().filter(|one| one.cpus == needed).cloned().collect();
        let setting = Setting {
            cpus: args.cpus.max(needed),
            realtime,
            memory: MEMORY,
            samples: SAMPLES_PER_TURN,
            program: PROGRAM.name,
            folder: &folder,
            root: None,
            arguments: &["serve"],
            cell: &[],
            lan: None,
            exocell,
        };
        let mut run = Run::new(&subjects, group, setting);
        for round in 0..args.options.rounds as usize {
            run.round(round);
        }
        rows.extend(run.rows());
    }
    Ok(rows)
}

fn list(folder: &Path) -> Command {
    let mut list = Command::new(folder.join(PROGRAM.name));
    list.arg("list");
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turns::{Refusal, Session};

    #[test]
    fn what_the_program_lists_is_understood_and_chosen_from() {
        let cache = tempfile::tempdir().unwrap();
        let all = listed(list(&PROGRAM.prepare(cache.path()).unwrap())).unwrap();
        assert!(all.len() > 20, "{all:?}");
        let only = ["fork_exit".to_owned(), "null_syscall".to_owned()];
        let names: Vec<_> =
            choose(all.clone(), &only).unwrap().into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["null_syscall", "fork_exit"]);
        let error = choose(all, &["fork_exot".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("fork_exot") && error.contains("fork_exec"), "{error}");
    }

    #[test]
    fn the_program_measures_natively() {
        let cache = tempfile::tempdir().unwrap();
        let folder = PROGRAM.prepare(cache.path()).unwrap();
        let mut command = Command::new(folder.join(PROGRAM.name));
        command.arg("serve");
        let mut session = Session::start(command, false, None).unwrap();
        for name in ["null_syscall", "fault_anon_rand", "fork_exit", "bw_file"] {
            let values = session.ask(name, 2).unwrap_or_else(|why| panic!("{name}: {why:?}"));
            assert!(
                values.len() == 2 && values.iter().all(|value| *value > 0.0),
                "{name}: {values:?}"
            );
        }
        let refused = Refusal::Reason("not a request".to_owned());
        assert_eq!(session.ask("nonsense", 1), Err(refused));
    }
}
