//! Connects the operator's terminal or pipes to a program in a cell: frames
//! one way, frames the other, signals and window sizes beside them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use exocell_cell::CellError;
use exocell_cell::agent::client::cleaned;
use exocell_cell::agent::{FailureKind, FrameReader, FrameWriter, Kind, Reply};
use exocell_docker::keys::Keys;
use nix::sys::signal::{SigSet, Signal};

use crate::terminal::{self, Raw};

/// How the program's end was told.
pub enum Outcome {
    Exited {
        code: u8,
        /// Whether the guest's kernel ended a process for lack of memory.
        out_of_memory: bool,
    },
    /// The supervisor went without a word: it was killed.
    Lost,
    /// The operator has left; the program goes on.
    Detached,
}

/// How a command follows a program.
pub struct Manner {
    /// Whether standard input goes to the program.
    pub interactive: bool,
    /// Whether the program has a terminal.
    pub tty: bool,
    /// Whether the end of standard input, or that there is none, is the end of the program's. Who
    /// attaches later leaves that to whoever is attached then.
    pub ends_input: bool,
    /// Whether signals go to the program instead of ending this command.
    pub proxies_signals: bool,
    /// What is pressed on a terminal to leave.
    pub detach_keys: Keys,
}

/// The signals that go to the program instead of ending this command.
const FORWARDED: [Signal; 6] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// What became of a signal.
pub enum Signalled {
    Sent,
    /// There is no way but the session's own stream.
    NoWay,
    /// The cell did not take it in time.
    NoAnswer,
}

/// Sends the program with this pid in the guest (0: not yet told) a signal on
/// a way of its own. A program that does not read its input holds up all that is
/// on `stream`.
pub type SendSignal = dyn Fn(u32, u8) -> Signalled + Send + Sync;

/// How long a program may go on that nobody hears.
const UNHEARD_TIME: Duration = Duration::from_secs(1);
/// Exit codes: 128 and SIGKILL, 128 and SIGPIPE.
const KILLED: u8 = 137;
const UNHEARD: u8 = 141;

/// How long a signal may be on its way before another one ends this command.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(2);

/// Follows a program on `stream` until it ends; `guest_pid` is 0 where that is
/// not told yet.
///
/// # Errors
/// [`CellError::Program`] when it could not be started.
pub fn follow(
    stream: &UnixStream,
    manner: &Manner,
    guest_pid: u32,
    send_signal: Box<SendSignal>,
) -> Result<Outcome, CellError> {
    let failed = |error: io::Error| CellError::host("cannot follow the cell")(error);
    let on_terminal = manner.tty && manner.interactive;
    let raw = if on_terminal { Raw::enter() } else { None };
    let writer = Arc::new(Mutex::new(FrameWriter::new(stream.try_clone().map_err(failed)?)));
    let signals = Arc::new(Signals {
        writer: writer.clone(),
        started: AtomicU32::new(guest_pid),
        send: send_signal,
        raw: Mutex::new(raw),
        is_ending: AtomicBool::new(false),
        pending: Mutex::new(None),
    });
    signals.clone().forward(manner).map_err(failed)?;
    let left = Arc::new(AtomicBool::new(false));
    if manner.interactive {
        let typed = Typed {
            keys: on_terminal.then(|| manner.detach_keys.clone()),
            ends_input: manner.ends_input,
            left: left.clone(),
            stream: stream.try_clone().map_err(failed)?,
        };
        let input = writer.clone();
        std::thread::spawn(move || typed.forward(&input));
    } else if manner.ends_input {
        send(&writer, Kind::StdinEof, &[]);
    }
    let mut is_unheard = false;
    let outcome = pump(stream, &mut io::stdout(), &mut io::stderr(), &signals.started, &mut || {
        if !std::mem::replace(&mut is_unheard, true) {
            let signals = signals.clone();
            std::thread::spawn(move || signals.end_unheard());
        }
    });
    drop(lock(&signals.raw).take());
    if left.load(Ordering::Relaxed) {
        return Ok(Outcome::Detached);
    }
    match outcome? {
        Outcome::Exited { code, out_of_memory: false }
            if code == KILLED && signals.is_ending.load(Ordering::Relaxed) =>
        {
            Ok(Outcome::Exited { code: UNHEARD, out_of_memory: false })
        }
        outcome => Ok(outcome),
    }
}

/// Copies out what a program on `stream` writes until it ends, without a
/// hand in its input or its signals.
pub fn watch(stream: &UnixStream) -> Result<Outcome, CellError> {
    let mut unheard = || end_unread();
    pump(stream, &mut io::stdout(), &mut io::stderr(), &AtomicU32::new(0), &mut unheard)
}

/// Ends this command, which writes where nobody reads any more and has nothing to end but itself.
pub fn end_unread() -> ! {
    std::process::exit(i32::from(UNHEARD))
}

/// Tells `news` that a program on `stream` has written something, until it ends.
pub fn listen(stream: &UnixStream, news: &SyncSender<()>) {
    let (mut out, mut err) = (Teller(news), Teller(news));
    // Whoever listens looks into the log, and need not know how it ended.
    let _ = pump(stream, &mut out, &mut err, &AtomicU32::new(0), &mut || {});
}

/// Tells of each write, and of many only once.
struct Teller<'a>(&'a SyncSender<()>);

impl Write for Teller<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // One that is told and has not looked yet will see this too.
        let _ = self.0.try_send(());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How a program on `stream` ends; what it writes is not shown.
pub fn await_end(stream: &UnixStream) -> Result<Outcome, CellError> {
    pump(stream, &mut io::sink(), &mut io::sink(), &AtomicU32::new(0), &mut || {})
}

/// Waits until the program on `stream` runs.
///
/// # Errors
/// [`CellError::Program`] when it could not be started.
pub fn await_start(stream: &UnixStream) -> Result<(), CellError> {
    let lost = || CellError::Guest("the cell ended before its program started".to_owned());
    let mut frames = FrameReader::new(stream);
    while let Ok(Some(frame)) = frames.read() {
        if frame.kind == Kind::Reply {
            return match frame.json::<Reply>() {
                Ok(Reply::Started { .. } | Reply::Exited { .. }) => Ok(()),
                Ok(Reply::Failed { kind, message }) => {
                    let message = cleaned(&message);
                    Err(CellError::Program { exit_code: exit_code(kind), message })
                }
                Ok(_) | Err(_) => Err(lost()),
            };
        }
    }
    Err(lost())
}

type Writer = Arc<Mutex<FrameWriter<UnixStream>>>;

fn send(writer: &Writer, kind: Kind, payload: &[u8]) -> bool {
    match writer.lock() {
        Ok(mut writer) => writer.write(kind, payload).is_ok(),
        Err(_) => false,
    }
}

/// What comes on standard input.
struct Typed {
    /// `None`: nobody can leave.
    keys: Option<Keys>,
    ends_input: bool,
    /// Set when the operator leaves.
    left: Arc<AtomicBool>,
    stream: UnixStream,
}

impl Typed {
    fn forward(mut self, writer: &Writer) {
        let mut buffer = vec![0; 32 << 10];
        loop {
            let count = match io::stdin().read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            let (passed, leaves) = match &mut self.keys {
                Some(keys) => keys.pass(&buffer[..count]),
                None => (buffer[..count].to_vec(), false),
            };
            if !passed.is_empty() && !send(writer, Kind::Stdin, &passed) {
                return;
            }
            if leaves {
                self.left.store(true, Ordering::Relaxed);
                // Whoever reads from it sees its end.
                let _ = self.stream.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
        if self.ends_input {
            send(writer, Kind::StdinEof, &[]);
        }
    }
}

/// The way of signals from this command to the program.
struct Signals {
    writer: Writer,
    /// The program's pid in the guest; 0 where it is not told.
    started: AtomicU32,
    send: Box<SendSignal>,
    raw: Mutex<Option<Raw>>,
    /// Whether this command ends the program, for nobody hears it.
    is_ending: AtomicBool,
    /// Since when one is on its way.
    pending: Mutex<Option<Instant>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Signals {
    /// Blocks the forwarded signals in this and later threads; one waits for them, and one
    /// sends them on, in order. A cell that takes none cannot keep the operator's terminal.
    fn forward(self: Arc<Self>, manner: &Manner) -> io::Result<()> {
        let forwarded = FORWARDED.into_iter().filter(|_| manner.proxies_signals);
        let mut signals: SigSet = forwarded.collect();
        if manner.tty {
            signals.add(Signal::SIGWINCH);
            send_size(&self.writer);
        }
        signals.thread_block()?;
        let (queue, queued) = channel();
        let sender = self.clone();
        std::thread::spawn(move || queued.iter().for_each(|signal| sender.send(signal)));
        std::thread::spawn(move || {
            while let Ok(signal) = signals.wait() {
                if signal == Signal::SIGWINCH {
                    send_size(&self.writer);
                    continue;
                }
                let waiting = *lock(&self.pending);
                if waiting.is_some_and(|since| since.elapsed() > SIGNAL_PATIENCE) {
                    self.give_up(signal);
                }
                let _ = queue.send(signal);
            }
        });
        Ok(())
    }

    fn send(&self, signal: Signal) {
        let number = signal as i32 as u8;
        *lock(&self.pending) = Some(Instant::now());
        match (self.send)(self.started.load(Ordering::Relaxed), number) {
            Signalled::Sent => {}
            Signalled::NoWay => drop(send(&self.writer, Kind::Signal, &[number])),
            Signalled::NoAnswer => self.give_up(signal),
        }
        *lock(&self.pending) = None;
    }

    /// Ends a program that writes where nobody reads any more, as the host would without a cell
    /// between them. The first program of a cell does not hear SIGPIPE unless it asks for it
    /// (pid_namespaces(7)).
    fn end_unheard(&self) {
        self.send(Signal::SIGPIPE);
        std::thread::sleep(UNHEARD_TIME);
        self.is_ending.store(true, Ordering::Relaxed);
        self.send(Signal::SIGKILL);
    }

    /// Ends this command as the signal would have.
    fn give_up(&self, signal: Signal) -> ! {
        drop(lock(&self.raw).take());
        crate::show::tell!(
            "exocell: the cell did not take {signal}; this command ends, the program may go on: \
             exocell stop ends the cell"
        );
        std::process::exit(128 + signal as i32)
    }
}

fn send_size(writer: &Writer) {
    if let (Some(size), Ok(mut writer)) = (terminal::size(), writer.lock()) {
        // The size is a courtesy; the session shows its own end.
        let _ = writer.write_json(Kind::Resize, &size);
    }
}

fn pump(
    stream: &UnixStream,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
    started: &AtomicU32,
    unheard: &mut dyn FnMut(),
) -> Result<Outcome, CellError> {
    let mut frames = FrameReader::new(stream);
    loop {
        let frame = match frames.read() {
            Ok(Some(frame)) => frame,
            Ok(None) | Err(_) => return Ok(Outcome::Lost),
        };
        match frame.kind {
            Kind::Stdout => put(stdout, &frame.payload, unheard)?,
            Kind::Stderr => put(stderr, &frame.payload, unheard)?,
            // Of the log, where its past is replayed.
            Kind::Time => {}
            Kind::Reply => match frame.json::<Reply>() {
                Ok(Reply::Started { guest_pid }) => started.store(guest_pid, Ordering::Relaxed),
                Ok(Reply::Exited { code, out_of_memory }) => {
                    return Ok(Outcome::Exited { code, out_of_memory });
                }
                Ok(Reply::Failed { kind, message }) => {
                    let message = cleaned(&message);
                    return Err(CellError::Program { exit_code: exit_code(kind), message });
                }
                Ok(_) | Err(_) => return Ok(Outcome::Lost),
            },
            _ => return Ok(Outcome::Lost),
        }
    }
}

/// A reader that went away (`| head`) is told to `unheard`.
fn put(to: &mut dyn Write, bytes: &[u8], unheard: &mut dyn FnMut()) -> Result<(), CellError> {
    match to.write_all(bytes).and_then(|()| to.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            unheard();
            Ok(())
        }
        Err(error) => Err(CellError::host("cannot write the program's output")(error)),
        Ok(()) => Ok(()),
    }
}

fn exit_code(kind: FailureKind) -> u8 {
    match kind {
        FailureKind::NotFound => 127,
        FailureKind::NotExecutable => 126,
        _ => 125,
    }
}
