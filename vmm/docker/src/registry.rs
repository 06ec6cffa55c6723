//! The calls that ask a registry: `POST /auth` and `GET /distribution/{name}/json`.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use exocell_cell::images::{Credentials, Looked, ProxyOptions, Reference, RegistryOptions};
use exocell_cell::registry;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::json;

use crate::error::{ApiError, ApiResult};
use crate::fields;
use crate::http::{Call, Response};
use crate::state::Server;
use crate::views;

/// What clients call Docker's own registry, beside `docker.io`.
const HUB: [&str; 4] = ["", "index.docker.io", "registry-1.docker.io", "docker.io"];

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Login {
    username: Option<String>,
    password: Option<String>,
    serveraddress: Option<String>,
}

/// What `X-Registry-Auth` holds.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Auth {
    username: String,
    password: String,
}

/// Those that a client sends along.
pub fn credentials(call: &Call) -> ApiResult<Option<Credentials>> {
    let Some(header) = call.headers.get("x-registry-auth") else { return Ok(None) };
    let bad = || ApiError::bad_request("X-Registry-Auth is not JSON in base64");
    let bytes = URL_SAFE
        .decode(header.as_bytes())
        .or_else(|_| STANDARD.decode(header.as_bytes()))
        .map_err(|_| bad())?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let auth: Option<Auth> = serde_json::from_slice(&bytes).map_err(|_| bad())?;
    let auth = auth.unwrap_or_default();
    let Auth { username, password } = auth;
    Ok((!username.is_empty()).then_some(Credentials { username, password }))
}

/// How a registry is spoken to, with `credentials` or without.
pub fn options(credentials: Option<Credentials>) -> RegistryOptions {
    let proxy = ProxyOptions::read(|name| std::env::var(name).ok());
    RegistryOptions { credentials, proxy, ..RegistryOptions::default() }
}

/// The host that a login is for: clients name it as an address of the web, too.
fn host(address: &str) -> String {
    let bare = address.split_once("://").map_or(address, |(_, rest)| rest);
    let host = bare.split('/').next().unwrap_or_default();
    if HUB.contains(&host) { "docker.io".to_owned() } else { host.to_owned() }
}

/// `POST /auth`: tries a login. Nothing of it is kept: clients send it with each pull.
pub async fn auth(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let Login { username, password, serveraddress } = call.fields(fields::AUTH).await?;
    let host = host(serveraddress.as_deref().unwrap_or_default());
    // A name of an image there is one, if the host is.
    let named: Reference = format!("{host}/a").parse()?;
    let (username, password) = (username.unwrap_or_default(), password.unwrap_or_default());
    if username.is_empty() {
        return Err(ApiError::bad_request("no user is named (username)"));
    }
    let options = options(Some(Credentials { username, password }));
    let tried = server.at_its_pace(move |_| Ok(registry::log_in(&named.registry, &options)?));
    tried.await.map_err(|error| match error.status {
        StatusCode::FORBIDDEN => ApiError { status: StatusCode::UNAUTHORIZED, ..error },
        _ => error,
    })?;
    Ok(views::ok(&json!({ "Status": "Login Succeeded", "IdentityToken": "" })))
}

/// `GET /distribution/{name}/json`: what a registry has by that name.
pub async fn distribution(server: &Arc<Server>, name: &str, call: &Call) -> ApiResult<Response> {
    let reference: Reference = name.parse()?;
    let options = options(credentials(call)?);
    let looked = server.at_its_pace(move |_| Ok(registry::look(&reference, &options)?));
    let Looked { digest, media_type, size, platforms } = looked.await?;
    Ok(views::ok(&json!({
        "Descriptor": { "mediaType": media_type, "digest": digest.to_string(), "size": size },
        "Platforms": platforms,
    })))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_registrys_host_is_found_however_it_is_written() {
        for (address, host) in [
            ("https://index.docker.io/v1/", "docker.io"),
            ("", "docker.io"),
            ("http://localhost:5000", "localhost:5000"),
            ("r.test/v2/", "r.test"),
        ] {
            assert_eq!(super::host(address), host);
        }
    }
}
