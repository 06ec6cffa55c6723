//! What Exocell does on the host: whose its files are, what a command line shows, what comes out of
//! a cell, how much it may take, what is left after a kill, and who reads what others made.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::cell::Cell;
use crate::common::docker::Server;
use crate::common::guest::{PrivateRoot, TINY};
use crate::common::{
    IMAGE, Started, eventually, exocell, finish, host, program, run, shell, text, unique, until,
};

/// Everything below `root`, links not followed.
fn below(root: &Path) -> Vec<(PathBuf, fs::Metadata)> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(about) = fs::symlink_metadata(entry.path()) else { continue };
            if about.is_dir() {
                waiting.push(entry.path());
            }
            found.push((entry.path(), about));
        }
    }
    found
}

/// What below `root` others may have something of.
fn open_to_others(root: &Path) -> Vec<String> {
    // What a guest kernel starts from holds nothing of anybody's; a volume's files are its users'.
    let spared = ["kernels", "initramfs"].map(|name| root.join(name));
    let volumes = root.join("docker/volumes");
    let open = below(root).into_iter().filter(|(path, about)| {
        let is_spared = spared.iter().any(|place| path.starts_with(place) && path != place);
        let is_volumes = path.starts_with(&volumes) && *path != volumes;
        !about.is_symlink() && !is_spared && !is_volumes && about.mode() & 0o077 != 0
    });
    open.map(|(path, about)| format!("{} {:o}", path.display(), about.mode() & 0o7777)).collect()
}

#[test]
fn files_under_the_root_are_their_owners_alone() {
    let root = PrivateRoot::with_image();
    root.run(["budget", "1g"]).ok();
    root.run(["run", "--rm", "--pager", "credit", TINY, "true"]).ok();
    let started = root.run(["run", "-d", "--name", "kept", "-e", "A=b", TINY, "sleep", "60"]).ok();
    assert!(!started.text().is_empty());
    assert_eq!(open_to_others(&root.path()), Vec::<String>::new());
    root.run(["rm", "-f", "kept"]).ok();

    let server = Server::start();
    let image = server.small();
    let flags = ["-d", "--network", "none", "-e", "TOKEN=hush", "-v", "vol:/data", "--name", "c"];
    server.docker(&[&["run"], &flags[..], &[&image, "sleep", "60"]].concat()).ok();
    server.docker(&["create", "--network", "none", "-e", "TOKEN=hush", &image, "true"]).ok();
    let containers = server.root().join("docker/containers");
    let holds = below(&containers)
        .into_iter()
        .filter(|(path, _)| fs::read_to_string(path).is_ok_and(|text| text.contains("TOKEN=hush")));
    assert_eq!(holds.count(), 2, "environments are kept");
    assert_eq!(open_to_others(server.root()), Vec::<String>::new());
}

#[test]
fn a_root_that_was_open_is_closed_by_the_next_server() {
    let mut server = Server::start();
    server.kill();
    for folder in ["docker", "docker/containers", "docker/disks"] {
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(server.root().join(folder), open).unwrap();
    }
    server.resume();
    assert_eq!(open_to_others(server.root()), Vec::<String>::new());
}

/// The command lines of this host's processes that hold `word`, this test's own left out.
fn command_lines_with(word: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.map(host::command_line).filter(|line| line.contains(word)).collect()
}

#[test]
fn values_are_in_no_command_line() {
    let (secret, variable) = (unique("hunter"), unique("variable"));
    let flags = ["--allow-net", "peer.test:80", "--secret", &format!("KEY={secret}@peer.test")];
    let own = format!("-eTOKEN={variable}");
    let cell = Cell::idle("hidden", &[&flags[..], &[&own]].concat());
    assert_eq!(cell.shell("echo $TOKEN").ok().text(), variable, "the program has it");
    for value in [&secret, &variable] {
        assert_eq!(command_lines_with(value), Vec::<String>::new());
    }
    let supervisor = host::command_line(cell.supervisor());
    assert!(supervisor.contains("KEY=*") && supervisor.contains("TOKEN=*"), "{supervisor}");
    // A command that stays in the foreground, and one more program.
    let mut inside = Started::new(&mut cell.exec(&["-e", &own[2..]], &["sleep", "60"]));
    eventually("its value is gone", || {
        let line = host::command_line(inside.pid());
        line.contains("TOKEN=*") && !line.contains(&variable)
    });
    inside.close_stdin();
}

/// Makes files in the cell that would give rights on a host.
const HOSTILE_FILES: &str = "mkdir -p /job/deep && cd /job && echo x > plain && cp plain su \
    && chmod 6755 su && chmod 4711 deep && cp su deep/sgid && chmod 2755 deep/sgid \
    && mknod disk b 7 0 && mknod deep/null c 1 3 && mkfifo fifo && ln -s /etc/shadow link";

/// Asserts that nothing below `place` gives rights, and that the rest came.
#[track_caller]
fn has_no_rights(place: &Path) {
    let found = below(place);
    for (path, about) in &found {
        let kind = about.file_type();
        let device = kind.is_block_device() || kind.is_char_device();
        assert!(!device, "{} is a device", path.display());
        assert_eq!(about.mode() & 0o6000, 0, "{} has set-id bits", path.display());
    }
    let files = found.iter().filter(|(_, about)| about.is_file()).count();
    assert_eq!(files, 3, "{found:?}");
}

#[test]
fn copies_out_of_a_cell_give_no_rights() {
    let cell = Cell::idle("copies", &[]);
    cell.shell(HOSTILE_FILES).ok();
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("copy");
    run(["cp", &cell.path("/job"), text(&copy)]).ok();
    has_no_rights(&copy);
    assert_eq!(fs::metadata(copy.join("su")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("/etc/shadow"));
    // The same as a stream, for whoever unpacks it.
    let stream = run(["cp", &cell.path("/job"), "-"]).ok().stdout;
    unpack_with_all_rights(&stream, &place.path().join("stream"));
    has_no_rights(&place.path().join("stream"));
}

/// As root unpacks an archive that it trusts.
#[track_caller]
fn unpack_with_all_rights(stream: &[u8], to: &Path) {
    fs::create_dir(to).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-x", "-p", "--xattrs", "--exclude=fifo", "-C", text(to)]);
    finish(&mut tar, stream).ok();
}

/// What the host has mounted, and what it reads as if it were a disk.
fn mounts_and_loops() -> (String, Vec<String>) {
    let backing =
        |path: std::path::PathBuf| fs::read_to_string(path.join("loop/backing_file")).ok();
    let disks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let loops = disks.filter_map(|disk| backing(disk.path())).collect();
    (fs::read_to_string("/proc/self/mounts").unwrap(), loops)
}

#[test]
fn a_disk_that_a_cell_broke_is_read_in_a_cell_alone() {
    let server = Server::start();
    server.docker(&["create", "--privileged", "--name", "c", IMAGE, "sleep", "1000"]).ok();
    server.docker(&["start", "c"]).ok();
    // Below its mounted file system, as the root of a cell can: the superblock, and what follows.
    let script = "echo kept > /job; sync; for d in /sys/block/vd*; do \
                  [ $(cat $d/ro) = 0 ] || continue; \
                  mknod /dev/raw b $(tr : ' ' < $d/dev); \
                  head -c 1048576 /dev/urandom | dd of=/dev/raw bs=64k conv=notrunc oflag=direct; \
                  rm /dev/raw; echo wrote; done";
    let wrote = server.docker(&["exec", "c", "sh", "-c", script]).ok();
    assert!(wrote.text().contains("wrote"), "{}", wrote.stderr);
    server.docker(&["kill", "c"]).ok();
    let before = mounts_and_loops();
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("copy");
    let exported = place.path().join("exported.tar");
    for args in [
        &["cp", "c:/job", text(&copy)][..],
        &["export", "-o", text(&exported), "c"],
        &["commit", "c", "broken"],
        &["start", "c"],
    ] {
        let ended = server.docker(args);
        assert_ne!(ended.code, 0, "{args:?}");
        assert!(!ended.stderr.trim().is_empty(), "{args:?}");
        assert_eq!(mounts_and_loops(), before);
    }
    // Nothing of it is left, and others are served.
    server.docker(&["rm", "-f", "c"]).ok();
    server.idle("d");
    assert_eq!(server.docker(&["exec", "d", "echo", "well"]).ok().text(), "well");
}

#[test]
fn copies_and_exports_of_a_container_give_no_rights() {
    let server = Server::start();
    server.idle("c");
    server.docker(&["exec", "c", "sh", "-c", HOSTILE_FILES]).ok();
    let place = tempfile::tempdir().unwrap();
    server.docker(&["cp", "c:/job", text(&place.path().join("copy"))]).ok();
    has_no_rights(&place.path().join("copy"));
    let exported = place.path().join("exported.tar");
    server.docker(&["export", "-o", text(&exported), "c"]).ok();
    let mut names = 0;
    for entry in tar::Archive::new(fs::File::open(&exported).unwrap()).entries().unwrap() {
        let entry = entry.unwrap();
        let (kind, mode) = (entry.header().entry_type(), entry.header().mode().unwrap());
        let name = entry.path().unwrap().display().to_string();
        assert!(!kind.is_block_special() && !kind.is_character_special(), "{name}");
        assert_eq!(mode & 0o6000, 0, "{name}");
        names += 1;
    }
    assert!(names > 1000, "{names} names: the whole root file system");
}

#[test]
fn a_folder_gets_no_set_id_bits_and_no_devices() {
    let place = tempfile::tempdir().unwrap();
    let shared = place.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let volume = format!("{}:/job", text(&shared));
    // It makes neither devices nor fifos.
    let script = HOSTILE_FILES.replace("&& mkfifo fifo &&", ";").replace("&& mknod", "; mknod");
    let said = shell(&["-v", &volume], &script).ok().stderr;
    assert_eq!(said.matches("Operation not permitted").count(), 2, "{said}");
    has_no_rights(&shared);
}

#[test]
fn two_servers_on_one_root_say_which() {
    let server = Server::start();
    let other = server.root().join("other.sock");
    let second = finish(&mut server.exocell(&["serve", "--docker", text(&other)]), b"");
    let first = server.url();
    second.exited(125).complains_of(&[text(server.root()), "--root", &first]);
}

/// `bytes` with gzip.
fn gzip(bytes: impl Read) -> Vec<u8> {
    let mut packed = flate2::read::GzEncoder::new(bytes, flate2::Compression::best());
    let mut out = Vec::new();
    packed.read_to_end(&mut out).unwrap();
    out
}

/// An archive with `entries`.
fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// The archive of an image called `name` with these layers.
fn image_of(name: &str, layers: &[Vec<u8>]) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": { "Env": [format!("X={name}")] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let names: Vec<String> = (0..layers.len()).map(|at| format!("{at}.tar")).collect();
    let manifest = json!([{ "Config": "config.json", "RepoTags": [name], "Layers": names }]);
    let (config, manifest) = (config.to_string(), manifest.to_string());
    let mut entries: Vec<(&str, &[u8])> =
        vec![("config.json", config.as_bytes()), ("manifest.json", manifest.as_bytes())];
    entries.extend(names.iter().zip(layers).map(|(name, layer)| (&**name, &**layer)));
    archive(&entries)
}

fn digest(bytes: &[u8]) -> String {
    exocell_cell::images::Digest::of(bytes).to_string()
}

#[test]
fn what_unpacks_to_too_much_is_refused_and_leaves_nothing() {
    let server = Server::start();
    let place = tempfile::tempdir().unwrap();
    // A few megabytes that are more than 5 GiB of one file.
    let bomb = place.path().join("bomb.tar.gz");
    let mut header = tar::Header::new_gnu();
    header.set_path("zeros").unwrap();
    header.set_size(6 << 30);
    header.set_cksum();
    // A gzip file may have several parts.
    let part = gzip(std::io::repeat(0).take(64 << 20));
    fs::write(&bomb, [gzip(&header.as_bytes()[..]), part.repeat(6 << 4)].concat()).unwrap();
    let size = fs::metadata(&bomb).unwrap().len();
    assert!(size < 8 << 20, "{size} bytes");
    let loaded = server.docker(&["load", "-i", text(&bomb)]);
    assert_ne!(loaded.code, 0);
    assert!(loaded.stderr.contains("decompression bomb"), "{}", loaded.stderr);
    let large = below(server.root()).into_iter().filter(|(_, about)| about.blocks() > 20 << 10);
    assert_eq!(large.map(|(path, _)| path).collect::<Vec<_>>(), Vec::<PathBuf>::new());

    // Too many layers, and too many names in one.
    let root = PrivateRoot::new();
    let layer = archive(&[("f", b"x")]);
    let layers = place.path().join("layers.tar");
    fs::write(&layers, image_of("many:1", &vec![layer; 600])).unwrap();
    root.run(["image", "import", text(&layers)])
        .exited(125)
        .complains_of(&["the number of layers", "512"]);
    let mut deep = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    header.set_mode(0o644);
    deep.append_data(&mut header, "d/".repeat(600) + "f", std::io::empty()).unwrap();
    let nested = place.path().join("nested.tar");
    fs::write(&nested, image_of("deep:1", &[deep.into_inner().unwrap()])).unwrap();
    root.run(["image", "import", text(&nested)]).exited(125).complains_of(&["depth_max", "512"]);
    let left = fs::read_dir(root.path().join("images/tmp")).unwrap().count();
    assert_eq!(left, 0, "what was refused is gone");
}

#[test]
fn volumes_are_counted() {
    let server = Server::start();
    server.docker(&["volume", "create", "first"]).ok();
    let volumes = server.root().join("docker/volumes");
    (1..1024).for_each(|at| fs::create_dir(volumes.join(format!("v{at}"))).unwrap());
    let more = server.docker(&["volume", "create", "more"]);
    assert_ne!(more.code, 0);
    assert!(more.stderr.contains("1024") && more.stderr.contains("volume rm"), "{}", more.stderr);
    server.docker(&["volume", "create", "first"]).ok();
    server.docker(&["volume", "rm", "v1"]).ok();
    server.docker(&["volume", "create", "more"]).ok();
}

#[test]
fn a_server_that_is_killed_during_a_load_leaves_nothing() {
    let mut server = Server::start();
    let mut stream = server.connect();
    let head = "POST /images/load HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let before = taken_by(server.pid());
    let chunk = [b"100000\r\n".to_vec(), vec![7; 1 << 20], b"\r\n".to_vec()].concat();
    (0..32).for_each(|_| stream.write_all(&chunk).unwrap());
    eventually("it has taken most of it", || taken_by(server.pid()) > before + (16 << 20));
    server.kill();
    let large = below(server.root()).into_iter().filter(|(_, about)| about.len() > 1 << 20);
    assert_eq!(large.map(|(path, _)| path).collect::<Vec<_>>(), Vec::<PathBuf>::new());
    let images = host::state_root().join("images/tmp");
    let named = below(&images).into_iter().filter(|(path, _)| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".tmp"))
    });
    assert_eq!(named.count(), 0);
    // What an earlier version left goes too.
    fs::write(server.root().join("docker/.tmpAbCdEf"), vec![7; 1 << 20]).unwrap();
    server.resume();
    assert!(!server.root().join("docker/.tmpAbCdEf").exists());
}

/// Bytes of the regular files that a process has open for itself.
fn taken_by(pid: i32) -> u64 {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| fs::metadata(entry.path()).ok());
    files.filter(fs::Metadata::is_file).map(|about| about.len()).sum()
}

#[test]
fn what_a_killed_copy_left_is_removed_by_the_next_command() {
    let cell = Cell::idle("killed", &["--disk", "64m"]);
    cell.shell("truncate -s 40G /tmp/endless || truncate -s 15G /tmp/endless").ok();
    let place = tempfile::tempdir().unwrap();
    let mut copy =
        Started::new(&mut exocell(["cp", &cell.path("/tmp/endless"), text(place.path())]));
    let begun = || below(place.path()).iter().any(|(_, about)| about.is_file() && about.len() > 0);
    eventually("it has begun", begun);
    copy.child.kill().unwrap();
    copy.child.wait().unwrap();
    run(["ps"]).ok();
    assert_eq!(below(place.path()).len(), 0, "{:?}", below(place.path()));
    // One that goes on is left alone.
    let _going = Started::new(&mut exocell(["cp", &cell.path("/tmp/endless"), text(place.path())]));
    eventually("it has begun", begun);
    run(["ps"]).ok();
    assert!(begun());
}

/// The processes below `pid`, by their names.
fn descendants(pid: i32) -> BTreeMap<String, i32> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![pid];
    while let Some(parent) = waiting.pop() {
        for child in host::children(parent) {
            waiting.push(child);
            let name = fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            found.insert(name.trim().to_owned(), child);
        }
    }
    found
}

/// Asserts that a process has no rights and its bounds.
#[track_caller]
fn is_jailed(pid: i32, network: bool) {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let status = read("status");
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"] {
        assert!(status.lines().any(|found| found == line), "{line} is missing in {status}");
    }
    let own = |kind: &str| {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        of(&pid.to_string()) != of("self")
    };
    for kind in ["user", "pid", "mnt", "ipc", "uts"] {
        assert!(own(kind), "it shares its {kind} namespace");
    }
    assert_eq!(own("net"), !network, "the host's network");
    if nix::unistd::geteuid().is_root() {
        let uid = fs::metadata(format!("/proc/{pid}")).unwrap().uid();
        let line = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
        assert!(!line.contains("\t0"), "it is root: {line} ({uid})");
    }
    let limits = read("limits");
    for name in ["Max address space", "Max data size", "Max file size"] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(!line[26..].starts_with("unlimited"), "{line}");
    }
    let seen: Vec<_> = below(Path::new(&format!("/proc/{pid}/root")))
        .into_iter()
        .filter(|(_, about)| !about.is_dir())
        .map(|(path, _)| path)
        .collect();
    let named = seen
        .iter()
        .all(|path| path.to_string_lossy().ends_with(".conf") || path.ends_with("etc/hosts"));
    assert!(named && (network || seen.is_empty()), "it sees {seen:?}");
}

/// A registry with one image, which stops in the middle of the layer until it is let go on.
fn registry(layer: &[u8], go_on: Receiver<()>) -> (u16, Receiver<()>, JoinHandle<()>) {
    let (tell, half_sent) = channel();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [digest(layer)] },
    });
    let config = config.to_string().into_bytes();
    let packed = layer.to_vec();
    let about = |bytes: &[u8]| json!({ "digest": digest(bytes), "size": bytes.len() });
    let manifest: Value = json!({
        "schemaVersion": 2, "config": about(&config), "layers": [about(&packed)],
    });
    let manifest = manifest.to_string().into_bytes();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || {
        for stream in server.incoming() {
            let mut stream = stream.unwrap();
            while let Some(path) = asked(&mut stream) {
                let body = match path.rsplit('/').next().unwrap_or_default() {
                    "1" => &manifest,
                    name if name == digest(&config) => &config,
                    _ => &packed,
                };
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).unwrap();
                if !std::ptr::eq(body, &packed) {
                    stream.write_all(body).unwrap();
                    continue;
                }
                let (half, rest) = body.split_at(body.len() / 2);
                stream.write_all(half).unwrap();
                tell.send(()).unwrap();
                if go_on.recv().is_err() {
                    return;
                }
                let _ = stream.write_all(rest);
                return;
            }
        }
    });
    (port, half_sent, serving)
}

/// The path that a client asks for.
fn asked(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).ok()?;
    head.split_ascii_whitespace().nth(1).map(str::to_owned)
}

/// A layer that is larger than what waits on its way.
fn large_layer() -> Vec<u8> {
    let noise: Vec<u8> =
        (0..16_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    archive(&[("noise", &noise)])
}

#[test]
fn a_registrys_answers_are_read_in_jails() {
    let root = PrivateRoot::new();
    let layer = large_layer();
    for kill in [false, true] {
        let (let_go, go_on) = channel();
        let (port, half_sent, serving) = registry(&layer, go_on);
        let name = format!("127.0.0.1:{port}/some/image:1");
        let mut pull = root.exocell(["image", "pull", &name]);
        let pull = Started::new(&mut pull);
        let mut found = BTreeMap::new();
        eventually("both processes work", || {
            found = descendants(pull.pid());
            found.contains_key("unpack") && found.contains_key("fetch")
        });
        half_sent.recv_timeout(crate::common::LIMIT).expect("the layer is asked for");
        eventually("they are in their jails", || {
            let confined = |name: &str| {
                let status = fs::read_to_string(format!("/proc/{}/status", found[name]));
                status.is_ok_and(|status| status.contains("Seccomp:\t2"))
            };
            confined("unpack") && confined("fetch")
        });
        is_jailed(found["unpack"], false);
        is_jailed(found["fetch"], true);
        if kill {
            host::send(found["unpack"], Signal::SIGKILL);
        }
        let_go.send(()).expect("the registry waits");
        let ended = pull.finish(crate::common::LIMIT).expect("it ends");
        serving.join().unwrap();
        match kill {
            false => {
                ended.ok();
                root.run(["image", "rm", &name]).ok();
            }
            true => drop(ended.exited(125).complains_of(&["unpack", "signal 9"])),
        }
        assert_eq!(fs::read_dir(root.path().join("images/tmp")).unwrap().count(), 0);
        assert_eq!(root.run(["image", "ls", "--json"]).ok().text(), "");
    }
}

#[test]
fn archives_and_layers_are_read_in_jails() {
    let server = Server::start();
    let place = tempfile::tempdir().unwrap();
    let (name, file) = (server.image("jailed"), place.path().join("image.tar"));
    fs::write(&file, image_of(&name, &[large_layer(), large_layer()])).unwrap();
    let sees = |pid: i32, stage: &str, command: &mut Command| {
        let mut started = Started::new(command);
        let own = started.pid();
        started.close_stdin();
        let mut seen = false;
        let found = until(crate::common::LIMIT, || {
            let all = descendants(if pid == 0 { own } else { pid });
            seen |= all.contains_key(stage);
            seen || started.child.try_wait().unwrap().is_some()
        });
        started.finish(crate::common::LIMIT).expect("it ends").ok();
        assert!(found && seen, "{command:?} did without {stage}");
    };
    sees(server.pid(), "unpack", &mut server.command(&["load", "-i", text(&file)]));
    let again = server.image("again");
    fs::write(&file, image_of(&again, &[large_layer(), large_layer()])).unwrap();
    sees(0, "unpack", &mut server.exocell(&["image", "import", text(&file), "--tag", &again]));
    let cell = Cell::idle("jailed", &[]);
    let made = server.image("made");
    cell.shell("head -c 100M /dev/urandom > /var/tmp/changed").ok();
    sees(0, "compose", &mut exocell(["commit", &cell.name, &made]));
    let copy = place.path().join("copy");
    sees(0, "extract", &mut exocell(["cp", &cell.path("/usr/bin"), text(&copy)]));
    server.idle("c");
    let copy = text(&copy).to_owned() + "-of-container";
    sees(server.pid(), "archive", &mut server.command(&["cp", "c:/usr/bin", &copy]));
    assert!(program().exists() && Path::new(&copy).exists());
}
