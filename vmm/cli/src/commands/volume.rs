//! `exocell volume`: folders that outlive cells.

use exocell_cell::{CellError, Layout, clock};
use exocell_docker::Filters;
use exocell_docker::stock::{self, Volume};
use serde_json::{Value, json};

use super::system::agreed;
use super::{docker, print_json};
use crate::args::{
    VolumeCommand, VolumeCreateArgs, VolumeInspectArgs, VolumeLsArgs, VolumePruneArgs, VolumeRmArgs,
};
use crate::format::Template;
use crate::show::{self, say};

/// The only kind.
const DRIVER: &str = "local";

pub fn volume(layout: &Layout, command: VolumeCommand) -> Result<u8, CellError> {
    match command {
        VolumeCommand::Create(args) => create(layout, args),
        VolumeCommand::Ls(args) => ls(layout, &args),
        VolumeCommand::Inspect(args) => inspect(layout, &args),
        VolumeCommand::Rm(args) => return rm(layout, &args),
        VolumeCommand::Prune(args) => prune(layout, &args),
    }
    .map(|()| 0)
}

fn create(layout: &Layout, args: VolumeCreateArgs) -> Result<(), CellError> {
    if args.driver != DRIVER {
        return Err(CellError::Usage(format!(
            "--driver {} is not there: volumes are of one kind, {DRIVER}",
            args.driver
        )));
    }
    if let Some(opt) = args.opt.first() {
        return Err(CellError::Usage(format!(
            "--opt {opt} is not there: a volume is a folder of this host's disk, and takes no \
             options; run -v DIR:PATH shares a folder, run --tmpfs PATH:size=64m is memory"
        )));
    }
    let labels = docker::labels(layout, &args.label, &[])?;
    say!("{}", stock::create(layout, args.volume, labels)?);
    Ok(())
}

fn filters(words: &[String], known: &[&str]) -> Result<Filters, CellError> {
    Filters::of_words(words, known).map_err(|error| CellError::Usage(format!("--filter: {error}")))
}

fn ls(layout: &Layout, args: &VolumeLsArgs) -> Result<(), CellError> {
    let filters = filters(&args.filter, &["name", "label", "dangling", "driver"])?;
    let truths = ["1", "true", "0", "false"];
    if let Some(odd) = filters.values("dangling").iter().find(|v| !truths.contains(&v.as_str())) {
        return Err(CellError::Usage(format!("--filter: dangling is true or false, not `{odd}`")));
    }
    // Nobody was there when a cell that runs by itself (run -d --rm) removed itself.
    exocell_docker::sweep_volumes(layout);
    let mut all = stock::all(layout)?;
    all.retain(|volume| {
        filters.names("name", &volume.name)
            && filters.any("driver", |wanted| wanted == DRIVER)
            && filters.labels(&volume.labels)
            && filters
                .any("dangling", |wanted| matches!(wanted, "1" | "true") == volume.cells.is_empty())
    });
    if args.quiet {
        all.iter().for_each(|volume| say!("{}", volume.name));
        return Ok(());
    }
    if args.json {
        return all.iter().try_for_each(|volume| print_json(&whole(volume), false));
    }
    if let Some(text) = &args.format {
        return Template::read(text)?.print(&all.iter().map(named).collect::<Vec<_>>());
    }
    let row = |volume: &Volume| {
        vec![volume.name.clone(), volume.cells.join(", "), volume.path.display().to_string()]
    };
    show::table(&["NAME", "CELLS", "FILES"], &all.iter().map(row).collect::<Vec<_>>());
    Ok(())
}

fn whole(volume: &Volume) -> Value {
    json!({
        "name": volume.name, "path": volume.path, "labels": volume.labels,
        "created": clock::rfc3339_ms(volume.created_ms), "anonymous": volume.is_anonymous,
        "cells": volume.cells,
    })
}

/// The same with docker's names beside, for templates.
fn named(volume: &Volume) -> Value {
    let labels = volume.labels.iter().map(|(name, value)| format!("{name}={value}"));
    let mut row = whole(volume);
    let own = [
        ("Name", volume.name.clone()),
        ("Driver", DRIVER.to_owned()),
        ("Scope", "local".to_owned()),
        ("Mountpoint", volume.path.display().to_string()),
        ("Labels", labels.collect::<Vec<_>>().join(",")),
        ("CreatedAt", clock::rfc3339_ms(volume.created_ms)),
    ];
    for (name, value) in own {
        row[name] = value.into();
    }
    row
}

fn inspect(layout: &Layout, args: &VolumeInspectArgs) -> Result<(), CellError> {
    let found = args.volumes.iter().map(|name| stock::find(layout, name));
    let found = found.collect::<Result<Vec<_>, CellError>>()?;
    match &args.format {
        Some(text) => Template::read(text)?.print(&found.iter().map(named).collect::<Vec<_>>()),
        None => print_json(&found.iter().map(whole).collect::<Vec<_>>(), true),
    }
}

fn rm(layout: &Layout, args: &VolumeRmArgs) -> Result<u8, CellError> {
    let mut code = 0;
    for name in &args.volumes {
        if args.force && stock::find(layout, name).is_err() {
            continue;
        }
        match stock::remove(layout, name) {
            Ok(()) => say!("{name}"),
            Err(error) => {
                show::complain(&error);
                code = error.exit_code();
            }
        }
    }
    Ok(code)
}

fn prune(layout: &Layout, args: &VolumePruneArgs) -> Result<(), CellError> {
    let filters = filters(&args.filter, &["label", "label!"])?;
    let which = if args.all { "all volumes" } else { "all volumes without a name" };
    if !args.force && !agreed(&format!("This removes {which} that no cell has."))? {
        return Ok(());
    }
    let wanted = |volume: &Volume| filters.labels(&volume.labels);
    let (removed, freed) = stock::prune(layout, args.all, wanted)?;
    removed.iter().for_each(|name| say!("{name}"));
    say!("{} freed", show::bytes(freed));
    Ok(())
}
