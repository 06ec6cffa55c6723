//! The API's JSON, as far as it is read. Clients written in Go send `null`
//! for what they leave out.

use std::collections::BTreeMap;

use exocell_cell::CellSpec;
use exocell_cell::images::Healthcheck;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::error::{ApiError, ApiResult};
use crate::fields;

/// `null` is the default of its type.
pub fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A list of words, or a single one.
fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Words {
        List(Vec<String>),
        One(String),
    }
    Ok(Option::deserialize(deserializer)?.map(|words| match words {
        Words::List(list) => list,
        Words::One(word) => vec![word],
    }))
}

/// Names without values: `{"80/tcp": {}}`.
pub type Names = BTreeMap<String, Value>;

/// What is asked of a container, and what `inspect` shows under `Config`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Config {
    #[serde(deserialize_with = "or_default")]
    pub hostname: String,
    #[serde(deserialize_with = "or_default")]
    pub domainname: String,
    #[serde(deserialize_with = "or_default")]
    pub user: String,
    #[serde(deserialize_with = "or_default")]
    pub attach_stdin: bool,
    #[serde(deserialize_with = "or_default")]
    pub attach_stdout: bool,
    #[serde(deserialize_with = "or_default")]
    pub attach_stderr: bool,
    #[serde(deserialize_with = "or_default")]
    pub exposed_ports: Names,
    #[serde(deserialize_with = "or_default")]
    pub tty: bool,
    #[serde(deserialize_with = "or_default")]
    pub open_stdin: bool,
    #[serde(deserialize_with = "or_default")]
    pub stdin_once: bool,
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "words")]
    pub cmd: Option<Vec<String>>,
    #[serde(deserialize_with = "words")]
    pub entrypoint: Option<Vec<String>>,
    #[serde(deserialize_with = "or_default")]
    pub image: String,
    #[serde(deserialize_with = "or_default")]
    pub volumes: Names,
    #[serde(deserialize_with = "or_default")]
    pub working_dir: String,
    /// Whether the container is to have no network, whatever the host's part says.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
    pub network_disabled: bool,
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_timeout: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<Healthcheck>,
    /// What the line of a health check is handed to.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub shell: Vec<String>,
}

impl Config {
    /// What a cell was given by the command line, beside what its image says.
    pub fn of_spec(spec: &CellSpec) -> Self {
        Self {
            user: spec.user.clone().unwrap_or_default(),
            env: spec.env.clone(),
            cmd: Some(spec.command.clone()),
            entrypoint: spec.entrypoint.clone(),
            working_dir: spec.working_dir.clone().unwrap_or_default(),
            labels: spec.labels.clone(),
            healthcheck: spec.health.clone(),
            stop_signal: spec.stop_signal.clone(),
            ..Self::default()
        }
    }
}

/// The part of `HostConfig` that decides something here. All of it is kept as
/// it came, for `inspect`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct HostConfig {
    #[serde(deserialize_with = "or_default")]
    pub binds: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub mounts: Vec<Mount>,
    /// Who makes volumes for it.
    #[serde(deserialize_with = "or_default")]
    pub volume_driver: String,
    /// Bytes; 0 is no limit.
    #[serde(deserialize_with = "or_default")]
    pub memory: i64,
    /// Billionths of a CPU; 0 is no limit.
    #[serde(deserialize_with = "or_default")]
    pub nano_cpus: i64,
    /// Microseconds of CPU a period.
    #[serde(deserialize_with = "or_default")]
    pub cpu_quota: i64,
    /// Microseconds.
    #[serde(deserialize_with = "or_default")]
    pub cpu_period: i64,
    /// 1024 is one share.
    #[serde(deserialize_with = "or_default")]
    pub cpu_shares: i64,
    #[serde(deserialize_with = "or_default")]
    pub cpuset_cpus: String,
    #[serde(deserialize_with = "or_default")]
    pub pids_limit: i64,
    #[serde(deserialize_with = "or_default")]
    pub auto_remove: bool,
    #[serde(deserialize_with = "or_default")]
    pub privileged: bool,
    #[serde(deserialize_with = "or_default")]
    pub readonly_rootfs: bool,
    #[serde(deserialize_with = "or_default")]
    pub network_mode: String,
    #[serde(deserialize_with = "or_default")]
    pub pid_mode: String,
    #[serde(deserialize_with = "or_default")]
    pub ipc_mode: String,
    #[serde(rename = "UTSMode", deserialize_with = "or_default")]
    pub uts_mode: String,
    #[serde(deserialize_with = "or_default")]
    pub userns_mode: String,
    #[serde(deserialize_with = "or_default")]
    pub devices: Vec<Device>,
    #[serde(deserialize_with = "or_default")]
    pub dns: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub dns_search: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub dns_options: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub device_requests: Vec<Value>,
    #[serde(deserialize_with = "or_default")]
    pub device_cgroup_rules: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub cap_add: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub cap_drop: Vec<String>,
    /// `null` are Docker's.
    pub masked_paths: Option<Vec<String>>,
    pub readonly_paths: Option<Vec<String>>,
    #[serde(deserialize_with = "or_default")]
    pub group_add: Vec<String>,
    /// Bytes; 0 is the default.
    #[serde(deserialize_with = "or_default")]
    pub shm_size: i64,
    #[serde(deserialize_with = "or_default")]
    pub oom_score_adj: i32,
    #[serde(deserialize_with = "or_default")]
    pub init: bool,
    /// Bytes; 0 is none.
    #[serde(deserialize_with = "or_default")]
    pub memory_reservation: i64,
    /// Bytes of memory and swap together; -1 is no limit.
    #[serde(deserialize_with = "or_default")]
    pub memory_swap: i64,
    #[serde(deserialize_with = "or_default")]
    pub isolation: String,
    #[serde(deserialize_with = "or_default")]
    pub cgroupns_mode: String,
    #[serde(deserialize_with = "or_default")]
    pub security_opt: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub sysctls: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub tmpfs: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub ulimits: Vec<Ulimit>,
    #[serde(deserialize_with = "or_default")]
    pub extra_hosts: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub port_bindings: BTreeMap<String, Option<Vec<PortBinding>>>,
    #[serde(deserialize_with = "or_default")]
    pub publish_all_ports: bool,
    #[serde(deserialize_with = "or_default")]
    pub links: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub volumes_from: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub restart_policy: RestartPolicy,
    #[serde(deserialize_with = "or_default")]
    pub log_config: LogConfig,
    #[serde(deserialize_with = "or_default")]
    pub runtime: String,
    /// Rows and columns of the terminal.
    #[serde(deserialize_with = "or_default")]
    pub console_size: Vec<u16>,
}

/// One of `HostConfig.Mounts`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Mount {
    #[serde(rename = "Type", deserialize_with = "or_default")]
    pub kind: String,
    #[serde(deserialize_with = "or_default")]
    pub source: String,
    #[serde(deserialize_with = "or_default")]
    pub target: String,
    #[serde(deserialize_with = "or_default")]
    pub read_only: bool,
    #[serde(deserialize_with = "or_default")]
    pub bind_options: BindOptions,
    #[serde(deserialize_with = "or_default")]
    pub volume_options: VolumeOptions,
    #[serde(deserialize_with = "or_default")]
    pub tmpfs_options: TmpfsOptions,
}

/// What a mount of type `bind` says of itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct BindOptions {
    #[serde(deserialize_with = "or_default")]
    pub propagation: String,
    /// Whether a folder that does not exist is made.
    #[serde(deserialize_with = "or_default")]
    pub create_mountpoint: bool,
}

/// What a mount of type `volume` says of itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct VolumeOptions {
    #[serde(deserialize_with = "or_default")]
    pub no_copy: bool,
    /// What of the volume is mounted.
    #[serde(deserialize_with = "or_default")]
    pub subpath: String,
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub driver_config: DriverConfig,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct DriverConfig {
    #[serde(deserialize_with = "or_default")]
    pub name: String,
}

/// What a mount of type `tmpfs` says of itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct TmpfsOptions {
    #[serde(deserialize_with = "or_default")]
    pub size_bytes: i64,
    #[serde(deserialize_with = "or_default")]
    pub mode: u32,
    /// As mount(8) has them: a word, or a name and a value.
    #[serde(deserialize_with = "or_default")]
    pub options: Vec<Vec<String>>,
}

/// One of `HostConfig.Devices`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Device {
    #[serde(deserialize_with = "or_default")]
    pub path_on_host: String,
    #[serde(deserialize_with = "or_default")]
    pub path_in_container: String,
    #[serde(deserialize_with = "or_default")]
    pub cgroup_permissions: String,
}

/// One of `HostConfig.Ulimits`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Ulimit {
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    #[serde(deserialize_with = "or_default")]
    pub soft: i64,
    #[serde(deserialize_with = "or_default")]
    pub hard: i64,
}

/// Where a port of a container is published.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct PortBinding {
    #[serde(deserialize_with = "or_default")]
    pub host_ip: String,
    #[serde(deserialize_with = "or_default")]
    pub host_port: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct RestartPolicy {
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    #[serde(deserialize_with = "or_default")]
    pub maximum_retry_count: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct LogConfig {
    #[serde(rename = "Type", deserialize_with = "or_default")]
    pub kind: String,
}

/// The body of `POST /containers/create`: `Config` with its host's part beside.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Create {
    pub config: Config,
    pub host: HostConfig,
    /// `HostConfig` as it came, its names as Docker spells them.
    pub host_value: Value,
    /// The networks that `NetworkingConfig` names.
    pub endpoints: BTreeMap<String, Endpoint>,
    /// Beside the one in `HostConfig`.
    pub runtime: String,
    /// Of fields that are taken and not used.
    pub warnings: Vec<String>,
}

impl Create {
    /// Reads the body's JSON.
    ///
    /// # Errors
    /// 400 for what is no such body, 501 for what it asks for and no cell has.
    pub fn read(mut body: Value) -> ApiResult<Self> {
        let warnings = fields::canonical(&mut body, fields::CREATE)?;
        Self::of(body, warnings)
            .map_err(|error| ApiError::bad_request(format!("the body cannot be read: {error}")))
    }

    /// Whether the container may have a network at all, of its own.
    pub fn wants_network(&self) -> bool {
        self.host.network_mode != "none" && !self.config.network_disabled && self.within().is_none()
    }

    /// The container whose network it is to have, and in whose guest it is then.
    pub fn within(&self) -> Option<&str> {
        self.host.network_mode.strip_prefix("container:")
    }

    fn of(mut body: Value, warnings: Vec<String>) -> serde_json::Result<Self> {
        let mut part = |name: &str| {
            let value = body.get_mut(name).map(Value::take).unwrap_or_default();
            if value.is_null() { serde_json::json!({}) } else { value }
        };
        let (host_value, networking) = (part("HostConfig"), part("NetworkingConfig"));
        let runtime = body.get_mut("Runtime").map(Value::take).unwrap_or_default();
        // Lists would be taken for the fields in their order.
        if !body.is_object() || !host_value.is_object() || !networking.is_object() {
            return Err(serde::de::Error::custom("it is no object"));
        }
        let mut host_value = host_value;
        if runtime.as_str().is_some_and(|name| !name.is_empty()) && host_value["Runtime"].is_null()
        {
            host_value["Runtime"] = runtime.clone();
        }
        Ok(Self {
            config: serde_json::from_value(body)?,
            host: serde_json::from_value(host_value.clone())?,
            host_value,
            endpoints: serde_json::from_value::<Networking>(networking)?
                .endpoints_config
                .into_iter()
                .map(|(name, endpoint)| (name, endpoint.unwrap_or_default()))
                .collect(),
            runtime: or_default(runtime)?,
            warnings,
        })
    }
}

/// The body of `POST /containers/{id}/update`: resources, as in a `HostConfig`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Update {
    /// 0 and -1 are no limit.
    pub pids_limit: Option<i64>,
    #[serde(flatten)]
    pub host: HostConfig,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Networking {
    #[serde(deserialize_with = "or_default")]
    endpoints_config: BTreeMap<String, Option<Endpoint>>,
}

/// A container's place in a network.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Endpoint {
    #[serde(deserialize_with = "or_default")]
    pub aliases: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub links: Vec<String>,
    #[serde(rename = "IPAMConfig", deserialize_with = "or_default")]
    pub ipam_config: EndpointIpam,
    #[serde(deserialize_with = "or_default")]
    pub driver_opts: BTreeMap<String, String>,
}

/// The addresses that it is to have there.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct EndpointIpam {
    #[serde(rename = "IPv4Address", deserialize_with = "or_default")]
    pub ipv4_address: String,
}

/// The body of `POST /containers/{id}/exec`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct ExecCreate {
    #[serde(deserialize_with = "or_default")]
    pub attach_stdin: bool,
    #[serde(deserialize_with = "or_default")]
    pub attach_stdout: bool,
    #[serde(deserialize_with = "or_default")]
    pub attach_stderr: bool,
    #[serde(deserialize_with = "or_default")]
    pub tty: bool,
    #[serde(deserialize_with = "words")]
    pub cmd: Option<Vec<String>>,
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub working_dir: String,
    #[serde(deserialize_with = "or_default")]
    pub user: String,
    #[serde(deserialize_with = "or_default")]
    pub privileged: bool,
    #[serde(deserialize_with = "or_default")]
    pub detach_keys: String,
    #[serde(deserialize_with = "or_default")]
    pub console_size: Vec<u16>,
}

/// The body of `POST /exec/{id}/start`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct ExecStart {
    #[serde(deserialize_with = "or_default")]
    pub detach: bool,
    #[serde(deserialize_with = "or_default")]
    pub tty: bool,
    #[serde(deserialize_with = "or_default")]
    pub console_size: Vec<u16>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_go_and_python_clients_send_is_read() {
        let create = Create::read(json!({
            "Image": "a", "Cmd": null, "Entrypoint": "run me", "Env": null, "Labels": {"a": "b"},
            "Volumes": {"/x": {}}, "NetworkingConfig": {"EndpointsConfig": {}},
            "HostConfig": {"Binds": null, "Memory": 5, "LogConfig": {"Type": "", "Config": {}},
                "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}, "Devices": [],
                "ConsoleSize": [24, 80], "UTSMode": "host", "Mounts": [{"Type": "bind"}]},
        }))
        .unwrap();
        assert_eq!(create.config.entrypoint, Some(vec!["run me".to_owned()]));
        assert_eq!((create.config.cmd, create.config.labels["a"].as_str()), (None, "b"));
        assert_eq!((create.host.memory, create.host.uts_mode.as_str()), (5, "host"));
        assert_eq!(create.host.mounts[0].kind, "bind");
        assert_eq!(create.host_value["Memory"], 5);
        assert_eq!(Create::read(json!({"Image": "a"})).unwrap().host_value, json!({}));
        for bad in [json!(null), json!([]), json!({"Env": 1}), json!({"HostConfig": []})] {
            assert_eq!(Create::read(bad.clone()).unwrap_err().status.as_u16(), 400, "{bad}");
        }
    }
}
