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

/// Files that are watched at once; ENOSPC over it.
const WATCHES_MAX: usize = 4096;
/// Bytes of events that are read from the host at once.
const EVENTS_LEN: usize = 4096;

/// Events by their bits, which are inotify's too, in the order in which they are told where the
/// host has merged them.
const TOLD: [u64; 9] = [
    libc::FAN_CREATE,
    libc::FAN_MOVED_FROM,
    libc::FAN_MOVED_TO,
    libc::FAN_MODIFY,
    libc::FAN_ATTRIB,
    libc::FAN_CLOSE_WRITE,
    libc::FAN_DELETE,
    libc::FAN_DELETE_SELF,
    libc::FAN_MOVE_SELF,
];
/// What is asked for: those, of directories and of what is in them too.
const WANTED: u64 = {
    let (mut mask, mut at) = (libc::FAN_ONDIR | libc::FAN_EVENT_ON_CHILD, 0);
    while at < TOLD.len() {
        mask |= TOLD[at];
        at += 1;
    }
    mask
};

/// Bytes of `struct fanotify_event_metadata`, and of what precedes the file handle in
/// `struct fanotify_event_info_fid`.
const EVENT_LEN: usize = 24;
const INFO_LEN: usize = 12;

/// Files that are watched.
#[derive(Debug, Default)]
pub struct Watches {
    group: Option<OwnedFd>,
    numbers: HashMap<FileHandle, u64>,
    handles: HashMap<u64, FileHandle>,
    /// What the host told and the guest did not hear yet, as the guest is told it.
    waiting: Vec<u8>,
}

impl Watches {
    /// Watches the file `number`, which is `held`; whether it was not watched before.
    ///
    /// # Errors
    /// ENOSYS where the host tells of nothing, ENOSPC where too many are watched, and the host's.
    pub fn add(
        &mut self,
        descriptors: &Descriptors,
        number: u64,
        held: impl AsFd,
    ) -> Result<bool, Errno> {
        if self.handles.contains_key(&number) {
            return Ok(false);
        }
        if self.handles.len() >= WATCHES_MAX {
            return Err(Errno::NOSPC);
        }
        let group = match self.group.take() {
            Some(group) => group,
            None => sys::listener().map_err(|_| Errno::NOSYS)?,
        };
        let group = self.group.insert(group);
        let handle = sys::file_handle(&held)?;
        sys::listen_to(&*group, descriptors.dir(), &descriptors.path(&held), WANTED)?;
        self.numbers.insert(handle.clone(), number);
        self.handles.insert(number, handle);
        Ok(true)
    }

    /// The guest has forgotten `number`.
    pub fn forget(&mut self, descriptors: &Descriptors, number: u64, held: impl AsFd) {
        let Some(handle) = self.handles.remove(&number) else { return };
        self.numbers.remove(&handle);
        if let Some(group) = &self.group {
            let _ = sys::listen_no_more(group, descriptors.dir(), &descriptors.path(held), WANTED);
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Puts what has happened into `body`, as much as there is `room` for.
    pub fn tell(&mut self, body: &mut Body, room: usize) {
        if self.waiting.is_empty() {
            self.hear();
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

    /// Reads events of the host's.
    fn hear(&mut self) {
        let Some(group) = &self.group else { return };
        let mut buffer = [0; EVENTS_LEN];
        let len = rustix::io::read(group, &mut buffer[..]).unwrap_or(0);
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let mut rest = buffer.get(..len).unwrap_or_default();
        while let Ok((event, after)) = Event::parse(rest) {
            if event.pid != own {
                self.note(&event);
            }
            rest = after;
        }
    }

    fn note(&mut self, event: &Event<'_>) {
        let mut infos = event.infos;
        while let Ok((info, after)) = Info::parse(infos) {
            infos = after;
            let Some(number) = self.numbers.get(&info.handle) else { continue };
            // A directory itself is told of as what is in it by this name.
            let name = if info.name == b"." { b"" } else { info.name };
            for told in TOLD.into_iter().filter(|told| event.mask & told != 0) {
                put_entry(&mut self.waiting, *number, told | event.mask & libc::FAN_ONDIR, name);
            }
            // Who watches the file itself hears of it by its name, too; that comes first.
            return;
        }
    }
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

/// A file, or a name in a directory.
struct Info<'a> {
    handle: FileHandle,
    name: &'a [u8],
}

impl<'a> Info<'a> {
    fn parse(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), Errno> {
        let mut fields = Fields::new(bytes);
        let len = (fields.u32()? >> 16) as usize;
        let mut fields = Fields::new(bytes.get(INFO_LEN..len).ok_or(Errno::INVAL)?);
        let (handle_len, kind) = (fields.u32()?, fields.u32()?);
        let handle = FileHandle::new(kind.cast_signed(), fields.bytes(handle_len as usize)?);
        // Without a name there are zeros at most.
        let name = fields.text().unwrap_or_default();
        Ok((Self { handle, name }, bytes.get(len..).unwrap_or_default()))
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
        let mut watches = Watches::default();
        put_entry(&mut watches.waiting, 1, libc::FAN_CREATE, b"first");
        put_entry(&mut watches.waiting, 2, libc::FAN_DELETE, b"");
        let mut body = Body::default();
        watches.tell(&mut body, 30);
        assert_eq!(body.len(), 24);
        watches.tell(&mut body, 100);
        assert_eq!((body.len(), watches.waiting.len()), (40, 0));
    }
}
