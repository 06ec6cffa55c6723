//! Copying files of one tree into another, as a layer.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::owners::owner;
use super::paths::{Match, Place, resolve};
use super::select::{Selection, found, tree_of};
use super::{Files, Layer, LayerWriter, Stack};
use crate::build::Room;
use crate::erofs::{Content, Rootfs, extents};
use crate::error::{ImageError, Result, shown};
use crate::layer::{self, Spent, WHITEOUT};
use crate::limits::ImportLimits;
use crate::progress::Progress;
use crate::rootfs::RootfsBuilder;
use crate::tar::{self, EntryKind, Extent, TarEntry, TarReader, TarWriter};
use crate::tree::{FileData, InodeId, Kind, Meta, Timestamp, Tree};

/// Bytes that tell whether a file is an archive: its first header.
const HEADER_BYTES: usize = 512;

/// A copy that is to become a layer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Copy {
    pub selection: Selection,
    /// An absolute path in the image; one that ends with a slash is a directory.
    pub to: String,
    /// `user[:group]`, by names of the image or by numbers.
    pub owner: Option<String>,
    /// Permission bits of all that is copied.
    pub mode: Option<u16>,
    /// Whether archives become what they hold.
    pub unpacks: bool,
    /// When what has no time of its own was made: seconds since 1970.
    pub time_s: i64,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Copied {
    Layer(Layer),
    /// All of it is there already: of a directory alone.
    Nothing,
}

/// Writes an archive of what is at `path` in `source` to `to`: of a directory what it holds.
///
/// # Errors
/// It is not there, or cannot be read or written.
pub fn pack(source: &Rootfs, path: &str, to: &mut dyn Write, limits: &ImportLimits) -> Result<()> {
    let tree = tree_of(source, &[], limits)?;
    let only = Selection { sources: vec![path.to_owned()], ..Selection::default() };
    let selected = found(&tree, &only)?;
    let mut writer = Writer {
        tar: TarWriter::new(to),
        owner: None,
        mode: None,
        keeps_owner: false,
        made: BTreeSet::new(),
    };
    for Match { name, inode } in selected {
        match tree.inode(inode).is_directory() {
            true => writer.children(&tree, source, inode, b"")?,
            false => writer.inode(&tree, source, inode, &name)?,
        }
    }
    writer.tar.finish().map_err(|error| ImageError::io("cannot write an archive", error))
}

/// Makes a layer in the empty file `to`, which puts what `job` selects of `source` into the image
/// that `stack` is.
///
/// # Errors
/// What is not there or has no place in the image, and what is wrong with the disk.
pub fn copy(
    job: &Copy,
    source: Option<&Rootfs>,
    stack: &Stack,
    files: Files,
    room: Room,
    to: &mut File,
    progress: &mut dyn Progress,
) -> Result<Copied> {
    let rootfs = stack.rootfs(files, room, progress)?;
    let from =
        source.map(|source| tree_of(source, &job.selection.hidden, &stack.limits)).transpose()?;
    let selected = match &from {
        Some(tree) => found(tree, &job.selection)?,
        None => Vec::new(),
    };
    let place = resolve(rootfs.tree(), job.to.as_bytes())?;
    let is_directory = |inode| rootfs.tree().inode(inode).is_directory();
    let count = selected.len() + job.selection.inline.len();
    if count == 0 && place.inode.is_some_and(is_directory) {
        return Ok(Copied::Nothing);
    }
    let wants_directory = count != 1 || job.to.ends_with('/');
    if place.inode.is_some_and(|inode| wants_directory && !is_directory(inode)) {
        return Err(no_directory(&job.to));
    }
    if count > 1 && !job.to.ends_with('/') {
        let why = "several files are copied there: it must be a directory and end with a /";
        return Err(ImageError::malformed(format!("`{}`", shown(job.to.as_bytes())), why));
    }
    let ids = job.owner.as_ref().map(|text| owner(&rootfs, text)).transpose()?;
    let mut writer = Writer {
        tar: TarWriter::new(LayerWriter::new(to, &stack.limits)?),
        owner: ids,
        mode: job.mode,
        keeps_owner: job.selection.keeps_owner,
        made: BTreeSet::new(),
    };
    let target = Target { rootfs: &rootfs, place, job, wants_directory };
    if count == 0 {
        writer.parents(&target, &target.place.names)?;
    }
    if let (Some(source), Some(tree)) = (source, &from) {
        for one in &selected {
            writer.selected(&target, tree, source, one, &stack.limits)?;
        }
    }
    for (name, content) in &job.selection.inline {
        writer.inline(&target, name.as_bytes(), content.as_bytes())?;
    }
    writer.finish().map(Copied::Layer)
}

fn no_directory(path: &str) -> ImageError {
    ImageError::malformed(
        format!("`{}`", shown(path.as_bytes())),
        "it is a file of the image, and what is copied wants a directory there",
    )
}

/// Where files go.
struct Target<'a> {
    rootfs: &'a RootfsBuilder<'a>,
    place: Place,
    job: &'a Copy,
    wants_directory: bool,
}

impl Target<'_> {
    fn is_directory(&self) -> bool {
        self.wants_directory
            || self.place.inode.is_some_and(|inode| self.rootfs.tree().inode(inode).is_directory())
    }

    /// The names of a file that is called `name` in the source.
    fn names(&self, name: &[u8]) -> Vec<Vec<u8>> {
        let mut names = self.place.names.clone();
        if self.is_directory() {
            names.push(name.to_vec());
        }
        names
    }

    fn has(&self, names: &[Vec<u8>]) -> bool {
        let mut here = InodeId::ROOT;
        names.iter().all(|name| {
            let found =
                self.rootfs.tree().children(here).and_then(|children| children.get(&name[..]));
            found.map(|entry| here = entry.inode).is_some()
        })
    }

    fn is_directory_at(&self, names: &[Vec<u8>]) -> bool {
        let path = names.join(&b'/');
        let found = resolve(self.rootfs.tree(), &path).ok().and_then(|place| place.inode);
        found.is_some_and(|inode| self.rootfs.tree().inode(inode).is_directory())
    }

    fn made(&self) -> Meta {
        let mtime = Timestamp { seconds: self.job.time_s, nanos: 0 };
        Meta { mode: 0o755, mtime, ..Meta::default() }
    }
}

struct Writer<W: Write> {
    tar: TarWriter<W>,
    owner: Option<(u32, u32)>,
    mode: Option<u16>,
    keeps_owner: bool,
    /// Directories that this layer has already.
    made: BTreeSet<Vec<u8>>,
}

impl Writer<LayerWriter<'_>> {
    fn finish(self) -> Result<Layer> {
        let failed = |error| ImageError::io("cannot write a layer", error);
        self.tar.into_inner().map_err(failed)?.finish()
    }
}

impl<W: Write> Writer<W> {
    fn entry(
        &mut self,
        path: &[u8],
        kind: &EntryKind,
        meta: Meta,
        content: &mut dyn Read,
    ) -> Result<()> {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if name.starts_with(WHITEOUT) {
            let why = "a name that begins with .wh. is a mark in a layer, and no file";
            return Err(ImageError::malformed(format!("`{}`", shown(path)), why));
        }
        let mut meta = meta;
        if let Some((uid, gid)) = self.owner {
            (meta.uid, meta.gid) = (uid, gid);
        }
        if let (Some(mode), false) = (self.mode, matches!(kind, EntryKind::Symlink(_))) {
            meta.mode = mode;
        }
        let written = self.tar.whole_entry(path, kind, &meta, content);
        written.map_err(|error| ImageError::io(format!("cannot copy `{}`", shown(path)), error))
    }

    /// Makes the directories of `names` that the image has not.
    fn parents(&mut self, target: &Target<'_>, names: &[Vec<u8>]) -> Result<()> {
        for count in 1..=names.len() {
            let path = names[..count].join(&b'/');
            if !target.has(&names[..count]) && self.made.insert(path.clone()) {
                // The mode that is asked for is that of files that are copied.
                let mode = self.mode.take();
                let made =
                    self.entry(&path, &EntryKind::Directory, target.made(), &mut io::empty());
                self.mode = mode;
                made?;
            }
        }
        Ok(())
    }

    fn selected(
        &mut self,
        target: &Target<'_>,
        tree: &Tree,
        source: &Rootfs,
        one: &Match,
        limits: &ImportLimits,
    ) -> Result<()> {
        let inode = tree.inode(one.inode);
        if inode.is_directory() {
            let names = &target.place.names;
            if target.place.inode.is_some() && !target.is_directory() {
                return Err(no_directory(&target.job.to));
            }
            self.parents(target, names.split_last().map_or(&[][..], |(_, above)| above))?;
            let path = names.join(&b'/');
            if !target.has(names) && self.made.insert(path.clone()) {
                let meta = self.meta(&inode.meta);
                self.entry(&path, &EntryKind::Directory, meta, &mut io::empty())?;
            }
            return self.children(tree, source, one.inode, &path);
        }
        if target.job.unpacks
            && let Kind::File(data) = &inode.kind
            && is_archive(source, data, &one.name, limits)?
        {
            self.parents(target, &target.place.names)?;
            return self.archive(target, source, data, limits);
        }
        let names = target.names(&one.name);
        if target.is_directory_at(&names) {
            let path = shown(&names.join(&b'/'));
            let why = "it is a directory of the image, and a file is copied there";
            return Err(ImageError::malformed(format!("`/{path}`"), why));
        }
        self.parents(target, &names[..names.len() - 1])?;
        self.inode(tree, source, one.inode, &names.join(&b'/'))
    }

    fn meta(&self, of: &Meta) -> Meta {
        match self.keeps_owner {
            true => of.clone(),
            false => Meta { uid: 0, gid: 0, ..of.clone() },
        }
    }

    fn children(&mut self, tree: &Tree, source: &Rootfs, id: InodeId, path: &[u8]) -> Result<()> {
        for (name, entry) in tree.children(id).into_iter().flatten() {
            let below = match path.is_empty() {
                true => name.to_vec(),
                false => [path, b"/", name].concat(),
            };
            self.inode(tree, source, entry.inode, &below)?;
        }
        Ok(())
    }

    fn inode(&mut self, tree: &Tree, source: &Rootfs, id: InodeId, path: &[u8]) -> Result<()> {
        let inode = tree.inode(id);
        let meta = self.meta(&inode.meta);
        let kind = match &inode.kind {
            Kind::Directory(_) => {
                self.made.insert(path.to_vec());
                self.entry(path, &EntryKind::Directory, meta, &mut io::empty())?;
                return self.children(tree, source, id, path);
            }
            Kind::File(data) => {
                let failed =
                    |error| ImageError::io(format!("cannot read `{}`", shown(path)), error);
                let parts = extents(source, data).map_err(failed)?;
                let kind = EntryKind::File { size: data.size, extents: parts.clone() };
                return self.entry(path, &kind, meta, &mut Content::new(source, data, &parts));
            }
            Kind::Symlink(target) => EntryKind::Symlink(target.to_vec()),
            Kind::Fifo => EntryKind::Fifo,
            // Nobody listens there any more.
            Kind::Socket => return Ok(()),
        };
        self.entry(path, &kind, meta, &mut io::empty())
    }

    fn inline(&mut self, target: &Target<'_>, name: &[u8], content: &[u8]) -> Result<()> {
        let names = target.names(name);
        self.parents(target, &names[..names.len() - 1])?;
        let size = content.len() as u64;
        let kind = EntryKind::File { size, extents: vec![Extent::whole(size)] };
        let meta = Meta { mode: 0o644, ..target.made() };
        self.entry(&names.join(&b'/'), &kind, meta, &mut { content })
    }

    /// What an archive holds, below the target.
    fn archive(
        &mut self,
        target: &Target<'_>,
        source: &Rootfs,
        data: &FileData,
        limits: &ImportLimits,
    ) -> Result<()> {
        let nothing = Spent::default();
        let parts = [Extent::whole(data.size)];
        let content = Content::new(source, data, &parts);
        let stream = layer::unpacked(content, "the archive", limits, &nothing)?;
        let mut tar = TarReader::new(stream, limits);
        let above = target.place.path();
        let below = |path: &[u8]| -> Result<Vec<u8>> {
            let own = crate::tree::split(path)?.join(&b'/');
            Ok(if above.is_empty() { own } else { [&above[..], b"/", &own].concat() })
        };
        let mut entries = 0u64;
        while let Some(TarEntry { path, kind, meta }) = tar.next_entry()? {
            entries += 1;
            if entries > limits.entries_max {
                let what = "the number of files of an archive";
                return Err(ImageError::limit(what, "entries_max", limits.entries_max));
            }
            let own = below(&path)?;
            if own == above {
                continue;
            }
            let kind = match kind {
                EntryKind::HardLink(target) => EntryKind::HardLink(below(&target)?),
                EntryKind::Device { .. } => {
                    return Err(ImageError::DeviceNode { path: shown(&path) });
                }
                kind => kind,
            };
            self.entry(&own, &kind, meta, &mut tar)?;
        }
        Ok(())
    }
}

/// Whether a file is an archive that is unpacked.
fn is_archive(
    source: &Rootfs,
    data: &FileData,
    name: &[u8],
    limits: &ImportLimits,
) -> Result<bool> {
    let parts = [Extent::whole(data.size)];
    let mut magic = Vec::new();
    let failed = |error| ImageError::io(format!("cannot read `{}`", shown(name)), error);
    let mut content = Content::new(source, data, &parts);
    content.by_ref().take(6).read_to_end(&mut magic).map_err(failed)?;
    if magic.starts_with(b"BZh") || magic.starts_with(&[0xfd, b'7', b'z', b'X', b'Z']) {
        let why = "ADD unpacks plain, gzip and zstd archives: pack it again, or COPY it and unpack \
                   it in a RUN";
        return Err(ImageError::Unsupported {
            what: format!("`{}`", shown(name)),
            why: why.into(),
        });
    }
    let nothing = Spent::default();
    let whole = Content::new(source, data, &parts);
    let Ok(stream) = layer::unpacked(whole, "the archive", limits, &nothing) else {
        return Ok(false);
    };
    let mut header = Vec::new();
    // What cannot be unpacked is a file like any other.
    let read = stream.take(HEADER_BYTES as u64).read_to_end(&mut header);
    let is_read = read.is_ok() && header.len() == HEADER_BYTES;
    Ok(is_read && tar::is_header(&header))
}
