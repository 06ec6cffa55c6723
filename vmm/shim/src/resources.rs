//! Limits and devices of a container's specification, as its guest's control group takes them.

use exocell_cell::agent::oci::Resources;
use serde_json::{Map, Value, json};

use crate::error::{Result, ShimError};
use crate::refusal::{refused, said};

/// Devices that a guest's kernel has: kind, major, and the first and last minor number.
const DEVICES: [(&str, u64, u64, u64); 10] = [
    ("c", 1, 3, 3),
    ("c", 1, 5, 5),
    ("c", 1, 7, 9),
    ("c", 1, 11, 11),
    ("c", 5, 0, 0),
    ("c", 10, 200, 200),
    ("c", 10, 229, 229),
    ("c", 10, 235, 235),
    ("c", 10, 237, 237),
    ("b", 7, 0, 7),
];

/// The limits that an `Update` names, as JSON.
///
/// # Errors
/// Names what a cell does not carry out.
pub fn read(text: &[u8]) -> Result<Resources> {
    let broken = |error: serde_json::Error| {
        ShimError::invalid(format!("a cell does not carry out all of the limits: {error}"))
    };
    let wanted: Map<String, Value> = serde_json::from_slice(text).map_err(broken)?;
    serde_json::from_value(translate(wanted)?.into()).map_err(broken)
}

/// `linux.resources`, without what says nothing.
///
/// # Errors
/// Names what a cell does not carry out.
pub fn translate(mut limits: Map<String, Value>) -> Result<Map<String, Value>> {
    if let Some(Value::Object(memory)) = limits.get_mut("memory") {
        // A guest has no swap, so its programs keep to any limit of that, and nothing is swapped
        // sooner or later. Its kernel counts memory of its own for them as any.
        for name in ["swap", "swappiness", "useHierarchy", "checkBeforeUpdate"] {
            memory.remove(name);
        }
        for name in ["kernel", "kernelTCP", "disableOOMKiller"] {
            if said(memory, name).is_some_and(|value| value.as_i64() != Some(-1)) {
                return Err(refused(format_args!("memory.{name}"), "limit the memory as a whole"));
            }
        }
        memory.retain(|_, value| !value.is_null());
    }
    if let Some(Value::Object(cpu)) = limits.get_mut("cpu") {
        for name in ["realtimeRuntime", "realtimePeriod", "idle", "burst"] {
            if said(cpu, name).is_some() {
                return Err(refused(format_args!("cpu.{name}"), "leave it out"));
            }
        }
        for name in ["cpus", "mems"] {
            // Numbers of the host's, of which a guest has none.
            if said(cpu, name).is_some() {
                return Err(refused(
                    format_args!("cpu.{name}"),
                    "a cell's processors are threads of the host's; limit their time (quota)",
                ));
            }
        }
        cpu.retain(|_, value| !value.is_null());
        // Docker's engine says 0 for none.
        cpu.retain(|_, value| value.as_i64() != Some(0));
    }
    let none = |page: &Value| page.get("limit").and_then(Value::as_u64) == Some(0);
    if let Some(pages) = said(&mut limits, "hugepageLimits")
        && !pages.as_array().is_some_and(|pages| pages.iter().all(none))
    {
        // Programs of a guest have none of any size.
        return Err(refused("hugepageLimits above 0", "a guest has no huge pages"));
    }
    if let Some(Value::Object(mut block)) = said(&mut limits, "blockIO") {
        let set = block.keys().cloned().collect::<Vec<_>>();
        if let Some(name) = set.into_iter().find(|name| said(&mut block, name).is_some()) {
            return Err(refused(format_args!("blockIO.{name}"), "leave it out"));
        }
    }
    for name in ["network", "rdma"] {
        let Some(Value::Object(mut own)) = said(&mut limits, name) else { continue };
        let set = own.keys().cloned().collect::<Vec<_>>();
        if let Some(field) = set.into_iter().find(|field| said(&mut own, field).is_some()) {
            return Err(refused(format_args!("{name}.{field}"), "leave it out"));
        }
    }
    if let Some(Value::Array(rules)) = limits.get_mut("devices") {
        for rule in rules.iter_mut().filter_map(Value::as_object_mut) {
            rule.retain(|_, value| !value.is_null() && value.as_str() != Some(""));
        }
    }
    limits.retain(|_, value| !value.is_null());
    Ok(limits)
}

/// `linux.devices`: nodes of devices, which have to be the guest's own.
///
/// # Errors
/// Names the first that is the host's.
pub fn devices(wanted: Value) -> Result<Value> {
    let mut nodes = Vec::new();
    for device in wanted.as_array().into_iter().flatten() {
        let text = |name: &str| device.get(name).and_then(Value::as_str).unwrap_or_default();
        let number = |name: &str| device.get(name).and_then(Value::as_u64).unwrap_or(0);
        let (kind, path) = (text("type"), text("path"));
        let kind = if kind == "u" { "c" } else { kind };
        let (major, minor) = (number("major"), number("minor"));
        let is_own = |&(known, own, first, last): &(&str, u64, u64, u64)| {
            known == kind && own == major && (first..=last).contains(&minor)
        };
        if !DEVICES.iter().any(is_own) || !path.starts_with("/dev/") {
            return Err(refused(
                format_args!("the device {path} ({kind} {major}:{minor})"),
                "a cell has no device of the host; leave it out",
            ));
        }
        if number("uid") != 0 || number("gid") != 0 {
            return Err(refused(format_args!("the owner of {path}"), "its node is root's"));
        }
        let mode = device.get("fileMode").and_then(Value::as_u64).unwrap_or(0o666) & 0o777;
        nodes.push(json!({
            "path": path, "type": kind, "major": major, "minor": minor, "fileMode": mode,
        }));
    }
    Ok(nodes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(value: Value) -> Result<Resources> {
        read(value.to_string().as_bytes())
    }

    #[test]
    fn limits_that_mean_nothing_in_a_guest_are_no_error() {
        let read = limits(json!({
            "memory": { "limit": 9, "swap": 9, "swappiness": 60 },
            "cpu": { "shares": 2, "quota": -1, "period": 100_000, "cpus": "", "mems": "" },
            "pids": { "limit": 5 },
            "blockIO": { "weight": 0 }, "hugepageLimits": [{ "pageSize": "2MB", "limit": 0 }],
            "devices": [{ "allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm" }],
        }));
        let read = read.unwrap();
        assert_eq!(read.memory.unwrap().limit, Some(9));
        assert_eq!((read.cpu.unwrap().shares, read.pids.unwrap().limit), (Some(2), 5));
    }

    #[test]
    fn what_a_guest_does_not_keep_to_is_refused_by_name() {
        for (value, name) in [
            (json!({ "memory": { "disableOOMKiller": true } }), "disableOOMKiller"),
            (json!({ "cpu": { "cpus": "0-1" } }), "cpus"),
            (json!({ "cpu": { "realtimeRuntime": 1 } }), "realtimeRuntime"),
            (json!({ "blockIO": { "weight": 10 } }), "blockIO.weight"),
            (json!({ "network": { "classID": 10 } }), "classID"),
            (json!({ "rdma": { "mlx": { "hcaHandles": 3 } } }), "rdma"),
            (json!({ "what": 3 }), "what"),
        ] {
            let error = limits(value).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn devices_are_the_guests_own() {
        let fuse = json!([{ "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229 }]);
        assert_eq!(devices(fuse).unwrap()[0]["fileMode"], 0o666);
        let disk = json!([{ "path": "/dev/sda", "type": "b", "major": 8, "minor": 0 }]);
        assert!(devices(disk).unwrap_err().to_string().contains("/dev/sda"));
        assert_eq!(devices(Value::Null).unwrap(), json!([]));
    }
}
