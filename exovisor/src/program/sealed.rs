//! Files in memory whose contents nobody changes any more.

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

/// A file in memory that is as it is (memfd_create(2), fcntl(2) F_ADD_SEALS). It stands at its
/// beginning.
#[derive(Debug)]
pub struct Sealed {
    file: File,
    bytes: u64,
}

/// There is more of it than there may be.
#[derive(Debug, thiserror::Error)]
#[error("it is longer than {max} bytes")]
pub struct TooLong {
    /// So much there may be.
    pub max: u64,
}

impl Sealed {
    /// An empty file, to be written and then sealed ([`Sealed::of`]).
    ///
    /// # Errors
    /// What the host says.
    pub fn empty() -> io::Result<File> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        Ok(memfd_create(c"exocell", flags)?.into())
    }

    /// Seals a file that nobody has mapped for writing.
    ///
    /// # Errors
    /// The host's error: it is not such a file, or is mapped.
    pub fn of(mut file: File) -> io::Result<Self> {
        let seals = SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        file.rewind()?;
        let bytes = file.metadata()?.len();
        Ok(Self { file, bytes })
    }

    /// A copy of what `from` gives, which `see` is shown piece by piece.
    ///
    /// # Errors
    /// What the host says; [`TooLong`] (as the inner error) if it is more than `bytes_max`.
    pub fn copy(from: impl Read, bytes_max: u64, mut see: impl FnMut(&[u8])) -> io::Result<Self> {
        let mut file = Self::empty()?;
        let mut from = from.take(bytes_max.saturating_add(1));
        let (mut piece, mut total) = (vec![0; 64 << 10], 0);
        loop {
            let count = match from.read(&mut piece) {
                Ok(0) => return Self::of(file),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            total += count as u64;
            if total > bytes_max {
                return Err(io::Error::other(TooLong { max: bytes_max }));
            }
            let read = piece.get(..count).unwrap_or_default();
            see(read);
            file.write_all(read)?;
        }
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of it.
    ///
    /// # Errors
    /// What the host says.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes =
            vec![0; usize::try_from(self.bytes).map_err(|_| io::ErrorKind::OutOfMemory)?];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// The file. All that share it share where it stands.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl AsFd for Sealed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_stays_and_what_is_too_long_is_refused() {
        let mut seen = Vec::new();
        let sealed = Sealed::copy(&b"abc"[..], 3, |piece| seen.extend(piece)).unwrap();
        assert_eq!((sealed.bytes(), seen.as_slice()), (3, &b"abc"[..]));
        let mut file = sealed.file();
        assert_eq!(io::read_to_string(file).unwrap(), "abc");
        assert_eq!(sealed.read().unwrap(), b"abc");
        assert!(file.write_all(b"d").is_err() && file.set_len(1).is_err());
        let error = Sealed::copy(&b"abcd"[..], 3, |_| ()).unwrap_err();
        assert!(error.get_ref().is_some_and(|inner| inner.is::<TooLong>()), "{error}");
    }
}
