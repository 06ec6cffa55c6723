//! Archives that a guest sends are read in jailed processes, as images are ([`crate::unpack`]).
//!
//! ```text
//! guest ─> frames ─> pipe ─> `archive`, a stage ─> pipe ─> whoever unpacks it
//!                    pipe ─> `extract`, a stage ─> one directory of the operator's
//! ```

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::time::{Duration, Instant};

use exocell_images::{FirstEntry, ImageError, ImportLimits, first_entry, pass, unzip};
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, StageError, Task};
use exocell_vmm::jail::{PathAccess, ThreadClass};
use serde::{Deserialize, Serialize};

/// Reads archives and passes them on.
pub const ARCHIVE: Stage = Stage { name: "archive", class: ThreadClass::Stage, work };
/// Unpacks one into a directory.
pub const EXTRACT: Stage =
    Stage { name: "extract", class: ThreadClass::Extract, work: extract_below };

/// What either may take beside the executable itself.
const MEMORY_BYTES: u64 = 512 << 20;
/// The longest file that may come out.
const FILE_BYTES_MAX: u64 = 1 << 40;
/// The longest that unpacking one may take.
const EXTRACT_MAX: Duration = Duration::from_secs(3600);
/// The longest that a look at the beginning of one may take.
const LOOK_MAX: Duration = Duration::from_secs(60);
/// A client may take its time with what is passed on to it.
const PASS_MAX: Duration = Duration::from_secs(24 * 3600);

/// Why an archive did not come through.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// What is wrong with it.
    #[error("{0}")]
    Refused(String),
    /// Whoever sends it, or takes it, failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<StageError> for ArchiveError {
    fn from(error: StageError) -> Self {
        Self::Refused(error.to_string())
    }
}

/// What the stage is asked for.
#[derive(Serialize, Deserialize)]
enum Request {
    /// Descriptors: from where, and where to.
    Pass(Names),
    /// Descriptors: from where, and where to; it is compressed with gzip.
    Gunzip,
    /// A descriptor: the beginning of an archive.
    First,
}

fn limits(time: Duration) -> Limits {
    Limits { deadline: Some(Instant::now() + time), ..Limits::of_memory(MEMORY_BYTES) }
}

/// The names that an archive may have, and those that it is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// What all begin with; without it any name is fine that leads nowhere.
    base: Option<Vec<u8>>,
    /// Whether each loses that.
    strip: bool,
}

impl Names {
    /// Of an archive of `path` in a guest.
    #[must_use]
    pub fn of(path: &str) -> Self {
        let base = base_name(path).map(|name| name.as_bytes().to_vec());
        Self { base, strip: false }
    }

    /// The same for who wants a directory's entries, without its own name.
    #[must_use]
    pub fn inside(path: &str) -> Self {
        let names = Self::of(path);
        Self { strip: names.base.is_some(), ..names }
    }
}

/// What `path` in a guest is called, and all that is below it in an archive of it; `None` of the
/// root, whose archive has no name of its own.
#[must_use]
pub fn base_name(path: &str) -> Option<&OsStr> {
    match Path::new(path).components().next_back() {
        Some(Component::RootDir) => None,
        // `..` and nothing are names that no entry has: no guest has an archive of those.
        part => Some(part.map_or(OsStr::new(""), Component::as_os_str)),
    }
}

/// Passes on to `out` the archive that `write` writes, without what gives rights on a host (set-id
/// bits, attributes, devices), and if its names are `names`, none of which leads out.
///
/// # Errors
/// What is wrong with it, or what `write` or `out` say.
pub fn passed(
    names: &Names,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    out: &mut dyn Write,
) -> Result<(), ArchiveError> {
    through(&Request::Pass(names.clone()), write, |mut read| io::copy(&mut read, out).map(drop))
}

/// Has `read` read what `write` writes with gzip.
///
/// # Errors
/// What is wrong with it, or what `write` or `read` say.
pub fn unzipped<T>(
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    read: impl FnOnce(io::PipeReader) -> io::Result<T>,
) -> Result<T, ArchiveError> {
    through(&Request::Gunzip, write, read)
}

fn through<T>(
    request: &Request,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    read: impl FnOnce(io::PipeReader) -> io::Result<T>,
) -> Result<T, ArchiveError> {
    let (from, to_stage) = io::pipe()?;
    let (from_stage, to) = io::pipe()?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write(to_stage));
        let stage = scope.spawn(move || {
            let given = vec![Given::file(&from), Given::file(&to)];
            let order = Order::new(ARCHIVE.name, given, limits(PASS_MAX));
            // Both pipes end here.
            order.run::<()>(request, |_| ())
        });
        let taken = read(from_stage);
        let passed = stage.join().unwrap_or_else(|_| {
            Err(StageError::Died { stage: ARCHIVE.name, how: "was not waited for".to_owned() })
        });
        let written = writer.join().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
        match (passed, written, taken) {
            // What the sender said last explains an archive that is cut.
            (_, Err(error), _) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            (_, _, Err(error)) => Err(error.into()),
            (Err(error), _, _) => Err(error.into()),
            (Ok(()), _, Ok(taken)) => Ok(taken),
        }
    })
}

/// The first entry of the archive that begins with `head`.
///
/// # Errors
/// What is wrong with it.
pub fn first(head: &[u8]) -> Result<FirstEntry, ArchiveError> {
    // It is shorter than what a socket holds, but a pipe may hold less.
    let (read, write) = io::pipe()?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut write = write;
            // A reader that has seen enough is gone.
            let _ = write.write_all(head);
        });
        let order = Order::new(ARCHIVE.name, vec![Given::file(&read)], limits(LOOK_MAX));
        let found = order.run(&Request::First, |_| ());
        drop(order);
        drop(read);
        Ok(found?)
    })
}

/// Unpacks the archive that `write` writes into `directory`, which is empty. No name and no link in
/// it leads out, whoever else changes it meanwhile.
///
/// # Errors
/// What is wrong with it, or what `write` says.
pub fn extract(
    directory: &impl AsFd,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
) -> Result<(), ArchiveError> {
    let (from, to_stage) = io::pipe()?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write(to_stage));
        let given = vec![Given::file(&from), Given::directory(directory, PathAccess::Write)];
        let limits = Limits { file_bytes: FILE_BYTES_MAX, ..limits(EXTRACT_MAX) };
        let mut order = Order::new(EXTRACT.name, given, limits);
        // Files are the operator's.
        order.keeps_id = true;
        let done = order.run::<()>(&(), |_| ());
        drop(order);
        // With nobody to read it, the writer ends.
        drop(from);
        let written = writer.join().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
        match (done, written) {
            (_, Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            (done, _) => Ok(done?),
        }
    })
}

/// In words about an archive: those of the error itself are about images.
fn refused(error: ImageError) -> Fault {
    Fault::Input(match error {
        ImageError::UnsafePath { path, why } => format!("`{path}` leads out: {why}"),
        ImageError::BadHardLink { path, target, why } => {
            format!("`{path}` is a hard link to `{target}`, {why}")
        }
        ImageError::ParentNotDirectory { path, parent } => {
            format!("`{path}` lies under `{parent}`, which is not a directory")
        }
        error => error.to_string(),
    })
}

fn answer(answer: &impl Serialize) -> Result<Vec<u8>, Fault> {
    serde_json::to_vec(answer).map_err(|error| Fault::Jail(error.to_string()))
}

/// What `archive` does.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let bounds = ImportLimits::default();
    let request = task.request()?;
    let mut from = File::from(task.take(0)?);
    match request {
        Request::Pass(Names { base, strip }) => {
            let mut to = io::BufWriter::with_capacity(64 << 10, File::from(task.take(1)?));
            pass(&mut from, &mut to, base.as_deref(), strip, &bounds).map_err(refused)?;
            answer(&())
        }
        Request::Gunzip => {
            unzip(&mut from, &mut File::from(task.take(1)?)).map_err(refused)?;
            answer(&())
        }
        Request::First => {
            let mut head = Vec::new();
            from.read_to_end(&mut head)?;
            answer(&first_entry(&head, &bounds).map_err(refused)?)
        }
    }
}

/// What `extract` does.
fn extract_below(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let (mut from, directory) = (File::from(task.take(0)?), task.take(1)?);
    let bounds = ImportLimits { apparent_bytes_max: FILE_BYTES_MAX, ..ImportLimits::default() };
    exocell_images::extract(&mut from, &directory, &bounds).map_err(refused)?;
    answer(&())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_of_what_was_asked_for() {
        let names = |base: Option<&str>, strip| Names {
            base: base.map(|base| base.as_bytes().to_vec()),
            strip,
        };
        for (path, base) in [
            ("/one.txt", Some("one.txt")),
            ("/d/", Some("d")),
            ("/d/.", Some("d")),
            ("/", None),
            ("/d/..", Some("..")),
            ("", Some("")),
        ] {
            assert_eq!(Names::of(path), names(base, false), "{path}");
        }
        assert_eq!(Names::inside("/d/."), names(Some("d"), true));
        assert_eq!(Names::inside("/."), names(None, false));
    }
}
