//! Image files: layers with honest digests around them, whole archives, and
//! configurations.

use std::fs;
use std::path::Path;

use exocell_images::{Digest, ImageConfig, ImportLimits, Silent, Source, Store};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Bytes of a tar header.
const BLOCK: usize = 512;

/// What one input may cost.
fn limits() -> ImportLimits {
    ImportLimits {
        bytes_max: 4 << 20,
        apparent_bytes_max: 1 << 30,
        entries_max: 1000,
        ..ImportLimits::default()
    }
}

/// A tar layer in an image whose digests are right. The first byte says
/// whether the headers' checksums are put right too.
pub fn layer(bytes: &[u8]) {
    let (choice, tar) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let mut tar = tar.to_vec();
    if choice & 1 == 0 {
        mend_checksums(&mut tar);
    }
    let folder = scratch();
    let layout = folder.path().join("layout");
    write_layout(&layout, &tar);
    import(&folder, &Source::Layout(layout));
}

/// A whole archive, as it came.
pub fn archive(bytes: &[u8]) {
    let folder = scratch();
    let file = folder.path().join("archive");
    fs::write(&file, bytes).expect("a file");
    import(&folder, &Source::Archive(file));
}

/// An image's configuration document, with honest digests around it.
pub fn config(bytes: &[u8]) {
    let folder = scratch();
    let layout = folder.path().join("layout");
    let tar = plain_tar();
    write_image(&layout, &tar, bytes);
    import(&folder, &Source::Layout(layout));
}

fn scratch() -> TempDir {
    // In memory where there is such a place: an import waits for the disk.
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a temporary directory")
}

/// Imports into a fresh store. A refusal must leave it empty.
fn import(folder: &TempDir, source: &Source) {
    let store = Store::open(folder.path().join("store")).expect("a store");
    let tag = "fuzz:latest".parse().expect("a name");
    let outcome = store.import(source, Some(&tag), &limits(), &mut Silent);
    let count = store.list().expect("the store can be listed").len();
    assert_eq!(count, usize::from(outcome.is_ok()), "{outcome:?}");
    let left = fs::read_dir(store.root().join("tmp")).expect("the store's scratch").count();
    assert_eq!(left, 0, "an import leaves nothing behind");
}

fn write_layout(layout: &Path, tar: &[u8]) {
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [Digest::of(tar)] },
    });
    write_image(layout, tar, config.to_string().as_bytes());
}

fn write_image(layout: &Path, tar: &[u8], config: &[u8]) {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).expect("a directory");
    let put = |bytes: &[u8]| -> Value {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes).expect("a blob");
        json!({ "mediaType": "application/octet-stream", "digest": digest, "size": bytes.len() })
    };
    let (config, tar) = (put(config), put(tar));
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [tar] });
    let manifest = put(manifest.to_string().as_bytes());
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), index.to_string()).expect("the index");
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("a file");
}

/// Corrects the checksum of each header that is where one is expected.
fn mend_checksums(tar: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = tar.get_mut(at..at + BLOCK) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let size = std::str::from_utf8(&header[124..135]).unwrap_or_default();
        let size = usize::from_str_radix(size.trim_matches(['\0', ' ']), 8).unwrap_or(0);
        at = at.saturating_add(BLOCK).saturating_add(size.div_ceil(BLOCK).saturating_mul(BLOCK));
    }
}

/// One tar entry with its content, without the checksum.
fn entry(kind: u8, name: &str, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    header[136..147].copy_from_slice(b"00000000001");
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header[257..265].copy_from_slice(b"ustar\x0000");
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(BLOCK), 0);
    header
}

fn tar(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = entries.concat();
    bytes.resize(bytes.len() + 2 * BLOCK, 0);
    mend_checksums(&mut bytes);
    bytes
}

fn plain_tar() -> Vec<u8> {
    tar(&[entry(b'5', "d/", "", b""), entry(b'0', "d/f", "", b"content")])
}

pub fn layer_seeds() -> Vec<Vec<u8>> {
    let pax = b"22 path=a-longer-name\n18 SCHILY.xattr.user.a=b\n";
    let layers = [
        plain_tar(),
        tar(&[entry(b'0', "f", "", b"x"), entry(b'1', "g", "f", b""), entry(b'2', "s", "f", b"")]),
        tar(&[entry(b'x', "p", "", pax), entry(b'0', "short", "", b"x")]),
        tar(&[entry(b'L', "././@LongLink", "", &[b'n'; 200]), entry(b'0', "n", "", b"x")]),
        tar(&[entry(b'5', "d/", "", b""), entry(b'0', "d/.wh..wh..opq", "", b"")]),
        tar(&[entry(b'6', "fifo", "", b""), entry(b'3', "null", "", b"")]),
    ];
    layers.into_iter().map(|layer| [vec![0], layer].concat()).collect()
}

pub fn archive_seeds() -> Vec<Vec<u8>> {
    let layer = plain_tar();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["sh"] },
        "rootfs": { "type": "layers", "diff_ids": [Digest::of(&layer)] },
    });
    let manifest = json!([{ "Config": "c.json", "RepoTags": ["a:b"], "Layers": ["l.tar"] }]);
    let docker = tar(&[
        entry(b'0', "l.tar", "", &layer),
        entry(b'0', "c.json", "", config.to_string().as_bytes()),
        entry(b'0', "manifest.json", "", manifest.to_string().as_bytes()),
    ]);
    vec![docker, layer]
}

pub fn config_seeds() -> Vec<Vec<u8>> {
    let whole = json!({
        "architecture": "amd64", "os": "linux",
        "config": ImageConfig::default(),
        "rootfs": { "type": "layers", "diff_ids": [Digest::of(&plain_tar())] },
    });
    vec![whole.to_string().into_bytes()]
}
