//! `process.Process`: commands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use bytes::Bytes;
use exocell_cell::agent::client::ClientError;
use exocell_cell::agent::files::{self, FileAction, FileEntry, FileKind, FileRequest};
use exocell_cell::agent::{Exec, TtySize};
use exocell_cell::now_ms;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::connect::{
    Messages, Stream, answer, last_answer, only, refused, time_limit, unary, whole,
};
use super::programs::{self, End, Event, Program, Selector};
use super::{placed, user};
use crate::error::{Problem, Result};
use crate::http::{Call, Growing, Response};
use crate::note::{Command, Note};
use crate::pairs::check_pairs;
use crate::sandbox::Sandbox;
use crate::state::Server;

/// Words of a command, and bytes of all of them (execve(2) has a bound of its own).
const WORDS_MAX: usize = 4096;
const WORDS_BYTES_MAX: usize = 1 << 20;
const TAG_BYTES_MAX: usize = 256;
/// How often a client that waits hears something, where it does not say.
const KEEPALIVE: Duration = Duration::from_secs(90);
/// Bytes that are kept of what a template's line says.
const SAID_MAX: usize = 256 << 10;
/// How long it may take until the end of a sandbox is noticed whose commands have ended so.
const GONE_MAX: Duration = Duration::from_secs(2);
/// Where commands are looked for, if the image does not say.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Base64 of JSON's form of bytes, with its padding or without.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

#[derive(Debug, Default, Deserialize)]
struct Config {
    #[serde(default)]
    cmd: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
struct Size {
    #[serde(default)]
    rows: u32,
    #[serde(default)]
    cols: u32,
}

impl Size {
    /// A terminal has at least one row and column, and no more than fit its numbers.
    fn fit(self) -> TtySize {
        let fit = |cells: u32| u16::try_from(cells).unwrap_or(u16::MAX).max(1);
        TtySize { rows: fit(self.rows), cols: fit(self.cols) }
    }
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
struct Pty {
    #[serde(default)]
    size: Size,
}

#[derive(Debug, Default, Deserialize)]
struct Start {
    #[serde(default)]
    process: Config,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

/// All that calls on a running command say.
#[derive(Debug, Default, Deserialize)]
struct Order {
    #[serde(default)]
    process: Selector,
    #[serde(default)]
    input: Input,
    signal: Option<Value>,
    pty: Option<Pty>,
}

#[derive(Debug, Default, Deserialize)]
struct Streamed {
    start: Option<Order>,
    data: Option<Order>,
}

pub async fn serve(
    server: &Arc<Server>,
    sandbox: Arc<Sandbox>,
    verb: &str,
    call: Call,
) -> Response {
    match verb {
        "Start" => start(server, &sandbox, call).await,
        "Connect" => connect(&sandbox, call).await,
        "StreamInput" => last_answer(stream_input(&sandbox, call).await),
        "List" => whole(list(&sandbox, call).await),
        "SendInput" => answer(send_input(&sandbox, call).await),
        "CloseStdin" => answer(close_stdin(&sandbox, call).await),
        "SendSignal" => answer(send_signal(&sandbox, call).await),
        "Update" => answer(update(&sandbox, call).await),
        other => {
            let problem = Problem::unsupported(format!("process.Process/{other}"), "leave it out");
            refused(&call, &problem)
        }
    }
}

async fn start(server: &Arc<Server>, sandbox: &Arc<Sandbox>, call: Call) -> Response {
    let every = keepalive(&call);
    let (limit, user) = match time_limit(&call)
        .and_then(|limit| Ok((limit, user(&sandbox.note(), &call.headers)?)))
    {
        Ok(read) => read,
        Err(problem) => return refused(&call, &problem),
    };
    let work = call.work.clone();
    let wanted: Start = match only(call).await {
        Ok(wanted) => wanted,
        Err(refused) => return refused,
    };
    let (stream, response) = Stream::open();
    let (server, sandbox) = (server.clone(), sandbox.clone());
    tokio::spawn(async move {
        let begun = async {
            let (command, program) = plan(&sandbox, &sandbox.note(), wanted, user, limit).await?;
            programs::start(&server, &sandbox, command, program).await
        };
        let begun = begun.await;
        // Until then it counts, whether its client is there or not.
        drop(work);
        match begun {
            Ok((program, events)) => tell(&sandbox, stream, &program, events, None, every).await,
            Err(problem) => stream.end(Err(problem)).await,
        }
    });
    response
}

/// Runs a line of a template's in the background, as the usual user. What a client says of its
/// sandbox is not said to it.
pub async fn begin(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    line: &str,
) -> Result<(Arc<Program>, mpsc::Receiver<Event>)> {
    let args = ["-l", "-c", line].map(str::to_owned).to_vec();
    let process = Config { cmd: "/bin/bash".to_owned(), args, ..Config::default() };
    let wanted = Start { process, stdin: Some(false), ..Start::default() };
    let note = Note { env: BTreeMap::new(), ..sandbox.note() };
    let user = note.user.clone();
    let (command, program) = plan(sandbox, &note, wanted, user, None).await?;
    programs::start(server, sandbox, command, program).await
}

/// The same to its end; its exit code, and the first of what it said.
pub async fn run(
    server: &Arc<Server>,
    sandbox: &Arc<Sandbox>,
    line: &str,
) -> Result<(u8, Vec<u8>)> {
    let (_, mut events) = begin(server, sandbox, line).await?;
    let mut said = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Stdout(bytes) if said.len() < SAID_MAX => said.extend_from_slice(&bytes),
            Event::End(end) => return Ok((end.code, said)),
            _ => {}
        }
    }
    Err(Problem::unavailable("the sandbox ended meanwhile"))
}

async fn connect(sandbox: &Arc<Sandbox>, call: Call) -> Response {
    let every = keepalive(&call);
    let limit = match time_limit(&call) {
        Ok(limit) => limit,
        Err(problem) => return refused(&call, &problem),
    };
    let wanted: Order = match only(call).await {
        Ok(wanted) => wanted,
        Err(refused) => return refused,
    };
    let (stream, response) = Stream::open();
    let sandbox = sandbox.clone();
    tokio::spawn(async move {
        match sandbox.programs.find(&wanted.process) {
            Ok(program) => {
                let events = program.listen();
                tell(&sandbox, stream, &program, events, limit, every).await;
            }
            Err(problem) => stream.end(Err(problem)).await,
        }
    });
    response
}

pub fn keepalive(call: &Call) -> Duration {
    let named = call.header("keepalive-ping-interval").and_then(|text| text.parse().ok());
    named.filter(|seconds| (1..=3600).contains(seconds)).map_or(KEEPALIVE, Duration::from_secs)
}

/// What is to run, in the guest's terms.
async fn plan(
    sandbox: &Arc<Sandbox>,
    note: &Note,
    wanted: Start,
    user: String,
    limit: Option<Duration>,
) -> Result<(Command, Exec)> {
    let Start { process, pty, tag, stdin } = wanted;
    let words = process.args.iter().chain([&process.cmd]);
    let bytes: usize = words.map(|word| word.len() + 1).sum();
    if process.cmd.is_empty() || process.args.iter().any(|word| word.contains('\0')) {
        return Err(Problem::invalid("no program is named, or a word of it has a zero byte"));
    }
    if process.args.len() > WORDS_MAX || bytes > WORDS_BYTES_MAX {
        return Err(Problem::invalid(format!(
            "the command has more than {WORDS_MAX} words or {WORDS_BYTES_MAX} bytes"
        )));
    }
    if tag.as_ref().is_some_and(|tag| tag.len() > TAG_BYTES_MAX) {
        return Err(Problem::invalid(format!("the tag has more than {TAG_BYTES_MAX} bytes")));
    }
    check_pairs("envs", Some(&process.envs))?;
    let cwd = directory(sandbox, &user, process.cwd.as_deref()).await?;
    // Where nobody says, there is input.
    let stdin = pty.is_some() || stdin.unwrap_or(true);
    let program = Exec {
        args: [vec![process.cmd.clone()], process.args.clone()].concat(),
        env: environment(note, &user, &process.envs),
        cwd,
        user,
        privileged: false,
        rules: None,
        tty: pty.map(|pty| pty.size.fit()),
        stdin,
        lasting: true,
    };
    let command = Command {
        pid: 0,
        cmd: process.cmd,
        args: process.args,
        envs: process.envs,
        cwd: process.cwd,
        tag,
        pty: pty.is_some(),
        stdin,
        deadline_ms: limit.map(|limit| now_ms() + limit.as_millis() as u64),
    };
    Ok((command, program))
}

/// Where the command begins: at the user's home, if nothing is said. It has to be there.
async fn directory(sandbox: &Arc<Sandbox>, user: &str, cwd: Option<&str>) -> Result<String> {
    let named = cwd.filter(|cwd| !cwd.is_empty());
    let note = sandbox.note();
    let usual = note.workdir.clone().unwrap_or_else(|| "~".to_owned());
    let path = named.map_or(usual, |path| placed(&note, path));
    let request = FileRequest { user: user.to_owned(), path, action: FileAction::Stat };
    let found: Result<FileEntry> = sandbox
        .ask(move |guest| -> std::result::Result<_, ClientError> {
            files::act(guest, guest, &request)
        })
        .await;
    match (found, named) {
        (Ok(entry), _) if entry.kind == Some(FileKind::Directory) => Ok(entry.path),
        (Err(error), None) if error.status == hyper::StatusCode::NOT_FOUND => Ok("/".to_owned()),
        (Ok(_), named) => {
            Err(Problem::invalid(format!("cwd '{}' is not a directory", named.unwrap_or("~"))))
        }
        (Err(error), Some(named)) if error.status == hyper::StatusCode::NOT_FOUND => {
            Err(Problem::invalid(format!("cwd '{named}' does not exist")))
        }
        (Err(error), _) => Err(super::of_user(error)),
    }
}

/// The image's, the sandbox', who it is, and the command's own; the last one counts.
fn environment(note: &Note, user: &str, envs: &BTreeMap<String, String>) -> Vec<String> {
    let mut all: BTreeMap<&str, &str> = BTreeMap::new();
    let (name, value) = PATH.split_once('=').unwrap_or_default();
    all.insert(name, value);
    all.extend(note.image_env.iter().filter_map(|pair| pair.split_once('=')));
    // The guest knows whose home is where.
    all.remove("HOME");
    all.extend(note.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    all.extend([("USER", user), ("LOGNAME", user)]);
    // By these a program knows that it is in a sandbox, and in which.
    let template = note.alias.as_deref().unwrap_or(&note.template);
    all.extend([
        ("E2B_SANDBOX", "true"),
        ("E2B_SANDBOX_ID", &note.id),
        ("E2B_TEMPLATE_ID", template),
    ]);
    all.extend(envs.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    all.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

/// Tells a client of a command, until that ends, the client's time is over, or it goes.
async fn tell(
    sandbox: &Sandbox,
    stream: Stream,
    program: &Program,
    mut events: mpsc::Receiver<Event>,
    limit: Option<Duration>,
    every: Duration,
) {
    let limit = limit.unwrap_or(Duration::from_secs(365 * 24 * 3600));
    let mut over = std::pin::pin!(tokio::time::sleep(limit));
    let started = json!({ "event": { "start": { "pid": program.command.pid } } });
    let mut listens = stream.say(&started).await;
    while listens {
        let event = tokio::select! {
            event = events.recv() => event,
            () = stream.closed() => return,
            () = &mut over => return stream.end(Err(late())).await,
            () = tokio::time::sleep(every) => {
                listens = stream.say(&json!({ "event": { "keepalive": {} } })).await;
                continue;
            }
        };
        let (name, bytes) = match event {
            Some(Event::Stdout(bytes)) if program.command.pty => ("pty", bytes),
            Some(Event::Stdout(bytes)) => ("stdout", bytes),
            Some(Event::Stderr(bytes)) => ("stderr", bytes),
            Some(Event::End(end)) => {
                if end.is_late {
                    return stream.end(Err(late())).await;
                }
                stream.say(&json!({ "event": { "end": ended(end) } })).await;
                return stream.end(Ok(())).await;
            }
            // Clients tell by the break, and by asking then, that the sandbox is gone.
            None if timeout(GONE_MAX, sandbox.gone()).await.is_ok() => {
                return stream.break_off().await;
            }
            None => {
                let lost = "the connection to the sandbox ended before the command did, or its \
                            output was not read for too long";
                return stream.end(Err(Problem::unavailable(lost))).await;
            }
        };
        let data = json!({ "event": { "data": { name: STANDARD.encode(&bytes) } } });
        listens = stream.say(&data).await;
    }
}

fn late() -> Problem {
    Problem::deadline("the time of the call is over")
}

/// As envd tells of an end: by Go's words for it (os.ProcessState).
fn ended(end: End) -> Value {
    match end.signal {
        Some(number) => {
            let name = match number {
                9 => "killed",
                15 => "terminated",
                _ => "ended",
            };
            let status = format!("signal: {name}");
            json!({ "exitCode": -1, "exited": false, "status": status, "error": status })
        }
        None => {
            let status = format!("exit status {}", end.code);
            let mut told = json!({ "exitCode": end.code, "exited": true, "status": status });
            if end.code != 0 {
                told["error"] = status.into();
            }
            told
        }
    }
}

async fn list(sandbox: &Sandbox, call: Call) -> Result<Response> {
    let mut all = Growing::new(call.held.another(), "{\"processes\":[");
    let _: Value = unary(call).await?;
    let shown = |program: &Arc<Program>| {
        let Command { pid, cmd, args, envs, cwd, tag, .. } = &program.command;
        let mut config = json!({ "cmd": cmd, "args": args, "envs": envs });
        if let Some(cwd) = cwd {
            config["cwd"] = cwd.as_str().into();
        }
        let mut shown = json!({ "pid": pid, "config": config });
        if let Some(tag) = tag {
            shown["tag"] = tag.as_str().into();
        }
        shown
    };
    sandbox.programs.all().iter().try_for_each(|program| all.push(&shown(program)))?;
    all.reply("]}")
}

/// The bytes of an input: to a terminal, or to standard input.
fn bytes_of(program: &Program, input: &Input) -> Result<Bytes> {
    let text = match (&input.stdin, &input.pty) {
        (Some(text), None) if !program.command.pty => text,
        (None, Some(text)) if program.command.pty => text,
        (Some(_), None) => return Err(Problem::invalid("the command has a terminal: send pty")),
        (None, Some(_)) => return Err(Problem::invalid("the command has no terminal: send stdin")),
        _ => return Err(Problem::invalid("send input as stdin or as pty")),
    };
    let bytes = LENIENT.decode(text);
    bytes.map(Bytes::from).map_err(|_| Problem::invalid("the input is not base64"))
}

async fn send_input(sandbox: &Sandbox, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let program = sandbox.programs.find(&order.process)?;
    program.feed(Some(bytes_of(&program, &order.input)?)).await?;
    Ok(json!({}))
}

async fn stream_input(sandbox: &Sandbox, call: Call) -> Result<Value> {
    let limit = time_limit(&call)?.unwrap_or(Duration::from_secs(365 * 24 * 3600));
    let fed = async {
        let mut messages = Messages::of(call)?;
        let mut program: Option<Arc<Program>> = None;
        while let Some(wanted) = messages.next::<Streamed>().await? {
            match (wanted, &program) {
                (Streamed { start: Some(order), .. }, None) => {
                    program = Some(sandbox.programs.find(&order.process)?);
                }
                (Streamed { data: Some(order), .. }, Some(program)) => {
                    program.feed(Some(bytes_of(program, &order.input)?)).await?;
                }
                (Streamed { start: None, data: None }, _) => {}
                _ => return Err(Problem::invalid("the first message of the stream says start")),
            }
        }
        Ok(json!({}))
    };
    tokio::time::timeout(limit, fed).await.unwrap_or_else(|_| Err(late()))
}

async fn close_stdin(sandbox: &Sandbox, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let program = sandbox.programs.find(&order.process)?;
    if program.command.pty {
        return Err(Problem::invalid("a terminal's input ends by Ctrl-D; send that"));
    }
    program.feed(None).await?;
    Ok(json!({}))
}

async fn send_signal(sandbox: &Arc<Sandbox>, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let number = match &order.signal {
        Some(Value::String(name)) if name == "SIGNAL_SIGKILL" => 9,
        Some(Value::String(name)) if name == "SIGNAL_SIGTERM" => 15,
        Some(Value::Number(number)) if [Some(9), Some(15)].contains(&number.as_u64()) => {
            number.as_u64().unwrap_or_default() as u8
        }
        _ => return Err(Problem::invalid("signal: say SIGNAL_SIGTERM or SIGNAL_SIGKILL")),
    };
    let program = sandbox.programs.find(&order.process)?;
    programs::signal(sandbox, &program, number).await?;
    Ok(json!({}))
}

async fn update(sandbox: &Sandbox, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let program = sandbox.programs.find(&order.process)?;
    if let Some(pty) = order.pty {
        let TtySize { rows, cols } = pty.size.fit();
        program.resize(rows, cols)?;
    }
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_on_a_variable_counts() {
        let note = Note {
            id: "i".to_owned(),
            alias: Some("base".to_owned()),
            image_env: vec!["PATH=/image".into(), "HOME=/x".into(), "A=image".into()],
            env: [("A".to_owned(), "box".to_owned()), ("B".to_owned(), "box".to_owned())].into(),
            ..Note::default()
        };
        let envs = [("B".to_owned(), "call".to_owned())].into();
        let mut all = environment(&note, "ann", &envs);
        let own = ["E2B_SANDBOX=true", "E2B_SANDBOX_ID=i", "E2B_TEMPLATE_ID=base"];
        assert!(own.iter().all(|own| all.iter().any(|one| one == own)), "{all:?}");
        all.retain(|one| !one.starts_with("E2B_"));
        assert_eq!(all, ["A=box", "B=call", "LOGNAME=ann", "PATH=/image", "USER=ann"]);
        assert!(environment(&Note::default(), "u", &BTreeMap::new()).contains(&PATH.to_owned()));
    }

    #[test]
    fn an_end_is_told_in_gos_words() {
        let end = |code, signal| ended(End { code, signal, is_late: false });
        assert_eq!(end(0, None)["status"], "exit status 0");
        assert!(end(0, None).get("error").is_none());
        assert_eq!(end(3, None)["error"], "exit status 3");
        assert_eq!(end(137, None)["exitCode"], 137);
        assert_eq!(
            (end(137, Some(9))["exitCode"].as_i64(), &end(137, Some(9))["status"]),
            (Some(-1), &json!("signal: killed"))
        );
    }

    #[test]
    fn a_terminal_has_a_size_that_it_can_have() {
        let fit = |rows, cols| Size { rows, cols }.fit();
        assert_eq!(fit(0, 80), TtySize { rows: 1, cols: 80 });
        assert_eq!(fit(u32::MAX, 70_000), TtySize { rows: u16::MAX, cols: u16::MAX });
    }
}
