//! Images that are made of others take what they change, and hold what they would as a whole.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use exocell_images::build::Room;
use exocell_images::compose::{Files, Form, Stack, compose, keep, layer};
use exocell_images::{ImageError, ImageRecord, ImportLimits, Rootfs, Silent, Source, Store};
use proptest::prelude::*;
use support::erofs::{Node, Reader};
use support::{Bench, Image, Layer};
use tar::EntryType;

fn limits() -> ImportLimits {
    ImportLimits { disk_free_bytes: 0, ..ImportLimits::default() }
}

/// A document that no other call gives.
fn document(bench: &Bench) -> String {
    let count = fs::read_dir(bench.store.root().join("blobs/sha256")).unwrap().count();
    format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Env":["N={count}-{}"]}},
            "rootfs":{{"type":"layers","diff_ids":[]}}}}"#,
        bench.store.list().unwrap().len()
    )
}

/// The image that `layers` over `below` make.
fn over(bench: &Bench, below: &ImageRecord, layers: &[&[u8]]) -> (ImageRecord, Form) {
    let base = bench.store.open_rootfs(below).unwrap();
    let kept = layers.iter().map(|bytes| {
        let mut to = tempfile::tempfile().unwrap();
        (keep(&mut &**bytes, &mut to, &limits()).unwrap(), to)
    });
    let (known, opened): (Vec<_>, Vec<_>) = kept.unzip();
    let stack = Stack { layers: known, limits: limits(), store: "/".into() };
    let draft = bench.store.begin().unwrap();
    let (image, spool) = draft.files().unwrap();
    let files = Files { base: Some(base.try_clone().unwrap()), layers: opened };
    let room = Room { image, spool, unpacked: None };
    let (image, form) = compose(&stack, &document(bench), files, room, &mut Silent).unwrap();
    let below = Some(&base).filter(|_| form == Form::Delta);
    (bench.store.publish(draft, image, below, None).unwrap(), form)
}

/// The file system of an image in one file, as a guest sees it.
fn seen(bench: &Bench, record: &ImageRecord) -> Vec<u8> {
    let (files, pieces, bytes) = bench.store.open_rootfs(record).unwrap().into_parts();
    let mut all = vec![0; bytes as usize];
    for (at, piece) in pieces.iter().enumerate() {
        let end = pieces.get(at + 1).map_or(bytes, |next| next.start);
        let part = &mut all[piece.start as usize..end as usize];
        files[piece.file].read_exact_at(part, piece.start).unwrap();
    }
    all
}

/// What is in it, by two readers that are not the project's writer.
fn nodes(bench: &Bench, record: &ImageRecord) -> BTreeMap<String, Node> {
    let bytes = seen(bench, record);
    let path = bench.path("seen.erofs");
    fs::write(&path, &bytes).unwrap();
    bench.extract(&path);
    let mut nodes = Reader::read(&bytes);
    // Another image has them elsewhere.
    nodes.values_mut().for_each(|node| {
        node.nid = 0;
        // What a directory holds is told by the names.
        if node.mode >> 12 == 4 {
            node.data.clear();
        }
    });
    nodes
}

/// Each layer as an image over the one before, and all of them as one.
fn both(layers: Vec<Vec<u8>>) -> (Bench, ImageRecord, BTreeMap<String, Node>) {
    let bench = Bench::default();
    let import = |layers: &[Vec<u8>]| {
        let pairs = layers.iter().map(|bytes| (bytes.clone(), bytes.clone()));
        bench.import(&Image::new(pairs.collect())).unwrap()
    };
    let whole = nodes(&bench, &import(&layers));
    let (first, rest) = layers.split_first().unwrap();
    let mut last = import(std::slice::from_ref(first));
    for layer in rest {
        let (record, form) = over(&bench, &last, &[layer]);
        assert_eq!(form, Form::Delta);
        last = record;
    }
    (bench, last, whole)
}

#[track_caller]
fn same(layers: Vec<Layer>) -> (Bench, ImageRecord) {
    let (bench, last, whole) = both(layers.into_iter().map(Layer::bytes).collect());
    assert_eq!(nodes(&bench, &last), whole);
    (bench, last)
}

/// What an image's layers make of it elsewhere.
fn by_layers(bench: &Bench, record: &ImageRecord) -> BTreeMap<String, Node> {
    let files = bench.store.open_rootfs(record).unwrap().into_parts().0;
    let upto = |count: usize| {
        let files = files.iter().take(count).map(|file| file.try_clone().unwrap()).collect();
        Rootfs::of(files).unwrap()
    };
    let layers = (0..files.len()).map(|at| {
        let below = (at > 0).then(|| upto(at));
        let made = |packs| {
            let mut to = tempfile::tempfile().unwrap();
            let made = layer(&upto(at + 1), below.as_ref(), &mut to, packs, &limits()).unwrap();
            let mut bytes = vec![0; made.blob_bytes as usize];
            to.read_exact_at(&mut bytes, 0).unwrap();
            (made, bytes)
        };
        let ((plain, bytes), (packed, zipped)) = (made(false), made(true));
        assert_eq!(plain.diff_id, packed.diff_id);
        assert_eq!(made(true).0, packed, "the same each time");
        (bytes, zipped)
    });
    let image = Image::new(layers.collect());
    let elsewhere = Bench::default();
    nodes(&elsewhere, &elsewhere.import(&image).unwrap())
}

fn dir(names: &[&str]) -> Layer {
    names.iter().fold(Layer::default(), |layer, name| layer.dir(name))
}

#[test]
fn a_small_change_takes_little() {
    let bench = Bench::default();
    let large: Vec<u8> =
        (0..8 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let base = dir(&["etc", "usr"]).file("usr/large", &large).file("etc/a", b"1");
    let first = bench.import(&Image::plain(vec![base])).unwrap();
    let (second, _) = over(&bench, &first, &[&Layer::default().file("etc/b", b"2").bytes()]);
    let own = fs::metadata(&second.erofs).unwrap().blocks() * 512;
    assert!(own < 64 << 10, "{own}");
    assert_eq!(second.own_bytes(), own);
    assert_eq!(second.size_bytes, own + first.size_bytes);
    assert_eq!(bench.store.resolve(&first.id.hex()).unwrap().own_bytes(), 0);
    assert_eq!(bench.store.listed_bytes().unwrap(), second.size_bytes);
    assert_eq!(nodes(&bench, &second)["/usr/large"].data, large);
}

#[test]
fn what_layers_hide_and_replace_is_as_it_would_be_as_a_whole() {
    let base = || {
        dir(&["d", "d/sub", "e"])
            .file("d/f", b"f")
            .file("d/sub/g", b"g")
            .symlink("l", "d")
            .file("top", b"t")
    };
    // A file stays removed, a directory becomes a file, a link, and a directory again.
    same(vec![
        base(),
        Layer::default().file(".wh.top", b"").file("d/.wh.f", b""),
        Layer::default().file("d/sub", b"a file now"),
        Layer::default().symlink("d/sub", "../e"),
        Layer::default().file("d/sub/through", b"a link"),
        Layer::default().file("d/.wh.sub", b"").dir("d/sub").file("d/sub/new", b"n"),
        Layer::default().file("other", b"o"),
    ]);
    // Whiteouts go through links; a directory is opaque; a name is gone and there again.
    same(vec![
        base(),
        Layer::default().file("l/.wh.f", b""),
        Layer::default().dir("d").file("d/.wh..wh..opq", b"").file("d/only", b"1"),
        Layer::default().file("d/f", b"again"),
        Layer::default().file(".wh.d", b""),
        Layer::default().dir("d"),
    ]);
}

#[test]
fn links_attributes_and_owners_cross_the_files() {
    let pax: &[(&str, &[u8])] =
        &[("SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0")];
    let (bench, last) = same(vec![
        dir(&["bin"]).pax(pax).file("bin/ping", b"ping").file("a", b"1").hard_link("b", "a"),
        // One of two names goes, a third comes.
        Layer::default().file(".wh.a", b"").hard_link("bin/c", "b"),
        Layer::default().hard_link("bin/d", "bin/ping"),
        Layer::default().entry(EntryType::Directory, "bin", "", 0o1700, b""),
        Layer::default().file("b", b"alone"),
    ]);
    let seen = nodes(&bench, &last);
    assert_eq!((seen["/bin/c"].links, seen["/b"].links), (1, 1));
    assert_eq!((seen["/bin/d"].links, seen["/bin/d"].xattrs.len()), (2, 1));
    assert_eq!(seen["/bin"].mode, 0o041700);
    assert_eq!(by_layers(&bench, &last), seen);
}

#[test]
fn a_directory_that_has_no_room_where_it_was_moves() {
    // Names fill its block, so that it has no more than a short inode.
    let long = |at: usize| format!("d/{at:02}{}", "n".repeat(88));
    let base =
        (0..41).fold(dir(&["d", "d/in", "d/in/deep"]), |layer, at| layer.file(&long(at), b""));
    let pax: &[(&str, &[u8])] = &[("SCHILY.xattr.user.more", &[7; 3000])];
    let (bench, last) = same(vec![
        base,
        Layer::default().pax(pax).dir("d"),
        Layer::default().pax(pax).dir("d/in").file("d/in/f", b"1"),
        Layer::default().pax(pax).dir("d/in/deep"),
        Layer::default().file("d/.wh.in", b""),
    ]);
    assert_eq!(by_layers(&bench, &last), nodes(&bench, &last));
    // The root has to stay where it is: then the image is written as a whole.
    let xattrs: &[(&str, &[u8])] = &[("SCHILY.xattr.user.more", &[7; 4000])];
    let layer = Layer::default().pax(xattrs).dir("./").bytes();
    let (whole, form) = over(&bench, &last, &[&layer]);
    assert_eq!((form, whole.below.len()), (Form::Whole, 0));
    assert_eq!(nodes(&bench, &whole)[""].xattrs.len(), 1);
}

#[test]
fn the_root_keeps_its_room_whatever_its_names_and_times_are() {
    let root = |seconds: u32, layer: Layer| {
        let time = seconds.to_string();
        layer.pax(&[("mtime", time.as_bytes())]).dir("./")
    };
    // First as short as it can be, then with more names than fit, then with a time of its own.
    let names = |from: usize| {
        (from..from + 3)
            .fold(Layer::default(), |layer, at| layer.file(&format!("name-{at:03}"), b""))
    };
    same(vec![
        root(1_700_000_000, names(0)),
        root(1_700_000_000, names(3)),
        root(1_700_000_001, names(6)),
        root(1_700_000_002, names(9)),
    ]);
}

#[test]
fn files_are_bounded_and_waste_is_not_kept() {
    let bench = Bench::default();
    let mut last = bench.import(&Image::plain(vec![Layer::default().file("f", b"0")])).unwrap();
    let mut wholes = 0;
    for at in 0..Rootfs::FILES_MAX + 3 {
        let name = format!("f{at}");
        let (record, form) = over(&bench, &last, &[&Layer::default().file(&name, b"1").bytes()]);
        wholes += usize::from(form == Form::Whole);
        assert!(record.below.len() < Rootfs::FILES_MAX);
        last = record;
    }
    assert_eq!(wholes, 1);
    assert_eq!(nodes(&bench, &last).len(), 1 + 1 + Rootfs::FILES_MAX + 3);
    // What is written anew each time does not stay for ever.
    let noise = |seed: u32| -> Vec<u8> {
        (0..24 << 20).map(|at: u32| ((at ^ seed).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
    };
    for seed in 0..6 {
        last = over(&bench, &last, &[&Layer::default().file("large", &noise(seed)).bytes()]).0;
        assert!(last.size_bytes < 160 << 20, "{}", last.size_bytes);
    }
    assert_eq!(nodes(&bench, &last)["/large"].data, noise(5));
}

#[test]
fn files_stay_as_long_as_an_image_has_them() {
    let bench = Bench::default();
    let base = || Image::plain(vec![Layer::default().file("a", b"base").file("b", &[7; 9000])]);
    let first = bench.import(&base()).unwrap();
    let (second, _) = over(&bench, &first, &[&Layer::default().file("a", b"own").bytes()]);
    let (third, _) = over(&bench, &second, &[&Layer::default().file("c", b"more").bytes()]);
    let shown = nodes(&bench, &third);
    let reopened = || Store::open(bench.store.root()).unwrap();
    for gone in [&first, &second] {
        assert_eq!(bench.store.remove(&gone.id.to_string(), true).unwrap(), Some(gone.id));
        assert!(gone.erofs.exists());
        reopened();
        assert_eq!(nodes(&bench, &third), shown);
    }
    // The same image once more is another file: what others are over is never replaced.
    let again = bench.import(&base()).unwrap();
    assert!(again.id == first.id && again.erofs != first.erofs, "{:?}", again.erofs);
    assert_eq!(nodes(&bench, &third), shown);
    assert_eq!((again.own_bytes(), again.size_bytes), (again.size_bytes, again.size_bytes));
    // Who uses an image keeps the files that it is over.
    let used = bench.store.open_rootfs(&third).unwrap();
    let id = third.id.to_string();
    assert!(matches!(bench.store.remove(&id, true), Err(ImageError::InUse { .. })));
    // It is not another's user.
    assert_eq!(bench.store.remove(&again.id.to_string(), true).unwrap(), Some(again.id));
    drop(used);
    bench.store.remove(&id, true).unwrap();
    reopened();
    assert_eq!(fs::read_dir(bench.store.root().join("blobs/sha256")).unwrap().count(), 0);
}

#[test]
fn a_store_without_such_images_is_as_it_was_before() {
    let bench = Bench::default();
    let index = || fs::read_to_string(bench.store.root().join("index.json")).unwrap();
    let first = bench.import(&Image::plain(vec![Layer::default().file("a", b"1")])).unwrap();
    assert!(index().contains("\"version\": 2") && !index().contains("below"), "{}", index());
    let (second, _) = over(&bench, &first, &[]);
    assert!(index().contains("\"version\": 3"), "{}", index());
    // A name that leads elsewhere is none.
    let good = index();
    let path = bench.store.root().join("index.json");
    for bad in ["../../x.erofs", "x", ".erofs", "a/b.erofs"] {
        let name = first.erofs.file_name().unwrap().to_str().unwrap();
        fs::write(
            &path,
            good.replace(&format!("\"file\": \"{name}\""), &format!("\"file\": \"{bad}\"")),
        )
        .unwrap();
        assert!(Store::open(bench.store.root()).is_err(), "{bad}");
    }
    fs::write(&path, good).unwrap();
    bench.store.remove(&second.id.to_string(), true).unwrap();
    assert!(index().contains("\"version\": 2"), "{}", index());
}

#[test]
fn a_file_that_is_cut_is_told_of() {
    let bench = Bench::default();
    let first = bench.import(&Image::plain(vec![Layer::default().file("a", b"1")])).unwrap();
    let (second, _) = over(&bench, &first, &[&Layer::default().file("b", b"2").bytes()]);
    fs::remove_file(&first.erofs).unwrap();
    assert!(matches!(bench.store.open_rootfs(&second), Err(ImageError::NotFound { .. })));
    assert!(!bench.store.ids().unwrap().contains(&second.id));
    fs::write(&first.erofs, vec![0; 4096]).unwrap();
    assert!(bench.store.open_rootfs(&second).is_err());
    // The base again is a file of its own, and leaves what is broken to itself.
    let again = bench.import(&Image::plain(vec![Layer::default().file("a", b"1")])).unwrap();
    assert!(nodes(&bench, &again).contains_key("/a"));
}

/// A step of a random layer: which name, and what becomes of it.
fn step() -> impl Strategy<Value = (usize, u8, usize)> {
    (0..40usize, 0..9u8, prop_oneof![0..100usize, 4000..4200usize, 9000..20_000usize])
}

/// Names of three levels, of which those above are directories or were.
fn name(at: usize) -> String {
    let parts = [at % 4, at / 4 % 4, at / 16 % 3];
    let depth = 1 + at % 3;
    parts[..depth].iter().map(|part| format!("n{part}")).collect::<Vec<_>>().join("/")
}

fn random_layer(base: bool, steps: &[(usize, u8, usize)]) -> Layer {
    let mut layer = Layer::default();
    if base {
        for at in 0..4 {
            layer = layer.dir(&format!("n{at}"));
        }
    }
    for (at, what, size) in steps {
        let name = name(*at);
        let (above, last) = name.rsplit_once('/').unwrap_or(("", &name));
        let slash = if above.is_empty() { "" } else { "/" };
        let xattr: &[(&str, &[u8])] = &[("SCHILY.xattr.user.x", &vec![1; size % 3000])];
        layer = match what {
            0 | 1 => layer.file(&name, &vec![*what + 1; *size]),
            2 => layer.dir(&name),
            3 if !base => layer.file(&format!("{above}{slash}.wh.{last}"), b""),
            4 if !base => layer.dir(&name).file(&format!("{name}/.wh..wh..opq"), b""),
            5 => layer.pax(xattr).dir(&name),
            6 => layer.pax(xattr).file(&name, &vec![9; *size]),
            7 => layer.entry(EntryType::Fifo, &name, "", 0o600, b""),
            _ => layer.file("n9", &vec![3; *size]).hard_link(&format!("h{}", size % 5), "n9"),
        };
    }
    layer
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_layers_make_the_same_either_way(
        layers in prop::collection::vec(prop::collection::vec(step(), 1..12), 2..6),
    ) {
        let layers = layers.iter().enumerate();
        let layers: Vec<_> = layers.map(|(at, steps)| random_layer(at == 0, steps).bytes()).collect();
        // What no image can be, as a file that is to be a directory, is none either way.
        let bench = Bench::default();
        let pairs = layers.iter().map(|bytes| (bytes.clone(), bytes.clone())).collect();
        Image::new(pairs).write_layout(&bench.path("layout"));
        let source = Source::Layout(bench.path("layout"));
        prop_assume!(bench.import_source(&source, &limits()).is_ok());
        let (bench, last, whole) = both(layers);
        let found = nodes(&bench, &last);
        prop_assert_eq!(&found, &whole);
        prop_assert_eq!(by_layers(&bench, &last), found);
    }
}
