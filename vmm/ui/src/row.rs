//! What a page is told of one cell.

use exocell_cell::agent::printable;
use exocell_cell::{CellSpec, Record, State, Status, Strength};
use serde::Serialize;

/// The longest text of a cell's that is told, in characters.
const TEXT_CHARS_MAX: usize = 256;
/// Whose a cell is, by a label of its.
const KINDS: [(&str, &str); 3] = [
    ("exocell.e2b.tenant", "e2b"),
    ("exocell.e2b.pool", "e2b, waits"),
    ("containerd.id", "containerd"),
];

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub id: String,
    pub name: String,
    pub image: String,
    /// The door by which it was asked for, where that leaves a label.
    pub door: &'static str,
    pub strength: Strength,
    /// `created`, `running`, `paused`, `restarting` or `exited`.
    pub state: &'static str,
    pub exit_code: Option<u8>,
    pub reason: String,
    /// Milliseconds since the epoch; 0 where it did not happen.
    pub created_ms: u64,
    pub started_ms: u64,
    pub finished_ms: u64,
    /// Of one that runs, once it was asked.
    pub figures: Option<Figures>,
}

/// What a cell uses.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Memory of the host: the guest's, and the processes' own.
    pub held_bytes: u64,
    pub limit_bytes: u64,
    /// What the guest says that its programs use: a claim.
    pub used_bytes: Option<u64>,
    pub cpu_ns: u64,
    /// Of one processor, since the look before.
    pub cpu_percent: Option<f64>,
    pub disk_bytes: u64,
    pub process_count: usize,
    pub received_bytes: Option<u64>,
    pub sent_bytes: Option<u64>,
    /// Milliseconds since the epoch.
    pub measured_ms: u64,
}

impl Row {
    pub fn of(record: &Record, spec: &CellSpec, status: &Status) -> Self {
        let door = KINDS.iter().find(|(label, _)| spec.labels.contains_key(*label));
        Self {
            id: record.id.clone(),
            name: shown(&spec.name),
            image: shown(&spec.image),
            door: door.map_or("", |(_, door)| door),
            strength: spec.strength,
            state: match status.state {
                State::Exited if record.is_restarting(spec, status) => "restarting",
                State::Running if record.is_paused() => "paused",
                state => state.name(),
            },
            exit_code: status.exit_code,
            reason: status.reason.as_deref().map(shown).unwrap_or_default(),
            created_ms: spec.created_ms,
            started_ms: status.started_ms,
            finished_ms: status.finished_ms,
            figures: None,
        }
    }

    /// Whether it has processes.
    pub fn is_alive(&self) -> bool {
        matches!(self.state, "running" | "paused")
    }
}

/// A text of a cell's, fit to be shown.
pub fn shown(text: &str) -> String {
    let text = printable(text);
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}
