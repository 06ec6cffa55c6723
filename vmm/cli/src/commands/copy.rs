//! `exocell cp`: tar streams into and out of a running cell.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, PipeWriter};
use std::path::Path;

use exocell_cell::agent::{TRANSFER_MAX, client};
use exocell_cell::archive::{self, ArchiveError};
use exocell_cell::images;
use exocell_cell::images::walk::Found;
use exocell_cell::{CellError, Layout};

use super::exec::guest_stream;
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
    let stream = guest_stream(layout, cell)?.within(TRANSFER_MAX);
    if from == "-" {
        return client::upload(&stream, &stream, to, &mut io::stdin()).map(drop).map_err(refused);
    }
    let path = Path::new(from);
    let found = Found::at(path).map_err(CellError::host(format!("cannot read {from}")))?;
    let (directory, name) = target(layout, cell, to, path)?;
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

/// Into which directory of the guest, and under which name: into `to` where
/// that is a directory or ends in `/`, else as `to`.
fn target(
    layout: &Layout,
    cell: &str,
    to: &str,
    from: &Path,
) -> Result<(String, String), CellError> {
    let own = from.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_owned()));
    let own = own
        .and_then(|name| name.into_string().ok())
        .ok_or_else(|| CellError::Usage(format!("{} has no name to copy", from.display())))?;
    match to.rsplit_once('/') {
        Some((parent, name)) if !matches!(name, "" | "." | "..") => {
            if is_directory(layout, cell, to)? {
                return Ok((to.to_owned(), own));
            }
            Ok((format!("{parent}/"), name.to_owned()))
        }
        _ => Ok((to.to_owned(), own)),
    }
}

/// Whether the guest has a directory `path`: one can be looked into.
fn is_directory(layout: &Layout, cell: &str, path: &str) -> Result<bool, CellError> {
    let stream = guest_stream(layout, cell)?;
    // The first frame says enough; the rest is refused.
    let inside = format!("{path}/.");
    match client::download(&stream, &stream, &inside, &mut io::sink(), 0) {
        Ok(_) | Err(client::ClientError::TooMuch { .. }) => Ok(true),
        Err(client::ClientError::Failed { .. }) => Ok(false),
        Err(error) => Err(refused(error)),
    }
}

fn download(layout: &Layout, cell: &str, from: &str, to: &str) -> Result<(), CellError> {
    let stream = guest_stream(layout, cell)?.within(TRANSFER_MAX);
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
        "-" => archive::passed(&archive::Names::of(from), get, &mut io::stdout()).map_err(CopyError::from),
        _ => unpack(layout, get, Path::new(to)),
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

/// Unpacks the archive that `get` gets from a guest: into the directory `to`, or as `to` when that
/// does not exist. Nothing lands outside, and nothing but files, directories and links is made.
fn unpack(
    layout: &Layout,
    get: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    to: &Path,
) -> Result<(), CopyError> {
    let into_directory = to.is_dir();
    let (base, rename) = if into_directory {
        (to, None)
    } else {
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
        (parent.unwrap_or(Path::new(".")), to.file_name())
    };
    let staging = Staging::new(layout, base)?;
    archive::extract(&fs::File::open(staging.path())?, get)?;
    for entry in fs::read_dir(staging.path())? {
        let entry = entry?;
        let name = entry.file_name();
        merge(&entry.path(), &base.join(rename.unwrap_or(&name)))?;
    }
    Ok(())
}

/// Moves `from` to `to`; directories are merged, files replaced.
fn merge(from: &Path, to: &Path) -> io::Result<()> {
    let both_directories = fs::symlink_metadata(from)?.is_dir()
        && fs::symlink_metadata(to).is_ok_and(|metadata| metadata.is_dir());
    if !both_directories {
        return fs::rename(from, to);
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        merge(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
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
}
