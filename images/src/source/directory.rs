//! A plain directory as the only layer of an image.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::Digest;
use crate::digest::Hashing;
use crate::error::{ImageError, Result, shown};
use crate::progress::{Progress, ProgressEvent};
use crate::rootfs::RootfsBuilder;
use crate::tar::Extent;
use crate::tree::{Kind, Meta, Timestamp};
use crate::walk::{self, Directory, Found};

/// Reads all of `root` into `rootfs`; a digest of all that was read.
pub(crate) fn import_directory(
    rootfs: &mut RootfsBuilder<'_>,
    root: &Path,
    progress: &mut dyn Progress,
) -> Result<Digest> {
    let failed = |error| ImageError::read(root, error);
    let directory = match Directory::real(root) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            let why = "it is not a directory".into();
            return Err(ImageError::NotAnImage { path: root.to_path_buf(), why });
        }
        opened => opened.map_err(failed)?,
    };
    let metadata = directory.metadata().map_err(failed)?;
    let device = metadata.dev();
    let mut walk =
        Walk { rootfs, progress, device, links: HashMap::new(), content: Sha256::new(), bytes: 0 };
    walk.rootfs.begin_layer();
    walk.run(root, directory)?;
    let digest: [u8; 32] = walk.content.finalize().into();
    Ok(Digest::of(&digest))
}

struct Walk<'w, 'r> {
    rootfs: &'w mut RootfsBuilder<'r>,
    progress: &'w mut dyn Progress,
    device: u64,
    /// First path of files with several names, by inode number.
    links: HashMap<u64, Vec<u8>>,
    content: Sha256,
    bytes: u64,
}

impl Walk<'_, '_> {
    /// Visits parents before children, names in byte order.
    fn run(&mut self, root: &Path, directory: Directory) -> Result<()> {
        let mut tree = walk::Walk::of(directory);
        while let Some((path, found)) = tree.next() {
            let host = root.join(&path);
            let failed = |error| ImageError::read(&host, error);
            self.rootfs.count_entry()?;
            let found = found.map_err(failed)?;
            self.visit(&host, path.as_os_str().as_bytes(), &found)?;
            if found.is_directory() && found.metadata().dev() == self.device {
                tree.enter(&path, &found).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn visit(&mut self, host: &Path, path: &[u8], found: &Found) -> Result<()> {
        crate::layer::check_name(path)?;
        let metadata = found.metadata();
        let kind = metadata.file_type();
        if kind.is_char_device() || kind.is_block_device() {
            return self.device_node(path);
        }
        if metadata.nlink() > 1 && !metadata.is_dir() {
            if let Some(first) = self.links.get(&metadata.ino()) {
                let first = first.clone();
                self.note(path, b"link", &first);
                return self.rootfs.add_hard_link(path, &first);
            }
            self.links.insert(metadata.ino(), path.to_vec());
        }
        let failed = |error| ImageError::read(host, error);
        let meta = Meta { xattrs: found.xattrs().map_err(failed)?, ..meta(metadata) };
        self.note(path, b"meta", format!("{:o} {meta:?}", metadata.mode()).as_bytes());
        let kind = if kind.is_dir() {
            Kind::Directory(Default::default())
        } else if kind.is_symlink() {
            let target = found.target().map_err(failed)?;
            self.note(path, b"target", &target);
            Kind::Symlink(target.into())
        } else if kind.is_fifo() {
            Kind::Fifo
        } else if kind.is_socket() {
            Kind::Socket
        } else {
            return self.file(host, path, found, meta);
        };
        self.rootfs.add(path, meta, kind)
    }

    /// A cell has its own /dev, so nodes there are left out.
    fn device_node(&mut self, path: &[u8]) -> Result<()> {
        if !path.starts_with(b"dev/") {
            return Err(ImageError::DeviceNode { path: shown(path) });
        }
        let why = "a cell has its own /dev";
        self.progress.event(ProgressEvent::Skipped { path: &shown(path), why });
        Ok(())
    }

    fn file(&mut self, host: &Path, path: &[u8], found: &Found, meta: Meta) -> Result<()> {
        let file = found.file().map_err(|error| ImageError::read(host, error))?;
        let metadata = file.metadata().map_err(|error| ImageError::read(host, error))?;
        let size = metadata.len();
        self.count_bytes(path, size)?;
        let extents = extents(&file, &metadata).map_err(|error| ImageError::read(host, error))?;
        let mut content = Hashing::new(Extents::new(&file, &extents));
        self.rootfs.add_file(path, meta, size, &extents, &mut content)?;
        let (digest, bytes) = (content.digest(), content.byte_count());
        self.note(path, b"size", &size.to_le_bytes());
        self.note(path, b"data", digest.as_bytes());
        self.progress.event(ProgressEvent::Bytes(bytes));
        Ok(())
    }

    fn count_bytes(&mut self, path: &[u8], size: u64) -> Result<()> {
        let max = self.rootfs.limits().bytes_max;
        self.bytes = self.bytes.saturating_add(size);
        match self.bytes > max {
            true => Err(ImageError::limit(format!("`{}`", shown(path)), "bytes_max", max)),
            false => Ok(()),
        }
    }

    /// Adds a fact to the digest, unambiguously.
    fn note(&mut self, path: &[u8], key: &[u8], value: &[u8]) {
        for part in [path, key, value] {
            self.content.update((part.len() as u64).to_le_bytes());
            self.content.update(part);
        }
    }
}

/// What is known of an entry without its attributes.
pub(crate) fn meta(metadata: &Metadata) -> Meta {
    Meta {
        mode: (metadata.mode() & 0o7777) as u16,
        uid: metadata.uid(),
        gid: metadata.gid(),
        mtime: Timestamp { seconds: metadata.mtime(), nanos: metadata.mtime_nsec() as u32 },
        ..Meta::default()
    }
}

/// The data runs of a file; the whole of it where holes cannot be asked for.
pub(crate) fn extents(file: &File, metadata: &Metadata) -> io::Result<Vec<Extent>> {
    use rustix::fs::{SeekFrom, seek};
    let size = metadata.len();
    if metadata.blocks().saturating_mul(512) >= size {
        return Ok(vec![Extent::whole(size)]);
    }
    let mut extents = Vec::new();
    let mut offset = 0;
    while offset < size {
        let start = match seek(file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => return Ok(vec![Extent::whole(size)]),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        extents.push(Extent { offset: start, length: end - start });
        offset = end;
    }
    Ok(extents)
}

/// Reads the data runs of a file one after the other.
pub(crate) struct Extents<'a> {
    file: &'a File,
    extents: std::slice::Iter<'a, Extent>,
    offset: u64,
    left: u64,
}

impl<'a> Extents<'a> {
    pub fn new(file: &'a File, extents: &'a [Extent]) -> Self {
        Self { file, extents: extents.iter(), offset: 0, left: 0 }
    }
}

impl Read for Extents<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        use std::os::unix::fs::FileExt;
        while self.left == 0 {
            let Some(next) = self.extents.next() else { return Ok(0) };
            (self.offset, self.left) = (next.offset, next.length);
        }
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read_at(buffer.get_mut(..want).unwrap_or_default(), self.offset)?;
        self.offset += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}
