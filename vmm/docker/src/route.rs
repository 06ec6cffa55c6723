//! Which call is which: the one list of what is spoken.

use std::sync::Arc;

use crate::error::{ApiError, ApiResult};
use crate::http::{Call, Response};
use crate::state::Server;
use crate::{
    archive, attach, build, buildkit, calls, diff, discard, exec, images, logs, networks, policy,
    push, registry, save, stats, system, update, views, volumes,
};

/// Answers one call.
pub async fn route(server: &Arc<Server>, method: &str, mut call: Call) -> ApiResult<Response> {
    policy::permit(server, method, &mut call).await?;
    let segments = call.target.segments.clone();
    let path: Vec<&str> = segments.iter().map(String::as_str).collect();
    match path.as_slice() {
        ["_ping"] if matches!(method, "GET" | "HEAD") => Ok(system::ping()),
        ["version"] if method == "GET" => Ok(system::version()),
        ["info"] if method == "GET" => system::info(server).await,
        ["build"] if method == "POST" => build::call::build(server, call).await,
        ["session"] if method == "POST" => buildkit::session(server, call),
        ["grpc"] if method == "POST" => buildkit::grpc(server, call),
        ["build", "prune"] if method == "POST" => build::call::prune(server).await,
        ["commit"] if method == "POST" => images::commit(server, call).await,
        // What is there is built in.
        ["plugins"] if method == "GET" => Ok(views::ok(&serde_json::json!([]))),
        ["events"] if method == "GET" => server.events.serve(&call),
        ["system", "df"] if method == "GET" => system::disk_usage(server, &call).await,
        ["auth"] if method == "POST" => registry::auth(server, call).await,
        ["distribution", name @ .., "json"] if method == "GET" && !name.is_empty() => {
            registry::distribution(server, &name.join("/"), &call).await
        }
        ["containers", rest @ ..] => containers(server, method, rest, call).await,
        ["exec", rest @ ..] => execs(server, method, rest, call).await,
        ["images", rest @ ..] => image(server, method, rest, call).await,
        ["networks", rest @ ..] => match (method, rest) {
            ("GET", []) => networks::list(server, &call).await,
            ("POST", ["create"]) => networks::create(server, call).await,
            ("POST", ["prune"]) => networks::prune(server, &call).await,
            ("GET", [name]) => networks::inspect(server, name).await,
            ("DELETE", [name]) => networks::remove(server, name, &call.caller).await,
            ("POST", [name, "connect"]) => networks::connect(server, name, call).await,
            ("POST", [name, "disconnect"]) => networks::disconnect(server, name, call).await,
            _ => Err(unknown(method, &path)),
        },
        ["volumes", rest @ ..] => match (method, rest) {
            ("GET", []) => volumes::list(server, &call).await,
            ("POST", ["create"]) => volumes::create(server, call).await,
            ("POST", ["prune"]) => volumes::prune(server, &call).await,
            ("GET", [name]) => volumes::inspect(server, name),
            ("DELETE", [name]) => volumes::remove(server, name, &call).await,
            _ => Err(unknown(method, &path)),
        },
        _ => Err(refusal(method, &path)),
    }
}

async fn containers(
    server: &Arc<Server>,
    method: &str,
    rest: &[&str],
    call: Call,
) -> ApiResult<Response> {
    match (method, rest) {
        ("GET", ["json"]) => calls::list(server, &call).await,
        ("POST", ["create"]) => calls::create(server, call).await,
        ("POST", ["prune"]) => calls::prune(server, &call).await,
        ("DELETE", [id]) => calls::remove(server, id, &call).await,
        ("GET", [id, "json"]) => calls::inspect(server, id, &call).await,
        ("POST", [id, "start"]) => calls::start(server, id).await,
        ("POST", [id, "stop"]) => calls::stop(server, id, &call).await,
        ("POST", [id, "restart"]) => calls::restart(server, id, &call).await,
        ("POST", [id, "kill"]) => calls::kill(server, id, &call).await,
        ("POST", [id, "pause"]) => calls::pause(server, id, true).await,
        ("POST", [id, "unpause"]) => calls::pause(server, id, false).await,
        ("POST", [id, "wait"]) => calls::wait(server, id, &call).await,
        ("POST", [id, "update"]) => update::update(server, id, call).await,
        ("POST", [id, "rename"]) => calls::rename(server, id, &call).await,
        ("GET", [id, "logs"]) => logs::logs(server, id, &call).await,
        ("POST", [id, "attach"]) => attach::attach(server, id, call).await,
        ("POST", [id, "resize"]) => attach::resize(server, id, &call).await,
        ("GET", [id, "stats"]) => stats::stats(server, id, &call).await,
        ("GET", [id, "top"]) => stats::top(server, id, &call).await,
        ("GET", [id, "changes"]) => diff::changes(server, id, &call.place).await,
        ("HEAD", [id, "archive"]) => archive::head(server, id, &call).await,
        ("GET", [id, "archive"]) => archive::get(server, id, &call).await,
        ("PUT", [id, "archive"]) => archive::put(server, id, call).await,
        ("GET", [id, "export"]) => save::export(server, id, &call.place).await,
        ("POST", [id, "exec"]) => exec::create(server, id, call).await,
        ("GET", [id, "attach", "ws"]) => {
            // A container that is not there is the first thing to say.
            server.find(id).await?;
            Err(ApiError::unsupported(
                "attaching by websocket",
                "attach by taking the connection over (POST /containers/ID/attach)",
            ))
        }
        (_, [id, verb]) => {
            server.find(id).await?;
            Err(unknown(method, &["containers", id, verb]))
        }
        _ => Err(unknown(method, &[&["containers"], rest].concat())),
    }
}

async fn execs(
    server: &Arc<Server>,
    method: &str,
    rest: &[&str],
    call: Call,
) -> ApiResult<Response> {
    match (method, rest) {
        ("POST", [id, "start"]) => exec::start(server, id, call).await,
        ("POST", [id, "resize"]) => exec::resize(server, id, &call),
        ("GET", [id, "json"]) => exec::inspect(server, id),
        _ => Err(unknown(method, &[&["exec"], rest].concat())),
    }
}

/// A name of an image may hold slashes.
async fn image(
    server: &Arc<Server>,
    method: &str,
    rest: &[&str],
    call: Call,
) -> ApiResult<Response> {
    match (method, rest) {
        ("GET", ["json"]) => images::list(server, &call).await,
        ("POST", ["create"]) => images::create(server, call).await,
        ("POST", ["load"]) => images::load(server, call).await,
        ("POST", ["prune"]) => discard::prune(server, &call).await,
        ("GET", ["search"]) => {
            Err(ApiError::unsupported("searching a registry", "pull the image by its name"))
        }
        ("GET", ["get"]) => {
            let names = call.target.query.all("names").map(str::to_owned).collect();
            save::save(server, names).await
        }
        ("GET", [name @ .., "get"]) => save::save(server, vec![name.join("/")]).await,
        ("GET", [name @ .., "json"]) => images::inspect(server, name.join("/"), &call).await,
        ("GET", [name @ .., "history"]) => images::history(server, name.join("/"), &call).await,
        ("POST", [name @ .., "tag"]) => images::tag(server, name.join("/"), &call).await,
        ("POST", [name @ .., "push"]) => push::push(server, name.join("/"), &call).await,
        ("DELETE", [_, ..]) => discard::remove(server, rest.join("/"), &call).await,
        _ => Err(unknown(method, &[&["images"], rest].concat())),
    }
}

/// Why a call outside of the families above is not answered.
fn refusal(method: &str, path: &[&str]) -> ApiError {
    let (what, remedy) = match path {
        ["plugins", ..] => ("a plugin", "use what is built in"),
        ["swarm" | "services" | "nodes" | "tasks" | "secrets" | "configs", ..] => {
            return ApiError::new(
                hyper::StatusCode::SERVICE_UNAVAILABLE,
                "This node is not a swarm manager. Exocell has no swarm: start containers one by one.",
            );
        }
        _ => return unknown(method, path),
    };
    ApiError::unsupported(what, remedy)
}

fn unknown(method: &str, path: &[&str]) -> ApiError {
    ApiError::not_found(format!("page not found: {method} /{}", path.join("/")))
}
