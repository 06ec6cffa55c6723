//! What is special about an archive that is to be a layer of an image: files with several names,
//! attributes, and what overlayfs notes of what a cell has changed (kernel:
//! Documentation/filesystems/overlayfs.rst).

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{fgetxattr, flistxattr};
use rustix::io::Errno;

use super::open;

/// The mark of a directory of which the image shows nothing any more.
pub const OPAQUE: &str = ".wh..wh..opq";
/// Files of the cell's own, that its image knows nothing of.
pub const LEFT_OUT: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Bytes of all names of one file's attributes, and of one value (Linux: XATTR_LIST_MAX,
/// XATTR_SIZE_MAX).
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// What an image's layer leaves out, and what it has seen.
pub struct Layer {
    /// Directories of other devices are mounted there.
    device: u64,
    /// First names of files that have several.
    names: HashMap<(u64, u64), PathBuf>,
    /// The root as programs see it, where only changes are wanted; and its device.
    root: Option<(File, u64)>,
    /// What does not come, beside the cell's own files.
    left_out: Vec<String>,
}

impl Layer {
    /// Of all that is on `device`.
    pub fn whole(device: u64) -> Self {
        Self { device, names: HashMap::new(), root: None, left_out: Vec::new() }
    }

    /// Of what lies on `device` over an image; both together are `root`.
    pub fn of_changes(device: u64, root: File, left_out: Vec<String>) -> io::Result<Self> {
        let of_root = root.metadata()?.dev();
        Ok(Self { root: Some((root, of_root)), left_out, ..Self::whole(device) })
    }

    /// Whether what is at `path` does not come.
    pub fn leaves_out(&self, path: &Path) -> bool {
        let own = LEFT_OUT.into_iter().chain(self.left_out.iter().map(String::as_str));
        own.into_iter().any(|own| path == Path::new(own))
    }

    pub fn is_of_changes(&self) -> bool {
        self.root.is_some()
    }

    /// The device that directories must be on; `whole` is the root as programs see it.
    pub fn device(&self, whole: bool) -> u64 {
        match (&self.root, whole) {
            (Some((_, device)), true) => *device,
            _ => self.device,
        }
    }

    /// What `path` is in the root as programs see it; no link is followed.
    pub fn in_root(&self, path: &Path) -> io::Result<Option<File>> {
        let Some((root, _)) = &self.root else { return Ok(None) };
        let mut here = root.try_clone()?;
        for part in path.components() {
            if let Component::Normal(name) = part {
                here = open(Some(&here), name)?;
            }
        }
        Ok(Some(here))
    }

    /// An earlier name of the file.
    pub fn earlier(&mut self, metadata: &Metadata, name: &Path) -> Option<PathBuf> {
        if metadata.nlink() < 2 || !metadata.is_file() {
            return None;
        }
        let key = (metadata.dev(), metadata.ino());
        let earlier = self.names.get(&key).cloned();
        self.names.entry(key).or_insert_with(|| name.to_path_buf());
        earlier
    }
}

/// Whether an entry says that the image's file is gone.
pub fn is_removal(metadata: &Metadata) -> bool {
    metadata.file_type().is_char_device() && metadata.rdev() == 0
}

/// Refuses a name that hides another file where it is in a layer.
pub fn check_name(path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default();
    match name.as_encoded_bytes().starts_with(b".wh.") {
        true => Err(io::Error::other(format!(
            "{} has a name that no image can hold; remove it, or give it another",
            path.display()
        ))),
        false => Ok(()),
    }
}

/// What a layer calls that.
pub fn mark_of(name: &Path) -> PathBuf {
    let mut mark = OsString::from(".wh.");
    mark.push(name.file_name().unwrap_or_default());
    name.with_file_name(mark)
}

/// A file's attributes.
#[derive(Debug, Default)]
pub struct Attributes {
    /// As an archive has them.
    pub records: Vec<(String, Vec<u8>)>,
    /// Whether nothing of the image's directory shows.
    pub is_opaque: bool,
    /// Whether it is a directory that the image has under another name.
    pub is_moved: bool,
}

/// Those of `file`, without overlayfs' own; none where there are none.
pub fn attributes(file: &File) -> io::Result<Attributes> {
    let mut found = Attributes::default();
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let count = match flistxattr(file, &mut names[..]) {
        Ok(count) => count,
        Err(Errno::OPNOTSUPP) => return Ok(found),
        Err(error) => return Err(error.into()),
    };
    names.truncate(count);
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        // An archive has no form for other names.
        let Ok(name) = std::str::from_utf8(name) else { continue };
        let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
        let count = match fgetxattr(file, name, &mut value[..]) {
            Ok(count) => count,
            // Somebody removes it at this moment.
            Err(Errno::NODATA) => continue,
            Err(error) => return Err(error.into()),
        };
        value.truncate(count);
        match name.strip_prefix("trusted.overlay.") {
            Some("opaque") => found.is_opaque = value == b"y",
            Some("redirect") => found.is_moved = true,
            Some(_) => {}
            None if name.starts_with("user.overlay.") => {}
            None => found.records.push((format!("SCHILY.xattr.{name}"), value)),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_lie_beside_what_they_are_of() {
        assert_eq!(mark_of(Path::new("./a/b")), Path::new("./a/.wh.b"));
        assert_eq!(mark_of(Path::new("b")), Path::new(".wh.b"));
        let root = File::open("/").unwrap();
        let layer = Layer::of_changes(1, root, vec!["/mnt".to_owned()]).unwrap();
        for (path, is) in [("/etc/hosts", true), ("/mnt", true), ("/mnt/x", false)] {
            assert_eq!(layer.leaves_out(Path::new(path)), is, "{path}");
        }
    }
}
