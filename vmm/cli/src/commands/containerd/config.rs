//! containerd's configuration, and the part of it that names the runtime.
//!
//! | `version` of the file | the plugin | since |
//! | --- | --- | --- |
//! | 2 | `io.containerd.grpc.v1.cri` | containerd 1.3 |
//! | 3 | `io.containerd.cri.v1.runtime` | containerd 2.0 |
//!
//! Up to 1.7 a file that is imported replaces a plugin's whole section, so there the runtime goes
//! into the file itself.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// The marks around what is added to a file of the operator's.
const BEGIN: &str = "# begin: exocell containerd install";
const END: &str = "# end: exocell containerd install";
/// The first line of a file that is nothing but ours.
const OWN: &str = "# By exocell containerd install; exocell containerd uninstall removes it.";

/// containerd's version, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl Version {
    /// Of what `containerd --version` prints.
    pub fn parse(said: &str) -> Option<Self> {
        let mut words = said.split_whitespace().map(|word| word.trim_start_matches('v'));
        words.find_map(|word| {
            let (major, rest) = word.split_once('.')?;
            let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
        })
    }

    /// The newest version of a configuration that it reads.
    fn of_config(self) -> i64 {
        if self.major >= 2 { 3 } else { 2 }
    }
}

/// A file, and what is to be in it; nothing for one that is to be gone.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    pub path: PathBuf,
    pub content: Option<String>,
}

/// Where the runtime is in a configuration of `version`.
fn plugin(version: i64) -> &'static str {
    if version >= 3 { "io.containerd.cri.v1.runtime" } else { "io.containerd.grpc.v1.cri" }
}

fn section(version: i64, handler: &str, runtime: &str) -> String {
    format!(
        "[plugins.\"{}\".containerd.runtimes.{handler}]\n  runtime_type = \"{runtime}\"\n  \
         privileged_without_host_devices = true\n",
        plugin(version)
    )
}

/// What of `text`, the file at `path`, names the runtime `handler`.
fn runtime_of<'a>(table: &'a Table, handler: &str) -> Option<&'a str> {
    let plugins = table.get("plugins")?;
    [2, 3].into_iter().find_map(|version| {
        let own = plugins.get(plugin(version))?.get("containerd")?.get("runtimes")?.get(handler)?;
        own.get("runtime_type")?.as_str()
    })
}

fn version_of(table: &Table) -> i64 {
    // Without one a file is of the first version.
    table.get("version").and_then(Value::as_integer).unwrap_or(1)
}

/// Whether a file imports what is in `conf.d` beside it.
fn imports(table: &Table, path: &Path) -> bool {
    let all = folder(path).join("*.toml");
    let listed = table.get("imports").and_then(Value::as_array);
    let mut names = listed.into_iter().flatten().filter_map(Value::as_str);
    names.any(|name| Path::new(name) == all)
}

fn folder(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).join("conf.d")
}

/// The file of our own beside the configuration at `path`.
pub fn drop_in(path: &Path) -> PathBuf {
    folder(path).join("exocell.toml")
}

fn parsed(text: &str, path: &Path) -> Result<Table, String> {
    text.parse().map_err(|error| format!("{} is no TOML: {error}", path.display()))
}

/// What has to change so that the configuration at `path`, whose content is `text`, has the runtime.
///
/// # Errors
/// Why it cannot be added.
pub fn install(
    path: &Path,
    text: Option<&str>,
    version: Version,
    handler: &str,
    runtime: &str,
) -> Result<Option<Change>, String> {
    let Some(text) = text else {
        let of = version.of_config();
        let content = format!("{OWN}\nversion = {of}\n\n{}", section(of, handler, runtime));
        return Ok(Some(Change { path: path.to_owned(), content: Some(content) }));
    };
    let table = parsed(text, path)?;
    match runtime_of(&table, handler) {
        Some(own) if own == runtime => return Ok(None),
        Some(own) => {
            return Err(format!(
                "{} has a runtime {handler} already, which is {own}; choose another --handler",
                path.display()
            ));
        }
        None => {}
    }
    let of = version_of(&table);
    if of < 2 {
        return Err(format!(
            "{} is of version 1, which containerd 2 does not read; write `version = 2` and the \
             names that belong to it (containerd config migrate prints them)",
            path.display()
        ));
    }
    if version.major >= 2 && imports(&table, path) {
        let content = format!("{OWN}\nversion = {of}\n\n{}", section(of, handler, runtime));
        return Ok(Some(Change { path: drop_in(path), content: Some(content) }));
    }
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let content = format!("{text}{gap}{BEGIN}\n{}{END}\n", section(of, handler, runtime));
    // What is there may name the table in another way, so that it cannot be named again.
    let read = parsed(&content, path)?;
    match runtime_of(&read, handler) {
        Some(own) if own == runtime => {
            Ok(Some(Change { path: path.to_owned(), content: Some(content) }))
        }
        _ => Err(format!("{}: the runtime cannot be added at its end", path.display())),
    }
}

/// What has to change so that the configuration at `path`, whose content is `text`, is without
/// what [`install`] added.
pub fn uninstall(path: &Path, text: Option<&str>) -> Option<Change> {
    let text = text?;
    if text.starts_with(OWN) {
        return Some(Change { path: path.to_owned(), content: None });
    }
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let content = format!("{before}{}", after.strip_prefix('\n').unwrap_or(after));
    Some(Change { path: path.to_owned(), content: Some(content) })
}

/// What the configuration at `path` says of the runtime: `Ok` where it is there and the CRI plugin
/// runs, else what is missing.
///
/// # Errors
/// What is missing.
pub fn check(
    path: &Path,
    text: Option<&str>,
    drop_in: Option<&str>,
    handler: &str,
    runtime: &str,
) -> Result<String, String> {
    let add = "exocell containerd install adds it";
    let Some(text) = text else {
        return Err(format!("there is no {}; {add}", path.display()));
    };
    let table = parsed(text, path)?;
    let added = drop_in.filter(|_| imports(&table, path)).and_then(|text| text.parse().ok());
    let found = [Some(&table), added.as_ref()]
        .into_iter()
        .flatten()
        .find_map(|table| runtime_of(table, handler).map(str::to_owned));
    match found {
        Some(own) if own == runtime => {}
        Some(own) => {
            return Err(format!("the runtime {handler} is {own}; choose another --handler"));
        }
        None => return Err(format!("{} has no runtime {handler}; {add}", path.display())),
    }
    let disabled = table.get("disabled_plugins").and_then(Value::as_array);
    let mut disabled = disabled.into_iter().flatten().filter_map(Value::as_str);
    match disabled.find(|name| name.trim_start_matches("io.containerd.grpc.v1.") == "cri") {
        Some(_) => Err(format!(
            "{} has the plugin cri among disabled_plugins, so there are no pods; take it out (ctr \
             and docker work without it)",
            path.display()
        )),
        None => Ok(format!("the handler {handler} is {runtime}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNTIME: &str = "io.containerd.exocell.v1";
    const OLD: Version = Version { major: 1, minor: 6 };
    const NEW: Version = Version { major: 2, minor: 1 };

    fn path() -> &'static Path {
        Path::new("/etc/containerd/config.toml")
    }

    fn added(text: Option<&str>, version: Version) -> Change {
        install(path(), text, version, "exocell", RUNTIME).unwrap().unwrap()
    }

    #[test]
    fn versions_are_read_as_debian_and_others_print_them() {
        let of = |text| Version::parse(text).unwrap();
        let debian = "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1";
        assert_eq!(of(debian), OLD);
        assert_eq!(of("containerd containerd.io v2.1.9 abc"), NEW);
        assert_eq!(Version::parse("none"), None);
    }

    #[test]
    fn a_file_of_the_operators_is_as_before_when_the_runtime_is_gone() {
        for text in ["version = 2\nroot = \"/r\"\n", "version = 2", "version = 3\n[grpc]\na = 1\n"]
        {
            let change = added(Some(text), OLD);
            let content = change.content.unwrap();
            assert!(content.starts_with(text) && change.path == path());
            let again = install(path(), Some(&content), OLD, "exocell", RUNTIME);
            assert_eq!(again, Ok(None));
            check(path(), Some(&content), None, "exocell", RUNTIME).unwrap();
            let back = uninstall(path(), Some(&content)).unwrap().content.unwrap();
            assert_eq!(back.trim_end(), text.trim_end());
        }
        assert_eq!(uninstall(path(), Some("version = 2\n")), None);
    }

    #[test]
    fn where_files_are_imported_the_runtime_has_one_of_its_own() {
        let text = "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
        let change = added(Some(text), NEW);
        assert_eq!(change.path, Path::new("/etc/containerd/conf.d/exocell.toml"));
        let own = change.content.unwrap();
        assert!(own.contains("io.containerd.cri.v1.runtime"));
        check(path(), Some(text), Some(&own), "exocell", RUNTIME).unwrap();
        assert_eq!(uninstall(&change.path, Some(&own)).unwrap().content, None);
        // There it would replace the whole plugin's section.
        let text = text.replace('3', "2");
        assert_eq!(added(Some(&text), OLD).path, path());
    }

    #[test]
    fn a_file_that_is_not_there_is_made_and_removed() {
        let change = added(None, OLD);
        let content = change.content.unwrap();
        assert!(content.contains("version = 2") && content.contains("grpc.v1.cri"));
        assert_eq!(uninstall(path(), Some(&content)).unwrap().content, None);
        assert!(added(None, NEW).content.unwrap().contains("version = 3"));
    }

    #[test]
    fn what_cannot_be_added_is_told() {
        let refused =
            |text: &str| install(path(), Some(text), OLD, "exocell", RUNTIME).unwrap_err();
        assert!(refused("root = \"/r\"\n").contains("version 1"));
        assert!(refused("version = [").contains("no TOML"));
        let other = section(2, "exocell", "io.containerd.kata.v2");
        assert!(refused(&format!("version = 2\n{other}")).contains("kata"));
        let error = refused("version = 2\nplugins = {}\n");
        assert!(error.contains("config.toml"), "{error}");
        let text = "version = 2\ndisabled_plugins = [\"cri\"]\n";
        let content = added(Some(text), OLD).content.unwrap();
        let error = check(path(), Some(&content), None, "exocell", RUNTIME).unwrap_err();
        assert!(error.contains("disabled_plugins"), "{error}");
    }
}
