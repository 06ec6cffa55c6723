//! The wire form of a cell: what the operator asked for, as it is stored.

mod limited;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use exocell_agent::FileCopy;
use exocell_images::Healthcheck;
use exocell_xgate::CapabilitySet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::CellError;
use crate::changes::Changes;
use crate::networks::Attachment;
use crate::policy::Policy;
use crate::settings::Settings;

/// How strongly a cell is isolated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strength {
    /// A Linux kernel of its own.
    Vm,
    /// A Wasm isolate.
    Isolate,
}

impl std::fmt::Display for Strength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Vm => "vm",
            Self::Isolate => "isolate",
        })
    }
}

/// A request for a cell, version 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellSpec {
    pub version: u32,
    pub id: String,
    pub name: String,
    pub strength: Strength,
    /// An image reference, or the path of a Wasm module.
    pub image: String,
    /// What the image was when the cell was made: a cell that starts again keeps to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// The image's entrypoint is replaced by this.
    pub entrypoint: Option<Vec<String>>,
    /// Program and arguments; empty takes the image's.
    pub command: Vec<String>,
    /// `NAME=value`, added to the image's.
    pub env: Vec<String>,
    pub working_dir: Option<String>,
    pub user: Option<String>,
    pub hostname: Option<String>,
    /// What its program has and is held to inside the guest.
    #[serde(default, skip_serializing_if = "Settings::are_default")]
    pub settings: Settings,
    pub tty: bool,
    /// Keep standard input open.
    pub stdin: bool,
    /// Remove the record when the cell ends.
    pub remove: bool,
    /// No private overlay: the root file system cannot be written.
    pub read_only: bool,
    /// Ports of the host that lead into the cell.
    #[serde(default)]
    pub publish: Vec<crate::network::Publish>,
    /// The cell in whose guest it is a container, on the network of that; it has no guest then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Within>,
    /// The networks between cells that it is in, at most once in each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<Attachment>,
    /// Whether it has a network device though nothing is granted, so that it can come into networks
    /// while it runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_link: bool,
    /// How guest memory goes back to the host.
    #[serde(default)]
    pub pager: exocell_pager::Mode,
    /// Memory, in bytes, that is set aside for the cell (`credit` mode).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_guarantee: Option<u64>,
    /// What stands between the guest's programs and its kernel.
    #[serde(default)]
    pub intra: exocell_vmm::intra::Intra,
    /// What runs the guest.
    #[serde(default)]
    pub platform: exocell_vmm::platform::PlatformKind,
    /// A file that keeps the private overlay beyond the cell's end, so that another
    /// cell can go on with it; made where it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<PathBuf>,
    /// Whether its record keeps the private overlay beyond its end, so that it can start again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_disk: bool,
    /// Whether what its program writes is for those who listen then, and is not written down.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_no_log: bool,
    /// What its operator notes of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// How its program is asked to end, and how long it has for that; TERM and 10 seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_seconds: Option<u64>,
    /// Whether it starts again by itself, and how often it did since it was started by hand.
    #[serde(default, skip_serializing_if = "Policy::is_no")]
    pub restart: Policy,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restarts: u32,
    /// How its program is looked after, as far as the image does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Healthcheck>,
    /// Runs no program: its operator reaches into its files until it hangs up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
    /// Instead of an image: a directory of the host with the roots and mounts of containers that
    /// come into its guest later, one of the directory each. It is idle itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depot: Option<PathBuf>,
    /// Its network device leads nowhere until it is plugged into a network of the host's
    /// ([`crate::control::ControlRequest::Plug`]); it is granted nothing of a network then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plug: bool,
    /// Ends when its operator hangs up: a step of a build, that nobody else has a use for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tied: bool,
    /// Of a cell that waits in a pool for its program: what a run must
    /// want to take it (see [`crate::warm`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<String>,
    /// The capability table in its TOML form, after the command line's flags.
    pub capabilities: String,
    /// What was changed of that since.
    #[serde(default, skip_serializing_if = "Changes::are_none")]
    pub changes: Changes,
    /// Where its folders were when it was made, if it may start again; found at its start else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub locations: Vec<crate::granted::Location>,
    /// The guest's paths of those that are volumes: such a one gets what the image has there, while
    /// it is empty and the cell begins for the first time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fills: Vec<PathBuf>,
    /// The guest's paths of single files that it gets as copies in memory.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub copies: BTreeMap<PathBuf, FileCopy>,
    /// Milliseconds since the epoch.
    pub created_ms: u64,
}

/// Another cell, whose guest a cell is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Within {
    /// Its id or name; its id once it was found.
    pub cell: String,
    /// Of what that cell has, what its programs may take together; all where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_max: Option<u32>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl CellSpec {
    pub const VERSION: u32 = 1;

    /// 128 random bits in hexadecimal: the id of a new cell.
    pub fn new_id() -> Result<String, CellError> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut bytes))
            .map_err(CellError::host("cannot read /dev/urandom"))?;
        Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether `text` has the form of an id.
    #[must_use]
    pub fn is_id(text: &str) -> bool {
        (32..=64).contains(&text.len())
            && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }

    /// A `vm` cell that runs no program, removes itself, and is granted `capabilities`, a table as
    /// JSON. What it is beside that is whoever asks' to say.
    ///
    /// # Errors
    /// The host has no random number for its id.
    pub fn idle(image: &str, capabilities: String) -> Result<Self, CellError> {
        let id = Self::new_id()?;
        Ok(Self {
            version: Self::VERSION,
            name: format!("files-{}", &id[..12]),
            id,
            strength: Strength::Vm,
            image: image.to_owned(),
            image_id: None,
            entrypoint: None,
            command: Vec::new(),
            env: Vec::new(),
            working_dir: None,
            user: None,
            hostname: None,
            settings: Settings::default(),
            tty: false,
            stdin: false,
            remove: true,
            read_only: false,
            publish: Vec::new(),
            within: None,
            networks: Vec::new(),
            has_link: false,
            pager: exocell_pager::Mode::default(),
            memory_guarantee: None,
            intra: exocell_vmm::intra::Intra::default(),
            platform: exocell_vmm::platform::PlatformKind::default(),
            disk: None,
            keeps_disk: false,
            keeps_no_log: false,
            labels: BTreeMap::new(),
            stop_signal: None,
            stop_seconds: None,
            restart: Policy::No,
            restarts: 0,
            health: None,
            idle: true,
            depot: None,
            plug: false,
            tied: false,
            warm: None,
            capabilities,
            changes: Changes::default(),
            locations: Vec::new(),
            fills: Vec::new(),
            copies: BTreeMap::new(),
            created_ms: crate::now_ms(),
        })
    }

    /// What the image store knows its image by.
    pub fn image_name(&self) -> &str {
        self.image_id.as_deref().unwrap_or(&self.image)
    }

    /// The grant by which it starts: the one that it was made with, and what was changed of that
    /// since. What was changed of its memory is a running guest's.
    ///
    /// # Errors
    /// The grant cannot be read.
    pub fn granted(&self) -> Result<CapabilitySet, CellError> {
        Ok(CapabilitySet::parse(&self.table().to_string(), Path::new("/"))?)
    }

    /// The capability table of that.
    fn table(&self) -> Value {
        let changes = Changes { memory_bytes: None, ..self.changes.clone() };
        changes.applied(&self.capabilities)
    }

    /// A cell without a program that shows the files of this one, which has ended and left `disk`:
    /// its image, the folders that it still has, and nothing else of what it had.
    ///
    /// # Errors
    /// Its grant cannot be read, or as of [`Self::idle`].
    pub fn showing(&self, disk: Option<PathBuf>) -> Result<Self, CellError> {
        let mut caps = self.table();
        if let Some(sections) = caps.as_object_mut() {
            for none in ["network", "time"] {
                sections.remove(none);
            }
        }
        Ok(Self {
            disk,
            locations: self.locations.clone(),
            fills: self.fills.clone(),
            ..Self::idle(self.image_name(), caps.to_string())?
        })
    }

    /// What runs its guest, if it has one of its own.
    pub fn guest_platform(&self) -> Option<exocell_vmm::platform::PlatformKind> {
        (self.strength == Strength::Vm && self.within.is_none()).then_some(self.platform)
    }

    /// Whether it can have its restart policy.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_restart(&self) -> Result<(), CellError> {
        if self.restart.is_no() {
            return Ok(());
        }
        if self.remove {
            return Err(CellError::Usage(
                "--restart and --rm do not go together: what removes itself does not start again"
                    .to_owned(),
            ));
        }
        self.can_start_again().map_err(|error| CellError::Usage(format!("--restart: {error}")))
    }

    /// Whether it can start again after its end.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn can_start_again(&self) -> Result<(), CellError> {
        let why = match self.strength {
            Strength::Isolate => "it is an isolate, of which nothing is left",
            Strength::Vm if self.within.is_some() && !self.remove => return Ok(()),
            Strength::Vm if self.keeps_disk || self.disk.is_some() || self.read_only => {
                return Ok(());
            }
            Strength::Vm if self.remove => "it removes itself (--rm)",
            Strength::Vm => "it kept no disk: a secret that it had is not written down",
        };
        Err(CellError::Usage(format!(
            "cell {} cannot start again: {why}; exocell run starts a new one",
            self.name
        )))
    }

    /// Whether a cell may be called `name`.
    pub fn check_name(name: &str) -> Result<(), CellError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain) {
            return Ok(());
        }
        Err(CellError::Usage(format!(
            "{name:?} is no name; use letters, digits, _ . - and start with a letter or digit"
        )))
    }
}
