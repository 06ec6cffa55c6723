//! Users and groups by their names in an image (passwd(5), group(5)).

use super::paths::resolve;
use crate::error::{ImageError, Result};
use crate::rootfs::RootfsBuilder;
use crate::tree::Kind;

/// The longest file of users or groups that is read.
const BYTES_MAX: u64 = 4 << 20;

/// The ids of `text`: `user`, `user:group`, either by name or by number. Without a group it is
/// the one with the user's number, as docker has it.
pub(super) fn owner(rootfs: &RootfsBuilder<'_>, text: &str) -> Result<(u32, u32)> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let uid = id(rootfs, "etc/passwd", user)?;
    let gid = group.map(|group| id(rootfs, "etc/group", group)).transpose()?;
    Ok((uid, gid.unwrap_or(uid)))
}

fn id(rootfs: &RootfsBuilder<'_>, path: &str, name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let text = resolve(rootfs.tree(), path.as_bytes())?.inode.and_then(|inode| {
        match rootfs.tree().inode(inode).kind {
            Kind::File(data) => rootfs.text(&data, BYTES_MAX).transpose(),
            _ => None,
        }
    });
    let text = text.transpose()?.unwrap_or_default();
    let found = String::from_utf8_lossy(&text).lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    found.filter(|_| !name.is_empty()).ok_or_else(|| {
        let why = format!("the image's /{path} has none of that name; give a number, or add it");
        ImageError::malformed(format!("the owner {name:?}"), why)
    })
}
