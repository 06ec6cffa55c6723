//! Removing images, and their names.

use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::images::{Digest, ImageError, ImageRecord, Reference, Store};
use hyper::StatusCode;
use serde_json::json;

use crate::containers::{Seen, short};
use crate::error::{ApiError, ApiResult};
use crate::filters::Filters;
use crate::http::{Call, Response, json as reply};
use crate::images::tell;
use crate::shares::is_tenants;
use crate::state::Server;

/// How long the supervisor of a cell that has ended may hold its image.
const RELEASE_MAX: Duration = Duration::from_secs(2);
/// Between two looks whether it still does.
const RELEASE_POLL: Duration = Duration::from_millis(10);

/// `DELETE /images/{name}`. One of several names goes whoever uses the image.
pub async fn remove(server: &Arc<Server>, name: String, call: &Call) -> ApiResult<Response> {
    let force = call.target.query.flag("force");
    let (id, untagged, gone) = server
        .blocking(move |server| {
            let store = server.images()?;
            let image = store.resolve(&name)?;
            let containers = server.containers.all()?;
            if !force
                && !is_one_of_several(&image, &name)
                && let Some(seen) = containers.iter().find(|seen| uses(seen, &image))
            {
                return Err(ApiError::conflict(format!(
                    "conflict: unable to remove repository reference \"{name}\" (must force) - container {} is using its referenced image {}",
                    short(seen.id()), image.id
                )));
            }
            let gone = remove_when_released(&store, &name, force)?.is_some();
            let left = if gone { Vec::new() } else { store.resolve(&image.id.to_string())?.tags };
            let untagged: Vec<_> =
                image.tags.into_iter().filter(|tag| !left.contains(tag)).collect();
            Ok((image.id.to_string(), untagged, gone))
        })
        .await?;
    let mut rows = Vec::new();
    for tag in &untagged {
        tell(server, "untag", &id, tag);
        rows.push(json!({ "Untagged": tag }));
    }
    if gone {
        tell(server, "delete", &id, &id);
        rows.push(json!({ "Deleted": id }));
    }
    Ok(reply(StatusCode::OK, &rows))
}

/// Whether `name` is a name of the image, which has others.
fn is_one_of_several(image: &ImageRecord, name: &str) -> bool {
    let name = name.parse::<Reference>().map(|name| name.to_string());
    image.tags.len() > 1 && name.is_ok_and(|name| image.tags.contains(&name))
}

/// A container that has ended and removes itself uses nothing any more, though
/// its record may still be there.
fn uses(seen: &Seen, image: &ImageRecord) -> bool {
    let ends = seen.container.spec.remove && seen.state() == "exited";
    seen.container.image_id == image.id.to_string() && !ends
}

/// A supervisor lets go of its image at its very end, a moment after its
/// operator was told that the cell has ended.
fn remove_when_released(store: &Store, name: &str, force: bool) -> ApiResult<Option<Digest>> {
    let until = Instant::now() + RELEASE_MAX;
    loop {
        match store.remove(name, force) {
            Err(ImageError::InUse { .. }) if Instant::now() < until => {
                std::thread::sleep(RELEASE_POLL);
            }
            result => return Ok(result?),
        }
    }
}

/// `POST /images/prune`: images without a name, or with `dangling=false` all that no container has.
pub async fn prune(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["dangling", "label", "label!", "until"])?;
    let until_ms = filters.until_ms()?;
    let all =
        filters.values("dangling").iter().any(|value| matches!(value.as_str(), "0" | "false"));
    let removed = server.blocking(move |server| {
        let store = server.images()?;
        let containers = server.containers.all()?;
        let unwanted = store.list()?.into_iter().filter(|image| {
            (all && !is_tenants(image) || image.tags.is_empty())
                && until_ms.is_none_or(|until| image.imported.saturating_mul(1000) < until)
                && filters.labels(&image.config.labels)
                && !containers.iter().any(|seen| uses(seen, image))
        });
        let before = store.listed_bytes()?;
        let mut removed = Vec::new();
        for image in unwanted {
            match store.remove(&image.id.to_string(), true) {
                Ok(Some(_)) => removed.push(image),
                // Somebody came to use it, or has removed it.
                Ok(None) | Err(ImageError::InUse { .. } | ImageError::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok((removed, before.saturating_sub(store.listed_bytes()?)))
    });
    let (removed, freed) = removed.await?;
    let mut rows = Vec::new();
    for image in &removed {
        let id = image.id.to_string();
        tell(server, "delete", &id, &id);
        rows.extend(image.tags.iter().map(|tag| json!({ "Untagged": tag })));
        rows.push(json!({ "Deleted": id }));
    }
    Ok(reply(StatusCode::OK, &json!({ "ImagesDeleted": rows, "SpaceReclaimed": freed })))
}
