//! Whether something lies in a folder, by whatever mount and name it was reached.
//!
//! A path tells where something is for this process. The same directory may be mounted elsewhere
//! too, and so may one that is in it: then no path and no way up from there leads through the
//! folder. So three things are compared: the paths, the directories on the way up, each by its
//! device and number, and the places in the file system that is mounted.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use exocell_images::walk::Found;
use rustix::fs::{AtFlags, StatxFlags, statx};

const MOUNTS: &str = "/proc/self/mountinfo";
/// How far up it is looked: a path has at most half as many directories (path_resolution(7)).
const LEVELS_MAX: usize = 4096;

/// A file, by device and number.
pub(crate) type Identity = (u64, u64);

/// A place in a file system, wherever that is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// As mountinfo has it (proc_pid_mountinfo(5)): not all of stat(2)'s numbers are there.
    device: String,
    path: PathBuf,
}

impl Place {
    fn holds(&self, other: &Self) -> bool {
        self.device == other.device && other.path.starts_with(&self.path)
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    /// What of the file system is mounted.
    shown: Place,
    at: PathBuf,
}

impl Mount {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let mut next = || fields.next();
        let id = std::str::from_utf8(next()?).ok()?.parse().ok()?;
        let device = std::str::from_utf8(next().and(next())?).ok()?.to_owned();
        let path = unescaped(next()?);
        Some(Self { id, shown: Place { device, path }, at: unescaped(next()?) })
    }
}

/// A path with its `\040` and the like as what they stand for.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = field;
    while let Some((first, more)) = rest.split_first() {
        let digits = more.first_chunk::<3>().filter(|_| *first == b'\\');
        let text = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match text.and_then(|text| u8::from_str_radix(text, 8).ok()) {
            Some(byte) => (bytes.push(byte), rest = &more[3..]),
            None => (bytes.push(*first), rest = more),
        };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// What is mounted for this process.
#[derive(Debug)]
pub(crate) struct Mounts(Vec<Mount>);

impl Mounts {
    /// # Errors
    /// There is no `/proc`.
    pub fn read() -> io::Result<Self> {
        let text = fs::read(MOUNTS)?;
        Ok(Self(text.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect()))
    }

    /// Where `found` is. `None` where its mount is not known here: a process whose root is no
    /// mount is not told of that.
    fn place(&self, found: &Found) -> io::Result<Option<Place>> {
        let id = statx(found, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        let Some(mount) = self.0.iter().find(|mount| mount.id == id) else { return Ok(None) };
        let path = found.path()?;
        let below = path.strip_prefix(&mount.at).ok();
        Ok(below.map(|below| Place { path: mount.shown.path.join(below), ..mount.shown.clone() }))
    }
}

/// Where a directory is.
#[derive(Debug)]
pub(crate) struct Spot {
    path: PathBuf,
    /// Itself and all that are above it.
    above: Vec<Identity>,
    place: Option<Place>,
}

impl Spot {
    /// # Errors
    /// The host's; it is no directory.
    pub fn of(mounts: &Mounts, directory: &Found) -> io::Result<Self> {
        let path = directory.path()?;
        let mut above = vec![identity(directory)];
        let mut next = directory.above();
        // Whoever moves it meanwhile does not make the way up shorter.
        for _ in 0..LEVELS_MAX {
            let here = match next {
                Ok(here) => here,
                // One above that its user may not pass.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => break,
                Err(error) => return Err(error),
            };
            above.push(identity(&here));
            if here.path()? == Path::new("/") {
                break;
            }
            next = here.above();
        }
        Ok(Self { path, above, place: mounts.place(directory)? })
    }

    /// That of the directory that holds `path`, or of the next one above it that is there by that
    /// path.
    ///
    /// # Errors
    /// The host's.
    pub fn around(mounts: &Mounts, path: &Path) -> io::Result<Self> {
        let mut above = path.ancestors().skip(1);
        let directory = |path: &Path| Found::real(path).ok().filter(Found::is_directory);
        let found = above.find_map(directory).ok_or(io::ErrorKind::NotFound)?;
        let parent = path.parent().unwrap_or(path).to_owned();
        Ok(Self { path: parent, ..Self::of(mounts, &found)? })
    }
}

fn identity(found: &Found) -> Identity {
    (found.metadata().dev(), found.metadata().ino())
}

/// A folder and all that is mounted below it.
#[derive(Debug)]
pub(crate) struct Territory {
    path: PathBuf,
    identities: Vec<Identity>,
    places: Vec<Place>,
}

impl Territory {
    /// That of the folder which was at `path`, where no part was a link, and had the identity
    /// `known`; it may be elsewhere by now, and something else there.
    ///
    /// # Errors
    /// The host's.
    pub fn of(mounts: &Mounts, path: PathBuf, known: Option<Identity>) -> io::Result<Self> {
        let found = Found::real(&path).ok();
        let below = mounts.0.iter().filter(|mount| mount.at != path && mount.at.starts_with(&path));
        let mut places: Vec<_> = below.map(|mount| mount.shown.clone()).collect();
        let mut identities = Vec::from_iter(known);
        if let Some(found) = found {
            identities.push(identity(&found));
            places.extend(mounts.place(&found)?);
        }
        Ok(Self { path, identities, places })
    }

    /// Whether what is in the directory at `spot` is in the folder.
    pub fn holds(&self, spot: &Spot) -> bool {
        spot.path.starts_with(&self.path)
            || spot.above.iter().any(|above| self.identities.contains(above))
            || spot.place.as_ref().is_some_and(|at| self.places.iter().any(|own| own.holds(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spot(path: &str, above: &[Identity], place: Option<(&str, &str)>) -> Spot {
        let place = place.map(|(device, path)| Place { device: device.into(), path: path.into() });
        Spot { path: path.into(), above: above.to_vec(), place }
    }

    #[test]
    fn mounts_are_read_as_the_kernel_writes_them() {
        let line = b"36 35 98:0 /m\\0401 /m\\134\\0112 rw - ext3 /dev/root rw";
        let mount = Mount::parse(line).unwrap();
        let shown = Place { device: "98:0".into(), path: "/m 1".into() };
        assert_eq!(mount, Mount { id: 36, shown, at: "/m\\\t2".into() });
        assert_eq!(unescaped(b"/a\\04"), Path::new("/a\\04"));
        assert_eq!(unescaped(b"/a\\777\\"), Path::new("/a\\777\\"));
        for broken in [&b""[..], b"36 35 98:0 /a", b"x 35 98:0 / / rw"] {
            assert_eq!(Mount::parse(broken), None);
        }
        let mounts = Mounts::read().unwrap();
        let root = mounts.place(&Found::at(Path::new("/")).unwrap()).unwrap();
        assert!(root.is_none_or(|root| !root.device.is_empty()));
    }

    #[test]
    fn a_folder_is_known_by_each_of_its_names() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let (folder, inner, other) = (base.join("f"), base.join("f/a/b"), base.join("other"));
        fs::create_dir_all(&inner).unwrap();
        fs::create_dir(&other).unwrap();
        let mounts = Mounts::read().unwrap();
        let own = Territory::of(&mounts, folder.clone(), None).unwrap();
        let at = |path: &Path| Spot::of(&mounts, &Found::at(path).unwrap()).unwrap();
        assert!(own.holds(&at(&folder)) && own.holds(&at(&inner)));
        assert!(!own.holds(&at(&other)) && !own.holds(&at(&base)) && !own.holds(&at("/".as_ref())));
        // By another mount of it, of what is in it, and of what is mounted in it.
        let known = at(&folder).above[0];
        assert!(own.holds(&spot("/mnt/x", &[(0, 0), known], None)));
        if let Some(Place { device, path }) = at(&inner).place {
            let elsewhere =
                |path: &Path| spot("/mnt", &[], Some((&device, path.to_str().unwrap())));
            assert!(own.holds(&elsewhere(&path)) && own.holds(&elsewhere(&path.join("x"))));
            assert!(!own.holds(&elsewhere(&path.ancestors().nth(3).unwrap().join("other"))));
            assert!(!own.holds(&spot("/mnt", &[], Some(("other", path.to_str().unwrap())))));
        }
        let mut below = Mounts::read().unwrap();
        let shown = Place { device: "9:9".into(), path: "/disk".into() };
        below.0.push(Mount { id: u64::MAX, shown, at: inner.clone() });
        let with = Territory::of(&below, folder.clone(), None).unwrap();
        assert!(with.holds(&spot("/mnt", &[], Some(("9:9", "/disk/x")))));
        assert!(!with.holds(&spot("/mnt", &[], Some(("9:9", "/diskette")))));
        // Moved away, and with something else in its place.
        fs::rename(&folder, base.join("moved")).unwrap();
        fs::create_dir(&folder).unwrap();
        let moved = Territory::of(&mounts, folder.clone(), Some(known)).unwrap();
        assert!(moved.holds(&at(&base.join("moved/a"))) && moved.holds(&at(&folder)));
        // What is not there is where it would be.
        let absent = Spot::around(&mounts, &folder.join("x/y/z")).unwrap();
        assert!(moved.holds(&absent));
        assert!(!moved.holds(&Spot::around(&mounts, &other.join("x")).unwrap()));
    }
}
