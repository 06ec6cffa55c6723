//! The gate: which rights a request needs. One match over every request, so
//! that a new one cannot be added without deciding.

use rustix::io::Errno;

use crate::Rights;
use crate::request::Request;

/// Access bits of an open, and those that truncate and append (`P9_DOTL_*`).
pub const ACCESS: u32 = 0o3;
pub const WRITE_ONLY: u32 = 0o1;
pub const READ_WRITE: u32 = 0o2;
pub const TRUNCATE: u32 = 0o1000;
pub const APPEND: u32 = 0o2000;

const NONE: Rights = Rights { read: false, write: false };
const WRITE: Rights = Rights { read: false, write: true };

/// Checks `request` against what the folder's holder may do.
///
/// # Errors
/// EROFS for a change without the write right, else EACCES.
pub fn check(request: &Request<'_>, held: Rights) -> Result<(), Errno> {
    let needed = needed(request);
    if held == NONE && !is_release(request) {
        return Err(Errno::ACCESS);
    }
    if needed.write && !held.write {
        return Err(Errno::ROFS);
    }
    if needed.read && !held.read {
        return Err(Errno::ACCESS);
    }
    Ok(())
}

/// True for what only gives something back: allowed even after revocation.
pub fn is_release(request: &Request<'_>) -> bool {
    matches!(request, Request::Clunk { .. } | Request::Flush)
}

fn needed(request: &Request<'_>) -> Rights {
    match request {
        Request::Version { .. }
        | Request::Auth
        | Request::Attach { .. }
        | Request::Flush
        | Request::Walk { .. }
        | Request::Getattr { .. }
        | Request::Statfs { .. }
        | Request::Fsync { .. }
        | Request::Lock { .. }
        | Request::Getlock { .. }
        | Request::Clunk { .. }
        | Request::Xattr
        | Request::Unknown => NONE,
        Request::Read { .. } | Request::Readdir { .. } | Request::Readlink { .. } => Rights::READ,
        Request::Lopen { flags, .. } => of_open(*flags),
        Request::Lcreate { flags, .. } => Rights { write: true, ..of_open(*flags) },
        Request::Write { .. }
        | Request::Setattr { .. }
        | Request::Symlink { .. }
        | Request::Mkdir { .. }
        | Request::Mknod { .. }
        | Request::Link { .. }
        | Request::Rename { .. }
        | Request::Renameat { .. }
        | Request::Unlinkat { .. }
        | Request::Remove { .. } => WRITE,
    }
}

fn of_open(flags: u32) -> Rights {
    let access = flags & ACCESS;
    Rights { read: access != WRITE_ONLY, write: access != 0 || flags & TRUNCATE != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_needs_what_it_asks_for() {
        let open = |flags, held| check(&Request::Lopen { fid: 0, flags }, held);
        assert_eq!(open(0, Rights::READ), Ok(()));
        assert_eq!(open(WRITE_ONLY, Rights::READ), Err(Errno::ROFS));
        assert_eq!(open(READ_WRITE, Rights::READ), Err(Errno::ROFS));
        assert_eq!(open(TRUNCATE, Rights::READ), Err(Errno::ROFS));
        assert_eq!(open(0, WRITE), Err(Errno::ACCESS));
        assert_eq!(open(READ_WRITE, WRITE), Err(Errno::ACCESS));
        assert_eq!(open(WRITE_ONLY, WRITE), Ok(()));
    }

    #[test]
    fn no_rights_allow_only_giving_back() {
        assert_eq!(check(&Request::Getattr { fid: 0 }, NONE), Err(Errno::ACCESS));
        assert_eq!(check(&Request::Clunk { fid: 0 }, NONE), Ok(()));
        assert_eq!(check(&Request::Flush, NONE), Ok(()));
    }
}
