//! A template: what a running cell's root file system holds, as an image that
//! other cells start from. Making it copies once; starting from it does not.

use std::io;

use exocell_agent::TRANSFER_MAX;
use exocell_agent::client::{self, ClientError};
use exocell_images::{ImageConfig, ImageRecord, Progress, Reference, Store};

use crate::control::Client;
use crate::unpack::import_layer;
use crate::{CellError, Layout, Record};

/// A guest cannot fill the host with one template.
const LAYER_BYTES_MAX: u64 = 64 << 30;

/// Makes an image called `tag` of the running cell `record`, to be started as
/// `config` says. What is mounted in the cell, folders above all, is left out.
/// Programs of the cell go on meanwhile.
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
    let stream = Client::connect(record)?.guest_stream()?.within(TRANSFER_MAX);
    let made = import_layer(&store, config, tag, progress, |mut write| {
        let sent = client::download_layer(&stream, &stream, &mut write, LAYER_BYTES_MAX);
        sent.map(drop).map_err(|error| match error {
            ClientError::Local(error) => error,
            error => io::Error::other(error),
        })
    });
    Ok(made?)
}
