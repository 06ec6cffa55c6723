//! The requests a guest may send, parsed from one message each.
//! Field orders are those of Linux `net/9p/client.c`.

use crate::FolderError;
use crate::wire::Fields;

/// The most names one walk may hold (`P9_MAXWELEM`).
pub const WALK_MAX: usize = 16;

/// `T` message numbers of 9P2000.L; the reply to each is one higher.
pub mod kind {
    pub const RLERROR: u8 = 7;
    pub const STATFS: u8 = 8;
    pub const LOPEN: u8 = 12;
    pub const LCREATE: u8 = 14;
    pub const SYMLINK: u8 = 16;
    pub const MKNOD: u8 = 18;
    pub const RENAME: u8 = 20;
    pub const READLINK: u8 = 22;
    pub const GETATTR: u8 = 24;
    pub const SETATTR: u8 = 26;
    pub const XATTRWALK: u8 = 30;
    pub const XATTRCREATE: u8 = 32;
    pub const READDIR: u8 = 40;
    pub const FSYNC: u8 = 50;
    pub const LOCK: u8 = 52;
    pub const GETLOCK: u8 = 54;
    pub const LINK: u8 = 70;
    pub const MKDIR: u8 = 72;
    pub const RENAMEAT: u8 = 74;
    pub const UNLINKAT: u8 = 76;
    pub const VERSION: u8 = 100;
    pub const AUTH: u8 = 102;
    pub const ATTACH: u8 = 104;
    pub const FLUSH: u8 = 108;
    pub const WALK: u8 = 110;
    pub const READ: u8 = 116;
    pub const WRITE: u8 = 118;
    pub const CLUNK: u8 = 120;
    pub const REMOVE: u8 = 122;
}

/// One request; byte strings borrow from the message.
#[derive(Debug)]
pub enum Request<'a> {
    Version {
        msize: u32,
        version: &'a [u8],
    },
    Auth,
    Attach {
        fid: u32,
        tree: &'a [u8],
    },
    Flush,
    Walk {
        fid: u32,
        newfid: u32,
        names: Vec<&'a [u8]>,
    },
    Getattr {
        fid: u32,
    },
    Setattr {
        fid: u32,
        change: Change,
    },
    Statfs {
        fid: u32,
    },
    Lopen {
        fid: u32,
        flags: u32,
    },
    Lcreate {
        dir: u32,
        name: &'a [u8],
        flags: u32,
        mode: u32,
    },
    Read {
        fid: u32,
        offset: u64,
        count: u32,
    },
    Write {
        fid: u32,
        offset: u64,
        data: &'a [u8],
    },
    Readdir {
        fid: u32,
        offset: u64,
        count: u32,
    },
    Readlink {
        fid: u32,
    },
    Symlink {
        dir: u32,
        name: &'a [u8],
        target: &'a [u8],
    },
    Mkdir {
        dir: u32,
        name: &'a [u8],
        mode: u32,
    },
    Mknod {
        dir: u32,
        name: &'a [u8],
        mode: u32,
    },
    Link {
        dir: u32,
        fid: u32,
        name: &'a [u8],
    },
    Rename {
        fid: u32,
        dir: u32,
        name: &'a [u8],
    },
    Renameat {
        dir: u32,
        name: &'a [u8],
        new_dir: u32,
        new_name: &'a [u8],
    },
    Unlinkat {
        dir: u32,
        name: &'a [u8],
        flags: u32,
    },
    Fsync {
        fid: u32,
        data_only: bool,
    },
    Lock {
        fid: u32,
    },
    Getlock {
        fid: u32,
        range: LockRange<'a>,
    },
    Clunk {
        fid: u32,
    },
    Remove {
        fid: u32,
    },
    /// Extended attributes, which a folder does not have.
    Xattr,
    /// A message number that 9P2000.L does not define.
    Unknown,
}

/// What a Tsetattr changes: the fields whose bit is set in `valid`.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub valid: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub atime: (u64, u64),
    pub mtime: (u64, u64),
}

/// The byte range a Tgetlock asks about; it is echoed as unlocked.
#[derive(Debug)]
pub struct LockRange<'a> {
    pub start: u64,
    pub len: u64,
    pub pid: u32,
    pub client: &'a [u8],
}

impl<'a> Request<'a> {
    /// Parses the body of a message of the given number.
    ///
    /// # Errors
    /// [`FolderError::Malformed`] names the first field that does not hold.
    pub fn parse(number: u8, body: &'a [u8]) -> Result<Self, FolderError> {
        let Some(name) = message_name(number) else {
            return Ok(Self::Unknown);
        };
        let mut fields = Fields::new(name, body);
        let request = match number {
            kind::VERSION | kind::AUTH | kind::ATTACH | kind::FLUSH => session(number, &mut fields),
            kind::LOPEN | kind::LCREATE | kind::READ | kind::WRITE | kind::READDIR => {
                file_io(number, &mut fields)
            }
            kind::SETATTR | kind::XATTRWALK | kind::XATTRCREATE | kind::LOCK | kind::GETLOCK => {
                attributes(number, &mut fields)
            }
            kind::WALK => walk(&mut fields),
            kind::STATFS..=kind::UNLINKAT | kind::CLUNK | kind::REMOVE => tree(number, &mut fields),
            _ => Ok(Self::Unknown),
        }?;
        fields.end().map(|()| request)
    }
}

type Parsed<'a> = Result<Request<'a>, FolderError>;

fn session<'a>(number: u8, f: &mut Fields<'a>) -> Parsed<'a> {
    Ok(match number {
        kind::VERSION => Request::Version { msize: f.u32("msize")?, version: f.string("version")? },
        kind::AUTH => {
            f.u32("afid")?;
            f.string("uname")?;
            f.string("aname")?;
            f.u32("n_uname")?;
            Request::Auth
        }
        kind::ATTACH => {
            let fid = f.u32("fid")?;
            f.u32("afid")?;
            f.string("uname")?;
            let tree = f.string("aname")?;
            f.u32("n_uname")?;
            Request::Attach { fid, tree }
        }
        _ => {
            f.u16("oldtag")?;
            Request::Flush
        }
    })
}

fn walk<'a>(f: &mut Fields<'a>) -> Parsed<'a> {
    let fid = f.u32("fid")?;
    let newfid = f.u32("newfid")?;
    let count = usize::from(f.u16("nwname")?);
    if count > WALK_MAX {
        return Err(f.malformed("nwname"));
    }
    let names = (0..count).map(|_| f.string("wname")).collect::<Result<_, _>>()?;
    Ok(Request::Walk { fid, newfid, names })
}

fn file_io<'a>(number: u8, f: &mut Fields<'a>) -> Parsed<'a> {
    let fid = f.u32("fid")?;
    Ok(match number {
        kind::LOPEN => Request::Lopen { fid, flags: f.u32("flags")? },
        kind::LCREATE => {
            let (name, flags, mode) = (f.string("name")?, f.u32("flags")?, f.u32("mode")?);
            f.u32("gid")?;
            Request::Lcreate { dir: fid, name, flags, mode }
        }
        kind::READ => Request::Read { fid, offset: f.u64("offset")?, count: f.u32("count")? },
        kind::READDIR => Request::Readdir { fid, offset: f.u64("offset")?, count: f.u32("count")? },
        _ => {
            let offset = f.u64("offset")?;
            let count = f.u32("count")?;
            Request::Write { fid, offset, data: f.bytes(count as usize, "count")? }
        }
    })
}

fn attributes<'a>(number: u8, f: &mut Fields<'a>) -> Parsed<'a> {
    let fid = f.u32("fid")?;
    Ok(match number {
        kind::SETATTR => Request::Setattr { fid, change: change(f)? },
        kind::XATTRWALK => {
            f.u32("newfid")?;
            f.string("name")?;
            Request::Xattr
        }
        kind::XATTRCREATE => {
            f.string("name")?;
            f.u64("attr_size")?;
            f.u32("flags")?;
            Request::Xattr
        }
        kind::LOCK => {
            f.u8("type")?;
            f.u32("flags")?;
            lock_range(f)?;
            Request::Lock { fid }
        }
        _ => {
            f.u8("type")?;
            Request::Getlock { fid, range: lock_range(f)? }
        }
    })
}

fn change(f: &mut Fields<'_>) -> Result<Change, FolderError> {
    Ok(Change {
        valid: f.u32("valid")?,
        mode: f.u32("mode")?,
        uid: f.u32("uid")?,
        gid: f.u32("gid")?,
        size: f.u64("size")?,
        atime: (f.u64("atime_sec")?, f.u64("atime_nsec")?),
        mtime: (f.u64("mtime_sec")?, f.u64("mtime_nsec")?),
    })
}

fn lock_range<'a>(f: &mut Fields<'a>) -> Result<LockRange<'a>, FolderError> {
    Ok(LockRange {
        start: f.u64("start")?,
        len: f.u64("length")?,
        pid: f.u32("proc_id")?,
        client: f.string("client_id")?,
    })
}

fn tree<'a>(number: u8, f: &mut Fields<'a>) -> Parsed<'a> {
    let fid = f.u32("fid")?;
    Ok(match number {
        kind::STATFS => Request::Statfs { fid },
        kind::GETATTR => {
            f.u64("request_mask")?;
            Request::Getattr { fid }
        }
        kind::READLINK => Request::Readlink { fid },
        kind::CLUNK => Request::Clunk { fid },
        kind::REMOVE => Request::Remove { fid },
        kind::FSYNC => Request::Fsync { fid, data_only: f.u32("datasync")? != 0 },
        kind::LINK => Request::Link { dir: fid, fid: f.u32("fid")?, name: f.string("name")? },
        kind::RENAME => Request::Rename { fid, dir: f.u32("dfid")?, name: f.string("name")? },
        _ => return named(number, fid, f),
    })
}

/// The requests that begin with a directory and a name in it.
fn named<'a>(number: u8, dir: u32, f: &mut Fields<'a>) -> Parsed<'a> {
    let name = f.string("name")?;
    Ok(match number {
        kind::UNLINKAT => Request::Unlinkat { dir, name, flags: f.u32("flags")? },
        kind::RENAMEAT => {
            let (new_dir, new_name) = (f.u32("newdirfid")?, f.string("newname")?);
            Request::Renameat { dir, name, new_dir, new_name }
        }
        kind::SYMLINK => {
            let target = f.string("symtgt")?;
            f.u32("gid")?;
            Request::Symlink { dir, name, target }
        }
        kind::MKDIR => {
            let mode = f.u32("mode")?;
            f.u32("gid")?;
            Request::Mkdir { dir, name, mode }
        }
        _ => {
            let mode = f.u32("mode")?;
            for field in ["major", "minor", "gid"] {
                f.u32(field)?;
            }
            Request::Mknod { dir, name, mode }
        }
    })
}

/// The name of a request that 9P2000.L defines.
fn message_name(number: u8) -> Option<&'static str> {
    Some(match number {
        kind::STATFS => "Tstatfs",
        kind::LOPEN => "Tlopen",
        kind::LCREATE => "Tlcreate",
        kind::SYMLINK => "Tsymlink",
        kind::MKNOD => "Tmknod",
        kind::RENAME => "Trename",
        kind::READLINK => "Treadlink",
        kind::GETATTR => "Tgetattr",
        kind::SETATTR => "Tsetattr",
        kind::XATTRWALK => "Txattrwalk",
        kind::XATTRCREATE => "Txattrcreate",
        kind::READDIR => "Treaddir",
        kind::FSYNC => "Tfsync",
        kind::LOCK => "Tlock",
        kind::GETLOCK => "Tgetlock",
        kind::LINK => "Tlink",
        kind::MKDIR => "Tmkdir",
        kind::RENAMEAT => "Trenameat",
        kind::UNLINKAT => "Tunlinkat",
        kind::VERSION => "Tversion",
        kind::AUTH => "Tauth",
        kind::ATTACH => "Tattach",
        kind::FLUSH => "Tflush",
        kind::WALK => "Twalk",
        kind::READ => "Tread",
        kind::WRITE => "Twrite",
        kind::CLUNK => "Tclunk",
        kind::REMOVE => "Tremove",
        _ => return None,
    })
}
