//! Removing what a container has left on the private disk.
//!
//! A tree may be as deep as its programs made it, so nothing here goes down into it: directories
//! come up instead, each to where the first one is, and what is empty goes.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::thread;

use nix::NixPath;
use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::log;

/// Where what is being removed is, beside what is not.
const REMOVED: &str = "removed";
/// Entries of a directory that are looked at together.
const BATCH: usize = 1024;
const STACK_BYTES: usize = 128 * 1024;

/// Moves the directory `name` in `directory` of `disk` out of the way of another of that name, and
/// removes it in a thread of its own. One that is not there is none.
pub fn begin(disk: &File, directory: &str, name: &str) {
    let begun = || -> nix::Result<()> {
        let within = open(disk, directory)?;
        match mkdirat(disk, REMOVED, Mode::from_bits_truncate(0o700)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        let removed = open(disk, REMOVED)?;
        // Two of one name follow each other.
        let place = (0_u32..).map(|number| format!("{name}.{number}")).find_map(|place| {
            match mkdirat(&removed, place.as_str(), Mode::from_bits_truncate(0o700)) {
                Ok(()) => Some(Ok(place)),
                Err(Errno::EEXIST) => None,
                Err(errno) => Some(Err(errno)),
            }
        });
        let place = place.unwrap_or(Err(Errno::EEXIST))?;
        let top = open(&removed, place.as_str())?;
        renameat(&within, name, &top, "0")?;
        let working = move || {
            if let Err(errno) = clear(&top) {
                log::warn(format_args!("files of a container stay: {errno}"));
            }
            drop(top);
            let _ = unlinkat(&removed, place.as_str(), UnlinkatFlags::RemoveDir);
        };
        let thread = thread::Builder::new().name("removal".into()).stack_size(STACK_BYTES);
        thread.spawn(working).map(drop).map_err(|_| Errno::EAGAIN)
    };
    match begun() {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(errno) => log::warn(format_args!("files of a container stay: {errno}")),
    }
}

/// Removes the directory `name` of `disk`, and what a removal that was broken off has left.
pub fn sweep(disk: &File, name: &str) {
    let _ = mkdirat(disk, name, Mode::from_bits_truncate(0o700));
    let left = format!("{name}/{REMOVED}");
    match renameat(disk, REMOVED, disk, left.as_str()) {
        Ok(()) | Err(Errno::ENOENT) => begin(disk, ".", name),
        Err(errno) => log::warn(format_args!("files of a container stay: {errno}")),
    }
}

/// Opens the directory `name` in another, and no link.
pub fn open<N: ?Sized + NixPath>(directory: impl AsFd, name: &N) -> nix::Result<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(directory, name, flags, Mode::empty()).map(File::from)
}

/// Removes all that is in `top`, which holds directories with numbers for names.
fn clear(top: &File) -> nix::Result<()> {
    let mut next = 1_u64;
    // Those that came up and were not looked at yet begin with this one.
    let mut first = 0;
    while first < next {
        let name = first.to_string();
        let directory = match open(top, name.as_str()) {
            Ok(directory) => directory,
            Err(Errno::ENOENT) => {
                first += 1;
                continue;
            }
            Err(errno) => return Err(errno),
        };
        loop {
            let entries = batch(&directory)?;
            if entries.is_empty() {
                break;
            }
            for (name, is_directory) in &entries {
                if !is_directory {
                    unlinkat(&directory, name.as_c_str(), UnlinkatFlags::NoRemoveDir)?;
                    continue;
                }
                match unlinkat(&directory, name.as_c_str(), UnlinkatFlags::RemoveDir) {
                    Err(Errno::ENOTEMPTY | Errno::EEXIST) => {
                        renameat(&directory, name.as_c_str(), top, next.to_string().as_str())?;
                        next += 1;
                    }
                    done => done?,
                }
            }
        }
        drop(directory);
        unlinkat(top, name.as_str(), UnlinkatFlags::RemoveDir)?;
        first += 1;
    }
    Ok(())
}

/// Some names in `directory`, and whether each is a directory's; none where it is empty.
pub fn batch(directory: &File) -> nix::Result<Vec<(CString, bool)>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut opened = Dir::openat(directory, ".", flags, Mode::empty())?;
    let mut found = Vec::new();
    for entry in opened.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            found.push((name.to_owned(), entry.file_type() == Some(Type::Directory)));
        }
        if found.len() >= BATCH {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tree_deeper_than_any_path_goes() {
        let folder = tempfile::tempdir().unwrap();
        let top = File::open(folder.path()).unwrap();
        fs::create_dir(folder.path().join("0")).unwrap();
        let mut at = open(&top, "0").unwrap();
        // Longer than a path may be (PATH_MAX), and each level has something beside the next.
        let name = "d".repeat(200);
        for _ in 0..40 {
            mkdirat(&at, name.as_str(), Mode::from_bits_truncate(0o700)).unwrap();
            let flags = OFlag::O_CREAT | OFlag::O_WRONLY;
            drop(openat(&at, "f", flags, Mode::from_bits_truncate(0o600)).unwrap());
            at = open(&at, name.as_str()).unwrap();
        }
        clear(&top).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(other.path().join("stays"), "").unwrap();
        let top = File::open(folder.path()).unwrap();
        fs::create_dir_all(folder.path().join("0/many")).unwrap();
        for number in 0..2 * BATCH {
            fs::write(folder.path().join(format!("0/many/{number}")), "").unwrap();
        }
        std::os::unix::fs::symlink(other.path(), folder.path().join("0/link")).unwrap();
        clear(&top).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(other.path().join("stays").exists());
    }
}
