//! What is noted of a volume beside its files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use exocell_cell::images::private;
use exocell_cell::now_ms;
use serde::{Deserialize, Serialize};

/// The label by which docker's own command knows a volume without a name.
const ANONYMOUS: &str = "com.docker.volume.anonymous";

/// See the module's head.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Notes {
    pub labels: BTreeMap<String, String>,
    /// Milliseconds since the epoch; 0 where nobody noted it.
    pub created_ms: u64,
    /// Whether its maker gave it no name.
    #[serde(default)]
    pub is_anonymous: bool,
    /// The container that it was made for, if it was for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whether it is to go with that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends_with_owner: bool,
    /// The cell that had it made, behind those that had that made; none of an operator's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made_by: Vec<String>,
}

impl Notes {
    /// Of a volume that is made now.
    pub fn new(mut labels: BTreeMap<String, String>, is_anonymous: bool) -> Self {
        if is_anonymous {
            labels.insert(ANONYMOUS.to_owned(), String::new());
        }
        Self { labels, created_ms: now_ms(), is_anonymous, ..Self::default() }
    }

    /// Of one without a name that is made for the container `owner`, and may be to go with that.
    pub fn of(owner: &str, ends_with_owner: bool) -> Self {
        let owner = Some(owner.to_owned());
        Self { owner, ends_with_owner, ..Self::new(BTreeMap::new(), true) }
    }

    /// Those at `path`; none of a volume that an earlier version made.
    pub fn read(path: &Path) -> Self {
        let text = fs::read(path).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Writes them down at `path`: all of them, or none where the disk is full.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        path.parent().map_or(Ok(()), private::folder)?;
        private::replace(path, &serde_json::to_vec(self)?)
    }
}
