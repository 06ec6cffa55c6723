//! The files of a build, out of its client's sessions.

use std::io::{self, Read};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use exocell_cell::compose;
use exocell_cell::images::dockerfile::ignore::{self, Ignore};
use exocell_cell::images::{Rootfs, dockerfile};
use tokio::runtime::Handle;

use super::attributes::{Asked, Source};
use super::jobs::Job;
use super::lines::at;
use crate::build::call::{CONTEXT_BYTES_MAX, files as unpacked};
use crate::grpc::{Code, Result, Status};
use crate::progress::Progress;
use crate::session::messages::Chunk;
use crate::session::{Patient, Session, Wanted, transfer};
use crate::state::Server;

const IGNORE: &str = ".dockerignore";
/// Bytes of all patterns of what is left out: they are in the head of a call.
const PATTERNS_BYTES_MAX: usize = 256 << 10;

/// Whom a build asks for files.
pub struct Client<'a> {
    pub server: &'a Arc<Server>,
    pub handle: &'a Handle,
    pub job: &'a Job,
    pub session: &'a Session,
}

/// What a build is made of.
pub struct Taken {
    pub context: Rootfs,
    pub dockerfile: String,
}

impl Client<'_> {
    /// Has an exchange waited for by this thread.
    pub fn patient(&self, exchange: crate::grpc::client::Exchange) -> Patient<'_> {
        Patient { handle: self.handle, exchange, stop: self.job.stop.subscribe() }
    }

    /// The Dockerfile, and the files that it is about.
    ///
    /// # Errors
    /// The client does not give them, or what it gives makes no sense.
    pub fn take(&self, asked: &Asked, progress: &mut Progress) -> Result<Taken> {
        progress.begin(&format!("[internal] load build definition from {}", asked.file));
        let name = asked.file.rsplit('/').next().unwrap_or_default();
        let own_ignore = format!("{}{IGNORE}", asked.file);
        let other = (name == "Dockerfile").then(|| {
            format!("{}dockerfile", asked.file.strip_suffix("Dockerfile").unwrap_or_default())
        });
        let only = [Some(asked.file.clone()), Some(own_ignore.clone()), other.clone()];
        let only = only.into_iter().flatten().collect();
        let around =
            self.files(&asked.file_in, asked, Wanted { only, ..Wanted::default() }, progress)?;
        let mut found = text(&around, &asked.file, dockerfile::BYTES_MAX)?;
        if let (None, Some(other)) = (&found, &other) {
            found = text(&around, other, dockerfile::BYTES_MAX)?;
        }
        let text_of = found.ok_or_else(|| {
            Status::new(Code::NotFound, format!("there is no Dockerfile {}", asked.file))
        })?;
        let dockerfile = match dockerfile::read(&text_of) {
            Ok(_) => text_of,
            Err(error) => {
                let words = format!("dockerfile parse error: {error}");
                return Err(at(Status::invalid(words), &asked.file, &text_of, error.line));
            }
        };
        let context = match &asked.context {
            // It is all there.
            Source::Archive(_) if asked.context == asked.file_in => around,
            Source::Archive(_) => self.context(asked, Vec::new(), progress)?,
            Source::Directory(_) => {
                progress.begin(&format!("[internal] load {IGNORE}"));
                let ignored = match text(&around, &own_ignore, ignore::BYTES_MAX)? {
                    Some(ignored) => Some(ignored),
                    None => {
                        let only = vec![IGNORE.to_owned()];
                        let wanted = Wanted { only, ..Wanted::default() };
                        let found = self.files(&asked.context, asked, wanted, progress)?;
                        text(&found, IGNORE, ignore::BYTES_MAX)?
                    }
                };
                self.context(asked, patterns(&ignored.unwrap_or_default())?, progress)?
            }
        };
        progress.end(None);
        Ok(Taken { context, dockerfile })
    }

    fn context(
        &self,
        asked: &Asked,
        left_out: Vec<String>,
        progress: &mut Progress,
    ) -> Result<Rootfs> {
        progress.begin("[internal] load build context");
        self.files(&asked.context, asked, Wanted { left_out, ..Wanted::default() }, progress)
    }

    /// The files of a directory of the client's, below no other name.
    ///
    /// # Errors
    /// The client does not give them.
    pub fn directory(&self, name: &str, asked: &Asked, progress: &mut Progress) -> Result<Rootfs> {
        let source = Source::Directory(name.to_owned());
        progress.begin(&format!("[context {name}] load from client"));
        let only = vec![IGNORE.to_owned()];
        let found = self.files(&source, asked, Wanted { only, ..Wanted::default() }, progress)?;
        let ignored = text(&found, IGNORE, ignore::BYTES_MAX)?;
        let left_out = patterns(&ignored.unwrap_or_default())?;
        let found = self.files(&source, asked, Wanted { left_out, ..Wanted::default() }, progress);
        progress.end(found.as_ref().err().map(|status| status.words.as_str()));
        found
    }

    fn files(
        &self,
        source: &Source,
        asked: &Asked,
        wanted: Wanted,
        progress: &Progress,
    ) -> Result<Rootfs> {
        let store = self.server.images().map_err(|error| Status::invalid(error.message))?;
        match source {
            Source::Directory(name) => {
                let other = match asked.sessions.get(name) {
                    Some(id) => Some(self.handle.block_on(self.server.sessions.wait(id))?),
                    None => None,
                };
                let session = other.as_ref().unwrap_or(self.session);
                let exchange = self.handle.block_on(session.files(name, &wanted))?;
                let mut line = self.patient(exchange);
                let part = format!("transferring {name}:");
                let mut meter = progress.meter(&part);
                let taken = compose::take(&store, |to| {
                    let mut told = |bytes| meter.add(bytes);
                    transfer::receive(&mut line, to, CONTEXT_BYTES_MAX, &mut told)
                });
                meter.end();
                taken.map_err(|error| Status::invalid(error.to_string()))
            }
            Source::Archive(path) => {
                let archive = self.session.archive("buildkit-session", path);
                let patient = self.patient(self.handle.block_on(archive)?);
                let archive = Archive { patient, chunk: Bytes::new() };
                unpacked(&store, archive).map_err(|error| Status::invalid(error.message))
            }
        }
    }
}

/// An archive that comes in chunks.
struct Archive<'a> {
    patient: Patient<'a>,
    chunk: Bytes,
}

impl Read for Archive<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.patient.message::<Chunk>()? {
                Some(chunk) => self.chunk = chunk.data.into(),
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

fn text(files: &Rootfs, path: &str, bytes_max: u64) -> Result<Option<String>> {
    compose::text(files, path, bytes_max).map_err(|error| Status::invalid(error.to_string()))
}

/// The lines of `.dockerignore` as the client's matcher takes them.
///
/// # Errors
/// One is malformed, or there are too many.
fn patterns(ignored: &str) -> Result<Vec<String>> {
    // What is malformed is said here, with its line.
    Ignore::read(ignored).map_err(Status::invalid)?;
    let lines = ignored.strip_prefix('\u{feff}').unwrap_or(ignored).lines();
    let lines = lines.filter(|line| !line.starts_with('#')).map(str::trim);
    let cleaned = lines.filter(|line| !line.is_empty()).filter_map(|line| {
        let (mark, path) = match line.strip_prefix('!') {
            Some(path) => ("!", path.trim()),
            None => ("", line),
        };
        let mut names: Vec<&str> = Vec::new();
        for name in path.split('/') {
            match name {
                "" | "." => {}
                ".." => drop(names.pop()),
                name => names.push(name),
            }
        }
        (!names.is_empty()).then(|| format!("{mark}{}", names.join("/")))
    });
    let cleaned: Vec<String> = cleaned.collect();
    match cleaned.iter().map(String::len).sum::<usize>() > PATTERNS_BYTES_MAX {
        true => Err(Status::invalid(format!(
            "the patterns of {IGNORE} have more than {PATTERNS_BYTES_MAX} bytes; use fewer, wider ones"
        ))),
        false => Ok(cleaned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_those_of_clients() {
        let read = patterns("# no\n\n*.log\n/a/./b/\n!keep \n../x/../y\n.\n").unwrap();
        assert_eq!(read, ["*.log", "a/b", "!keep", "y"]);
        assert!(patterns("!\n").unwrap_err().words.contains("line 1"));
        assert!(patterns(&"x".repeat(300 << 10)).is_err());
    }
}
