//! What modules that `exocell serve --http` serves may do on the host. They have no records.

use std::fs;
use std::io;
use std::path::Path;

use exocell_xgate::CapabilitySet;
use serde::Deserialize;

use crate::Layout;

/// What is read here of a module's entry (`exovisor/service/src/store.rs`).
#[derive(Deserialize)]
struct Entry {
    caps: String,
}

/// The capability table of each.
///
/// # Errors
/// One cannot be read: then nobody knows what its module may do.
pub(crate) fn tables(layout: &Layout) -> io::Result<Vec<CapabilitySet>> {
    let files = match fs::read_dir(layout.modules()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files?,
    };
    let mut tables = Vec::new();
    for file in files {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            tables.extend(table(&path)?);
        }
    }
    Ok(tables)
}

/// `None` for one that was removed meanwhile.
fn table(path: &Path) -> io::Result<Option<CapabilitySet>> {
    let damaged = |why: String| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        io::Error::other(format!(
            "{} is damaged ({why}); exocell module rm {name} removes it",
            path.display()
        ))
    };
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let entry: Entry = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let caps = CapabilitySet::parse(&entry.caps, Path::new("/"));
    caps.map(Some).map_err(|error| damaged(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_named_with_the_remedy() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path());
        assert!(tables(&layout).unwrap().is_empty());
        fs::create_dir(layout.modules()).unwrap();
        fs::write(layout.modules().join("m.wasm"), "").unwrap();
        let entry = serde_json::json!({ "name": "m", "caps": "version = 1" }).to_string();
        fs::write(layout.modules().join("m.json"), &entry).unwrap();
        assert_eq!(tables(&layout).unwrap().len(), 1);
        fs::write(layout.modules().join("m.json"), &entry[..entry.len() - 2]).unwrap();
        let said = tables(&layout).unwrap_err().to_string();
        assert!(said.contains("m.json is damaged") && said.contains("module rm m "), "{said}");
    }
}
