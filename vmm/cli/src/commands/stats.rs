//! `exocell stats`: what running cells use, by the host's own figures; the
//! guest's are shown beside them as its claims.

use exocell_cell::agent::{GuestStats, client};
use exocell_cell::control::{Client, ControlReply, ControlRequest, Counters};
use exocell_cell::platform::PlatformKind;
use exocell_cell::processes::CellUse;
use exocell_cell::{CellError, Layout, Record, State, Strength};
use serde::Serialize;

use super::print_json;
use super::run::must_run;
use crate::args::StatsArgs;
use crate::show;

/// Cells that are asked at once, each by a thread.
const ASKED_MAX: usize = 128;

#[derive(Serialize)]
pub struct Row {
    pub id: String,
    pub name: String,
    pub strength: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformKind>,
    /// Guest memory the host holds, plus the processes' own.
    pub host_memory_bytes: u64,
    pub host: CellUse,
    pub counters: Counters,
    /// The guest's own account; `null` for an isolate, a paused or a silent
    /// guest.
    guest_claims: Option<GuestStats>,
}

pub fn stats(layout: &Layout, args: &StatsArgs) -> Result<u8, CellError> {
    let mut rows = Vec::new();
    for row in ask_all(&keys(layout, args)?, |key| row(layout, key)) {
        match row {
            Ok(row) => rows.push(row),
            // A cell may end between being listed and being asked.
            Err(_) if args.cells.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    if args.json {
        for row in &rows {
            print_json(row, false)?;
        }
        return Ok(0);
    }
    let cells: Vec<Vec<String>> = rows.iter().map(columns).collect();
    show::table(&["CELL ID", "NAME", "CPU", "MEMORY / LIMIT", "DISK", "PROCESSES"], &cells);
    Ok(0)
}

fn keys(layout: &Layout, args: &StatsArgs) -> Result<Vec<String>, CellError> {
    if !args.cells.is_empty() {
        return Ok(args.cells.clone());
    }
    let all = Record::all(layout)?;
    let running = all.into_iter().filter(|(_, _, status)| status.state == State::Running);
    Ok(running.map(|(record, _, _)| record.id).collect())
}

/// What `ask` says of each of `keys`, in their order. Many are asked at once: each may be silent.
pub fn ask_all<T: Send>(
    keys: &[String],
    ask: impl Fn(&str) -> Result<T, CellError> + Sync,
) -> Vec<Result<T, CellError>> {
    let ask = &ask;
    let mut answers = Vec::new();
    for keys in keys.chunks(ASKED_MAX) {
        std::thread::scope(|scope| {
            let asked: Vec<_> = keys.iter().map(|key| scope.spawn(move || ask(key))).collect();
            let broken = || CellError::Guest("the thread that asked it has panicked".to_owned());
            answers.extend(asked.into_iter().map(|it| it.join().unwrap_or_else(|_| Err(broken()))));
        });
    }
    answers
}

/// The figures of one cell.
///
/// # Errors
/// It does not run, or its supervisor does not answer.
pub fn row(layout: &Layout, key: &str) -> Result<Row, CellError> {
    let (record, spec, status) = Record::find(layout, key)?;
    if spec.warm.is_none() {
        must_run(&record, status.state)?;
    }
    let counters = match Client::connect(&record)?.ask(&ControlRequest::Counters)? {
        ControlReply::Counters(counters) => counters,
        _ => return Err(CellError::Guest("the supervisor broke the protocol".to_owned())),
    };
    let guest_claims = match spec.strength {
        Strength::Isolate => None,
        Strength::Vm => {
            let stream = Client::connect(&record)?.guest_stream().ok();
            stream.and_then(|stream| client::stats(&stream, &stream).ok())
        }
    };
    let host = CellUse::of_cell(&record.id, status.supervisor_pid);
    Ok(Row {
        platform: spec.guest_platform(),
        id: record.id,
        name: spec.name,
        strength: spec.strength.to_string(),
        host_memory_bytes: counters.memory_allocated_bytes + host.memory.anonymous_bytes,
        host,
        counters,
        guest_claims,
    })
}

fn columns(row: &Row) -> Vec<String> {
    let limit = show::bytes(row.counters.memory_limit_bytes);
    vec![
        row.id[..12].to_owned(),
        row.name.clone(),
        format!("{:.2} s", row.host.cpu_ns as f64 / 1e9),
        format!("{} / {limit}", show::bytes(row.host_memory_bytes)),
        show::bytes(row.counters.disk_allocated_bytes),
        row.host.process_count.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn guests_are_asked_side_by_side() {
        let keys: Vec<String> = (0..3).map(|key| key.to_string()).collect();
        // None answers before all were asked.
        let all = Barrier::new(keys.len());
        let answers = ask_all(&keys, |key| {
            all.wait();
            Ok(key.to_owned())
        });
        let answers: Vec<String> = answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers, keys);
    }
}
