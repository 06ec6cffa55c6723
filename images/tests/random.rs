//! Random trees come out of the erofs image as they went in.

mod support;

use std::collections::BTreeMap;
use std::fs;

use exocell_images::{ImportLimits, Source};
use proptest::prelude::*;
use support::erofs::{Node, Reader};
use support::{Bench, Image, Layer};
use tar::EntryType;

#[derive(Debug, Clone)]
enum Content {
    Directory,
    File { size: usize, byte: u8 },
    Symlink(String),
}

#[derive(Debug, Clone)]
struct Item {
    content: Content,
    mode: u32,
    uid: u64,
    mtime: (i64, u32),
    xattrs: BTreeMap<String, Vec<u8>>,
    linked: bool,
}

fn content() -> impl Strategy<Value = Content> {
    let size = prop_oneof![0..200usize, 3900..4200usize, 8000..30_000usize];
    prop_oneof![
        1 => Just(Content::Directory),
        3 => (size, any::<u8>()).prop_map(|(size, byte)| Content::File { size, byte }),
        1 => "[a-z./]{1,300}".prop_map(Content::Symlink),
    ]
}

fn item() -> impl Strategy<Value = Item> {
    let mtime =
        prop_oneof![Just((1_700_000_000, 0)), (-1_000_000..4_000_000_000i64, 0..1_000_000_000u32)];
    let name = prop_oneof!["user\\.[a-z]{1,30}", "security\\.[a-z]{1,30}", "trusted\\.[a-z]{1,30}"];
    let value = prop::collection::vec(any::<u8>(), 0..3000);
    let xattrs = prop::collection::btree_map(name, value, 0..3);
    (
        content(),
        0..0o10000u32,
        prop_oneof![0..10u64, 65_530..4_294_967_296u64],
        mtime,
        xattrs,
        any::<bool>(),
    )
        .prop_map(|(content, mode, uid, mtime, xattrs, linked)| Item {
            content,
            mode,
            uid,
            mtime,
            xattrs,
            linked,
        })
}

fn add(mut layer: Layer, name: &str, item: &Item) -> Layer {
    let (seconds, nanos) = item.mtime;
    // The decimal form of a time before 1970 counts its fraction downwards.
    let mtime = match seconds < 0 && nanos > 0 {
        true => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
        false => format!("{seconds}.{nanos:09}"),
    };
    let mut records: Vec<(String, Vec<u8>)> =
        vec![("mtime".into(), mtime.into()), ("uid".into(), item.uid.to_string().into())];
    if let Content::Symlink(target) = &item.content {
        records.push(("linkpath".into(), target.clone().into()));
    }
    records.extend(
        item.xattrs.iter().map(|(name, value)| (format!("SCHILY.xattr.{name}"), value.clone())),
    );
    let records: Vec<_> =
        records.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
    layer = layer.pax(&records);
    match &item.content {
        Content::Directory => layer.entry(EntryType::Directory, name, "", item.mode, b""),
        Content::File { size, byte } => {
            layer.entry(EntryType::Regular, name, "", item.mode, &vec![*byte; *size])
        }
        Content::Symlink(_) => layer.entry(EntryType::Symlink, name, "", item.mode, b""),
    }
}

fn check(node: &Node, item: &Item, links: u32) {
    let (kind, data) = match &item.content {
        Content::Directory => (0o040000, Vec::new()),
        Content::File { size, byte } => (0o100000, vec![*byte; *size]),
        Content::Symlink(target) => (0o120000, target.clone().into_bytes()),
    };
    assert_eq!(u32::from(node.mode), kind | item.mode);
    assert_eq!((u64::from(node.uid), node.mtime), (item.uid, item.mtime));
    assert_eq!(node.xattrs, item.xattrs);
    assert!(node.data == data, "the data differ");
    assert_eq!(node.links, links);
}

/// An image of `items` holds them, and other readers of erofs find nothing wrong.
fn survive(items: &BTreeMap<String, Item>) {
    let mut layer = Layer::default();
    for (name, item) in items {
        layer = add(layer, name, item);
        if item.linked && !matches!(item.content, Content::Directory) {
            let (from, to) = (format!("links/{}", name.len()), name);
            layer = layer.hard_link(&from, to);
        }
    }
    let bench = Bench::default();
    let image = Image::plain(vec![layer]);
    image.write_layout(&bench.path("layout"));
    let record = bench
        .import_source(&Source::Layout(bench.path("layout")), &ImportLimits::default())
        .unwrap();
    let bytes = fs::read(&record.erofs).unwrap();
    let nodes = Reader::read(&bytes);
    for (name, item) in items {
        let node = &nodes[&format!("/{name}")];
        let names = nodes.values().filter(|other| other.nid == node.nid).count() as u32;
        check(node, item, if matches!(item.content, Content::Directory) { 2 } else { names });
    }
    bench.extract(&record.erofs);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn trees_survive(items in prop::collection::btree_map("[a-z!~]{1,90}", item(), 0..60)) {
        survive(&items);
    }
}

/// fsck.erofs reads the place of an inode's attributes though there are none.
#[test]
fn an_image_does_not_end_with_an_inode() {
    let file = |size, mtime| Item {
        content: Content::File { size, byte: 1 },
        mode: 0,
        uid: 0,
        mtime,
        xattrs: BTreeMap::new(),
        linked: false,
    };
    // The first leaves two slots of its block, which the second's long inode fills; with the
    // third the first's time is the commonest, so its inode is short.
    let usual = (1_700_000_000, 0);
    let items =
        [("a", file(4000, usual)), ("b", file(4058, (1_260_126_819, 1))), ("c", file(10, usual))];
    survive(&items.map(|(name, item)| (name.to_owned(), item)).into());
}
