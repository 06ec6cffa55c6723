//! `File`: one file, as a client of the operator's wants it.
//!
//! ```text
//! FileRequest ─> its path, by the user's home ─> stat, list, make, move, remove, read, write
//!                                             └> [`watch`], until the host hangs up
//! ```
//! Nothing is refused that root of the cell could do itself, as with archives ([`crate::transfer`]).

mod change;
mod watch;

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use exocell_agent::files::{
    ENTRIES_MAX, FileAction, FileEntry, FileKind, FileRequest, LISTING_BYTES_MAX,
    METADATA_BYTES_MAX, METADATA_MAX, METADATA_PREFIX, PATH_BYTES_MAX,
};
use exocell_agent::{FRAME_BYTES_MAX, FailureKind, FrameReader, FrameWriter, Kind, Reply};
use rustix::fs::{lgetxattr, llistxattr};

use crate::error::{Context, InitError};
use crate::own_proc;
use crate::stats::meminfo_bytes;
use crate::transfer::DataWriter;
use crate::users::{self, Identity};

/// Names of attributes that are looked through, in bytes.
const NAMES_BYTES_MAX: usize = 64 << 10;
/// Bytes of a file that are sent at a time.
const CHUNK_BYTES: usize = 32 << 10;
/// What listings may hold at once in the smallest cell, and by how much one's part grows, in bytes.
const ROOM_BYTES_MIN: usize = 2 << 20;
const ROOM_STEP: usize = 32 << 10;
const LISTING_FULL: &str =
    "it holds more than a listing may have; list less depth, or a directory below it";
const ROOM_FULL: &str = "the cell has no memory for another listing of that length at the same \
    time; try again later, or give the cell more memory";

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
        let too_much = |why| InitError::Failed {
            kind: FailureKind::Full,
            message: format!("{}: {why}", self.path.display()),
        };
        let mut sink = Lines { writer: FrameWriter::new(stream), text: Vec::new(), sent: 0 };
        let mut count = 0;
        // What is left of the directories that are listed: one for each level.
        let refused = |path: &Path, why| match why {
            NoNames::Io(error) => InitError::io(path.display(), &error),
            NoNames::Room => too_much(ROOM_FULL),
        };
        let top = Names::of(&self.path, &ROOM).map_err(|why| refused(&self.path, why))?;
        let mut open = vec![top];
        loop {
            let waiting: usize = open.iter().map(|names| names.spans.len()).sum();
            if count + waiting > ENTRIES_MAX || sink.sent > LISTING_BYTES_MAX / 2 {
                return Err(too_much(LISTING_FULL));
            }
            let Some(names) = open.last_mut() else { break };
            let Some(path) = names.next() else {
                open.pop();
                continue;
            };
            let entry = match self.look(&path) {
                // It went meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entry => entry.context(|| path.display())?,
            };
            sink.say(&entry)?;
            count += 1;
            let level = u32::try_from(open.len()).unwrap_or(u32::MAX);
            if entry.link.is_some() || entry.kind != Some(FileKind::Directory) || level >= depth {
                continue;
            }
            match Names::of(&path, &ROOM) {
                Ok(names) => open.push(names),
                Err(NoNames::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(why) => return Err(refused(&path, why)),
            }
        }
        sink.flush()?;
        Ok(sink.writer.write(Kind::DataEof, &[])?)
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

/// What all listings may hold at once, in bytes: nobody may end this process for its memory.
struct Room {
    most: usize,
    taken: AtomicUsize,
}

/// An eighth of the cell's memory.
static ROOM: LazyLock<Room> = LazyLock::new(|| {
    let all = meminfo_bytes(&own_proc::read("meminfo"), "MemTotal") / 8;
    Room::new(usize::try_from(all).unwrap_or(usize::MAX).max(ROOM_BYTES_MIN))
});

impl Room {
    fn new(most: usize) -> Self {
        Self { most, taken: AtomicUsize::new(0) }
    }

    fn take(&self, bytes: usize) -> bool {
        let most = self.most;
        let more = |taken: usize| taken.checked_add(bytes).filter(|all| *all <= most);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }
}

/// The names in a directory of which nothing was told yet.
struct Names<'a> {
    path: PathBuf,
    bytes: Vec<u8>,
    /// Where each is in `bytes`, the last by name first.
    spans: Vec<(u32, u32)>,
    room: &'a Room,
    held: usize,
}

enum NoNames {
    Io(io::Error),
    Room,
}

impl<'a> Names<'a> {
    /// A name or two more than a listing may have are enough to refuse it.
    fn of(path: &Path, room: &'a Room) -> Result<Self, NoNames> {
        let (bytes, spans) = (Vec::new(), Vec::new());
        let mut names = Self { path: path.to_owned(), bytes, spans, room, held: 0 };
        for entry in fs::read_dir(path).map_err(NoNames::Io)?.take(ENTRIES_MAX + 1) {
            let name = entry.map_err(NoNames::Io)?.file_name();
            names.add(name.as_bytes()).ok_or(NoNames::Room)?;
        }
        let Self { bytes, spans, .. } = &mut names;
        let name = |(from, to): &(u32, u32)| &bytes[*from as usize..*to as usize];
        spans.sort_unstable_by(|one, other| name(other).cmp(name(one)));
        Ok(names)
    }

    fn add(&mut self, name: &[u8]) -> Option<()> {
        let need = name.len() + size_of::<(u32, u32)>();
        let free = self.bytes.capacity() - self.bytes.len();
        if free < name.len() || self.spans.len() == self.spans.capacity() {
            let (more, spans) = (ROOM_STEP.max(need), ROOM_STEP / 16);
            let all = more + spans * size_of::<(u32, u32)>();
            if !self.room.take(all) {
                return None;
            }
            self.held += all;
            self.bytes.reserve_exact(more);
            self.spans.reserve_exact(spans);
        }
        let from = u32::try_from(self.bytes.len()).ok()?;
        self.bytes.extend_from_slice(name);
        self.spans.push((from, from + name.len() as u32));
        Some(())
    }

    fn next(&mut self) -> Option<PathBuf> {
        let (from, to) = self.spans.pop()?;
        Some(self.path.join(OsStr::from_bytes(&self.bytes[from as usize..to as usize])))
    }
}

impl Drop for Names<'_> {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.held, Ordering::Relaxed);
    }
}

/// Lines of a listing on their way.
struct Lines<'a> {
    writer: FrameWriter<&'a File>,
    text: Vec<u8>,
    sent: u64,
}

impl Lines<'_> {
    fn say(&mut self, entry: &FileEntry) -> Result<(), InitError> {
        let before = self.text.len();
        let line = serde_json::to_writer(&mut self.text, entry).map_err(io::Error::other);
        line.context(|| "a line of the listing")?;
        self.text.push(b'\n');
        self.sent += (self.text.len() - before) as u64;
        if self.text.len() >= CHUNK_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), InitError> {
        self.writer.write(Kind::Data, &self.text)?;
        self.text.clear();
        Ok(())
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

    fn folder(count: usize) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..count {
            File::create(folder.path().join(format!("f{number:04}"))).unwrap();
        }
        folder
    }

    fn listed(path: &Path, depth: u32) -> Result<String, String> {
        let file = tempfile::tempfile().unwrap();
        let (groups, home) = (Vec::new(), "/".to_owned());
        let user = Identity { uid: 0, gid: 0, groups, home };
        let (passwd, group) = (String::new(), String::new());
        let place = Place { user, path: path.to_owned(), passwd, group };
        place.list(&file, depth).map_err(|error| error.to_string())?;
        io::Seek::rewind(&mut &file).unwrap();
        let mut frames = FrameReader::new(&file);
        let (mut text, mut all) = (Vec::new(), Vec::new());
        while let Some(frame) = frames.read().unwrap().filter(|frame| frame.kind == Kind::Data) {
            text.extend(frame.payload);
        }
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            all.push(serde_json::from_slice::<FileEntry>(line).unwrap().name);
        }
        Ok(all.join(" "))
    }

    #[test]
    fn a_listing_is_in_order_and_as_deep_as_it_was_asked_for() {
        let folder = folder(2);
        fs::create_dir_all(folder.path().join("d/e/g")).unwrap();
        File::create(folder.path().join("d/z")).unwrap();
        let of = |depth| listed(folder.path(), depth).unwrap();
        assert_eq!(of(1), "d f0000 f0001");
        assert_eq!(of(2), "d e z f0000 f0001");
        assert_eq!(of(3), "d e g z f0000 f0001");
        assert!(listed(&folder.path().join("d/z"), 1).unwrap_err().contains("not a directory"));
        let many = super::tests::folder(5000);
        assert_eq!(listed(many.path(), 1).unwrap().split(' ').count(), 5000);
    }

    #[test]
    fn listings_at_once_have_bounded_room() {
        let folder = folder(3000);
        assert!(matches!(Names::of(folder.path(), &Room::new(0)), Err(NoNames::Room)));
        let some = Room::new(400 << 10);
        let first: Vec<_> = (0..16).map_while(|_| Names::of(folder.path(), &some).ok()).collect();
        assert!((1..16).contains(&first.len()), "{}", first.len());
        assert!(some.taken.load(Ordering::Relaxed) <= 400 << 10);
        // They are packed: little more than they are.
        let names = &first[0];
        assert!(names.bytes.capacity() <= 2 * ROOM_STEP, "{}", names.bytes.capacity());
        drop(first);
        assert_eq!(some.taken.load(Ordering::Relaxed), 0);
        assert!(Names::of(folder.path(), &some).is_ok());
    }
}
