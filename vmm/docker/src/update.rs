//! `POST /containers/{id}/update`: a container's restart policy and its limits, of one that runs as
//! well as of one that does not.

use std::sync::Arc;

use exocell_cell::limits::Limits;
use exocell_cell::policy::Policy;
use exocell_cell::settings::{CPU_PERIOD_US, CpuTime, UNLIMITED};
use exocell_cell::{CellError, Strength, plan, restart};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::admit::{self, Defaults};
use crate::containers::{self, Container};
use crate::error::{ApiError, ApiResult};
use crate::fields;
use crate::http::{Call, Response, json as reply};
use crate::lifecycle;
use crate::state::Server;
use crate::wire::{HostConfig, RestartPolicy, Update};

/// Changes what the body names; the rest stays.
pub async fn update(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let caller = call.caller.clone();
    let Update { pids_limit, host } = call.fields(fields::UPDATE).await?;
    let RestartPolicy { name, maximum_retry_count } = &host.restart_policy;
    let policy = match name.as_str() {
        "" => None,
        name => Some(Policy::of(name, *maximum_retry_count).map_err(ApiError::bad_request)?),
    };
    let live = server.live(server.find(key).await?.id());
    let _changing = live.claim(lifecycle::READERS_PATIENCE).await;
    let seen = server.find(&live.id).await?;
    let spec = &seen.container.spec;
    if policy.is_some() && spec.remove {
        return Err(ApiError::conflict(
            "Restart policy cannot be updated because AutoRemove is enabled for the container",
        ));
    }
    let limits = limits(&host, pids_limit, &server.defaults, spec.settings.cpu)?;
    if !limits.are_none() && spec.strength == Strength::Isolate {
        return Err(ApiError::unsupported("changing an isolate's limits", "make another one"));
    }
    if let (Some(bytes), None) = (limits.memory_bytes, &spec.within) {
        plan::check_memory(bytes)?;
    }
    if let Some(cell) = caller.cell() {
        let mut changed = spec.clone();
        limits.apply(&mut changed)?;
        cell.check_limits(&changed.capabilities)?;
    }
    let warnings = warnings(&host);
    if policy.is_none() && limits.are_none() {
        return Ok(answer(&warnings));
    }
    let updated = server.blocking(move |server| {
        let mut container = seen.container;
        let record = seen.cell.as_ref().map(|(record, _)| record);
        if let (Some(record), false) = (record, limits.are_none()) {
            // What a guest or its supervisor refuses is the container's to have.
            let refused = |error: CellError| match ApiError::from(error) {
                ApiError { status: StatusCode::INTERNAL_SERVER_ERROR, message } => {
                    ApiError::conflict(message)
                }
                other => other,
            };
            record.set_limits(&limits).map_err(refused)?;
        }
        limits.apply(&mut container.spec)?;
        show(&mut container, &limits, &host);
        if let Some(policy) = policy {
            if let Some(record) = record {
                record.set_restart(&container.spec, policy)?;
                restart::follow_policy(server.layout(), record)?;
            }
            container.spec.restart = policy;
            container.host["RestartPolicy"] = containers::restart_policy(policy);
        }
        server.containers.write(&container)?;
        Ok(container)
    });
    server.tell(&updated.await?, "update", &[]);
    Ok(answer(&warnings))
}

fn answer(warnings: &[&str]) -> Response {
    reply(StatusCode::OK, &json!({ "Warnings": warnings }))
}

/// What is taken but not done.
fn warnings(host: &HostConfig) -> Vec<&'static str> {
    let swaps = host.memory_swap < 0 || host.memory_swap > host.memory;
    let text = "MemorySwap is not used: a container has its memory and no swap";
    swaps.then_some(text).into_iter().collect()
}

/// The limits that a body names; `cpu` is what the container has now.
fn limits(
    host: &HostConfig,
    pids_limit: Option<i64>,
    defaults: &Defaults,
    cpu: Option<CpuTime>,
) -> ApiResult<Limits> {
    if host.memory < 0 || host.nano_cpus < 0 {
        return Err(ApiError::bad_request("a limit is negative"));
    }
    admit::check_cpu_time(host, defaults)?;
    let has_time = host.cpu_quota != 0 || host.cpu_period != 0;
    let positive = |amount: i64| u64::try_from(amount).ok().filter(|amount| *amount > 0);
    let cpu = match positive(host.nano_cpus) {
        Some(_) if has_time => {
            return Err(ApiError::bad_request(
                "Conflicting options: Nano CPUs and CPU Period cannot both be set",
            ));
        }
        Some(nano) => Some(CpuTime::of_nano_cpus(nano)),
        None if has_time => {
            let now = cpu.unwrap_or(CpuTime { quota_us: UNLIMITED, period_us: CPU_PERIOD_US });
            let quota_us = match host.cpu_quota {
                0 => now.quota_us,
                quota => u64::try_from(quota).unwrap_or(UNLIMITED),
            };
            let period_us = positive(host.cpu_period).unwrap_or(now.period_us);
            Some(CpuTime { quota_us, period_us })
        }
        None => None,
    };
    if let Some(cpu) = cpu.filter(|cpu| cpu.quota_us != UNLIMITED) {
        admit::check_processors(cpu, defaults)?;
    }
    let count = |count: i64| u32::try_from(count).ok().filter(|count| *count > 0);
    Ok(Limits {
        cpu,
        cpu_shares: positive(host.cpu_shares),
        cpuset: Some(host.cpuset_cpus.clone()).filter(|cpus| !cpus.is_empty()),
        memory_bytes: positive(host.memory),
        memory_reservation: positive(host.memory_reservation),
        // As many as a container has whose client names no limit.
        process_max: pids_limit.map(|most| count(most).unwrap_or(defaults.processes)),
    })
}

/// Has `inspect` show what was changed.
fn show(container: &mut Container, limits: &Limits, asked: &HostConfig) {
    let mut shown: Vec<(&str, Value)> = Vec::new();
    if limits.cpu.is_some() {
        shown.push(("NanoCpus", asked.nano_cpus.into()));
        shown.push(("CpuQuota", asked.cpu_quota.into()));
        shown.push(("CpuPeriod", asked.cpu_period.into()));
    }
    shown.extend(limits.cpu_shares.map(|shares| ("CpuShares", shares.into())));
    shown.extend(limits.cpuset.clone().map(|cpus| ("CpusetCpus", cpus.into())));
    shown.extend(limits.memory_bytes.map(|bytes| ("Memory", bytes.into())));
    shown.extend(limits.memory_reservation.map(|bytes| ("MemoryReservation", bytes.into())));
    shown.extend(limits.process_max.map(|most| ("PidsLimit", most.into())));
    shown.into_iter().for_each(|(name, value)| container.host[name] = value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::canonical;

    fn read(mut body: Value) -> ApiResult<Limits> {
        canonical(&mut body, fields::UPDATE)?;
        let Update { pids_limit, host } = serde_json::from_value(body).unwrap();
        let defaults = Defaults {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            vcpus: 2,
            processes: 99,
            intra: exocell_cell::intra::Intra::default(),
            connect: Vec::new(),
        };
        let now = CpuTime { quota_us: 30_000, period_us: 100_000 };
        limits(&host, pids_limit, &defaults, Some(now))
    }

    #[test]
    fn what_a_client_leaves_out_stays() {
        // As the docker command sends it.
        let silent = json!({ "CpuShares": 0, "Memory": 0, "NanoCpus": 0, "CgroupParent": "",
            "BlkioWeight": 0, "Devices": null, "PidsLimit": null, "RestartPolicy": { "Name": "" } });
        assert_eq!(read(silent).unwrap(), Limits::default());
        let limits = read(json!({ "memory": 5, "PidsLimit": -1, "CpuPeriod": 50_000 })).unwrap();
        assert_eq!((limits.memory_bytes, limits.process_max), (Some(5), Some(99)));
        assert_eq!(limits.cpu, Some(CpuTime { quota_us: 30_000, period_us: 50_000 }));
        let unlimited = read(json!({ "CpuQuota": -1 })).unwrap();
        assert_eq!(unlimited.cpu.unwrap().quota_us, UNLIMITED);
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_name() {
        for (body, word) in [
            (json!({ "NanoCpus": 2_500_000_000_i64 }), "range of CPUs"),
            (json!({ "NanoCpus": 500_000_000, "CpuQuota": 1000 }), "Conflicting options"),
            (json!({ "CpusetMems": "0" }), "CpusetMems"),
            (json!({ "BlkioWeight": 9 }), "BlkioWeight"),
            (json!({ "Memory": -1 }), "negative"),
        ] {
            let error = read(body).unwrap_err();
            assert!(error.message.contains(word), "{}", error.message);
        }
    }
}
