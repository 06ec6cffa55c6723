//! `GET /containers/{id}/stats` and `/top`.

use std::sync::Arc;
use std::time::Duration;

use exocell_cell::agent::client::{self, ClientError};
use exocell_cell::agent::{Exec, FailureKind, printable, printable_lines};
use exocell_cell::clock::{NEVER, rfc3339_ms};
use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::processes::CellUse;
use exocell_cell::{Record, State, Status, now_ms};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::containers::Seen;
use crate::error::{ApiError, ApiResult};
use crate::http::{Body, Call, Response, json as reply, stream};
use crate::state::Server;

/// How often a stream of figures goes on.
const INTERVAL: Duration = Duration::from_secs(1);
/// What `ps` is asked for where the client does not say: no start times, for a
/// guest knows no time of its boot.
pub const TOP_ARGUMENTS: &str = "-eo user,pid,ppid,tty,time,args";
/// The guest's list of processes, in bytes.
const TOP_BYTES_MAX: usize = 1 << 20;

/// `GET /containers/{id}/stats`
pub async fn stats(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let query = &call.target.query;
    let seen = server.find(key).await?;
    if !query.flag_or("stream", true) {
        let mut before = Value::Null;
        if !query.flag("one-shot") && seen.is_running() {
            before = figures(server, &seen, &Value::Null).await?;
            tokio::time::sleep(INTERVAL).await;
        }
        let now = figures(server, &seen, &before).await?;
        return Ok(reply(StatusCode::OK, &now));
    }
    let (sender, body) = Body::stream();
    let server = server.clone();
    tokio::spawn(async move {
        let mut before = Value::Null;
        loop {
            let Ok(now) = figures(&server, &seen, &before).await else { return };
            if !sender.line(&now).await {
                return;
            }
            before = now;
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                () = sender.closed() => return,
            }
            match server.find(seen.id()).await {
                Ok(seen) if seen.is_running() => {}
                _ => return,
            }
        }
    });
    Ok(stream("application/json", body))
}

/// The figures of now, with those of `before` beside them. A container that
/// does not run has none.
async fn figures(server: &Arc<Server>, seen: &Seen, before: &Value) -> ApiResult<Value> {
    let cell = seen.cell.clone().filter(|(_, status)| status.state == State::Running);
    let (name, id) = (seen.container.name().to_owned(), seen.id().to_owned());
    let vcpus = server.defaults.vcpus;
    let mut now = server
        .blocking(move |_| match &cell {
            Some((record, status)) => measure(record, status, vcpus),
            None => Ok(nothing()),
        })
        .await?;
    now["precpu_stats"] = match before {
        Value::Null => nothing()["cpu_stats"].clone(),
        before => before["cpu_stats"].clone(),
    };
    now["preread"] = before["read"].as_str().unwrap_or(NEVER).into();
    now["name"] = format!("/{name}").into();
    now["id"] = id.into();
    Ok(now)
}

fn nothing() -> Value {
    json!({
        "read": NEVER, "pids_stats": {}, "num_procs": 0, "storage_stats": {}, "memory_stats": {},
        "cpu_stats": { "cpu_usage": { "total_usage": 0, "usage_in_kernelmode": 0,
            "usage_in_usermode": 0 }, "throttling_data": { "periods": 0, "throttled_periods": 0,
            "throttled_time": 0 } },
        "blkio_stats": { "io_service_bytes_recursive": null },
    })
}

/// What the host sees of a cell.
fn measure(record: &Record, status: &Status, vcpus: u32) -> ApiResult<Value> {
    let counters = match Client::connect(record)?.ask(&ControlRequest::Counters)? {
        ControlReply::Counters(counters) => counters,
        _ => return Err(ApiError::internal("the supervisor broke the protocol")),
    };
    let host = CellUse::of_cell(&record.id, status.supervisor_pid);
    let memory = counters.memory_allocated_bytes + host.memory.anonymous_bytes;
    let mut now = nothing();
    now["read"] = rfc3339_ms(now_ms()).into();
    now["num_procs"] = 0.into();
    now["pids_stats"] = json!({ "current": host.process_count });
    now["memory_stats"] =
        json!({ "usage": memory, "limit": counters.memory_limit_bytes, "stats": {} });
    now["cpu_stats"]["cpu_usage"]["total_usage"] = host.cpu_ns.into();
    now["cpu_stats"]["cpu_usage"]["usage_in_usermode"] = host.cpu_ns.into();
    now["cpu_stats"]["system_cpu_usage"] = host_cpu_ns().into();
    now["cpu_stats"]["online_cpus"] = vcpus.into();
    let io = |op: &str, value: u64| json!({ "major": 0, "minor": 0, "op": op, "value": value });
    now["networks"] = json!({});
    if let Some(link) = counters.devices.get("network") {
        let count = |name: &str| link.get(name).copied().unwrap_or(0);
        now["networks"] = json!({ "eth0": {
            "rx_bytes": count("received_bytes"), "rx_packets": count("received_packets"),
            "rx_errors": 0, "rx_dropped": 0,
            "tx_bytes": count("sent_bytes"), "tx_packets": count("sent_packets"),
            "tx_errors": 0, "tx_dropped": count("dropped_frames"),
        }});
    }
    now["blkio_stats"]["io_service_bytes_recursive"] =
        json!([io("read", counters.block_read_bytes), io("write", counters.block_written_bytes),]);
    Ok(now)
}

/// CPU time of the whole host, idle time included (proc_stat(5)): what clients
/// divide a container's by.
fn host_cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let ticks: u64 =
        line.split_ascii_whitespace().skip(1).take(8).filter_map(|f| f.parse::<u64>().ok()).sum();
    // A tick is 10 ms on every x86-64 Linux (USER_HZ).
    ticks * 10_000_000
}

/// `GET /containers/{id}/top`: `ps` of the container's own.
pub async fn top(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let wanted = call.target.query.get("ps_args").map(str::to_owned);
    let seen = server.find(key).await?;
    let record = seen.awake()?.0.clone();
    let env = seen.container.config.env.clone();
    let listed = server.blocking(move |_| match &wanted {
        Some(arguments) => list(&record, env, arguments),
        // A small image's ps knows few columns, or none to choose.
        None => list(&record, env.clone(), TOP_ARGUMENTS).or_else(|_| list(&record, env, "")),
    });
    let text = listed.await?;
    let mut lines = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let titles = lines.next().unwrap_or_default();
    let columns = titles.len();
    let rows = lines.map(|fields| {
        // The last column is the command, blanks and all.
        let at = columns.saturating_sub(1).min(fields.len());
        let (first, rest) = fields.split_at(at);
        let mut row: Vec<String> = first.iter().map(|field| (*field).to_owned()).collect();
        row.push(rest.join(" "));
        row
    });
    let processes: Vec<_> = rows.collect();
    Ok(reply(StatusCode::OK, &json!({ "Titles": titles, "Processes": processes })))
}

pub fn list(record: &Record, env: Vec<String>, arguments: &str) -> ApiResult<String> {
    let stream = Client::connect(record)?.guest_stream()?;
    let words = ["ps"].into_iter().chain(arguments.split_ascii_whitespace());
    let args = words.map(str::to_owned).collect();
    let exec = Exec { args, env, cwd: "/".to_owned(), user: "0".to_owned(), ..Exec::default() };
    let refused = |error: ClientError| match error {
        ClientError::Failed { kind: FailureKind::NotFound, .. } => ApiError::unsupported(
            "top without ps in the image",
            "add procps to it, or read /proc with exec",
        ),
        error => ApiError::internal(error.to_string()),
    };
    let mut session = client::exec(&stream, &stream, &exec).map_err(refused)?;
    let (mut out, mut err) = (Bounded::default(), Bounded::default());
    let code = session.output.pump(&mut out, &mut err).map_err(refused)?;
    // Names of processes are the guest's, and end on a terminal.
    let text = |bounded: Bounded| String::from_utf8_lossy(&bounded.0).into_owned();
    match code {
        0 => Ok(without_own(&printable_lines(&text(out)), &exec.args.join(" "))),
        code => {
            let said = text(err);
            let why = format!("ps exited with {code}: {}", printable(said.trim()));
            Err(ApiError::bad_request(why))
        }
    }
}

/// The list without the process that made it: the last one that is called so.
fn without_own(listed: &str, own: &str) -> String {
    let lines: Vec<&str> = listed.lines().collect();
    let is_own = |line: &&str| line.ends_with(own) && line.split_ascii_whitespace().count() > 1;
    let at = lines.iter().skip(1).rposition(is_own).map(|at| at + 1);
    let kept = lines.iter().enumerate().filter(|(line, _)| Some(*line) != at);
    kept.map(|(_, line)| format!("{line}\n")).collect()
}

/// Takes a guest's word only so far.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > TOP_BYTES_MAX {
            return Err(std::io::Error::other("the guest's list is too long"));
        }
        self.0.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_makes_the_list_is_not_in_it() {
        let listed =
            "PID   USER     TIME  COMMAND\n    1 root      0:00 sleep 9\n    7 root      0:00 ps\n";
        assert_eq!(without_own(listed, "ps").lines().count(), 2);
        let all = "PID CMD\n1 ps -e\n2 sh\n9 ps -e\n";
        assert_eq!(without_own(all, "ps -e"), "PID CMD\n1 ps -e\n2 sh\n");
        assert_eq!(without_own("PID CMD\n1 sh\n", "ps"), "PID CMD\n1 sh\n");
    }
}
