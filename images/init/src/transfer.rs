//! `Upload` and `Download`: tar streams in and out of the root file system.
//!
//! Nothing is refused that a program of the cell could do itself: the walls are
//! the host's, which must not trust what comes out of here.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use exocell_agent::{FRAME_BYTES_MAX, FrameReader, FrameWriter, Kind, Reply};
use tar::{Archive, Builder, Header};

use crate::error::{Context, InitError};

/// Directories of the kernel's making: in no archive, unless asked for.
const KERNEL_TREES: [&str; 3] = ["/proc", "/sys", "/dev"];

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
struct DataReader<'a, R> {
    frames: &'a mut FrameReader<R>,
    chunk: io::Cursor<Vec<u8>>,
    ended: bool,
}

impl<'a, R: Read> DataReader<'a, R> {
    fn new(frames: &'a mut FrameReader<R>) -> Self {
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
    let layer = layer.then(|| Layer { device: metadata.dev(), names: HashMap::new() });
    pack(stream, path, Path::new(name), layer).context(|| format!("reading {}", path.display()))?;
    Ok(FrameWriter::new(stream).write(Kind::DataEof, &[])?)
}

/// What an image's layer leaves out.
struct Layer {
    /// Directories of other devices are mounted there.
    device: u64,
    /// First names of files that have several.
    names: HashMap<(u64, u64), PathBuf>,
}

impl Layer {
    fn is_mounted(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|found| found.dev() != self.device)
    }

    /// An earlier name of the file.
    fn earlier(&mut self, metadata: &fs::Metadata, name: &Path) -> Option<PathBuf> {
        if metadata.nlink() < 2 || !metadata.is_file() {
            return None;
        }
        let key = (metadata.dev(), metadata.ino());
        let earlier = self.names.get(&key).cloned();
        self.names.entry(key).or_insert_with(|| name.to_path_buf());
        earlier
    }
}

fn pack(stream: &File, path: &Path, name: &Path, mut layer: Option<Layer>) -> io::Result<()> {
    let sink = DataWriter(FrameWriter::new(stream));
    let mut archive = Builder::new(BufWriter::with_capacity(FRAME_BYTES_MAX, sink));
    // A stack instead of recursion: the depth is the cell's to choose.
    let mut todo = vec![(path.to_path_buf(), name.to_path_buf())];
    while let Some((path, name)) = todo.pop() {
        let is_directory = append(&mut archive, &path, &name, layer.as_mut())?;
        if is_directory && !layer.as_ref().is_some_and(|layer| layer.is_mounted(&path)) {
            todo.extend(children(&path, &name)?);
        }
    }
    archive.into_inner()?.flush()
}

/// The entries of a directory, last name first so that the stack sorts them.
fn children(path: &Path, name: &Path) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable_by(|a, b| b.cmp(a));
    let entries = names.into_iter().map(|entry| (path.join(&entry), name.join(&entry)));
    Ok(entries.filter(|(path, _)| !is_kernel_tree(path)).collect())
}

fn is_kernel_tree(path: &Path) -> bool {
    KERNEL_TREES.iter().any(|tree| path == Path::new(tree))
}

/// Adds one entry; whether it is a directory. Sockets are skipped: tar has no
/// form for them. So is what vanished since it was listed.
fn append<W: Write>(
    archive: &mut Builder<W>,
    path: &Path,
    name: &Path,
    layer: Option<&mut Layer>,
) -> io::Result<bool> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(false) };
    let kind = metadata.file_type();
    let mut header = Header::new_gnu();
    header.set_metadata(&metadata);
    if let Some(earlier) = layer.and_then(|layer| layer.earlier(&metadata, name)) {
        header.set_entry_type(tar::EntryType::Link);
        header.set_size(0);
        archive.append_link(&mut header, name, earlier)?;
    } else if kind.is_file() {
        append_file(archive, &mut header, path, name, metadata.len())?;
    } else if kind.is_symlink() {
        archive.append_link(&mut header, name, fs::read_link(path)?)?;
    } else if kind.is_dir() {
        archive.append_data(&mut header, name, io::empty())?;
    } else if !kind.is_socket() {
        append_special(archive, &mut header, &metadata, name)?;
    }
    Ok(kind.is_dir())
}

/// A device or a named pipe: a header alone.
fn append_special<W: Write>(
    archive: &mut Builder<W>,
    header: &mut Header,
    metadata: &fs::Metadata,
    name: &Path,
) -> io::Result<()> {
    let device = |number: u64| u32::try_from(number).map_err(io::Error::other);
    header.set_device_major(device(nix::sys::stat::major(metadata.rdev()))?)?;
    header.set_device_minor(device(nix::sys::stat::minor(metadata.rdev()))?)?;
    header.set_size(0);
    archive.append_data(header, name, io::empty())
}

/// A file that grows or shrinks while it is read is cut or padded to the length
/// that its header already promised.
fn append_file<W: Write>(
    archive: &mut Builder<W>,
    header: &mut Header,
    path: &Path,
    name: &Path,
    length: u64,
) -> io::Result<()> {
    let content = File::open(path)?.take(length).chain(io::repeat(0)).take(length);
    archive.append_data(header, name, content)
}

/// Writes `Data` frames.
struct DataWriter<W>(FrameWriter<W>);

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
