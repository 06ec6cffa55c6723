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
use exocell_images::compose::{self, Copied, Copy, Files, Form, Layer, Selection, Stack};
use exocell_images::{
    Digest, Draft, Fault as Whose, ImageError, ImageRecord, ImportLimits, Reference, Refusal,
    Rootfs, Silent, Store,
};
use exocell_vmm::jail::ThreadClass;
use exocell_vmm::jail::stage::{Fault, Given, Limits, Order, Stage, Task};
use serde::{Deserialize, Serialize};

/// Composes images and makes layers.
pub const COMPOSE: Stage = Stage { name: "compose", class: ThreadClass::Stage, work };

/// As of reading images.
const MEMORY_BYTES: u64 = 2 << 30;
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Two images, as many layers as a build has over one, and some more.
const OPEN_FILES_MAX: u64 = 2 * Rootfs::FILES_MAX as u64 + 96;
/// The longest that one of these may take.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// What the stage is asked for. Descriptors come in the order of the fields, and behind them two
/// files for what is needed meanwhile.
#[derive(Serialize, Deserialize)]
enum Request {
    /// The image's file, then the base and the layers.
    Compose { stack: Stack, base_files: usize, document: String },
    /// The stream, the layer's file.
    Keep { limits: ImportLimits },
    /// The stream, the file of what it holds.
    Take { stack: Stack },
    /// The source.
    Hash { selection: Selection, source_files: usize, limits: ImportLimits },
    /// The source.
    Text { path: String, bytes_max: u64, source_files: usize, limits: ImportLimits },
    /// The source, and where the archive goes.
    Pack { path: String, source_files: usize, limits: ImportLimits },
    /// The layer's file, the files below, and the one that it is of.
    Layer { below: usize, packs: bool, limits: ImportLimits },
    /// The layer's file, the source, the base and the layers.
    Copy { copy: Copy, source_files: usize, stack: Stack, base_files: usize },
}

/// What it answers.
#[derive(Serialize, Deserialize)]
enum Answer {
    Image(Box<Image>, Form),
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
    pub base: Option<&'a Rootfs>,
    pub layers: &'a [(Layer, File)],
}

impl<'a> Below<'a> {
    fn stack(&self, store: &Store) -> Stack {
        Stack {
            layers: self.layers.iter().map(|(layer, _)| layer.clone()).collect(),
            // This machine has compressed them: what came of a guest came at its full length.
            limits: ImportLimits { ratio_max: u64::MAX, ..ImportLimits::default() },
            store: store.root().to_owned(),
        }
    }

    fn files(&self) -> impl Iterator<Item = &'a File> {
        let base = self.base.into_iter().flat_map(Rootfs::files);
        base.chain(self.layers.iter().map(|(_, file)| file))
    }

    fn base_files(&self) -> usize {
        self.base.map_or(0, |base| base.files().len())
    }
}

/// Makes the image with the configuration `document`, which passes: it goes when nobody has the
/// returned files, or a cell of it, any more. Of what is in the base image it is over the files.
///
/// # Errors
/// What is wrong with what it is made of. The store is as it was then.
pub fn passing(
    store: &Store,
    document: &str,
    below: Below<'_>,
) -> Result<(ImageRecord, Rootfs), ImageError> {
    let (draft, image, form) = made(store, document, below)?;
    store.publish_passing(draft, image, over(form, below))
}

/// Makes the image with the configuration `document`, which stays, and gives it the name `tag`.
///
/// # Errors
/// As of [`passing`].
pub fn lasting(
    store: &Store,
    document: &str,
    below: Below<'_>,
    tag: Option<&Reference>,
) -> Result<ImageRecord, ImageError> {
    if let Some(record) = store.name_present(Digest::of(document.as_bytes()), tag)? {
        return Ok(record);
    }
    let (draft, image, form) = made(store, document, below)?;
    store.publish(draft, image, over(form, below), tag)
}

/// What an image of this form is over.
fn over<'a>(form: Form, below: Below<'a>) -> Option<&'a Rootfs> {
    below.base.filter(|_| form == Form::Delta)
}

fn made(
    store: &Store,
    document: &str,
    below: Below<'_>,
) -> Result<(Draft, Image, Form), ImageError> {
    let draft = store.begin()?;
    let (image, spool) = draft.files()?;
    let request = Request::Compose {
        stack: below.stack(store),
        base_files: below.base_files(),
        document: document.to_owned(),
    };
    let given = [&image].into_iter().chain(below.files()).map(Given::file);
    match ask(given.chain([Given::file(&spool)]).collect(), &request)? {
        Answer::Image(image, form) => Ok((draft, *image, form)),
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

/// Takes what the tar stream that `write` writes holds; it is gone with its last holder.
///
/// # Errors
/// What is wrong with the stream, or what `write` says.
pub fn take(
    store: &Store,
    write: impl FnOnce(PipeWriter) -> io::Result<()> + Send,
) -> Result<Rootfs, ImageError> {
    let (to, spool) = (store.scratch()?, store.scratch()?);
    let stack = Below { base: None, layers: &[] }.stack(store);
    let request = Request::Take { stack };
    let answer = fed(write, |from| {
        ask(vec![Given::file(from), Given::file(&to), Given::file(&spool)], &request)
    });
    match answer? {
        Answer::Done => Rootfs::of(vec![to]),
        _ => Err(another_answer()),
    }
}

fn count(source: Option<&Rootfs>) -> usize {
    source.map_or(0, |source| source.files().len())
}

fn given(source: Option<&Rootfs>) -> impl Iterator<Item = Given<'_>> {
    source.into_iter().flat_map(Rootfs::files).map(Given::file)
}

/// A digest of what is selected of `source`.
///
/// # Errors
/// What is not there.
pub fn hash(selection: &Selection, source: Option<&Rootfs>) -> Result<Digest, ImageError> {
    let request = Request::Hash {
        selection: selection.clone(),
        source_files: count(source),
        limits: ImportLimits::default(),
    };
    match ask(given(source).collect(), &request)? {
        Answer::Hash(digest) => Ok(digest),
        _ => Err(another_answer()),
    }
}

/// The text of the file at `path` in `source`; `None` where there is none.
///
/// # Errors
/// It is longer than `bytes_max`, or no text.
pub fn text(source: &Rootfs, path: &str, bytes_max: u64) -> Result<Option<String>, ImageError> {
    let (limits, source_files) = (ImportLimits::default(), count(Some(source)));
    let request = Request::Text { path: path.to_owned(), bytes_max, source_files, limits };
    match ask(given(Some(source)).collect(), &request)? {
        Answer::Text(text) => Ok(text),
        _ => Err(another_answer()),
    }
}

/// Writes an archive of what is at `path` in `source` to `to`: of a directory what it holds.
///
/// # Errors
/// It is not there.
pub fn pack(source: &Rootfs, path: &str, to: &PipeWriter) -> Result<(), ImageError> {
    let (limits, source_files) = (ImportLimits::default(), count(Some(source)));
    let request = Request::Pack { path: path.to_owned(), source_files, limits };
    match ask(given(Some(source)).chain([Given::file(to)]).collect(), &request)? {
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
    source: Option<&Rootfs>,
    below: Below<'_>,
    to: &File,
) -> Result<Copied, ImageError> {
    let scratch = [store.scratch()?, store.scratch()?];
    let request = Request::Copy {
        copy: copy.clone(),
        source_files: count(source),
        stack: below.stack(store),
        base_files: below.base_files(),
    };
    let source = source.into_iter().flat_map(Rootfs::files);
    let given = [to].into_iter().chain(source).chain(below.files()).chain(&scratch);
    match ask(given.map(Given::file).collect(), &request)? {
        Answer::Copied(copied) => Ok(copied),
        _ => Err(another_answer()),
    }
}

/// Makes a layer of the file `number` of `image` in the empty file `to`, of what it has over those
/// below; compressed as registries have it if `packs`.
///
/// # Errors
/// It holds what no layer can; the host's.
pub fn layer(image: &Rootfs, number: usize, packs: bool, to: &File) -> Result<Layer, ImageError> {
    let request = Request::Layer { below: number, packs, limits: ImportLimits::default() };
    let files = image.files().iter().take(number + 1);
    match ask([to].into_iter().chain(files).map(Given::file).collect(), &request)? {
        Answer::Layer(layer) => Ok(layer),
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
        open_files: OPEN_FILES_MAX,
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

    /// An image of so many files; none of none.
    fn image(&mut self, count: usize) -> Result<Option<Rootfs>, Fault> {
        let files = (0..count).map(|_| self.file()).collect::<Result<Vec<_>, _>>()?;
        let image = (!files.is_empty()).then(|| Rootfs::of(files)).transpose();
        image.map_err(|error| Fault::Jail(error.to_string()))
    }

    fn source(&mut self, count: usize) -> Result<Rootfs, Fault> {
        self.image(count)?.ok_or_else(|| Fault::Jail("there is no image".to_owned()))
    }

    fn below(&mut self, stack: &Stack, base_files: usize) -> Result<Files, Fault> {
        let base = self.image(base_files)?;
        let layers = stack.layers.iter().map(|_| self.file()).collect::<Result<_, _>>()?;
        Ok(Files { base, layers })
    }
}

/// What the stage does.
fn work(task: &mut Task) -> Result<Vec<u8>, Fault> {
    let request = task.request()?;
    let mut taken = Taken(task, 0);
    let answer = match request {
        Request::Compose { stack, base_files, document } => {
            let image = taken.file()?;
            let files = taken.below(&stack, base_files)?;
            let room = Room { image, spool: taken.file()?, unpacked: None };
            compose::compose(&stack, &document, files, room, &mut Silent)
                .map(|(image, form)| Answer::Image(Box::new(image), form))
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
        Request::Hash { selection, source_files, limits } => {
            let source = taken.image(source_files)?;
            compose::hash(&selection, source.as_ref(), &limits).map(Answer::Hash)
        }
        Request::Text { path, bytes_max, source_files, limits } => {
            compose::text(&taken.source(source_files)?, &path, bytes_max, &limits).map(Answer::Text)
        }
        Request::Pack { path, source_files, limits } => {
            let (source, to) = (taken.source(source_files)?, taken.file()?);
            let mut to = io::BufWriter::with_capacity(64 << 10, to);
            let packed = compose::pack(&source, &path, &mut to, &limits);
            packed
                .and_then(|()| to.flush().map_err(|error| host("cannot write", error)))
                .map(|()| Answer::Done)
        }
        Request::Layer { below, packs, limits } => {
            let mut to = taken.file()?;
            let below = taken.image(below)?;
            let own = taken.file()?;
            let of_all = || -> Result<Layer, ImageError> {
                let mut files = match &below {
                    Some(below) => below.try_clone()?.into_parts().0,
                    None => Vec::new(),
                };
                files.push(own);
                let image = Rootfs::of(files)?;
                compose::layer(&image, below.as_ref(), &mut to, packs, &limits)
            };
            of_all().map(Answer::Layer)
        }
        Request::Copy { copy, source_files, stack, base_files } => {
            let mut to = taken.file()?;
            let source = taken.image(source_files)?;
            let files = taken.below(&stack, base_files)?;
            let room = Room { image: taken.file()?, spool: taken.file()?, unpacked: None };
            compose::copy(&copy, source.as_ref(), &stack, files, room, &mut to, &mut Silent)
                .map(Answer::Copied)
        }
    };
    let answer = answer.unwrap_or_else(|error| Answer::Refused(error.refusal()));
    serde_json::to_vec(&answer).map_err(|error| Fault::Jail(error.to_string()))
}
