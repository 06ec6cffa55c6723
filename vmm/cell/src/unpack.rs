//! Images are read in jailed processes: this one hands descriptors over and publishes what was
//! made.
//!
//! ```text
//! operator's process             `unpack`, a stage                  `fetch`, a stage
//! archive, a descriptor ───────> tar, gzip, zstd, JSON
//! layout's files, as bytes <───> (a socket)
//! registry ────────────────────> (a socket) <─────────────────────> HTTP, TLS, names
//! draft in the store, empty ───> the file system of the image
//!            <────────────────── the configuration, its fields
//! id = digest of it? publish
//! ```
//! A directory of the operator's is no such input: it is copied here, with the operator's rights.

use std::fs::File;
use std::io::{self, PipeWriter};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use exocell_agent::printable;
use exocell_images::build::{self, Image, Job, Made, Room};
use exocell_images::walk::Found;
use exocell_images::{
    Digest, ImageConfig, ImageError, ImageRecord, ImportLimits, Note, Progress, Reference, Refusal,
    STALL_MAX, Source, Store, layout_server, version,
};
use exocell_vmm::jail::ThreadClass;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, Task};
use serde::{Deserialize, Serialize};

use crate::jailed::{Step, TIME_MAX, Teller, another_answer, host, refused};
use crate::registry;

/// Reads archives, documents and layers, and makes images of them.
pub const UNPACK: Stage = Stage { name: "unpack", class: ThreadClass::Stage, work };

/// What unpacking may take beside the executable itself: the names of as many files as an image
/// may have.
const MEMORY_BYTES: u64 = 2 << 30;
/// A configuration in JSON that is escaped again, and its fields.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// More ids of images need not be told: an image is then made, and found to be there.
const KNOWN_MAX: usize = 16 << 10;

/// What the stage is asked for.
#[derive(Serialize, Deserialize)]
enum Request {
    /// Descriptors: the input, the image, the spool, and a file for an archive that is unpacked.
    Build(Box<Job>),
    /// Descriptors: the archive, and the same file.
    Names { path: PathBuf, limits: ImportLimits },
}

/// What it answers.
#[derive(Serialize, Deserialize)]
enum Answer {
    Made(Made),
    Names(Vec<String>),
    Refused(Refusal),
}

/// Imports an image into `store` and gives it the name `tag`. All that others made is read in a
/// jailed process.
///
/// # Errors
/// What is wrong with the image, and bounds that it does not keep to. The store is as it was then.
pub fn import(
    store: &Store,
    source: &Source,
    tag: Option<&Reference>,
    limits: &ImportLimits,
    progress: &mut dyn Progress,
) -> Result<ImageRecord, ImageError> {
    match source {
        Source::Directory { path, config } => {
            store.import_directory(path, config, tag, limits, progress)
        }
        Source::Archive(path) => {
            let file = Archive::open(path)?;
            file.import(store, tag, limits, progress)
        }
        Source::Layout(path) => {
            let (ours, theirs) = pair()?;
            let from = build::From::Layout(path.clone());
            // It ends with the other side of its socket, and nobody waits for it: a file of the
            // layout may be on a disk that does not answer.
            let path = path.clone();
            std::thread::Builder::new()
                .name("layout".to_owned())
                .spawn(move || layout_server(&ours, &path))
                .map_err(|error| host("cannot start a thread", error))?;
            make(store, from, &theirs.into(), tag, limits, progress)
        }
        Source::Registry { reference, options } => {
            let (ours, theirs) = pair()?;
            let failed = |error| host("cannot bound a wait", error);
            theirs.set_read_timeout(Some(STALL_MAX)).map_err(failed)?;
            let fetching = registry::start(&ours, reference, options)?;
            drop(ours);
            let from = build::From::Registry { version: version(reference) };
            let made =
                make(store, from, &theirs.into(), Some(tag.unwrap_or(reference)), limits, progress);
            drop(fetching);
            made
        }
    }
}

/// Makes an image of one layer, the tar stream that `write` writes, and gives it the name `tag`;
/// its document says what `note` does.
///
/// # Errors
/// What is wrong with the stream, or what `write` says. The store is as it was then.
pub fn import_layer(
    store: &Store,
    (config, note): (&ImageConfig, &Note),
    tag: Option<&Reference>,
    progress: &mut dyn Progress,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
) -> Result<ImageRecord, ImageError> {
    note.check()?;
    let (read, to) = io::pipe().map_err(|error| host("cannot make a pipe", error))?;
    let limits = ImportLimits::default();
    let from = build::From::Layer(Box::new(config.clone()), note.clone());
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write(to));
        let draft = Draft::new(store, from, None, &limits);
        let made = draft.and_then(|draft| {
            let made = draft.make(&OwnedFd::from(read), progress);
            made.map(|made| (draft, made))
        });
        // With nobody to read it, the writer has ended too.
        let written = writer.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        match (made, written) {
            // Its reader had seen enough; that it ended early explains nothing.
            (Err(error), Err(written)) if written.kind() == io::ErrorKind::BrokenPipe => Err(error),
            // A layer that was cut is not published, whatever it looks like.
            (_, Err(written)) => Err(host("cannot read the layer", written)),
            (Err(error), Ok(())) => Err(error),
            (Ok((draft, made)), Ok(())) => draft.publish(made, tag),
        }
    })
}

/// A tar file with images.
#[derive(Debug)]
pub struct Archive {
    file: File,
    path: PathBuf,
}

impl Archive {
    /// Opens the file at `path`, of which no part is a link.
    ///
    /// # Errors
    /// It cannot be read, or is not a file.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let failed = |error| host(&format!("cannot read {}", path.display()), error);
        let found = Found::real(path).map_err(failed)?;
        if !found.metadata().is_file() {
            let why = "it is not a file".to_owned();
            return Err(ImageError::NotAnImage { path: path.to_owned(), why });
        }
        Ok(Self { file: found.file().map_err(failed)?, path: path.to_owned() })
    }

    /// One that has no name on the host; messages call it `path`.
    #[must_use]
    pub fn of_file(file: File, path: &Path) -> Self {
        Self { file, path: path.to_owned() }
    }

    /// Imports one of its images, the one called `tag` if there are several.
    ///
    /// # Errors
    /// As of [`import`].
    pub fn import(
        &self,
        store: &Store,
        tag: Option<&Reference>,
        limits: &ImportLimits,
        progress: &mut dyn Progress,
    ) -> Result<ImageRecord, ImageError> {
        let from = build::From::Archive(self.path.clone());
        let failed = |error| host("cannot share the archive", error);
        let input = OwnedFd::from(self.file.try_clone().map_err(failed)?);
        make(store, from, &input, tag, limits, progress)
    }

    /// The names of its images; it is unpacked then, if it was compressed as a whole.
    ///
    /// # Errors
    /// As of [`import`].
    pub fn names(
        &mut self,
        store: &Store,
        limits: &ImportLimits,
    ) -> Result<Vec<String>, ImageError> {
        let unpacked = store.scratch()?;
        let request = Request::Names { path: self.path.clone(), limits: limits.clone() };
        let given = vec![Given::file(&self.file), Given::file(&unpacked)];
        let answer = ask(given, &request, limits, &mut exocell_images::Silent)?;
        let Answer::Names(names) = answer else { return Err(another_answer()) };
        if unpacked.metadata().is_ok_and(|metadata| metadata.len() > 0) {
            self.file = unpacked;
        }
        Ok(names)
    }
}

fn pair() -> Result<(UnixStream, UnixStream), ImageError> {
    UnixStream::pair().map_err(|error| host("cannot make a socket pair", error))
}

/// Makes an image of `input` and publishes it.
fn make(
    store: &Store,
    from: build::From,
    input: &OwnedFd,
    tag: Option<&Reference>,
    limits: &ImportLimits,
    progress: &mut dyn Progress,
) -> Result<ImageRecord, ImageError> {
    let draft = Draft::new(store, from, tag, limits)?;
    let made = draft.make(input, progress)?;
    draft.publish(made, tag)
}

/// An image that is being made.
struct Draft<'a> {
    store: &'a Store,
    draft: exocell_images::Draft,
    job: Job,
}

impl<'a> Draft<'a> {
    fn new(
        store: &'a Store,
        from: build::From,
        wanted: Option<&Reference>,
        limits: &ImportLimits,
    ) -> Result<Self, ImageError> {
        // What an image of the store is called in an archive of it is that image, too.
        let saved = store.originals()?.into_keys();
        let known: Vec<Digest> = store.ids()?.into_iter().chain(saved).take(KNOWN_MAX).collect();
        let job = Job {
            from,
            wanted: wanted.map(ToString::to_string),
            known,
            limits: limits.clone(),
            store: store.root().to_owned(),
        };
        Ok(Self { store, draft: store.begin()?, job })
    }

    fn make(&self, input: &OwnedFd, progress: &mut dyn Progress) -> Result<Made, ImageError> {
        let (image, spool) = self.draft.files()?;
        let unpacked = self.store.scratch()?;
        let given = [&spool, &unpacked];
        let given = [Given::file(input), Given::file(&image)]
            .into_iter()
            .chain(given.into_iter().map(Given::file));
        let request = Request::Build(Box::new(self.job.clone()));
        match ask(given.collect(), &request, &self.job.limits, progress)? {
            Answer::Made(made) => Ok(made),
            _ => Err(another_answer()),
        }
    }

    fn publish(self, made: Made, tag: Option<&Reference>) -> Result<ImageRecord, ImageError> {
        let image: Image = match made {
            Made::Image(image) => *image,
            Made::Known(id) => {
                let id = match self.store.ids()?.contains(&id) {
                    true => id,
                    false => self.store.originals()?.get(&id).copied().unwrap_or(id),
                };
                return self.store.name_present(id, tag)?.ok_or(ImageError::Gone { id });
            }
        };
        self.store.publish(self.draft, image, None, tag)
    }
}

/// Has a jailed process work.
fn ask(
    given: Vec<Given<'_>>,
    request: &Request,
    bounds: &ImportLimits,
    progress: &mut dyn Progress,
) -> Result<Answer, ImageError> {
    let limits = Limits {
        // An image is as long as its files' sizes say, holes included.
        file_bytes: bounds.apparent_bytes_max.saturating_add(bounds.bytes_max),
        answer_bytes: ANSWER_BYTES_MAX,
        deadline: Some(Instant::now() + TIME_MAX),
        ..Limits::of_memory(MEMORY_BYTES)
    };
    let order = Order::new(UNPACK.name, given, limits);
    let answer = order.run(request, |line| Step::hear(line, progress));
    match answer.map_err(|error| refused(&error))? {
        Answer::Refused(Refusal { fault, message }) => {
            // Words about bytes that are somebody else's, of a process that may have been taken
            // over by them.
            let message = printable(&message).into_owned();
            Err(ImageError::Refused(Refusal { fault, message }))
        }
        answer => Ok(answer),
    }
}

/// What the stage does.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let done = match task.request()? {
        Request::Build(job) => {
            let input = task.take(0)?;
            let room = Room {
                image: File::from(task.take(1)?),
                spool: File::from(task.take(2)?),
                unpacked: Some(File::from(task.take(3)?)),
            };
            build::build(&job, input, room, &mut Teller::of(task)).map(Answer::Made)
        }
        Request::Names { path, limits } => {
            let (archive, unpacked) = (File::from(task.take(0)?), File::from(task.take(1)?));
            build::names(archive, &path, unpacked, &limits).map(Answer::Names)
        }
    };
    let answer = done.unwrap_or_else(|error| Answer::Refused(error.refusal()));
    serde_json::to_vec(&answer).map_err(|error| Fault::Jail(error.to_string()))
}
