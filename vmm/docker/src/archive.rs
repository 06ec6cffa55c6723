//! `GET`, `HEAD` and `PUT /containers/{id}/archive`: tar streams out of and
//! into a container.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use exocell_cell::agent::client::{self, ClientError};
use exocell_cell::agent::{FailureKind, Patient};
use hyper::StatusCode;
use serde_json::{Value, json};
use tar::{Archive, EntryType, Header};

use crate::clock::rfc3339_ms;
use crate::error::{ApiError, ApiResult};
use crate::http::{Body, BodyReader, Call, Response, empty, stream, with_header};
use crate::reach::{self, Reach};
use crate::state::Server;

/// A guest cannot feed a client for ever: bytes of one archive.
const ARCHIVE_BYTES_MAX: u64 = 64 << 30;
/// What a path's archive must begin with to be told of: long names included.
const HEAD_BYTES_MAX: u64 = 128 << 10;
const STAT_HEADER: &str = "x-docker-container-path-stat";

/// Go's bits for what is no plain file (`io/fs.FileMode`).
const GO_DIRECTORY: u32 = 1 << 31;
const GO_SYMLINK: u32 = 1 << 27;
const GO_DEVICE: u32 = 1 << 26;
const GO_PIPE: u32 = 1 << 25;
const GO_SETUID: u32 = 1 << 23;
const GO_SETGID: u32 = 1 << 22;
const GO_CHARACTER: u32 = 1 << 21;
const GO_STICKY: u32 = 1 << 20;

/// What a client is told of a path.
#[derive(Debug, PartialEq)]
struct PathStat {
    value: Value,
    directory: bool,
}

impl PathStat {
    /// Reads it off the first entry of the path's archive.
    fn of(entry: &tar::Entry<'_, impl Read>) -> io::Result<Self> {
        let header = entry.header();
        let path = entry.path()?;
        let name = path.file_name().map_or("/".into(), |name| name.to_string_lossy());
        let link = entry.link_name()?.map(|link| link.to_string_lossy().into_owned());
        let directory = header.entry_type().is_dir();
        let value = json!({
            "name": name, "size": if directory { 4096 } else { entry.size() },
            "mode": go_mode(header)?, "mtime": rfc3339_ms(header.mtime()?.saturating_mul(1000)),
            "linkTarget": link.unwrap_or_default(),
        });
        Ok(Self { value, directory })
    }

    fn header(&self) -> String {
        STANDARD.encode(self.value.to_string())
    }
}

/// The mode in the form that Go programs use.
fn go_mode(header: &Header) -> io::Result<u32> {
    let mode = header.mode()?;
    let kind = match header.entry_type() {
        EntryType::Directory => GO_DIRECTORY,
        EntryType::Symlink => GO_SYMLINK,
        EntryType::Block => GO_DEVICE,
        EntryType::Char => GO_DEVICE | GO_CHARACTER,
        EntryType::Fifo => GO_PIPE,
        _ => 0,
    };
    let special = [(0o4000, GO_SETUID), (0o2000, GO_SETGID), (0o1000, GO_STICKY)];
    let special = special.into_iter().filter(|(bit, _)| mode & bit != 0).map(|(_, go)| go);
    Ok(special.fold(kind | mode & 0o777, |all, bit| all | bit))
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
    let broken = |error| ApiError::internal(format!("the guest's archive of {path}: {error}"));
    let mut archive = Archive::new(head.as_slice());
    let mut entries = archive.entries().map_err(broken)?;
    let entry = entries.next().ok_or_else(|| broken(io::ErrorKind::UnexpectedEof.into()))?;
    PathStat::of(&entry.map_err(broken)?).map_err(broken)
}

fn path_of(call: &Call) -> ApiResult<String> {
    let path = call.target.query.get("path").unwrap_or_default();
    match path.split('/').any(|part| part == "..") {
        _ if path.is_empty() => Err(ApiError::bad_request("no path is named (path)")),
        true => Err(ApiError::bad_request(format!("the path {path} holds .."))),
        false => Ok(format!("/{}", path.trim_start_matches('/'))),
    }
}

/// `HEAD /containers/{id}/archive`
pub async fn head(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let path = path_of(call)?;
    let reach = reach::container(server, key).await?;
    let stat = server.blocking(move |_| stat(&reach, &path)).await?;
    Ok(with_header(empty(StatusCode::OK), STAT_HEADER, &stat.header()))
}

/// `GET /containers/{id}/archive`
pub async fn get(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let path = path_of(call)?;
    let reach = reach::container(server, key).await?;
    let (stat, stream_in, reach) = server
        .blocking({
            let path = path.clone();
            move |_| Ok((stat(&reach, &path)?, reach.guest()?, reach))
        })
        .await?;
    let (sender, body) = Body::stream();
    // A thread of its own: a client may take its time, and hold it.
    thread::spawn(move || {
        let failures = sender.clone();
        let mut writer = sender.writer();
        let sent = send(&stream_in, &path, &mut writer);
        // The container may be started before its client has seen the end.
        drop(reach);
        if let Err(error) = sent {
            failures.fail(error);
        }
    });
    Ok(with_header(stream("application/x-tar", body), STAT_HEADER, &stat.header()))
}

/// Sends the archive of `path`; of `DIRECTORY/.` its entries begin with `./`.
fn send(guest: &Patient, path: &str, out: &mut impl Write) -> io::Result<()> {
    let contents = path.ends_with("/.");
    if !contents {
        let sent = client::download(guest, guest, path, out, ARCHIVE_BYTES_MAX);
        return sent.map(drop).map_err(io::Error::other);
    }
    let (read, mut write) = io::pipe()?;
    thread::scope(|scope| {
        let sent = scope
            .spawn(move || client::download(guest, guest, path, &mut write, ARCHIVE_BYTES_MAX));
        let renamed = rename(read, out);
        match sent.join() {
            Ok(sent) => sent.map_err(io::Error::other).map(drop).and(renamed),
            Err(_) => Err(io::Error::other("the archive was cut short")),
        }
    })
}

/// Copies an archive without the first part of each name; the folder itself is
/// `./`.
fn rename(from: impl Read, to: &mut impl Write) -> io::Result<()> {
    let strip = |path: &std::path::Path| -> std::path::PathBuf {
        let mut parts = path.components();
        parts.next();
        let rest = parts.as_path();
        if rest.as_os_str().is_empty() { "./".into() } else { rest.to_owned() }
    };
    let mut builder = tar::Builder::new(to);
    for entry in Archive::new(from).entries()? {
        let entry = entry?;
        let mut header = entry.header().clone();
        let name = strip(&entry.path()?);
        match entry.link_name()? {
            Some(link) if header.entry_type().is_hard_link() => {
                builder.append_link(&mut header, name, strip(&link))?;
            }
            Some(link) => builder.append_link(&mut header, name, link)?,
            None => builder.append_data(&mut header, name, entry)?,
        }
    }
    builder.finish()
}

/// `PUT /containers/{id}/archive`
pub async fn put(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let path = path_of(&call)?;
    let reach = reach::container(server, key).await?;
    let body = BodyReader::new(call.body);
    server
        .blocking(move |_| {
            if !stat(&reach, &format!("{}/.", path.trim_end_matches('/')))?.directory {
                return Err(ApiError::bad_request(format!("{path}: not a directory")));
            }
            let stream = reach.guest()?;
            let sent = client::upload(&stream, &stream, &path, &mut unpacked(body)?);
            sent.map(drop).map_err(|error| refused(&path, error))
        })
        .await?;
    Ok(empty(StatusCode::OK))
}

/// The tar stream in `body`, which may be compressed with gzip.
pub fn unpacked(mut body: impl Read + 'static) -> ApiResult<Box<dyn Read>> {
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
    let whole = io::Cursor::new(head).chain(body);
    Ok(if gzip { Box::new(flate2::read::MultiGzDecoder::new(whole)) } else { Box::new(whole) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, EntryType, u32, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, mode, content) in entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(*mode);
            header.set_mtime(1);
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_size(0);
                builder.append_link(&mut header, name, content).unwrap();
            } else {
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, name, content.as_bytes()).unwrap();
            }
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn a_path_is_told_in_gos_terms() {
        for (kind, mode, content, bits, size) in [
            (EntryType::Regular, 0o4755, "abc", GO_SETUID | 0o755, 3),
            (EntryType::Directory, 0o1777, "", GO_DIRECTORY | GO_STICKY | 0o777, 4096),
            (EntryType::Symlink, 0o777, "to", GO_SYMLINK | 0o777, 0),
        ] {
            let bytes = archive(&[("a/name", kind, mode, content)]);
            let mut read = Archive::new(bytes.as_slice());
            let stat = PathStat::of(&read.entries().unwrap().next().unwrap().unwrap()).unwrap();
            assert_eq!(
                (stat.value["mode"].as_u64(), stat.value["size"].as_u64()),
                (Some(bits.into()), Some(size))
            );
            assert_eq!(stat.value["name"], "name");
            assert_eq!(stat.value["mtime"], "1970-01-01T00:00:01.000000000Z");
            assert_eq!(stat.directory, kind.is_dir());
        }
    }

    #[test]
    fn the_contents_of_a_directory_stand_for_it() {
        let bytes = archive(&[
            ("d", EntryType::Directory, 0o755, ""),
            ("d/f", EntryType::Regular, 0o644, "x"),
            ("d/h", EntryType::Link, 0o644, "d/f"),
            ("d/s", EntryType::Symlink, 0o777, "d/f"),
        ]);
        let mut out = Vec::new();
        rename(bytes.as_slice(), &mut out).unwrap();
        let mut read = Archive::new(out.as_slice());
        let names: Vec<_> = read
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let link = entry.link_name().unwrap().map(|link| link.display().to_string());
                (entry.path().unwrap().display().to_string(), link)
            })
            .collect();
        let name = |name: &str, link: Option<&str>| (name.to_owned(), link.map(str::to_owned));
        let expected =
            [name("./", None), name("f", None), name("h", Some("f")), name("s", Some("d/f"))];
        assert_eq!(names, expected);
    }

    #[test]
    fn only_what_can_be_unpacked_is_taken() {
        let mut plain = Vec::new();
        unpacked(&b"tar"[..]).unwrap().read_to_end(&mut plain).unwrap();
        assert_eq!(plain, b"tar");
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"a tar stream").unwrap();
        let packed = io::Cursor::new(packed.finish().unwrap());
        let mut plain = Vec::new();
        unpacked(packed).unwrap().read_to_end(&mut plain).unwrap();
        assert_eq!(plain, b"a tar stream");
        assert_eq!(unpacked(&b"BZh91"[..]).err().unwrap().status.as_u16(), 501);
    }
}
