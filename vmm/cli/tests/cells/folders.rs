//! Host folders in a cell: read-only or read-write, never more than granted.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::common::cell::Cell;
use crate::common::{Finished, IMAGE, eventually, exocell, finish, program, run, shell, text};

/// A folder with one file, and the flag that shares it.
fn folder(rights: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("shared")).unwrap();
    fs::write(dir.path().join("shared/file"), "from the host\n").unwrap();
    let flag = format!("{}:/data{rights}", text(&dir.path().join("shared")));
    (dir, flag)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_read_only_folder_is_read_and_not_written() {
    let (dir, flag) = folder(":ro");
    let script = "cat /data/file; echo x > /data/new; echo x >> /data/file; rm /data/file; \
                  mkdir /data/d; mv /data/file /data/g; chmod 777 /data/file; ls /data";
    let ended = shell(&["-v", &flag], script).ok();
    assert_eq!(ended.text(), "from the host\nfile");
    assert_eq!(ended.stderr.matches("Read-only file system").count(), 6, "{}", ended.stderr);
    assert_eq!(read(&dir.path().join("shared/file")), "from the host\n");
}

#[test]
fn a_guest_that_remounts_a_read_only_folder_still_cannot_write() {
    let (dir, flag) = folder(":ro");
    shell(&["--privileged", "-v", &flag], "mount -o remount,rw /data; echo x > /data/new; true");
    assert!(!dir.path().join("shared/new").exists());
}

#[test]
fn what_a_cell_writes_is_there_after_its_end() {
    let (dir, flag) = folder("");
    let script = "mkdir -p /data/a/b && echo deep > /data/a/b/c && ln -s b/c /data/a/link \
                  && mv /data/file /data/moved && dd if=/dev/zero bs=1M count=20 of=/data/big";
    shell(&["-v", &flag], script).ok();
    let shared = dir.path().join("shared");
    assert_eq!(read(&shared.join("a/b/c")), "deep\n");
    assert_eq!(read(&shared.join("a/link")), "deep\n");
    assert_eq!(read(&shared.join("moved")), "from the host\n");
    assert!(!shared.join("file").exists());
    assert_eq!(fs::metadata(shared.join("big")).unwrap().len(), 20 << 20);
}

/// make compares the times of a folder's files, which are the host's, with its own clock.
#[test]
fn a_file_is_not_of_the_future() {
    let (_dir, flag) = folder("");
    let script = "import os, time\n\
                  for i in range(20):\n    \
                      open('/data/file', 'w').write('x')\n    \
                      now = time.time_ns()\n    \
                      time.sleep(0.01)\n    \
                      assert os.stat('/data/file').st_mtime_ns <= now\n";
    run(["run", "--rm", "-v", &flag, IMAGE, "python3", "-c", script]).ok();
}

#[test]
fn what_the_host_writes_is_seen_inside() {
    let (dir, flag) = folder(":ro");
    let cell = Cell::idle("host-write", &["-v", &flag]);
    fs::write(dir.path().join("shared/later"), "now").unwrap();
    eventually("the guest sees it", || cell.shell("cat /data/later 2>/dev/null").text() == "now");
}

#[test]
fn symbolic_links_out_of_the_folder_lead_nowhere() {
    let (dir, flag) = folder("");
    let shared = dir.path().join("shared");
    fs::write(dir.path().join("secret"), "secret").unwrap();
    symlink("../secret", shared.join("relative")).unwrap();
    symlink(dir.path().join("secret"), shared.join("absolute")).unwrap();
    symlink(dir.path(), shared.join("above")).unwrap();
    let script = "cat /data/relative /data/absolute /data/above/secret /data/../secret; \
                  echo x > /data/above/planted; ls -la /data/above/; ls /data/..";
    let ended = shell(&["-v", &flag], script);
    let seen = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(!seen.contains("secret"), "{seen}");
    assert!(!dir.path().join("planted").exists());
    assert_eq!(read(&dir.path().join("secret")), "secret");
}

/// `exocell ARGS` where `shown` is mounted at `at` too, and what came of it.
fn beside_a_mount(shown: &Path, at: &Path, args: &[&str]) -> Finished {
    let script = "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).args([shown, at]);
    finish(command.arg(program()).args(args), b"")
}

#[test]
fn a_cells_link_is_known_by_whatever_mount_it_is_reached() {
    let (dir, flag) = folder("");
    let (shared, alias) = (dir.path().join("shared"), dir.path().join("alias"));
    let secret = dir.path().join("secret");
    fs::write(&secret, "NAME=of the host\n").unwrap();
    for made in [&alias, &shared.join("a"), &shared.join("a/b")] {
        fs::create_dir(made).unwrap();
    }
    let cell = Cell::idle("mounts", &["-v", &flag]);
    let script = "ln -s \"$1\" /data/a/b/s";
    finish(&mut cell.exec(&[], &["sh", "-c", script, "sh", text(&secret)]), b"").ok();
    for (below, link) in [("", "a/b/s"), ("a", "b/s"), ("a/b", "s")] {
        let link = alias.join(link);
        beside_a_mount(&shared.join(below), &alias, &["caps", "explain", text(&link)])
            .exited(125)
            .complains_of(&["goes through the link", "a cell may write", text(&shared)]);
    }
    // What is beside the folder on the same disk is the operator's.
    symlink(&secret, dir.path().join("own")).unwrap();
    let own = alias.join("own");
    let args = ["run", "--rm", "--env-file", text(&own), IMAGE, "sh", "-c", "echo $NAME"];
    assert_eq!(beside_a_mount(dir.path(), &alias, &args).ok().text(), "of the host");
}

#[test]
fn a_link_that_a_served_module_may_have_made_is_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().canonicalize().unwrap();
    let (folder, link) = (base.join("f"), base.join("f/link"));
    fs::create_dir(&folder).unwrap();
    fs::write(base.join("table"), "version = 1").unwrap();
    fs::write(base.join("m.wat"), "(module (memory (export \"memory\") 1))").unwrap();
    let table = format!(
        "version = 1\n[memory]\nlimit = \"8M\"\n[time]\ndeadline = \"1s\"\n[[folder]]\n\
         host = {:?}\nguest = \"/f\"\nrights = [\"read\", \"write\"]",
        base.join("operators")
    );
    symlink(&folder, base.join("operators")).unwrap();
    fs::write(base.join("caps.toml"), table).unwrap();
    let own = |args: &[&str]| {
        let root = ["--root", text(&base)];
        finish(&mut exocell([&root[..], args].concat()), b"")
    };
    let (caps, module) = (base.join("caps.toml"), base.join("m.wat"));
    let add = ["module", "add", "--tenant", "t", "--caps", text(&caps), "m", text(&module)];
    own(&add).ok();
    // The operator's own link was followed once: what the table says is a folder.
    let entry: serde_json::Value =
        serde_json::from_slice(&fs::read(base.join("modules/m.json")).unwrap()).unwrap();
    assert!(entry["caps"].as_str().unwrap().contains(text(&folder)), "{entry}");
    symlink(base.join("table"), &link).unwrap();
    own(&["caps", "explain", text(&link)]).exited(125).complains_of(&["a cell may write"]);
    // Another table that leads through it is not taken either.
    fs::write(&caps, fs::read_to_string(&caps).unwrap().replace("/operators", "/f/link")).unwrap();
    let again = ["module", "add", "--tenant", "u", "--caps", text(&caps), "n", text(&module)];
    own(&again).exited(125).complains_of(&["a cell may write"]);
    // Who does not know what a module may do follows nothing.
    fs::write(base.join("modules/m.json"), "{").unwrap();
    own(&["caps", "explain", text(&link)])
        .exited(125)
        .complains_of(&["m.json is damaged", "exocell module rm m"]);
    own(&["module", "rm", "m"]).ok();
    own(&["caps", "explain", text(&link)]).ok();
}

#[test]
fn no_command_of_the_operator_follows_a_cells_link_or_waits_for_its_pipe() {
    let (dir, flag) = folder("");
    let (shared, host) = (dir.path().join("shared"), dir.path().join("host"));
    fs::create_dir(&host).unwrap();
    fs::write(host.join("secret"), "NAME=of the host\n").unwrap();
    symlink(host.join("secret"), dir.path().join("operators")).unwrap();
    let cell = Cell::idle("links", &["-v", &flag]);
    let script = "ln -s \"$1\" /data/l && ln -s \"$1/secret\" /data/s && mkfifo /data/p";
    finish(&mut cell.exec(&[], &["sh", "-c", script, "sh", text(&host)]), b"").ok();
    let at = |name: &str| text(&shared.join(name)).to_owned();
    let (folder, file, module) = (at("l"), at("s"), at("l/m.wasm"));
    let (made, pipe) = (at("l/made"), at("p"));
    for args in [
        &["run", "--rm", "--env-file", &file, IMAGE, "true"][..],
        &["run", "--rm", "--label-file", &file, IMAGE, "true"],
        &["run", "--rm", "--caps", &file, IMAGE, "true"],
        &["run", "--rm", "--cidfile", &made, IMAGE, "true"],
        &["run", "--rm", &module],
        &["exec", "--env-file", &file, &cell.name, "true"],
        &["caps", "explain", &file],
        &["image", "import", &folder],
        &["load", "-i", &file],
        &["save", "-o", &made, IMAGE],
        &["swebench", "run", "--run-id", "r", "--dataset", &file, "--predictions", "gold"],
        &["man", text(&shared)],
    ] {
        run(args).exited(125).complains_of(&["a cell may write", text(&shared)]);
    }
    assert!(!host.join("made").exists());
    for args in [
        &["run", "--rm", "--env-file", &pipe, IMAGE, "true"][..],
        &["caps", "explain", &pipe],
        &["load", "-i", &pipe],
    ] {
        run(args).exited(125).complains_of(&[&pipe, "not a file"]);
    }
    // A key that is where a cell may write is the cell's, too.
    let made = at("made");
    for place in [&file, &pipe, &made] {
        for args in [
            &["serve", "--ui", "127.0.0.1:0", "--ui-key", place][..],
            &["serve", "--e2b", "127.0.0.1:0", "--e2b-keys", place],
            &["mcp", "--http", "127.0.0.1:0", "--image", IMAGE, "--key-file", place],
        ] {
            if *place != made || !args.contains(&"--e2b-keys") {
                run(args).exited(125).complains_of(&["a cell may write", text(&shared)]);
            }
        }
    }
    assert!(!shared.join("made").exists() && read(&host.join("secret")).contains("of the host"));
    // The operator's own are followed.
    let own = text(&dir.path().join("operators")).to_owned();
    let ended = shell(&["--env-file", &own], "echo $NAME").ok();
    assert_eq!(ended.text(), "of the host");
}

#[test]
fn several_folders_have_rights_of_their_own() {
    let (one, read_only) = folder(":ro");
    let other = tempfile::tempdir().unwrap();
    let writable = format!("{}:/out", text(other.path()));
    let flags = ["-v", &read_only, "-v", &writable];
    let ended = shell(&flags, "cp /data/file /out/copy && ! cp /out/copy /data/back").ok();
    assert!(ended.stderr.contains("Read-only"), "{}", ended.stderr);
    assert_eq!(read(&other.path().join("copy")), "from the host\n");
    assert!(!one.path().join("shared/back").exists());
}

#[test]
fn python_and_git_work_in_a_folder() {
    let (dir, flag) = folder("");
    let script = "git init -q r && cd r && git config user.email a@b && git config user.name n \
        && python3 -c \"open('m.py','w').write('def f(): return 42')\" \
        && python3 -c 'import m; print(m.f())' && git add m.py && git commit -qm first \
        && git log --format=%s && git fsck 2>&1 && git gc -q && git status --short m.py";
    let ended = shell(&["-v", &flag, "-w", "/data"], script).ok();
    assert_eq!(ended.text(), "42\nfirst");
    assert_eq!(read(&dir.path().join("shared/r/m.py")), "def f(): return 42");
    assert!(dir.path().join("shared/r/__pycache__").is_dir());
}

#[test]
fn revoking_a_folder_ends_access_at_once() {
    let (dir, flag) = folder("");
    let cell = Cell::idle("revoke", &["-v", &flag]);
    // A file that stays open across the revocation, written to from inside.
    let script = "import os, time
held = os.open('/data/held', os.O_WRONLY | os.O_CREAT)
while True: os.write(held, b'x'); os.fsync(held); time.sleep(0.05)";
    let mut writer = cell.exec(&["-d"], &["python3", "-c", script]);
    finish(&mut writer, b"").ok();
    let held = dir.path().join("shared/held");
    eventually("the writer writes", || fs::metadata(&held).is_ok_and(|data| data.len() > 0));
    assert!(cell.inspect()["capabilities"].to_string().contains("/data"));
    let revoked = run(["update", "--revoke", "folder:/data", &cell.name]).ok();
    assert!(revoked.text().contains("revoked"), "{}", revoked.text());
    let length = || fs::metadata(&held).unwrap().len();
    let before = length();
    let ended = cell.shell("cat /data/file; echo x > /data/new");
    assert!(!String::from_utf8_lossy(&ended.stdout).contains("from the host"));
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(length(), before);
    assert!(!dir.path().join("shared/new").exists());
    // The cell itself goes on.
    assert_eq!(cell.shell("echo alive").ok().text(), "alive");
    run(["update", "--revoke", "folder:/nowhere", &cell.name])
        .exited(125)
        .complains_of(&["folder:/nowhere", "exocell inspect"]);
    run(["update", "--revoke", "memory", &cell.name])
        .exited(125)
        .complains_of(&["memory", "exocell stop"]);
}

#[test]
fn a_folder_that_is_missing_is_named() {
    let ended = run(["run", "--rm", "-v", "/no/such/folder:/data", IMAGE, "true"]).exited(125);
    ended.complains_of(&["/no/such/folder"]);
}

#[test]
fn a_relative_folder_starts_where_the_command_does() {
    let (dir, _) = folder("");
    let mut command =
        exocell(["run", "--rm", "-v", "./shared:/data:ro", IMAGE, "cat", "/data/file"]);
    let ended = finish(command.current_dir(dir.path()), b"").ok();
    assert_eq!(ended.text(), "from the host");
}

/// Whether owners can be tested: only root has more ids than its own.
fn has_ids() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// A folder that belongs to user 1000, with a file that only that user may read.
fn owned() -> (TempDir, String) {
    let (dir, flag) = folder("");
    let shared = dir.path().join("shared");
    for (path, mode) in [(shared.clone(), 0o755), (shared.join("file"), 0o600)] {
        chown(&path, Some(1000), Some(1000)).unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    (dir, flag)
}

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

#[test]
fn a_folder_of_another_user_is_read_and_written() {
    if !has_ids() {
        return;
    }
    let (dir, flag) = owned();
    let script = "ls -ln /data/file | cut -d' ' -f1,3,4; cat /data/file; echo more >>/data/file; \
                  cd /data && git -c safe.directory=* init -q && ls -d .git";
    let ended = shell(&["-v", &flag], script).ok();
    assert_eq!(ended.text(), "-rw------- 1000 1000\nfrom the host\n.git");
    let shared = dir.path().join("shared");
    assert_eq!(read(&shared.join("file")), "from the host\nmore\n");
    assert_eq!((owner(&shared.join("file")), owner(&shared.join(".git"))), ((1000, 1000), (0, 0)));
}

#[test]
fn owners_are_given_and_kept_on_both_sides() {
    if !has_ids() {
        return;
    }
    let (dir, flag) = folder("");
    let script = "cd /data && touch a && chown 999:998 a && install -o 33 -g 34 a b \
        && mkdir -p /t/d && echo x >/t/d/f && chown 12:13 /t/d/f && chown -h 7:8 /t/d \
        && ln -s f /t/d/l && chown -h 5:6 /t/d/l && tar -C /t -cf /t.tar d && tar -xf /t.tar \
        && cp -a d e && stat -c '%u:%g %n' a b d/f e/f e/l e";
    let ended = shell(&["-v", &flag], script).ok();
    let told = "999:998 a\n33:34 b\n12:13 d/f\n12:13 e/f\n5:6 e/l\n7:8 e";
    assert_eq!(ended.text(), told);
    let shared = dir.path().join("shared");
    let names = [("a", 999, 998), ("b", 33, 34), ("e/f", 12, 13), ("e/l", 5, 6), ("e", 7, 8)];
    for (name, uid, gid) in names {
        assert_eq!(owner(&shared.join(name)), (uid, gid), "{name}");
    }
}

#[test]
fn a_user_of_the_cell_goes_on_with_what_is_its_own() {
    if !has_ids() {
        return;
    }
    let (dir, flag) = folder("");
    let shared = dir.path().join("shared");
    fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
    let script = "cd /data && umask 027 && echo one >f && echo two >>f && chmod 600 f && mv f g \
        && mkdir d && touch d/x && cat g && stat -c '%u:%g %a' g d d/x \
        && ! rm file 2>/dev/null && python3 -m venv --without-pip v && v/bin/python -c 'print(1)'";
    let ended = shell(&["-u", "1000:1001", "-v", &flag], script).ok();
    assert_eq!(ended.text(), "one\ntwo\n1000:1001 600\n1000:1001 750\n1000:1001 640\n1");
    assert_eq!(owner(&shared.join("g")), (1000, 1001));
    assert_eq!(owner(&shared.join("v/bin/python3")), (1000, 1001));
    // A directory that passes its group on does.
    fs::create_dir(shared.join("team")).unwrap();
    chown(shared.join("team"), None, Some(77)).unwrap();
    fs::set_permissions(shared.join("team"), Permissions::from_mode(0o2777)).unwrap();
    let script = "cd /data/team && touch f && mkdir d && stat -c '%u:%g' f d && stat -c %A d; \
                  mkdir /data/own && chgrp 0 /data/own; chmod g+s /data/own; stat -c %A /data/own";
    let ended = shell(&["-u", "1000:1001", "-v", &flag], script).ok();
    assert_eq!(ended.text(), "1000:77\n1000:77\ndrwxr-sr-x\ndrwxr-sr-x");
}

#[test]
fn one_file_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own config");
    fs::write(&path, "[user]\n\tname = N\n").unwrap();
    let flag = format!("{}:/root/.gitconfig:ro", text(&path));
    let script = "git config user.name; echo x >>/root/.gitconfig; ls -A /dev | grep -c exocell; \
                  stat -c %F /root/.gitconfig";
    let ended = shell(&["-v", &flag], script).ok();
    assert_eq!(ended.text(), "N\n0\nregular file");
    assert!(ended.stderr.contains("Read-only file system"), "{}", ended.stderr);
    let flag = format!("{}:/a/new/place", text(&path));
    shell(&["-v", &flag], "echo changed >/a/new/place").ok();
    assert_eq!(read(&path), "changed\n");
}

#[test]
fn what_is_no_folder_file_or_socket_is_refused() {
    run(["run", "--rm", "-v", "/dev/null:/n", IMAGE, "true"])
        .exited(125)
        .complains_of(&["/dev/null", "regular file"]);
}

#[test]
fn a_folder_is_mounted_within_another() {
    let (one, outer) = folder("");
    let (other, _) = folder("");
    let inner = format!("{}:/data/sub/deep", text(&other.path().join("shared")));
    fs::write(other.path().join("shared/file"), "inner\n").unwrap();
    // In whatever order they are said.
    let script = "cat /data/file /data/sub/deep/file; echo x >/data/sub/deep/new";
    let ended = shell(&["-v", &inner, "-v", &outer], script).ok();
    assert_eq!(ended.text(), "from the host\ninner");
    assert!(other.path().join("shared/new").exists());
    assert!(one.path().join("shared/sub/deep").is_dir());
}

#[test]
fn a_program_follows_what_the_host_appends() {
    let (dir, flag) = folder("");
    let path = dir.path().join("shared/log");
    fs::write(&path, "first\n").unwrap();
    let cell = Cell::idle("follow", &["-v", &flag]);
    cell.shell("tail -f /data/log >/tmp/seen 2>&1 & sleep 1").ok();
    for line in ["second\n", "third\n"] {
        File::options().append(true).open(&path).unwrap().write_all(line.as_bytes()).unwrap();
        eventually("the line is seen", || {
            cell.shell("cat /tmp/seen").text().ends_with(line.trim())
        });
    }
    assert_eq!(cell.shell("cat /tmp/seen").ok().text(), "first\nsecond\nthird");
}

#[test]
fn what_the_host_puts_in_place_or_removes_is_seen() {
    let (dir, flag) = folder("");
    let shared = dir.path().join("shared");
    let cell = Cell::idle("replace", &["-v", &flag]);
    let held = "exec 3</data/file; cat /data/file; touch /tmp/ready; \
                while [ ! -e /tmp/go ]; do sleep .05; done; cat <&3";
    let mut held = cell.exec(&[], &["sh", "-c", held]);
    let held = std::thread::spawn(move || finish(&mut held, b""));
    eventually("the file is held", || cell.shell("test -e /tmp/ready").code == 0);
    fs::write(shared.join("new"), "replaced\n").unwrap();
    fs::rename(shared.join("new"), shared.join("file")).unwrap();
    eventually("the new one is seen", || cell.shell("cat /data/file").text() == "replaced");
    cell.shell("touch /tmp/go").ok();
    // What is open stays what it was.
    assert_eq!(held.join().unwrap().ok().text(), "from the host\nfrom the host");
    fs::remove_file(shared.join("file")).unwrap();
    eventually("it is gone", || cell.shell("ls /data").text().is_empty());
    eventually("it cannot be read", || cell.shell("cat /data/file").code == 1);
}

/// Watches /data, /data/sub and /data/file, and says what it hears (inotify(7)): names are of 16
/// bytes and longer where there are any.
const WATCHER: &str = r#"
import ctypes, os, select, struct, sys, time
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(os.O_NONBLOCK)
BITS = {2: "modify", 8: "close_write", 0x40: "moved_from", 0x80: "moved_to", 0x100: "create", 0x200: "delete"}
paths = {}
for path in ["/data", "/data/sub", "/data/file"]:
    paths[libc.inotify_add_watch(fd, path.encode(), sum(BITS))] = path
print("ready", flush=True)
poll = select.poll()
poll.register(fd, select.POLLIN)
while True:
    poll.poll()
    heard = os.read(fd, 65536)
    while heard:
        wd, mask, cookie, length = struct.unpack_from("iIII", heard)
        name = heard[16:16 + length].rstrip(b"\0").decode()
        heard = heard[16 + length:]
        kind = "+".join(word for bit, word in BITS.items() if mask & bit)
        folder = "/" if mask & 0x40000000 else ""
        print(paths[wd], kind, name + folder, "paired" if cookie else "", flush=True)
"#;

#[test]
fn changes_of_the_hosts_and_of_other_cells_are_events() {
    let (dir, flag) = folder("");
    let shared = dir.path().join("shared");
    fs::create_dir(shared.join("sub")).unwrap();
    let cell = Cell::idle("events", &["-v", &flag]);
    let other = Cell::idle("events-other", &["-v", &flag]);
    cell.shell(&format!("cat >/tmp/watch.py <<'END'\n{WATCHER}\nEND")).ok();
    cell.shell(
        "python3 /tmp/watch.py >/tmp/heard 2>&1 & until [ -s /tmp/heard ]; do sleep .05; done",
    )
    .ok();
    let heard = || cell.shell("cat /tmp/heard").text().to_owned();
    // The tail of what it has heard, once it has heard of `last`.
    let hears = |last: &str, wanted: &[&str]| {
        eventually(last, || heard().contains(last));
        let heard = heard();
        let lines: Vec<_> = heard.lines().map(str::trim_end).collect();
        let at = lines.iter().rposition(|line| line.contains(last)).unwrap() + 1;
        assert_eq!(lines[at.saturating_sub(wanted.len())..at], *wanted, "{heard}");
    };
    cell.shell("touch /data/inside /data/sub/inside").ok();
    hears(
        "/data/sub close_write inside",
        &[
            "/data create inside",
            "/data close_write inside",
            "/data/sub create inside",
            "/data/sub close_write inside",
        ],
    );
    fs::write(shared.join("sub/host"), "text").unwrap();
    hears(
        "/data/sub close_write host",
        &["/data/sub create host", "/data/sub modify host", "/data/sub close_write host"],
    );
    File::options().append(true).open(shared.join("file")).unwrap().write_all(b"more").unwrap();
    eventually("the file itself", || heard().contains("/data/file modify"));
    assert!(cell.shell("cat /data/file").ok().text().ends_with("more"));
    fs::rename(shared.join("sub/host"), shared.join("renamed")).unwrap();
    hears(
        "/data moved_to renamed",
        &["/data/sub moved_from host paired", "/data moved_to renamed paired"],
    );
    other.shell("mkdir /data/sub/made && rm /data/renamed").ok();
    hears("/data delete renamed", &["/data/sub create made/", "/data delete renamed"]);
    // Nothing of its own was told twice.
    let all = heard();
    assert_eq!(all.matches("create inside").count(), 2, "{all}");
}

#[test]
fn locks_hold_between_the_host_and_cells() {
    let (dir, flag) = folder("");
    let (one, other) = (Cell::idle("lock-a", &["-v", &flag]), Cell::idle("lock-b", &["-v", &flag]));
    let flock = "flock -n /data/file true && echo free || echo held";
    let posix = "python3 -c \"
import fcntl
f = open('/data/file', 'r+')
try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')
except OSError: print('held')\"";
    let host = File::options().write(true).open(dir.path().join("shared/file")).unwrap();
    host.lock().unwrap();
    assert_eq!(one.shell(flock).text(), "held");
    // A program that waits gets it when the host lets go.
    let mut waits = one.exec(&[], &["flock", "/data/file", "echo", "mine"]);
    let waits = std::thread::spawn(move || finish(&mut waits, b""));
    host.unlock().unwrap();
    assert_eq!(waits.join().unwrap().ok().text(), "mine");
    let hold = "exec 9</data/file; flock 9; touch /tmp/ready; sleep 1000";
    let mut held = one.exec(&["-d"], &["sh", "-c", hold]);
    finish(&mut held, b"").ok();
    eventually("it is held", || one.shell("test -e /tmp/ready").code == 0);
    assert_eq!(other.shell(flock).text(), "held");
    assert_eq!(one.shell(flock).text(), "held");
    assert!(host.try_lock().is_err());
    // Locks of bytes are others than those of whole files.
    assert_eq!(other.shell(posix).text(), "free");
    let hold = "import fcntl, time
f = open('/data/file', 'r+')
fcntl.lockf(f, fcntl.LOCK_EX, 4, 0)
open('/tmp/bytes', 'w').close()
time.sleep(1000)";
    let mut held = one.exec(&["-d"], &["python3", "-c", hold]);
    finish(&mut held, b"").ok();
    eventually("they are held", || one.shell("test -e /tmp/bytes").code == 0);
    assert_eq!((one.shell(posix).text(), other.shell(posix).text()), ("held", "held"));
    // They end with the process, and a cell's with the cell.
    one.shell("pkill python3").ok();
    eventually("they are free", || other.shell(posix).text() == "free");
    one.verb(&["stop", "-t", "1"]).ok();
    eventually("it is free", || other.shell(flock).text() == "free");
}

#[test]
fn sockets_and_fifos_connect_within_a_cell() {
    let (dir, flag) = folder("");
    let script = "cd /data && mkfifo p && (echo through >p &) && cat p && python3 -c \"
import socket, threading
s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen()
threading.Thread(target=lambda: s.accept()[0].sendall(b'hello')).start()
c = socket.socket(socket.AF_UNIX); c.connect('s'); print(c.recv(9).decode())\"";
    assert_eq!(shell(&["-v", &flag], script).ok().text(), "through\nhello");
    // A fifo of the host's is seen, is nobody's to write to inside, and holds nothing up.
    let shared = dir.path().join("shared");
    assert!(fs::symlink_metadata(shared.join("s")).is_ok());
    shell(&["-v", &flag], "timeout 1 cat /data/p; cat /data/file").exited(0);
}

/// What programs expect of a disk, and who cannot have it says so.
const AS_ON_A_DISK: &str = include_str!("../../../folders/tests/mounted.py");

#[test]
fn it_is_as_on_a_disk() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let flag = format!("{}:/data", text(dir.path()));
    let ended =
        run(["run", "--rm", "-v", &flag, IMAGE, "python3", "-c", AS_ON_A_DISK, "/data"]).ok();
    assert_eq!(ended.text(), "done");
    let name = [&[b'n'; 251][..], b"\xff\xfe\xf0\x01"].concat();
    assert_eq!(read(&dir.path().join(std::ffi::OsStr::from_bytes(&name))), "long");
    assert_eq!(fs::read_dir(dir.path().join("many")).unwrap().count(), 5000);
}

#[test]
fn file_capabilities_are_kept_for_cells() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let flag = format!("{}:/data", text(dir.path()));
    let set = "import os
open('/data/f', 'w').close()
os.setxattr('/data/f', 'security.capability', bytes.fromhex('0100000200040000') + bytes(12))
print(os.getxattr('/data/f', 'security.capability').hex())";
    let said = run(["run", "--rm", "-v", &flag, IMAGE, "python3", "-c", set]).ok();
    let value = "0100000200040000000000000000000000000000";
    assert_eq!(said.text(), value);
    let get = "import os; print(os.getxattr('/data/f', 'security.capability').hex())";
    let said = run(["run", "--rm", "-v", &flag, IMAGE, "python3", "-c", get]).ok();
    assert_eq!(said.text(), value);
    // They are none on the host.
    let ask = format!("import os; os.getxattr('{}/f', 'security.capability')", text(dir.path()));
    let mut python = std::process::Command::new("python3");
    let asked = finish(python.args(["-c", &ask]), b"").exited(1);
    assert!(asked.stderr.contains("No data available"), "{}", asked.stderr);
}

#[test]
fn nothing_of_the_folders_process_is_left() {
    let (dir, flag) = folder("");
    let cell = Cell::idle("left", &["-v", &flag]);
    let serving = || {
        let named = |entry: &fs::DirEntry| {
            fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name == "folder\n")
                && fs::read_link(entry.path().join("root")).is_ok()
                && fs::read_to_string(entry.path().join("mountinfo"))
                    .is_ok_and(|mounts| mounts.contains(text(dir.path())))
        };
        fs::read_dir("/proc").unwrap().flatten().filter(named).count()
    };
    assert_eq!(serving(), 1);
    let supervisor = nix::unistd::Pid::from_raw(cell.supervisor());
    nix::sys::signal::kill(supervisor, nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("it ends with the cell", || serving() == 0);
}

/// Has user 1000, to whom /home/ann is given, do something; then the cell starts again.
#[track_caller]
fn starts_again_after(cell: &Cell, script: &str) -> Finished {
    cell.shell("chown -R 1000:1000 /home/ann").ok();
    finish(&mut cell.exec(&["-u", "1000"], &["sh", "-c", script]), b"").ok();
    cell.verb(&["stop", "-t", "0"]).ok();
    cell.verb(&["start"])
}

#[test]
fn a_mount_point_leads_over_no_link_of_an_ordinary_users() {
    let dir = tempfile::tempdir().unwrap();
    let flag = format!("{}:/home/ann/.cache/pip", text(dir.path()));
    for covered in ["/proc", "/etc"] {
        let cell = Cell::idle("ordinary", &["-v", &flag]);
        let script =
            format!("cd /home/ann && mv .cache old && mkdir .cache && ln -s {covered} .cache/pip");
        starts_again_after(&cell, &script).complains_of(&[
            "the mount point /home/ann/.cache/pip leads over /home/ann/.cache/pip,",
            "remove the link",
        ]);
    }
    // Root's and the image's lead where they do, within the root; and nothing covers the kernel's.
    let below = |target: &str| format!("{}:{target}", text(dir.path()));
    let shown = "test -e /run/kept/here && ls -ld /var/run | cut -c1";
    fs::write(dir.path().join("here"), "").unwrap();
    assert_eq!(shell(&["-v", &below("/var/run/kept")], shown).ok().text(), "l");
    let cell = Cell::idle("links", &["-v", &below("/srv/deep/data")]);
    cell.shell("mv /srv/deep /srv/old; mkdir /srv/new; ln -s ../../../srv/new /srv/deep").ok();
    cell.verb(&["stop", "-t", "0"]).ok();
    cell.verb(&["start"]).ok();
    cell.shell("test -e /srv/new/data/here").ok();
    for target in ["/sys/data", "/proc/data", "/var/../proc"] {
        let refused = shell(&["-v", &below(target)], "true").exited(125);
        assert!(refused.stderr.contains(target.rsplit('/').next().unwrap()), "{}", refused.stderr);
    }
}

#[test]
fn what_lies_where_a_file_is_mounted_is_neither_opened_nor_followed() {
    let (dir, _) = folder("");
    let file = dir.path().join("shared/file");
    let flag = format!("{}:/home/ann/d/file", text(&file));
    let cell = Cell::idle("ordinary", &["-v", &flag]);
    assert_eq!(cell.shell("cat /home/ann/d/file").ok().text(), "from the host");
    starts_again_after(&cell, "cd /home/ann && mv d old && mkdir d && mkfifo d/file").ok();
    assert_eq!(cell.shell("cat /home/ann/d/file").ok().text(), "from the host");
    starts_again_after(&cell, "cd /home/ann && mv d older && ln -s /etc d")
        .complains_of(&["/home/ann/d/file leads over /home/ann/d,"]);
}
