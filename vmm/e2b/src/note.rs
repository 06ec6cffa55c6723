//! What is written down of a sandbox, so that a server that is started later finds it again:
//! `ROOT/e2b/sandboxes/ID.json`, and beside it the commands that run in it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exocell_cell::images::private;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Who runs commands where nobody says.
pub const USER: &str = "user";
const ENDING: &str = ".json";
const PROGRAMS_ENDING: &str = ".programs";

/// What becomes of a sandbox whose time is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    #[default]
    Kill,
    Pause,
}

/// A sandbox as it was asked for, and what has become of that.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    /// Its cell's, too.
    pub id: String,
    pub tenant: String,
    pub template: String,
    /// The name by which the template was asked for, where it has another.
    pub alias: Option<String>,
    pub metadata: BTreeMap<String, String>,
    /// Of every command: the image's, then the client's.
    pub image_env: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// Who runs commands where nobody says.
    pub user: String,
    /// Where relative paths begin, if not at the user's home.
    pub workdir: Option<String>,
    pub access_token: String,
    /// Of whoever reaches other ports than the protocol's, where not everyone may.
    pub traffic_token: Option<String>,
    /// Milliseconds since the epoch.
    pub started_ms: u64,
    pub deadline_ms: u64,
    pub paused_ms: Option<u64>,
    pub on_timeout: OnTimeout,
    /// Whether a call of a client lets it go on when it is paused.
    pub auto_resume: bool,
    pub internet: Option<bool>,
    /// What was asked of the network, as it was.
    pub network: Option<Value>,
    /// What it comes to: rules of a capability table.
    pub rules: Vec<String>,
    pub vcpus: u32,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    /// The client's key for its request, and the hash of that.
    pub request: Option<(String, String)>,
}

/// A command that was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    pub pid: u32,
    pub cmd: String,
    pub args: Vec<String>,
    pub envs: BTreeMap<String, String>,
    pub cwd: Option<String>,
    pub tag: Option<String>,
    pub pty: bool,
    pub stdin: bool,
    /// When it is ended; milliseconds since the epoch.
    pub deadline_ms: Option<u64>,
}

impl Command {
    /// How much there is of it.
    pub fn bytes(&self) -> u64 {
        let pairs = self.envs.iter().map(|(name, value)| name.len() + value.len());
        let words = self.args.iter().chain([&self.cmd]).chain(&self.cwd).chain(&self.tag);
        (pairs.sum::<usize>() + words.map(String::len).sum::<usize>()) as u64
    }
}

/// Where all of them are.
#[derive(Debug, Clone)]
pub struct Notes {
    folder: PathBuf,
    /// Held by who writes: the last word is the last file.
    writing: Arc<Mutex<()>>,
}

impl Notes {
    /// # Errors
    /// The folder cannot be made.
    pub fn open(folder: PathBuf) -> io::Result<Self> {
        private::folder(&folder)?;
        Ok(Self { folder, writing: Arc::default() })
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what `note` says by then.
    pub fn write(&self, note: impl FnOnce() -> Note) -> io::Result<()> {
        let _held = self.hold();
        let note = note();
        write(&self.folder.join(format!("{}{ENDING}", note.id)), &note)
    }

    /// Writes down what `commands` says by then.
    pub fn write_commands(
        &self,
        id: &str,
        commands: impl FnOnce() -> Vec<Command>,
    ) -> io::Result<()> {
        let _held = self.hold();
        write(&self.commands_path(id), &commands())
    }

    fn commands_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}{PROGRAMS_ENDING}"))
    }

    pub fn commands(&self, id: &str) -> Vec<Command> {
        read(&self.commands_path(id)).unwrap_or_default()
    }

    pub fn remove(&self, id: &str) {
        let _held = self.hold();
        // What is not there need not be removed.
        let _ = fs::remove_file(self.folder.join(format!("{id}{ENDING}")));
        let _ = fs::remove_file(self.commands_path(id));
    }

    /// Removes what is of no sandbox.
    pub fn sweep(&self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(PROGRAMS_ENDING);
            let has_note = |id: &str| self.folder.join(format!("{id}{ENDING}")).exists();
            if id.is_some_and(|id| !has_note(id)) || name.ends_with(".new") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// All that can be read.
    pub fn all(&self) -> Vec<Note> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let own = entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(ENDING));
        own.filter_map(|entry| read(&entry.path())).collect()
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Whoever reads sees the file before or after.
fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(value).map_err(io::Error::other)?;
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    private::create(&new)?.write_all(&text)?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_found_again_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::open(folder.path().join("a/b")).unwrap();
        let note = Note { id: "1".into(), deadline_ms: 7, ..Note::default() };
        notes.write(|| note.clone()).unwrap();
        notes.write(|| Note { id: "2".into(), ..note.clone() }).unwrap();
        let commands = vec![Command { pid: 3, cmd: "x".into(), ..Command::default() }];
        notes.write_commands("1", || commands.clone()).unwrap();
        notes.write_commands("9", Vec::new).unwrap();
        notes.sweep();
        assert!(!folder.path().join("a/b/9.programs").exists());
        fs::write(folder.path().join("a/b/3.json"), "broken").unwrap();
        let mut all = notes.all();
        all.sort_by(|one, other| one.id.cmp(&other.id));
        assert_eq!((all.len(), &all[0]), (2, &note));
        assert_eq!(notes.commands("1"), commands);
        assert!(notes.commands("2").is_empty());
        notes.remove("1");
        assert_eq!(notes.all().len(), 1);
        assert!(notes.commands("1").is_empty());
    }
}
