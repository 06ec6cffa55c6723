//! A 9P2000.L client for the tests: one request, one answer.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use exocell_folders::{Folder, FolderError, Limits, Metrics, Rights, SYSCALLS, serve};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

pub const EPERM: u32 = libc::EPERM as u32;
pub const ENOENT: u32 = libc::ENOENT as u32;
pub const EBADF: u32 = libc::EBADF as u32;
pub const EACCES: u32 = libc::EACCES as u32;
pub const EINVAL: u32 = libc::EINVAL as u32;
pub const ENOTDIR: u32 = libc::ENOTDIR as u32;
pub const ENFILE: u32 = libc::ENFILE as u32;
pub const EROFS: u32 = libc::EROFS as u32;
pub const ELOOP: u32 = libc::ELOOP as u32;
pub const ESTALE: u32 = libc::ESTALE as u32;
pub const EEXIST: u32 = libc::EEXIST as u32;
pub const EISDIR: u32 = libc::EISDIR as u32;
pub const EOPNOTSUPP: u32 = libc::EOPNOTSUPP as u32;
pub const ENAMETOOLONG: u32 = libc::ENAMETOOLONG as u32;

/// Answer body, or the errno of an Rlerror.
pub type Answer = Result<Vec<u8>, u32>;

/// The fields of a request, appended one by one.
#[derive(Default)]
pub struct Msg(pub Vec<u8>);

impl Msg {
    pub fn new() -> Self {
        Self::default()
    }
    pub fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
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
        self = self.u16(value.as_ref().len() as u16);
        self.0.extend(value.as_ref());
        self
    }
    /// The whole message with its head.
    pub fn frame(&self, number: u8, tag: u16) -> Vec<u8> {
        let mut all = (self.0.len() as u32 + 7).to_le_bytes().to_vec();
        all.push(number);
        all.extend(tag.to_le_bytes());
        all.extend(&self.0);
        all
    }
}

/// A served folder and the guest's end of its stream.
pub struct Guest {
    pub stream: UnixStream,
    pub live: Arc<AtomicBool>,
    pub metrics: Arc<Metrics>,
    pub server: Option<JoinHandle<Result<(), FolderError>>>,
}

/// Serves `dir`; fid 0 is attached to its root.
pub fn mount(dir: &Path, rights: Rights) -> Guest {
    let mut guest = start(dir, rights, Limits::default());
    guest.version(65536).unwrap();
    guest.attach(0).unwrap();
    guest
}

/// Serves `dir` without speaking to it yet.
pub fn start(dir: &Path, rights: Rights, limits: Limits) -> Guest {
    let live = Arc::new(AtomicBool::new(true));
    let asked = live.clone();
    let fd = std::fs::File::open(dir).unwrap().into();
    let mut folder = Folder::new(fd, rights, Arc::new(move || asked.load(Ordering::SeqCst)));
    folder.limits = limits;
    start_folder(folder, live)
}

/// Serves `folder`, whose capability is `live`.
pub fn start_folder(folder: Folder, live: Arc<AtomicBool>) -> Guest {
    let (stream, far) = UnixStream::pair().unwrap();
    let metrics = folder.metrics.clone();
    let server = Some(std::thread::spawn(move || {
        filter_calls();
        serve(folder, far)
    }));
    Guest { stream, live, metrics, server }
}

/// Allows the calling thread what a serving thread needs, and what its
/// allocations and its end need; anything else ends the whole test.
fn filter_calls() {
    let of_the_thread = [
        libc::SYS_brk,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_futex,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_exit,
        // The allocator reads overcommit_memory where there is a /proc.
        libc::SYS_read,
        // The standard library's check of a descriptor it closes, in debug builds.
        libc::SYS_fcntl,
    ];
    let calls = SYSCALLS.iter().chain(&of_the_thread);
    let rules = calls.map(|&call| (call, vec![])).collect();
    let (other, listed) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, other, listed, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

impl Guest {
    /// Sends one request and waits for its answer.
    pub fn call(&mut self, number: u8, msg: Msg) -> Answer {
        self.stream.write_all(&msg.frame(number, 7)).unwrap();
        let (kind, body) = self.receive();
        match kind {
            7 => Err(u32::from_le_bytes(body.try_into().unwrap())),
            kind if kind == number + 1 => Ok(body),
            kind => panic!("message {number} was answered by {kind}"),
        }
    }

    pub fn receive(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 7];
        self.stream.read_exact(&mut head).unwrap();
        assert_eq!(u16::from_le_bytes([head[5], head[6]]), 7, "tag");
        let size = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        let mut body = vec![0; size - 7];
        self.stream.read_exact(&mut body).unwrap();
        (head[4], body)
    }

    /// Ends the stream and returns what the server says.
    pub fn end(mut self) -> Result<(), FolderError> {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        self.server.take().unwrap().join().unwrap()
    }

    /// What the server ends with on its own.
    pub fn server_error(mut self) -> String {
        self.server.take().unwrap().join().unwrap().unwrap_err().to_string()
    }

    pub fn version(&mut self, msize: u32) -> Answer {
        self.call(100, Msg::new().u32(msize).s("9P2000.L"))
    }
    pub fn attach(&mut self, fid: u32) -> Answer {
        self.call(104, Msg::new().u32(fid).u32(u32::MAX).s("root").s("").u32(0))
    }
    pub fn walk(&mut self, fid: u32, newfid: u32, names: &[&str]) -> Answer {
        let msg = Msg::new().u32(fid).u32(newfid).u16(names.len() as u16);
        self.call(110, names.iter().fold(msg, |msg, name| msg.s(name)))
    }
    /// Walks from the root and fails unless every name was found.
    pub fn find(&mut self, newfid: u32, path: &str) -> Result<(), u32> {
        let names: Vec<_> = path.split('/').filter(|n| !n.is_empty()).collect();
        let body = self.walk(0, newfid, &names)?;
        let found = u16::from_le_bytes([body[0], body[1]]);
        if usize::from(found) == names.len() { Ok(()) } else { Err(ENOENT) }
    }
    pub fn lopen(&mut self, fid: u32, flags: i32) -> Answer {
        self.call(12, Msg::new().u32(fid).u32(flags as u32))
    }
    pub fn lcreate(&mut self, dir: u32, name: &str, flags: i32, mode: u32) -> Answer {
        self.call(14, Msg::new().u32(dir).s(name).u32(flags as u32).u32(mode).u32(0))
    }
    pub fn read(&mut self, fid: u32, offset: u64, count: u32) -> Answer {
        let body = self.call(116, Msg::new().u32(fid).u64(offset).u32(count))?;
        assert_eq!(u32::from_le_bytes(body[..4].try_into().unwrap()) as usize, body.len() - 4);
        Ok(body[4..].to_vec())
    }
    pub fn write(&mut self, fid: u32, offset: u64, data: &[u8]) -> Answer {
        let mut msg = Msg::new().u32(fid).u64(offset).u32(data.len() as u32);
        msg.0.extend(data);
        self.call(118, msg)
    }
    /// One Treaddir: (name, offset of the next, d_type, qid path).
    pub fn readdir(
        &mut self,
        fid: u32,
        offset: u64,
        count: u32,
    ) -> Result<Vec<(String, u64, u8, u64)>, u32> {
        let body = self.call(40, Msg::new().u32(fid).u64(offset).u32(count))?;
        let (mut rest, mut out) = (&body[4..], Vec::new());
        assert!(rest.len() <= count as usize);
        while !rest.is_empty() {
            let len = usize::from(u16::from_le_bytes([rest[22], rest[23]]));
            let name = String::from_utf8(rest[24..24 + len].to_vec()).unwrap();
            let number = |at: usize| u64::from_le_bytes(rest[at..at + 8].try_into().unwrap());
            out.push((name, number(13), rest[21], number(5)));
            rest = &rest[24 + len..];
        }
        Ok(out)
    }
    /// Every name in an opened directory, in chunks of `count` bytes.
    pub fn list(&mut self, fid: u32, count: u32) -> Vec<String> {
        let (mut offset, mut names) = (0, Vec::new());
        loop {
            let batch = self.readdir(fid, offset, count).unwrap();
            let Some(last) = batch.last() else { break };
            offset = last.1;
            names.extend(batch.into_iter().map(|entry| entry.0));
        }
        names.sort();
        names
    }
    pub fn getattr(&mut self, fid: u32) -> Result<Attr, u32> {
        let body = self.call(24, Msg::new().u32(fid).u64(0x3fff))?;
        assert_eq!(body.len(), 153);
        let u32_at = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
        Ok(Attr {
            valid: u64_at(0),
            qid_kind: body[8],
            qid_path: u64_at(13),
            mode: u32_at(21),
            uid: u32_at(25),
            nlink: u64_at(33),
            size: u64_at(49),
            mtime: (u64_at(89), u64_at(97)),
        })
    }
    pub fn setattr(&mut self, fid: u32, valid: u32, set: Set) -> Answer {
        let msg =
            Msg::new().u32(fid).u32(valid).u32(set.mode).u32(set.uid).u32(set.uid).u64(set.size);
        self.call(26, msg.u64(set.atime.0).u64(set.atime.1).u64(set.mtime.0).u64(set.mtime.1))
    }
    pub fn mkdir(&mut self, dir: u32, name: &str, mode: u32) -> Answer {
        self.call(72, Msg::new().u32(dir).s(name).u32(mode).u32(0))
    }
    pub fn mknod(&mut self, dir: u32, name: &str, mode: u32) -> Answer {
        self.call(18, Msg::new().u32(dir).s(name).u32(mode).u32(1).u32(3).u32(0))
    }
    pub fn symlink(&mut self, dir: u32, name: &str, target: &str) -> Answer {
        self.call(16, Msg::new().u32(dir).s(name).s(target).u32(0))
    }
    pub fn readlink(&mut self, fid: u32) -> Answer {
        self.call(22, Msg::new().u32(fid)).map(|body| body[2..].to_vec())
    }
    pub fn link(&mut self, dir: u32, fid: u32, name: &str) -> Answer {
        self.call(70, Msg::new().u32(dir).u32(fid).s(name))
    }
    pub fn rename(&mut self, fid: u32, dir: u32, name: &str) -> Answer {
        self.call(20, Msg::new().u32(fid).u32(dir).s(name))
    }
    pub fn renameat(&mut self, dir: u32, name: &str, new_dir: u32, new_name: &str) -> Answer {
        self.call(74, Msg::new().u32(dir).s(name).u32(new_dir).s(new_name))
    }
    pub fn unlinkat(&mut self, dir: u32, name: &str, flags: u32) -> Answer {
        self.call(76, Msg::new().u32(dir).s(name).u32(flags))
    }
    pub fn clunk(&mut self, fid: u32) -> Answer {
        self.call(120, Msg::new().u32(fid))
    }
    pub fn remove(&mut self, fid: u32) -> Answer {
        self.call(122, Msg::new().u32(fid))
    }
    pub fn denials(&self) -> u64 {
        self.metrics.denials.load(Ordering::SeqCst)
    }
}

/// The parts of Rgetattr that tests look at.
#[derive(Debug)]
pub struct Attr {
    pub valid: u64,
    pub qid_kind: u8,
    pub qid_path: u64,
    pub mode: u32,
    pub uid: u32,
    pub nlink: u64,
    pub size: u64,
    pub mtime: (u64, u64),
}

/// The values of a Tsetattr.
#[derive(Clone, Copy, Default)]
pub struct Set {
    pub mode: u32,
    pub uid: u32,
    pub size: u64,
    pub atime: (u64, u64),
    pub mtime: (u64, u64),
}
