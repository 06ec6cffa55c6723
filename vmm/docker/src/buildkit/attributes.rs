//! What a client asks for, as attributes of the frontend `dockerfile.v0` (BuildKit's
//! `frontend/dockerui`): each is carried out or refused by its name.

use std::collections::BTreeMap;
use std::net::IpAddr;

use exocell_cell::plan;
use exocell_cell::settings::Settings;

use crate::build::{self, Named, Options, check_platform};
use crate::control_messages::CacheEntry;
use crate::grpc::{Result, Status};
use crate::state::Server;

/// The longest path of the Dockerfile, in bytes.
const PATH_BYTES_MAX: usize = 512;
/// Arguments and labels.
const PAIRS_MAX: usize = 4096;
/// An archive that the client hands over in its session.
const UPLOADS: &str = "http://buildkit-session/";

/// Where files come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory of the client's, by its name in the session.
    Directory(String),
    /// The path of an archive in the session.
    Archive(String),
}

/// A build, as it was asked for.
#[derive(Debug)]
pub struct Asked {
    pub options: Options,
    /// The Dockerfile's path.
    pub file: String,
    /// Where that is.
    pub file_in: Source,
    pub context: Source,
    /// Sessions of directories that are not the build's own.
    pub sessions: BTreeMap<String, String>,
    /// Contexts with names of their own that are directories of the client's.
    pub directories: BTreeMap<String, String>,
    /// The same that are images of other builds, by the client's names for those.
    pub inputs: BTreeMap<String, String>,
    /// What the client is to know.
    pub warnings: Vec<String>,
}

/// Options that are refused, and what to do instead.
const REFUSED: [(&str, &str, &str); 15] = [
    ("requestid", "a question to the frontend (--call, --check)", "build without it"),
    ("cgroup-parent", "--cgroup-parent", "leave it out: each step is a cell of its own"),
    ("ulimit", "--ulimit for a build", "set it in the RUN that wants it (ulimit -n)"),
    ("hostname", "a host name for a build", "leave BUILDKIT_SANDBOX_HOSTNAME out"),
    ("contextsubdir", "a part of a context", "name that directory as the context"),
    ("source", "another frontend", "leave BUILDKIT_SYNTAX out: Dockerfiles are read here"),
    ("cmdline", "another frontend", "leave BUILDKIT_SYNTAX out: Dockerfiles are read here"),
    ("override-copy-image", "override-copy-image", "leave it out"),
    ("memswap", "--memory-swap for a build", "leave it out"),
    ("cpushares", "--cpu-shares for a build", "leave it out"),
    ("cpuperiod", "--cpu-period for a build", "leave it out"),
    ("cpuquota", "--cpu-quota for a build", "leave it out"),
    ("cpusetcpus", "--cpuset-cpus for a build", "leave it out"),
    ("cpusetmems", "--cpuset-mems for a build", "leave it out"),
    ("build-arg:BUILDKIT_SYNTAX", "another frontend", "leave BUILDKIT_SYNTAX out"),
];

/// What frontends are asked for that is there, or has nothing to do.
const CAPABILITIES: [&str; 1] = ["moby.buildkit.frontend.contexts"];

/// Reads attributes. `imports` is where the client wants layers to be taken from.
///
/// # Errors
/// What makes no sense, and what no build has, by its name.
pub fn read(
    server: &Server,
    attributes: &BTreeMap<String, String>,
    imports: &[CacheEntry],
) -> Result<Asked> {
    let mut grant = server.defaults.clone();
    let mode = attributes.get("force-network-mode").map(String::as_str);
    let network = build::network(server.layout(), mode, &mut grant)
        .map_err(|error| Status::invalid(error.to_string()))?;
    if let Some(bytes) = number(attributes, "memory")? {
        grant.memory_bytes = bytes;
        plan::check_memory(bytes).map_err(|error| Status::invalid(error.to_string()))?;
    }
    let get = |name: &str| attributes.get(name).map(String::as_str).filter(|text| !text.is_empty());
    let context = match get("context") {
        None => Source::Directory(get("contextkey").unwrap_or("context").to_owned()),
        Some(address) => match address.strip_prefix(UPLOADS) {
            Some(path) => Source::Archive(format!("/{path}")),
            None => {
                return Err(Status::unsupported(
                    format!("a context at {address}"),
                    "fetch it, and build from the directory",
                ));
            }
        },
    };
    let file_in = match (get("dockerfilekey"), &context) {
        (None, Source::Archive(_)) => context.clone(),
        (key, _) => Source::Directory(key.unwrap_or("dockerfile").to_owned()),
    };
    let mut asked = Asked {
        file: get("filename").unwrap_or("Dockerfile").to_owned(),
        file_in,
        context,
        sessions: BTreeMap::new(),
        directories: BTreeMap::new(),
        inputs: BTreeMap::new(),
        warnings: Vec::new(),
        options: Options {
            dockerfile: String::new(),
            tags: Vec::new(),
            arguments: BTreeMap::new(),
            labels: BTreeMap::new(),
            target: get("target").map(str::to_owned),
            uses_cache: uses_cache(attributes)?,
            pulls: get("image-resolve-mode") == Some("pull"),
            secrets: Vec::new(),
            grant,
            network,
            hosts: hosts(get("add-hosts").unwrap_or_default())?,
            shm_bytes: number(attributes, "shm-size")?.filter(|bytes| *bytes > 0),
            hidden: Vec::new(),
            named: BTreeMap::new(),
        },
    };
    if asked.file.len() > PATH_BYTES_MAX {
        return Err(Status::invalid(format!(
            "the path of the Dockerfile has at most {PATH_BYTES_MAX} bytes"
        )));
    }
    if attributes.len() > PAIRS_MAX {
        return Err(Status::invalid(format!(
            "a build has at most {PAIRS_MAX} arguments and labels"
        )));
    }
    let refused = |(name, _, _): &&(&str, _, _)| get(name).is_some();
    if let Some((_, what, remedy)) = REFUSED.iter().find(refused) {
        return Err(Status::unsupported(what, remedy));
    }
    for (name, value) in attributes {
        one(name, value, &mut asked)?;
    }
    asked.warnings.extend(cached_elsewhere(imports)?);
    if let Some(text) = get("cache-from") {
        asked.warnings.push(elsewhere(text));
    }
    Ok(asked)
}

/// Takes one attribute that was not read by its name.
fn one(name: &str, value: &str, asked: &mut Asked) -> Result<()> {
    let options = &mut asked.options;
    match (name, name.split_once(':')) {
        ("platform", _) => check_platform(value).map_err(Status::invalid),
        ("multi-platform", _) => match value {
            "" | "0" | "false" => Ok(()),
            _ => Err(Status::unsupported("an image of several platforms", "build linux/amd64")),
        },
        ("image-resolve-mode", _) => match value {
            "" | "default" | "local" | "pull" => Ok(()),
            other => Err(Status::invalid(format!("image-resolve-mode={other} is not known"))),
        },
        ("frontend.caps", _) => {
            let wanted = value.split(',').filter(|word| !word.is_empty());
            let known =
                |word: &&str| CAPABILITIES.contains(&word.split('+').next().unwrap_or_default());
            match wanted.into_iter().find(|word| !known(word)) {
                Some(other) => Err(Status::unsupported(other, "build without it")),
                None => Ok(()),
            }
        }
        (refused, _) if REFUSED.iter().any(|(name, _, _)| *name == refused) => Ok(()),
        // They were read by their names, or say what others say too.
        (
            "context" | "contextkey" | "dockerfilekey" | "filename" | "target" | "no-cache"
            | "force-network-mode" | "add-hosts" | "shm-size" | "memory" | "cache-from"
            | "cache-imports",
            _,
        ) => Ok(()),
        (_, Some(("build-arg", argument))) => {
            options.arguments.insert(argument.to_owned(), value.to_owned());
            Ok(())
        }
        (_, Some(("label", label))) => {
            options.labels.insert(label.to_owned(), value.to_owned());
            Ok(())
        }
        (_, Some(("local-sessionid", directory))) => {
            asked.sessions.insert(directory.to_owned(), value.to_owned());
            Ok(())
        }
        // Where the client keeps its files is for records of builds, which are not kept; what it
        // calls them by is for copies of them, which are not either.
        (_, Some(("vcs" | "sharedkey", _))) => Ok(()),
        // An image of another build has its configuration with it.
        (_, Some(("input-metadata", _))) => Ok(()),
        (_, Some(("attest", kind))) => Err(Status::unsupported(
            format!("an attestation ({kind})"),
            "leave it out (--provenance=false, --sbom=false)",
        )),
        (_, Some(("context", name))) => named(name, value, asked),
        (other, _) => Err(Status::unsupported(format!("the build option {other}"), "leave it out")),
    }
}

/// A context with a name of its own.
fn named(name: &str, value: &str, asked: &mut Asked) -> Result<()> {
    let unsupported = || {
        Status::unsupported(
            format!("the named context {name} ({value})"),
            "name a directory, or an image (docker-image://NAME)",
        )
    };
    // The client says for which platform it is, where it is for one.
    let (name, platform) = name.split_once("::").unwrap_or((name, ""));
    check_platform(platform).map_err(Status::invalid)?;
    let (kind, what) = value.split_once(':').ok_or_else(unsupported)?;
    match kind {
        "docker-image" => {
            let image = what.strip_prefix("//").ok_or_else(unsupported)?;
            asked.options.named.insert(name.to_owned(), Named::Image(image.to_owned()));
        }
        "local" => {
            asked.directories.insert(name.to_owned(), what.to_owned());
        }
        "input" => {
            asked.inputs.insert(name.to_owned(), what.to_owned());
        }
        _ => return Err(unsupported()),
    }
    Ok(())
}

fn number(attributes: &BTreeMap<String, String>, name: &str) -> Result<Option<u64>> {
    let Some(text) = attributes.get(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.parse().map(Some);
    number.map_err(|_| Status::invalid(format!("{name} is no number of bytes: {text}")))
}

/// `a=1.2.3.4,b=::1`
fn hosts(text: &str) -> Result<Vec<(String, IpAddr)>> {
    let mut hosts = Settings::default();
    for host in text.split(',').filter(|host| !host.is_empty()) {
        hosts.add_host(host).map_err(Status::invalid)?;
    }
    Ok(hosts.hosts)
}

/// An empty value is of all stages.
fn uses_cache(attributes: &BTreeMap<String, String>) -> Result<bool> {
    match attributes.get("no-cache").map(String::as_str) {
        None => Ok(true),
        Some("") => Ok(false),
        Some(stages) => Err(Status::unsupported(
            format!("--no-cache-filter={stages}"),
            "build all stages anew (--no-cache)",
        )),
    }
}

fn elsewhere(what: &str) -> String {
    format!("layers of {what} are not taken over: what was built here before is found anyway")
}

/// What is said of caches that are not here.
///
/// # Errors
/// One of a kind that is no image's.
fn cached_elsewhere(imports: &[CacheEntry]) -> Result<Vec<String>> {
    let told = imports.iter().map(|entry| match entry.kind.as_str() {
        "registry" => Ok(elsewhere(entry.attributes.get("ref").map_or("an image", String::as_str))),
        kind => Err(Status::unsupported(
            format!("--cache-from type={kind}"),
            "leave it out: what was built here before is found anyway",
        )),
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listen::tests::server;

    fn asked(pairs: &[(&str, &str)]) -> Result<Asked> {
        let place = tempfile::tempdir().unwrap();
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        read(&server(place.path()), &pairs.collect(), &[])
    }

    #[test]
    fn what_buildx_says_is_understood() {
        let read = asked(&[
            ("filename", "d/Dockerfile.x"),
            ("build-arg:A", "1"),
            ("build-arg:B:C", ""),
            ("label:l", "v"),
            ("target", "t"),
            ("no-cache", ""),
            ("image-resolve-mode", "local"),
            ("platform", "linux/amd64"),
            ("add-hosts", "a=1.2.3.4,b=::1"),
            ("shm-size", "1024"),
            ("force-network-mode", "none"),
            ("local-sessionid:context", "s"),
            ("vcs:revision", "r"),
            ("vcs:localdir:context", "."),
            ("sharedkey:localdir:context", "k"),
            ("context:base", "docker-image://other:1"),
            ("context:more", "local:dir"),
        ])
        .unwrap();
        assert_eq!(read.directories["more"], "dir");
        assert!(matches!(&read.options.named["base"], Named::Image(name) if name == "other:1"));
        let Options { arguments, labels, target, uses_cache, hosts, shm_bytes, grant, .. } =
            &read.options;
        assert_eq!(arguments.get("A").unwrap(), "1");
        assert_eq!(arguments.get("B:C").unwrap(), "");
        assert_eq!((labels["l"].as_str(), target.as_deref()), ("v", Some("t")));
        assert_eq!((*uses_cache, hosts.len(), *shm_bytes), (false, 2, Some(1024)));
        assert!(grant.connect.is_empty());
        assert_eq!(
            (read.file.as_str(), read.sessions["context"].as_str()),
            ("d/Dockerfile.x", "s")
        );
        assert_eq!(read.context, Source::Directory("context".to_owned()));
        assert_eq!(read.file_in, Source::Directory("dockerfile".to_owned()));
        let read = asked(&[("context", "http://buildkit-session/x")]).unwrap();
        assert_eq!(read.file_in, Source::Archive("/x".to_owned()));
    }

    #[test]
    fn what_no_build_has_is_refused_by_its_name() {
        for (name, value, word) in [
            ("context", "https://example.org/x.git", "example.org"),
            ("platform", "linux/arm64", "arm64"),
            ("platform", "linux/amd64,linux/arm64", "arm64"),
            ("multi-platform", "true", "several platforms"),
            ("no-cache", "stage", "--no-cache-filter=stage"),
            ("force-network-mode", "host", "network"),
            ("ulimit", "nofile=1:2", "--ulimit"),
            ("cgroup-parent", "x", "--cgroup-parent"),
            ("requestid", "frontend.lint", "--check"),
            ("source", "docker/dockerfile", "BUILDKIT_SYNTAX"),
            ("attest:sbom", "", "--sbom=false"),
            ("context:base", "oci-layout://x", "base"),
            ("context:base", "target:x", "base"),
            ("context:base", "https://example.org/x.git", "example.org"),
            ("frontend.caps", "moby.buildkit.frontend.subrequests+forward", "subrequests"),
            ("add-hosts", "a=b", "add-host"),
            ("shm-size", "x", "shm-size"),
            ("whatever", "", "whatever"),
        ] {
            let refused = asked(&[(name, value)]).unwrap_err().words;
            assert!(refused.contains(word), "{name}={value}: {refused}");
        }
        let other = CacheEntry { kind: "s3".to_owned(), ..CacheEntry::default() };
        assert!(cached_elsewhere(&[other]).unwrap_err().words.contains("s3"));
    }
}
