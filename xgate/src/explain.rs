//! A grant in words: what each capability lets a `vm` cell and an `isolate` do.

use crate::amount::{format_bytes, format_duration};
use crate::{Capability, CapabilitySet, Kind, Rights, Scope};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// One row of an explanation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// Name of the capability, or of the kind when nothing of it is granted.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// Whether anything is granted.
    pub granted: bool,
    /// Its rights, joined by commas.
    pub rights: String,
    /// What it covers and how much.
    pub scope: String,
    /// What a `vm` cell may do.
    pub vm: String,
    /// What an `isolate` may do.
    pub isolate: String,
}

impl CapabilitySet {
    /// Explains every kind, granted or not, by kind.
    #[must_use]
    pub fn explain(&self) -> Vec<Explained> {
        let held = self.capabilities("");
        let mut rows = Vec::new();
        for kind in Kind::ALL {
            let of_kind = held.iter().filter(|capability| capability.kind() == *kind);
            let before = rows.len();
            rows.extend(of_kind.map(granted));
            if rows.len() == before {
                rows.push(not_granted(*kind));
            }
        }
        rows
    }
}

/// The rows as a table for people.
#[must_use]
pub fn explain_table(rows: &[Explained]) -> String {
    let widths = [
        rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(10),
        rows.iter().map(|row| row.rights.len()).max().unwrap_or(0).max(6),
    ];
    let mut text = String::new();
    for row in rows {
        let [name, rights] = widths;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:name$}  {:rights$}  {}", row.name, row.rights, row.scope);
        let _ = writeln!(text, "{:name$}  {:rights$}    vm:      {}", "", "", row.vm);
        let _ = writeln!(text, "{:name$}  {:rights$}    isolate: {}", "", "", row.isolate);
    }
    text
}

/// The rows as JSON for programs.
#[must_use]
pub fn explain_json(rows: &[Explained]) -> String {
    serde_json::to_string_pretty(rows).unwrap_or_default()
}

fn granted(capability: &Capability) -> Explained {
    let (vm, isolate) = meaning(capability);
    Explained {
        name: capability.name().to_owned(),
        kind: capability.kind().to_string(),
        granted: true,
        rights: capability.rights().to_string(),
        scope: scope(capability),
        vm,
        isolate,
    }
}

fn not_granted(kind: Kind) -> Explained {
    let (vm, isolate) = without(kind);
    Explained {
        name: kind.to_string(),
        kind: kind.to_string(),
        granted: false,
        rights: Rights::empty().to_string(),
        scope: if kind == Kind::Time || kind == Kind::Fuel { "no limit" } else { "not granted" }
            .to_owned(),
        vm: vm.to_owned(),
        isolate: isolate.to_owned(),
    }
}

/// What it covers and how much, in a person's units.
pub(crate) fn scope(capability: &Capability) -> String {
    let amount = capability.quota().0;
    match (capability.kind(), capability.scope()) {
        (Kind::Memory | Kind::Disk, _) => format_bytes(amount),
        (Kind::Time, _) => format_duration(Duration::from_nanos(amount)),
        (Kind::Cpu, Scope::Weight(weight)) => format!("{amount} vCPUs, weight {weight}"),
        (Kind::Processes | Kind::Spawn | Kind::Fuel, _) => format!("at most {amount}"),
        (_, scope) => scope.to_string(),
    }
}

fn meaning(capability: &Capability) -> (String, String) {
    let folder = |write: &str, run: &str| format!("sees it{write}{run}");
    match capability.kind() {
        Kind::Folder => {
            let rights = capability.rights();
            let write = if rights.contains(Rights::WRITE) {
                " and may change it"
            } else if rights.contains(Rights::OVERLAY) {
                " and may change a layer of its own over it"
            } else {
                ", read-only"
            };
            let run = if rights.contains(Rights::EXECUTE) {
                "; programs in it run"
            } else {
                "; programs in it do not run"
            };
            let vm = match rights.contains(Rights::OVERLAY) {
                true => "does not start: layers over folders are for isolates".to_owned(),
                false => folder(write, run),
            };
            (vm, folder(write, " (preopened)"))
        }
        kind => {
            let (vm, isolate) = with(kind);
            (vm.to_owned(), isolate.to_owned())
        }
    }
}

const NETWORK: &str = "dials these peers, is reached at these ports; speaks HTTP/1 or TLS for that \
     name to names, by /raw anything; what is said to addresses and by /udp is not looked at";

/// What a granted kind means for a `vm` cell and for an isolate.
fn with(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Memory => {
            ("the guest's whole memory, kernel included", "linear memories and tables together")
        }
        Kind::Cpu => (
            "so many processors; the weight ranks it against other cells",
            "so many of its threads at once; the weight ranks it against other cells",
        ),
        Kind::Disk => (
            "a private writable layer over the image, up to this size",
            "what its layers over folders hold, in memory, up to this size",
        ),
        Kind::Processes => {
            ("so many processes and threads in the guest", "so many threads, if the module has any")
        }
        Kind::Time => (
            "ended when the time is over",
            "ended when the time is over, also in the middle of a loop",
        ),
        Kind::Clock => ("the guest's clock follows the host's", "may read clocks and sleep"),
        Kind::Random => ("an entropy device", "may draw random bytes"),
        Kind::Stdio => ("its streams are attached", "its streams are attached"),
        Kind::Network => (NETWORK, NETWORK),
        Kind::Device => {
            ("names are kept; no such device yet", "names are kept; no such device yet")
        }
        Kind::Spawn => (
            "has the command `exocell`, and runs so many isolates at once under its own limits",
            "starts no isolates",
        ),
        Kind::Model => (
            "isolates in it find it in /run/exocell/models, if it starts any",
            "may have it computed (wasi_ephemeral_nn), by its name",
        ),
        Kind::Fuel => (
            "nothing: a guest kernel is not metered by instruction",
            "trapped when so many instructions are used",
        ),
        _ => ("", ""),
    }
}

/// What the lack of a kind means.
fn without(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Folder => {
            ("sees no folder of the host", "no folder is preopened; path imports are refused")
        }
        Kind::Network => ("has no network device", "socket imports are refused"),
        Kind::Memory => ("does not start", "does not start"),
        Kind::Cpu => ("does not start", "nothing changes"),
        Kind::Disk => ("its file system is read-only", "no folder has a layer over it"),
        Kind::Processes => ("does not start", "thread imports are refused"),
        Kind::Time => ("runs until it ends", "runs until it ends"),
        Kind::Clock => (
            "still reads the processor's time stamp counter; that cannot be taken away",
            "clock imports are refused",
        ),
        Kind::Random => ("has no entropy device", "random imports are refused"),
        Kind::Stdio => (
            "its output is dropped, its input is empty",
            "stream imports are refused unless a folder is granted",
        ),
        Kind::Device => ("has no further devices", "has no devices"),
        Kind::Spawn => ("starts no isolates", "starts no isolates"),
        Kind::Model => ("nothing changes", "inference imports are refused"),
        Kind::Fuel => ("is not metered by instruction", "is not metered by instruction"),
        _ => ("", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_row_and_every_row_its_words() {
        for set in [CapabilitySet::nothing(), CapabilitySet::default()] {
            let rows = set.explain();
            for kind in Kind::ALL {
                assert!(rows.iter().any(|row| row.kind == kind.name()), "{kind}");
            }
            for row in &rows {
                assert!(!row.vm.is_empty() && !row.isolate.is_empty(), "{}", row.name);
            }
        }
    }

    #[test]
    fn every_kind_has_words_when_granted() {
        for kind in Kind::ALL.iter().filter(|kind| **kind != Kind::Folder) {
            assert!(!with(*kind).0.is_empty() && !with(*kind).1.is_empty(), "{kind}");
        }
    }

    #[test]
    fn a_network_says_what_may_be_spoken() {
        let set = CapabilitySet {
            network: Some(crate::NetworkScope {
                connect: vec!["a.test:22/raw".parse().unwrap(), "a.test:443".parse().unwrap()],
                ..Default::default()
            }),
            ..CapabilitySet::default()
        };
        let table = explain_table(&set.explain());
        assert!(table.contains("connect a.test:22/raw, a.test:443"), "{table}");
        assert!(table.contains("HTTP/1 or TLS") && table.contains("by /raw anything"), "{table}");
    }

    #[test]
    fn json_and_table_name_each_capability() {
        let rows = CapabilitySet::default().explain();
        let (json, table) = (explain_json(&rows), explain_table(&rows));
        assert!(json.contains("\"scope\": \"256M\"") && table.contains("256M"), "{json}{table}");
    }
}
