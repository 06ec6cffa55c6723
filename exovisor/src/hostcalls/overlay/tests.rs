//! An overlay does what the host's file system does, and its base stays as it was.

use super::*;
use proptest::prelude::*;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use tempfile::TempDir;

const WISH: Wish = Wish {
    follow: true,
    create: true,
    exclusive: false,
    truncate: false,
    directory: false,
    write: true,
};

struct World {
    layers: Layers,
    overlay: Arc<Overlay>,
    budget: Budget,
}

fn over(folder: &Path, bytes_max: u64) -> World {
    let layers = Layers::default();
    let overlay = layers.over(folder).unwrap();
    let budget = Budget::new(&layers.0.used, bytes_max);
    World { layers, overlay, budget }
}

impl World {
    fn open(&self, path: &str, wish: Wish) -> Result<OpenFile, Errno> {
        match self.overlay.open(&self.budget, &[], path, wish)? {
            Opened::File(file) => Ok(file),
            Opened::Dir(_) => Err(Errno::Isdir),
        }
    }

    fn write(&self, path: &str, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        let open = self.open(path, WISH)?;
        let below = open.below.as_ref();
        open.file.write_at(&self.budget, below, Some(offset), data).map(|(count, _)| count)
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        let open = self.open(path, Wish { create: false, write: false, ..WISH })?;
        let mut bytes = vec![0; open.file.len() as usize];
        let count = open.file.read_at(open.below.as_ref(), 0, &mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Each path below `dir`, with what is there.
    fn contents(&self, dir: &str, into: &mut BTreeMap<String, String>) {
        let opened = self.overlay.open(
            &self.budget,
            &[],
            dir,
            Wish { create: false, write: false, directory: true, ..WISH },
        );
        let Ok(Opened::Dir(path)) = opened else { panic!("{dir} is no directory") };
        for listed in self.overlay.list(&path).unwrap() {
            let path = format!("{dir}/{}", listed.name);
            let what = match listed.kind {
                Filetype::Directory => {
                    self.contents(&path, into);
                    "directory".to_owned()
                }
                Filetype::SymbolicLink => self.overlay.read_link(&[], &path).unwrap(),
                _ => format!("{:?}", self.read(&path).unwrap()),
            };
            into.insert(path, what);
        }
    }
}

fn contents(root: &Path, dir: &str, into: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(root.join(dir)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{dir}/{}", entry.file_name().to_str().unwrap());
        let kind = entry.file_type().unwrap();
        let what = if kind.is_dir() {
            contents(root, &path, into);
            "directory".to_owned()
        } else if kind.is_symlink() {
            fs::read_link(entry.path()).unwrap().to_str().unwrap().to_owned()
        } else {
            format!("{:?}", fs::read(entry.path()).unwrap())
        };
        into.insert(path, what);
    }
}

fn on_host(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    contents(root, ".", &mut found);
    found
}

#[derive(Clone, Debug)]
enum Change {
    Write(String, u16, u16),
    Truncate(String, u16),
    Empty(String),
    MakeDir(String),
    RemoveDir(String),
    Remove(String),
    Rename(String, String),
    Link(String, String),
    Symlink(String, String),
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec("[abc]", 1..4).prop_map(|names| names.join("/"))
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (path(), 0u16..10_000, 1u16..6_000).prop_map(|(path, at, len)| Change::Write(path, at, len)),
        1 => (path(), 0u16..10_000).prop_map(|(path, len)| Change::Truncate(path, len)),
        1 => path().prop_map(Change::Empty),
        4 => path().prop_map(Change::MakeDir),
        1 => path().prop_map(Change::RemoveDir),
        1 => path().prop_map(Change::Remove),
        3 => (path(), path()).prop_map(|(from, to)| Change::Rename(from, to)),
        1 => (path(), path()).prop_map(|(from, to)| Change::Link(from, to)),
        1 => (path(), path()).prop_map(|(target, path)| Change::Symlink(target, path)),
    ]
}

fn data(at: u16, len: u16) -> Vec<u8> {
    (0..len).map(|index| (at ^ index.wrapping_mul(31)) as u8 | 1).collect()
}

/// The change on the host; whether it was done.
fn change_host(root: &Path, change: &Change) -> bool {
    let at = |path: &String| root.join(path);
    let open = |path: &String, create| {
        fs::OpenOptions::new().write(true).create(create).truncate(false).open(at(path))
    };
    match change {
        Change::Write(path, offset, len) => open(path, true)
            .and_then(|file| file.write_all_at(&data(*offset, *len), u64::from(*offset)))
            .is_ok(),
        Change::Truncate(path, len) => {
            open(path, false).and_then(|file| file.set_len(u64::from(*len))).is_ok()
        }
        Change::Empty(path) => {
            fs::OpenOptions::new().write(true).truncate(true).open(at(path)).is_ok()
        }
        Change::MakeDir(path) => fs::create_dir(at(path)).is_ok(),
        Change::RemoveDir(path) => fs::remove_dir(at(path)).is_ok(),
        Change::Remove(path) => fs::remove_file(at(path)).is_ok(),
        Change::Rename(from, to) => fs::rename(at(from), at(to)).is_ok(),
        Change::Link(from, to) => fs::hard_link(at(from), at(to)).is_ok(),
        Change::Symlink(target, path) => symlink(target, at(path)).is_ok(),
    }
}

fn change_overlay(world: &World, change: &Change) -> bool {
    let World { overlay, budget, .. } = world;
    match change {
        Change::Write(path, at, len) => {
            world.write(path, u64::from(*at), &data(*at, *len)) == Ok(usize::from(*len))
        }
        Change::Truncate(path, len) => world
            .open(path, Wish { create: false, ..WISH })
            .and_then(|open| open.file.set_len(u64::from(*len)))
            .is_ok(),
        Change::Empty(path) => {
            world.open(path, Wish { create: false, truncate: true, ..WISH }).is_ok()
        }
        Change::MakeDir(path) => overlay.make_dir(budget, &[], path).is_ok(),
        Change::RemoveDir(path) => overlay.remove_dir(budget, &[], path).is_ok(),
        Change::Remove(path) => overlay.remove_file(budget, &[], path).is_ok(),
        Change::Rename(from, to) => overlay.rename(budget, (&[], from), (&[], to)).is_ok(),
        Change::Link(from, to) => overlay.link(budget, (&[], from, false), (&[], to)).is_ok(),
        Change::Symlink(target, path) => overlay.make_link(budget, target, &[], path).is_ok(),
    }
}

/// A second name for a symbolic link itself is not offered.
fn is_offered(root: &Path, change: &Change) -> bool {
    match change {
        Change::Link(from, _) => !root.join(from).is_symlink(),
        _ => true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn it_does_what_the_host_does_and_the_base_stays(
        before in prop::collection::vec(change(), 0..25),
        changes in prop::collection::vec(change(), 0..60),
    ) {
        let (base, host) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        for change in &before {
            if is_offered(base.path(), change) {
                // Two names of a file are two files in the base: a layer cannot know better.
                if !matches!(change, Change::Link(..)) {
                    prop_assert_eq!(change_host(base.path(), change), change_host(host.path(), change));
                }
            }
        }
        let was = on_host(base.path());
        let world = over(base.path(), u64::MAX);
        for change in &changes {
            if is_offered(host.path(), change) {
                prop_assert_eq!(change_overlay(&world, change), change_host(host.path(), change), "{:?}", change);
            }
        }
        let mut seen = BTreeMap::new();
        world.contents(".", &mut seen);
        prop_assert_eq!(seen, on_host(host.path()));
        prop_assert_eq!(on_host(base.path()), was);
        let (layers, used) = (world.layers.clone(), Arc::clone(&world.layers.0.used));
        drop((world, layers));
        prop_assert_eq!(used.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn room_is_bounded_and_comes_back() {
    let base = TempDir::new().unwrap();
    fs::write(base.path().join("large"), vec![7; 1 << 20]).unwrap();
    let world = over(base.path(), 64 << 10);
    // One byte of a large file takes one block.
    assert_eq!(world.write("large", 500_000, b"x"), Ok(1));
    let after_one = world.layers.bytes();
    assert!((4096..8192).contains(&after_one), "{after_one}");
    assert_eq!(world.read("large").unwrap().iter().filter(|byte| **byte != 7).count(), 1);
    let written = world.write("new", 0, &[1; 1 << 20]).unwrap();
    assert!(written < 64 << 10 && written > 32 << 10, "{written}");
    assert_eq!(world.write("new", written as u64, b"x"), Err(Errno::Nospc));
    assert_eq!(
        world.overlay.make_dir(&world.budget, &[], &"d".repeat(4000)),
        Err(Errno::Nametoolong)
    );
    let mut dirs = 0;
    while world.overlay.make_dir(&world.budget, &[], &format!("d{dirs}")).is_ok() {
        dirs += 1;
    }
    assert!(dirs < 128, "{dirs}");
    world.overlay.remove_file(&world.budget, &[], "new").unwrap();
    assert_eq!(world.write("large", 0, b"x"), Ok(1));
    // A hole takes none.
    world.open("hole", WISH).unwrap().file.set_len(1 << 40).unwrap();
    assert_eq!(world.open("hole", WISH).unwrap().file.set_len((1 << 40) + 1), Err(Errno::Fbig));
    assert_eq!(world.write("hole", u64::MAX, b"x"), Err(Errno::Fbig));
}

#[test]
fn nothing_outside_the_folder_is_reached() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("folder");
    fs::create_dir_all(folder.join("dir")).unwrap();
    fs::write(outer.path().join("secret"), "secret").unwrap();
    symlink(outer.path().join("secret"), folder.join("absolute")).unwrap();
    symlink("../secret", folder.join("relative")).unwrap();
    symlink("../../secret", folder.join("dir/deeper")).unwrap();
    symlink("..", folder.join("up")).unwrap();
    symlink("loop", folder.join("loop")).unwrap();
    symlink("/proc/self/root", folder.join("proc")).unwrap();
    let world = over(&folder, 1 << 20);
    for path in [
        "../secret",
        "dir/../../secret",
        "absolute",
        "relative",
        "dir/deeper",
        "up/secret",
        "up/folder/../secret",
        "proc/etc/passwd",
        "/etc/passwd",
        "./../secret",
        "",
        "dir/\0/../../secret",
    ] {
        assert!(world.read(path).is_err(), "{path:?}");
        assert!(world.write(path, 0, b"x").is_err(), "{path:?}");
    }
    assert_eq!(world.read("loop").unwrap_err(), Errno::Loop);
    // The same by links that the guest makes, and by moving a directory under an open one.
    let World { overlay, budget, .. } = &world;
    assert_eq!(overlay.make_link(budget, "/etc/passwd", &[], "own"), Err(Errno::Perm));
    overlay.make_link(budget, "../secret", &[], "own").unwrap();
    overlay.make_link(budget, "dir/../../secret", &[], "own2").unwrap();
    for path in ["own", "own2", "dir/../own"] {
        assert_eq!(world.read(path), Err(Errno::Perm), "{path}");
    }
    let start = [Name::from("dir")];
    assert_eq!(overlay.status(&start, "..", true).unwrap_err(), Errno::Perm);
    assert_eq!(overlay.status(&start, "../own", false).unwrap_err(), Errno::Perm);
    overlay.rename(budget, (&[], "dir"), (&[], "moved")).unwrap();
    assert_eq!(overlay.status(&start, ".", true).unwrap_err(), Errno::Noent);
    assert_eq!(fs::read(outer.path().join("secret")).unwrap(), b"secret");
}

#[test]
fn directories_do_not_nest_without_end() {
    let base = TempDir::new().unwrap();
    let World { overlay, budget, .. } = over(base.path(), u64::MAX);
    let chain = |root: &str| {
        let mut path = root.to_owned();
        for _ in 0..200 {
            overlay.make_dir(&budget, &[], &path).unwrap();
            path.push_str("/d");
        }
        path
    };
    let end = chain("a");
    chain("b");
    assert_eq!(overlay.rename(&budget, (&[], "b"), (&[], &end)), Err(Errno::Nametoolong));
    assert!(overlay.status(&[], "b/d/d", true).is_ok());
}

#[test]
fn what_else_lies_in_the_base_is_not_opened() {
    let base = TempDir::new().unwrap();
    nix::unistd::mkfifo(&base.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut file = fs::File::create(base.path().join("file")).unwrap();
    file.write_all(b"content").unwrap();
    let world = over(base.path(), 1 << 20);
    assert_eq!(world.read("pipe"), Err(Errno::Notsup));
    assert_eq!(world.write("pipe", 0, b"x"), Err(Errno::Notsup));
    // What the host cuts off meanwhile reads as zeros, and does not fail.
    let open = world.open("file", WISH).unwrap();
    file.set_len(3).unwrap();
    let mut bytes = [1; 7];
    assert_eq!(open.file.read_at(open.below.as_ref(), 0, &mut bytes), Ok(7));
    assert_eq!(&bytes, b"con\0\0\0\0");
}
