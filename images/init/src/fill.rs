//! What docker does with a new volume: while it is empty, it gets what the image has in its place,
//! with owners, modes, times and attributes.
//!
//! ```text
//! empty, or marked ──> marked, and the mark locked ──> copied ──> the mark is gone
//! ```
//! A copy that was cut off leaves its mark, and is done anew. Cells that begin with the same volume
//! wait for each other at the lock. Nothing here follows a link: another cell may have written there.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid,
    XattrFlags, chmodat, chownat, fchmod, fchown, fgetxattr, flistxattr, flock, fsetxattr, fstat,
    futimens, linkat, mkdirat, mknodat, openat, readlinkat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use crate::log;

/// Is in a volume while it is filled.
const MARK: &CStr = c".exocell-filling";
/// How long another cell may fill it.
const LOCK_MAX: Duration = Duration::from_secs(45);
const LOCK_LOOK: Duration = Duration::from_millis(10);
/// Bytes that are copied in one step.
const STEP_BYTES: u64 = 4 << 20;

/// Steps that copies have made, of all volumes: whether a long one goes on.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// How many steps were made so far.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

const NO_FOLLOW: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const DIRECTORY: OFlags = NO_FOLLOW.union(OFlags::DIRECTORY);

/// Fills `volume` with what is in `image`, unless there is something in it.
///
/// # Errors
/// As of the calls; another cell fills it, and is not done in time.
pub fn fill(image: BorrowedFd<'_>, volume: BorrowedFd<'_>) -> io::Result<()> {
    let found = Content::of(volume)?;
    if found.others && !found.mark {
        return Ok(());
    }
    let flags = OFlags::RDWR | NO_FOLLOW;
    let own = openat(volume, MARK, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR);
    let (mark, is_own) = match own {
        Err(Errno::EXIST) => match openat(volume, MARK, flags, Mode::empty()) {
            // Another cell is done, or this is no mark.
            Err(Errno::NOENT | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Ok(()),
            mark => (mark?, false),
        },
        mark => (mark?, true),
    };
    await_lock(&mark)?;
    let found = Content::of(volume)?;
    if !found.mark {
        return Ok(());
    }
    // One of our own in a volume that was filled meanwhile says nothing.
    if !(is_own && found.others) {
        copy_all(image, volume)?;
    }
    Ok(unlinkat(volume, MARK, AtFlags::empty())?)
}

/// What is in a volume.
struct Content {
    mark: bool,
    others: bool,
}

impl Content {
    /// As the host says it: names are remembered longer than they may be there.
    fn of(volume: BorrowedFd<'_>) -> io::Result<Self> {
        let mut found = Self { mark: false, others: false };
        for name in names(volume)? {
            if name.as_c_str() == MARK {
                found.mark = true;
            } else {
                found.others = true;
            }
        }
        Ok(found)
    }
}

fn names(directory: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if name.as_c_str() != c"." && name.as_c_str() != c".." {
            names.push(name);
        }
    }
    Ok(names)
}

fn await_lock(mark: &OwnedFd) -> io::Result<()> {
    let until = Instant::now() + LOCK_MAX;
    loop {
        match flock(mark, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => sleep(LOCK_LOOK),
            Err(Errno::AGAIN) => {
                return Err(io::Error::other("another cell has not filled it in time; try again"));
            }
            // A file system of the host's without locks.
            Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
            locked => return Ok(locked?),
        }
    }
}

/// A directory that is being copied.
struct Level {
    from: OwnedFd,
    to: OwnedFd,
    stat: Stat,
    names: Vec<CString>,
}

impl Level {
    fn new(from: OwnedFd, to: OwnedFd) -> io::Result<Self> {
        let (stat, names) = (fstat(&from)?, names(from.as_fd())?);
        Ok(Self { from, to, stat, names })
    }
}

/// Copies what is in `from`, and what it is itself.
fn copy_all(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut linked = HashMap::new();
    let mut levels = vec![Level::new(from.try_clone_to_owned()?, to.try_clone_to_owned()?)?];
    while let Some(level) = levels.last_mut() {
        STEPS.fetch_add(1, Ordering::Relaxed);
        let Some(name) = level.names.pop() else {
            dress(&level.from, &level.to, &level.stat)?;
            levels.pop();
            continue;
        };
        let stat = statat(&level.from, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let from = openat(&level.from, &name, DIRECTORY, Mode::empty())?;
            let to = make_directory(&level.to, &name)?;
            levels.push(Level::new(from, to)?);
            continue;
        }
        let is_linked = stat.st_nlink > 1;
        let key = (stat.st_dev, stat.st_ino);
        if let Some(first) = linked.get(&key).filter(|_| is_linked) {
            put(&level.to, &name, || linkat(first, c"", &level.to, &name, AtFlags::EMPTY_PATH))?;
            continue;
        }
        copy_one(&level.from, &level.to, &name, &stat)?;
        if is_linked {
            let flags = OFlags::PATH | NO_FOLLOW;
            // What was left out has no first name.
            if let Ok(first) = openat(&level.to, &name, flags, Mode::empty()) {
                linked.insert(key, first);
            }
        }
    }
    Ok(())
}

/// Makes `name` in `to` by `make`; what an earlier copy left of it goes.
fn put<T>(
    to: &OwnedFd,
    name: &CStr,
    mut make: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            unlinkat(to, name, AtFlags::empty())?;
            Ok(make()?)
        }
        made => Ok(made?),
    }
}

fn make_directory(to: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    match mkdirat(to, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    match openat(to, name, DIRECTORY, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            put(to, name, || mkdirat(to, name, Mode::RWXU))?;
            Ok(openat(to, name, DIRECTORY, Mode::empty())?)
        }
        opened => Ok(opened?),
    }
}

fn copy_one(from: &OwnedFd, to: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    match kind {
        FileType::RegularFile => {
            let source = openat(from, name, OFlags::RDONLY | NO_FOLLOW, Mode::empty())?;
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | NO_FOLLOW;
            let made = put(to, name, || openat(to, name, flags, Mode::RUSR | Mode::WUSR))?;
            let (mut source, mut made) = (File::from(source), File::from(made));
            while io::copy(&mut (&mut source).take(STEP_BYTES), &mut made)? == STEP_BYTES {
                STEPS.fetch_add(1, Ordering::Relaxed);
            }
            dress(&source, &made, stat)
        }
        FileType::Symlink => {
            let target = readlinkat(from, name, Vec::new())?;
            put(to, name, || symlinkat(&target, to, name))?;
            give(to, name, stat)
        }
        FileType::Fifo => {
            put(to, name, || mknodat(to, name, kind, mode(stat), 0))?;
            give(to, name, stat)?;
            Ok(chmodat(to, name, mode(stat), AtFlags::empty())?)
        }
        // A folder of the host holds none.
        _ => {
            log::warn(format_args!(
                "{name:?} is not copied into a volume: it is a device or socket"
            ));
            Ok(())
        }
    }
}

fn mode(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode & 0o7777)
}

fn owner(stat: &Stat) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))
}

fn times(stat: &Stat) -> Timestamps {
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec as _),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
    }
}

/// The owner and the times of what cannot be opened.
fn give(to: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
    let (user, group) = owner(stat);
    chownat(to, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(utimensat(to, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes `to` what `from` is, beside its content. Attributes last but for times: a new owner takes
/// capabilities away.
fn dress(from: impl AsFd, to: impl AsFd, stat: &Stat) -> io::Result<()> {
    let (user, group) = owner(stat);
    fchown(&to, user, group)?;
    fchmod(&to, mode(stat))?;
    for (name, value) in attributes(from.as_fd())? {
        match fsetxattr(&to, name.as_c_str(), &value, XattrFlags::empty()) {
            // The volume's file system has no such attributes.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(futimens(&to, &times(stat))?)
}

/// The longest list of names, and the longest value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const ATTRIBUTES_LEN_MAX: usize = 64 << 10;

/// The attributes of an image's file. Those of the overlay are its own.
fn attributes(from: BorrowedFd<'_>) -> io::Result<Vec<(CString, Vec<u8>)>> {
    let mut list = vec![0; ATTRIBUTES_LEN_MAX];
    let len = match flistxattr(from, list.as_mut_slice()) {
        Err(Errno::OPNOTSUPP) => 0,
        len => len?,
    };
    list.truncate(len);
    let mut found = Vec::new();
    for name in list.split(|byte| *byte == 0) {
        if name.is_empty() || name.starts_with(b"trusted.") {
            continue;
        }
        let name = CString::new(name)?;
        let mut value = vec![0; ATTRIBUTES_LEN_MAX];
        match fgetxattr(from, name.as_c_str(), value.as_mut_slice()) {
            Ok(len) => {
                value.truncate(len);
                found.push((name, value));
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;

    fn fill_from(image: &Path, volume: &Path) -> io::Result<()> {
        let (image, volume) = (File::open(image)?, File::open(volume)?);
        fill(image.as_fd(), volume.as_fd())
    }

    /// An image's directory, and an empty volume.
    fn places() -> (tempfile::TempDir, std::path::PathBuf, std::path::PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let (image, volume) = (place.path().join("image"), place.path().join("volume"));
        fs::create_dir_all(image.join("sub/deep")).unwrap();
        fs::create_dir(&volume).unwrap();
        fs::write(image.join("sub/file"), "content").unwrap();
        fs::hard_link(image.join("sub/file"), image.join("other")).unwrap();
        symlink("/etc/passwd", image.join("link")).unwrap();
        fs::set_permissions(image.join("sub/file"), Permissions::from_mode(0o640)).unwrap();
        fs::set_permissions(&image, Permissions::from_mode(0o1750)).unwrap();
        (place, image, volume)
    }

    #[test]
    fn an_empty_volume_becomes_what_the_image_has() {
        let (_place, image, volume) = places();
        fill_from(&image, &volume).unwrap();
        assert_eq!(fs::read_to_string(volume.join("sub/file")).unwrap(), "content");
        assert_eq!(fs::read_link(volume.join("link")).unwrap(), Path::new("/etc/passwd"));
        let stat = |path: &str| fs::symlink_metadata(volume.join(path)).unwrap();
        assert_eq!(stat("sub/file").mode() & 0o7777, 0o640);
        assert_eq!(stat("sub/file").ino(), stat("other").ino());
        assert_eq!(stat(".").mode() & 0o7777, 0o1750);
        let of_image = fs::metadata(image.join("sub")).unwrap();
        assert_eq!(stat("sub").mtime_nsec(), of_image.mtime_nsec());
        assert!(!volume.join(MARK.to_str().unwrap()).exists());
        // What is there stays as it is.
        fs::remove_file(volume.join("other")).unwrap();
        fs::write(volume.join("sub/file"), "another").unwrap();
        fill_from(&image, &volume).unwrap();
        assert!(!volume.join("other").exists());
        assert_eq!(fs::read_to_string(volume.join("sub/file")).unwrap(), "another");
    }

    #[test]
    fn a_copy_that_was_cut_off_is_done_anew_and_follows_no_link() {
        let (place, image, volume) = places();
        let mark = volume.join(MARK.to_str().unwrap());
        fs::write(&mark, "").unwrap();
        let host = place.path().join("host");
        fs::create_dir(&host).unwrap();
        symlink(&host, volume.join("sub")).unwrap();
        symlink(host.join("made"), volume.join("other")).unwrap();
        fill_from(&image, &volume).unwrap();
        assert_eq!(fs::read_to_string(volume.join("sub/file")).unwrap(), "content");
        assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
        assert!(!mark.exists());
        // What has the mark's name and is none is somebody's own.
        fs::create_dir(&mark).unwrap();
        fs::remove_file(volume.join("link")).unwrap();
        fill_from(&image, &volume).unwrap();
        assert!(!volume.join("link").exists() && mark.is_dir());
    }
}
