//! Which calls a cell may make that was given the server's socket: one row for each there is.
//!
//! What is in no row is refused: a call that comes later is the operator's until somebody has
//! thought about it.

use std::sync::Arc;

use crate::caller::{CONTAINERS_MAX, Caller, Cell};
use crate::error::{ApiError, ApiResult, refused};
use crate::http::Call;
use crate::state::Server;
use crate::{shares, starts};

/// What is looked at before a call of a cell's is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Nothing: it tells nothing that is anybody's, or ends what anybody may end.
    Anyone,
    /// The container that the path names is the cell's own.
    OwnContainer,
    /// The program that the path names is in a container of the cell's own.
    OwnExec,
    /// The container that the query names is the cell's own, and its image has a name that is free.
    Commit,
    /// The call itself holds what it is asked for against what the cell has.
    Bounded,
    /// The cell may connect to the registry.
    Pull,
    /// Never, for this reason.
    Never(&'static str),
}

const IMAGES: &str = "images are the operator's, and other cells are started from them: a cell may \
                      list, inspect and pull them, and commit its own containers under new names";
const BUILDS: &str = "a cell builds no images by this socket, since all cells share them: build \
                      them in the cell (buildah, kaniko), or have the operator build them";

/// The rule for a call; `None` for one that is in no row.
pub fn rule(method: &str, path: &[&str]) -> Option<Rule> {
    use Rule::*;
    Some(match (method, path) {
        ("GET" | "HEAD", ["_ping"]) => Anyone,
        ("GET", ["version" | "info" | "plugins"]) => Anyone,
        // Of its own containers.
        ("GET", ["events"]) => Bounded,
        ("GET", ["system", "df"]) => Anyone,
        ("POST", ["build"] | ["build", "prune"] | ["session" | "grpc"]) => Never(BUILDS),
        ("POST", ["commit"]) => Commit,
        ("POST", ["auth"]) | ("GET", ["distribution", ..]) => {
            Never("a cell has no registry but those that it pulls from (docker pull)")
        }

        ("GET", ["containers", "json"]) => Anyone,
        ("POST", ["containers", "create"]) => Bounded,
        ("POST", ["containers", "prune"]) => Anyone,
        ("DELETE", ["containers", _]) => Anyone,
        ("POST", ["containers", _, "stop" | "kill" | "wait"]) => Anyone,
        // Every start holds it against what the cell has: [`check_start`].
        ("POST", ["containers", _, "start" | "restart"]) => OwnContainer,
        ("POST", ["containers", _, "pause" | "unpause" | "rename"]) => OwnContainer,
        ("POST", ["containers", _, "attach" | "resize" | "exec"]) => OwnContainer,
        ("POST", ["containers", _, "update"]) => OwnContainer,
        ("GET", ["containers", _, "json" | "logs" | "stats" | "top" | "changes" | "export"]) => {
            OwnContainer
        }
        ("GET", ["containers", _, "attach", "ws"]) => OwnContainer,
        ("HEAD" | "GET" | "PUT", ["containers", _, "archive"]) => OwnContainer,

        ("POST", ["exec", _, "start" | "resize"]) => OwnExec,
        ("GET", ["exec", _, "json"]) => OwnExec,

        ("GET", ["images", "json" | "search"]) => Anyone,
        ("POST", ["images", "create"]) => Pull,
        ("POST", ["images", "load" | "prune"]) => Never(IMAGES),
        ("GET", ["images", "get"] | ["images", .., "get"]) => Never(IMAGES),
        ("GET", ["images", _, .., "json" | "history"]) => Anyone,
        ("POST", ["images", _, .., "tag" | "push"]) => Never(IMAGES),
        ("DELETE", ["images", _, ..]) => Never(IMAGES),

        ("GET", ["networks"] | ["networks", _]) => Anyone,
        ("POST", ["networks", "create"]) => Bounded,
        ("POST", ["networks", "prune"]) => Bounded,
        ("DELETE", ["networks", _]) => Bounded,
        ("POST", ["networks", _, "connect" | "disconnect"]) => Bounded,

        ("GET", ["volumes"] | ["volumes", _]) => Anyone,
        ("POST", ["volumes", "create"]) => Bounded,
        ("POST", ["volumes", "prune"]) => Bounded,
        ("DELETE", ["volumes", _]) => Bounded,
        _ => return None,
    })
}

/// Whether the call is one for who makes it. A container's name becomes its id: what is called so a
/// moment later is not what was looked at.
///
/// # Errors
/// 403 with what the cell lacks, and what says that there is no such container.
pub async fn permit(server: &Arc<Server>, method: &str, call: &mut Call) -> ApiResult<()> {
    let Some(cell) = call.caller.cell() else { return Ok(()) };
    let segments = call.target.segments.clone();
    let path: Vec<&str> = segments.iter().map(String::as_str).collect();
    let found = rule(method, &path)
        .ok_or_else(|| refused(format!("{method} /{} is not a call for a cell", path.join("/"))))?;
    match found {
        Rule::Anyone | Rule::Bounded => Ok(()),
        Rule::Never(why) => Err(refused(why)),
        Rule::OwnContainer => {
            let key = path.get(1).copied().unwrap_or_default();
            let container = server.find(key).await?.container;
            call.caller.check_owns(&container)?;
            if matches!(path[..], [.., "archive" | "export"]) {
                cell.inside.check_files(&container.spec)?;
            }
            if let Some(key) = call.target.segments.get_mut(1) {
                container.id().clone_into(key);
            }
            Ok(())
        }
        Rule::OwnExec => {
            let id = path.get(1).copied().unwrap_or_default();
            let container = server.find(&server.execs.container_of(id)?).await?.container;
            call.caller.check_owns(&container)
        }
        Rule::Commit => commit(server, call).await,
        Rule::Pull => pull(cell, call),
    }
}

async fn commit(server: &Arc<Server>, call: &mut Call) -> ApiResult<()> {
    let key = call.target.query.get("container").unwrap_or_default().to_owned();
    let container = server.find(&key).await?.container;
    call.caller.check_owns(&container)?;
    call.target.query.set("container", container.id());
    let cell = call.caller.cell();
    let name = crate::images::named(&call.target.query)?;
    if let (Some(cell), Some(name)) = (cell, &name) {
        shares::check_name(cell, name)?;
    }
    if let Some(cell) = cell {
        cell.inside.check_files(&container.spec)?;
        server.shares.commit(cell)?;
    }
    let Some(name) = name else { return Ok(()) };
    let taken = server.blocking(move |server| {
        let taken = server.images()?.resolve(&name.to_string()).is_ok();
        Ok(taken.then(|| name.to_string()))
    });
    match taken.await? {
        None => Ok(()),
        Some(name) => Err(refused(format!(
            "there is an image {name}, which other cells are started from; give yours another name"
        ))),
    }
}

/// The server would fetch it, in the host's network.
fn pull(cell: &Cell, call: &Call) -> ApiResult<()> {
    if call.target.query.get("fromSrc").is_some() {
        return Err(refused(IMAGES));
    }
    let Some(reference) = crate::images::wanted(&call.target.query)? else { return Ok(()) };
    let registry = match reference.registry.as_str() {
        "docker.io" => "registry-1.docker.io",
        registry => registry,
    };
    let peer = match registry.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => registry.to_owned(),
        _ => format!("{registry}:443"),
    };
    let rule = peer.parse::<exocell_cell::xgate::Endpoint>().map_err(ApiError::bad_request)?;
    let own = cell.caps.network().map(|network| network.connect.as_slice()).unwrap_or_default();
    match own.iter().any(|own| own.contains(&rule)) {
        true => Ok(()),
        false => Err(refused(format!(
            "the cell {} may not connect to {peer}, where the image {reference} is pulled from; \
             have the operator pull it, or grant that (--allow-net)",
            cell.name
        ))),
    }
}

/// The cell `id` as a caller, with what it has at this moment.
///
/// # Errors
/// 403 for one that has ended.
pub async fn caller(server: &Arc<Server>, id: &str) -> ApiResult<Caller> {
    let id = id.to_owned();
    server
        .blocking(move |server| Ok(Caller::of_cell(starts::read(&server.containers, &id, true)?)))
        .await
}

/// Whether a cell may have one more container made.
///
/// # Errors
/// 403 where it has had too many made.
pub fn check_count(server: &Server, caller: &Caller) -> ApiResult<()> {
    if caller.cell().is_none() {
        return Ok(());
    }
    let made = server.containers.all()?;
    let count = made.iter().filter(|seen| caller.has_made(&seen.container.made_by)).count();
    match count < CONTAINERS_MAX {
        true => Ok(()),
        false => Err(refused(format!(
            "the cell has {count} containers, and may have {CONTAINERS_MAX}; remove some (docker \
             rm)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every call that the server answers, and what it takes for a cell to make it.
    const CALLS: &[(&str, &str, Rule)] = &[
        ("GET", "_ping", Rule::Anyone),
        ("HEAD", "_ping", Rule::Anyone),
        ("GET", "version", Rule::Anyone),
        ("GET", "info", Rule::Anyone),
        ("POST", "build", Rule::Never(BUILDS)),
        ("POST", "build/prune", Rule::Never(BUILDS)),
        ("POST", "session", Rule::Never(BUILDS)),
        ("POST", "grpc", Rule::Never(BUILDS)),
        ("POST", "commit", Rule::Commit),
        ("GET", "plugins", Rule::Anyone),
        ("GET", "events", Rule::Bounded),
        ("GET", "system/df", Rule::Anyone),
        ("GET", "containers/json", Rule::Anyone),
        ("POST", "containers/create", Rule::Bounded),
        ("POST", "containers/prune", Rule::Anyone),
        ("DELETE", "containers/x", Rule::Anyone),
        ("GET", "containers/x/json", Rule::OwnContainer),
        ("POST", "containers/x/start", Rule::OwnContainer),
        ("POST", "containers/x/stop", Rule::Anyone),
        ("POST", "containers/x/restart", Rule::OwnContainer),
        ("POST", "containers/x/kill", Rule::Anyone),
        ("POST", "containers/x/pause", Rule::OwnContainer),
        ("POST", "containers/x/unpause", Rule::OwnContainer),
        ("POST", "containers/x/wait", Rule::Anyone),
        ("POST", "containers/x/update", Rule::OwnContainer),
        ("POST", "containers/x/rename", Rule::OwnContainer),
        ("GET", "containers/x/logs", Rule::OwnContainer),
        ("POST", "containers/x/attach", Rule::OwnContainer),
        ("GET", "containers/x/attach/ws", Rule::OwnContainer),
        ("POST", "containers/x/resize", Rule::OwnContainer),
        ("GET", "containers/x/stats", Rule::OwnContainer),
        ("GET", "containers/x/top", Rule::OwnContainer),
        ("GET", "containers/x/changes", Rule::OwnContainer),
        ("HEAD", "containers/x/archive", Rule::OwnContainer),
        ("GET", "containers/x/archive", Rule::OwnContainer),
        ("PUT", "containers/x/archive", Rule::OwnContainer),
        ("GET", "containers/x/export", Rule::OwnContainer),
        ("POST", "containers/x/exec", Rule::OwnContainer),
        ("POST", "exec/x/start", Rule::OwnExec),
        ("POST", "exec/x/resize", Rule::OwnExec),
        ("GET", "exec/x/json", Rule::OwnExec),
        ("GET", "images/json", Rule::Anyone),
        ("POST", "images/create", Rule::Pull),
        ("POST", "images/load", Rule::Never(IMAGES)),
        ("POST", "images/prune", Rule::Never(IMAGES)),
        ("GET", "images/search", Rule::Anyone),
        ("GET", "images/get", Rule::Never(IMAGES)),
        ("GET", "images/a/b/get", Rule::Never(IMAGES)),
        ("GET", "images/a/b/json", Rule::Anyone),
        ("GET", "images/a/history", Rule::Anyone),
        ("POST", "images/a/b/tag", Rule::Never(IMAGES)),
        ("POST", "images/a/push", Rule::Never(IMAGES)),
        ("DELETE", "images/a/b", Rule::Never(IMAGES)),
        ("GET", "networks", Rule::Anyone),
        ("POST", "networks/create", Rule::Bounded),
        ("POST", "networks/prune", Rule::Bounded),
        ("GET", "networks/x", Rule::Anyone),
        ("DELETE", "networks/x", Rule::Bounded),
        ("POST", "networks/x/connect", Rule::Bounded),
        ("POST", "networks/x/disconnect", Rule::Bounded),
        ("GET", "volumes", Rule::Anyone),
        ("POST", "volumes/create", Rule::Bounded),
        ("POST", "volumes/prune", Rule::Bounded),
        ("GET", "volumes/x", Rule::Anyone),
        ("DELETE", "volumes/x", Rule::Bounded),
    ];

    #[test]
    fn every_call_has_a_rule_and_what_is_none_is_refused() {
        for (method, path, wanted) in CALLS {
            let path: Vec<&str> = path.split('/').collect();
            assert_eq!(rule(method, &path), Some(*wanted), "{method} {path:?}");
        }
        for (method, path) in [
            ("GET", "swarm"),
            ("POST", "containers/x/checkpoint"),
            ("POST", "containers/x/json"),
            ("GET", "containers/x/start"),
            ("PATCH", "containers/x"),
            ("GET", "containers"),
            ("POST", "containers/x/attach/ws"),
            ("GET", "exec/x/start"),
            ("PUT", "images/create"),
            ("DELETE", "images"),
            ("POST", "plugins/pull"),
            ("POST", "secrets/create"),
            ("GET", ""),
        ] {
            let path: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
            assert_eq!(rule(method, &path), None, "{method} {path:?}");
        }
    }

    /// What `route.rs` spells out as a call is in the table above.
    #[test]
    fn the_table_has_the_words_of_all_routes() {
        let source = include_str!("route.rs");
        let words = source.split('"').skip(1).step_by(2);
        let is_word = |word: &&str| {
            !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
        };
        let known: Vec<&str> = CALLS.iter().flat_map(|(_, path, _)| path.split('/')).collect();
        // Read from a query, or refused to everybody.
        const OTHERS: [&str; 14] = [
            "names",
            "session",
            "grpc",
            "swarm",
            "services",
            "nodes",
            "tasks",
            "secrets",
            "configs",
            "auth",
            "distribution",
            "exec",
            "ws",
            "get",
        ];
        for word in words.filter(is_word) {
            assert!(known.contains(&word) || OTHERS.contains(&word), "{word} has no rule");
        }
    }
}
