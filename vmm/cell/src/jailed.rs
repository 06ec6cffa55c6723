//! What jailed processes say that read or send images: how far they are, and why they failed.

use std::io;
use std::time::Duration;

use exocell_images::{Digest, Fault as Whose, ImageError, Progress, ProgressEvent, Refusal};
use exocell_vmm::jail::stage::{StageError, Task};
use serde::{Deserialize, Serialize};

/// The longest that making or sending an image may take.
pub const TIME_MAX: Duration = Duration::from_secs(3600);
/// Packed bytes between two lines of progress.
const STEP_BYTES: u64 = 1 << 20;

pub fn host(what: &str, source: io::Error) -> ImageError {
    ImageError::Io { what: what.to_owned(), source }
}

pub fn another_answer() -> ImageError {
    let message = "the process that reads images gave another answer than it was asked for";
    ImageError::Refused(Refusal { fault: Whose::Other, message: message.to_owned() })
}

pub fn refused(error: &StageError) -> ImageError {
    let message = match error {
        StageError::Deadline { .. } => format!(
            "to read or send the image takes more than {} minutes; make it smaller",
            TIME_MAX.as_secs() / 60
        ),
        StageError::Memory { bytes, .. } => format!(
            "to read or send the image takes more than {} MiB of memory; make an image of fewer files",
            bytes >> 20
        ),
        error => error.to_string(),
    };
    ImageError::Refused(Refusal { fault: Whose::Other, message })
}

/// A line of progress.
#[derive(Serialize, Deserialize)]
pub enum Step {
    Layer { index: usize, count: usize, bytes: Option<u64> },
    Bytes(u64),
    Skipped { path: String, why: String },
    Present(Digest),
    Finishing,
}

impl Step {
    fn of(event: &ProgressEvent<'_>) -> Option<Self> {
        match event {
            ProgressEvent::Layer { index, count, bytes } => {
                Some(Self::Layer { index: *index, count: *count, bytes: *bytes })
            }
            ProgressEvent::Bytes(bytes) => Some(Self::Bytes(*bytes)),
            ProgressEvent::Skipped { path, why } => {
                Some(Self::Skipped { path: (*path).to_owned(), why: (*why).to_owned() })
            }
            ProgressEvent::Present { id } => Some(Self::Present(*id)),
            ProgressEvent::Finishing => Some(Self::Finishing),
            _ => None,
        }
    }

    /// Tells what a line of progress says, if it says something.
    pub fn hear(line: &str, progress: &mut dyn Progress) {
        if let Ok(step) = serde_json::from_str::<Self>(line) {
            step.tell(progress);
        }
    }

    fn tell(&self, progress: &mut dyn Progress) {
        progress.event(match self {
            Self::Layer { index, count, bytes } => {
                ProgressEvent::Layer { index: *index, count: *count, bytes: *bytes }
            }
            Self::Bytes(bytes) => ProgressEvent::Bytes(*bytes),
            Self::Skipped { path, why } => ProgressEvent::Skipped { path, why },
            Self::Present(id) => ProgressEvent::Present { id: *id },
            Self::Finishing => ProgressEvent::Finishing,
        });
    }
}

/// Sends steps to the caller, few of them.
pub struct Teller<'a> {
    task: &'a Task,
    bytes: u64,
}

impl<'a> Teller<'a> {
    pub fn of(task: &'a Task) -> Self {
        Self { task, bytes: 0 }
    }

    fn send(&self, step: &Step) {
        if let Ok(line) = serde_json::to_string(step) {
            self.task.progress(&line);
        }
    }
}

impl Progress for Teller<'_> {
    fn event(&mut self, event: ProgressEvent<'_>) {
        if let ProgressEvent::Bytes(bytes) = event {
            self.bytes += bytes;
            if self.bytes < STEP_BYTES {
                return;
            }
        }
        if self.bytes > 0 {
            let bytes = std::mem::take(&mut self.bytes);
            self.send(&Step::Bytes(bytes));
        }
        if let Some(step) = Step::of(&event).filter(|step| !matches!(step, Step::Bytes(_))) {
            self.send(&step);
        }
    }
}
