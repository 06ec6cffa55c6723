//! What a guest does with a folder that it may write, and what of it is on the host.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use common::{Msg, ROOT, mount, start_for, start_what};
use exocell_folders::{Errno, FILE_NAME, Limits, Owners, Rights, What};

const RW: Rights = Rights::READ_WRITE;

#[test]
fn files_are_made_written_read_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), RW);
    let (made, handle) = guest.create(ROOT, "new", libc::O_RDWR, 0o640).unwrap();
    assert_eq!(made.mode, libc::S_IFREG | 0o640);
    assert_eq!(guest.write(handle, 3, b"abc"), Ok(3));
    assert_eq!(guest.read(handle, 0, 100).unwrap(), b"\0\0\0abc");
    assert_eq!(fs::read(dir.path().join("new")).unwrap(), b"\0\0\0abc");
    assert_eq!(guest.getattr(made.node).unwrap().size, 6);
    guest.release(handle).unwrap();
    assert_eq!(guest.read(handle, 0, 1), Err(Errno::BADF));
    guest.ask(10, ROOT, Msg::new().s("new")).unwrap();
    assert_eq!(guest.lookup(ROOT, "new"), Err(Errno::NOENT));
    // It is still the file that it was, for who holds it.
    let handle = guest.open(made.node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(handle, 3, 3).unwrap(), b"abc");
}

#[test]
fn directories_are_listed_whole_however_small_the_room() {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..500 {
        fs::write(dir.path().join(format!("file-{number:03}")), "").unwrap();
    }
    let mut guest = mount(dir.path(), RW);
    for plus in [false, true] {
        let mut names = guest.names(ROOT, plus).unwrap();
        names.sort();
        assert_eq!(names.len(), 502, "plus {plus}");
        assert_eq!(names[..3], [".", "..", "file-000"]);
        assert_eq!(names[501], "file-499");
    }
}

#[test]
fn trees_are_made_moved_and_linked() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), RW);
    guest.ask(9, ROOT, Msg::new().u32(0o755).u32(0).s("a")).unwrap();
    let a = guest.find("a").unwrap().node;
    guest.create(a, "f", libc::O_WRONLY, 0o600).unwrap();
    guest.ask(6, a, Msg::new().s("l").s("../outside")).unwrap();
    let link = guest.find("a/l").unwrap().node;
    assert_eq!(guest.ask(5, link, Msg::new()).unwrap(), b"../outside");
    let file = guest.find("a/f").unwrap().node;
    guest.ask(13, ROOT, Msg::new().u64(file).s("hard")).unwrap();
    assert_eq!(fs::metadata(dir.path().join("hard")).unwrap().nlink(), 2);
    guest.ask(13, ROOT, Msg::new().u64(link).s("soft")).unwrap();
    assert!(fs::symlink_metadata(dir.path().join("soft")).unwrap().is_symlink());
    // RENAME_NOREPLACE, RENAME_EXCHANGE, and what would make a device.
    let rename = |flags, from, to| Msg::new().u64(ROOT).u32(flags).u32(0).s(from).s(to);
    assert_eq!(guest.ask(45, ROOT, rename(1, "hard", "a")), Err(Errno::EXIST));
    guest.ask(45, ROOT, rename(2, "hard", "soft")).unwrap();
    assert!(fs::symlink_metadata(dir.path().join("hard")).unwrap().is_symlink());
    assert_eq!(guest.ask(45, ROOT, rename(4, "hard", "x")), Err(Errno::INVAL));
    guest.ask(12, ROOT, Msg::new().u64(a).s("soft").s("f")).unwrap();
    assert_eq!(guest.ask(11, ROOT, Msg::new().s("a")), Err(Errno::NOTEMPTY));
}

#[test]
fn what_is_fixed_at_one_place_is_written_at_another() {
    use nix::mount::{MsFlags, mount as mounted};
    use nix::sched::{CloneFlags, unshare};
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // In mounts of this thread's own.
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none = None::<&str>;
    mounted(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let (source, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    mounted(Some("t"), source.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(source.path().join("f"), "before").unwrap();
    for (name, flags) in [("fixed", MsFlags::MS_RDONLY), ("open", MsFlags::empty())] {
        let at = dir.path().join(name);
        fs::create_dir(&at).unwrap();
        mounted(Some(source.path()), &at, none, MsFlags::MS_BIND, none).unwrap();
        mounted(none, &at, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags, none).unwrap();
    }
    for names in [["fixed/f", "open/f"], ["open/f", "fixed/f"]] {
        let mut guest = mount(dir.path(), RW);
        let [fixed, open] = {
            let [first, second] = names.map(|name| guest.find(name).unwrap().node);
            if names[0] == "fixed/f" { [first, second] } else { [second, first] }
        };
        assert_ne!(fixed, open);
        assert_eq!(guest.find("fixed/f").unwrap().node, fixed);
        assert_eq!(guest.open(fixed, libc::O_RDWR).err(), Some(Errno::ROFS));
        let handle = guest.open(open, libc::O_RDWR).unwrap();
        assert_eq!(guest.write(handle, 0, b"after!"), Ok(6));
        let handle = guest.open(fixed, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(handle, 0, 6).unwrap(), b"after!");
    }
}

#[test]
fn set_id_bits_and_devices_are_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), RW);
    let (made, _) = guest.create(ROOT, "f", libc::O_WRONLY, 0o6755).unwrap();
    assert_eq!(made.mode & 0o7777, 0o755);
    let changed = guest.setattr(made.node, 1, (0o6711, 0, 0), 0).unwrap();
    assert_eq!(changed.mode & 0o7777, 0o711);
    for kind in [libc::S_IFCHR, libc::S_IFBLK] {
        let body = Msg::new().u32(kind | 0o666).u32(0x103).u32(0).u32(0).s("device");
        assert_eq!(guest.ask(8, ROOT, body), Err(Errno::PERM));
    }
    for (kind, name) in [(libc::S_IFIFO, "fifo"), (libc::S_IFSOCK, "socket")] {
        guest.ask(8, ROOT, Msg::new().u32(kind | 0o666).u32(0).u32(0).u32(0).s(name)).unwrap();
        let node = guest.find(name).unwrap().node;
        assert_eq!(guest.open(node, libc::O_RDWR), Err(Errno::ACCESS));
    }
    assert_eq!(guest.denials(), 4);
}

#[test]
fn a_file_without_a_name_gets_one_by_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), RW);
    let body = Msg::new().u32(libc::O_RDWR as u32).u32(0o600).u32(0).u32(0).s("");
    let answer = guest.ask(51, ROOT, body).unwrap();
    let node = u64::from_le_bytes(answer[..8].try_into().unwrap());
    let handle = u64::from_le_bytes(answer[128..136].try_into().unwrap());
    guest.write(handle, 0, b"unnamed").unwrap();
    guest.ask(13, ROOT, Msg::new().u64(node).s("named")).unwrap();
    assert_eq!(fs::read(dir.path().join("named")).unwrap(), b"unnamed");
}

#[test]
fn attributes_that_would_act_on_the_host_are_kept_apart() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut guest = mount(dir.path(), RW);
    let (file, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o755).unwrap();
    let set = |name: &str| Msg::new().u32(3).u32(0).u32(0).u32(0).s(name).bytes(b"\0\x01\x02");
    for name in ["security.capability", "user.mine", "trusted.overlay.opaque"] {
        guest.ask(21, file.node, set(name)).unwrap();
        let get = guest.ask(22, file.node, Msg::new().u32(64).u32(0).s(name));
        assert_eq!(get.unwrap(), b"\0\x01\x02", "{name}");
    }
    let mut names = guest.ask(23, file.node, Msg::new().u32(4096).u32(0)).unwrap();
    names.pop();
    let mut names: Vec<&[u8]> = names.split(|byte| *byte == 0).collect();
    names.sort();
    let told: [&[u8]; 3] = [b"security.capability", b"trusted.overlay.opaque", b"user.mine"];
    assert_eq!(names, told);
    let mut held = [0; 64];
    let path = dir.path().join("f");
    let host = rustix::fs::getxattr(&path, "security.capability", &mut held);
    assert_eq!(host, Err(Errno::NODATA));
    assert_eq!(guest.ask(21, file.node, set("user.exocell.owner")), Err(Errno::OPNOTSUPP));
    // They end when the file changes.
    guest.release(handle).unwrap();
    let handle = guest.open(file.node, libc::O_WRONLY).unwrap();
    guest.write(handle, 0, b"x").unwrap();
    let get = guest.ask(22, file.node, Msg::new().u32(64).u32(0).s("security.capability"));
    assert_eq!(get, Err(Errno::NODATA));
}

#[test]
fn locks_hold_on_the_host_and_end_with_their_holder() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = mount(dir.path(), RW);
    let (file, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    let lock = |owner, kind: i32, flags| {
        let lock = Msg::new().u64(handle).u64(owner).u64(0).u64(9).u32(kind as u32);
        lock.u32(0).u32(flags).u32(0)
    };
    guest.ask(32, file.node, lock(1, libc::F_WRLCK, 0)).unwrap();
    assert_eq!(guest.ask(32, file.node, lock(2, libc::F_RDLCK, 0)), Err(Errno::AGAIN));
    assert_eq!(guest.ask(33, file.node, lock(2, libc::F_RDLCK, 0)), Err(Errno::AGAIN));
    let found = guest.ask(31, file.node, lock(2, libc::F_RDLCK, 0)).unwrap();
    assert_eq!(u32::from_le_bytes(found[16..20].try_into().unwrap()), libc::F_WRLCK as u32);
    guest.ask(25, file.node, Msg::new().u64(handle).u64(0).u64(1)).unwrap();
    guest.ask(32, file.node, lock(2, libc::F_WRLCK, 0)).unwrap();
    // Whole files, against the host.
    let host = fs::File::open(dir.path().join("f")).unwrap();
    guest.ask(32, file.node, lock(1, libc::F_WRLCK, 1)).unwrap();
    assert!(host.try_lock().is_err());
    guest.release(handle).unwrap();
    host.try_lock().unwrap();
    host.unlock().unwrap();
    // What a description locked, of which no flush tells, ends with it.
    let again = guest.open(file.node, libc::O_RDWR).unwrap();
    assert_eq!(guest.ask(32, file.node, lock(3, libc::F_WRLCK, 0)), Err(Errno::BADF));
    let lock = |handle, owner| {
        let lock = Msg::new().u64(handle).u64(owner).u64(0).u64(9).u32(libc::F_WRLCK as u32);
        lock.u32(0).u32(0).u32(0)
    };
    guest.ask(32, file.node, lock(again, 3)).unwrap();
    let other = guest.open(file.node, libc::O_RDWR).unwrap();
    assert_eq!(guest.ask(32, file.node, lock(other, 4)), Err(Errno::AGAIN));
    guest.release(again).unwrap();
    guest.ask(32, file.node, lock(other, 4)).unwrap();
}

#[test]
fn a_file_is_emptied_for_who_only_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "text").unwrap();
    let mut guest = mount(dir.path(), RW);
    let file = guest.find("f").unwrap().node;
    guest.open(file, libc::O_RDONLY | libc::O_TRUNC).unwrap();
    assert_eq!(fs::metadata(dir.path().join("f")).unwrap().len(), 0);
    let mut reader = mount(dir.path(), Rights::READ);
    let file = reader.find("f").unwrap().node;
    assert_eq!(reader.open(file, libc::O_RDONLY | libc::O_TRUNC), Err(Errno::ROFS));
}

#[test]
fn one_file_is_all_that_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("own"), "content").unwrap();
    let file = fs::File::options().read(true).write(true).open(dir.path().join("own")).unwrap();
    let empty = fs::File::open(empty.path()).unwrap();
    let what = What::File { file: file.into(), empty: empty.into() };
    let mut guest = start_what(what, RW, Limits::default());
    guest.init().unwrap();
    assert_eq!(guest.names(ROOT, true).unwrap(), [FILE_NAME]);
    let node = guest.lookup(ROOT, FILE_NAME).unwrap().node;
    let handle = guest.open(node, libc::O_RDWR | libc::O_TRUNC).unwrap();
    guest.write(handle, 0, b"changed").unwrap();
    assert_eq!(fs::read(dir.path().join("own")).unwrap(), b"changed");
    assert_eq!(guest.lookup(ROOT, "own"), Err(Errno::NOENT));
    assert_eq!(guest.create(ROOT, "x", libc::O_RDWR, 0o600).err(), Some(Errno::PERM));
    assert_eq!(guest.ask(10, ROOT, Msg::new().s(FILE_NAME)), Err(Errno::PERM));
}

#[test]
fn what_the_host_changes_is_told_at_the_next_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, "before").unwrap();
    let mut guest = mount(dir.path(), RW);
    let node = guest.find("f").unwrap().node;
    let keeps = |guest: &mut common::Guest| {
        let answer = guest.ask(14, node, Msg::new().u32(0).u32(0)).unwrap();
        u32::from_le_bytes(answer[8..12].try_into().unwrap()) & 2 != 0
    };
    assert!(!keeps(&mut guest), "nothing is known at first");
    assert!(keeps(&mut guest));
    fs::write(&path, "and after").unwrap();
    assert!(!keeps(&mut guest));
    assert!(keeps(&mut guest));
}

#[test]
fn owners_that_the_host_cannot_keep_are_told_to_guests() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = fs::File::open(dir.path()).unwrap();
    let what = What::Directory(folder.into());
    let mut guest = start_for(what, RW, Limits::default(), Owners::Squashed);
    guest.init().unwrap();
    // Who serves is 0 in the process's own namespace.
    let own = fs::metadata(dir.path()).unwrap();
    if own.uid() != 0 {
        return;
    }
    (guest.uid, guest.gid) = (1000, 1001);
    let (made, handle) = guest.create(ROOT, "f", libc::O_RDWR, 0o600).unwrap();
    assert_eq!((made.uid, made.gid), (1000, 1001));
    guest.write(handle, 0, b"mine").unwrap();
    guest.ask(9, ROOT, Msg::new().u32(0o700).u32(0).s("d")).unwrap();
    let told = guest.find("d").unwrap();
    assert_eq!((told.uid, told.gid), (1000, 1001));
    let held = fs::metadata(dir.path().join("f")).unwrap();
    assert_eq!((held.uid(), held.gid()), (own.uid(), own.gid()));
    // FATTR_UID and FATTR_GID: to another, and back to whose they are on the host.
    let given = guest.setattr(made.node, 6, (0, 999, 998), 0).unwrap();
    assert_eq!((given.uid, given.gid), (999, 998));
    assert_eq!(guest.ask(23, made.node, Msg::new().u32(4096).u32(0)).unwrap(), b"");
    let given = guest.setattr(made.node, 6, (0, 0, own.gid()), 0).unwrap();
    assert_eq!((given.uid, given.gid), (0, own.gid()));
}

#[test]
fn links_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("in")).unwrap();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    symlink("../secret", dir.path().join("in/link")).unwrap();
    symlink("..", dir.path().join("in/up")).unwrap();
    let mut guest = mount(&dir.path().join("in"), RW);
    let link = guest.find("link").unwrap();
    assert_eq!(link.mode & libc::S_IFMT, libc::S_IFLNK);
    assert_eq!(guest.open(link.node, libc::O_RDONLY), Err(Errno::LOOP));
    assert_eq!(guest.find("up/secret"), Err(Errno::NOTDIR));
    for name in ["..", ".", "a/b", "../secret", "/etc/passwd"] {
        assert_eq!(guest.lookup(ROOT, name), Err(Errno::ACCESS), "{name}");
        assert_eq!(guest.create(ROOT, name, libc::O_RDWR, 0o600).err(), Some(Errno::ACCESS));
    }
    let name = "n".repeat(256);
    assert_eq!(guest.lookup(ROOT, &name), Err(Errno::NAMETOOLONG));
    // The parent of the folder is hidden.
    let mode = fs::metadata(dir.path().join("secret")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644 & mode);
}

/// What a guest knows takes no descriptor each.
#[test]
fn more_files_are_known_than_are_held() {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..100 {
        fs::create_dir(dir.path().join(format!("d{number}"))).unwrap();
        fs::write(dir.path().join(format!("d{number}/f")), number.to_string()).unwrap();
    }
    let limits = Limits { nodes_max: 1000, held_max: 8, ..Limits::default() };
    let what = What::Directory(fs::File::open(dir.path()).unwrap().into());
    let mut guest = start_what(what, RW, limits);
    guest.init().unwrap();
    let nodes: Vec<(u64, u64)> = (0..100)
        .map(|number| {
            let parent = guest.find(&format!("d{number}")).unwrap().node;
            (parent, guest.lookup(parent, "f").unwrap().node)
        })
        .collect();
    for (number, (_, node)) in nodes.iter().enumerate() {
        let handle = guest.open(*node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(handle, 0, 9).unwrap(), number.to_string().as_bytes());
        guest.release(handle).unwrap();
    }
    // The same file has the same number, wherever it is now.
    assert_eq!(guest.find("d0/f").unwrap().node, nodes[0].1);
    guest.ask(12, nodes[1].0, Msg::new().u64(nodes[2].0).s("f").s("moved")).unwrap();
    for (_, node) in &nodes[50..] {
        guest.getattr(*node).unwrap();
    }
    assert_eq!(guest.getattr(nodes[1].1).unwrap().size, 1);
    assert_eq!(guest.find("d2/moved").unwrap().node, nodes[1].1);
    // One that the host replaced is not that file, and found again by its name only.
    for (_, node) in &nodes[50..] {
        guest.getattr(*node).unwrap();
    }
    fs::remove_file(dir.path().join("d3/f")).unwrap();
    fs::write(dir.path().join("d3/f"), "another").unwrap();
    assert_eq!(guest.getattr(nodes[3].1), Err(Errno::STALE));
    let again = guest.lookup(nodes[3].0, "f").unwrap();
    assert_ne!(again.node, nodes[3].1);
    assert_eq!(again.size, 7);
    guest.forget(nodes[3].1);
    assert_eq!(guest.getattr(again.node).unwrap().size, 7);
    // What is open stays held, with a name or without one.
    let handles: Vec<u64> =
        nodes[10..14].iter().map(|(_, node)| guest.open(*node, libc::O_RDWR).unwrap()).collect();
    guest.ask(10, nodes[10].0, Msg::new().s("f")).unwrap();
    for (_, node) in &nodes[50..] {
        guest.getattr(*node).unwrap();
    }
    assert_eq!(guest.getattr(nodes[10].1).unwrap().size, 2);
    // Where all that may be held is open, there is no room.
    let more: Vec<_> =
        nodes[20..30].iter().map(|(_, node)| guest.open(*node, libc::O_RDWR)).collect();
    assert!(more.contains(&Err(Errno::NFILE)), "{more:?}");
    assert_eq!(guest.create(ROOT, "new", libc::O_RDWR, 0o600).err(), Some(Errno::NFILE));
    assert!(!dir.path().join("new").exists());
    handles.into_iter().for_each(|handle| drop(guest.release(handle).unwrap()));
    guest.create(ROOT, "new", libc::O_RDWR, 0o600).unwrap();
    // A guest that forgets a directory cannot be told of what was in it.
    guest.forget(nodes[40].0);
    for (_, node) in &nodes[50..] {
        guest.getattr(*node).unwrap();
    }
    assert_eq!(guest.getattr(nodes[40].1), Err(Errno::STALE));
}

/// Opcodes of the guest's kernel for files that are watched there.
const WATCH: u32 = 8192;
const EVENTS: u32 = 8193;

/// Runs a program of the host's in `dir`, as one process.
fn python(dir: &std::path::Path, script: &str) {
    let script = format!("import os\n{script}");
    let done =
        std::process::Command::new("python3").args(["-c", &script]).current_dir(dir).status();
    assert!(done.unwrap().success());
}

/// What is told: files, events, names.
fn told(bytes: &[u8]) -> Vec<(u64, u32, String)> {
    let mut told = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let number = u64::from_le_bytes(rest[..8].try_into().unwrap());
        let event = u32::from_le_bytes(rest[8..12].try_into().unwrap());
        let len = u32::from_le_bytes(rest[12..16].try_into().unwrap()) as usize;
        told.push((number, event, String::from_utf8(rest[16..16 + len].to_vec()).unwrap()));
        rest = &rest[(16 + len).next_multiple_of(8)..];
    }
    told
}

#[test]
fn what_others_do_to_files_that_are_watched_is_told() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("unwatched")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let (mut guest, mut other) = (mount(dir.path(), RW), mount(dir.path(), RW));
    let its_file = other.find("file").unwrap().node;
    other.ask(WATCH, its_file, Msg::new().u64(1)).unwrap();
    let file = guest.find("file").unwrap().node;
    guest.ask(WATCH, ROOT, Msg::new().u64(1)).unwrap();
    guest.ask(WATCH, ROOT, Msg::new().u64(0)).unwrap();
    guest.ask(WATCH, file, Msg::new().u64(0)).unwrap();
    // The server's own process has done that.
    guest.create(ROOT, "own", libc::O_RDWR, 0o640).unwrap();
    assert_eq!(told(&guest.ask(EVENTS, ROOT, Msg::new()).unwrap()), []);
    let script = "mkdir d; echo x >f; echo x >unwatched/f; echo x >>file; mv f g; rmdir d";
    let done =
        std::process::Command::new("sh").args(["-c", script]).current_dir(dir.path()).status();
    assert!(done.unwrap().success());
    let mut all = Vec::new();
    loop {
        let more = guest.ask(EVENTS, ROOT, Msg::new()).unwrap();
        if more.is_empty() {
            break;
        }
        all.extend(told(&more));
    }
    let event = |number, event: u64, name: &str| (number, event as u32, name.to_owned());
    let has = |wanted| assert!(all.contains(&wanted), "{wanted:?} {all:?}");
    has(event(ROOT, libc::FAN_CREATE | libc::FAN_ONDIR, "d"));
    has(event(ROOT, libc::FAN_CREATE, "f"));
    has(event(ROOT, libc::FAN_CLOSE_WRITE, "f"));
    has(event(ROOT, libc::FAN_MODIFY, "file"));
    // Both names of a rename follow one another, and say so.
    let from = event(ROOT, libc::FAN_MOVED_FROM | 1, "f");
    let at = all.iter().position(|heard| *heard == from).expect("it moved");
    assert_eq!(all[at + 1], event(ROOT, libc::FAN_MOVED_TO | 1, "g"));
    has(event(ROOT, libc::FAN_DELETE | libc::FAN_ONDIR, "d"));
    // What both are told of is told once: the guest's kernel tells who watches the file.
    assert!(all.iter().all(|(number, ..)| *number == ROOT), "{all:?}");
    // Who watches the file alone hears of that.
    let heard = told(&other.ask(EVENTS, ROOT, Msg::new()).unwrap());
    assert_eq!(heard[0], (its_file, libc::FAN_MODIFY as u32, String::new()));
    // What the guest has forgotten is not watched any more.
    guest.forget(file);
    fs::write(dir.path().join("file"), "again").unwrap();
    let after = told(&guest.ask(EVENTS, ROOT, Msg::new()).unwrap());
    assert!(after.iter().all(|(number, ..)| *number == ROOT), "{after:?}");
}

#[test]
fn what_the_host_tells_at_once_is_told_as_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["again", "self"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let mut guest = mount(dir.path(), RW);
    let gone = guest.find("self").unwrap().node;
    guest.ask(WATCH, ROOT, Msg::new().u64(1)).unwrap();
    guest.ask(WATCH, gone, Msg::new().u64(0)).unwrap();
    let events = |guest: &mut common::Guest| told(&guest.ask(EVENTS, ROOT, Msg::new()).unwrap());
    let event = |number, event: u64, name: &str| (number, event as u32, name.to_owned());
    // The guest's own changes, more than are read at once, do not keep others' back.
    for number in 0..300 {
        let (_, handle) = guest.create(ROOT, &format!("own{number}"), libc::O_RDWR, 0o600).unwrap();
        guest.release(handle).unwrap();
    }
    python(dir.path(), "os.unlink('again'); open('again', 'w').close()");
    let heard = events(&mut guest);
    assert_eq!(heard[0], event(ROOT, libc::FAN_DELETE, "again"), "{heard:?}");
    assert_eq!(heard[1], event(ROOT, libc::FAN_CREATE, "again"), "{heard:?}");
    python(dir.path(), "open('new', 'w').close(); os.unlink('new')");
    let heard = events(&mut guest);
    assert_eq!(heard[0], event(ROOT, libc::FAN_CREATE, "new"), "{heard:?}");
    // The host has merged these two. What it tells of the file is told for a name that is gone.
    assert_eq!(heard[1], event(ROOT, libc::FAN_DELETE, "new"), "{heard:?}");
    // There and back are two renames.
    python(dir.path(), "os.rename('again', 'x'); os.rename('x', 'again')");
    let names: Vec<_> = events(&mut guest).into_iter().map(|(_, _, name)| name).collect();
    assert_eq!(names, ["again", "x", "x", "again"]);
    python(dir.path(), "os.unlink('self')");
    assert!(events(&mut guest).contains(&event(gone, libc::FAN_DELETE_SELF, "")));
    // What happened while nobody watched is nobody's.
    python(dir.path(), "open('unheard', 'w').close()");
    guest.ask(WATCH, ROOT, Msg::new().u64(1)).unwrap();
    assert_eq!(events(&mut guest), []);
}
