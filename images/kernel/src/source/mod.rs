//! Where the source tarball comes from, in order: the one the user names, Debian, upstream.

mod apt;

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Attempt, KernelError};
use crate::pin::{Pin, Upstream};
use crate::progress::Step;
use crate::recipe::hex;
use crate::runner::Runner;
use crate::tools;

/// What a kernel was built from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The tarball's, package's or file's name.
    pub name: String,
    /// The version of the package, or of the kernel where the source is no package.
    pub version: String,
    /// The sha256 of the file that was checked: a tarball or a `.deb`.
    pub sha256: String,
    /// Whether that is a hash that `KERNEL` pins; otherwise the archive's signature vouches for it.
    pub pinned: bool,
}

/// A checked tarball.
#[derive(Debug)]
pub struct Source {
    pub tarball: PathBuf,
    pub origin: Origin,
}

/// Finds a tarball; downloads go below `work`.
///
/// A tarball that the user names is used or refused: nothing else is tried behind their back.
pub fn fetch(
    pin: &Pin,
    named: Option<&Path>,
    work: &Path,
    runner: &mut Runner<'_>,
) -> Result<Source, KernelError> {
    runner.start(Step::Fetch);
    match named {
        Some(path) => from_file(pin, path),
        None => download(pin, work, runner),
    }
}

fn from_file(pin: &Pin, path: &Path) -> Result<Source, KernelError> {
    let found = sha256_of(path)?;
    let Some(known) = pin.tarball_with(&found) else {
        let known = pin.tarball.iter().map(|tarball| tarball.name.clone()).collect();
        return Err(KernelError::UnknownTarball { path: path.to_path_buf(), found, known });
    };
    let origin = Origin {
        name: known.name.clone(),
        version: pin.version.clone(),
        sha256: found,
        pinned: true,
    };
    // Programs run in other directories, so the path must not be relative to ours.
    let tarball = path.canonicalize().map_err(KernelError::io("open", path))?;
    Ok(Source { tarball, origin })
}

fn download(pin: &Pin, work: &Path, runner: &mut Runner<'_>) -> Result<Source, KernelError> {
    let mut tried = Vec::new();
    if let Some(debian) = &pin.debian {
        match apt::fetch(debian, work, runner) {
            Ok(source) => return Ok(source),
            Err(error) => {
                tried.push(attempt(&format!("Debian package {}", debian.package), &error))
            }
        }
    }
    if let Some(upstream) = &pin.upstream {
        match from_upstream(pin, upstream, work, runner) {
            Ok(source) => return Ok(source),
            Err(error) => tried.push(attempt(&upstream.url, &error)),
        }
    }
    Err(KernelError::NoSource(tried))
}

fn attempt(source: &str, error: &dyn std::fmt::Display) -> Attempt {
    Attempt { source: source.to_owned(), why: error.to_string() }
}

fn from_upstream(
    pin: &Pin,
    upstream: &Upstream,
    work: &Path,
    runner: &mut Runner<'_>,
) -> Result<Source, String> {
    let pinned =
        upstream.sha256.as_deref().ok_or("skipped: KERNEL has no sha256 to check it with")?;
    let tarball = work.join("upstream.tar.xz");
    let mut curl = tools::command("curl");
    curl.args(["-fsSL", "--retry", "2", "--connect-timeout", "20", "-o"])
        .arg(&tarball)
        .arg(&upstream.url);
    runner.run(Step::Fetch, &mut curl).map_err(|error| error.to_string())?;
    let sha256 = expect_hash(&tarball, &upstream.url, pinned).map_err(|error| error.to_string())?;
    let origin =
        Origin { name: upstream.url.clone(), version: pin.version.clone(), sha256, pinned: true };
    Ok(Source { tarball, origin })
}

/// Checks a downloaded file against its pin and returns its hash.
pub fn expect_hash(file: &Path, name: &str, pinned: &str) -> Result<String, KernelError> {
    let found = sha256_of(file)?;
    if found == pinned {
        return Ok(found);
    }
    Err(KernelError::WrongHash { name: name.to_owned(), found, pinned: pinned.to_owned() })
}

/// The sha256 of a file in lower-case hexadecimal.
pub fn sha256_of(path: &Path) -> Result<String, KernelError> {
    let mut file = File::open(path).map_err(KernelError::io("open", path))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut hasher).map_err(KernelError::io("read", path))?;
    Ok(hex(&hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tarball_that_is_not_known_is_refused_and_the_known_ones_are_named() {
        let pin =
            Pin::parse("version = \"1\"\n[[tarball]]\nname = \"good.tar.xz\"\nsha256 = \"00\"\n")
                .expect("valid");
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let error = from_file(&pin, file.path()).expect_err("unknown").to_string();
        assert!(error.contains("e3b0c44298fc1c14") && error.contains("good.tar.xz"), "{error}");
    }

    #[test]
    fn a_tarball_that_is_not_there_is_an_error() {
        let pin = Pin::parse("version = \"1\"\n").expect("valid");
        let error =
            from_file(&pin, Path::new("/no/such/tarball")).expect_err("missing").to_string();
        assert!(error.contains("cannot open /no/such/tarball"), "{error}");
    }

    #[test]
    fn every_source_that_was_tried_is_listed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut ignore = |_| {};
        let mut runner = Runner::new(folder.path().join("log"), &mut ignore).expect("log");
        let pin = Pin::parse("version = \"1\"\n[upstream]\nurl = \"https://example.invalid/x\"\n")
            .expect("valid");
        let error =
            fetch(&pin, None, folder.path(), &mut runner).expect_err("no source").to_string();
        assert!(
            error.contains("https://example.invalid/x: skipped: KERNEL has no sha256"),
            "{error}"
        );
        assert!(error.contains("EXOCELL_KERNEL_TARBALL"), "{error}");
    }

    #[test]
    fn a_download_that_is_not_the_pinned_file_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        assert!(matches!(
            expect_hash(file.path(), "x.deb", "00"),
            Err(KernelError::WrongHash { .. })
        ));
    }
}
