//! A bundle: the folder with `config.json`, what a container is to be (OCI runtime specification).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::config::Config;
use crate::error::{Result, ShimError};
use crate::spec::{self, Wanted};

/// The longest `config.json`, in bytes; the guest takes no longer request.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// What a bundle asks for.
pub struct Bundle {
    pub path: PathBuf,
    pub wanted: Wanted,
}

impl Bundle {
    /// # Errors
    /// It cannot be read, or names what a cell does not carry out.
    pub fn read(path: &Path, config: &Config) -> Result<Self> {
        let text = text(path)?;
        let specification: Value = serde_json::from_str(&text).map_err(broken(path))?;
        let wanted = spec::translate(specification, path, config)?;
        Ok(Self { path: path.to_owned(), wanted })
    }
}

/// The annotations of the container whose bundle is at `path`; none where there is no bundle (any
/// more).
///
/// # Errors
/// It is no specification.
pub fn annotations(path: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Annotated {
        #[serde(default)]
        annotations: Option<BTreeMap<String, String>>,
    }
    if !path.join("config.json").exists() {
        return Ok(BTreeMap::new());
    }
    let found: Annotated = serde_json::from_str(&text(path)?).map_err(broken(path))?;
    Ok(found.annotations.unwrap_or_default())
}

/// The control group that the container whose bundle is at `path` names; empty where there is none.
pub fn cgroups_path(path: &Path) -> String {
    let read: Option<Value> = text(path).ok().and_then(|text| serde_json::from_str(&text).ok());
    let named = read.as_ref().and_then(|read| read.pointer("/linux/cgroupsPath")?.as_str());
    named.unwrap_or_default().to_owned()
}

fn text(path: &Path) -> Result<String> {
    let file = path.join("config.json");
    let mut text = String::new();
    let read = File::open(&file)
        .and_then(|opened| opened.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text));
    read.map_err(ShimError::host(format!("cannot read {}", file.display())))?;
    match text.len() as u64 > CONFIG_BYTES_MAX {
        false => Ok(text),
        true => Err(ShimError::invalid(format!(
            "{} is longer than {} MiB",
            file.display(),
            CONFIG_BYTES_MAX >> 20
        ))),
    }
}

fn broken(path: &Path) -> impl FnOnce(serde_json::Error) -> ShimError {
    let path = path.display().to_string();
    move |error| ShimError::invalid(format!("{path}/config.json is no specification: {error}"))
}
