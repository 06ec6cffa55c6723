//! What a cell has that may start isolates: the command, and the table that theirs are
//! derived from.

use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use exocell_agent::{
    ISOLATES_BIN, ISOLATES_FOLDER, ISOLATES_PLACES, ISOLATES_TABLE, IsolatesSetup,
};
use nix::mount::{MsFlags, mount};

use crate::dev::make_mount_point;
use crate::error::{Context, InitError};
use crate::root::mount_disk;

/// Where the command's file system lies out of sight.
const PROGRAM: &str = "/program";
const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// Mounts the command's file system while its device is in reach; its root.
pub fn open_program(setup: &IsolatesSetup) -> Result<File, InitError> {
    fs::create_dir_all(PROGRAM).context(|| PROGRAM)?;
    mount_disk(&setup.device, PROGRAM, "erofs", SAFE | MsFlags::MS_RDONLY)?;
    File::open(PROGRAM).context(|| PROGRAM)
}

/// Puts all of it where programs find it. On file systems of its own, so that no template
/// takes it over.
pub fn set_up(setup: &IsolatesSetup, program: &File) -> Result<(), InitError> {
    make_mount_point(ISOLATES_BIN)?;
    let source = format!("/proc/self/fd/{}", program.as_raw_fd());
    mount(Some(source.as_str()), ISOLATES_BIN, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .context(|| format!("binding the command on {ISOLATES_BIN}"))?;
    make_mount_point(ISOLATES_FOLDER)?;
    let flags = SAFE | MsFlags::MS_NOEXEC;
    let mount_it = |flags, data| {
        mount(Some("tmpfs"), ISOLATES_FOLDER, Some("tmpfs"), flags, data)
            .context(|| format!("mounting tmpfs on {ISOLATES_FOLDER}"))
    };
    mount_it(flags, Some("mode=755,size=1m"))?;
    fs::write(ISOLATES_TABLE, &setup.table).context(|| ISOLATES_TABLE)?;
    fs::set_permissions(ISOLATES_TABLE, Permissions::from_mode(0o444))
        .context(|| ISOLATES_TABLE)?;
    fs::create_dir(ISOLATES_PLACES).context(|| ISOLATES_PLACES)?;
    for place in 0..setup.count_max {
        let path = format!("{ISOLATES_PLACES}/{place}");
        File::create(&path).context(|| path.clone())?;
    }
    mount_it(flags | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, None)
}
