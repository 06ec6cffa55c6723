//! `exocell system` and `exocell version`.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;

use exocell_cell::images::Store;
use exocell_cell::kernel::{self, Status as KernelStatus};
use exocell_cell::{CellError, CellSpec, Layout, Record, State, Status, end};
use serde::Serialize;

use super::print_json;
use crate::args::SystemCommand;
use crate::show::{self, say};

pub fn system(layout: &Layout, command: &SystemCommand) -> Result<u8, CellError> {
    match command {
        SystemCommand::Df { json } => df(layout, *json),
        SystemCommand::Prune { all, volumes, force } => prune(layout, *all, *volumes, *force),
    }
}

/// What one kind of things takes.
#[derive(Serialize)]
struct Row {
    kind: &'static str,
    count: usize,
    /// Those that a cell uses, or that run.
    active: usize,
    size_bytes: u64,
    /// Of what `system prune --all` removes.
    reclaimable_bytes: u64,
}

fn df(layout: &Layout, json: bool) -> Result<u8, CellError> {
    let cells = Record::all(layout)?;
    let rows = [images(layout, &cells)?, records(&cells)];
    if json {
        return rows.iter().try_for_each(|row| print_json(row, false)).map(|()| 0);
    }
    let shown: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let bytes = [row.size_bytes, row.reclaimable_bytes].map(show::bytes);
            let [size, reclaimable] = bytes;
            vec![
                row.kind.to_owned(),
                row.count.to_string(),
                row.active.to_string(),
                size,
                reclaimable,
            ]
        })
        .collect();
    show::table(&["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"], &shown);
    Ok(0)
}

type Cell = (Record, CellSpec, Status);

fn images(layout: &Layout, cells: &[Cell]) -> Result<Row, CellError> {
    let store = Store::open(layout.images())?;
    let names = cells.iter().map(|(_, spec, _)| spec.image_name());
    let used: Vec<_> = names.filter_map(|name| store.resolve(name).ok()).collect();
    let all = store.list()?;
    let (active, idle): (Vec<_>, Vec<_>) =
        all.iter().partition(|image| used.iter().any(|used| used.id == image.id));
    Ok(Row {
        kind: "images",
        count: all.len(),
        active: active.len(),
        size_bytes: store.listed_bytes()?,
        reclaimable_bytes: idle.iter().map(|image| image.own_bytes()).sum(),
    })
}

fn records(cells: &[Cell]) -> Row {
    let sum = |ended: bool| {
        let wanted = cells.iter().filter(|(_, _, s)| !ended || s.state == State::Exited);
        wanted.map(|(record, _, _)| taken_bytes(record)).sum()
    };
    Row {
        kind: "cells",
        count: cells.len(),
        active: cells.iter().filter(|(_, _, status)| status.state != State::Exited).count(),
        size_bytes: sum(false),
        reclaimable_bytes: sum(true),
    }
}

/// What the files of a record take on their disk.
fn taken_bytes(record: &Record) -> u64 {
    let entries = fs::read_dir(record.directory()).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(entry.metadata().ok()?.blocks() * 512)).sum()
}

fn prune(layout: &Layout, all: bool, volumes: bool, force: bool) -> Result<u8, CellError> {
    let images = if all { "all images that no cell uses" } else { "all images without a name" };
    if !force
        && !agreed(&format!(
            "This removes all cells that have ended, what builds keep, and {images}."
        ))?
    {
        return Ok(0);
    }
    let mut count = 0;
    let mut freed = 0;
    for (record, spec, status) in Record::all(layout)? {
        if status.state == State::Exited && !record.is_restarting(&spec, &status) {
            freed += taken_bytes(&record);
            end::remove(layout, &record, &status, false)?;
            count += 1;
        }
    }
    say!("{count} cells removed, {} freed", show::bytes(freed));
    if volumes {
        say!("{} volumes removed", exocell_docker::prune_volumes(layout)?);
    }
    // A build that runs now needs what it keeps.
    if let Ok(freed) = exocell_docker::build::prune(layout) {
        say!("{} of builds freed", show::bytes(freed));
    }
    super::image::prune(layout, &Store::open(layout.images())?, all)?;
    Ok(0)
}

/// Whether the operator says yes.
pub(super) fn agreed(words: &str) -> Result<bool, CellError> {
    if !io::stdin().is_terminal() {
        return Err(CellError::Usage(format!("{words} Say so with --force (-f)")));
    }
    let asked = write!(io::stdout(), "{words} Go on? [y/N] ").and_then(|()| io::stdout().flush());
    asked.map_err(CellError::host("cannot ask"))?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(CellError::host("cannot read the answer"))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

pub fn version(layout: &Layout) -> Result<u8, CellError> {
    say!("exocell {}", env!("CARGO_PKG_VERSION"));
    match kernel::status(&layout.kernels())? {
        KernelStatus::Present(kernel) => say!("guest kernel {}", kernel.path.display()),
        KernelStatus::Absent { .. } => say!("guest kernel missing; run exocell kernel build"),
    }
    Ok(0)
}
