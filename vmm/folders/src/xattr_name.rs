//! Names of extended attributes: the guest's and, for the same, the host's.
//!
//! `user.*` and ACLs are the same on both sides. What acts on the host (`security.*`) or needs the
//! host's root (`trusted.*`) is kept under a name of our own, where it acts in guests only; what
//! the host has under the true name is read where there is none of ours.

use rustix::io::Errno;

/// What we keep begins with this; the guest cannot name it.
const OURS: &[u8] = b"user.exocell.";
/// Where a file's capabilities are kept.
pub const CAPABILITY_KEPT: &[u8] = b"user.exocell.security.capability";
/// The longest name, in bytes (`XATTR_NAME_MAX`).
const NAME_MAX: usize = 255;

/// A guest's name as it is on the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// Where it is written to, and looked for first.
    pub own: Vec<u8>,
    /// Where it is looked for then.
    pub true_name: Option<Vec<u8>>,
}

/// What the guest's `name` is on the host.
///
/// # Errors
/// EOPNOTSUPP for one that is nobody's, ERANGE for one that is too long.
pub fn names(name: &[u8]) -> Result<Names, Errno> {
    if name.len() > NAME_MAX || name.is_empty() {
        return Err(Errno::RANGE);
    }
    if name.starts_with(OURS) {
        return Err(Errno::OPNOTSUPP);
    }
    if name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_") {
        return Ok(Names { own: name.to_vec(), true_name: None });
    }
    if name.starts_with(b"security.") || name.starts_with(b"trusted.") {
        let own = [OURS, name].concat();
        if own.len() > NAME_MAX {
            return Err(Errno::RANGE);
        }
        return Ok(Names { own, true_name: Some(name.to_vec()) });
    }
    Err(Errno::OPNOTSUPP)
}

/// What the host's `name` is for the guest; `None` for one that it is not to see.
pub fn guests(name: &[u8]) -> Option<&[u8]> {
    match name.strip_prefix(OURS) {
        Some(kept) if kept.starts_with(b"security.") || kept.starts_with(b"trusted.") => Some(kept),
        Some(_) => None,
        None => Some(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_act_on_the_host_is_kept_apart() {
        let kept = names(b"security.capability").unwrap();
        assert_eq!(kept.own, CAPABILITY_KEPT);
        assert_eq!(guests(&kept.own), Some(&b"security.capability"[..]));
        assert_eq!(names(b"user.x").unwrap().own, b"user.x");
        assert_eq!(names(b"user.exocell.owner"), Err(Errno::OPNOTSUPP));
        assert_eq!(names(b"system.nfs4_acl"), Err(Errno::OPNOTSUPP));
        assert_eq!(names(&[b'u'; 256]), Err(Errno::RANGE));
        assert_eq!(guests(b"user.exocell.owner"), None);
    }
}
