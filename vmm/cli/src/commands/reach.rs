//! Reaching into a cell's files, whether its program runs or not. For one that has ended a cell
//! without a program is started on the disk that it left:
//!
//! ```text
//! running ──> its guest
//! ended   ──> idle cell on its disk ── dropped ──> the disk is whole
//! ```
//! Nobody starts the cell meanwhile: a disk has one guest at a time (`exocell_cell::disk`).

use std::os::unix::net::UnixStream;

use exocell_cell::agent::Patient;
use exocell_cell::control::Client;
use exocell_cell::launch::{self, Request, Workload};
use exocell_cell::{CellError, CellSpec, Layout, Record, State, Strength};

use super::run::must_run;
use crate::session;

/// A cell whose guest gives and takes files.
pub struct Reach {
    /// The cell's own spec.
    pub spec: CellSpec,
    /// Whose guest it is: the cell's own record, or that of the idle one.
    pub record: Record,
    idle: Option<UnixStream>,
}

impl Drop for Reach {
    fn drop(&mut self) {
        if let Some(session) = self.idle.take() {
            drop(session);
            self.record.await_release();
        }
    }
}

impl Reach {
    /// Reaches into the cell named `key`. The caller must have one thread.
    ///
    /// # Errors
    /// It is an isolate, about to start, or has ended and left no files.
    pub fn cell(layout: &Layout, key: &str) -> Result<Self, CellError> {
        let request = Request::begin();
        let (record, spec, status) = Record::find(layout, key)?;
        if spec.strength == Strength::Isolate {
            return Err(CellError::Usage(format!(
                "{key} is an isolate: it has no file system and no guest to reach into"
            )));
        }
        if status.state != State::Exited || record.is_restarting(&spec, &status) {
            must_run(&record, status.state)?;
            return Ok(Self { spec, record, idle: None });
        }
        let mut shown = spec.showing(disk(&record, &spec)?)?;
        let (workload, caps) = Workload::plan(layout, &mut shown, None, Vec::new())?;
        let launched = launch::launch(layout, shown, caps, workload, request)?;
        let reach = Self { spec, record: launched.record, idle: Some(launched.session) };
        if let Some(session) = &reach.idle {
            session::await_start(session)?;
        }
        Ok(reach)
    }

    /// A stream to the guest.
    ///
    /// # Errors
    /// The cell does not answer.
    pub fn guest(&self) -> Result<Patient, CellError> {
        Client::connect(&self.record)?.guest_stream()
    }

    /// The same, to change files.
    ///
    /// # Errors
    /// What is written would be lost: the cell has ended, and its root cannot be written.
    pub fn guest_to_write(&self) -> Result<Patient, CellError> {
        match self.idle.is_some() && self.spec.read_only {
            true => Err(CellError::Usage(format!(
                "the root of cell {} cannot be written (--read-only)",
                self.spec.name
            ))),
            false => self.guest(),
        }
    }
}

/// The disk that an ended cell left; none of one that had none.
fn disk(record: &Record, spec: &CellSpec) -> Result<Option<std::path::PathBuf>, CellError> {
    let name = &spec.name;
    if spec.within.is_some() {
        return Err(CellError::Usage(format!(
            "cell {name} has ended, and its files are in the guest of another: exocell start it first"
        )));
    }
    if spec.read_only {
        return Ok(None);
    }
    let path = spec.disk.clone().unwrap_or_else(|| record.disk());
    match path.exists() {
        true => Ok(Some(path)),
        false => Err(CellError::Usage(format!(
            "cell {name} has ended and left no files: one with a secret keeps none, and so does \
             one that could not start"
        ))),
    }
}
