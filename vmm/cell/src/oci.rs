//! The one OCI runtime specification that every door makes of a program, and that the guest's init
//! carries out.
//!
//! ```text
//! exocell run ────┐
//!                 ├─> Settings ──> Spec ──> Start ──> init
//! Docker API ─────┘                 ^
//!   whoever has a config.json ──────┘ read: what is not carried out is refused by name
//! ```
//! The defaults are docker's (moby, `daemon/pkg/oci/defaults.go`). Where a cell has a namespace of
//! the host's kernel around it, the program has one of the guest kernel's as well, so that it finds
//! itself as in a container.

use std::collections::BTreeMap;

use exocell_agent::TtySize;
use exocell_agent::oci::{
    ANNOTATION_GROUPS, ANNOTATION_INIT, ANNOTATION_USER, CAPABILITIES as EVERY, Capabilities,
    ConsoleSize, Cpu, Device, DeviceKind, DeviceRule, Linux, Memory, Mount, Namespace,
    NamespaceKind, Pids, Process, Resources, Rlimit, Root, Spec, User,
};
use exocell_xgate::CapabilitySet;

use crate::CellError;
use crate::device_rule::device_rule;
use crate::settings::{CPU_PERIOD_US, LOOPS, Node, Settings, Tmpfs, Ulimit};

/// The version of the runtime specification that is made.
const VERSION: &str = "1.2.0";
/// Docker's size of /dev/shm.
const SHM_BYTES: u64 = 64 << 20;
/// Memory that the kernel and programs have before /dev/shm has half of the rest, where nobody says:
/// what lies there outlasts programs.
const BEFORE_SHM_BYTES: u64 = 24 << 20;
const SHM_BYTES_MIN: u64 = 1 << 20;
const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// A program, image and operator together.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    /// `name|uid[:group|gid]`; empty is root.
    pub user: String,
    pub tty: Option<TtySize>,
    pub read_only: bool,
}

/// The specification of `program` in a cell that was granted `caps`.
///
/// # Errors
/// What `settings` name that there is not.
pub fn spec(
    program: Program,
    settings: &Settings,
    caps: &CapabilitySet,
) -> Result<Spec, CellError> {
    let mut annotations = BTreeMap::from([(ANNOTATION_USER.to_owned(), program.user.clone())]);
    if !settings.groups.is_empty() {
        annotations.insert(ANNOTATION_GROUPS.to_owned(), settings.groups.join(","));
    }
    if settings.init {
        annotations.insert(ANNOTATION_INIT.to_owned(), "true".to_owned());
    }
    Ok(Spec {
        oci_version: VERSION.to_owned(),
        root: Some(Root { path: "rootfs".to_owned(), readonly: program.read_only }),
        process: process(program, settings).map_err(CellError::Usage)?,
        // The cell's own; it is the same in all of its guest.
        hostname: None,
        domainname: settings.domain_name.clone(),
        mounts: mounts(settings, caps),
        linux: linux(settings, caps),
        annotations,
    })
}

/// Whether there is all that `settings` name.
///
/// # Errors
/// What there is not.
pub fn check(settings: &Settings) -> Result<(), String> {
    granted(settings)?;
    let is_setting = |name: &String| !name.replace('.', "/").split('/').any(str::is_empty);
    if let Some(name) = settings.sysctls.keys().find(|name| !is_setting(name)) {
        return Err(format!("{name:?} is no setting of a kernel (--sysctl)"));
    }
    settings.ulimits.iter().try_for_each(|limit| limit.kind().map(drop))
}

/// A specification that somebody else has written (`config.json`).
///
/// # Errors
/// Names what of it is not carried out.
pub fn read(text: &str) -> Result<Spec, CellError> {
    serde_json::from_str(text).map_err(|error| {
        CellError::Usage(format!("a cell does not carry out all of the specification: {error}"))
    })
}

fn process(program: Program, settings: &Settings) -> Result<Process, String> {
    let console_size = program
        .tty
        .map(|size| ConsoleSize { height: u64::from(size.rows), width: u64::from(size.cols) });
    Ok(Process {
        terminal: program.tty.is_some(),
        console_size,
        user: User { umask: Some(0o022), ..User::default() },
        args: program.args,
        env: program.env,
        cwd: program.cwd,
        capabilities: Some(capabilities(settings)?),
        rlimits: settings.ulimits.iter().map(rlimit).collect::<Result<_, _>>()?,
        no_new_privileges: settings.no_new_privileges,
        oom_score_adj: settings.oom_score_adj,
    })
}

fn rlimit(limit: &Ulimit) -> Result<Rlimit, String> {
    Ok(Rlimit { kind: limit.kind()?.to_owned(), soft: limit.soft, hard: limit.hard })
}

/// What root has; another user can get no more.
fn capabilities(settings: &Settings) -> Result<Capabilities, String> {
    let granted: Vec<String> =
        granted(settings)?.iter().map(|name| format!("CAP_{name}")).collect();
    Ok(Capabilities {
        bounding: granted.clone(),
        effective: granted.clone(),
        permitted: granted,
        ..Capabilities::default()
    })
}

/// As moby's TweakCapabilities.
fn granted(settings: &Settings) -> Result<Vec<&'static str>, String> {
    let (add, drop) =
        (names("cap-add", &settings.cap_add)?, names("cap-drop", &settings.cap_drop)?);
    if settings.privileged {
        return Ok(EVERY.to_vec());
    }
    let mut granted = match (&add, &drop) {
        (Named::All, _) => EVERY.to_vec(),
        (Named::These(_), Named::All) => Vec::new(),
        (Named::These(_), Named::These(_)) => CAPABILITIES.to_vec(),
    };
    if let Named::These(drop) = &drop {
        granted.retain(|name| !drop.contains(name));
    }
    if let Named::These(mut add) = add {
        add.retain(|name| !granted.contains(name));
        granted.extend(add);
    }
    Ok(granted)
}

enum Named {
    All,
    These(Vec<&'static str>),
}

fn names(flag: &str, names: &[String]) -> Result<Named, String> {
    let plain = |name: &String| {
        let upper = name.to_ascii_uppercase();
        upper.strip_prefix("CAP_").map_or(upper.clone(), str::to_owned)
    };
    let plain: Vec<String> = names.iter().map(plain).collect();
    if plain.iter().any(|name| name == "ALL") {
        return Ok(Named::All);
    }
    let find = |name: &String| {
        let found = EVERY.into_iter().find(|known| known == name);
        found.ok_or_else(|| format!("invalid {flag}: unknown capability: \"CAP_{name}\""))
    };
    plain.iter().map(find).collect::<Result<_, _>>().map(Named::These)
}

fn mount(kind: &str, target: &str, options: &[&str]) -> Mount {
    Mount {
        destination: target.to_owned(),
        kind: kind.to_owned(),
        source: kind.to_owned(),
        options: options.iter().map(ToString::to_string).collect(),
    }
}

fn mounts(settings: &Settings, caps: &CapabilitySet) -> Vec<Mount> {
    let access = if settings.privileged { "rw" } else { "ro" };
    let safe = ["nosuid", "noexec", "nodev"];
    let rest = caps.memory_bytes().map_or(u64::MAX, |bytes| bytes.saturating_sub(BEFORE_SHM_BYTES));
    let most = (rest / 2).clamp(SHM_BYTES_MIN, SHM_BYTES);
    let shared = format!("size={}k", settings.shm_bytes.unwrap_or(most) >> 10);
    let mut mounts = vec![
        mount("proc", "/proc", &safe),
        mount("sysfs", "/sys", &["nosuid", "noexec", "nodev", access]),
        mount("cgroup", "/sys/fs/cgroup", &["nosuid", "noexec", "nodev", access]),
        mount("mqueue", "/dev/mqueue", &safe),
        mount("tmpfs", "/dev/shm", &["nosuid", "noexec", "nodev", "mode=1777", &shared]),
    ];
    mounts.extend(settings.tmpfs.iter().map(|Tmpfs { target, options }| {
        let own = options.iter().map(String::as_str);
        mount("tmpfs", target, &safe.into_iter().chain(own).collect::<Vec<_>>())
    }));
    mounts
}

fn linux(settings: &Settings, caps: &CapabilitySet) -> Linux {
    use NamespaceKind::{Cgroup, Ipc, Mount, Pid, Uts};
    let paths = |own: &Option<Vec<String>>, docker: &[&str]| match (own, settings.privileged) {
        (Some(own), _) => own.clone(),
        (None, true) => Vec::new(),
        (None, false) => docker.iter().map(ToString::to_string).collect(),
    };
    let own = [Pid, Mount, Ipc, Uts, Cgroup];
    Linux {
        namespaces: own.into_iter().map(|kind| Namespace { kind }).collect(),
        devices: nodes(settings),
        resources: Some(resources(settings, caps)),
        sysctl: settings.sysctls.clone(),
        masked_paths: paths(&settings.masked_paths, &MASKED),
        readonly_paths: paths(&settings.readonly_paths, &READ_ONLY),
    }
}

/// What the program has by its privilege, and what was asked for.
fn nodes(settings: &Settings) -> Vec<Device> {
    let known = devices();
    let own = settings.devices.iter().filter_map(|Node { device, path }| {
        let found = known.iter().find(|known| known.path == *device);
        let found = found.cloned().or_else(|| shared(device))?;
        Some(Device { path: path.clone(), ..found })
    });
    let own: Vec<Device> = own.collect();
    if settings.privileged { [known, own].concat() } else { own }
}

/// One that every program has under its own name.
fn shared(path: &str) -> Option<Device> {
    let (major, minor) = match path {
        "/dev/fuse" => (10, 229),
        "/dev/net/tun" => (10, 200),
        "/dev/null" => (1, 3),
        "/dev/zero" => (1, 5),
        "/dev/full" => (1, 7),
        "/dev/random" => (1, 8),
        "/dev/urandom" => (1, 9),
        "/dev/tty" => (5, 0),
        _ => return None,
    };
    let kind = DeviceKind::Character;
    Some(Device { path: path.to_owned(), kind, major, minor, file_mode: 0o666 })
}

/// Whoever is privileged may use every device, others those that were asked for: moby's rules.
fn rules(settings: &Settings) -> Vec<DeviceRule> {
    let all = DeviceRule { allow: true, ..DeviceRule::default() };
    if settings.privileged {
        return vec![all];
    }
    let one = |device: Device| DeviceRule {
        kind: device.kind.into(),
        major: Some(device.major.into()),
        minor: Some(device.minor.into()),
        ..all.clone()
    };
    let more = settings.device_rules.iter().filter_map(|line| device_rule(line).ok());
    nodes(settings).into_iter().map(one).chain(more).collect()
}

/// What a privileged program has beside what all have. The cell's own disks are not among them.
fn devices() -> Vec<Device> {
    use DeviceKind::{Block, Character};
    let device = |name: &str, kind, major, minor, file_mode| {
        let path = format!("/dev/{name}");
        Device { path, kind, major, minor, file_mode }
    };
    let mut devices = vec![
        device("kmsg", Character, 1, 11, 0o644),
        device("autofs", Character, 10, 235, 0o600),
        device("loop-control", Character, 10, 237, 0o660),
    ];
    devices.extend((0..LOOPS).map(|minor| device(&format!("loop{minor}"), Block, 7, minor, 0o660)));
    devices
}

/// All of the limits are named: a warm cell's first program may have left others.
fn resources(settings: &Settings, caps: &CapabilitySet) -> Resources {
    let signed = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let memory = Memory {
        limit: caps.memory_bytes().map(signed),
        reservation: settings.memory_reservation.map(signed),
    };
    let cpu = Cpu {
        quota: Some(settings.cpu.map_or(-1, |time| signed(time.quota_us))),
        period: Some(settings.cpu.map_or(CPU_PERIOD_US, |time| time.period_us)),
        shares: settings.cpu_shares,
        cpus: settings.cpuset.clone(),
    };
    Resources {
        memory: Some(memory),
        cpu: Some(cpu),
        pids: caps.process_max().map(|most| Pids { limit: i64::from(most) }),
        devices: rules(settings),
        unified: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use exocell_agent::oci::DeviceKinds;

    use super::*;
    use std::path::Path;

    fn program() -> Program {
        Program {
            args: vec!["true".to_owned()],
            env: vec!["A=a".to_owned()],
            cwd: "/w".to_owned(),
            user: "ann".to_owned(),
            tty: Some(TtySize { rows: 24, cols: 80 }),
            read_only: true,
        }
    }

    fn made(settings: &Settings) -> Spec {
        let caps = r#"{"version": 1, "memory": {"limit": "512M"}, "processes": {"max": 7}}"#;
        let caps = CapabilitySet::parse(caps, Path::new("/")).expect("a table");
        spec(program(), settings, &caps).expect("a specification")
    }

    #[test]
    fn the_defaults_are_dockers() {
        let spec = made(&Settings::default());
        let sets = spec.process.capabilities.as_ref().unwrap();
        assert_eq!((sets.bounding.len(), sets.inheritable.len()), (14, 0));
        assert!(sets.effective.contains(&"CAP_CHOWN".to_owned()), "{sets:?}");
        assert_eq!(spec.annotation(ANNOTATION_USER), "ann");
        assert!(spec.root.is_some_and(|root| root.readonly) && spec.hostname.is_none());
        let resources = spec.linux.resources.unwrap();
        assert_eq!(resources.memory.unwrap().limit, Some(512 << 20));
        let cpu = resources.cpu.unwrap();
        assert_eq!((cpu.quota, cpu.period), (Some(-1), Some(100_000)));
        assert_eq!(resources.pids.unwrap().limit, 7);
        let shared = spec.mounts.iter().find(|mount| mount.destination == "/dev/shm").unwrap();
        assert!(shared.options.contains(&"size=65536k".to_owned()), "{shared:?}");
        assert_eq!(spec.process.console_size.unwrap().width, 80);
        assert!(spec.linux.masked_paths.contains(&"/proc/kcore".to_owned()));
    }

    #[test]
    fn capabilities_are_added_and_dropped_as_docker_does() {
        let granted = |add: &[&str], drop: &[&str]| {
            let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
            let settings =
                Settings { cap_add: words(add), cap_drop: words(drop), ..Settings::default() };
            super::granted(&settings).map(|granted| granted.len())
        };
        assert_eq!(granted(&["SYS_ADMIN"], &["cap_mknod", "KILL"]), Ok(13));
        assert_eq!(granted(&["all"], &["SYS_ADMIN"]), Ok(40));
        assert_eq!(granted(&["NET_ADMIN"], &["ALL"]), Ok(1));
        assert_eq!(granted(&["CHOWN"], &[]), Ok(14));
        assert_eq!(granted(&[], &["ALL"]), Ok(0));
        assert!(granted(&["SYS_GOD"], &[]).unwrap_err().contains("CAP_SYS_GOD"));
        let all = Settings { privileged: true, ..Settings::default() };
        assert_eq!(super::granted(&all).unwrap().len(), 41);
    }

    #[test]
    fn a_privileged_program_has_nothing_masked() {
        let spec = made(&Settings { privileged: true, ..Settings::default() });
        assert!(spec.linux.masked_paths.is_empty() && spec.linux.readonly_paths.is_empty());
        let read_only = |mount: &Mount| mount.options.contains(&"ro".to_owned());
        assert!(!spec.mounts.iter().any(read_only));
        assert!(spec.linux.devices.iter().any(|device| device.path == "/dev/loop-control"));
        assert!(made(&Settings::default()).linux.devices.is_empty());
        let nodes = ["/dev/loop3", "/dev/fuse:/dev/own"].map(|text| Node::read(text).unwrap());
        let asked = made(&Settings { devices: nodes.to_vec(), ..Settings::default() });
        let shown = asked.linux.devices.iter().map(|d| (d.path.as_str(), d.major, d.minor));
        assert_eq!(shown.collect::<Vec<_>>(), [("/dev/loop3", 7, 3), ("/dev/own", 10, 229)]);
        let rules = |spec: Spec| spec.linux.resources.unwrap().devices;
        let allowed = rules(asked).into_iter().map(|rule| (rule.allow, rule.major, rule.minor));
        let expected = [(true, Some(7), Some(3)), (true, Some(10), Some(229))];
        assert_eq!(allowed.collect::<Vec<_>>(), expected);
        assert!(rules(made(&Settings::default())).is_empty());
        let all = DeviceRule { allow: true, ..DeviceRule::default() };
        assert_eq!(rules(spec), [all]);
    }

    #[test]
    fn rules_of_devices_are_dockers_lines() {
        let mut settings = Settings::default();
        settings.add_device_rule("c 7:128 rwm").unwrap();
        settings.add_device_rule("b 7:* r").unwrap();
        let rules = made(&settings).linux.resources.unwrap().devices;
        let shown = rules.iter().map(|rule| (rule.kind, rule.major, rule.minor, &rule.access[..]));
        let expected = [
            (DeviceKinds::Character, Some(7), Some(128), "rwm"),
            (DeviceKinds::Block, Some(7), None, "r"),
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        for line in ["", "c 7:1", "x 7:1 r", "c 7 r", "c 7:-1 r", "c 7:1 rx", "c 7:1 ", "c 7:1  r"]
        {
            assert!(Settings::default().add_device_rule(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_specification_of_others_is_read_or_refused_by_name() {
        let text = serde_json::to_string(&made(&Settings::default())).unwrap();
        assert_eq!(read(&text).unwrap(), made(&Settings::default()));
        let error = read(r#"{"ociVersion": "1.2.0", "hooks": {}}"#).unwrap_err().to_string();
        assert!(error.contains("hooks"), "{error}");
    }
}
