//! What a cell has that may start isolates: the command, the table that theirs are derived from,
//! and its models.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;

use exocell_agent::{
    ISOLATES_BIN, ISOLATES_FOLDER, ISOLATES_MODELS, ISOLATES_PLACES, ISOLATES_TABLE, IsolatesSetup,
};
use nix::mount::{MsFlags, mount};

use crate::dev::make_mount_point;
use crate::error::{Context, InitError};
use crate::mounting;
use crate::paths::MountPoints;
use crate::root::mount_disk;

/// Where the file systems of the command and of models lie out of sight.
const PROGRAM: &str = "/program";
const MODELS: &str = "/models";
const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// What was mounted while its devices were in reach.
pub struct Opened {
    program: File,
    models: Option<File>,
}

/// Mounts the file systems of the command and of models.
pub fn open(setup: &IsolatesSetup) -> Result<Opened, InitError> {
    let program = open_disk(&setup.device, PROGRAM, SAFE)?;
    let models = setup.models_device.as_ref();
    let models = models.map(|device| open_disk(device, MODELS, SAFE | MsFlags::MS_NOEXEC));
    Ok(Opened { program, models: models.transpose()? })
}

/// Mounts a device; the root of what it holds.
fn open_disk(device: &str, at: &str, flags: MsFlags) -> Result<File, InitError> {
    fs::create_dir_all(at).context(|| at)?;
    mount_disk(device, at, "erofs", flags | MsFlags::MS_RDONLY)?;
    File::open(at).context(|| at)
}

/// Shows what was mounted at `target` too.
fn bind(opened: &File, target: &str) -> Result<(), InitError> {
    let points = MountPoints::new(None).context(|| "the root")?;
    let place = points.directory(target)?;
    let bound = mounting::copy(opened, false).and_then(|copied| mounting::put(&copied, &place));
    bound.context(|| format!("binding {target}"))
}

/// Puts all of it where programs find it. On file systems of its own, so that no template
/// takes it over.
pub fn set_up(setup: &IsolatesSetup, opened: &Opened) -> Result<(), InitError> {
    bind(&opened.program, ISOLATES_BIN)?;
    if let Some(models) = &opened.models {
        bind(models, ISOLATES_MODELS)?;
    }
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
