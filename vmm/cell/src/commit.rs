//! A template: what a running cell's root file system holds, as an image that
//! other cells start from. What the cell has changed of its image is a file over those of the image.

use std::io;

use exocell_agent::TRANSFER_MAX;
use exocell_agent::client::{self, ClientError};
use exocell_images::{
    ImageConfig, ImageRecord, Progress, ProgressEvent, Reference, Store, document_over,
};

use crate::compose::{self, Below};
use crate::control::Client;
use crate::unpack::import_layer;
use crate::{CellError, Layout, Record};

/// A guest cannot fill the host with one template.
const LAYER_BYTES_MAX: u64 = 64 << 30;

/// Makes an image called `tag` of the running cell `record`, to be started as
/// `config` says. What is mounted in the cell, folders above all, is left out, and so are the files
/// that tell it its names (/etc/hosts and the like). Programs of the cell go on meanwhile.
///
/// # Errors
/// The guest's, and what is wrong with what it sends; the store is as it was.
pub fn commit(
    layout: &Layout,
    record: &Record,
    config: &ImageConfig,
    tag: Option<&Reference>,
    progress: &mut dyn Progress,
) -> Result<ImageRecord, CellError> {
    let store = Store::open(layout.images())?;
    let (_, spec, _) = Record::find(layout, &record.id)?;
    // A root that cannot be written has nothing that lies over its image.
    if !spec.read_only
        && spec.depot.is_none()
        && let Ok(image) = store.resolve(spec.image_name())
    {
        return changes(&store, record, &image, (config, tag), progress);
    }
    let stream = Client::connect(record)?.guest_stream()?.within(TRANSFER_MAX);
    let made = import_layer(&store, config, tag, progress, |mut write| {
        let sent = client::download_layer(&stream, &stream, &mut write, LAYER_BYTES_MAX);
        sent.map(drop).map_err(local)
    });
    Ok(made?)
}

/// The same by what the cell has changed of `image`.
fn changes(
    store: &Store,
    record: &Record,
    image: &ImageRecord,
    (config, tag): (&ImageConfig, Option<&Reference>),
    progress: &mut dyn Progress,
) -> Result<ImageRecord, CellError> {
    let rootfs = store.open_rootfs(image)?;
    let below = store.inspect(&image.id.to_string())?;
    let to = store.scratch()?;
    progress.event(ProgressEvent::Layer { index: 0, count: 1, bytes: None });
    let stream = Client::connect(record)?.guest_stream()?.within(TRANSFER_MAX);
    let layer = compose::keep(&to, |mut write| {
        let sent = client::download_changes(&stream, &stream, &[], &mut write, LAYER_BYTES_MAX);
        sent.map(drop).map_err(local)
    })?;
    progress.event(ProgressEvent::Finishing);
    let document = document_over(&below, config, layer.diff_id)?;
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
