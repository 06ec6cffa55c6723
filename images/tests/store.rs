//! The store under names, users, crowds, kills and a full disk.

mod support;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use exocell_images::build::Room;
use exocell_images::compose::{Files, Stack, compose};
use exocell_images::{ImageConfig, ImageError, ImportLimits, Silent, Source, Store};
use support::{Bench, Image, Layer};

fn image(content: &[u8]) -> Image {
    Image::plain(vec![Layer::default().file("a", content)])
}

#[test]
fn images_are_found_by_name_and_id() {
    let bench = Bench::default();
    let record = bench.import(&image(b"1")).unwrap();
    let hex = record.id.hex();
    for name in
        ["test", "test:latest", "docker.io/library/test", &hex, &hex[..6], &record.id.to_string()]
    {
        assert_eq!(bench.store.resolve(name).unwrap().id, record.id, "{name}");
    }
    let by_manifest = format!("x@{}", record.manifest.unwrap());
    assert_eq!(bench.store.resolve(&by_manifest).unwrap().id, record.id);
    for name in ["other", "test:1", "", "zz", "../x"] {
        assert!(matches!(bench.store.resolve(name), Err(ImageError::NotFound { .. })), "{name}");
    }
}

/// What a disk has lost is what is asked for again, and what takes nothing else with it.
#[test]
fn an_image_that_lost_its_files_is_whole_after_an_import() {
    let bench = Bench::default();
    let (lost, other) = (image(b"1"), image(b"2"));
    let record = bench.import(&lost).unwrap();
    bench.import(&other).unwrap();
    let config = record.erofs.with_extension("config");
    let damages: [&dyn Fn(); 4] = [
        &|| fs::remove_file(&record.erofs).unwrap(),
        &|| fs::remove_file(&config).unwrap(),
        &|| {
            fs::remove_file(&config).unwrap();
            fs::write(&config, "{").unwrap();
        },
        &|| {
            fs::remove_file(&record.erofs).unwrap();
            fs::write(&record.erofs, "short").unwrap();
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let whole = fs::read(&record.erofs).unwrap();
        damage();
        assert!(!bench.store.list().unwrap().is_empty(), "{number}");
        let again = bench.import(&lost).unwrap();
        assert_eq!(again.id, record.id, "{number}");
        assert_eq!(fs::read(&again.erofs).unwrap(), whole, "{number}");
        assert_eq!(bench.store.list().unwrap().len(), 2, "{number}");
    }
}

#[test]
fn images_without_an_index_are_no_leftovers() {
    let bench = Bench::default();
    let record = bench.import(&image(b"1")).unwrap();
    let index = bench.store.root().join("index.json");
    fs::rename(&index, index.with_extension("aside")).unwrap();
    let refused = Store::open(bench.store.root()).unwrap_err().to_string();
    assert!(refused.contains("has no index.json"), "{refused}");
    assert!(record.erofs.exists());
    fs::rename(index.with_extension("aside"), &index).unwrap();
    assert_eq!(Store::open(bench.store.root()).unwrap().list().unwrap().len(), 1);
}

/// Whoever has an image's id, or the digits that are shown of it, gets that image.
#[test]
fn no_name_is_taken_for_an_id() {
    let bench = Bench::default();
    let pinned = bench.import(&image(b"1")).unwrap();
    let other = bench.import(&image(b"2")).unwrap();
    let (whole, hex, short) = (pinned.id.to_string(), pinned.id.hex(), pinned.id.short());
    // An index of before such names were refused.
    let path = bench.store.root().join("index.json");
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for name in [&whole, &format!("{hex}:latest"), &format!("{short}:latest")] {
        index["tags"][name] = serde_json::to_value(other.id).unwrap();
    }
    fs::write(&path, serde_json::to_vec(&index).unwrap()).unwrap();
    for name in [&whole, &hex, &short, &format!("sha256:{short}"), &whole[..30]] {
        assert_eq!(bench.store.resolve(name).unwrap().id, pinned.id, "{name}");
    }
    let unlike = "sha256:".to_owned() + &"0".repeat(64);
    assert!(matches!(bench.store.resolve(&unlike), Err(ImageError::NotFound { .. })));
    // A short name may still be given, and asked for with its tag.
    assert_eq!(bench.store.resolve(&format!("{short}:latest")).unwrap().id, other.id);
    assert_eq!(other.tags, ["test:latest"]);
    assert_eq!(bench.store.resolve(&other.id.hex()).unwrap().tags.len(), 2);
    assert_eq!(bench.store.remove(&short, false).unwrap(), Some(pinned.id));
}

/// The index is as long for an image of many words as for any other, and one of before is split.
#[test]
fn an_images_words_are_not_in_the_index() {
    let bench = Bench::default();
    let mut large = image(b"1");
    let layer = large.manifest["layers"][0]["digest"].as_str().unwrap();
    let labels: std::collections::BTreeMap<_, _> =
        (0..900).map(|n| (n.to_string(), "x".repeat(200))).collect();
    // Of what only the document has, 3 MiB.
    let document = serde_json::json!({"architecture": "amd64", "os": "linux",
        "config": {"Cmd": ["sh"], "Labels": labels}, "history": ["y".repeat(3 << 20)],
        "rootfs": {"type": "layers", "diff_ids": [layer]}});
    let document = serde_json::to_vec(&document).unwrap();
    large.manifest["config"] = support::put(&mut large.blobs, document.clone());
    large.seal();
    let record = bench.import(&large).unwrap();
    let other = bench.import(&image(b"2")).unwrap();
    let path = bench.store.root().join("index.json");
    assert!(fs::metadata(&path).unwrap().len() < 2000);
    let hex = record.id.hex();
    let check = |store: &Store| {
        assert_eq!(store.resolve(&hex).unwrap().config.labels.len(), 900);
        assert_eq!(store.inspect(&hex).unwrap().as_bytes(), document);
        assert_eq!(store.list().unwrap().len(), 2);
    };
    check(&bench.store);
    // As it was written before.
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    index["version"] = 1.into();
    for record in bench.store.list().unwrap() {
        let id = record.id.to_string();
        index["images"][&id]["document"] = bench.store.inspect(&id).unwrap().into();
        index["images"][&id]["config"] = serde_json::to_value(&record.config).unwrap();
        let blobs = bench.store.root().join("blobs/sha256");
        for ending in ["config", "json"] {
            fs::remove_file(blobs.join(format!("{}.{ending}", record.id.hex()))).unwrap();
        }
    }
    fs::write(&path, serde_json::to_vec(&index).unwrap()).unwrap();
    check(&bench.store);
    check(&Store::open(bench.store.root()).unwrap());
    assert!(fs::metadata(&path).unwrap().len() < 2000);
    // An image whose files are gone is none, and keeps nobody from the others.
    let gone = bench.store.root().join(format!("blobs/sha256/{hex}.config"));
    fs::remove_file(gone).unwrap();
    assert!(matches!(bench.store.resolve(&hex), Err(ImageError::NotFound { .. })));
    assert_eq!(bench.store.list().unwrap()[0].id, other.id);
    bench.store.remove(&hex, true).unwrap();
    assert_eq!(fs::read_dir(bench.store.root().join("blobs/sha256")).unwrap().count(), 3);
}

#[test]
fn names_move_and_images_go_with_the_last() {
    let bench = Bench::default();
    let old = bench.import(&image(b"1")).unwrap();
    let new = bench.import(&image(b"2")).unwrap();
    assert_eq!(bench.store.resolve("test").unwrap().id, new.id);
    assert_eq!(bench.store.prune().unwrap()[0].id, old.id);
    bench.store.tag("test", &"also:1".parse().unwrap()).unwrap();
    assert!(matches!(
        bench.store.remove(&new.id.hex(), false),
        Err(ImageError::SeveralTags { .. })
    ));
    assert_eq!(bench.store.remove("test", false).unwrap(), None);
    assert_eq!(bench.store.remove("also:1", false).unwrap(), Some(new.id));
    assert!(!new.erofs.exists() && bench.store.list().unwrap().is_empty());
}

#[test]
fn images_in_use_stay() {
    let bench = Bench::default();
    let record = bench.import(&image(b"1")).unwrap();
    let used = bench.store.open_rootfs(&record).unwrap();
    assert!(matches!(bench.store.remove("test", true), Err(ImageError::InUse { .. })));
    assert_eq!(bench.store.list().unwrap().len(), 1);
    drop(used);
    bench.store.remove("test", true).unwrap();
    assert!(matches!(bench.store.open_rootfs(&record), Err(ImageError::NotFound { .. })));
}

#[test]
fn importing_twice_reads_once() {
    let bench = Bench::default();
    bench.import(&image(b"1")).unwrap();
    let mut present = false;
    let source = Source::Layout(bench.path("layout"));
    let mut progress = |event: exocell_images::ProgressEvent<'_>| {
        present |= matches!(event, exocell_images::ProgressEvent::Present { .. });
    };
    bench.store.import(&source, None, &ImportLimits::default(), &mut progress).unwrap();
    assert!(present);
}

#[test]
fn many_imports_at_once() {
    let bench = Bench::default();
    std::thread::scope(|scope| {
        for number in 0..8u8 {
            let (store, folder) = (&bench.store, bench.path(&format!("layout{number}")));
            scope.spawn(move || {
                image(&[number % 4; 5000]).write_layout(&folder);
                let tag = format!("n{number}").parse().unwrap();
                store
                    .import(
                        &Source::Layout(folder),
                        Some(&tag),
                        &ImportLimits::default(),
                        &mut Silent,
                    )
                    .unwrap();
            });
        }
    });
    assert_eq!(bench.store.list().unwrap().len(), 4);
    assert!((0..8).all(|number| bench.store.resolve(&format!("n{number}")).is_ok()));
    assert_eq!(bench.leftovers(), 0);
}

#[test]
fn a_broken_index_is_said_so() {
    let bench = Bench::default();
    fs::write(bench.store.root().join("index.json"), b"{").unwrap();
    assert!(matches!(Store::open(bench.store.root()), Err(ImageError::StoreCorrupt { .. })));
}

#[test]
fn directories_are_imported_as_they_are() {
    let bench = Bench::default();
    let root = bench.path("root");
    fs::create_dir_all(root.join("d")).unwrap();
    fs::write(root.join("d/a"), [5; 10_000]).unwrap();
    fs::hard_link(root.join("d/a"), root.join("d/b")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("s")).unwrap();
    let config = ImageConfig { cmd: vec!["sh".into()], ..Default::default() };
    let source = Source::detect(&root, config.clone()).unwrap();
    let record = bench.import_source(&source, &ImportLimits::default()).unwrap();
    assert_eq!(record.config, config);
    let out = bench.extract(&record.erofs);
    assert_eq!(fs::read(out.join("d/b")).unwrap(), [5; 10_000]);
    assert_eq!(fs::read_link(out.join("s")).unwrap(), Path::new("/etc/passwd"));
    assert!(record.size_bytes < 40_000);
    let again = bench.import_source(&source, &ImportLimits::default()).unwrap();
    assert_eq!(again.id, record.id);
}

const CHILD: &str = "EXOCELL_IMAGES_TEST_CHILD";

/// Does nothing by itself: the child process of the tests below.
#[test]
fn child_imports() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let folder = Path::new(&folder);
    let limits = ImportLimits::default();
    let tag = "killed".parse().unwrap();
    let imported = Store::open(folder.join("store")).and_then(|store| {
        store.import(&Source::Layout(folder.join("layout")), Some(&tag), &limits, &mut Silent)
    });
    println!("imported: {:?}", imported.map(|record| record.id).map_err(|error| error.to_string()));
}

const FULL: &str = "EXOCELL_IMAGES_TEST_FULL";

/// The other side of `a_full_disk_is_emptied`, in a store of its own.
#[test]
fn child_fills_and_removes() {
    let Some(folder) = std::env::var_os(FULL) else { return };
    let folder = Path::new(&folder);
    let store = Store::open(folder.join("store")).unwrap();
    let limits = ImportLimits::default();
    for (number, name) in ["one", "two"].iter().enumerate() {
        let layout = folder.join(name);
        image(&vec![number as u8 + 1; 200_000]).write_layout(&layout);
        let tag = name.parse().unwrap();
        store.import(&Source::Layout(layout), Some(&tag), &limits, &mut Silent).unwrap();
    }
    let two = store.resolve("two").unwrap().id;
    store.tag("two", &"also".parse().unwrap()).unwrap();
    store.remove("two", false).unwrap();
    let filler = fs::File::create(folder.join("store/filler")).unwrap();
    let mut filler = std::io::BufWriter::with_capacity(1, filler);
    while std::io::Write::write_all(&mut filler, &[1; 512]).is_ok() {}
    assert_eq!(store.remove("also", false).unwrap(), Some(two));
    assert_eq!(store.list().unwrap().len(), 1);
    println!("removed: {}", store.resolve("one").is_ok());
}

#[test]
fn a_full_disk_is_emptied() {
    let bench = Bench::default();
    let script = "mount -t tmpfs -o size=4m tmpfs \"$1\"/store && shift && \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script, "sh"])
        .arg(bench.folder.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child_fills_and_removes", "--nocapture"])
        .env(FULL, bench.folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("removed: true"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

fn child(folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_imports", "--nocapture"]).env(CHILD, folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_kill_at_any_moment_leaves_the_store_whole() {
    let bench = Bench::default();
    let kept = bench.import(&image(b"kept")).unwrap();
    let layers =
        (0..20u8).map(|i| Layer::default().file(&format!("f{i}"), &vec![i + 1; 300_000])).collect();
    image(b"").write_layout(&bench.path("other"));
    fs::remove_dir_all(bench.path("layout")).unwrap();
    Image::plain(layers).write_layout(&bench.path("layout"));
    let mut killed = 0;
    for round in 0..40u64 {
        let mut running = child(bench.folder.path()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(round * 17 % 400));
        running.kill().unwrap();
        killed += u32::from(running.wait().unwrap().signal().is_some());
        let store = Store::open(bench.store.root()).unwrap();
        assert_eq!(bench.leftovers(), 0, "round {round}");
        let records = store.list().unwrap();
        assert!(records.iter().any(|record| record.id == kept.id));
        assert!(records.iter().all(|record| record.erofs.is_file()));
        let blobs = fs::read_dir(store.root().join("blobs/sha256")).unwrap().count();
        // Each with how it is run, and its document.
        assert_eq!(blobs, 3 * records.len());
        if let Some(record) = records.iter().find(|record| record.id != kept.id) {
            bench.extract(&record.erofs);
            store.remove(&record.id.hex(), true).unwrap();
        }
    }
    assert!(killed > 0, "no round was quick enough");
}

#[test]
fn a_sweep_spares_imports_that_live() {
    let bench = Bench::default();
    let source = Source::Layout(bench.path("layout"));
    Image::plain(vec![Layer::default().file("a", &[1; 5000])]).write_layout(&bench.path("layout"));
    let root = bench.store.root().to_path_buf();
    let mut progress = |_: exocell_images::ProgressEvent<'_>| drop(Store::open(&root).unwrap());
    let record =
        bench.store.import(&source, None, &ImportLimits::default(), &mut progress).unwrap();
    assert!(record.erofs.is_file());
}

#[test]
fn a_full_disk_is_said_so() {
    // Too small, and without the part that an import leaves free.
    for size in ["512k", "1604k"] {
        full_disk(size);
    }
}

fn full_disk(size: &str) {
    let bench = Bench::default();
    let noise: Vec<u8> = (0..400_000u32).flat_map(|i| i.to_le_bytes()).collect();
    Image::plain(vec![Layer::default().file("a", &noise)]).write_layout(&bench.path("layout"));
    let script = format!(
        "mount -t tmpfs -o size={size} tmpfs \"$1\"/store && shift && \"$@\"; ls /proc/self/cwd/store/tmp"
    );
    let inner = child(bench.folder.path());
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", &script, "sh"])
        .arg(bench.folder.path())
        .arg(inner.get_program())
        .args(inner.get_args())
        .env(CHILD, bench.folder.path())
        .current_dir(bench.folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("no space left in the image store"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!text.contains("import-"), "{text}");
}

/// An image between two steps of a build.
#[test]
fn a_passing_image_is_in_no_list_and_goes_with_its_last_user() {
    let bench = Bench::default();
    let document =
        r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let limits = ImportLimits { disk_free_bytes: 0, ..ImportLimits::default() };
    let stack = Stack { layers: Vec::new(), limits, store: "/".into() };
    let make = || {
        let draft = bench.store.begin().unwrap();
        let (image, spool) = draft.files().unwrap();
        let (files, room) =
            (Files { base: None, layers: Vec::new() }, Room { image, spool, unpacked: None });
        let (image, _) = compose(&stack, document, files, room, &mut Silent).unwrap();
        bench.store.publish_passing(draft, image, None).unwrap()
    };
    let reopened = || Store::open(bench.store.root()).unwrap();
    let (record, used) = make();
    let id = record.id.to_string();
    assert_eq!(reopened().resolve(&id).unwrap().id, record.id);
    assert!(bench.store.list().unwrap().is_empty() && bench.store.prune().unwrap().is_empty());
    drop(used);
    assert!(matches!(reopened().resolve(&id), Err(ImageError::NotFound { .. })));
    assert!(!record.erofs.exists());
    // One that gets a name stays.
    let (_, used) = make();
    bench.store.tag(&id, &"named".parse().unwrap()).unwrap();
    drop(used);
    assert_eq!(reopened().list().unwrap().len(), 1);
}
