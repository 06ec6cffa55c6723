//! The private overlay of a cell: an empty ext4 file system of the granted
//! size, copied from a template that is made once per size.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{Whence, linkat, lseek};

use crate::{CellError, Layout};
use exocell_images::private;

/// The smallest disk on which ext4 leaves room for anything.
pub const DISK_BYTES_MIN: u64 = 4 << 20;

/// The smallest disk that has a journal, and how large that is.
const JOURNALED_BYTES_MIN: u64 = 64 << 20;
const JOURNAL: &str = "size=8";

/// How long a cell waits for a disk that another still has, and how soon it looks again.
const HELD_MAX: Duration = Duration::from_secs(10);
const HELD_LOOK: Duration = Duration::from_millis(10);

/// How long a disk lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// As the kernel that writes it. It needs no journal.
    OneCell,
    /// Another cell goes on with it, also after a kill of this one.
    Kept,
}

impl Life {
    fn has_journal(self, bytes: u64) -> bool {
        self == Self::Kept && bytes >= JOURNALED_BYTES_MIN
    }
}

/// A new disk of `bytes`, without a name: it is gone with its last holder.
pub fn create(layout: &Layout, bytes: u64, life: Life) -> Result<File, CellError> {
    if bytes < DISK_BYTES_MIN {
        return Err(CellError::Usage(format!(
            "a disk of {bytes} bytes is too small; grant at least {DISK_BYTES_MIN} (disk.size)"
        )));
    }
    let directory = layout.disks();
    let what = || format!("cannot make a disk in {}", directory.display());
    private::folder(&directory).map_err(CellError::host(what()))?;
    let template = template(&directory, bytes, life.has_journal(bytes))?;
    let disk = nameless(&directory).map_err(CellError::host(what()))?;
    hold(&disk)?;
    disk.set_len(bytes)
        .and_then(|()| copy_data(&template, &disk))
        .map_err(CellError::host(what()))?;
    Ok(disk)
}

/// Takes `disk` for one cell, until its last holder is gone: two guests that write one file system
/// destroy it.
///
/// # Errors
/// [`CellError::Usage`] when another has it and keeps it.
pub fn hold(disk: &File) -> Result<(), CellError> {
    let until = Instant::now() + HELD_MAX;
    loop {
        match disk.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                std::thread::sleep(HELD_LOOK);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(CellError::Usage(
                    "the cell's files are being copied (exocell cp, commit); try again after that"
                        .to_owned(),
                ));
            }
            Err(TryLockError::Error(error)) => {
                return Err(CellError::host("cannot lock the cell's disk")(error));
            }
        }
    }
}

/// A file without a name, which a name can be given.
pub fn nameless(directory: &Path) -> io::Result<File> {
    let mut options = private::options();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(directory)
}

/// The disk in the file `path`, which a cell before may have left; a new one of
/// `bytes` where there is none.
///
/// # Errors
/// [`CellError::Host`] when the file can neither be opened nor made.
pub fn keep(layout: &Layout, path: &Path, bytes: u64) -> Result<File, CellError> {
    let what = || format!("cannot open the disk {}", path.display());
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(disk) => return hold(&disk).map(|()| disk),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(CellError::host(what())(error)),
    }
    let disk = create(layout, bytes, Life::Kept)?;
    name(&disk, path).map_err(CellError::host(what()))?;
    Ok(disk)
}

/// Gives a file without a name one, once it is whole (open(2), O_TMPFILE): a kill before leaves
/// nothing.
///
/// # Errors
/// linkat(2); there is such a file already.
pub fn name(file: &File, path: &Path) -> io::Result<()> {
    let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
    let follow = AtFlags::AT_SYMLINK_FOLLOW;
    Ok(linkat(AT_FDCWD, nameless.as_str(), AT_FDCWD, path, follow)?)
}

/// As [`name`], where it does not matter who made the file that has it.
///
/// # Errors
/// linkat(2).
pub fn name_first(file: &File, path: &Path) -> io::Result<()> {
    match name(file, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn template(directory: &Path, bytes: u64, has_journal: bool) -> Result<File, CellError> {
    let kind = if has_journal { "journal" } else { "empty" };
    let path = directory.join(format!("{kind}-{bytes}.ext4"));
    if let Ok(file) = File::open(&path) {
        return Ok(file);
    }
    let what = || format!("cannot make {}", path.display());
    let new = nameless(directory).map_err(CellError::host(what()))?;
    new.set_len(bytes).map_err(CellError::host(what()))?;
    // Another process opens it through this one's.
    let path_of_new = format!("/proc/{}/fd/{}", std::process::id(), new.as_raw_fd());
    format(Path::new(&path_of_new), has_journal)?;
    name_first(&new, &path).map_err(CellError::host(what()))?;
    File::open(&path).map_err(CellError::host(what()))
}

fn format(path: &Path, has_journal: bool) -> Result<(), CellError> {
    let journal: &[&str] = match has_journal {
        true => &["-O", "has_journal,^resize_inode", "-J", JOURNAL],
        false => &["-O", "^has_journal,^resize_inode"],
    };
    let output = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0"])
        .args(journal)
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"])
        .arg(path)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(CellError::host("cannot run mkfs.ext4 (apt install e2fsprogs)"))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(CellError::Usage(format!("mkfs.ext4 {} failed: {reason}", path.display())))
}

/// Copies what is not a hole.
fn copy_data(from: &File, to: &File) -> io::Result<()> {
    let end = from.metadata()?.len() as i64;
    let mut position = 0;
    while let Some(start) = seek(from, position, Whence::SeekData)? {
        let hole = seek(from, start, Whence::SeekHole)?.unwrap_or(end);
        copy_range(from, to, start, hole)?;
        position = hole;
    }
    Ok(())
}

fn seek(file: &File, from: i64, whence: Whence) -> io::Result<Option<i64>> {
    match lseek(file, from, whence) {
        Ok(position) => Ok(Some(position)),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn copy_range(from: &File, to: &File, start: i64, end: i64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 64 << 10];
    let mut position = start as u64;
    while position < end as u64 {
        let want = buffer.len().min((end as u64 - position) as usize);
        let got = from.read_at(&mut buffer[..want], position)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        to.write_all_at(&buffer[..got], position)?;
        position += got as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_disk_is_a_sparse_file_system_of_its_size() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let disk = create(&layout, 64 << 20, Life::OneCell).unwrap();
        assert_eq!(disk.metadata().unwrap().len(), 64 << 20);
        assert!(disk.metadata().unwrap().blocks() * 512 < 4 << 20);
        let mut magic = [0; 2];
        std::os::unix::fs::FileExt::read_exact_at(&disk, &mut magic, 1024 + 56).unwrap();
        assert_eq!(u16::from_le_bytes(magic), 0xef53);
    }

    #[test]
    fn a_disk_that_is_kept_is_made_once() {
        use std::os::unix::fs::FileExt;
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let path = root.path().join("kept.ext4");
        let disk = keep(&layout, &path, 64 << 20).unwrap();
        disk.write_all_at(b"mine", 0).unwrap();
        drop(disk);
        let mut found = [0; 4];
        let again = keep(&layout, &path, 128 << 20).unwrap();
        again.read_exact_at(&mut found, 0).unwrap();
        assert_eq!((&found, again.metadata().unwrap().len()), (b"mine", 64 << 20));
        let nowhere = keep(&layout, &root.path().join("no/where"), 64 << 20).unwrap_err();
        assert!(nowhere.to_string().contains("no/where"), "{nowhere}");
    }

    #[test]
    fn too_small_a_disk_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let error = create(&Layout::new(root.path()), 4096, Life::OneCell).unwrap_err();
        assert!(error.to_string().contains("disk.size"), "{error}");
    }
}
