//! The checked plan of a container in the guest of another cell, on whose network it is.
//!
//! It has an image, a program, limits within the other cell's, and a connection to that cell's
//! supervisor. What a guest has from its boot on it cannot have: folders, a network of its own.

use exocell_agent::{Start, TtySize};
use exocell_images::{Rootfs, Store};
use exocell_xgate::CapabilitySet;

use super::{health, start};
use crate::control::{Client, Contain};
use crate::health::Check;
use crate::{CellError, CellSpec, Layout, Record, State, Strength, Within};

/// Settings of kernels that each container has for itself; all others are the cell's.
const OWN_SYSCTLS: [&str; 5] =
    ["kernel.msg", "kernel.sem", "kernel.shm", "fs.mqueue.", "kernel.domainname"];

/// A container that can be started in another cell's guest.
pub struct SidecarPlan {
    /// The other cell's name, for who is told of its end.
    pub(crate) other: String,
    /// To its supervisor, before any request.
    pub(crate) client: Client,
    /// The image, held against removal.
    pub(crate) image: Rootfs,
    pub(crate) wanted: Contain,
    pub(crate) start: Start,
    pub(crate) health: Option<Check>,
    pub(crate) stdio: bool,
}

/// The other cell: its record and its spec.
///
/// # Errors
/// There is none, it does not run, or it has no guest.
pub fn find(layout: &Layout, key: &str) -> Result<(Record, CellSpec), CellError> {
    let (mut record, mut spec, mut status) = Record::find(layout, key)?;
    if let Some(within) = &spec.within {
        // One that is in another's guest is on that one's network.
        (record, spec, status) = Record::find(layout, &within.cell)?;
    }
    let refused =
        |why: &str| Err(CellError::Usage(format!("--network container:{key}: cannot join {why}")));
    if spec.within.is_some() {
        return refused("a cell that is itself in another's guest; name the cell with the guest");
    }
    if spec.strength == Strength::Isolate {
        return refused("an isolate, which has no guest that another could be in");
    }
    if spec.idle || spec.warm.is_some() || status.state != State::Running {
        return refused(&format!(
            "a cell that does not run ({}); exocell start {key} starts it",
            status.state.name()
        ));
    }
    if spec.read_only {
        return refused(
            "a cell that cannot be written (--read-only): another container has no place there",
        );
    }
    Ok((record, spec))
}

/// Whether `spec` is to be in the guest of a cell that is there and may run later.
pub(crate) fn awaits(layout: &Layout, spec: &CellSpec) -> bool {
    spec.within.as_ref().is_some_and(|within| Record::find(layout, &within.cell).is_ok())
}

/// What `spec` cannot have in another's guest.
///
/// # Errors
/// Names the first.
pub fn check(spec: &CellSpec, caps: &CapabilitySet) -> Result<(), CellError> {
    let settings = &spec.settings;
    let is_own = |name: &&String| !OWN_SYSCTLS.iter().any(|own| name.starts_with(own));
    let shared = settings.sysctls.keys().find(is_own);
    let refused = [
        (spec.strength == Strength::Isolate, "an isolate has no guest: leave out --strength"),
        (!spec.publish.is_empty(), "publish the port where the other cell is started (--publish)"),
        (!spec.networks.is_empty(), "its networks are the other cell's (exocell network connect)"),
        (
            caps.network().is_some(),
            "its network is the other cell's, and so are the rules (exocell update)",
        ),
        (
            settings.has_dns(),
            "conflicting options: dns and the network mode: names are looked up as the other cell does",
        ),
        (
            !settings.hosts.is_empty(),
            "conflicting options: custom host-to-IP mapping and the network mode",
        ),
        (
            !caps.folders().is_empty(),
            "a guest that runs gets no more folders (--volume, --mount): copy files in (exocell cp), \
             or start the other cell with the folder",
        ),
        (
            !caps.models().is_empty() || caps.spawn_max() > 0,
            "it starts no isolates: leave out models and spawn",
        ),
    ];
    let why = refused.into_iter().find(|(asked, _)| *asked).map(|(_, why)| why.to_owned());
    let why = why.or_else(|| {
        shared.map(|name| format!("the setting {name} is the other cell's kernel's (--sysctl)"))
    });
    match why {
        None => Ok(()),
        Some(why) => Err(CellError::Usage(format!("--network container: {why}"))),
    }
}

/// What `spec` may have within `other`: its own limits, and the other's where it names none.
///
/// # Errors
/// It wants more than there is.
fn limits(
    within: &Within,
    caps: &CapabilitySet,
    other: &CellSpec,
) -> Result<CapabilitySet, CellError> {
    let all = other.changes.applied(&other.capabilities).to_string();
    let all = CapabilitySet::parse(&all, "/".as_ref())?;
    let more = |flag: &str, wanted: u64, most: u64| {
        Err(CellError::Usage(format!(
            "--{flag}: {wanted} is more than the cell {} has, in which the container is to be \
             ({most})",
            other.name
        )))
    };
    let memory = match (within.memory_bytes, all.memory_bytes()) {
        (Some(wanted), Some(most)) if wanted > most => return more("memory", wanted, most),
        (wanted, most) => wanted.or(most),
    };
    let processes = match (within.process_max, all.process_max()) {
        (Some(wanted), Some(most)) if wanted > most => {
            return more("pids-limit", wanted.into(), most.into());
        }
        (wanted, most) => wanted.or(most),
    };
    let mut table: serde_json::Value = serde_json::from_str(&caps.to_json()).unwrap_or_default();
    if let Some(bytes) = memory {
        table["memory"]["limit"] = bytes.to_string().into();
    }
    if let Some(count) = processes {
        table["processes"]["max"] = count.into();
    }
    Ok(CapabilitySet::parse(&table.to_string(), "/".as_ref())?)
}

impl SidecarPlan {
    /// Checks `spec`, which is within another cell, and opens what it names. The spec comes to say
    /// what the container gets.
    ///
    /// # Errors
    /// What cannot be, in the words that Docker has for it where it has some.
    pub fn new(
        layout: &Layout,
        spec: &mut CellSpec,
        caps: &CapabilitySet,
        tty: Option<TtySize>,
    ) -> Result<(Self, CapabilitySet), CellError> {
        let Some(within) = spec.within.clone() else {
            return Err(CellError::Usage("the container is in no other cell".to_owned()));
        };
        if [&spec.id, &spec.name].contains(&&within.cell) {
            return Err(CellError::Usage("cannot join own network".to_owned()));
        }
        check(spec, caps)?;
        let (record, other) = find(layout, &within.cell)?;
        let caps = limits(&within, caps, &other)?;
        let store = Store::open(layout.images())?;
        let image = store.resolve(spec.image_name())?;
        let hostname = spec.hostname.clone().unwrap_or_else(|| spec.id[..12].to_owned());
        let rootfs = store.open_rootfs(&image)?;
        let plan = Self {
            client: Client::connect(&record)?,
            wanted: Contain {
                files: rootfs.files().len(),
                id: spec.id.clone(),
                hostname,
                domain_name: spec.settings.domain_name.clone().unwrap_or_default(),
                read_only: spec.read_only,
                keeps_files: !spec.remove,
                depot: None,
                shares_with: None,
                shares_pids: false,
            },
            image: rootfs,
            start: start(spec, &caps, &image.config, tty)?,
            health: health(spec, &image.config)?,
            stdio: caps.stdio(),
            other: other.name,
        };
        spec.within = Some(Within { cell: record.id, ..within });
        spec.capabilities = caps.to_json();
        // Its changes are on the other cell's disk.
        (spec.disk, spec.keeps_disk) = (None, false);
        Ok((plan, caps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(more: serde_json::Value) -> CellSpec {
        let mut spec = json!({
            "version": 1, "id": "0".repeat(32), "name": "s", "strength": "vm", "image": "i",
            "entrypoint": null, "command": [], "env": [], "working_dir": null, "user": null,
            "hostname": null, "tty": false, "stdin": false, "remove": false, "read_only": false,
            "capabilities": r#"{"version": 1, "memory": {"limit": "64M"}, "processes": {"max": 9}}"#,
            "created_ms": 0, "within": { "cell": "other" },
        });
        let more = more.as_object().cloned().unwrap_or_default();
        spec.as_object_mut().unwrap().extend(more);
        serde_json::from_value(spec).unwrap()
    }

    fn caps(table: &str) -> CapabilitySet {
        CapabilitySet::parse(table, "/".as_ref()).unwrap()
    }

    #[test]
    fn what_a_guest_has_from_its_boot_on_is_refused_by_name() {
        let plain = caps(r#"{"version": 1}"#);
        let refusal =
            |spec: &CellSpec, caps: &CapabilitySet| check(spec, caps).unwrap_err().to_string();
        check(&spec(json!({})), &plain).unwrap();
        let network = caps(r#"{"version": 1, "network": {"connect": ["a.test:1"]}}"#);
        assert!(refusal(&spec(json!({})), &network).contains("the rules"));
        let folder =
            r#"{"version": 1, "folder": [{"host": "/f", "guest": "/f", "rights": ["read"]}]}"#;
        assert!(refusal(&spec(json!({})), &caps(folder)).contains("--volume"));
        for (more, word) in [
            (json!({"strength": "isolate"}), "--strength"),
            (json!({"publish": [{"host": "127.0.0.1:1", "guest_port": 1}]}), "--publish"),
            (json!({"settings": {"dns": ["1.1.1.1"]}}), "conflicting options: dns"),
            (json!({"settings": {"hosts": [["a", "1.1.1.1"]]}}), "host-to-IP"),
            (json!({"settings": {"sysctls": {"net.core.somaxconn": "1"}}}), "net.core.somaxconn"),
        ] {
            let refused = refusal(&spec(more), &plain);
            assert!(refused.contains(word), "{word}: {refused}");
        }
        check(&spec(json!({"settings": {"sysctls": {"kernel.shmmax": "1"}}})), &plain).unwrap();
    }

    #[test]
    fn limits_are_the_cells_or_less() {
        let (other, own) = (spec(json!({})), caps(r#"{"version": 1, "memory": {"limit": "1G"}}"#));
        let within =
            |memory_bytes, process_max| Within { cell: String::new(), memory_bytes, process_max };
        let all = limits(&within(None, None), &own, &other).unwrap();
        assert_eq!((all.memory_bytes(), all.process_max()), (Some(64 << 20), Some(9)));
        let some = limits(&within(Some(32 << 20), Some(3)), &own, &other).unwrap();
        assert_eq!((some.memory_bytes(), some.process_max()), (Some(32 << 20), Some(3)));
        let error = limits(&within(Some(65 << 20), None), &own, &other).unwrap_err().to_string();
        assert!(error.contains("--memory") && error.contains("more than the cell s"), "{error}");
        assert!(limits(&within(None, Some(10)), &own, &other).is_err());
    }
}
