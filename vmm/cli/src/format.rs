//! `--format`: docker's templates.
//!
//! `{{.Name}}` is a field, `{{.A.B}}` one of a field, `{{json .A}}` either as JSON, and
//! `table ...` puts rows under a header. `if`, `with`, `range`, variables and functions are Go's
//! ([`parse`], [`show`]). Names are read without their case and their `_`, so that docker's
//! `{{.ExitCode}}` finds `exit_code`; beside exocell's own names are docker's.

mod parse;
mod show;

use exocell_cell::CellError;
use exocell_cell::agent::printable_lines;
use serde_json::Value;

use crate::show::{self as terminal, say};
use parse::{Node, Term};
pub use show::Item;

/// A template that was read.
pub struct Template {
    nodes: Vec<Node>,
    is_table: bool,
}

impl Template {
    /// # Errors
    /// [`CellError::Usage`] for what is no template.
    pub fn read(text: &str) -> Result<Self, CellError> {
        let text = if text == "json" { "{{json .}}" } else { text };
        let (text, is_table) = match text.strip_prefix("table ") {
            Some(columns) => (columns, true),
            None => (text, false),
        };
        Ok(Self { nodes: parse::read(text)?, is_table })
    }

    /// Prints a line for each of `rows`.
    ///
    /// # Errors
    /// [`CellError::Usage`] for a field that a row has not.
    pub fn print(&self, rows: &[Value]) -> Result<(), CellError> {
        let items = rows.iter().map(|row| Item::new(row.clone(), None));
        self.print_items(&items.collect::<Vec<_>>())
    }

    /// The same of rows that have docker's names beside.
    ///
    /// # Errors
    /// As of [`Self::print`].
    pub fn print_items(&self, rows: &[Item]) -> Result<(), CellError> {
        let lines = rows.iter().map(|row| show::line(&self.nodes, row));
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        if !self.is_table {
            lines.iter().for_each(|line| say!("{}", printable_lines(line)));
            return Ok(());
        }
        let cells = |line: &String| line.split('\t').map(str::to_owned).collect::<Vec<_>>();
        let header = cells(&self.header());
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        terminal::table(&header, &lines.iter().map(cells).collect::<Vec<_>>());
        Ok(())
    }

    /// The names of the fields, where they stand.
    fn header(&self) -> String {
        let part = |node: &Node| match node {
            Node::Text(text) => text.clone(),
            Node::Show(pipe) => {
                let fields = pipe.iter().flatten().filter_map(|term| match term {
                    Term::Field(path) => path.last().map(|name| name.to_uppercase()),
                    _ => None,
                });
                fields.collect::<Vec<_>>().join(" ")
            }
            _ => String::new(),
        };
        self.nodes.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(template: &str) -> Result<String, String> {
        let own = json!({
            "ID": "ab", "id": "abcd", "exit_code": 3, "state": "exited", "none": null,
            "spec": { "image": "i:1", "env": ["A=1"] },
        });
        let other = json!({
            "State": { "Status": "exited", "Running": false, "ExitCode": 3 },
            "Mounts": [{ "Source": "/a", "Destination": "/b" }, { "Source": "/c", "Destination": "/d" }],
            "NetworkSettings": {
                "IPAddress": "",
                "Networks": { "n": { "IPAddress": "10.0.0.2" }, "o": { "IPAddress": "10.1.0.2" } },
                "Ports": { "80/tcp": [{ "HostIp": "127.0.0.1", "HostPort": "8080" }], "81/tcp": null },
            },
            "Config": { "Env": ["A=1", "B=2"], "Labels": { "a.b": "c" } },
        });
        let item = Item::new(own, Some(other));
        let line = Template::read(template).and_then(|read| show::line(&read.nodes, &item));
        line.map_err(|error| error.to_string())
    }

    #[test]
    fn templates_are_words_and_fields() {
        for (template, shown) in [
            ("{{.ID}}\\t{{.id}}", "ab\tabcd"),
            ("code {{ .ExitCode }}{{.none}}!", "code 3!"),
            ("{{.Spec.Image}} {{json .spec.env}}", "i:1 [\"A=1\"]"),
            ("{{.State}} {{.State.Status}} {{.State.Running}}", "exited exited false"),
            ("{{json .Spec}}", "{\"env\":[\"A=1\"],\"image\":\"i:1\"}"),
            ("{{.NetworkSettings.IPAddress}}.", "."),
            ("{{.Config.Env}} {{.Spec}}", "[A=1 B=2] map[env:[A=1] image:i:1]"),
            ("plain", "plain"),
        ] {
            assert_eq!(line(template).unwrap(), shown, "{template}");
        }
    }

    #[test]
    fn templates_are_gos() {
        for (template, shown) in [
            ("{{range .Mounts}}{{.Source}}:{{.Destination}} {{end}}", "/a:/b /c:/d "),
            (
                "{{range $name, $own := .NetworkSettings.Networks}}{{$name}}={{$own.IPAddress}} {{end}}",
                "n=10.0.0.2 o=10.1.0.2 ",
            ),
            ("{{range .NetworkSettings.Networks}}{{.IPAddress}},{{end}}", "10.0.0.2,10.1.0.2,"),
            ("{{(index (index .NetworkSettings.Ports \"80/tcp\") 0).HostPort}}", "8080"),
            (
                "{{range $p, $c := .NetworkSettings.Ports}}{{$p}} -> {{with $c}}{{(index . 0).HostPort}}{{else}}-{{end}};{{end}}",
                "80/tcp -> 8080;81/tcp -> -;",
            ),
            ("{{index .Config.Labels \"a.b\"}}{{index .Config.Labels \"x\"}}", "c"),
            ("{{.Config.Labels.none}}", ""),
            ("{{join .Config.Env \", \"}} {{len .Mounts}}", "A=1, B=2 2"),
            (
                "{{if .State.Running}}up{{else if eq .State.ExitCode 3}}three{{else}}x{{end}}",
                "three",
            ),
            ("{{if and .ID (not .none)}}both{{end}}{{if or .none false}}x{{end}}", "both"),
            ("{{.ID | upper | printf \"%-4s|\"}}{{printf \"%d%%\" .exit_code}}", "AB  |3%"),
            ("{{range .none}}x{{else}}empty{{end}}", "empty"),
            ("a {{- /* no */ -}} b {{- \" c}}\" }}", "ab c}}"),
            ("{{with .State}}{{.Status}}{{end}}{{$x := .ID}}{{$x}}{{$.ID}}", "exitedabab"),
            (
                "{{title \"a bc\"}} {{index (split \"a/b\" \"/\") 1}} {{truncate \"abc\" 2}}",
                "A Bc b ab",
            ),
            ("{{println .ID}}{{lower \"AB\"}}", "ab\nab"),
        ] {
            assert_eq!(line(template).unwrap(), shown, "{template}");
        }
    }

    #[test]
    fn what_is_no_template_is_refused_with_a_way_out() {
        let deep = "{{if true}}".repeat(40);
        for template in [
            "{{range .ID}}x{{end}}",
            "{{range .Mounts}}",
            "{{.A",
            "{{end}}",
            "{{}}",
            "{{.ID | nothing}}",
            "{{index .Mounts 2}}",
            "{{(.ID}}",
            "{{.ID)}}",
            "{{\"a}}",
            "{{.ID .ID}}",
            "{{$x}}",
            "{{printf \"%9999999d\" 1}}",
            "{{pad .ID 99999999 0}}",
            deep.as_str(),
            "{{((((((((((((((((((((((((((((((((((((((((.ID}}",
        ] {
            assert!(line(template).unwrap_err().contains("--json and jq"), "{template}");
        }
        let missing = line("{{.Nothing}}").unwrap_err();
        assert!(missing.contains("no Nothing") && missing.contains("exit_code"), "{missing}");
        assert!(line("{{.ID.x}}").unwrap_err().contains("no ID.x"));
    }
}
