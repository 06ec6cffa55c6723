//! Finding files in a tree by the paths and patterns of a build, as a program whose root the tree
//! is would find them: links are followed inside it.

use crate::dockerfile::pattern;
use crate::error::{ImageError, Result, shown};
use crate::tree::{InodeId, Kind, Tree};

/// Symbolic links followed for one path (Linux: MAXSYMLINKS).
const HOPS_MAX: usize = 40;
const NAME_BYTES_MAX: usize = 255;
/// Files that one pattern may be of.
const MATCHES_MAX: usize = 1 << 20;

/// Where a path leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// Its names from the root on, none of which is a link that is there.
    pub names: Vec<Vec<u8>>,
    /// What is there.
    pub inode: Option<InodeId>,
}

impl Place {
    fn root() -> Self {
        Self { names: Vec::new(), inode: Some(InodeId::ROOT) }
    }

    /// The path without a slash before it.
    pub fn path(&self) -> Vec<u8> {
        self.names.join(&b'/')
    }
}

/// Where `path` leads in `tree`, links at its end included; `..` stops at the root.
pub(super) fn resolve(tree: &Tree, path: &[u8]) -> Result<Place> {
    let mut walk = Walk { tree, path, above: Vec::new(), here: Place::root(), hops: 0 };
    for name in path.split(|byte| *byte == b'/') {
        walk.enter(name)?;
    }
    Ok(walk.here)
}

struct Walk<'a> {
    tree: &'a Tree,
    path: &'a [u8],
    /// The inodes of the directories above, the root first.
    above: Vec<Option<InodeId>>,
    here: Place,
    hops: usize,
}

impl Walk<'_> {
    fn enter(&mut self, name: &[u8]) -> Result<()> {
        match name {
            b"" | b"." => return Ok(()),
            b".." => {
                if let Some(above) = self.above.pop() {
                    self.here.names.pop();
                    self.here.inode = above;
                }
                return Ok(());
            }
            _ if name.len() > NAME_BYTES_MAX || self.above.len() > 4096 => {
                let max = NAME_BYTES_MAX as u64;
                return Err(ImageError::limit(shown(self.path), "file name bytes", max));
            }
            _ => {}
        }
        let found = self.here.inode.and_then(|here| child(self.tree, here, name));
        let is_file = |inode: InodeId| !self.tree.inode(inode).is_directory();
        if self.here.inode.is_some_and(is_file) {
            let parent = shown(&self.here.path());
            return Err(ImageError::ParentNotDirectory { path: shown(self.path), parent });
        }
        if let Some(Kind::Symlink(target)) = found.map(|found| &self.tree.inode(found).kind) {
            let target = target.clone();
            self.hops += 1;
            if self.hops > HOPS_MAX {
                return Err(ImageError::LinkLoop { path: shown(self.path) });
            }
            if target.first() == Some(&b'/') {
                self.above.clear();
                self.here = Place::root();
            }
            return target.split(|byte| *byte == b'/').try_for_each(|name| self.enter(name));
        }
        self.above.push(self.here.inode);
        self.here.names.push(name.to_vec());
        self.here.inode = found;
        Ok(())
    }
}

fn child(tree: &Tree, directory: InodeId, name: &[u8]) -> Option<InodeId> {
    tree.children(directory)?.get(name).map(|entry| entry.inode)
}

/// A file that was asked for, with the name that it is copied under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Match {
    pub name: Vec<u8>,
    pub inode: InodeId,
}

/// What `wanted`, a path or a pattern, is of in `tree`, in the order of the names.
pub(super) fn find(tree: &Tree, wanted: &str) -> Result<Vec<Match>> {
    let names: Vec<&[u8]> = wanted
        .as_bytes()
        .split(|byte| *byte == b'/')
        .filter(|n| !matches!(*n, b"" | b"."))
        .collect();
    if names.contains(&&b".."[..]) {
        let why = "its name has `..` in it";
        return Err(ImageError::UnsafePath { path: shown(wanted.as_bytes()), why });
    }
    let mut found = vec![Vec::new()];
    for name in names {
        let mut next: Vec<Vec<u8>> = Vec::new();
        for above in found {
            let join = |name: &[u8]| match above.is_empty() {
                true => name.to_vec(),
                false => [&above[..], b"/", name].concat(),
            };
            if !pattern::is_pattern(name) {
                next.push(join(name));
                continue;
            }
            let Ok(Place { inode: Some(directory), .. }) = resolve(tree, &above) else { continue };
            for child in tree.children(directory).into_iter().flat_map(|names| names.keys()) {
                if pattern::matches(name, child) {
                    next.push(join(child));
                }
            }
            if next.len() > MATCHES_MAX {
                let what = format!("the number of files that {} is of", shown(wanted.as_bytes()));
                return Err(ImageError::limit(what, "matches", MATCHES_MAX as u64));
            }
        }
        found = next;
    }
    let mut matches = Vec::new();
    for path in found {
        // What is under a file, or at the end of a link that leads nowhere, is not there.
        let Ok(Place { inode: Some(inode), .. }) = resolve(tree, &path) else { continue };
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
        matches.push(Match { name, inode });
    }
    Ok(matches)
}
