//! What is selected of a tree: by paths and patterns, and by a digest of all that it holds.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::paths::{Match, Place, find, resolve};
use crate::Digest;
use crate::digest::HashingWriter;
use crate::erofs::{Content, Reader, Rootfs, extents};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::tar::Extent;
use crate::tree::{InodeId, Kind, Tree};

/// What is copied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// Paths and patterns in the source.
    pub sources: Vec<String>,
    /// Files whose contents come with the request.
    pub inline: Vec<(String, String)>,
    /// Whether files belong to whom they belong to in the source; to root otherwise.
    pub keeps_owner: bool,
    /// Files of the source that are as if they were not there.
    pub hidden: Vec<String>,
}

/// What a pattern is of is found or it is an error.
pub(super) fn found(tree: &Tree, selection: &Selection) -> Result<Vec<Match>> {
    // As docker says it.
    let whose = match selection.keeps_owner {
        true => "COPY failed: file not found in the stage or image",
        false => "COPY failed: file not found in build context or excluded by .dockerignore",
    };
    let mut all = Vec::new();
    for source in &selection.sources {
        let matches = find(tree, source)?;
        if matches.is_empty() {
            return Err(ImageError::NotInSource { whose, path: shown(source.as_bytes()) });
        }
        all.extend(matches);
    }
    Ok(all)
}

pub(super) fn tree_of(source: &Rootfs, hidden: &[String], limits: &ImportLimits) -> Result<Tree> {
    let mut tree = Reader::new(source)?.tree(limits)?;
    for path in hidden {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        if let Place { inode: Some(directory), .. } = resolve(&tree, above.as_bytes())? {
            tree.remove(directory, name.as_bytes());
        }
    }
    Ok(tree)
}

/// A digest of what is selected of `source`: names, modes and contents, not times; owners only
/// where they are kept.
///
/// # Errors
/// What is not there, or cannot be read.
pub fn hash(
    selection: &Selection,
    source: Option<&Rootfs>,
    limits: &ImportLimits,
) -> Result<Digest> {
    let mut hasher = HashingWriter::new(io::sink());
    if let Some(source) = source {
        let tree = tree_of(source, &selection.hidden, limits)?;
        for Match { name, inode } in found(&tree, selection)? {
            let mut hashed = Hashed { tree: &tree, source, selection, to: &mut hasher };
            hashed.inode(&name, inode)?;
        }
    }
    for (name, content) in &selection.inline {
        note(&mut hasher, &[b"inline", name.as_bytes(), content.as_bytes()])?;
    }
    Ok(hasher.finish().0)
}

/// Parts with their lengths, so that none can stand for another.
fn note(to: &mut impl Write, parts: &[&[u8]]) -> Result<()> {
    parts.iter().try_for_each(|part| {
        to.write_all(&(part.len() as u64).to_le_bytes())
            .and_then(|()| to.write_all(part))
            .map_err(|error| ImageError::io("cannot hash what is copied", error))
    })
}

struct Hashed<'a, W> {
    tree: &'a Tree,
    source: &'a Rootfs,
    selection: &'a Selection,
    to: &'a mut W,
}

impl<W: Write> Hashed<'_, W> {
    fn inode(&mut self, name: &[u8], id: InodeId) -> Result<()> {
        let inode = self.tree.inode(id);
        let meta = &inode.meta;
        let (uid, gid) = match self.selection.keeps_owner {
            true => (meta.uid, meta.gid),
            false => (0, 0),
        };
        note(self.to, &[name, format!("{:o} {uid} {gid}", meta.mode).as_bytes()])?;
        for (name, value) in &meta.xattrs {
            note(self.to, &[name, value])?;
        }
        match &inode.kind {
            Kind::Directory(children) => {
                note(self.to, &[b"directory", &(children.len() as u64).to_le_bytes()])?;
                children.iter().try_for_each(|(name, entry)| self.inode(name, entry.inode))
            }
            Kind::Symlink(target) => note(self.to, &[b"link", target]),
            Kind::Fifo => note(self.to, &[b"pipe"]),
            Kind::Socket => note(self.to, &[b"socket"]),
            Kind::File(data) => {
                note(self.to, &[b"file", &data.size.to_le_bytes()])?;
                let failed = |error| ImageError::io("cannot read what is copied", error);
                let parts = extents(self.source, data).map_err(failed)?;
                for part in &parts {
                    let words = [part.offset.to_le_bytes(), part.length.to_le_bytes()];
                    note(self.to, &[&words[0], &words[1]])?;
                }
                let mut content = Content::new(self.source, data, &parts);
                io::copy(&mut content, self.to).map(drop).map_err(failed)
            }
        }
    }
}

/// All bytes of the file at `path` in `source`, as text; `None` where there is none.
///
/// # Errors
/// It is no file, longer than `bytes_max`, or no text.
pub fn text(
    source: &Rootfs,
    path: &str,
    bytes_max: u64,
    limits: &ImportLimits,
) -> Result<Option<String>> {
    let tree = tree_of(source, &[], limits)?;
    let what = || format!("`{}`", shown(path.as_bytes()));
    let Place { inode: Some(inode), .. } = resolve(&tree, path.as_bytes())? else {
        return Ok(None);
    };
    let Kind::File(data) = &tree.inode(inode).kind else {
        return Err(ImageError::malformed(what(), "it is no file"));
    };
    if data.size > bytes_max {
        return Err(ImageError::limit(what(), "bytes", bytes_max));
    }
    let whole = [Extent::whole(data.size)];
    let mut bytes = Vec::new();
    Content::new(source, data, &whole)
        .read_to_end(&mut bytes)
        .map_err(|error| ImageError::io(format!("cannot read {}", what()), error))?;
    String::from_utf8(bytes).map(Some).map_err(|error| ImageError::malformed(what(), error))
}
