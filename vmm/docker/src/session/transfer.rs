//! Files that a client sends (fsutil's protocol, tonistiigi/fsutil `send.go`), as a tar stream.
//!
//! ```text
//! client ── STAT, STAT, ... STAT without a file ──>   all there is, in its order
//!        <── REQUEST 3, REQUEST 7, ... ──             a few ahead, by their places in that order
//!        ── DATA 7, DATA 3, ... DATA 3 without bytes, ... ──>
//!        <── FINISH ── ── FINISH ──>
//! ```
//! What the names and links mean is not looked at here: who reads the stream does that in a jail
//! ([`exocell_cell::compose::take`]), as it does with the archives of the classic call.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use exocell_cell::agent::printable;
use tar::{Builder, EntryType, Header};

use super::messages::{DATA, ERROR, FINISH, Packet, REQUEST, STAT, Stat};
use crate::go;

/// Files, directories and links of one transfer.
const ENTRIES_MAX: usize = 1 << 20;
/// Bytes that all names, links and attributes take.
const NAMES_BYTES_MAX: usize = 256 << 20;
/// Bytes of one name.
const NAME_BYTES_MAX: usize = 4096;
/// Bytes of all attributes of a file.
const ATTRIBUTES_BYTES_MAX: usize = 64 << 10;
/// What an attribute takes beside its name and value, in bytes, at most.
const ATTRIBUTE_BYTES: usize = 192;
/// Files that are asked for ahead, and the bytes that all but the first may have.
const AHEAD_MAX: usize = 64;
const AHEAD_BYTES_MAX: u64 = 4 << 20;
/// The longest words of a client that are told.
const WORDS_BYTES_MAX: usize = 1 << 10;
/// Who owns what a client sends: the image's root.
const ROOT: u64 = 0;

/// A way to a client and back.
pub trait Line {
    /// The next packet; `None` where the client has ended.
    ///
    /// # Errors
    /// The client is gone.
    fn receive(&mut self) -> io::Result<Option<Packet>>;

    /// # Errors
    /// The client is gone.
    fn send(&mut self, packet: &Packet) -> io::Result<()>;
}

pub(super) fn refused(words: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, words.into())
}

fn shown(name: &[u8]) -> String {
    printable(&String::from_utf8_lossy(name)).into_owned()
}

/// Writes all that the client sends to `out`; `told` hears of its bytes.
///
/// # Errors
/// What the client says makes no sense or is too much, or either side failed. The client is told.
pub fn receive(
    line: &mut impl Line,
    out: impl Write,
    bytes_max: u64,
    told: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let received = entries(line, bytes_max).and_then(|entries| {
        write(&entries, line, out, told)?;
        line.send(&Packet::of(FINISH, 0))
    });
    if let Err(error) = &received {
        let data = error.to_string().into_bytes();
        // One that is gone is told nothing.
        let _ = line.send(&Packet { kind: ERROR, data, ..Packet::default() });
        return received;
    }
    loop {
        match line.receive()? {
            Some(packet) if packet.kind == ERROR => return Err(complaint(&packet)),
            Some(packet) if packet.kind != FINISH => {
                return Err(refused("the client sends more than it was asked for"));
            }
            Some(_) => {}
            None => return Ok(()),
        }
    }
}

pub(super) fn complaint(packet: &Packet) -> io::Error {
    let end = packet.data.len().min(WORDS_BYTES_MAX);
    io::Error::other(format!("the client failed: {}", shown(&packet.data[..end])))
}

/// Everything that there is.
fn entries(line: &mut impl Line, bytes_max: u64) -> io::Result<Vec<Stat>> {
    let (mut found, mut names, mut bytes) = (Vec::new(), 0, 0u64);
    loop {
        let packet = line.receive()?.ok_or_else(cut_short)?;
        match packet.kind {
            STAT => {}
            ERROR => return Err(complaint(&packet)),
            _ => return Err(refused("the client sends data before it has named its files")),
        }
        let Some(stat) = packet.stat else { return Ok(found) };
        let attributes: usize =
            stat.attributes.iter().map(|(name, value)| name.len() + value.len()).sum();
        // What keeps them takes more than they have bytes.
        let kept = size_of::<Stat>() + stat.attributes.len() * ATTRIBUTE_BYTES;
        names += stat.path.len() + stat.link.len() + attributes + kept;
        let name = || shown(&stat.path);
        if stat.path.len() > NAME_BYTES_MAX || stat.link.len() > NAME_BYTES_MAX {
            return Err(refused(format!("a name has at most {NAME_BYTES_MAX} bytes: {}", name())));
        }
        if stat.path.is_empty() || stat.path.contains(&0) || stat.link.contains(&0) {
            return Err(refused("a file without a name, or with a zero in it"));
        }
        if attributes > ATTRIBUTES_BYTES_MAX {
            let most = ATTRIBUTES_BYTES_MAX;
            return Err(refused(format!("{} has more than {most} bytes of attributes", name())));
        }
        if has_content(&stat) {
            let size = u64::try_from(stat.size);
            let size = size.map_err(|_| refused(format!("the size of {} is negative", name())))?;
            bytes = bytes.saturating_add(size);
        }
        if bytes > bytes_max || names > NAMES_BYTES_MAX || found.len() == ENTRIES_MAX {
            return Err(refused(format!(
                "there is too much: at most {bytes_max} bytes in {ENTRIES_MAX} files are taken \
                 (.dockerignore leaves files out)"
            )));
        }
        found.push(stat);
    }
}

fn cut_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the client ended before it had sent all")
}

/// All bits of Go's that say what a file is, if it is no plain one; of a socket nothing is said.
const KINDS: u32 = go::DIRECTORY | go::SYMLINK | go::DEVICE | go::PIPE | go::CHARACTER | OTHERS;
/// Sockets, and what Go knows nothing of.
const OTHERS: u32 = 1 << 24 | 1 << 19;

/// A file whose content can be asked for, in the words of the protocol.
fn is_plain(stat: &Stat) -> bool {
    stat.mode & KINDS == 0
}

/// The same, where it is asked for.
fn has_content(stat: &Stat) -> bool {
    is_plain(stat) && stat.link.is_empty()
}

fn write(
    entries: &[Stat],
    line: &mut impl Line,
    out: impl Write,
    told: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let wanted = entries.iter().enumerate().filter(|(_, stat)| has_content(stat));
    let wanted = wanted.map(|(at, stat)| (at as u32, stat.size as u64)).collect();
    let mut contents = Contents { line, wanted, asked: VecDeque::new() };
    let mut archive = Builder::new(out);
    for stat in entries {
        entry(stat, &mut archive, &mut contents, told)?;
    }
    archive.into_inner()?.flush()
}

fn entry<L: Line>(
    stat: &Stat,
    archive: &mut Builder<impl Write>,
    contents: &mut Contents<'_, L>,
    told: &mut dyn FnMut(u64),
) -> io::Result<()> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let name = OsStr::from_bytes(&stat.path);
    let of_name = |error: io::Error| refused(format!("{}: {error}", shown(&stat.path)));
    let mut header = Header::new_gnu();
    let special = [(0o4000, go::SETUID), (0o2000, go::SETGID), (0o1000, go::STICKY)];
    let special = special.into_iter().filter(|(_, bit)| stat.mode & bit != 0);
    header.set_mode(special.fold(stat.mode & 0o777, |all, (bit, _)| all | bit));
    header.set_uid(ROOT);
    header.set_gid(ROOT);
    header.set_mtime(u64::try_from(stat.modified / 1_000_000_000).unwrap_or(0));
    header.set_size(0);
    if !stat.attributes.is_empty() {
        let records = stat.attributes.iter();
        let records: Vec<(String, &[u8])> =
            records.map(|(name, value)| (format!("SCHILY.xattr.{name}"), &value[..])).collect();
        let records = records.iter().map(|(name, value)| (name.as_str(), *value));
        archive.append_pax_extensions(records).map_err(of_name)?;
    }
    let kind = match stat.mode & KINDS {
        0 if stat.link.is_empty() => EntryType::Regular,
        0 => EntryType::Link,
        go::DIRECTORY => EntryType::Directory,
        go::SYMLINK => EntryType::Symlink,
        go::PIPE => EntryType::Fifo,
        // What a device of the client's host is does not matter to an image.
        _ => {
            return Err(refused(format!(
                "{} is a device or a socket; leave it out (.dockerignore)",
                shown(&stat.path)
            )));
        }
    };
    header.set_entry_type(kind);
    match kind {
        EntryType::Regular => {
            header.set_size(stat.size as u64);
            contents.ask()?;
            let mut content = Content { contents, left: stat.size as u64, told, stat };
            archive.append_data(&mut header, name, &mut content).map_err(of_name)?;
            content.end()
        }
        EntryType::Link | EntryType::Symlink => {
            archive.append_link(&mut header, name, OsStr::from_bytes(&stat.link)).map_err(of_name)
        }
        _ => archive.append_data(&mut header, name, io::empty()).map_err(of_name),
    }
}

/// A file that was asked for.
struct Asked {
    id: u32,
    /// As much as may still come.
    left: u64,
    /// What came, and was not read yet.
    waiting: VecDeque<u8>,
    is_whole: bool,
}

/// What is in files. Of those that were asked for the first is read.
struct Contents<'a, L> {
    line: &'a mut L,
    /// Those that are to be asked for, with their sizes.
    wanted: VecDeque<(u32, u64)>,
    asked: VecDeque<Asked>,
}

impl<L: Line> Contents<'_, L> {
    /// Asks for as many files as may be waited for.
    fn ask(&mut self) -> io::Result<()> {
        let mut ahead: u64 =
            self.asked.iter().map(|file| file.left + file.waiting.len() as u64).sum();
        while let Some((id, size)) = self.wanted.front().copied() {
            ahead = ahead.saturating_add(size);
            let is_first = self.asked.is_empty();
            if !is_first && (self.asked.len() == AHEAD_MAX || ahead > AHEAD_BYTES_MAX) {
                return Ok(());
            }
            self.wanted.pop_front();
            let waiting = VecDeque::new();
            self.asked.push_back(Asked { id, left: size, waiting, is_whole: false });
            self.line.send(&Packet::of(REQUEST, id))?;
        }
        Ok(())
    }

    /// Takes one packet.
    fn take(&mut self) -> io::Result<()> {
        let packet = self.line.receive()?.ok_or_else(cut_short)?;
        match packet.kind {
            DATA => {}
            ERROR => return Err(complaint(&packet)),
            _ => return Err(refused("the client sends something else than it was asked for")),
        }
        let unasked = || refused("the client sends a file that it was not asked for");
        let file = self.asked.iter_mut().find(|file| file.id == packet.id && !file.is_whole);
        let file = file.ok_or_else(unasked)?;
        if packet.data.is_empty() {
            file.is_whole = true;
            return Ok(());
        }
        let bytes = packet.data.len() as u64;
        file.left = file.left.checked_sub(bytes).ok_or_else(changed)?;
        file.waiting.extend(packet.data);
        Ok(())
    }
}

fn changed() -> io::Error {
    refused("it changed while it was sent; build again, or leave it out (.dockerignore)")
}

/// The first file that was asked for.
struct Content<'a, 'l, L> {
    contents: &'a mut Contents<'l, L>,
    left: u64,
    told: &'a mut dyn FnMut(u64),
    stat: &'a Stat,
}

impl<L: Line> Content<'_, '_, L> {
    /// It is read; the next one may be.
    fn end(self) -> io::Result<()> {
        let of_file = |error: io::Error| refused(format!("{}: {error}", shown(&self.stat.path)));
        while let Some(file) = self.contents.asked.front() {
            if file.is_whole {
                break;
            }
            // More than was said is an error of its own.
            self.contents.take().map_err(of_file)?;
        }
        self.contents.asked.pop_front();
        Ok(())
    }
}

impl<L: Line> Read for Content<'_, '_, L> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let Some(file) = self.contents.asked.front_mut() else { return Err(cut_short()) };
            if !file.waiting.is_empty() {
                let count = file.waiting.read(buffer)?;
                self.left -= count as u64;
                (self.told)(count as u64);
                return Ok(count);
            }
            if file.is_whole {
                return Err(changed());
            }
            self.contents.take()?;
        }
    }
}

#[cfg(test)]
mod tests;
