//! What a cell's program writes: to the log, and to whoever is attached.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use exocell_agent::{FrameReader, FrameWriter, Kind, Reply};

use crate::CellError;

/// The log is two files of at most this many bytes; the older is dropped.
const LOG_BYTES_MAX: u64 = 8 << 20;
/// How many clients may follow one program.
const ATTACHED_MAX: usize = 32;

/// The outlet of one program, shared by the threads that feed and follow it.
#[derive(Clone)]
pub struct Output {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    ended: Condvar,
}

struct Inner {
    log: Log,
    attached: Vec<UnixStream>,
    started: Option<u32>,
    end: Option<Reply>,
}

impl Output {
    /// An outlet that logs to `log` in the working directory.
    pub fn new() -> io::Result<Self> {
        let log = Log { file: File::create("log")?, bytes: 0 };
        let inner = Inner { log, attached: Vec::new(), started: None, end: None };
        Ok(Self { shared: Arc::new(Shared { inner: Mutex::new(inner), ended: Condvar::new() }) })
    }

    /// A poisoned lock only means that a feeder died; the state stays usable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a follower; false when there are too many or the program is over.
    pub fn attach(&self, stream: UnixStream) -> bool {
        let mut inner = self.lock();
        if inner.end.is_some() || inner.attached.len() >= ATTACHED_MAX {
            return false;
        }
        let mut stream = stream;
        if let Some(guest_pid) = inner.started {
            let _ = FrameWriter::new(&mut stream)
                .write_json(Kind::Reply, &Reply::Started { guest_pid });
        }
        inner.attached.push(stream);
        true
    }

    pub fn started(&self, guest_pid: u32) {
        let mut inner = self.lock();
        inner.started = Some(guest_pid);
        inner.tell(&Reply::Started { guest_pid });
    }

    /// Output of the program: `kind` is `Stdout` or `Stderr`.
    pub fn write(&self, kind: Kind, bytes: &[u8]) {
        let mut inner = self.lock();
        // A full disk must not stop the program: the log ends, the rest goes on.
        let _ = inner.log.write(kind, bytes);
        inner.attached.retain_mut(|client| FrameWriter::new(client).write(kind, bytes).is_ok());
    }

    /// The program is over. Followers hear of it at [`Output::close`].
    pub fn ended(&self, end: Reply) {
        let mut inner = self.lock();
        if inner.end.is_none() {
            inner.end = Some(end);
        }
        self.shared.ended.notify_all();
    }

    pub fn end(&self) -> Option<Reply> {
        self.lock().end.clone()
    }

    /// Tells every follower how it ended, as the last thing they hear.
    pub fn close(&self, end: &Reply) {
        let mut inner = self.lock();
        inner.tell(end);
        inner.attached.clear();
    }
}

impl Inner {
    fn tell(&mut self, reply: &Reply) {
        self.attached
            .retain_mut(|client| FrameWriter::new(client).write_json(Kind::Reply, reply).is_ok());
    }
}

/// The log of one cell: frames, as the agent protocol has them.
struct Log {
    file: File,
    bytes: u64,
}

impl Log {
    fn write(&mut self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        if self.bytes > LOG_BYTES_MAX {
            std::fs::rename("log", "log.old")?;
            *self = Self { file: File::create("log")?, bytes: 0 };
        }
        self.bytes += bytes.len() as u64;
        FrameWriter::new(&mut self.file).write(kind, bytes).map_err(io::Error::other)
    }
}

/// Replays the log in `directory` to the two writers.
pub fn replay_log(
    directory: &Path,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<(), CellError> {
    for name in ["log.old", "log"] {
        let path = directory.join(name);
        let file = match File::open(&path) {
            Ok(file) => io::BufReader::new(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(CellError::host(format!("cannot read {}", path.display()))(error));
            }
        };
        let mut frames = FrameReader::new(file);
        // A log cut short by a crash ends where it was cut.
        while let Ok(Some(frame)) = frames.read() {
            let written = match frame.kind {
                Kind::Stdout => stdout.write_all(&frame.payload),
                Kind::Stderr => stderr.write_all(&frame.payload),
                _ => Ok(()),
            };
            written.map_err(CellError::host("cannot write the log out"))?;
        }
    }
    Ok(())
}
