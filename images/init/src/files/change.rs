//! Making, moving, removing and writing files.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chown, fchown};
use std::path::Path;

use exocell_agent::files::METADATA_PREFIX;
use exocell_agent::{FailureKind, FrameReader, FrameWriter, Kind, Reply};
use nix::errno::Errno;
use nix::unistd::{UnlinkatFlags, unlinkat};
use rustix::fs::{XattrFlags, flistxattr, fremovexattr, fsetxattr};

use super::{CHUNK_BYTES, NAMES_BYTES_MAX, Place, check_file};
use crate::error::{Context, InitError};
use crate::removal;
use crate::transfer::DataReader;
use crate::users::Identity;

/// Levels of directories that a removal goes down; each holds a descriptor.
const DEPTH_MAX: usize = 4096;

/// Makes the directory `path`, and those above it that are missing.
pub fn make(path: &Path, user: &Identity) -> Result<(), InitError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(InitError::Failed {
            kind: FailureKind::Exists,
            message: format!("directory already exists: {}", path.display()),
        }),
        Ok(_) => {
            let message = format!("{}: it is there, and is not a directory", path.display());
            Err(InitError::invalid(message))
        }
        Err(_) => ensure(path, user),
    }
}

/// The same, of one that may be there.
fn ensure(path: &Path, user: &Identity) -> Result<(), InitError> {
    let mut missing: Vec<&Path> = path.ancestors().take_while(|path| !path.is_dir()).collect();
    while let Some(path) = missing.pop() {
        match DirBuilder::new().mode(0o755).create(path) {
            Ok(()) => chown(path, Some(user.uid), Some(user.gid)).context(|| path.display())?,
            // A program was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            Err(error) => return Err(InitError::io(path.display(), &error)),
        }
    }
    Ok(())
}

pub fn rename(from: &Path, to: &Path, user: &Identity) -> Result<(), InitError> {
    fs::symlink_metadata(from).context(|| from.display())?;
    if let Some(parent) = to.parent() {
        ensure(parent, user)?;
    }
    fs::rename(from, to).context(|| format!("moving {} to {}", from.display(), to.display()))
}

/// Removes `path`, and all below it.
pub fn remove(path: &Path) -> Result<(), InitError> {
    if path.parent().is_none() {
        return Err(InitError::invalid("the root directory cannot be removed"));
    }
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => remove_tree(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(|| format!("removing {}", path.display())),
    }
}

/// Goes down to what is empty and up again, without a call for each level.
fn remove_tree(path: &Path) -> io::Result<()> {
    let mut levels = vec![(removal::open(nix::fcntl::AT_FDCWD, path)?, None)];
    while let Some((directory, _)) = levels.last() {
        if let Some(name) = remove_entries(directory)? {
            if levels.len() >= DEPTH_MAX {
                return Err(io::Error::other(format!("it is more than {DEPTH_MAX} levels deep")));
            }
            let below = removal::open(directory, name.as_c_str())?;
            levels.push((below, Some(name)));
            continue;
        }
        let emptied = levels.pop().and_then(|(_, name)| name);
        if let (Some(name), Some((above, _))) = (emptied, levels.last()) {
            unlinkat(above, name.as_c_str(), UnlinkatFlags::RemoveDir)?;
        }
    }
    fs::remove_dir(path)
}

/// Removes what can be removed of a directory; the name of one in it that is not empty.
fn remove_entries(directory: &File) -> nix::Result<Option<std::ffi::CString>> {
    loop {
        let entries = removal::batch(directory)?;
        if entries.is_empty() {
            return Ok(None);
        }
        for (name, is_directory) in entries {
            let how = match is_directory {
                true => UnlinkatFlags::RemoveDir,
                false => UnlinkatFlags::NoRemoveDir,
            };
            match unlinkat(directory, name.as_c_str(), how) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST) if is_directory => return Ok(Some(name)),
                Err(Errno::ENOENT) => {}
                done => done?,
            }
        }
    }
}

/// Removes what was said of a file's bytes before.
fn forget(file: &File) {
    let mut names = vec![0_u8; NAMES_BYTES_MAX];
    let length = flistxattr(file, names.as_mut_slice()).unwrap_or(0);
    let names = names.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    for name in names.filter(|name| name.starts_with(METADATA_PREFIX.as_bytes())) {
        // One that is gone by now is gone.
        let _ = fremovexattr(file, name);
    }
}

/// Writes what comes on `frames` into a file, and says what it is then.
pub fn write(
    stream: &File,
    mut frames: FrameReader<&File>,
    place: &Place,
    metadata: &BTreeMap<String, String>,
) -> Result<(), InitError> {
    let mut data = DataReader::new(&mut frames);
    let written = fill(&mut data, place, metadata).and_then(|()| place.entry(&place.path));
    let reply = match written {
        Ok(entry) => Reply::Entry(Box::new(entry)),
        Err(error) => error.into_reply()?,
    };
    FrameWriter::new(stream).write_json(Kind::Reply, &reply)?;
    // Listen on: a host that is still sending would lose the reply to a reset.
    let _ = io::copy(&mut data, &mut io::sink());
    Ok(())
}

fn fill(
    data: &mut impl Read,
    place: &Place,
    metadata: &BTreeMap<String, String>,
) -> Result<(), InitError> {
    let (path, user) = (&place.path, &place.user);
    if let Some(parent) = path.parent() {
        ensure(parent, user)?;
    }
    // What is a pipe or a device is not waited for, and not cut short before it is looked at.
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o644);
    options.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY);
    let mut file = options.open(path).context(|| path.display())?;
    check_file(&file, path)?;
    // Who watches the directory hears of a change, so there is none where nothing changes.
    if file.metadata().context(|| path.display())?.len() > 0 {
        file.set_len(0).context(|| path.display())?;
    }
    fchown(&file, Some(user.uid), Some(user.gid)).context(|| path.display())?;
    forget(&file);
    for (name, value) in metadata {
        let name = format!("{METADATA_PREFIX}{name}");
        fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty())
            .map_err(io::Error::from)
            .context(|| format!("the metadata of {}", path.display()))?;
    }
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let count = data.read(&mut chunk).context(|| "the file's bytes")?;
        if count == 0 {
            return Ok(());
        }
        file.write_all(&chunk[..count]).context(|| format!("writing {}", path.display()))?;
    }
}
