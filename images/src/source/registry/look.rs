//! What a registry says of itself and of an image, without the image: logins are tried, and
//! manifests are looked at.

use serde::{Deserialize, Serialize};

use super::{MANIFEST_TYPES, Registry, RegistryOptions};
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::reference::Reference;
use crate::source::{read_document, version};
use crate::{Digest, digest};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// What an image runs on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Platform {
    pub architecture: String,
    pub os: String,
    #[serde(rename = "os.version", skip_serializing_if = "String::is_empty")]
    pub os_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

/// An image as its registry has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looked {
    /// Of its manifest, or of its index.
    pub digest: Digest,
    pub media_type: String,
    /// Of the same, in bytes.
    pub size: u64,
    pub platforms: Vec<Platform>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: Option<String>,
    #[serde(default)]
    manifests: Vec<Entry>,
    config: Option<Config>,
}

#[derive(Deserialize)]
struct Entry {
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Config {
    digest: Digest,
}

/// Tries the credentials in `options` at `registry`, a host with or without a port.
///
/// # Errors
/// [`ImageError::Unauthorized`] where they are not taken; the network's.
pub fn log_in(registry: &str, options: &RegistryOptions) -> Result<()> {
    let (registry, repository) = (registry.to_owned(), String::new());
    let whole = Reference { registry, repository, tag: None, digest: None };
    Registry::new(&whole, options)?.get("", "*/*").map(drop)
}

/// Looks at an image in its registry.
///
/// # Errors
/// As of a pull.
pub fn look(reference: &Reference, options: &RegistryOptions) -> Result<Looked> {
    let (registry, limits) = (Registry::new(reference, options)?, ImportLimits::default());
    let read = |path: &str, what: &'static str| {
        read_document(&mut *registry.get(path, MANIFEST_TYPES)?, what, &limits)
    };
    let bytes = read(&format!("manifests/{}", version(reference)), "the manifest")?;
    let own = Digest::of(&bytes);
    if let Some(expected) = reference.digest {
        digest::expect("the manifest", expected, own)?;
    }
    let document = parse::<Document>("the manifest", &bytes)?;
    let platforms = match &document.config {
        Some(config) => {
            let config = read(&format!("blobs/{}", config.digest), "the configuration")?;
            vec![parse::<Platform>("the configuration", &config)?]
        }
        None => document.manifests.into_iter().filter_map(|entry| entry.platform).collect(),
    };
    let kind = if document.config.is_some() { MANIFEST } else { INDEX };
    let media_type = document.media_type.unwrap_or_else(|| kind.to_owned());
    Ok(Looked { digest: own, media_type, size: bytes.len() as u64, platforms })
}

fn parse<'a, T: Deserialize<'a>>(what: &'static str, bytes: &'a [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::malformed(what, error))
}
