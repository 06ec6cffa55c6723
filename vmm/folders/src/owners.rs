//! Whose files are: the host's owners as the guest sees them, and the guest's as the host keeps
//! them.
//!
//! The serving process of a root operator's has all of the host's ids, so owners are what they are.
//! That of any other operator has one, which is 0 inside. A file that the guest gives to somebody
//! else stays the operator's, and says for whom it is in an attribute of its own, as far as the
//! host's file system keeps attributes of such a file.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Gid, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use crate::host::Descriptors;

/// The attribute: `UID:GID` in decimal.
pub const OWNER: &[u8] = b"user.exocell.owner";
/// Longer than any value of it.
const OWNER_LEN_MAX: usize = 32;

/// How owners are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owners {
    /// As they are on the host.
    Host,
    /// All is the operator's.
    Squashed,
}

/// A user and a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    fn text(self) -> String {
        format!("{}:{}", self.uid, self.gid)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (uid, gid) = std::str::from_utf8(text).ok()?.split_once(':')?;
        Some(Self { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    }
}

/// Whether the host's kernel keeps attributes of such a file.
fn keeps(kind: FileType) -> bool {
    matches!(kind, FileType::RegularFile | FileType::Directory)
}

impl Owners {
    /// Whose `held` is, which is `stat`.
    pub fn of(self, descriptors: &Descriptors, held: impl AsFd, stat: &Stat) -> Owner {
        let own = Owner { uid: stat.st_uid, gid: stat.st_gid };
        let kind = FileType::from_raw_mode(stat.st_mode);
        // What is another's on the host cannot say that it is not.
        if self == Self::Host || own.uid != 0 || !keeps(kind) {
            return own;
        }
        let mut text = [0; OWNER_LEN_MAX];
        rustix::fs::getxattr(&*descriptors.path(held), OWNER, &mut text[..])
            .ok()
            .and_then(|len| Owner::parse(text.get(..len)?))
            .unwrap_or(own)
    }

    /// Gives `held`, which is `stat`, to `uid` and `gid` as far as they are said.
    ///
    /// # Errors
    /// The host's.
    pub fn give(
        self,
        descriptors: &Descriptors,
        held: impl AsFd,
        stat: &Stat,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(), Errno> {
        if [uid, gid].contains(&Some(u32::MAX)) {
            return Err(Errno::INVAL);
        }
        if self == Self::Host {
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            return rustix::fs::chownat(held, c"", uid, gid, AtFlags::EMPTY_PATH);
        }
        if stat.st_uid != 0 {
            return Err(Errno::PERM);
        }
        if !keeps(FileType::from_raw_mode(stat.st_mode)) {
            return Ok(());
        }
        let before = self.of(descriptors, held.as_fd(), stat);
        let after = Owner { uid: uid.unwrap_or(before.uid), gid: gid.unwrap_or(before.gid) };
        if after == before {
            return Ok(());
        }
        let path = descriptors.path(held);
        if (after.uid, after.gid) == (stat.st_uid, stat.st_gid) {
            return rustix::fs::removexattr(&*path, OWNER);
        }
        let text = after.text();
        match rustix::fs::setxattr(&*path, OWNER, text.as_bytes(), XattrFlags::empty()) {
            // A file system without attributes: it is the operator's, and that is all.
            Err(Errno::OPNOTSUPP) => Ok(()),
            set => set,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_as_they_are_written() {
        let owner = Owner { uid: 999, gid: u32::MAX - 1 };
        assert_eq!(Owner::parse(owner.text().as_bytes()), Some(owner));
        for bad in [&b""[..], b"1", b"1:", b":1", b"-1:1", b"1:4294967296", b"\xff:1"] {
            assert_eq!(Owner::parse(bad), None, "{bad:?}");
        }
    }
}
