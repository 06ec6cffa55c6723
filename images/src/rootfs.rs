//! Builds the file system of one image out of layers.

use std::io::{self, Read};
use std::path::Path;

use crate::Digest;
use crate::erofs::{self, DataArea, Rootfs, Shape};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tar::Extent;
use crate::tree::{FileData, InodeId, Kind, Meta, Parent, Tree};

/// Values of one attribute (Linux: XATTR_SIZE_MAX; erofs stores 16 bits).
const XATTR_VALUE_BYTES_MAX: usize = 65535;
/// Bytes of a symbolic link (Linux: PATH_MAX less its NUL).
const SYMLINK_BYTES_MAX: usize = 4095;

/// An image file system that is being built.
pub(crate) struct RootfsBuilder<'a> {
    tree: Tree,
    area: DataArea,
    limits: &'a ImportLimits,
    store: &'a Path,
    entries: u64,
    apparent_bytes: u64,
    /// Of the image below, if there is one.
    shape: Option<Shape>,
}

/// What files may hold beside twice what an image shows of them, before it is written as a whole: a
/// step that writes a large file anew each time would keep all that it wrote.
const SPARE_BYTES: u64 = 64 << 20;

/// What an image was written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Form {
    /// A file that has all of it.
    Whole,
    /// One over the files of the image below.
    Delta,
}

impl<'a> RootfsBuilder<'a> {
    /// Builds into `area`, which lies in the store at `store`.
    pub fn new(area: DataArea, limits: &'a ImportLimits, store: &'a Path) -> Self {
        Self {
            tree: Tree::new(limits.depth_max),
            area,
            limits,
            store,
            entries: 0,
            apparent_bytes: 0,
            shape: None,
        }
    }

    /// The same, over what the image `base` holds. Nothing of it is copied as long as it is not
    /// finished.
    pub fn over(
        base: Rootfs,
        area: DataArea,
        limits: &'a ImportLimits,
        store: &'a Path,
    ) -> Result<Self> {
        let mut reader = erofs::Reader::new(&base)?;
        let (tree, shape) = (reader.tree(limits)?, reader.shape());
        let mut builder = Self { tree, shape: Some(shape), ..Self::new(area, limits, store) };
        builder.area.borrow(base);
        Ok(builder)
    }

    /// What there is so far.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// All bytes of a small file that is there; `None` where it is longer than `bytes_max`.
    pub fn text(&self, data: &FileData, bytes_max: u64) -> Result<Option<Vec<u8>>> {
        if data.size > bytes_max {
            return Ok(None);
        }
        let read = self.area.content(data);
        read.map(Some).map_err(|error| ImageError::store(self.store, error))
    }

    pub fn limits(&self) -> &'a ImportLimits {
        self.limits
    }

    pub fn begin_layer(&mut self) {
        self.tree.begin_layer();
    }

    /// Counts one archive entry, whiteouts included.
    pub fn count_entry(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries.max(self.tree.len() as u64) > self.limits.entries_max {
            return Err(ImageError::limit(
                "the number of files",
                "entries_max",
                self.limits.entries_max,
            ));
        }
        Ok(())
    }

    /// Places something that is no regular file.
    pub fn add(&mut self, path: &[u8], mut meta: Meta, kind: Kind) -> Result<()> {
        self.clean_xattrs(path, &mut meta)?;
        if let Kind::Symlink(target) = &kind {
            check_symlink(path, target)?;
        }
        let place = self.tree.place(path)?;
        if place.name.is_empty() {
            return self.set_root(path, meta, &kind);
        }
        self.tree.insert(place.directory, place.name, meta, kind);
        self.give_back();
        Ok(())
    }

    /// Places a file of `size` bytes with `content` in its `extents`.
    pub fn add_file(
        &mut self,
        path: &[u8],
        mut meta: Meta,
        size: u64,
        extents: &[Extent],
        content: &mut dyn Read,
    ) -> Result<()> {
        self.clean_xattrs(path, &mut meta)?;
        self.count_bytes(path, size)?;
        let place = self.place_file(path)?;
        let mut source = Source { content, failed: None };
        let added =
            self.area.add_file(size, extents, &mut source, erofs::xattr_bytes(&meta.xattrs));
        let data = added.map_err(|error| match source.failed.take() {
            Some(failed) => ImageError::io(format!("cannot read `{}`", shown(path)), failed),
            None => ImageError::store(self.store, error),
        })?;
        self.tree.insert(place.directory, place.name, meta, Kind::File(data));
        self.give_back();
        Ok(())
    }

    /// Gives the inode at `target` the name `path` as well.
    pub fn add_hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<()> {
        let bad = |why| ImageError::BadHardLink { path: shown(path), target: shown(target), why };
        let found = self.tree.find(target)?.ok_or_else(|| bad("which is not in the image"))?;
        if self.tree.inode(found).is_directory() {
            return Err(bad("which is a directory"));
        }
        let place = self.place_file(path)?;
        let same =
            self.tree.children(place.directory).and_then(|children| children.get(place.name));
        if same.is_some_and(|entry| entry.inode == found) {
            return if crate::tree::split(path)? == crate::tree::split(target)? {
                Err(bad("itself"))
            } else {
                Ok(())
            };
        }
        self.tree.link(place.directory, place.name, found);
        self.give_back();
        Ok(())
    }

    /// Applies the whiteout of `path`.
    pub fn hide(&mut self, path: &[u8]) -> Result<()> {
        let place = self.place_file(path)?;
        self.tree.hide(place.directory, place.name);
        self.give_back();
        Ok(())
    }

    /// Applies the opaque whiteout of the directory that holds `marker`.
    pub fn hide_siblings(&mut self, marker: &[u8]) -> Result<()> {
        let place = self.place_file(marker)?;
        self.tree.hide_children(place.directory);
        self.give_back();
        Ok(())
    }

    /// Writes the rest of the image; its length in bytes.
    pub fn finish(mut self, id: &Digest) -> Result<u64> {
        erofs::finish(&self.tree, &mut self.area, uuid(id))
            .map_err(|error| ImageError::store(self.store, error))
    }

    /// The same, as what has changed of the image below, unless that is no use: its files are as
    /// many as there may be, or most of what they hold is seen by nobody any more.
    pub fn finish_over(mut self, id: &Digest) -> Result<Form> {
        let failed = |error| ImageError::store(self.store, error);
        if let (Some(shape), Some(under)) = (self.shape, self.area.under()) {
            let held = under.disk_bytes().map_err(failed)?;
            let shown: u64 = self.tree.files().map(|data| data.size).sum();
            let is_worth = held <= shown.saturating_mul(2).saturating_add(SPARE_BYTES);
            if is_worth && under.files().len() < Rootfs::FILES_MAX {
                let (tree, area) = (&self.tree, &mut self.area);
                let made = erofs::finish_delta(tree, area, shape, uuid(id)).map_err(failed)?;
                if made.is_some() {
                    return Ok(Form::Delta);
                }
            }
        }
        self.finish(id).map(|_| Form::Whole)
    }

    fn place_file<'p>(&mut self, path: &'p [u8]) -> Result<Parent<'p>> {
        let place = self.tree.place(path)?;
        if place.name.is_empty() {
            let why = "only a directory can be the root";
            return Err(ImageError::UnsafePath { path: shown(path), why });
        }
        Ok(place)
    }

    fn set_root(&mut self, path: &[u8], meta: Meta, kind: &Kind) -> Result<()> {
        if !matches!(kind, Kind::Directory(_)) || !self.tree.inode(InodeId::ROOT).is_directory() {
            let why = "only a directory can be the root";
            return Err(ImageError::UnsafePath { path: shown(path), why });
        }
        self.tree.set_root_meta(meta);
        Ok(())
    }

    fn count_bytes(&mut self, path: &[u8], size: u64) -> Result<()> {
        let max = self.limits.apparent_bytes_max.min(8 << 40);
        self.apparent_bytes = self.apparent_bytes.saturating_add(size);
        if self.apparent_bytes > max {
            return Err(ImageError::limit(format!("`{}`", shown(path)), "apparent_bytes_max", max));
        }
        Ok(())
    }

    fn clean_xattrs(&self, path: &[u8], meta: &mut Meta) -> Result<()> {
        meta.xattrs.retain(|name, _| erofs::xattr_is_kept(name));
        let max = self.limits.xattr_bytes_max.min(128 << 10);
        let too_long = meta.xattrs.values().any(|value| value.len() > XATTR_VALUE_BYTES_MAX);
        if too_long || erofs::xattr_bytes(&meta.xattrs) > max {
            let what = format!("the attributes of `{}`", shown(path));
            return Err(ImageError::limit(what, "xattr_bytes_max", max as u64));
        }
        Ok(())
    }

    fn give_back(&mut self) {
        for data in self.tree.take_freed() {
            self.area.discard(&data);
        }
    }
}

fn uuid(id: &Digest) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&id.as_bytes()[..16]);
    uuid
}

fn check_symlink(path: &[u8], target: &[u8]) -> Result<()> {
    if target.is_empty() || target.len() > SYMLINK_BYTES_MAX || target.contains(&0) {
        let why = "its target is empty, too long or has a NUL byte";
        return Err(ImageError::malformed(format!("the symbolic link `{}`", shown(path)), why));
    }
    Ok(())
}

/// Tells errors of the content from errors of the image file.
struct Source<'a> {
    content: &'a mut dyn Read,
    failed: Option<io::Error>,
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let result = match self.content.read(buffer) {
            Ok(0) if !buffer.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other,
        };
        result.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                self.failed = Some(error);
            }
            kind.into()
        })
    }
}
