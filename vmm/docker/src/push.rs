//! `POST /images/{name}/push`: images to a registry, each as one layer ([`crate::save`] says why).

use std::sync::Arc;

use exocell_cell::images::{
    ImageError, Progress, ProgressEvent, Pushed, Reference, RegistryOptions, Store,
};
use exocell_cell::{CellError, Layout, registry as reached};
use serde_json::json;

use crate::error::{ApiError, ApiResult};
use crate::http::{Body, BodySender, Call, Response, stream};
use crate::images::{say_failure, tell};
use crate::state::Server;
use crate::{registry, save};

/// How often a client hears how far it is, in bytes.
const STEP_BYTES: u64 = 4 << 20;

/// Pushes the image called `reference`. Blocks.
///
/// # Errors
/// No image is called so, or it cannot be packed; the registry's.
pub fn push_to(
    layout: &Layout,
    reference: &Reference,
    options: &RegistryOptions,
    progress: &mut dyn Progress,
) -> Result<Pushed, CellError> {
    let packed = save::packed(layout, &reference.to_string());
    let packed = packed.map_err(|error| CellError::Usage(error.message))?;
    Ok(sent(layout, reference, options, &packed, progress)?)
}

fn sent(
    layout: &Layout,
    reference: &Reference,
    options: &RegistryOptions,
    packed: &save::Saved,
    progress: &mut dyn Progress,
) -> Result<Pushed, ImageError> {
    let store = Store::open(layout.images())?;
    reached::push(&store, reference, options, (&packed.layer, &packed.document), progress)
}

/// `POST /images/{name}/push`: one tag, or without one all that the repository has here.
pub async fn push(server: &Arc<Server>, name: String, call: &Call) -> ApiResult<Response> {
    let (tag, options) = (
        call.target.query.get("tag").map(str::to_owned),
        registry::options(registry::credentials(call)?),
    );
    let wanted = server.blocking(move |server| tags(&server.images()?, &name, tag.as_deref()));
    let wanted = wanted.await?;
    let (sender, body) = Body::stream();
    server.begin(move |server| {
        let repository = wanted.first().map(repository).unwrap_or_default();
        let status = format!("The push refers to repository [{repository}]");
        sender.line_now(&json!({ "status": status }));
        for reference in &wanted {
            if let Err(error) = push_one(server, reference, &options, &sender) {
                say_failure(&sender, &error);
                break;
            }
        }
    })?;
    Ok(stream("application/json", body))
}

/// Registry and repository.
fn repository(reference: &Reference) -> String {
    format!("{}/{}", reference.registry, reference.repository)
}

/// What is to be pushed of the repository `name`.
fn tags(store: &Store, name: &str, tag: Option<&str>) -> ApiResult<Vec<Reference>> {
    let missing = |wanted: &Reference| {
        let repository = repository(wanted);
        ApiError::not_found(format!("An image does not exist locally with the tag: {repository}"))
    };
    if let Some(tag) = tag.filter(|tag| !tag.is_empty()) {
        let wanted: Reference = format!("{name}:{tag}").parse()?;
        return match store.resolve(&wanted.to_string()) {
            Err(ImageError::NotFound { .. }) => Err(missing(&wanted)),
            found => found.map(|_| vec![wanted]).map_err(ApiError::from),
        };
    }
    let wanted: Reference = name.parse()?;
    let named = store.list()?.into_iter().flat_map(|image| image.tags);
    let named = named.filter_map(|tag| tag.parse::<Reference>().ok());
    let found: Vec<_> = named.filter(|tag| repository(tag) == repository(&wanted)).collect();
    if found.is_empty() { Err(missing(&wanted)) } else { Ok(found) }
}

fn push_one(
    server: &Server,
    reference: &Reference,
    options: &RegistryOptions,
    sender: &BodySender,
) -> ApiResult<()> {
    let packed = save::packed(server.layout(), &reference.to_string())?;
    let layer = &packed.diff_id.hex()[..12];
    let say = |status: &str| {
        sender.line_now(&json!({ "status": status, "progressDetail": {}, "id": layer }));
    };
    say("Preparing");
    let mut told = Told { sender, layer, total: 0, done: 0, told: 0, is_there: false };
    let pushed = sent(server.layout(), reference, options, &packed, &mut told)?;
    say(if told.is_there { "Layer already exists" } else { "Pushed" });
    let Pushed { digest, size } = pushed;
    let tag = reference.tag.as_deref().unwrap_or("latest");
    sender.line_now(&json!({ "status": format!("{tag}: digest: {digest} size: {size}") }));
    let aux = json!({ "Tag": tag, "Digest": digest.to_string(), "Size": size });
    sender.line_now(&json!({ "progressDetail": {}, "aux": aux }));
    tell(server, "push", &reference.to_string(), &reference.to_string());
    Ok(())
}

/// Tells a client how far a push is.
struct Told<'a> {
    sender: &'a BodySender,
    layer: &'a str,
    total: u64,
    done: u64,
    told: u64,
    is_there: bool,
}

impl Progress for Told<'_> {
    fn event(&mut self, event: ProgressEvent<'_>) {
        match event {
            ProgressEvent::Layer { bytes, .. } => self.total = bytes.unwrap_or(0),
            ProgressEvent::Present { .. } => self.is_there = true,
            ProgressEvent::Bytes(bytes) => {
                self.done += bytes;
                if self.done - self.told >= STEP_BYTES {
                    self.told = self.done;
                    self.sender.line_now(&json!({
                        "status": "Pushing", "id": self.layer,
                        "progressDetail": { "current": self.done, "total": self.total },
                    }));
                }
            }
            _ => {}
        }
    }
}
