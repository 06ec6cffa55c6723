//! A tree of files for a client (`--output type=local`): the protocol of [`super::transfer`], seen
//! from its other side.
//!
//! The tree comes as an archive that a jailed process has looked at
//! ([`exocell_cell::archive::passed`]). The client wants names in the order of their parts, each
//! directory before what is in it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use tar::EntryType;

use super::messages::{DATA, ERROR, FINISH, Packet, REQUEST, STAT, Stat};
use super::transfer::{Line, complaint, refused};
use crate::go;

/// What is sent so. While it is told what there is, a client's wishes wait in one window of the
/// connection, which holds about this many.
const ENTRIES_MAX: usize = 80_000;
/// Bytes of one packet.
const CHUNK_BYTES: usize = 32 << 10;

/// A file, and where its content is in the archive.
struct Placed {
    stat: Stat,
    at: u64,
}

/// Sends what is in `archive` to the client.
///
/// # Errors
/// It is too much, or cannot be read; the client's.
pub fn send(line: &mut impl Line, archive: &File) -> io::Result<()> {
    let all: Vec<Placed> = listed(archive)?.into_values().collect();
    for Placed { stat, .. } in &all {
        let stat = Some(stat.clone());
        line.send(&Packet { kind: STAT, stat, ..Packet::default() })?;
    }
    line.send(&Packet::of(STAT, 0))?;
    loop {
        let packet = line.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match packet.kind {
            REQUEST => {
                let file = all.get(packet.id as usize);
                let file =
                    file.ok_or_else(|| refused("the client wants a file that is not there"))?;
                content(line, archive, file, packet.id)?;
            }
            FINISH => return line.send(&Packet::of(FINISH, 0)),
            ERROR => return Err(complaint(&packet)),
            _ => return Err(refused("the client says what nobody has asked for")),
        }
    }
}

fn content(line: &mut impl Line, archive: &File, file: &Placed, id: u32) -> io::Result<()> {
    let (mut at, mut left) = (file.at, file.stat.size as u64);
    while left > 0 {
        let mut data = vec![0; CHUNK_BYTES.min(left as usize)];
        archive.read_exact_at(&mut data, at)?;
        (at, left) = (at + data.len() as u64, left - data.len() as u64);
        line.send(&Packet { kind: DATA, id, data, ..Packet::default() })?;
    }
    line.send(&Packet::of(DATA, id))
}

/// What is in the archive, by the parts of names.
fn listed(archive: &File) -> io::Result<BTreeMap<Vec<Vec<u8>>, Placed>> {
    let mut read = archive;
    read.seek(SeekFrom::Start(0))?;
    let mut found = BTreeMap::new();
    for entry in tar::Archive::new(read).entries_with_seek()? {
        let mut entry = entry?;
        let parts: Vec<Vec<u8>> = parts(&entry.path_bytes());
        let Some(stat) = stat(&mut entry, &parts)? else { continue };
        for count in 1..parts.len() {
            let above = parts[..count].to_vec();
            let path = above.join(&b'/');
            found.entry(above).or_insert_with(|| Placed { stat: directory(path), at: 0 });
        }
        let at = entry.raw_file_position();
        found.insert(parts, Placed { stat, at });
        if found.len() > ENTRIES_MAX {
            return Err(refused(format!(
                "there are more than {ENTRIES_MAX} files; have them in an archive (--output \
                 type=tar,dest=FILE)"
            )));
        }
    }
    Ok(found)
}

fn parts(name: &[u8]) -> Vec<Vec<u8>> {
    let parts = name.split(|byte| *byte == b'/');
    parts.filter(|part| !matches!(*part, b"" | b"." | b"..")).map(<[u8]>::to_vec).collect()
}

fn directory(path: Vec<u8>) -> Stat {
    Stat { path, mode: go::DIRECTORY | 0o755, ..Stat::default() }
}

/// What the client is told of an entry; nothing of the root, and of what it cannot have.
fn stat<R: Read>(entry: &mut tar::Entry<'_, R>, parts: &[Vec<u8>]) -> io::Result<Option<Stat>> {
    if parts.is_empty() {
        return Ok(None);
    }
    let header = entry.header();
    let (kind, mode) = (header.entry_type(), header.mode()?);
    let modified = i64::try_from(header.mtime()?).unwrap_or(0).saturating_mul(1_000_000_000);
    let link = entry.link_name_bytes().map(|link| link.into_owned()).unwrap_or_default();
    let special = [(0o4000, go::SETUID), (0o2000, go::SETGID), (0o1000, go::STICKY)];
    let special = special.into_iter().filter(|(bit, _)| mode & bit != 0);
    let mode = special.fold(mode & 0o777, |all, (_, go)| all | go);
    let (kind, size, link) = match kind {
        EntryType::Directory => (go::DIRECTORY, 0, Vec::new()),
        EntryType::Symlink => (go::SYMLINK, 0, link),
        // Its first name is one of the tree.
        EntryType::Link => (0, 0, self::parts(&link).join(&b'/')),
        EntryType::Fifo => (go::PIPE, 0, Vec::new()),
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            (0, i64::try_from(entry.size()).map_err(io::Error::other)?, Vec::new())
        }
        _ => return Ok(None),
    };
    let path = parts.join(&b'/');
    Ok(Some(Stat { path, mode: mode | kind, size, modified, link, ..Stat::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::transfer;
    use std::io::Write;
    use std::sync::mpsc;

    /// One end of a line to another thread.
    struct End(mpsc::Sender<Packet>, mpsc::Receiver<Packet>);

    impl Line for End {
        fn receive(&mut self) -> io::Result<Option<Packet>> {
            Ok(self.1.recv().ok())
        }

        fn send(&mut self, packet: &Packet) -> io::Result<()> {
            self.0.send(packet.clone()).map_err(io::Error::other)
        }
    }

    fn packed(files: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (name, kind, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o4755);
            header.set_mtime(7);
            match kind {
                EntryType::Symlink | EntryType::Link => {
                    header.set_size(0);
                    archive.append_link(&mut header, name, content).unwrap();
                }
                _ => {
                    header.set_size(content.len() as u64);
                    archive.append_data(&mut header, name, content.as_bytes()).unwrap();
                }
            }
        }
        archive.into_inner().unwrap()
    }

    #[test]
    fn a_tree_that_is_sent_is_the_one_that_is_received() {
        let long = "x".repeat(100_000);
        let mut archive = tempfile::tempfile().unwrap();
        let tree = packed(&[
            ("b/c/d", EntryType::Regular, "of d"),
            ("b-", EntryType::Regular, &long),
            ("b", EntryType::Directory, ""),
            ("a", EntryType::Symlink, "../b"),
            ("z", EntryType::Link, "b-"),
            ("b/empty", EntryType::Regular, ""),
        ]);
        archive.write_all(&tree).unwrap();
        let (to_them, theirs) = mpsc::channel();
        let (to_us, ours) = mpsc::channel();
        let mut there = End(to_us, theirs);
        let received = std::thread::spawn(move || {
            let mut out = Vec::new();
            let mut told = 0;
            transfer::receive(&mut there, &mut out, 1 << 20, &mut |bytes| told += bytes).unwrap();
            (out, told)
        });
        send(&mut End(to_them, ours), &archive).unwrap();
        let (out, told) = received.join().unwrap();
        assert_eq!(told, 100_004);
        let mut names = Vec::new();
        for entry in tar::Archive::new(out.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            match name.as_str() {
                "b/c/d" => assert_eq!(content, "of d"),
                "b-" => assert_eq!(content, long),
                "a" => assert_eq!(entry.link_name_bytes().unwrap().as_ref(), b"../b"),
                "z" => assert_eq!(entry.link_name_bytes().unwrap().as_ref(), b"b-"),
                _ => assert_eq!(content, ""),
            }
            let mode = entry.header().mode().unwrap();
            assert!(name == "b/c" || mode == 0o4755, "{name}: {mode:o}");
            names.push(name);
        }
        assert_eq!(names, ["a", "b", "b/c", "b/c/d", "b/empty", "b-", "z"]);
    }
}
