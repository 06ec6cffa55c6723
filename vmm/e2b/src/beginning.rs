//! What a template runs in each of its sandboxes before a client has it.
//!
//! E2B runs the start command once, in the template's build, and keeps the memory. Here it is run
//! in each sandbox, without what a client says of its own. A ready command that only sleeps
//! (`sleep 20`, which SDKs make of a Dockerfile's `CMD`) says nothing of when the start command is
//! ready. It is slept once; then it is looked at what the start command has come to, and the next
//! sandboxes of that image are ready when they have come to the same:
//!
//! ```text
//! first sandbox:  start ─> sleep ─> looked at: listens at …, has ended, or neither
//! next ones:      start ─> looked at again and again, no longer than the sleep ─> ready
//! ```
//! No tenant reaches a sandbox before that, and what one's sandboxes have come to is remembered for
//! that tenant alone. What the pool's have come to is remembered for all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::images::ImageConfig;
use tokio::time::timeout;

use crate::envd::process;
use crate::error::{Problem, Result};
use crate::sandbox::Sandbox;
use crate::settled::State;
use crate::state::Server;

/// Labels of an image, see [`Beginning`].
const START: &str = "exocell.e2b.start";
const READY: &str = "exocell.e2b.ready";
/// How long a sandbox may take to be ready, and how soon it is looked again.
const READY_MAX: Duration = Duration::from_secs(60);
const READY_AGAIN: Duration = Duration::from_millis(100);
/// How long the guest may take beyond that to start a program and to say what listens.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Sockets that are remembered of an image.
const SOCKETS_MAX: usize = 64;
/// Tells which sockets listen, by what every shell has built in (proc(5)).
const LISTENING: &str = "for file in tcp tcp6 unix; do \
while read -r line; do echo \"$file $line\"; done < /proc/net/$file; done 2>/dev/null; :";

/// What a template's image says of its sandboxes, in labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning {
    /// What runs in the background from the start on.
    start: Option<String>,
    /// What is run again and again until it succeeds: then the sandbox is ready.
    ready: Option<String>,
}

impl Beginning {
    pub fn of(image: &ImageConfig) -> Self {
        let label = |name: &str| image.labels.get(name).filter(|text| !text.is_empty()).cloned();
        Self { start: label(START), ready: label(READY) }
    }

    /// Whether something of the template's own runs.
    pub fn runs(&self) -> bool {
        self.start.is_some() || self.ready.is_some()
    }

    /// Runs it, until the sandbox is ready.
    ///
    /// # Errors
    /// It was not in time.
    pub async fn run(&self, server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let whole = timeout(READY_MAX + ANSWER_MAX, self.run_all(server, sandbox));
        whole.await.unwrap_or_else(|_| Err(late("its guest did not answer")))
    }

    async fn run_all(&self, server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let started = match &self.start {
            Some(line) => Some(process::begin(server, sandbox, line).await?),
            None => None,
        };
        let pid = started.as_ref().map(|(program, _)| program.command.pid);
        // What it says is nobody's.
        drop(started);
        let Some(line) = &self.ready else { return Ok(()) };
        if let Some(time) = only_sleeps(line) {
            return self.settle(server, sandbox, pid, time).await;
        }
        let ready = async {
            while process::run(server, sandbox, line).await?.0 != 0 {
                tokio::time::sleep(READY_AGAIN).await;
            }
            Ok(())
        };
        // One that goes on for ever does not succeed either.
        let ready = timeout(READY_MAX, ready).await;
        ready.unwrap_or_else(|_| Err(late("its ready command did not succeed")))
    }

    async fn settle(
        &self,
        server: &Arc<Server>,
        sandbox: &Arc<Sandbox>,
        pid: Option<u32>,
        time: Duration,
    ) -> Result<()> {
        let until = Instant::now() + time.min(READY_MAX);
        let note = sandbox.note();
        // Without the same network a start command may come to something else.
        let kind = format!("{} {}", note.template, note.rules.join(" "));
        let known = server.settled.of(&note.tenant, &kind);
        if let Some(known) = known {
            while Instant::now() < until && !known.is_reached_by(&look(server, sandbox, pid).await?)
            {
                tokio::time::sleep(READY_AGAIN).await;
            }
            return Ok(());
        }
        tokio::time::sleep(until.saturating_duration_since(Instant::now())).await;
        let state = look(server, sandbox, pid).await?;
        server.settled.set(&note.tenant, kind, state);
        Ok(())
    }
}

fn late(why: &str) -> Problem {
    let most = READY_MAX.as_secs();
    Problem::internal(format!("the template's sandbox was not ready within {most} s: {why}"))
}

/// How long a line sleeps that does nothing else.
fn only_sleeps(line: &str) -> Option<Duration> {
    let seconds = line.trim().strip_prefix("sleep")?.strip_prefix([' ', '\t'])?.trim();
    let is_plain = seconds.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = seconds.parse().ok().filter(|_| is_plain)?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// What the start command has come to by now.
async fn look(server: &Arc<Server>, sandbox: &Arc<Sandbox>, pid: Option<u32>) -> Result<State> {
    let (_, said) = process::run(server, sandbox, LISTENING).await?;
    let runs = sandbox.programs.all().iter().any(|program| Some(program.command.pid) == pid);
    Ok(State { sockets: listening(&String::from_utf8_lossy(&said)), has_ended: !runs })
}

/// The sockets that listen, in the lines that [`LISTENING`] says. A guest says what it likes.
fn listening(text: &str) -> BTreeSet<String> {
    let socket = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            // State 0A; no matter at which address, for a server may be at one of the two kinds.
            [tcp, _, local, _, "0A", ..] if tcp.starts_with("tcp") => {
                local.rsplit_once(':').map(|(_, port)| port.to_owned())
            }
            // Flag __SO_ACCEPTCON.
            ["unix", _, _, _, flags, _, _, _, path] if flags.ends_with("10000") => {
                Some((*path).to_owned())
            }
            _ => None,
        }
    };
    text.lines().filter_map(socket).filter(|name| name.len() <= 256).take(SOCKETS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_only_sleeps_is_known() {
        assert_eq!(only_sleeps("sleep 20"), Some(Duration::from_secs(20)));
        assert_eq!(only_sleeps(" sleep  0.5 "), Some(Duration::from_millis(500)));
        for other in ["sleep", "sleep x", "sleep 1 && true", "sleep -1", "sleepy 1", "true"] {
            assert_eq!(only_sleeps(other), None, "{other}");
        }
        assert_eq!(only_sleeps(&format!("sleep {}", "9".repeat(400))), None);
    }

    #[test]
    fn what_listens_is_read_and_what_has_come_as_far_is_ready() {
        let text = "tcp sl local_address rem_address st\n\
            tcp 0: 00000000:1F90 00000000:0000 0A 00000000:00000000\n\
            tcp 1: 0100007F:1F91 00000000:0000 01 00000000:00000000\n\
            tcp6 0: 00000000000000000000000000000000:0050 0:0 0A 0\n\
            unix 0000000000000000: 00000002 00000000 00010000 0001 01 1234 /run/x.sock\n\
            unix 0000000000000000: 00000003 00000000 00000000 0001 03 1235\n";
        let sockets = listening(text);
        assert_eq!(sockets.iter().collect::<Vec<_>>(), ["/run/x.sock", "0050", "1F90"]);
        let state = State { sockets: sockets.clone(), has_ended: false };
        assert!(state.is_reached_by(&State { has_ended: true, ..state.clone() }));
        assert!(!state.is_reached_by(&State::default()));
        assert!(State::default().is_reached_by(&state));
        assert!(!State { has_ended: true, ..State::default() }.is_reached_by(&state));
        assert_eq!(listening(&"tcp 0: 0:00 0 0A\n".repeat(1000)).len(), 1);
    }
}
