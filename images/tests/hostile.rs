//! Hostile images, each with its error; the store stays as it was.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use exocell_images::{ImageConfig, ImageError, ImportLimits, Silent, Source, layout_server};
use support::{Bench, Image, Layer, gzip, zstd};
use tar::EntryType;

/// Imports one layer, which must be refused, and returns why.
fn refused(layer: Layer) -> ImageError {
    refused_image(&Image::plain(vec![layer]), &ImportLimits::default())
}

fn refused_image(image: &Image, limits: &ImportLimits) -> ImageError {
    let bench = Bench::default();
    let error = bench.import_limited(image, limits).expect_err("this image must be refused");
    assert_eq!(bench.leftovers(), 0, "the temporary file must be gone");
    assert!(bench.store.list().unwrap().is_empty());
    assert_eq!(fs::read_dir(bench.store.root().join("blobs/sha256")).unwrap().count(), 0);
    error
}

macro_rules! assert_error {
    ($error:expr, $pattern:pat) => {
        let error = $error;
        assert!(matches!(error, $pattern), "{error:?}");
        assert!(error.to_string().len() < 500, "{error}");
    };
}

#[test]
fn names_that_leave_the_image() {
    for name in ["../etc/passwd", "a/../../b", "/etc/passwd", ".wh...", "a/.wh..", ".wh."] {
        assert_error!(refused(Layer::default().file(name, b"x")), ImageError::UnsafePath { .. });
    }
    assert_error!(
        refused(Layer::default().pax(&[("path", b"a/../../b")]).file("x", b"")),
        ImageError::UnsafePath { .. }
    );
}

#[test]
fn links_that_lead_nowhere_or_out() {
    let hard = |name, target| Layer::default().file("f", b"").dir("d").hard_link(name, target);
    assert_error!(refused(hard("x", "missing")), ImageError::BadHardLink { .. });
    assert_error!(refused(hard("x", "d")), ImageError::BadHardLink { .. });
    assert_error!(refused(hard("f", "f")), ImageError::BadHardLink { .. });
    assert_error!(refused(hard("x", "../../etc/passwd")), ImageError::UnsafePath { .. });
    assert_error!(refused(hard("x", "/etc/passwd")), ImageError::UnsafePath { .. });
    let looped = Layer::default().symlink("a", "b").symlink("b", "a").file("a/x", b"");
    assert_error!(refused(looped), ImageError::LinkLoop { .. });
    let through = Layer::default().file("f", b"").file("f/x", b"");
    assert_error!(refused(through), ImageError::ParentNotDirectory { .. });
    assert_error!(refused(Layer::default().symlink("a", "")), ImageError::Malformed { .. });
}

#[test]
fn links_out_of_the_image_stay_in_it() {
    let host = tempfile::tempdir().unwrap();
    let target = host.path().to_str().unwrap();
    let layer = Layer::default().symlink("out", target).file("out/file", b"x");
    let bench = Bench::default();
    bench.import(&Image::plain(vec![layer])).unwrap();
    assert_eq!(fs::read_dir(host.path()).unwrap().count(), 0);
}

#[test]
fn device_nodes() {
    for kind in [EntryType::Char, EntryType::Block] {
        let layer = Layer::default().entry(kind, "dev/mem", "", 0o600, b"");
        assert_error!(refused(layer), ImageError::DeviceNode { .. });
    }
    assert_error!(
        refused(Layer::default().entry(EntryType::Block, "dev/zero", "", 0, b"")),
        ImageError::DeviceNode { .. }
    );
}

#[test]
fn bombs() {
    let zeros = vec![0; 8 << 20];
    let bytes = Layer::default().file("zeros", &zeros).bytes();
    let limits = ImportLimits { ratio_free_bytes: 1 << 20, ratio_max: 100, ..Default::default() };
    for pack in [gzip, zstd] {
        let image = Image::new(vec![(bytes.clone(), pack(&bytes))]);
        assert_error!(refused_image(&image, &limits), ImageError::Bomb { .. });
    }
}

/// What is in a layout is opened only if it is a regular file of it, and nobody waits for more.
#[test]
fn layouts_with_other_things_than_files() {
    let bench = Bench::default();
    let secret = bench.path("secret");
    std::fs::write(&secret, b"secret").unwrap();
    let make = |kind: &str, at: &std::path::Path| {
        std::fs::remove_file(at).unwrap();
        match kind {
            "fifo" => {
                assert!(std::process::Command::new("mkfifo").arg(at).status().unwrap().success())
            }
            "folder" => std::fs::create_dir(at).unwrap(),
            "link" => std::os::unix::fs::symlink(&secret, at).unwrap(),
            _ => std::os::unix::fs::symlink("../../../secret", at).unwrap(),
        }
    };
    for kind in ["fifo", "folder", "link", "relative"] {
        let image = Image::plain(vec![Layer::default().file("a", b"x")]);
        let layer = image.manifest["layers"][0]["digest"].as_str().unwrap()[7..].to_owned();
        let manifest = image.index["manifests"][0]["digest"].as_str().unwrap()[7..].to_owned();
        for name in [
            "index.json".to_owned(),
            format!("blobs/sha256/{manifest}"),
            format!("blobs/sha256/{layer}"),
        ] {
            let layout = bench.path("layout");
            std::fs::remove_dir_all(&layout).ok();
            image.write_layout(&layout);
            make(kind, &layout.join(&name));
            let error = bench
                .import_source(&Source::Layout(layout.clone()), &ImportLimits::default())
                .unwrap_err();
            assert!(matches!(error, ImageError::NotAnImage { .. }), "{kind} {name}: {error:?}");
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(&(name.len() as u16).to_le_bytes()).unwrap();
            theirs.write_all(name.as_bytes()).unwrap();
            theirs.shutdown(Shutdown::Write).unwrap();
            layout_server(&ours, &layout).unwrap();
            drop(ours);
            let mut answer = Vec::new();
            theirs.read_to_end(&mut answer).unwrap();
            assert_eq!(answer[..4], u32::MAX.to_le_bytes(), "{kind} {name}");
            assert!(String::from_utf8_lossy(&answer).contains("not a regular file"));
        }
    }
}

/// One small layer listed often is one layer's packed bytes, and its unpacked bytes each time.
#[test]
fn bombs_of_many_layers() {
    let bytes = Layer::default().file("zeros", &vec![0; 256 << 10]).bytes();
    let noise: Vec<u8> = (0..30_000u32).flat_map(|i| (i * i).to_le_bytes()).collect();
    let limits = ImportLimits { ratio_free_bytes: 1 << 20, ratio_max: 100, ..Default::default() };
    let bomb = Image::new(vec![(bytes.clone(), gzip(&bytes)); 16]);
    assert_error!(refused_image(&bomb, &limits), ImageError::Bomb { .. });
    // Others that bring enough of their own are what the ratio is of, too.
    let other = Layer::default().file("noise", &noise).bytes();
    let mut layers = vec![(bytes.clone(), gzip(&bytes)); 16];
    layers.insert(0, (other.clone(), other));
    Bench::default().import_limited(&Image::new(layers), &limits).unwrap();
}

#[test]
fn limits() {
    let image = || {
        let layer = Layer::default().file("a/b/c", &[1; 20_000]).file("d", b"");
        Image::plain(vec![layer.pax(&[("SCHILY.xattr.user.x", &[1; 900])]).file("e", b"")])
    };
    let default = ImportLimits::default;
    for limits in [
        ImportLimits { bytes_max: 10_000, ..default() },
        ImportLimits { apparent_bytes_max: 10_000, ..default() },
        ImportLimits { entries_max: 2, ..default() },
        ImportLimits { path_bytes_max: 3, ..default() },
        ImportLimits { depth_max: 1, ..default() },
        ImportLimits { xattr_bytes_max: 500, ..default() },
        ImportLimits { extension_bytes_max: 500, ..default() },
        ImportLimits { layers_max: 0, ..default() },
        ImportLimits { document_bytes_max: 10, ..default() },
    ] {
        assert_error!(refused_image(&image(), &limits), ImageError::LimitExceeded { .. });
    }
    let bench = Bench::default();
    bench.import(&image()).unwrap();
}

#[test]
fn lying_digests_and_sizes() {
    let layer = || vec![Layer::default().file("a", b"x")];
    let mut changed = Image::plain(layer());
    let digest = changed.manifest["layers"][0]["digest"].as_str().unwrap()[7..].to_owned();
    changed.blobs.get_mut(&digest).unwrap()[600] ^= 1;
    assert_error!(
        refused_image(&changed, &ImportLimits::default()),
        ImageError::DigestMismatch { .. }
    );

    let bytes = Layer::default().file("a", b"x").bytes();
    let other = Layer::default().file("a", b"y").bytes();
    let lying = Image::new(vec![(other, gzip(&bytes))]);
    assert_error!(
        refused_image(&lying, &ImportLimits::default()),
        ImageError::DigestMismatch { .. }
    );

    for size in [1u64, 1 << 40] {
        let mut image = Image::plain(layer());
        image.manifest["layers"][0]["size"] = size.into();
        image.seal();
        let error = refused_image(&image, &ImportLimits::default());
        assert_error!(error, ImageError::SizeMismatch { .. } | ImageError::Malformed { .. });
    }
    let mut image = Image::plain(layer());
    image.manifest["config"]["digest"] = image.manifest["layers"][0]["digest"].clone();
    image.seal();
    assert_error!(
        refused_image(&image, &ImportLimits::default()),
        ImageError::SizeMismatch { .. } | ImageError::DigestMismatch { .. }
    );
    let mut image = Image::plain(layer());
    image.manifest["layers"][0]["digest"] = "sha256:../../../etc/passwd".into();
    image.seal();
    assert_error!(refused_image(&image, &ImportLimits::default()), ImageError::Malformed { .. });
}

#[test]
fn corrupt_layers() {
    let bytes = Layer::default().file("a", &[1; 4000]).bytes();
    for broken in [&bytes[..700], &b"not a tar archive at all".repeat(50)[..], &gzip(&bytes)[..40]]
    {
        let image = Image::new(vec![(broken.to_vec(), broken.to_vec())]);
        let error = refused_image(&image, &ImportLimits::default());
        assert_error!(error, ImageError::Malformed { .. } | ImageError::Io { .. });
    }
    let xz = b"\xfd7zXZ\0rest".to_vec();
    assert_error!(
        refused_image(&Image::new(vec![(xz.clone(), xz)]), &ImportLimits::default()),
        ImageError::Unsupported { .. }
    );
}

#[test]
fn wrong_platforms() {
    let arm = Image::for_architecture(vec![], "arm64");
    assert_error!(refused_image(&arm, &ImportLimits::default()), ImageError::WrongPlatform { .. });
    let mut index = Image::plain(vec![]);
    let mut entry = index.index["manifests"][0].clone();
    entry["platform"] = serde_json::json!({"os": "windows", "architecture": "amd64"});
    let inner = support::put(
        &mut index.blobs,
        serde_json::to_vec(&serde_json::json!({"manifests": [entry]})).unwrap(),
    );
    index.index = serde_json::json!({"manifests": [inner]});
    assert_error!(
        refused_image(&index, &ImportLimits::default()),
        ImageError::WrongPlatform { .. }
    );
}

#[test]
fn an_index_that_contains_itself_ends() {
    let mut image = Image::plain(vec![]);
    for _ in 0..8 {
        let inner = serde_json::json!({"manifests": image.index["manifests"]});
        let descriptor = support::put(&mut image.blobs, serde_json::to_vec(&inner).unwrap());
        image.index = serde_json::json!({"manifests": [descriptor]});
    }
    assert_error!(refused_image(&image, &ImportLimits::default()), ImageError::Malformed { .. });
}

#[test]
fn files_that_are_no_images() {
    let bench = Bench::default();
    let path = bench.path("file");
    for (content, what) in
        [(&b""[..], "empty"), (b"hello", "short"), (&[7; 2000], "noise"), (&gzip(b"x"), "gzip")]
    {
        fs::write(&path, content).unwrap();
        let error = bench
            .import_source(&Source::Archive(path.clone()), &ImportLimits::default())
            .unwrap_err();
        assert!(
            matches!(error, ImageError::NotAnImage { .. } | ImageError::Unsupported { .. }),
            "{what}: {error:?}"
        );
    }
    let missing = Source::detect(&bench.path("missing"), ImageConfig::default());
    assert!(matches!(missing, Err(ImageError::Io { .. })));
}

#[test]
fn layers_that_claim_huge_sparse_files_cost_nothing() {
    let map = b"1\n1099511627776\n0\n";
    let mut data = map.to_vec();
    data.resize(512, 0);
    let records: [(&str, &[u8]); 4] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"huge"),
        ("GNU.sparse.realsize", b"1099511627776"),
    ];
    let bench = Bench::default();
    let image = Image::plain(vec![Layer::default().pax(&records).file("x", &data)]);
    let record = bench.import(&image).unwrap();
    assert!(record.size_bytes < 1 << 20);
    let limits = ImportLimits { apparent_bytes_max: 1 << 30, ..Default::default() };
    assert_error!(refused_image(&image, &limits), ImageError::LimitExceeded { .. });
}

#[test]
fn binary_attributes_come_through_whole() {
    let capability = b"\x01\x00\x00\x02\n\n=\x00\x00 5 x=\x00\x00\x00\x00\x00\x00\x00";
    let layer = Layer::default()
        .pax(&[("SCHILY.xattr.security.capability", capability)])
        .file("ping", b"elf");
    let bench = Bench::default();
    let record = bench.store.import(
        &{
            let layout = bench.path("layout");
            Image::plain(vec![layer]).write_layout(&layout);
            Source::Layout(layout)
        },
        None,
        &ImportLimits::default(),
        &mut Silent,
    );
    let erofs = fs::read(record.unwrap().erofs).unwrap();
    assert!(erofs.windows(capability.len()).any(|window| window == capability));
}
