//! What the server says of itself: ping, version, info, disk usage.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use exocell_cell::images::walk;
use exocell_cell::plan;
use hyper::StatusCode;
use serde_json::json;

use crate::build::kept;
use crate::containers::Seen;
use crate::error::ApiResult;
use crate::http::{Response, text, with_header};
use crate::networks::Endpoints;
use crate::state::Server;
use crate::target::{VERSION_MAX, VERSION_MIN};
use crate::views;
use crate::volumes::Volume;

/// The host's kernel release; containers have their own.
fn kernel() -> String {
    let release = nix::sys::utsname::uname();
    release.map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned())
}

/// `GET` and `HEAD /_ping`. The classic builder is named, so that the docker
/// command asks this server to build and hears why it does not.
pub fn ping() -> Response {
    let response = with_header(text(StatusCode::OK, "OK"), "builder-version", "1");
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
        "MemoryLimit": true, "SwapLimit": false, "CpuCfsPeriod": false, "CpuCfsQuota": false,
        "CPUShares": true, "CPUSet": false, "PidsLimit": true, "IPv4Forwarding": false,
        "OomKillDisable": false, "Debug": false, "NFd": 0, "NGoroutines": 0,
        "SystemTime": exocell_cell::clock::rfc3339_ms(exocell_cell::now_ms()), "LoggingDriver": "json-file",
        "CgroupDriver": "none", "CgroupVersion": "2", "NEventsListener": 0,
        "KernelVersion": kernel(), "OperatingSystem": "Exocell", "OSVersion": "",
        "OSType": "linux", "Architecture": "x86_64", "IndexServerAddress": "https://index.docker.io/v1/",
        "RegistryConfig": { "InsecureRegistryCIDRs": ["127.0.0.0/8"], "IndexConfigs": {}, "Mirrors": null },
        "NCPU": server.defaults.vcpus, "MemTotal": plan::host_memory(),
        "DockerRootDir": server.layout().root(), "HttpProxy": "", "HttpsProxy": "", "NoProxy": "",
        "Labels": [], "ExperimentalBuild": false, "Runtimes": { "exocell": { "path": "exocell" } },
        "DefaultRuntime": "exocell", "Swarm": { "LocalNodeState": "inactive" },
        "LiveRestoreEnabled": true, "Isolation": "", "InitBinary": "exocell-init",
        "SecurityOptions": ["name=exocell"], "Warnings": null,
    })))
}

/// `GET /system/df`
pub async fn disk_usage(server: &Arc<Server>) -> ApiResult<Response> {
    let (images, containers, endpoints) = server
        .blocking(|server| {
            let all = server.containers.all()?;
            let endpoints = Endpoints::of(server, all.iter().map(|seen| &seen.container))?;
            Ok((server.images()?.list()?, all, endpoints))
        })
        .await?;
    let total: u64 = images.iter().map(|image| image.size_bytes).sum();
    let uses = |id: &str| containers.iter().filter(|seen| seen.container.image_id == id).count();
    let images: Vec<_> = images
        .iter()
        .map(|image| {
            let id = image.id.to_string();
            json!({
                "Id": id, "ParentId": "", "RepoTags": image.tags, "RepoDigests": [],
                "Created": image.imported, "Size": image.size_bytes, "SharedSize": 0,
                "VirtualSize": image.size_bytes, "Labels": image.config.labels,
                "Containers": uses(&id),
            })
        })
        .collect();
    let measured = server.at_its_pace(|server| {
        let volumes = Volume::all(server)?;
        let shelf = server.containers.shelf();
        let volumes = volumes.into_iter().map(|own| (walk::bytes(&shelf.path(&own.name)), own));
        Ok((kept(server.layout()), volumes.collect::<Vec<_>>()))
    });
    let (cache, volumes) = measured.await?;
    let volumes = volumes.into_iter().map(|(bytes, Volume { name, mut shown, .. })| {
        let has = |seen: &&Seen| {
            seen.container.mounts.iter().any(|own| own.volume.as_ref() == Some(&name))
        };
        let count = containers.iter().filter(has).count();
        shown["UsageData"] = json!({ "Size": bytes, "RefCount": count });
        shown
    });
    let cache = cache.iter().map(|own| {
        let used = own.used.duration_since(UNIX_EPOCH).unwrap_or_default();
        let used = exocell_cell::clock::rfc3339_ms(used.as_millis() as u64);
        json!({
            "ID": own.id, "Type": own.kind, "Description": "", "InUse": false, "Shared": false,
            "Size": own.bytes, "CreatedAt": used, "LastUsedAt": used, "UsageCount": 1,
        })
    });
    let (volumes, cache): (Vec<_>, Vec<_>) = (volumes.collect(), cache.collect());
    let rows: Vec<_> = containers.iter().map(|seen| views::row(seen, &endpoints)).collect();
    Ok(views::ok(&json!({
        "LayersSize": total, "Images": images, "Containers": rows, "Volumes": volumes,
        "BuildCache": cache,
    })))
}
