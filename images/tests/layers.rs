//! What comes out of an import is what the layers say.

mod support;

use std::fs;
use std::io::{Seek, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use exocell_images::build::{From, Job, Room, build};
use exocell_images::{ImageConfig, ImageError, ImportLimits, Note, Silent, Source};
use support::{Bench, Image, Layer, gzip, zstd};
use tar::EntryType;

#[test]
fn a_tree_survives_the_way_into_erofs() {
    let big: Vec<u8> = (0..1_000_003u32).flat_map(|i| i.to_le_bytes()).collect();
    let layer = Layer::default()
        .dir("etc/")
        .file("etc/small", b"hello\n")
        .file("etc/empty", b"")
        .file("etc/block", &[7; 4096])
        .file("etc/almost", &[8; 4095])
        .file("big", &big)
        .symlink("link", "/etc/small")
        .hard_link("etc/second", "etc/small")
        .entry(EntryType::Fifo, "pipe", "", 0o600, b"")
        .entry(EntryType::Regular, "mode", "", 0o1751, b"x");
    let bench = Bench::default();
    let record = bench.import(&Image::plain(vec![layer])).unwrap();
    let root = bench.extract(&record.erofs);
    assert_eq!(fs::read(root.join("etc/small")).unwrap(), b"hello\n");
    assert_eq!(fs::read(root.join("etc/second")).unwrap(), b"hello\n");
    assert_eq!(fs::read(root.join("etc/empty")).unwrap(), b"");
    assert_eq!(fs::read(root.join("etc/block")).unwrap(), [7; 4096]);
    assert_eq!(fs::read(root.join("etc/almost")).unwrap(), [8; 4095]);
    assert!(fs::read(root.join("big")).unwrap() == big);
    assert_eq!(fs::read_link(root.join("link")).unwrap().to_str(), Some("/etc/small"));
    assert!(fs::symlink_metadata(root.join("pipe")).unwrap().file_type().is_fifo());
    let mode = fs::metadata(root.join("mode")).unwrap();
    assert_eq!((mode.permissions().mode() & 0o7777, mode.mtime()), (0o1751, 1_700_000_000));
}

#[test]
fn the_configuration_is_read() {
    let bench = Bench::default();
    let record = bench.import(&Image::plain(vec![Layer::default()])).unwrap();
    let config = &record.config;
    assert_eq!((&*config.env[0], &*config.cmd[0]), ("PATH=/bin", "sh"));
    assert_eq!((&*config.working_dir, &*config.user), ("/w", "1:2"));
    assert_eq!(config.stop_signal.as_deref(), Some("SIGINT"));
    assert!(config.exposed_ports.contains("80/tcp"));
    assert_eq!(record.tags, ["test:latest"]);
    assert!(bench.store.inspect("test").unwrap().contains("diff_ids"));
}

#[test]
fn upper_layers_win() {
    let lower = Layer::default()
        .file("gone", b"1")
        .file("dir/old", b"2")
        .file("opaque/old", b"3")
        .file("changed", &[1; 9000])
        .file("type/inside", b"4")
        .file("shared", b"5");
    let upper = Layer::default()
        .file(".wh.gone", b"")
        .file("dir/new", b"6")
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/new", b"7")
        .file("changed", b"8")
        .file("type", b"9")
        .hard_link("again", "shared")
        .entry(EntryType::Char, "dir/old", "", 0, b"");
    let packed = |layer: Layer, pack: fn(&[u8]) -> Vec<u8>| {
        let bytes = layer.bytes();
        (bytes.clone(), pack(&bytes))
    };
    let bench = Bench::default();
    let image = Image::new(vec![packed(lower, gzip), packed(upper, zstd)]);
    let root = bench.extract(&bench.import(&image).unwrap().erofs);
    let read = |name: &str| fs::read(root.join(name)).ok();
    for (name, content) in [
        ("dir/new", b"6"),
        ("opaque/new", b"7"),
        ("changed", b"8"),
        ("type", b"9"),
        ("again", b"5"),
        ("shared", b"5"),
    ] {
        assert_eq!(read(name).as_deref(), Some(&content[..]), "{name}");
    }
    for name in ["gone", "dir/old", "opaque/old", "opaque/.wh..wh..opq", ".wh.gone"] {
        assert_eq!(read(name), None, "{name}");
    }
}

#[test]
fn a_name_that_would_hide_another_file_is_refused() {
    let bench = Bench::default();
    let source = bench.path("root");
    fs::create_dir_all(source.join("d")).unwrap();
    fs::write(source.join("d/.wh.f"), "kept?").unwrap();
    let directory = Source::Directory { path: source, config: ImageConfig::default() };
    let refused = bench.import_source(&directory, &ImportLimits::default()).unwrap_err();
    assert!(matches!(&refused, ImageError::UnsafePath { path, .. } if path == "d/.wh.f"));
    // What a cell holds comes as a stream, with nothing below it to be hidden.
    let made = |layer: Layer| {
        let file = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).and_then(|()| file.rewind()).unwrap();
            file
        };
        let job = Job {
            from: From::Layer(Box::default(), Note::default()),
            wanted: None,
            known: Vec::new(),
            limits: ImportLimits::default(),
            store: bench.path("store"),
        };
        let room = Room { image: file(b""), spool: file(b""), unpacked: None };
        build(&job, file(&layer.bytes()).into(), room, &mut Silent)
    };
    made(Layer::default().dir("d").file("d/wh.f", b"").file("d/x.wh.f", b"")).unwrap();
    for name in ["d/.wh.f", ".wh..wh..opq", "d/.wh."] {
        let refused = made(Layer::default().dir("d").file(name, b"")).unwrap_err();
        assert!(matches!(&refused, ImageError::UnsafePath { path, .. } if path == name));
    }
}

#[test]
fn several_gzip_members_are_one_layer() {
    let bytes = Layer::default().file("a", &[1; 5000]).bytes();
    let (left, right) = bytes.split_at(3000);
    let packed = [gzip(left), gzip(right)].concat();
    let bench = Bench::default();
    let record = bench.import(&Image::new(vec![(bytes.clone(), packed)])).unwrap();
    assert_eq!(fs::read(bench.extract(&record.erofs).join("a")).unwrap(), [1; 5000]);
}

#[test]
fn big_directories_and_long_names_work() {
    let mut layer = Layer::default();
    for index in 0..3000 {
        layer = layer.file(&format!("d/!{index:080}"), index.to_string().as_bytes());
    }
    let long = format!("{}/{}", "l".repeat(200), "n".repeat(250));
    layer = layer.pax(&[("path", long.as_bytes())]).file("short", b"long");
    let bench = Bench::default();
    let root = bench.extract(&bench.import(&Image::plain(vec![layer])).unwrap().erofs);
    assert_eq!(fs::read_dir(root.join("d")).unwrap().count(), 3000);
    assert_eq!(fs::read(root.join(format!("d/!{:080}", 2999))).unwrap(), b"2999");
    assert_eq!(fs::read(root.join(long)).unwrap(), b"long");
}

#[test]
fn holes_take_no_space() {
    let bench = Bench::default();
    let source = bench.path("root");
    fs::create_dir(&source).unwrap();
    let sparse = fs::File::create(source.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (1 << 30) - 3).unwrap();
    let source = Source::Directory { path: source, config: ImageConfig::default() };
    let record = bench.import_source(&source, &ImportLimits::default()).unwrap();
    assert!(record.size_bytes < 1 << 20, "{}", record.size_bytes);
    assert!(fs::metadata(&record.erofs).unwrap().len() > 1 << 30);
}

#[test]
fn replaced_files_give_their_blocks_back() {
    let layers = (0..8u8).map(|i| Layer::default().file("f", &vec![i + 1; 1 << 20])).collect();
    let bench = Bench::default();
    let record = bench.import(&Image::plain(layers)).unwrap();
    assert!(record.size_bytes < 2 << 20, "{}", record.size_bytes);
    assert_eq!(fs::read(bench.extract(&record.erofs).join("f")).unwrap(), vec![8; 1 << 20]);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let image = Image::plain(vec![Layer::default().file("a/b", &[3; 10_000]).symlink("c", "a")]);
    let bytes: Vec<_> = (0..2)
        .map(|_| {
            let bench = Bench::default();
            fs::read(bench.import(&image).unwrap().erofs).unwrap()
        })
        .collect();
    assert!(bytes[0] == bytes[1]);
}

#[test]
fn archives_of_gnu_tar_are_read() {
    let bench = Bench::default();
    let tree = bench.path("tree");
    fs::create_dir_all(tree.join("x".repeat(180))).unwrap();
    fs::write(tree.join("x".repeat(180)).join("y".repeat(180)), b"deep").unwrap();
    let sparse = fs::File::create(tree.join("sparse")).unwrap();
    for index in 0..40u64 {
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", index << 20).unwrap();
    }
    for format in ["gnu", "pax", "ustar"] {
        let archive = bench.path("tree.tar");
        let sparse_flag = if format == "ustar" { "--format=pax" } else { "-S" };
        let output = std::process::Command::new("tar")
            .args([&format!("--format={format}"), sparse_flag, "-cf"])
            .arg(&archive)
            .args(["-C", tree.to_str().unwrap(), "."])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let bytes = fs::read(&archive).unwrap();
        let record = bench.import(&Image::new(vec![(bytes.clone(), bytes)])).unwrap();
        let root = bench.extract(&record.erofs);
        assert!(
            fs::read(root.join("sparse")).unwrap() == fs::read(tree.join("sparse")).unwrap(),
            "{format}"
        );
        assert_eq!(fs::read(root.join("x".repeat(180)).join("y".repeat(180))).unwrap(), b"deep");
        assert!(record.size_bytes < 1 << 20, "{format}: {}", record.size_bytes);
    }
}

#[test]
fn docker_archives_and_oci_archives_are_read() {
    let bench = Bench::default();
    let layer = Layer::default().file("a", b"docker").bytes();
    let config = support::config(&[exocell_images::Digest::of(&layer)], "amd64");
    let name = format!("{}.json", exocell_images::Digest::of(&config).hex());
    let manifest =
        format!(r#"[{{"Config":"{name}","RepoTags":["x:1"],"Layers":["l/layer.tar"]}}]"#);
    let saved = Layer::default()
        .file(&name, &config)
        .file("real/layer.tar", &layer)
        .symlink("l/layer.tar", "../real/layer.tar")
        .file("manifest.json", manifest.as_bytes());
    fs::write(bench.path("saved.tar"), saved.bytes()).unwrap();
    let source = Source::detect(&bench.path("saved.tar"), ImageConfig::default()).unwrap();
    let docker = bench.import_source(&source, &ImportLimits::default()).unwrap();
    assert_eq!(fs::read(bench.extract(&docker.erofs).join("a")).unwrap(), b"docker");

    let image = Image::plain(vec![Layer::default().file("a", b"oci")]);
    let mut oci = Layer::default().file("index.json", &serde_json::to_vec(&image.index).unwrap());
    for (digest, bytes) in &image.blobs {
        oci = oci.file(&format!("blobs/sha256/{digest}"), bytes);
    }
    fs::write(bench.path("oci.tar"), oci.bytes()).unwrap();
    let source = Source::Archive(bench.path("oci.tar"));
    let record = bench.store.import(&source, None, &ImportLimits::default(), &mut Silent).unwrap();
    assert_eq!(fs::read(bench.extract(&record.erofs).join("a")).unwrap(), b"oci");
}

#[test]
fn indexes_are_searched_for_our_platform() {
    let bench = Bench::default();
    let mut image = Image::plain(vec![Layer::default().file("a", b"amd64")]);
    let arm = Image::for_architecture(vec![], "arm64");
    image.blobs.extend(arm.blobs);
    let mut entries = vec![arm.index["manifests"][0].clone(), image.index["manifests"][0].clone()];
    for (entry, architecture) in entries.iter_mut().zip(["arm64", "amd64"]) {
        entry["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
    }
    let inner = support::put(
        &mut image.blobs,
        serde_json::to_vec(&serde_json::json!({"manifests": entries})).unwrap(),
    );
    image.index = serde_json::json!({"manifests": [inner]});
    let record = bench.import(&image).unwrap();
    assert_eq!(fs::read(bench.extract(&record.erofs).join("a")).unwrap(), b"amd64");
}
