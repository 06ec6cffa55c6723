//! `GET /files` and `POST /files`: what is in files.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use exocell_cell::agent::Patient;
use exocell_cell::agent::client::{ClientError, receive_data};
use exocell_cell::agent::files::{
    self, FileAction, FileEntry, FileKind, FileRequest, METADATA_BYTES_MAX, METADATA_MAX,
};
use exocell_cell::archive;
use http_body_util::{BodyDataStream, BodyExt};
use hyper::{HeaderMap, StatusCode};
use multer::{Constraints, Multipart, SizeLimit};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::signature::Signed;
use super::{checked_user, of_user, placed, user};
use crate::error::{Problem, Result};
use crate::http::{Body, Call, ChunkReader, PAUSE_MAX, Response, chunks, json_reply, reply};
use crate::sandbox::Sandbox;

/// A guest cannot feed a client for ever: bytes of one file.
const FILE_BYTES_MAX: u64 = 64 << 30;
/// Files of one upload.
const FILES_MAX: usize = 1000;
const METADATA: &str = "x-metadata-";

/// Lets in whoever has the sandbox' token, or a URL that is signed with it.
fn admit(sandbox: &Sandbox, call: &Call, operation: &'static str) -> Result<String> {
    if let Some(signed) = Signed::read(&call.query, operation) {
        signed.check(&sandbox.note().access_token)?;
    } else if !sandbox.lets_in(call.header("x-access-token")) {
        return Err(Problem::unauthorized(
            "missing signature query parameter, or access token (X-Access-Token)",
        ));
    }
    let note = sandbox.note();
    match call.query.get("username") {
        Some(name) => checked_user(&note, name),
        None => user(&note, &call.headers),
    }
}

/// Sends a file.
pub async fn get(sandbox: &Arc<Sandbox>, call: &Call) -> Result<Response> {
    let user = admit(sandbox, call, "read")?;
    let path = placed(&sandbox.note(), call.query.get("path").unwrap_or_default());
    let request = FileRequest { user, path, action: FileAction::Read };
    let own = sandbox.clone();
    let (sender, body) = Body::stream();
    let (told, heard) = oneshot::channel();
    let sending = move || {
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
pub async fn post(sandbox: &Arc<Sandbox>, call: Call) -> Result<Response> {
    let user = admit(sandbox, &call, "write")?;
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
            vec![upload.whole(path, call, encoding == "gzip").await?]
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
    fn begin(
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
        let own = self.sandbox.clone();
        spawn(move || drop(told.send(write(&own, &request, reader, gzip))))?;
        Ok((sender, heard))
    }

    /// Writes the body of `call` into the file at `path`.
    async fn whole(&self, path: String, call: Call, gzip: bool) -> Result<Value> {
        let (sender, told) = self.begin(path, gzip)?;
        if let Some(mut body) = call.body.open() {
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
            let (sender, told) = self.begin(name.clone(), false)?;
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
