//! Making an archive of what the operator names on the host, where a cell may change it meanwhile.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, minor};

use crate::dockerfile::ignore::Ignore;
use crate::source::{Extents, extents, meta};
use crate::tar::{BLOCK_BYTES, EntryKind, Extent, TarWriter};
use crate::walk::{Found, Walk};

/// Writes an archive of `from` to `to`, in which it is called `name`. Links stay links.
///
/// # Errors
/// What cannot be read, or written.
pub fn archive(from: &Found, name: &OsStr, to: &mut dyn Write) -> io::Result<()> {
    let mut writer = TarWriter::new(to);
    let at = |path: &Path| {
        let path = Path::new(name).join(path);
        move |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
    };
    if !from.is_directory() {
        entry(&mut writer, from, Path::new(name)).map_err(at(Path::new("")))?;
        return writer.finish();
    }
    let mut walk = Walk::of(from.directory()?);
    while let Some((path, found)) = walk.next() {
        let found = found.map_err(at(&path))?;
        let own =
            if path.as_os_str().is_empty() { name.into() } else { Path::new(name).join(&path) };
        entry(&mut writer, &found, &own).map_err(at(&path))?;
        if found.is_directory() {
            walk.enter(&path, &found).map_err(at(&path))?;
        }
    }
    writer.finish()
}

/// Writes an archive of what the directory `from` holds to `to`, without what `ignore` leaves out,
/// and without sockets. Links stay links.
///
/// # Errors
/// What cannot be read, or written.
pub fn context(from: &Found, ignore: &Ignore, to: &mut dyn Write) -> io::Result<()> {
    let mut writer = TarWriter::new(to);
    let mut walk = Walk::of(from.directory()?);
    while let Some((path, found)) = walk.next() {
        let at =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        // Patterns are of text; another name is of none of them.
        let name = path.to_string_lossy();
        if !name.is_empty() && ignore.leaves_out_all_below(&name) {
            continue;
        }
        let found = found.map_err(at)?;
        let wanted = !name.is_empty() && !ignore.leaves_out(&name);
        if wanted && !found.metadata().file_type().is_socket() {
            entry(&mut writer, &found, &path).map_err(at)?;
        }
        if found.is_directory() {
            walk.enter(&path, &found).map_err(at)?;
        }
    }
    writer.finish()
}

fn entry(writer: &mut TarWriter<&mut dyn Write>, found: &Found, path: &Path) -> io::Result<()> {
    let metadata = found.metadata();
    let path = path.as_os_str().as_bytes();
    let mut about = meta(metadata);
    about.mtime.nanos = 0;
    let kind = metadata.file_type();
    let kind = if kind.is_dir() {
        EntryKind::Directory
    } else if kind.is_symlink() {
        EntryKind::Symlink(found.target()?)
    } else if kind.is_fifo() {
        EntryKind::Fifo
    } else if kind.is_socket() {
        return Err(io::Error::other("a socket cannot be copied"));
    } else if kind.is_file() {
        let file = found.file()?;
        // It may be another size by now; what is told is what comes.
        let metadata = file.metadata()?;
        let mut extents = extents(&file, &metadata)?;
        // Some readers want parts of whole blocks.
        let is_cut = |extent: &Extent| !extent.length.is_multiple_of(BLOCK_BYTES as u64);
        if extents.iter().rev().skip(1).any(is_cut) {
            extents = vec![Extent::whole(metadata.len())];
        }
        let kind = EntryKind::File { size: metadata.len(), extents: extents.clone() };
        return writer.entry(path, &kind, &about, &mut Extents::new(&file, &extents));
    } else {
        let (major, minor) = (major(metadata.rdev()), minor(metadata.rdev()));
        EntryKind::Device { char: kind.is_char_device(), major: major.into(), minor: minor.into() }
    };
    writer.entry(path, &kind, &about, &mut io::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::walk::Directory;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    /// Names, kinds and contents.
    fn entries(bytes: &[u8]) -> Vec<(String, u8, String)> {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            let kind = entry.header().entry_type().as_byte();
            (name, kind, content)
        });
        entries.collect()
    }

    #[test]
    fn a_tree_comes_as_it_is_and_links_stay_links() {
        let place = tempfile::tempdir().unwrap();
        let from = place.path().join("from");
        fs::create_dir_all(from.join("a")).unwrap();
        fs::write(from.join("a/f"), "content").unwrap();
        symlink("/etc/shadow", from.join("l")).unwrap();
        fs::File::create(from.join("sparse")).unwrap().set_len(1 << 30).unwrap();
        let mut out = Vec::new();
        archive(&Found::at(&from).unwrap(), OsStr::new("n"), &mut out).unwrap();
        assert!(out.len() < 20 << 10, "{} bytes: holes are no zeros", out.len());
        let mut found = tar::Archive::new(&*out);
        let names: Vec<_> = found
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                (entry.path().unwrap().display().to_string(), entry.header().entry_type().as_byte())
            })
            .collect();
        let names: Vec<_> = names.iter().map(|(name, kind)| (&**name, *kind)).collect();
        assert_eq!(
            names,
            [("n", b'5'), ("n/a", b'5'), ("n/a/f", b'0'), ("n/l", b'2'), ("n/sparse", b'S')]
        );
        let mut one = Vec::new();
        archive(&Directory::at(&from).unwrap().find("l").unwrap(), OsStr::new("o"), &mut one)
            .unwrap();
        assert_eq!(entries(&one), [("o".to_owned(), b'2', String::new())]);
    }

    #[test]
    fn a_context_has_what_is_not_left_out() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir_all(place.path().join("d/e")).unwrap();
        fs::create_dir_all(place.path().join("big")).unwrap();
        for name in ["a", "d/b", "d/e/keep", "big/x"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        symlink("/etc/shadow", place.path().join("l")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(place.path().join("s")).unwrap();
        let ignore = Ignore::read("d\nbig\n!d/e/keep").unwrap();
        let mut out = Vec::new();
        context(&Found::at(place.path()).unwrap(), &ignore, &mut out).unwrap();
        let names: Vec<_> = entries(&out).into_iter().map(|(name, kind, _)| (name, kind)).collect();
        let names: Vec<_> = names.iter().map(|(name, kind)| (name.as_str(), *kind)).collect();
        assert_eq!(names, [("a", b'0'), ("d/e/keep", b'0'), ("l", b'2')]);
    }

    /// Takes what is written, and has a cell work when so many parts of it have come.
    struct Meanwhile<'a, F: FnMut()>(&'a mut Vec<u8>, usize, F);

    impl<F: FnMut()> Write for Meanwhile<'_, F> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.1 == 0 {
                self.2();
            }
            self.1 = self.1.wrapping_sub(1);
            self.0.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_becomes_a_link_meanwhile_shows_nothing_of_the_host() {
        let place = tempfile::tempdir().unwrap();
        let (from, host) = (place.path().join("from"), place.path().join("host"));
        fs::create_dir_all(from.join("d")).unwrap();
        fs::create_dir(&host).unwrap();
        for name in ["from/d/a", "from/d/s", "from/f"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        fs::write(host.join("s"), "of the host").unwrap();
        let swap = |name: &str, target: &Path| {
            fs::rename(from.join(name), place.path().join("away")).unwrap();
            symlink(target, from.join(name)).unwrap();
        };
        // A file, after its directory was read: it comes as the link that it is by then.
        let mut out = Vec::new();
        let swapped = || swap("f", &host.join("s"));
        let top = Found::at(&from).unwrap();
        archive(&top, OsStr::new("n"), &mut Meanwhile(&mut out, 1, swapped)).unwrap();
        let seen = entries(&out);
        assert!(seen.contains(&("n/f".to_owned(), b'2', String::new())), "{seen:?}");
        // A directory, after it was read: what it holds is not found any more.
        fs::remove_file(place.path().join("away")).unwrap();
        let mut out = Vec::new();
        let swapped = || swap("d", &host);
        let said = archive(&top, OsStr::new("n"), &mut Meanwhile(&mut out, 2, swapped));
        assert!(said.unwrap_err().to_string().starts_with("n/d/s: "));
        assert!(!out.windows(11).any(|part| part == b"of the host"));
    }

    #[test]
    fn a_file_that_grows_meanwhile_adds_no_entries() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("f");
        fs::write(&file, "short").unwrap();
        let mut forged = Vec::new();
        archive(&Found::at(&file).unwrap(), OsStr::new("evil"), &mut forged).unwrap();
        let grow = || {
            let content = [vec![b'x'; 512], forged.clone()].concat();
            fs::write(&file, content).unwrap();
        };
        let mut out = Vec::new();
        let found = Found::at(&file).unwrap();
        archive(&found, OsStr::new("f"), &mut Meanwhile(&mut out, 0, grow)).unwrap();
        assert_eq!(entries(&out), [("f".to_owned(), b'0', "xxxxx".to_owned())]);
    }
}
