//! What a container may start with: no more than the cell that had it made has at that moment, and
//! nothing of a cell's where it is the operator's. All ways in which a container begins ask this.

use std::path::Path;

use exocell_cell::granted::Links;
use exocell_cell::networks::Networks;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, Record, State};

use crate::caller::{Caller, Cell, Own};
use crate::containers::{Container, Containers};
use crate::error::{ApiError, ApiResult, refused};
use crate::inside::Inside;
use crate::shares;
use crate::shelf::Shelf;

/// Whether no volume and network of a container that is the operator's was made by a cell: what is
/// called so would be read by that cell, and who came first to a name is not who is meant by it.
/// What a container has made itself is its own.
///
/// # Errors
/// 409 with the way out.
pub fn check_makers(containers: &Containers, container: &Container) -> ApiResult<()> {
    if !container.made_by.is_empty() {
        return Ok(());
    }
    let shelf = containers.shelf();
    for name in container.mounts.iter().filter_map(|mount| mount.volume.as_deref()) {
        if shelf.path(name).exists() {
            shares::check_maker("volume", name, &shelf.notes(name).made_by, container.id())?;
        }
    }
    let networks = Networks::of(containers.layout());
    for joined in &container.spec.networks {
        // One that is not there is told of by whoever starts it.
        if let Ok(network) = networks.find(&joined.network) {
            shares::check_maker("network", &network.name, &network.made_by, container.id())?;
        }
    }
    Ok(())
}

/// Whether a container that a cell had made may start: it has no more than that cell has now, or
/// had at its end. What was revoked is gone for all starts, whoever begins them: a client, the
/// operator, its restart policy, the next server. One of the operator's own has no volume or network
/// that a cell has made ([`check_makers`]).
///
/// Where the cell was removed, the one that had it made is asked; where all were, nobody knows of
/// anything that was revoked.
///
/// # Errors
/// 403 for what is more than the cell has, and what says that this cannot be told.
pub fn check_start(containers: &Containers, container: &Container) -> ApiResult<()> {
    let layout = containers.layout();
    if containers.has_file(container.id()) {
        // One that cannot be read is listed as a cell that nobody had made, and is not taken for that.
        containers.read(container.id())?;
    }
    check_makers(containers, container)?;
    let Some(maker) = container.made_by.iter().rev().find(|id| Record::exists(layout, id)) else {
        return Ok(());
    };
    let maker = Caller::of_cell(read(containers, maker, false)?);
    let Some(cell) = maker.cell() else { return Ok(()) };
    let networks = Networks::of(layout);
    let joined = container.spec.networks.iter().map(|joined| joined.network.clone());
    let own = joined.filter(|name| check_own(&networks, &maker, name).is_ok());
    let table = container.spec.changes.applied(&container.spec.capabilities);
    cell.check_table(&table.to_string(), &own.collect::<Vec<_>>())?;
    cell.check_publish(&container.spec.publish)?;
    cell.check_places(&container.mounts, &container.spec.locations)?;
    check_volumes(&containers.shelf(), &maker, container)?;
    match &container.spec.within {
        Some(within) => maker.check_owns(&containers.find(&within.cell)?.container),
        None => Ok(()),
    }
}

/// Whether a cell may have its containers be in `network`.
///
/// # Errors
/// 403 for one that it is not in itself and has not made.
pub fn check_own(networks: &Networks, caller: &Caller, network: &str) -> ApiResult<()> {
    let Some(cell) = caller.cell() else { return Ok(()) };
    let found = networks.find(network).map_err(not_found)?;
    match cell.networks.contains(&found.name) || caller.has_made(&found.made_by) {
        true => Ok(()),
        false => Err(refused(format!(
            "the network {} was not made by the cell {}, which is not in it either; make one \
             (docker network create)",
            found.name, cell.name
        ))),
    }
}

/// What says that a network is not there, as clients know it.
pub fn not_found(error: CellError) -> ApiError {
    match error {
        CellError::Usage(message) if message.contains("not found") => ApiError::not_found(message),
        error => error.into(),
    }
}

/// Whether all volumes of a container are the caller's own, or new.
///
/// # Errors
/// 403 for another's.
pub fn check_volumes(shelf: &Shelf, caller: &Caller, container: &Container) -> ApiResult<()> {
    for mount in &container.mounts {
        let Some(name) = mount.volume.as_deref() else { continue };
        let path = shelf.path(name);
        let has = caller.cell().is_some_and(|cell| cell.has_volume(&path, mount.writable));
        if path.exists() && !has && !caller.has_made(&shelf.notes(name).made_by) {
            return Err(refused(format!(
                "the volume {name} was not made by this cell, and is not one that it has; give \
                 yours another name"
            )));
        }
    }
    Ok(())
}

/// The cell `id` as a caller, which may have ended unless it `must_run`.
///
/// # Errors
/// 403 for one that is gone.
pub fn read(containers: &Containers, id: &str, must_run: bool) -> ApiResult<Cell> {
    let layout = containers.layout();
    let gone = || refused("the cell has ended, and what it was given with it");
    let (_, spec, status) = Record::find(layout, id).map_err(|_| gone())?;
    if must_run && status.state == State::Exited || spec.id != id {
        return Err(gone());
    }
    let table = spec.changes.applied(&spec.capabilities).to_string();
    let caps = CapabilitySet::parse(&table, Path::new("/")).map_err(CellError::from)?;
    let links = Links::of(layout, &caps);
    let mut folders = Vec::new();
    for folder in caps.folders() {
        let known = spec.locations.iter().find(|found| found.folder() == folder.host);
        let found = match known {
            Some(known) => Ok((known.real().to_owned(), known.is_socket())),
            None => links.locate(&folder.host, false).map(|l| (l.real().to_owned(), l.is_socket())),
        };
        // What is not there any more, or behind a link of a cell's, gives no right.
        if let Ok((real, is_socket)) = found {
            folders.push(Own { host: folder.host.clone(), real, rights: folder.rights, is_socket });
        }
    }
    let mut line = containers.maker_of(id);
    line.push(id.to_owned());
    let networks = spec.networks.iter().map(|own| own.network.clone()).collect();
    let inside = Inside::of(containers, &spec);
    let dns = spec.settings.dns;
    let labels = match containers.has_file(id) {
        true => containers.read(id)?.config.labels,
        false => spec.labels,
    };
    let (name, publish) = (spec.name, spec.publish);
    Ok(Cell { line, name, caps, folders, networks, dns, labels, publish, inside })
}
