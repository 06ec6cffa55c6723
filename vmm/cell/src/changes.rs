//! What `exocell update` has changed of a grant since the cell was made.
//!
//! The grant itself stays as it was: a folder that is revoked may hold links that the cell made
//! while it could write there ([`crate::granted`]).

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Changes {
    /// Capabilities by their names, like `folder:/src`.
    pub revoked: Vec<String>,
    /// The network's rules, where they are others.
    pub connect: Option<Vec<String>>,
    /// The networks between cells that it may be in, where they are others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join: Option<Vec<String>>,
    /// What the guest may use of its memory.
    pub memory_bytes: Option<u64>,
}

impl Changes {
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// The grant in the table `capabilities` as it holds now.
    pub fn applied(&self, capabilities: &str) -> Value {
        let mut table: Value = serde_json::from_str(capabilities).unwrap_or_default();
        if let Some(bytes) = self.memory_bytes {
            table["memory"]["limit"] = bytes.to_string().into();
        }
        if let Some(connect) = &self.connect {
            table["network"]["connect"] = connect.iter().map(String::as_str).collect();
        }
        if let Some(join) = &self.join {
            table["network"]["join"] = join.iter().map(String::as_str).collect();
        }
        for name in &self.revoked {
            revoke(&mut table, name);
        }
        table
    }
}

fn revoke(table: &mut Value, name: &str) {
    let Some(sections) = table.as_object_mut() else { return };
    let (section, guest) = name.split_once(':').unwrap_or((name, ""));
    match sections.get_mut(section) {
        Some(Value::Array(several)) => several.retain(|one| one["guest"] != guest),
        _ => drop(sections.remove(section)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CellSpec;
    use serde_json::json;

    #[test]
    fn a_grant_is_shown_as_it_holds() {
        let table = json!({
            "memory": { "limit": "256M" }, "network": { "connect": ["a:1"], "connections": 64 },
            "folder": [{ "guest": "/a" }, { "guest": "/b" }],
        });
        let mut changes = Changes::default();
        assert!(changes.are_none());
        assert_eq!(changes.applied(&table.to_string()), table);
        changes.connect = Some(vec!["b:2".to_owned()]);
        changes.join = Some(vec!["net".to_owned()]);
        changes.memory_bytes = Some(1 << 20);
        changes.revoked = vec!["folder:/a".to_owned()];
        let holds = json!({
            "memory": { "limit": "1048576" }, "network": { "connect": ["b:2"], "connections": 64, "join": ["net"] },
            "folder": [{ "guest": "/b" }],
        });
        assert_eq!(changes.applied(&table.to_string()), holds);
        changes.revoked.push("network".to_owned());
        assert!(changes.applied(&table.to_string()).get("network").is_none());
    }

    #[test]
    fn a_start_has_what_holds_then() {
        let table = json!({
            "version": 1, "memory": { "limit": "64M" }, "network": { "connect": ["a:1"] },
            "folder": [
                { "host": "/a", "guest": "/a", "rights": ["read"] },
                { "host": "/b", "guest": "/b", "rights": ["read"] },
            ],
        });
        let mut spec = CellSpec::idle("i", table.to_string()).unwrap();
        spec.changes.revoked = vec!["folder:/a".to_owned(), "network".to_owned()];
        // A running guest's, and not the next one's.
        spec.changes.memory_bytes = Some(1 << 20);
        let caps = spec.granted().unwrap();
        assert_eq!(caps.folders().len(), 1);
        assert!(caps.folders()[0].guest.ends_with("b") && caps.network().is_none());
        assert_eq!(caps.memory_bytes(), Some(64 << 20));
        // So has the cell that shows its files.
        assert_eq!(spec.showing(None).unwrap().granted().unwrap().folders().len(), 1);
        spec.capabilities = "{".to_owned();
        assert!(spec.granted().is_err(), "what cannot be read grants nothing");
    }
}
