//! Finding the place of an archive entry, never outside the tree.

use super::{Entry, Inode, InodeId, Kind, Meta, Tree};
use crate::error::{ImageError, Result, shown};

/// Symbolic links followed for one path (Linux: MAXSYMLINKS).
const HOPS_MAX: usize = 40;
/// Bytes of one name (Linux: NAME_MAX, erofs: EROFS_NAME_LEN).
const NAME_BYTES_MAX: usize = 255;

/// The place of an entry: a directory, and a name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parent<'a> {
    pub directory: InodeId,
    /// Empty for the root itself.
    pub name: &'a [u8],
}

/// The components of an archive path. Refuses absolute paths, `..`, names
/// that are too long and NUL bytes; drops `.` and doubled slashes.
pub(crate) fn split(path: &[u8]) -> Result<Vec<&[u8]>> {
    let unsafe_path = |why| ImageError::UnsafePath { path: shown(path), why };
    if path.first() == Some(&b'/') {
        return Err(unsafe_path("its name is absolute"));
    }
    if path.contains(&0) {
        return Err(unsafe_path("its name has a NUL byte"));
    }
    let mut components = Vec::new();
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(unsafe_path("its name has `..` in it")),
            name if name.len() > NAME_BYTES_MAX => {
                return Err(ImageError::limit(
                    format!("the name `{}`", shown(name)),
                    "file name bytes",
                    NAME_BYTES_MAX as u64,
                ));
            }
            name => components.push(name),
        }
    }
    Ok(components)
}

/// One walk from the root, with the directories it came through.
struct Walk<'t> {
    tree: &'t mut Tree,
    path: &'t [u8],
    stack: Vec<InodeId>,
    hops: usize,
    /// Make missing directories and mark those passed as of this layer.
    create: bool,
}

impl Tree {
    /// The place of `path`. Symbolic links above the last component are
    /// followed inside the tree, as a process whose root is the image would;
    /// missing directories are made.
    pub fn place<'a>(&mut self, path: &'a [u8]) -> Result<Parent<'a>> {
        let components = split(path)?;
        let Some((name, above)) = components.split_last() else {
            return Ok(Parent { directory: InodeId::ROOT, name: b"" });
        };
        let mut walk = Walk { tree: self, path, stack: vec![InodeId::ROOT], hops: 0, create: true };
        for component in above {
            walk.enter(component)?;
        }
        Ok(Parent { directory: walk.here(), name })
    }

    /// The inode at `path`, whose last component is not followed, or `None`.
    pub fn find(&mut self, path: &[u8]) -> Result<Option<InodeId>> {
        let components = split(path)?;
        let Some((name, above)) = components.split_last() else {
            return Ok(Some(InodeId::ROOT));
        };
        let mut walk =
            Walk { tree: self, path, stack: vec![InodeId::ROOT], hops: 0, create: false };
        for component in above {
            if !walk.enter(component)? {
                return Ok(None);
            }
        }
        Ok(walk.lookup(name).map(|entry| entry.inode))
    }
}

impl Walk<'_> {
    fn here(&self) -> InodeId {
        self.stack.last().copied().unwrap_or(InodeId::ROOT)
    }

    fn lookup(&self, name: &[u8]) -> Option<Entry> {
        self.tree.children(self.here()).and_then(|children| children.get(name)).copied()
    }

    /// Steps into `name`; false if it is missing and not to be made.
    fn enter(&mut self, name: &[u8]) -> Result<bool> {
        let Some(entry) = self.lookup(name) else {
            return self.make(name);
        };
        match &self.tree.inode(entry.inode).kind {
            Kind::Directory(_) => {
                if self.create {
                    self.touch(name, entry);
                }
                self.push(entry.inode)?;
                Ok(true)
            }
            Kind::Symlink(target) => {
                let target = target.clone();
                self.follow(&target)
            }
            _ => {
                Err(ImageError::ParentNotDirectory { path: shown(self.path), parent: shown(name) })
            }
        }
    }

    fn push(&mut self, directory: InodeId) -> Result<()> {
        if self.stack.len() > self.tree.depth_max {
            let max = self.tree.depth_max as u64;
            return Err(ImageError::limit(format!("`{}`", shown(self.path)), "depth_max", max));
        }
        self.stack.push(directory);
        Ok(())
    }

    fn make(&mut self, name: &[u8]) -> Result<bool> {
        if !self.create {
            return Ok(false);
        }
        let here = self.here();
        let kind = Kind::Directory(Default::default());
        let made = self.tree.insert(here, name, Meta::implicit(), kind);
        self.push(made)?;
        Ok(true)
    }

    fn touch(&mut self, name: &[u8], entry: Entry) {
        let layer = self.tree.layer;
        let here = self.here();
        if entry.layer < layer {
            self.tree.set_entry(here, name, Entry { layer, ..entry });
        }
    }

    /// Walks a link's target; `..` stops at the root.
    fn follow(&mut self, target: &[u8]) -> Result<bool> {
        self.hops += 1;
        if self.hops > HOPS_MAX {
            return Err(ImageError::LinkLoop { path: shown(self.path) });
        }
        if target.first() == Some(&b'/') {
            self.stack.truncate(1);
        }
        for component in target.split(|byte| *byte == b'/') {
            match component {
                b"" | b"." => {}
                b".." if self.stack.len() > 1 => {
                    self.stack.pop();
                }
                b".." => {}
                name => {
                    check_name(name)?;
                    if !self.enter(name)? {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    split(name).map(|_| ())
}

impl Inode {
    pub fn is_directory(&self) -> bool {
        matches!(self.kind, Kind::Directory(_))
    }
}
