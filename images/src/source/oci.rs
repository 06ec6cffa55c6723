//! OCI indexes and manifests (OCI image-spec, image-index.md, manifest.md).

use std::collections::BTreeMap;
use std::io::Read;

use serde::Deserialize;

use super::files::Files;
use super::{Input, LayerPlan, Plan, parse, read_document};
use crate::Digest;
use crate::config::{ConfigDocument, check_platform};
use crate::digest;
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::reference::Reference;

/// Indexes inside one another.
const NESTING_MAX: usize = 4;
const REF_NAME: &str = "org.opencontainers.image.ref.name";
const FULL_NAME: &str = "io.containerd.image.name";

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// An index or a manifest; which one, its fields tell.
#[derive(Debug, Deserialize)]
struct Document {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// Opens what descriptors point to.
pub(super) trait Blobs: Input {
    fn manifest(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>>;
    fn blob(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>>;
}

impl Input for Files {
    fn open_layer(&self, layer: &LayerPlan) -> Result<Box<dyn Read + '_>> {
        self.open(&layer.name)
    }
}

impl Blobs for Files {
    fn manifest(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.blob(descriptor)
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.open(&blob_name(descriptor.digest))
    }
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Plans the import of a layout; `wanted` chooses if it holds several images.
pub(super) fn plan_files(
    files: Files,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Plan> {
    let index: Document = parse(&files.document("index.json", limits)?, "index.json")?;
    let descriptor = choose(&files, index.manifests.unwrap_or_default(), wanted)?;
    let bytes = fetch(&mut *files.manifest(&descriptor)?, &descriptor, "a manifest", limits)?;
    plan_document(Box::new(files), bytes, limits)
}

/// The image of a layout's index: the only one, the only one for our platform,
/// or the one with the wanted name.
fn choose(
    files: &Files,
    manifests: Vec<Descriptor>,
    wanted: Option<&Reference>,
) -> Result<Descriptor> {
    if manifests.len() > 1
        && manifests.iter().all(|manifest| manifest.platform.is_some() && name(manifest).is_none())
    {
        return pick_platform(manifests);
    }
    let named = |manifest: &Descriptor| wanted.is_some_and(|wanted| is_named(manifest, wanted));
    if manifests.len() > 1 {
        if let Some(found) = manifests.iter().find(|manifest| named(manifest)) {
            return Ok(found.clone());
        }
        let names: Vec<_> =
            manifests.iter().map(|manifest| name(manifest).unwrap_or("unnamed")).collect();
        let names = shown(names.join(", ").as_bytes());
        return Err(ImageError::SeveralImages { path: files.path().to_path_buf(), names });
    }
    manifests.into_iter().next().ok_or_else(|| ImageError::NotAnImage {
        path: files.path().to_path_buf(),
        why: "its index names no image".into(),
    })
}

fn name(manifest: &Descriptor) -> Option<&str> {
    let annotations = manifest.annotations.as_ref()?;
    annotations.get(FULL_NAME).or_else(|| annotations.get(REF_NAME)).map(String::as_str)
}

fn is_named(manifest: &Descriptor, wanted: &Reference) -> bool {
    let Some(name) = name(manifest) else { return false };
    name.parse().is_ok_and(|name: Reference| &name == wanted) || wanted.tag.as_deref() == Some(name)
}

fn pick_platform(manifests: Vec<Descriptor>) -> Result<Descriptor> {
    let fits = |manifest: &Descriptor| match &manifest.platform {
        Some(platform) => check_platform(&platform.os, &platform.architecture).is_ok(),
        None => true,
    };
    let offered: Vec<_> = manifests
        .iter()
        .filter_map(|manifest| manifest.platform.as_ref())
        .map(|platform| format!("{}/{}", platform.os, platform.architecture))
        .collect();
    manifests
        .into_iter()
        .find(fits)
        .ok_or_else(|| ImageError::WrongPlatform { found: shown(offered.join(", ").as_bytes()) })
}

/// Plans from a manifest's or index's bytes, whose digest is checked already.
pub(super) fn plan_document(
    blobs: Box<dyn Blobs>,
    mut bytes: Vec<u8>,
    limits: &ImportLimits,
) -> Result<Plan> {
    for _ in 0..NESTING_MAX {
        let document: Document = parse(&bytes, "the manifest")?;
        if let Some(manifests) = document.manifests {
            let descriptor = pick_platform(manifests)?;
            bytes = fetch(&mut *blobs.manifest(&descriptor)?, &descriptor, "a manifest", limits)?;
            continue;
        }
        let (Some(config), Some(layers)) = (document.config, document.layers) else {
            return Err(ImageError::malformed("the manifest", "it has no config or no layers"));
        };
        let manifest = Digest::of(&bytes);
        let config = fetch(&mut *blobs.blob(&config)?, &config, "the image configuration", limits)?;
        let layers = pair(&config, layers)?;
        return Ok(Plan { config, layers, manifest: Some(manifest), input: blobs });
    }
    Err(ImageError::malformed("the index", "indexes are nested too deeply"))
}

/// Joins the layers of a manifest with the diff ids of its configuration.
fn pair(config: &[u8], layers: Vec<Descriptor>) -> Result<Vec<LayerPlan>> {
    let diff_ids = ConfigDocument::parse(config)?.rootfs.diff_ids;
    if diff_ids.len() != layers.len() {
        let why = format!("it has {} layers, its configuration {}", layers.len(), diff_ids.len());
        return Err(ImageError::malformed("the manifest", why));
    }
    layers.into_iter().zip(diff_ids).map(|(layer, diff_id)| layer_plan(&layer, diff_id)).collect()
}

fn layer_plan(layer: &Descriptor, diff_id: Digest) -> Result<LayerPlan> {
    if layer.media_type.contains("encrypted") || layer.media_type.contains("foreign") {
        let what = format!("a layer of type `{}`", shown(layer.media_type.as_bytes()));
        return Err(ImageError::Unsupported {
            what,
            why: "its content is not in the image".into(),
        });
    }
    Ok(LayerPlan { name: blob_name(layer.digest), blob: Some((layer.digest, layer.size)), diff_id })
}

/// All of a document, checked against its descriptor.
fn fetch(
    stream: &mut dyn Read,
    descriptor: &Descriptor,
    what: &str,
    limits: &ImportLimits,
) -> Result<Vec<u8>> {
    let bytes = read_document(stream, what, limits)?;
    if bytes.len() as u64 != descriptor.size {
        let (expected, found) = (descriptor.size, bytes.len() as u64);
        return Err(ImageError::SizeMismatch { what: what.into(), expected, found });
    }
    digest::expect(what, descriptor.digest, Digest::of(&bytes))?;
    Ok(bytes)
}
