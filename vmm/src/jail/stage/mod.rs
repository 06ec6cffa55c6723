//! Stages: pieces of work on bytes that are somebody else's, each in a process of its own jail.
//!
//! ```text
//! caller                       warden                          stage
//! Order::start ── exec ──────> the same executable ── clone ─> own namespaces, own jail
//!   │  descriptors, request ── control socket ───────────────> work()
//!   │ <── progress, answer or refusal ───────────────────────────┘
//!   └──── leash (a pipe) ────> gone: kills the stage
//! ```
//!
//! The caller may have many threads: the process comes from an exec, with nothing of the caller's
//! memory or environment. The warden has one thread, makes the namespaces, waits, and ends with
//! the stage's status; it reads nothing that the stage writes. The stage dies with the warden
//! (prctl(2) PR_SET_PDEATHSIG), the warden ends it when the caller's end of the leash is gone,
//! and it is the first process of its pid namespace, so what it started dies with it.
//!
//! Inside there are no capabilities, no file system but an empty read-only one with the files and
//! folders that were named ([`Order::shown`]), no network unless it is kept ([`HostNetwork::Kept`]), no
//! descriptors but those that were given ([`Order::given`]), a list of system calls
//! ([`ThreadClass`]), Landlock where there is one, and limits ([`Limits`]).
//!
//! A program whose crates order stages calls [`entered`] first thing in `main`.

mod confine;
mod inside;
mod order;
mod warden;
mod wire;

pub use inside::{Fault, Task};
pub use order::{Given, Limits, Order, Running, Shown};
pub use warden::entered;
pub use wire::Link;

use super::ThreadClass;

/// The first argument of the warden's command line.
const VERB: &str = "jailed-stage";

/// One kind of work, as the executable knows it.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// The word for it in errors, on the command line and as the process's name: at most 15
    /// bytes.
    pub name: &'static str,
    /// Which system calls it may make.
    pub class: ThreadClass,
    /// Runs inside, on the process's one thread; it may start others where its class has the call.
    /// What it gives is the answer.
    pub work: fn(&mut Task) -> Result<Vec<u8>, Fault>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The input's fault, in the stage's words; without characters that a terminal acts on.
    #[error("{0}")]
    Refused(String),
    /// It did not answer in time and was killed.
    #[error("{stage} did not end before its deadline")]
    Deadline {
        /// Which.
        stage: &'static str,
    },
    /// Its memory bound was reached.
    #[error("{stage} needs more than its bound of {} MiB of memory", bytes >> 20)]
    Memory {
        /// Which.
        stage: &'static str,
        /// The bound.
        bytes: u64,
    },
    /// It wrote, or answered, more than its bound.
    #[error("{stage} gives more than its bound of {bytes} bytes")]
    Output {
        /// Which.
        stage: &'static str,
        /// The bound.
        bytes: u64,
    },
    /// It died or broke the protocol: a bug of ours that the input found, or something on the
    /// host that killed it.
    #[error("the jailed process `{stage}` {how}; this is a fault of exocell's, or of its host")]
    Died {
        /// Which.
        stage: &'static str,
        /// What wait(2) and its standard error said.
        how: String,
    },
    /// The jail could not be made.
    #[error("cannot start the jailed process `{stage}`: {why}")]
    Start {
        /// Which.
        stage: &'static str,
        /// What failed, and the remedy.
        why: String,
    },
}

/// `text` as a terminal can show it: what it would act on is written out, and what is longer than
/// 2,000 characters is cut.
fn escaped(text: &str) -> String {
    const CHARACTERS_MAX: usize = 2000;
    // What changes the direction of text, or is not seen.
    let is_hidden = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let mut clean = String::new();
    for c in text.chars().take(CHARACTERS_MAX) {
        match c {
            '\n' => clean.push(c),
            c if c.is_control() || is_hidden(c) => clean.extend(c.escape_default()),
            c => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_written_out() {
        assert_eq!(escaped("a\x1b[2Jb\u{202e}c\n"), "a\\u{1b}[2Jb\\u{202e}c\n");
        assert_eq!(escaped(&"x".repeat(5000)).len(), 2000);
    }
}
