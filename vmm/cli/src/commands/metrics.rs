//! `exocell metrics`: figures of all running cells for Prometheus, under the names that cAdvisor
//! gives those of containers.
//!
//! They are the host's own; of the guest's claims there is none. What cAdvisor has and a cell has
//! not is left out, so that nobody reads 0 for it.

use std::collections::BTreeMap;
use std::fmt::Write;

use exocell_cell::{CellError, CellSpec, Layout, Record, State, Status};

use super::stats::{Row, ask_all, row};
use crate::show::say;

/// What is known of one cell.
struct Cell {
    labels: String,
    started_s: f64,
    row: Row,
}

/// A figure: its name, its kind, what it is, and where a cell has it.
type Metric = (&'static str, &'static str, &'static str, fn(&Cell) -> Option<f64>);

const METRICS: [Metric; 12] = [
    ("container_start_time_seconds", "gauge", "When the program began, since 1970.", |cell| {
        Some(cell.started_s)
    }),
    (
        "container_cpu_usage_seconds_total",
        "counter",
        "CPU time of the cell's processes on the host.",
        |cell| Some(cell.row.host.cpu_ns as f64 / 1e9),
    ),
    (
        "container_memory_usage_bytes",
        "gauge",
        "Memory of the host: the guest's, and the processes' own.",
        |cell| Some(cell.row.host_memory_bytes as f64),
    ),
    (
        "container_memory_working_set_bytes",
        "gauge",
        "The same: the host takes none of it back by itself.",
        |cell| Some(cell.row.host_memory_bytes as f64),
    ),
    (
        "container_spec_memory_limit_bytes",
        "gauge",
        "The most memory that the guest may have.",
        |cell| Some(cell.row.counters.memory_limit_bytes as f64),
    ),
    ("container_processes", "gauge", "Processes of the cell on the host.", |cell| {
        Some(cell.row.host.process_count as f64)
    }),
    ("container_fs_usage_bytes", "gauge", "What the private disk takes of the host's.", |cell| {
        Some(cell.row.counters.disk_allocated_bytes as f64)
    }),
    ("container_fs_reads_bytes_total", "counter", "Bytes that the guest read of disks.", |cell| {
        Some(cell.row.counters.block_read_bytes as f64)
    }),
    (
        "container_fs_writes_bytes_total",
        "counter",
        "Bytes that the guest wrote to disks.",
        |cell| Some(cell.row.counters.block_written_bytes as f64),
    ),
    (
        "container_network_receive_bytes_total",
        "counter",
        "Bytes that the guest was sent.",
        |cell| cell.network("received_bytes"),
    ),
    ("container_network_transmit_bytes_total", "counter", "Bytes that the guest sent.", |cell| {
        cell.network("sent_bytes")
    }),
    (
        "container_network_receive_packets_dropped_total",
        "counter",
        "Frames that the guest did not take.",
        |cell| cell.network("dropped_frames"),
    ),
];

impl Cell {
    /// A counter of the network device, where there is one.
    fn network(&self, name: &str) -> Option<f64> {
        self.row.counters.devices.get("network")?.get(name).map(|count| *count as f64)
    }
}

pub fn metrics(layout: &Layout) -> Result<u8, CellError> {
    let all = Record::all(layout)?;
    let mut states = BTreeMap::from([State::Created, State::Running, State::Exited].map(|state| {
        let count = all.iter().filter(|(_, _, status)| status.state == state).count();
        (state.name(), count)
    }));
    let running: Vec<_> =
        all.into_iter().filter(|(_, _, status)| status.state == State::Running).collect();
    let ids: Vec<String> = running.iter().map(|(record, _, _)| record.id.clone()).collect();
    let rows = ask_all(&ids, |id| row(layout, id));
    let asked = running.iter().zip(rows);
    // A cell may end between being listed and being asked.
    let cells: Vec<Cell> = asked
        .filter_map(|((_, spec, status), row)| row.ok().map(|row| cell(spec, status, row)))
        .collect();
    if cells.len() < ids.len()
        && let Some(count) = states.get_mut(State::Running.name())
    {
        *count = cells.len();
    }
    say!("{}", text(&cells, &states).trim_end());
    Ok(0)
}

fn cell(spec: &CellSpec, status: &Status, row: Row) -> Cell {
    let mut labels = format!(
        "id=\"/exocell/{}\",name=\"{}\",image=\"{}\",strength=\"{}\"",
        escaped(&row.id),
        escaped(&row.name),
        escaped(&spec.image),
        escaped(&row.strength),
    );
    if let Some(platform) = row.platform {
        let _ = write!(labels, ",platform=\"{platform}\"");
    }
    // As cAdvisor names them under Kubernetes; a pod's cell has those of all of its containers.
    if let (Some(namespace), Some(id)) =
        (spec.labels.get("containerd.namespace"), spec.labels.get("containerd.id"))
    {
        let _ = write!(
            labels,
            ",containerd_namespace=\"{}\",containerd_id=\"{}\"",
            escaped(namespace),
            escaped(id)
        );
    }
    Cell { labels, started_s: status.started_ms as f64 / 1e3, row }
}

/// The value of a label (Prometheus's text format).
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn text(cells: &[Cell], states: &BTreeMap<&str, usize>) -> String {
    let mut text = format!(
        "# HELP exocell_build_info The version of this command.\n\
         # TYPE exocell_build_info gauge\nexocell_build_info{{version=\"{}\"}} 1\n\
         # HELP exocell_cells Cells by their state.\n# TYPE exocell_cells gauge\n",
        env!("CARGO_PKG_VERSION")
    );
    // Writing to a string cannot fail.
    for (state, count) in states {
        let _ = writeln!(text, "exocell_cells{{state=\"{state}\"}} {count}");
    }
    for (name, kind, help, value) in METRICS {
        let of = cells.iter().filter_map(|cell| Some((&cell.labels, value(cell)?)));
        let lines: Vec<String> =
            of.map(|(labels, value)| format!("{name}{{{labels}}} {value}")).collect();
        if !lines.is_empty() {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            lines.iter().for_each(|line| text.push_str(&format!("{line}\n")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_as_prometheus_reads_them() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
        let text = text(&[], &BTreeMap::from([("running", 0)]));
        assert!(text.contains("exocell_cells{state=\"running\"} 0\n"), "{text}");
        assert!(!text.contains("container_"), "{text}");
    }
}
