//! The configuration of an image that is being built, as it will lie in the store.

use exocell_cell::images::Digest;
use exocell_cell::images::dockerfile::Program;
use exocell_cell::plan::PATH_DEFAULT;
use serde_json::{Map, Value, json};

/// What a line of words is handed to where the image says nothing.
const SHELL: [&str; 2] = ["/bin/sh", "-c"];

/// Bytes of one.
const BYTES_MAX: usize = 2 << 20;

/// A document in JSON (OCI image-spec, config.md).
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    fields: Map<String, Value>,
    /// As it is in the store, as long as nothing has changed it.
    stored: Option<String>,
}

impl Document {
    /// Of an image without files.
    pub fn empty() -> Self {
        Self::of(json!({ "architecture": "amd64", "os": "linux" }))
    }

    /// The document of an image in the store.
    ///
    /// # Errors
    /// It is no object.
    pub fn read(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => {
                Ok(Self { stored: Some(text.to_owned()), ..Self::of(value) })
            }
            Ok(_) | Err(_) => Err("the image's configuration cannot be read".to_owned()),
        }
    }

    fn of(value: Value) -> Self {
        let mut document = match value {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        // What a container of old was made from has no place in an image of now.
        for gone in ["container", "container_config", "id", "parent", "docker_version"] {
            document.remove(gone);
        }
        for (name, kind) in [("config", json!({})), ("rootfs", json!({})), ("history", json!([]))] {
            let is_kind = document.get(name).is_some_and(|own| own.is_object() == kind.is_object());
            if !is_kind {
                document.insert(name.to_owned(), kind);
            }
        }
        let rootfs = document.get_mut("rootfs").and_then(Value::as_object_mut);
        if let Some(rootfs) = rootfs {
            rootfs.insert("type".to_owned(), json!("layers"));
            rootfs.entry("diff_ids").or_insert_with(|| json!([]));
        }
        Self { fields: document, stored: None }
    }

    pub fn text(&self) -> String {
        let changed = || Value::Object(self.fields.clone()).to_string();
        self.stored.clone().unwrap_or_else(changed)
    }

    /// The id of the image that it would be now.
    pub fn id(&self) -> Digest {
        Digest::of(self.text().as_bytes())
    }

    fn config(&self) -> Option<&Map<String, Value>> {
        self.fields.get("config").and_then(Value::as_object)
    }

    pub fn get(&self, name: &str) -> &Value {
        self.config().and_then(|config| config.get(name)).unwrap_or(&Value::Null)
    }

    pub fn set(&mut self, name: &str, value: Value) {
        self.stored = None;
        if let Some(config) = self.fields.get_mut("config").and_then(Value::as_object_mut) {
            match value.is_null() {
                true => drop(config.remove(name)),
                false => drop(config.insert(name.to_owned(), value)),
            }
        }
    }

    /// The words in a list.
    pub fn words(&self, name: &str) -> Vec<String> {
        let words = self.get(name).as_array().into_iter().flatten();
        words.filter_map(|word| word.as_str().map(str::to_owned)).collect()
    }

    /// The environment, with the path that programs have where the image names none.
    pub fn env(&self) -> Vec<String> {
        let mut env = self.words("Env");
        if !env.iter().any(|entry| entry.starts_with("PATH=")) {
            env.push(PATH_DEFAULT.to_owned());
        }
        env
    }

    pub fn string(&self, name: &str) -> String {
        self.get(name).as_str().unwrap_or_default().to_owned()
    }

    /// Sets a variable of the environment.
    pub fn set_env(&mut self, name: &str, value: &str) {
        let mut env = self.words("Env");
        let entry = format!("{name}={value}");
        let known = env.iter_mut().find(|own| own.split('=').next() == Some(name));
        match known {
            Some(own) => *own = entry,
            None => env.push(entry),
        }
        self.set("Env", json!(env));
    }

    /// Adds a field to an object, like a label.
    pub fn add(&mut self, name: &str, field: &str, value: Value) {
        self.stored = None;
        let Some(config) = self.fields.get_mut("config").and_then(Value::as_object_mut) else {
            return;
        };
        let fields = config.entry(name).or_insert_with(|| json!({}));
        if !fields.is_object() {
            *fields = json!({});
        }
        if let Some(fields) = fields.as_object_mut() {
            fields.insert(field.to_owned(), value);
        }
    }

    /// Whether it is longer than any image's: its variables and labels come from the text of a
    /// build.
    pub fn is_too_long(&self) -> bool {
        self.stored.is_none() && self.text().len() > BYTES_MAX
    }

    /// What a line of words is handed to.
    pub fn shell(&self) -> Vec<String> {
        match self.words("Shell") {
            shell if shell.is_empty() => SHELL.map(str::to_owned).to_vec(),
            shell => shell,
        }
    }

    /// The words that a program is started by.
    pub fn program(&self, program: &Program) -> Vec<String> {
        match program {
            Program::Words(words) => words.clone(),
            Program::Line(line) if line.is_empty() => Vec::new(),
            Program::Line(line) => {
                let mut words = self.shell();
                words.push(line.clone());
                words
            }
        }
    }

    /// Takes the instructions out that the image has for who builds on it.
    pub fn take_triggers(&mut self) -> Vec<String> {
        let triggers = self.words("OnBuild");
        if !triggers.is_empty() {
            self.set("OnBuild", Value::Null);
        }
        triggers
    }

    /// Notes a step, and its layer if it made one.
    pub fn note(&mut self, step: &str, created: &str, layer: Option<Digest>) {
        self.stored = None;
        self.fields.insert("created".to_owned(), json!(created));
        let mut entry = json!({ "created": created, "created_by": step });
        match layer {
            None => entry["empty_layer"] = json!(true),
            Some(diff_id) => {
                let ids =
                    self.fields.get_mut("rootfs").and_then(|rootfs| rootfs.get_mut("diff_ids"));
                if let Some(ids) = ids.and_then(Value::as_array_mut) {
                    ids.push(json!(diff_id.to_string()));
                }
            }
        }
        if let Some(history) = self.fields.get_mut("history").and_then(Value::as_array_mut) {
            history.push(entry);
        }
    }

    pub fn set_author(&mut self, author: &str) {
        self.stored = None;
        self.fields.insert("author".to_owned(), json!(author));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_notes_steps_and_layers() {
        let mut document = Document::empty();
        let before = document.id();
        document.set_env("A", "1");
        document.set_env("B", "2");
        document.set_env("A", "3");
        assert_eq!(document.words("Env"), ["A=3", "B=2"]);
        document.add("Labels", "l", json!("v"));
        document.note("ENV", "2020", None);
        document.note("RUN", "2021", Some(Digest::of(b"x")));
        assert_ne!(document.id(), before);
        let text: Value = serde_json::from_str(&document.text()).unwrap();
        assert_eq!(text["rootfs"]["diff_ids"].as_array().unwrap().len(), 1);
        assert_eq!(text["history"][0]["empty_layer"], true);
        assert_eq!(
            (&text["created"], &text["config"]["Labels"]["l"]),
            (&json!("2021"), &json!("v"))
        );
        assert_eq!(document.program(&Program::Line("x y".into())), ["/bin/sh", "-c", "x y"]);
        document.set("Shell", json!(["bash", "-ec"]));
        assert_eq!(document.program(&Program::Line("x".into())), ["bash", "-ec", "x"]);
    }

    #[test]
    fn a_document_of_another_builder_goes_on() {
        let text = r#"{"architecture":"amd64","os":"linux","config":{"OnBuild":["RUN x"],"Env":null},
            "container":"c","rootfs":{"type":"layers","diff_ids":["sha256:0"]},"history":null}"#;
        let mut document = Document::read(text).unwrap();
        assert_eq!(document.id(), Digest::of(text.as_bytes()));
        assert_eq!(document.take_triggers(), ["RUN x"]);
        document.set_env("A", "1");
        document.note("ENV", "now", None);
        assert!(!document.text().contains("container") && document.text().contains("sha256:0"));
        assert!(Document::read("[]").is_err());
    }
}
