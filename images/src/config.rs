//! The image configuration (OCI image-spec, config.md).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use crate::Digest;
use crate::error::{ImageError, Result};

/// What starts a process, together: it goes to the cell's agent in one frame, with what the command
/// line adds.
const START_BYTES_MAX: usize = 48 << 10;
/// What the image says of itself: labels, ports, volumes.
const NOTES_BYTES_MAX: usize = 256 << 10;
const NOTES_MAX: usize = 1000;
/// Author and message.
const NOTE_BYTES_MAX: usize = 16 << 10;

/// How the image wants its processes to be started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    /// Empty means `/`.
    pub working_dir: String,
    /// `user`, `uid`, `user:group`, or empty for root.
    pub user: String,
    pub labels: BTreeMap<String, String>,
    /// `80/tcp`.
    pub exposed_ports: BTreeSet<String>,
    pub volumes: BTreeSet<String>,
    pub stop_signal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<Healthcheck>,
    /// What a line of words is handed to, like `/bin/sh -c`; empty is that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shell: Vec<String>,
}

/// How it is found out whether a program is well, in docker's form. Times are in nanoseconds; what
/// is 0 or empty is said elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Healthcheck {
    /// `NONE`; `CMD` and words; `CMD-SHELL` and a line.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub test: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub interval: i64,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub timeout: i64,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub start_period: i64,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub start_interval: i64,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub retries: i64,
}

/// `null` is what is not said.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

impl ImageConfig {
    /// What an image's document says of it.
    ///
    /// # Errors
    /// The document is malformed, or says more than a cell can take.
    pub fn of_document(document: &str) -> Result<Self> {
        let config = ConfigDocument::parse(document.as_bytes())?.run_config()?;
        config.check()?;
        Ok(config)
    }

    /// Whether it is what a cell, and whoever lists images, can take.
    pub(crate) fn check(&self) -> Result<()> {
        // Files of `NAME=VALUE` lines are made of these: docker and runc take such names.
        if let Some(entry) = self.env.iter().find(|entry| name_of(entry).contains(char::is_control))
        {
            let name = crate::error::shown(name_of(entry).as_bytes());
            let why = format!(
                "the name of the variable `{name}` has a control character; rebuild the image \
                 without it"
            );
            return Err(ImageError::malformed("the image configuration", why));
        }
        let words = self.env.iter().chain(&self.entrypoint).chain(&self.cmd);
        let words = words.chain([&self.working_dir, &self.user]).chain(&self.stop_signal);
        let test = self.healthcheck.iter().flat_map(|check| &check.test);
        let words = words.chain(test).chain(&self.shell);
        // Each has its length beside it.
        let start: usize = words.map(|word| word.len() + 8).sum();
        if start > START_BYTES_MAX {
            let what = "the environment, entry point and command of the image";
            return Err(ImageError::limit(what, "bytes", START_BYTES_MAX as u64));
        }
        let what = "what the image says of itself (labels, ports, volumes)";
        let notes = || self.labels.keys().chain(&self.exposed_ports).chain(&self.volumes);
        if notes().count() > NOTES_MAX {
            return Err(ImageError::limit(what, "entries", NOTES_MAX as u64));
        }
        let bytes: usize = notes().chain(self.labels.values()).map(String::len).sum();
        if bytes > NOTES_BYTES_MAX {
            return Err(ImageError::limit(what, "bytes", NOTES_BYTES_MAX as u64));
        }
        Ok(())
    }
}

/// What whoever makes an image here says of it, beside how it is started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub author: String,
    pub comment: String,
    /// The image that it was made from.
    pub parent: Option<Digest>,
}

impl Note {
    /// # Errors
    /// It is longer than what is kept.
    pub fn check(&self) -> Result<()> {
        match self.author.len().saturating_add(self.comment.len()) > NOTE_BYTES_MAX {
            true => {
                let what = "the author and the message of the image";
                Err(ImageError::limit(what, "bytes", NOTE_BYTES_MAX as u64))
            }
            false => Ok(()),
        }
    }

    /// Writes it into a document, whose last step is how the image was made.
    fn put(&self, fields: &mut Map<String, Value>) {
        if !self.author.is_empty() {
            fields.insert("author".to_owned(), json!(self.author));
        }
        if let Some(parent) = self.parent {
            fields.insert("parent".to_owned(), json!(parent));
        }
    }

    /// The step by which the image was made.
    fn step(&self, word: &str) -> Value {
        let comment = if self.comment.is_empty() { word } else { &self.comment };
        let mut step = json!({ "comment": comment });
        if !self.author.is_empty() {
            step["author"] = json!(self.author);
        }
        step
    }
}

fn name_of(entry: &str) -> &str {
    entry.split_once('=').map_or(entry, |(name, _)| name)
}

/// The document of an image that has one more layer than the one whose document is `below`, and is
/// started as `config` says. The steps before are told of as that does, the last as `note` does.
///
/// # Errors
/// `below` is no document.
pub fn document_over(
    below: &str,
    (config, note): (&ImageConfig, &Note),
    diff_id: Digest,
) -> Result<String> {
    let malformed = |error| ImageError::malformed("the image configuration", error);
    let mut document: Value = serde_json::from_str(below).map_err(malformed)?;
    let Some(fields) = document.as_object_mut() else {
        return Err(ImageError::malformed("the image configuration", "it is no object"));
    };
    // What is of the other image, or of what it was made from.
    for gone in ["created", "container", "container_config", "id", "parent", "docker_version"] {
        fields.remove(gone);
    }
    let own = serde_json::to_value(RunConfig::from(config.clone())).map_err(malformed)?;
    fields.insert("config".to_owned(), own);
    note.put(fields);
    let ids = document["rootfs"]["diff_ids"].as_array().cloned().unwrap_or_default();
    let mut history = document["history"].as_array().cloned().unwrap_or_default();
    if history.is_empty() {
        history = ids.iter().map(|_| json!({ "comment": "imported" })).collect();
    }
    history.push(note.step("commit"));
    let ids: Vec<Value> = ids.into_iter().chain([json!(diff_id)]).collect();
    document["history"] = Value::Array(history);
    document["rootfs"] = json!({ "type": "layers", "diff_ids": ids });
    Ok(document.to_string())
}

/// The document as it is in an image.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ConfigDocument {
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub os: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// Whose it is, and how it was made, in words: of one made here.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    author: Value,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    history: Value,
    #[serde(default)]
    config: Option<RunConfig>,
    pub rootfs: RootfsDocument,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RootfsDocument {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    pub diff_ids: Vec<Digest>,
}

type Names = BTreeMap<String, serde_json::Value>;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    exposed_ports: Option<Names>,
    volumes: Option<Names>,
    stop_signal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    healthcheck: Option<Healthcheck>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shell: Option<Vec<String>>,
}

impl ConfigDocument {
    /// Reads a configuration and refuses what a cell cannot run.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let document: Self = serde_json::from_slice(bytes)
            .map_err(|error| ImageError::malformed("the image configuration", error))?;
        check_platform(&document.os, &document.architecture)?;
        Ok(document)
    }

    /// The configuration of an image with one layer, made here.
    pub fn single_layer((config, note): (&ImageConfig, &Note), diff_id: Digest) -> Self {
        let own = |words: &str, value: Value| if words.is_empty() { Value::Null } else { value };
        Self {
            architecture: "amd64".into(),
            os: "linux".into(),
            created: None,
            author: own(&note.author, json!(note.author)),
            history: own(&note.comment, json!([note.step("")])),
            config: Some(RunConfig::from(config.clone())),
            rootfs: RootfsDocument { kind: "layers".into(), diff_ids: vec![diff_id] },
        }
    }

    /// The part that tells how to start processes.
    pub fn run_config(&mut self) -> Result<ImageConfig> {
        let config = ImageConfig::from(self.config.take().unwrap_or_default());
        let words = config.env.iter().chain(&config.entrypoint).chain(&config.cmd);
        let test = config.healthcheck.iter().flat_map(|check| &check.test);
        let words = words.chain(test).chain(&config.shell);
        if words.chain([&config.working_dir, &config.user]).any(|word| word.contains('\0')) {
            return Err(ImageError::malformed("the image configuration", "a word has a NUL byte"));
        }
        Ok(config)
    }
}

/// Only linux/amd64 runs in a cell.
pub(crate) fn check_platform(os: &str, architecture: &str) -> Result<()> {
    if (os, architecture) == ("linux", "amd64") {
        return Ok(());
    }
    let found = crate::error::shown(format!("{os}/{architecture}").as_bytes());
    Err(ImageError::WrongPlatform { found })
}

impl From<RunConfig> for ImageConfig {
    fn from(config: RunConfig) -> Self {
        let keys = |names: Option<Names>| names.unwrap_or_default().into_keys().collect();
        Self {
            env: config.env.unwrap_or_default(),
            entrypoint: config.entrypoint.unwrap_or_default(),
            cmd: config.cmd.unwrap_or_default(),
            working_dir: config.working_dir.unwrap_or_default(),
            user: config.user.unwrap_or_default(),
            labels: config.labels.unwrap_or_default(),
            exposed_ports: keys(config.exposed_ports),
            volumes: keys(config.volumes),
            stop_signal: config.stop_signal.filter(|signal| !signal.is_empty()),
            healthcheck: config.healthcheck,
            shell: config.shell.unwrap_or_default(),
        }
    }
}

impl From<ImageConfig> for RunConfig {
    fn from(config: ImageConfig) -> Self {
        let names = |names: BTreeSet<String>| {
            Some(names.into_iter().map(|name| (name, serde_json::json!({}))).collect())
        };
        Self {
            env: Some(config.env),
            entrypoint: Some(config.entrypoint),
            cmd: Some(config.cmd),
            working_dir: Some(config.working_dir),
            user: Some(config.user),
            labels: Some(config.labels),
            exposed_ports: names(config.exposed_ports),
            volumes: names(config.volumes),
            stop_signal: config.stop_signal,
            healthcheck: config.healthcheck,
            shell: (!config.shell.is_empty()).then_some(config.shell),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_and_missing_parts_are_empty() {
        let text = br#"{"architecture":"amd64","os":"linux","config":{"Env":null,"Cmd":["sh"],
            "ExposedPorts":{"80/tcp":{}},"Shell":["sh","-c"],"Healthcheck":{"Test":null,"Retries":2}},
            "rootfs":{"type":"layers","diff_ids":[]}}"#;
        let config = ConfigDocument::parse(text).unwrap().run_config().unwrap();
        assert_eq!((config.env.len(), config.cmd.as_slice()), (0, &["sh".to_owned()][..]));
        assert!(config.exposed_ports.contains("80/tcp"));
        assert_eq!((config.shell.len(), config.healthcheck.unwrap().retries), (2, 2));
    }

    #[test]
    fn a_document_over_another_has_one_layer_more() {
        let below = r#"{"architecture":"amd64","os":"linux","created":"then","config":{"Env":["A=1"]},
            "rootfs":{"type":"layers","diff_ids":["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]}}"#;
        let config = ImageConfig { cmd: vec!["sh".into()], ..ImageConfig::default() };
        let note = Note::default();
        let over = document_over(below, (&config, &note), Digest::of(b"layer")).unwrap();
        let mut document = ConfigDocument::parse(over.as_bytes()).unwrap();
        assert_eq!(document.rootfs.diff_ids, [Digest::of(b""), Digest::of(b"layer")]);
        assert_eq!((document.created.clone(), document.run_config().unwrap()), (None, config));
        assert!(over.contains("imported") && over.contains("commit"), "{over}");
        let config = ImageConfig::default();
        assert!(document_over("[]", (&config, &note), Digest::of(b"")).is_err());
        let parent = Some(Digest::of(b"below"));
        let note = Note { author: "me".into(), comment: "why".into(), parent };
        let again = document_over(&over, (&config, &note), Digest::of(b"more")).unwrap();
        let again: Value = serde_json::from_str(&again).unwrap();
        assert_eq!(again["history"].as_array().unwrap().len(), 3);
        assert_eq!(again["history"][2], json!({ "comment": "why", "author": "me" }));
        assert_eq!((&again["author"], &again["parent"]), (&json!("me"), &json!(parent)));
        let long = Note { comment: "x".repeat(NOTE_BYTES_MAX + 1), ..Note::default() };
        assert!(note.check().is_ok() && long.check().is_err());
    }

    #[test]
    fn other_platforms_and_broken_documents_are_refused() {
        let arm =
            br#"{"architecture":"arm64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
        assert!(matches!(ConfigDocument::parse(arm), Err(ImageError::WrongPlatform { .. })));
        assert!(matches!(ConfigDocument::parse(b"{}"), Err(ImageError::Malformed { .. })));
    }

    #[test]
    fn what_is_kept_of_an_image_is_bounded() {
        let long = |count| "x".repeat(count);
        let many = |count: usize| (0..count).map(|n| n.to_string());
        let config = ImageConfig {
            env: vec![long(40_000)],
            labels: many(900).map(|name| (name, long(200))).collect(),
            exposed_ports: many(50).collect(),
            ..Default::default()
        };
        config.check().unwrap();
        let labels = [(long(10), long(257 << 10))].into();
        for worse in [
            ImageConfig { cmd: vec![long(10_000)], ..config.clone() },
            ImageConfig { entrypoint: vec![String::new(); 2000], ..config.clone() },
            ImageConfig { stop_signal: Some(long(10_000)), ..config.clone() },
            ImageConfig { volumes: many(100).collect(), ..config.clone() },
            ImageConfig { labels, ..config.clone() },
        ] {
            assert!(matches!(worse.check(), Err(ImageError::LimitExceeded { .. })));
        }
    }

    #[test]
    fn a_variable_is_named_in_one_line() {
        let of = |entry: &str| ImageConfig { env: vec![entry.to_owned()], ..Default::default() };
        for entry in ["A=1", "A=two\nlines", "a b.c=\t", "A", "=x", "\u{e9}=1"] {
            of(entry).check().unwrap();
        }
        for entry in ["A\nB=1", "A\nB", "\rA=1", "A\u{85}=1", "A\u{7f}=1", "\u{1b}=1"] {
            let error = of(entry).check().unwrap_err();
            assert!(error.to_string().contains("control character"), "{entry:?}: {error}");
            assert!(!error.to_string().contains(char::is_control), "{error:?}");
            let document = serde_json::json!({
                "architecture": "amd64", "os": "linux", "config": { "Env": [entry] },
                "rootfs": { "type": "layers", "diff_ids": [] },
            });
            assert!(ImageConfig::of_document(&document.to_string()).is_err(), "{entry:?}");
        }
    }

    #[test]
    fn a_made_configuration_reads_back() {
        let check = Healthcheck { test: vec!["NONE".into()], interval: 5, ..Default::default() };
        let config = ImageConfig {
            cmd: vec!["sh".into()],
            user: "1".into(),
            healthcheck: Some(check),
            ..Default::default()
        };
        let document = ConfigDocument::single_layer((&config, &Note::default()), Digest::of(b""));
        let bytes = serde_json::to_vec(&document).unwrap();
        assert_eq!(ConfigDocument::parse(&bytes).unwrap().run_config().unwrap(), config);
    }
}
