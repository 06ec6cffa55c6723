//! A private file: what was written, in blocks, over what the base has.

use super::usage::{Budget, Charge};
use super::{Status, Times};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use wasmtime_wasi::p1::types::{Errno, Filetype};

const BLOCK_BYTES: usize = 4096;
/// What a block is charged: its bytes and its place in the list.
const BLOCK_CHARGE: u64 = BLOCK_BYTES as u64 + 64;
/// The longest file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 40;

#[derive(Debug)]
pub(crate) struct File {
    pub ino: u64,
    /// The file of the base that shows through where nothing was written.
    pub below: Option<PathBuf>,
    content: Mutex<Content>,
}

#[derive(Debug)]
struct Content {
    /// How much of the file below shows through, in bytes.
    below_len: u64,
    len: u64,
    blocks: BTreeMap<u64, Box<[u8; BLOCK_BYTES]>>,
    times: Times,
    links: u64,
    charge: Charge,
}

impl File {
    /// An empty file.
    pub fn new(ino: u64, charge: Charge) -> Self {
        Self::with(ino, None, 0, Times::now(), charge)
    }

    /// What the base has at `path`, until it is written to.
    pub fn over(path: &Path, status: &Status, charge: Charge) -> Self {
        Self::with(status.ino, Some(path.to_owned()), status.len, status.times, charge)
    }

    fn with(ino: u64, below: Option<PathBuf>, len: u64, times: Times, charge: Charge) -> Self {
        let blocks = BTreeMap::new();
        let content = Content { below_len: len, len, blocks, times, links: 1, charge };
        Self { ino, below, content: Mutex::new(content) }
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self) -> Status {
        let Content { len, times, links, .. } = *self.lock();
        Status { kind: Filetype::RegularFile, ino: self.ino, links, len, times }
    }

    pub fn len(&self) -> u64 {
        self.lock().len
    }

    /// Another name, or one less.
    pub fn linked(&self, more: bool) {
        let mut content = self.lock();
        content.links = content.links.saturating_add_signed(if more { 1 } else { -1 });
    }

    pub fn set_times(&self, change: impl FnOnce(&mut Times)) {
        change(&mut self.lock().times);
    }

    /// Reads at `offset`; less than asked for only at the end. `below` is the file of the base,
    /// where there is one.
    ///
    /// # Errors
    /// [`Errno::Io`] when the base cannot be read.
    pub fn read_at(
        &self,
        below: Option<&std::fs::File>,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, Errno> {
        let content = self.lock();
        let rest = usize::try_from(content.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let count = rest.min(out.len());
        let mut done = 0;
        while done < count {
            let at = offset + done as u64;
            let (number, within) = place(at);
            // Up to the next block that was written, the base is read in one go.
            let end = match content.blocks.range(number..).next() {
                Some((found, _)) if *found == number => count.min(done + BLOCK_BYTES - within),
                Some((next, _)) => {
                    let until = next * BLOCK_BYTES as u64 - offset;
                    count.min(usize::try_from(until).unwrap_or(usize::MAX))
                }
                None => count,
            };
            let part = &mut out[done..end];
            match content.blocks.get(&number) {
                Some(block) => part.copy_from_slice(&block[within..within + part.len()]),
                None => read_below(below, content.below_len, at, part)?,
            }
            done = end;
        }
        Ok(count)
    }

    /// Writes at `offset`, or at the end; answers with how much and where that ended.
    ///
    /// # Errors
    /// [`Errno::Nospc`] when not one byte finds room, [`Errno::Fbig`], [`Errno::Io`].
    pub fn write_at(
        &self,
        budget: &Budget,
        below: Option<&std::fs::File>,
        offset: Option<u64>,
        data: &[u8],
    ) -> Result<(usize, u64), Errno> {
        let mut content = self.lock();
        let offset = offset.unwrap_or(content.len);
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= FILE_BYTES_MAX);
        end.ok_or(Errno::Fbig)?;
        let mut done = 0;
        while done < data.len() {
            let (number, within) = place(offset + done as u64);
            let part = &data[done..data.len().min(done + BLOCK_BYTES - within)];
            match content.block(budget, below, number) {
                Ok(block) => block[within..within + part.len()].copy_from_slice(part),
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
            done += part.len();
        }
        let end = offset + done as u64;
        if done > 0 {
            content.len = content.len.max(end);
            content.times.changed_ns = Times::now().changed_ns;
        }
        Ok((done, end))
    }

    /// Cuts it off or lengthens it with zeros, which take no room.
    ///
    /// # Errors
    /// [`Errno::Fbig`].
    pub fn set_len(&self, len: u64) -> Result<(), Errno> {
        if len > FILE_BYTES_MAX {
            return Err(Errno::Fbig);
        }
        let mut content = self.lock();
        if len < content.len {
            content.below_len = content.below_len.min(len);
            let (number, within) = place(len);
            if let Some(block) = content.blocks.get_mut(&number) {
                block[within..].fill(0);
            }
            let gone = content.blocks.split_off(&number.saturating_add(u64::from(within > 0)));
            content.charge.shrink(gone.len() as u64 * BLOCK_CHARGE);
        }
        content.len = len;
        content.times.changed_ns = Times::now().changed_ns;
        Ok(())
    }
}

impl Content {
    /// The block of this number, made of what shows there now.
    fn block(
        &mut self,
        budget: &Budget,
        below: Option<&std::fs::File>,
        number: u64,
    ) -> Result<&mut [u8; BLOCK_BYTES], Errno> {
        if !self.blocks.contains_key(&number) {
            let mut bytes = Box::new([0; BLOCK_BYTES]);
            read_below(below, self.below_len, number * BLOCK_BYTES as u64, &mut bytes[..])?;
            self.charge.grow(budget, BLOCK_CHARGE)?;
            self.blocks.insert(number, bytes);
        }
        self.blocks.get_mut(&number).map(|block| &mut **block).ok_or(Errno::Io)
    }
}

fn place(offset: u64) -> (u64, usize) {
    (offset / BLOCK_BYTES as u64, (offset % BLOCK_BYTES as u64) as usize)
}

/// What shows of the base at `offset`, with zeros behind its end.
fn read_below(
    below: Option<&std::fs::File>,
    below_len: u64,
    offset: u64,
    out: &mut [u8],
) -> Result<(), Errno> {
    let there = usize::try_from(below_len.saturating_sub(offset)).unwrap_or(usize::MAX);
    let (mut shown, rest) = out.split_at_mut(there.min(out.len()));
    rest.fill(0);
    let mut at = offset;
    while !shown.is_empty() {
        match below.ok_or(Errno::Io)?.read_at(shown, at) {
            Ok(0) => break,
            Ok(count) => {
                shown = &mut shown[count..];
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Errno::Io),
        }
    }
    // The host cut it short meanwhile.
    shown.fill(0);
    Ok(())
}
