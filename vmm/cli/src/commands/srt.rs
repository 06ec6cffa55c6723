//! `exocell run --srt FILE`: the settings of Anthropic's sandbox runtime (`srt`) as what a cell may
//! have. Its user keeps one file for both.
//!
//! ```text
//! network.allowedDomains ─> --allow-net        less network.deniedDomains
//! filesystem.allowWrite  ─> -v PATH:PATH       the paths are the host's, in the cell too
//! the current directory, allowRead ─> -v PATH:PATH:ro
//! filesystem.denyWrite   ─> -v PATH:PATH:ro    in what may be written
//! filesystem.denyRead    ─> --tmpfs PATH       in what may be read
//! ```
//! Beside these a cell sees nothing of the host, which is less than `srt` lets a program read. What
//! a cell cannot keep to is refused by its name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use exocell_cell::granted::Links;
use exocell_cell::xgate::Endpoint;
use exocell_cell::{CellError, Layout};
use serde::Deserialize;
use serde_json::Value;

use crate::args::RunArgs;

/// The longest file of settings, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// What `srt` itself lets nobody write, wherever it may write: programs of the host run it.
const ALWAYS_DENIED: [&str; 15] = [
    ".bashrc",
    ".bash_profile",
    ".zshrc",
    ".zprofile",
    ".profile",
    ".gitconfig",
    ".gitmodules",
    ".ripgreprc",
    ".mcp.json",
    ".vscode",
    ".idea",
    ".claude/commands",
    ".claude/agents",
    ".git/config",
    ".git/hooks",
];

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Settings {
    network: Network,
    filesystem: Filesystem,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Network {
    allowed_domains: Vec<String>,
    denied_domains: Vec<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Filesystem {
    deny_read: Vec<String>,
    allow_read: Vec<String>,
    allow_write: Vec<String>,
    deny_write: Vec<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Fields that change nothing for a cell: words for a model, other systems, and what a cell has
/// anyway.
const IDLE: [&str; 6] = [
    "network.deniedDomainReasons",
    "network.allowLocalBinding",
    "mandatoryDenySearchDepth",
    "ripgrep",
    "windows",
    "seccomp",
];

/// Adds to `args` what the settings in its file say.
///
/// # Errors
/// The file cannot be read, or says what a cell cannot keep to.
pub fn apply(layout: &Layout, args: &mut RunArgs) -> Result<(), CellError> {
    let Some(path) = &args.srt else { return Ok(()) };
    let text = Links::outside(layout).text(path, FILE_BYTES_MAX);
    let (text, _) = text.map_err(CellError::host(format!("cannot read {}", path.display())))?;
    let here = std::env::current_dir().map_err(CellError::host("cannot find this directory"))?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let granted = Granted::of(&text, &here, home.as_deref())
        .map_err(|why| CellError::Usage(format!("--srt {}: {why}", path.display())))?;
    args.allow_net.extend(granted.rules);
    args.volume.extend(granted.folders.iter().map(|(path, writable)| {
        let rights = if *writable { "" } else { ":ro" };
        format!("{0}:{0}{rights}", path.display())
    }));
    let hidden = granted.hidden.iter().map(|path| path.display().to_string());
    args.settings.tmpfs.extend(hidden);
    if args.process.workdir.is_none() {
        args.process.workdir = Some(here.display().to_string());
    }
    Ok(())
}

/// What a cell is given.
#[derive(Debug, Default, PartialEq, Eq)]
struct Granted {
    rules: Vec<String>,
    /// Paths of the host, and whether they may be written.
    folders: BTreeMap<PathBuf, bool>,
    hidden: BTreeSet<PathBuf>,
}

impl Granted {
    fn of(text: &str, here: &Path, home: Option<&Path>) -> Result<Self, String> {
        let settings: Settings = serde_json::from_str(text).map_err(|error| error.to_string())?;
        check_others(&settings)?;
        let paths = |field: &str, texts: &[String]| {
            let one =
                |text: &String| placed(text, here, home).map_err(|why| format!("{field}: {why}"));
            texts.iter().map(one).collect::<Result<Vec<_>, _>>()
        };
        let files = &settings.filesystem;
        let writable = paths("filesystem.allowWrite", &files.allow_write)?;
        let read_only = paths("filesystem.denyWrite", &files.deny_write)?;
        let readable = paths("filesystem.allowRead", &files.allow_read)?;
        let hidden = paths("filesystem.denyRead", &files.deny_read)?;
        let mut granted = Self { rules: rules(&settings.network)?, ..Self::default() };
        granted.folders.insert(here.to_owned(), false);
        let there = |path: &PathBuf| path.exists();
        granted.folders.extend(readable.iter().filter(|p| there(p)).map(|p| (p.clone(), false)));
        granted.folders.extend(writable.iter().filter(|p| there(p)).map(|p| (p.clone(), true)));
        for path in &read_only {
            granted.keep(path)?;
        }
        for root in &writable {
            for name in ALWAYS_DENIED {
                let path = root.join(name);
                if path.exists() && !granted.folders.contains_key(&path) {
                    granted.keep(&path)?;
                }
            }
        }
        for path in &hidden {
            granted.hide(path, &readable)?;
        }
        Ok(granted)
    }

    /// The nearest folder around `path` that the cell has.
    fn around(&self, path: &Path) -> Option<(&PathBuf, bool)> {
        path.ancestors().find_map(|one| self.folders.get_key_value(one)).map(|(at, w)| (at, *w))
    }

    /// Lets nobody write `path`, which is in what may be written. Directories on the way become
    /// mount points of their own, or one could be renamed, and another `path` made.
    fn keep(&mut self, path: &Path) -> Result<(), String> {
        let Some((root, true)) = self.around(path) else { return Ok(()) };
        if !path.exists() {
            return Err(format!(
                "filesystem.denyWrite: {} is not there, and a cell could make it; make it first",
                path.display()
            ));
        }
        let root = root.clone();
        let between = path.ancestors().skip(1).take_while(|one| **one != *root);
        let pinned: Vec<PathBuf> = between.map(Path::to_owned).collect();
        self.folders.extend(pinned.into_iter().map(|one| (one, true)));
        self.folders.insert(path.to_owned(), false);
        Ok(())
    }

    /// Lets nobody read `path`, if the cell would see it at all.
    fn hide(&mut self, path: &Path, readable: &[PathBuf]) -> Result<(), String> {
        // What is allowed in it, or is it, wins.
        let wins = |allowed: &PathBuf| allowed == path;
        if readable.iter().any(wins) || self.around(path).is_none() || !path.exists() {
            // A folder of the cell within it is one that was allowed.
            return Ok(());
        }
        if !path.is_dir() {
            return Err(format!(
                "filesystem.denyRead: {} is a file of a folder that the cell has; a cell hides \
                 directories only",
                path.display()
            ));
        }
        if self.folders.contains_key(path) {
            return Err(format!(
                "filesystem.denyRead: {} is this directory, or one that may be written",
                path.display()
            ));
        }
        self.hidden.insert(path.to_owned());
        Ok(())
    }
}

/// Refuses fields that a cell cannot keep to, and those that nobody knows.
fn check_others(settings: &Settings) -> Result<(), String> {
    let named = |of: &str, others: &BTreeMap<String, Value>| {
        others
            .iter()
            .filter(|(_, value)| !is_nothing(value))
            .map(|(name, _)| format!("{of}{name}"))
            .collect::<Vec<_>>()
    };
    let all = [
        named("", &settings.others),
        named("network.", &settings.network.others),
        named("filesystem.", &settings.filesystem.others),
    ];
    match all.concat().iter().find(|name| !IDLE.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(format!(
            "{name} is not there in a cell; leave it out, or say it by flags (exocell run --help)"
        )),
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}

/// Rules of the network: what is allowed, less what is denied.
fn rules(network: &Network) -> Result<Vec<String>, String> {
    let read = |field: &str, texts: &[String]| {
        let one = |text: &String| {
            let text = with_ports(text);
            let rule = text.parse::<Endpoint>().map_err(|why| format!("{field}: {why}"))?;
            Ok::<_, String>((text, rule))
        };
        texts.iter().map(one).collect::<Result<Vec<_>, _>>()
    };
    let allowed = read("network.allowedDomains", &network.allowed_domains)?;
    let denied = read("network.deniedDomains", &network.denied_domains)?;
    let mut rules = Vec::new();
    for (text, rule) in allowed {
        if denied.iter().any(|(_, denied)| denied.contains(&rule)) {
            continue;
        }
        if let Some((part, _)) = denied.iter().find(|(_, denied)| rule.contains(denied)) {
            return Err(format!(
                "network.deniedDomains: {part} is a part of {text}, and a rule of a cell has no \
                 exceptions; allow less than {text}"
            ));
        }
        rules.push(text);
    }
    Ok(rules)
}

/// A domain without a port is one of every port.
fn with_ports(domain: &str) -> String {
    let port = domain.rsplit_once(':').map(|(_, port)| port);
    match port.is_some_and(|port| port.parse::<u16>().is_ok()) {
        true => domain.to_owned(),
        false => format!("{domain}:1-65535"),
    }
}

/// Where a path of the settings is: `~` is the home, others are of this directory.
fn placed(text: &str, here: &Path, home: Option<&Path>) -> Result<PathBuf, String> {
    let text = text.strip_suffix("/**").unwrap_or(text);
    if text.contains(['*', '?', '[']) {
        return Err(format!("{text}: patterns are not there for a cell; name paths"));
    }
    if text.contains([':', ',']) {
        return Err(format!("{text}: a path with a colon or a comma cannot be shared"));
    }
    let whole = match text.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            let home = home.ok_or_else(|| format!("{text}: there is no HOME"))?;
            home.join(rest.trim_start_matches('/'))
        }
        _ => here.join(text),
    };
    let mut path = PathBuf::from("/");
    for part in whole.components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::ParentDir => drop(path.pop()),
            _ => {}
        }
    }
    match path == Path::new("/") {
        true => Err(format!("{text}: the whole host is nothing for a cell; name less")),
        false => Ok(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(settings: &Value, here: &Path) -> Result<Granted, String> {
        Granted::of(&settings.to_string(), here, Some(Path::new("/home/me")))
    }

    fn project() -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for folder in [".git/hooks", "secrets", "src", "keep/deep"] {
            std::fs::create_dir_all(place.path().join(folder)).unwrap();
        }
        std::fs::write(place.path().join("file"), "x").unwrap();
        place
    }

    #[test]
    fn paths_and_domains_become_folders_and_rules() {
        let place = project();
        let here = place.path();
        let settings = serde_json::json!({
            "network": { "allowedDomains": ["pypi.org", "*.example.com:443", "gone.example"],
                         "deniedDomains": ["gone.example", "other.example"] },
            "filesystem": { "allowWrite": ["."], "denyWrite": ["keep/deep"],
                            "denyRead": ["~/.ssh", "secrets"], "allowRead": [] },
            "ripgrep": { "command": "rg" },
        });
        let granted = granted(&settings, here).unwrap();
        assert_eq!(granted.rules, ["pypi.org:1-65535", "*.example.com:443"]);
        let folders = [
            (here.to_owned(), true),
            (here.join(".git"), true),
            (here.join(".git/hooks"), false),
            (here.join("keep"), true),
            (here.join("keep/deep"), false),
        ];
        assert_eq!(granted.folders, folders.into());
        assert_eq!(granted.hidden, [here.join("secrets")].into());
    }

    #[test]
    fn without_a_word_the_directory_can_be_read() {
        let place = project();
        let granted = granted(&serde_json::json!({}), place.path()).unwrap();
        assert_eq!(granted.folders, [(place.path().to_owned(), false)].into());
        assert!(granted.rules.is_empty() && granted.hidden.is_empty());
    }

    #[test]
    fn what_a_cell_cannot_keep_to_is_refused_by_its_name() {
        let place = project();
        for (settings, word) in [
            (serde_json::json!({ "network": { "allowUnixSockets": ["/x"] } }), "allowUnixSockets"),
            (serde_json::json!({ "credentials": { "files": [1] } }), "credentials"),
            (
                serde_json::json!({ "network": { "allowedDomains": ["*.a.org"],
                                                 "deniedDomains": ["b.a.org"] } }),
                "b.a.org",
            ),
            (serde_json::json!({ "filesystem": { "allowWrite": ["src/**/*.ts"] } }), "patterns"),
            (serde_json::json!({ "filesystem": { "allowWrite": ["/"] } }), "whole host"),
            (serde_json::json!({ "filesystem": { "denyRead": ["file"] } }), "directories"),
            (
                serde_json::json!({ "filesystem": { "allowWrite": ["."], "denyWrite": ["new"] } }),
                "make it first",
            ),
        ] {
            let error = granted(&settings, place.path()).unwrap_err();
            assert!(error.contains(word), "{settings}: {error}");
        }
    }
}
