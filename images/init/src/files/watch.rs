//! Telling what happens in a directory, by inotify(7).
//!
//! Below it, where that is asked for, each directory has a watch of its own: one that comes is
//! looked through once it has its watch, so that what was in it by then is told too.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use exocell_agent::files::{FileChange, FileEvent};
use exocell_agent::{FailureKind, FrameWriter, Kind, Reply};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::inotify::{
    CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
};

use crate::error::{Context, InitError};

/// Directories that one client watches at most.
const DIRECTORIES_MAX: usize = 8192;
/// Events are read so many bytes at a time.
const BUFFER_BYTES: usize = 16 << 10;

/// Tells the host of `path` until it hangs up.
pub fn run(stream: &File, path: &Path, recursive: bool) -> Result<(), InitError> {
    let found = fs::metadata(path).context(|| path.display())?;
    if !found.is_dir() {
        return Err(InitError::invalid(format!("{}: it is not a directory", path.display())));
    }
    let notify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(io::Error::from);
    let notify = notify.map_err(|error| no_watch(path, &error))?;
    let mut watch = Watch { notify, top: path.to_owned(), recursive, below: HashMap::new() };
    watch.add(Path::new("")).map_err(|error| no_watch(path, &error))?;
    watch.add_below(PathBuf::new(), &mut |_| Ok(())).map_err(|error| no_watch(path, &error))?;
    FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done)?;
    let told = watch.tell(stream);
    // A host that hung up needs no word.
    told.or_else(|error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
        _ => Err(InitError::io(path.display(), &error)),
    })
}

fn no_watch(path: &Path, error: &io::Error) -> InitError {
    let full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EMFILE));
    match full || error.kind() == io::ErrorKind::QuotaExceeded {
        true => InitError::Failed {
            kind: FailureKind::Full,
            message: format!("{}: there are too many watches: {error}", path.display()),
        },
        false => InitError::io(path.display(), error),
    }
}

struct Watch {
    notify: OwnedFd,
    top: PathBuf,
    recursive: bool,
    /// The directories that are watched, relative to the top.
    below: HashMap<i32, PathBuf>,
}

type Tell<'a> = dyn FnMut(FileEvent) -> io::Result<()> + 'a;

impl Watch {
    fn add(&mut self, below: &Path) -> io::Result<()> {
        if self.below.len() >= DIRECTORIES_MAX {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let mut flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        match below.as_os_str().is_empty() {
            true => flags |= WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF,
            false => flags |= WatchFlags::DONT_FOLLOW,
        }
        let added = add_watch(&self.notify, self.top.join(below).as_os_str().as_bytes(), flags)?;
        self.below.insert(added, below.to_owned());
        Ok(())
    }

    /// Watches the directories below one, and tells of all that is there.
    fn add_below(&mut self, from: PathBuf, tell: &mut Tell) -> io::Result<()> {
        if !self.recursive {
            return Ok(());
        }
        let mut waiting = vec![from];
        while let Some(from) = waiting.pop() {
            let Ok(entries) = fs::read_dir(self.top.join(&from)) else { continue };
            for entry in entries.flatten() {
                let path = from.join(entry.file_name());
                tell(FileEvent::of(&path, FileChange::Created))?;
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                match self.add(&path) {
                    Ok(()) => waiting.push(path),
                    // It went meanwhile.
                    Err(error) if gone(&error) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn tell(&mut self, stream: &File) -> io::Result<()> {
        let mut writer = FrameWriter::new(stream);
        let mut tell = |event: FileEvent| {
            let line = serde_json::to_vec(&event).map_err(io::Error::other)?;
            writer.write(Kind::Data, &[&line[..], b"\n"].concat()).map_err(|error| match error {
                exocell_agent::FrameError::Io(error) => error,
                error => io::Error::other(error),
            })
        };
        loop {
            let mut waited = [
                PollFd::new(self.notify.as_fd(), PollFlags::POLLIN),
                PollFd::new(stream.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut waited, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => continue,
                polled => polled?,
            };
            // The host has nothing to say but that it goes.
            if waited[1].any() == Some(true) {
                return Ok(());
            }
            for (watch, flags, name) in self.events()? {
                if !self.take(watch, flags, &name, &mut tell)? {
                    return Ok(());
                }
            }
        }
    }

    /// What has happened since.
    fn events(&self) -> io::Result<Vec<(i32, ReadFlags, PathBuf)>> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = Reader::new(&self.notify, &mut buffer);
        let mut found = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map_or(&[][..], |name| name.to_bytes());
                    let name = PathBuf::from(std::ffi::OsStr::from_bytes(name));
                    found.push((event.wd(), event.events(), name));
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(found),
                Err(errno) => return Err(errno.into()),
            }
            if reader.is_buffer_empty() {
                return Ok(found);
            }
        }
    }

    /// Tells of one event; whether there may be more.
    fn take(
        &mut self,
        watch: i32,
        flags: ReadFlags,
        name: &Path,
        tell: &mut Tell,
    ) -> io::Result<bool> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            tell(FileEvent::of(Path::new(""), FileChange::Lost))?;
            return Ok(true);
        }
        let Some(directory) = self.below.get(&watch).cloned() else { return Ok(true) };
        if flags.contains(ReadFlags::IGNORED) {
            self.below.remove(&watch);
            return Ok(true);
        }
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) {
            tell(FileEvent::of(Path::new(""), FileChange::Ended))?;
            return Ok(false);
        }
        let path = directory.join(name);
        let changes = [
            (ReadFlags::CREATE | ReadFlags::MOVED_TO, FileChange::Created),
            (ReadFlags::MODIFY, FileChange::Written),
            (ReadFlags::DELETE, FileChange::Removed),
            (ReadFlags::MOVED_FROM, FileChange::Renamed),
            (ReadFlags::ATTRIB, FileChange::Attributes),
        ];
        // A directory's own attributes, which its parent's watch tells too.
        let is_own = name.as_os_str().is_empty();
        for (_, change) in
            changes.into_iter().filter(|(bits, _)| flags.intersects(*bits) && !is_own)
        {
            tell(FileEvent::of(&path, change))?;
        }
        if flags.contains(ReadFlags::ISDIR) && self.recursive {
            if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                match self.add(&path) {
                    Ok(()) => self.add_below(path, tell)?,
                    Err(error) if gone(&error) => {}
                    Err(error) => return Err(error),
                }
            } else if flags.contains(ReadFlags::MOVED_FROM) {
                self.forget(&path);
            }
        }
        Ok(true)
    }

    /// What is moved away is not below the top any more.
    fn forget(&mut self, path: &Path) {
        let notify = &self.notify;
        self.below.retain(|watch, below| {
            let stays = !below.starts_with(path);
            if !stays {
                let _ = remove_watch(notify, *watch);
            }
            stays
        });
    }
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
