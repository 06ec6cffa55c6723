//! Image names, read as docker reads them.

use std::fmt;
use std::str::FromStr;

use crate::Digest;
use crate::error::{ImageError, Result};

const DEFAULT_REGISTRY: &str = "docker.io";
const NAME_BYTES_MAX: usize = 255;
const TAG_BYTES_MAX: usize = 128;
/// Algorithms of digests, by the names that images and blobs have with them.
const ALGORITHMS: [&str; 3] = ["sha256", "sha384", "sha512"];

/// `[REGISTRY/]REPOSITORY[:TAG][@DIGEST]`. Without a registry it is docker.io,
/// a single word there is in `library/`, and without a tag or digest it is
/// `:latest`. Displayed in the short form that docker shows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// Host and optional port.
    pub registry: String,
    pub repository: String,
    pub tag: Option<String>,
    pub digest: Option<Digest>,
}

impl FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self> {
        let bad =
            |why| ImageError::BadReference { reference: crate::error::shown(text.as_bytes()), why };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (
                rest,
                Some(digest.parse().map_err(|_| bad("its digest is not sha256:<64 hex digits>"))?),
            ),
            None => (text, None),
        };
        let (name, tag) = match rest.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
            Some((name, tag)) => (name, Some(tag.to_owned())),
            None => (rest, digest.is_none().then(|| "latest".to_owned())),
        };
        if tag.as_deref().is_some_and(|tag| !is_tag(tag)) {
            return Err(bad("its tag must be letters, digits, `_`, `.` and `-`, at most 128"));
        }
        let (registry, repository) = split_registry(name);
        if !is_registry(registry) {
            return Err(bad("its registry must be HOST or HOST:PORT"));
        }
        if name.len() > NAME_BYTES_MAX || !repository.split('/').all(is_component) {
            return Err(bad(
                "a repository is lower-case letters and digits, with single `.`, `_`, `-` between, and `/`",
            ));
        }
        if registry == DEFAULT_REGISTRY && is_id(repository) {
            return Err(bad("it would read as the id of an image; give it another name"));
        }
        let repository = match registry == DEFAULT_REGISTRY && !repository.contains('/') {
            true => format!("library/{repository}"),
            false => repository.to_owned(),
        };
        Ok(Self { registry: registry.to_owned(), repository, tag, digest })
    }
}

/// Whether a repository of docker.io is shown as what only an image's id may be: docker refuses
/// such names, too.
fn is_id(repository: &str) -> bool {
    let word = repository.strip_prefix("library/").unwrap_or(repository);
    ALGORITHMS.contains(&word) || Digest::from_hex(word).is_some()
}

/// The part before the first slash is a registry if it looks like a host.
fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some(("index.docker.io", rest)) => (DEFAULT_REGISTRY, rest),
        Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => (host, rest),
        _ => (DEFAULT_REGISTRY, name),
    }
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = registry.rsplit_once(':').unwrap_or((registry, "0"));
    let of_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '[' | ']' | ':');
    !host.is_empty() && host.chars().all(of_host) && port.parse::<u16>().is_ok()
}

fn is_tag(tag: &str) -> bool {
    let of_tag = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    !tag.is_empty()
        && tag.len() <= TAG_BYTES_MAX
        && tag.chars().all(of_tag)
        && !tag.starts_with(['.', '-'])
}

fn is_component(component: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    component.starts_with(alphanumeric)
        && component.ends_with(alphanumeric)
        && component.chars().all(|c| alphanumeric(c) || matches!(c, '.' | '_' | '-'))
        && !component.contains("..")
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.registry == DEFAULT_REGISTRY {
            true => {
                f.write_str(self.repository.strip_prefix("library/").unwrap_or(&self.repository))?
            }
            false => write!(f, "{}/{}", self.registry, self.repository)?,
        }
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_docker_does() {
        for (text, registry, repository, shown) in [
            ("ubuntu", "docker.io", "library/ubuntu", "ubuntu:latest"),
            ("docker.io/library/ubuntu:1", "docker.io", "library/ubuntu", "ubuntu:1"),
            ("exocell/base:latest", "docker.io", "exocell/base", "exocell/base:latest"),
            ("localhost:5000/x:tag", "localhost:5000", "x", "localhost:5000/x:tag"),
            ("localhost/x", "localhost", "x", "localhost/x:latest"),
            ("localhost/sha256:1", "localhost", "sha256", "localhost/sha256:1"),
            ("me/sha256:1", "docker.io", "me/sha256", "me/sha256:1"),
            ("127.0.0.1:5000/a/b__c", "127.0.0.1:5000", "a/b__c", "127.0.0.1:5000/a/b__c:latest"),
        ] {
            let name: Reference = text.parse().unwrap();
            assert_eq!((&*name.registry, &*name.repository), (registry, repository));
            assert_eq!(name.to_string(), shown);
            assert_eq!(shown.parse::<Reference>().unwrap(), name);
        }
    }

    #[test]
    fn bad_names_are_refused() {
        for text in [
            "",
            "A",
            "a:",
            "a@sha256:1",
            "a/../b",
            "a//b",
            "x:y/z",
            "a b",
            "-a",
            "a:.t",
            "h:99999/x",
            // What ids are.
            "sha256",
            "sha256:ad331f96524e",
            "docker.io/sha512:x",
            "docker.io/library/sha384:x",
            "ad331f96524e0109ad331f96524e0109ad331f96524e0109ad331f96524e0109",
            "ad331f96524e0109ad331f96524e0109ad331f96524e0109ad331f96524e0109:latest",
            "library/ad331f96524e0109ad331f96524e0109ad331f96524e0109ad331f96524e0109:x",
        ] {
            assert!(
                matches!(text.parse::<Reference>(), Err(ImageError::BadReference { .. })),
                "{text}"
            );
        }
    }
}
