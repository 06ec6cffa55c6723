//! More programs in a running container: create, start, inspect, resize.
//!
//! A program whose client goes away runs on, as under Docker; what it writes
//! is then read and thrown away. A server that ends leaves it running too.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream as BlockingStream;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use exocell_cell::agent::client::cleaned;
use exocell_cell::agent::{
    ANSWER_MAX, Exec as Program, FailureKind, Kind, Reply, Request, TtySize,
};
use exocell_cell::control::Client;
use exocell_cell::{Record, Strength, plan};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::watch;

use crate::bounds;
use crate::containers::Seen;
use crate::error::{ApiError, ApiResult};
use crate::fields;
use crate::frames::{Chunk, read_frame, write_json};
use crate::hijack::{self, Feed, Hijacked, Listener};
use crate::http::{Call, Response, empty, json as reply_json};
use crate::ids::new_id;
use crate::input::Input;
use crate::place::Place;
use crate::state::Server;
use crate::wire::{ExecCreate, ExecStart};

/// Programs that are remembered, ended ones among them.
const EXECS_MAX: usize = 4096;
/// What the words of those may take together, in bytes.
const EXECS_BYTES_MAX: usize = 64 << 20;

/// Where a program stands.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    started: bool,
    running: bool,
    exit_code: Option<u8>,
    /// In the guest.
    pid: u32,
}

/// One program.
pub struct Exec {
    id: String,
    container: String,
    program: Program,
    wire: ExecCreate,
    progress: Mutex<Progress>,
    input: Mutex<Option<Arc<Input>>>,
    /// Of its terminal, as a client wanted it before there was one.
    size: Mutex<Option<TtySize>>,
}

impl Exec {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn input(&self) -> MutexGuard<'_, Option<Arc<Input>>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes its terminal's size, now or once there is one; a program that is over has none.
    fn resize(&self, size: TtySize) {
        let input = self.input();
        match input.as_ref() {
            Some(input) => input.resize(size),
            None => *self.size.lock().unwrap_or_else(PoisonError::into_inner) = Some(size),
        }
    }

    /// The size that was wanted before.
    fn wanted_size(&self) -> Option<TtySize> {
        *self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program runs, and takes `input`.
    fn takes(&self, input: Input) {
        let mut own = self.input();
        if let Some(size) = self.wanted_size().filter(|_| self.wire.tty) {
            input.resize(size);
        }
        *own = Some(Arc::new(input));
    }

    fn is_over(&self) -> bool {
        let progress = self.progress();
        progress.started && !progress.running
    }

    /// What it holds of the words of its client.
    fn bytes(&self) -> usize {
        let program = self.program.args.iter().chain(&self.program.env);
        let wire = self.wire.cmd.iter().flatten().chain(&self.wire.env);
        program.chain(wire).map(String::len).sum()
    }

    fn ended(&self, code: u8) {
        let mut progress = self.progress();
        (progress.running, progress.exit_code) = (false, Some(code));
    }

    fn inspect(&self) -> Value {
        let progress = *self.progress();
        let (entrypoint, arguments) =
            self.program.args.split_first().map_or(("", &[][..]), |(e, a)| (e.as_str(), a));
        json!({
            "ID": self.id, "ContainerID": self.container, "Running": progress.running,
            "ExitCode": progress.exit_code, "Pid": progress.pid,
            "ProcessConfig": {
                "tty": self.wire.tty, "entrypoint": entrypoint, "arguments": arguments,
                "privileged": self.wire.privileged, "user": self.wire.user,
            },
            "OpenStdin": self.wire.attach_stdin, "OpenStdout": self.wire.attach_stdout,
            "OpenStderr": self.wire.attach_stderr, "CanRemove": false, "DetachKeys": self.wire.detach_keys,
        })
    }
}

/// The programs of all containers, oldest first.
#[derive(Default)]
pub struct Execs(Mutex<BTreeMap<u64, Arc<Exec>>>);

impl Execs {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Exec>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers `exec`, in the place of the oldest that are over.
    fn add(&self, exec: Exec) -> ApiResult<()> {
        let mut all = self.all();
        let mut bytes = exec.bytes() + all.values().map(|exec| exec.bytes()).sum::<usize>();
        while all.len() >= EXECS_MAX || bytes > EXECS_BYTES_MAX && !all.is_empty() {
            let over = all.iter().find(|(_, exec)| exec.is_over()).map(|(at, _)| *at);
            let oldest = over.or_else(|| all.keys().next().copied()).unwrap_or(0);
            bytes -= all.remove(&oldest).map_or(0, |exec| exec.bytes());
        }
        let next = all.keys().next_back().map_or(0, |last| last + 1);
        all.insert(next, Arc::new(exec));
        Ok(())
    }

    fn find(&self, id: &str) -> ApiResult<Arc<Exec>> {
        let all = self.all();
        let found = all.values().find(|exec| exec.id == id);
        found.cloned().ok_or_else(|| ApiError::not_found(format!("No such exec instance: {id}")))
    }

    /// The container that the program `id` is in.
    pub fn container_of(&self, id: &str) -> ApiResult<String> {
        self.find(id).map(|exec| exec.container.clone())
    }

    /// The ids of what runs in `container`.
    pub fn of(&self, container: &str) -> Vec<String> {
        let all = self.all();
        let running = all.values().filter(|e| e.container == container && e.progress().running);
        running.map(|exec| exec.id.clone()).collect()
    }

    pub fn forget_container(&self, container: &str) {
        self.all().retain(|_, exec| exec.container != container);
    }
}

/// `POST /containers/{id}/exec`
pub async fn create(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let caller = call.caller.clone();
    let wire: ExecCreate = call.fields(fields::EXEC_CREATE).await?;
    let args = wire.cmd.clone().unwrap_or_default();
    if args.is_empty() {
        return Err(ApiError::bad_request("No exec command specified"));
    }
    let seen = server.find(key).await?;
    seen.awake()?;
    if seen.container.spec.strength == Strength::Isolate {
        return Err(ApiError::unsupported("exec in an isolate", "it has one program and no guest"));
    }
    let config = &seen.container.config;
    let given = |own: &str, container: &str| {
        if own.is_empty() { container.to_owned() } else { own.to_owned() }
    };
    let program = Program {
        env: plan::environment(&config.env, &wire.env, wire.tty),
        cwd: given(&given(&wire.working_dir, &config.working_dir), "/"),
        user: given(&wire.user, &config.user),
        tty: wire.tty.then(|| tty_size(&wire.console_size).unwrap_or(plan::TTY_SIZE_DEFAULT)),
        stdin: wire.attach_stdin,
        lasting: false,
        privileged: wire.privileged,
        rules: None,
        args,
    };
    bounds::check_exec(&program)?;
    if let Some(cell) = caller.cell() {
        let spec = &seen.container.spec;
        cell.inside.check_program(spec, &program.user, program.privileged)?;
    }
    hijack::keys(&wire.detach_keys)?;
    let id = new_id()?;
    let told = format!("exec_create: {}", program.args.join(" "));
    server.tell(&seen.container, told, &[("execID", id.clone())]);
    server.execs.add(Exec {
        id: id.clone(),
        container: seen.id().to_owned(),
        program,
        wire,
        progress: Mutex::default(),
        input: Mutex::default(),
        size: Mutex::default(),
    })?;
    Ok(reply_json(StatusCode::CREATED, &json!({ "Id": id })))
}

/// Rows and columns, if both are given.
pub fn tty_size(size: &[u16]) -> Option<TtySize> {
    match size {
        [rows, cols] if *rows > 0 && *cols > 0 => Some(TtySize { rows: *rows, cols: *cols }),
        _ => None,
    }
}

/// `GET /exec/{id}/json`
pub fn inspect(server: &Server, id: &str) -> ApiResult<Response> {
    Ok(reply_json(StatusCode::OK, &server.execs.find(id)?.inspect()))
}

/// `POST /exec/{id}/resize`
pub fn resize(server: &Server, id: &str, call: &Call) -> ApiResult<Response> {
    let exec = server.execs.find(id)?;
    let size = hijack::wanted_size(call)?;
    exec.resize(size);
    Ok(empty(StatusCode::OK))
}

/// `POST /exec/{id}/start`: the program starts once the client has its 101.
pub async fn start(server: &Arc<Server>, id: &str, mut call: Call) -> ApiResult<Response> {
    let exec = server.execs.find(id)?;
    let hijack = hijack::Offer::of(&mut call);
    let wire: ExecStart = call.fields(fields::EXEC_START).await?;
    let seen = server.find(&exec.container).await?;
    let record = seen.awake()?.0.clone();
    if std::mem::replace(&mut exec.progress().started, true) {
        return Err(ApiError::conflict(format!("exec {id} has been started already")));
    }
    let mut program = exec.program.clone();
    let wanted = tty_size(&wire.console_size).or(exec.wanted_size());
    if let (Some(size), Some(wanted)) = (&mut program.tty, wanted) {
        *size = wanted;
    }
    if wire.detach {
        let output = begin(server, &exec, &seen, record, program).await?;
        tokio::spawn(run(server.clone(), exec, seen, output, None));
        return Ok(empty(StatusCode::OK));
    }
    // As docker has it: what the client says now is how it will read, a terminal or not.
    let (response, hijacked) = hijack.accept(wire.tty);
    let server = server.clone();
    tokio::spawn(async move {
        let Some(client) = hijacked.await else { return };
        match begin(&server, &exec, &seen, record, program).await {
            Ok(output) => run(server, exec, seen, output, Some(client)).await,
            // The client knows by the exit code; this is for its user.
            Err(error) => client.say(&Chunk::text(format!("{}\r\n", error.message))).await,
        }
    });
    Ok(response)
}

/// Starts the program; its output once it runs.
async fn begin(
    server: &Arc<Server>,
    exec: &Arc<Exec>,
    seen: &Seen,
    record: Record,
    program: Program,
) -> ApiResult<OwnedReadHalf> {
    let begun = try_begin(server, exec, record, program).await;
    if let Err((code, _)) = &begun {
        exec.progress().exit_code = Some(*code);
    }
    let told = format!("exec_start: {}", exec.program.args.join(" "));
    server.tell(&seen.container, told, &[("execID", exec.id.clone())]);
    begun.map_err(|(_, error)| error)
}

/// A stream to the guest for a program that may run for ever. Blocks.
fn endless_stream(record: &Record) -> ApiResult<BlockingStream> {
    let stream = Client::connect(record)?.guest_stream()?;
    stream.into_endless().map_err(|error| ApiError::internal(error.to_string()))
}

async fn try_begin(
    server: &Arc<Server>,
    exec: &Arc<Exec>,
    record: Record,
    program: Program,
) -> Result<OwnedReadHalf, (u8, ApiError)> {
    let failed = |message: String| (126, ApiError::internal(message));
    let stream: ApiResult<BlockingStream> = server.blocking(move |_| endless_stream(&record)).await;
    let stream = stream.map_err(|error| (126, error))?;
    let stream = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    let stream = stream.map_err(|error| failed(format!("no stream into the guest: {error}")))?;
    let (mut output, mut input) = stream.into_split();
    let request = Request::Exec(program);
    let asked = async {
        write_json(&mut input, Kind::Request, &request).await?;
        read_frame(&mut output).await
    };
    let answer = tokio::time::timeout(ANSWER_MAX, asked).await.map_err(|_| {
        failed(format!("the cell's agent did not answer within {} s", ANSWER_MAX.as_secs()))
    })?;
    let reply = match answer {
        Ok(Some(frame)) if frame.kind == Kind::Reply => frame.json::<Reply>().ok(),
        _ => None,
    };
    match reply {
        Some(Reply::Started { guest_pid }) => {
            exec.takes(Input::new(input));
            let mut progress = exec.progress();
            (progress.running, progress.pid) = (true, guest_pid);
            Ok(output)
        }
        Some(Reply::Failed { kind: FailureKind::NotFound, message }) => {
            let text = format!("exec failed: {}: executable file not found", cleaned(&message));
            Err((127, ApiError::bad_request(text)))
        }
        Some(Reply::Failed { message, .. }) => {
            Err((126, ApiError::bad_request(format!("exec failed: {}", cleaned(&message)))))
        }
        _ => Err(failed("exec failed: the cell ended".to_owned())),
    }
}

/// Follows the program to its end, for `client` as long as that listens.
async fn run(
    server: Arc<Server>,
    exec: Arc<Exec>,
    seen: Seen,
    mut output: OwnedReadHalf,
    client: Option<Hijacked>,
) {
    let (leaves, mut left) = watch::channel(false);
    let (mut listener, feeder) = match client {
        Some(client) => {
            let (input, listener) = client.into_split();
            let keys = exec.wire.tty.then(|| hijack::keys(&exec.wire.detach_keys).ok()).flatten();
            let to = exec.clone();
            let feed = || {
                tokio::spawn(async move {
                    if hijack::feed(input, to, keys).await {
                        leaves.send_replace(true);
                    }
                })
            };
            let feeder = exec.wire.attach_stdin.then(feed);
            (Some(listener), feeder)
        }
        None => (None, None),
    };
    let mut place = listener.as_ref().map(Listener::place);
    let mut code = 128 + 9;
    loop {
        let mut next = pin!(read_frame(&mut output));
        let frame = loop {
            tokio::select! {
                frame = &mut next => break frame,
                // The program runs on.
                () = gone(place.as_ref()) => (listener, place) = (None, None),
                () = hijack::left(&mut left), if listener.is_some() => {
                    if let Some(mut listener) = listener.take() {
                        listener.end().await;
                    }
                    place = None;
                }
            }
        };
        let Ok(Some(frame)) = frame else { break };
        if frame.kind == Kind::Reply {
            if let Ok(Reply::Exited { code: told, .. }) = frame.json() {
                code = told;
            }
            break;
        }
        let wanted = match frame.kind {
            Kind::Stdout => exec.wire.attach_stdout,
            _ => exec.wire.attach_stderr,
        };
        if let (Some(chunk), Some(to), true) = (Chunk::of(frame), &mut listener, wanted)
            && !to.say(&chunk).await
        {
            listener = None;
        }
    }
    if let Some(feeder) = feeder {
        feeder.abort();
    }
    exec.ended(code);
    let input = exec.input().take();
    if let Some(input) = input {
        input.end();
    }
    let more = [("execID", exec.id.clone()), ("exitCode", code.to_string())];
    server.tell(&seen.container, "exec_die", &more);
    if let Some(mut listener) = listener {
        listener.end().await;
    }
}

/// Waits until the client is gone, if there is one.
async fn gone(place: Option<&Place>) {
    match place {
        Some(place) => place.gone().await,
        None => std::future::pending().await,
    }
}

impl Feed for Exec {
    async fn feed(&self, bytes: Option<Bytes>) -> bool {
        let input = self.input().clone();
        let Some(input) = input else { return false };
        match bytes {
            Some(bytes) => input.send(Kind::Stdin, bytes).await,
            // A terminal's user types the end.
            None if self.wire.tty => true,
            None => input.send(Kind::StdinEof, Bytes::new()).await,
        }
    }
}
