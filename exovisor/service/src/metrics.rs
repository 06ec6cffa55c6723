//! What tenants used, as JSON and in the text format of Prometheus.

pub(crate) use exocell_exovisor::Stats;

use exocell_exovisor::Slots;
use serde_json::{Value, json};
use std::fmt::Write;

/// One tenant: what its calls came to, and what was refused before any.
pub(crate) struct Tenant<'a> {
    pub name: &'a str,
    pub stats: Stats,
    pub denials: u64,
}

/// Where the isolates of all tenants lie.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub slots: Slots,
    /// Isolates for which there is room.
    pub isolates: u32,
}

type Metric = (&'static str, &'static str, fn(&Tenant<'_>) -> f64);

const METRICS: [Metric; 7] = [
    ("exocell_invocations_total", "Calls that are over.", |t| t.stats.calls as f64),
    ("exocell_cpu_seconds_total", "CPU time of calls.", |t| t.stats.cpu_ns as f64 / 1e9),
    ("exocell_traps_total", "Calls that trapped.", |t| t.stats.traps as f64),
    ("exocell_limits_total", "Calls that ran out of memory or fuel.", |t| t.stats.limits as f64),
    ("exocell_ended_total", "Calls ended at a deadline or stopped.", |t| t.stats.ended as f64),
    ("exocell_preemptions_total", "Times the CPU was taken.", |t| t.stats.preemptions as f64),
    ("exocell_denials_total", "Requests refused.", |t| t.denials as f64),
];

/// Names are checked when modules are added, so they need no escapes.
pub(crate) fn prometheus(tenants: &[Tenant<'_>], place: Place) -> String {
    let Place { slots, isolates } = place;
    let mut text = format!(
        "# HELP exocell_slots Isolates for which there is room, by how their memories lie.\n\
         # TYPE exocell_slots gauge\nexocell_slots{{kind=\"{}\"}} {isolates}\n",
        slots.name()
    );
    for (name, help, value) in METRICS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for tenant in tenants {
            let _ = writeln!(text, "{name}{{tenant=\"{}\"}} {}", tenant.name, value(tenant));
        }
    }
    text
}

pub(crate) fn json(tenant: &Tenant<'_>, place: Place) -> Value {
    let Stats { calls, cpu_ns, traps, limits, ended, preemptions } = tenant.stats;
    json!({
        "tenant": tenant.name, "invocations": calls, "cpu_ns": cpu_ns, "traps": traps,
        "limits": limits, "ended": ended, "preemptions": preemptions, "denials": tenant.denials,
        "slots": place.slots.name(),
    })
}
