//! Archives of files that builds take: `ROOT/e2b/archives/TENANT/HASH`.
//!
//! Clients put them there by URLs that are signed. No byte of them is looked at here.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use exocell_cell::images::{ImportLimits, Reserve, private};
use exocell_cell::now_ms;
use http_body_util::BodyExt;
use hyper::StatusCode;
use serde_json::json;
use tempfile::NamedTempFile;
use tokio::time::timeout;

use super::Builds;
use crate::blocking::blocking;
use crate::error::{Problem, Result};
use crate::http::{Call, PAUSE_MAX, Query, Response, empty, json_reply};
use crate::keys::{self, Tenant};

/// Bytes of one archive, of all of a tenant's, and how many those are.
const BYTES_MAX: u64 = 4 << 30;
const BYTES_OF_ONE_MAX: u64 = 8 << 30;
const OF_ONE_MAX: usize = 1000;
/// How long one is kept that no build takes.
const KEPT: Duration = Duration::from_secs(3600);
/// Bytes that come between two looks at what a tenant has.
const LOOK_BYTES: u64 = 16 << 20;
/// How long a client may take to begin to send one, in seconds.
const URL_SECONDS: u64 = 3600;
/// How long it waits until others of its tenant's have come.
const TURN_MAX: Duration = Duration::from_secs(60);

pub fn check_hash(hash: &str) -> Result<()> {
    match hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => Ok(()),
        false => Err(Problem::invalid("a hash of files has 64 hexadecimal digits")),
    }
}

/// Where all of them are.
pub fn root(builds: &Builds) -> PathBuf {
    builds.options.layout.root().join("e2b/archives")
}

/// Where the archive `hash` of a tenant is.
pub fn path(builds: &Builds, tenant: &str, hash: &str) -> PathBuf {
    root(builds).join(tenant).join(hash.to_ascii_lowercase())
}

/// Whether it is there; then it is kept as one that has just come.
pub fn renew(path: &Path) -> bool {
    let renewed = File::options().write(true).open(path);
    renewed.and_then(|file| file.set_modified(SystemTime::now())).is_ok()
}

fn signature(builds: &Builds, tenant: &str, hash: &str, expires: u64) -> String {
    keys::hash(&format!("{}:{tenant}:{hash}:{expires}", builds.secret))
}

/// `GET /templates/{name}/files/{hash}`: where the archive is to be put.
pub fn file(builds: &Builds, tenant: &Tenant, hash: &str, call: &Call) -> Result<Response> {
    check_hash(hash)?;
    let present = renew(&path(builds, &tenant.name, hash));
    let expires = now_ms() / 1000 + URL_SECONDS;
    let signature = signature(builds, &tenant.name, hash, expires);
    let own = || format!("127.0.0.1:{}", builds.options.port);
    let host = call.header("host").map_or_else(own, str::to_owned);
    // A proxy before this server may speak TLS for it, and says so; who lies has no use of it.
    let scheme = match call.header("x-forwarded-proto") {
        Some("https") => "https",
        _ => "http",
    };
    let url = format!(
        "{scheme}://{host}/e2b/archives/{}/{hash}?expires={expires}&signature={signature}",
        tenant.name
    );
    Ok(json_reply(StatusCode::CREATED, &json!({ "present": present, "url": url })))
}

/// `PUT /e2b/archives/{tenant}/{hash}`, by a URL that was signed.
pub async fn upload(
    builds: &Arc<Builds>,
    tenant: &str,
    hash: &str,
    query: &Query,
    mut call: Call,
) -> Result<Response> {
    check_hash(hash)?;
    let expires = query.number("expires")?.unwrap_or(0);
    let own = signature(builds, tenant, hash, expires);
    let given = query.get("signature").unwrap_or_default();
    if !keys::same(&own, given) || expires < now_ms() / 1000 {
        return Err(Problem::unauthorized("the URL is not signed, or its time is over"));
    }
    call.count(tenant)?;
    let turn = timeout(TURN_MAX, builds.bounds.archives.wait(tenant, 1)).await;
    let _turn = turn
        .map_err(|_| Problem::exhausted("as many archives as may come at once; try again later"))?;
    let path = path(builds, tenant, hash);
    let folder = path.parent().map(PathBuf::from).unwrap_or_default();
    let mut coming = blocking(move || Coming::begin(folder, BYTES_OF_ONE_MAX)).await?;
    let mut body = call.body.open();
    while let Some(open) = &mut body {
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
        let frame = match timeout(PAUSE_MAX, open.frame()).await.map_err(late)? {
            None => break,
            Some(frame) => frame.map_err(|error| Problem::invalid(error.to_string()))?,
        };
        let Ok(data) = frame.into_data() else { continue };
        coming = blocking(move || {
            coming.write(&data)?;
            Ok(coming)
        })
        .await?;
    }
    blocking(move || {
        coming.file.persist(path).map_err(|error| failed(error.error))?;
        Ok(empty(StatusCode::OK))
    })
    .await
}

fn failed(error: io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Problem::new(
            StatusCode::INSUFFICIENT_STORAGE,
            "the server's disk has no room for the archive: 1 GiB of it, or a twentieth where \
             that is less, is kept free; let the operator make room (exocell system prune)",
        ),
        _ => Problem::internal(format!("cannot keep the archive: {error}")),
    }
}

/// An archive that comes.
struct Coming {
    file: NamedTempFile,
    folder: PathBuf,
    reserve: Reserve,
    /// Bytes of it, and of all that its tenant has; how many came since that was looked at.
    own: u64,
    all: u64,
    unseen: u64,
    all_max: u64,
}

impl Coming {
    fn begin(folder: PathBuf, all_max: u64) -> Result<Self> {
        private::folder(&folder).map_err(failed)?;
        let (count, all) = used(&folder);
        if count >= OF_ONE_MAX {
            return Err(Problem::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!(
                    "this key has {OF_ONE_MAX} archives that no build has taken; build, or wait"
                ),
            ));
        }
        let file = NamedTempFile::new_in(&folder).map_err(failed)?;
        let reserve = Reserve::new(&ImportLimits::default());
        Ok(Self { file, folder, reserve, own: 0, all, unseen: 0, all_max })
    }

    fn write(&mut self, data: &[u8]) -> Result<()> {
        let count = data.len() as u64;
        (self.own, self.all, self.unseen) =
            (self.own + count, self.all + count, self.unseen + count);
        if self.own > BYTES_MAX {
            return Err(Problem::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the archive has more than {} GiB", BYTES_MAX >> 30),
            ));
        }
        // Others come beside it.
        if self.unseen > LOOK_BYTES {
            (self.unseen, self.all) = (0, used(&self.folder).1 + count);
        }
        if self.all > self.all_max {
            return Err(Problem::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!(
                    "this key has {} GiB of archives that no build has taken, as much as it may; \
                     build, or wait: they are kept for an hour",
                    self.all_max >> 30
                ),
            ));
        }
        self.reserve.spend(self.file.as_file(), data.len()).map_err(failed)?;
        self.file.write_all(data).map_err(failed)
    }
}

/// How many files there are in `folder`, and their bytes.
fn used(folder: &Path) -> (usize, u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| entry.metadata().ok()).map(|data| data.len());
    sizes.fold((0, 0), |(count, all), size| (count + 1, all + size))
}

/// Removes archives below `root` that no build has taken for long and that none of `wanted` is, and
/// what was left by clients that went.
pub fn sweep(root: &Path, wanted: &[PathBuf], now: SystemTime) {
    for folder in fs::read_dir(root).into_iter().flatten().flatten() {
        for entry in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|data| data.modified());
            let age = modified.ok().and_then(|at| now.duration_since(at).ok());
            if age.is_some_and(|age| age > KEPT) && !wanted.contains(&entry.path()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_archives_are_bounded_together() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("ann");
        let begin = || Coming::begin(folder.clone(), 3 << 20).unwrap();
        let (mut first, mut second) = (begin(), begin());
        let piece = vec![0; 1 << 20];
        for _ in 0..2 {
            first.write(&piece).unwrap();
        }
        first.file.persist(folder.join("first")).unwrap();
        second.unseen = LOOK_BYTES;
        second.write(&piece).unwrap();
        let full = second.write(&piece).unwrap_err();
        assert_eq!(full.status, 507, "{full}");
        assert!(full.message.contains("build, or wait"), "{full}");
        drop(second);
        begin().write(&piece).unwrap();
        for number in 0..OF_ONE_MAX {
            File::create(folder.join(number.to_string())).unwrap();
        }
        assert_eq!(Coming::begin(folder, 1 << 40).err().unwrap().status, 507);
    }

    #[test]
    fn what_no_build_takes_is_forgotten_after_an_hour() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("ann");
        fs::create_dir(&folder).unwrap();
        let [old, wanted, renewed] = ["old", "wanted", "renewed"].map(|name| folder.join(name));
        for path in [&old, &wanted, &renewed] {
            let file = File::create(path).unwrap();
            file.set_modified(SystemTime::now() - KEPT - Duration::from_secs(60)).unwrap();
        }
        assert!(renew(&renewed) && !renew(&folder.join("none")));
        sweep(root.path(), std::slice::from_ref(&wanted), SystemTime::now());
        assert!(!old.exists() && wanted.exists() && renewed.exists());
    }
}
