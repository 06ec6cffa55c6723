//! `GET /files` and `POST /files`: what is in files.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

use bytes::{Bytes, BytesMut};
use exocell_cell::agent::Patient;
use exocell_cell::agent::client::{ClientError, receive_data};
use exocell_cell::agent::files::{
    self, FileAction, FileEntry, FileKind, FileRequest, METADATA_BYTES_MAX, METADATA_MAX,
};
use exocell_cell::archive;
use http_body_util::{BodyDataStream, BodyExt};
use hyper::body::Incoming;
use hyper::{HeaderMap, StatusCode};
use multer::{Constraints, Multipart, SizeLimit};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::signature::Signed;
use super::{checked_user, of_user, placed, user};
use crate::error::{Problem, Result};
use crate::http::{
    Body, Call, ChunkReader, PAUSE_MAX, Query, Response, chunks, json_reply, reply, too_much,
};
use crate::keys;
use crate::note::Note;
use crate::sandbox::Sandbox;

/// A guest cannot feed a client for ever: bytes of one file.
const FILE_BYTES_MAX: u64 = 64 << 30;
/// Files of one upload.
const FILES_MAX: usize = 1000;
/// Bytes of a packed file, or all of it, that come before somebody unpacks it.
const UNPACKED_FROM: usize = 64 << 10;
const METADATA: &str = "x-metadata-";

/// As which user whoever asks is let in: by the sandbox' token, or by a URL that is signed with it.
fn caller(
    note: &Note,
    query: &Query,
    headers: &HeaderMap,
    operation: &'static str,
) -> Result<String> {
    if let Some(signed) = Signed::read(query, operation) {
        signed.check(&note.access_token)?;
        // Who has a URL chooses no user: what it does not name was not signed.
        return checked_user(note, signed.user);
    }
    let token = headers.get("x-access-token").and_then(|value| value.to_str().ok());
    if !token.is_some_and(|token| keys::same(token, &note.access_token)) {
        return Err(Problem::unauthorized(
            "missing signature query parameter, or access token (X-Access-Token)",
        ));
    }
    match query.get("username") {
        Some(name) => checked_user(note, name),
        None => user(note, headers),
    }
}

fn admit(sandbox: &Sandbox, call: &mut Call, operation: &'static str) -> Result<String> {
    let user = caller(&sandbox.note(), &call.query, &call.headers, operation)?;
    call.count(sandbox.tenant())?;
    Ok(user)
}

/// Sends a file.
pub async fn get(sandbox: &Arc<Sandbox>, mut call: Call) -> Result<Response> {
    let user = admit(sandbox, &mut call, "read")?;
    let turn = sandbox.transfer().await?;
    let path = placed(&sandbox.note(), call.query.get("path").unwrap_or_default());
    let request = FileRequest { user, path, action: FileAction::Read };
    let own = sandbox.clone();
    let (sender, body) = Body::stream();
    let (told, heard) = oneshot::channel();
    let sending = move || {
        let _turn = turn;
        let begun = own.guest_for_long().and_then(|guest| {
            let stream = guest.get_ref().try_clone();
            let stream = stream.map_err(|error| Problem::internal(error.to_string()))?;
            let reader = Patient::new(stream, exocell_cell::agent::TRANSFER_MAX);
            Ok((guest, reader))
        });
        let (guest, reader) = match begun {
            Ok(begun) => begun,
            Err(problem) => return drop(told.send(Err(problem))),
        };
        let (entry, mut rest) = match files::read(&reader, &guest, &request) {
            Ok(begun) => begun,
            Err(error) => return drop(told.send(Err(of_user(error.into())))),
        };
        if told.send(Ok(entry)).is_err() {
            return;
        }
        let failures = sender.clone();
        let mut writer = sender.writer();
        if let Err(error) = receive_data(&mut rest, &mut writer, FILE_BYTES_MAX) {
            failures.fail(io::Error::other(error));
        }
    };
    spawn(sending)?;
    let lost = |_| Problem::unavailable("the sandbox ended meanwhile");
    let _: FileEntry = heard.await.map_err(lost)??;
    Ok(reply(StatusCode::OK, "application/octet-stream", body))
}

/// Begins work on a thread of its own, which whoever feeds it may hold.
fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name("e2b-file".to_owned()).spawn(work);
    thread.map(drop).map_err(|error| {
        Problem::unavailable(format!("there is no thread for the call ({error}); try again later"))
    })
}

/// Takes files in: one as it is, or as many as a form has.
pub async fn post(sandbox: &Arc<Sandbox>, mut call: Call) -> Result<Response> {
    let user = admit(sandbox, &mut call, "write")?;
    let metadata = metadata(&call.headers)?;
    let kind = call.header("content-type").unwrap_or_default().to_owned();
    let upload = Upload { sandbox: sandbox.clone(), user, metadata };
    let path = call.query.get("path").map(str::to_owned);
    let encoding = call.header("content-encoding").unwrap_or("identity").to_owned();
    let is_form = kind.starts_with("multipart/form-data");
    let told = match (is_form, encoding.as_str()) {
        (true, "identity" | "") => upload.form(&kind, path, call).await?,
        (false, "identity" | "" | "gzip") => {
            let path = path.ok_or_else(|| Problem::invalid("no path is named (path)"))?;
            vec![match encoding == "gzip" {
                true => upload.packed(path, call).await?,
                false => upload.whole(path, call.body.open(), None).await?,
            }]
        }
        (_, other) => {
            return Err(Problem::unsupported(
                format!("compression {other:?} of such a body"),
                "send it plain, or one file by gzip as application/octet-stream",
            ));
        }
    };
    Ok(json_reply(StatusCode::OK, &told))
}

/// What headers say of the files that come.
fn metadata(headers: &HeaderMap) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for (name, value) in headers {
        let Some(name) = name.as_str().strip_prefix(METADATA) else { continue };
        let plain = |text: &&str| text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        let value = value.to_str().ok().filter(plain);
        let value = value.ok_or_else(|| {
            Problem::invalid(format!("the metadata {name:?} is no printable ASCII"))
        })?;
        all.insert(name.to_owned(), value.to_owned());
    }
    let bytes: usize = all.iter().map(|(name, value)| name.len() + value.len()).sum();
    match all.len() > METADATA_MAX || bytes > METADATA_BYTES_MAX {
        true => Err(Problem::invalid(format!(
            "the metadata has more than {METADATA_MAX} entries or {METADATA_BYTES_MAX} bytes"
        ))),
        false => Ok(all),
    }
}

struct Upload {
    sandbox: Arc<Sandbox>,
    user: String,
    metadata: BTreeMap<String, String>,
}

type Sender = mpsc::Sender<io::Result<Bytes>>;

impl Upload {
    /// Begins to write the file at `path`; where its bytes go, and what is told of it at the end.
    async fn begin(
        &self,
        path: String,
        gzip: bool,
    ) -> Result<(Sender, oneshot::Receiver<Result<FileEntry>>)> {
        if path.is_empty() {
            return Err(Problem::invalid("a file has no path"));
        }
        let action = FileAction::Write { metadata: self.metadata.clone() };
        let path = placed(&self.sandbox.note(), &path);
        let request = FileRequest { user: self.user.clone(), path, action };
        let (sender, reader) = chunks();
        let (told, heard) = oneshot::channel();
        let (own, turn) = (self.sandbox.clone(), self.sandbox.transfer().await?);
        spawn(move || {
            let _turn = turn;
            drop(told.send(write(&own, &request, reader, gzip)));
        })?;
        Ok((sender, heard))
    }

    /// Writes a packed body into the file at `path`. A client that says little has no process.
    async fn packed(&self, path: String, mut call: Call) -> Result<Value> {
        let (mut body, mut first) = (call.body.open(), BytesMut::new());
        while let Some(open) = &mut body
            && first.len() < UNPACKED_FROM
        {
            let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come");
            let Some(frame) = timeout(PAUSE_MAX, open.frame()).await.map_err(late)? else {
                body = None;
                break;
            };
            let cut = |error| Problem::invalid(format!("the body was cut short: {error}"));
            let Ok(data) = frame.map_err(cut)?.into_data() else { continue };
            if !call.held.grow(data.len() as u64) {
                return Err(too_much());
            }
            first.extend_from_slice(&data);
        }
        let _turn = self.sandbox.unpack().await?;
        self.whole(path, body, Some(first.freeze())).await
    }

    /// Writes `body` into the file at `path`: what is `packed`, of which the first has come, or what
    /// is as it is.
    async fn whole(
        &self,
        path: String,
        body: Option<Incoming>,
        packed: Option<Bytes>,
    ) -> Result<Value> {
        let (sender, told) = self.begin(path, packed.is_some()).await?;
        if let Some(first) = packed.filter(|first| !first.is_empty()) {
            // Who writes has an error to tell.
            let _ = sender.send(Ok(first)).await;
        }
        if let Some(mut body) = body {
            loop {
                let chunk = match timeout(PAUSE_MAX, body.frame()).await {
                    Err(_) => Err(io::ErrorKind::TimedOut.into()),
                    Ok(None) => break,
                    Ok(Some(Err(error))) => Err(io::Error::other(error)),
                    Ok(Some(Ok(frame))) => match frame.into_data() {
                        Ok(data) => Ok(data),
                        Err(_) => continue,
                    },
                };
                let ended = chunk.is_err();
                // Who writes has an error to tell.
                if sender.send(chunk).await.is_err() || ended {
                    break;
                }
            }
        }
        drop(sender);
        shown(told).await
    }

    /// Writes the files of a form: to `path` if it is one, else each to its own name.
    async fn form(&self, kind: &str, path: Option<String>, call: Call) -> Result<Vec<Value>> {
        let boundary = multer::parse_boundary(kind)
            .map_err(|error| Problem::invalid(format!("the form cannot be read: {error}")))?;
        let Some(body) = call.body.open() else { return Ok(Vec::new()) };
        // The guest's disk bounds what may come.
        let limits = Constraints::new().size_limit(SizeLimit::new().whole_stream(FILE_BYTES_MAX));
        let stream = BodyDataStream::new(body);
        let mut form = Multipart::with_constraints(stream, boundary, limits);
        let broken =
            |error: multer::Error| Problem::invalid(format!("the form cannot be read: {error}"));
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the form did not come in time");
        let (mut all, mut paths) = (Vec::new(), Vec::new());
        while let Some(mut field) =
            timeout(PAUSE_MAX, form.next_field()).await.map_err(late)?.map_err(broken)?
        {
            if field.name() != Some("file") {
                continue;
            }
            let name = path.clone().or_else(|| field.file_name().map(str::to_owned));
            let name = name.unwrap_or_default();
            if paths.contains(&name) {
                return Err(Problem::invalid(format!(
                    "two files of the form have the path {name:?}"
                )));
            }
            if paths.len() >= FILES_MAX {
                return Err(Problem::invalid(format!("the form has more than {FILES_MAX} files")));
            }
            let (sender, told) = self.begin(name.clone(), false).await?;
            loop {
                let chunk = match timeout(PAUSE_MAX, field.chunk()).await {
                    Err(_) => Err(io::ErrorKind::TimedOut.into()),
                    Ok(Ok(None)) => break,
                    Ok(Ok(Some(chunk))) => Ok(chunk),
                    Ok(Err(error)) => Err(io::Error::other(error.to_string())),
                };
                let ended = chunk.is_err();
                if sender.send(chunk).await.is_err() || ended {
                    break;
                }
            }
            drop(sender);
            all.push(shown(told).await?);
            paths.push(name);
        }
        match all.is_empty() {
            true => Err(Problem::invalid("the form has no file")),
            false => Ok(all),
        }
    }
}

/// Writes what comes into a file of the guest. What is packed is unpacked by a jailed process.
fn write(
    sandbox: &Sandbox,
    request: &FileRequest,
    mut from: ChunkReader,
    gzip: bool,
) -> Result<FileEntry> {
    let guest = sandbox.guest_for_long()?;
    let send = |from: &mut dyn Read| {
        let mut from = from;
        files::write(&guest, &guest, request, &mut from)
    };
    let written: std::result::Result<FileEntry, ClientError> = match gzip {
        false => send(&mut from),
        true => archive::unzipped(
            |mut to| io::copy(&mut from, &mut to).map(drop),
            |mut unpacked| Ok(send(&mut unpacked)),
        )
        .map_err(|error| Problem::invalid(format!("the body cannot be unpacked: {error}")))?,
    };
    written.map_err(|error| of_user(error.into()))
}

async fn shown(told: oneshot::Receiver<Result<FileEntry>>) -> Result<Value> {
    let lost = |_| Problem::unavailable("the sandbox ended meanwhile");
    let entry = told.await.map_err(lost)??;
    let kind = match entry.kind {
        Some(FileKind::Directory) => "dir",
        _ => "file",
    };
    let mut shown = json!({ "name": entry.name, "path": entry.path, "type": kind });
    if !entry.metadata.is_empty() {
        shown["metadata"] = json!(entry.metadata);
    }
    Ok(shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use sha2::{Digest, Sha256};

    #[test]
    fn who_has_a_signed_url_chooses_no_user() {
        let note = Note { user: "user".into(), access_token: "token".into(), ..Note::default() };
        let basic = |name: &str| format!("Basic {}", STANDARD.encode(format!("{name}:")));
        let mut headers = HeaderMap::new();
        headers.insert("authorization", basic("root").parse().unwrap());
        let of =
            |query: &str, headers: &HeaderMap| caller(&note, &Query::read(query), headers, "read");
        let sign = |text: &str| {
            let sum = Sha256::digest(text.as_bytes());
            format!("v1_{}", STANDARD.encode(sum)).replace('+', "%2B").replace('=', "")
        };
        let plain = format!("path=/a&signature={}", sign("/a:read::token"));
        assert_eq!(of(&plain, &headers).unwrap(), "user");
        let named = format!("path=/a&username=ann&signature={}", sign("/a:read:ann:token"));
        assert_eq!(of(&named, &headers).unwrap(), "ann");
        let other = named.replace("=ann", "=root");
        assert_eq!(of(&other, &headers).unwrap_err().status, 401);
        assert_eq!(of("path=/a", &headers).unwrap_err().status, 401);
        headers.insert("x-access-token", "token".parse().unwrap());
        assert_eq!(of("path=/a", &headers).unwrap(), "root");
    }

    #[test]
    fn metadata_is_of_headers_and_bounded() {
        let mut headers = HeaderMap::new();
        headers.insert("x-metadata-owner", "a b".parse().unwrap());
        headers.insert("x-other", "c".parse().unwrap());
        assert_eq!(metadata(&headers).unwrap(), [("owner".to_owned(), "a b".to_owned())].into());
        let long = "x".repeat(10_000);
        headers.insert("x-metadata-long", long.parse().unwrap());
        assert_eq!(metadata(&headers).unwrap_err().status, 400);
        headers.insert("x-metadata-long", hyper::header::HeaderValue::from_bytes(b"\xff").unwrap());
        assert!(metadata(&headers).is_err());
    }
}
