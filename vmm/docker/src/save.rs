//! `GET /images/get`, `GET /images/{name}/get` and `GET /containers/{id}/export`:
//! files out of the store and out of containers, as tar streams.
//!
//! The store keeps an image as file systems one over the other, not as the layers that it came in.
//! So what is saved has one layer for each file ([`exocell_cell::compose::layer`]), and another id
//! than the image. The store notes that: in this store it is the image itself when it comes back.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::sync::Arc;

use exocell_cell::agent::client;
use exocell_cell::images::compose::Layer;
use exocell_cell::images::{Digest, ImageRecord, Reference, Store};
use exocell_cell::{CellError, Layout, archive, compose};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use crate::archive::local;
use crate::error::{ApiError, ApiResult};
use crate::http::{Body, BodyWriter, Response, stream};
use crate::place::Place;
use crate::reach;
use crate::state::Server;

/// A guest cannot fill the host with one layer, in bytes.
const LAYER_BYTES_MAX: u64 = 64 << 30;
/// Images in one archive.
const IMAGES_MAX: usize = 64;

/// `GET /containers/{id}/export`: all its files, but what is mounted and what gives rights on a
/// host.
pub async fn export(server: &Arc<Server>, key: &str, place: &Place) -> ApiResult<Response> {
    let reach = reach::container(server, key, place).await?;
    let (reach, guest) = server
        .blocking(move |_| {
            let guest = reach.guest()?;
            Ok((reach, guest))
        })
        .await?;
    sent(server, move |out| {
        let packed = archive::passed(
            &archive::Names::of("/"),
            |mut write| {
                let sent = client::download_layer(&guest, &guest, &mut write, LAYER_BYTES_MAX);
                sent.map(drop).map_err(local)
            },
            out,
        );
        drop(reach);
        packed.map_err(io::Error::other)
    })
}

/// A reply that `write` writes, on a thread of its own: a client may take its
/// time, and hold it.
fn sent(
    server: &Arc<Server>,
    write: impl FnOnce(&mut BodyWriter) -> io::Result<()> + Send + 'static,
) -> ApiResult<Response> {
    let (sender, body) = Body::stream();
    server.begin(move |_| {
        let failures = sender.clone();
        if let Err(error) = write(&mut sender.writer()) {
            failures.fail(error);
        }
    })?;
    Ok(stream("application/x-tar", body))
}

/// An image that is ready to be written to an archive.
struct Saved {
    tags: Vec<String>,
    /// Its configuration.
    document: Vec<u8>,
    layers: Vec<(Layer, File)>,
}

/// An archive as `docker save` makes them, of the images called `names`.
pub async fn save(server: &Arc<Server>, names: Vec<String>) -> ApiResult<Response> {
    if names.is_empty() || names.len() > IMAGES_MAX {
        return Err(ApiError::bad_request(format!("name 1 to {IMAGES_MAX} images (names)")));
    }
    let saved = server.blocking(move |server| pack_all(server.layout(), &names)).await?;
    sent(server, move |out| write_archive(saved, out))
}

/// Writes the same archive of the images called `names` to `out`. Blocks.
///
/// # Errors
/// No image is called so, or it cannot be packed or written.
pub fn save_to(layout: &Layout, names: &[String], out: &mut impl Write) -> Result<(), CellError> {
    let saved = pack_all(layout, names).map_err(|error| CellError::Usage(error.message))?;
    write_archive(saved, out).map_err(CellError::host("cannot write the archive"))
}

fn pack_all(layout: &Layout, names: &[String]) -> ApiResult<Vec<Saved>> {
    let store = Store::open(layout.images())?;
    // All are there, or nothing is begun.
    let found: Vec<_> = names
        .iter()
        .map(|name| Ok((name, store.resolve(name)?, store.inspect(name)?)))
        .collect::<ApiResult<_>>()?;
    let mut packed: Vec<(Digest, Saved)> = Vec::new();
    for (name, image, document) in &found {
        match packed.iter_mut().find(|(id, _)| *id == image.id) {
            // One image by another of its names.
            Some((_, saved)) => saved.tags.extend(tags_of(name, image)),
            None => packed.push((image.id, pack(layout, name, image, document)?)),
        }
    }
    for (_, saved) in &mut packed {
        saved.tags.sort();
        saved.tags.dedup();
    }
    Ok(packed.into_iter().map(|(_, saved)| saved).collect())
}

fn pack(layout: &Layout, name: &str, image: &ImageRecord, document: &str) -> ApiResult<Saved> {
    let broken = |error: &dyn std::fmt::Display| {
        ApiError::internal(format!("the image {name} cannot be packed: {error}"))
    };
    let store = Store::open(layout.images())?;
    let rootfs = store.open_rootfs(image)?;
    let pack_one = |number| {
        let to = store.scratch()?;
        compose::layer(&rootfs, number, false, &to).map(|layer| (layer, to))
    };
    let layers: Result<Vec<_>, _> = (0..rootfs.files().len()).map(pack_one).collect();
    let layers = layers.map_err(|error| broken(&error))?;
    let ids: Vec<Digest> = layers.iter().map(|(layer, _)| layer.diff_id).collect();
    let document = with_layers(document, &ids).map_err(|error| broken(&error))?;
    store.note_saved(image.id, Digest::of(&document))?;
    Ok(Saved { tags: tags_of(name, image), document, layers })
}

/// The image's own configuration, for these layers.
pub(crate) fn with_layers(document: &str, diff_ids: &[Digest]) -> serde_json::Result<Vec<u8>> {
    let mut document: Value = serde_json::from_str(document)?;
    document["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
    // Its steps stood for other layers.
    let steps = diff_ids.iter().map(|_| json!({ "created_by": "docker save" }));
    document["history"] = steps.collect();
    serde_json::to_vec(&document)
}

/// The name that the image was asked for by; none for an id.
fn tags_of(name: &str, image: &ImageRecord) -> Vec<String> {
    let tag = name.parse::<Reference>().map(|reference| reference.to_string());
    tag.into_iter().filter(|tag| image.tags.contains(tag)).collect()
}

fn write_archive(saved: Vec<Saved>, out: &mut impl Write) -> io::Result<()> {
    let mut archive = Builder::new(out);
    let mut items: Vec<Value> = Vec::new();
    let mut written = BTreeSet::new();
    for image in saved {
        let config = format!("{}.json", Digest::of(&image.document).hex());
        add(&mut archive, &config, image.document.len() as u64, image.document.as_slice())?;
        let mut names = Vec::new();
        for (layer, mut file) in image.layers {
            let name = format!("{}/layer.tar", layer.diff_id.hex());
            // Images of one archive share what they share here.
            if written.insert(layer.diff_id) {
                file.rewind()?;
                add(&mut archive, &name, layer.blob_bytes, &mut file)?;
            }
            names.push(name);
        }
        items.push(json!({ "Config": config, "RepoTags": image.tags, "Layers": names }));
    }
    let manifest = serde_json::to_vec(&items)?;
    add(&mut archive, "manifest.json", manifest.len() as u64, manifest.as_slice())?;
    archive.finish()
}

fn add<W: Write>(
    archive: &mut Builder<W>,
    name: &str,
    bytes: u64,
    content: impl Read,
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_size(bytes);
    archive.append_data(&mut header, name, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_names_its_parts() {
        let layer = |content: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(content).unwrap();
            let (digest, bytes) = (Digest::of(content), content.len() as u64);
            (Layer { diff_id: digest, bytes, blob: digest, blob_bytes: bytes }, file)
        };
        let layers = || vec![layer(b"a layer"), layer(b"another")];
        let ids = layers().iter().map(|(layer, _)| layer.diff_id).collect::<Vec<_>>();
        let document = with_layers(r#"{"config":{"Cmd":["sh"]},"rootfs":{}}"#, &ids).unwrap();
        let saved = |tag: &str| Saved {
            tags: vec![tag.into()],
            document: document.clone(),
            layers: layers(),
        };
        let mut out = Vec::new();
        write_archive(vec![saved("a:1"), saved("b:1")], &mut out).unwrap();
        let mut found = std::collections::BTreeMap::new();
        let mut names = Vec::new();
        for entry in tar::Archive::new(out.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            names.push(name.clone());
            found.insert(name, content);
        }
        let layers_there = names.iter().filter(|name| name.ends_with("layer.tar"));
        assert_eq!(layers_there.count(), 2, "{names:?}");
        let manifest: Value = serde_json::from_slice(&found["manifest.json"]).unwrap();
        let part = |value: &Value| found[value.as_str().expect("a name")].clone();
        assert_eq!(part(&manifest[0]["Layers"][0]), b"a layer");
        assert_eq!(part(&manifest[1]["Layers"][1]), b"another");
        assert_eq!(part(&manifest[0]["Config"]), document);
        assert_eq!(manifest[0]["RepoTags"], json!(["a:1"]));
        let config: Value = serde_json::from_slice(&document).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!(ids));
        assert_eq!(config["config"]["Cmd"], json!(["sh"]));
    }
}
