//! Files with holes in an archive (GNU tar manual, "Storing Sparse Files", the old form): where data
//! is, and that data alone. A file of 60 GB that holds nothing is a header.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use rustix::fs::SeekFrom as Look;
use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

/// Shorter holes are sent as zeros.
const HOLE_BYTES_MIN: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 512;
/// Parts of one file; who reads the archive bounds its memory, too. Of a file with more, the shorter
/// holes are sent as zeros.
const PARTS_MAX: usize = 16 << 10;

/// Where data is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    offset: u64,
    length: u64,
}

impl Part {
    fn end(self) -> u64 {
        self.offset + self.length
    }
}

/// Where data is in the first `length` bytes of `file`; `None` where that is everywhere, or its file
/// system does not say.
fn parts(file: &File, length: u64) -> io::Result<Option<Vec<Part>>> {
    let (mut found, mut hole_min, mut at) = (Vec::new(), HOLE_BYTES_MIN, 0);
    while at < length {
        let begin = match rustix::fs::seek(file, Look::Data(at)) {
            Ok(begin) => begin,
            // Nothing more.
            Err(Errno::NXIO) => break,
            Err(_) if at == 0 => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if begin >= length {
            break;
        }
        // One that is cut meanwhile ends there.
        let end = rustix::fs::seek(file, Look::Hole(begin)).unwrap_or(length);
        // Readers want all parts but the last in whole blocks.
        let (begin, end) = (begin - begin % BLOCK_BYTES, end.next_multiple_of(BLOCK_BYTES));
        let end = end.min(length);
        add(&mut found, Part { offset: begin, length: end.saturating_sub(begin) }, hole_min);
        while found.len() > PARTS_MAX {
            hole_min *= 2;
            let all = std::mem::take(&mut found);
            all.into_iter().for_each(|part| add(&mut found, part, hole_min));
        }
        at = end.max(at + 1);
    }
    let is_whole = found == [Part { offset: 0, length }];
    Ok((!is_whole && length > 0).then_some(found))
}

/// Adds a part behind the others, or to the last one if the hole between is short.
fn add(parts: &mut Vec<Part>, part: Part, hole_min: u64) {
    let end = parts.last().map_or(0, |last| last.end());
    match parts.last_mut() {
        Some(last) if part.offset - end < hole_min => last.length = part.end() - last.offset,
        None if part.offset < hole_min => parts.push(Part { offset: 0, length: part.end() }),
        _ => parts.push(part),
    }
}

/// Makes `header` that of a file with holes, if `file` has any in its first `length` bytes; what
/// follows it in the archive.
pub fn begin(header: &mut Header, file: &File, length: u64) -> io::Result<Option<Stored>> {
    if length < HOLE_BYTES_MIN {
        return Ok(None);
    }
    let found = parts(file, length)?;
    (&*file).rewind()?;
    let Some(mut parts) = found else { return Ok(None) };
    let Some(own) = header.as_gnu_mut() else { return Ok(None) };
    own.set_real_size(length);
    if parts.last().map_or(0, |last| last.end()) < length {
        // Readers take the end of the last part for the end of the file.
        parts.push(Part { offset: length, length: 0 });
    }
    let (first, rest) = parts.split_at(parts.len().min(own.sparse.len()));
    write(&mut own.sparse, first);
    own.set_is_extended(!rest.is_empty());
    let mut map = Vec::new();
    let mut block = GnuExtSparseHeader::new();
    let room = block.sparse().len();
    let count = rest.len().div_ceil(room);
    for (number, parts) in rest.chunks(room).enumerate() {
        block = GnuExtSparseHeader::new();
        write(block.sparse_mut(), parts);
        block.set_is_extended(number + 1 < count);
        map.extend_from_slice(block.as_bytes());
    }
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(parts.iter().map(|part| part.length).sum());
    parts.reverse();
    Ok(Some(Stored { map: io::Cursor::new(map), parts, file: file.try_clone()?, left: 0 }))
}

fn write(places: &mut [GnuSparseHeader], parts: &[Part]) {
    for (place, part) in places.iter_mut().zip(parts) {
        place.set_offset(part.offset);
        place.set_length(part.length);
    }
}

/// What lies behind the header: the rest of the map, then the data. A file that shrinks meanwhile is
/// padded.
pub struct Stored {
    map: io::Cursor<Vec<u8>>,
    /// Those to come, the next one last.
    parts: Vec<Part>,
    file: File,
    /// Bytes of the current one.
    left: u64,
}

impl Read for Stored {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.map.read(buffer)?;
        if count > 0 {
            return Ok(count);
        }
        while self.left == 0 {
            let Some(next) = self.parts.pop() else { return Ok(0) };
            self.file.seek(SeekFrom::Start(next.offset))?;
            self.left = next.length;
        }
        let count =
            (&self.file).take(self.left).chain(io::repeat(0)).take(self.left).read(buffer)?;
        self.left -= count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// What `file` is in an archive, and how long that is.
    fn packed(file: &File) -> (Vec<u8>, usize) {
        let length = file.metadata().unwrap().len();
        let mut header = Header::new_gnu();
        header.set_size(length);
        header.set_mode(0o644);
        let mut archive = tar::Builder::new(Vec::new());
        match begin(&mut header, file, length).unwrap() {
            Some(stored) => archive.append_data(&mut header, "f", stored).unwrap(),
            None => archive.append_data(&mut header, "f", file).unwrap(),
        }
        let bytes = archive.into_inner().unwrap();
        let count = bytes.len();
        (bytes, count)
    }

    fn unpacked(bytes: &[u8]) -> Vec<u8> {
        let mut archive = tar::Archive::new(bytes);
        let mut entry = archive.entries().unwrap().next().unwrap().unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        content
    }

    fn file(length: u64, data: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        data.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
        file
    }

    #[test]
    fn holes_are_not_sent_and_come_back() {
        let long = vec![7; 200 << 10];
        let cases: [&[(u64, &[u8])]; 5] = [
            &[],
            &[(0, b"begin")],
            &[((9 << 20) + 4, b"the very end")],
            &[(1 << 20, &long), (5 << 20, b"x")],
            &[(4096, b"after a short hole"), (3 << 20, b"y")],
        ];
        for data in cases {
            let file = file((9 << 20) + 16, data);
            let (bytes, count) = packed(&file);
            assert!(count < 400 << 10, "{count}");
            let mut expected = vec![0; (9 << 20) + 16];
            for (at, bytes) in data {
                expected[*at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            assert!(unpacked(&bytes) == expected, "{data:?}");
        }
        // A file of 60 GiB is a header.
        assert!(packed(&file(60 << 30, &[])).1 < 4096);
        let whole = file(0, &[(0, &long)]);
        assert_eq!(unpacked(&packed(&whole).0), long);
    }

    #[test]
    fn a_map_has_blocks_of_its_own_and_is_bounded() {
        let places: Vec<u64> = (0..100).map(|number| number << 20).collect();
        let data: Vec<(u64, &[u8])> = places.iter().map(|at| (*at, &b"data"[..])).collect();
        let file = file(100 << 20, &data);
        let (bytes, count) = packed(&file);
        assert!(count < 1 << 20, "{count}");
        let content = unpacked(&bytes);
        assert!(places.iter().all(|at| content[*at as usize..].starts_with(b"data\0")));
        // Short holes go where there are too many.
        let mut parts = Vec::new();
        for number in 0..10 {
            add(&mut parts, Part { offset: number * 10, length: 5 }, 5);
        }
        assert_eq!(parts.len(), 10);
        let mut fewer = Vec::new();
        parts.into_iter().for_each(|part| add(&mut fewer, part, 10));
        assert_eq!(fewer, [Part { offset: 0, length: 95 }]);
    }

    #[test]
    fn a_file_that_shrinks_meanwhile_is_padded() {
        let file = file(2 << 20, &[(1 << 20, b"gone")]);
        let mut header = Header::new_gnu();
        let mut stored = begin(&mut header, &file, 2 << 20).unwrap().unwrap();
        file.set_len(0).unwrap();
        let mut content = Vec::new();
        stored.read_to_end(&mut content).unwrap();
        assert_eq!(content.len() as u64, header.entry_size().unwrap());
        assert!(content.iter().all(|byte| *byte == 0));
    }
}
