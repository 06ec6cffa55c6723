//! A grant, or a narrowing of one, from the command line.

use crate::amount::{format_bytes, format_duration, parse_bytes, parse_duration};
use crate::set::{CapabilitySet, Cpu, Folder, Model};
use crate::{CapsError, Endpoint, NamePattern, NetworkName, NetworkScope, PortRange, Rights};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Flags, each read when it is added.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    wishes: Vec<(String, Wish)>,
}

#[derive(Clone, Debug)]
enum Wish {
    Memory(u64),
    Cpus(u32),
    Weight(u32),
    Disk(u64),
    Processes(u32),
    Time(Duration),
    Fuel(u64),
    Clock,
    Random,
    Stdio,
    Connect(Endpoint),
    Listen(PortRange),
    Resolve(NamePattern),
    Join(NetworkName),
    Device(String),
    Spawn(u32),
    Model(Model),
    /// `execute_as_granted`: the flag did not say, so the file decides.
    Folder {
        folder: Folder,
        execute_as_granted: bool,
    },
}

impl CapabilitySet {
    /// The grant that flags alone make: the default, with what they name changed or added.
    ///
    /// # Errors
    /// [`CapsError::Value`] names the flag.
    pub fn from_flags(flags: &Flags) -> Result<Self, CapsError> {
        Self::default().with(flags)
    }

    /// This grant, with what flags name changed or added.
    ///
    /// # Errors
    /// [`CapsError::Value`] names the flag.
    pub fn with(self, flags: &Flags) -> Result<Self, CapsError> {
        flags.add_to(self)
    }

    /// This grant, narrowed by flags.
    ///
    /// # Errors
    /// [`CapsError::Exceeds`] names the flag and the capability it goes beyond.
    pub fn narrowed(&self, flags: &Flags) -> Result<Self, CapsError> {
        flags.narrow(self)
    }
}

impl Flags {
    /// The names that [`Flags::add`] knows.
    pub const NAMES: [&'static str; 18] = [
        "memory",
        "cpus",
        "weight",
        "disk",
        "processes",
        "time",
        "fuel",
        "clock",
        "random",
        "stdio",
        "connect",
        "listen",
        "resolve",
        "join",
        "device",
        "spawn",
        "folder",
        "model",
    ];

    /// Adds one flag. `flag` is what the person typed, for messages (`--memory`); `name` is one
    /// of [`Flags::NAMES`]; relative host paths start at `base`.
    ///
    /// A folder is `HOST:GUEST`, or `HOST:GUEST:OPTIONS` with options of `ro`, `rw` (the
    /// default), `overlay`, `exec`, `noexec`, joined by commas. A model is `NAME:FILE`. `clock`, `random` and `stdio` take no value.
    ///
    /// # Errors
    /// [`CapsError::Value`] names the flag and says what to write.
    pub fn add(
        &mut self,
        flag: &str,
        name: &str,
        text: &str,
        base: &Path,
    ) -> Result<(), CapsError> {
        let wish = match name {
            "folder" => folder(flag, text, base)?,
            "model" => model(flag, text, base)?,
            _ => wish(name, text).map_err(|message| value(flag, message))?,
        };
        self.wishes.push((flag.to_owned(), wish));
        Ok(())
    }

    /// Adds one `NAME=VALUE` or plain `NAME`.
    ///
    /// # Errors
    /// Those of [`Flags::add`].
    pub fn add_pair(&mut self, flag: &str, pair: &str, base: &Path) -> Result<(), CapsError> {
        let (name, text) = pair.split_once('=').unwrap_or((pair, ""));
        self.add(&format!("{flag} {name}"), name, text, base)
    }

    /// Whether no flag was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wishes.is_empty()
    }

    pub(crate) fn add_to(&self, mut set: CapabilitySet) -> Result<CapabilitySet, CapsError> {
        for (_, wish) in &self.wishes {
            wish.apply(&mut set);
        }
        set.checked()
    }

    pub(crate) fn narrow(&self, file: &CapabilitySet) -> Result<CapabilitySet, CapsError> {
        let mut set = file.clone();
        for (flag, wish) in &self.wishes {
            if let Some((capability, asked, granted)) = wish.excess(file) {
                let capability = capability.to_owned();
                return Err(CapsError::Exceeds { flag: flag.clone(), capability, asked, granted });
            }
            wish.narrow(&mut set, file);
        }
        set.checked()
    }
}

fn wish(name: &str, text: &str) -> Result<Wish, String> {
    Ok(match name {
        "memory" => Wish::Memory(parse_bytes(text)?),
        "cpus" => Wish::Cpus(number(text, "whole vCPUs, like \"2\"")?),
        "weight" => Wish::Weight(number(text, "a weight, like \"100\"")?),
        "disk" => Wish::Disk(parse_bytes(text)?),
        "processes" => Wish::Processes(number(text, "a number of processes, like \"512\"")?),
        "time" => Wish::Time(parse_duration(text)?),
        "fuel" => Wish::Fuel(
            text.parse().map_err(|_| format!("`{text}` is not a number of instructions"))?,
        ),
        "clock" => plain(Wish::Clock, text)?,
        "random" => plain(Wish::Random, text)?,
        "stdio" => plain(Wish::Stdio, text)?,
        "connect" => Wish::Connect(text.parse()?),
        "listen" => Wish::Listen(text.parse()?),
        "resolve" => Wish::Resolve(text.parse()?),
        "join" => Wish::Join(text.parse()?),
        "device" if !text.is_empty() => Wish::Device(text.to_owned()),
        "device" => return Err("names no device; write device=NAME".to_owned()),
        "spawn" => Wish::Spawn(number(text, "a number of isolates, like \"4\"")?),
        _ => {
            return Err(format!(
                "`{name}` is not a capability; known are {}",
                Flags::NAMES.join(", ")
            ));
        }
    })
}

fn number(text: &str, what: &str) -> Result<u32, String> {
    // "2.0" is what some callers of docker write; a fraction of a processor is not offered.
    let whole = text.strip_suffix(".0").unwrap_or(text);
    whole.parse().map_err(|_| format!("`{text}` is not {what}"))
}

fn plain(wish: Wish, text: &str) -> Result<Wish, String> {
    if text.is_empty() { Ok(wish) } else { Err(format!("takes no value, but has `{text}`")) }
}

fn folder(flag: &str, text: &str, base: &Path) -> Result<Wish, CapsError> {
    let parts: Vec<&str> = text.split(':').collect();
    let (host, guest, options) = match parts[..] {
        [host, guest] => (host, guest, ""),
        [host, guest, options] => (host, guest, options),
        _ => {
            return Err(value(flag, format!("`{text}` is not HOST:GUEST or HOST:GUEST:ro")));
        }
    };
    if !host.starts_with(['/', '.']) {
        let message = format!(
            "`{host}` is neither a path nor the name of a volume; write ./{host} for a folder"
        );
        return Err(value(flag, message));
    }
    let (mut rights, mut execute_as_granted) =
        (Rights::READ | Rights::WRITE | Rights::EXECUTE, true);
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option {
            "ro" => rights.remove(Rights::WRITE),
            // Labels of SELinux: a folder is reached by a process of its own, whoever labelled it.
            "rw" | "z" | "Z" => {}
            "overlay" => {
                rights.remove(Rights::WRITE);
                rights.insert(Rights::OVERLAY);
            }
            "exec" => execute_as_granted = false,
            "noexec" => rights.remove(Rights::EXECUTE),
            _ => {
                return Err(value(
                    flag,
                    format!("`{option}` is not one of ro, rw, overlay, exec, noexec"),
                ));
            }
        }
    }
    let folder = Folder::new(&PathBuf::from(host), &PathBuf::from(guest), rights, base, flag)?;
    Ok(Wish::Folder { folder, execute_as_granted })
}

fn model(flag: &str, text: &str, base: &Path) -> Result<Wish, CapsError> {
    let parts = text.split_once(':').filter(|(_, file)| !file.is_empty());
    let (name, file) =
        parts.ok_or_else(|| value(flag, format!("`{text}` is not NAME:FILE, like m:./m.onnx")))?;
    Model::new(name, Path::new(file), base, flag).map(Wish::Model)
}

fn value(flag: &str, message: String) -> CapsError {
    CapsError::Value { key: flag.to_owned(), message }
}

impl Wish {
    /// Sets or adds it in a grant that flags alone make.
    fn apply(&self, set: &mut CapabilitySet) {
        match self {
            Self::Memory(bytes) => set.memory_bytes = Some(*bytes),
            Self::Cpus(count) => set.cpu = Some(Cpu { count: *count, ..cpu(set) }),
            Self::Weight(weight) => set.cpu = Some(Cpu { weight: *weight, ..cpu(set) }),
            Self::Disk(bytes) => set.disk_bytes = Some(*bytes),
            Self::Processes(max) => set.process_max = Some(*max),
            Self::Time(deadline) => set.deadline = Some(*deadline),
            Self::Fuel(fuel) => set.fuel = Some(*fuel),
            Self::Clock => set.clock = true,
            Self::Random => set.random = true,
            Self::Stdio => set.stdio = true,
            Self::Connect(rule) => network(set).connect.push(rule.clone()),
            Self::Listen(rule) => network(set).listen.push(*rule),
            Self::Resolve(rule) => network(set).resolve.push(rule.clone()),
            Self::Join(name) => {
                let join = &mut network(set).join;
                join.extend((!join.contains(name)).then(|| name.clone()));
            }
            Self::Device(name) => drop(set.devices.get_or_insert_default().insert(name.clone())),
            Self::Spawn(max) => set.spawn_max = Some(*max),
            Self::Folder { folder, .. } => set.folders.push(folder.clone()),
            Self::Model(model) => set.models.push(model.clone()),
        }
    }

    /// Applies it to a grant that covers it. Lists of a file stay as they are: a rule that they
    /// cover adds nothing to them.
    fn narrow(&self, set: &mut CapabilitySet, file: &CapabilitySet) {
        match self {
            Self::Connect(_)
            | Self::Listen(_)
            | Self::Resolve(_)
            | Self::Join(_)
            | Self::Device(_)
            | Self::Model(_) => {}
            Self::Folder { folder, execute_as_granted } => {
                let mut folder = folder.clone();
                if *execute_as_granted && !covers(file, &folder, Rights::empty()) {
                    folder.rights.remove(Rights::EXECUTE);
                }
                set.folders.retain(|other| other.guest != folder.guest);
                set.folders.push(folder);
            }
            _ => self.apply(set),
        }
    }

    /// What of it is more than `file` grants: the capability, what was asked, what there is.
    fn excess(&self, file: &CapabilitySet) -> Option<(&'static str, String, String)> {
        let network = file.network.clone().unwrap_or_default();
        match self {
            Self::Memory(bytes) => above("memory", *bytes, file.memory_bytes, format_bytes),
            Self::Disk(bytes) => above("disk", *bytes, file.disk_bytes, format_bytes),
            Self::Cpus(count) => {
                above("cpu", u64::from(*count), file.cpu.map(|cpu| u64::from(cpu.count)), count_of)
            }
            Self::Weight(weight) => above(
                "cpu",
                u64::from(*weight),
                file.cpu.map(|cpu| u64::from(cpu.weight)),
                count_of,
            ),
            Self::Processes(max) => {
                above("processes", u64::from(*max), file.process_max.map(u64::from), count_of)
            }
            Self::Spawn(max) => {
                above("spawn", u64::from(*max), file.spawn_max.map(u64::from), count_of)
            }
            Self::Time(time) => later(*time, file.deadline),
            Self::Fuel(fuel) => {
                file.fuel.and_then(|limit| above("fuel", *fuel, Some(limit), count_of))
            }
            Self::Clock => absent("clock", file.clock),
            Self::Random => absent("random", file.random),
            Self::Stdio => absent("stdio", file.stdio),
            Self::Connect(rule) => outside(
                &network,
                NetworkScope { connect: vec![rule.clone()], ..Default::default() },
            ),
            Self::Listen(rule) => {
                outside(&network, NetworkScope { listen: vec![*rule], ..Default::default() })
            }
            Self::Resolve(rule) => outside(
                &network,
                NetworkScope { resolve: vec![rule.clone()], ..Default::default() },
            ),
            Self::Join(name) => {
                outside(&network, NetworkScope { join: vec![name.clone()], ..Default::default() })
            }
            Self::Device(name) => absent("device", file.devices().any(|device| device == name)),
            Self::Model(model) => {
                let asked = model.file.display().to_string();
                let granted = file.models.iter().any(|own| own == model);
                (!granted).then(|| ("model", asked, format!("no such model as {}", model.name)))
            }
            Self::Folder { folder, execute_as_granted } => {
                let optional = if *execute_as_granted { Rights::EXECUTE } else { Rights::empty() };
                (!covers(file, folder, optional)).then(|| folder_excess(folder, optional, file))
            }
        }
    }
}

fn cpu(set: &CapabilitySet) -> Cpu {
    set.cpu.unwrap_or(Cpu { count: 1, weight: Cpu::WEIGHT_DEFAULT })
}

fn network(set: &mut CapabilitySet) -> &mut NetworkScope {
    set.network.get_or_insert_default()
}

/// Whether one folder of `file` gives all of `folder`, rights in `optional` aside.
fn covers(file: &CapabilitySet, folder: &Folder, optional: Rights) -> bool {
    let needed = folder.rights - optional;
    file.folders
        .iter()
        .any(|own| own.scope().contains(&folder.scope()) && own.rights.contains(needed))
}

fn folder_excess(
    folder: &Folder,
    optional: Rights,
    file: &CapabilitySet,
) -> (&'static str, String, String) {
    let asked = format!("{} on {}", folder.rights - optional, folder.host.display());
    let around = file.folders.iter().filter(|own| own.scope().contains(&folder.scope()));
    let granted: Vec<String> =
        around.map(|own| format!("{} on {}", own.rights, own.host.display())).collect();
    (
        "folder",
        asked,
        if granted.is_empty() { "nothing there".to_owned() } else { granted.join(" and ") },
    )
}

fn count_of(count: u64) -> String {
    count.to_string()
}

fn above(
    capability: &'static str,
    asked: u64,
    granted: Option<u64>,
    show: fn(u64) -> String,
) -> Option<(&'static str, String, String)> {
    let there = || granted.map_or("nothing".to_owned(), show);
    (asked > granted.unwrap_or(0) || granted.is_none()).then(|| (capability, show(asked), there()))
}

fn later(asked: Duration, granted: Option<Duration>) -> Option<(&'static str, String, String)> {
    let granted = granted.filter(|granted| asked > *granted)?;
    Some(("time", format_duration(asked), format_duration(granted)))
}

fn absent(capability: &'static str, granted: bool) -> Option<(&'static str, String, String)> {
    (!granted).then(|| (capability, "it".to_owned(), "nothing".to_owned()))
}

fn outside(own: &NetworkScope, asked: NetworkScope) -> Option<(&'static str, String, String)> {
    (!own.lists_contain(&asked)).then(|| ("network", asked.to_string(), own.to_string()))
}

#[cfg(test)]
mod tests;
