//! One subject that runs the measuring program and answers requests.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// A subject starts within this, its memory warmed.
const START_MAX: Duration = Duration::from_secs(120);
/// The program ends a request that takes longer than 60 seconds by itself.
const ANSWER_MAX: Duration = Duration::from_secs(90);
const END_MAX: Duration = Duration::from_secs(10);

/// Why a request has no values.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This measurement does not work there.
    Reason(String),
    /// The subject is gone.
    Gone(String),
}

/// A running `micro serve`; ended with its owner.
pub struct Session {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Removes what is left where the program had to be killed.
    cleanup: Option<Command>,
}

impl Session {
    /// Starts `command` and waits until it is ready.
    pub fn start(
        mut command: Command,
        pinned: bool,
        cleanup: Option<Command>,
    ) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let spawned = if pinned { on_one_cpu(|| command.spawn()) } else { command.spawn() };
        let mut child = spawned.map_err(|error| error.to_string())?;
        let output = child.stdout.take();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
            // The owner may be gone; so is then the program.
            let _ = lines.map_while(Result::ok).try_for_each(|line| sender.send(line));
        });
        let session = Self { input: child.stdin.take(), child, lines, cleanup };
        match session.line(START_MAX) {
            Ok(line) if line == "ready" => Ok(session),
            Ok(line) => Err(format!("it said {line:?} instead of ready")),
            Err(why) => Err(why),
        }
    }

    fn line(&self, limit: Duration) -> Result<String, String> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("no answer within {limit:?}"),
            RecvTimeoutError::Disconnected => "it ended early".to_owned(),
        })
    }

    /// Asks for `samples` values of measurement `name`.
    pub fn ask(&mut self, name: &str, samples: u32) -> Result<Vec<f64>, Refusal> {
        let gone = |why: String| Refusal::Gone(why);
        let input = self.input.as_mut().ok_or_else(|| gone("its input is closed".to_owned()))?;
        writeln!(input, "{name} {samples}").map_err(|error| gone(error.to_string()))?;
        let line = self.line(ANSWER_MAX).map_err(gone)?;
        values(&line, name)
    }
}

/// The values of a line `NAME VALUE...` or `NAME error REASON`.
fn values(line: &str, name: &str) -> Result<Vec<f64>, Refusal> {
    let odd = || Refusal::Gone(format!("it answered {line:?}"));
    let rest = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(' ')).ok_or_else(odd)?;
    if let Some(reason) = rest.strip_prefix("error ") {
        return Err(Refusal::Reason(reason.to_owned()));
    }
    rest.split(' ').map(|word| word.parse::<f64>().map_err(|_| odd())).collect()
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.input.take()); // end of input ends the program
        let until = Instant::now() + END_MAX;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = self.child.kill(); // it may have ended this instant
                let _ = self.child.wait();
                let _ = self.cleanup.as_mut().map(Command::output);
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Runs `start` with this thread on the last CPU it may use, which what it
/// starts inherits.
fn on_one_cpu<T>(start: impl FnOnce() -> T) -> T {
    let own = Pid::from_raw(0);
    let Ok(before) = sched_getaffinity(own) else { return start() };
    let last = (0..CpuSet::count()).rev().find(|cpu| before.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    if last.is_none_or(|cpu| one.set(cpu).is_err()) || sched_setaffinity(own, &one).is_err() {
        return start();
    }
    let started = start();
    // It worked a moment ago with fewer CPUs.
    let _ = sched_setaffinity(own, &before);
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn values_are_read_and_nonsense_is_not() {
        assert_eq!(values("a 1.5 2", "a"), Ok(vec![1.5, 2.0]));
        assert_eq!(values("a error no b", "a"), Err(Refusal::Reason("no b".to_owned())));
        for line in ["ab 1", "a", "b 1", "a 1 x", ""] {
            assert!(matches!(values(line, "a"), Err(Refusal::Gone(_))), "{line}");
        }
    }

    #[test]
    fn a_session_answers_until_the_program_ends() {
        let script = "echo ready; read r; echo a 1; exit";
        let mut session = Session::start(shell(script), false, None).unwrap();
        assert_eq!(session.ask("a", 1), Ok(vec![1.0]));
        assert!(matches!(session.ask("a", 1), Err(Refusal::Gone(_))));
        assert!(Session::start(shell("echo hello"), false, None).is_err());
        assert!(Session::start(shell("exit 1"), false, None).is_err());
    }

    #[test]
    fn a_pinned_program_has_one_cpu_and_we_keep_ours() {
        let count = || {
            sched_getaffinity(Pid::from_raw(0)).map(|set| {
                (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).count()
            })
        };
        let before = count().unwrap();
        let script = "echo ready; read r; echo a $(nproc)";
        let mut session = Session::start(shell(script), true, None).unwrap();
        assert_eq!(session.ask("a", 1), Ok(vec![1.0]));
        assert_eq!(count().unwrap(), before);
    }
}
