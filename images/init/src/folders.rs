//! Host folders: virtio-fs (kernel: Documentation/filesystems/virtiofs.rst).

use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{PermissionsExt, fchown};

use exocell_agent::{FOLDER_FILE, FileCopy, FolderMount, SocketFile};
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};

use crate::error::{Context, InitError};
use crate::fill::fill;
use crate::paths::{Missing, MountPoints};
use crate::sockets::Sockets;
use crate::{mounting, own_proc, paths};

/// Is in the private disk of a cell whose volumes were filled.
const FILLED: &str = "filled";

const NO_FOLLOW: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// Mounts every folder on its mount point, made if missing. `private` is the cell's own disk, which
/// knows whether the cell begins for the first time: volumes are filled then only. `image` is what
/// the image holds. What programs connect to is returned.
pub fn mount_all(
    folders: &[FolderMount],
    private: Option<&File>,
    image: Option<&File>,
) -> Result<Sockets, InitError> {
    let is_filled = |disk| statat(disk, FILLED, AtFlags::SYMLINK_NOFOLLOW).is_ok();
    let is_first = private.is_none_or(|disk| !is_filled(disk));
    let wants = |folder: &&FolderMount| folder.fill && is_first;
    let points = MountPoints::new(image).context(|| "the root")?;
    let images = folders.iter().map(|folder| match wants(&folder) {
        true => held(&points, folder),
        false => Ok(None),
    });
    // All of them before anything covers one.
    let images = images.collect::<Result<Vec<_>, _>>()?;
    let sockets = Sockets::default();
    for (folder, image) in folders.iter().zip(images) {
        match folder.socket {
            Some(socket) => mount_socket(&points, folder, socket, &sockets)?,
            None => mount_one(&points, folder, image)?,
        }
    }
    if let Some(disk) = private.filter(|_| folders.iter().any(|folder| wants(&folder))) {
        let flags = OFlags::WRONLY | OFlags::CREATE | NO_FOLLOW;
        let noted = openat(disk, FILLED, flags, Mode::RUSR | Mode::WUSR).map(drop);
        noted.map_err(io::Error::from).context(|| "noting that volumes are filled")?;
    }
    Ok(sockets)
}

fn mount_socket(
    points: &MountPoints<'_>,
    folder: &FolderMount,
    socket: SocketFile,
    sockets: &Sockets,
) -> Result<(), InitError> {
    let target = folder.guest_path.as_str();
    let place = points.file(target)?;
    let shown = sockets.make(socket, folder.read_only);
    shown
        .and_then(|shown| mounting::put(&shown, &place))
        .context(|| format!("mounting the socket {target}"))
}

/// What the image has where the folder is to be; a volume stays as it is where that is nothing.
fn held(points: &MountPoints<'_>, folder: &FolderMount) -> Result<Option<File>, InitError> {
    let found = points.find(&folder.guest_path, Missing::Nothing)?;
    found.map(|found| directory(&found)).transpose().context(|| folder.guest_path.clone())
}

/// Opens a directory that was found, or the root of a mount, to be read.
fn directory(found: &File) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(found, c".", flags, Mode::empty())?.into())
}

fn mount_one(
    points: &MountPoints<'_>,
    folder: &FolderMount,
    image: Option<File>,
) -> Result<(), InitError> {
    let target = folder.guest_path.as_str();
    if folder.is_file {
        let place = points.file(target)?;
        return mount_file(folder, &place).context(|| format!("mounting the file {target}"));
    }
    let place = points.directory(target)?;
    let mount = || -> io::Result<File> {
        let mounted = device(folder)?;
        mounting::put(&mounted, &place)?;
        Ok(mounted)
    };
    let mounted = mount().context(|| format!("mounting the folder on {target}"))?;
    let Some(image) = image else { return Ok(()) };
    let filled = directory(&mounted).and_then(|volume| fill(image.as_fd(), volume.as_fd()));
    filled.context(|| format!("copying the image's {target} into the volume there"))
}

/// Detaches the folder on `path` from what this thread sees, and nothing else that programs have had
/// the path lead to.
pub fn detach(path: &str) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = File::from(openat(CWD, path, flags, Mode::empty())?);
    if paths::kind_of(&found)? != paths::FUSE {
        return Err(io::Error::other("no folder is there"));
    }
    // A directory of this thread's own: the call takes a path.
    unshare(CloneFlags::CLONE_FS)?;
    own_proc::enter()?;
    Ok(umount2(format!("self/fd/{}", found.as_raw_fd()).as_str(), MntFlags::MNT_DETACH)?)
}

/// What the device of a folder holds, which lies nowhere yet.
fn device(folder: &FolderMount) -> io::Result<File> {
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_RDONLY, folder.read_only);
    mounting::make("virtiofs", &folder.tag, flags, "")
}

/// Has the one file of a device lie on `place`, or a copy of it.
fn mount_file(folder: &FolderMount, place: &File) -> io::Result<()> {
    let mounted = device(folder)?;
    let shown = match folder.copied {
        Some(copied) => copy(&mounted, copied)?,
        None => {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            mounting::copy(openat(&mounted, FOLDER_FILE, flags, Mode::empty())?, false)?
        }
    };
    mounting::put(&shown, place)
}

/// The longest file that is copied into memory, in bytes; docker's secrets are shorter.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// A file in memory with what the device's holds. Nothing is left of the device.
fn copy(device: &File, copied: FileCopy) -> io::Result<File> {
    let mut content = Vec::new();
    let file = openat(device, FOLDER_FILE, OFlags::RDONLY | NO_FOLLOW, Mode::empty())?;
    File::from(file).take(COPY_BYTES_MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > COPY_BYTES_MAX {
        let most = COPY_BYTES_MAX >> 10;
        return Err(io::Error::other(format!("it is longer than {most} KiB")));
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let memory = mounting::make("tmpfs", "tmpfs", flags, "size=2m")?;
    let FileCopy { mode, uid, gid } = copied;
    let made = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | NO_FOLLOW;
    let mut file = File::from(openat(&memory, FOLDER_FILE, made, Mode::RUSR | Mode::WUSR)?);
    file.write_all(&content)?;
    fchown(&file, Some(uid), Some(gid))?;
    file.set_permissions(Permissions::from_mode(mode & 0o777))?;
    let shown = mounting::copy(&file, false)?;
    mounting::change(&shown, flags | MsFlags::MS_RDONLY)?;
    Ok(shown)
}
