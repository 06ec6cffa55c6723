//! The way of a request through the rights to what carries it out.

mod attr;
mod files;
mod tree;
mod xattr;

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::Errno;

use crate::host::{self, Descriptors, Ident};
use crate::locks::Lockers;
use crate::nodes::{Content, Forgotten, Node, Nodes, ROOT};
use crate::owners::{Owner, Owners};
use crate::quota::Quota;
use crate::table::Table;
use crate::watches::{Sight, Watches};
use crate::wire::{Body, Fields, Head, REPLY_HEAD_LEN, REQUEST_HEAD_LEN, opcode};
use crate::{Exchange, FILE_NAME, Folder, FolderError, Metrics, Rights, What};

use files::Handle;

/// The version of the protocol that is spoken (7.38), and the oldest that a guest may speak.
const MAJOR: u32 = 7;
const MINOR: u32 = 38;
const MINOR_MIN: u32 = 31;

/// The most bytes of a body that is not a file's content: a name and an attribute's value, and
/// some spare.
const BODY_LEN_MAX: usize = (64 << 10) + 4096;
/// The most bytes of one reading or writing.
const CONTENT_LEN_MAX: u32 = 1 << 20;
/// For how long the guest may take names and attributes as it knows them, in nanoseconds.
const VALID_NS: u32 = 1_000_000_000;
/// Most bytes of directory entries read from the host at once.
const ENTRIES_LEN: usize = 32 << 10;

/// Flags of FUSE_INIT (`FUSE_*` in the kernel's header).
const WANTED: u64 = 1 // ASYNC_READ
    | 1 << 1 // POSIX_LOCKS
    | 1 << 3 // ATOMIC_O_TRUNC
    | 1 << 5 // BIG_WRITES
    | 1 << 10 // FLOCK_LOCKS
    | 1 << 12 // AUTO_INVAL_DATA
    | 1 << 13 // DO_READDIRPLUS
    | 1 << 14 // READDIRPLUS_AUTO
    | 1 << 15 // ASYNC_DIO
    | 1 << 18 // PARALLEL_DIROPS
    | 1 << 22 // MAX_PAGES
    | 1 << 23 // CACHE_SYMLINKS
    | 1 << 28 // HANDLE_KILLPRIV_V2
    | 1 << 29; // SETXATTR_EXT
/// `FUSE_SETXATTR_EXT`.
const SETXATTR_EXT: u64 = 1 << 29;

/// Whether a request is answered.
enum Answer {
    /// With what was put into the exchange, so many bytes, or with the body if none were.
    Body,
    Content(usize),
    None,
}

/// The state of one guest's folder.
pub struct Server {
    rights: Rights,
    owners: Owners,
    descriptors: Descriptors,
    /// The one file of a folder that is one file.
    file: Option<OwnedFd>,
    root: Ident,
    nodes: Nodes,
    handles: Table<Handle>,
    lockers: Lockers,
    watches: Watches,
    quota: Quota,
    metrics: Arc<Metrics>,
    ended: bool,
    started: bool,
    xattr_flags: bool,
    request: Vec<u8>,
    body: Body,
    entries: Vec<std::mem::MaybeUninit<u8>>,
}

impl Sight for Nodes {
    fn has(&self, directory: u64, name: &[u8]) -> bool {
        self.dir(directory).is_ok_and(|dir| host::look(&dir.fd, name).is_ok())
    }

    fn is_gone(&self, file: u64) -> bool {
        let stat = self.get(file).and_then(|node| rustix::fs::fstat(&node.fd));
        stat.is_ok_and(|stat| stat.st_nlink == 0)
    }
}

/// Whether the guest holds the file, by whatever.
fn is_held(nodes: &Nodes, handles: &Table<Handle>, ident: Ident) -> bool {
    let is_it = |own: Ident| own == ident || own == ident.other();
    nodes.holds(ident)
        || nodes.holds(ident.other())
        || handles.values().any(|handle| is_it(handle.ident))
}

impl Server {
    /// # Errors
    /// [`FolderError`]: what is to be served is not what it should be.
    pub fn new(folder: Folder) -> Result<Self, FolderError> {
        let broken = |errno: Errno| FolderError::Root(errno.into());
        let Folder { what, rights, owners, limits, descriptors, metrics } = folder;
        let (dir, file) = match what {
            What::Directory(dir) => (dir, None),
            What::File { file, empty } => (empty, Some(file)),
        };
        let kind = |fd: &OwnedFd| -> Result<FileType, FolderError> {
            let stat = rustix::fs::fstat(fd).map_err(broken)?;
            Ok(FileType::from_raw_mode(stat.st_mode))
        };
        if kind(&dir)? != FileType::Directory {
            return Err(FolderError::NotADirectory);
        }
        if file.as_ref().map(kind).transpose()?.is_some_and(|kind| kind != FileType::RegularFile) {
            return Err(FolderError::NotAFile);
        }
        if !host::is_open(file.as_ref().unwrap_or(&dir)).map_err(broken)? {
            return Err(FolderError::NotOfFiles("the folder's file system"));
        }
        let dir = descriptors.hold(&dir).map_err(broken)?;
        let stat = rustix::fs::fstat(&dir).map_err(broken)?;
        let root = Ident::of(&stat);
        crate::sys::lower_group_bit();
        Ok(Self {
            rights,
            owners,
            descriptors,
            file,
            root,
            nodes: Nodes::new(Node::new(dir, &stat), &limits).map_err(broken)?,
            handles: Table::new(limits.opened_max),
            lockers: Lockers::new(&limits),
            watches: Watches::new(limits.held_max),
            quota: Quota::new(&limits),
            metrics,
            ended: false,
            started: false,
            xattr_flags: false,
            request: Vec::new(),
            body: Body::default(),
            entries: vec![std::mem::MaybeUninit::uninit(); ENTRIES_LEN],
        })
    }

    /// Goes on from what another server has written down in `tally` of the disk that its guest took,
    /// and writes down there what this one's takes. The file is empty at first.
    ///
    /// # Errors
    /// The host's; EINVAL for a file with something else in it.
    pub fn go_on(&mut self, tally: OwnedFd) -> Result<(), Errno> {
        self.quota.go_on(tally)
    }

    /// Ends all access: every file is closed, and every request from now on fails with EACCES.
    pub fn end(&mut self) {
        self.ended = true;
        self.handles.clear();
        self.lockers.clear();
        self.watches.clear();
        self.nodes.forget_all();
        self.quota.settle();
    }

    /// The same at the guest's end, when there is time to look what goes with it: what has no name.
    pub fn finish(&mut self) {
        let Self { handles, nodes, quota, descriptors, .. } = &mut *self;
        let opened = handles.values().map(|handle| (handle.ident, handle.file.as_fd()));
        let known = nodes.held().map(|node| (node.ident, node.fd.as_fd()));
        let mut seen = HashSet::new();
        let is_wanted = quota.is_written_down();
        for (ident, file) in opened.chain(known).filter(|_| is_wanted) {
            if let Ok(stat) = rustix::fs::fstat(file)
                && stat.st_nlink == 0
                && seen.insert(ident)
            {
                quota.gone(&stat, xattr::attribute_bytes(descriptors, file));
            }
        }
        self.end();
    }

    /// Carries out one request of the guest's.
    pub fn serve(&mut self, exchange: &mut dyn Exchange) {
        Metrics::add(&self.metrics.requests, 1);
        let mut head = [0; REQUEST_HEAD_LEN];
        if exchange.take(&mut head) != head.len() {
            return;
        }
        let Ok(head) = Head::parse(&head) else { return };
        self.body.clear();
        let (error, len) = match self.answer(&head, exchange) {
            Ok(Answer::None) => return,
            Ok(Answer::Content(len)) => (0, len),
            Ok(Answer::Body) => match exchange.put(self.body.bytes()) == self.body.len() {
                true => (0, self.body.len()),
                false => (Errno::OVERFLOW.raw_os_error(), 0),
            },
            Err(errno) => (errno.raw_os_error(), 0),
        };
        let mut reply = [0; REPLY_HEAD_LEN];
        reply[..4].copy_from_slice(&((REPLY_HEAD_LEN + len) as u32).to_le_bytes());
        reply[4..8].copy_from_slice(&(-error).to_le_bytes());
        reply[8..].copy_from_slice(&head.unique.to_le_bytes());
        exchange.finish(reply);
    }

    fn answer(&mut self, head: &Head, exchange: &mut dyn Exchange) -> Result<Answer, Errno> {
        let content = if head.opcode == opcode::WRITE { files::WRITE_HEAD_LEN } else { usize::MAX };
        let len = (head.len as usize).saturating_sub(REQUEST_HEAD_LEN).min(exchange.left());
        let len = len.min(content);
        if len > BODY_LEN_MAX {
            return Err(Errno::TOOBIG);
        }
        let mut request = std::mem::take(&mut self.request);
        request.resize(len, 0);
        let taken = exchange.take(&mut request);
        let fields = Fields::new(request.get(..taken).unwrap_or_default());
        let answer = self.admit(head).and_then(|()| self.carry_out(head, fields, exchange));
        self.request = request;
        match head.opcode {
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Ok(Answer::None),
            _ => answer,
        }
    }

    /// What holds for every request.
    fn admit(&mut self, head: &Head) -> Result<(), Errno> {
        if self.ended || self.rights == Rights::default() {
            return Err(self.deny(Errno::ACCESS));
        }
        if !self.started && head.opcode != opcode::INIT {
            return Err(self.deny(Errno::PROTO));
        }
        let changes = matches!(
            head.opcode,
            opcode::SETATTR
                | opcode::SYMLINK
                | opcode::MKNOD
                | opcode::MKDIR
                | opcode::UNLINK
                | opcode::RMDIR
                | opcode::RENAME
                | opcode::RENAME2
                | opcode::LINK
                | opcode::WRITE
                | opcode::SETXATTR
                | opcode::REMOVEXATTR
                | opcode::CREATE
                | opcode::TMPFILE
                | opcode::FALLOCATE
                | opcode::COPY_FILE_RANGE
                | opcode::COPY_FILE_RANGE_64
        );
        let reads = matches!(
            head.opcode,
            opcode::READ
                | opcode::READDIR
                | opcode::READDIRPLUS
                | opcode::READLINK
                | opcode::WATCH
                | opcode::EVENTS
        );
        if changes && !self.rights.write {
            return Err(self.deny(Errno::ROFS));
        }
        if reads && !self.rights.read {
            return Err(self.deny(Errno::ACCESS));
        }
        Ok(())
    }

    fn carry_out(
        &mut self,
        head: &Head,
        mut fields: Fields<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Answer, Errno> {
        let (node, fields) = (head.node, &mut fields);
        self.nodes.begin();
        if !matches!(head.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT) {
            self.nodes.wake(node)?;
        }
        match head.opcode {
            opcode::READ => return self.read(fields, exchange).map(Answer::Content),
            opcode::WRITE => self.write(fields, exchange),
            opcode::READDIR => self.readdir(node, fields, exchange.room(), false),
            opcode::READDIRPLUS => self.readdir(node, fields, exchange.room(), true),
            opcode::INIT => self.init(fields),
            opcode::LOOKUP => self.lookup(node, fields.text()?),
            opcode::FORGET => self.forget(node, fields.u64()?),
            opcode::BATCH_FORGET => self.batch_forget(fields),
            opcode::GETATTR => self.getattr(node, fields),
            opcode::SETATTR => self.setattr(node, fields),
            opcode::READLINK => self.readlink(node),
            opcode::SYMLINK => self.symlink(head, fields),
            opcode::MKNOD => self.mknod(head, fields),
            opcode::MKDIR => self.mkdir(head, fields),
            opcode::UNLINK => self.unlink(node, fields.text()?, false),
            opcode::RMDIR => self.unlink(node, fields.text()?, true),
            opcode::RENAME => self.rename(node, fields, false),
            opcode::RENAME2 => self.rename(node, fields, true),
            opcode::LINK => self.link(node, fields),
            opcode::OPEN => self.open(node, fields),
            opcode::OPENDIR => self.opendir(node),
            opcode::CREATE => self.create(head, fields, false),
            opcode::TMPFILE => self.create(head, fields, true),
            opcode::STATFS => self.statfs(node),
            opcode::RELEASE | opcode::RELEASEDIR => self.release(fields.u64()?),
            opcode::FSYNC | opcode::FSYNCDIR => self.fsync(fields),
            opcode::FLUSH => self.flush(node, fields),
            opcode::FALLOCATE => self.fallocate(fields),
            opcode::LSEEK => self.lseek(fields),
            opcode::COPY_FILE_RANGE => self.copy_range(fields, false),
            opcode::COPY_FILE_RANGE_64 => self.copy_range(fields, true),
            opcode::SETXATTR => self.setxattr(node, fields),
            opcode::GETXATTR => self.getxattr(node, fields),
            opcode::LISTXATTR => self.listxattr(node, fields),
            opcode::REMOVEXATTR => self.removexattr(node, fields),
            opcode::GETLK => self.getlk(node, fields),
            opcode::SETLK | opcode::SETLKW => self.setlk(node, fields),
            opcode::WATCH => self.watch(node, fields.u64()?),
            opcode::EVENTS => {
                let Self { nodes, watches, body, .. } = self;
                watches.tell(nodes, body, exchange.room());
                Ok(())
            }
            opcode::INTERRUPT | opcode::DESTROY => Ok(()),
            // The guest asks for no more of them.
            opcode::IOCTL => Err(Errno::NOSYS),
            _ => Err(Errno::NOSYS),
        }?;
        Ok(Answer::Body)
    }

    /// `struct fuse_init_in` and `struct fuse_init_out`.
    fn init(&mut self, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let (major, minor) = (fields.u32()?, fields.u32()?);
        if major != MAJOR || minor < MINOR_MIN {
            return Err(Errno::PROTO);
        }
        let (readahead, low) = (fields.u32()?, fields.u32()?);
        let agreed = u64::from(low) & WANTED;
        self.started = true;
        self.xattr_flags = agreed & SETXATTR_EXT != 0;
        self.body.u32(MAJOR);
        self.body.u32(MINOR);
        self.body.u32(readahead);
        self.body.u32(agreed as u32);
        // Requests in the background at once, and from how many on that is many.
        self.body.u16(64);
        self.body.u16(48);
        self.body.u32(CONTENT_LEN_MAX);
        // Nanoseconds.
        self.body.u32(1);
        self.body.u16((CONTENT_LEN_MAX / 4096) as u16);
        self.body.zeros(2 + 4 + 4 + 24);
        Ok(())
    }

    /// Counts a refusal of the folder's own.
    fn deny(&self, errno: Errno) -> Errno {
        Metrics::add(&self.metrics.denials, 1);
        errno
    }

    /// A name of one component, which is not one of ours.
    fn name<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], Errno> {
        host::name(bytes).map_err(|errno| match errno {
            Errno::ACCESS => self.deny(errno),
            errno => errno,
        })
    }

    /// A folder that is one file has no other names, and none come or go.
    fn check_tree(&self) -> Result<(), Errno> {
        if self.file.is_some() { Err(self.deny(Errno::PERM)) } else { Ok(()) }
    }

    fn owner(&self, held: impl AsFd, stat: &Stat) -> Owner {
        self.owners.of(&self.descriptors, held, stat)
    }

    /// Opens a file that is held, if it is one that may be.
    fn open_node(&self, node: &Node, flags: OFlags) -> Result<OwnedFd, Errno> {
        match node.kind {
            FileType::RegularFile | FileType::Directory => self.descriptors.open(&node.fd, flags),
            FileType::Symlink => Err(Errno::LOOP),
            // Opening one may wait, or act.
            _ => Err(self.deny(Errno::ACCESS)),
        }
    }

    /// The guest has seen the file's content as it is at `stat`, or will.
    fn note_content(&mut self, number: u64, stat: &Stat) {
        if let Ok(node) = self.nodes.get_mut(number) {
            node.cached = Some(Content::of(stat));
        }
    }

    /// The node behind `held`, which the guest is told of, and which is in a directory under a name
    /// if it is in one.
    fn known(
        &mut self,
        held: OwnedFd,
        stat: &Stat,
        place: Option<(u64, &[u8])>,
    ) -> Result<u64, Errno> {
        self.nodes.add(Node::new(held, stat), place)
    }

    fn lookup(&mut self, dir: u64, name: &[u8]) -> Result<(), Errno> {
        match self.find(dir, name) {
            Ok((number, stat)) => self.put_entry(number, &stat),
            // Known not to be there, for as long as any name is known.
            Err(Errno::NOENT) => {
                self.body.u64(0);
                self.body.u64(0);
                self.put_valid_entry();
                self.body.zeros(attr::ATTR_LEN);
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    /// The file of that name in `dir`, which the guest is told of.
    fn find(&mut self, dir: u64, name: &[u8]) -> Result<(u64, Stat), Errno> {
        let name = self.name(name)?;
        if let Some(file) = &self.file {
            if (dir, name) != (ROOT, FILE_NAME.as_bytes()) {
                return Err(Errno::NOENT);
            }
            let (held, stat) = (self.descriptors.hold(file)?, rustix::fs::fstat(file)?);
            return Ok((self.known(held, &stat, None)?, stat));
        }
        let parent = self.nodes.dir(dir)?;
        let (stat, above) = (host::look(&parent.fd, name)?, parent.ident);
        // What is held cannot have become another file with the same numbers. Of a file that is
        // mounted here it is not known yet whether it may be written here.
        let ident = Ident { is_fixed: above.is_fixed, ..Ident::of(&stat) };
        if stat.st_dev == above.dev
            && let Some(number) = self.nodes.find(ident, Some((dir, name)))
        {
            return Ok((number, stat));
        }
        let held = host::hold(&self.nodes.dir(dir)?.fd, name)?;
        let stat = rustix::fs::fstat(&held)?;
        let ident = Ident::of_found(&held, &stat, above)?;
        let mut node = Node::new(held, &stat);
        node.ident = ident;
        Ok((self.nodes.add(node, Some((dir, name)))?, stat))
    }

    /// From now on the guest may hear what others do to the file, which stays held.
    fn watch(&mut self, number: u64, flags: u64) -> Result<(), Errno> {
        let Self { nodes, watches, descriptors, .. } = self;
        let node = nodes.get_mut(number)?;
        match node.kind {
            FileType::RegularFile | FileType::Directory => {}
            _ => return Ok(()),
        }
        if watches.add(descriptors, number, &node.fd, node.is_dir(), flags)? {
            node.opens += 1;
        }
        Ok(())
    }

    fn forget(&mut self, number: u64, count: u64) -> Result<(), Errno> {
        match self.nodes.forget(number, count) {
            Forgotten::No => {}
            Forgotten::Parked => self.lockers.forget(number),
            Forgotten::LetGo(node) => {
                self.lockers.forget(number);
                self.watches.forget(&self.descriptors, number, &node.fd, node.is_dir());
                self.let_go(&node.fd, node.ident);
            }
        }
        Ok(())
    }

    /// The guest holds `file` one time less. Once it holds it no more, and that has no name, it is
    /// gone, and so is what it takes of the disk.
    fn let_go(&mut self, file: impl AsFd, ident: Ident) {
        let Ok(stat) = rustix::fs::fstat(file.as_fd()) else { return };
        if stat.st_nlink == 0 && !is_held(&self.nodes, &self.handles, ident) {
            self.quota.gone(&stat, xattr::attribute_bytes(&self.descriptors, file));
        }
    }

    fn batch_forget(&mut self, fields: &mut Fields<'_>) -> Result<(), Errno> {
        let count = fields.u32()?;
        fields.skip(4)?;
        for _ in 0..count {
            let (number, lookups) = (fields.u64()?, fields.u64()?);
            self.forget(number, lookups)?;
        }
        Ok(())
    }
}
