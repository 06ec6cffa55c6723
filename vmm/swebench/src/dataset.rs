//! Datasets and predictions: one JSON list, or one JSON object a line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::error::SwebenchError;

type Result<T> = std::result::Result<T, SwebenchError>;

/// A row of a dataset, as far as an evaluation needs it.
#[derive(Debug, Clone, Deserialize)]
pub struct Instance {
    pub instance_id: String,
    /// The patch that solves it.
    #[serde(default)]
    pub patch: String,
    /// An image with the repository at /testbed.
    pub image: String,
    /// A program for bash that brings the tests in and runs them.
    pub eval_script: String,
    /// Which parser reads what the tests print.
    pub log_parser: String,
    #[serde(default)]
    pub eval_type: EvalType,
    #[serde(rename = "FAIL_TO_PASS", deserialize_with = "list")]
    pub fail_to_pass: Vec<String>,
    #[serde(rename = "PASS_TO_PASS", deserialize_with = "list")]
    pub pass_to_pass: Vec<String>,
    /// Binary files that a patch cannot carry.
    #[serde(default)]
    image_assets: Value,
}

/// How the tests' verdicts are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalType {
    /// Each test must be seen to pass.
    #[default]
    PassAndFail,
    /// The tests' runner tells failures only.
    FailOnly,
}

impl Instance {
    /// Whether the instance comes with binary files.
    pub fn has_assets(&self) -> bool {
        match &self.image_assets {
            Value::Null => false,
            Value::String(text) => !matches!(text.trim(), "" | "{}" | "null"),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        }
    }
}

/// A list of words, or the text of its JSON.
fn list<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        List(Vec<String>),
        Text(String),
    }
    match Form::deserialize(deserializer)? {
        Form::List(list) => Ok(list),
        Form::Text(text) => serde_json::from_str(&text).map_err(serde::de::Error::custom),
    }
}

/// What a model proposes for an instance.
#[derive(Debug, Clone, Deserialize)]
pub struct Prediction {
    pub instance_id: String,
    #[serde(default)]
    pub model_patch: Option<String>,
    #[serde(default)]
    pub model_name_or_path: Option<String>,
}

impl Prediction {
    /// The patch; `None` where there is nothing to try.
    pub fn patch(&self) -> Option<&str> {
        self.model_patch.as_deref().filter(|patch| !patch.is_empty())
    }

    /// The model's name as a folder's.
    pub fn model(&self) -> String {
        self.model_name_or_path.as_deref().unwrap_or("None").replace('/', "__")
    }
}

/// Predictions by instance.
pub type Predictions = BTreeMap<String, Prediction>;

/// A file that the operator names, and the text in it.
#[derive(Debug, Clone)]
pub struct TextFile {
    /// Its suffix says what form the text has.
    pub path: PathBuf,
    pub text: String,
}

/// Reads a dataset; of it the instances that `only` names, or all.
pub fn read_dataset(file: &TextFile, only: &[String]) -> Result<Vec<Instance>> {
    let mut instances: Vec<Instance> = rows(file, "dataset")?;
    for instance in &instances {
        check_name("an instance_id", &instance.instance_id)?;
    }
    let known: BTreeSet<&str> = instances.iter().map(|own| own.instance_id.as_str()).collect();
    if let Some(unknown) = only.iter().find(|id| !known.contains(id.as_str())) {
        return Err(SwebenchError::UnknownInstance(unknown.clone()));
    }
    if !only.is_empty() {
        instances.retain(|instance| only.contains(&instance.instance_id));
    }
    Ok(instances)
}

/// The patches that solve `instances`, as a model's.
pub fn gold(instances: &[Instance]) -> Predictions {
    let prediction = |instance: &Instance| Prediction {
        instance_id: instance.instance_id.clone(),
        model_patch: Some(instance.patch.clone()),
        model_name_or_path: Some("gold".to_owned()),
    };
    instances.iter().map(|own| (own.instance_id.clone(), prediction(own))).collect()
}

/// Reads predictions: a list, lines, or an object by instance.
pub fn read_predictions(file: &TextFile) -> Result<Predictions> {
    let predictions: Vec<Prediction> = rows(file, "list of predictions")?;
    for prediction in &predictions {
        check_name("an instance_id", &prediction.instance_id)?;
        check_name("a model's name", &prediction.model())?;
    }
    Ok(predictions.into_iter().map(|own| (own.instance_id.clone(), own)).collect())
}

/// Whether `name` can be a folder's name and stay below its parent.
pub fn check_name(what: &'static str, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_graphic() && c != '/' && c != '\\' || c == ' ';
    if !name.is_empty() && !name.starts_with('.') && name.len() < 200 && name.chars().all(plain) {
        return Ok(());
    }
    Err(SwebenchError::Name { what, name: name.to_owned() })
}

fn rows<T: DeserializeOwned>(file: &TextFile, what: &'static str) -> Result<Vec<T>> {
    let TextFile { path, text } = file;
    let wrong = |reason: String| SwebenchError::Form { what, path: path.to_owned(), reason };
    match path.extension().and_then(|suffix| suffix.to_str()) {
        Some("jsonl") => {
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let read = |(at, line): (usize, &str)| {
                serde_json::from_str(line)
                    .map_err(|error| wrong(format!("line {}: {error}", at + 1)))
            };
            lines.map(read).collect()
        }
        Some("json") => {
            let value: Value = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
            let values = match value {
                Value::Object(map) => map.into_iter().map(|(_, value)| value).collect(),
                Value::Array(values) => values,
                _ => return Err(wrong("it is neither a list nor an object".to_owned())),
            };
            let read = |value| serde_json::from_value(value).map_err(|e| wrong(e.to_string()));
            values.into_iter().map(read).collect()
        }
        _ => Err(SwebenchError::Suffix(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn predictions_come_in_three_forms() {
        let (a, b) =
            (json!({"instance_id": "a", "model_patch": null}), json!({"instance_id": "b"}));
        let read = |name: &str, text: String| {
            let file = TextFile { path: name.into(), text };
            read_predictions(&file).map(|all| all.into_keys().collect::<Vec<_>>().join(" "))
        };
        assert_eq!(read("l.jsonl", format!("{a}\n\n{b}\n")).unwrap(), "a b");
        assert_eq!(read("l.json", json!([a, b]).to_string()).unwrap(), "a b");
        assert_eq!(read("o.json", json!({"x": a, "y": b}).to_string()).unwrap(), "a b");
        for (name, text) in [("n.json", "1"), ("n.jsonl", "{"), ("n.txt", ""), ("i.json", "[{}]")] {
            assert!(read(name, text.to_owned()).is_err(), "{name}");
        }
    }

    #[test]
    fn no_name_leads_out_of_its_folder() {
        for name in ["", ".", "..", "a/b", "../a", "a\0", "a\n", "\\", &"a".repeat(200)] {
            assert!(check_name("a name", name).is_err(), "{name:?}");
        }
        for name in ["a__b-1", "model (v1.2)", "a..b"] {
            check_name("a name", name).unwrap();
        }
    }

    #[test]
    fn assets_are_seen_in_both_forms() {
        let with = |assets: Value| {
            let row = json!({"instance_id": "i", "image": "x", "eval_script": "", "log_parser": "",
                "FAIL_TO_PASS": [], "PASS_TO_PASS": "[]", "image_assets": assets});
            serde_json::from_value::<Instance>(row).unwrap().has_assets()
        };
        assert!(!with(json!(null)) && !with(json!("")) && !with(json!({})) && !with(json!("{}")));
        assert!(with(json!({"patch": []})) && with(json!("{\"patch\": []}")));
    }
}
