//! A template: what a running cell's root file system holds, as an image that
//! other cells start from. What the cell has changed of its image is a file over those of the image.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use exocell_agent::client::{self, ClientError};
use exocell_agent::{Patient, TRANSFER_MAX};
use exocell_images::{
    ImageConfig, ImageRecord, Note, Progress, ProgressEvent, Reference, Store, document_over,
};

use crate::compose::{self, Below};
use crate::control::Client;
use crate::unpack::import_layer;
use crate::{CellError, Layout, Record};

/// A guest cannot fill the host with one template.
const LAYER_BYTES_MAX: u64 = 64 << 30;

/// Breaks a commit off from another thread, while the guest still sends: the host's own work on what
/// came goes on to its end.
#[derive(Debug, Default)]
pub struct Cutter(Mutex<Cut>);

#[derive(Debug, Default)]
struct Cut {
    is_cut: bool,
    stream: Option<UnixStream>,
}

impl Cutter {
    /// Breaks it off, if it has begun or not.
    pub fn cut(&self) {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        own.is_cut = true;
        if let Some(stream) = own.stream.take() {
            // One that has ended is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_cut
    }

    fn watch(&self, stream: &UnixStream) -> io::Result<()> {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if own.is_cut {
            return Err(io::Error::other("it was broken off"));
        }
        own.stream = Some(stream.try_clone()?);
        Ok(())
    }
}

/// Makes an image called `tag` of the running cell `record`, to be started as
/// `config` says; its document says what the note does. What is mounted in the cell, folders above all, is left out, and so are the files
/// that tell it its names (/etc/hosts and the like). Programs of the cell go on meanwhile.
///
/// # Errors
/// The guest's, and what is wrong with what it sends; the store is as it was.
pub fn commit(
    layout: &Layout,
    record: &Record,
    config: (&ImageConfig, &Note),
    tag: Option<&Reference>,
    progress: &mut dyn Progress,
) -> Result<ImageRecord, CellError> {
    commit_until(layout, record, config, tag, progress, &Cutter::default())
}

/// The same, until `cutter` breaks it off.
///
/// # Errors
/// As of [`commit`]; it was broken off.
pub fn commit_until(
    layout: &Layout,
    record: &Record,
    config: (&ImageConfig, &Note),
    tag: Option<&Reference>,
    progress: &mut dyn Progress,
    cutter: &Cutter,
) -> Result<ImageRecord, CellError> {
    let store = Store::open(layout.images())?;
    let guest = || -> Result<Patient, CellError> {
        let stream = Client::connect(record)?.guest_stream()?.within(TRANSFER_MAX);
        cutter.watch(stream.get_ref()).map_err(CellError::host("cannot commit the cell"))?;
        Ok(stream)
    };
    config.1.check()?;
    let (_, spec, _) = Record::find(layout, &record.id)?;
    // A root that cannot be written has nothing that lies over its image.
    if !spec.read_only
        && spec.depot.is_none()
        && let Ok(image) = store.resolve(spec.image_name())
    {
        let (config, note) = config;
        return changes(&store, guest, &image, (config, note, tag), progress);
    }
    let stream = guest()?;
    let made = import_layer(&store, config, tag, progress, |mut write| {
        let sent = client::download_layer(&stream, &stream, &mut write, LAYER_BYTES_MAX);
        sent.map(drop).map_err(local)
    });
    Ok(made?)
}

/// The same by what the cell has changed of `image`.
fn changes(
    store: &Store,
    guest: impl FnOnce() -> Result<Patient, CellError>,
    image: &ImageRecord,
    (config, note, tag): (&ImageConfig, &Note, Option<&Reference>),
    progress: &mut dyn Progress,
) -> Result<ImageRecord, CellError> {
    let rootfs = store.open_rootfs(image)?;
    let below = store.inspect(&image.id.to_string())?;
    let to = store.scratch()?;
    progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
    let stream = guest()?;
    let layer = compose::keep(&to, |mut write| {
        let sent = client::download_changes(&stream, &stream, &[], &mut write, LAYER_BYTES_MAX);
        sent.map(drop).map_err(local)
    })?;
    progress.event(ProgressEvent::Finishing);
    let note = Note { parent: Some(image.id), ..note.clone() };
    let document = document_over(&below, (config, &note), layer.diff_id)?;
    let layers = [(layer, to)];
    let below = Below { base: Some(&rootfs), layers: &layers };
    Ok(compose::lasting(store, &document, below, tag)?)
}

fn local(error: ClientError) -> io::Error {
    match error {
        ClientError::Local(error) => error,
        error => io::Error::other(error),
    }
}
