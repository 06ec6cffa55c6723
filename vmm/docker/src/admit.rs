//! What a client asks of a container, held against what a cell can be: refused
//! by name, taken with a warning, or turned into a capability table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use exocell_cell::Within;
use exocell_cell::health;
use exocell_cell::images::{Healthcheck, ImageConfig};
use exocell_cell::intra::Intra;
use exocell_cell::limits;
use exocell_cell::network::{HOST_NAME, Publish};
use exocell_cell::networks::Attachment;
use exocell_cell::oci;
use exocell_cell::plan;
use exocell_cell::policy::Policy;
use exocell_cell::settings::{self, CPU_PERIOD_US, CpuTime, Node, Settings, Tmpfs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{ApiError, ApiResult};
use crate::ids::new_id;
use crate::ports;
use crate::wire::{
    BindOptions, Config, Create, HostConfig, Mount, Names, RestartPolicy, TmpfsOptions, Ulimit,
    VolumeOptions,
};

/// The longest name of a volume, which is a directory's.
const VOLUME_NAME_BYTES_MAX: usize = 255;

/// From so many bytes on a limit is none: clients that read theirs from a control group without
/// one send the largest number that it can hold.
const UNLIMITED: i64 = 1 << 62;

/// What a container gets where its client names no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    pub vcpus: u32,
    pub processes: u32,
    /// What stands between a container's programs and its kernel.
    pub intra: Intra,
    /// What a container may connect to, rules as a capability table has them.
    pub connect: Vec<String>,
}

/// A folder of the host or a volume in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountPoint {
    /// The volume's; `None` for a folder of the host.
    pub volume: Option<String>,
    pub source: PathBuf,
    pub target: String,
    pub writable: bool,
    /// Whether a folder that does not exist is made (`-v` does, `--mount` not).
    pub make: bool,
    /// Of a volume that is made with it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether a volume without a name is made with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_anonymous: bool,
    /// Whether a volume gets what the image has in its place while it is empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fill: bool,
    /// What of the volume it is; empty is all of it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subpath: String,
}

/// A request that a cell can honour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    pub args: Vec<String>,
    pub mounts: Vec<MountPoint>,
    /// The paths of those that get what the image has there.
    pub fills: Vec<PathBuf>,
    pub publish: Vec<Publish>,
    /// The container in whose guest it is.
    pub within: Option<Within>,
    pub networks: Vec<Attachment>,
    pub settings: Settings,
    pub restart: Policy,
    /// With the image's where the client says nothing.
    pub health: Option<Healthcheck>,
    /// The capability table, JSON.
    pub capabilities: String,
    pub intra: Intra,
    pub warnings: Vec<String>,
}

/// Volumes that one image may want: each is a device of the cell.
pub const VOLUMES_OF_IMAGE_MAX: usize = 16;

/// Checks `create` against `image`; volumes lie in `volumes`, `networks` are those between cells
/// that it names, and `inherited` what it has of other containers.
///
/// # Errors
/// 400 for what makes no sense, 501 for what cells do not have.
pub fn admit(
    create: &Create,
    image: &ImageConfig,
    defaults: &Defaults,
    volumes: &Path,
    networks: Vec<Attachment>,
    inherited: Vec<MountPoint>,
) -> ApiResult<Admitted> {
    let host = &create.host;
    refuse(create)?;
    let args = args(&create.config, image);
    if args.is_empty() || args.iter().all(String::is_empty) {
        return Err(ApiError::bad_request(format!(
            "no command specified: the image {} names no program",
            create.config.image
        )));
    }
    let mounts = mounts(create, image, volumes, inherited)?;
    check_driver(&host.volume_driver, &mounts)?;
    let fills = mounts.iter().filter(|mount| mount.fill).map(|mount| PathBuf::from(&mount.target));
    let publish = publish(create, image)?;
    Ok(Admitted {
        fills: fills.collect(),
        args,
        capabilities: table(create, defaults, &mounts, &publish, &networks)?.to_string(),
        intra: defaults.intra,
        settings: settings(create)?,
        restart: restart(host)?,
        health: healthcheck(&create.config, image)?,
        warnings: warnings(create, defaults, !networks.is_empty()),
        within: within(create),
        mounts,
        publish,
        networks,
    })
}

/// The container in whose guest it is, and what it may have there if the client says so.
fn within(create: &Create) -> Option<Within> {
    let host = &create.host;
    create.within().map(|cell| Within {
        cell: cell.to_owned(),
        memory_bytes: u64::try_from(host.memory)
            .ok()
            .filter(|bytes| (1..UNLIMITED as u64).contains(bytes)),
        process_max: u32::try_from(host.pids_limit).ok().filter(|count| *count > 0),
    })
}

/// Whether who is to make the container's volumes is there: where none are made that does not matter.
fn check_driver(driver: &str, mounts: &[MountPoint]) -> ApiResult<()> {
    match matches!(driver, "" | "local") || mounts.iter().all(|mount| mount.volume.is_none()) {
        true => Ok(()),
        false => Err(ApiError::unsupported(
            format!("the volume driver {driver}"),
            "leave it out: volumes are folders of the server's host (local)",
        )),
    }
}

/// What docker does not take beside another container's network, in its words.
fn refuse_within(create: &Create) -> ApiResult<()> {
    let (host, config) = (&create.host, &create.config);
    let conflict = |what: &str, with: &str| {
        Err(ApiError::bad_request(format!(
            "conflicting options: {what} and the {with}network mode"
        )))
    };
    let (any, containers) = ("", "container type ");
    let conflicts = [
        (!config.hostname.is_empty(), "hostname", any),
        (!host.links.is_empty(), "links", any),
        (!host.dns.is_empty(), "dns", any),
        (!host.extra_hosts.is_empty(), "custom host-to-IP mapping", any),
        (!host.port_bindings.is_empty() || host.publish_all_ports, "port publishing", containers),
        (!config.exposed_ports.is_empty(), "port exposing", containers),
    ];
    match (create.within(), conflicts.into_iter().find(|(asked, ..)| *asked)) {
        (Some(_), Some((_, what, with))) => conflict(what, with),
        (Some(""), None) => {
            Err(ApiError::bad_request("invalid container format container:<name|id>"))
        }
        (Some(_), None) if !create.endpoints.is_empty() => Err(ApiError::bad_request(
            "container cannot be connected to network endpoints: it has another container's \
             network",
        )),
        _ => Ok(()),
    }
}

fn publish(create: &Create, image: &ImageConfig) -> ApiResult<Vec<Publish>> {
    let mut exposed: Names = create.config.exposed_ports.clone();
    exposed.extend(image.exposed_ports.iter().map(|port| (port.clone(), json!({}))));
    let publish = ports::published(&create.host, &exposed)?;
    if !publish.is_empty() && !create.wants_network() {
        return Err(ApiError::bad_request(
            "conflicting options: published ports and no network (NetworkMode none, NetworkDisabled)",
        ));
    }
    Ok(publish)
}

/// Entrypoint and command as Docker merges them: a client's entrypoint, even
/// an empty word, does away with the image's command.
fn args(config: &Config, image: &ImageConfig) -> Vec<String> {
    let (mut entrypoint, mut cmd) = (config.entrypoint.clone(), config.cmd.clone());
    if entrypoint.as_ref().is_none_or(Vec::is_empty) {
        cmd = cmd.filter(|cmd| !cmd.is_empty()).or_else(|| Some(image.cmd.clone()));
        entrypoint = entrypoint.or_else(|| Some(image.entrypoint.clone()));
    }
    let mut args = entrypoint.unwrap_or_default();
    if args == [""] {
        args.clear();
    }
    args.extend(cmd.unwrap_or_default());
    args
}

/// Whether `mode` names the host's or another container's namespace.
pub fn is_foreign(mode: &str) -> bool {
    mode == "host" || mode.starts_with("container:") || mode.starts_with("ns:")
}

/// One container's network another can have.
fn is_foreign_network(mode: &str) -> bool {
    is_foreign(mode) && !mode.starts_with("container:")
}

fn refuse(create: &Create) -> ApiResult<()> {
    let host = &create.host;
    let own_kernel = "a cell has a kernel of its own and never reaches into the host's";
    let modes = [
        ("pid", &host.pid_mode),
        ("ipc", &host.ipc_mode),
        ("uts", &host.uts_mode),
        ("userns", &host.userns_mode),
        ("network", &host.network_mode),
        ("cgroup namespace", &host.cgroupns_mode),
    ];
    let is_refused = |(name, mode): &(&str, &String)| match *name {
        "network" => is_foreign_network(mode),
        _ => is_foreign(mode),
    };
    refuse_within(create)?;
    if let Some((name, mode)) = modes.into_iter().find(is_refused) {
        let remedy = match name {
            "network" => {
                "a cell never has the host's own: -p publishes its ports, and host.docker.internal \
                 is the host where the server grants that (exocell serve --allow-net)"
            }
            "pid" | "ipc" if mode.starts_with("container:") => {
                "docker exec runs a program beside the other container's own"
            }
            _ => own_kernel,
        };
        return Err(ApiError::unsupported(format!("the {name} mode {mode}"), remedy));
    }
    let known: [(&str, &String, &[&str]); 6] = [
        ("PidMode", &host.pid_mode, &[""]),
        ("IpcMode", &host.ipc_mode, &["", "private", "shareable"]),
        ("UTSMode", &host.uts_mode, &[""]),
        ("UsernsMode", &host.userns_mode, &[""]),
        ("CgroupnsMode", &host.cgroupns_mode, &["", "private"]),
        ("Isolation", &host.isolation, &["", "default"]),
    ];
    if let Some((name, mode, _)) =
        known.into_iter().find(|(_, mode, known)| !known.contains(&mode.as_str()))
    {
        return Err(ApiError::unsupported(format!("the {name} {mode:?}"), "leave it out"));
    }
    let log = host.log_config.kind.as_str();
    let is_runtime = |name: &String| matches!(name.as_str(), "" | "exocell" | "runc");
    let refused = [
        (!host.device_requests.is_empty(), "DeviceRequests (--gpus)", own_kernel),
        (
            !host.links.is_empty(),
            "Links",
            "the containers of a network reach each other by their names and aliases",
        ),
        (
            !matches!(log, "" | "json-file" | "local" | "none"),
            "this log driver",
            "use json-file, whose logs are kept with the cell, or none",
        ),
        (
            !is_runtime(&host.runtime) || !is_runtime(&create.runtime),
            "this runtime",
            "leave it out",
        ),
    ];
    const OTHERS: [&str; 8] =
        ["syslog", "journald", "gelf", "fluentd", "awslogs", "splunk", "etwlogs", "gcplogs"];
    if !matches!(log, "" | "json-file" | "local" | "none") && !OTHERS.contains(&log) {
        return Err(ApiError::bad_request(format!(
            "logger: no log driver named '{log}' is registered"
        )));
    }
    match refused.into_iter().find(|(asked, ..)| *asked) {
        Some((_, what, remedy)) => Err(ApiError::unsupported(what, remedy)),
        None => Ok(()),
    }
}

/// What is taken but not done, in words for the client.
fn warnings(create: &Create, defaults: &Defaults, is_joined: bool) -> Vec<String> {
    let host = &create.host;
    [
        (
            create.wants_network() && defaults.connect.is_empty() && !is_joined,
            "the container has no network to connect to: exocell serve grants one with --allow-net",
        ),
        (
            host.extra_hosts.iter().any(|line| line.ends_with("host-gateway"))
                && !defaults.connect.iter().any(|rule| rule.starts_with(HOST_NAME)),
            "the host is reached by a rule only: exocell serve --allow-net \
             host.docker.internal:PORT grants a port of its loopback",
        ),
        (
            host.memory_swap < 0 || host.memory_swap > host.memory,
            "MemorySwap is not used: a container has its memory and no swap",
        ),
        (
            create.endpoints.values().any(|own| !own.driver_opts.is_empty()),
            "DriverOpts are kept and change nothing of a network here",
        ),
    ]
    .into_iter()
    .filter(|(applies, _)| *applies)
    .map(|(_, text)| text.to_owned())
    .chain(create.warnings.iter().cloned())
    .collect()
}

/// Whether the container starts again by itself.
fn restart(host: &HostConfig) -> ApiResult<Policy> {
    let RestartPolicy { name, maximum_retry_count } = &host.restart_policy;
    let policy = Policy::of(name, *maximum_retry_count).map_err(bad)?;
    match host.auto_remove && !policy.is_no() {
        true => {
            Err(ApiError::bad_request("can't create 'AutoRemove' container with restart policy"))
        }
        false => Ok(policy),
    }
}

/// How the container is looked after. A line for a shell of the client's own is one of its words.
fn healthcheck(config: &Config, image: &ImageConfig) -> ApiResult<Option<Healthcheck>> {
    let own = config.healthcheck.as_ref();
    own.map_or(Ok(()), health::validate).map_err(bad)?;
    let mut wanted = health::merged(own, image.healthcheck.as_ref());
    if let Some(check) = &mut wanted
        && let [kind, line] = check.test.as_slice()
        && kind == "CMD-SHELL"
        && !config.shell.is_empty()
    {
        let words = config.shell.iter().chain([line]).cloned();
        check.test = ["CMD".to_owned()].into_iter().chain(words).collect();
    }
    Ok(wanted)
}

/// Whether a share of the CPUs is one that a control group takes.
pub fn check_cpu_time(host: &HostConfig, defaults: &Defaults) -> ApiResult<()> {
    if (1..10_000_000).contains(&host.nano_cpus) {
        return Err(ApiError::bad_request(format!(
            "range of CPUs is from 0.01 to {0}.00, as there are only {0} CPUs available",
            defaults.vcpus
        )));
    }
    if host.cpu_period != 0 && !(1000..=1_000_000).contains(&host.cpu_period) {
        return Err(ApiError::bad_request(
            "CPU cfs period can not be less than 1ms (i.e. 1000) or larger than 1s (i.e. 1000000)",
        ));
    }
    match host.cpu_quota {
        1..1000 => Err(ApiError::bad_request("CPU cfs quota can not be less than 1ms (i.e. 1000)")),
        _ => Ok(()),
    }
}

/// How many processors it takes to have `time`.
///
/// # Errors
/// There are not so many.
pub fn check_processors(time: CpuTime, defaults: &Defaults) -> ApiResult<u32> {
    match u32::try_from(time.processors()) {
        Ok(count) if count <= defaults.vcpus => Ok(count),
        _ => Err(ApiError::bad_request(format!(
            "range of CPUs is from 0.01 to {0}.00, as there are only {0} CPUs available",
            defaults.vcpus
        ))),
    }
}

/// How much of the CPUs the client limits the container to.
fn cpus(host: &HostConfig) -> Option<CpuTime> {
    let positive = |amount: i64| u64::try_from(amount).ok().filter(|amount| *amount > 0);
    if let Some(nano) = positive(host.nano_cpus) {
        return Some(CpuTime::of_nano_cpus(nano));
    }
    let period_us = positive(host.cpu_period).unwrap_or(CPU_PERIOD_US);
    positive(host.cpu_quota).map(|quota_us| CpuTime { quota_us, period_us })
}

/// What the program has and is held to inside its guest.
fn settings(create: &Create) -> ApiResult<Settings> {
    let host = &create.host;
    let positive = |amount: i64| u64::try_from(amount).ok().filter(|amount| *amount > 0);
    let given = |text: &String| (!text.is_empty()).then(|| text.clone());
    let limit = |own: &Ulimit| settings::Ulimit::new(&own.name, own.soft, own.hard);
    let mut settings = Settings {
        privileged: host.privileged,
        cap_add: host.cap_add.clone(),
        cap_drop: host.cap_drop.clone(),
        masked_paths: host.masked_paths.clone(),
        readonly_paths: host.readonly_paths.clone(),
        groups: host.group_add.clone(),
        ulimits: host.ulimits.iter().map(limit).collect::<Result<_, _>>().map_err(bad)?,
        tmpfs: tmpfs(host)?,
        shm_bytes: positive(host.shm_size),
        sysctls: host.sysctls.clone(),
        domain_name: given(&create.config.domainname),
        oom_score_adj: Some(host.oom_score_adj).filter(|adjustment| *adjustment != 0),
        init: host.init,
        cpu: cpus(host),
        cpu_shares: positive(host.cpu_shares),
        cpuset: given(&host.cpuset_cpus),
        memory_reservation: positive(host.memory_reservation),
        ..Settings::default()
    };
    for option in &host.security_opt {
        settings.add_security_option(option).map_err(bad)?;
    }
    settings.add_dns(&host.dns, &host.dns_search, &host.dns_options).map_err(bad)?;
    for own in &host.devices {
        let node = Node::new(&own.path_on_host, &own.path_in_container, &own.cgroup_permissions);
        settings.devices.push(node.map_err(bad)?);
    }
    for rule in &host.device_cgroup_rules {
        settings.add_device_rule(rule).map_err(bad)?;
    }
    for line in &host.extra_hosts {
        settings.add_host(line).map_err(bad)?;
    }
    // What there is not is told now, not at the start.
    oci::check(&settings).map_err(bad)?;
    Ok(settings)
}

fn bad(message: String) -> ApiError {
    ApiError::bad_request(message)
}

fn tmpfs(host: &HostConfig) -> ApiResult<Vec<Tmpfs>> {
    let by_path = host.tmpfs.iter().map(|(target, options)| Tmpfs::new(target, options));
    let mounts = host.mounts.iter().filter(|mount| mount.kind == "tmpfs").map(|mount| {
        let TmpfsOptions { size_bytes, mode, options } = &mount.tmpfs_options;
        let (size_bytes, mode) = (*size_bytes, *mode);
        let more = options.iter().map(|words| words.join("="));
        let size = (size_bytes > 0).then(|| format!("size={size_bytes}"));
        let mode = (mode > 0).then(|| format!("mode={mode:o}"));
        let read_only = mount.read_only.then(|| "ro".to_owned());
        let own = [size, mode, read_only].into_iter().flatten();
        let options: Vec<String> = own.chain(more).collect();
        Tmpfs::new(&mount.target, &options.join(","))
    });
    by_path.chain(mounts).collect::<Result<_, _>>().map_err(bad)
}

fn table(
    create: &Create,
    defaults: &Defaults,
    mounts: &[MountPoint],
    publish: &[Publish],
    networks: &[Attachment],
) -> ApiResult<Value> {
    let host = &create.host;
    if host.memory < 0 || host.nano_cpus < 0 {
        return Err(ApiError::bad_request("a limit is negative"));
    }
    let memory = match host.memory {
        // Of another's guest it may have less than a guest needs.
        1..UNLIMITED if create.within().is_some() => host.memory as u64,
        1..UNLIMITED => {
            plan::check_memory(host.memory as u64)?;
            host.memory as u64
        }
        _ => defaults.memory_bytes,
    };
    check_cpu_time(host, defaults)?;
    let vcpus = match cpus(host) {
        Some(time) => check_processors(time, defaults)?,
        None => defaults.vcpus,
    };
    let weight = match u64::try_from(host.cpu_shares) {
        Ok(0) | Err(_) => 100,
        Ok(shares) => limits::weight(shares),
    };
    let processes = u32::try_from(host.pids_limit).ok().filter(|limit| *limit > 0);
    let folders: Vec<Value> = mounts.iter().map(folder).collect();
    let mut table = json!({
        "version": 1,
        "memory": { "limit": memory.to_string() },
        "cpu": { "count": vcpus, "weight": weight },
        "disk": { "size": defaults.disk_bytes.to_string() },
        "processes": { "max": processes.unwrap_or(defaults.processes) },
        "clock": {}, "random": {}, "stdio": {},
        "folder": folders,
    });
    let has_none = defaults.connect.is_empty() && publish.is_empty() && networks.is_empty();
    if create.wants_network() && !has_none {
        let listen: BTreeSet<u16> = publish.iter().map(|publish| publish.guest_port).collect();
        let listen: Vec<String> = listen.iter().map(u16::to_string).collect();
        table["network"] = json!({ "connect": defaults.connect, "listen": listen });
        let join: Vec<&String> = networks.iter().map(|own| &own.network).collect();
        if !join.is_empty() {
            table["network"]["join"] = json!(join);
        }
    }
    Ok(table)
}

fn folder(mount: &MountPoint) -> Value {
    let rights: &[&str] =
        if mount.writable { &["read", "write", "exec"] } else { &["read", "exec"] };
    json!({ "host": mount.source, "guest": mount.target, "rights": rights })
}

fn mounts(
    create: &Create,
    image: &ImageConfig,
    volumes: &Path,
    inherited: Vec<MountPoint>,
) -> ApiResult<Vec<MountPoint>> {
    let host = &create.host;
    let mut found: Vec<MountPoint> = Vec::new();
    for bind in &host.binds {
        found.push(read_bind(bind, volumes)?);
    }
    for mount in host.mounts.iter().filter(|mount| mount.kind != "tmpfs") {
        found.push(read_mount(mount, volumes)?);
    }
    let mut taken = BTreeSet::new();
    if let Some(twice) = found.iter().find(|mount| !taken.insert(plain(&mount.target))) {
        return Err(ApiError::bad_request(format!("Duplicate mount point: {}", twice.target)));
    }
    let in_memory = host.mounts.iter().filter(|mount| mount.kind == "tmpfs");
    taken.extend(in_memory.map(|mount| plain(&mount.target)));
    taken.extend(host.tmpfs.keys().map(|target| plain(target)));
    // What it says itself goes before what others have there.
    found.extend(inherited.into_iter().filter(|mount| taken.insert(plain(&mount.target))));
    // In another's guest no folder can come later: what the image wants there is on its disk.
    let of_image = image.volumes.iter().filter(|_| create.within().is_none());
    if image.volumes.len() > VOLUMES_OF_IMAGE_MAX {
        return Err(ApiError::bad_request(format!(
            "the image wants {} volumes, at most {VOLUMES_OF_IMAGE_MAX} are made for one",
            image.volumes.len()
        )));
    }
    for target in create.config.volumes.keys().chain(of_image) {
        if taken.insert(plain(target)) {
            found.push(anonymous(target, volumes)?);
        }
    }
    Ok(found)
}

/// The path, however it is written.
fn plain(target: &str) -> PathBuf {
    Path::new("/").join(target).components().collect()
}

/// A volume that is called by an id.
fn anonymous(target: &str, volumes: &Path) -> ApiResult<MountPoint> {
    let target = match target.starts_with('/') {
        true => target.to_owned(),
        false => format!("/{target}"),
    };
    let point = point(&new_id()?, &target, true, true, volumes)?;
    Ok(MountPoint { is_anonymous: true, ..point })
}

/// `SOURCE:TARGET[:OPTIONS]`; a source that is no path is a volume's name, and a target alone a
/// volume without one.
fn read_bind(bind: &str, volumes: &Path) -> ApiResult<MountPoint> {
    let invalid = || ApiError::bad_request(format!("invalid volume specification: '{bind}'"));
    let parts: Vec<&str> = bind.split(':').collect();
    let (source, target, options) = match parts.as_slice() {
        [target] if target.starts_with('/') => return anonymous(target, volumes),
        [source, target] => (*source, *target, ""),
        [source, target, options] => (*source, *target, *options),
        _ => return Err(invalid()),
    };
    if source.is_empty() {
        return Err(invalid());
    }
    let point = point(source, target, is_writable(options)?, true, volumes)?;
    let fill = point.fill && !options.split(',').any(|word| word == "nocopy");
    Ok(MountPoint { fill, ..point })
}

/// Whether a bind with these options may be written to. A word that is not understood may have
/// meant that it may not.
fn is_writable(options: &str) -> ApiResult<bool> {
    const KINDS: [&[&str]; 5] = [
        &["rw", "ro"],
        // Labels of SELinux, which a cell has not.
        &["z", "Z"],
        &["nocopy"],
        &["private", "rprivate"],
        // Of the Mac.
        &["consistent", "cached", "delegated"],
    ];
    let invalid = || ApiError::bad_request(format!("invalid mode: {options}"));
    let words: Vec<&str> = match options {
        "" => Vec::new(),
        options => options.split(',').collect(),
    };
    let shared = ["shared", "rshared", "slave", "rslave"];
    if let Some(word) = words.iter().find(|word| shared.contains(*word)) {
        return Err(no_propagation(word));
    }
    if !words.iter().all(|word| KINDS.iter().any(|kind| kind.contains(word))) {
        return Err(invalid());
    }
    let often = |kind: &&[&str]| words.iter().filter(|word| kind.contains(*word)).count() > 1;
    if KINDS.iter().any(often) {
        return Err(invalid());
    }
    Ok(!words.contains(&"ro"))
}

fn read_mount(mount: &Mount, volumes: &Path) -> ApiResult<MountPoint> {
    match (mount.kind.as_str(), mount.source.as_str()) {
        ("bind", source) if source.starts_with('/') => {
            let BindOptions { propagation, create_mountpoint } = &mount.bind_options;
            if !matches!(propagation.as_str(), "" | "private" | "rprivate") {
                return Err(no_propagation(propagation));
            }
            point(source, &mount.target, !mount.read_only, *create_mountpoint, volumes)
        }
        ("volume", _)
            if !matches!(mount.volume_options.driver_config.name.as_str(), "" | "local") =>
        {
            Err(ApiError::unsupported("this volume driver", "use local, without options"))
        }
        ("volume", name) if !name.contains('/') => {
            let labels = mount.volume_options.labels.clone();
            let point = match name {
                "" => anonymous(&mount.target, volumes)?,
                name => point(name, &mount.target, true, true, volumes)?,
            };
            let VolumeOptions { no_copy, subpath, .. } = &mount.volume_options;
            let fill = point.fill && !no_copy && subpath.is_empty();
            let subpath = check_subpath(subpath)?;
            let source =
                if subpath.is_empty() { point.source } else { point.source.join(&subpath) };
            Ok(MountPoint { labels, fill, writable: !mount.read_only, source, subpath, ..point })
        }
        ("bind" | "volume", source) => {
            Err(ApiError::bad_request(format!("invalid mount source '{source}'")))
        }
        ("image", _) => Err(ApiError::unsupported(
            "a mount of an image",
            "copy what you need of it into your own (COPY --from), or into a volume",
        )),
        (kind, _) => Err(ApiError::unsupported(
            format!("a mount of type {kind:?}"),
            "use a bind mount or a named volume",
        )),
    }
}

/// A path within a volume, without what says nothing.
fn check_subpath(text: &str) -> ApiResult<String> {
    let parts: Vec<&str> = text.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    match text.starts_with('/') || parts.contains(&"..") || text.contains('\0') {
        true => Err(ApiError::bad_request(format!(
            "invalid volume subpath '{text}': it must be a path below the volume, without .."
        ))),
        false => Ok(parts.join("/")),
    }
}

fn no_propagation(word: &str) -> ApiError {
    ApiError::unsupported(
        format!("the mount propagation {word:?}"),
        "what is mounted on one side of a cell is not seen on the other",
    )
}

fn point(
    source: &str,
    target: &str,
    writable: bool,
    make: bool,
    volumes: &Path,
) -> ApiResult<MountPoint> {
    if !target.starts_with('/') || target.split('/').any(|part| part == "..") {
        return Err(ApiError::bad_request(format!(
            "invalid mount target '{target}': it must be an absolute path without .."
        )));
    }
    let mut parts = target.split('/').filter(|part| !matches!(*part, "" | "."));
    match (parts.next(), parts.next()) {
        (None, _) => {
            return Err(ApiError::bad_request(format!(
                "invalid mount target '{target}': destination can't be '/'"
            )));
        }
        (Some("proc" | "sys"), None) => {
            return Err(ApiError::bad_request(format!(
                "invalid mount target '{target}': a container has its own; mount it elsewhere"
            )));
        }
        _ => {}
    }
    let volume = (!source.starts_with('/')).then(|| source.to_owned());
    let source = match &volume {
        Some(name) => {
            check_volume(name)?;
            volumes.join(name)
        }
        None => PathBuf::from(source),
    };
    let (target, fill) = (target.to_owned(), volume.is_some());
    Ok(MountPoint { volume, source, target, writable, make, fill, ..MountPoint::default() })
}

/// Whether a volume may be called `name`.
pub fn check_volume(name: &str) -> ApiResult<()> {
    exocell_cell::CellSpec::check_name(name)
        .map_err(|error| ApiError::bad_request(format!("the volume cannot be named: {error}")))?;
    match name.len() > VOLUME_NAME_BYTES_MAX {
        true => Err(ApiError::bad_request(format!(
            "the volume's name has {} letters; give it {VOLUME_NAME_BYTES_MAX} at most",
            name.len()
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_cell::xgate::CapabilitySet;

    fn defaults(connect: &[&str]) -> Defaults {
        let connect = connect.iter().map(ToString::to_string).collect();
        Defaults {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            vcpus: 2,
            processes: 100,
            intra: Intra::default(),
            connect,
        }
    }

    fn create(host: Value) -> ApiResult<Create> {
        Create::read(json!({ "Image": "i", "Cmd": ["c"], "HostConfig": host }))
    }

    fn admitted(host: Value) -> ApiResult<Admitted> {
        admit(
            &create(host)?,
            &ImageConfig::default(),
            &defaults(&[]),
            Path::new("/volumes"),
            Vec::new(),
            Vec::new(),
        )
    }

    #[test]
    fn memory_is_what_the_host_has_or_no_limit() {
        for none in [0, i64::MAX, 0x7fff_ffff_ffff_f000] {
            let admitted = admitted(json!({ "Memory": none })).unwrap();
            let caps = CapabilitySet::parse(&admitted.capabilities, Path::new("/")).unwrap();
            assert_eq!(caps.memory_bytes(), Some(1 << 30), "{none}");
        }
        for (bytes, word) in [(1_i64 << 50, "more than the host has"), (4096, "too few")] {
            let error = admitted(json!({ "Memory": bytes })).unwrap_err();
            assert!(error.status == 400 && error.message.contains(word), "{error}");
        }
    }

    #[test]
    fn limits_and_folders_become_a_table() {
        let host = json!({
            "Memory": 64 << 20, "NanoCpus": 1_500_000_000i64, "PidsLimit": 7, "CpuShares": 512,
            "Binds": ["/src:/src:ro", "cache:/cache"],
            "Mounts": [{"Type": "bind", "Source": "/data", "Target": "/data"}],
        });
        let admitted = admitted(host).unwrap();
        let caps = CapabilitySet::parse(&admitted.capabilities, Path::new("/")).unwrap();
        assert_eq!((caps.memory_bytes(), caps.vcpus()), (Some(64 << 20), 2));
        assert_eq!((caps.process_max(), caps.cpu_weight()), (Some(7), 50));
        let hosts: Vec<_> = caps.folders().iter().map(|f| f.host.display().to_string()).collect();
        assert_eq!(hosts, ["/src", "/volumes/cache", "/data"]);
        let writable: Vec<_> = admitted.mounts.iter().map(|mount| mount.writable).collect();
        assert_eq!(writable, [false, true, true]);
        let time = admitted.settings.cpu.unwrap();
        assert_eq!((time.quota_us, time.period_us), (150_000, 100_000));
        let plain = self::admitted(json!({"NetworkMode": "none"})).unwrap();
        assert_eq!(plain.warnings, Vec::<String>::new());
    }

    #[test]
    fn a_network_is_what_the_server_grants_and_the_client_publishes() {
        let table = |host: Value, connect: &[&str]| {
            let image = ImageConfig::default();
            let admitted = admit(
                &create(host).unwrap(),
                &image,
                &defaults(connect),
                Path::new("/volumes"),
                Vec::new(),
                Vec::new(),
            )
            .unwrap();
            let caps = CapabilitySet::parse(&admitted.capabilities, Path::new("/")).unwrap();
            (caps.network().map(ToString::to_string), admitted.warnings.len())
        };
        let ports = json!({"80/tcp": [{"HostPort": "8080"}, {"HostPort": "8081"}]});
        assert_eq!(table(json!({}), &[]), (None, 1));
        assert_eq!(table(json!({"NetworkMode": "none"}), &["a.test:1"]), (None, 0));
        let (granted, warnings) = table(json!({}), &["a.test:1"]);
        assert!(granted.unwrap().contains("a.test:1") && warnings == 0);
        let (granted, warnings) = table(json!({"PortBindings": ports}), &[]);
        assert!(granted.unwrap().contains("80") && warnings == 1);
    }

    #[test]
    fn what_a_program_has_inside_comes_from_the_client() {
        let host = json!({
            "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "GroupAdd": ["4242"],
            "Ulimits": [{"Name": "nofile", "Soft": 5, "Hard": -1}], "ShmSize": 1 << 30,
            "Tmpfs": {"/t": "size=1m"}, "Init": true, "Sysctls": {"net.core.somaxconn": "9"},
            "Mounts": [{"Type": "tmpfs", "Target": "/m", "TmpfsOptions": {"SizeBytes": 4096}}],
            "Dns": ["192.0.2.1"], "DnsSearch": ["a.test"], "DnsOptions": ["ndots:2"],
            "Devices": [{"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse",
                "CgroupPermissions": "rwm"}],
            "ExtraHosts": ["db:10.0.0.7"], "MaskedPaths": [], "MemorySwappiness": -1,
        });
        let settings = admitted(host).unwrap().settings;
        assert_eq!((settings.cap_drop[0].as_str(), settings.groups[0].as_str()), ("ALL", "4242"));
        assert!(settings.no_new_privileges && settings.init);
        assert_eq!((settings.ulimits[0].soft, settings.ulimits[0].hard), (5, u64::MAX));
        assert_eq!((settings.shm_bytes, settings.masked_paths), (Some(1 << 30), Some(vec![])));
        assert_eq!((settings.dns.len(), settings.devices[0].path.as_str()), (1, "/dev/fuse"));
        assert_eq!((settings.dns_search.len(), settings.dns_options.len()), (1, 1));
        let targets: Vec<_> = settings.tmpfs.iter().map(|own| own.target.as_str()).collect();
        assert_eq!((targets, settings.hosts.len()), (vec!["/t", "/m"], 1));
        assert!(admitted(json!({"BlkioWeight": 0, "OomKillDisable": false})).is_ok());
    }

    #[test]
    fn options_of_a_bind_that_are_not_understood_give_no_rights() {
        let bind = |options: &str| admitted(json!({ "Binds": [format!("/a:/b:{options}")] }));
        for (options, writable) in [
            ("", true),
            ("rw", true),
            ("z", true),
            ("ro", false),
            ("ro,Z", false),
            ("cached,rprivate,ro", false),
            ("nocopy,rw", true),
        ] {
            let found = bind(options).unwrap().mounts[0].writable;
            assert_eq!(found, writable, "{options}");
        }
        for options in
            ["readonly", "RO", "nonsense,ro ", " ro", "ro,", ",", "ro,rw", "ro,ro", "z,Z", "ro;z"]
        {
            let error = bind(options).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{options}: {error}");
            assert_eq!(error.message, format!("invalid mode: {options}"));
        }
        assert_eq!(bind("ro,rshared").unwrap_err().status.as_u16(), 501);
    }

    #[test]
    fn a_container_that_wants_no_network_has_none_however_it_says_so() {
        let body = |more: Value| {
            let mut body = json!({ "Image": "i", "Cmd": ["c"] });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let create = Create::read(body)?;
            admit(
                &create,
                &ImageConfig::default(),
                &defaults(&["x:1"]),
                Path::new("/volumes"),
                Vec::new(),
                Vec::new(),
            )
        };
        let networked = |more: Value| {
            let caps = CapabilitySet::parse(&body(more).unwrap().capabilities, Path::new("/"));
            caps.unwrap().network().is_some()
        };
        assert!(networked(json!({})));
        assert!(networked(json!({"NetworkingConfig": {"EndpointsConfig": {"bridge": {}}}})));
        assert!(!networked(json!({"NetworkDisabled": true})));
        assert!(!networked(
            json!({"networkdisabled": true, "HostConfig": {"NetworkMode": "bridge"}})
        ));
        assert!(!networked(json!({"HostConfig": {"networkMode": "none"}})));
        let none = json!({"HostConfig": {"NetworkMode": "none"},
            "NetworkingConfig": {"EndpointsConfig": {"none": {"IPAMConfig": null}}}});
        assert!(!networked(none));
        let ports =
            json!({"NetworkDisabled": true, "HostConfig": {"PortBindings": {"80/tcp": []}}});
        for (more, status, word) in [
            (ports, 400, "conflicting options"),
            (json!({"MacAddress": "02:00:00:00:00:01"}), 501, "MacAddress"),
            (json!({"Runtime": "kata"}), 501, "runtime"),
        ] {
            let error = body(more.clone()).unwrap_err();
            assert_eq!(error.status.as_u16(), status, "{more}: {error}");
            assert!(error.message.contains(word), "{more}: {error}");
        }
        let admitted = body(json!({ "Volumes": {"/data": {}} })).unwrap();
        assert!(admitted.mounts.len() == 1 && admitted.mounts[0].is_anonymous);
        assert!(!admitted.warnings.join("; ").contains("Volumes"), "{:?}", admitted.warnings);
    }

    #[test]
    fn a_health_check_is_the_clients_or_the_images() {
        let own = Healthcheck {
            test: vec!["CMD-SHELL".into(), "true".into()],
            retries: 7,
            ..Healthcheck::default()
        };
        let image = ImageConfig { healthcheck: Some(own.clone()), ..ImageConfig::default() };
        let admitted = |check: Value| {
            let body = json!({ "Image": "i", "Cmd": ["c"], "Healthcheck": check, "Shell": ["x"] });
            admit(
                &Create::read(body)?,
                &image,
                &defaults(&[]),
                Path::new("/volumes"),
                Vec::new(),
                Vec::new(),
            )
        };
        let test = |check: Value| admitted(check).unwrap().health.unwrap();
        for none in [json!(null), json!({}), json!({"Test": []}), json!({"Test": null})] {
            assert_eq!(test(none).test, ["CMD", "x", "true"]);
        }
        assert_eq!(test(json!({"test": ["NONE"]})).test, ["NONE"]);
        let both = test(json!({"Test": ["CMD", "a", "b"], "Interval": 1_000_000}));
        assert_eq!(
            (both.test.join(" ").as_str(), both.interval, both.retries),
            ("CMD a b", 1_000_000, 7)
        );
        for (refused, word) in [
            (json!({"Test": ["curl", "x"]}), "curl"),
            (json!({"Interval": 10}), "1ms"),
            (json!({"Retries": -1}), "negative"),
        ] {
            let error = admitted(refused).unwrap_err();
            assert!(error.status == 400 && error.message.contains(word), "{error}");
        }
    }

    #[test]
    fn a_container_has_anothers_network_and_none_of_its_own() {
        let wanted = json!({"NetworkMode": "container:web", "Memory": 9 << 20, "PidsLimit": 7});
        let within = admitted(wanted).unwrap();
        let named =
            Within { cell: "web".to_owned(), memory_bytes: Some(9 << 20), process_max: Some(7) };
        assert_eq!(within.within, Some(named));
        let table: Value = serde_json::from_str(&within.capabilities).unwrap();
        assert!(table["network"].is_null(), "{table}");
        let plain = admitted(json!({"NetworkMode": "container:web"})).unwrap().within.unwrap();
        assert_eq!((plain.memory_bytes, plain.process_max), (None, None));
        assert!(admitted(json!({})).unwrap().within.is_none());
    }

    #[test]
    fn what_a_cell_cannot_be_is_refused_by_name() {
        for (host, status, word) in [
            (json!({"StorageOpt": {"size": "1g"}}), 501, "HostConfig.StorageOpt"),
            (json!({"CgroupnsMode": "host"}), 501, "cgroup namespace mode host"),
            (json!({"CapAdd": ["SYS_GOD"]}), 400, "CAP_SYS_GOD"),
            (json!({"Ulimits": [{"Name": "files", "Soft": 1, "Hard": 1}]}), 400, "files"),
            (json!({"Tmpfs": {"/": ""}}), 400, "tmpfs"),
            (json!({"SecurityOpt": ["seccomp={}"]}), 400, "seccomp"),
            (json!({"PidMode": "host"}), 501, "pid mode host"),
            (json!({"NetworkMode": "host"}), 501, "network mode"),
            (json!({"NetworkMode": "container:"}), 400, "invalid container format"),
            (
                json!({"NetworkMode": "container:x", "Dns": ["1.1.1.1"]}),
                400,
                "conflicting options: dns and the network mode",
            ),
            (
                json!({"NetworkMode": "container:x", "ExtraHosts": ["a:1.1.1.1"]}),
                400,
                "conflicting options: custom host-to-IP mapping",
            ),
            (
                json!({"NetworkMode": "container:x", "PortBindings": {"80/tcp": [{}]}}),
                400,
                "port publishing and the container type network mode",
            ),
            (json!({"Devices": [{"PathOnHost": "/dev/sda"}]}), 400, "no device of the host"),
            (json!({"Dns": ["dns.test"]}), 400, "dns.test"),
            (json!({"PortBindings": {"80/sctp": []}}), 501, "80/sctp"),
            (json!({"PortBindings": {"80/tcp": []}, "NetworkMode": "none"}), 400, "none"),
            (json!({"LogConfig": {"Type": "syslog"}}), 501, "log driver"),
            (json!({"Runtime": "nvidia"}), 501, "runtime"),
            (json!({"Mounts": [{"Type": "npipe", "Target": "/x"}]}), 501, "npipe"),
            (json!({"Binds": ["a:/x", "/x/"]}), 400, "Duplicate mount point"),
            (json!({"Binds": ["x"]}), 400, "invalid volume specification"),
            (json!({"Memory": -1}), 400, "negative"),
            (json!({"NanoCpus": 9_000_000_000i64}), 400, "only 2 CPUs"),
            (json!({"IpcMode": "none"}), 501, "IpcMode"),
            (json!({"UTSMode": "mine"}), 501, "UTSMode"),
            (json!({"Isolation": "hyperv"}), 501, "Isolation"),
            (
                json!({"Mounts": [{"Type": "bind", "Source": "/a", "Target": "/b",
                "BindOptions": {"Propagation": "rshared"}}]}),
                501,
                "rshared",
            ),
            (
                json!({"Mounts": [{"Type": "volume", "Source": "a", "Target": "/b",
                "VolumeOptions": {"DriverConfig": {"Name": "nfs"}}}]}),
                501,
                "volume driver",
            ),
            (json!({"Binds": [format!("{}:/v", "v".repeat(256))]}), 400, "255 at most"),
            (json!({"Binds": ["x"]}), 400, "'x'"),
            (json!({"Binds": ["/a:/"]}), 400, "can't be '/'"),
            (json!({"Binds": ["/a:/./"]}), 400, "can't be '/'"),
            (json!({"Binds": ["/a:/proc/"]}), 400, "has its own"),
            (json!({"Binds": ["/a://sys:ro"]}), 400, "has its own"),
            (json!({"NanoCpus": 1}), 400, "from 0.01"),
            (json!({"CpuQuota": 999}), 400, "quota"),
            (json!({"CpuPeriod": 999}), 400, "period"),
            (json!({"Sysctls": {"net.../x": "1"}}), 400, "no setting"),
            (json!({"Sysctls": {"kernel/../x": "1"}}), 400, "no setting"),
            (json!({"Binds": ["/a:b"]}), 400, "'b'"),
            (json!({"Binds": ["/a:/../b"]}), 400, "without .."),
            (json!({"Binds": ["../a:/b"]}), 400, "named"),
        ] {
            let error = admitted(host.clone()).unwrap_err();
            assert_eq!(error.status.as_u16(), status, "{host}: {error}");
            assert!(error.message.contains(word), "{host}: {error}");
        }
    }

    #[test]
    fn entrypoint_and_command_merge_as_docker_merges_them() {
        let image = ImageConfig {
            entrypoint: vec!["ie".into()],
            cmd: vec!["ic".into()],
            ..ImageConfig::default()
        };
        for (entrypoint, cmd, expected) in [
            (json!(null), json!(null), "ie ic"),
            (json!(null), json!(["c"]), "ie c"),
            (json!(["e"]), json!(null), "e"),
            (json!(["e"]), json!(["c"]), "e c"),
            (json!([]), json!(null), "ic"),
            (json!([""]), json!(["c"]), "c"),
        ] {
            let body = json!({ "Entrypoint": entrypoint, "Cmd": cmd });
            let config = Create::read(body).unwrap().config;
            assert_eq!(args(&config, &image).join(" "), expected, "{config:?}");
        }
    }
}
