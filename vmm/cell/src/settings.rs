//! What an operator asks of a cell's program inside its guest: capabilities, limits, mounts.
//!
//! Both doors, the command line and the Docker API, fill the same [`Settings`]; [`crate::oci`]
//! makes a specification of them. The words are docker's.

use std::collections::BTreeMap;
use std::net::IpAddr;

use exocell_network::link;
use serde::{Deserialize, Serialize};

use crate::device_rule::device_rule;

/// No limit.
pub const UNLIMITED: u64 = u64::MAX;
/// Docker's period of CPU time, in microseconds.
pub const CPU_PERIOD_US: u64 = 100_000;

/// As docker's defaults where nothing is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Root of its own kernel: every capability, nothing masked or read-only.
    pub privileged: bool,
    /// Names with or without `CAP_`; `ALL`.
    pub cap_add: Vec<String>,
    pub cap_drop: Vec<String>,
    pub no_new_privileges: bool,
    /// `None` are docker's.
    pub masked_paths: Option<Vec<String>>,
    pub readonly_paths: Option<Vec<String>>,
    /// Names or numbers of groups beside the user's own.
    pub groups: Vec<String>,
    pub ulimits: Vec<Ulimit>,
    pub tmpfs: Vec<Tmpfs>,
    /// Size of /dev/shm.
    pub shm_bytes: Option<u64>,
    pub sysctls: BTreeMap<String, String>,
    pub domain_name: Option<String>,
    /// Lines of /etc/hosts: a name and its address.
    pub hosts: Vec<(String, IpAddr)>,
    /// Who is asked for names, instead of those that the host asks.
    pub dns: Vec<IpAddr>,
    /// Lines of resolv.conf: `search` and `options`.
    pub dns_search: Vec<String>,
    pub dns_options: Vec<String>,
    pub devices: Vec<Node>,
    /// Which nodes that its program makes can be used, beside those: lines of docker's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_rules: Vec<String>,
    pub oom_score_adj: Option<i32>,
    /// Whether a first process reaps orphans and passes signals on.
    pub init: bool,
    /// Microseconds of CPU a period, in microseconds.
    pub cpu: Option<CpuTime>,
    /// 1024 is one share.
    pub cpu_shares: Option<u64>,
    /// Of the cell's own processors, like `0-1`.
    pub cpuset: Option<String>,
    /// Bytes that its kernel takes back last.
    pub memory_reservation: Option<u64>,
}

/// A limit of setrlimit(2), named as `nofile`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ulimit {
    pub name: String,
    pub soft: u64,
    pub hard: u64,
}

/// A node of a device of the guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// As the kernel names it, like `/dev/fuse`.
    pub device: String,
    /// Where the program finds it.
    pub path: String,
}

/// Files in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tmpfs {
    pub target: String,
    /// As mount(8) has them, beside docker's.
    pub options: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuTime {
    pub quota_us: u64,
    pub period_us: u64,
}

impl CpuTime {
    /// So many billionths of a processor.
    pub fn of_nano_cpus(nano: u64) -> Self {
        Self { quota_us: (nano / 10_000).max(1), period_us: CPU_PERIOD_US }
    }

    /// How many processors it takes to have that much.
    pub fn processors(self) -> u64 {
        self.quota_us.div_ceil(self.period_us.max(1)).max(1)
    }
}

/// Docker's names of limits, and the specification's.
const ULIMITS: [(&str, &str); 15] = [
    ("core", "RLIMIT_CORE"),
    ("cpu", "RLIMIT_CPU"),
    ("data", "RLIMIT_DATA"),
    ("fsize", "RLIMIT_FSIZE"),
    ("locks", "RLIMIT_LOCKS"),
    ("memlock", "RLIMIT_MEMLOCK"),
    ("msgqueue", "RLIMIT_MSGQUEUE"),
    ("nice", "RLIMIT_NICE"),
    ("nofile", "RLIMIT_NOFILE"),
    ("nproc", "RLIMIT_NPROC"),
    ("rss", "RLIMIT_RSS"),
    ("rtprio", "RLIMIT_RTPRIO"),
    ("rttime", "RLIMIT_RTTIME"),
    ("sigpending", "RLIMIT_SIGPENDING"),
    ("stack", "RLIMIT_STACK"),
];

impl Ulimit {
    /// # Errors
    /// No limit is called so, or the soft one is above the hard.
    pub fn new(name: &str, soft: i64, hard: i64) -> Result<Self, String> {
        let amount = |value: i64| u64::try_from(value).unwrap_or(UNLIMITED);
        let limit = Self { name: name.to_owned(), soft: amount(soft), hard: amount(hard) };
        limit.kind()?;
        match limit.soft > limit.hard {
            true => Err(format!(
                "ulimit soft limit must be less than or equal to hard limit: {soft} > {hard}"
            )),
            false => Ok(limit),
        }
    }

    /// `NAME=SOFT[:HARD]`.
    ///
    /// # Errors
    /// As [`Self::new`]'s, and what is no number.
    pub fn read(text: &str) -> Result<Self, String> {
        let broken = || format!("invalid ulimit argument: {text}; give NAME=SOFT[:HARD]");
        let (name, values) = text.split_once('=').ok_or_else(broken)?;
        let (soft, hard) = values.split_once(':').unwrap_or((values, values));
        let number = |text: &str| text.parse::<i64>().map_err(|_| broken());
        Self::new(name, number(soft)?, number(hard)?)
    }

    /// The specification's name.
    pub(crate) fn kind(&self) -> Result<&'static str, String> {
        let known = ULIMITS.iter().find(|(name, _)| *name == self.name);
        let names = || ULIMITS.map(|(name, _)| name).join(", ");
        known
            .map(|(_, kind)| *kind)
            .ok_or_else(|| format!("invalid ulimit type: {}; there are {}", self.name, names()))
    }
}

impl Node {
    /// # Errors
    /// The guest's kernel has no such device, or it cannot be there.
    pub fn new(device: &str, path: &str, permissions: &str) -> Result<Self, String> {
        if !is_device(device) {
            return Err(format!(
                "a cell has no device of the host, and its own kernel has no {device}; it has {}",
                DEVICES.join(", ")
            ));
        }
        let path = if path.is_empty() { device } else { path };
        let below = path.strip_prefix("/dev/").unwrap_or_default();
        if below.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(format!("the device {device} cannot be at {path:?}; name a path in /dev"));
        }
        let is_permission = |c: char| "rwm".contains(c);
        match permissions {
            "" => {}
            other if !other.chars().all(is_permission) => {
                return Err(format!("invalid device permissions {other:?}; give some of rwm"));
            }
            other if !(other.contains('r') && other.contains('w')) => {
                return Err(format!(
                    "the permissions {other:?} of {device} are not kept apart in a cell; leave \
                     them out"
                ));
            }
            _ => {}
        }
        Ok(Self { device: device.to_owned(), path: path.to_owned() })
    }

    /// `DEVICE[:PATH][:PERMISSIONS]`.
    ///
    /// # Errors
    /// As [`Self::new`]'s.
    pub fn read(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        match parts.as_slice() {
            [device] => Self::new(device, "", ""),
            [device, path] if path.starts_with('/') => Self::new(device, path, ""),
            [device, permissions] => Self::new(device, "", permissions),
            [device, path, permissions] => Self::new(device, path, permissions),
            _ => Err(format!("invalid device {text:?}; give DEVICE[:PATH][:PERMISSIONS]")),
        }
    }
}

/// What can be named as a device; `/dev/loop0` and its like are seven more.
const DEVICES: [&str; 11] = [
    "/dev/fuse",
    "/dev/net/tun",
    "/dev/loop-control",
    "/dev/loop0",
    "/dev/kmsg",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
];

fn is_device(name: &str) -> bool {
    let is_loop = name
        .strip_prefix("/dev/loop")
        .and_then(|number| number.parse::<u32>().ok())
        .is_some_and(|number| number < LOOPS && name == format!("/dev/loop{number}"));
    is_loop || DEVICES.contains(&name)
}

/// Nodes of loop devices; the guest's kernel makes more where a program asks for more.
pub(crate) const LOOPS: u32 = 8;

impl Tmpfs {
    /// # Errors
    /// A target where nothing can be mounted.
    pub fn new(target: &str, options: &str) -> Result<Self, String> {
        let plain = target.starts_with('/')
            && !target.trim_matches('/').is_empty()
            && !target.split('/').any(|part| part == "..");
        if !plain {
            return Err(format!(
                "invalid tmpfs target {target:?}: it must be an absolute path below / without .."
            ));
        }
        let options = options.split(',').filter(|option| !option.is_empty());
        Ok(Self { target: target.to_owned(), options: options.map(str::to_owned).collect() })
    }

    /// `TARGET[:OPTIONS]`.
    ///
    /// # Errors
    /// As [`Self::new`]'s.
    pub fn read(text: &str) -> Result<Self, String> {
        let (target, options) = text.split_once(':').unwrap_or((text, ""));
        Self::new(target, options)
    }
}

impl Settings {
    /// Whether nothing was set.
    pub fn are_default(&self) -> bool {
        *self == Self::default()
    }

    /// `TYPE MAJOR:MINOR ACCESS`.
    ///
    /// # Errors
    /// It is no such line.
    pub fn add_device_rule(&mut self, line: &str) -> Result<(), String> {
        device_rule(line)?;
        self.device_rules.push(line.to_owned());
        Ok(())
    }

    /// Adds a line of /etc/hosts: `NAME:ADDRESS` or `NAME=ADDRESS`.
    ///
    /// # Errors
    /// What is no address.
    pub fn add_host(&mut self, text: &str) -> Result<(), String> {
        let broken = || format!("bad format for add-host: {text:?}; give NAME:ADDRESS");
        let (name, address) = text.split_once([':', '=']).ok_or_else(broken)?;
        let host = link::HOST_V4.to_string();
        let address = if address == "host-gateway" { host.as_str() } else { address };
        let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let plain = |c: char| c.is_ascii_graphic() && c != '#';
        if name.is_empty() || !name.chars().all(plain) {
            return Err(broken());
        }
        let address = bare.unwrap_or(address).parse().map_err(|_| {
            format!("invalid IP address in add-host: {address:?}; give NAME:ADDRESS")
        })?;
        self.hosts.push((name.to_owned(), address));
        Ok(())
    }

    /// Takes the words of `--dns`, `--dns-search` and `--dns-option`.
    ///
    /// # Errors
    /// What is no address, and what is no word.
    pub fn add_dns(
        &mut self,
        servers: &[String],
        search: &[String],
        options: &[String],
    ) -> Result<(), String> {
        for text in servers {
            let address = text
                .parse()
                .map_err(|_| format!("invalid IP address of a DNS server: {text:?}"))?;
            self.dns.push(address);
        }
        let is_word =
            |text: &&String| !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        if let Some(wrong) = search.iter().chain(options).find(|text| !is_word(text)) {
            return Err(format!("{wrong:?} is no domain and no option of resolv.conf"));
        }
        // Docker's way to search nowhere.
        self.dns_search.extend(search.iter().filter(|domain| *domain != ".").cloned());
        self.dns_options.extend(options.iter().cloned());
        Ok(())
    }

    /// Whether anything is said of how names are looked up.
    pub fn has_dns(&self) -> bool {
        !(self.dns.is_empty() && self.dns_search.is_empty() && self.dns_options.is_empty())
    }

    /// Takes `NAME=VALUE`.
    ///
    /// # Errors
    /// What is not of that form.
    pub fn add_sysctl(&mut self, text: &str) -> Result<(), String> {
        let broken = || format!("invalid sysctl {text:?}; give NAME=VALUE");
        let (name, value) = text.split_once('=').ok_or_else(broken)?;
        self.sysctls.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    /// Takes a word of `--security-opt`.
    ///
    /// # Errors
    /// What is not carried out, by its name.
    pub fn add_security_option(&mut self, text: &str) -> Result<(), String> {
        match text.split_once(['=', ':']).unwrap_or((text, "")) {
            ("no-new-privileges", "" | "true") => self.no_new_privileges = true,
            ("no-new-privileges", "false") => self.no_new_privileges = false,
            ("systempaths", "unconfined") => {
                self.masked_paths = Some(Vec::new());
                self.readonly_paths = Some(Vec::new());
            }
            // So it is: the cell's kernel is the boundary.
            ("seccomp" | "apparmor", "unconfined") | ("label", "disable") => {}
            ("seccomp" | "apparmor" | "label", _) => {
                let (name, _) = text.split_once(['=', ':']).unwrap_or((text, ""));
                return Err(format!(
                    "a profile of {name} is not supported: the cell's kernel is the boundary; leave the security option out"
                ));
            }
            _ => return Err(format!("invalid --security-opt: {text:?}")),
        }
        Ok(())
    }

    /// Takes `--cpus` in text: whole processors, or a part of one.
    ///
    /// # Errors
    /// What is no number, or none of a processor.
    pub fn read_cpus(text: &str) -> Result<CpuTime, String> {
        let broken = || format!("{text:?} is no number of CPUs; give one like 2 or 0.5");
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.len() > 6 || part.len() > 9 || !digits(whole) || !digits(part) || text == "." {
            return Err(broken());
        }
        let number = |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u64>() };
        let nano = number(&format!("{part:0<9}")).map_err(|_| broken())?;
        let nano = number(whole).map_err(|_| broken())? * 1_000_000_000 + nano;
        match nano {
            0..10_000_000 => Err(format!("{text} CPUs are too few; the least are 0.01")),
            nano => Ok(CpuTime::of_nano_cpus(nano)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_docker_reads_them() {
        let read = |text: &str| Ulimit::read(text).map(|limit| (limit.soft, limit.hard));
        assert_eq!(read("nofile=100"), Ok((100, 100)));
        assert_eq!(read("nproc=10:20"), Ok((10, 20)));
        assert_eq!(read("core=0:-1"), Ok((0, UNLIMITED)));
        for (text, word) in
            [("files=1", "files"), ("nofile", "NAME="), ("nofile=2:1", "soft"), ("nofile=x", "x")]
        {
            assert!(read(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn hosts_settings_and_options_are_read_or_refused_by_name() {
        let mut settings = Settings::default();
        for text in ["db:10.0.0.7", "six:::1", "seven=[fe80::7]"] {
            settings.add_host(text).unwrap();
        }
        assert_eq!(settings.hosts[1], ("six".to_owned(), "::1".parse().unwrap()));
        settings.add_host("host.docker.internal:host-gateway").unwrap();
        assert_eq!(settings.hosts[3].1, link::HOST_V4);
        for (text, word) in [("db", "NAME:"), ("db:x", "x")] {
            assert!(settings.add_host(text).unwrap_err().contains(word), "{text}");
        }
        settings.add_security_option("no-new-privileges").unwrap();
        settings.add_security_option("systempaths=unconfined").unwrap();
        assert!(settings.no_new_privileges && settings.masked_paths == Some(Vec::new()));
        let refused = settings.add_security_option("seccomp={}").unwrap_err();
        assert!(refused.contains("seccomp"));
        assert!(settings.add_sysctl("net").is_err());
        assert!(Tmpfs::read("/").is_err() && Tmpfs::read("t").is_err());
        assert_eq!(Tmpfs::read("/t:size=1m,ro").unwrap().options, ["size=1m", "ro"]);
    }

    #[test]
    fn devices_are_the_guests_own_and_others_are_refused_with_the_reason() {
        let read = |text: &str| Node::read(text).map(|node| (node.device, node.path));
        let both = |device: &str, path: &str| Ok((device.to_owned(), path.to_owned()));
        assert_eq!(read("/dev/fuse"), both("/dev/fuse", "/dev/fuse"));
        assert_eq!(read("/dev/loop7:/dev/own/l:rwm"), both("/dev/loop7", "/dev/own/l"));
        assert_eq!(read("/dev/net/tun:rw"), both("/dev/net/tun", "/dev/net/tun"));
        for (text, word) in [
            ("/dev/sda", "no device of the host"),
            ("/dev/kvm", "/dev/kvm"),
            ("/dev/loop8", "/dev/loop8"),
            ("/dev/loop07", "/dev/loop07"),
            ("/dev/fuse:/etc/fuse", "in /dev"),
            ("/dev/fuse:/dev/../x", "in /dev"),
            ("/dev/fuse:/dev/", "in /dev"),
            ("/dev/fuse:x", "rwm"),
            ("/dev/fuse:r", "not kept apart"),
            ("/dev/fuse:/dev/a:rw:x", "DEVICE"),
        ] {
            assert!(read(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn servers_for_names_are_addresses() {
        let mut settings = Settings::default();
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(!settings.has_dns());
        settings.add_dns(&words(&["192.0.2.1", "::1"]), &words(&["a.test", "."]), &[]).unwrap();
        assert!(settings.has_dns() && settings.dns.len() == 2);
        assert_eq!(settings.dns_search, ["a.test"]);
        assert!(settings.add_dns(&words(&["dns.test"]), &[], &[]).is_err());
        assert!(settings.add_dns(&[], &words(&["a\nnameserver"]), &[]).is_err());
        assert!(settings.add_dns(&[], &[], &words(&[""])).is_err());
    }

    #[test]
    fn a_part_of_a_processor_is_one() {
        let read =
            |text: &str| Settings::read_cpus(text).map(|cpu| (cpu.quota_us, cpu.processors()));
        assert_eq!(read("0.5"), Ok((50_000, 1)));
        assert_eq!(read("2"), Ok((200_000, 2)));
        assert_eq!(read("1.01"), Ok((101_000, 2)));
        for text in ["0", "", ".", "-1", "1e3", "0.001", "half"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
