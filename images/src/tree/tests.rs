use super::*;
use crate::error::ImageError;

fn tree() -> Tree {
    let mut tree = Tree::new(64);
    tree.begin_layer();
    tree
}

fn put(tree: &mut Tree, path: &str, kind: Kind) {
    let place = tree.place(path.as_bytes()).unwrap();
    tree.insert(place.directory, place.name, Meta::default(), kind);
}

fn file() -> Kind {
    Kind::File(FileData::default())
}

fn directory() -> Kind {
    Kind::Directory(BTreeMap::new())
}

fn symlink(target: &str) -> Kind {
    Kind::Symlink(target.as_bytes().into())
}

fn has(tree: &mut Tree, path: &str) -> bool {
    tree.find(path.as_bytes()).unwrap().is_some()
}

fn whiteout(tree: &mut Tree, path: &str) {
    let place = tree.place(path.as_bytes()).unwrap();
    tree.hide(place.directory, place.name);
}

#[test]
fn parents_are_made_and_links_stay_inside() {
    let mut tree = tree();
    put(&mut tree, "usr/lib", directory());
    put(&mut tree, "lib", symlink("../../../usr/lib"));
    put(&mut tree, "abs", symlink("/usr"));
    put(&mut tree, "lib/a", file());
    put(&mut tree, "abs/b", file());
    put(&mut tree, "./x//y/./z", file());
    for path in ["usr/lib/a", "usr/b", "x/y/z"] {
        assert!(has(&mut tree, path), "{path}");
    }
}

#[test]
fn the_last_component_is_never_followed() {
    let mut tree = tree();
    put(&mut tree, "etc/passwd", file());
    put(&mut tree, "link", symlink("etc/passwd"));
    put(&mut tree, "link", file());
    assert!(has(&mut tree, "etc/passwd"));
    let link = tree.find(b"link").unwrap().unwrap();
    assert!(matches!(tree.inode(link).kind, Kind::File(_)));
}

#[test]
fn hostile_places_are_refused() {
    let mut tree = tree();
    for path in ["/etc/passwd", "../x", "a/../../x", "a/..", "a\0b"] {
        let refused = tree.place(path.as_bytes());
        assert!(matches!(refused, Err(ImageError::UnsafePath { .. })), "{path}");
    }
    let long = "n".repeat(256);
    assert!(matches!(tree.place(long.as_bytes()), Err(ImageError::LimitExceeded { .. })));
    put(&mut tree, "file", file());
    assert!(matches!(tree.place(b"file/x"), Err(ImageError::ParentNotDirectory { .. })));
}

#[test]
fn loops_and_depth_are_bounded() {
    let mut tree = tree();
    put(&mut tree, "a", symlink("b"));
    put(&mut tree, "b", symlink("a"));
    put(&mut tree, "self", symlink("self/self"));
    for path in ["a/x", "self/x"] {
        assert!(matches!(tree.place(path.as_bytes()), Err(ImageError::LinkLoop { .. })), "{path}");
    }
    let deep = "d/".repeat(80);
    assert!(matches!(tree.place(deep.as_bytes()), Err(ImageError::LimitExceeded { .. })));
}

#[test]
fn depth_cannot_be_smuggled_through_links() {
    let mut tree = tree();
    let run = "d/".repeat(40);
    put(&mut tree, &format!("{run}d"), directory());
    put(&mut tree, "s", symlink(&run));
    let path = format!("s/{run}x");
    let refused = tree.place(path.as_bytes());
    assert!(matches!(refused, Err(ImageError::LimitExceeded { limit: "depth_max", .. })));
}

#[test]
fn whiteouts_hide_lower_layers_only() {
    let mut tree = tree();
    for path in ["a/old", "a/sub/old", "b", "kept"] {
        put(&mut tree, path, file());
    }
    tree.begin_layer();
    put(&mut tree, "a/new", file());
    put(&mut tree, "a/sub/new", file());
    whiteout(&mut tree, "b");
    whiteout(&mut tree, "missing");
    let place = tree.place(b"a/mark").unwrap();
    tree.hide_children(place.directory);
    for path in ["a/new", "a/sub/new", "kept"] {
        assert!(has(&mut tree, path), "{path}");
    }
    for path in ["a/old", "a/sub/old", "b"] {
        assert!(!has(&mut tree, path), "{path}");
    }
}

#[test]
fn data_is_freed_with_the_last_name() {
    let mut tree = tree();
    put(&mut tree, "a", Kind::File(FileData { size: 1, ..FileData::default() }));
    let id = tree.find(b"a").unwrap().unwrap();
    let place = tree.place(b"d/b").unwrap();
    tree.link(place.directory, place.name, id);
    put(&mut tree, "a", directory());
    assert!(tree.take_freed().is_empty());
    put(&mut tree, "d", file());
    assert_eq!(tree.take_freed().len(), 1);
}

#[test]
fn a_directory_over_a_directory_keeps_its_children() {
    let mut tree = tree();
    put(&mut tree, "d/x", file());
    tree.begin_layer();
    let place = tree.place(b"d").unwrap();
    tree.insert(place.directory, place.name, Meta { mode: 0o700, ..Meta::default() }, directory());
    assert!(has(&mut tree, "d/x"));
    let id = tree.find(b"d").unwrap().unwrap();
    assert_eq!(tree.inode(id).meta.mode, 0o700);
}
