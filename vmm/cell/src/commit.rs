//! A template: what a running cell's root file system holds, as an image that
//! other cells start from. Making it copies once; starting from it does not.

use std::io::{self, PipeReader, Read};
use std::sync::mpsc::{Receiver, channel};

use exocell_agent::TRANSFER_MAX;
use exocell_agent::client::{self, ClientError};
use exocell_images::{ImageRecord, ImportLimits, Progress, Reference, Store};

use crate::control::Client;
use crate::{CellError, Layout, Record};

/// A guest cannot fill the host with one template.
const LAYER_BYTES_MAX: u64 = 64 << 30;

/// Makes an image called `tag` of the running cell `record`, to be started as
/// the image `from` is. What is mounted in the cell, folders above all, is left
/// out, and so are extended attributes. Programs of the cell go on meanwhile.
///
/// # Errors
/// The guest's, and what is wrong with what it sends; the store is as it was.
pub fn commit(
    layout: &Layout,
    record: &Record,
    from: &str,
    tag: Option<&Reference>,
    progress: &mut dyn Progress,
) -> Result<ImageRecord, CellError> {
    let store = Store::open(layout.images())?;
    let config = store.resolve(from)?.config;
    let stream = Client::connect(record)?.guest_stream()?.within(TRANSFER_MAX);
    let (read, mut write) = io::pipe().map_err(CellError::host("cannot make a pipe"))?;
    let (say, outcome) = channel();
    let mut layer = Layer { read, outcome };
    let limits = ImportLimits::default();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let sent = client::download_layer(&stream, &stream, &mut write, LAYER_BYTES_MAX);
            // An import that failed does not ask any more.
            let _ = say.send(sent.map(drop));
        });
        let made = store.import_layer(&mut layer, &config, tag, &limits, progress);
        // With nobody to read it, the sender ends too.
        drop(layer);
        Ok(made?)
    })
}

/// A guest's archive; one that the guest did not end is not whole.
struct Layer {
    read: PipeReader,
    outcome: Receiver<Result<(), ClientError>>,
}

impl Read for Layer {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.read.read(buffer)? {
            0 if !buffer.is_empty() => match self.outcome.recv() {
                Ok(Err(error)) => Err(io::Error::other(error)),
                // Said already, when the end was met before.
                Ok(Ok(())) | Err(_) => Ok(0),
            },
            count => Ok(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn an_archive_that_was_not_ended_is_an_error_at_its_end() {
        for (sent, whole) in [(Ok(()), true), (Err(ClientError::Closed), false)] {
            let (read, mut write) = io::pipe().unwrap();
            let (say, outcome) = channel();
            write.write_all(b"part").unwrap();
            drop(write);
            say.send(sent).unwrap();
            let mut bytes = Vec::new();
            let end = Layer { read, outcome }.read_to_end(&mut bytes);
            assert_eq!((bytes.as_slice(), end.is_ok()), (&b"part"[..], whole));
        }
    }
}
