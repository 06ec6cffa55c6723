//! Host folders in a cell: read-only or read-write, never more than granted.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::cell::Cell;
use common::{IMAGE, eventually, exocell, finish, run, shell, text};
use tempfile::TempDir;

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
    let file = tempfile::NamedTempFile::new().unwrap();
    let flag = format!("{}:/data", text(file.path()));
    run(["run", "--rm", "-v", &flag, IMAGE, "true"]).exited(125).complains_of(&[text(file.path())]);
}

#[test]
fn a_relative_folder_starts_where_the_command_does() {
    let (dir, _) = folder("");
    let mut command =
        exocell(["run", "--rm", "-v", "./shared:/data:ro", IMAGE, "cat", "/data/file"]);
    let ended = finish(command.current_dir(dir.path()), b"").ok();
    assert_eq!(ended.text(), "from the host");
}
