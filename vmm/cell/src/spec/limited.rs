//! What limits that an operator changes do to how a cell is made.

use std::path::Path;

use exocell_xgate::CapabilitySet;
use serde_json::Value;

use super::CellSpec;
use crate::CellError;
use crate::limits::{Limits, processors, weight};
use crate::settings::UNLIMITED;

impl Limits {
    /// Refuses more processors than a running cell has that was made as `spec`. Of memory and
    /// processes its guest knows what it was started with.
    ///
    /// # Errors
    /// It is so.
    pub fn check_running(&self, spec: &CellSpec) -> Result<(), CellError> {
        let most = CapabilitySet::parse(&spec.capabilities, Path::new("/"))?.vcpus();
        match self.cpu.and_then(processors) {
            Some(wanted) if wanted > u64::from(most) => Err(CellError::Usage(format!(
                "{wanted} processors are more than the {most} that the cell was started with; stop \
                 it, change it, and start it again"
            ))),
            _ => Ok(()),
        }
    }

    /// Has the next start of a cell made as `spec` keep to them.
    ///
    /// # Errors
    /// Its capability table cannot be read.
    pub fn apply(&self, spec: &mut CellSpec) -> Result<(), CellError> {
        let settings = &mut spec.settings;
        if let Some(cpu) = self.cpu {
            settings.cpu = Some(cpu).filter(|cpu| cpu.quota_us != UNLIMITED);
        }
        settings.cpu_shares = self.cpu_shares.or(settings.cpu_shares);
        settings.cpuset = self.cpuset.clone().or(settings.cpuset.take());
        settings.memory_reservation = self.memory_reservation.or(settings.memory_reservation);
        if let (Some(within), Some(bytes)) = (&mut spec.within, self.memory_bytes) {
            within.memory_bytes = Some(bytes);
        }
        if let (Some(within), Some(count)) = (&mut spec.within, self.process_max) {
            within.process_max = Some(count);
        }
        let own = CapabilitySet::parse(&spec.capabilities, Path::new("/"))?;
        let mut table: Value = serde_json::from_str(&spec.capabilities).unwrap_or_default();
        if let Some(bytes) = self.memory_bytes {
            table["memory"]["limit"] = bytes.to_string().into();
            // What was changed of that before is over.
            spec.changes.memory_bytes = None;
        }
        if let Some(count) = self.process_max {
            table["processes"]["max"] = count.into();
        }
        let processors = self.cpu.and_then(processors).and_then(|count| u32::try_from(count).ok());
        // A running one has those that it has.
        if let Some(count) = processors.filter(|count| *count > own.vcpus()) {
            table["cpu"]["count"] = count.into();
        }
        if let Some(shares) = self.cpu_shares {
            table["cpu"]["weight"] = weight(shares).into();
        }
        let table = table.to_string();
        CapabilitySet::parse(&table, Path::new("/"))?;
        spec.capabilities = table;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::CpuTime;
    use serde_json::json;

    fn spec() -> CellSpec {
        let table = r#"{"version": 1, "memory": {"limit": "64M"}, "processes": {"max": 9}, "cpu": {"count": 2, "weight": 100}}"#;
        serde_json::from_value(json!({
            "version": 1, "id": "0".repeat(32), "name": "s", "strength": "vm", "image": "i",
            "entrypoint": null, "command": [], "env": [], "working_dir": null, "user": null,
            "hostname": null, "tty": false, "stdin": false, "remove": false, "read_only": false,
            "capabilities": table, "created_ms": 0,
        }))
        .expect("a spec")
    }

    #[test]
    fn the_next_start_keeps_to_what_was_changed() {
        let half = CpuTime { quota_us: 50_000, period_us: 100_000 };
        let limits = Limits {
            cpu: Some(half),
            cpu_shares: Some(512),
            memory_bytes: Some(96 << 20),
            process_max: Some(7),
            ..Limits::default()
        };
        let mut changed = spec();
        limits.apply(&mut changed).unwrap();
        let caps = CapabilitySet::parse(&changed.capabilities, Path::new("/")).unwrap();
        assert_eq!((caps.memory_bytes(), caps.process_max()), (Some(96 << 20), Some(7)));
        assert_eq!((caps.vcpus(), caps.cpu().unwrap().weight), (2, 50));
        assert_eq!((changed.settings.cpu, changed.settings.cpu_shares), (Some(half), Some(512)));
        let unlimited =
            Limits { cpu: Some(CpuTime { quota_us: UNLIMITED, ..half }), ..Limits::default() };
        unlimited.apply(&mut changed).unwrap();
        assert_eq!((changed.settings.cpu, changed.settings.cpu_shares), (None, Some(512)));
    }

    #[test]
    fn a_running_cell_has_no_more_processors_than_it_began_with() {
        let of = |nano| Limits { cpu: Some(CpuTime::of_nano_cpus(nano)), ..Limits::default() };
        of(1_500_000_000).check_running(&spec()).unwrap();
        let refused = of(2_500_000_000).check_running(&spec()).unwrap_err().to_string();
        assert!(refused.contains("3 processors are more than the 2"), "{refused}");
        let cpu = of(1).resources(true).cpu.unwrap();
        assert_eq!((cpu.quota, cpu.period), (Some(1), Some(100_000)));
        let none = CpuTime { quota_us: UNLIMITED, period_us: 100_000 };
        let none = Limits { cpu: Some(none), memory_bytes: Some(5), ..Limits::default() };
        assert_eq!(none.resources(false).memory.unwrap().limit, None);
        assert_eq!(none.resources(true).memory.unwrap().limit, Some(5));
        assert_eq!(none.resources(true).cpu.unwrap().quota, Some(-1));
    }
}
