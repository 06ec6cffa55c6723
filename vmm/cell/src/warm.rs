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

use exocell_agent::{Start, TtySize};
use exocell_images::{ImageRecord, Store};
use exocell_xgate::CapabilitySet;

use crate::control::{Client, ControlRequest, Order};
use crate::health::Check;
use crate::record::{Registry, check_name_free};
use crate::{CellError, CellSpec, Layout, Record, State, Status, Strength, initramfs, plan};

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
        (spec.within.is_some(), "the guest of another"),
        (!caps.folders().is_empty(), "a folder"),
        (caps.network().is_some(), "a network"),
        (spec.hostname.is_some(), "a host name of its own"),
        (spec.disk.is_some(), "a disk that is kept"),
        (spec.keeps_no_log, "no log"),
        (!spec.settings.hosts.is_empty(), "hosts of its own"),
        (spec.settings.domain_name.is_some(), "a domain name"),
    ];
    if let Some((_, what)) = own.iter().find(|(has, _)| *has) {
        return Err(CellError::Usage(format!(
            "a cell with {what} cannot be kept warm; leave it out"
        )));
    }
    let image = Store::open(layout.images())?.resolve(spec.image_name())?;
    let mut caps: serde_json::Value = serde_json::from_str(&caps.to_json()).unwrap_or_default();
    if let Some(sections) = caps.as_object_mut() {
        sections.remove("time");
    }
    let parts = serde_json::json!({
        "image": image.id.to_string(),
        "kernel": plan::kernel::path(layout, spec.platform)?,
        "platform": spec.platform,
        "initramfs": initramfs::prepare(layout)?,
        "read_only": spec.read_only,
        "pager": spec.pager,
        "memory_guarantee": spec.memory_guarantee,
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
    let start = plan::start(spec, caps, &image.config, tty)?;
    let health = plan::health(spec, &image.config)?;
    // Nobody takes the name meanwhile.
    let _registry = Registry::lock(layout)?;
    let all = Record::all(layout)?;
    check_name_free(layout, &all, &spec.name, "")?;
    for (record, known, status) in all {
        if !is_warm(&known) || !is_ready(&status) {
            continue;
        }
        // Someone else may have been faster, or its pool has gone.
        if let Ok(taken) = give(record, spec, caps, (start.clone(), health.clone())) {
            return Ok(Some(taken));
        }
    }
    Ok(None)
}

fn is_ready(status: &Status) -> bool {
    status.state == State::Created && status.times.guest_ready_us > 0
}

/// Makes the warm cell `record` the one that `spec` describes.
fn give(
    record: Record,
    spec: &CellSpec,
    caps: &CapabilitySet,
    (start, health): (Start, Option<Check>),
) -> Result<Taken, CellError> {
    let spec = CellSpec { id: record.id.clone(), ..spec.clone() };
    let deadline_ms = caps.deadline().map(|limit| limit.as_millis() as u64);
    let session = ask(&record, Order { spec: spec.clone(), start, health, deadline_ms })?;
    Ok(Taken { record, spec, session })
}

/// What a warm cell's key is while it is kept for who will be `id`.
fn reserved_key(id: &str) -> String {
    format!("reserved for {id}")
}

/// Keeps a warm cell for `spec`, which is to take its id: that id, if there is one.
///
/// # Errors
/// The records cannot be read.
pub fn reserve(
    layout: &Layout,
    spec: &CellSpec,
    caps: &CapabilitySet,
) -> Result<Option<String>, CellError> {
    let Ok(from) = key(layout, spec, caps) else { return Ok(None) };
    for (record, known, status) in Record::all(layout)? {
        let to = reserved_key(&record.id);
        let request = ControlRequest::Reserve { from: from.clone(), to };
        let fits = known.warm.as_ref() == Some(&from) && is_ready(&status);
        if fits && Client::connect(&record).and_then(|client| client.ask(&request)).is_ok() {
            return Ok(Some(record.id));
        }
    }
    Ok(None)
}

/// The record of the warm cell that is kept for `id`.
fn reserved(layout: &Layout, id: &str) -> Result<Option<Record>, CellError> {
    let wanted = reserved_key(id);
    let mut all = Record::all(layout)?.into_iter();
    let found = all.find(|(_, known, _)| known.warm.as_ref() == Some(&wanted));
    Ok(found.map(|(record, _, _)| record))
}

/// Takes the warm cell that was kept for `spec`; `None` where its pool has gone.
///
/// # Errors
/// As [`take`]'s.
pub fn take_reserved(
    layout: &Layout,
    spec: &CellSpec,
    caps: &CapabilitySet,
    tty: Option<TtySize>,
) -> Result<Option<Taken>, CellError> {
    let Some(record) = reserved(layout, &spec.id)? else { return Ok(None) };
    // Nobody takes the name meanwhile.
    let _registry = Registry::lock(layout)?;
    check_name_free(layout, &Record::all(layout)?, &spec.name, &spec.id)?;
    let image = Store::open(layout.images())?.resolve(spec.image_name())?;
    let start = plan::start(spec, caps, &image.config, tty)?;
    let health = plan::health(spec, &image.config)?;
    let taken = give(record, spec, caps, (start, health)).ok();
    if taken.is_none() {
        // The next cell of that id needs its place.
        release(layout, &spec.id)?;
    }
    Ok(taken)
}

/// Ends the warm cell that was kept for `id`, if there is one.
///
/// # Errors
/// The records cannot be read.
pub fn release(layout: &Layout, id: &str) -> Result<(), CellError> {
    if let Some(record) = reserved(layout, id)? {
        let stop = ControlRequest::Stop { signal: libc::SIGKILL as u8, grace_ms: 0 };
        // One whose pool has gone ends by itself.
        let _ = Client::connect(&record).and_then(|client| client.ask(&stop));
        record.await_release();
    }
    Ok(())
}

fn ask(record: &Record, order: Order) -> Result<UnixStream, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Take(Box::new(order)))?;
    Ok(client.into_stream())
}
