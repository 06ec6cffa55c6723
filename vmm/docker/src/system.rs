//! What the server says of itself: ping, version, info, disk usage.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use exocell_cell::images::walk;
use exocell_cell::plan;
use hyper::StatusCode;
use serde_json::json;

use crate::build::kept;
use crate::containers::Seen;
use crate::error::{ApiError, ApiResult};
use crate::http::{Call, Response, text, with_header};
use crate::images;
use crate::networks::Endpoints;
use crate::shares;
use crate::state::Server;
use crate::target::{VERSION_MAX, VERSION_MIN};
use crate::views;
use crate::volumes::Volume;

/// The host's kernel release; containers have their own.
fn kernel() -> String {
    let release = nix::sys::utsname::uname();
    release.map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned())
}

/// `GET` and `HEAD /_ping`. BuildKit is named as the builder: the docker command speaks its protocol
/// where it has buildx, and asks for the classic build elsewhere.
pub fn ping() -> Response {
    let response = with_header(text(StatusCode::OK, "OK"), "builder-version", "2");
    with_header(response, "cache-control", "no-cache, no-store, must-revalidate")
}

/// `GET /version`
pub fn version() -> Response {
    let version = env!("CARGO_PKG_VERSION");
    let (newest, oldest) = (format!("1.{VERSION_MAX}"), format!("1.{VERSION_MIN}"));
    views::ok(&json!({
        "Platform": { "Name": "Exocell" }, "Version": version, "ApiVersion": newest,
        "MinAPIVersion": oldest, "Os": "linux", "Arch": "amd64", "KernelVersion": kernel(),
        "GitCommit": "", "GoVersion": "", "BuildTime": "", "Experimental": false,
        "Components": [{
            "Name": "Engine", "Version": version,
            "Details": { "ApiVersion": newest, "MinAPIVersion": oldest, "Os": "linux",
                "Arch": "amd64", "KernelVersion": kernel(), "Experimental": "false" },
        }],
    }))
}

/// `GET /info`
pub async fn info(server: &Arc<Server>) -> ApiResult<Response> {
    let (all, images) = server
        .blocking(|server| Ok((server.containers.all()?, server.images()?.list()?.len())))
        .await?;
    let running = all.iter().filter(|seen| seen.is_running()).count();
    let paused = all.iter().filter(|seen| seen.is_paused()).count();
    let hostname = nix::unistd::gethostname().unwrap_or_default();
    Ok(views::ok(&json!({
        "ID": "exocell", "Name": hostname.to_string_lossy(), "ServerVersion": env!("CARGO_PKG_VERSION"),
        "Containers": all.len(), "ContainersRunning": running - paused, "ContainersPaused": paused,
        "ContainersStopped": all.len() - running, "Images": images, "Driver": "exocell",
        "DriverStatus": [["Boundary", "a guest kernel for each container"]],
        "SystemStatus": null, "Plugins": { "Volume": ["local"], "Network": ["bridge", "null"],
            "Authorization": null, "Log": ["json-file"] },
        "MemoryLimit": true, "SwapLimit": false, "CpuCfsPeriod": true, "CpuCfsQuota": true,
        "CPUShares": true, "CPUSet": true, "PidsLimit": true, "IPv4Forwarding": true,
        "BridgeNfIptables": false, "BridgeNfIp6tables": false, "KernelMemory": false,
        "KernelMemoryTCP": false, "CpuRealtimePeriod": false, "CpuRealtimeRuntime": false,
        "GenericResources": null, "DefaultAddressPools": [], "CDISpecDirs": [],
        "ContainerdCommit": { "ID": "" }, "RuncCommit": { "ID": "" }, "InitCommit": { "ID": "" },
        "ClusterStore": "", "ClusterAdvertise": "", "ProductLicense": "",
        "OomKillDisable": false, "Debug": false, "NFd": 0, "NGoroutines": 0,
        "SystemTime": exocell_cell::clock::rfc3339_ms(exocell_cell::now_ms()), "LoggingDriver": "json-file",
        "CgroupDriver": "none", "CgroupVersion": "2", "NEventsListener": 0,
        "KernelVersion": kernel(), "OperatingSystem": "Exocell", "OSVersion": "",
        "OSType": "linux", "Architecture": "x86_64", "IndexServerAddress": "https://index.docker.io/v1/",
        "RegistryConfig": { "InsecureRegistryCIDRs": ["127.0.0.0/8"], "IndexConfigs": {}, "Mirrors": null },
        "NCPU": server.defaults.vcpus, "MemTotal": plan::host_memory(),
        "DockerRootDir": server.layout().root(), "HttpProxy": "", "HttpsProxy": "", "NoProxy": "",
        "Labels": [], "ExperimentalBuild": false, "Runtimes": { "exocell": { "path": "exocell" } },
        "DefaultRuntime": "exocell", "Swarm": {
            "NodeID": "", "NodeAddr": "", "LocalNodeState": "inactive", "ControlAvailable": false,
            "Error": "", "RemoteManagers": null,
        },
        "LiveRestoreEnabled": true, "Isolation": "", "InitBinary": "exocell-init",
        "SecurityOptions": ["name=exocell"], "Warnings": null,
    })))
}

/// What `GET /system/df` can be narrowed to.
const USERS: [&str; 4] = ["image", "container", "volume", "build-cache"];

/// `GET /system/df`
pub async fn disk_usage(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let asked: Vec<String> = call.target.query.all("type").map(str::to_owned).collect();
    if let Some(unknown) = asked.iter().find(|kind| !USERS.contains(&kind.as_str())) {
        return Err(ApiError::bad_request(format!("unknown object type: {unknown}")));
    }
    let wants = |kind: &str| asked.is_empty() || asked.iter().any(|asked| asked == kind);
    let (images, containers, endpoints) = server
        .blocking(|server| {
            let all = server.containers.all()?;
            let endpoints = Endpoints::of(server.layout(), all.iter().map(|seen| &seen.container))?;
            Ok((server.images()?.list()?, all, endpoints))
        })
        .await?;
    let mut shown = json!({});
    if wants("image") {
        let total = server.blocking(|server| Ok(server.images()?.listed_bytes()?)).await?;
        let uses =
            |id: &str| containers.iter().filter(|seen| seen.container.image_id == id).count();
        let seen = images.iter().filter(|image| shares::sees(&call.caller, image));
        let rows = seen.map(|image| {
            let mut row = images::row(image, call.target.version);
            row["SharedSize"] = image.shared_bytes.into();
            row["Containers"] = uses(&image.id.to_string()).into();
            row
        });
        (shown["LayersSize"], shown["Images"]) = (total.into(), rows.collect());
    }
    if wants("container") {
        let rows = containers.iter().map(|seen| {
            let row = views::row(seen, &endpoints, call.caller.owns(&seen.container));
            views::with_sizes(row, seen, &images)
        });
        shown["Containers"] = rows.collect();
    }
    if wants("volume") {
        let measured = server.at_its_pace(|server| {
            let shelf = server.containers.shelf();
            let volumes = Volume::all(server)?.into_iter();
            let measured = volumes.map(|own| (walk::bytes(&shelf.path(&own.name)), own));
            Ok(measured.collect::<Vec<_>>())
        });
        let rows = measured.await?.into_iter().map(|(bytes, Volume { name, mut shown, .. })| {
            let has = |seen: &&Seen| {
                seen.container.mounts.iter().any(|own| own.volume.as_ref() == Some(&name))
            };
            let count = containers.iter().filter(has).count();
            shown["UsageData"] = json!({ "Size": bytes, "RefCount": count });
            shown
        });
        shown["Volumes"] = rows.collect();
    }
    if wants("build-cache") {
        let cache = server.at_its_pace(|server| Ok(kept(server.layout()))).await?;
        let (mut total, mut rows) = (0, Vec::new());
        for own in cache {
            let used = own.used.duration_since(UNIX_EPOCH).unwrap_or_default();
            let used = exocell_cell::clock::rfc3339_ms(used.as_millis() as u64);
            total += own.bytes;
            rows.push(json!({
                "ID": own.id, "Type": own.kind, "Description": "", "InUse": false, "Shared": false,
                "Size": own.bytes, "CreatedAt": used, "LastUsedAt": used, "UsageCount": 1,
                "Parents": null,
            }));
        }
        (shown["BuildCache"], shown["BuilderSize"]) = (rows.into(), total.into());
    }
    Ok(views::ok(&shown))
}
