//! One connection: the session requests, and the way of every request through
//! revocation and the gate to what carries it out.

mod attr;
mod files;
mod tree;

use std::mem::MaybeUninit;
use std::rc::Rc;
use std::sync::Arc;

use rustix::io::Errno;

use crate::fids::Fids;
use crate::gate;
use crate::host::{self, Name, Node};
use crate::quota::Quota;
use crate::request::Request;
use crate::wire::{Qid, Reply};
use crate::{Folder, FolderError, Live, MSIZE_MAX, MSIZE_MIN, Metrics, Rights};

/// The one version spoken.
const VERSION: &[u8] = b"9P2000.L";

/// Most bytes of directory entries read from the host at once.
const ENTRIES_LEN: usize = 32 * 1024;

/// Why a request was not carried out.
pub enum Failure {
    /// The guest is told and goes on.
    Errno(Errno),
    /// The connection ends.
    Fatal(FolderError),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// The state of one connection.
pub struct Server {
    root: Node,
    rights: Rights,
    live: Live,
    revoked: bool,
    fids: Fids,
    quota: Quota,
    msize_max: u32,
    msize: Option<usize>,
    metrics: Arc<Metrics>,
    entries: Vec<MaybeUninit<u8>>,
}

impl Server {
    /// # Errors
    /// The folder's descriptor is not a directory or not usable.
    pub fn new(folder: Folder) -> Result<Self, FolderError> {
        let root = Node::root(Rc::new(folder.dir), folder.submounts)
            .map_err(|e| FolderError::Root(e.into()))?;
        if !root.is_dir() {
            return Err(FolderError::NotADirectory);
        }
        Ok(Self {
            root,
            rights: folder.rights,
            live: folder.live,
            revoked: false,
            fids: Fids::new(folder.limits.fids_max),
            quota: Quota::new(&folder.limits),
            msize_max: folder.limits.msize_max.clamp(MSIZE_MIN, MSIZE_MAX),
            msize: None,
            metrics: folder.metrics,
            entries: vec![MaybeUninit::uninit(); ENTRIES_LEN],
        })
    }

    /// The agreed size of messages in bytes, once there is one.
    pub fn msize(&self) -> Option<usize> {
        self.msize
    }

    /// Carries out one request and writes the body of its answer.
    pub fn handle(&mut self, request: &Request<'_>, reply: &mut Reply) -> Result<(), Failure> {
        Metrics::add(&self.metrics.requests, 1);
        if self.is_revoked() {
            return match gate::is_release(request) {
                true => Ok(()),
                false => Err(self.deny(Errno::ACCESS).into()),
            };
        }
        if let Err(errno) = gate::check(request, self.rights) {
            self.release_removed(request);
            return Err(self.deny(errno).into());
        }
        self.carry_out(request, reply)
    }

    fn carry_out(&mut self, request: &Request<'_>, reply: &mut Reply) -> Result<(), Failure> {
        match *request {
            Request::Version { msize, version } => return self.version(msize, version, reply),
            Request::Attach { fid, tree } => self.attach(fid, tree, reply),
            Request::Walk { fid, newfid, ref names } => self.walk(fid, newfid, names, reply),
            Request::Flush => Ok(()),
            Request::Clunk { fid } => self.fids.remove(fid).map(drop),
            Request::Getattr { fid } => self.getattr(fid, reply),
            Request::Setattr { fid, ref change } => self.setattr(fid, change),
            Request::Statfs { fid } => self.statfs(fid, reply),
            Request::Lopen { fid, flags } => self.lopen(fid, flags, reply),
            Request::Lcreate { dir, name, flags, mode } => {
                self.lcreate(dir, name, flags, mode, reply)
            }
            Request::Read { fid, offset, count } => self.read(fid, offset, count, reply),
            Request::Write { fid, offset, data } => self.write(fid, offset, data, reply),
            Request::Readdir { fid, offset, count } => self.readdir(fid, offset, count, reply),
            Request::Fsync { fid, data_only } => self.fsync(fid, data_only),
            Request::Readlink { fid } => self.readlink(fid, reply),
            Request::Symlink { dir, name, target } => self.symlink(dir, name, target, reply),
            Request::Mkdir { dir, name, mode } => self.mkdir(dir, name, mode, reply),
            Request::Mknod { dir, name, mode } => self.mknod(dir, name, mode, reply),
            Request::Link { dir, fid, name } => self.link(dir, fid, name),
            Request::Rename { fid, dir, name } => self.rename(fid, dir, name),
            Request::Renameat { dir, name, new_dir, new_name } => {
                self.renameat(dir, name, new_dir, new_name)
            }
            Request::Unlinkat { dir, name, flags } => self.unlinkat(dir, name, flags),
            Request::Remove { fid } => self.remove(fid),
            Request::Lock { fid } => self.lock(fid, reply),
            Request::Getlock { fid, ref range } => self.getlock(fid, range, reply),
            Request::Auth | Request::Xattr | Request::Unknown => Err(Errno::OPNOTSUPP),
        }
        .map_err(Failure::from)
    }

    /// Asks the capability, and closes every file the moment it is gone.
    fn is_revoked(&mut self) -> bool {
        if !self.revoked && !(self.live)() {
            self.revoked = true;
            self.fids.clear();
        }
        self.revoked
    }

    /// A Tremove ends its fid even when it fails (remove(5)).
    fn release_removed(&mut self, request: &Request<'_>) {
        if let Request::Remove { fid } = request {
            let _ = self.fids.remove(*fid);
        }
    }

    /// Counts a refusal of the folder's own.
    fn deny(&self, errno: Errno) -> Errno {
        Metrics::add(&self.metrics.denials, 1);
        errno
    }

    /// Checks a name the guest sent; one that could lead elsewhere is denied.
    fn name<'a>(&self, bytes: &'a [u8]) -> Result<Name<'a>, Errno> {
        Name::new(bytes).map_err(|errno| match errno {
            Errno::ACCESS => self.deny(errno),
            other => other,
        })
    }

    fn version(&mut self, msize: u32, version: &[u8], reply: &mut Reply) -> Result<(), Failure> {
        if msize < MSIZE_MIN {
            let (message, field) = ("Tversion", "msize (under 4096)");
            return Err(Failure::Fatal(FolderError::Malformed { message, field }));
        }
        self.fids.clear();
        let agreed = msize.min(self.msize_max);
        let known = version == VERSION;
        self.msize = known.then_some(agreed as usize);
        reply.u32(agreed);
        reply.string(if known { VERSION } else { b"unknown" });
        Ok(())
    }

    fn attach(&mut self, fid: u32, tree: &[u8], reply: &mut Reply) -> Result<(), Errno> {
        if !matches!(tree, b"" | b"/") {
            return Err(Errno::NOENT);
        }
        let stat = self.root.stat()?;
        self.fids.insert(fid, self.root.clone())?;
        reply.qid(host::qid(&stat, self.root.ident));
        Ok(())
    }

    /// A walk that fails after its first name reports how far it came and
    /// makes no fid (walk(5)).
    fn walk(
        &mut self,
        fid: u32,
        newfid: u32,
        names: &[&[u8]],
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let start = self.fids.get(fid)?;
        if fid == newfid && start.open.is_some() {
            return Err(Errno::INVAL);
        }
        if fid != newfid {
            self.fids.check_free(newfid)?;
        }
        let (node, qids) = self.descend(start.node.clone(), names)?;
        if qids.len() == names.len() {
            if fid == newfid {
                self.fids.remove(fid)?;
            }
            self.fids.insert(newfid, node)?;
        }
        reply.u16(qids.len() as u16);
        qids.into_iter().for_each(|qid| reply.qid(qid));
        Ok(())
    }

    /// Goes down name by name; fails only if the first one does.
    fn descend(&self, start: Node, names: &[&[u8]]) -> Result<(Node, Vec<Qid>), Errno> {
        let mut node = start;
        let mut qids = Vec::with_capacity(names.len());
        for name in names {
            match self.step(&node, name) {
                Ok((child, qid)) => {
                    node = child;
                    qids.push(qid);
                }
                Err(errno) if qids.is_empty() => return Err(errno),
                Err(_) => break,
            }
        }
        Ok((node, qids))
    }

    fn step(&self, dir: &Node, name: &[u8]) -> Result<(Node, Qid), Errno> {
        if !dir.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let (child, stat) = dir.child(self.name(name)?).map_err(|errno| match errno {
            Errno::XDEV => self.deny(Errno::ACCESS),
            other => other,
        })?;
        Ok((child, host::qid(&stat, self.root.ident)))
    }
}
