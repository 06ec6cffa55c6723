//! The part of the OCI runtime specification that a guest's init carries out, by the names of its
//! JSON (`config.json`).
//!
//! Whoever starts a program writes the whole of a specification. What has no field here is refused
//! by its name when that is read, so that nothing is left out in silence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An annotation: the user as it was given, `name|uid[:group|gid]`, which only the guest's
/// /etc/passwd can tell. It comes before `process.user.uid` and `gid`.
pub const ANNOTATION_USER: &str = "org.exocell.user";
/// An annotation: groups beside the user's own, names or numbers with commas between them.
pub const ANNOTATION_GROUPS: &str = "org.exocell.groups";
/// An annotation, `true`: the program's parent is a first process that reaps orphans and passes
/// signals on.
pub const ANNOTATION_INIT: &str = "org.exocell.init";

/// Every capability, in the order of their numbers (linux/capability.h), without `CAP_`.
pub const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// A program and the container around it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    pub oci_version: String,
    #[serde(default)]
    pub process: Process,
    /// The image of the cell, whatever the path says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Root>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domainname: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(default)]
    pub linux: Linux,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Spec {
    /// The value of an annotation of ours; empty where there is none.
    pub fn annotation(&self, name: &str) -> &str {
        self.annotations.get(name).map_or("", String::as_str)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Root {
    pub path: String,
    #[serde(default)]
    pub readonly: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Process {
    #[serde(default)]
    pub terminal: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_size: Option<ConsoleSize>,
    #[serde(default)]
    pub user: User,
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(default)]
    pub env: Vec<String>,
    #[serde(default)]
    pub cwd: String,
    /// All that the guest's kernel has, where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rlimits: Vec<Rlimit>,
    #[serde(default)]
    pub no_new_privileges: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_score_adj: Option<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleSize {
    pub height: u64,
    pub width: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct User {
    #[serde(default)]
    pub uid: u32,
    #[serde(default)]
    pub gid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// Names as `CAP_CHOWN`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Capabilities {
    #[serde(default)]
    pub bounding: Vec<String>,
    #[serde(default)]
    pub effective: Vec<String>,
    #[serde(default)]
    pub inheritable: Vec<String>,
    #[serde(default)]
    pub permitted: Vec<String>,
    #[serde(default)]
    pub ambient: Vec<String>,
}

/// A limit of setrlimit(2), named as `RLIMIT_NOFILE`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rlimit {
    #[serde(rename = "type")]
    pub kind: String,
    pub hard: u64,
    pub soft: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    pub destination: String,
    #[serde(rename = "type", default)]
    pub kind: String,
    #[serde(default)]
    pub source: String,
    #[serde(default)]
    pub options: Vec<String>,
}

impl Mount {
    /// Whether it shows what lies somewhere else, too.
    pub fn is_bind(&self) -> bool {
        self.options.iter().any(|option| option == "bind" || option == "rbind")
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Linux {
    #[serde(default)]
    pub namespaces: Vec<Namespace>,
    /// Beside those that every program has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctl: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked_paths: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readonly_paths: Vec<String>,
}

/// A node of a device, root's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub path: String,
    #[serde(rename = "type")]
    pub kind: DeviceKind,
    pub major: u32,
    pub minor: u32,
    #[serde(default = "everyone")]
    pub file_mode: u32,
}

/// Whether a program may use devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRule {
    pub allow: bool,
    #[serde(rename = "type", default, skip_serializing_if = "DeviceKinds::is_all")]
    pub kind: DeviceKinds,
    /// Every one, where there is none or a negative one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Of `r`, `w` and `m` (mknod(2)); all of them where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub access: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKinds {
    #[default]
    #[serde(rename = "a")]
    All,
    #[serde(rename = "b")]
    Block,
    #[serde(rename = "c")]
    Character,
}

impl DeviceKinds {
    fn is_all(&self) -> bool {
        *self == Self::All
    }
}

impl From<DeviceKind> for DeviceKinds {
    fn from(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Block => Self::Block,
            DeviceKind::Character => Self::Character,
        }
    }
}

/// The mode of a device's node where a specification has none.
const fn everyone() -> u32 {
    0o666
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    #[serde(rename = "b")]
    Block,
    #[serde(rename = "c")]
    Character,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Namespace {
    #[serde(rename = "type")]
    pub kind: NamespaceKind,
}

/// Those that a program may have of its own. That of the network is the cell's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamespaceKind {
    Pid,
    Mount,
    Ipc,
    Uts,
    Cgroup,
    Network,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<Pids>,
    /// Which devices it may use beside those that every program may; of two rules the later one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRule>,
    /// Files of the control group, and what to write to them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unified: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u64>,
    /// Microseconds of CPU a period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<i64>,
    /// Microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pids {
    pub limit: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_carried_out_is_refused_by_name() {
        let least = r#"{"ociVersion": "1.2.0", "process": {"args": ["true"], "cwd": "/"}}"#;
        let spec: Spec = serde_json::from_str(least).unwrap();
        assert_eq!((spec.process.args.len(), spec.annotation(ANNOTATION_USER)), (1, ""));
        for (more, name) in [
            (r#""hooks": {}"#, "hooks"),
            (r#""linux": {"seccomp": {}}"#, "seccomp"),
            (r#""linux": {"resources": {"hugepageLimits": []}}"#, "hugepageLimits"),
            (r#""linux": {"namespaces": [{"type": "user"}]}"#, "user"),
            (r#""linux": {"namespaces": [{"type": "pid", "path": "/x"}]}"#, "path"),
        ] {
            let text = format!(r#"{{"ociVersion": "1.2.0", {more}}}"#);
            let error = serde_json::from_str::<Spec>(&text).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
