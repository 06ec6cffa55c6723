//! `--format`: docker's templates, as far as they are words and names.
//!
//! `{{.Name}}` is a field, `{{.A.B}}` one of a field, `{{json .A}}` either as JSON, and
//! `table ...` puts rows under a header. Names are read without their case and their `_`, so that
//! docker's `{{.ExitCode}}` finds `exit_code`.

use exocell_cell::CellError;
use serde_json::Value;

use crate::show::{self, say};

/// A template that was read.
pub struct Template {
    parts: Vec<Part>,
    is_table: bool,
}

enum Part {
    Text(String),
    Field { path: Vec<String>, is_json: bool },
}

/// Other names of what `inspect` shows: docker's.
const ALIASES: [(&str, &str); 22] = [
    ("state.status", "state"),
    ("state.exitcode", "exitcode"),
    ("state.restarting", "restarting"),
    ("state.health", "health"),
    ("state.health.status", "health.status"),
    ("state.health.failingstreak", "health.failing_streak"),
    ("state.health.log", "health.log"),
    ("state.pid", "supervisorpid"),
    ("state.error", "reason"),
    ("state.oomkilled", "outofmemory"),
    ("state.startedat", "startedat"),
    ("state.finishedat", "finishedat"),
    ("config.image", "spec.image"),
    ("config.env", "spec.env"),
    ("config.cmd", "spec.command"),
    ("config.entrypoint", "spec.entrypoint"),
    ("config.labels", "spec.labels"),
    ("config.hostname", "spec.hostname"),
    ("config.user", "spec.user"),
    ("config.tty", "spec.tty"),
    ("config.workingdir", "spec.workingdir"),
    ("image", "spec.image"),
];

impl Template {
    /// # Errors
    /// [`CellError::Usage`] for what is more of a template than the module's head has.
    pub fn read(text: &str) -> Result<Self, CellError> {
        if text == "json" {
            let whole = Part::Field { path: Vec::new(), is_json: true };
            return Ok(Self { parts: vec![whole], is_table: false });
        }
        let (text, is_table) = match text.strip_prefix("table ") {
            Some(columns) => (columns, true),
            None => (text, false),
        };
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once("{{") {
            let (action, after) = behind.split_once("}}").ok_or_else(|| refused(behind))?;
            parts.push(Part::Text(unescaped(before)));
            parts.push(field(action)?);
            rest = after;
        }
        parts.push(Part::Text(unescaped(rest)));
        Ok(Self { parts, is_table })
    }

    /// The line for `row`.
    fn line(&self, row: &Value) -> Result<String, CellError> {
        let texts = self.parts.iter().map(|part| match part {
            Part::Text(text) => Ok(text.clone()),
            Part::Field { path, is_json } => {
                let value = find(row, path)?;
                Ok(if *is_json { value.to_string() } else { plain(value) })
            }
        });
        texts.collect()
    }

    /// Prints a line for each of `rows`.
    ///
    /// # Errors
    /// [`CellError::Usage`] for a field that a row has not.
    pub fn print(&self, rows: &[Value]) -> Result<(), CellError> {
        let lines = rows.iter().map(|row| self.line(row)).collect::<Result<Vec<_>, _>>()?;
        if !self.is_table {
            lines.iter().for_each(|line| say!("{}", exocell_cell::agent::printable_lines(line)));
            return Ok(());
        }
        let cells = |line: &String| line.split('\t').map(str::to_owned).collect::<Vec<_>>();
        let header = self.parts.iter().map(|part| match part {
            Part::Text(text) => text.clone(),
            Part::Field { path, .. } => path.last().map_or_else(String::new, |n| n.to_uppercase()),
        });
        let header = cells(&header.collect());
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        show::table(&header, &lines.iter().map(cells).collect::<Vec<_>>());
        Ok(())
    }
}

fn refused(action: &str) -> CellError {
    CellError::Usage(format!(
        "--format: `{{{{{action}` is more of a template than there is; write {{{{.NAME}}}} or {{{{json .NAME}}}}, or take --json and jq"
    ))
}

fn field(action: &str) -> Result<Part, CellError> {
    let words: Vec<&str> = action.split_ascii_whitespace().collect();
    let (is_json, name) = match words.as_slice() {
        ["json", name] => (true, *name),
        [name] => (false, *name),
        _ => return Err(refused(&format!("{action}}}}}"))),
    };
    let name = name.strip_prefix('.').ok_or_else(|| refused(&format!("{action}}}}}")))?;
    let plain = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let path: Vec<String> = name.split('.').filter(|p| !p.is_empty()).map(str::to_owned).collect();
    match path.iter().all(|part| plain(part)) {
        true => Ok(Part::Field { path, is_json }),
        false => Err(refused(&format!("{action}}}}}"))),
    }
}

/// What shells pass on as two letters.
fn unescaped(text: &str) -> String {
    text.replace("\\t", "\t").replace("\\n", "\n")
}

/// docker's switches for what is one word here.
fn state_is(row: &Value, wanted: &str) -> Option<&'static Value> {
    let state = row.get("state")?.as_str()?;
    match wanted.strip_prefix("state.")? {
        // As docker has it, what is paused runs.
        "running" => Some(truth(matches!(state, "running" | "paused"))),
        "paused" => Some(truth(state == "paused")),
        "dead" => Some(truth(false)),
        _ => None,
    }
}

fn truth(is: bool) -> &'static Value {
    if is { &Value::Bool(true) } else { &Value::Bool(false) }
}

fn find<'a>(row: &'a Value, path: &[String]) -> Result<&'a Value, CellError> {
    let wanted: Vec<String> = path.iter().map(|name| folded(name)).collect();
    let wanted = wanted.join(".");
    let alias = ALIASES.iter().find(|(name, _)| *name == wanted).map(|(_, own)| *own);
    let own = alias.map(|own| own.split('.').map(str::to_owned).collect::<Vec<_>>());
    let found = walk(row, path).or_else(|| walk(row, &own?)).or_else(|| state_is(row, &wanted));
    found.ok_or_else(|| {
        let names: Vec<&String> = row.as_object().into_iter().flat_map(|o| o.keys()).collect();
        let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
        CellError::Usage(format!(
            "--format: there is no {}; there are {}",
            path.join("."),
            names.join(", ")
        ))
    })
}

fn walk<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(value, |value, name| {
        let fields = value.as_object()?;
        let same = || fields.iter().find(|(own, _)| folded(own) == folded(name));
        fields.get(name).or_else(|| same().map(|(_, value)| value))
    })
}

fn folded(name: &str) -> String {
    name.replace('_', "").to_ascii_lowercase()
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(template: &str) -> Result<String, String> {
        let row = json!({
            "ID": "ab", "id": "abcd", "exit_code": 3, "state": "exited", "none": null,
            "spec": { "image": "i:1", "env": ["A=1"] },
        });
        let line = Template::read(template).and_then(|template| template.line(&row));
        line.map_err(|error| error.to_string())
    }

    #[test]
    fn templates_are_words_and_fields() {
        for (template, shown) in [
            ("{{.ID}}\\t{{.id}}", "ab\tabcd"),
            ("code {{ .ExitCode }}{{.none}}!", "code 3!"),
            ("{{.Spec.Image}} {{json .spec.env}}", "i:1 [\"A=1\"]"),
            ("{{.State.Status}} {{.Config.Image}}", "exited i:1"),
            ("{{json .Spec}}", "{\"env\":[\"A=1\"],\"image\":\"i:1\"}"),
            ("plain", "plain"),
        ] {
            assert_eq!(line(template).unwrap(), shown, "{template}");
        }
    }

    #[test]
    fn what_is_no_field_is_refused_with_a_way_out() {
        for template in ["{{range .A}}", "{{.A", "{{if .A}}x{{end}}", "{{.A|x}}", "{{index .A 0}}"]
        {
            assert!(line(template).unwrap_err().contains("--json and jq"), "{template}");
        }
        let missing = line("{{.Nothing}}").unwrap_err();
        assert!(missing.contains("no Nothing") && missing.contains("exit_code"), "{missing}");
    }
}
