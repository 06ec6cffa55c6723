//! What is noted of a volume beside its files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use exocell_cell::images::private;
use exocell_cell::now_ms;
use serde::{Deserialize, Serialize};

/// See the module's head.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Notes {
    pub labels: BTreeMap<String, String>,
    /// Milliseconds since the epoch; 0 where nobody noted it.
    pub created_ms: u64,
    /// Whether its maker gave it no name.
    #[serde(default)]
    pub is_anonymous: bool,
}

impl Notes {
    /// Of a volume that is made now.
    pub fn new(labels: BTreeMap<String, String>, is_anonymous: bool) -> Self {
        Self { labels, created_ms: now_ms(), is_anonymous }
    }

    /// Those at `path`; none of a volume that an earlier version made.
    pub fn read(path: &Path) -> Self {
        let text = fs::read(path).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Writes them down at `path`.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        path.parent().map_or(Ok(()), private::folder)?;
        let mut file = private::create(path)?;
        serde_json::to_writer(&mut file, self)?;
        file.sync_all()
    }
}
