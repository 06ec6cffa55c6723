//! Builds layers and images for the tests.
#![allow(dead_code)]

pub mod erofs;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use exocell_images::{Digest, ImageError, ImageRecord, ImportLimits, Silent, Source, Store};
use serde_json::json;

/// A layer that is put together entry by entry.
pub struct Layer(tar::Builder<Vec<u8>>);

impl Default for Layer {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Layer {
    /// Any entry; the name and link go in as they are.
    pub fn entry(
        mut self,
        kind: tar::EntryType,
        name: &str,
        link: &str,
        mode: u32,
        data: &[u8],
    ) -> Self {
        let mut header = tar::Header::new_gnu();
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        header.set_size(data.len() as u64);
        if kind.is_character_special() || kind.is_block_special() {
            header.set_device_major(u32::from(mode != 0)).unwrap();
            header.set_device_minor(u32::from(mode != 0) * 3).unwrap();
        }
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    pub fn file(self, name: &str, data: &[u8]) -> Self {
        self.entry(tar::EntryType::Regular, name, "", 0o644, data)
    }

    pub fn dir(self, name: &str) -> Self {
        self.entry(tar::EntryType::Directory, name, "", 0o755, b"")
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(tar::EntryType::Symlink, name, target, 0o777, b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(tar::EntryType::Link, name, target, 0o644, b"")
    }

    pub fn pax(mut self, records: &[(&str, &[u8])]) -> Self {
        self.0.append_pax_extensions(records.iter().copied()).unwrap();
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// The blobs and documents of an OCI image; a test may spoil any of them.
pub struct Image {
    pub blobs: BTreeMap<String, Vec<u8>>,
    pub manifest: serde_json::Value,
    pub index: serde_json::Value,
}

pub fn config(diff_ids: &[Digest], architecture: &str) -> Vec<u8> {
    serde_json::to_vec(&json!({"architecture": architecture, "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"], "WorkingDir": "/w", "User": "1:2",
            "Labels": {"a": "b"}, "ExposedPorts": {"80/tcp": {}}, "StopSignal": "SIGINT"},
        "rootfs": {"type": "layers", "diff_ids": diff_ids}}))
    .unwrap()
}

pub fn put(blobs: &mut BTreeMap<String, Vec<u8>>, bytes: Vec<u8>) -> serde_json::Value {
    let digest = Digest::of(&bytes);
    let descriptor =
        json!({"mediaType": "application/octet-stream", "digest": digest, "size": bytes.len()});
    blobs.insert(digest.hex(), bytes);
    descriptor
}

impl Image {
    /// From pairs of unpacked and packed layers.
    pub fn new(layers: Vec<(Vec<u8>, Vec<u8>)>) -> Self {
        Self::for_architecture(layers, "amd64")
    }

    pub fn plain(layers: Vec<Layer>) -> Self {
        Self::new(
            layers.into_iter().map(Layer::bytes).map(|bytes| (bytes.clone(), bytes)).collect(),
        )
    }

    pub fn for_architecture(layers: Vec<(Vec<u8>, Vec<u8>)>, architecture: &str) -> Self {
        let mut blobs = BTreeMap::new();
        let diff_ids: Vec<_> = layers.iter().map(|(tar, _)| Digest::of(tar)).collect();
        let config = put(&mut blobs, config(&diff_ids, architecture));
        let layers: Vec<_> =
            layers.into_iter().map(|(_, packed)| put(&mut blobs, packed)).collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        let mut image = Self { blobs, manifest, index: json!(null) };
        image.seal();
        image
    }

    /// Makes the index anew after the manifest was changed.
    pub fn seal(&mut self) {
        let manifest = put(&mut self.blobs, serde_json::to_vec(&self.manifest).unwrap());
        self.index = json!({"schemaVersion": 2, "manifests": [manifest]});
    }

    pub fn write_layout(&self, root: &Path) {
        let blobs = root.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(root.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        std::fs::write(root.join("index.json"), serde_json::to_vec(&self.index).unwrap()).unwrap();
        for (name, bytes) in &self.blobs {
            std::fs::write(blobs.join(name), bytes).unwrap();
        }
    }
}

/// A store and a scratch folder that go away together.
pub struct Bench {
    pub folder: tempfile::TempDir,
    pub store: Store,
}

impl Default for Bench {
    fn default() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store")).unwrap();
        Self { folder, store }
    }
}

impl Bench {
    pub fn import(&self, image: &Image) -> Result<ImageRecord, ImageError> {
        self.import_limited(image, &ImportLimits::default())
    }

    pub fn import_limited(
        &self,
        image: &Image,
        limits: &ImportLimits,
    ) -> Result<ImageRecord, ImageError> {
        let layout = self.path("layout");
        std::fs::remove_dir_all(&layout).ok();
        image.write_layout(&layout);
        self.import_source(&Source::Layout(layout), limits)
    }

    pub fn import_source(
        &self,
        source: &Source,
        limits: &ImportLimits,
    ) -> Result<ImageRecord, ImageError> {
        self.store.import(source, Some(&"test".parse().unwrap()), limits, &mut Silent)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Files that imports have left behind.
    pub fn leftovers(&self) -> usize {
        std::fs::read_dir(self.store.root().join("tmp")).unwrap().count()
    }

    /// Checks an image with fsck.erofs and extracts it; the folder.
    pub fn extract(&self, erofs: &Path) -> PathBuf {
        let target = self.path("extracted");
        std::fs::remove_dir_all(&target).ok();
        let output = Command::new("fsck.erofs")
            .arg(format!("--extract={}", target.display()))
            .arg(erofs)
            .output()
            .expect("fsck.erofs is missing: install erofs-utils");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        target
    }
}
