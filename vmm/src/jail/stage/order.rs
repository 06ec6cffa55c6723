//! The caller's side: starts a stage, waits for it no longer than it may take, and says what
//! became of it.

use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::inside::Fault;
use super::warden::Settings;
use super::wire::{self, HEAD_BYTES, Kind};
use super::{StageError, VERB, escaped};
use crate::jail::{HostNetwork, PathAccess};

/// The longest line of progress, or words of a refusal.
const WORDS_BYTES_MAX: usize = 16 << 10;
/// What is kept of what it writes on standard error.
const SAID_BYTES_MAX: usize = 4 << 10;

/// A descriptor that the stage is given.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    pub descriptor: BorrowedFd<'a>,
    /// Of a directory what the stage may do below it, by Landlock; it also needs the rights of
    /// its user id.
    pub below: Option<PathAccess>,
}

impl<'a> Given<'a> {
    /// A file, a pipe or a socket.
    pub fn file(file: &'a impl AsFd) -> Self {
        Self { descriptor: file.as_fd(), below: None }
    }

    /// A directory in which it opens files.
    pub fn directory(directory: &'a impl AsFd, below: PathAccess) -> Self {
        Self { descriptor: directory.as_fd(), below: Some(below) }
    }
}

/// A file or directory of the host as a stage sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shown {
    pub path: PathBuf,
    /// Whether what is there may be changed, which also needs the rights of its user id.
    pub writable: bool,
    /// Whether links in `path` are followed: not where somebody else may have made them.
    pub follows: bool,
}

impl Shown {
    /// To be read; the links in its path are the host's own.
    #[must_use]
    pub fn read_only(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), writable: false, follows: true }
    }
}

/// What a stage may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory beyond the program itself (setrlimit(2) RLIMIT_AS and RLIMIT_DATA).
    pub memory_bytes: u64,
    /// The length of any file that it writes.
    pub file_bytes: u64,
    /// The length of its answer.
    pub answer_bytes: usize,
    /// Descriptors that it may have open.
    pub open_files: u64,
    /// Processes and threads of its user, which has no others unless it keeps the caller's id.
    pub processes: Option<u64>,
    /// Whether it may set more address space aside than it uses: then memory is bounded only as
    /// it becomes writable (RLIMIT_DATA).
    pub reserves: bool,
    /// When it is killed.
    pub deadline: Option<Instant>,
}

impl Limits {
    /// 64 descriptors, an answer of 1 MiB, no files.
    #[must_use]
    pub fn of_memory(memory_bytes: u64) -> Self {
        Self {
            memory_bytes,
            file_bytes: 0,
            answer_bytes: 1 << 20,
            open_files: 64,
            processes: None,
            reserves: false,
            deadline: None,
        }
    }
}

/// A stage that is wanted.
#[derive(Debug)]
pub struct Order<'a> {
    /// Its name in the executable's table.
    pub stage: &'static str,
    /// All that it has open, in the order in which it takes them.
    pub given: Vec<Given<'a>>,
    /// Files and directories of the host that it sees at the same place.
    pub shown: Vec<Shown>,
    /// [`HostNetwork::Never`] or [`HostNetwork::Kept`].
    pub network: HostNetwork,
    /// Whether it has the caller's user id, for directories that are the caller's; else, where
    /// the caller is root, it has one that nobody else has. It has no capabilities either way.
    pub keeps_id: bool,
    pub limits: Limits,
}

impl<'a> Order<'a> {
    /// With nothing but `given`.
    #[must_use]
    pub fn new(stage: &'static str, given: Vec<Given<'a>>, limits: Limits) -> Self {
        let network = HostNetwork::Never;
        Self { stage, given, shown: Vec::new(), network, keeps_id: false, limits }
    }

    /// Has it work, and reads its answer. Blocks at most until the deadline.
    ///
    /// # Errors
    /// [`StageError`]; nothing of it is left then.
    pub fn run<A: DeserializeOwned>(
        &self,
        request: &impl Serialize,
        progress: impl FnMut(&str),
    ) -> Result<A, StageError> {
        self.run_while(request, || (), progress)
    }

    /// The same, and does `meanwhile` while the stage works.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn run_while<A: DeserializeOwned>(
        &self,
        request: &impl Serialize,
        meanwhile: impl FnOnce(),
        progress: impl FnMut(&str),
    ) -> Result<A, StageError> {
        let answer = self.run_for_bytes(request, meanwhile, progress)?;
        serde_json::from_slice(&answer).map_err(|_| self.died("gave an answer of another form"))
    }

    /// The same with the answer as it came, which need not be JSON.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn run_for_bytes(
        &self,
        request: &impl Serialize,
        meanwhile: impl FnOnce(),
        mut progress: impl FnMut(&str),
    ) -> Result<Vec<u8>, StageError> {
        let mut running = self.start_with(request, self.cpu_seconds())?;
        meanwhile();
        let told = running.attend(&self.limits, &mut progress);
        let (status, said) = running.end();
        match told? {
            Told::Answer(answer) => Ok(answer),
            Told::Fault(Fault::Input(words)) => Err(StageError::Refused(escaped(&words))),
            Told::Fault(Fault::Memory) => Err(self.memory()),
            Told::Fault(Fault::Output) => {
                Err(StageError::Output { stage: self.stage, bytes: self.limits.file_bytes })
            }
            Told::Fault(Fault::Jail(why)) => {
                Err(StageError::Start { stage: self.stage, why: escaped(&why) })
            }
            Told::Nothing => Err(self.ended(status, &said)),
        }
    }

    /// Starts one that goes on by itself (a worker): the caller speaks with it over
    /// [`Running::stream`] and ends it by dropping what this gives.
    ///
    /// # Errors
    /// [`StageError::Start`].
    pub fn start(&self, request: &impl Serialize) -> Result<Running, StageError> {
        let mut running = self.start_with(request, None)?;
        match running.attend_start(&self.limits)? {
            Told::Nothing => Ok(running),
            Told::Fault(Fault::Jail(why)) => {
                Err(StageError::Start { stage: self.stage, why: escaped(&why) })
            }
            _ => Err(self.died("spoke before it began")),
        }
    }

    fn start_with(
        &self,
        request: &impl Serialize,
        cpu_seconds: Option<u64>,
    ) -> Result<Running, StageError> {
        let failed = |what: &str, error: io::Error| StageError::Start {
            stage: self.stage,
            why: format!("{what}: {error}"),
        };
        let request = serde_json::to_vec(request)
            .map_err(|error| failed("cannot write the request", error.into()))?;
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| failed("cannot make a socket pair", error))?;
        let (theirs_leash, leash) = nix::unistd::pipe2(OFlag::O_CLOEXEC)
            .map_err(|errno| failed("cannot make a pipe", errno.into()))?;
        let settings = serde_json::to_string(&self.settings(cpu_seconds))
            .map_err(|error| failed("cannot write the settings", error.into()))?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("exocell")
            .args([VERB, &settings])
            .env_clear()
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(theirs_leash)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed("cannot run /proc/self/exe", error))?;
        let said = child.stderr.take();
        let warden = Warden { child, leash: Some(leash) };
        let running = Running { stage: self.stage, stream: ours, said, warden };
        let descriptors: Vec<_> = self.given.iter().map(|given| given.descriptor).collect();
        // One that is gone already says why on the stream.
        match wire::send_request(&running.stream, &descriptors, &request) {
            Err(error)
                if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                Err(failed("cannot hand the request over", error))
            }
            _ => Ok(running),
        }
    }

    fn settings(&self, cpu_seconds: Option<u64>) -> Settings {
        Settings {
            stage: self.stage.to_owned(),
            memory_bytes: self.limits.memory_bytes,
            file_bytes: self.limits.file_bytes,
            open_files: self.limits.open_files,
            processes: self.limits.processes,
            reserves: self.limits.reserves,
            cpu_seconds,
            keeps_network: self.network != HostNetwork::Never,
            keeps_id: self.keeps_id,
            shown: self.shown.clone(),
            below: self.given.iter().map(|given| given.below).collect(),
        }
    }

    /// For where nobody is left to look at the deadline.
    fn cpu_seconds(&self) -> Option<u64> {
        let left = self.limits.deadline?.saturating_duration_since(Instant::now());
        Some(left.as_secs() + 2)
    }

    fn memory(&self) -> StageError {
        StageError::Memory { stage: self.stage, bytes: self.limits.memory_bytes }
    }

    fn died(&self, how: &str) -> StageError {
        StageError::Died { stage: self.stage, how: how.to_owned() }
    }

    /// What a status means that came without a word.
    fn ended(&self, status: Option<ExitStatus>, said: &str) -> StageError {
        let code = status.and_then(|status| status.code());
        let signal = code.and_then(|code| code.checked_sub(128)).filter(|number| *number > 0);
        match signal {
            // What the allocator says before it aborts. The signal of an abort does nothing to
            // the first process of a pid namespace (pid_namespaces(7)); the next instruction of
            // abort(3) ends it.
            Some(libc::SIGABRT | libc::SIGSEGV) if said.contains("memory allocation of") => {
                self.memory()
            }
            _ => {
                let how = match (signal, code, status.and_then(|status| status.signal())) {
                    (Some(signal), _, _) => format!("was killed by signal {signal}"),
                    (_, Some(code), _) => format!("ended with status {code}"),
                    (_, _, Some(signal)) => format!("lost its warden to signal {signal}"),
                    _ => "ended".to_owned(),
                };
                let last = said.lines().map(str::trim).rfind(|line| !line.is_empty());
                let words = last.map_or_else(String::new, |line| format!(" ({})", escaped(line)));
                self.died(&format!("{how}{words}"))
            }
        }
    }
}

/// What a stage said last.
enum Told {
    Answer(Vec<u8>),
    Fault(Fault),
    Nothing,
}

/// A stage that runs. Dropped, it is killed, and waited for.
#[derive(Debug)]
pub struct Running {
    stage: &'static str,
    stream: UnixStream,
    said: Option<ChildStderr>,
    warden: Warden,
}

impl Running {
    /// The caller's end of [`super::Task::stream`].
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// What it prints, its panics too. Hostile bytes, to be read and escaped: a stage whose pipe
    /// is full waits.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.said.take()
    }

    /// The same for messages with descriptors ([`super::Task::link`] has the stage's end).
    ///
    /// # Errors
    /// No more descriptors.
    pub fn link(&self) -> io::Result<wire::Link> {
        wire::Link::of(&self.stream)
    }

    /// Ends it, if it has not ended; how it ended, in words.
    #[must_use]
    pub fn stop(mut self) -> String {
        match self.warden.end() {
            Some(status) => in_words(status),
            None => "ended unseen".to_owned(),
        }
    }

    /// Waits for its end; how it ended, in words.
    #[must_use]
    pub fn wait(mut self) -> String {
        match self.warden.child.wait() {
            Ok(status) => in_words(status),
            Err(error) => format!("ended unseen ({error})"),
        }
    }

    /// Reads what it says until it has given an answer, ended, or used up its time.
    fn attend(
        &mut self,
        limits: &Limits,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Told, StageError> {
        loop {
            let (kind, bytes) = match self.frame(limits)? {
                Some(frame) => frame,
                None => return Ok(Told::Nothing),
            };
            match kind {
                Kind::Begun => {}
                Kind::Progress => progress(&escaped(&String::from_utf8_lossy(&bytes))),
                Kind::Answer => return Ok(Told::Answer(bytes)),
                Kind::Fault => return self.fault(&bytes),
                Kind::Request => return Err(self.broke_the_protocol()),
            }
        }
    }

    /// The same until it has begun.
    fn attend_start(&mut self, limits: &Limits) -> Result<Told, StageError> {
        match self.frame(limits)? {
            Some((Kind::Begun, _)) => Ok(Told::Nothing),
            Some((Kind::Fault, bytes)) => self.fault(&bytes),
            _ => Err(self.broke_the_protocol()),
        }
    }

    fn fault(&self, bytes: &[u8]) -> Result<Told, StageError> {
        let fault = serde_json::from_slice(bytes);
        fault.map(Told::Fault).map_err(|_| self.broke_the_protocol())
    }

    fn broke_the_protocol(&self) -> StageError {
        StageError::Died { stage: self.stage, how: "broke the protocol".to_owned() }
    }

    fn frame(&mut self, limits: &Limits) -> Result<Option<(Kind, Vec<u8>)>, StageError> {
        let mut head = [0; HEAD_BYTES];
        if !self.read(&mut head, limits.deadline)? {
            return Ok(None);
        }
        let (kind, length) = wire::head(head);
        let kind = Kind::of(kind).ok_or_else(|| self.broke_the_protocol())?;
        let most = if kind == Kind::Answer { limits.answer_bytes } else { WORDS_BYTES_MAX };
        if length > most {
            return Err(StageError::Output { stage: self.stage, bytes: most as u64 });
        }
        let mut bytes = vec![0; length];
        match self.read(&mut bytes, limits.deadline)? {
            true => Ok(Some((kind, bytes))),
            false => Ok(None),
        }
    }

    /// Fills `bytes`; false if the stream ended before.
    fn read(&mut self, bytes: &mut [u8], deadline: Option<Instant>) -> Result<bool, StageError> {
        let mut read = 0;
        while read < bytes.len() {
            self.wait_readable(deadline)?;
            match self.stream.read(&mut bytes[read..]) {
                Ok(0) => return Ok(false),
                Ok(count) => read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    fn wait_readable(&self, deadline: Option<Instant>) -> Result<(), StageError> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(StageError::Deadline { stage: self.stage });
            }
            let mut ends = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
            // Rounded up, and not longer than can be said: then it looks again.
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                let ms = left.as_millis().saturating_add(1);
                PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
            });
            match poll(&mut ends, timeout) {
                Ok(0) | Err(nix::errno::Errno::EINTR) => {}
                // What is wrong with the socket, reading it tells.
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }

    /// Ends it, if it has not ended; its status, and the end of what it printed.
    fn end(mut self) -> (Option<ExitStatus>, String) {
        let said = self.said.take();
        let status = self.warden.end();
        let mut last = Vec::new();
        if let Some(said) = said {
            // All writers are gone, so this ends. A pipe holds 64 KiB.
            let mut text = Vec::new();
            let _ = said.take(1 << 20).read_to_end(&mut text);
            last = text.split_off(text.len().saturating_sub(SAID_BYTES_MAX));
        }
        (status, String::from_utf8_lossy(&last).into_owned())
    }
}

/// How a stage ended, by its warden's status.
fn in_words(status: ExitStatus) -> String {
    match status.code() {
        Some(code) if code > 128 => format!("was killed by signal {}", code - 128),
        Some(code) => format!("ended with status {code}"),
        None => format!("lost its warden ({status})"),
    }
}

/// Ends the stage, then itself, when the leash is let go.
#[derive(Debug)]
struct Warden {
    child: Child,
    leash: Option<OwnedFd>,
}

impl Warden {
    fn end(&mut self) -> Option<ExitStatus> {
        drop(self.leash.take());
        self.child.wait().ok()
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.end();
    }
}
