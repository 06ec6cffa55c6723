//! What a process that serves a folder can reach: that folder. It has a `main` of its own, because
//! such a process is made by one with a single thread.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use exocell_vmm::jail::{
    Capability, FolderRoot, HostNetwork, IdentityMap, PathAccess, ThreadClass, close_all_but,
    forgo_capabilities, keep_capabilities, restrict_calls, restrict_paths, spawn,
};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

type Checks = fn(&FolderRoot, &Path);

fn main() {
    inside("a_folder_is_all_that_there_is", true, false, a_folder_is_all_that_there_is);
    inside("one_that_is_read_is_not_written", false, false, one_that_is_read_is_not_written);
    inside("a_file_is_all_that_there_is", true, true, a_file_is_all_that_there_is);
}

/// Runs `checks` in a process that serves a folder, or a file in it.
fn inside(name: &str, writable: bool, file: bool, checks: Checks) {
    let outside = tempfile::tempdir().expect("a temporary directory");
    let folder = outside.path().join("folder");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("file"), "content").expect("a file");
    fs::write(outside.path().join("secret"), "secret").expect("a file");
    let path = if file { folder.join("file") } else { folder };
    let planned = File::open(&path).expect("it is there");
    let identity = IdentityMap::for_folder();
    let child = spawn(identity, HostNetwork::Never, |_| {
        let caught = std::panic::catch_unwind(|| {
            close_all_but(&[planned.as_raw_fd()]).expect("descriptors are closed");
            let root = FolderRoot::enter(&path, &planned, writable, false).expect("the root");
            forgo_capabilities();
            let kept: &[Capability] = match identity {
                IdentityMap::Everyone => {
                    &[Capability::Chown, Capability::DacOverride, Capability::Fowner]
                }
                _ => &[],
            };
            keep_capabilities(kept).expect("capabilities");
            let access = if writable { PathAccess::Write } else { PathAccess::Read };
            restrict_paths(&root.grants(access)).expect("Landlock");
            checks(&root, outside.path());
        });
        i32::from(caught.is_err())
    });
    let pid = Pid::from_raw(child.expect("a process").pid);
    assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, 0)), "{name}");
    println!("test {name} ... ok");
}

fn is_refused<T>(done: io::Result<T>) -> bool {
    done.is_err_and(|error| {
        matches!(
            error.raw_os_error(),
            Some(libc::ENOENT | libc::EACCES | libc::EROFS | libc::EPERM)
        )
    })
}

fn a_folder_is_all_that_there_is(root: &FolderRoot, outside: &Path) {
    let mut names: Vec<_> = fs::read_dir("/").unwrap().flatten().map(|it| it.file_name()).collect();
    names.sort();
    assert_eq!(names, ["file"]);
    assert_eq!(fs::read("/../file").unwrap(), b"content");
    assert!(is_refused(fs::read(outside.join("secret"))));
    // Its descriptors are the working directory, and nothing is above them.
    let inode = |path| fs::metadata(path).unwrap().ino();
    assert_eq!(inode(".."), inode("."));
    assert!(is_refused(fs::read("../status")) && is_refused(fs::read("../../self/status")));
    let held = File::options().read(true).custom_flags(libc::O_PATH).open("/file").unwrap();
    assert_eq!(fs::read(held.as_raw_fd().to_string()).unwrap(), b"content");
    fs::write("/new", "new").unwrap();
    if fs::metadata("/new").unwrap().uid() == 0 && is_root_everywhere() {
        std::os::unix::fs::chown("/new", Some(4711), Some(4712)).unwrap();
        fs::set_permissions("/new", fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(fs::read("/new").unwrap(), b"new");
    }
    restrict_calls(ThreadClass::Folder).unwrap();
    fs::write("/more", "more").unwrap();
    let mode = |mode| File::options().write(true).create(true).mode(mode).open("/bits");
    assert!(mode(0o4755).is_err() && mode(0o755).is_ok());
    let device = nix::sys::stat::SFlag::S_IFCHR;
    let number = nix::sys::stat::makedev(1, 3);
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o666);
    assert!(nix::sys::stat::mknodat(&root.root, "null", device, mode, number).is_err());
    assert!(std::os::unix::net::UnixStream::connect("/socket").is_err());
}

/// Whether the caller's ids are the host's, as a root operator's are.
fn is_root_everywhere() -> bool {
    nix::unistd::setgroups(&[]).is_err() && nix::unistd::getuid().is_root()
}

fn one_that_is_read_is_not_written(_: &FolderRoot, _: &Path) {
    assert_eq!(fs::read("/file").unwrap(), b"content");
    assert!(is_refused(fs::write("/file", "changed")));
    assert!(is_refused(fs::write("/new", "new")));
    assert!(is_refused(fs::remove_file("/file")));
}

fn a_file_is_all_that_there_is(root: &FolderRoot, _: &Path) {
    let file = root.file.as_ref().expect("a file");
    assert_eq!(fs::read_dir("/").unwrap().count(), 0);
    assert!(is_refused(fs::write("/new", "new")));
    let own = file.as_raw_fd().to_string();
    assert_eq!(fs::read(&own).unwrap(), b"content");
    fs::write(&own, "changed").unwrap();
    assert!(fs::read(format!("{own}/../secret")).is_err() && fs::read("../secret").is_err());
}
