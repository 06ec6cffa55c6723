//! Pulling from a registry (OCI distribution-spec; Docker token
//! authentication).

mod auth;

use std::cell::RefCell;
use std::io::Read;
use std::time::Duration;

use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

use super::oci::{Blobs, Descriptor, plan_document};
use super::{Input, LayerPlan, Plan, read_document};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::reference::Reference;
use crate::{Digest, digest};

const MANIFEST_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_HUB: &str = "registry-1.docker.io";

/// A user of a registry.
#[derive(Clone)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

/// The password stays out of logs.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// How to speak to a registry.
#[derive(Debug, Clone, Default)]
pub struct RegistryOptions {
    /// Plain http; loopback addresses use it anyway.
    pub plain_http: bool,
    pub credentials: Option<Credentials>,
}

/// One repository of a registry.
struct Registry {
    agent: Agent,
    host: String,
    base: String,
    repository: String,
    plain_http: bool,
    credentials: Option<Credentials>,
    /// The `Authorization` header that the registry asked for.
    authorization: RefCell<Option<String>>,
}

/// Fetches the manifest and configuration of an image.
pub(super) fn plan(
    reference: &Reference,
    options: &RegistryOptions,
    limits: &ImportLimits,
) -> Result<Plan> {
    let registry = Registry::new(reference, options);
    let version = match (&reference.digest, &reference.tag) {
        (Some(digest), _) => digest.to_string(),
        (None, tag) => tag.clone().unwrap_or_else(|| "latest".into()),
    };
    let bytes = {
        let mut stream = registry.get(&format!("manifests/{version}"), MANIFEST_TYPES)?;
        read_document(&mut *stream, "the manifest", limits)?
    };
    if let Some(expected) = reference.digest {
        digest::expect("the manifest", expected, Digest::of(&bytes))?;
    }
    plan_document(Box::new(registry), bytes, limits)
}

impl Registry {
    fn new(reference: &Reference, options: &RegistryOptions) -> Self {
        let host = match reference.registry.as_str() {
            "docker.io" => DOCKER_HUB,
            other => other,
        };
        let plain_http = options.plain_http || is_loopback(host);
        let scheme = if plain_http { "http" } else { "https" };
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(!plain_http)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .build();
        Self {
            agent: agent.into(),
            host: host.to_owned(),
            base: format!("{scheme}://{host}/v2/{}", reference.repository),
            repository: reference.repository.clone(),
            plain_http,
            credentials: options.credentials.clone(),
            authorization: RefCell::new(None),
        }
    }

    /// The body of `{base}/{path}`; logs in when the registry asks for it.
    fn get(&self, path: &str, accept: &str) -> Result<Box<dyn Read>> {
        let mut response = self.send(path, accept)?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.log_in(path, &response)?;
            response = self.send(path, accept)?;
        }
        match response.status() {
            StatusCode::OK => Ok(Box::new(response.into_body().into_reader())),
            StatusCode::NOT_FOUND => Err(ImageError::NotInRegistry {
                registry: self.host.clone(),
                what: self.what(path),
            }),
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                Err(self.unauthorized(path, status.to_string()))
            }
            status => Err(self.failed(path, status)),
        }
    }

    fn send(&self, path: &str, accept: &str) -> Result<Response<Body>> {
        let mut request =
            self.agent.get(format!("{}/{path}", self.base)).header(header::ACCEPT, accept);
        if let Some(authorization) = self.authorization.borrow().as_ref() {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        request.call().map_err(|error| self.failed(path, error))
    }

    fn log_in(&self, path: &str, response: &Response<Body>) -> Result<()> {
        let challenges: Vec<_> = response
            .headers()
            .get_all(header::WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| auth::Challenge::parse(value.to_str().ok()?))
            .collect();
        let challenge = challenges.first().ok_or_else(|| {
            self.unauthorized(path, "it wants a login of a kind we do not know".into())
        })?;
        let authorization = self.authorize(path, challenge)?;
        *self.authorization.borrow_mut() = Some(authorization);
        Ok(())
    }

    fn authorize(&self, path: &str, challenge: &auth::Challenge) -> Result<String> {
        let basic = self.credentials.as_ref().map(auth::basic);
        match challenge {
            auth::Challenge::Basic => basic
                .ok_or_else(|| self.unauthorized(path, "it wants a user name and password".into())),
            auth::Challenge::Bearer { realm, service } => {
                if !self.plain_http && !realm.starts_with("https://") {
                    return Err(
                        self.unauthorized(path, "it sends us to an unencrypted login".into())
                    );
                }
                self.token(path, realm, service.as_deref(), basic)
            }
        }
    }

    /// Asks the token server for a token to pull this repository.
    fn token(
        &self,
        path: &str,
        realm: &str,
        service: Option<&str>,
        basic: Option<String>,
    ) -> Result<String> {
        let scope = format!("repository:{}:pull", self.repository);
        let mut request = self.agent.get(realm).query("scope", scope);
        if let Some(service) = service {
            request = request.query("service", service);
        }
        if let Some(basic) = basic {
            request = request.header(header::AUTHORIZATION, basic);
        }
        let mut response = request.call().map_err(|error| self.failed(path, error))?;
        if response.status() != StatusCode::OK {
            let why = format!("its login server answers {}", response.status());
            return Err(self.unauthorized(path, why));
        }
        let limits = ImportLimits { document_bytes_max: 1 << 20, ..Default::default() };
        let text = read_document(&mut response.body_mut().as_reader(), "the login token", &limits)?;
        auth::token(&text).map(|token| format!("Bearer {token}"))
    }

    fn what(&self, path: &str) -> String {
        shown(format!("{}/{path}", self.repository).as_bytes())
    }

    fn unauthorized(&self, path: &str, why: String) -> ImageError {
        ImageError::Unauthorized { registry: self.host.clone(), what: self.what(path), why }
    }

    fn failed(&self, path: &str, why: impl ToString) -> ImageError {
        ImageError::Registry {
            registry: self.host.clone(),
            what: self.what(path),
            why: why.to_string(),
        }
    }
}

impl Input for Registry {
    fn open_layer(&self, layer: &LayerPlan) -> Result<Box<dyn Read + '_>> {
        let digest = layer.blob.map_or(layer.diff_id, |(digest, _)| digest);
        self.get(&format!("blobs/{digest}"), "*/*")
    }
}

impl Blobs for Registry {
    fn manifest(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.get(&format!("manifests/{}", descriptor.digest), MANIFEST_TYPES)
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<Box<dyn Read + '_>> {
        self.get(&format!("blobs/{}", descriptor.digest), "*/*")
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_plain() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:1", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example.com", "127.0.0.1.example.com", "10.0.0.1:5000"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
