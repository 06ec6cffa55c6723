//! Host folders: virtio-fs (kernel: Documentation/filesystems/virtiofs.rst).

use std::fs::{self, File};
use std::io::ErrorKind;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use exocell_agent::{FOLDER_FILE, FileCopy, FolderMount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::dev::make_mount_point;
use crate::error::{Context, InitError};
use crate::fill::fill;

/// Where a folder that is one file is, while that file is bound to its place.
const ASIDE: &str = "/dev/.exocell-folder";

/// Is in the private disk of a cell whose volumes were filled.
const FILLED: &str = "filled";

/// Mounts every folder on its mount point, made if missing. `private` is the cell's own disk, which
/// knows whether the cell begins for the first time: volumes are filled then only.
pub fn mount_all(folders: &[FolderMount], private: Option<&File>) -> Result<(), InitError> {
    let filled = private.map(|disk| format!("/proc/self/fd/{}/{FILLED}", disk.as_raw_fd()));
    let is_first = filled.as_ref().is_none_or(|filled| fs::symlink_metadata(filled).is_err());
    let wants = |folder: &&FolderMount| folder.fill && is_first;
    let images = folders.iter().map(|folder| match wants(&folder) {
        true => held(folder),
        false => Ok(None),
    });
    // All of them before anything covers one.
    let images = images.collect::<Result<Vec<_>, _>>()?;
    for (folder, image) in folders.iter().zip(images) {
        mount_one(folder, image)?;
    }
    if let Some(filled) = filled.filter(|_| folders.iter().any(|folder| wants(&folder))) {
        File::create(&filled).context(|| "noting that volumes are filled")?;
    }
    Ok(())
}

/// What the image has where the folder is to be; a volume stays as it is where that is nothing.
fn held(folder: &FolderMount) -> Result<Option<File>, InitError> {
    match File::open(&folder.guest_path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).context(|| folder.guest_path.clone()),
    }
}

fn mount_one(folder: &FolderMount, image: Option<File>) -> Result<(), InitError> {
    match folder.copied {
        Some(copied) if folder.is_file => return mount_copy(folder, copied),
        _ if folder.is_file => return mount_file(folder),
        _ => {}
    }
    make_mount_point(&folder.guest_path)?;
    mount_device(folder, &folder.guest_path)?;
    let Some(image) = image else { return Ok(()) };
    let target = &folder.guest_path;
    let filled = File::open(target).and_then(|volume| fill(image.as_fd(), volume.as_fd()));
    filled.context(|| format!("copying the image's {target} into the volume there"))
}

fn flags(folder: &FolderMount) -> MsFlags {
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_RDONLY, folder.read_only);
    flags
}

fn mount_device(folder: &FolderMount, target: &str) -> Result<(), InitError> {
    let tag = folder.tag.as_str();
    mount(Some(tag), target, Some("virtiofs"), flags(folder), None::<&str>)
        .context(|| format!("mounting the folder on {}", folder.guest_path))
}

/// The file's own mount holds its device's; nobody sees that.
fn mount_file(folder: &FolderMount) -> Result<(), InitError> {
    let target = folder.guest_path.as_str();
    make_file(target)?;
    fs::create_dir_all(ASIDE).context(|| ASIDE)?;
    mount_device(folder, ASIDE)?;
    let file = format!("{ASIDE}/{FOLDER_FILE}");
    let bound = mount(Some(file.as_str()), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .context(|| format!("mounting the file {target}"));
    umount2(ASIDE, MntFlags::MNT_DETACH).context(|| ASIDE)?;
    fs::remove_dir(ASIDE).context(|| ASIDE)?;
    bound
}

/// The longest file that is copied into memory, in bytes; docker's secrets are shorter.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// A file in memory with what the device's holds. Nothing is left of the device.
fn mount_copy(folder: &FolderMount, copied: FileCopy) -> Result<(), InitError> {
    let target = folder.guest_path.as_str();
    make_file(target)?;
    fs::create_dir_all(ASIDE).context(|| ASIDE)?;
    mount_device(folder, ASIDE)?;
    let file = format!("{ASIDE}/{FOLDER_FILE}");
    let mut content = Vec::new();
    let read =
        File::open(&file).and_then(|file| file.take(COPY_BYTES_MAX + 1).read_to_end(&mut content));
    umount2(ASIDE, MntFlags::MNT_DETACH).context(|| ASIDE)?;
    read.context(|| format!("reading what is to be {target}"))?;
    if content.len() as u64 > COPY_BYTES_MAX {
        let most = COPY_BYTES_MAX >> 10;
        return Err(InitError::invalid(format!("{target}: it is longer than {most} KiB")));
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("tmpfs"), ASIDE, Some("tmpfs"), flags, Some("size=2m")).context(|| ASIDE)?;
    let FileCopy { mode, uid, gid } = copied;
    let made = fs::write(&file, &content)
        .and_then(|()| chown(&file, Some(uid), Some(gid)))
        .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(mode & 0o777)));
    let bound = made.context(|| format!("making {target}")).and_then(|()| {
        let only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | flags;
        mount(Some(file.as_str()), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .and_then(|()| mount(None::<&str>, target, None::<&str>, only, None::<&str>))
            .context(|| format!("mounting the file {target}"))
    });
    umount2(ASIDE, MntFlags::MNT_DETACH).context(|| ASIDE)?;
    fs::remove_dir(ASIDE).context(|| ASIDE)?;
    bound
}

/// Makes the file `target`, which another is to be seen instead of, if it is missing.
fn make_file(target: &str) -> Result<(), InitError> {
    if let Some(parent) = Path::new(target).parent().and_then(Path::to_str) {
        make_mount_point(parent)?;
    }
    match File::options().append(true).create(true).open(target) {
        Ok(_) => Ok(()),
        // It is there, and may not be written.
        Err(_) if Path::new(target).is_file() => Ok(()),
        Err(error) => Err(InitError::io(format!("making the file {target}"), &error)),
    }
}
