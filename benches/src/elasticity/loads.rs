//! What cells are asked to do while they are watched.

use std::fs;
use std::path::{Path, PathBuf};

use super::{FOLDER, PROGRAM, agent};
use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::{ElasticityArgs, Workload};

/// Where a cell sees the folder that its load reads.
const INPUT: &str = "/input";

/// A load: its name, the words that run it in the cell, the folder that it reads.
pub struct Load {
    pub name: String,
    pub words: Vec<String>,
    pub input: Option<PathBuf>,
}

impl Load {
    /// The option of `exocell run` that shows the cell its input.
    pub fn volume(&self) -> Option<String> {
        self.input.as_ref().map(|folder| format!("{}:{INPUT}:ro", folder.display()))
    }
}

/// The runs of one workload.
pub fn of(
    workload: Workload,
    args: &ElasticityArgs,
    exocell: &Exocell,
) -> Result<Vec<Load>, BenchError> {
    match workload {
        Workload::Bursty => Ok(vec![Load {
            name: "bursty".to_owned(),
            words: elastic(&["bursty", &args.seconds.to_string()]),
            input: None,
        }]),
        Workload::Traces => traces(args),
        Workload::Agent => Ok(vec![Load {
            name: "agent".to_owned(),
            words: vec![
                "sh".to_owned(),
                format!("{INPUT}/{}", agent::SCRIPT_NAME),
                INPUT.to_owned(),
                args.pause.to_string(),
            ],
            input: Some(agent::prepare(&exocell.cache())?),
        }]),
    }
}

/// The words that run the compiled program.
pub fn elastic(words: &[&str]) -> Vec<String> {
    let program = format!("{FOLDER}/{}", PROGRAM.name);
    std::iter::once(program).chain(words.iter().map(|word| (*word).to_owned())).collect()
}

/// The traces of the folder; the first so many.
fn traces(args: &ElasticityArgs) -> Result<Vec<Load>, BenchError> {
    let folder = args.traces.as_deref().ok_or(BenchError::NoTraces)?;
    let mut loads = replays(folder, args.speed, args.memory_mib)?;
    loads.truncate(args.traces_max);
    Ok(loads)
}

/// A load for each trace of `folder`, by name, in cells of `memory_mib`.
pub fn replays(folder: &Path, speed: u32, memory_mib: u64) -> Result<Vec<Load>, BenchError> {
    let mut names = names_in(folder)?;
    names.retain(|name| name.ends_with(".csv"));
    names.sort_unstable();
    // What the guest itself needs stays free.
    let (speed, most_mib) = (speed.to_string(), (memory_mib * 3 / 4).to_string());
    let load = |name: String| Load {
        words: elastic(&["replay", &format!("{INPUT}/{name}"), &speed, &most_mib]),
        input: Some(folder.to_owned()),
        name,
    };
    Ok(names.into_iter().map(load).collect())
}

fn names_in(folder: &Path) -> Result<Vec<String>, BenchError> {
    let failed = || BenchError::host(folder.display());
    let entries = fs::read_dir(folder).map_err(failed())?;
    entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_, _>>()
        .map_err(failed())
}
