//! `GET`, `HEAD` and `PUT /containers/{id}/archive`: tar streams out of and
//! into a container.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use exocell_cell::agent::client::{self, ClientError};
use exocell_cell::agent::{FailureKind, Patient};
use exocell_cell::archive;
use exocell_cell::clock::rfc3339_ms;
use exocell_cell::images::FirstEntry;
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::admit::MountPoint;
use crate::error::{ApiError, ApiResult};
use crate::go;
use crate::http::{Body, BodyReader, Call, Response, empty, stream, with_header};
use crate::lifecycle;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::state::Server;

/// A guest cannot feed a client for ever: bytes of one archive.
const ARCHIVE_BYTES_MAX: u64 = 64 << 30;
/// What a path's archive must begin with to be told of: long names included.
const HEAD_BYTES_MAX: u64 = 128 << 10;
const STAT_HEADER: &str = "x-docker-container-path-stat";

/// What tar calls a directory.
const DIRECTORY: char = '5';

/// What a client is told of a path.
#[derive(Debug, PartialEq)]
struct PathStat {
    value: Value,
    directory: bool,
}

impl PathStat {
    /// Of the first entry of the path's archive.
    fn of(entry: FirstEntry) -> Self {
        let FirstEntry { name, link, kind, size, mode, mtime } = entry;
        let directory = kind == DIRECTORY;
        let mtime_ms = u64::try_from(mtime).unwrap_or(0).saturating_mul(1000);
        let value = json!({
            "name": if name.is_empty() { "/" } else { &name },
            "size": if directory { 4096 } else { size },
            "mode": go_mode(kind, mode), "mtime": rfc3339_ms(mtime_ms), "linkTarget": link,
        });
        Self { value, directory }
    }

    fn header(&self) -> String {
        STANDARD.encode(self.value.to_string())
    }
}

/// The mode in the form that Go programs use.
fn go_mode(kind: char, mode: u16) -> u32 {
    let kind = match kind {
        DIRECTORY => go::DIRECTORY,
        '2' => go::SYMLINK,
        '3' => go::DEVICE | go::CHARACTER,
        '4' => go::DEVICE,
        '6' => go::PIPE,
        _ => 0,
    };
    let mode = u32::from(mode);
    let special = [(0o4000, go::SETUID), (0o2000, go::SETGID), (0o1000, go::STICKY)];
    let special = special.into_iter().filter(|(bit, _)| mode & bit != 0).map(|(_, go)| go);
    special.fold(kind | mode & 0o777, |all, bit| all | bit)
}

fn refused(path: &str, error: ClientError) -> ApiError {
    match error {
        ClientError::Failed { kind: FailureKind::NotFound, .. } => {
            ApiError::not_found(format!("Could not find the file {path} in the container"))
        }
        ClientError::Failed { kind: FailureKind::Invalid, message } => {
            ApiError::bad_request(message)
        }
        error => ApiError::internal(error.to_string()),
    }
}

/// What `path` is in the guest. Blocks.
fn stat(reach: &Reach, path: &str) -> ApiResult<PathStat> {
    let stream = reach.guest()?;
    let mut head = Vec::new();
    match client::download(&stream, &stream, path, &mut head, HEAD_BYTES_MAX) {
        // The beginning says enough.
        Ok(_) | Err(ClientError::TooMuch { .. }) => {}
        Err(error) => return Err(refused(path, error)),
    }
    let of_another =
        |said: String| ApiError::internal(format!("the guest's archive of {path}: {said}"));
    let first = archive::first(&head).map_err(|error| of_another(error.to_string()))?;
    // Clients may make a file of that name.
    let name = archive::base_name(path).unwrap_or_default();
    match first.name.as_str() == name {
        true => Ok(PathStat::of(first)),
        false => Err(of_another(format!("it is of {:?}", first.name))),
    }
}

fn path_of(call: &Call) -> ApiResult<String> {
    let path = call.target.query.get("path").unwrap_or_default();
    match path.split('/').any(|part| part == "..") {
        _ if path.is_empty() => Err(ApiError::bad_request("no path is named (path)")),
        true => Err(ApiError::bad_request(format!("the path {path} holds .."))),
        false => Ok(format!("/{}", path.trim_start_matches('/'))),
    }
}

/// Reaches into container `key` and does the first of it. A program that ends meanwhile takes its
/// cell with it: then the files are looked for once more, on the container's disk.
pub async fn begun<T: Send + 'static>(
    server: &Arc<Server>,
    key: &str,
    place: &Place,
    first: impl Fn(&Reach) -> ApiResult<T> + Clone + Send + 'static,
) -> ApiResult<(Reach, T)> {
    let mut again = true;
    loop {
        let reach = reach::container(server, key, place).await?;
        let running = reach.running().map(str::to_owned);
        let first = first.clone();
        let done = server.blocking(move |_| {
            let done = first(&reach)?;
            Ok((reach, done))
        });
        match (done.await, running) {
            (Err(error), Some(id))
                if again
                    && error.status == StatusCode::INTERNAL_SERVER_ERROR
                    && lifecycle::is_over(server, &id).await =>
            {
                again = false;
            }
            (done, _) => return done,
        }
    }
}

/// `HEAD /containers/{id}/archive`
pub async fn head(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let path = path_of(call)?;
    let (_, stat) = begun(server, key, &call.place, move |reach| stat(reach, &path)).await?;
    Ok(with_header(empty(StatusCode::OK), STAT_HEADER, &stat.header()))
}

/// `GET /containers/{id}/archive`
pub async fn get(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let path = path_of(call)?;
    let of = path.clone();
    let (reach, (stat, stream_in)) =
        begun(server, key, &call.place, move |reach| Ok((stat(reach, &of)?, reach.guest()?)))
            .await?;
    let (sender, body) = Body::stream();
    server.begin(move |_| {
        let failures = sender.clone();
        let mut writer = sender.writer();
        let sent = send(&stream_in, &path, &mut writer);
        // The container may be started before its client has seen the end.
        drop(reach);
        if let Err(error) = sent {
            failures.fail(error);
        }
    })?;
    Ok(with_header(stream("application/x-tar", body), STAT_HEADER, &stat.header()))
}

/// Sends the archive of `path` without what gives rights on a host, and with no names but `path`'s
/// own and those below; of `DIRECTORY/.` its entries, without it.
fn send(guest: &Patient, path: &str, out: &mut impl Write) -> io::Result<()> {
    let names = match path.ends_with("/.") {
        true => archive::Names::inside(path),
        false => archive::Names::of(path),
    };
    let passed = archive::passed(
        &names,
        |mut write| {
            let sent = client::download(guest, guest, path, &mut write, ARCHIVE_BYTES_MAX);
            sent.map(drop).map_err(local)
        },
        out,
    );
    passed.map_err(io::Error::other)
}

/// What was wrong on this side is told as it is.
pub fn local(error: ClientError) -> io::Error {
    match error {
        ClientError::Local(error) => error,
        error => io::Error::other(error),
    }
}

/// `PUT /containers/{id}/archive`
pub async fn put(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let path = path_of(&call)?;
    let folder = path.clone();
    let seen = server.find(key).await?;
    if seen.container.spec.read_only && !is_mounted(&seen.container.mounts, &path) {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "container rootfs is marked read-only: copy into a volume or a folder that may be \
             written",
        ));
    }
    let (reach, stream) = begun(server, key, &call.place, move |reach| {
        if !stat(reach, &format!("{}/.", folder.trim_end_matches('/')))?.directory {
            return Err(ApiError::bad_request(format!("{folder}: not a directory")));
        }
        reach.guest()
    })
    .await?;
    let body = BodyReader::new(call.body);
    let id = reach.running().map(str::to_owned);
    let sent = server
        .at_its_pace(move |_| upload(&stream, &path, body).map_err(|error| reach.failure(error)));
    match (sent.await, id) {
        (sent, Some(id)) => lifecycle::unless_over(server, &id, sent).await?,
        (sent, None) => sent?,
    }
    Ok(empty(StatusCode::OK))
}

/// Whether `path` is in a mount that may be written, by its name.
fn is_mounted(mounts: &[MountPoint], path: &str) -> bool {
    let path = Path::new("/").join(path);
    let is_plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    is_plain && mounts.iter().any(|mount| mount.writable && path.starts_with(&mount.target))
}

/// Sends the tar stream in `body` to the guest. One that is compressed with gzip is read by a
/// jailed process first.
fn upload(guest: &Patient, path: &str, body: BodyReader) -> ApiResult<()> {
    let (mut body, gzip) = looked_at(body)?;
    let send = |from: &mut dyn Read| {
        let mut from = from;
        client::upload(guest, guest, path, &mut from).map(drop)
    };
    let sent = match gzip {
        false => send(&mut body),
        true => archive::unzipped(
            |mut write| io::copy(&mut body, &mut write).map(drop),
            |mut read| Ok(send(&mut read)),
        )?,
    };
    sent.map_err(|error| refused(path, error))
}

/// The tar stream in `body` as it is, if it is in a form that can be read: plain, or gzip.
pub fn known<R: Read + Send>(body: R) -> ApiResult<impl Read + Send> {
    looked_at(body).map(|(body, _)| body)
}

/// The same, and whether it is compressed.
fn looked_at<R: Read + Send>(mut body: R) -> ApiResult<(impl Read + Send, bool)> {
    let mut head = Vec::new();
    let read = body.by_ref().take(6).read_to_end(&mut head);
    read.map_err(|error| ApiError::bad_request(format!("the archive was cut short: {error}")))?;
    let unsupported = |name: &str| {
        Err(ApiError::unsupported(format!("{name} compression"), "send the archive plain or gzip"))
    };
    match head.as_slice() {
        [b'B', b'Z', b'h', ..] => return unsupported("bzip2"),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => return unsupported("xz"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => return unsupported("zstd"),
        _ => {}
    }
    let gzip = head.starts_with(&[0x1f, 0x8b]);
    Ok((io::Cursor::new(head).chain(body), gzip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_told_in_gos_terms() {
        for (kind, mode, size, bits, shown) in [
            ('0', 0o4755, 3, go::SETUID | 0o755, 3),
            (DIRECTORY, 0o1777, 0, go::DIRECTORY | go::STICKY | 0o777, 4096),
            ('2', 0o777, 0, go::SYMLINK | 0o777, 0),
        ] {
            let (name, link) = ("name".to_owned(), String::new());
            let stat = PathStat::of(FirstEntry { name, link, kind, size, mode, mtime: 1 });
            assert_eq!(
                (stat.value["mode"].as_u64(), stat.value["size"].as_u64()),
                (Some(bits.into()), Some(shown))
            );
            assert_eq!(stat.value["name"], "name");
            assert_eq!(stat.value["mtime"], "1970-01-01T00:00:01.000000000Z");
            assert_eq!(stat.directory, kind == DIRECTORY);
        }
    }

    #[test]
    fn only_what_can_be_unpacked_is_taken() {
        let read = |bytes: &'static [u8]| {
            let (mut body, gzip) = looked_at(bytes)?;
            let mut whole = Vec::new();
            body.read_to_end(&mut whole).unwrap();
            Ok::<_, ApiError>((whole, gzip))
        };
        assert_eq!(read(b"tar").unwrap(), (b"tar".to_vec(), false));
        assert!(read(b"\x1f\x8bpacked").unwrap().1);
        assert_eq!(read(b"BZh91").unwrap_err().status.as_u16(), 501);
    }
}
