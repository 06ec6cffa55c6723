//! Servers on unix sockets of the host, for cells to connect to.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Says all back that it is told, and ends when the other side has ended.
pub struct Echo {
    path: PathBuf,
    listener: UnixListener,
    /// Connections that there were.
    pub count: Arc<AtomicUsize>,
}

impl Echo {
    pub fn new(path: &Path) -> Self {
        Self::by(path, echo)
    }

    /// One that serves each connection by `serve`.
    pub fn by(path: &Path, serve: impl Fn(UnixStream) + Clone + Send + 'static) -> Self {
        let listener = UnixListener::bind(path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let (incoming, count) = (listener.try_clone().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counted = count.clone();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = incoming.accept() {
                counted.fetch_add(1, Ordering::Relaxed);
                let serve = serve.clone();
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { path: path.to_owned(), listener, count }
    }

    /// Ends it, so that its path leads to nothing.
    pub fn end(self) {
        drop(self);
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        // Whoever waits in accept(2) is woken, and nobody is let in any more.
        nix::sys::socket::shutdown(
            std::os::fd::AsRawFd::as_raw_fd(&self.listener),
            nix::sys::socket::Shutdown::Both,
        )
        .unwrap();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn echo(mut stream: UnixStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}
