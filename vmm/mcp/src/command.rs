//! Commands in a sandbox: their output is bounded, and so is their time.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_cell::agent::client::{self, ClientError, ExecEvent, ExecInput, ExecOutput};
use exocell_cell::agent::{Exec, Patient};
use rmcp::RoleServer;
use rmcp::service::RequestContext;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::{sleep, timeout};

use crate::error::{Refusal, blocking};
use crate::sandbox::Sandbox;

/// Seconds that a command may take where nobody says, and at most.
const TIME_DEFAULT: u64 = 120;
const TIME_MAX: u64 = 3600;
/// Bytes that are kept of each stream where nobody says, and at most.
const OUTPUT_DEFAULT: usize = 32 << 10;
const OUTPUT_MAX: usize = 1 << 20;
/// How long a killed program may take to be gone.
const KILL_MAX: Duration = Duration::from_secs(5);

/// What a client says.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunCommand {
    /// The sandbox' id.
    pub sandbox: String,
    /// A line for /bin/sh.
    pub command: String,
    /// The working directory, an absolute path. Default: the image's.
    pub workdir: Option<String>,
    /// NAME or UID, with :GROUP or :GID. Default: the image's.
    pub user: Option<String>,
    /// Variables of the environment.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// What the command reads on its standard input. Default: nothing.
    pub stdin: Option<String>,
    /// Seconds after which it is killed, 1 to 3600. Default: 120.
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: Option<u64>,
    /// Bytes of each stream that are told: of more, the first and the last. Default: 32768.
    #[schemars(range(min = 0, max = 1_048_576))]
    pub output_bytes: Option<usize>,
}

/// What came of a command.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct Ran {
    /// The exit status, or 128 + the signal that ended it. Null: it was out of time.
    pub exit_code: Option<u8>,
    /// Whether it was out of time, and was killed. What it wrote until then is told.
    pub timed_out: bool,
    pub stdout: String,
    pub stderr: String,
    /// Bytes that were left out in the middle of either.
    pub stdout_left_out: u64,
    pub stderr_left_out: u64,
    /// Whether the kernel of the sandbox ended a process for lack of memory.
    pub out_of_memory: bool,
}

/// The first and the last bytes of a stream.
#[derive(Debug, Default)]
struct Kept {
    most: usize,
    first: Vec<u8>,
    last: std::collections::VecDeque<u8>,
    left_out: u64,
}

impl Kept {
    fn of(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    fn add(&mut self, bytes: &[u8]) {
        let half = self.most.div_ceil(2);
        let room = half.saturating_sub(self.first.len()).min(bytes.len());
        let (head, rest) = bytes.split_at(room);
        self.first.extend_from_slice(head);
        self.last.extend(rest);
        let too_many = self.last.len().saturating_sub(self.most - half);
        self.last.drain(..too_many);
        self.left_out += too_many as u64;
    }

    fn text(&self) -> String {
        let tail: Vec<u8> = self.last.iter().copied().collect();
        match self.left_out {
            0 => String::from_utf8_lossy(&[self.first.as_slice(), &tail].concat()).into_owned(),
            bytes => format!(
                "{}\n[{bytes} bytes are left out here]\n{}",
                String::from_utf8_lossy(&self.first),
                String::from_utf8_lossy(&tail)
            ),
        }
    }
}

/// What is known of a program while it runs.
#[derive(Default)]
struct Heard {
    stdout: Kept,
    stderr: Kept,
    guest_pid: Option<u32>,
    /// To break it off.
    stream: Option<UnixStream>,
    exit: Option<(u8, bool)>,
}

type Shared = Arc<Mutex<Heard>>;

fn lock(heard: &Shared) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a command until it ends, is out of time, or its client wants it no longer.
///
/// # Errors
/// It cannot be started, and its cell ended before it did.
pub async fn run(
    sandbox: &Arc<Sandbox>,
    wanted: RunCommand,
    context: &RequestContext<RoleServer>,
) -> Result<Ran, Refusal> {
    let limit = match wanted.timeout_seconds.unwrap_or(TIME_DEFAULT) {
        seconds @ 1..=TIME_MAX => Duration::from_secs(seconds),
        seconds => {
            return Err(Refusal::new(format!("timeout_seconds: {seconds} is not 1 to {TIME_MAX}")));
        }
    };
    let most = match wanted.output_bytes.unwrap_or(OUTPUT_DEFAULT) {
        bytes if bytes <= OUTPUT_MAX => bytes,
        bytes => {
            return Err(Refusal::new(format!("output_bytes: {bytes} is more than {OUTPUT_MAX}")));
        }
    };
    let begun = Heard { stdout: Kept::of(most), stderr: Kept::of(most), ..Heard::default() };
    let heard: Shared = Arc::new(Mutex::new(begun));
    let (own, of_thread) = (sandbox.clone(), heard.clone());
    let running = blocking(move || {
        let (guest, spec) = own.guest()?;
        let set = wanted.env.iter().map(|(name, value)| format!("{name}={value}"));
        let env = own.environment(&spec, &set.collect::<Vec<_>>());
        follow(guest, env, wanted, &of_thread)
    });
    tokio::pin!(running);
    let timed_out = tokio::select! {
        ended = &mut running => { ended?; false }
        () = sleep(limit) => true,
        () = context.ct.cancelled() => true,
    };
    if timed_out {
        stop(sandbox, &heard).await;
        // Whatever it says now, it was out of time.
        let _ = timeout(KILL_MAX, &mut running).await;
        if let Some(stream) = &lock(&heard).stream {
            // A guest that does not let go of it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
    let heard = lock(&heard);
    Ok(Ran {
        exit_code: heard.exit.map(|(code, _)| code).filter(|_| !timed_out),
        timed_out,
        stdout: heard.stdout.text(),
        stderr: heard.stderr.text(),
        stdout_left_out: heard.stdout.left_out,
        stderr_left_out: heard.stderr.left_out,
        out_of_memory: heard.exit.is_some_and(|(_, out_of_memory)| out_of_memory),
    })
}

/// Starts the program and hears it to its end. Blocks.
fn follow(
    guest: Patient,
    env: Vec<String>,
    wanted: RunCommand,
    heard: &Shared,
) -> Result<(), Refusal> {
    if let Some(name) = wanted.env.keys().find(|name| name.is_empty() || name.contains('=')) {
        return Err(Refusal::new(format!("env: {name:?} is no variable's name")));
    }
    let exec = Exec {
        args: ["/bin/sh", "-c", &wanted.command].map(str::to_owned).to_vec(),
        env,
        cwd: wanted.workdir.unwrap_or_default(),
        user: wanted.user.unwrap_or_default(),
        privileged: false,
        rules: None,
        tty: None,
        stdin: wanted.stdin.is_some(),
        lasting: false,
    };
    let started = client::exec(&guest, &guest, &exec)?;
    let guest_pid = started.guest_pid;
    drop(started);
    let local = |error| Refusal::new(format!("cannot follow the command: {error}"));
    let stream = guest.into_endless().map_err(local)?;
    {
        let mut heard = lock(heard);
        heard.guest_pid = Some(guest_pid);
        heard.stream = Some(stream.try_clone().map_err(local)?);
    }
    std::thread::scope(|scope| {
        if let Some(text) = &wanted.stdin {
            let input = ExecInput::new(&stream);
            // A program need not read its input.
            scope.spawn(move || input.pump_stdin(&mut text.as_bytes()));
        }
        let heard = hear(&mut ExecOutput::new(&stream), heard);
        if heard.is_err() {
            // Nothing else ends whoever still writes.
            let _ = stream.shutdown(Shutdown::Both);
        }
        heard
    })
}

fn hear(output: &mut ExecOutput<&UnixStream>, heard: &Shared) -> Result<(), Refusal> {
    loop {
        match output.event() {
            Ok(ExecEvent::Stdout(bytes)) => lock(heard).stdout.add(&bytes),
            Ok(ExecEvent::Stderr(bytes)) => lock(heard).stderr.add(&bytes),
            Ok(ExecEvent::Exited(code)) => {
                lock(heard).exit = Some((code, output.is_out_of_memory()));
                return Ok(());
            }
            Err(ClientError::Closed) => {
                return Err(Refusal::new("the sandbox ended before the command did"));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Kills the program and all of its group.
async fn stop(sandbox: &Arc<Sandbox>, heard: &Shared) {
    let Some(guest_pid) = lock(heard).guest_pid else { return };
    let killed = sandbox.ask(move |guest, _| {
        let guest = guest.within(KILL_MAX);
        client::kill_group(&guest, &guest, guest_pid).map_err(Refusal::from)
    });
    // One that is gone already cannot be killed.
    let _ = killed.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(most: usize, pieces: &[&str]) -> Kept {
        let mut kept = Kept::of(most);
        pieces.iter().for_each(|piece| kept.add(piece.as_bytes()));
        kept
    }

    #[test]
    fn what_fits_is_told_whole() {
        assert_eq!(kept(6, &["abc", "def"]).text(), "abcdef");
        assert_eq!(kept(0, &[""]).text(), "");
    }

    #[test]
    fn of_more_the_first_and_the_last_are_told() {
        let of = kept(4, &["ab", "cdefg", "hi"]);
        assert_eq!((of.left_out, of.text().as_str()), (5, "ab\n[5 bytes are left out here]\nhi"));
        let of = kept(3, &["abcdef"]);
        assert_eq!((of.left_out, of.first.len(), of.last.len()), (3, 2, 1));
        assert_eq!(kept(0, &["abc"]).left_out, 3);
    }

    #[test]
    fn a_character_that_is_cut_does_no_harm() {
        assert!(kept(3, &["ää", "öö"]).text().contains("bytes are left out"));
    }
}
