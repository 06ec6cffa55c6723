//! Named volumes: folders of the server's own.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use exocell_cell::images::walk;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::admit::check_volume;
use crate::clock::rfc3339_ms;
use crate::error::{ApiError, ApiResult};
use crate::events::Event;
use crate::exec::new_id;
use crate::fields;
use crate::filters::Filters;
use crate::http::{Call, Response, empty, json as reply};
use crate::state::Server;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Wanted {
    name: Option<String>,
    driver: Option<String>,
    driver_opts: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, String>>,
}

fn show(path: &Path) -> Option<Value> {
    let made = fs::metadata(path).ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(json!({
        "Name": path.file_name()?.to_str()?, "Driver": "local", "Mountpoint": path,
        "CreatedAt": rfc3339_ms(made.as_millis() as u64), "Labels": {}, "Scope": "local",
        "Options": null,
    }))
}

fn failed(what: &str, name: &str) -> impl FnOnce(io::Error) -> ApiError {
    let text = format!("cannot {what} the volume {name}");
    move |error| ApiError::internal(format!("{text}: {error}"))
}

fn tell(server: &Server, action: &str, name: &str) {
    let attributes = BTreeMap::from([("driver".to_owned(), "local".to_owned())]);
    server.events.tell(Event::new("volume", action, name, attributes));
}

/// `GET /volumes`
pub async fn list(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["dangling", "driver", "label", "name"])?;
    let all = server.blocking(|server| {
        let entries = fs::read_dir(server.containers.volumes()).map_err(failed("list", ""))?;
        Ok(entries.flatten().filter_map(|entry| show(&entry.path())).collect::<Vec<_>>())
    });
    let named = |volume: &Value| {
        let name = volume["Name"].as_str().unwrap_or_default();
        filters.any("name", |wanted| name.contains(wanted)) && filters.values("label").is_empty()
    };
    let shown: Vec<_> = all.await?.into_iter().filter(named).collect();
    Ok(reply(StatusCode::OK, &json!({ "Volumes": shown, "Warnings": null })))
}

/// `POST /volumes/create`
pub async fn create(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let wanted: Wanted = call.fields(fields::VOLUME_CREATE).await?;
    if !matches!(wanted.driver.as_deref(), None | Some("" | "local"))
        || !wanted.driver_opts.unwrap_or_default().is_empty()
    {
        return Err(ApiError::unsupported("this volume driver", "use local, without options"));
    }
    if !wanted.labels.unwrap_or_default().is_empty() {
        return Err(ApiError::unsupported("a label on a volume", "leave it out"));
    }
    let name = match wanted.name.filter(|name| !name.is_empty()) {
        Some(name) => name,
        None => new_id()?,
    };
    check_volume(&name)?;
    let made = name.clone();
    let shown = server.blocking(move |server| {
        server.containers.check_volumes(&[made.as_str()])?;
        let path = server.containers.volumes().join(&made);
        fs::create_dir_all(&path).map_err(failed("make", &made))?;
        show(&path).ok_or_else(|| ApiError::internal(format!("the volume {made} is gone")))
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
    let shown = show(&server.containers.volumes().join(name)).ok_or_else(|| no_such(name))?;
    Ok(reply(StatusCode::OK, &shown))
}

/// `DELETE /volumes/{name}`
pub async fn remove(server: &Arc<Server>, name: &str) -> ApiResult<Response> {
    check_volume(name).map_err(|_| no_such(name))?;
    let gone = name.to_owned();
    server
        .blocking(move |server| {
            let uses = |seen: &crate::containers::Seen| {
                seen.container.mounts.iter().any(|m| m.volume.as_deref() == Some(&gone))
            };
            if let Some(seen) = server.containers.all()?.iter().find(|seen| uses(seen)) {
                return Err(ApiError::conflict(format!(
                    "remove {gone}: volume is in use - [{}]",
                    seen.id()
                )));
            }
            let path = server.containers.volumes().join(&gone);
            // As deep as its containers have made it.
            match path.symlink_metadata().and_then(|_| walk::remove(&path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(no_such(&gone)),
                other => other.map_err(failed("remove", &gone)),
            }
        })
        .await?;
    tell(server, "destroy", name);
    Ok(empty(StatusCode::NO_CONTENT))
}
