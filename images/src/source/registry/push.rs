//! Pushing to a registry (OCI distribution-spec, "Push"): layers that it has not, a configuration,
//! and a manifest that names all.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::{Body, SendBody};

use super::place::{self, Place};
use super::{Registry, RegistryOptions};
use crate::digest::Digest;
use crate::error::{ImageError, Result, shown};
use crate::layer::Layer;
use crate::progress::{Progress, ProgressEvent};
use crate::reference::Reference;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const BYTES: &str = "application/octet-stream";
/// How long a registry may take to store what it has whole.
const STORED_MAX: Duration = Duration::from_secs(600);
/// What is read of a refusal, in bytes.
const REFUSAL_BYTES_MAX: u64 = 16 << 10;
const CHUNK_BYTES: usize = 64 << 10;

/// What a registry has now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pushed {
    /// Of the manifest.
    pub digest: Digest,
    /// Of the same, in bytes.
    pub size: u64,
}

/// Which of `layers` the registry has, of `reference`'s repository. Who may not push there hears so.
///
/// # Errors
/// As of [`push`].
pub fn present(
    reference: &Reference,
    options: &RegistryOptions,
    layers: &[Digest],
) -> Result<Vec<bool>> {
    let registry = of(reference, options)?;
    let to = registry.begin_upload()?;
    registry.give_up(&to);
    layers.iter().map(|layer| registry.has(*layer)).collect()
}

fn of(reference: &Reference, options: &RegistryOptions) -> Result<Registry> {
    if reference.digest.is_some() {
        let (what, why) = ("pushing by a digest", "the registry computes it; push by a tag");
        return Err(ImageError::Unsupported { what: what.to_owned(), why: why.to_owned() });
    }
    Ok(Registry { actions: "pull,push", ..Registry::new(reference, options)? })
}

/// Pushes an image as `reference`: its layers, the lowest first, each as its file holds it; those
/// without one the registry has.
///
/// # Errors
/// [`ImageError::Unauthorized`] where the credentials do not do; what the registry refuses; the
/// network's.
pub fn push(
    reference: &Reference,
    options: &RegistryOptions,
    layers: Vec<(Layer, Option<File>)>,
    config: &[u8],
    progress: &mut dyn Progress,
) -> Result<Pushed> {
    let registry = of(reference, options)?;
    let count = layers.len();
    let mut told = Vec::new();
    for (index, (layer, file)) in layers.into_iter().enumerate() {
        let Layer { blob, blob_bytes, .. } = layer;
        progress.event(ProgressEvent::Layer { index, count, bytes: Some(blob_bytes) });
        let is_there = registry.has(blob)?;
        match file {
            _ if is_there => progress.event(ProgressEvent::Present { id: blob }),
            Some(mut file) => {
                let to = registry.begin_upload()?;
                let open = || {
                    file.rewind()?;
                    Ok(file.try_clone()?.take(blob_bytes))
                };
                registry.upload(&to, blob, blob_bytes, open, progress)?;
            }
            None => {
                let path = format!("blobs/{blob}");
                return Err(registry.failed(&path, "it had the layer, and lost it; push again"));
            }
        }
        told.push(json!({ "mediaType": LAYER, "digest": blob, "size": blob_bytes }));
    }
    let (config_digest, config_bytes) = (Digest::of(config), config.len() as u64);
    if !registry.has(config_digest)? {
        let to = registry.begin_upload()?;
        registry.upload(&to, config_digest, config_bytes, || Ok(config), &mut crate::Silent)?;
    }
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": { "mediaType": CONFIG, "digest": config_digest, "size": config_bytes },
        "layers": told,
    });
    progress.event(ProgressEvent::Finishing);
    registry.name(&super::super::version(reference), manifest.to_string().as_bytes())
}

/// Counts what is read of it.
struct Told<'a, R> {
    from: R,
    bytes: &'a Cell<u64>,
    progress: &'a mut dyn Progress,
}

impl<R: Read> Read for Told<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(CHUNK_BYTES);
        let n = self.from.read(&mut buffer[..most])?;
        self.bytes.set(self.bytes.get() + n as u64);
        self.progress.event(ProgressEvent::Bytes(n as u64));
        Ok(n)
    }
}

#[derive(Deserialize)]
struct Refusals {
    errors: Vec<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl Registry {
    /// Has `call` ask with what logs us in, once more after a login if the registry wants one.
    fn asked(
        &self,
        path: &str,
        mut call: impl FnMut(Option<&str>) -> Result<Response<Body>>,
    ) -> Result<Response<Body>> {
        let mut ask = || {
            let authorization = self.authorization.borrow().clone();
            call(authorization.as_deref())
        };
        let response = ask()?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        self.log_in(path, &response)?;
        ask()
    }

    /// Whether the registry has this blob.
    fn has(&self, digest: Digest) -> Result<bool> {
        let path = format!("blobs/{digest}");
        let uri = format!("{}/{path}", self.base);
        let response = self.asked(&path, |authorization| {
            let mut request = self.agent.head(&uri);
            if let Some(authorization) = authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            request.call().map_err(|error| self.failed(&path, error))
        })?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(false),
            // Where it would send us for it, it has it.
            status if status == StatusCode::OK || super::is_redirect(status) => Ok(true),
            _ => Err(self.refusal(&path, response)),
        }
    }

    /// Where a blob is to be sent.
    fn begin_upload(&self) -> Result<Uri> {
        let path = "blobs/uploads/";
        let uri: Uri = format!("{}/{path}", self.base)
            .parse()
            .map_err(|error: ureq::http::uri::InvalidUri| self.failed(path, error))?;
        let response = self.asked(path, |authorization| {
            let mut request = self.agent.post(&uri);
            if let Some(authorization) = authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            request.send_empty().map_err(|error| self.failed(path, error))
        })?;
        if response.status() != StatusCode::ACCEPTED {
            return Err(self.refusal(path, response));
        }
        let to = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
        // One that brings a user of its own is none: it would say who we are.
        to.and_then(|to| place::resolve(&uri, to))
            .filter(|to| Place::of(to).is_some())
            .ok_or_else(|| self.failed(path, "it does not say where blobs are to be sent"))
    }

    /// Tells the registry that nothing will be sent there.
    fn give_up(&self, to: &Uri) {
        // Of another host it is not known what it would take away.
        if !self.is_own(to) {
            return;
        }
        let mut request = self.agent.delete(to);
        let authorization = self.authorization.borrow().clone();
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        // It forgets that by itself, later.
        let _ = request.call();
    }

    /// What logs us in is the registry's alone.
    fn is_own(&self, uri: &Uri) -> bool {
        Place::of(uri).as_ref() == Some(&self.place)
    }

    /// Sends a blob, which `open` gives from its beginning, to where it is to be sent.
    fn upload<R: Read>(
        &self,
        to: &Uri,
        digest: Digest,
        bytes: u64,
        mut open: impl FnMut() -> io::Result<R>,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let path = format!("blobs/{digest}");
        let digest = digest.to_string();
        let to = place::with_query(&to.to_string(), [("digest", digest.as_str())].into_iter());
        let to =
            to.ok_or_else(|| self.failed(&path, "it does not say where blobs are to be sent"))?;
        let is_own = self.is_own(&to);
        let sent = Cell::new(0);
        let mut send = |authorization: Option<&str>| {
            let opened = open().map_err(|error| ImageError::io("cannot read the layer", error))?;
            let mut body = Told { from: opened, bytes: &sent, progress: &mut *progress };
            let mut request = self
                .agent
                .put(&to)
                .header(header::CONTENT_TYPE, BYTES)
                .header(header::CONTENT_LENGTH, bytes);
            if let Some(authorization) = authorization.filter(|_| is_own) {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            let request = request.config().timeout_recv_response(Some(STORED_MAX)).build();
            request
                .send(SendBody::from_reader(&mut body))
                .map_err(|error| self.failed(&path, error))
        };
        let response = match is_own {
            true => self.asked(&path, send)?,
            false => send(None)?,
        };
        match response.status() {
            StatusCode::CREATED => Ok(()),
            _ => Err(self.refusal(&path, response)),
        }
    }

    /// Gives a manifest its name.
    fn name(&self, tag: &str, manifest: &[u8]) -> Result<Pushed> {
        let path = format!("manifests/{tag}");
        let uri = format!("{}/{path}", self.base);
        let response = self.asked(&path, |authorization| {
            let mut request = self.agent.put(&uri).header(header::CONTENT_TYPE, MANIFEST);
            if let Some(authorization) = authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            request.send(manifest).map_err(|error| self.failed(&path, error))
        })?;
        match response.status() {
            StatusCode::CREATED => {
                Ok(Pushed { digest: Digest::of(manifest), size: manifest.len() as u64 })
            }
            _ => Err(self.refusal(&path, response)),
        }
    }

    /// Why the registry did not do it, in its own words where it has some.
    fn refusal(&self, path: &str, response: Response<Body>) -> ImageError {
        let status = response.status();
        let mut text = Vec::new();
        // Without its words the status says it.
        let _ = response.into_body().into_reader().take(REFUSAL_BYTES_MAX).read_to_end(&mut text);
        let said = serde_json::from_slice::<Refusals>(&text).ok();
        let said = said.and_then(|said| said.errors.into_iter().next());
        let why = match said {
            Some(Refusal { code, message }) => {
                format!("{status}: {}", shown(format!("{code} {message}").trim().as_bytes()))
            }
            None => status.to_string(),
        };
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.unauthorized(path, why),
            _ => self.failed(path, why),
        }
    }
}
