//! Which capability stands behind each descriptor, and whether it still holds.

use crate::imports::{Import, Wasi};
use exocell_xgate::{Handle, Kind, Live, Table};
use std::collections::BTreeMap;
use wiggle::{GuestMemory, GuestPtr};

/// `errno::notcapable` of WASI preview 1.
pub(crate) const NOTCAPABLE: i32 = 76;
const SUCCESS: i32 = 0;
/// The descriptors below those of folders.
pub(crate) const STREAMS: std::ops::Range<u32> = 0..3;

/// Tested before every hostcall. The default permits only what needs no capability.
#[derive(Default)]
pub(crate) struct Gate {
    /// Tokens of the kinds that are not reached through a descriptor.
    kinds: BTreeMap<Kind, Live>,
    /// Token of the capability behind each open descriptor.
    descriptors: BTreeMap<u32, Live>,
}

impl Gate {
    /// `folders` in the order in which they are preopened, from descriptor 3 on.
    pub fn new(table: &Table, handles: &[Handle], folders: &[Live]) -> Self {
        let held = handles.iter().filter_map(|handle| table.get(*handle).ok());
        let kinds: BTreeMap<Kind, Live> = held.map(|held| (held.kind(), held.live())).collect();
        let streams = STREAMS.filter_map(|fd| Some((fd, kinds.get(&Kind::Stdio)?.clone())));
        let folders = (STREAMS.end..).zip(folders.iter().cloned());
        let descriptors = streams.chain(folders).collect();
        Self { kinds, descriptors }
    }

    /// Whether a call may go on: no capability behind it was revoked.
    pub fn permits(&self, import: &Import, arguments: &[i64]) -> bool {
        if !import.descriptors.is_empty() {
            // A descriptor that is not open has nothing behind it and fails with EBADF.
            let open = |index: &usize| self.descriptors.get(&(*arguments.get(*index)? as u32));
            return import.descriptors.iter().filter_map(open).all(Live::is_live);
        }
        import.needs.is_empty()
            || import.needs.iter().any(|kind| self.kinds.get(kind).is_some_and(Live::is_live))
    }

    /// Keeps track of descriptors after a call that answered `errno`.
    pub fn settle(&mut self, call: Wasi, arguments: &[i64], errno: i32, memory: &GuestMemory<'_>) {
        if errno != SUCCESS {
            return;
        }
        match (call, arguments) {
            (Wasi::path_open, [folder, .., out]) => {
                // The call has just written there, so it can be read.
                let opened = memory.read(GuestPtr::<u32>::new(*out as u32));
                if let (Ok(opened), Some(live)) = (opened, self.token(*folder)) {
                    self.descriptors.insert(opened, live);
                }
            }
            (Wasi::fd_close, [fd]) => self.close(*fd as u32),
            // It stays what it is, with what it came from.
            (Wasi::fd_renumber, [from, to]) if *from as u32 == *to as u32 => {}
            (Wasi::fd_renumber, [from, to]) => {
                // What `to` was is closed, whatever `from` is.
                self.descriptors.remove(&(*to as u32));
                if let Some(live) = self.descriptors.remove(&(*from as u32)) {
                    self.descriptors.insert(*to as u32, live);
                }
            }
            _ => {}
        }
    }

    /// A socket was opened or accepted.
    pub fn open_socket(&mut self, fd: u32) {
        if let Some(live) = self.kinds.get(&Kind::Network) {
            self.descriptors.insert(fd, live.clone());
        }
    }

    pub fn close(&mut self, fd: u32) {
        self.descriptors.remove(&fd);
    }

    /// Whether nothing behind a descriptor was revoked.
    pub fn holds(&self, fd: u32) -> bool {
        self.descriptors.get(&fd).is_none_or(Live::is_live)
    }

    fn token(&self, fd: i64) -> Option<Live> {
        self.descriptors.get(&(fd as u32)).cloned()
    }
}
