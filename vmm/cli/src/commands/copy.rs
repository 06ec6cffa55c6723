//! `exocell cp`: tar streams into and out of a cell, whether it runs or has ended.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::{self, PipeWriter};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use exocell_cell::agent::{Patient, TRANSFER_MAX, client};
use exocell_cell::archive::{self, ArchiveError};
use exocell_cell::granted::Links;
use exocell_cell::images;
use exocell_cell::images::walk::Found;
use exocell_cell::{CellError, Layout};

use super::reach::Reach;
use super::staging::Staging;
use crate::args::CpArgs;

/// A guest cannot fill the host with one copy: bytes of a download.
const DOWNLOAD_BYTES_MAX: u64 = 64 << 30;

pub fn cp(layout: &Layout, args: &CpArgs) -> Result<u8, CellError> {
    match (split(&args.from), split(&args.to)) {
        (None, Some((cell, path))) => upload(layout, &args.from, cell, path),
        (Some((cell, path)), None) => download(layout, cell, path, &args.to),
        _ => Err(CellError::Usage(
            "one side is CELL:PATH and the other a PATH of this host or -".to_owned(),
        )),
    }?;
    Ok(0)
}

/// `CELL:PATH`; a path of the host starts with `/`, `.` or has no colon.
fn split(argument: &str) -> Option<(&str, &str)> {
    let local = argument.starts_with(['/', '.']);
    argument.split_once(':').filter(|(cell, _)| !local && !cell.is_empty())
}

fn refused(error: client::ClientError) -> CellError {
    CellError::Guest(error.to_string())
}

fn upload(layout: &Layout, from: &str, cell: &str, to: &str) -> Result<(), CellError> {
    let reach = Reach::cell(layout, cell)?;
    let stream = reach.guest_to_write()?.within(TRANSFER_MAX);
    if from == "-" {
        return client::upload(&stream, &stream, to, &mut io::stdin()).map(drop).map_err(refused);
    }
    let path = Path::new(from);
    let found = Links::outside(layout)
        .find(path)
        .map_err(CellError::host(format!("cannot read {from}")))?;
    let (directory, name) = match is_contents(path) {
        // What is in the directory comes into `to`, which is made where it is not there.
        true => (format!("{}/", to.trim_end_matches('/')), ".".to_owned()),
        false => target(&reach, to, own_name(path, &found)?)?,
    };
    // The archive is made while it is sent: a pipe joins the two.
    let (read, write) = io::pipe().map_err(CellError::host("cannot make a pipe"))?;
    std::thread::scope(|scope| {
        let mut write = io::BufWriter::with_capacity(64 << 10, write);
        let archiver = scope.spawn(move || images::archive(&found, OsStr::new(&name), &mut write));
        let sent = client::upload(&stream, &stream, &directory, &mut { read }).map_err(refused);
        let archived = match archiver.join() {
            Ok(result) => result.map_err(CellError::host(format!("cannot read {from}"))),
            Err(_) => Err(CellError::Usage(format!("cannot archive {from}"))),
        };
        sent.map(drop).and(archived)
    })
}

/// Whether `path` means what is in a directory, as docker has it: `DIR/.`, and `.`.
fn is_contents(path: &Path) -> bool {
    let path = path.as_os_str().as_bytes();
    path == b"." || path.ends_with(b"/.")
}

/// What a copy of `found`, which `path` names, is called: as it is called there, a link too.
fn own_name(path: &Path, found: &Found) -> Result<String, CellError> {
    let named = !path.as_os_str().as_bytes().ends_with(b"/.");
    let name = path.file_name().filter(|_| named).map(OsStr::to_owned);
    // `.` and `..` have the name of what they are.
    let name = name.or_else(|| Some(found.path().ok()?.file_name()?.to_owned()));
    name.and_then(|name| name.into_string().ok())
        .ok_or_else(|| CellError::Usage(format!("{} has no name to copy", path.display())))
}

/// Into which directory of the guest, and under which name: into `to` where
/// that is a directory or ends in `/`, else as `to`.
fn target(reach: &Reach, to: &str, own: String) -> Result<(String, String), CellError> {
    match to.rsplit_once('/') {
        Some((parent, name)) if !matches!(name, "" | "." | "..") => {
            if is_directory(&reach.guest()?, to)? {
                return Ok((to.to_owned(), own));
            }
            Ok((format!("{parent}/"), name.to_owned()))
        }
        _ => Ok((to.to_owned(), own)),
    }
}

/// Whether the guest at the other end of `stream`, which is used up, has a directory `path`: one
/// can be looked into.
pub(super) fn is_directory(stream: &Patient, path: &str) -> Result<bool, CellError> {
    // The first frame says enough; the rest is refused.
    let inside = format!("{path}/.");
    match client::download(stream, stream, &inside, &mut io::sink(), 0) {
        Ok(_) | Err(client::ClientError::TooMuch { .. }) => Ok(true),
        Err(client::ClientError::Failed { .. }) => Ok(false),
        Err(error) => Err(refused(error)),
    }
}

fn download(layout: &Layout, cell: &str, from: &str, to: &str) -> Result<(), CellError> {
    let reach = Reach::cell(layout, cell)?;
    let stream = reach.guest()?.within(TRANSFER_MAX);
    let mut refusal = None;
    let get = |mut write: PipeWriter| {
        let got = client::download(&stream, &stream, from, &mut write, DOWNLOAD_BYTES_MAX);
        got.map(drop).map_err(|error| match error {
            client::ClientError::Local(error) => error,
            error => {
                let said = io::Error::other(error.to_string());
                refusal = Some(error);
                said
            }
        })
    };
    let done = match to {
        "-" => {
            let names = archive::Names::of(from);
            archive::passed(&names, get, &mut io::stdout()).map_err(CopyError::from)
        }
        _ => unpack(layout, get, from, Path::new(to)),
    };
    match (done, refusal) {
        (_, Some(error)) => Err(refused(error)),
        (Ok(()), None) => Ok(()),
        (Err(CopyError::Archive(ArchiveError::Refused(words))), None) => {
            Err(CellError::Guest(format!("what it sent cannot be unpacked: {words}")))
        }
        (Err(CopyError::Archive(ArchiveError::Io(error)) | CopyError::Io(error)), None) => {
            Err(CellError::host(format!("cannot write {to}"))(error))
        }
    }
}

/// Why nothing, or not all, was copied.
#[derive(Debug)]
enum CopyError {
    Archive(ArchiveError),
    Io(io::Error),
}

impl From<ArchiveError> for CopyError {
    fn from(error: ArchiveError) -> Self {
        Self::Archive(error)
    }
}

impl From<io::Error> for CopyError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Unpacks the archive of `from` that `get` gets from a guest: into the directory `to`, or as `to`
/// when that does not exist. Nothing lands outside, and nothing but files, directories and links
/// is made, all called or below what `from` is called.
///
/// What lies in `to` may be a cell's, which changes it meanwhile: its names are used in directories
/// that are open, and no link of a cell's is followed.
fn unpack(
    layout: &Layout,
    get: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    from: &str,
    to: &Path,
) -> Result<(), CopyError> {
    let there = std::fs::symlink_metadata(to).map(|there| there.file_type());
    if there.is_ok_and(|kind| !kind.is_file() && !kind.is_dir() && !kind.is_symlink()) {
        let words = "it is a device, a pipe or a socket, which is not replaced; copy to a file or a \
                     directory, or to `-` for an archive";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, words).into());
    }
    let links = Links::outside(layout);
    let (directory, rename) = match links.directory(to) {
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {
            let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = links.directory(parent.unwrap_or(Path::new(".")))?;
            match (archive::base_name(from), to.file_name()) {
                // All of a cell is what the new directory holds.
                (None, Some(name)) => (parent.make(name, 0o755)?, None),
                (_, name) => (parent, name),
            }
        }
        opened => (opened?, None),
    };
    let staging = Staging::new(layout, &directory)?;
    archive::extract(staging.directory(), get)?;
    let names = staging.directory().names()?;
    let names = wanted(names, archive::base_name(from), rename.is_some())?;
    for name in names {
        staging.directory().merge(&name, &directory, rename.unwrap_or(&name))?;
    }
    Ok(())
}

/// Those of `names` that come of a copy of what is called `base`: all, or none. As `one`, no more.
fn wanted(
    names: Vec<OsString>,
    base: Option<&OsStr>,
    one: bool,
) -> Result<Vec<OsString>, ArchiveError> {
    let other = base.and_then(|base| names.iter().find(|name| *name != base));
    if let Some(other) = other {
        let (other, base) = (other.display(), base.unwrap_or_default().display());
        return Err(ArchiveError::Refused(format!("`{other}`, where `{base}` was asked for")));
    }
    match names.len() {
        1 => Ok(names),
        0 => Err(ArchiveError::Refused("no file, directory or link".to_owned())),
        count if one => {
            let why = format!("{count} files and directories; copy into a directory that is there");
            Err(ArchiveError::Refused(why))
        }
        _ => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cells_path_is_told_from_a_hosts() {
        assert_eq!(split("job:/x"), Some(("job", "/x")));
        assert_eq!(split("./a:b"), None);
        assert_eq!(split("/a:b"), None);
        assert_eq!(split("plain"), None);
    }

    #[test]
    fn a_copy_is_called_as_it_was_named() {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().canonicalize().unwrap();
        let (file, link) = (base.join("file"), base.join("link"));
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let name = |path: &Path| own_name(path, &Found::at(path).unwrap()).unwrap();
        // Not as what the link leads to, which is another's to choose.
        assert_eq!((name(&file), name(&link)), ("file".to_owned(), "link".to_owned()));
        let own = base.file_name().unwrap().to_str().unwrap();
        assert_eq!(name(&base), own);
        std::fs::create_dir(base.join("d")).unwrap();
        assert_eq!((name(&base.join("d/.")), name(&base.join("d/.."))), ("d".into(), own.into()));
        assert!(own_name(Path::new("/"), &Found::at(Path::new("/")).unwrap()).is_err());
    }

    #[test]
    fn a_guest_names_nothing_but_what_was_asked_for() {
        let names = |names: &[&str]| names.iter().map(OsString::from).collect::<Vec<_>>();
        let base = Some(OsStr::new("wanted.txt"));
        assert_eq!(wanted(names(&["wanted.txt"]), base, true).unwrap(), ["wanted.txt"]);
        for hostile in [&[".bashrc", "wanted.txt"][..], &[".ssh"], &[]] {
            wanted(names(hostile), base, false).unwrap_err();
            wanted(names(hostile), base, true).unwrap_err();
        }
        // Of its whole root: into a directory, not as one.
        assert_eq!(wanted(names(&["bin", "etc"]), None, false).unwrap(), ["bin", "etc"]);
        wanted(names(&["bin", "etc"]), None, true).unwrap_err();
    }
}
