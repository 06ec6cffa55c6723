//! A FUSE client for the tests: one request, one answer.
#![allow(dead_code)]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use exocell_folders::{
    Descriptors, Errno, Exchange, Folder, Limits, Metrics, Owners, REPLY_HEAD_LEN, Rights, Server,
    What,
};

pub const ROOT: u64 = 1;

/// Answer body, or the error.
pub type Answer = Result<Vec<u8>, Errno>;

/// A request and its answer in memory.
pub struct Memory {
    request: Vec<u8>,
    at: usize,
    body: Vec<u8>,
    room: usize,
    pub head: Option<[u8; REPLY_HEAD_LEN]>,
}

impl Memory {
    pub fn new(request: Vec<u8>, room: usize) -> Self {
        Self { request, at: 0, body: Vec::new(), room, head: None }
    }

    /// The answer as it is sent, if one came.
    pub fn reply(self) -> Option<Vec<u8>> {
        let head = self.head?;
        let len = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize - head.len();
        Some([&head[..], &self.body[..len]].concat())
    }

    /// The answer, if one came.
    pub fn answer(self) -> Option<Answer> {
        let head = self.head?;
        let error = i32::from_le_bytes(head[4..8].try_into().unwrap());
        let len = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        assert!(len <= REPLY_HEAD_LEN + self.body.len(), "it tells more than there is");
        Some(match error {
            0 => Ok(self.body),
            error => Err(Errno::from_raw_os_error(-error)),
        })
    }
}

impl Exchange for Memory {
    fn left(&self) -> usize {
        self.request.len() - self.at
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.left());
        into[..count].copy_from_slice(&self.request[self.at..self.at + count]);
        self.at += count;
        count
    }

    fn take_to(&mut self, file: BorrowedFd<'_>, offset: u64, count: usize) -> Result<usize, Errno> {
        let count = count.min(self.left());
        let done = rustix::io::pwrite(file, &self.request[self.at..self.at + count], offset)?;
        self.at += count;
        Ok(done)
    }

    fn room(&self) -> usize {
        self.room - self.body.len()
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.room());
        self.body.extend_from_slice(&bytes[..count]);
        count
    }

    fn put_from(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        count: usize,
    ) -> Result<usize, Errno> {
        let mut bytes = vec![0; count.min(self.room())];
        let done = rustix::io::pread(file, &mut bytes, offset)?;
        self.body.extend_from_slice(&bytes[..done]);
        Ok(done)
    }

    fn finish(&mut self, head: [u8; REPLY_HEAD_LEN]) {
        self.head = Some(head);
    }
}

/// The fields of a request, appended one by one.
#[derive(Default, Clone)]
pub struct Msg(pub Vec<u8>);

impl Msg {
    pub fn new() -> Self {
        Self::default()
    }
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    pub fn s(mut self, value: impl AsRef<[u8]>) -> Self {
        self.0.extend(value.as_ref());
        self.0.push(0);
        self
    }
    pub fn bytes(mut self, value: &[u8]) -> Self {
        self.0.extend(value);
        self
    }
}

/// What a lookup tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub node: u64,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

impl Entry {
    pub fn parse(bytes: &[u8]) -> Self {
        Self { node: u64_at(bytes, 0), ..Self::of_attr(&bytes[40..]) }
    }

    pub fn of_attr(attr: &[u8]) -> Self {
        Self {
            node: 0,
            size: u64_at(attr, 8),
            mode: u32_at(attr, 60),
            uid: u32_at(attr, 68),
            gid: u32_at(attr, 72),
        }
    }
}

/// A served folder.
pub struct Guest {
    pub server: Server,
    pub metrics: Arc<Metrics>,
    pub uid: u32,
    pub gid: u32,
}

/// Serves `dir` to a guest that has greeted it.
pub fn mount(dir: &Path, rights: Rights) -> Guest {
    let mut guest = start(dir, rights, Limits::default());
    guest.init().unwrap();
    guest
}

/// Serves `dir` without speaking to it yet.
pub fn start(dir: &Path, rights: Rights, limits: Limits) -> Guest {
    start_what(What::Directory(File::open(dir).unwrap().into()), rights, limits)
}

pub fn start_what(what: What, rights: Rights, limits: Limits) -> Guest {
    start_for(what, rights, limits, Owners::Host)
}

pub fn start_for(what: What, rights: Rights, limits: Limits, owners: Owners) -> Guest {
    let metrics = Arc::<Metrics>::default();
    let folder = Folder {
        what,
        rights,
        owners,
        limits,
        descriptors: Descriptors::of_host().unwrap(),
        metrics: metrics.clone(),
    };
    let server = Server::new(folder).unwrap();
    // As whoever runs the tests.
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Guest { server, metrics, uid, gid }
}

impl Guest {
    /// The bytes of a request.
    pub fn request(&self, opcode: u32, node: u64, body: &Msg) -> Vec<u8> {
        let len = 40 + body.0.len() as u32;
        let head = Msg::new().u32(len).u32(opcode).u64(7).u64(node);
        head.u32(self.uid).u32(self.gid).u32(1).u32(0).bytes(&body.0).0
    }

    pub fn raw(&mut self, request: Vec<u8>, room: usize) -> Option<Answer> {
        let mut memory = Memory::new(request, room);
        self.server.serve(&mut memory);
        memory.answer()
    }

    pub fn ask(&mut self, opcode: u32, node: u64, body: Msg) -> Answer {
        let request = self.request(opcode, node, &body);
        self.raw(request, 1 << 20).expect("an answer")
    }

    pub fn init(&mut self) -> Answer {
        self.ask(26, 0, Msg::new().u32(7).u32(45).u32(1 << 17).u32(u32::MAX).u32(0))
    }

    pub fn lookup(&mut self, dir: u64, name: impl AsRef<[u8]>) -> Result<Entry, Errno> {
        let entry = Entry::parse(&self.ask(1, dir, Msg::new().s(name))?);
        if entry.node == 0 { Err(Errno::NOENT) } else { Ok(entry) }
    }

    /// Looks a path up from the root.
    pub fn find(&mut self, path: &str) -> Result<Entry, Errno> {
        let mut entry = Entry { node: ROOT, size: 0, mode: 0, uid: 0, gid: 0 };
        for name in path.split('/') {
            entry = self.lookup(entry.node, name)?;
        }
        Ok(entry)
    }

    pub fn getattr(&mut self, node: u64) -> Result<Entry, Errno> {
        let answer = self.ask(3, node, Msg::new().u32(0).u32(0).u64(0))?;
        Ok(Entry { node, ..Entry::of_attr(&answer[16..]) })
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Result<u64, Errno> {
        Ok(u64_at(&self.ask(14, node, Msg::new().u32(flags as u32).u32(0))?, 0))
    }

    pub fn opendir(&mut self, node: u64) -> Result<u64, Errno> {
        Ok(u64_at(&self.ask(27, node, Msg::new().u32(0).u32(0))?, 0))
    }

    pub fn read(&mut self, handle: u64, offset: u64, size: u32) -> Answer {
        let body = Msg::new().u64(handle).u64(offset).u32(size).u32(0).u64(0).u32(0).u32(0);
        self.ask(15, 0, body)
    }

    pub fn write(&mut self, handle: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        let body = Msg::new().u64(handle).u64(offset).u32(data.len() as u32).u32(0).u64(0);
        Ok(u32_at(&self.ask(16, 0, body.u32(0).u32(0).bytes(data))?, 0))
    }

    pub fn create(
        &mut self,
        dir: u64,
        name: &str,
        flags: i32,
        mode: u32,
    ) -> Result<(Entry, u64), Errno> {
        let body = Msg::new().u32(flags as u32).u32(mode).u32(0).u32(0).s(name);
        let answer = self.ask(35, dir, body)?;
        Ok((Entry::parse(&answer), u64_at(&answer, 128)))
    }

    pub fn release(&mut self, handle: u64) -> Answer {
        self.ask(18, 0, Msg::new().u64(handle).u32(0).u32(0).u64(0))
    }

    /// `valid` names which of mode, owner, group and size are set.
    /// Forgets all lookups of it; there is no answer.
    pub fn forget(&mut self, node: u64) {
        let request = self.request(2, node, &Msg::new().u64(u64::MAX));
        assert!(self.raw(request, 4096).is_none());
    }

    pub fn setattr(
        &mut self,
        node: u64,
        valid: u32,
        (mode, uid, gid): (u32, u32, u32),
        size: u64,
    ) -> Result<Entry, Errno> {
        let body = Msg::new().u32(valid).u32(0).u64(0).u64(size).u64(0).u64(0).u64(0).u64(0);
        let body = body.u32(0).u32(0).u32(0).u32(mode).u32(0).u32(uid).u32(gid).u32(0);
        Ok(Entry::of_attr(&self.ask(4, node, body)?[16..]))
    }

    pub fn names(&mut self, dir: u64, plus: bool) -> Result<Vec<String>, Errno> {
        let handle = self.opendir(dir)?;
        let (mut names, mut offset) = (Vec::new(), 0);
        loop {
            let body = Msg::new().u64(handle).u64(offset).u32(4096).u32(0).u64(0).u32(0).u32(0);
            let answer = self.ask(if plus { 44 } else { 28 }, dir, body)?;
            if answer.is_empty() {
                self.ask(29, dir, Msg::new().u64(handle).u32(0).u32(0).u64(0))?;
                return Ok(names);
            }
            let mut rest = &answer[..];
            while !rest.is_empty() {
                let entry = &rest[if plus { 128 } else { 0 }..];
                let len = u32_at(entry, 16) as usize;
                offset = u64_at(entry, 8);
                names.push(String::from_utf8_lossy(&entry[24..24 + len]).into_owned());
                let whole = (24 + len + if plus { 128 } else { 0 }).next_multiple_of(8);
                rest = &rest[whole..];
            }
        }
    }

    pub fn denials(&self) -> u64 {
        self.metrics.denials.load(Ordering::Relaxed)
    }
}

/// Whether two descriptors are the same file: for holds.
pub fn is_same(one: impl AsFd, other: impl AsFd) -> bool {
    let stat = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap();
    let (one, other) = (stat(one.as_fd()), stat(other.as_fd()));
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}
