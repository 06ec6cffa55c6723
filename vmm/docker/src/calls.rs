//! The calls on containers: create, list, inspect, start, stop, kill, restart,
//! wait, rename, remove, prune.

use std::path::Path;
use std::sync::Arc;

use exocell_cell::images::ImageRecord;
use exocell_cell::networks::Networks;
use exocell_cell::plan::sidecar;
use exocell_cell::signal::Signal;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, CellSpec, Names, Strength, end, now_ms, switches, warm};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::admit::{self, Admitted, MountPoint};
use crate::bounds;
use crate::caller::{Caller, Cell};
use crate::containers::{Container, Seen, short};
use crate::error::{ApiError, ApiResult, refused};
use crate::exec::tty_size;
use crate::filters::Filters;
use crate::http::{Body, Call, Response, empty, json as reply, stream};
use crate::ids::new_id;
use crate::lifecycle::{self, Stop, restarts};
use crate::live::Life;
use crate::networks::Endpoints;
use crate::state::Server;
use crate::wire::Create;
use crate::{networks, policy, ports, shares, starts, views};

/// What the filters of a list may name.
const FILTERS: [&str; 14] = [
    "ancestor", "before", "exited", "expose", "health", "id", "is-task", "label", "name",
    "network", "publish", "since", "status", "volume",
];

/// What some of them may say.
const VALUES: [(&str, &[&str]); 3] = [
    ("status", &["created", "running", "paused", "restarting", "removing", "exited", "dead"]),
    ("health", &["starting", "healthy", "unhealthy", "none"]),
    ("is-task", &["true", "false", "1", "0"]),
];

/// `POST /containers/create`
pub async fn create(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let name = call.target.query.get("name").map(|name| name.trim_start_matches('/').to_owned());
    let platform = call.target.query.get("platform").map(str::to_owned);
    if let Some(platform) = platform.filter(|platform| !platform.starts_with("linux/amd64")) {
        return Err(ApiError::not_found(format!(
            "No such image for the platform {platform}: cells run linux/amd64"
        )));
    }
    let caller = call.caller.clone();
    let body: Value = call.json().await?;
    let wanted = Create::read(body)?;
    if wanted.config.image.is_empty() {
        return Err(ApiError::bad_request("no image is named (Image)"));
    }
    let id = new_id()?;
    let name = name.unwrap_or_else(|| format!("cell-{}", &id[..6]));
    bounds::check_name(&name)?;
    let _naming = server.naming.lock().await;
    let container = server
        .blocking(move |server| {
            server.containers.check_free(&name)?;
            policy::check_count(server, &caller)?;
            let image = server.images()?.resolve(&wanted.config.image)?;
            shares::check_sees(&caller, &image, &wanted.config.image)?;
            let volumes = server.containers.volumes();
            let networks = networks::attachments(&Networks::of(server.layout()), &wanted)?;
            let inherited = inherited(server, &caller, &wanted.host.volumes_from)?;
            let (config, defaults) = (&image.config, &caller.defaults(&server.defaults));
            let weighs = wanted.host.cpu_shares > 0;
            let admitted = admit::admit(&wanted, config, defaults, &volumes, networks, inherited)?;
            let mut container = container(wanted, &image, admitted, id, name);
            container.made_by = caller.line();
            bounds::check(&container)?;
            check_within(&container)?;
            name_other_by_id(server, &mut container);
            starts::check_makers(&server.containers, &container)?;
            if let Some(cell) = caller.cell() {
                bound(server, &caller, cell, &mut container, weighs)?;
            }
            // Until it is written down.
            let _held = server.containers.prepare(&mut container)?;
            if let Some(cell) = caller.cell() {
                // Those that were made just now are its own; another's may have come meanwhile.
                starts::check_volumes(&server.containers.shelf(), &caller, &container)?;
                cell.check_places(&container.mounts, &container.spec.locations)?;
            }
            let keeps = !container.spec.remove
                && !container.spec.read_only
                && container.spec.within.is_none();
            container.spec.disk = keeps.then(|| server.containers.disk(container.id()));
            let caps = CapabilitySet::parse(&container.spec.capabilities, Path::new("/"));
            if let Ok(caps) = caps
                && container.spec.restart.is_no()
                && let Some(id) = warm::reserve(server.layout(), &container.spec, &caps)?
            {
                container.become_cell(id);
            }
            // A cell may have taken the name meanwhile.
            let _names = Names::hold(server.layout())?;
            if let Err(taken) = server.containers.check_free(container.name()) {
                warm::release(server.layout(), container.id())?;
                return Err(taken);
            }
            server.containers.write(&container)?;
            Ok(container)
        })
        .await?;
    server.tell(&container, "create", &[]);
    let made = json!({ "Id": container.id(), "Warnings": container.warnings });
    Ok(reply(StatusCode::CREATED, &made))
}

/// Holds a container that a cell has made against what the cell has.
fn bound(
    server: &Server,
    caller: &Caller,
    cell: &Cell,
    container: &mut Container,
    weighs: bool,
) -> ApiResult<()> {
    let networks = Networks::of(server.layout());
    let spec = &mut container.spec;
    let mut own = Vec::new();
    for joined in &spec.networks {
        starts::check_own(&networks, caller, &joined.network)?;
        own.push(joined.network.clone());
    }
    networks::check_member(&server.containers, caller, (&spec.id, &spec.name), &spec.networks)?;
    if let Some(within) = &spec.within {
        // One that is not there is told of at the start, and looked at then as well.
        caller.check_owns(&server.containers.find(&within.cell)?.container)?;
    }
    // Who answers for a name says where a rule for that name leads: the operator's to choose.
    let dns = &mut spec.settings.dns;
    if dns.is_empty() {
        dns.clone_from(&cell.dns);
    }
    if *dns != cell.dns {
        return Err(refused(format!(
            "a container that a cell makes asks the name servers of the cell {} (Dns)",
            cell.name
        )));
    }
    cell.inside.bound(spec, &container.config.user)?;
    cell.check_publish(&spec.publish)?;
    cell.check_names(&container.mounts)?;
    spec.capabilities = cell.bounded(&spec.capabilities, weighs, &own)?;
    // Nothing is made on the host but what the cell has.
    container.mounts.iter_mut().for_each(|mount| mount.make &= mount.volume.is_some());
    let shelf = server.containers.shelf();
    shares::check_volumes(&shelf, caller, shares::new_volumes(&shelf, container))?;
    for name in container.mounts.iter().filter_map(|mount| mount.volume.as_deref()) {
        if !shelf.path(name).exists() {
            shares::check_unused(&server.containers, caller, "volume", name)?;
        }
    }
    starts::check_volumes(&shelf, caller, container)
}

/// What the containers that `from` names have: `CONTAINER[:ro]`.
fn inherited(server: &Server, caller: &Caller, from: &[String]) -> ApiResult<Vec<MountPoint>> {
    let mut all = Vec::new();
    for text in from {
        let (key, options) = text.split_once(':').unwrap_or((text, "rw"));
        let is_writable = match options {
            "rw" | "z" | "Z" => true,
            "ro" => false,
            _ => {
                return Err(ApiError::bad_request(format!(
                    "invalid volumes-from specification: {text}"
                )));
            }
        };
        // Not 404, which clients take for an image that is to be pulled.
        let found = server.containers.find(key);
        let found = found.map_err(|error| ApiError::bad_request(error.message))?;
        caller.check_owns(&found.container)?;
        let mounts = found.container.mounts.into_iter();
        all.extend(mounts.map(|mount| MountPoint {
            writable: mount.writable && is_writable,
            is_anonymous: false,
            ..mount
        }));
    }
    Ok(all)
}

/// A container that is renamed stays the one in whose guest another is.
fn name_other_by_id(server: &Server, container: &mut Container) {
    let Some(within) = &mut container.spec.within else { return };
    // One that is not there is told of at the start, as docker does.
    if let Ok(other) = server.containers.find(&within.cell) {
        other.id().clone_into(&mut within.cell);
        container.host["NetworkMode"] = json!(format!("container:{}", other.id()));
    }
}

/// What a container in another's guest cannot have is told now, not at the start.
fn check_within(container: &Container) -> ApiResult<()> {
    let spec = &container.spec;
    if spec.within.is_none() {
        return Ok(());
    }
    let caps = CapabilitySet::parse(&spec.capabilities, Path::new("/"));
    Ok(sidecar::check(spec, &caps.map_err(CellError::from)?)?)
}

fn container(
    wanted: Create,
    image: &ImageRecord,
    admitted: Admitted,
    id: String,
    name: String,
) -> Container {
    let has_link = wanted.wants_network();
    let (mut config, host) = (wanted.config, wanted.host);
    let own_env = std::mem::take(&mut config.env);
    let set = |own: &mut String, image: &str| {
        if own.is_empty() {
            image.clone_into(own);
        }
    };
    set(&mut config.working_dir, &image.config.working_dir);
    set(&mut config.user, &image.config.user);
    config.env = exocell_cell::plan::environment(&image.config.env, &own_env, false);
    let labels = image.config.labels.clone().into_iter();
    let volumes = image.config.volumes.iter();
    config.volumes.extend(volumes.map(|path| (path.clone(), json!({}))));
    let exposed = image.config.exposed_ports.iter();
    config.exposed_ports.extend(exposed.map(|port| (port.clone(), json!({}))));
    config.labels = labels.chain(std::mem::take(&mut config.labels)).collect();
    config.stop_signal = config.stop_signal.or_else(|| image.config.stop_signal.clone());
    if config.entrypoint.as_ref().is_none_or(Vec::is_empty) {
        config.cmd = config.cmd.filter(|cmd| !cmd.is_empty());
        config.cmd = config.cmd.or_else(|| Some(image.config.cmd.clone()));
    }
    config.healthcheck = admitted.health.clone();
    let own = |words: &Vec<String>| (!words.is_empty()).then(|| words.clone());
    config.entrypoint = config.entrypoint.or_else(|| own(&image.config.entrypoint));
    let given = |text: &String| (!text.is_empty()).then(|| text.clone());
    let hostname = given(&config.hostname);
    set(&mut config.hostname, short(&id));
    let spec = CellSpec {
        version: CellSpec::VERSION,
        id,
        name,
        strength: Strength::Vm,
        image: config.image.clone(),
        entrypoint: Some(Vec::new()),
        command: admitted.args,
        env: own_env,
        working_dir: given(&config.working_dir),
        user: given(&config.user),
        // Without one it is the beginning of the id, as here.
        hostname,
        settings: admitted.settings,
        tty: config.tty,
        stdin: config.open_stdin,
        remove: host.auto_remove,
        read_only: host.readonly_rootfs,
        pager: exocell_cell::pager::Mode::default(),
        memory_guarantee: None,
        intra: admitted.intra,
        platform: exocell_cell::platform::PlatformKind::default(),
        publish: admitted.publish,
        within: admitted.within,
        networks: admitted.networks,
        has_link,
        capabilities: admitted.capabilities,
        // A tag may come to name another image.
        image_id: Some(image.id.to_string()),
        keeps_disk: false,
        keeps_no_log: host.log_config.kind == "none",
        labels: std::collections::BTreeMap::new(),
        stop_signal: None,
        stop_seconds: None,
        restart: admitted.restart,
        restarts: 0,
        health: admitted.health,
        disk: None,
        idle: false,
        depot: None,
        plug: false,
        tied: false,
        warm: None,
        changes: exocell_cell::changes::Changes::default(),
        locations: Vec::new(),
        fills: admitted.fills,
        copies: std::collections::BTreeMap::new(),
        created_ms: now_ms(),
    };
    let plain = |name: &str| matches!(name, "default" | "bridge");
    let endpoints = wanted.endpoints.into_iter().filter(|(name, _)| plain(name));
    let options = endpoints.flat_map(|(_, own)| own.driver_opts).collect();
    Container {
        version: Container::VERSION,
        options,
        spec,
        host: wanted.host_value,
        image_id: image.id.to_string(),
        mounts: admitted.mounts,
        warnings: admitted.warnings,
        tty_size: tty_size(&host.console_size).map(|size| (size.rows, size.cols)),
        started: false,
        made_by: Vec::new(),
        is_cell: false,
        words: None,
        config,
    }
}

/// `GET /containers/json`
pub async fn list(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let query = &call.target.query;
    let filters = Filters::of(query, &FILTERS)?;
    let limit: Option<i64> = query.number("limit")?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).filter(|limit| *limit > 0);
    filters.check(&VALUES, &["exited"]).map_err(ApiError::bad_request)?;
    for wanted in filters.values("expose").iter().chain(filters.values("publish")) {
        ports::has(wanted, &[])?;
    }
    let asked = !filters.values("status").is_empty() || !filters.values("exited").is_empty();
    let everything = query.flag("all") || limit.is_some() || asked;
    let wanted = filters.values("ancestor").to_vec();
    let listed = server.blocking(move |server| {
        let all = server.containers.all()?;
        let endpoints = Endpoints::of(server.layout(), all.iter().map(|seen| &seen.container))?;
        let store = server.images()?;
        let ids = wanted.iter().filter_map(|name| Some(store.resolve(name).ok()?.id.to_string()));
        Ok((all, endpoints, ids.collect::<Vec<_>>()))
    });
    let (mut all, endpoints, ancestors) = listed.await?;
    all.reverse();
    let at = |name: &str| filters.values(name).first().map(|key| position(&all, key));
    let (before, since) = (at("before").transpose()?, at("since").transpose()?);
    let rows = all.iter().enumerate().filter(|(at, seen)| {
        before.is_none_or(|before| *at > before)
            && since.is_none_or(|since| *at < since)
            && (everything || seen.is_running() || seen.is_restarting())
            && passes(seen, &filters, &ancestors)
    });
    let sizes = match query.flag("size") {
        true => Some(server.blocking(|server| Ok(server.images()?.list()?)).await?),
        false => None,
    };
    let rows = rows.take(limit.unwrap_or(usize::MAX)).map(|(_, seen)| {
        let row = views::row(seen, &endpoints, call.caller.owns(&seen.container));
        sizes.iter().fold(row, |row, images| views::with_sizes(row, seen, images))
    });
    Ok(reply(StatusCode::OK, &rows.collect::<Vec<_>>()))
}

fn position(all: &[Seen], key: &str) -> ApiResult<usize> {
    let found = all.iter().position(|seen| {
        seen.container.name() == key || !key.is_empty() && seen.id().starts_with(key)
    });
    found.ok_or_else(|| ApiError::no_such_container(key))
}

/// Whether a container is wanted; `ancestors` are the ids of images that are.
fn passes(seen: &Seen, filters: &Filters, ancestors: &[String]) -> bool {
    let container = &seen.container;
    let exit_code = seen.status().and_then(|status| status.exit_code);
    let mounted = |wanted: &str| {
        let names = |m: &crate::admit::MountPoint| m.volume.as_deref() == Some(wanted);
        container.mounts.iter().any(|m| m.target == wanted || names(m))
    };
    let image = |wanted: &str| {
        ancestors.contains(&container.image_id)
            || container.config.image == wanted
            || container.config.image == format!("{wanted}:latest")
    };
    filters.any("id", |wanted| container.id().starts_with(wanted))
        && filters.names("name", container.name())
        && filters.any("status", |wanted| seen.state() == wanted)
        && filters.any("exited", |wanted| exit_code.is_some_and(|code| code.to_string() == wanted))
        && filters.any("ancestor", image)
        && filters.any("volume", mounted)
        && filters.any("network", |wanted| {
            views::host_config(container)["NetworkMode"] == wanted
                || container.spec.networks.iter().any(|own| own.network == wanted)
        })
        && filters.any("publish", |wanted| {
            ports::has(wanted, &ports::published_ones(&container.spec.publish)).is_ok_and(|has| has)
        })
        && filters.any("expose", |wanted| {
            let exposed: Vec<String> = container.config.exposed_ports.keys().cloned().collect();
            ports::has(wanted, &exposed).is_ok_and(|has| has)
        })
        && filters.any("health", |wanted| wanted == views::health_word(seen))
        && filters.any("is-task", |wanted| matches!(wanted, "false" | "0"))
        && filters.labels(&container.config.labels)
}

/// `GET /containers/{id}/json`
pub async fn inspect(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let (key, has_sizes) = (key.to_owned(), call.target.query.flag("size"));
    let shown = server.blocking(move |server| {
        let seen = server.containers.find(&key)?;
        let endpoints = Endpoints::of(server.layout(), [&seen.container])?;
        let shown = views::inspect(&server.execs.of(seen.id()), &seen, &endpoints);
        match has_sizes {
            true => Ok(views::with_sizes(shown, &seen, &server.images()?.list()?)),
            false => Ok(shown),
        }
    });
    Ok(views::ok(&shown.await?))
}

/// 204 for what was done, 304 for what was so already.
fn done(changed: bool) -> Response {
    empty(if changed { StatusCode::NO_CONTENT } else { StatusCode::NOT_MODIFIED })
}

/// `POST /containers/{id}/start`
pub async fn start(server: &Arc<Server>, key: &str) -> ApiResult<Response> {
    lifecycle::start(server, key).await.map(done)
}

fn how(call: &Call) -> ApiResult<Stop> {
    let query = &call.target.query;
    Ok(Stop { seconds: query.number("t")?, signal: query.get("signal").map(str::to_owned) })
}

/// `POST /containers/{id}/stop`
pub async fn stop(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    lifecycle::stop(server, key, how(call)?).await.map(done)
}

/// `POST /containers/{id}/restart`
pub async fn restart(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let how = how(call)?;
    let container = server.find(key).await?.container;
    let id = container.id().to_owned();
    // Before anything is ended.
    server.blocking(move |server| starts::check_start(&server.containers, &container)).await?;
    lifecycle::stop(server, &id, how).await?;
    lifecycle::start(server, &id).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /containers/{id}/kill`
pub async fn kill(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let signal: Signal = call.target.query.get("signal").unwrap_or("KILL").parse()?;
    let seen = server.find(key).await?;
    if seen.is_restarting() {
        lifecycle::stays_ended(server, &seen).await?;
        return Ok(empty(StatusCode::NO_CONTENT));
    }
    if !seen.is_running() {
        return Err(ApiError::conflict(format!(
            "cannot kill container: {key}: container {} is not running",
            seen.id()
        )));
    }
    // As docker has it: what ends a program by hand is its last end.
    let own = seen.container.config.stop_signal.as_deref().unwrap_or("TERM");
    if signal == Signal::KILL || own.parse().is_ok_and(|own: Signal| own == signal) {
        lifecycle::stays_ended(server, &seen).await?;
    }
    match signal {
        Signal::KILL => lifecycle::kill_now(server, &seen).await?,
        other => lifecycle::signal(server, &seen, other).await?,
    }
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /containers/{id}/pause` and `/unpause`
pub async fn pause(server: &Arc<Server>, key: &str, pause: bool) -> ApiResult<Response> {
    let live = server.live(server.find(key).await?.id());
    let _changing = live.changing.lock().await;
    let seen = server.find(&live.id).await?;
    let record = seen.running()?.0.clone();
    if seen.is_paused() == pause {
        let how = if pause { "already" } else { "not" };
        return Err(ApiError::conflict(format!("Container {} is {how} paused", live.id)));
    }
    let done = server.blocking(move |_| Ok(end::pause(&record, pause)?)).await;
    lifecycle::unless_over(server, &live.id, done).await?;
    server.tell(&seen.container, if pause { "pause" } else { "unpause" }, &[]);
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /containers/{id}/wait`: the reply's head comes at once, so that its
/// client may then start the container.
pub async fn wait(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let condition = call.target.query.get("condition").unwrap_or("not-running").to_owned();
    if !["not-running", "next-exit", "removed"].contains(&condition.as_str()) {
        return Err(ApiError::bad_request(format!("invalid condition: \"{condition}\"")));
    }
    let found = server.find(key).await?;
    let live = server.live(found.id());
    let mut life = live.life();
    // Looked at again: what ends from here on is heard.
    let seen = server.find(found.id()).await?;
    let before: Life = *life.borrow_and_update();
    if seen.is_running() {
        // One that is just ending is settled already.
        let _ = lifecycle::adopt(server, &seen).await;
    }
    if seen.is_restarting() {
        restarts::follow(server, &seen.container);
    }
    let over = condition == "not-running" && !seen.is_running() && !seen.is_restarting();
    let last = seen.status().and_then(|status| status.exit_code).unwrap_or(before.code);
    let (sender, body) = Body::stream();
    tokio::spawn(async move {
        let ended = async {
            let until_removed = condition == "removed";
            let met = |life: &Life| life.removed || (!until_removed && life.ends > before.ends);
            let life = life.wait_for(met).await.map_or(before, |life| *life);
            if life.ends > before.ends { life.code } else { last }
        };
        let code = tokio::select! {
            code = ended, if !over => code,
            () = std::future::ready(()), if over => last,
            () = sender.closed() => return,
        };
        sender.line(&json!({ "StatusCode": code })).await;
    });
    Ok(stream("application/json", body))
}

/// `POST /containers/{id}/rename`
pub async fn rename(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let name = call.target.query.get("name").unwrap_or_default().trim_start_matches('/').to_owned();
    bounds::check_name(&name)?;
    let caller = call.caller.clone();
    // A start or a removal writes the same file.
    let live = server.live(server.find(key).await?.id());
    let _changing = live.claim(lifecycle::READERS_PATIENCE).await;
    let _naming = server.naming.lock().await;
    let seen = server.find(&live.id).await?;
    let renamed = server.blocking(move |server| {
        let joined = &seen.container.spec.networks;
        networks::check_member(&server.containers, &caller, (seen.id(), &name), joined)?;
        let _names = match &seen.cell {
            Some(_) => {
                server.containers.check_free(&name)?;
                switches::rename(server.layout(), seen.id(), &name)?;
                None
            }
            None => {
                let names = Names::hold(server.layout())?;
                server.containers.check_free(&name)?;
                Some(names)
            }
        };
        let mut container = seen.container;
        container.spec.name = name;
        server.containers.write(&container)?;
        Ok(container)
    });
    server.tell(&renamed.await?, "rename", &[]);
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `DELETE /containers/{id}`
pub async fn remove(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let query = &call.target.query;
    lifecycle::remove(server, key, query.flag("force"), query.flag("v")).await?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /containers/prune`
pub async fn prune(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["label", "label!", "until"])?;
    let until_ms = filters.until_ms()?;
    let all = server.blocking(|server| server.containers.all()).await?;
    let (mut deleted, mut freed) = (Vec::new(), 0);
    for seen in all.iter().filter(|seen| !seen.is_running() && !seen.is_restarting()) {
        let container = &seen.container;
        let fits = filters.labels(&container.config.labels)
            && until_ms.is_none_or(|until| container.spec.created_ms < until);
        let bytes = seen.disk_bytes();
        if fits && lifecycle::remove(server, seen.id(), false, false).await.is_ok() {
            deleted.push(seen.id());
            freed += bytes;
        }
    }
    let pruned = json!({ "ContainersDeleted": deleted, "SpaceReclaimed": freed });
    Ok(reply(StatusCode::OK, &pruned))
}
