//! Inline extended attributes.

use super::format::put16;
use crate::tree::Xattrs;

const HEADER_BYTES: usize = 12;

/// Name prefixes with their indexes (EROFS_XATTR_INDEX_*).
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Index and rest of a name that erofs can hold.
fn index(name: &[u8]) -> Option<(u8, &[u8])> {
    let (prefix, index) = PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix))?;
    let rest = name.get(prefix.len()..)?;
    let acl = matches!(index, 2 | 3);
    (rest.is_empty() == acl && rest.len() <= 255).then_some((*index, rest))
}

/// Whether an attribute goes into the image. Names of other systems do not,
/// nor do overlayfs' own marks, which would change what the cell's overlay
/// shows.
pub(crate) fn is_kept(name: &[u8]) -> bool {
    !name.starts_with(b"trusted.overlay.")
        && !name.starts_with(b"user.overlay.")
        && index(name).is_some()
}

/// Bytes that the attributes take after the inode.
pub(crate) fn body_bytes(xattrs: &Xattrs) -> usize {
    let entry = |(name, value): (&Vec<u8>, &Vec<u8>)| {
        index(name).map_or(0, |(_, rest)| (4 + rest.len() + value.len()).next_multiple_of(4))
    };
    let entries: usize = xattrs.iter().map(entry).sum();
    if entries == 0 { 0 } else { HEADER_BYTES + entries }
}

/// The inode's `i_xattr_icount` for so many bytes.
pub(super) fn icount(bytes: usize) -> u16 {
    bytes.checked_sub(HEADER_BYTES).map_or(0, |entries| (entries / 4 + 1) as u16)
}

/// The bytes that an inode's `i_xattr_icount` stands for.
pub(super) fn body_of(icount: u16) -> usize {
    usize::from(icount).checked_sub(1).map_or(0, |words| HEADER_BYTES + words * 4)
}

/// The attributes in the bytes behind an inode; `None` where they are cut.
pub(super) fn decode(body: &[u8]) -> Option<Xattrs> {
    let mut xattrs = Xattrs::new();
    let mut rest = body.get(HEADER_BYTES..).unwrap_or_default();
    while let [name_bytes, index, low, high, after @ ..] = rest {
        let (name_bytes, value_bytes) =
            (usize::from(*name_bytes), usize::from(u16::from_le_bytes([*low, *high])));
        let (prefix, _) = PREFIXES.iter().find(|(_, known)| known == index)?;
        let name = [prefix, after.get(..name_bytes)?].concat();
        let value = after.get(name_bytes..name_bytes + value_bytes)?;
        xattrs.insert(name, value.to_vec());
        let used = (4 + name_bytes + value_bytes).next_multiple_of(4);
        rest = rest.get(used..).unwrap_or_default();
    }
    Some(xattrs)
}

pub(super) fn encode(xattrs: &Xattrs, out: &mut Vec<u8>) {
    if body_bytes(xattrs) == 0 {
        return;
    }
    out.extend([0; HEADER_BYTES]);
    for (name, value) in xattrs {
        let Some((index, rest)) = index(name) else { continue };
        out.extend([rest.len() as u8, index]);
        put16(out, value.len() as u16);
        out.extend(rest);
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_counted() {
        let xattrs = Xattrs::from([(b"user.ab".to_vec(), b"xyz".to_vec())]);
        let mut out = Vec::new();
        encode(&xattrs, &mut out);
        assert_eq!(out.len(), body_bytes(&xattrs));
        assert_eq!(&out[12..], b"\x02\x01\x03\x00abxyz\0\0\0");
        assert_eq!(icount(out.len()), 4);
        assert_eq!(body_of(4), out.len());
        assert_eq!(decode(&out).unwrap(), xattrs);
        assert!(decode(&out[..out.len() - 4]).is_none());
    }

    #[test]
    fn foreign_names_and_overlay_marks_are_left_out() {
        for name in ["com.apple.quarantine", "trusted.overlay.opaque", "user.", "system.nfs4_acl"] {
            assert!(!is_kept(name.as_bytes()), "{name}");
        }
        for name in ["security.capability", "system.posix_acl_access", "user.x"] {
            assert!(is_kept(name.as_bytes()), "{name}");
        }
    }
}
