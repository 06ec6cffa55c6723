//! The file tree of an image, held in memory while its layers are applied.

mod place;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub(crate) use place::{Parent, split};

/// Seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    pub seconds: i64,
    pub nanos: u32,
}

/// Extended attributes by their full names.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What `stat` tells of an inode beside its type.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Permission, set-id and sticky bits (07777).
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    pub xattrs: Xattrs,
}

impl Meta {
    /// The directories that an archive does not list, but has files in.
    fn implicit() -> Self {
        Self { mode: 0o755, ..Self::default() }
    }
}

/// Where the bytes of a regular file are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FileData {
    pub size: u64,
    /// First block of the whole blocks (and of the last part, unless `tail`).
    pub start_block: u32,
    /// Offset in the spool of the part after the last whole block.
    pub tail: Option<u64>,
}

/// Where an inode lies in the image below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub nid: u64,
    /// Bytes that it has there: itself, its attributes, and what lies at it.
    pub room: usize,
    pub number: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory(BTreeMap<Box<[u8]>, Entry>),
    File(FileData),
    Symlink(Box<[u8]>),
    Fifo,
    Socket,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub inode: InodeId,
    /// The last layer that spoke of this name or of something below it.
    pub layer: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inode {
    pub meta: Meta,
    pub kind: Kind,
    /// Names of it; for a directory always 1 while it is in the tree.
    pub links: u32,
    /// Where it was read from, if it was.
    pub origin: Option<Origin>,
    /// Whether it is another than it was there.
    pub changed: bool,
}

impl Inode {
    fn new(meta: Meta, kind: Kind) -> Self {
        Self { meta, kind, links: 1, origin: None, changed: true }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct InodeId(u32);

impl InodeId {
    pub const ROOT: Self = Self(0);

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// All inodes of an image. Ids stay valid; an inode without links is dead.
#[derive(Debug)]
pub(crate) struct Tree {
    inodes: Vec<Inode>,
    /// Data of files that lost their last name, to be given back.
    freed: Vec<FileData>,
    layer: u32,
    depth_max: usize,
}

impl Tree {
    pub fn new(depth_max: usize) -> Self {
        let root = Inode::new(Meta::implicit(), Kind::Directory(BTreeMap::new()));
        Self { inodes: vec![root], freed: Vec::new(), layer: 0, depth_max }
    }

    /// Starts the next layer: whiteouts hide what is there now, and only that.
    pub fn begin_layer(&mut self) {
        self.layer += 1;
    }

    /// Number of inodes made so far, dead ones included.
    pub fn len(&self) -> usize {
        self.inodes.len()
    }

    /// The inode of an id, which this tree handed out.
    pub fn inode(&self, id: InodeId) -> &Inode {
        &self.inodes[id.index()]
    }

    fn inode_mut(&mut self, id: InodeId) -> &mut Inode {
        &mut self.inodes[id.index()]
    }

    pub fn children(&self, id: InodeId) -> Option<&BTreeMap<Box<[u8]>, Entry>> {
        match &self.inode(id).kind {
            Kind::Directory(children) => Some(children),
            _ => None,
        }
    }

    fn children_mut(&mut self, id: InodeId) -> Option<&mut BTreeMap<Box<[u8]>, Entry>> {
        match &mut self.inode_mut(id).kind {
            Kind::Directory(children) => Some(children),
            _ => None,
        }
    }

    /// Takes the data of files that have lost their last name since last asked.
    pub fn take_freed(&mut self) -> Vec<FileData> {
        std::mem::take(&mut self.freed)
    }

    pub fn set_root_meta(&mut self, meta: Meta) {
        self.set_meta(InodeId::ROOT, meta);
    }

    fn set_meta(&mut self, id: InodeId, meta: Meta) {
        let inode = self.inode_mut(id);
        inode.changed |= inode.meta != meta;
        inode.meta = meta;
    }

    /// Notes where an inode was read from.
    pub fn set_origin(&mut self, id: InodeId, origin: Origin) {
        self.inode_mut(id).origin = Some(origin);
    }

    /// All that was read is there, and nothing of it has changed.
    pub fn settle(&mut self) {
        self.inodes.iter_mut().for_each(|inode| inode.changed = false);
    }

    /// Puts an inode at `name` in `parent`. What was there is removed, but a
    /// directory that replaces a directory keeps what is in it. The inode that is there now.
    pub fn insert(&mut self, parent: InodeId, name: &[u8], meta: Meta, kind: Kind) -> InodeId {
        let layer = self.layer;
        let old = self.children(parent).and_then(|children| children.get(name)).copied();
        if let Some(old) = old
            && matches!(kind, Kind::Directory(_))
            && self.children(old.inode).is_some()
        {
            self.set_meta(old.inode, meta);
            self.set_entry(parent, name, Entry { inode: old.inode, layer });
            return old.inode;
        }
        self.remove(parent, name);
        let inode = InodeId(self.inodes.len() as u32);
        self.inodes.push(Inode::new(meta, kind));
        self.set_entry(parent, name, Entry { inode, layer });
        inode
    }

    /// The data of all files that have a name.
    pub fn files(&self) -> impl Iterator<Item = &FileData> {
        self.inodes.iter().filter(|inode| inode.links > 0).filter_map(|inode| match &inode.kind {
            Kind::File(data) => Some(data),
            _ => None,
        })
    }

    /// Gives `inode`, which is no directory, one more name.
    pub fn link(&mut self, parent: InodeId, name: &[u8], inode: InodeId) {
        let linked = self.inode_mut(inode);
        linked.links += 1;
        linked.changed = true;
        self.remove(parent, name);
        let layer = self.layer;
        self.set_entry(parent, name, Entry { inode, layer });
    }

    fn set_entry(&mut self, parent: InodeId, name: &[u8], entry: Entry) {
        let Some(children) = self.children_mut(parent) else { return };
        let before = children.insert(name.into(), entry);
        let is_another = before.is_none_or(|before| before.inode != entry.inode);
        self.inode_mut(parent).changed |= is_another;
    }

    /// Removes a name and, if it is a directory, all below it.
    pub fn remove(&mut self, parent: InodeId, name: &[u8]) {
        if let Some(entry) = self.children_mut(parent).and_then(|children| children.remove(name)) {
            self.inode_mut(parent).changed = true;
            self.release(entry.inode);
        }
    }

    fn release(&mut self, id: InodeId) {
        let inode = self.inode_mut(id);
        inode.links = inode.links.saturating_sub(1);
        inode.changed = true;
        if inode.links > 0 {
            return;
        }
        match &mut inode.kind {
            Kind::Directory(children) => {
                for entry in std::mem::take(children).into_values() {
                    self.release(entry.inode);
                }
            }
            Kind::File(data) => {
                let data = std::mem::take(data);
                self.freed.push(data);
            }
            _ => {}
        }
    }

    /// A whiteout: hides what lower layers have at `name` (OCI image-spec,
    /// layer.md, "Whiteouts"). Names of the current layer stay.
    pub fn hide(&mut self, parent: InodeId, name: &[u8]) {
        let Some(entry) = self.children(parent).and_then(|children| children.get(name)).copied()
        else {
            return;
        };
        if entry.layer < self.layer {
            self.remove(parent, name);
        } else {
            self.hide_children(entry.inode);
        }
    }

    /// An opaque whiteout: hides all that lower layers have in `directory`.
    pub fn hide_children(&mut self, directory: InodeId) {
        let Some(children) = self.children(directory) else { return };
        let names: Vec<_> = children.keys().cloned().collect();
        for name in names {
            self.hide(directory, &name);
        }
    }
}
