//! `File`: one file, as a client of the operator's wants it.
//!
//! ```text
//! FileRequest ─> its path, by the user's home ─> stat, list, make, move, remove, read, write
//!                                             └> [`watch`], until the host hangs up
//! ```
//! Nothing is refused that root of the cell could do itself, as with archives ([`crate::transfer`]).

mod change;
mod watch;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use exocell_agent::files::{
    ENTRIES_MAX, FileAction, FileEntry, FileKind, FileRequest, LISTING_BYTES_MAX,
    METADATA_BYTES_MAX, METADATA_MAX, METADATA_PREFIX, PATH_BYTES_MAX,
};
use exocell_agent::{FRAME_BYTES_MAX, FrameReader, FrameWriter, Kind, Reply};
use rustix::fs::{lgetxattr, llistxattr};

use crate::error::{Context, InitError};
use crate::transfer::DataWriter;
use crate::users::{self, Identity};

/// Names of attributes that are looked through, in bytes.
const NAMES_BYTES_MAX: usize = 64 << 10;
/// Bytes of a file that are sent at a time.
const CHUNK_BYTES: usize = 32 << 10;

/// Does what `request` says; the thread sees files as the container's programs do.
pub fn serve(
    stream: &File,
    frames: FrameReader<&File>,
    request: &FileRequest,
) -> Result<(), InitError> {
    let place = Place::of(request)?;
    let path = place.path.as_path();
    let reply = match &request.action {
        FileAction::Stat => place.entry(path)?,
        FileAction::List { depth } => return place.list(stream, *depth),
        FileAction::MakeDir => {
            change::make(path, &place.user)?;
            place.entry(path)?
        }
        FileAction::Move { to } => {
            let to = resolved(to, &place.user.home)?;
            change::rename(path, &to, &place.user)?;
            place.entry(&to)?
        }
        FileAction::Remove => {
            change::remove(path)?;
            return Ok(FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done)?);
        }
        FileAction::Read => return place.read(stream),
        FileAction::Write { metadata } => {
            return change::write(stream, frames, &place, metadata);
        }
        FileAction::Watch { recursive } => return watch::run(stream, path, *recursive),
    };
    Ok(FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Entry(Box::new(reply)))?)
}

/// A path, and whose it is to be.
struct Place {
    user: Identity,
    path: PathBuf,
    passwd: String,
    group: String,
}

impl Place {
    fn of(request: &FileRequest) -> Result<Self, InitError> {
        let [passwd, group] = ["/etc/passwd", "/etc/group"].map(users::database);
        let user = users::resolve(&request.user, &passwd, &group)?;
        Ok(Self { path: resolved(&request.path, &user.home)?, user, passwd, group })
    }

    fn entry(&self, path: &Path) -> Result<FileEntry, InitError> {
        self.look(path).context(|| path.display())
    }

    /// What is at `path`.
    fn look(&self, path: &Path) -> io::Result<FileEntry> {
        let own = fs::symlink_metadata(path)?;
        let (kind, link) = match own.is_symlink() {
            false => (Some(kind(&own)), None),
            true => {
                let whole = fs::canonicalize(path).or_else(|_| fs::read_link(path))?;
                let kind = fs::metadata(path).ok().map(|target| kind(&target));
                (kind, Some(whole.to_string_lossy().into_owned()))
            }
        };
        let name = path.file_name().unwrap_or(path.as_os_str());
        Ok(FileEntry {
            name: name.to_string_lossy().into_owned(),
            path: path.to_string_lossy().into_owned(),
            kind,
            size: own.len(),
            mode: own.mode() & 0o7777,
            owner: users::name_of(own.uid(), &self.passwd),
            group: users::name_of(own.gid(), &self.group),
            modified_s: own.mtime(),
            modified_ns: u32::try_from(own.mtime_nsec()).unwrap_or(0),
            link,
            metadata: metadata(path),
        })
    }

    /// Sends what is in a directory and `depth` levels below it, by name.
    fn list(&self, stream: &File, depth: u32) -> Result<(), InitError> {
        let top = fs::metadata(&self.path).context(|| self.path.display())?;
        if !top.is_dir() {
            let message = format!("{}: it is not a directory", self.path.display());
            return Err(InitError::invalid(message));
        }
        let (mut text, mut count) = (Vec::new(), 0);
        let mut waiting = vec![(self.path.clone(), depth.max(1))];
        while let Some((path, depth)) = waiting.pop() {
            if path != self.path {
                let entry = match self.look(&path) {
                    // It went meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    entry => entry.context(|| path.display())?,
                };
                let line = serde_json::to_vec(&entry).map_err(io::Error::other);
                text.extend(line.context(|| "a line of the listing")?);
                text.push(b'\n');
                count += 1;
                if entry.link.is_some() || entry.kind != Some(FileKind::Directory) || depth == 0 {
                    continue;
                }
            }
            let names = fs::read_dir(&path).and_then(|all| {
                all.map(|entry| entry.map(|entry| entry.file_name()))
                    .take(ENTRIES_MAX + 1)
                    .collect::<io::Result<Vec<_>>>()
            });
            let mut names = match names {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                names => names.context(|| path.display())?,
            };
            if count + waiting.len() + names.len() > ENTRIES_MAX
                || text.len() as u64 > LISTING_BYTES_MAX / 2
            {
                return Err(InitError::Failed {
                    kind: exocell_agent::FailureKind::Full,
                    message: format!(
                        "{}: it holds more than a listing may have; list less depth, or a \
                         directory below it",
                        self.path.display()
                    ),
                });
            }
            names.sort_unstable_by(|one, other| other.cmp(one));
            waiting.extend(names.into_iter().map(|name| (path.join(name), depth - 1)));
        }
        let mut writer = FrameWriter::new(stream);
        writer.write(Kind::Data, &text)?;
        Ok(writer.write(Kind::DataEof, &[])?)
    }

    /// Sends what the file is, and all that is in it.
    fn read(&self, stream: &File) -> Result<(), InitError> {
        let path = &self.path;
        // A pipe that nobody writes to is not waited for.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY);
        let mut file = options.open(path).context(|| path.display())?;
        check_file(&file, path)?;
        let entry = Reply::Entry(Box::new(self.entry(path)?));
        FrameWriter::new(stream).write_json(Kind::Reply, &entry)?;
        let sink = DataWriter(FrameWriter::new(stream));
        let mut sink = BufWriter::with_capacity(FRAME_BYTES_MAX, sink);
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut copy = || loop {
            match file.read(&mut chunk)? {
                0 => return sink.flush(),
                count => sink.write_all(&chunk[..count])?,
            }
        };
        copy().context(|| format!("reading {}", path.display()))?;
        Ok(FrameWriter::new(stream).write(Kind::DataEof, &[])?)
    }
}

fn kind(metadata: &fs::Metadata) -> FileKind {
    match metadata {
        data if data.is_file() => FileKind::File,
        data if data.is_dir() => FileKind::Directory,
        _ => FileKind::Other,
    }
}

/// Refuses what is not a regular file.
fn check_file(file: &File, path: &Path) -> Result<(), InitError> {
    let metadata = file.metadata().context(|| path.display())?;
    let what = match kind(&metadata) {
        FileKind::File => return Ok(()),
        FileKind::Directory => "it is a directory",
        FileKind::Other => "it is no regular file",
    };
    Err(InitError::invalid(format!("{}: {what}", path.display())))
}

/// The attributes of a file that are its metadata, as far as they are text.
fn metadata(path: &Path) -> std::collections::BTreeMap<String, String> {
    let mut names = vec![0_u8; NAMES_BYTES_MAX];
    let length = llistxattr(path, names.as_mut_slice()).unwrap_or(0);
    let names = names.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    let own =
        names.filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(METADATA_PREFIX));
    let mut left = METADATA_BYTES_MAX;
    let value = |name: &str| {
        let mut value = [const { MaybeUninit::<u8>::uninit() }; METADATA_BYTES_MAX];
        let (value, _) = lgetxattr(path, format!("{METADATA_PREFIX}{name}"), &mut value).ok()?;
        let text = String::from_utf8(value.to_vec()).ok()?;
        text.bytes().all(|byte| (0x20..0x7f).contains(&byte)).then_some(text)
    };
    own.filter_map(|name| Some((name.to_owned(), value(name)?)))
        .take(METADATA_MAX)
        .take_while(|(name, value)| {
            let enough = left.checked_sub(name.len() + value.len());
            left = enough.unwrap_or(0);
            enough.is_some()
        })
        .collect()
}

/// The absolute path that `path` means to one whose home is `home`, without `.` and `..`.
fn resolved(path: &str, home: &str) -> Result<PathBuf, InitError> {
    if path.len() > PATH_BYTES_MAX || path.as_bytes().contains(&0) {
        return Err(InitError::invalid(format!(
            "the path is no path: it has a zero byte, or more than {PATH_BYTES_MAX} bytes"
        )));
    }
    let below = match path {
        "~" => "",
        path => path.strip_prefix("~/").unwrap_or(path),
    };
    let mut whole = PathBuf::from("/");
    for part in Path::new(home).join(below).components() {
        match part {
            Component::Normal(name) => whole.push(name),
            Component::ParentDir => drop(whole.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    match whole.as_os_str().as_bytes().len() <= PATH_BYTES_MAX {
        true => Ok(whole),
        false => Err(InitError::invalid("the path is too long")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_begins_at_home_and_stays_below_the_root() {
        let of = |path: &str| resolved(path, "/home/user").unwrap().display().to_string();
        for (path, whole) in [
            ("", "/home/user"),
            ("~", "/home/user"),
            ("~/a", "/home/user/a"),
            ("a/./b", "/home/user/a/b"),
            ("~bob", "/home/user/~bob"),
            ("/etc/../x//y/", "/x/y"),
            ("../../../..", "/"),
        ] {
            assert_eq!(of(path), whole, "{path}");
        }
        assert!(resolved("a\0b", "/").is_err());
        assert!(resolved(&"x".repeat(10_000), "/").is_err());
        assert_eq!(of("a\nb"), "/home/user/a\nb");
    }
}
