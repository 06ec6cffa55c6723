//! Streams that end when the capability behind them is revoked.

use crate::hostcalls::stdio::Stream;
use bytes::Bytes;
use exocell_xgate::Live;
use std::io::{self, ErrorKind};
use tokio::io::{AsyncRead, AsyncWrite};
use wasmtime_wasi::async_trait;
use wasmtime_wasi::cli::{IsTerminal, StdinStream, StdoutStream};
use wasmtime_wasi::p2::{
    DynInputStream, DynOutputStream, InputStream, OutputStream, Pollable, StreamError, StreamResult,
};

/// A stream and the token of its capability. A revoked one fails with `access`: were it closed,
/// a reader would take what it has for the whole.
#[derive(Clone)]
pub(super) struct Guarded<S> {
    pub stream: S,
    pub live: Live,
}

impl<S> Guarded<S> {
    fn open(&mut self) -> StreamResult<&mut S> {
        if self.live.is_live() {
            return Ok(&mut self.stream);
        }
        Err(StreamError::LastOperationFailed(io::Error::from(ErrorKind::PermissionDenied).into()))
    }
}

#[async_trait]
impl<S: Pollable> Pollable for Guarded<S> {
    async fn ready(&mut self) {
        if self.live.is_live() {
            self.stream.ready().await;
        }
    }
}

#[async_trait]
impl InputStream for Guarded<DynInputStream> {
    fn read(&mut self, size: usize) -> StreamResult<Bytes> {
        self.open()?.read(size)
    }

    /// Of files this is the way that takes no other thread.
    async fn blocking_read(&mut self, size: usize) -> StreamResult<Bytes> {
        let bytes = self.open()?.blocking_read(size).await?;
        // It may have waited since.
        self.open()?;
        Ok(bytes)
    }

    async fn cancel(&mut self) {
        self.stream.cancel().await;
    }
}

#[async_trait]
impl OutputStream for Guarded<DynOutputStream> {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.open()?.write(bytes)
    }

    fn flush(&mut self) -> StreamResult<()> {
        self.open()?.flush()
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        self.open()?.check_write()
    }

    /// As [`InputStream::blocking_read`].
    async fn blocking_write_and_flush(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.open()?.blocking_write_and_flush(bytes).await
    }

    async fn cancel(&mut self) {
        self.stream.cancel().await;
    }
}

impl IsTerminal for Guarded<Stream> {
    fn is_terminal(&self) -> bool {
        self.live.is_live() && self.stream.is_terminal()
    }
}

impl StdinStream for Guarded<Stream> {
    fn p2_stream(&self) -> DynInputStream {
        let stream: DynInputStream = Box::new(self.stream.clone());
        Box::new(Guarded { stream, live: self.live.clone() })
    }

    fn async_stream(&self) -> Box<dyn AsyncRead + Send + Sync> {
        StdinStream::async_stream(&self.stream)
    }
}

impl StdoutStream for Guarded<Stream> {
    fn p2_stream(&self) -> DynOutputStream {
        let stream: DynOutputStream = Box::new(self.stream.clone());
        Box::new(Guarded { stream, live: self.live.clone() })
    }

    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        StdoutStream::async_stream(&self.stream)
    }
}
