//! The initramfs: a cpio archive (Linux: Documentation/driver-api/early-userspace/buffer-format.rst)
//! with the guest init and a console for it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{CellError, Layout, disk};
use exocell_images::private;

/// Names the guest init instead of `exocell-init` beside the running binary.
pub const INIT_VARIABLE: &str = "EXOCELL_INIT";

/// The initramfs for the installed guest init, made on first use.
pub fn prepare(layout: &Layout) -> Result<PathBuf, CellError> {
    let init = init()?;
    let metadata = fs::metadata(&init)
        .map_err(CellError::host(format!("cannot read the guest init {}", init.display())))?;
    let stamp = format!("{:x}-{:x}-{:x}", metadata.ino(), metadata.mtime_nsec(), metadata.len());
    let directory = layout.root().join("initramfs");
    let path = directory.join(format!("{:x}-{stamp}.cpio", metadata.mtime()));
    if path.exists() {
        return Ok(path);
    }
    let failed = || format!("cannot make the initramfs {}", path.display());
    let program = fs::read(&init).map_err(CellError::host(failed()))?;
    private::folder(&directory).map_err(CellError::host(failed()))?;
    publish(&directory, &path, &archive(&program)).map_err(CellError::host(failed()))?;
    Ok(path)
}

/// Where the guest init is.
///
/// # Errors
/// It is missing.
pub fn init() -> Result<PathBuf, CellError> {
    let init = init_path()?;
    match init.is_file() {
        true => Ok(init),
        false => Err(CellError::Usage(format!(
            "the guest init {} is missing; run make build, or set {INIT_VARIABLE}",
            init.display()
        ))),
    }
}

fn init_path() -> Result<PathBuf, CellError> {
    if let Some(path) = std::env::var_os(INIT_VARIABLE) {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe().map_err(CellError::host("cannot find this program"))?;
    Ok(own.with_file_name("exocell-init"))
}

/// Writes `bytes` as `path`, whole or not at all.
fn publish(directory: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = disk::nameless(directory)?;
    file.write_all(bytes)?;
    // The guest kernel, which has an id of its own, reads it. It holds nothing but the init.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.set_permissions(mode)?;
    disk::name_first(&file, path)
}

/// One entry of a "newc" archive.
struct Entry<'a> {
    name: &'a str,
    mode: u32,
    device: (u32, u32),
    data: &'a [u8],
}

fn archive(init: &[u8]) -> Vec<u8> {
    let directory = libc::S_IFDIR | 0o755;
    let entries = [
        Entry { name: "dev", mode: directory, device: (0, 0), data: &[] },
        Entry { name: "dev/console", mode: libc::S_IFCHR | 0o600, device: (5, 1), data: &[] },
        Entry { name: "init", mode: libc::S_IFREG | 0o755, device: (0, 0), data: init },
        Entry { name: "TRAILER!!!", mode: 0, device: (0, 0), data: &[] },
    ];
    let mut out = Vec::with_capacity(init.len() + 1024);
    for (index, entry) in entries.iter().enumerate() {
        append(&mut out, index as u32 + 1, entry);
    }
    out
}

fn append(out: &mut Vec<u8>, inode: u32, entry: &Entry<'_>) {
    let (major, minor) = entry.device;
    let name_bytes = entry.name.len() as u32 + 1;
    // inode, mode, uid, gid, links, mtime, size, device, rdevice, name, check
    let size = entry.data.len() as u32;
    let fields = [inode, entry.mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_bytes, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(entry.name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(entry.data);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_one_that_cpio_reads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.cpio");
        fs::write(&path, archive(b"program")).unwrap();
        let listing = std::process::Command::new("cpio")
            .args(["-t", "--quiet", "-F"])
            .arg(&path)
            .output()
            .expect("cpio is installed by scripts/setup");
        assert_eq!(String::from_utf8_lossy(&listing.stdout), "dev\ndev/console\ninit\n");
    }
}
