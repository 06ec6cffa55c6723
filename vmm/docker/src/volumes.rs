//! Named volumes: folders of the server's own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use exocell_cell::clock::rfc3339_ms;
use exocell_cell::images::walk;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::admit::check_volume;
use crate::containers::{Container, Seen};
use crate::error::{ApiError, ApiResult};
use crate::events::Event;
use crate::fields;
use crate::filters::Filters;
use crate::http::{Call, Response, empty, json as reply};
use crate::ids::new_id;
use crate::leftovers::{Discarded, START_MAX};
use crate::notes::Notes;
use crate::shares;
use crate::state::Server;

/// The API version, as its part after `1.`, from which on a prune leaves volumes that have names.
const PRUNES_NAMELESS: u32 = 42;
/// Bytes of all labels of one.
const LABELS_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Wanted {
    name: Option<String>,
    driver: Option<String>,
    driver_opts: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, String>>,
}

/// A volume as the API shows it.
pub struct Volume {
    pub name: String,
    notes: Notes,
    pub shown: Value,
}

impl Volume {
    fn of(server: &Server, name: &str) -> Option<Self> {
        let shelf = server.containers.shelf();
        let path = shelf.path(name);
        let made = fs::metadata(&path).ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let notes = shelf.notes(name);
        let created =
            if notes.created_ms == 0 { made.as_millis() as u64 } else { notes.created_ms };
        let shown = json!({
            "Name": name, "Driver": "local", "Mountpoint": path,
            "CreatedAt": rfc3339_ms(created), "Labels": notes.labels, "Scope": "local",
            "Options": null,
        });
        Some(Self { name: name.to_owned(), notes, shown })
    }

    /// All of them, by their names.
    pub fn all(server: &Server) -> ApiResult<Vec<Self>> {
        let names = server.containers.shelf().names().map_err(failed("list", ""))?;
        Ok(names.iter().filter_map(|name| Self::of(server, name)).collect())
    }
}

/// The names of volumes that a container has.
fn used(server: &Server) -> ApiResult<BTreeSet<String>> {
    server.containers.used_volumes()
}

fn failed(what: &str, name: &str) -> impl FnOnce(io::Error) -> ApiError {
    let text = format!("cannot {what} the volume {name}");
    move |error| ApiError::internal(format!("{text}: {error}"))
}

/// Removes the volumes without names of a container that is gone, and tells of them. Blocks.
pub fn discard_of(server: &Server, container: &Container) {
    let gone = server.containers.discard_volumes_of(container);
    gone.iter().for_each(|name| tell(server, "destroy", name));
}

fn tell(server: &Server, action: &str, name: &str) {
    let attributes = BTreeMap::from([("driver".to_owned(), "local".to_owned())]);
    server.events.tell(Event::new("volume", action, name, attributes));
}

/// `GET /volumes`
pub async fn list(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["dangling", "driver", "label", "name"])?;
    let listed = server.blocking(|server| Ok((Volume::all(server)?, used(server)?)));
    let (all, used) = listed.await?;
    let passes = |volume: &Volume| {
        let is_used = used.contains(&volume.name);
        filters.names("name", &volume.name)
            && filters.any("driver", |wanted| wanted == "local")
            && filters.any("dangling", |wanted| matches!(wanted, "1" | "true") != is_used)
            && filters.labels(&volume.notes.labels)
    };
    let shown: Vec<_> = all.into_iter().filter(passes).map(|volume| volume.shown).collect();
    Ok(reply(StatusCode::OK, &json!({ "Volumes": shown, "Warnings": null })))
}

/// `POST /volumes/create`
pub async fn create(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let (made_by, caller) = (call.caller.line(), call.caller.clone());
    let wanted: Wanted = call.fields(fields::VOLUME_CREATE).await?;
    if !matches!(wanted.driver.as_deref(), None | Some("" | "local"))
        || !wanted.driver_opts.unwrap_or_default().is_empty()
    {
        return Err(ApiError::unsupported("this volume driver", "use local, without options"));
    }
    let given = wanted.name.filter(|name| !name.is_empty());
    let notes = Notes::new(wanted.labels.unwrap_or_default(), given.is_none());
    let notes = Notes { made_by, ..notes };
    let bytes: usize = notes.labels.iter().map(|(name, value)| name.len() + value.len()).sum();
    if bytes > LABELS_BYTES_MAX {
        return Err(ApiError::bad_request(format!(
            "the labels of a volume have at most {LABELS_BYTES_MAX} bytes"
        )));
    }
    let name = given.map_or_else(new_id, Ok)?;
    check_volume(&name)?;
    let made = name.clone();
    let shown = server.blocking(move |server| {
        server.containers.check_volumes(&[made.as_str()])?;
        let shelf = server.containers.shelf();
        let is_new = !shelf.path(&made).exists();
        shares::check_volumes(&shelf, &caller, usize::from(is_new))?;
        match is_new {
            true => shares::check_unused(&server.containers, &caller, "volume", &made)?,
            false if caller.cell().is_none() => {
                shares::check_maker("volume", &made, &shelf.notes(&made).made_by, "")?;
            }
            // It stays what it is, and whose it is.
            false => {}
        }
        let _held = shelf.make(&made, &notes).map_err(failed("make", &made))?;
        let volume = Volume::of(server, &made);
        let volume = volume.ok_or_else(|| failed("find", &made)(io::ErrorKind::NotFound.into()))?;
        Ok(volume.shown)
    });
    let shown = shown.await?;
    tell(server, "create", &name);
    Ok(reply(StatusCode::CREATED, &shown))
}

fn no_such(name: &str) -> ApiError {
    ApiError::not_found(format!("get {name}: no such volume"))
}

/// `GET /volumes/{name}`
pub fn inspect(server: &Server, name: &str) -> ApiResult<Response> {
    check_volume(name).map_err(|_| no_such(name))?;
    let volume = Volume::of(server, name).ok_or_else(|| no_such(name))?;
    Ok(reply(StatusCode::OK, &volume.shown))
}

/// `POST /volumes/prune`
pub async fn prune(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["label", "label!", "all"])?;
    let all = filters.values("all").iter().any(|value| matches!(value.as_str(), "1" | "true"));
    // Older clients mean all that nobody uses.
    let named = all || call.target.version < PRUNES_NAMELESS;
    let caller = call.caller.clone();
    let removed = server.at_its_pace(move |server| {
        let used = used(server)?;
        let (mut removed, mut freed) = (Vec::new(), 0);
        let unused = Volume::all(server)?.into_iter().filter(|volume| {
            !used.contains(&volume.name)
                && caller.tidies(&volume.notes.made_by, &volume.notes.labels)
                && (named || volume.notes.is_anonymous)
                && !server.containers.awaits_owner(&volume.notes)
                && filters.labels(&volume.notes.labels)
        });
        for volume in unused {
            let bytes = walk::bytes(&server.containers.shelf().path(&volume.name));
            // Who has come to use it meanwhile keeps it.
            if server.containers.discard_volume(&volume.name, Duration::ZERO)?.is_gone() {
                freed += bytes;
                removed.push(volume.name);
            }
        }
        Ok((removed, freed))
    });
    let (removed, freed) = removed.await?;
    removed.iter().for_each(|name| tell(server, "destroy", name));
    Ok(reply(StatusCode::OK, &json!({ "VolumesDeleted": removed, "SpaceReclaimed": freed })))
}

/// `DELETE /volumes/{name}`
/// By force a volume that is not there is no error.
pub async fn remove(server: &Arc<Server>, name: &str, call: &Call) -> ApiResult<Response> {
    let is_name = check_volume(name).is_ok();
    if call.target.query.flag("force")
        && (!is_name || !server.containers.shelf().path(name).exists())
    {
        return Ok(empty(StatusCode::NO_CONTENT));
    }
    check_volume(name).map_err(|_| no_such(name))?;
    let (gone, caller) = (name.to_owned(), call.caller.clone());
    server
        .blocking(move |server| {
            let shelf = server.containers.shelf();
            if shelf.path(&gone).exists() {
                let notes = shelf.notes(&gone);
                shares::check_tidies(&caller, "volume", &gone, &notes.made_by, &notes.labels)?;
            }
            let by = match server.containers.discard_volume(&gone, START_MAX)? {
                Discarded::Gone => return Ok(()),
                Discarded::Missing => return Err(no_such(&gone)),
                Discarded::Starting => "a cell that is being started".to_owned(),
                Discarded::Used(users) => users.iter().map(Seen::id).collect::<Vec<_>>().join(", "),
            };
            Err(ApiError::conflict(format!("remove {gone}: volume is in use - [{by}]")))
        })
        .await?;
    tell(server, "destroy", name);
    Ok(empty(StatusCode::NO_CONTENT))
}
