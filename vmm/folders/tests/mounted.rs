//! The folder as the host's own FUSE client sees it, where the tests may mount: what a guest's
//! kernel sees, without a guest.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use common::{Memory, start};
use exocell_folders::{Limits, Rights};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// The largest request, in bytes.
const REQUEST_LEN_MAX: usize = (1 << 20) + 4096;

/// What programs expect of a disk.
const PROGRAM: &str = include_str!("mounted.py");

#[test]
fn a_kernels_client_sees_a_disk() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
        eprintln!("not looked at: this machine has no /dev/fuse");
        return;
    };
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (folder, target) = (place.path().join("folder"), place.path().join("target"));
    fs::create_dir(&folder).unwrap();
    fs::create_dir(&target).unwrap();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let options = std::ffi::CString::new(options).unwrap();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    if let Err(errno) = mount("exocell", &target, "fuse", flags, Some(options.as_c_str())) {
        eprintln!("not looked at: this machine lets nobody mount ({errno})");
        return;
    }
    let limits =
        Limits { nodes_max: 20000, held_max: 10000, opened_max: 10000, ..Limits::default() };
    let served = folder.clone();
    let server = std::thread::spawn(move || serve(device, &served, limits));
    let ran = Command::new("python3").args(["-c", PROGRAM]).arg(&target).arg(&folder).output();
    unmount(&target, UnmountFlags::DETACH).unwrap();
    server.join().unwrap();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

/// Answers what the kernel asks until the folder is unmounted.
fn serve(mut device: File, folder: &Path, limits: Limits) {
    let mut guest = start(folder, Rights::READ_WRITE, limits);
    let mut request = vec![0; REQUEST_LEN_MAX];
    while let Ok(len) = device.read(&mut request) {
        let mut memory = Memory::new(request[..len].to_vec(), REQUEST_LEN_MAX);
        guest.server.serve(&mut memory);
        if let Some(reply) = memory.reply() {
            // One whose asker is gone is not wanted any more.
            let _ = device.write(&reply);
        }
    }
}
