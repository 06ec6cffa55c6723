//! The wire form of a grant: TOML or JSON, version 1.

use crate::amount::{format_bytes, format_duration, parse_bytes, parse_duration};
use crate::set::{CapabilitySet, Cpu, Folder, Model};
use crate::{CapsError, Endpoint, NamePattern, NetworkName, NetworkScope, PortRange, Rights};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Longest capability file, in bytes.
pub(crate) const FILE_BYTES_MAX: usize = 1 << 20;
/// The version this module reads and writes.
const VERSION: u32 = 1;

impl CapabilitySet {
    /// Reads a capability file, TOML or JSON. Relative host paths start at `base`, which should
    /// be the folder the file lies in.
    ///
    /// # Errors
    /// A sentence with the line or the key and what to write instead.
    pub fn parse(text: &str, base: &Path) -> Result<Self, CapsError> {
        read(text, base)
    }

    /// Writes it as JSON that [`CapabilitySet::parse`] reads back to an equal grant.
    #[must_use]
    pub fn to_json(&self) -> String {
        write(self)
    }
}

/// Reads a grant. Text that opens with `{` is JSON, all other text is TOML.
fn read(text: &str, base: &Path) -> Result<CapabilitySet, CapsError> {
    if text.len() > FILE_BYTES_MAX {
        return Err(CapsError::TooLong { bytes: text.len(), max: FILE_BYTES_MAX });
    }
    let wire = if text.trim_start().starts_with('{') { read_json(text)? } else { read_toml(text)? };
    if wire.version != VERSION {
        return Err(CapsError::Version { found: wire.version });
    }
    wire.check(base)
}

fn read_json(text: &str) -> Result<Wire, CapsError> {
    serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let message =
            message.rsplit_once(" at line ").map_or(message.as_str(), |(before, _)| before);
        CapsError::Syntax { line: error.line().max(1), message: message.to_owned() }
    })
}

fn read_toml(text: &str) -> Result<Wire, CapsError> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start);
        let before = text.as_bytes().get(..start).unwrap_or_default();
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        CapsError::Syntax { line, message: error.message().replace('\n', ", ") }
    })
}

/// Writes a grant as JSON that [`read`] takes.
fn write(set: &CapabilitySet) -> String {
    serde_json::to_string_pretty(&Wire::from(set)).unwrap_or_default()
}

/// A value that is written as a string.
#[derive(Clone)]
struct Text<T>(T);

impl<'de, T: FromStr<Err = String>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Text).map_err(serde::de::Error::custom)
    }
}

impl<T: fmt::Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

#[derive(Clone)]
struct Bytes(u64);

impl FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        parse_bytes(text).map(Bytes)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_bytes(self.0))
    }
}

#[derive(Clone)]
struct Span(Duration);

impl FromStr for Span {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        parse_duration(text).map(Span)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_duration(self.0))
    }
}

/// The whole file. A section that is absent grants nothing.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<MemoryWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<CpuWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<DiskWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<CountWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<TimeWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fuel: Option<FuelWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    clock: Option<PlainWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    random: Option<PlainWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdio: Option<PlainWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    spawn: Option<CountWire>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    folder: Vec<FolderWire>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    model: Vec<ModelWire>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryWire {
    limit: Text<Bytes>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CpuWire {
    #[serde(default = "one")]
    count: u32,
    #[serde(default = "default_weight")]
    weight: u32,
}

fn one() -> u32 {
    1
}

fn default_weight() -> u32 {
    Cpu::WEIGHT_DEFAULT
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskWire {
    size: Text<Bytes>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CountWire {
    max: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeWire {
    deadline: Text<Span>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FuelWire {
    instructions: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainWire {}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkWire {
    #[serde(default)]
    connect: Vec<Text<Endpoint>>,
    #[serde(default)]
    listen: Vec<Text<PortRange>>,
    #[serde(default)]
    resolve: Vec<Text<NamePattern>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    join: Vec<Text<NetworkName>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connections: Option<u32>,
    /// Bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<Text<Bytes>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceWire {
    names: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FolderWire {
    host: PathBuf,
    guest: PathBuf,
    rights: Vec<FolderRight>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelWire {
    name: String,
    file: PathBuf,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FolderRight {
    Read,
    Write,
    #[serde(alias = "exec")]
    Execute,
    Overlay,
}

impl FolderRight {
    const ALL: [(FolderRight, Rights); 4] = [
        (Self::Read, Rights::READ),
        (Self::Write, Rights::WRITE),
        (Self::Execute, Rights::EXECUTE),
        (Self::Overlay, Rights::OVERLAY),
    ];

    fn rights(list: &[Self]) -> Rights {
        list.iter().fold(Rights::empty(), |sum, right| {
            sum | match right {
                Self::Read => Rights::READ,
                Self::Write => Rights::WRITE,
                Self::Execute => Rights::EXECUTE,
                Self::Overlay => Rights::OVERLAY,
            }
        })
    }

    fn list(rights: Rights) -> Vec<Self> {
        Self::ALL
            .iter()
            .filter(|(_, right)| rights.contains(*right))
            .map(|(name, _)| *name)
            .collect()
    }
}

impl Wire {
    fn check(self, base: &Path) -> Result<CapabilitySet, CapsError> {
        let mut set = CapabilitySet::nothing();
        set.memory_bytes = self.memory.map(|memory| memory.limit.0.0);
        set.cpu = self.cpu.map(|cpu| Cpu { count: cpu.count, weight: cpu.weight });
        set.disk_bytes = self.disk.map(|disk| disk.size.0.0);
        set.process_max = self.processes.map(|processes| processes.max);
        set.deadline = self.time.map(|time| time.deadline.0.0);
        set.fuel = self.fuel.map(|fuel| fuel.instructions);
        set.clock = self.clock.is_some();
        set.random = self.random.is_some();
        set.stdio = self.stdio.is_some();
        set.network = self.network.map(NetworkWire::scope);
        set.devices = self.device.map(|device| device.names.into_iter().collect());
        set.spawn_max = self.spawn.map(|spawn| spawn.max);
        for folder in self.folder {
            let rights = FolderRight::rights(&folder.rights);
            set.folders.push(Folder::new(&folder.host, &folder.guest, rights, base, "folder")?);
        }
        for model in self.model {
            set.models.push(Model::new(&model.name, &model.file, base, "model")?);
        }
        set.checked()
    }
}

impl NetworkWire {
    fn scope(self) -> NetworkScope {
        NetworkScope {
            connect: bare(self.connect),
            listen: bare(self.listen),
            resolve: bare(self.resolve),
            join: bare(self.join),
            connections_max: self.connections,
            rate_bytes: self.rate.map(|rate| rate.0.0),
        }
    }
}

fn bare<T>(list: Vec<Text<T>>) -> Vec<T> {
    list.into_iter().map(|text| text.0).collect()
}

fn texts<T: Clone>(list: &[T]) -> Vec<Text<T>> {
    list.iter().cloned().map(Text).collect()
}

impl From<&CapabilitySet> for Wire {
    fn from(set: &CapabilitySet) -> Self {
        let plain = |granted: bool| granted.then_some(PlainWire {});
        Self {
            version: VERSION,
            memory: set.memory_bytes.map(|bytes| MemoryWire { limit: Text(Bytes(bytes)) }),
            cpu: set.cpu.map(|cpu| CpuWire { count: cpu.count, weight: cpu.weight }),
            disk: set.disk_bytes.map(|bytes| DiskWire { size: Text(Bytes(bytes)) }),
            processes: set.process_max.map(|max| CountWire { max }),
            time: set.deadline.map(|deadline| TimeWire { deadline: Text(Span(deadline)) }),
            fuel: set.fuel.map(|instructions| FuelWire { instructions }),
            clock: plain(set.clock),
            random: plain(set.random),
            stdio: plain(set.stdio),
            network: set.network.as_ref().map(NetworkWire::from),
            device: set
                .devices
                .as_ref()
                .map(|names| DeviceWire { names: names.iter().cloned().collect() }),
            spawn: set.spawn_max.map(|max| CountWire { max }),
            folder: set.folders.iter().map(FolderWire::from).collect(),
            model: set.models.iter().map(ModelWire::from).collect(),
        }
    }
}

impl From<&NetworkScope> for NetworkWire {
    fn from(scope: &NetworkScope) -> Self {
        Self {
            connect: texts(&scope.connect),
            listen: texts(&scope.listen),
            resolve: texts(&scope.resolve),
            join: texts(&scope.join),
            connections: scope.connections_max,
            rate: scope.rate_bytes.map(|bytes| Text(Bytes(bytes))),
        }
    }
}

impl From<&Model> for ModelWire {
    fn from(model: &Model) -> Self {
        Self { name: model.name.clone(), file: model.file.clone() }
    }
}

impl From<&Folder> for FolderWire {
    fn from(folder: &Folder) -> Self {
        let rights = FolderRight::list(folder.rights);
        Self { host: folder.host.clone(), guest: folder.guest.clone(), rights }
    }
}

#[cfg(test)]
mod tests;
