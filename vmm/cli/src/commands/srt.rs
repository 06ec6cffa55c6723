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
//! a cell cannot keep to is refused by its name. Paths are in [`folders`], the network in
//! [`domains`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use exocell_cell::granted::Links;
use exocell_cell::{CellError, Layout};
use serde::Deserialize;
use serde_json::Value;

use crate::args::RunArgs;
use folders::{Folders, Lists};

mod domains;
mod folders;

/// The longest file of settings, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// How many directories below what may be written are searched, and the most that may be said.
const SEARCH_DEPTH: usize = 3;
const SEARCH_DEPTH_MAX: usize = 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Settings {
    network: Network,
    filesystem: Filesystem,
    #[serde(rename = "mandatoryDenySearchDepth")]
    search_depth: Option<usize>,
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
const IDLE: [&str; 5] =
    ["network.deniedDomainReasons", "network.allowLocalBinding", "ripgrep", "windows", "seccomp"];

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
    args.volume.extend(granted.folders.shared.iter().map(|(at, folder)| {
        let rights = if folder.is_writable { "" } else { ":ro" };
        format!("{}:{}{rights}", folder.from.display(), at.display())
    }));
    let hidden = granted.folders.hidden.iter().map(|path| path.display().to_string());
    args.settings.tmpfs.extend(hidden);
    if args.process.workdir.is_none() {
        args.process.workdir = Some(here.display().to_string());
    }
    Ok(())
}

/// What a cell is given.
#[derive(Debug)]
struct Granted {
    rules: Vec<String>,
    folders: Folders,
}

impl Granted {
    fn of(text: &str, here: &Path, home: Option<&Path>) -> Result<Self, String> {
        let settings: Settings = serde_json::from_str(text).map_err(|error| error.to_string())?;
        check_others(&settings)?;
        let depth = settings.search_depth.unwrap_or(SEARCH_DEPTH);
        if !(1..=SEARCH_DEPTH_MAX).contains(&depth) {
            return Err(format!(
                "mandatoryDenySearchDepth: {depth} is not from 1 to {SEARCH_DEPTH_MAX}"
            ));
        }
        let paths = |field: &str, texts: &[String]| {
            let one =
                |text: &String| spelled(text, here, home).map_err(|why| format!("{field}: {why}"));
            texts.iter().map(one).collect::<Result<Vec<_>, _>>()
        };
        let files = &settings.filesystem;
        let lists = Lists {
            allow_write: paths("filesystem.allowWrite", &files.allow_write)?,
            deny_write: paths("filesystem.denyWrite", &files.deny_write)?,
            allow_read: paths("filesystem.allowRead", &files.allow_read)?,
            deny_read: paths("filesystem.denyRead", &files.deny_read)?,
        };
        let network = &settings.network;
        Ok(Self {
            rules: domains::rules(&network.allowed_domains, &network.denied_domains)?,
            folders: Folders::of(here, &lists, depth)?,
        })
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

/// A path of the settings from the root on: `~` is the home, others are of this directory.
fn spelled(text: &str, here: &Path, home: Option<&Path>) -> Result<PathBuf, String> {
    let text = text.strip_suffix("/**").unwrap_or(text);
    if text.contains(['*', '?', '[']) {
        return Err(format!("{text}: patterns are not there for a cell; name paths"));
    }
    if text.contains([':', ',']) {
        return Err(format!("{text}: a path with a colon or a comma cannot be shared"));
    }
    match text.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            let home = home.ok_or_else(|| format!("{text}: there is no HOME"))?;
            Ok(home.join(rest.trim_start_matches('/')))
        }
        _ => Ok(here.join(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(settings: &Value, here: &Path) -> Result<Granted, String> {
        Granted::of(&settings.to_string(), here, Some(Path::new("/home/me")))
    }

    fn rights(granted: &Granted) -> BTreeMap<PathBuf, bool> {
        let shared = granted.folders.shared.iter();
        shared.map(|(path, folder)| (path.clone(), folder.is_writable)).collect()
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
        assert_eq!(rights(&granted), folders.into());
        assert_eq!(granted.folders.hidden, [here.join("secrets")].into());
    }

    #[test]
    fn without_a_word_the_directory_can_be_read() {
        let place = project();
        let granted = granted(&serde_json::json!({}), place.path()).unwrap();
        assert_eq!(rights(&granted), [(place.path().to_owned(), false)].into());
        assert!(granted.rules.is_empty() && granted.folders.hidden.is_empty());
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
            (serde_json::json!({ "filesystem": { "denyRead": [".."] } }), "allowRead"),
            (serde_json::json!({ "mandatoryDenySearchDepth": 11 }), "mandatoryDenySearchDepth"),
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
