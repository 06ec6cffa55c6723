//! The system calls that neither rustix nor nix offers.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// A lock of bytes of a file (fcntl(2), "open file description locks").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: i16,
    pub start: i64,
    /// 0: up to the end, however the file grows.
    pub len: i64,
}

/// Sets or gives up a lock without waiting.
///
/// # Errors
/// EAGAIN where another holds one that excludes it.
pub fn set_lock(file: impl AsFd, lock: Lock) -> Result<(), Errno> {
    lock_call(file, libc::F_OFD_SETLK, lock).map(drop)
}

/// The lock that would be in the way, or one of kind `F_UNLCK`.
///
/// # Errors
/// fcntl(2)'s.
pub fn find_lock(file: impl AsFd, lock: Lock) -> Result<Lock, Errno> {
    lock_call(file, libc::F_OFD_GETLK, lock)
}

fn lock_call(file: impl AsFd, call: libc::c_int, lock: Lock) -> Result<Lock, Errno> {
    // SAFETY: all-zero is a valid flock; l_pid has to be 0 for these locks.
    let mut told: libc::flock = unsafe { std::mem::zeroed() };
    told.l_type = lock.kind;
    told.l_whence = libc::SEEK_SET as i16;
    (told.l_start, told.l_len) = (lock.start, lock.len);
    // SAFETY: the structure outlives the call, which writes only there; the descriptor is
    // borrowed for it. Needed because rustix has no locks of this kind.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), call, &raw mut told) } {
        -1 => Err(last_error()),
        _ => Ok(Lock { kind: told.l_type, start: told.l_start, len: told.l_len }),
    }
}

/// fallocate(2) with any mode.
///
/// # Errors
/// The host's.
pub fn allocate(file: impl AsFd, mode: u32, offset: i64, len: i64) -> Result<(), Errno> {
    // SAFETY: the call takes integers and a descriptor that is borrowed for it. Needed because
    // rustix refuses modes that it does not know instead of asking the host.
    let done =
        unsafe { libc::fallocate(file.as_fd().as_raw_fd(), mode.cast_signed(), offset, len) };
    if done == 0 { Ok(()) } else { Err(last_error()) }
}

/// What tells a file of the host from others for good (name_to_handle_at(2)).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileHandle(i32, Box<[u8]>);

impl FileHandle {
    pub fn new(kind: i32, bytes: &[u8]) -> Self {
        Self(kind, bytes.into())
    }
}

/// The handle of `held`.
///
/// # Errors
/// The host's; EOPNOTSUPP where its file system has none.
pub fn file_handle(held: impl AsFd) -> Result<FileHandle, Errno> {
    const BYTES_MAX: usize = 128;
    // One that only tells files apart, where the host knows the difference (Linux 6.5).
    const AT_HANDLE_FID: libc::c_int = 0x200;
    #[repr(C)]
    struct Handle {
        len: u32,
        kind: i32,
        bytes: [u8; BYTES_MAX],
    }
    let take = |flags: libc::c_int| {
        let mut handle = Handle { len: BYTES_MAX as u32, kind: 0, bytes: [0; BYTES_MAX] };
        let mut mount: libc::c_int = 0;
        // SAFETY: handle, which says how long it is, and mount outlive the call, which writes only
        // there; the path is an empty text. Needed because rustix has no word for it.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                held.as_fd().as_raw_fd(),
                c"".as_ptr(),
                &raw mut handle,
                &raw mut mount,
                flags | libc::AT_EMPTY_PATH,
            )
        };
        if done == 0 { Ok(handle) } else { Err(last_error()) }
    };
    let handle = take(AT_HANDLE_FID).or_else(|_| take(0))?;
    let bytes = handle.bytes.get(..handle.len as usize).ok_or(Errno::OVERFLOW)?;
    Ok(FileHandle::new(handle.kind, bytes))
}

/// Who hears what happens to files, by their handles and names (fanotify(7), without privileges).
///
/// # Errors
/// The host's: EPERM before Linux 5.13, EMFILE where its user has too many.
pub fn listener() -> Result<OwnedFd, Errno> {
    let flags = libc::FAN_CLASS_NOTIF
        | libc::FAN_CLOEXEC
        | libc::FAN_NONBLOCK
        | libc::FAN_REPORT_FID
        | libc::FAN_REPORT_DFID_NAME;
    // SAFETY: the call takes integers. Needed because rustix has no word for it.
    let made = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) };
    match made {
        -1 => Err(last_error()),
        // SAFETY: the call has just made it, and it is nobody else's.
        made => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
    }
}

/// Has `listener` hear of the file that `path` leads to from `dir`.
///
/// # Errors
/// The host's.
pub fn listen_to(
    listener: impl AsFd,
    dir: impl AsFd,
    path: &CStr,
    events: u64,
) -> Result<(), Errno> {
    mark(listener, libc::FAN_MARK_ADD, dir, path, events)
}

/// Has it hear of that no more.
///
/// # Errors
/// The host's.
pub fn listen_no_more(
    listener: impl AsFd,
    dir: impl AsFd,
    path: &CStr,
    events: u64,
) -> Result<(), Errno> {
    mark(listener, libc::FAN_MARK_REMOVE, dir, path, events)
}

fn mark(
    listener: impl AsFd,
    what: libc::c_uint,
    dir: impl AsFd,
    path: &CStr,
    events: u64,
) -> Result<(), Errno> {
    let (listener, dir) = (listener.as_fd().as_raw_fd(), dir.as_fd().as_raw_fd());
    // SAFETY: the path is a text that outlives the call, and the descriptors are borrowed for it.
    // Needed because rustix has no word for it.
    let done = unsafe { libc::fanotify_mark(listener, what, events, dir, path.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(last_error()) }
}

/// _LINUX_CAPABILITY_VERSION_3, which has two words of each set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// CAP_FSETID: a file keeps its set-id bits whoever changes it.
const KEEPS_SET_ID: u32 = 1 << 4;

/// Runs `work` while the calling thread may set a directory's group bit for groups that are not
/// its own, if it may have that right at all.
pub fn with_group_bit<T>(work: impl FnOnce() -> T) -> T {
    let raised = change_effective(|effective, permitted| effective | (permitted & KEEPS_SET_ID));
    let done = work();
    if raised {
        change_effective(|effective, _| effective & !KEEPS_SET_ID);
    }
    done
}

/// Gives up, for now, the right to leave set-id bits on files that change.
pub fn lower_group_bit() {
    change_effective(|effective, _| effective & !KEEPS_SET_ID);
}

fn change_effective(change: impl FnOnce(u32, u32) -> u32) -> bool {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    let header = Header { version: CAPABILITY_VERSION, pid: 0 };
    // Effective, permitted, inheritable; then their high words.
    let mut sets = [0_u32; 6];
    // SAFETY: header and sets have the sizes of their version and outlive the call. Needed because
    // rustix has no word for it.
    if unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) } != 0 {
        return false;
    }
    let wanted = change(sets[0], sets[1]);
    if wanted == sets[0] {
        return false;
    }
    sets[0] = wanted;
    // SAFETY: as above; it changes this thread's effective set only.
    unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) == 0 }
}

fn last_error() -> Errno {
    let errno = std::io::Error::last_os_error().raw_os_error();
    errno.map_or(Errno::IO, Errno::from_raw_os_error)
}
