//! What a container uses, as `io.containerd.cgroups.v2.Metrics`: its guest's control group.

use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use exocell_cell::agent::ContainerUsage;

use crate::error::{Result, ShimError};
use crate::events::any;

/// The type's name as containerd knows it.
const NAME: &str = "io.containerd.cgroups.v2.Metrics";

/// # Errors
/// The message cannot be written.
pub fn of(usage: &ContainerUsage) -> Result<Any> {
    let text = metrics(usage).write_to_bytes().map_err(ShimError::host("cannot write figures"))?;
    Ok(any(NAME, text))
}

fn metrics(usage: &ContainerUsage) -> Metrics {
    let (cpu, memory, events) = (&usage.cpu, &usage.memory, &usage.memory_events);
    let of = |figures: &std::collections::BTreeMap<String, u64>, name: &str| {
        figures.get(name).copied().unwrap_or(0)
    };
    // No limit is the largest number, as the control group has it.
    let limit = |limit: u64| if limit == 0 { u64::MAX } else { limit };
    Metrics {
        pids: MessageField::some(PidsStat {
            current: usage.task_count,
            // There 0 is no limit.
            limit: usage.task_count_max,
            ..PidsStat::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage_usec: of(cpu, "usage_usec"),
            user_usec: of(cpu, "user_usec"),
            system_usec: of(cpu, "system_usec"),
            nr_periods: of(cpu, "nr_periods"),
            nr_throttled: of(cpu, "nr_throttled"),
            throttled_usec: of(cpu, "throttled_usec"),
            ..CPUStat::default()
        }),
        memory: MessageField::some(MemoryStat {
            anon: of(memory, "anon"),
            file: of(memory, "file"),
            kernel_stack: of(memory, "kernel_stack"),
            slab: of(memory, "slab"),
            sock: of(memory, "sock"),
            shmem: of(memory, "shmem"),
            file_mapped: of(memory, "file_mapped"),
            file_dirty: of(memory, "file_dirty"),
            file_writeback: of(memory, "file_writeback"),
            inactive_anon: of(memory, "inactive_anon"),
            active_anon: of(memory, "active_anon"),
            inactive_file: of(memory, "inactive_file"),
            active_file: of(memory, "active_file"),
            unevictable: of(memory, "unevictable"),
            slab_reclaimable: of(memory, "slab_reclaimable"),
            slab_unreclaimable: of(memory, "slab_unreclaimable"),
            pgfault: of(memory, "pgfault"),
            pgmajfault: of(memory, "pgmajfault"),
            usage: usage.memory_bytes,
            usage_limit: limit(usage.memory_limit_bytes),
            max_usage: usage.memory_peak_bytes,
            ..MemoryStat::default()
        }),
        memory_events: MessageField::some(MemoryEvents {
            low: of(events, "low"),
            high: of(events, "high"),
            max: of(events, "max"),
            oom: of(events, "oom"),
            oom_kill: of(events, "oom_kill"),
            ..MemoryEvents::default()
        }),
        ..Metrics::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_control_group() {
        let usage = ContainerUsage {
            task_count: 3,
            memory_bytes: 7,
            cpu: [("usage_usec".to_owned(), 5)].into(),
            memory: [("anon".to_owned(), 2)].into(),
            ..ContainerUsage::default()
        };
        let any = of(&usage).unwrap();
        let read = Metrics::parse_from_bytes(&any.value).unwrap();
        assert_eq!((any.type_url.as_str(), read.pids.current), (NAME, 3));
        assert_eq!((read.cpu.usage_usec, read.memory.anon, read.memory.usage), (5, 2, 7));
        assert_eq!(read.memory.usage_limit, u64::MAX);
    }
}
