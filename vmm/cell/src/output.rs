//! What a cell's program writes: to the log, and to whoever is attached.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use exocell_agent::{FrameReader, Kind, Reply, printable_lines};

use crate::CellError;
use crate::follower::{Follower, Frames, Onlooker, frames, reply_frame};
use exocell_images::private;

/// The log is two files of at most this many bytes; the older is dropped.
const LOG_BYTES_MAX: u64 = 8 << 20;
/// How many clients may follow one program.
const ATTACHED_MAX: usize = 32;
/// How long an ended cell waits for onlookers that still listen.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// The outlet of one program, shared by the threads that feed and follow it.
#[derive(Clone)]
pub struct Output {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    /// None where nothing is to be written down.
    log: Option<Log>,
    attached: Vec<Arc<Follower>>,
    started: Option<u32>,
    ended: bool,
}

impl Output {
    /// An outlet that logs to `log` in the working directory if it `keeps` one, behind what the cell
    /// wrote before it was begun again, for `operator`.
    pub fn new(operator: UnixStream, keeps: bool) -> io::Result<Self> {
        let log = keeps.then(Log::open).transpose()?;
        let attached = vec![Arc::new(Follower::Operator(Mutex::new(operator)))];
        let inner = Inner { log, attached, started: None, ended: false };
        Ok(Self { inner: Arc::new(Mutex::new(inner)) })
    }

    /// A poisoned lock only means that a feeder died; the state stays usable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds an onlooker, unless there are too many or the program is over. It
    /// hears what was logged so far, if `replay`, and all that is written later.
    pub(crate) fn attach(&self, stream: UnixStream, replay: bool) -> Option<Arc<Follower>> {
        let mut inner = self.lock();
        if inner.ended || inner.attached.len() >= ATTACHED_MAX {
            return None;
        }
        let logged = match &inner.log {
            Some(log) if replay => log.so_far().ok()?,
            _ => Vec::new(),
        };
        let follower = Arc::new(Follower::Onlooker(Onlooker::new(stream, logged).ok()?));
        if let Some(guest_pid) = inner.started {
            follower.take(&reply_frame(&Reply::Started { guest_pid }));
        }
        inner.attached.push(follower.clone());
        Some(follower)
    }

    /// Makes `operator` the one whose standard output this is.
    pub(crate) fn hand_over(&self, operator: UnixStream) {
        let mut inner = self.lock();
        inner.attached.retain(|follower| !follower.is_replaced());
        inner.attached.push(Arc::new(Follower::Operator(Mutex::new(operator))));
    }

    /// The follower has hung up.
    pub(crate) fn detach(&self, follower: &Arc<Follower>) {
        self.lock().attached.retain(|other| !Arc::ptr_eq(other, follower));
        follower.forget();
    }

    pub fn started(&self, guest_pid: u32) {
        let attached = {
            let mut inner = self.lock();
            inner.started = Some(guest_pid);
            inner.attached.clone()
        };
        self.tell(attached, &reply_frame(&Reply::Started { guest_pid }));
    }

    /// Output of the program: `kind` is `Stdout` or `Stderr`.
    pub fn write(&self, kind: Kind, bytes: &[u8]) {
        let frames = frames(kind, bytes);
        // One lock for both: who attaches later finds these bytes in the log.
        let attached = {
            let mut inner = self.lock();
            if let Some(log) = &mut inner.log {
                log.write(&frames);
            }
            inner.attached.clone()
        };
        self.tell(attached, &frames);
    }

    /// What exocell itself has to say to whoever reads the program's standard error.
    pub fn notice(&self, words: &str) {
        self.write(Kind::Stderr, notice(words).as_bytes());
    }

    /// Not under the lock: the operator may take its time.
    fn tell(&self, attached: Vec<Arc<Follower>>, frames: &Frames) {
        for follower in attached {
            if !follower.take(frames) {
                self.lock().attached.retain(|other| !Arc::ptr_eq(other, &follower));
            }
        }
    }

    /// The program is over: nobody may follow it any more.
    pub fn close(&self, end: &Reply) {
        let attached = {
            let mut inner = self.lock();
            inner.ended = true;
            std::mem::take(&mut inner.attached)
        };
        let last = reply_frame(end);
        let (operators, onlookers): (Vec<_>, Vec<_>) =
            attached.into_iter().partition(|follower| matches!(**follower, Follower::Operator(_)));
        onlookers.iter().chain(&operators).for_each(|follower| follower.close(&last));
        let until = Instant::now() + FAREWELL_MAX;
        onlookers.iter().for_each(|follower| follower.await_heard(until));
    }
}

/// Words of exocell's, which may hold what a guest or a module calls things, for a terminal.
pub(crate) fn notice(words: &str) -> String {
    format!("exocell: {}\n", printable_lines(words))
}

/// The log of one cell: frames, as the agent protocol has them, each write
/// under its time.
struct Log {
    file: File,
    bytes: u64,
    /// There is an older file too.
    rotated: bool,
    /// A write failed, perhaps halfway: nothing may come after it.
    ended: bool,
}

impl Log {
    fn open() -> io::Result<Self> {
        let mut options = private::options();
        let mut file = options.create(true).truncate(false).read(true).write(true).open("log")?;
        let bytes = whole_frames(&file);
        // A kill may have cut the last one short.
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Self { file, bytes, rotated: Path::new("log.old").exists(), ended: false })
    }

    /// A full disk must not stop the program: the log ends, the rest goes on.
    fn write(&mut self, frames: &[u8]) {
        if !self.ended {
            self.ended = self.append(frames).is_err();
        }
    }

    fn append(&mut self, frames: &[u8]) -> io::Result<()> {
        if self.bytes > LOG_BYTES_MAX {
            std::fs::rename("log", "log.old")?;
            (self.bytes, self.rotated) = (0, true);
            self.file = private::create("log")?;
        }
        let time = crate::follower::frames(Kind::Time, &crate::now_ms().to_le_bytes());
        let entry = [&*time, frames].concat();
        self.file.write_all(&entry)?;
        self.bytes += entry.len() as u64;
        Ok(())
    }

    /// The frames written until now, in order; later ones are cut off.
    fn so_far(&self) -> io::Result<Vec<io::Take<File>>> {
        let mut parts = Vec::new();
        if self.rotated {
            parts.push(File::open("log.old")?.take(u64::MAX));
        }
        parts.push(File::open("log")?.take(self.bytes));
        Ok(parts)
    }
}

/// The length of the frames at the beginning of `log`, in bytes.
fn whole_frames(log: &File) -> u64 {
    let (mut frames, mut whole) = (FrameReader::new(Counted { log, bytes: 0 }), 0);
    while let Ok(Some(_)) = frames.read() {
        whole = frames.get_ref().bytes;
    }
    whole
}

/// Counts what is read of a file.
struct Counted<'a> {
    log: &'a File,
    bytes: u64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.log.read(buffer)?;
        self.bytes += count as u64;
        Ok(count)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_holds_nothing_for_a_terminal_to_act_on() {
        let words = "import `x.\u{1b}[2J\u{202e}` is not known\nat f";
        let shown = notice(words);
        assert_eq!(shown, "exocell: import `x.\\u001b[2J\\u202e` is not known\nat f\n");
    }
}
