//! What others than the guest do to files that it watches (inotify(7) in the guest).
//!
//! fanotify(7) tells of it. A listener without privileges hears of what it may read, and which
//! changes were its own process's: those are the guest's, whose kernel has told of them itself.
//! The guest asks for events now and then, as long as anybody there watches.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use crate::host::Descriptors;
use crate::sys::{self, FileHandle};
use crate::wire::{Body, Fields};

/// The most files that are watched at once; ENOSPC over it.
const WATCHES_MAX: usize = 16 << 10;
/// Bytes of events that are read from the host at once, and how often while all of them are the
/// guest's own: the host keeps 16,384 events.
const EVENTS_LEN: usize = 4096;
const ROUNDS_MAX: usize = 1024;

/// Events by their bits, which are inotify's too. The host merges those of one name, so they are
/// told in the order that ends as things are.
const CHANGES: [u64; 3] = [libc::FAN_MODIFY, libc::FAN_ATTRIB, libc::FAN_CLOSE_WRITE];
const ENDS: [u64; 3] = [libc::FAN_DELETE, libc::FAN_DELETE_SELF, libc::FAN_MOVE_SELF];
/// What is asked for of each file.
const OF_FILE: u64 = CHANGES[0] | CHANGES[1] | CHANGES[2] | ENDS[1] | ENDS[2];
/// And of a directory, and of what is in it.
const OF_DIRECTORY: u64 = OF_FILE
    | libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_RENAME
    | libc::FAN_ONDIR
    | libc::FAN_EVENT_ON_CHILD;

/// For the guest's kernel: the next entry is the name that this one moves to, or was that.
const PAIRED: u64 = 1;
/// From the guest's kernel: nobody watched before.
const FIRST: u64 = 1;

/// Bytes of `struct fanotify_event_metadata`, and of what precedes the file handle in
/// `struct fanotify_event_info_fid`.
const EVENT_LEN: usize = 24;
const INFO_LEN: usize = 12;

/// Files that are watched.
#[derive(Debug)]
pub struct Watches {
    group: Option<OwnedFd>,
    numbers: HashMap<FileHandle, u64>,
    handles: HashMap<u64, FileHandle>,
    max: usize,
    /// What the host told and the guest did not hear yet, as the guest is told it.
    waiting: Vec<u8>,
}

/// How things are by now: whether a directory has a name, and whether a file has none any more.
pub trait Sight {
    fn has(&self, directory: u64, name: &[u8]) -> bool;
    fn is_gone(&self, file: u64) -> bool;
}

impl Watches {
    /// None, and never more than half of the files that may be held: each of them stays held.
    pub fn new(held_max: usize) -> Self {
        Self {
            group: None,
            numbers: HashMap::new(),
            handles: HashMap::new(),
            max: WATCHES_MAX.min(held_max / 2),
            waiting: Vec::new(),
        }
    }

    /// Watches the file `number`, which is `held`, as `flags` say; whether it was not watched before.
    ///
    /// # Errors
    /// ENOSYS where the host tells of nothing, ENOSPC where too many are watched, and the host's.
    pub fn add(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        held: impl AsFd,
        is_dir: bool,
        flags: u64,
    ) -> Result<bool, Errno> {
        if flags & FIRST != 0 {
            self.skip();
        }
        if self.handles.contains_key(&number) {
            return Ok(false);
        }
        if self.handles.len() >= self.max {
            return Err(Errno::NOSPC);
        }
        let group = match self.group.take() {
            Some(group) => group,
            None => sys::listener().map_err(|_| Errno::NOSYS)?,
        };
        let group = self.group.insert(group);
        let handle = sys::file_handle(&held)?;
        sys::listen_to(&*group, descriptors.dir(), &descriptors.path(&held), events(is_dir))?;
        self.numbers.insert(handle.clone(), number);
        self.handles.insert(number, handle);
        Ok(true)
    }

    /// The guest has forgotten `number`.
    pub fn forget(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        held: impl AsFd,
        is_dir: bool,
    ) {
        let Some(handle) = self.handles.remove(&number) else { return };
        self.numbers.remove(&handle);
        if let Some(group) = &self.group {
            let _ = sys::listen_no_more(
                group,
                descriptors.dir(),
                &descriptors.path(held),
                events(is_dir),
            );
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        (self.group, self.waiting) = (None, Vec::new());
        self.numbers.clear();
        self.handles.clear();
    }

    /// Puts what has happened into `body`, as much as there is `room` for.
    pub fn tell(&mut self, sight: &impl Sight, body: &mut Body, room: usize) {
        for _ in 0..ROUNDS_MAX {
            if !self.waiting.is_empty() || !self.hear(sight) {
                break;
            }
        }
        let mut told = 0;
        while let Some(len) = entry_len(self.waiting.get(told..).unwrap_or_default())
            && told + len <= room
        {
            told += len;
        }
        body.put(self.waiting.get(..told).unwrap_or_default());
        self.waiting.drain(..told);
    }

    /// Drops what has happened.
    fn skip(&mut self) {
        self.waiting.clear();
        let Some(group) = &self.group else { return };
        let mut buffer = [0; EVENTS_LEN];
        for _ in 0..ROUNDS_MAX {
            if rustix::io::read(group, &mut buffer[..]).is_err() {
                break;
            }
        }
    }

    /// Reads events of the host's; whether there were any.
    fn hear(&mut self, sight: &impl Sight) -> bool {
        let Some(group) = &self.group else { return false };
        let mut buffer = [0; EVENTS_LEN];
        let len = rustix::io::read(group, &mut buffer[..]).unwrap_or(0);
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let mut rest = buffer.get(..len).unwrap_or_default();
        while let Ok((event, after)) = Event::parse(rest) {
            if event.pid != own {
                self.note(&event, sight);
            }
            rest = after;
        }
        len > 0
    }

    fn note(&mut self, event: &Event<'_>, sight: &impl Sight) {
        let of_dir = event.mask & libc::FAN_ONDIR;
        let infos = || {
            std::iter::successors(Info::parse(event.infos).ok(), |(_, rest)| Info::parse(rest).ok())
        };
        let known = |info: &Info<'_>| self.numbers.get(&info.handle).copied();
        let mut entries: Vec<(u64, u64, &[u8])> = Vec::new();
        if event.mask & libc::FAN_RENAME != 0 {
            let side = |kind| {
                infos()
                    .map(|(info, _)| info)
                    .find(|info| info.kind == kind)
                    .and_then(|info| Some((known(&info)?, info.name)))
            };
            let (from, to) = (side(INFO_OLD_NAME), side(INFO_NEW_NAME));
            let paired = if from.is_some() && to.is_some() { PAIRED } else { 0 };
            entries.extend(from.map(|(dir, name)| (dir, libc::FAN_MOVED_FROM | paired, name)));
            entries.extend(to.map(|(dir, name)| (dir, libc::FAN_MOVED_TO | paired, name)));
        }
        // The directory comes first. Who watches the file itself hears of it there, too.
        let first = infos().find_map(|(info, _)| Some((known(&info)?, info.name)));
        if let Some((number, name)) = first {
            // A directory itself is told of as what is in it by this name.
            let name = if name == b"." { b"" } else { name };
            let both = libc::FAN_CREATE | libc::FAN_DELETE;
            let ends_there = event.mask & both == both && sight.has(number, name);
            let (before, after) = match ends_there {
                true => (&ENDS[..], &[][..]),
                false => (&[][..], &ENDS[..]),
            };
            let order = [before, &[libc::FAN_CREATE], &CHANGES, after].concat();
            let has = order.into_iter().filter(|bit| event.mask & bit != 0);
            entries.extend(has.map(|bit| (number, bit, name)));
        }
        // A file that lost its last name stays held here, so the host does not say that it ends.
        let ends = infos().filter(|_| event.mask & libc::FAN_ATTRIB != 0);
        let ends = ends.filter_map(|(info, _)| known(&info).filter(|file| sight.is_gone(*file)));
        entries.extend(ends.take(1).map(|file| (file, libc::FAN_DELETE_SELF, &b""[..])));
        for (number, bit, name) in entries {
            put_entry(&mut self.waiting, number, bit | of_dir, name);
        }
    }
}

fn events(is_dir: bool) -> u64 {
    if is_dir { OF_DIRECTORY } else { OF_FILE }
}

/// Number, event and name, as the guest's kernel takes them (patch 0505 of its series).
fn put_entry(waiting: &mut Vec<u8>, number: u64, mask: u64, name: &[u8]) {
    waiting.extend(number.to_le_bytes());
    waiting.extend((mask as u32).to_le_bytes());
    waiting.extend((name.len() as u32).to_le_bytes());
    waiting.extend(name);
    waiting.resize(waiting.len().next_multiple_of(8), 0);
}

/// The bytes of the first entry.
fn entry_len(entries: &[u8]) -> Option<usize> {
    let name = entries.get(12..16)?.try_into().ok().map(u32::from_le_bytes)?;
    Some((16 + name as usize).next_multiple_of(8))
}

/// One event of the host's, with what it tells of files.
struct Event<'a> {
    mask: u64,
    pid: i32,
    infos: &'a [u8],
}

impl<'a> Event<'a> {
    fn parse(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), Errno> {
        let mut fields = Fields::new(bytes);
        let len = fields.u32()? as usize;
        // Version, length of this head.
        fields.skip(4)?;
        let mask = fields.u64()?;
        fields.skip(4)?;
        let pid = fields.u32()?.cast_signed();
        let infos = bytes.get(EVENT_LEN..len).ok_or(Errno::INVAL)?;
        Ok((Self { mask, pid, infos }, bytes.get(len..).unwrap_or_default()))
    }
}

/// `FAN_EVENT_INFO_TYPE_OLD_DFID_NAME` and `FAN_EVENT_INFO_TYPE_NEW_DFID_NAME`.
const INFO_OLD_NAME: u8 = 10;
const INFO_NEW_NAME: u8 = 12;

/// A file, or a name in a directory.
struct Info<'a> {
    kind: u8,
    handle: FileHandle,
    name: &'a [u8],
}

impl<'a> Info<'a> {
    fn parse(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), Errno> {
        let mut fields = Fields::new(bytes);
        let head = fields.u32()?;
        let (info_kind, len) = (head as u8, (head >> 16) as usize);
        let mut fields = Fields::new(bytes.get(INFO_LEN..len).ok_or(Errno::INVAL)?);
        let (handle_len, kind) = (fields.u32()?, fields.u32()?);
        let handle = FileHandle::new(kind.cast_signed(), fields.bytes(handle_len as usize)?);
        // Without a name there are zeros at most.
        let name = fields.text().unwrap_or_default();
        Ok((Self { kind: info_kind, handle, name }, bytes.get(len..).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_are_cut_short_are_none() {
        let mut event = [0; EVENT_LEN + 8];
        event[0] = 200;
        assert!(Event::parse(&event).is_err());
        event[0] = 8;
        assert!(Event::parse(&event).is_err());
        let info = [1, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0, 0];
        assert!(Info::parse(&info).is_err());
        assert!(Info::parse(&[1, 0, 2, 0]).is_err());
    }

    #[test]
    fn entries_are_told_whole() {
        struct Nothing;
        impl Sight for Nothing {
            fn has(&self, _: u64, _: &[u8]) -> bool {
                false
            }
            fn is_gone(&self, _: u64) -> bool {
                false
            }
        }
        let mut watches = Watches::new(8);
        put_entry(&mut watches.waiting, 1, libc::FAN_CREATE, b"first");
        put_entry(&mut watches.waiting, 2, libc::FAN_DELETE, b"");
        let mut body = Body::default();
        watches.tell(&Nothing, &mut body, 30);
        assert_eq!(body.len(), 24);
        watches.tell(&Nothing, &mut body, 100);
        assert_eq!((body.len(), watches.waiting.len()), (40, 0));
    }
}
