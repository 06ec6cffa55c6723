//! `Upload` and `Download`: tar streams in and out of the root file system.
//!
//! Nothing is refused that a program of the cell could do itself: the walls are
//! the host's, which must not trust what comes out of here.

pub mod changes;
mod layer;
mod sparse;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use exocell_agent::{FRAME_BYTES_MAX, FrameReader, FrameWriter, Kind, Reply};
use nix::dir::Dir;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::Mode;
use tar::{Archive, Builder, Header};

use crate::error::{Context, InitError};
use crate::own_proc;
use layer::Layer;

/// What the cell has changed of its image, in the root of its own disk.
pub const UPPER: &str = "upper";
/// Directories of the kernel's making: in no archive, unless asked for.
const KERNEL_TREES: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Levels of directories that a copy goes down; each holds a descriptor.
const DEPTH_MAX: usize = 10_000;
/// Names that a copy holds at once, in bytes: an ordinary user's files must not take the memory of
/// the whole cell.
const NAMES_BYTES_MAX: usize = 16 << 20;
/// How long a copy waits for leases, all together, and between two looks.
const LEASES_MAX: Duration = Duration::from_secs(10);
const LEASE_LOOK: Duration = Duration::from_millis(50);

/// Unpacks the tar stream that follows on `frames` into the directory `path`.
pub fn upload(stream: &File, mut frames: FrameReader<&File>, path: &Path) -> Result<(), InitError> {
    let mut data = DataReader::new(&mut frames);
    let unpacked = unpack(&mut data, path);
    let reply = match unpacked {
        Ok(()) => {
            io::copy(&mut data, &mut io::sink()).context(|| "the end of the archive")?;
            return Ok(FrameWriter::new(stream).write_json(Kind::Reply, &Reply::Done)?);
        }
        Err(error) => error.into_reply(),
    };
    FrameWriter::new(stream).write_json(Kind::Reply, &reply?)?;
    // Listen on: a host that is still sending would lose the reply to a reset.
    let _ = io::copy(&mut data, &mut io::sink());
    Ok(())
}

fn unpack(data: impl Read, path: &Path) -> Result<(), InitError> {
    check_absolute(path)?;
    let mut archive = Archive::new(data);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_preserve_mtime(true);
    archive.unpack(path).map_err(|error| {
        InitError::io(format!("unpacking into {}", path.display()), &with_causes(&error))
    })
}

/// `error` with its causes in its text: the tar crate shows only the last.
fn with_causes(error: &io::Error) -> io::Error {
    let mut text = error.to_string();
    let mut cause = error.get_ref().and_then(|inner| inner.source());
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    io::Error::new(error.kind(), text)
}

fn check_absolute(path: &Path) -> Result<(), InitError> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(InitError::invalid(format!("{}: give an absolute path", path.display()))),
    }
}

/// The bytes of `Data` frames up to `DataEof`.
pub struct DataReader<'a, R> {
    frames: &'a mut FrameReader<R>,
    chunk: io::Cursor<Vec<u8>>,
    ended: bool,
}

impl<'a, R: Read> DataReader<'a, R> {
    pub fn new(frames: &'a mut FrameReader<R>) -> Self {
        Self { frames, chunk: io::Cursor::default(), ended: false }
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        let frame = self.frames.read().map_err(io::Error::other)?;
        let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)?;
        match frame.kind {
            Kind::Data => self.chunk = io::Cursor::new(frame.payload),
            Kind::DataEof => self.ended = true,
            kind => return Err(io::Error::other(format!("{kind:?} frame in an upload"))),
        }
        Ok(())
    }
}

impl<R: Read> Read for DataReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.chunk.read(buffer)? {
                0 if !self.ended && !buffer.is_empty() => self.next_chunk()?,
                n => return Ok(n),
            }
        }
    }
}

/// Sends `path` as a tar stream; a symbolic link is sent as the link it is. As
/// a `layer` it leaves out what is mounted, and keeps hard links.
pub fn download(stream: &File, path: &Path, layer: bool) -> Result<(), InitError> {
    check_absolute(path)?;
    let name = match path.file_name() {
        Some(name) => name,
        None if path == Path::new("/") => OsStr::new("."),
        None => return Err(InitError::invalid(format!("{}: names nothing", path.display()))),
    };
    // Looked at first, so that a missing path is a plain failure.
    let metadata = fs::symlink_metadata(path).context(|| path.display())?;
    let layer = layer.then(|| Layer::whole(metadata.dev()));
    let pack = || pack(stream, open(None, path.as_os_str())?, path, Path::new(name), layer);
    pack().context(|| format!("reading {}", path.display()))?;
    Ok(FrameWriter::new(stream).write(Kind::DataEof, &[])?)
}

/// Sends what a container has changed of its image as a layer; that lies in `upper`.
pub fn download_changes(
    stream: &File,
    upper: File,
    left_out: Vec<String>,
) -> Result<(), InitError> {
    let pack = || {
        let root = open(None, OsStr::new("/"))?;
        let layer = Layer::of_changes(upper.metadata()?.dev(), root, left_out)?;
        pack(stream, upper, Path::new("/"), Path::new("."), Some(layer))
    };
    pack().context(|| "reading what the cell has changed")?;
    Ok(FrameWriter::new(stream).write(Kind::DataEof, &[])?)
}

/// A directory that is being packed.
struct Level {
    directory: File,
    /// What is left of it, the last first.
    names: Vec<OsString>,
    /// Bytes of all names that it had.
    held_bytes: usize,
    /// Whether it is of the whole root, in an archive of changes.
    is_whole: bool,
}

/// A tree on its way into an archive. Programs change it meanwhile: each entry is found by its name
/// in a directory that is open, and read as what was found.
struct Packing<W: Write> {
    archive: Builder<W>,
    layer: Option<Layer>,
    /// From the outermost directory to the innermost.
    levels: Vec<Level>,
    /// Where the innermost is, and what it is called in the archive.
    path: PathBuf,
    name: PathBuf,
    /// Bytes of names in all levels.
    held_bytes: usize,
    /// How long files may still be waited for that programs hold by leases.
    patience: Duration,
}

fn pack(
    stream: &File,
    found: File,
    path: &Path,
    name: &Path,
    layer: Option<Layer>,
) -> io::Result<()> {
    let sink = DataWriter(FrameWriter::new(stream));
    let mut packing = Packing {
        archive: Builder::new(BufWriter::with_capacity(FRAME_BYTES_MAX, sink)),
        layer,
        levels: Vec::new(),
        path: path.to_path_buf(),
        name: name.to_path_buf(),
        held_bytes: 0,
        patience: LEASES_MAX,
    };
    if packing.append(found)? {
        while packing.step()? {}
    }
    packing.archive.into_inner()?.flush()
}

impl<W: Write> Packing<W> {
    /// Packs one more entry; false when there is none.
    fn step(&mut self) -> io::Result<bool> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        let Some(entry) = level.names.pop() else {
            self.held_bytes -= level.held_bytes;
            self.levels.pop();
            self.path.pop();
            self.name.pop();
            return Ok(true);
        };
        // What has vanished since it was listed is skipped.
        let Ok(found) = open(Some(&level.directory), &entry) else { return Ok(true) };
        self.path.push(&entry);
        self.name.push(&entry);
        let entered = !is_kernel_tree(&self.path) && self.append(found)?;
        if !entered {
            self.path.pop();
            self.name.pop();
        }
        Ok(true)
    }

    /// Adds what was found, which is called as [`Self::name`]; whether it is a directory that is
    /// packed next. Sockets are skipped: tar has no form for them.
    fn append(&mut self, found: File) -> io::Result<bool> {
        let metadata = found.metadata()?;
        let kind = metadata.file_type();
        let mut header = Header::new_gnu();
        header.set_metadata(&metadata);
        // The header has no time before 1970.
        header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
        let of_changes = self.is_of_changes();
        let is_left_out =
            of_changes && self.layer.as_ref().is_some_and(|layer| layer.leaves_out(&self.path));
        if is_left_out && !kind.is_dir() {
            return Ok(false);
        }
        if self.layer.as_ref().is_some_and(Layer::is_of_changes) {
            layer::check_name(&self.path)?;
        }
        if of_changes && layer::is_removal(&metadata) {
            self.append_mark(&layer::mark_of(&self.name))?;
            return Ok(false);
        }
        let earlier = self.layer.as_mut().and_then(|layer| layer.earlier(&metadata, &self.name));
        if let Some(earlier) = earlier {
            header.set_entry_type(tar::EntryType::Link);
            header.set_size(0);
            self.archive.append_link(&mut header, &self.name, earlier)?;
        } else if kind.is_file() {
            self.append_file(&mut header, &found, metadata.len())?;
        } else if kind.is_symlink() {
            let target = readlinkat(&found, c"")?;
            self.archive.append_link(&mut header, &self.name, target)?;
        } else if kind.is_dir() {
            return self.append_directory(&mut header, &found, &metadata);
        } else if !kind.is_socket() {
            self.append_special(&mut header, &metadata)?;
        }
        Ok(false)
    }

    /// Whether what is packed now is what the cell has changed, and not all that is there.
    fn is_of_changes(&self) -> bool {
        self.layer.as_ref().is_some_and(Layer::is_of_changes)
            && !self.levels.last().is_some_and(|level| level.is_whole)
    }

    fn append_mark(&mut self, name: &Path) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(0);
        self.archive.append_data(&mut header, name, io::empty())
    }

    fn append_directory(
        &mut self,
        header: &mut Header,
        found: &File,
        metadata: &fs::Metadata,
    ) -> io::Result<bool> {
        let of_changes = self.is_of_changes();
        let attributes = match self.layer {
            Some(_) => layer::attributes(&own_proc::reopen(found)?)?,
            None => layer::Attributes::default(),
        };
        let is_left_out =
            of_changes && self.layer.as_ref().is_some_and(|layer| layer.leaves_out(&self.path));
        if !is_left_out {
            self.append_attributes(&attributes)?;
            self.archive.append_data(header, &self.name, io::empty())?;
        }
        if of_changes && (attributes.is_opaque || attributes.is_moved) {
            self.append_mark(&self.name.join(layer::OPAQUE))?;
        }
        if of_changes && attributes.is_moved {
            // What it holds lies under another name in the image.
            let whole = self.layer.as_ref().map(|layer| layer.in_root(&self.path)).transpose()?;
            if let Some(whole) = whole.flatten() {
                self.enter(&whole, true)?;
                return Ok(true);
            }
        }
        let is_whole = self.levels.last().is_some_and(|level| level.is_whole);
        let device = self.layer.as_ref().map(|layer| layer.device(is_whole));
        let is_mounted = device.is_some_and(|device| device != metadata.dev());
        if !is_mounted {
            self.enter(found, is_whole)?;
        }
        Ok(!is_mounted)
    }

    fn append_attributes(&mut self, attributes: &layer::Attributes) -> io::Result<()> {
        match attributes.records.is_empty() {
            true => Ok(()),
            false => self.archive.append_pax_extensions(
                attributes.records.iter().map(|(name, value)| (name.as_str(), value.as_slice())),
            ),
        }
    }

    fn enter(&mut self, found: &File, is_whole: bool) -> io::Result<()> {
        let too_much = |what: &str| {
            let at = self.path.display();
            io::Error::other(format!("{at} is too {what} to be copied at once; copy parts of it"))
        };
        if self.levels.len() >= DEPTH_MAX {
            return Err(too_much("deep"));
        }
        let room = NAMES_BYTES_MAX - self.held_bytes;
        let (names, held_bytes) = names_in(found, room)?.ok_or_else(|| too_much("large"))?;
        let directory = openat(found, c".", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        self.held_bytes += held_bytes;
        self.levels.push(Level { directory: directory.into(), names, held_bytes, is_whole });
        Ok(())
    }

    /// A device or a named pipe: a header alone.
    fn append_special(&mut self, header: &mut Header, metadata: &fs::Metadata) -> io::Result<()> {
        let device = |number: u64| u32::try_from(number).map_err(io::Error::other);
        header.set_device_major(device(nix::sys::stat::major(metadata.rdev()))?)?;
        header.set_device_minor(device(nix::sys::stat::minor(metadata.rdev()))?)?;
        header.set_size(0);
        self.archive.append_data(header, &self.name, io::empty())
    }

    /// A file that grows or shrinks while it is read is cut or padded to the length
    /// that its header already promised. Holes are left out of changes.
    fn append_file(&mut self, header: &mut Header, found: &File, length: u64) -> io::Result<()> {
        let content = self.open_content(found)?;
        if self.layer.is_some() {
            self.append_attributes(&layer::attributes(&content)?)?;
        }
        // The host itself reads changes; clients of Docker's, who get all else, refuse such entries.
        if self.layer.as_ref().is_some_and(Layer::is_of_changes)
            && let Some(stored) = sparse::begin(header, &content, length)?
        {
            return self.archive.append_data(header, &self.name, stored);
        }
        let content = content.take(length).chain(io::repeat(0)).take(length);
        self.archive.append_data(header, &self.name, content)
    }

    /// Opens a file for reading, waiting a little if a program holds it by a lease (fcntl(2)).
    fn open_content(&mut self, found: &File) -> io::Result<File> {
        loop {
            match own_proc::reopen(found) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                opened => return opened,
            }
            if self.patience.is_zero() {
                let at = self.path.display();
                return Err(io::Error::other(format!(
                    "{at} is held by a program of the cell, by a lease (fcntl(2)); end that program"
                )));
            }
            sleep(LEASE_LOOK);
            self.patience = self.patience.saturating_sub(LEASE_LOOK);
        }
    }
}

/// The names in a directory, the last first, and what they take in bytes; `None` if that is more
/// than `room`.
fn names_in(found: &File, room: usize) -> io::Result<Option<(Vec<OsString>, usize)>> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut entries = Dir::openat(found, c".", flags, Mode::empty())?;
    let (mut names, mut held_bytes) = (Vec::new(), 0);
    for entry in entries.iter() {
        let entry = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if entry == "." || entry == ".." {
            continue;
        }
        held_bytes += entry.len() + size_of::<OsString>();
        if held_bytes > room {
            return Ok(None);
        }
        names.push(entry);
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(Some((names, held_bytes)))
}

/// What is called `name` in `directory`, to be looked at and not yet read; a link is itself.
fn open(directory: Option<&File>, name: &OsStr) -> io::Result<File> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let opened = match directory {
        Some(directory) => openat(directory, name, flags, Mode::empty()),
        None => nix::fcntl::open(name, flags, Mode::empty()),
    };
    Ok(opened?.into())
}

fn is_kernel_tree(path: &Path) -> bool {
    KERNEL_TREES.iter().any(|tree| path == Path::new(tree))
}

/// Writes `Data` frames.
pub struct DataWriter<W>(pub FrameWriter<W>);

impl<W: Write> Write for DataWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !bytes.is_empty() {
            self.0.write(Kind::Data, bytes).map_err(io::Error::other)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
