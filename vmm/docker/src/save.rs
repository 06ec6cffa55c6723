//! `GET /images/get`, `GET /images/{name}/get` and `GET /containers/{id}/export`:
//! files out of the store and out of containers, as tar streams.
//!
//! The store keeps an image as one file system, not as the layers that it came
//! in. So what is saved is an image of one layer, which a cell without a program
//! packs; its id is another one than the image's.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::sync::Arc;

use exocell_cell::agent::client;
use exocell_cell::archive;
use exocell_cell::images::{Digest, Hashing, ImageRecord, Reference, Store, private};
use exocell_cell::{CellError, Layout};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use crate::archive::local;
use crate::containers::Containers;
use crate::error::{ApiError, ApiResult};
use crate::http::{Body, BodyWriter, Response, stream};
use crate::place::Place;
use crate::reach::{self, Reach};
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

/// An image that is ready to be sent.
pub(crate) struct Saved {
    tags: Vec<String>,
    /// Its configuration.
    pub document: Vec<u8>,
    pub layer: File,
    pub diff_id: Digest,
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

/// The image called `name`, packed. Blocks.
pub(crate) fn packed(layout: &Layout, name: &str) -> ApiResult<Saved> {
    let store = Store::open(layout.images())?;
    let (image, document) = (store.resolve(name)?, store.inspect(name)?);
    pack(layout, name, &image, &document)
}

fn pack(layout: &Layout, name: &str, image: &ImageRecord, document: &str) -> ApiResult<Saved> {
    let broken = |error: &dyn std::fmt::Display| {
        ApiError::internal(format!("the image {name} cannot be packed: {error}"))
    };
    let reach = reach::image(layout, &image.id.to_string())?;
    let folder = Containers::root(layout);
    let layer = private::folder(&folder).and_then(|()| tempfile::tempfile_in(folder));
    let mut layer = layer.map_err(|error| broken(&error))?;
    unpack_into(&reach, &mut layer).map_err(|error| broken(&error))?;
    drop(reach);
    let diff_id = digest(&mut layer).map_err(|error| broken(&error))?;
    let document = one_layer(document, diff_id).map_err(|error| broken(&error))?;
    Ok(Saved { tags: tags_of(name, image), document, layer, diff_id })
}

fn unpack_into(reach: &Reach, layer: &mut File) -> io::Result<()> {
    let guest = reach.guest().map_err(|error| io::Error::other(error.message))?;
    let mut out = io::BufWriter::new(layer);
    client::download_layer(&guest, &guest, &mut out, LAYER_BYTES_MAX).map_err(io::Error::other)?;
    out.flush()
}

fn digest(file: &mut File) -> io::Result<Digest> {
    file.rewind()?;
    let mut read = Hashing::new(&mut *file);
    io::copy(&mut read, &mut io::sink())?;
    let digest = read.digest();
    file.rewind()?;
    Ok(digest)
}

/// The image's own configuration, for the one layer.
fn one_layer(document: &str, diff_id: Digest) -> serde_json::Result<Vec<u8>> {
    let mut document: Value = serde_json::from_str(document)?;
    document["rootfs"] = json!({ "type": "layers", "diff_ids": [diff_id.to_string()] });
    // Its steps stood for layers.
    document["history"] = json!([{ "created_by": "docker save", "comment": "one layer" }]);
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
    for mut image in saved {
        let config = format!("{}.json", Digest::of(&image.document).hex());
        let layer = format!("{}/layer.tar", image.diff_id.hex());
        add(&mut archive, &config, image.document.len() as u64, image.document.as_slice())?;
        let bytes = image.layer.metadata()?.len();
        add(&mut archive, &layer, bytes, &mut image.layer)?;
        items.push(json!({ "Config": config, "RepoTags": image.tags, "Layers": [layer] }));
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
        let mut layer = tempfile::tempfile().unwrap();
        layer.write_all(b"a layer").unwrap();
        let diff_id = digest(&mut layer).unwrap();
        assert_eq!(diff_id, Digest::of(b"a layer"));
        let document = one_layer(r#"{"config":{"Cmd":["sh"]},"rootfs":{}}"#, diff_id).unwrap();
        let saved = Saved { tags: vec!["a:1".into()], document: document.clone(), layer, diff_id };
        let mut out = Vec::new();
        write_archive(vec![saved], &mut out).unwrap();
        let mut found = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(out.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.insert(name, content);
        }
        let manifest: Value = serde_json::from_slice(&found["manifest.json"]).unwrap();
        let part = |value: &Value| found[value.as_str().expect("a name")].clone();
        assert_eq!(part(&manifest[0]["Layers"][0]), b"a layer");
        assert_eq!(part(&manifest[0]["Config"]), document);
        assert_eq!(manifest[0]["RepoTags"], json!(["a:1"]));
        let config: Value = serde_json::from_slice(&document).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!([diff_id.to_string()]));
        assert_eq!(config["config"]["Cmd"], json!(["sh"]));
    }
}
