//! What a command reads and writes: files in memory, each of a bounded length.

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// A file is longer by so much than what may be written to it: whoever writes more gets there.
const MORE_BYTES: u64 = 4096;

/// Standard input: all that there is to read.
pub(crate) fn input(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("stdin", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// Standard output or error.
pub(crate) struct Output {
    file: File,
    bytes_max: usize,
}

impl Output {
    /// Takes `bytes_max` bytes, and fails the writes that come much later (memfd_create(2),
    /// `F_SEAL_GROW`).
    pub fn new(bytes_max: usize) -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("output", flags)?);
        file.set_len(bytes_max as u64 + MORE_BYTES)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(Self { file, bytes_max })
    }

    /// Where to write.
    pub fn end(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// What was written, and whether that is all of it.
    pub fn written(mut self) -> io::Result<(Vec<u8>, bool)> {
        let length = usize::try_from(self.file.stream_position()?).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length.min(self.bytes_max)];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok((bytes, length <= self.bytes_max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn what_is_there_is_read_to_its_end() {
        let mut bytes = Vec::new();
        File::from(input(b"abc").unwrap()).read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"abc");
    }

    #[test]
    fn what_is_written_is_bounded() {
        const MAX: usize = 10_000;
        for (length, kept, is_all) in [(0, 0, true), (MAX, MAX, true), (MAX + 1, MAX, false)] {
            let output = Output::new(MAX).unwrap();
            let mut end = File::from(output.end().unwrap());
            end.write_all(&vec![b'x'; length]).unwrap();
            assert_eq!(output.written().unwrap(), (vec![b'x'; kept], is_all), "{length}");
        }
        let output = Output::new(MAX).unwrap();
        let mut end = File::from(output.end().unwrap());
        let refused = (0..100).find_map(|_| end.write_all(&[b'x'; 4096]).err()).unwrap();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(output.written().unwrap(), (vec![b'x'; MAX], false));
    }
}
