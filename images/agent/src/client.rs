//! The host's side of a session: typed helpers over the two halves of a stream.
//!
//! The peer is a hostile guest. Every frame is checked, one frame of at most
//! [`FRAME_BYTES_MAX`](crate::FRAME_BYTES_MAX) is held at a time, whatever the
//! protocol does not allow is an error, and text from the guest is made printable
//! before it can reach a terminal. How long a guest may take is the caller's to
//! say: by a stream that is [`Patient`](crate::Patient).

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::oci::Resources;
use crate::{
    Boot, BootTimes, Contain, ContainerUsage, Exec, FailureKind, Frame, FrameError, FrameReader,
    FrameWriter, GuestStats, JoinedAddress, Kind, NetworkSetup, Reply, Request, Start, TtySize,
    printable,
};

/// The longest text of the guest's that an error repeats, in characters.
const MESSAGE_CHARS_MAX: usize = 512;
/// Bytes read from a local file or pipe at a time.
const CHUNK_BYTES: usize = 32 * 1024;

/// Why a conversation with the guest init ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("the guest closed the stream before it answered; see the cell's log")]
    Closed,
    /// The guest init refused the request or could not do it.
    #[error("{message}")]
    Failed { kind: FailureKind, message: String },
    #[error(
        "the guest sent a {got:?} frame where the protocol has none; its init is not to be trusted"
    )]
    UnexpectedFrame { got: Kind },
    #[error("the guest answered {request} with the wrong reply; its init is not to be trusted")]
    UnexpectedReply { request: &'static str },
    #[error("the guest sent more than the {bytes_max} bytes allowed for this download")]
    TooMuch { bytes_max: u64 },
    #[error("the local end of the session failed: {0}")]
    Local(#[source] io::Error),
}

impl ClientError {
    /// docker's exit code for a program that was not started: 127 not found,
    /// 126 not executable, 125 anything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed { kind: FailureKind::NotFound, .. } => 127,
            Self::Failed { kind: FailureKind::NotExecutable, .. } => 126,
            _ => 125,
        }
    }
}

/// A guest's message, fit to be shown: at most [`MESSAGE_CHARS_MAX`] long.
pub fn cleaned(text: &str) -> String {
    printable(text).chars().take(MESSAGE_CHARS_MAX).collect()
}

/// The reply in `frame`; `Reply::Failed` becomes an error.
fn reply_in(frame: &Frame) -> Result<Reply, ClientError> {
    match frame.json()? {
        Reply::Failed { kind, message } => {
            Err(ClientError::Failed { kind, message: cleaned(&message) })
        }
        reply => Ok(reply),
    }
}

pub(crate) fn reply_of<R: Read>(reader: &mut FrameReader<R>) -> Result<Reply, ClientError> {
    let frame = reader.read()?.ok_or(ClientError::Closed)?;
    match frame.kind {
        Kind::Reply => reply_in(&frame),
        got => Err(ClientError::UnexpectedFrame { got }),
    }
}

/// Sends `request` and reads its single reply.
pub fn request(
    read: impl Read,
    write: impl Write,
    request: &Request,
) -> Result<Reply, ClientError> {
    FrameWriter::new(write).write_json(Kind::Request, request)?;
    reply_of(&mut FrameReader::new(read))
}

/// Boots the cell over the stream the guest opened to
/// [`CONTROL_PORT`](crate::CONTROL_PORT). `goes_on` hears each time that the guest says it is still
/// at work on that.
pub fn boot(
    read: impl Read,
    write: impl Write,
    boot: &Boot,
    mut goes_on: impl FnMut(),
) -> Result<BootTimes, ClientError> {
    let request = Request::Boot(Box::new(boot.clone()));
    FrameWriter::new(write).write_json(Kind::Request, &request)?;
    let mut frames = FrameReader::new(read);
    loop {
        match reply_of(&mut frames)? {
            Reply::Ready(times) => return Ok(times),
            Reply::GoesOn => goes_on(),
            _ => return Err(ClientError::UnexpectedReply { request: "boot" }),
        }
    }
}

/// The guest's own account of itself: claims, not facts.
pub fn stats(read: impl Read, write: impl Write) -> Result<GuestStats, ClientError> {
    match request(read, write, &Request::Stats)? {
        Reply::Stats(stats) => Ok(*stats),
        _ => Err(ClientError::UnexpectedReply { request: "stats" }),
    }
}

/// What a container's programs use, and which they are: claims, too.
pub fn usage(read: impl Read, write: impl Write) -> Result<ContainerUsage, ClientError> {
    match request(read, write, &Request::Usage)? {
        Reply::Usage(usage) => Ok(*usage),
        _ => Err(ClientError::UnexpectedReply { request: "usage" }),
    }
}

/// Stops all of a container's programs where they are, or lets them go on.
pub fn freeze(read: impl Read, write: impl Write, frozen: bool) -> Result<(), ClientError> {
    done(request(read, write, &Request::Freeze { frozen })?, "freeze")
}

/// Sends every program of a container a signal.
pub fn signal_all(read: impl Read, write: impl Write, number: u8) -> Result<(), ClientError> {
    done(request(read, write, &Request::SignalAll { number })?, "signal all")
}

/// Tells the guest how much memory it may use.
pub fn memory(read: impl Read, write: impl Write, limit_bytes: u64) -> Result<(), ClientError> {
    done(request(read, write, &Request::Memory { limit_bytes })?, "memory")
}

/// Limits a container's programs otherwise.
pub fn limit(read: impl Read, write: impl Write, resources: &Resources) -> Result<(), ClientError> {
    done(request(read, write, &Request::Limit(resources.clone()))?, "limit")
}

/// Has the guest make room for one more container.
pub fn contain(read: impl Read, write: impl Write, wanted: &Contain) -> Result<(), ClientError> {
    done(request(read, write, &Request::Contain(Box::new(wanted.clone())))?, "contain")
}

/// Has the guest end a container, and take away what it has.
pub fn discard(read: impl Read, write: impl Write, container: u32) -> Result<(), ClientError> {
    done(request(read, write, &Request::Discard { container })?, "discard")
}

/// Has the guest remove what containers called `name` have kept.
pub fn forget(read: impl Read, write: impl Write, name: &str) -> Result<(), ClientError> {
    done(request(read, write, &Request::Forget { name: name.into() })?, "forget")
}

/// Says that the request that comes next on the stream is for `container`.
pub fn within(write: impl Write, container: u32) -> Result<(), ClientError> {
    Ok(FrameWriter::new(write).write_json(Kind::Request, &Request::Within { container })?)
}

/// Has the guest have a user `name`, with a home.
pub fn account(read: impl Read, write: impl Write, name: &str) -> Result<(), ClientError> {
    done(request(read, write, &Request::Account { name: name.into() })?, "account")
}

/// Has the guest connect to a port of its own; the stream is that connection then.
pub fn dial(read: impl Read, write: impl Write, port: u16) -> Result<(), ClientError> {
    done(request(read, write, &Request::Dial { port })?, "dial")
}

/// Has the guest take `address` at the network at `place`, or none.
pub fn address(
    read: impl Read,
    write: impl Write,
    place: u32,
    address: Option<JoinedAddress>,
) -> Result<(), ClientError> {
    done(request(read, write, &Request::Address { place, address })?, "address")
}

/// Has the guest set its interface up, whose link was plugged into a network.
pub fn plug(read: impl Read, write: impl Write, setup: &NetworkSetup) -> Result<(), ClientError> {
    done(request(read, write, &Request::Plug(Box::new(setup.clone())))?, "plug")
}

/// Asks the guest for `bytes` of its credit; it gives what no program uses.
pub fn give_back(read: impl Read, write: impl Write, bytes: u64) -> Result<(), ClientError> {
    done(request(read, write, &Request::GiveBack { bytes })?, "give back")
}

/// Has the guest drop a share of what files left in its memory.
pub fn drop_cold(read: impl Read, write: impl Write) -> Result<(), ClientError> {
    done(request(read, write, &Request::DropCold)?, "drop cold")
}

/// Detaches the mount at `path` in the guest.
pub fn unmount(read: impl Read, write: impl Write, path: &str) -> Result<(), ClientError> {
    done(request(read, write, &Request::Unmount { path: path.into() })?, "unmount")
}

/// Returns when a program of the guest has connected to the socket `number`: the stream is its
/// connection once [`SOCKET_OPEN`](crate::SOCKET_OPEN) was said on it.
pub fn socket(read: impl Read, write: impl Write, number: u32) -> Result<(), ClientError> {
    done(request(read, write, &Request::Socket { number })?, "socket")
}

/// Has the guest let no program connect to the socket `number`.
pub fn close_socket(read: impl Read, write: impl Write, number: u32) -> Result<(), ClientError> {
    done(request(read, write, &Request::CloseSocket { number })?, "close socket")
}

/// Sends the program `guest_pid` of an exec session a signal, beside its input.
pub fn signal(
    read: impl Read,
    write: impl Write,
    guest_pid: u32,
    number: u8,
) -> Result<(), ClientError> {
    done(request(read, write, &Request::Signal { guest_pid, number, group: false })?, "signal")
}

/// Ends the program `guest_pid` of an exec session at once, with all of its process group.
pub fn kill_group(read: impl Read, write: impl Write, guest_pid: u32) -> Result<(), ClientError> {
    const KILL: u8 = 9;
    done(request(read, write, &Request::Signal { guest_pid, number: KILL, group: true })?, "kill")
}

/// Ends every program in the guest and powers it off; returns when its file
/// systems are synced. Drop the stream then: the guest waits for that, shortly.
pub fn shutdown(read: impl Read, write: impl Write, grace_ms: u64) -> Result<(), ClientError> {
    done(request(read, write, &Request::Shutdown { grace_ms })?, "shutdown")
}

fn done(reply: Reply, request: &'static str) -> Result<(), ClientError> {
    match reply {
        Reply::Done => Ok(()),
        _ => Err(ClientError::UnexpectedReply { request }),
    }
}

/// Sends the tar stream `archive` to be unpacked into the guest directory
/// `path`; returns the bytes sent.
pub fn upload(
    read: impl Read,
    write: impl Write,
    path: &str,
    archive: &mut impl Read,
) -> Result<u64, ClientError> {
    let mut reader = FrameReader::new(read);
    let sent = send_archive(write, path, archive);
    if let Err(ClientError::Frame(_)) = &sent {
        // The guest may have said why it stopped listening.
        reply_of(&mut reader)?;
    }
    let bytes = sent?;
    done(reply_of(&mut reader)?, "upload")?;
    Ok(bytes)
}

fn send_archive(
    write: impl Write,
    path: &str,
    archive: &mut impl Read,
) -> Result<u64, ClientError> {
    let mut writer = FrameWriter::new(write);
    writer.write_json(Kind::Request, &Request::Upload { path: path.into() })?;
    let bytes = copy_chunks(archive, |chunk| Ok(writer.write(Kind::Data, chunk)?))?;
    writer.write(Kind::DataEof, &[])?;
    Ok(bytes)
}

/// Receives the guest's `path` as a tar stream of at most `bytes_max` bytes
/// into `out`; returns its length. What is in the archive is the guest's word:
/// unpack it with care.
pub fn download(
    read: impl Read,
    write: impl Write,
    path: &str,
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    let request =
        Request::Download { path: path.into(), layer: false, changes: false, left_out: Vec::new() };
    receive(read, write, &request, out, bytes_max)
}

/// As [`download`], of all that the guest's root file system holds, as the
/// layer of an image.
pub fn download_layer(
    read: impl Read,
    write: impl Write,
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    let (path, left_out) = ("/".into(), Vec::new());
    let request = Request::Download { path, layer: true, changes: false, left_out };
    receive(read, write, &request, out, bytes_max)
}

/// As [`download_layer`], of what the cell has changed of its image, and that alone. What is called
/// as in `left_out` does not come; what is in such a directory does.
pub fn download_changes(
    read: impl Read,
    write: impl Write,
    left_out: &[String],
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    let (path, left_out) = ("/".into(), left_out.to_vec());
    let request = Request::Download { path, layer: true, changes: true, left_out };
    receive(read, write, &request, out, bytes_max)
}

/// Receives the names of what the cell has changed of its image, as [`Request::Changes`] has them.
pub fn changes(
    read: impl Read,
    write: impl Write,
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    receive(read, write, &Request::Changes, out, bytes_max)
}

fn receive(
    read: impl Read,
    write: impl Write,
    request: &Request,
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    FrameWriter::new(write).write_json(Kind::Request, request)?;
    receive_data(&mut FrameReader::new(read), out, bytes_max)
}

/// Takes `Data` frames up to `DataEof`, at most `bytes_max` bytes, into `out`; how many came.
///
/// # Errors
/// The guest's, and those of the stream and of `out`.
pub fn receive_data<R: Read>(
    reader: &mut FrameReader<R>,
    out: &mut impl Write,
    bytes_max: u64,
) -> Result<u64, ClientError> {
    let mut received = 0u64;
    loop {
        let frame = reader.read()?.ok_or(ClientError::Closed)?;
        match frame.kind {
            Kind::Data => received += frame.payload.len() as u64,
            Kind::DataEof => return Ok(received),
            Kind::Reply => {
                reply_in(&frame)?;
                return Err(ClientError::UnexpectedReply { request: "download" });
            }
            got => return Err(ClientError::UnexpectedFrame { got }),
        }
        if received > bytes_max {
            return Err(ClientError::TooMuch { bytes_max });
        }
        out.write_all(&frame.payload).map_err(ClientError::Local)?;
    }
}

/// Starts the cell's program; returns when it runs.
///
/// # Errors
/// As [`exec`]'s.
pub fn start<R: Read, W: Write>(
    read: R,
    write: W,
    start: &Start,
) -> Result<ExecSession<R, W>, ClientError> {
    begin(read, write, &Request::Start(Box::new(start.clone())))
}

/// Starts a program beside the cell's; returns when it runs.
///
/// # Errors
/// [`ClientError::Failed`] with [`FailureKind::NotFound`] or
/// [`FailureKind::NotExecutable`] when the program cannot be started.
pub fn exec<R: Read, W: Write>(
    read: R,
    write: W,
    exec: &Exec,
) -> Result<ExecSession<R, W>, ClientError> {
    begin(read, write, &Request::Exec(exec.clone()))
}

fn begin<R: Read, W: Write>(
    read: R,
    write: W,
    request: &Request,
) -> Result<ExecSession<R, W>, ClientError> {
    let mut writer = FrameWriter::new(write);
    writer.write_json(Kind::Request, request)?;
    let mut reader = FrameReader::new(read);
    match reply_of(&mut reader)? {
        Reply::Started { guest_pid } => Ok(ExecSession {
            guest_pid,
            input: ExecInput(Arc::new(Mutex::new(writer))),
            output: ExecOutput::of(reader),
        }),
        _ => Err(ClientError::UnexpectedReply { request: "exec" }),
    }
}

/// A program that runs in the guest.
pub struct ExecSession<R, W> {
    /// The guest's process id: a claim, good for showing only.
    pub guest_pid: u32,
    pub input: ExecInput<W>,
    pub output: ExecOutput<R>,
}

/// What the host sends to a program; clones share the stream, so that signals
/// and window sizes may come from other threads than standard input.
pub struct ExecInput<W>(Arc<Mutex<FrameWriter<W>>>);

impl<W> Clone for ExecInput<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W: Write> ExecInput<W> {
    /// What goes on `stream` after the program's start was told.
    pub fn new(stream: W) -> Self {
        Self(Arc::new(Mutex::new(FrameWriter::new(stream))))
    }

    fn writer(&self) -> MutexGuard<'_, FrameWriter<W>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes `bytes` to the program's standard input.
    pub fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        if bytes.is_empty() {
            return Ok(());
        }
        Ok(self.writer().write(Kind::Stdin, bytes)?)
    }

    /// Ends the program's standard input; on a terminal, types Ctrl-D.
    pub fn stdin_eof(&self) -> Result<(), ClientError> {
        Ok(self.writer().write(Kind::StdinEof, &[])?)
    }

    /// Sets the size of the program's terminal.
    pub fn resize(&self, size: TtySize) -> Result<(), ClientError> {
        Ok(self.writer().write_json(Kind::Resize, &size)?)
    }

    /// Sends the program a signal by its Linux number.
    pub fn signal(&self, number: u8) -> Result<(), ClientError> {
        Ok(self.writer().write(Kind::Signal, &[number])?)
    }

    /// Forwards `source` until it ends, then ends standard input.
    pub fn pump_stdin(&self, source: &mut impl Read) -> Result<u64, ClientError> {
        let bytes = copy_chunks(source, |chunk| self.stdin(chunk))?;
        self.stdin_eof()?;
        Ok(bytes)
    }
}

/// What a program says, as it says it.
#[derive(Debug, PartialEq, Eq)]
pub enum ExecEvent {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// The last event: the exit status, or 128 + the signal.
    Exited(u8),
}

/// The output end of a session.
pub struct ExecOutput<R> {
    frames: FrameReader<R>,
    out_of_memory: bool,
}

impl<R: Read> ExecOutput<R> {
    /// What comes on `stream` after the program's start was told.
    pub fn new(stream: R) -> Self {
        Self::of(FrameReader::new(stream))
    }

    fn of(frames: FrameReader<R>) -> Self {
        Self { frames, out_of_memory: false }
    }

    /// Whether the guest's kernel had ended a process for lack of memory when it told the exit.
    pub fn is_out_of_memory(&self) -> bool {
        self.out_of_memory
    }

    /// The stream underneath, for a timeout or a shutdown.
    pub fn get_ref(&self) -> &R {
        self.frames.get_ref()
    }

    /// Waits for the next event; there is none after [`ExecEvent::Exited`].
    pub fn event(&mut self) -> Result<ExecEvent, ClientError> {
        let frame = self.frames.read()?.ok_or(ClientError::Closed)?;
        match frame.kind {
            Kind::Stdout => Ok(ExecEvent::Stdout(frame.payload)),
            Kind::Stderr => Ok(ExecEvent::Stderr(frame.payload)),
            Kind::Reply => match reply_in(&frame)? {
                Reply::Exited { code, out_of_memory } => {
                    self.out_of_memory = out_of_memory;
                    Ok(ExecEvent::Exited(code))
                }
                _ => Err(ClientError::UnexpectedReply { request: "exec" }),
            },
            got => Err(ClientError::UnexpectedFrame { got }),
        }
    }

    /// Copies the program's output until it exits; returns its exit code.
    pub fn pump(
        &mut self,
        stdout: &mut impl Write,
        stderr: &mut impl Write,
    ) -> Result<u8, ClientError> {
        loop {
            match self.event()? {
                ExecEvent::Stdout(bytes) => write_now(stdout, &bytes)?,
                ExecEvent::Stderr(bytes) => write_now(stderr, &bytes)?,
                ExecEvent::Exited(code) => return Ok(code),
            }
        }
    }
}

fn write_now(sink: &mut impl Write, bytes: &[u8]) -> Result<(), ClientError> {
    sink.write_all(bytes).and_then(|()| sink.flush()).map_err(ClientError::Local)
}

/// Reads `source` to its end and hands on each chunk; the bytes copied.
pub(crate) fn copy_chunks(
    source: &mut impl Read,
    mut sink: impl FnMut(&[u8]) -> Result<(), ClientError>,
) -> Result<u64, ClientError> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut copied = 0;
    loop {
        match source.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(n) => {
                sink(buffer.get(..n).unwrap_or_default())?;
                copied += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ClientError::Local(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that says `frames` whatever it is asked.
    fn guest(frames: &[(Kind, &[u8])]) -> Vec<u8> {
        let mut wire = Vec::new();
        let mut writer = FrameWriter::new(&mut wire);
        for (kind, payload) in frames {
            writer.write(*kind, payload).unwrap();
        }
        wire
    }

    fn reply(reply: &Reply) -> Vec<u8> {
        serde_json::to_vec(reply).unwrap()
    }

    #[test]
    fn a_guest_that_is_at_work_is_waited_for() {
        let (goes_on, ready) = (reply(&Reply::GoesOn), reply(&Reply::Ready(BootTimes::default())));
        let wire =
            guest(&[(Kind::Reply, &goes_on[..]), (Kind::Reply, &goes_on), (Kind::Reply, &ready)]);
        let mut heard = 0;
        boot(wire.as_slice(), std::io::sink(), &Boot::default(), || heard += 1).unwrap();
        assert_eq!(heard, 2);
    }

    #[test]
    fn a_session_yields_its_output_and_code() {
        let (started, exited) = (reply(&Reply::Started { guest_pid: 7 }), reply(&Reply::exited(3)));
        let wire = guest(&[
            (Kind::Reply, &started),
            (Kind::Stdout, b"out"),
            (Kind::Stderr, b"err"),
            (Kind::Reply, &exited),
        ]);
        let mut session = exec(wire.as_slice(), io::sink(), &Exec::default()).unwrap();
        assert_eq!(session.guest_pid, 7);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        assert_eq!(session.output.pump(&mut out, &mut err).unwrap(), 3);
        assert_eq!((out.as_slice(), err.as_slice()), (&b"out"[..], &b"err"[..]));
        assert!(matches!(session.output.event(), Err(ClientError::Closed)));
    }

    #[test]
    fn input_goes_out_as_the_frames_the_protocol_names() {
        let mut wire = Vec::new();
        let input = ExecInput(Arc::new(Mutex::new(FrameWriter::new(&mut wire))));
        assert_eq!(input.pump_stdin(&mut &b"hello"[..]).unwrap(), 5);
        input.resize(TtySize { rows: 2, cols: 3 }).unwrap();
        input.signal(15).unwrap();
        drop(input);
        let mut reader = FrameReader::new(wire.as_slice());
        let mut kinds = Vec::new();
        while let Some(frame) = reader.read().unwrap() {
            kinds.push(frame.kind);
        }
        assert_eq!(kinds, [Kind::Stdin, Kind::StdinEof, Kind::Resize, Kind::Signal]);
    }

    #[test]
    fn failures_carry_dockers_exit_codes_and_no_control_characters() {
        let message = format!("no \x1b[31mprogram\n{}", "x".repeat(9000));
        let failed = reply(&Reply::Failed { kind: FailureKind::NotFound, message });
        let wire = guest(&[(Kind::Reply, &failed)]);
        let error = exec(wire.as_slice(), io::sink(), &Exec::default()).err().unwrap();
        assert_eq!(error.exit_code(), 127);
        assert_eq!(error.to_string().chars().count(), MESSAGE_CHARS_MAX);
        assert!(!error.to_string().contains(char::is_control));
    }

    #[test]
    fn frames_out_of_place_are_errors() {
        let done = reply(&Reply::Done);
        let wire = guest(&[(Kind::Reply, &done)]);
        let error = exec(wire.as_slice(), io::sink(), &Exec::default()).err().unwrap();
        assert!(matches!(error, ClientError::UnexpectedReply { request: "exec" }));
        let wire = guest(&[(Kind::Stdin, b"x")]);
        let error = stats(wire.as_slice(), io::sink()).unwrap_err();
        assert!(matches!(error, ClientError::UnexpectedFrame { got: Kind::Stdin }));
        let wire = guest(&[(Kind::Data, b"x"), (Kind::Reply, &done)]);
        let error = download(wire.as_slice(), io::sink(), "/x", &mut io::sink(), 9).unwrap_err();
        assert!(matches!(error, ClientError::UnexpectedReply { request: "download" }));
        assert!(matches!(stats(&b""[..], io::sink()), Err(ClientError::Closed)));
    }

    #[test]
    fn a_download_stops_at_its_limit() {
        let wire = guest(&[(Kind::Data, &[1; 60]), (Kind::Data, &[2; 60]), (Kind::DataEof, b"")]);
        let mut out = Vec::new();
        let error = download(wire.as_slice(), io::sink(), "/x", &mut out, 100).unwrap_err();
        assert!(matches!(error, ClientError::TooMuch { bytes_max: 100 }));
        assert_eq!(out.len(), 60);
        assert_eq!(download(wire.as_slice(), io::sink(), "/x", &mut out, 120).unwrap(), 120);
    }

    #[test]
    fn an_upload_reports_why_the_guest_stopped_listening() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let failed = Reply::Failed { kind: FailureKind::Guest, message: "disk full".into() };
        let wire = guest(&[(Kind::Reply, &reply(&failed))]);
        let error = upload(wire.as_slice(), Broken, "/x", &mut &b"tar"[..]).unwrap_err();
        assert_eq!(error.to_string(), "disk full");
    }
}
