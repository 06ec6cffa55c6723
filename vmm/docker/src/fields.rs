//! Every field that the bodies of the Docker API have, and what becomes of it
//! here. Docker's decoder takes a field's name in any case, so a body's names
//! are first spelled as the table spells them: what is checked by one name is
//! then not lost by another. What no table knows is refused by its name.

use std::fmt;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::map::Entry;
use serde_json::{Map, Value};

use crate::error::{ApiError, ApiResult};

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is read, and carried out or refused by its value (`wire`, `admit`).
    Read,
    /// It says nothing of a cell: the client's own affair, or another system's.
    Idle,
    /// It is taken, and the client is told in these words.
    Warned(&'static str),
    /// No cell has it; in these words what to do instead.
    Refused(&'static str),
}

/// What a field's value holds.
#[derive(Debug, Clone, Copy)]
enum Inside {
    /// A value, or names that are the client's own.
    Plain,
    One(&'static [Field]),
    List(&'static [Field]),
    /// By names of the client's own.
    Named(&'static [Field]),
    NamedLists(&'static [Field]),
}

/// A field of a body.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    name: &'static str,
    fate: Fate,
    inside: Inside,
}

const fn field(name: &'static str, fate: Fate) -> Field {
    Field { name, fate, inside: Inside::Plain }
}

const fn read(name: &'static str) -> Field {
    field(name, Fate::Read)
}

const fn idle(name: &'static str) -> Field {
    field(name, Fate::Idle)
}

const fn refused(name: &'static str, remedy: &'static str) -> Field {
    field(name, Fate::Refused(remedy))
}

const fn holds(name: &'static str, inside: Inside) -> Field {
    Field { name, fate: Fate::Read, inside }
}

const LEAVE_OUT: &str = "leave it out";
const OLD: Fate = Fate::Warned("is not used here: it belongs into HostConfig");
const ONE_LINK: &str = "a container has one link, whose networks are told apart by their addresses";
const NO_IPV6: &str = "networks between containers have addresses of IPv4";

/// The body of `POST /containers/create`.
pub const CREATE: &[Field] = &[
    read("Hostname"),
    read("Domainname"),
    read("User"),
    read("AttachStdin"),
    read("AttachStdout"),
    read("AttachStderr"),
    read("ExposedPorts"),
    read("Tty"),
    read("OpenStdin"),
    read("StdinOnce"),
    read("Env"),
    read("Cmd"),
    holds("Healthcheck", Inside::One(HEALTHCHECK)),
    // Of Windows.
    idle("ArgsEscaped"),
    read("Image"),
    read("Volumes"),
    read("WorkingDir"),
    read("Entrypoint"),
    read("NetworkDisabled"),
    refused("MacAddress", ONE_LINK),
    field("OnBuild", Fate::Warned("is not used: images are built elsewhere")),
    read("Labels"),
    read("StopSignal"),
    read("StopTimeout"),
    read("Shell"),
    refused("PortSpecs", "use HostConfig.PortBindings"),
    // docker-py says it here as well as in `HostConfig`.
    read("Runtime"),
    holds("HostConfig", Inside::One(HOST_CONFIG)),
    holds("NetworkingConfig", Inside::One(NETWORKING)),
    // Clients of dockerode repeat what they say in the query.
    idle("Name"),
    idle("Platform"),
    // Until API 1.18 they were here, and clients still say them; dockerd has no use for them.
    field("Dns", OLD),
    field("VolumesFrom", OLD),
    field("Memory", OLD),
    field("MemorySwap", OLD),
    field("CpuShares", OLD),
    field("Cpuset", OLD),
    field("VolumeDriver", OLD),
];

/// What clients of dockerode repeat in the body of `POST /commit`.
pub const COMMIT_QUERY: [&str; 7] =
    ["author", "changes", "comment", "container", "pause", "repo", "tag"];

const HEALTHCHECK: &[Field] = &[
    read("Test"),
    read("Interval"),
    read("Timeout"),
    read("StartPeriod"),
    read("StartInterval"),
    read("Retries"),
];

const HOST_CONFIG: &[Field] = &[
    read("Binds"),
    // A file that the docker command itself writes.
    idle("ContainerIDFile"),
    holds("LogConfig", Inside::One(LOG_CONFIG)),
    read("NetworkMode"),
    holds("PortBindings", Inside::NamedLists(&[read("HostIp"), read("HostPort")])),
    holds("RestartPolicy", Inside::One(RESTART_POLICY)),
    read("AutoRemove"),
    read("VolumeDriver"),
    read("VolumesFrom"),
    read("ConsoleSize"),
    // The client's own words, for whoever reads them.
    idle("Annotations"),
    read("CapAdd"),
    read("CapDrop"),
    read("CgroupnsMode"),
    read("Dns"),
    read("DnsOptions"),
    read("DnsSearch"),
    read("ExtraHosts"),
    read("GroupAdd"),
    read("IpcMode"),
    refused("Cgroup", LEAVE_OUT),
    read("Links"),
    read("OomScoreAdj"),
    read("PidMode"),
    read("Privileged"),
    read("PublishAllPorts"),
    read("ReadonlyRootfs"),
    read("SecurityOpt"),
    refused("StorageOpt", LEAVE_OUT),
    read("Tmpfs"),
    read("UTSMode"),
    read("UsernsMode"),
    read("ShmSize"),
    read("Sysctls"),
    read("Runtime"),
    read("Isolation"),
    holds("Mounts", Inside::List(MOUNT)),
    read("MaskedPaths"),
    read("ReadonlyPaths"),
    read("Init"),
    read("CpuShares"),
    read("Memory"),
    read("NanoCpus"),
    refused("CgroupParent", LEAVE_OUT),
    refused("BlkioWeight", LEAVE_OUT),
    refused("BlkioWeightDevice", LEAVE_OUT),
    refused("BlkioDeviceReadBps", LEAVE_OUT),
    refused("BlkioDeviceWriteBps", LEAVE_OUT),
    refused("BlkioDeviceReadIOps", LEAVE_OUT),
    refused("BlkioDeviceWriteIOps", LEAVE_OUT),
    read("CpuPeriod"),
    read("CpuQuota"),
    refused("CpuRealtimePeriod", LEAVE_OUT),
    refused("CpuRealtimeRuntime", LEAVE_OUT),
    read("CpusetCpus"),
    refused("CpusetMems", LEAVE_OUT),
    holds("Devices", Inside::List(DEVICE)),
    read("DeviceCgroupRules"),
    read("DeviceRequests"),
    refused("KernelMemory", "use Memory"),
    refused("KernelMemoryTCP", "use Memory"),
    read("MemoryReservation"),
    read("MemorySwap"),
    // Nothing is swapped.
    idle("MemorySwappiness"),
    refused("OomKillDisable", LEAVE_OUT),
    read("PidsLimit"),
    holds("Ulimits", Inside::List(&[read("Name"), read("Soft"), read("Hard")])),
    refused("CpuCount", "use NanoCpus"),
    refused("CpuPercent", "use NanoCpus"),
    refused("IOMaximumIOps", LEAVE_OUT),
    refused("IOMaximumBandwidth", LEAVE_OUT),
];

const DEVICE: &[Field] = &[read("PathOnHost"), read("PathInContainer"), read("CgroupPermissions")];

const RESTART_POLICY: &[Field] = &[read("Name"), read("MaximumRetryCount")];

/// The body of `POST /containers/{id}/update`.
pub const UPDATE: &[Field] = &[
    holds("RestartPolicy", Inside::One(RESTART_POLICY)),
    read("CpuShares"),
    read("CpuPeriod"),
    read("CpuQuota"),
    read("CpusetCpus"),
    read("NanoCpus"),
    read("Memory"),
    read("MemoryReservation"),
    read("MemorySwap"),
    read("PidsLimit"),
];

const LOG_CONFIG: &[Field] = &[
    read("Type"),
    field("Config", Fate::Warned("is not used: a log's length is bounded as every cell's is")),
];

const MOUNT: &[Field] = &[
    read("Type"),
    read("Source"),
    read("Target"),
    read("ReadOnly"),
    // Of the Mac.
    idle("Consistency"),
    holds("BindOptions", Inside::One(BIND_OPTIONS)),
    holds("VolumeOptions", Inside::One(VOLUME_OPTIONS)),
    holds("TmpfsOptions", Inside::One(TMPFS_OPTIONS)),
    refused("ImageOptions", LEAVE_OUT),
    refused("ClusterOptions", LEAVE_OUT),
];

const BIND_OPTIONS: &[Field] = &[
    read("Propagation"),
    refused("NonRecursive", "mount a folder that nothing is mounted below"),
    read("CreateMountpoint"),
    refused("ReadOnlyNonRecursive", "a folder that is read-only is so all the way down"),
    // So it is.
    idle("ReadOnlyForceRecursive"),
];

const VOLUME_OPTIONS: &[Field] = &[
    read("NoCopy"),
    read("Labels"),
    holds("DriverConfig", Inside::One(&[read("Name"), refused("Options", LEAVE_OUT)])),
    read("Subpath"),
];

const TMPFS_OPTIONS: &[Field] = &[read("SizeBytes"), read("Mode"), read("Options")];

const NETWORKING: &[Field] = &[holds("EndpointsConfig", Inside::Named(ENDPOINT))];

const ENDPOINT_IPAM: &[Field] =
    &[read("IPv4Address"), refused("IPv6Address", NO_IPV6), refused("LinkLocalIPs", LEAVE_OUT)];

/// The body of `POST /networks/create`.
pub const NETWORK_CREATE: &[Field] = &[
    read("Name"),
    // Names are given once in any case.
    idle("CheckDuplicate"),
    read("Driver"),
    read("Scope"),
    read("Internal"),
    // Any container may be attached; its client is told.
    read("Attachable"),
    refused("Ingress", LEAVE_OUT),
    refused("ConfigOnly", LEAVE_OUT),
    holds("ConfigFrom", Inside::One(&[refused("Network", LEAVE_OUT)])),
    holds("IPAM", Inside::One(IPAM)),
    idle("EnableIPv4"),
    refused("EnableIPv6", NO_IPV6),
    read("Options"),
    read("Labels"),
];

const IPAM: &[Field] =
    &[read("Driver"), refused("Options", LEAVE_OUT), holds("Config", Inside::List(IPAM_CONFIG))];

const IPAM_CONFIG: &[Field] =
    &[read("Subnet"), read("IPRange"), read("Gateway"), read("AuxiliaryAddresses")];

/// The body of `POST /networks/{id}/connect` and of `disconnect`.
pub const NETWORK_CONNECT: &[Field] =
    &[read("Container"), holds("EndpointConfig", Inside::One(ENDPOINT)), idle("Force")];

const ENDPOINT: &[Field] = &[
    holds("IPAMConfig", Inside::One(ENDPOINT_IPAM)),
    read("Links"),
    read("Aliases"),
    refused("MacAddress", ONE_LINK),
    read("DriverOpts"),
    idle("GwPriority"),
    // What a client may have read from `inspect`; Docker passes it over too.
    idle("NetworkID"),
    idle("EndpointID"),
    idle("Gateway"),
    idle("IPAddress"),
    idle("IPPrefixLen"),
    idle("IPv6Gateway"),
    idle("GlobalIPv6Address"),
    idle("GlobalIPv6PrefixLen"),
    idle("DNSNames"),
];

/// The body of `POST /containers/{id}/exec`.
pub const EXEC_CREATE: &[Field] = &[
    read("User"),
    read("Privileged"),
    read("Tty"),
    read("ConsoleSize"),
    read("AttachStdin"),
    read("AttachStdout"),
    read("AttachStderr"),
    read("Env"),
    read("WorkingDir"),
    read("Cmd"),
    // The end of a client's attention is told by its hanging up.
    read("DetachKeys"),
    // Said again at the start, where it counts.
    idle("Detach"),
    // docker-py repeats what the path names.
    idle("Container"),
];

/// The body of `POST /exec/{id}/start`.
pub const EXEC_START: &[Field] = &[
    read("Detach"),
    read("Tty"),
    read("ConsoleSize"),
    idle("DetachKeys"),
    // dockerode's own options, which it sends too.
    idle("hijack"),
    idle("stdin"),
];

/// The body of `POST /volumes/create`.
pub const VOLUME_CREATE: &[Field] = &[
    read("Name"),
    read("Driver"),
    read("DriverOpts"),
    read("Labels"),
    // Of answers, which clients send back.
    idle("Mountpoint"),
    idle("Scope"),
    refused("ClusterVolumeSpec", LEAVE_OUT),
];

/// The body of `POST /auth`.
pub const AUTH: &[Field] = &[
    read("username"),
    read("password"),
    read("serveraddress"),
    idle("email"),
    idle("auth"),
    refused("identitytoken", "log in with a user name and a password"),
    refused("registrytoken", "log in with a user name and a password"),
];

/// Whether `value` asks for anything.
pub fn says(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(set) => *set,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// JSON in which no object has a name twice: of two that are spelled alike another reader may
/// take the other.
pub struct Once(pub Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceVisitor).map(Self)
    }
}

struct OnceVisitor;

impl<'de> Visitor<'de> for OnceVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Once(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some((name, Once(value))) = map.next_entry::<String, Once>()? {
            match fields.entry(name) {
                Entry::Vacant(place) => drop(place.insert(value)),
                Entry::Occupied(field) => {
                    let name = field.key();
                    return Err(A::Error::custom(format!("{name} is given twice; give it once")));
                }
            }
        }
        Ok(fields.into())
    }
}

/// Spells the names of `body` as `table` does, and gives what its client is to be
/// warned of.
///
/// # Errors
/// 501 for what no cell has, 400 for what is said twice.
pub fn canonical(body: &mut Value, table: &[Field]) -> ApiResult<Vec<String>> {
    let mut warnings = Vec::new();
    spell(body, table, "", &mut warnings)?;
    Ok(warnings)
}

fn spell(
    value: &mut Value,
    table: &[Field],
    at: &str,
    warnings: &mut Vec<String>,
) -> ApiResult<()> {
    // What is no object is refused by who reads it.
    let Value::Object(given) = value else { return Ok(()) };
    let mut spelled = Map::new();
    for (name, mut value) in std::mem::take(given) {
        let Some(field) = table.iter().find(|field| field.name.eq_ignore_ascii_case(&name)) else {
            match says(&value) {
                true => return Err(ApiError::unsupported(format!("{at}{name}"), LEAVE_OUT)),
                false => continue,
            }
        };
        let full = format!("{at}{}", field.name);
        match field.fate {
            Fate::Refused(remedy) if says(&value) => {
                return Err(ApiError::unsupported(full, remedy));
            }
            Fate::Warned(words) if says(&value) => warnings.push(format!("{full} {words}")),
            _ => {}
        }
        within(&mut value, field.inside, &full, warnings)?;
        if spelled.insert(field.name.to_owned(), value).is_some() {
            return Err(ApiError::bad_request(format!(
                "{full} is given twice, in two spellings; give it once"
            )));
        }
    }
    *given = spelled;
    Ok(())
}

fn within(
    value: &mut Value,
    inside: Inside,
    at: &str,
    warnings: &mut Vec<String>,
) -> ApiResult<()> {
    let below = format!("{at}.");
    match (inside, value) {
        (Inside::One(table), value) => spell(value, table, &below, warnings),
        (Inside::List(table), Value::Array(list)) => {
            list.iter_mut().try_for_each(|value| spell(value, table, &below, warnings))
        }
        (Inside::Named(table), Value::Object(named)) => {
            named.iter_mut().try_for_each(|(_, value)| spell(value, table, &below, warnings))
        }
        (Inside::NamedLists(table), Value::Object(named)) => named
            .iter_mut()
            .try_for_each(|(_, value)| within(value, Inside::List(table), at, warnings)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Create;
    use serde_json::json;

    /// The fields of Docker's own types, as API 1.47 has them, where each is in the body.
    const DOCKERS: [(&str, &str); 12] = [
        (
            "",
            "Hostname Domainname User AttachStdin AttachStdout AttachStderr ExposedPorts Tty \
             OpenStdin StdinOnce Env Cmd Healthcheck ArgsEscaped Image Volumes WorkingDir \
             Entrypoint NetworkDisabled MacAddress OnBuild Labels StopSignal StopTimeout Shell \
             HostConfig NetworkingConfig",
        ),
        (
            "HostConfig",
            "Binds ContainerIDFile LogConfig NetworkMode PortBindings RestartPolicy AutoRemove \
             VolumeDriver VolumesFrom ConsoleSize Annotations CapAdd CapDrop CgroupnsMode Dns \
             DnsOptions DnsSearch ExtraHosts GroupAdd IpcMode Cgroup Links OomScoreAdj PidMode \
             Privileged PublishAllPorts ReadonlyRootfs SecurityOpt StorageOpt Tmpfs UTSMode \
             UsernsMode ShmSize Sysctls Runtime Isolation CpuShares Memory NanoCpus CgroupParent \
             BlkioWeight BlkioWeightDevice BlkioDeviceReadBps BlkioDeviceWriteBps \
             BlkioDeviceReadIOps BlkioDeviceWriteIOps CpuPeriod CpuQuota CpuRealtimePeriod \
             CpuRealtimeRuntime CpusetCpus CpusetMems Devices DeviceCgroupRules DeviceRequests \
             KernelMemory KernelMemoryTCP MemoryReservation MemorySwap MemorySwappiness \
             OomKillDisable PidsLimit Ulimits CpuCount CpuPercent IOMaximumIOps \
             IOMaximumBandwidth Mounts MaskedPaths ReadonlyPaths Init",
        ),
        ("Healthcheck", "Test Interval Timeout StartPeriod StartInterval Retries"),
        (
            "HostConfig/Mounts/0",
            "Type Source Target ReadOnly Consistency BindOptions VolumeOptions TmpfsOptions \
             ClusterOptions",
        ),
        (
            "HostConfig/Mounts/0/BindOptions",
            "Propagation NonRecursive CreateMountpoint ReadOnlyNonRecursive ReadOnlyForceRecursive",
        ),
        ("HostConfig/Mounts/0/VolumeOptions", "NoCopy Labels DriverConfig Subpath"),
        ("HostConfig/Mounts/0/TmpfsOptions", "SizeBytes Mode Options"),
        ("HostConfig/Devices/0", "PathOnHost PathInContainer CgroupPermissions"),
        ("HostConfig/RestartPolicy", "Name MaximumRetryCount"),
        ("HostConfig/Ulimits/0", "Name Hard Soft"),
        ("HostConfig/PortBindings/80/0", "HostIp HostPort"),
        (
            "NetworkingConfig/EndpointsConfig/bridge",
            "IPAMConfig Links Aliases MacAddress NetworkID EndpointID Gateway IPAddress \
             IPPrefixLen IPv6Gateway GlobalIPv6Address GlobalIPv6PrefixLen DriverOpts DNSNames",
        ),
    ];

    /// A body that holds nothing but `value` under `name` at `place`.
    fn body(place: &str, name: &str, value: Value) -> Value {
        let place = place.split('/').filter(|part| !part.is_empty());
        place.rev().fold(json!({ name: value }), |inner, part| match part {
            "0" => json!([inner]),
            part => json!({ part: inner }),
        })
    }

    fn table(place: &str) -> &'static [Field] {
        let parts = place.split('/').filter(|part| part.chars().all(char::is_alphabetic));
        parts.filter(|part| !part.is_empty() && *part != "bridge").fold(CREATE, |table, part| {
            match table.iter().find(|field| field.name == part).map(|field| field.inside) {
                Some(
                    Inside::One(table)
                    | Inside::List(table)
                    | Inside::Named(table)
                    | Inside::NamedLists(table),
                ) => table,
                _ => panic!("{place}: {part} holds no fields"),
            }
        })
    }

    fn values() -> Vec<Value> {
        let object = json!({ "x": {} });
        [
            json!(true),
            json!(7),
            json!("x"),
            json!(["x"]),
            json!([7]),
            json!([object]),
            json!([["x"]]),
            json!({ "x": "y" }),
            json!({ "80": [] }),
            object,
        ]
        .into()
    }

    /// What is read of a body, but for its own text.
    fn understood(body: Value) -> ApiResult<Create> {
        let mut create = Create::read(body)?;
        create.host_value = Value::Null;
        Ok(create)
    }

    #[test]
    fn every_field_of_the_api_is_carried_out_or_refused_by_name_or_warned_of() {
        for (place, names) in DOCKERS {
            for name in names.split_ascii_whitespace() {
                let field = table(place).iter().find(|field| field.name == name);
                let field = field.unwrap_or_else(|| panic!("{place}: {name} is not in the table"));
                let silent = understood(body(place, name, Value::Null)).expect("nothing is said");
                let tried = values().into_iter().map(|value| understood(body(place, name, value)));
                match (field.fate, field.inside) {
                    (Fate::Read, Inside::Plain) => assert!(
                        tried.flatten().any(|heard| heard != silent),
                        "{place}: {name} is said to be read"
                    ),
                    (Fate::Refused(_), _) => tried.for_each(|heard| {
                        let error = heard.unwrap_err();
                        assert_eq!(error.status.as_u16(), 501, "{place}: {name}");
                        assert!(error.message.contains(name), "{place}: {error}");
                    }),
                    (Fate::Warned(_), _) => tried.flatten().for_each(|heard| {
                        assert!(heard.warnings[0].contains(name), "{place}: {:?}", heard.warnings);
                    }),
                    (Fate::Idle, _) => {
                        tried.for_each(|heard| assert_eq!(heard.unwrap(), silent, "{name}"));
                    }
                    (Fate::Read, _) => {}
                }
            }
        }
    }

    #[test]
    fn a_name_is_read_in_any_case_wherever_its_check_is() {
        for (place, names) in DOCKERS {
            for name in names.split_ascii_whitespace() {
                for value in values() {
                    let plain = understood(body(place, name, value.clone()));
                    for other in [name.to_ascii_lowercase(), name.to_ascii_uppercase()] {
                        let heard = understood(body(place, &other, value.clone()));
                        assert_eq!(heard, plain, "{place}: {other} = {value}");
                    }
                }
            }
        }
        let lower = json!({"hostconfig": {"networkMode": "none", "mounts": [
            {"type": "bind", "source": "/a", "target": "/b", "Readonly": true}]}});
        let create = Create::read(lower).unwrap();
        assert_eq!(create.host.network_mode, "none");
        assert!(create.host.mounts[0].read_only);
        assert_eq!(create.host_value["NetworkMode"], "none", "as inspect shows it");
    }

    #[test]
    fn what_no_table_knows_or_what_is_said_twice_is_refused() {
        for (text, status, word) in [
            (r#"{"Whatever": 1}"#, 501, "Whatever is not supported"),
            (r#"{"HostConfig": {"Whatever": ["x"]}}"#, 501, "HostConfig.Whatever"),
            (r#"{"HostConfig": {"Mounts": [{"Whatever": true}]}}"#, 501, "Mounts.Whatever"),
            (r#"{"HostConfig": {"NetworkMode": "none", "networkmode": "bridge"}}"#, 400, "twice"),
            (r#"{"HostConfig": {}, "hostConfig": {"Privileged": true}}"#, 400, "twice"),
        ] {
            let error = Create::read(serde_json::from_str(text).unwrap()).unwrap_err();
            assert_eq!(error.status.as_u16(), status, "{text}: {error}");
            assert!(error.message.contains(word), "{text}: {error}");
        }
        let nothing = json!({"Whatever": 0, "HostConfig": {"Whatever": null, "Other": {}}});
        assert_eq!(Create::read(nothing).unwrap().host_value, json!({}));
        // Names of the client's own are nobody's fields.
        let own =
            json!({"Labels": {"tty": "1", "TTY": "2"}, "HostConfig": {"Sysctls": {"a": "b"}}});
        let own = Create::read(own).unwrap();
        assert_eq!((own.config.labels.len(), own.host.sysctls.len()), (2, 1));
    }
}
