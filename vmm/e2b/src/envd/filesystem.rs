//! `filesystem.Filesystem`: files but for what is in them.

use std::sync::Arc;

use exocell_cell::agent::files::{
    self, FileAction, FileChange, FileEntry, FileEvent, FileKind, FileRequest,
};
use exocell_cell::clock::rfc3339_ms;
use serde::Deserialize;
use serde_json::{Value, json};

use super::connect::{Stream, answer, only, refused, time_limit, unary, whole};
use super::watchers::{self, Watching};
use super::{of_user, placed, user};
use crate::error::{Problem, Result};
use crate::http::{Call, Growing, Response};
use crate::sandbox::Sandbox;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Order {
    path: String,
    depth: u32,
    source: String,
    destination: String,
    recursive: bool,
    include_entry: bool,
    /// Of a file system of the network, of which a cell has none but the operator's folders.
    #[serde(rename = "allowNetworkMounts")]
    _allow_network_mounts: bool,
    watcher_id: String,
}

pub async fn serve(sandbox: Arc<Sandbox>, verb: &str, call: Call) -> Response {
    let user = match user(&sandbox.note(), &call.headers) {
        Ok(user) => user,
        Err(problem) => return refused(&call, &problem),
    };
    match verb {
        "WatchDir" => watch(sandbox, user, call).await,
        "ListDir" => whole(list(&sandbox, user, call).await),
        "Stat" | "MakeDir" | "Remove" | "Move" => answer(change(&sandbox, user, verb, call).await),
        "CreateWatcher" => answer(create_watcher(&sandbox, user, call).await),
        "GetWatcherEvents" => whole(watcher_events(&sandbox, call).await),
        "RemoveWatcher" => answer(remove_watcher(&sandbox, call).await),
        other => {
            let what = format!("filesystem.Filesystem/{other}");
            refused(&call, &Problem::unsupported(what, "leave it out"))
        }
    }
}

async fn change(sandbox: &Arc<Sandbox>, user: String, verb: &str, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let (path, action) = match verb {
        "Stat" => (order.path, FileAction::Stat),
        "MakeDir" => (order.path, FileAction::MakeDir),
        "Remove" => (order.path, FileAction::Remove),
        _ => (order.source, FileAction::Move { to: order.destination }),
    };
    let note = sandbox.note();
    let action = match action {
        FileAction::Move { to } => FileAction::Move { to: placed(&note, &to) },
        other => other,
    };
    let request = FileRequest { user, path: placed(&note, &path), action };
    match &request.action {
        FileAction::Remove => {
            let removed = sandbox.ask(move |guest| files::done(guest, guest, &request)).await;
            removed.map_err(of_user).map(|()| json!({}))
        }
        _ => act(sandbox, request).await.map(|told| json!({ "entry": entry(&told) })),
    }
}

/// What is in a directory. Little more is held of it than the answer, which is the caller's.
async fn list(sandbox: &Arc<Sandbox>, user: String, call: Call) -> Result<Response> {
    let mut growing = Growing::new(call.held.another(), "{\"entries\":[");
    let order: Order = unary(call).await?;
    let path = placed(&sandbox.note(), &order.path);
    let action = FileAction::List { depth: order.depth.max(1) };
    let request = FileRequest { user, path, action };
    let own = sandbox.clone();
    let listed = sandbox.work(move || {
        let (guest, mut grown) = (own.guest()?, Ok(()));
        files::list_each(&guest, &guest, &request, |found| {
            grown = growing.push(&entry(&found));
            grown.is_ok()
        })?;
        grown.map(|()| growing)
    });
    listed.await.map_err(of_user)?.reply("]}")
}

pub async fn act(sandbox: &Arc<Sandbox>, request: FileRequest) -> Result<FileEntry> {
    sandbox.ask(move |guest| files::act(guest, guest, &request)).await.map_err(of_user)
}

/// A file as the protocol tells of it.
pub fn entry(entry: &FileEntry) -> Value {
    let kind = match (&entry.kind, &entry.link) {
        (Some(FileKind::File), _) => "FILE_TYPE_FILE",
        (Some(FileKind::Directory), _) => "FILE_TYPE_DIRECTORY",
        (None, Some(_)) => "FILE_TYPE_SYMLINK",
        _ => "FILE_TYPE_UNSPECIFIED",
    };
    let seconds = u64::try_from(entry.modified_s).unwrap_or(0);
    let whole = rfc3339_ms(seconds.saturating_mul(1000));
    let modified = format!("{}.{:09}Z", whole.get(..19).unwrap_or_default(), entry.modified_ns);
    let mut told = json!({
        "name": entry.name, "path": entry.path, "type": kind,
        // Numbers of 64 bits are text in JSON (protobuf.dev, "JSON options").
        "size": entry.size.to_string(), "mode": entry.mode & 0o777,
        "permissions": permissions(entry), "owner": entry.owner, "group": entry.group,
        "modifiedTime": modified,
    });
    if let Some(link) = &entry.link {
        told["symlinkTarget"] = link.as_str().into();
        told["isSymlink"] = true.into();
    }
    if !entry.metadata.is_empty() {
        told["metadata"] = json!(entry.metadata);
    }
    told
}

/// As ls(1) shows them.
fn permissions(entry: &FileEntry) -> String {
    let kind = match (&entry.link, &entry.kind) {
        (Some(_), _) => 'L',
        (None, Some(FileKind::Directory)) => 'd',
        _ => '-',
    };
    let bit =
        |at: u32| if entry.mode >> (8 - at) & 1 == 1 { b"rwx"[at as usize % 3] } else { b'-' };
    std::iter::once(kind).chain((0..9).map(|at| char::from(bit(at)))).collect()
}

/// An event as the protocol tells of it; `None` for one that it has no word for.
pub fn event(event: &FileEvent, told: Option<Value>) -> Option<Value> {
    let kind = match event.change {
        FileChange::Created => "EVENT_TYPE_CREATE",
        FileChange::Written => "EVENT_TYPE_WRITE",
        FileChange::Removed => "EVENT_TYPE_REMOVE",
        FileChange::Renamed => "EVENT_TYPE_RENAME",
        FileChange::Attributes => "EVENT_TYPE_CHMOD",
        FileChange::Lost | FileChange::Ended => return None,
    };
    let mut shown = json!({ "name": event.name, "type": kind });
    if let Some(told) = told {
        shown["entry"] = told;
    }
    Some(shown)
}

fn watching(sandbox: &Sandbox, order: &Order, user: String) -> Watching {
    Watching {
        user,
        path: placed(&sandbox.note(), &order.path),
        recursive: order.recursive,
        include_entry: order.include_entry,
    }
}

async fn watch(sandbox: Arc<Sandbox>, user: String, call: Call) -> Response {
    let limit = match time_limit(&call) {
        Ok(limit) => limit,
        Err(problem) => return refused(&call, &problem),
    };
    let every = super::process::keepalive(&call);
    let work = call.work.clone();
    let order: Order = match only(call).await {
        Ok(order) => order,
        Err(refused) => return refused,
    };
    let (stream, response) = Stream::open();
    tokio::spawn(async move {
        let begun = watchers::begin(&sandbox, watching(&sandbox, &order, user)).await;
        // Until then it counts, whether its client is there or not.
        drop(work);
        match begun {
            Ok(watch) => watchers::stream(&sandbox, watch, stream, limit, every).await,
            Err(problem) => stream.end(Err(problem)).await,
        }
    });
    response
}

async fn create_watcher(sandbox: &Arc<Sandbox>, user: String, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    let id = watchers::create(sandbox, watching(sandbox, &order, user)).await?;
    Ok(json!({ "watcherId": id }))
}

async fn watcher_events(sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let growing = Growing::new(call.held.another(), "{\"events\":[");
    let order: Order = unary(call).await?;
    watchers::events(sandbox, &order.watcher_id, growing).await?.reply("]}")
}

async fn remove_watcher(sandbox: &Sandbox, call: Call) -> Result<Value> {
    let order: Order = unary(call).await?;
    sandbox.watchers.remove(&order.watcher_id).map(|()| json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> FileEntry {
        FileEntry {
            name: "a\nb".into(),
            path: "/x/a\nb".into(),
            kind: Some(FileKind::File),
            size: 5,
            mode: 0o4751,
            owner: "user".into(),
            group: "user".into(),
            modified_s: 1,
            modified_ns: 2,
            link: None,
            metadata: [("k".to_owned(), "v".to_owned())].into(),
        }
    }

    #[test]
    fn a_file_is_told_in_the_protocols_terms() {
        let told = entry(&sample());
        assert_eq!(told["type"], "FILE_TYPE_FILE");
        assert_eq!((&told["size"], told["mode"].as_u64()), (&json!("5"), Some(0o751)));
        assert_eq!(told["permissions"], "-rwxr-x--x");
        assert_eq!(told["modifiedTime"], "1970-01-01T00:00:01.000000002Z");
        assert_eq!(told["metadata"]["k"], "v");
        assert!(told.get("isSymlink").is_none());
        let link =
            FileEntry { link: Some("/etc".into()), kind: Some(FileKind::Directory), ..sample() };
        let told = entry(&link);
        assert_eq!(
            (&told["type"], &told["isSymlink"]),
            (&json!("FILE_TYPE_DIRECTORY"), &json!(true))
        );
    }

    #[test]
    fn events_have_the_protocols_names() {
        let of = |change| event(&FileEvent { name: "n".into(), change }, None);
        assert_eq!(of(FileChange::Written).unwrap()["type"], "EVENT_TYPE_WRITE");
        assert!(of(FileChange::Lost).is_none() && of(FileChange::Ended).is_none());
    }
}
