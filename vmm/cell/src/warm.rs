//! Warm cells: booted, their program not yet said. A pool keeps some, and a
//! run that wants just such a cell takes one instead of waiting for a boot.
//!
//! ```text
//! pool ── launch(spec.warm = key) ──> supervisor ── guest ready ──> waits
//! run  ── key, Order on the control socket ──> taken: spec, program, name of its own
//! ```
//! A cell is taken once, and has run nothing before but `true` of its image,
//! where there is one, after which the next program starts faster. It waits as long as its
//! pool's end of the session is open: a pool that is gone, however it ended,
//! leaves no cell that waits.

use std::os::unix::net::UnixStream;

use exocell_agent::TtySize;
use exocell_images::{ImageRecord, Store};
use exocell_xgate::CapabilitySet;

use crate::control::{Client, ControlRequest, Order};
use crate::record::Registry;
use crate::{CellError, CellSpec, Layout, Record, State, Strength, initramfs, plan};

/// A warm cell that is the caller's now.
pub struct Taken {
    pub record: Record,
    pub spec: CellSpec,
    /// Carries the program's session; see [`crate::control`].
    pub session: UnixStream,
}

/// What two cells must have in common to be the same while no program runs in
/// them: all but the deadline, which counts from the request.
///
/// # Errors
/// Why a cell as `spec` and `caps` describe it cannot be warmed: what is opened
/// for it before its start is its own.
pub fn key(layout: &Layout, spec: &CellSpec, caps: &CapabilitySet) -> Result<String, CellError> {
    shape(layout, spec, caps).map(|(key, _)| key)
}

fn shape(
    layout: &Layout,
    spec: &CellSpec,
    caps: &CapabilitySet,
) -> Result<(String, ImageRecord), CellError> {
    let own = [
        (spec.strength != Strength::Vm, "an isolate"),
        (!caps.folders().is_empty(), "a folder"),
        (caps.network().is_some(), "a network"),
        (spec.hostname.is_some(), "a host name of its own"),
    ];
    if let Some((_, what)) = own.iter().find(|(has, _)| *has) {
        return Err(CellError::Usage(format!(
            "a cell with {what} cannot be kept warm; leave it out"
        )));
    }
    let image = Store::open(layout.images())?.resolve(&spec.image)?;
    let mut caps: serde_json::Value = serde_json::from_str(&caps.to_json()).unwrap_or_default();
    if let Some(sections) = caps.as_object_mut() {
        sections.remove("time");
    }
    let parts = serde_json::json!({
        "image": image.id.to_string(),
        "kernel": plan::kernel(layout)?,
        "initramfs": initramfs::prepare(layout)?,
        "read_only": spec.read_only,
        "pager": spec.pager,
        "intra": spec.intra,
        "capabilities": caps,
    });
    Ok((parts.to_string(), image))
}

/// Takes a warm cell for `spec` if there is one; it then is that cell, but for
/// the id, which it keeps.
///
/// # Errors
/// [`CellError::NameTaken`], and what is wrong with the program.
pub fn take(
    layout: &Layout,
    spec: &CellSpec,
    caps: &CapabilitySet,
    tty: Option<TtySize>,
) -> Result<Option<Taken>, CellError> {
    // What cannot be warm is not in a pool; what is wrong with it is said elsewhere.
    let Ok((key, image)) = shape(layout, spec, caps) else { return Ok(None) };
    let is_warm = |known: &CellSpec| known.warm.as_ref() == Some(&key);
    if !Record::all(layout)?.iter().any(|(_, known, _)| is_warm(known)) {
        return Ok(None);
    }
    let exec = plan::exec(spec, caps, &image.config, tty)?;
    // Nobody takes the name meanwhile.
    let _registry = Registry::lock(layout)?;
    let all = Record::all(layout)?;
    if all.iter().any(|(_, known, _)| known.name == spec.name) {
        return Err(CellError::NameTaken(spec.name.clone()));
    }
    for (record, known, status) in all {
        let is_ready = status.state == State::Created && status.times.guest_ready_us > 0;
        if !is_warm(&known) || !is_ready {
            continue;
        }
        let spec = CellSpec { id: record.id.clone(), ..spec.clone() };
        let deadline_ms = caps.deadline().map(|limit| limit.as_millis() as u64);
        let order = Order { spec: spec.clone(), exec: exec.clone(), deadline_ms };
        // Someone else may have been faster, or its pool has gone.
        if let Ok(session) = ask(&record, order) {
            return Ok(Some(Taken { record, spec, session }));
        }
    }
    Ok(None)
}

fn ask(record: &Record, order: Order) -> Result<UnixStream, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Take(Box::new(order)))?;
    Ok(client.into_stream())
}
