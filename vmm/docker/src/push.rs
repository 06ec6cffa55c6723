//! `POST /images/{name}/push`: images to a registry, with one layer for each file of the store
//! ([`crate::save`] says why). The store notes what each was as a layer, and what the registry has
//! is not packed again.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use exocell_cell::images::compose::Layer;
use exocell_cell::images::{
    Digest, ImageError, Progress, ProgressEvent, Pushed, Reference, RegistryOptions, Store,
};
use exocell_cell::{CellError, Layout, compose, registry as reached};
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
    let ready = Ready::make(layout, reference, options)?;
    Ok(ready.send(reference, options, progress)?)
}

/// An image that can be sent.
struct Ready {
    store: Store,
    document: Vec<u8>,
    /// Without a file those that the registry has.
    layers: Vec<(Layer, Option<File>)>,
}

impl Ready {
    /// Packs what the registry has not.
    fn make(
        layout: &Layout,
        reference: &Reference,
        options: &RegistryOptions,
    ) -> Result<Self, CellError> {
        let store = Store::open(layout.images())?;
        let image = store.resolve(&reference.to_string())?;
        let document = store.inspect(&image.id.to_string())?;
        let rootfs = store.open_rootfs(&image)?;
        let known = store.layers(&image);
        let asked: Vec<_> = known.iter().flatten().map(|layer| layer.blob).collect();
        // Before anything is packed: who may not push hears so at once.
        let present = reached::present(reference, options, &asked)?;
        let present: BTreeMap<_, _> = asked.into_iter().zip(present).collect();
        let mut layers = Vec::new();
        for (number, known) in known.into_iter().enumerate() {
            let is_there = |layer: &Layer| present.get(&layer.blob) == Some(&true);
            if let Some(layer) = known.filter(is_there) {
                layers.push((layer, None));
                continue;
            }
            let to = store.scratch()?;
            let layer = compose::layer(&rootfs, number, true, &to)?;
            store.note_layer(&image, number, &layer)?;
            layers.push((layer, Some(to)));
        }
        let ids: Vec<_> = layers.iter().map(|(layer, _)| layer.diff_id).collect();
        let document = save::with_layers(&document, &ids)
            .map_err(|error| CellError::Usage(format!("{reference} cannot be packed: {error}")))?;
        store.note_saved(image.id, Digest::of(&document))?;
        Ok(Self { store, document, layers })
    }

    fn send(
        &self,
        reference: &Reference,
        options: &RegistryOptions,
        progress: &mut dyn Progress,
    ) -> Result<Pushed, ImageError> {
        let parts = (self.layers.as_slice(), self.document.as_slice());
        reached::push(&self.store, reference, options, parts, progress)
    }
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
    let ready = Ready::make(server.layout(), reference, options)?;
    let ids = ready.layers.iter().map(|(layer, _)| layer.diff_id.hex()[..12].to_owned());
    let mut told = Told::new(sender, ids.collect());
    told.all("Preparing");
    let pushed = ready.send(reference, options, &mut told)?;
    told.end();
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
    /// What the layers are called.
    layers: Vec<String>,
    /// The one that is sent now.
    now: Option<usize>,
    total: u64,
    done: u64,
    told: u64,
    is_there: bool,
}

impl<'a> Told<'a> {
    fn new(sender: &'a BodySender, layers: Vec<String>) -> Self {
        Self { sender, layers, now: None, total: 0, done: 0, told: 0, is_there: false }
    }

    fn all(&self, status: &str) {
        self.layers.iter().for_each(|layer| self.say(layer, status));
    }

    fn say(&self, layer: &str, status: &str) {
        self.sender.line_now(&json!({ "status": status, "progressDetail": {}, "id": layer }));
    }

    /// The layer that was sent is there.
    fn end(&mut self) {
        if let Some(layer) = self.now.take().and_then(|now| self.layers.get(now)) {
            self.say(layer, if self.is_there { "Layer already exists" } else { "Pushed" });
        }
    }
}

impl Progress for Told<'_> {
    fn event(&mut self, event: ProgressEvent<'_>) {
        match event {
            ProgressEvent::Layer { index, bytes, .. } => {
                self.end();
                self.now = Some(index);
                self.total = bytes.unwrap_or(0);
                (self.done, self.told, self.is_there) = (0, 0, false);
            }
            ProgressEvent::Present { .. } => self.is_there = true,
            ProgressEvent::Bytes(bytes) => {
                self.done += bytes;
                let layer = self.now.and_then(|now| self.layers.get(now));
                if let Some(layer) = layer.filter(|_| self.done - self.told >= STEP_BYTES) {
                    self.told = self.done;
                    self.sender.line_now(&json!({
                        "status": "Pushing", "id": layer,
                        "progressDetail": { "current": self.done, "total": self.total },
                    }));
                }
            }
            ProgressEvent::Finishing => self.end(),
            _ => {}
        }
    }
}
