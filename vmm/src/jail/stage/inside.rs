//! The stage's own process: it shuts the jail behind itself, and then does its work.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Stage;
use super::confine::confine;
use super::warden::Settings;
use super::wire::{self, Kind};
use crate::jail::IdentityMap;

/// The status of a Rust program that panicked.
const PANICKED: i32 = 101;

/// Why a stage gives no answer, as it says itself.
#[derive(Debug, Serialize, Deserialize)]
pub enum Fault {
    /// The input is at fault; the words are for whoever brought it.
    Input(String),
    /// The host refused memory.
    Memory,
    /// A file that it writes would be longer than it may.
    Output,
    /// The stage cannot work here.
    Jail(String),
}

/// What the host refuses: by its limits, or because something is wrong with the stage.
impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::FileTooLarge => Self::Output,
            io::ErrorKind::OutOfMemory => Self::Memory,
            _ => Self::Jail(error.to_string()),
        }
    }
}

impl Fault {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        // A string always has a form as JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// A request as the stage sees it.
#[derive(Debug)]
pub struct Task {
    control: UnixStream,
    request: Vec<u8>,
    descriptors: Vec<Option<OwnedFd>>,
}

// Only `prepare` makes one, once the jail is shut: whoever has a task is inside.
impl Task {
    /// The request.
    ///
    /// # Errors
    /// [`Fault::Jail`] if it is not of that form: caller and stage are the same executable.
    pub fn request<T: DeserializeOwned>(&self) -> Result<T, Fault> {
        serde_json::from_slice(&self.request)
            .map_err(|error| Fault::Jail(format!("the request is not understood: {error}")))
    }

    /// The descriptor at `index` of those that were given; each can be taken once.
    ///
    /// # Errors
    /// [`Fault::Jail`] if there is none.
    pub fn take(&mut self, index: usize) -> Result<OwnedFd, Fault> {
        self.descriptors
            .get_mut(index)
            .and_then(Option::take)
            .ok_or_else(|| Fault::Jail(format!("there is no descriptor {index}")))
    }

    /// Tells the caller how far it is, in a line of at most 4 KiB.
    pub fn progress(&self, line: &str) {
        // A caller that is gone ends this process.
        let _ = wire::send(&self.control, Kind::Progress, line.as_bytes());
    }

    /// The same for messages with descriptors ([`super::Running::link`] has the caller's end).
    ///
    /// # Errors
    /// [`Fault`] if there are no more descriptors.
    pub fn link(&self) -> Result<wire::Link, Fault> {
        Ok(wire::Link::of(&self.control)?)
    }

    /// The socket to the caller, for a stage that has more to say than one answer (a worker).
    /// The caller's end is [`super::Running::stream`].
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.control
    }
}

/// The body of the process; its exit status.
pub(super) fn main(
    settings: &Settings,
    stage: &Stage,
    map: IdentityMap,
    control: &UnixStream,
    warden: &OwnedFd,
) -> i32 {
    let outcome = prepare(settings, stage, map, control, warden).and_then(|mut task| {
        let work = catch_unwind(AssertUnwindSafe(|| (stage.work)(&mut task)));
        // The panic's message is on standard error.
        work.unwrap_or_else(|_| std::process::exit(PANICKED))
    });
    let sent = match &outcome {
        Ok(answer) => wire::send(control, Kind::Answer, answer),
        Err(fault) => wire::send(control, Kind::Fault, &fault.to_bytes()),
    };
    i32::from(sent.is_err())
}

fn prepare(
    settings: &Settings,
    stage: &Stage,
    map: IdentityMap,
    control: &UnixStream,
    warden: &OwnedFd,
) -> Result<Task, Fault> {
    let (descriptors, request) = wire::receive_request(control)?;
    let control = control.try_clone()?;
    // What it prints goes where its panics go.
    nix::unistd::dup2_stdout(io::stderr()).map_err(io::Error::from)?;
    let given: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    confine(settings, stage, map, &given, warden).map_err(Fault::Jail)?;
    wire::send(&control, Kind::Begun, &[])?;
    let descriptors = descriptors.into_iter().map(Some).collect();
    Ok(Task { control, request, descriptors })
}
