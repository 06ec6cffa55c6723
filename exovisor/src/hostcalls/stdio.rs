//! The standard streams of an isolate, on descriptors of the host.
//!
//! Pipes, sockets and terminals are waited for with epoll, so a waiting isolate can still be
//! ended. Regular files are always ready, and epoll does not take them (epoll_ctl(2), EPERM).

use bytes::Bytes;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal as _, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, empty};
use wasmtime_wasi::async_trait;
use wasmtime_wasi::cli::{IsTerminal, StdinStream, StdoutStream};
use wasmtime_wasi::p2::{InputStream, OutputStream, Pollable, StreamError, StreamResult};

/// Bytes that a pipe takes at once when it is writable (pipe(7), PIPE_BUF).
const WRITE_BYTES_MAX: usize = 4096;
const READ_BYTES_MAX: usize = 64 << 10;

/// One stream.
#[derive(Clone)]
pub(crate) struct Stream(Arc<Source>);

enum Source {
    Waited(AsyncFd<File>, Interest),
    Always(File),
}

impl Stream {
    /// Takes a descriptor to read from. Must be called inside a tokio runtime.
    pub fn input(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd.into(), Interest::READABLE)
    }

    /// Takes a descriptor to write to. Must be called inside a tokio runtime.
    pub fn output(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd.into(), Interest::WRITABLE)
    }

    // The constructor is deprecated for types whose descriptor can change; a `File`'s cannot.
    #[expect(deprecated, reason = "its successor is unsafe, which this crate forbids")]
    fn new(file: File, interest: Interest) -> io::Result<Self> {
        if file.metadata()?.is_file() {
            return Ok(Self(Arc::new(Source::Always(file))));
        }
        // Devices without poll, like /dev/null, are refused by epoll as regular files are.
        let source = match AsyncFd::try_with_interest(file, interest) {
            Ok(waited) => Source::Waited(waited, interest),
            Err(error) => Source::Always(error.into_parts().0),
        };
        Ok(Self(Arc::new(source)))
    }

    fn file(&self) -> &File {
        match &*self.0 {
            Source::Waited(waited, _) => waited.get_ref(),
            Source::Always(file) => file,
        }
    }

    /// Does one operation if the descriptor is ready; `None` if it is not.
    ///
    /// The descriptor may be a blocking one, and epoll told of a state that is past: so poll(2)
    /// is asked once more, and its no makes tokio wait for the next event.
    fn attempt<T>(
        &self,
        operation: impl FnOnce(&File) -> io::Result<T>,
    ) -> StreamResult<Option<T>> {
        let result = match &*self.0 {
            Source::Always(file) => operation(file),
            Source::Waited(waited, interest) => {
                waited.try_io(*interest, |file| match is_ready(file, *interest)? {
                    true => operation(file),
                    false => Err(ErrorKind::WouldBlock.into()),
                })
            }
        };
        match result {
            Ok(done) => Ok(Some(done)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(failure(error)),
        }
    }
}

fn failure(error: io::Error) -> StreamError {
    match error.kind() {
        ErrorKind::BrokenPipe => StreamError::Closed,
        _ => StreamError::LastOperationFailed(error.into()),
    }
}

/// Whether reading or writing now would not block; an error or a hangup counts as ready.
fn is_ready(file: &File, interest: Interest) -> io::Result<bool> {
    let flags = if interest.is_readable() { PollFlags::POLLIN } else { PollFlags::POLLOUT };
    let mut wanted = [PollFd::new(file.as_fd(), flags)];
    Ok(poll(&mut wanted, PollTimeout::ZERO)? > 0)
}

#[async_trait]
impl Pollable for Stream {
    async fn ready(&mut self) {
        if let Source::Waited(waited, interest) = &*self.0 {
            // An error shows again, with its reason, in the operation that follows.
            if let Ok(mut ready) = waited.ready(*interest).await {
                ready.retain_ready();
            }
        }
    }
}

impl InputStream for Stream {
    fn read(&mut self, size: usize) -> StreamResult<Bytes> {
        let mut buffer = vec![0; size.min(READ_BYTES_MAX)];
        let length = self.attempt(|mut file| file.read(&mut buffer))?;
        match length {
            Some(0) if size > 0 => Err(StreamError::Closed),
            length => {
                buffer.truncate(length.unwrap_or(0));
                Ok(buffer.into())
            }
        }
    }
}

impl OutputStream for Stream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            // A pipe takes at once what `check_write` permitted. Anything else that takes only a
            // part of it is written to again, waiting in the kernel.
            let written = match self.attempt(|mut file| file.write(rest))? {
                Some(written) => written,
                None => self.file().write(rest).map_err(failure)?,
            };
            rest = rest.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(self.attempt(|_| Ok(WRITE_BYTES_MAX))?.unwrap_or(0))
    }
}

impl IsTerminal for Stream {
    fn is_terminal(&self) -> bool {
        self.file().is_terminal()
    }
}

impl StdinStream for Stream {
    fn p2_stream(&self) -> Box<dyn InputStream> {
        Box::new(self.clone())
    }

    /// Preview 1 reads through [`StdinStream::p2_stream`] only.
    fn async_stream(&self) -> Box<dyn AsyncRead + Send + Sync> {
        Box::new(empty())
    }
}

impl StdoutStream for Stream {
    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }

    /// Preview 1 writes through [`StdoutStream::p2_stream`] only.
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(empty())
    }
}
