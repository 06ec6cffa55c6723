//! `docker save` archives (Docker image specification v1.2, manifest.json).

use serde::Deserialize;

use super::files::Files;
use super::{LayerPlan, Plan, parse};
use crate::config::ConfigDocument;
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::reference::Reference;
use crate::{Digest, digest};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Item {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Item {
    fn is_named(&self, wanted: &Reference) -> bool {
        let tags = self.repo_tags.iter().flatten();
        tags.filter_map(|tag| tag.parse::<Reference>().ok()).any(|tag| &tag == wanted)
    }
}

/// Plans the import of an archive; `wanted` chooses if it holds several.
pub(super) fn plan(
    files: Files,
    wanted: Option<&Reference>,
    limits: &ImportLimits,
) -> Result<Plan> {
    if !files.has("manifest.json") {
        let why =
            "it has neither index.json nor manifest.json; use `docker save` or an OCI archive"
                .into();
        return Err(ImageError::NotAnImage { path: files.path().to_path_buf(), why });
    }
    let items: Vec<Item> = parse(&files.document("manifest.json", limits)?, "manifest.json")?;
    let item = choose(&files, items, wanted)?;
    let config = files.document(&item.config, limits)?;
    check_config_name(&item.config, &config)?;
    let diff_ids = ConfigDocument::parse(&config)?.rootfs.diff_ids;
    if diff_ids.len() != item.layers.len() {
        let why =
            format!("it has {} layers, its configuration {}", item.layers.len(), diff_ids.len());
        return Err(ImageError::malformed("manifest.json", why));
    }
    let layer = |(name, diff_id)| LayerPlan { name, blob: None, diff_id };
    let layers = item.layers.into_iter().zip(diff_ids).map(layer).collect();
    Ok(Plan { config, layers, manifest: None, input: Box::new(files) })
}

/// The names of an archive's images; none where it has no `manifest.json`.
pub(super) fn names(files: &Files, limits: &ImportLimits) -> Result<Vec<String>> {
    if !files.has("manifest.json") {
        return Ok(Vec::new());
    }
    let items: Vec<Item> = parse(&files.document("manifest.json", limits)?, "manifest.json")?;
    Ok(items.into_iter().flat_map(|item| item.repo_tags.unwrap_or_default()).collect())
}

fn choose(files: &Files, mut items: Vec<Item>, wanted: Option<&Reference>) -> Result<Item> {
    if items.len() > 1 {
        let named =
            items.iter().position(|item| wanted.is_some_and(|wanted| item.is_named(wanted)));
        let Some(index) = named else {
            let names: Vec<_> =
                items.iter().flat_map(|item| item.repo_tags.iter().flatten().cloned()).collect();
            let names = shown(names.join(", ").as_bytes());
            return Err(ImageError::SeveralImages { path: files.path().to_path_buf(), names });
        };
        return Ok(items.swap_remove(index));
    }
    items.pop().ok_or_else(|| ImageError::NotAnImage {
        path: files.path().to_path_buf(),
        why: "its manifest.json names no image".into(),
    })
}

/// The configuration's name is its digest.
fn check_config_name(name: &str, config: &[u8]) -> Result<()> {
    let file = name.rsplit('/').next().unwrap_or(name);
    match Digest::from_hex(file.strip_suffix(".json").unwrap_or(file)) {
        Some(expected) => digest::expect("the image configuration", expected, Digest::of(config)),
        None => Ok(()),
    }
}
