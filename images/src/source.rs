//! Where images come from.

mod directory;
mod docker;
mod files;
mod oci;
mod registry;
mod remote;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::config::ImageConfig;
use crate::error::{ImageError, Result};
use crate::limits::ImportLimits;
use crate::reference::Reference;
use crate::walk::Found;
use crate::{Digest, digest};
pub(crate) use directory::{Extents, extents, import_directory, meta};
use files::Files;
pub use registry::{
    Connection, Credentials, Grant, Judge, Looked, Platform, ProxyOptions, Pushed, RegistryOptions,
    log_in, look, present, push,
};
use remote::{Distant, Remote};

/// An image that is to be imported.
#[derive(Debug, Clone)]
pub enum Source {
    /// A plain directory, which becomes the only layer. Nothing is followed
    /// out of it: other file systems mounted in it count as empty directories.
    Directory { path: PathBuf, config: ImageConfig },
    /// A directory in the OCI image layout.
    Layout(PathBuf),
    /// A tar file: `docker save`, or an OCI layout.
    Archive(PathBuf),
    /// A registry that speaks the OCI distribution API.
    Registry { reference: Reference, options: RegistryOptions },
}

impl Source {
    /// Tells what `path` is: a directory with an `index.json` and `blobs` is a
    /// layout, another directory is a root file system, a file an archive. No part of the path is
    /// a link, neither here nor when the source is read.
    pub fn detect(path: &Path, config: ImageConfig) -> Result<Self> {
        let found = Found::real(path).map_err(|error| ImageError::read(path, error))?;
        let path = path.to_path_buf();
        Ok(match found.is_directory() {
            true if path.join("index.json").is_file() && path.join("blobs").is_dir() => {
                Self::Layout(path)
            }
            true => Self::Directory { path, config },
            false => Self::Archive(path),
        })
    }
}

/// One layer of a [`Plan`].
pub(crate) struct LayerPlan {
    /// How the input names it.
    pub name: String,
    pub blob: Option<(Digest, u64)>,
    pub diff_id: Digest,
}

/// What an import will read.
pub(crate) struct Plan {
    /// The configuration's bytes; their digest is the image's id.
    pub config: Vec<u8>,
    pub layers: Vec<LayerPlan>,
    /// Digest of the manifest, if the input has one.
    pub manifest: Option<Digest>,
    pub input: Box<dyn Input>,
}

/// Opens the layers of a plan.
pub(crate) trait Input {
    fn open_layer(&self, layer: &LayerPlan) -> Result<Box<dyn Read + '_>>;
}

/// Reads what `source` holds, short of its layers. `None` for a directory.
pub(crate) fn plan(
    source: &Source,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Option<Plan>> {
    let plan = match source {
        Source::Directory { .. } => return Ok(None),
        Source::Layout(path) => oci::plan_files(Files::directory(path), wanted, limits)?,
        Source::Archive(path) => {
            let file = Found::real(path).and_then(|found| found.file());
            let file = file.map_err(|error| ImageError::read(path, error))?;
            return plan_archive(file, path, wanted, limits).map(Some);
        }
        Source::Registry { reference, options } => registry::plan(reference, options, limits)?,
    };
    bounded(plan, limits).map(Some)
}

/// The same of a tar file that is open.
pub(crate) fn plan_archive(
    file: File,
    path: &Path,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Plan> {
    let files = Files::archive(file, path, limits)?;
    let plan = match files.has("index.json") {
        true => oci::plan_files(files, wanted, limits)?,
        false => docker::plan(files, wanted, limits)?,
    };
    bounded(plan, limits)
}

/// The names that a tar file has for its images; none where it has no `manifest.json`.
pub(crate) fn archive_names(file: File, path: &Path, limits: &ImportLimits) -> Result<Vec<String>> {
    docker::names(&Files::archive(file, path, limits)?, limits)
}

/// The same of an OCI layout whose files another process hands over ([`layout_server`]).
pub(crate) fn plan_remote_layout(
    stream: UnixStream,
    path: &Path,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Plan> {
    let files = Files::remote(Remote::new(stream), path);
    bounded(oci::plan_files(files, wanted, limits)?, limits)
}

/// The same of an image in a registry that another process reaches ([`registry_server`]).
pub(crate) fn plan_remote(
    stream: UnixStream,
    version: &str,
    limits: &ImportLimits,
) -> Result<Plan> {
    let remote = Remote::new(stream);
    let bytes = {
        let mut stream = remote.open(&format!("manifests/{version}"))?;
        read_document(&mut *stream, "the manifest", limits)?
    };
    if let Ok(expected) = version.parse() {
        digest::expect("the manifest", expected, Digest::of(&bytes))?;
    }
    bounded(oci::plan_document(Box::new(Distant(remote)), bytes, limits)?, limits)
}

/// The tag or digest by which a registry knows what `reference` names.
#[must_use]
pub fn version(reference: &Reference) -> String {
    match (&reference.digest, &reference.tag) {
        (Some(digest), _) => digest.to_string(),
        (None, tag) => tag.clone().unwrap_or_else(|| "latest".into()),
    }
}

/// Hands the files of the OCI layout in the folder `path` over, as bytes that nobody looks into,
/// until the other side of `stream` is gone.
///
/// # Errors
/// The other side broke the protocol.
pub fn layout_server(stream: &UnixStream, path: &Path) -> io::Result<()> {
    remote::serve(stream, |name| {
        let digest = name.strip_prefix("blobs/sha256/").and_then(Digest::from_hex);
        if name != "index.json" && digest.is_none() {
            return Err(ImageError::malformed("the layout", "a file of it has another name"));
        }
        Ok(Box::new(files::open_member(path, name)?))
    })
}

/// Hands manifests and blobs of the repository that `reference` names over, as bytes that nobody
/// looks into, until the other side of `stream` is gone.
///
/// # Errors
/// The other side broke the protocol.
pub fn registry_server(
    stream: &UnixStream,
    reference: &Reference,
    options: &RegistryOptions,
) -> io::Result<()> {
    registry::serve(stream, reference, options)
}

fn bounded(plan: Plan, limits: &ImportLimits) -> Result<Plan> {
    let max = limits.layers_max;
    match plan.layers.len() > max {
        true => Err(ImageError::limit("the number of layers", "layers_max", max as u64)),
        false => Ok(plan),
    }
}

/// All of a small document.
fn read_document(stream: &mut dyn Read, what: &str, limits: &ImportLimits) -> Result<Vec<u8>> {
    let max = limits.document_bytes_max as u64;
    let mut bytes = Vec::new();
    stream
        .take(max + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| ImageError::io(format!("cannot read {what}"), error))?;
    if bytes.len() as u64 > max {
        return Err(ImageError::limit(what, "document_bytes_max", max));
    }
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::malformed(what, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_in_a_layout_show_nothing_of_the_host() {
        let place = tempfile::tempdir().unwrap();
        let (layout, host) = (place.path().join("layout"), place.path().join("host"));
        let name = format!("blobs/sha256/{}", Digest::of(b"x").hex());
        fs::create_dir(&layout).unwrap();
        fs::create_dir_all(host.join("sha256")).unwrap();
        fs::write(host.join(&name["blobs/".len()..]), "of the host").unwrap();
        fs::write(host.join("secret"), "of the host").unwrap();
        symlink(host.join("secret"), layout.join("index.json")).unwrap();
        symlink(&host, layout.join("blobs")).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| layout_server(&ours, &layout).unwrap());
            let remote = Remote::new(theirs);
            let read = |name: &str| {
                read_document(&mut *remote.open(name)?, name, &ImportLimits::default())
            };
            read("index.json").unwrap_err();
            read(&name).unwrap_err();
            fs::remove_file(layout.join("index.json")).unwrap();
            fs::write(layout.join("index.json"), "{}").unwrap();
            assert_eq!(read("index.json").unwrap(), b"{}");
            drop(remote);
        });
    }
}
