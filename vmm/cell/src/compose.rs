//! Images over images, and the layers between them, are made in jailed processes, as images are
//! read ([`crate::unpack`]).
//!
//! ```text
//! base image, layers ────────> `compose`, a stage ─> another image, or one more layer
//! files to copy, a stream ───>
//! ```
//! All of it comes from guests and from build contexts: a process that is taken over by it has
//! descriptors of these files and nothing else.

use std::fs::File;
use std::io::{self, PipeWriter, Write};
use std::time::{Duration, Instant};

use exocell_agent::printable;
use exocell_images::build::{Image, Room};
use exocell_images::compose::{self, Copied, Copy, Files, Layer, Selection, Stack};
use exocell_images::{
    Digest, Draft, Fault as Whose, ImageError, ImageRecord, ImportLimits, Refusal, Silent, Store,
};
use exocell_vmm::jail::ThreadClass;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, Task};
use serde::{Deserialize, Serialize};

/// Composes images and makes layers.
pub const COMPOSE: Stage = Stage { name: "compose", class: ThreadClass::Stage, work };

/// As of reading images.
const MEMORY_BYTES: u64 = 2 << 30;
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The longest that one of these may take.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// What the stage is asked for. Descriptors come in the order of the fields, and behind them two
/// files for what is needed meanwhile.
#[derive(Serialize, Deserialize)]
enum Request {
    /// The image's file, then the base and the layers.
    Compose { stack: Stack, has_base: bool, document: String },
    /// The stream, the layer's file.
    Keep { limits: ImportLimits },
    /// The stream, the file of what it holds.
    Take { stack: Stack },
    /// The source.
    Hash { selection: Selection, has_source: bool, limits: ImportLimits },
    /// The source.
    Text { path: String, bytes_max: u64, limits: ImportLimits },
    /// The source, and where the archive goes.
    Pack { path: String, limits: ImportLimits },
    /// The layer's file, the source, the base and the layers.
    Copy { copy: Copy, has_source: bool, stack: Stack, has_base: bool },
}

/// What it answers.
#[derive(Serialize, Deserialize)]
enum Answer {
    Image(Box<Image>),
    Layer(Layer),
    Copied(Copied),
    Hash(Digest),
    Text(Option<String>),
    Done,
    Refused(Refusal),
}

/// An image, or nothing, and layers over it.
#[derive(Debug, Clone, Copy)]
pub struct Below<'a> {
    pub base: Option<&'a File>,
    pub layers: &'a [(Layer, File)],
}

impl<'a> Below<'a> {
    fn stack(&self, store: &Store) -> Stack {
        Stack {
            layers: self.layers.iter().map(|(layer, _)| layer.clone()).collect(),
            limits: ImportLimits::default(),
            store: store.root().to_owned(),
        }
    }

    fn files(&self) -> impl Iterator<Item = &'a File> {
        self.base.into_iter().chain(self.layers.iter().map(|(_, file)| file))
    }
}

/// Makes the image with the configuration `document`, which passes: it goes when nobody has the
/// returned file, or a cell of it, any more.
///
/// # Errors
/// What is wrong with what it is made of. The store is as it was then.
pub fn passing(
    store: &Store,
    document: &str,
    below: Below<'_>,
) -> Result<(ImageRecord, File), ImageError> {
    let (draft, image) = made(store, document, below)?;
    store.publish_passing(draft, image)
}

/// Makes the image with the configuration `document`, which stays.
///
/// # Errors
/// As of [`passing`].
pub fn lasting(store: &Store, document: &str, below: Below<'_>) -> Result<ImageRecord, ImageError> {
    if let Some(record) = store.name_present(Digest::of(document.as_bytes()), None)? {
        return Ok(record);
    }
    let (draft, image) = made(store, document, below)?;
    store.publish(draft, image, None)
}

fn made(store: &Store, document: &str, below: Below<'_>) -> Result<(Draft, Image), ImageError> {
    let draft = store.begin()?;
    let (image, spool) = draft.files()?;
    let request = Request::Compose {
        stack: below.stack(store),
        has_base: below.base.is_some(),
        document: document.to_owned(),
    };
    let given = [&image].into_iter().chain(below.files()).map(Given::file);
    match ask(given.chain([Given::file(&spool)]).collect(), &request)? {
        Answer::Image(image) => Ok((draft, *image)),
        _ => Err(another_answer()),
    }
}

/// Keeps the tar stream that `write` writes as a layer in the empty file `to`.
///
/// # Errors
/// What is wrong with the stream, or what `write` says.
pub fn keep(
    to: &File,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
) -> Result<Layer, ImageError> {
    let request = Request::Keep { limits: ImportLimits::default() };
    let answer = fed(write, |from| ask(vec![Given::file(from), Given::file(to)], &request))?;
    match answer {
        Answer::Layer(layer) => Ok(layer),
        _ => Err(another_answer()),
    }
}

/// Takes what the tar stream that `write` writes holds; the file is gone with its last holder.
///
/// # Errors
/// What is wrong with the stream, or what `write` says.
pub fn take(
    store: &Store,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
) -> Result<File, ImageError> {
    let (to, spool) = (store.scratch()?, store.scratch()?);
    let stack = Below { base: None, layers: &[] }.stack(store);
    let request = Request::Take { stack };
    let answer = fed(write, |from| {
        ask(vec![Given::file(from), Given::file(&to), Given::file(&spool)], &request)
    });
    match answer? {
        Answer::Done => Ok(to),
        _ => Err(another_answer()),
    }
}

/// A digest of what is selected of `source`.
///
/// # Errors
/// What is not there.
pub fn hash(selection: &Selection, source: Option<&File>) -> Result<Digest, ImageError> {
    let request = Request::Hash {
        selection: selection.clone(),
        has_source: source.is_some(),
        limits: ImportLimits::default(),
    };
    match ask(source.into_iter().map(Given::file).collect(), &request)? {
        Answer::Hash(digest) => Ok(digest),
        _ => Err(another_answer()),
    }
}

/// The text of the file at `path` in `source`; `None` where there is none.
///
/// # Errors
/// It is longer than `bytes_max`, or no text.
pub fn text(source: &File, path: &str, bytes_max: u64) -> Result<Option<String>, ImageError> {
    let limits = ImportLimits::default();
    let request = Request::Text { path: path.to_owned(), bytes_max, limits };
    match ask(vec![Given::file(source)], &request)? {
        Answer::Text(text) => Ok(text),
        _ => Err(another_answer()),
    }
}

/// Writes an archive of what is at `path` in `source` to `to`: of a directory what it holds.
///
/// # Errors
/// It is not there.
pub fn pack(source: &File, path: &str, to: &PipeWriter) -> Result<(), ImageError> {
    let request = Request::Pack { path: path.to_owned(), limits: ImportLimits::default() };
    match ask(vec![Given::file(source), Given::file(to)], &request)? {
        Answer::Done => Ok(()),
        _ => Err(another_answer()),
    }
}

/// Makes a layer in the empty file `to` that puts what `copy` selects of `source` into the image
/// that `below` is.
///
/// # Errors
/// What is not there, or has no place in the image.
pub fn copy(
    store: &Store,
    copy: &Copy,
    source: Option<&File>,
    below: Below<'_>,
    to: &File,
) -> Result<Copied, ImageError> {
    let scratch = [store.scratch()?, store.scratch()?];
    let request = Request::Copy {
        copy: copy.clone(),
        has_source: source.is_some(),
        stack: below.stack(store),
        has_base: below.base.is_some(),
    };
    let given = [to].into_iter().chain(source).chain(below.files()).chain(&scratch);
    match ask(given.map(Given::file).collect(), &request)? {
        Answer::Copied(copied) => Ok(copied),
        _ => Err(another_answer()),
    }
}

/// Has `read` read what `write` writes.
fn fed(
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
    read: impl FnOnce(&io::PipeReader) -> Result<Answer, ImageError>,
) -> Result<Answer, ImageError> {
    let (from, to) = io::pipe().map_err(|error| host("cannot make a pipe", error))?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write(to));
        let answer = read(&from);
        // With nobody to read it, the writer ends.
        drop(from);
        let written = writer.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        match (answer, written) {
            // Its reader had seen enough; that it ended early explains nothing.
            (Err(error), Err(written)) if written.kind() == io::ErrorKind::BrokenPipe => Err(error),
            (_, Err(written)) => Err(host("cannot read what is sent", written)),
            (answer, Ok(())) => answer,
        }
    })
}

fn host(what: &str, source: io::Error) -> ImageError {
    ImageError::Io { what: what.to_owned(), source }
}

fn ask(given: Vec<Given<'_>>, request: &Request) -> Result<Answer, ImageError> {
    let bounds = ImportLimits::default();
    let limits = Limits {
        file_bytes: bounds.apparent_bytes_max.saturating_add(bounds.bytes_max),
        answer_bytes: ANSWER_BYTES_MAX,
        deadline: Some(Instant::now() + TIME_MAX),
        ..Limits::of_memory(MEMORY_BYTES)
    };
    let answer = Order::new(COMPOSE.name, given, limits).run(request, |_| ());
    let answer = answer.map_err(|error| other(error.to_string()))?;
    match answer {
        Answer::Refused(Refusal { fault, message }) => {
            // Words about bytes that are somebody else's.
            let message = printable(&message).into_owned();
            Err(ImageError::Refused(Refusal { fault, message }))
        }
        answer => Ok(answer),
    }
}

fn other(message: String) -> ImageError {
    ImageError::Refused(Refusal { fault: Whose::Other, message })
}

fn another_answer() -> ImageError {
    other("the process that makes layers gave another answer than it was asked for".to_owned())
}

/// The descriptors of a request, one after the other.
struct Taken<'a>(&'a mut Task, usize);

impl Taken<'_> {
    fn file(&mut self) -> Result<File, Fault> {
        self.1 += 1;
        self.0.take(self.1 - 1).map(File::from)
    }

    fn file_if(&mut self, is_there: bool) -> Result<Option<File>, Fault> {
        is_there.then(|| self.file()).transpose()
    }

    fn below(&mut self, stack: &Stack, has_base: bool) -> Result<Files, Fault> {
        let base = self.file_if(has_base)?;
        let layers = stack.layers.iter().map(|_| self.file()).collect::<Result<_, _>>()?;
        Ok(Files { base, layers })
    }
}

/// What the stage does.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let request = task.request()?;
    let mut taken = Taken(task, 0);
    let answer = match request {
        Request::Compose { stack, has_base, document } => {
            let image = taken.file()?;
            let files = taken.below(&stack, has_base)?;
            let room = Room { image, spool: taken.file()?, unpacked: None };
            compose::compose(&stack, &document, files, room, &mut Silent)
                .map(|image| Answer::Image(Box::new(image)))
        }
        Request::Keep { limits } => {
            let (mut from, mut to) = (taken.file()?, taken.file()?);
            compose::keep(&mut from, &mut to, &limits).map(Answer::Layer)
        }
        Request::Take { stack } => {
            let mut from = taken.file()?;
            let room = Room { image: taken.file()?, spool: taken.file()?, unpacked: None };
            compose::take(&mut from, room, &stack, &mut Silent).map(|()| Answer::Done)
        }
        Request::Hash { selection, has_source, limits } => {
            let source = taken.file_if(has_source)?;
            compose::hash(&selection, source.as_ref(), &limits).map(Answer::Hash)
        }
        Request::Text { path, bytes_max, limits } => {
            compose::text(&taken.file()?, &path, bytes_max, &limits).map(Answer::Text)
        }
        Request::Pack { path, limits } => {
            let (source, to) = (taken.file()?, taken.file()?);
            let mut to = io::BufWriter::with_capacity(64 << 10, to);
            let packed = compose::pack(&source, &path, &mut to, &limits);
            packed
                .and_then(|()| to.flush().map_err(|error| host("cannot write", error)))
                .map(|()| Answer::Done)
        }
        Request::Copy { copy, has_source, stack, has_base } => {
            let mut to = taken.file()?;
            let source = taken.file_if(has_source)?;
            let files = taken.below(&stack, has_base)?;
            let room = Room { image: taken.file()?, spool: taken.file()?, unpacked: None };
            compose::copy(&copy, source.as_ref(), &stack, files, room, &mut to, &mut Silent)
                .map(Answer::Copied)
        }
    };
    let answer = answer.unwrap_or_else(|error| Answer::Refused(error.refusal()));
    serde_json::to_vec(&answer).map_err(|error| Fault::Jail(error.to_string()))
}
