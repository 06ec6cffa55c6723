//! What the uppermost file of an image is as a layer: what it has over those below, as an archive.
//! The same files give the same bytes, so that one need be made but once ([`crate::Store::layers`]).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::Layer;
use crate::digest::HashingWriter;
use crate::erofs::{Content, Reader, Rootfs, extents};
use crate::error::{ImageError, Result, shown};
use crate::layer::{Reserving, WHITEOUT};
use crate::limits::ImportLimits;
use crate::tar::{EntryKind, Extent, TarWriter};
use crate::tree::{InodeId, Kind, Meta, Tree};

/// Writes what `image` has over `below` to the empty file `to`, compressed as registries have it if
/// `packs`. Whoever has nothing below gets all of it.
///
/// # Errors
/// An image cannot be read, or holds what no layer can; what is wrong with the disk.
pub fn layer(
    image: &Rootfs,
    below: Option<&Rootfs>,
    to: &mut File,
    packs: bool,
    limits: &ImportLimits,
) -> Result<Layer> {
    let after = Reader::new(image)?.tree(limits)?;
    let before = match below {
        Some(below) => Reader::new(below)?.tree(limits)?,
        None => Tree::new(limits.depth_max),
    };
    let blob = HashingWriter::new(BufWriter::with_capacity(128 << 10, Reserving::new(to, limits)));
    let failed = |error| ImageError::io("cannot write a layer", error);
    let packer = match packs {
        true => Packer::Gzip(GzEncoder::new(blob, Compression::default())),
        false => Packer::Plain(blob),
    };
    let tar = TarWriter::new(HashingWriter::new(packer));
    let mut writer = Writer { image, before, after, tar, names: HashMap::new(), hides: false };
    writer.hides = below.is_some();
    writer.find_names(Some(InodeId::ROOT), InodeId::ROOT, b"");
    writer.root()?;
    writer.directory(Some(InodeId::ROOT), InodeId::ROOT, b"")?;
    let stream = writer.tar.into_inner().map_err(failed)?;
    let bytes = stream.byte_count();
    let (diff_id, packer) = stream.finish();
    let mut blob = match packer {
        Packer::Gzip(packer) => packer.finish().map_err(failed)?,
        Packer::Plain(blob) => blob,
    };
    blob.flush().map_err(failed)?;
    let blob_bytes = blob.byte_count();
    let (blob, _) = blob.finish();
    Ok(Layer { diff_id, bytes, blob, blob_bytes })
}

/// Compresses, or does not.
enum Packer<W: Write> {
    Gzip(GzEncoder<W>),
    Plain(W),
}

impl<W: Write> Write for Packer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Gzip(packer) => packer.write(bytes),
            Self::Plain(to) => to.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Gzip(packer) => packer.flush(),
            Self::Plain(to) => to.flush(),
        }
    }
}

struct Writer<'a, W: Write> {
    image: &'a Rootfs,
    before: Tree,
    after: Tree,
    tar: TarWriter<W>,
    /// A name of each inode that has several, which is below or was written.
    names: HashMap<InodeId, Vec<u8>>,
    /// Whether there is anything below that could be hidden.
    hides: bool,
}

impl<W: Write> Writer<'_, W> {
    /// Finds the names of files that are below as they are above.
    fn find_names(&mut self, before: Option<InodeId>, after: InodeId, path: &[u8]) {
        for (name, inode) in children(&self.after, after) {
            let Some(old) = before.and_then(|before| child(&self.before, before, &name)) else {
                continue;
            };
            let path = join(path, &name);
            let found = self.after.inode(inode);
            if found.is_directory() {
                self.find_names(Some(old), inode, &path);
            } else if found.links > 1 && self.is_same(old, inode) {
                self.names.entry(inode).or_insert(path);
            }
        }
    }

    /// Whether nothing of an inode itself has changed. Data at the same place are the same.
    fn is_same(&self, old: InodeId, new: InodeId) -> bool {
        let (old, new) = (self.before.inode(old), self.after.inode(new));
        let is_same_kind = match (&old.kind, &new.kind) {
            (Kind::Directory(_), Kind::Directory(_)) => true,
            (old, new) => old == new,
        };
        is_same_kind && old.meta == new.meta
    }

    fn root(&mut self) -> Result<()> {
        if self.hides && self.is_same(InodeId::ROOT, InodeId::ROOT) {
            return Ok(());
        }
        let meta = self.after.inode(InodeId::ROOT).meta.clone();
        self.entry(b"", &EntryKind::Directory, &meta, &mut io::empty())
    }

    /// What is in a directory, which is `before` below.
    fn directory(&mut self, before: Option<InodeId>, after: InodeId, path: &[u8]) -> Result<()> {
        // Sockets are nothing that a layer could have.
        let is_left = |tree: &Tree, inode| !matches!(tree.inode(inode).kind, Kind::Socket);
        for (name, _) in before.map(|before| children(&self.before, before)).unwrap_or_default() {
            let left = child(&self.after, after, &name);
            if left.is_none_or(|inode| !is_left(&self.after, inode)) {
                let mark = join(path, &[WHITEOUT, &name].concat());
                let size = EntryKind::File { size: 0, extents: Vec::new() };
                let written = self.tar.entry(&mark, &size, &Meta::default(), &mut io::empty());
                written.map_err(|error| failed(&mark, error))?;
            }
        }
        for (name, inode) in children(&self.after, after) {
            let path = join(path, &name);
            let old = before.and_then(|before| child(&self.before, before, &name));
            let is_same = old.is_some_and(|old| self.is_same(old, inode));
            if !is_same {
                self.inode(inode, &path)?;
            }
            if self.after.inode(inode).is_directory() {
                let old = old.filter(|old| self.before.inode(*old).is_directory());
                self.directory(old, inode, &path)?;
            }
        }
        Ok(())
    }

    fn inode(&mut self, id: InodeId, path: &[u8]) -> Result<()> {
        let inode = self.after.inode(id);
        let (meta, several) = (inode.meta.clone(), inode.links > 1 && !inode.is_directory());
        if let Some(earlier) = self.names.get(&id).filter(|_| several) {
            let kind = EntryKind::HardLink(earlier.clone());
            // Its attributes are the other name's.
            let meta = Meta { xattrs: Default::default(), ..meta };
            return self.entry(path, &kind, &meta, &mut io::empty());
        }
        let kind = match &inode.kind {
            Kind::Directory(_) => EntryKind::Directory,
            Kind::Symlink(target) => EntryKind::Symlink(target.to_vec()),
            Kind::Fifo => EntryKind::Fifo,
            Kind::Socket => return Ok(()),
            Kind::File(data) => {
                let data = *data;
                let parts = match data.size {
                    0 => Vec::new(),
                    _ => extents(self.image, &data).map_err(|error| failed(path, error))?,
                };
                // Few readers know of holes: those that are not worth it are written.
                let held: u64 = parts.iter().map(|part| part.length).sum();
                let parts = match data.size - held < HOLES_BYTES_MIN {
                    true => vec![Extent::whole(data.size)],
                    false => parts,
                };
                let kind = EntryKind::File { size: data.size, extents: parts.clone() };
                let mut content = Content::new(self.image, &data, &parts);
                self.entry(path, &kind, &meta, &mut content)?;
                if several {
                    self.names.insert(id, path.to_vec());
                }
                return Ok(());
            }
        };
        self.entry(path, &kind, &meta, &mut io::empty())?;
        if several {
            self.names.insert(id, path.to_vec());
        }
        Ok(())
    }

    fn entry(
        &mut self,
        path: &[u8],
        kind: &EntryKind,
        meta: &Meta,
        content: &mut dyn Read,
    ) -> Result<()> {
        crate::layer::check_name(path)?;
        let written = self.tar.whole_entry(path, kind, meta, content);
        written.map_err(|error| failed(path, error))
    }
}

/// Holes of fewer bytes are written.
const HOLES_BYTES_MIN: u64 = 1 << 20;

fn failed(path: &[u8], error: io::Error) -> ImageError {
    ImageError::io(format!("cannot write `{}` to a layer", shown(path)), error)
}

fn children(tree: &Tree, directory: InodeId) -> Vec<(Box<[u8]>, InodeId)> {
    let children = tree.children(directory).into_iter().flatten();
    children.map(|(name, entry)| (name.clone(), entry.inode)).collect()
}

fn child(tree: &Tree, directory: InodeId, name: &[u8]) -> Option<InodeId> {
    tree.children(directory)?.get(name).map(|entry| entry.inode)
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match path.is_empty() {
        true => name.to_vec(),
        false => [path, b"/", name].concat(),
    }
}
