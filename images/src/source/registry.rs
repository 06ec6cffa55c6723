//! Pulling from a registry and pushing to it (OCI distribution-spec; Docker token
//! authentication).

mod auth;
mod judge;
mod look;
mod place;
mod push;

use std::cell::RefCell;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body, Proxy, ProxyBuilder};

use super::oci::{Blobs, Descriptor, plan_document};
use super::{Input, LayerPlan, Plan, read_document, remote};
use crate::error::{ImageError, Result, shown};
use crate::limits::ImportLimits;
use crate::reference::Reference;
use crate::{Digest, digest};
pub use judge::{Connection, Judge};
pub use look::{Looked, Platform, log_in, look};
use place::{Place, is_loopback};
pub use push::{Pushed, present, push};

const MANIFEST_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_HUB: &str = "registry-1.docker.io";
/// As many as other clients follow.
const REDIRECTS_MAX: usize = 10;

/// A user of a registry.
#[derive(Clone, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RegistryOptions {
    /// Plain http; loopback addresses use it anyway.
    pub plain_http: bool,
    /// The registry gets them, and its login server if that is the same host, one below it or
    /// below the domain that the registry is in, or one of `login_hosts`. Nobody else does,
    /// wherever the registry sends us.
    pub credentials: Option<Credentials>,
    /// Other hosts of login servers that may have the credentials, without a port.
    pub login_hosts: Vec<String>,
    /// For a process that has no environment.
    pub proxy: Option<ProxyOptions>,
    /// Whose rules of the network the connections are held to; the operator's where there are
    /// none. What connects makes its judge of them.
    pub grant: Option<Grant>,
    #[serde(skip)]
    pub judge: Option<Judge>,
}

/// What someone may reach who has images fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// In the words of whoever judges.
    pub rules: String,
    /// Addresses of this host, which it reaches by a rule that names them alone.
    pub own: Vec<IpAddr>,
}

/// The proxy that the environment names, in the variables that other programs know too.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyOptions {
    uri: String,
    /// Which hosts are reached without it.
    without: String,
}

/// It may hold a password.
impl std::fmt::Debug for ProxyOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyOptions").field("without", &self.without).finish_non_exhaustive()
    }
}

impl ProxyOptions {
    /// By `variable`, which reads the environment.
    #[must_use]
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let either = |name: &str| {
            let found = variable(name).or_else(|| variable(&name.to_ascii_lowercase()));
            found.filter(|text| !text.is_empty())
        };
        let uri = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"].into_iter().find_map(either)?;
        Some(Self { uri, without: either("NO_PROXY").unwrap_or_default() })
    }

    fn proxy(&self) -> std::result::Result<Proxy, ureq::Error> {
        let own = Proxy::new(&self.uri)?;
        let mut whole = Proxy::builder(own.protocol()).host(own.host()).port(own.port());
        if let Some(name) = own.username() {
            whole = whole.username(name);
        }
        if let Some(password) = own.password() {
            whole = whole.password(password);
        }
        let without = self.without.split(',').map(str::trim).filter(|host| !host.is_empty());
        without.fold(whole, ProxyBuilder::no_proxy).build()
    }
}

/// One repository of a registry.
struct Registry {
    agent: Agent,
    host: String,
    /// Where the registry is: what it asked for is told there and nowhere else.
    place: Place,
    base: String,
    repository: String,
    /// What a login is asked for (Docker token authentication, "scope").
    actions: &'static str,
    plain_http: bool,
    credentials: Option<Credentials>,
    login_hosts: Vec<String>,
    /// The `Authorization` header that the registry asked for.
    authorization: RefCell<Option<String>>,
}

/// What came at the end of a chain of redirects.
struct Answer {
    response: Response<Body>,
    from: Place,
}

/// Fetches the manifest and configuration of an image.
pub(super) fn plan(
    reference: &Reference,
    options: &RegistryOptions,
    limits: &ImportLimits,
) -> Result<Plan> {
    let registry = Registry::new(reference, options)?;
    let version = super::version(reference);
    let bytes = {
        let mut stream = registry.get(&format!("manifests/{version}"), MANIFEST_TYPES)?;
        read_document(&mut *stream, "the manifest", limits)?
    };
    if let Some(expected) = reference.digest {
        digest::expect("the manifest", expected, Digest::of(&bytes))?;
    }
    plan_document(Box::new(registry), bytes, limits)
}

/// Answers what the other side of `stream` asks for. It can ask for nothing but what one
/// repository has: its manifests by digest, the one that is wanted, and its blobs.
pub(super) fn serve(
    stream: &UnixStream,
    reference: &Reference,
    options: &RegistryOptions,
) -> io::Result<()> {
    let registry = Registry::new(reference, options);
    let version = super::version(reference);
    remote::serve(stream, |name| {
        let registry = registry.as_ref().map_err(|error| ImageError::Refused(error.refusal()))?;
        let is_digest = |text: &str| text.parse::<Digest>().is_ok();
        match name.split_once('/') {
            Some(("manifests", which)) if which == version || is_digest(which) => {
                registry.get(name, MANIFEST_TYPES)
            }
            Some(("blobs", which)) if is_digest(which) => registry.get(name, "*/*"),
            _ => Err(ImageError::malformed("the request to the registry", "it has no such thing")),
        }
    })
}

impl Registry {
    fn new(reference: &Reference, options: &RegistryOptions) -> Result<Self> {
        let host = match reference.registry.as_str() {
            "docker.io" => DOCKER_HUB,
            other => other,
        };
        let plain_http = options.plain_http || is_loopback(host);
        let scheme = if plain_http { "http" } else { "https" };
        let mut agent = Agent::config_builder();
        if let Some(proxy) = &options.proxy {
            let proxy = proxy.proxy().map_err(|error| ImageError::Registry {
                registry: host.to_owned(),
                what: "the proxy of the environment (HTTPS_PROXY)".to_owned(),
                why: error.to_string(),
            })?;
            agent = agent.proxy(Some(proxy));
        }
        let config = agent
            .http_status_as_error(false)
            .https_only(!plain_http)
            // They are followed here, where it is known who may be told what.
            .max_redirects(0)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .build();
        let base = format!("{scheme}://{host}/v2/{}", reference.repository);
        // Without a repository it is the registry itself.
        let base = base.trim_end_matches('/').to_owned();
        let place = base.parse().ok().and_then(|uri| Place::of(&uri));
        let place = place.ok_or_else(|| ImageError::Registry {
            registry: host.to_owned(),
            what: reference.repository.clone(),
            why: "its name is no host".to_owned(),
        })?;
        let agent = match &options.judge {
            Some(judge) if options.proxy.is_none() => {
                let resolver = judge::Judged::new(place.clone(), judge.clone());
                Agent::with_parts(config, DefaultConnector::default(), resolver)
            }
            _ => config.into(),
        };
        Ok(Self {
            agent,
            host: host.to_owned(),
            place,
            base,
            repository: reference.repository.clone(),
            actions: "pull",
            plain_http,
            credentials: options.credentials.clone(),
            login_hosts: options.login_hosts.clone(),
            authorization: RefCell::new(None),
        })
    }

    /// The body of `{base}/{path}`; logs in when the registry asks for it.
    fn get(&self, path: &str, accept: &str) -> Result<Box<dyn Read>> {
        let mut answer = self.send(path, accept)?;
        if answer.response.status() == StatusCode::UNAUTHORIZED && answer.from == self.place {
            self.log_in(path, &answer.response)?;
            answer = self.send(path, accept)?;
        }
        let Answer { response, from } = answer;
        match response.status() {
            StatusCode::OK => Ok(Box::new(response.into_body().into_reader())),
            StatusCode::UNAUTHORIZED if from != self.place => {
                let from = shown(from.to_string().as_bytes());
                let why = format!("{from}, where it sends us, wants a login and gets none");
                Err(self.unauthorized(path, why))
            }
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

    fn send(&self, path: &str, accept: &str) -> Result<Answer> {
        let uri = format!("{}/{path}", self.base);
        let uri =
            uri.parse().map_err(|error: ureq::http::uri::InvalidUri| self.failed(path, error))?;
        let authorization = self.authorization.borrow().clone();
        self.follow(path, uri, Some(accept), authorization.as_deref())
    }

    /// Asks at `uri` and where that sends us. `authorization` is for who is asked first.
    fn follow(
        &self,
        path: &str,
        mut uri: Uri,
        accept: Option<&str>,
        authorization: Option<&str>,
    ) -> Result<Answer> {
        let lost = |why: &str| self.failed(path, why);
        let first = Place::of(&uri).ok_or_else(|| lost("it sends us to no host"))?;
        for _ in 0..=REDIRECTS_MAX {
            let from = Place::of(&uri).ok_or_else(|| lost("it sends us to no host"))?;
            let mut request = self.agent.get(&uri);
            if let Some(accept) = accept {
                request = request.header(header::ACCEPT, accept);
            }
            if let Some(authorization) = authorization.filter(|_| from == first) {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            let response = request.call().map_err(|error| self.failed(path, error))?;
            if !is_redirect(response.status()) {
                return Ok(Answer { response, from });
            }
            let to = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
            uri = to
                .and_then(|to| place::resolve(&uri, to))
                .ok_or_else(|| lost("it redirects us without saying where to"))?;
        }
        Err(lost("it redirects us without end"))
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
        match challenge {
            auth::Challenge::Basic => {
                self.credentials.as_ref().map(auth::basic).ok_or_else(|| {
                    self.unauthorized(path, "it wants a user name and password".into())
                })
            }
            auth::Challenge::Bearer { realm, service } => {
                self.token(path, realm, service.as_deref())
            }
        }
    }

    /// Asks the token server for a token for this repository.
    fn token(&self, path: &str, realm: &str, service: Option<&str>) -> Result<String> {
        let scope = format!("repository:{}:{}", self.repository, self.actions);
        let scope = (!self.repository.is_empty()).then_some(("scope", &*scope));
        let parts = [scope, service.map(|service| ("service", service))];
        let uri = place::with_query(realm, parts.into_iter().flatten());
        let server = uri.as_ref().and_then(Place::of);
        let (Some(uri), Some(server)) = (uri, server) else {
            return Err(self.unauthorized(path, "its login server has no address".into()));
        };
        if !self.plain_http && !server.is_encrypted() {
            return Err(self.unauthorized(path, "it sends us to an unencrypted login".into()));
        }
        let credentials = self.credentials.as_ref();
        if credentials.is_some() && !server.logs_in_for(&self.place, &self.login_hosts) {
            let server = shown(server.host().as_bytes());
            let why = format!(
                "its login server {server} is another's: it gets no password unless it is named \
                 as one that may have it"
            );
            return Err(self.unauthorized(path, why));
        }
        let basic = credentials.map(auth::basic);
        let mut response = self.follow(path, uri, None, basic.as_deref())?.response;
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

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}
