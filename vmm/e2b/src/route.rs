//! Which call is which: the one list of what is spoken beside what is about one sandbox
//! ([`crate::envd`]).

use std::sync::Arc;

use hyper::{Method, StatusCode};
use percent_encoding::percent_decode_str;

use crate::error::{Problem, Result};
use crate::http::{Call, Response, empty};
use crate::keys::Tenant;
use crate::state::Server;
use crate::{builds, calls, create, snapshots, templates};

/// Answers one call on the server itself.
pub async fn route(server: &Arc<Server>, mut call: Call) -> Result<Response> {
    let path = call.path.clone();
    let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if call.method == Method::GET && parts == ["health"] {
        return Ok(empty(StatusCode::OK));
    }
    if let ("PUT", ["e2b", "archives", tenant, hash]) = (call.method.as_str(), parts.as_slice()) {
        // Its URL is signed.
        let query = call.query.clone();
        return builds::archives::upload(&server.builds, tenant, hash, &query, call).await;
    }
    let tenant = tenant(server, &call)?;
    call.count(&tenant.name)?;
    // Where both are spoken alike, the version says nothing.
    let is_second = parts.first() == Some(&"v2");
    if is_second {
        parts.remove(0);
    }
    match (call.method.as_str(), parts.as_slice()) {
        ("POST", ["sandboxes"]) => create::create(server, &tenant, call).await,
        ("GET", ["sandboxes"]) => calls::list(server, &tenant, &call.query, is_second),
        ("POST", ["v3", "templates"]) => builds::request(&server.builds, &tenant, call).await,
        ("GET", ["templates"]) => templates::list(server, &tenant, &call.query, is_second).await,
        ("POST", ["templates", "tags"]) => templates::assign(server, &tenant, call).await,
        ("DELETE", ["templates", "tags"]) => templates::unassign(server, &tenant, call).await,
        ("GET", ["templates", name, "tags"]) => {
            templates::tags(server, &tenant, &decoded(name)).await
        }
        ("GET", ["templates", name]) => templates::info(server, &tenant, &decoded(name)).await,
        ("GET", ["templates", "aliases", name]) => {
            builds::alias(&server.builds, &tenant, &decoded(name)).await
        }
        ("GET", ["templates", _, "files", hash]) => {
            builds::archives::file(&server.builds, &tenant, hash, &call)
        }
        ("POST", ["templates", name, "builds", id]) => {
            builds::start(&server.builds, &tenant, (&decoded(name), id), call).await
        }
        ("GET", ["templates", name, "builds", id, "status"]) => {
            builds::status(&server.builds, &tenant, (&decoded(name), id), &call.query)
        }
        ("GET", ["snapshots"]) => snapshots::list(server, &tenant, &call.query).await,
        ("DELETE", ["templates", name]) => snapshots::remove(server, &tenant, &decoded(name)).await,
        ("GET", ["sandboxes", "metrics"]) => {
            calls::metrics_of_all(server, &tenant, &call.query).await
        }
        (_, ["sandboxes", id, rest @ ..]) => sandbox(server, &tenant, id, rest, call).await,
        _ => Err(refused(&call, &parts)),
    }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// Whose key the call has.
fn tenant(server: &Server, call: &Call) -> Result<Tenant> {
    let missing =
        || Problem::unauthorized("the key is missing, or is nobody's: say X-API-KEY (E2B_API_KEY)");
    let key = call.header("x-api-key").ok_or_else(missing)?;
    server.keys.find(key).cloned().ok_or_else(missing)
}

async fn sandbox(
    server: &Arc<Server>,
    tenant: &Tenant,
    id: &str,
    rest: &[&str],
    call: Call,
) -> Result<Response> {
    if call.method == Method::DELETE && rest.is_empty() {
        return calls::kill(server, &server.find(&tenant.name, id)?).await;
    }
    let found = server.find_begun(&tenant.name, id)?;
    match (call.method.as_str(), rest) {
        ("GET", []) => Ok(calls::info(server, &found)),
        ("POST", ["timeout"]) => calls::timeout(server, &found, call).await,
        ("POST", ["refreshes"]) => calls::refresh(server, &found, call).await,
        ("POST", ["pause"]) => calls::pause(server, &found, call).await,
        ("POST", ["connect"]) => calls::connect(server, &found, call).await,
        ("POST", ["resume"]) => calls::resume(server, &found, call).await,
        ("POST", ["snapshots"]) => snapshots::create(server, &found, call).await,
        ("PUT", ["network"]) => calls::set_network(server, tenant, &found, call).await,
        ("GET", ["metrics"]) => calls::metrics(server, &found, &call.query).await,
        _ => Err(refused(&call, &[&["sandboxes", "ID"], rest].concat())),
    }
}

/// Why a call outside of the list is not answered.
fn refused(call: &Call, parts: &[&str]) -> Problem {
    let (what, remedy) = match parts {
        ["sandboxes", _, "fork"] => ("forking a sandbox", "start another one"),
        ["sandboxes", _, "logs"] => ("the log of a sandbox", "read a command's output"),
        ["templates", _] if call.method == Method::PATCH => {
            ("publishing a template", "let its users build it with their own keys")
        }
        ["teams", ..] => ("a team", "use the key itself (E2B_API_KEY)"),
        ["volumes", ..] => ("a volume", "upload the files"),
        ["secrets", ..] => ("a secret", "give the sandbox a variable (envs)"),
        _ => {
            return Problem::not_found(format!("there is no {} {}", call.method, call.path));
        }
    };
    Problem::unsupported(what, remedy)
}
