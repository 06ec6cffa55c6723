//! Containers as the API shows them.

use exocell_cell::clock::rfc3339_ms;
use exocell_cell::health::Health;
use exocell_cell::images::ImageRecord;
use exocell_cell::network::Publish;
use exocell_cell::{State, Status};
use serde_json::{Map, Value, json};

use crate::admit::MountPoint;
use crate::containers::{Container, Seen};
use crate::http::Response;
use crate::networks::Endpoints;
use crate::ports;
use crate::wire::Names;

/// What `HostConfig` shows where the client said nothing.
fn host_defaults() -> Value {
    json!({
        "Binds": null, "NetworkMode": "bridge", "PortBindings": {}, "AutoRemove": false,
        "LogConfig": { "Type": "json-file", "Config": {} },
        "RestartPolicy": { "Name": "no", "MaximumRetryCount": 0 },
        "VolumesFrom": null, "CapAdd": null, "CapDrop": null, "ExtraHosts": null, "Dns": [],
        "DnsOptions": [], "DnsSearch": [], "GroupAdd": null, "IpcMode": "private", "Links": null,
        "OomScoreAdj": 0, "PidMode": "", "Privileged": false, "PublishAllPorts": false,
        "ReadonlyRootfs": false, "SecurityOpt": null, "UTSMode": "", "UsernsMode": "",
        "ShmSize": 67_108_864, "Runtime": "exocell", "Isolation": "", "CpuShares": 0, "Memory": 0,
        "NanoCpus": 0, "CpuPeriod": 0, "CpuQuota": 0, "CpusetCpus": "", "Devices": [],
        "PidsLimit": null, "Ulimits": [], "Mounts": [], "ConsoleSize": [0, 0],
    })
}

/// `HostConfig` with its gaps filled.
pub fn host_config(container: &Container) -> Value {
    let mut shown = host_defaults();
    if let (Some(shown), Some(own)) = (shown.as_object_mut(), container.host.as_object()) {
        let said = own.iter().filter(|(_, value)| !value.is_null());
        shown.extend(said.map(|(name, value)| (name.clone(), value.clone())));
        let defaults = host_defaults();
        for (name, field) in [("LogConfig", "Type"), ("RestartPolicy", "Name")] {
            if shown[name][field] == "" {
                shown[name][field] = defaults[name][field].clone();
            }
        }
        if shown["Runtime"] == "" {
            shown.insert("Runtime".to_owned(), defaults["Runtime"].clone());
        }
    }
    shown
}

/// The `Config` of `inspect`.
fn config(container: &Container) -> Value {
    let mut shown = json!(container.config);
    if let Some(shown) = shown.as_object_mut() {
        let empty = |shown: &Map<String, Value>, name: &str| {
            shown.get(name).and_then(Value::as_object).is_some_and(Map::is_empty)
        };
        // The docker command tells absent from empty here.
        for name in ["ExposedPorts", "Volumes"] {
            if empty(shown, name) {
                shown.remove(name);
            }
        }
        shown.entry("Volumes").or_insert(Value::Null);
        shown.insert("OnBuild".to_owned(), Value::Null);
    }
    shown
}

fn mount(point: &MountPoint) -> Value {
    json!({
        "Type": if point.volume.is_some() { "volume" } else { "bind" },
        "Name": point.volume, "Source": point.source, "Destination": point.target,
        "Driver": if point.volume.is_some() { "local" } else { "" },
        "Mode": if point.writable { "" } else { "ro" },
        "RW": point.writable,
        "Propagation": if point.volume.is_some() { "" } else { "rprivate" },
    })
}

fn state(seen: &Seen) -> Value {
    let status = seen.status().cloned().unwrap_or_default();
    let alive = seen.is_running();
    let restarting = seen.is_restarting();
    let mut shown = json!({
        "Status": seen.state(), "Running": alive || restarting, "Paused": seen.is_paused(),
        "Restarting": restarting,
        "OOMKilled": status.out_of_memory, "Dead": false,
        "Pid": if alive { status.supervisor_pid } else { 0 },
        "ExitCode": status.exit_code.unwrap_or(0),
        "Error": status.reason.as_deref().unwrap_or_default(),
        "StartedAt": rfc3339_ms(match status.started_ms {
            0 => status.started_before_ms,
            started_ms => started_ms,
        }),
        "FinishedAt": rfc3339_ms(status.finished_ms),
    });
    if let Some(health) = seen.health() {
        shown["Health"] = self::health(&health);
    }
    shown
}

fn health(health: &Health) -> Value {
    let probes = health.log.iter().map(|probe| {
        json!({
            "Start": rfc3339_ms(probe.start_ms), "End": rfc3339_ms(probe.end_ms),
            "ExitCode": probe.exit_code, "Output": probe.output,
        })
    });
    json!({
        "Status": health.status.name(), "FailingStreak": health.failing_streak,
        "Log": probes.collect::<Vec<_>>(),
    })
}

/// As a list is filtered by it.
pub fn health_word(seen: &Seen) -> &'static str {
    seen.health().map_or("none", |health| health.status.name())
}

/// The ports that lead somewhere, and those that the container exposes: none while it does not run.
fn ports(seen: &Seen) -> (&[Publish], &Names) {
    static NONE: Names = Names::new();
    match seen.is_running() {
        true => (&seen.container.spec.publish, &seen.container.config.exposed_ports),
        false => (&[], &NONE),
    }
}

/// `GET /containers/{id}/json`, with the ids of programs that run beside its own.
pub fn inspect(execs: &[String], seen: &Seen, endpoints: &Endpoints) -> Value {
    let container = &seen.container;
    let args = container.words.as_ref().unwrap_or(&container.spec.command);
    let (path, args) = args.split_first().map_or(("", &[][..]), |(p, a)| (p.as_str(), a));
    let log = seen.cell.as_ref().map(|(record, _)| record.path("log"));
    let (open, exposed) = ports(seen);
    json!({
        "Id": seen.id(), "Created": rfc3339_ms(container.spec.created_ms),
        "Path": path, "Args": args, "State": state(seen), "Image": container.image_id,
        "ResolvConfPath": "", "HostnamePath": "", "HostsPath": "", "LogPath": log,
        "Name": format!("/{}", container.name()), "RestartCount": container.spec.restarts, "Driver": "exocell",
        "Platform": "linux", "MountLabel": "", "ProcessLabel": "", "AppArmorProfile": "",
        "ExecIDs": if execs.is_empty() { Value::Null } else { json!(execs) },
        "HostConfig": host_config(container), "GraphDriver": { "Name": "exocell", "Data": {} },
        "Mounts": container.mounts.iter().map(mount).collect::<Vec<_>>(),
        "Config": config(container),
        "NetworkSettings": {
            "Bridge": "", "SandboxID": "", "SandboxKey": "", "Ports": ports::settings(open, exposed),
            "Gateway": ports::gateway(open),
            "IPAddress": "", "IPPrefixLen": 0, "MacAddress": "", "Networks": endpoints.show(container),
        },
        "Warnings": container.warnings,
    })
}

/// A row of `GET /containers/json`. Paths of the host are for whoever `owns` the container.
pub fn row(seen: &Seen, endpoints: &Endpoints, owns: bool) -> Value {
    let container = &seen.container;
    let (open, exposed) = ports(seen);
    json!({
        "Id": seen.id(), "Names": [format!("/{}", container.name())],
        "Image": container.config.image, "ImageID": container.image_id,
        "Command": container.words.as_ref().unwrap_or(&container.spec.command).join(" "),
        "Created": container.spec.created_ms / 1000,
        "Ports": ports::row(open, exposed), "Labels": container.config.labels,
        "State": seen.state(), "Status": status_text(seen),
        "HostConfig": {
            "NetworkMode": host_config(container)["NetworkMode"],
            "Annotations": container.host["Annotations"],
        },
        "NetworkSettings": { "Networks": endpoints.show(container) },
        "Mounts": container.mounts.iter().filter(|_| owns).map(mount).collect::<Vec<_>>(),
    })
}

/// The same with what the container's files take on the host: its disk, and that with its image.
pub fn with_sizes(mut shown: Value, seen: &Seen, images: &[ImageRecord]) -> Value {
    let own = seen.disk_bytes();
    let image = images.iter().find(|image| image.id.to_string() == seen.container.image_id);
    let image = image.map_or(0, |image| image.size_bytes);
    shown["SizeRw"] = own.into();
    shown["SizeRootFs"] = own.saturating_add(image).into();
    shown
}

/// `Up 3 minutes`, `Exited (0) 3 minutes ago`, `Created`.
fn status_text(seen: &Seen) -> String {
    let ago = |then_ms: u64| duration(exocell_cell::now_ms().saturating_sub(then_ms) / 1000);
    match seen.status() {
        None => "Created".to_owned(),
        Some(Status { state: State::Exited, exit_code, finished_ms, .. }) => {
            let word = if seen.is_restarting() { "Restarting" } else { "Exited" };
            format!("{word} ({}) {} ago", exit_code.unwrap_or(0), ago(*finished_ms))
        }
        Some(status) => {
            let since = ago(status.started_ms.max(seen.container.spec.created_ms));
            let more = match seen.health() {
                _ if seen.is_paused() => " (Paused)".to_owned(),
                Some(health) => format!(" ({})", health.status.shown()),
                None => String::new(),
            };
            format!("Up {since}{more}")
        }
    }
}

/// Seconds in words.
fn duration(seconds: u64) -> String {
    let plural = |count: u64, unit: &str| match count {
        1 => format!("About a {unit}"),
        count => format!("{count} {unit}s"),
    };
    match seconds {
        0 => "Less than a second".to_owned(),
        1 => "1 second".to_owned(),
        2..60 => format!("{seconds} seconds"),
        60..3600 => plural(seconds / 60, "minute"),
        3600..172_800 => plural(seconds / 3600, "hour"),
        _ => plural(seconds / 86_400, "day"),
    }
}

/// A reply of one JSON value with status 200.
pub fn ok(value: &Value) -> Response {
    crate::http::json(hyper::StatusCode::OK, value)
}

#[cfg(test)]
mod tests {
    #[test]
    fn durations_are_words() {
        for (seconds, text) in [
            (0, "Less than a second"),
            (59, "59 seconds"),
            (61, "About a minute"),
            (7200, "2 hours"),
            (172_800, "2 days"),
        ] {
            assert_eq!(super::duration(seconds), text);
        }
    }
}
