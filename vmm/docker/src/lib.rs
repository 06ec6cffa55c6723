//! The Docker Engine API on a unix socket: containers are cells.
//!
//! Read it in this order: [`listen`] (the socket) -> [`route`] (which call is
//! which) -> `calls`, `exec`, `attach`, `logs`, `archive`, `images` (the calls)
//! -> `lifecycle` (start, follow, end) -> [`launcher`] (how a cell is started).
//! `admit` holds what a client asks for against what a cell can be;
//! `containers` is what is on disk.
#![forbid(unsafe_code)]
// The API's larger objects are written out in one piece.
#![recursion_limit = "256"]

mod admit;
mod archive;
mod attach;
mod bounds;
pub mod build;
mod buildkit;
mod caller;
mod calls;
mod containers;
mod control_messages;
mod diff;
mod discard;
pub mod error;
mod events;
mod exec;
mod fields;
mod filters;
pub mod frames;
mod go;
pub mod grpc;
mod health;
mod hijack;
pub mod http;
mod ids;
mod images;
pub mod input;
mod inside;
pub mod keys;
pub mod launcher;
mod leftovers;
mod lifecycle;
mod listen;
mod live;
mod logs;
mod networks;
mod notes;
mod place;
mod policy;
mod ports;
mod progress;
mod push;
mod reach;
mod registry;
mod route;
mod save;
pub mod session;
mod shares;
mod shelf;
mod starts;
mod state;
mod stats;
pub mod stock;
mod system;
mod target;
mod update;
mod views;
mod volumes;
mod whose;
mod wire;

pub use admit::{Defaults, VOLUMES_OF_IMAGE_MAX};
pub use error::{ApiError, ApiResult, ServeError};
pub use exocell_cell::plan::host_memory;
pub use filters::{Filters, OF_IMAGES, image_passes};
pub use listen::{GIVEN, Options, serve};
pub use push::push_to;
pub use save::save_to;
pub use shares::is_tenants;
pub use shelf::Held;

/// Makes the volume `name` where it is missing; where its files are. One without a name is called
/// by an id, and made for the cell `owner`; whether it is to go with that is said beside. Nobody
/// removes it until what is beside its path is dropped, by when the cell is to be listed.
///
/// # Errors
/// It can't be called so; as of mkdir(2).
pub fn make_volume(
    layout: &exocell_cell::Layout,
    name: &str,
    owner: Option<(&str, bool)>,
) -> Result<(std::path::PathBuf, Held), exocell_cell::CellError> {
    check_volume_name(name).map_err(exocell_cell::CellError::Usage)?;
    let shelf = shelf::Shelf::of(layout);
    let notes = match owner {
        Some((owner, ends_with_owner)) => notes::Notes::of(owner, ends_with_owner),
        None => notes::Notes::new(std::collections::BTreeMap::new(), false),
    };
    let path = shelf.path(name);
    let what = format!("cannot make the volume {}", path.display());
    let held = shelf.make(name, &notes).map_err(exocell_cell::CellError::host(what))?;
    // Looked at once nobody removes it and makes another.
    shares::check_maker("volume", name, &shelf.notes(name).made_by, "")
        .map_err(|error| exocell_cell::CellError::Usage(error.message))?;
    Ok((path, held))
}

/// Whether a cell that the operator starts may be in a network: none that a cell had made.
///
/// # Errors
/// It was, with the way out.
pub fn check_network(
    network: &exocell_cell::networks::Network,
    cell: &str,
) -> Result<(), exocell_cell::CellError> {
    shares::check_maker("network", &network.name, &network.made_by, cell)
        .map_err(|error| exocell_cell::CellError::Usage(error.message))
}

/// Whether cell `id` may start as far as it is a container that another cell had made: it has no
/// more than that cell has now. One that is the operator's has no volume or network of a cell's.
///
/// # Errors
/// It has, or that cannot be told.
pub fn check_start(layout: &exocell_cell::Layout, id: &str) -> Result<(), exocell_cell::CellError> {
    let containers = containers::Containers::of(layout);
    let check =
        || -> ApiResult<()> { starts::check_start(&containers, &containers.find(id)?.container) };
    check().map_err(|error| exocell_cell::CellError::Usage(error.message))
}

/// What docker's `inspect` shows of the cell or container named `key`.
///
/// # Errors
/// There is none, or it cannot be read.
pub fn inspected(
    layout: &exocell_cell::Layout,
    key: &str,
) -> Result<serde_json::Value, exocell_cell::CellError> {
    let shown = || -> ApiResult<serde_json::Value> {
        let seen = containers::Containers::of(layout).find(key)?;
        let endpoints = networks::Endpoints::of(layout, [&seen.container])?;
        Ok(views::inspect(&[], &seen, &endpoints))
    };
    shown().map_err(|error| exocell_cell::CellError::Usage(error.message))
}

/// Removes the volumes without names that were made for cell `id`, which is gone.
pub fn discard_volumes(layout: &exocell_cell::Layout, id: &str) {
    containers::Containers::of(layout).discard_volumes_owned(id);
}

/// Removes volumes whose cells were to take them with them; there was nobody to do it.
pub fn sweep_volumes(layout: &exocell_cell::Layout) {
    containers::Containers::of(layout).sweep_volumes();
}

/// Removes the volumes without names that no cell has; how many.
///
/// # Errors
/// The host's.
pub fn prune_volumes(layout: &exocell_cell::Layout) -> Result<usize, exocell_cell::CellError> {
    stock::prune(layout, false, |_| true).map(|(removed, _)| removed.len())
}

/// Whether a volume may be called `name`.
///
/// # Errors
/// Why not.
pub fn check_volume_name(name: &str) -> Result<(), String> {
    admit::check_volume(name).map_err(|error| error.message)
}

/// What `ps` with `arguments` says in the guest of a running cell, fit to be shown. Blocks.
///
/// # Errors
/// [`CellError`](exocell_cell::CellError): there is no `ps` in the image, or it failed.
pub fn processes(
    record: &exocell_cell::Record,
    env: Vec<String>,
    arguments: &str,
) -> Result<String, exocell_cell::CellError> {
    let arguments = if arguments.is_empty() { stats::TOP_ARGUMENTS } else { arguments };
    stats::list(record, env, arguments)
        .map_err(|error| exocell_cell::CellError::Usage(error.message))
}
