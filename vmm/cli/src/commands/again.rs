//! `exocell start`, `restart` and `attach`: cells that were made before.

use std::time::Duration;

use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::granted::Links;
use exocell_cell::images::Store;
use exocell_cell::launch::{self, Request, Workload};
use exocell_cell::network::Publish;
use exocell_cell::parent::Parent;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, CellSpec, Layout, Record, State, end, restart};

use super::cells::stop_one;
use super::run::{Showing, Started, left, must_run, show, to_cell};
use crate::args::{AttachArgs, RestartArgs, StartArgs};
use crate::session::{self, Manner, Outcome};
use crate::show::{each, say};
use crate::terminal;

/// Notes what the cell keeps to when it starts again: its image, and where its folders are.
pub fn pin(layout: &Layout, spec: &mut CellSpec, caps: &CapabilitySet) -> Result<(), CellError> {
    // Where there can be no cell, no image is looked for.
    Parent::refuse_cells()?;
    spec.image_id = Some(Store::open(layout.images())?.resolve(&spec.image)?.id.to_string());
    let links = Links::of(layout, caps);
    let locate = |folder: &exocell_cell::xgate::Folder| {
        let shown = folder.host.display();
        let failed = CellError::host(format!("cannot open the folder {shown} (--volume)"));
        links.locate(&folder.host, false).map_err(failed)
    };
    spec.locations = caps.folders().iter().map(locate).collect::<Result<_, _>>()?;
    Ok(())
}

pub fn start(layout: &Layout, args: &StartArgs) -> Result<u8, CellError> {
    let attaches = args.attach || args.interactive;
    if attaches && args.cells.len() > 1 {
        return Err(CellError::Usage("-a and -i are for one cell; name one".to_owned()));
    }
    if attaches {
        return start_attached(layout, &args.cells[0], args.interactive);
    }
    Ok(each(&args.cells, |key| {
        let (record, spec, status) = Record::find(layout, key)?;
        // As docker has it: one that runs is started, and one that is about to.
        if status.state == State::Exited && !record.is_restarting(&spec, &status) {
            session::await_start(begin_again(layout, &record, spec)?.session())?;
        }
        say!("{key}");
        Ok(())
    }))
}

fn start_attached(layout: &Layout, key: &str, interactive: bool) -> Result<u8, CellError> {
    let (record, spec, status) = Record::find(layout, key)?;
    let manner = manner(&spec, interactive);
    if status.state != State::Exited {
        return follow(layout, &record, &spec, &manner);
    }
    let manner = Manner { ends_input: true, ..manner };
    let started = begin_again(layout, &record, spec)?;
    show(layout, &started, &Showing { detach: false, json: false, manner })
}

fn manner(spec: &CellSpec, interactive: bool) -> Manner {
    Manner {
        interactive: interactive && spec.stdin,
        tty: spec.tty,
        ends_input: false,
        proxies_signals: true,
        detach_keys: Default::default(),
    }
}

/// Starts a cell by hand that has ended, as it was made and with what was changed since.
fn begin_again(layout: &Layout, record: &Record, spec: CellSpec) -> Result<Started, CellError> {
    let request = Request::begin();
    let kept = !spec.restart.is_no();
    // Whoever waits to start it is not to do so too.
    record.end_restarter()?;
    let started = launch_again(layout, record, CellSpec { restarts: 0, ..spec }, request)?;
    keep_started(layout, &started, kept)?;
    Ok(started)
}

/// Has a cell with a restart policy kept that was just started; one that cannot be is ended.
pub fn keep_started(layout: &Layout, started: &Started, kept: bool) -> Result<(), CellError> {
    if !kept {
        return Ok(());
    }
    let record = started.record();
    restart::keep(layout, &record.id).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = end::kill(layout, record, exocell_cell::signal::Signal::KILL);
    })
}

/// The process that starts a cell again as its restart policy says.
pub fn keep(layout: &Layout, id: &str) -> Result<u8, CellError> {
    restart::stay(layout, id, |record, spec| {
        let started = launch_again(layout, record, spec, Request::begin())?;
        session::await_start(started.session())
    })?;
    Ok(0)
}

fn launch_again(
    layout: &Layout,
    record: &Record,
    mut spec: CellSpec,
    request: Request,
) -> Result<Started, CellError> {
    spec.can_start_again()?;
    exocell_docker::check_start(layout, &record.id)?;
    // Who heard of the end may be faster than the supervisor's own.
    record.await_release();
    Publish::number_all(&mut spec.publish)?;
    let (workload, caps) = Workload::plan(layout, &mut spec, terminal::size(), Vec::new())?;
    Ok(Started::from(launch::launch(layout, spec, caps, workload, request)?))
}

pub fn restart(layout: &Layout, args: &RestartArgs) -> Result<u8, CellError> {
    Ok(each(&args.cells, |key| {
        let (record, spec, status) = Record::find(layout, key)?;
        // Before anything is ended.
        spec.can_start_again()?;
        if status.state != State::Exited {
            stop_one(layout, &record, &spec, args.signal.as_deref(), args.time)?;
        }
        let started = begin_again(layout, &record, spec)?;
        session::await_start(started.session())?;
        say!("{key}");
        Ok(())
    }))
}

pub fn attach(layout: &Layout, args: &AttachArgs) -> Result<u8, CellError> {
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    if status.state == State::Exited {
        must_run(&record, status.state)?;
    }
    let manner = Manner {
        detach_keys: args.detach_keys.clone(),
        proxies_signals: args.sig_proxy,
        ..manner(&spec, !args.no_stdin)
    };
    follow(layout, &record, &spec, &manner)
}

/// Follows a cell that runs, beside whoever else does.
fn follow(
    layout: &Layout,
    record: &Record,
    spec: &CellSpec,
    manner: &Manner,
) -> Result<u8, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Attach { replay: false })?;
    match session::follow(&client.into_stream(), manner, 0, to_cell(record))? {
        Outcome::Exited { code, .. } => Ok(code),
        Outcome::Detached => {
            left(record);
            Ok(0)
        }
        // It ended before it could be followed.
        Outcome::Lost => match Record::find(layout, &spec.id) {
            Ok((record, _, status)) => {
                let limit = Some(Duration::from_secs(1));
                Ok(end::await_end(layout, &record, &status, limit)?.unwrap_or(137))
            }
            Err(_) => Ok(0),
        },
    }
}
