//! What the networks of cells were let do, as it is written down: the ends of their logs
//! (`exocell_cell::network`), a bounded part of each at a time.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use exocell_cell::{Record, network};
use serde::{Deserialize, Serialize};

use crate::row::shown;

/// The last one is the one that is written now.
const LOG: &str = network::LOGS[2];
/// So much is read of one cell's log in a look, and of all, in bytes. Of more the end is read.
const READ_MAX: u64 = 32 << 10;
const READ_ALL_MAX: u64 = 1 << 20;
/// So much of it when it is looked at first.
const FIRST_MAX: u64 = 4 << 10;
/// Decisions of one cell that are told in a look: a guest makes as many as it likes.
const TOLD_MAX: usize = 20;

/// One decision, with the cell that it is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Decision {
    pub cell: String,
    #[serde(flatten)]
    pub line: Line,
}

/// A line of the log, as far as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub time_ms: u64,
    pub event: String,
    pub decision: String,
    pub protocol: Option<String>,
    pub target: String,
    pub port: Option<u16>,
    #[serde(default)]
    pub reason: String,
}

/// What was read of a log.
#[derive(Default)]
struct Place {
    file: u64,
    at: u64,
    /// The look at which its cell was there last.
    seen: u64,
}

#[derive(Default)]
pub struct Decisions {
    places: HashMap<String, Place>,
    looks: u64,
}

impl Decisions {
    /// What was decided since the last look, and how many decisions are left out. Blocks.
    pub fn look(&mut self, cells: &[Record]) -> (Vec<Decision>, u64) {
        self.looks += 1;
        let (mut all, mut left_out, mut read) = (Vec::new(), 0, 0);
        // Nobody is always the last.
        let first = self.looks as usize % cells.len().max(1);
        let (later, sooner) = cells.split_at(first.min(cells.len()));
        for record in sooner.iter().chain(later) {
            let known = self.places.contains_key(&record.id);
            let place = self.places.entry(record.id.clone()).or_default();
            place.seen = self.looks;
            if read >= READ_ALL_MAX {
                continue;
            }
            let text = place.read(record, if known { READ_MAX } else { FIRST_MAX });
            read += text.len() as u64;
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
            let mut lines: Vec<Line> = lines.collect();
            let too_many = lines.len().saturating_sub(TOLD_MAX);
            lines.drain(..too_many);
            left_out += too_many as u64;
            all.extend(lines.into_iter().map(|line| Decision {
                cell: record.id.clone(),
                line: Line {
                    event: shown(&line.event),
                    decision: shown(&line.decision),
                    protocol: line.protocol.as_deref().map(shown),
                    target: shown(&line.target),
                    reason: shown(&line.reason),
                    ..line
                },
            }));
        }
        self.places.retain(|_, place| place.seen == self.looks);
        all.sort_by_key(|decision| decision.line.time_ms);
        (all, left_out)
    }
}

impl Place {
    /// The whole lines that are new, of at most so many bytes at the end.
    fn read(&mut self, record: &Record, most: u64) -> String {
        let Ok(file) = File::open(record.path(LOG)) else { return String::new() };
        let Ok(meta) = file.metadata() else { return String::new() };
        if meta.ino() != self.file {
            // Another file has taken its place, or there was none.
            (self.file, self.at) = (meta.ino(), 0);
        }
        let from = self.at.max(meta.len().saturating_sub(most));
        let mut bytes = vec![0; meta.len().saturating_sub(from).min(most) as usize];
        let count = file.read_at(&mut bytes, from).unwrap_or(0);
        bytes.truncate(count);
        // The rest of the last line comes.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        self.at = from + whole as u64;
        bytes.truncate(whole);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use exocell_cell::Layout;

    use super::*;

    const ID: &str = "11";

    fn line(target: &str) -> String {
        format!(
            "{{\"time_ms\":7,\"event\":\"connect\",\"decision\":\"denied\",\
             \"target\":\"{target}\",\"port\":443,\"reason\":\"no rule covers it\"}}\n"
        )
    }

    fn targets(looked: (Vec<Decision>, u64)) -> Vec<String> {
        looked.0.into_iter().map(|decision| decision.line.target).collect()
    }

    #[test]
    fn what_is_new_is_told_once_through_files_that_change_places() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let cells = [Record::at(&layout, ID)];
        fs::create_dir_all(cells[0].directory()).unwrap();
        let log = cells[0].path(LOG);
        let mut own = Decisions::default();
        assert!(targets(own.look(&cells)).is_empty());
        fs::write(&log, format!("{}not JSON\n{{\"time", line("a.test"))).unwrap();
        assert_eq!(targets(own.look(&cells)), ["a.test"]);
        assert!(targets(own.look(&cells)).is_empty());
        fs::rename(&log, cells[0].path(network::LOGS[1])).unwrap();
        fs::write(&log, line("b.test")).unwrap();
        assert_eq!(targets(own.look(&cells)), ["b.test"]);
        assert!(targets(own.look(&[])).is_empty());
        assert!(own.places.is_empty(), "nothing is kept of a cell that is gone");
    }

    #[test]
    fn of_a_flood_the_end_is_told_and_how_much_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let cells = [Record::at(&layout, ID)];
        fs::create_dir_all(cells[0].directory()).unwrap();
        let log = cells[0].path(LOG);
        fs::write(&log, line("first.test")).unwrap();
        let mut own = Decisions::default();
        own.look(&cells);
        let mut file = fs::OpenOptions::new().append(true).open(&log).unwrap();
        for index in 0..10_000 {
            file.write_all(line(&format!("{index}.test")).as_bytes()).unwrap();
        }
        let (told, left_out) = own.look(&cells);
        assert_eq!(told.len(), TOLD_MAX);
        assert_eq!(told.last().unwrap().line.target, "9999.test");
        assert!(left_out > 0 && targets(own.look(&cells)).is_empty());
    }
}
