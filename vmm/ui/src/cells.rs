//! The cells, and what they use: a bounded look at them each time, however many there are.
//!
//! The log of events says of which cells something is new; a list of all is made now and then.
//! Figures are asked for in turns, of those that were asked longest ago. What a guest itself
//! says is asked for rarely: that wakes it up.

use std::collections::{BTreeMap, BTreeSet};

use exocell_cell::agent::client;
use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::events::Reader;
use exocell_cell::processes::CellUse;
use exocell_cell::{CellError, CellSpec, Layout, Record, State, Status, Strength, now_ms};

use crate::row::{Figures, Row};

/// How often, in looks, all records are read.
const LIST_EACH: u64 = 10;
/// Cells that are asked in a look, and that are being asked at once: one may be silent for long.
const ASKED_MAX: usize = 32;
/// Guests that are asked in a look.
const INSIDE_MAX: usize = 4;
/// Cells that are shown: those that live, and then those that ended last.
pub const LIVING_MAX: usize = 2000;
pub const ENDED_MAX: usize = 100;

pub struct Cells {
    layout: Layout,
    events: Option<Reader>,
    known: BTreeMap<String, Known>,
    looks: u64,
    /// The look at which all were listed last; none where it is to be done now.
    listed: Option<u64>,
}

struct Known {
    record: Record,
    supervisor: i32,
    row: Row,
    /// The look at which it was asked last, and its guest.
    asked: u64,
    inside: u64,
    is_asked: bool,
}

/// What is new.
#[derive(Default)]
pub struct Changes {
    pub rows: Vec<Row>,
    pub gone: Vec<String>,
}

/// A cell that is to be asked.
pub struct Ask {
    record: Record,
    used: CellUse,
    inside: bool,
}

/// What it said; `None`: nothing.
pub struct Answer {
    id: String,
    figures: Option<Figures>,
}

impl Cells {
    pub fn new(layout: &Layout) -> Self {
        Self {
            layout: layout.clone(),
            events: None,
            known: BTreeMap::new(),
            looks: 0,
            listed: None,
        }
    }

    /// Nobody has looked for long: all is new.
    pub fn begin_anew(&mut self) {
        (self.listed, self.events) = (None, None);
    }

    /// Finds what has become of cells. Blocks.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn look(&mut self) -> Result<Changes, CellError> {
        let mut changes = Changes::default();
        if self.events.is_none() {
            // Before the list: what comes after that is told.
            self.events = Reader::open(&self.layout, true).ok();
        }
        self.looks += 1;
        let is_old = |listed| self.looks - listed >= LIST_EACH;
        let all = self.listed.is_none_or(is_old);
        let mut named = BTreeSet::new();
        while let Some(Ok(Some(event))) = self.events.as_mut().map(Reader::next_event) {
            named.insert(event.id);
        }
        if all {
            self.listed = Some(self.looks);
            let found = chosen(Record::all(&self.layout)?);
            let ids: BTreeSet<&String> = found.iter().map(|(record, _, _)| &record.id).collect();
            changes.gone = self.known.keys().filter(|id| !ids.contains(id)).cloned().collect();
            for (record, spec, status) in found {
                changes.rows.extend(self.take(record, &spec, &status));
            }
        } else {
            for id in named.into_iter().filter(|id| CellSpec::is_id(id)) {
                let record = Record::at(&self.layout, &id);
                match record.look(&self.layout) {
                    Ok(Some((spec, status))) => {
                        changes.rows.extend(self.take(record, &spec, &status));
                    }
                    Ok(None) => changes.gone.push(id),
                    // One that cannot be read now is looked at with all the others.
                    Err(_) => {}
                }
            }
        }
        changes.gone.iter().for_each(|id| drop(self.known.remove(id)));
        Ok(changes)
    }

    /// Its row, if that is new.
    fn take(&mut self, record: Record, spec: &CellSpec, status: &Status) -> Option<Row> {
        let mut row = Row::of(&record, spec, status);
        let before = self.known.get(&record.id);
        row.figures = before.and_then(|known| known.row.figures).filter(|_| row.is_alive());
        let is_new = before.is_none_or(|known| known.row != row);
        let (asked, inside, is_asked) =
            before.map_or((0, 0, false), |known| (known.asked, known.inside, known.is_asked));
        let supervisor = status.supervisor_pid;
        let known = Known { record, supervisor, row: row.clone(), asked, inside, is_asked };
        self.known.insert(row.id.clone(), known);
        is_new.then_some(row)
    }

    /// Those whose turn it is to be asked. Blocks.
    pub fn due(&mut self) -> Vec<Ask> {
        let busy = self.known.values().filter(|known| known.is_asked).count();
        let mut due: Vec<&mut Known> = self
            .known
            .values_mut()
            .filter(|known| known.row.is_alive() && known.supervisor > 0 && !known.is_asked)
            .collect();
        due.sort_by_key(|known| known.asked);
        due.truncate(ASKED_MAX.saturating_sub(busy));
        let places: Vec<(&str, i32)> =
            due.iter().map(|known| (known.row.id.as_str(), known.supervisor)).collect();
        let used = CellUse::of_cells(&places);
        let has_guest =
            |row: &Row| row.strength == Strength::Vm && row.state == State::Running.name();
        let mut guests: Vec<(u64, usize)> = due
            .iter()
            .enumerate()
            .filter(|(_, known)| has_guest(&known.row))
            .map(|(at, known)| (known.inside, at))
            .collect();
        guests.sort_unstable();
        guests.truncate(INSIDE_MAX);
        let mut asks = Vec::new();
        for (at, (known, used)) in due.into_iter().zip(used).enumerate() {
            let inside = guests.iter().any(|(_, guest)| *guest == at);
            (known.asked, known.is_asked) = (self.looks, true);
            known.inside = if inside { self.looks } else { known.inside };
            asks.push(Ask { record: known.record.clone(), used, inside });
        }
        asks
    }

    /// Takes in what a cell said; its row, if that is new.
    pub fn hear(&mut self, answer: Answer) -> Option<Row> {
        let known = self.known.get_mut(&answer.id)?;
        known.is_asked = false;
        let mut figures = answer.figures.filter(|_| known.row.is_alive())?;
        if let Some(before) = known.row.figures {
            let passed = figures.measured_ms.saturating_sub(before.measured_ms);
            let used = figures.cpu_ns.saturating_sub(before.cpu_ns);
            figures.cpu_percent = (passed > 0).then(|| used as f64 / passed as f64 / 1e4);
            figures.used_bytes = figures.used_bytes.or(before.used_bytes);
        }
        known.row.figures = Some(figures);
        Some(known.row.clone())
    }

    /// The cells that live, and their records.
    pub fn living(&self) -> Vec<Record> {
        let living = self.known.values().filter(|known| known.row.is_alive());
        living.map(|known| known.record.clone()).collect()
    }
}

/// Those that are shown.
fn chosen(mut all: Vec<(Record, CellSpec, Status)>) -> Vec<(Record, CellSpec, Status)> {
    let has_ended = |status: &Status| status.state == State::Exited;
    all.sort_by_key(|(_, spec, status)| {
        let at = if has_ended(status) { status.finished_ms } else { spec.created_ms };
        std::cmp::Reverse(at)
    });
    let (mut living, mut ended) = (0, 0);
    all.retain(|(_, _, status)| {
        let (count, most) = match has_ended(status) {
            true => (&mut ended, ENDED_MAX),
            false => (&mut living, LIVING_MAX),
        };
        *count += 1;
        *count <= most
    });
    all
}

impl Ask {
    /// Asks it. Blocks, for as long as its supervisor and its guest may take.
    pub fn ask(self) -> Answer {
        let id = self.record.id.clone();
        let figures = self.figures().ok();
        Answer { id, figures }
    }

    fn figures(&self) -> Result<Figures, CellError> {
        let counters = match Client::connect(&self.record)?.ask(&ControlRequest::Counters)? {
            ControlReply::Counters(counters) => counters,
            _ => return Err(CellError::Guest("the supervisor broke the protocol".to_owned())),
        };
        let network = |name: &str| counters.devices.get("network")?.get(name).copied();
        let inside = || {
            let stream = Client::connect(&self.record).ok()?.guest_stream().ok()?;
            client::stats(&stream, &stream).ok()
        };
        let inside = if self.inside { inside() } else { None };
        Ok(Figures {
            held_bytes: counters.memory_allocated_bytes + self.used.memory.anonymous_bytes,
            limit_bytes: counters.memory_limit_bytes,
            used_bytes: inside
                .map(|stats| stats.memory_total_bytes.saturating_sub(stats.memory_available_bytes)),
            cpu_ns: self.used.cpu_ns,
            cpu_percent: None,
            disk_bytes: counters.disk_allocated_bytes,
            process_count: self.used.process_count,
            received_bytes: network("received_bytes"),
            sent_bytes: network("sent_bytes"),
            measured_ms: now_ms(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cells that run, as far as their records say.
    fn cells(count: usize) -> Cells {
        let mut cells = Cells::new(&Layout::new("/nowhere"));
        for at in 0..count {
            let id = format!("{at:064}");
            let row = Row {
                id: id.clone(),
                name: String::new(),
                image: String::new(),
                door: "",
                strength: Strength::Vm,
                state: "running",
                exit_code: None,
                reason: String::new(),
                created_ms: 0,
                started_ms: 0,
                finished_ms: 0,
                figures: None,
            };
            let record = Record::at(&cells.layout, &id);
            let supervisor = i32::MAX;
            let known = Known { record, supervisor, row, asked: 0, inside: 0, is_asked: false };
            cells.known.insert(id, known);
        }
        cells
    }

    #[test]
    fn many_cells_are_asked_in_turns() {
        let mut cells = cells(500);
        let (mut asked, mut inside) = (BTreeSet::new(), 0);
        for _ in 0..16 {
            cells.looks += 1;
            let asks = cells.due();
            assert!(asks.len() <= ASKED_MAX && cells.due().is_empty(), "as many as may be at once");
            inside += asks.iter().filter(|ask| ask.inside).count();
            for ask in asks {
                asked.insert(ask.record.id.clone());
                // One that says nothing is asked again when it is its turn.
                assert_eq!(cells.hear(Answer { id: ask.record.id, figures: None }), None);
            }
        }
        assert_eq!((asked.len(), inside), (500, 16 * INSIDE_MAX));
        // Those who keep silent take the places of others, and no more.
        for _ in 0..3 {
            cells.looks += 1;
            cells.due();
        }
        assert_eq!(cells.known.values().filter(|known| known.is_asked).count(), ASKED_MAX);
    }

    #[test]
    fn what_was_computed_is_told_of_the_time_between_two_looks() {
        let mut cells = cells(1);
        let id = cells.known.keys().next().unwrap().clone();
        let mut say = |cpu_ns, measured_ms, used_bytes| {
            let figures = Figures {
                held_bytes: 1,
                limit_bytes: 2,
                used_bytes,
                cpu_ns,
                cpu_percent: None,
                disk_bytes: 0,
                process_count: 1,
                received_bytes: None,
                sent_bytes: None,
                measured_ms,
            };
            let row = cells.hear(Answer { id: id.clone(), figures: Some(figures) }).unwrap();
            let figures = row.figures.unwrap();
            (figures.cpu_percent, figures.used_bytes)
        };
        assert_eq!(say(5_000_000_000, 1000, Some(7)), (None, Some(7)));
        assert_eq!(say(6_000_000_000, 3000, None), (Some(50.0), Some(7)));
        assert_eq!(say(5_000_000_000, 4000, Some(8)), (Some(0.0), Some(8)));
    }
}
