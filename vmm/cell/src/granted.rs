//! The host's folders that a cell is granted: found once, when the cell is made, and the same ones
//! at each start.
//!
//! A folder may lie in another that a cell may write. That cell can put a link in its place, and
//! would be given what the link leads to at the next start. So links on the way are followed once,
//! for the operator, and only where no cell and no module that is served can have made them; what
//! was found then is written down, and opened later without following any.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use exocell_images::walk::{Directory, Found};
use exocell_xgate::{CapabilitySet, Folder, Rights};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::compile::Module;
use crate::plan::PlannedFolder;
use crate::territory::{Identity, Mounts, Spot, Territory};
use crate::{CellError, Layout, Record, served};

/// Tells one start of the host from another (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where a granted folder was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Location {
    /// As the capability table has it.
    folder: PathBuf,
    /// Where that is; no part is a link.
    real: PathBuf,
    device: u64,
    inode: u64,
    /// Devices are numbered anew at each start of the host.
    boot: String,
    /// Whether nobody but cells writes around it, so that no other is ever taken in its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_cells: bool,
    /// A socket is a new file each time when its server begins: it is known by its directory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_socket: bool,
}

impl Location {
    fn new(folder: &Path, found: &Found) -> io::Result<Self> {
        let (folder, real) = (folder.to_owned(), found.path()?);
        let is_socket = found.metadata().file_type().is_socket();
        let around = match real.parent().filter(|_| is_socket) {
            Some(parent) => Some(Found::real(parent)?),
            None => None,
        };
        let metadata = around.as_ref().unwrap_or(found).metadata();
        let (device, inode) = (metadata.dev(), metadata.ino());
        Ok(Self { folder, real, device, inode, boot: boot()?, is_cells: false, is_socket })
    }

    /// As the capability table has it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where that is; no part is a link.
    #[must_use]
    pub fn real(&self) -> &Path {
        &self.real
    }

    /// Whether it is a socket.
    #[must_use]
    pub fn is_socket(&self) -> bool {
        self.is_socket
    }

    /// Which folder it is, as long as the host does not start anew.
    fn identity(&self, boot: &str) -> Option<Identity> {
        (self.boot == boot).then_some((self.device, self.inode))
    }

    /// Finds it again, if it is still there.
    fn find(&self) -> Result<Found, CellError> {
        let replaced = || {
            CellError::Usage(format!(
                "the folder {} was replaced since the cell was made: {} is not the folder that it \
                 was; put that back, or make the cell anew",
                self.folder.display(),
                self.real.display()
            ))
        };
        let failed =
            || CellError::host(format!("cannot open the folder {}", self.folder.display()));
        let found = match Found::real(&self.real) {
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ELOOP | Errno::ENOTDIR | Errno::ENOENT) => return Err(replaced()),
                _ => return Err(failed()(error)),
            },
            Ok(found) => found,
        };
        let now = Self::new(&self.folder, &found).map_err(failed())?;
        let same_device = self.device == now.device || self.boot != now.boot;
        match same_device && self.inode == now.inode && self.is_socket == now.is_socket {
            true => Ok(found),
            false => Err(replaced()),
        }
    }
}

fn boot() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// Which links the operator's paths may go through.
pub struct Links<'a> {
    layout: &'a Layout,
    caps: Option<&'a CapabilitySet>,
}

impl<'a> Links<'a> {
    /// For a cell that is to have `caps`.
    #[must_use]
    pub fn of(layout: &'a Layout, caps: &'a CapabilitySet) -> Self {
        Self { layout, caps: Some(caps) }
    }

    /// For what is no folder of a cell's, but may lie in one.
    #[must_use]
    pub fn outside(layout: &'a Layout) -> Self {
        Self { layout, caps: None }
    }

    /// The directory at `path`.
    ///
    /// # Errors
    /// As of open(2), and for a link that a cell can have made.
    pub fn directory(&self, path: &Path) -> io::Result<Directory> {
        self.open(path, false)?.directory()
    }

    /// What `path` names, a link if it is one.
    ///
    /// # Errors
    /// As of open(2), and for a link on the way that a cell can have made.
    pub fn find(&self, path: &Path) -> io::Result<Found> {
        let bytes = path.as_os_str().as_bytes();
        let is_directory = bytes.ends_with(b"/") || bytes.ends_with(b"/.");
        match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) if !is_directory => self.directory(parent)?.find(name),
            _ => self.directory(path)?.find("."),
        }
    }

    /// The directory that `path` is in, and what it is called there. The name itself may be a link.
    ///
    /// # Errors
    /// As of [`Self::directory`], and for a path that does not end in a name.
    pub fn place<'p>(&self, path: &'p Path) -> io::Result<(Directory, &'p OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        Ok((self.directory(parent.unwrap_or(Path::new(".")))?, name))
    }

    /// Where the directory at `path` is, made where it is missing: one in which no cell may put
    /// links in the way of what is written there.
    ///
    /// # Errors
    /// As of [`Self::locate`], and for a directory that a cell may write.
    pub fn own(&self, path: &Path) -> io::Result<PathBuf> {
        let found = self.open(path, true)?;
        let mounts = Mounts::read()?;
        match self.writer(&mounts, &Spot::of(&mounts, &found)?)? {
            None => found.path(),
            Some(writable) => Err(io::Error::other(format!(
                "a cell may write {}, and lead elsewhere what is written there; name another \
                 directory",
                writable.display()
            ))),
        }
    }

    /// What `path` leads to.
    ///
    /// # Errors
    /// As of open(2), and for a link that a cell can have made.
    pub fn follow(&self, path: &Path) -> io::Result<Found> {
        self.open(path, false)
    }

    /// Where that is: no part of that path is a link.
    ///
    /// # Errors
    /// As of [`Self::follow`].
    pub fn real(&self, path: &Path) -> io::Result<PathBuf> {
        self.follow(path)?.path()
    }

    /// The text at `path`, and where that is. A pipe of the operator's is read to its end; what a
    /// cell can have put there has to be a file, which is never waited for.
    ///
    /// # Errors
    /// As of [`Self::follow`] and read(2); text that is not UTF-8, or longer than `bytes_max`.
    pub fn text(&self, path: &Path, bytes_max: u64) -> io::Result<(String, PathBuf)> {
        if is_descriptor(path) {
            let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            return Ok((bounded_text(File::open(path)?, bytes_max)?, real));
        }
        let found = self.follow(path)?;
        let real = found.path()?;
        let file = match found.metadata().is_file() || self.writer_at(&real)?.is_some() {
            true => found.file()?,
            false => File::open(&real)?,
        };
        Ok((bounded_text(file, bytes_max)?, real))
    }

    /// The text of the file at `path`, which no cell may change; nothing is waited for but a
    /// descriptor of the operator's.
    ///
    /// # Errors
    /// As of [`Self::text`]; a file that a cell may write, and what is no file.
    pub fn untouched(&self, path: &Path, bytes_max: u64) -> io::Result<String> {
        if is_descriptor(path) {
            return bounded_text(File::open(path)?, bytes_max);
        }
        let found = self.follow(path)?;
        match self.writer_at(&found.path()?)? {
            None => bounded_text(found.file()?, bytes_max),
            Some(writable) => Err(cells_place(&writable)),
        }
    }

    /// Where a file at `path` would be, in a directory that is there and that no cell may write.
    ///
    /// # Errors
    /// As of [`Self::place`], and for a directory that a cell may write.
    pub fn untouched_place(&self, path: &Path) -> io::Result<PathBuf> {
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let place = self.real(parent.unwrap_or(Path::new(".")))?.join(name);
        match self.writer_at(&place)? {
            None => Ok(place),
            Some(writable) => Err(cells_place(&writable)),
        }
    }

    /// A copy of the module at `path`.
    ///
    /// # Errors
    /// As of [`Self::follow`] and [`Module::read`].
    pub fn module(&self, path: &Path) -> Result<Module, CellError> {
        let what = || format!("cannot read the module {}", path.display());
        Module::read(&self.follow(path).map_err(CellError::host(what()))?, path)
    }

    /// Finds `folder`, with `make` where it is missing, too.
    ///
    /// # Errors
    /// As of open(2) and mkdir(2), and for a link that a cell can have made.
    pub fn locate(&self, folder: &Path, make: bool) -> io::Result<Location> {
        Location::new(folder, &self.open(folder, make)?)
    }

    /// Finds what is at `below` in `base`, where cells put what they like: no link is followed. The
    /// capability table has it as `folder`.
    ///
    /// # Errors
    /// As of open(2), ELOOP and ENOTDIR for a link, and for a path that leads out.
    pub fn locate_within(&self, folder: &Path, base: &Path, below: &Path) -> io::Result<Location> {
        let is_below = |part| matches!(part, Component::Normal(_) | Component::CurDir);
        if !below.components().all(is_below) {
            return Err(io::Error::other("it leads out of the volume"));
        }
        let found = Found::real(&self.real(base)?.join(below))?;
        if !found.metadata().is_dir() && !found.metadata().is_file() {
            return Err(io::Error::other(
                "it is neither a folder nor a regular file, and no link is followed there",
            ));
        }
        Ok(Location { is_cells: true, ..Location::new(folder, &found)? })
    }

    /// Where `path` is, or would be.
    fn settle(&self, path: &Path, what: &str) -> Result<PathBuf, CellError> {
        match self.real(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.to_owned()),
            real => {
                real.map_err(CellError::host(format!("cannot read {}, {what}", path.display())))
            }
        }
    }

    fn open(&self, folder: &Path, make: bool) -> io::Result<Found> {
        Found::resolve(folder, make, &mut |directory, name| {
            let mounts = Mounts::read()?;
            match self.writer(&mounts, &Spot::of(&mounts, directory)?)? {
                None => Ok(()),
                Some(writable) => Err(io::Error::other(format!(
                    "its path goes through the link {}, and a cell may write {}; name what the \
                     link leads to",
                    directory.path()?.join(name).display(),
                    writable.display()
                ))),
            }
        })
    }

    /// The folder with what is at `path` in it that this cell, or another, may write; so may a
    /// module that is served.
    fn writer_at(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let mounts = Mounts::read()?;
        self.writer(&mounts, &Spot::around(&mounts, path)?)
    }

    /// The same, for what is in the directory at `spot`.
    fn writer(&self, mounts: &Mounts, spot: &Spot) -> io::Result<Option<PathBuf>> {
        let cells = Record::all(self.layout).map_err(io::Error::other)?;
        let cells = cells.iter().filter_map(|(_, spec, _)| {
            let caps = CapabilitySet::parse(&spec.capabilities, Path::new("/")).ok()?;
            Some((caps, spec.locations.clone()))
        });
        let served = served::tables(self.layout)?;
        let others = served.into_iter().chain(self.caps.cloned()).map(|caps| (caps, Vec::new()));
        let boot = boot()?;
        for (caps, locations) in cells.chain(others) {
            let is_writable = |folder: &&Folder| folder.rights.contains(Rights::WRITE);
            for folder in caps.folders().iter().filter(is_writable) {
                let found = locations.iter().find(|found| found.folder == folder.host);
                if found.is_some_and(|found| found.is_socket) {
                    // Nothing lies in one.
                    continue;
                }
                let real = found.map(|found| found.real.clone());
                // One that is not there yet holds no link.
                let Some(real) = real.or_else(|| folder.host.canonicalize().ok()) else { continue };
                let known = found.and_then(|found| found.identity(&boot));
                if Territory::of(mounts, real, known)?.holds(spot) {
                    return Ok(Some(folder.host.clone()));
                }
            }
        }
        Ok(None)
    }
}

fn cells_place(writable: &Path) -> io::Error {
    io::Error::other(format!(
        "a cell may write {}, and change what is there; name a place that no cell has",
        writable.display()
    ))
}

/// Whether `path` names a descriptor of this process, which no cell can have made.
fn is_descriptor(path: &Path) -> bool {
    let folders = ["/dev/fd", "/proc/self/fd"];
    path == Path::new("/dev/stdin")
        || path.parent().is_some_and(|folder| folders.iter().any(|own| folder == Path::new(own)))
}

/// The same grant with each model's file where it is, so that no link is followed later. What is
/// not there is told when it is to be read.
///
/// # Errors
/// A file whose path goes through a link that a cell can have made.
pub fn settle_models(layout: &Layout, caps: CapabilitySet) -> Result<CapabilitySet, CellError> {
    let links = Links::of(layout, &caps);
    let mut files = Vec::new();
    for model in caps.models() {
        let what = format!("the file of the model {}", model.name);
        files.push(links.settle(&model.file, &what)?);
    }
    Ok(caps.with_model_files(files))
}

/// The same with each folder where it is, too: for a grant that is kept and has no record.
///
/// # Errors
/// As of [`settle_models`].
pub fn settle(layout: &Layout, caps: CapabilitySet) -> Result<CapabilitySet, CellError> {
    let links = Links::of(layout, &caps);
    let mut hosts = Vec::new();
    for folder in caps.folders() {
        hosts.push(links.settle(&folder.host, &format!("the folder {}", folder.guest.display()))?);
    }
    settle_models(layout, caps.with_folder_hosts(hosts))
}

/// Finds every folder of the grant, or file, each where it was found when the cell was made.
pub(crate) fn find(
    layout: &Layout,
    caps: &CapabilitySet,
    locations: &[Location],
) -> Result<Vec<(Found, Folder)>, CellError> {
    let links = Links::of(layout, caps);
    let find = |granted: &Folder| {
        let known = locations.iter().find(|found| found.folder == granted.host);
        let again = || links.open(&granted.host, false).map_err(unopened(granted));
        let found = match known {
            None => again()?,
            Some(known) => match (known.find(), links.writer_at(&known.real)) {
                (Ok(found), _) => found,
                (Err(replaced), _) if known.is_cells => return Err(replaced),
                // What no cell can have put there, the operator has.
                (Err(_), Ok(None)) => again()?,
                (Err(replaced), _) => return Err(replaced),
            },
        };
        Ok((found, granted.clone()))
    };
    caps.folders().iter().map(find).collect()
}

/// The same, opened as folders.
pub(crate) fn open(
    layout: &Layout,
    caps: &CapabilitySet,
    locations: &[Location],
) -> Result<Vec<PlannedFolder>, CellError> {
    let open = |(found, granted): (Found, Folder)| {
        if found.metadata().file_type().is_socket() {
            return Err(CellError::Usage(format!(
                "{} is a socket of the host, to which vm cells can connect and isolates cannot;                  for a service of the host grant a name or an address (--allow-net)",
                granted.host.display()
            )));
        }
        let dir = found.directory().map_err(unopened(&granted))?;
        Ok(PlannedFolder { dir: dir.into(), granted })
    };
    find(layout, caps, locations)?.into_iter().map(open).collect()
}

/// What to say of a folder that cannot be opened.
pub(crate) fn unopened(granted: &Folder) -> impl FnOnce(io::Error) -> CellError + use<> {
    CellError::host(format!("cannot open the folder {} (--volume)", granted.host.display()))
}

/// The longest text of variables, labels or rules, in bytes. A cell can make a file of any size in
/// a folder, of which nothing is on the disk.
pub const TEXT_BYTES_MAX: u64 = 4 << 20;

fn bounded_text(file: File, bytes_max: u64) -> io::Result<String> {
    let mut text = String::new();
    file.take(bytes_max.saturating_add(1)).read_to_string(&mut text)?;
    match text.len() as u64 > bytes_max {
        true => Err(io::Error::other(format!("it is longer than {bytes_max} bytes"))),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    fn caps(folders: &[(&Path, &str)]) -> CapabilitySet {
        let folders: Vec<_> = folders
            .iter()
            .enumerate()
            .map(|(at, (host, right))| {
                serde_json::json!({
                    "host": host, "guest": format!("/f{at}"), "rights": ["read", right],
                })
            })
            .collect();
        let table = serde_json::json!({ "version": 1, "folder": folders });
        CapabilitySet::parse(&table.to_string(), Path::new("/")).unwrap()
    }

    fn is(opened: &PlannedFolder, path: &Path) -> bool {
        let stat = nix::sys::stat::fstat(&opened.dir).unwrap();
        fs::metadata(path).unwrap().ino() == stat.st_ino
    }

    #[test]
    fn a_folder_is_at_each_start_what_it_was_when_the_cell_was_made() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let (app, data, host) = (base.join("app"), base.join("app/data"), base.join("host"));
        fs::create_dir_all(&data).unwrap();
        fs::create_dir(&host).unwrap();
        symlink(&base, base.join("operators")).unwrap();
        let layout = Layout::new(base.join("root"));
        let named = base.join("operators/app/data");
        let caps = caps(&[(&app, "write"), (&named, "write")]);
        let links = Links::of(&layout, &caps);
        // The operator's own link is not in a folder of a cell's.
        let found = vec![links.locate(&named, false).unwrap()];
        let opened = open(&layout, &caps, &found).unwrap();
        assert!(is(&opened[0], &app) && is(&opened[1], &data));
        // The cell puts a link in the folder's place; one of its own folders; nothing.
        fs::rename(&data, app.join("moved")).unwrap();
        symlink(&host, &data).unwrap();
        let refused = |locations: &[Location], word: &str| {
            let said = open(&layout, &caps, locations).map(drop).unwrap_err().to_string();
            assert!(said.contains(word), "{said}");
        };
        refused(&found, "was replaced since the cell was made");
        // For a new cell the link may be one that a cell has left.
        refused(&[], "goes through the link");
        fs::remove_file(&data).unwrap();
        fs::create_dir(&data).unwrap();
        refused(&found, "was replaced since the cell was made");
        fs::remove_dir(&data).unwrap();
        refused(&found, "was replaced since the cell was made");
        // What no cell can have put there is the operator's.
        let own = self::caps(&[(&host, "write")]);
        let found_host = vec![Links::of(&layout, &own).locate(&host, false).unwrap()];
        fs::remove_dir(&host).unwrap();
        fs::create_dir(&host).unwrap();
        assert!(is(&open(&layout, &own, &found_host).unwrap()[0], &host));
        // Put back, it is the folder again, under another name of the device after a boot, too.
        fs::rename(app.join("moved"), &data).unwrap();
        let mut later = found.clone();
        (later[0].boot, later[0].device) = ("another".to_owned(), 0);
        assert!(is(&open(&layout, &caps, &later).unwrap()[1], &data));
        (later[0].boot, later[0].device) = (found[0].boot.clone(), 0);
        refused(&later, "was replaced");
    }

    #[test]
    fn what_an_operator_names_is_not_behind_a_cells_links_and_is_not_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let (app, host) = (base.join("app"), base.join("host"));
        fs::create_dir(&app).unwrap();
        fs::write(&host, "A=1").unwrap();
        symlink(&host, app.join("link")).unwrap();
        symlink(&host, base.join("operators")).unwrap();
        fs::write(app.join("own"), "B=2").unwrap();
        let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
        nix::unistd::mkfifo(&app.join("fifo"), mode).unwrap();
        let layout = Layout::new(base.join("root"));
        let table = |model: &str| {
            serde_json::json!({
                "version": 1,
                "folder": [{ "host": app, "guest": "/f", "rights": ["read", "write"] }],
                "model": [{ "name": "m", "file": base.join(model) }],
            })
        };
        let caps = |model| CapabilitySet::parse(&table(model).to_string(), Path::new("/")).unwrap();
        let own = caps("operators");
        let links = Links::of(&layout, &own);
        assert_eq!(
            links.text(&base.join("operators"), TEXT_BYTES_MAX).unwrap(),
            ("A=1".to_owned(), host.clone())
        );
        assert_eq!(links.text(&app.join("own"), TEXT_BYTES_MAX).unwrap().0, "B=2");
        assert!(links.text(&app.join("own"), 2).unwrap_err().to_string().contains("longer"));
        for refused in ["link", "fifo", "."] {
            links.text(&app.join(refused), TEXT_BYTES_MAX).unwrap_err();
        }
        links.real(&app.join("link")).unwrap_err();
        // The operator's own pipe is read, by whatever name.
        let (read, write) = nix::unistd::pipe().unwrap();
        File::from(write).write_all(b"C=3").unwrap();
        let name = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read));
        assert_eq!(links.text(Path::new(&name), TEXT_BYTES_MAX).unwrap().0, "C=3");
        // A model is where its link led to.
        assert_eq!(settle_models(&layout, own.clone()).unwrap().models()[0].file, host);
        settle_models(&layout, caps("app/link")).unwrap_err();
        settle_models(&layout, caps("absent")).unwrap();
    }

    #[test]
    fn folders_are_made_and_not_behind_a_cells_links() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let (app, host) = (base.join("app"), base.join("host"));
        fs::create_dir(&app).unwrap();
        fs::create_dir(&host).unwrap();
        symlink(&host, app.join("link")).unwrap();
        symlink(&host, base.join("operators")).unwrap();
        let layout = Layout::new(base.join("root"));
        let caps = caps(&[(&app, "write")]);
        let links = Links::of(&layout, &caps);
        links.locate(&app.join("link/made"), true).unwrap_err();
        fs::write(host.join("s"), "of the host").unwrap();
        links.find(&app.join("link/s")).unwrap_err();
        assert!(links.find(&app.join("link")).unwrap().metadata().is_symlink());
        links.find(&base.join("operators/s")).unwrap();
        assert!(links.find(&base.join("operators/")).unwrap().is_directory());
        links.find(&base.join("operators/..")).unwrap();
        fs::remove_file(host.join("s")).unwrap();
        assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
        let made = links.locate(&base.join("operators/a/b"), true).unwrap();
        assert_eq!(made.real, host.join("a/b"));
        links.locate(&base.join("operators/c"), false).unwrap_err();
    }
}
