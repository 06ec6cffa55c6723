//! How a run ended, in a value and in words.

use crate::preempt::cancel::CancelReason;
use exocell_xgate::format_bytes;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It returned (0) or called `proc_exit`.
    Exited(i32),
    /// It trapped; the words are wasmtime's.
    Trap(String),
    /// Its memory limit stopped it.
    OutOfMemory {
        /// The limit, in bytes.
        limit: u64,
    },
    /// Its instructions were used up.
    OutOfFuel,
    /// It was ended from outside.
    Ended(CancelReason),
}

impl Outcome {
    /// The host could not do what the call needs.
    pub(crate) fn failed(error: &wasmtime::Error) -> Self {
        Self::Trap(format!("{error:#}"))
    }

    /// The exit status a shell would show: a trap is 134 (128 + SIGABRT), all that ends it from
    /// outside or by a limit is 137 (128 + SIGKILL).
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exited(code) => *code as u8,
            Self::Trap(_) => 134,
            Self::OutOfMemory { .. } | Self::OutOfFuel | Self::Ended(_) => 137,
        }
    }

    /// What happened, if it was not the program's own end.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Exited(_) => None,
            Self::Trap(text) => Some(text.clone()),
            Self::OutOfMemory { limit } => {
                Some(format!("the memory limit of {} was reached", format_bytes(*limit)))
            }
            Self::OutOfFuel => Some("the instructions granted by `fuel` are used up".to_owned()),
            Self::Ended(CancelReason::Deadline) => {
                Some("the deadline granted by `time` is over".to_owned())
            }
            Self::Ended(CancelReason::Revoked) => {
                Some("a capability it needs was revoked".to_owned())
            }
            Self::Ended(CancelReason::Stopped) => Some("it was stopped".to_owned()),
            Self::Ended(CancelReason::CpuTime) => Some("its CPU time is used up".to_owned()),
        }
    }
}
