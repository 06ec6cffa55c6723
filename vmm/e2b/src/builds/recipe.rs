//! The steps of a template as a Dockerfile.
//!
//! Words of a client stand in it as JSON (the exec form), or are held to what needs no quoting:
//! none becomes an instruction of its own.

use std::path::PathBuf;

use exocell_cell::agent::printable;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Problem, Result};

const STEPS_MAX: usize = 500;
const ARCHIVES_MAX: usize = 100;
/// Bytes of one word.
const WORD_BYTES_MAX: usize = 256 << 10;
/// The image that E2B's own templates begin with; here the template that everyone has.
const E2B_BASE: &str = "e2bdev/base";
const BASE: &str = "base";
/// Who a step is run by, and where, until another is said.
const USER: &str = "user";
const HOME: &str = "/home/user";

/// Makes the user in an image that lacks him, as a sandbox would; by what a shell has built in, as
/// far as that goes.
const MAKE_USER: &str = "\
: >> /etc/passwd; : >> /etc/group; root=; \
while IFS=: read -r name rest; do \
[ \"$name\" = user ] && exit 0; [ \"$name\" = root ] && root=1; done < /etc/passwd; \
free() { for file in /etc/passwd /etc/group; do while IFS=: read -r name pass id rest; do \
[ \"$id\" = \"$1\" ] && return 1; done < $file; done; return 0; }; \
own=1000; until free $own; do own=$((own + 1)); done; \
shell=/bin/sh; [ -x /bin/bash ] && shell=/bin/bash; \
[ -n \"$root\" ] || echo \"root:x:0:0:root:/root:$shell\" >> /etc/passwd; \
echo \"user:x:$own:\" >> /etc/group; \
echo \"user:x:$own:$own::/home/user:$shell\" >> /etc/passwd; \
chown $own:$own /home/user; \
[ ! -d /etc/sudoers.d ] || { echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/user; \
chmod 440 /etc/sudoers.d/user; }";
/// Runs its first word by bash, as clients expect, or by sh where there is no bash.
const SHELL: &str =
    "if [ -x /bin/bash ]; then exec /bin/bash -l -c \"$0\"; else exec /bin/sh -l -c \"$0\"; fi";

/// A client's request.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Steps {
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<Value>,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    steps: Vec<Step>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Step {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    #[serde(default)]
    force: Option<bool>,
}

/// What is to be built.
#[derive(Debug)]
pub struct Recipe {
    /// The template that it begins with.
    pub from: String,
    pub archives: Vec<String>,
    pub labels: Vec<(String, String)>,
    pub force: bool,
    lines: Vec<String>,
}

/// Labels of a template's image: who runs commands in its sandboxes, and where, where nobody says.
pub const LABEL_USER: &str = "exocell.e2b.user";
pub const LABEL_WORKDIR: &str = "exocell.e2b.workdir";

/// What an archive is called in the context.
pub fn archive_name(at: usize) -> String {
    format!("files-{at}.tar")
}

impl Recipe {
    /// # Errors
    /// What is no step, or has no place in a Dockerfile.
    pub fn read(wanted: &Steps) -> Result<Self> {
        if wanted.from_image_registry.as_ref().is_some_and(|it| !it.is_null()) {
            return Err(Problem::unsupported(
                "a registry's credentials",
                "ask who runs the server to have the image there",
            ));
        }
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let from = match (given(&wanted.from_image), given(&wanted.from_template)) {
            (Some(from), None) | (None, Some(from)) => from,
            _ => return Err(Problem::invalid("name one of fromImage and fromTemplate")),
        };
        if wanted.steps.len() > STEPS_MAX {
            return Err(Problem::invalid(format!("a template has at most {STEPS_MAX} steps")));
        }
        let is_e2b = from == E2B_BASE
            || from.strip_prefix(E2B_BASE).is_some_and(|rest| rest.starts_with(':'));
        let mut recipe = Self {
            from: if is_e2b { BASE.to_owned() } else { from },
            archives: Vec::new(),
            labels: Vec::new(),
            force: wanted.force || wanted.steps.iter().any(|step| step.force == Some(true)),
            lines: Vec::new(),
        };
        // A directory that is missing is made.
        recipe.lines.extend(["USER 0", "WORKDIR /etc"].map(str::to_owned));
        recipe.lines.push(format!("WORKDIR {HOME}"));
        recipe.run(MAKE_USER, &["/bin/sh", "-c"]);
        recipe.lines.push(format!("USER {USER}"));
        let mut user = USER.to_owned();
        let mut workdir: Option<PathBuf> = None;
        for step in &wanted.steps {
            recipe.step(step, &mut user)?;
            if let ("WORKDIR", [path]) = (step.kind.as_str(), step.args.as_slice()) {
                let before = workdir.take().unwrap_or_else(|| PathBuf::from(HOME));
                workdir = Some(before.join(path));
            }
        }
        let (name, _) = user.split_once(':').unwrap_or((&user, ""));
        recipe.labels.push((LABEL_USER.to_owned(), name.to_owned()));
        if let Some(path) = workdir {
            recipe.labels.push((LABEL_WORKDIR.to_owned(), path.to_string_lossy().into_owned()));
        }
        for (name, text) in
            [("exocell.e2b.start", &wanted.start_cmd), ("exocell.e2b.ready", &wanted.ready_cmd)]
        {
            // One of the template that it begins with is not this one's.
            let text = text.clone().unwrap_or_default();
            check(&text)?;
            recipe.labels.push((name.to_owned(), text));
        }
        Ok(recipe)
    }

    fn run(&mut self, script: &str, shell: &[&str]) {
        let words: Vec<&str> = shell.iter().copied().chain([script]).collect();
        self.lines.push(format!("RUN {}", json!(words)));
    }

    fn step(&mut self, step: &Step, user: &mut String) -> Result<()> {
        for word in &step.args {
            check(word)?;
        }
        let words: Vec<&str> = step.args.iter().map(String::as_str).collect();
        match (step.kind.as_str(), words.as_slice()) {
            ("RUN", [script]) => self.run(script, &["/bin/sh", "-c", SHELL]),
            ("RUN", [script, by]) => {
                self.lines.push(format!("USER {}", name(by)?));
                self.run(script, &["/bin/sh", "-c", SHELL]);
                self.lines.push(format!("USER {user}"));
            }
            ("USER", [by]) => {
                *user = name(by)?.to_owned();
                self.lines.push(format!("USER {user}"));
            }
            ("WORKDIR", [path]) => self.lines.push(format!("WORKDIR {}", plain(path)?)),
            ("ENV", pairs) if pairs.len() % 2 == 0 && !pairs.is_empty() => {
                for pair in pairs.chunks(2) {
                    let [name, value] = pair else { continue };
                    self.lines.push(format!("ENV {}={}", variable(name)?, quoted(value)?));
                }
            }
            ("COPY", [from, to, rest @ ..]) if rest.len() <= 2 => {
                let hash = step.files_hash.as_deref().unwrap_or_default();
                self.copy((from, to), rest, hash, user)?;
            }
            (kind, words) => {
                return Err(Problem::invalid(format!(
                    "a step {} with {} words is none; say RUN, COPY, ENV, WORKDIR or USER",
                    printable(kind),
                    words.len()
                )));
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        (from, to): (&str, &str),
        rest: &[&str],
        hash: &str,
        user: &str,
    ) -> Result<()> {
        let at = match self.archives.iter().position(|own| own == hash) {
            Some(at) => at,
            None => {
                self.archives.push(hash.to_owned());
                self.archives.len() - 1
            }
        };
        if self.archives.len() > ARCHIVES_MAX {
            return Err(Problem::invalid(format!(
                "a template has at most {ARCHIVES_MAX} archives"
            )));
        }
        if from.split('/').any(|part| part == "..") {
            return Err(Problem::invalid(format!("COPY {from:?}: it leads out of the files")));
        }
        let below = from.trim_start_matches("./").trim_start_matches('/');
        let source = if below == "." { "/".to_owned() } else { format!("/{below}") };
        let by = rest.first().copied().filter(|by| !by.is_empty()).unwrap_or(user);
        let mode = match rest.get(1).copied().filter(|mode| !mode.is_empty()) {
            Some(mode) if mode.len() <= 5 && mode.bytes().all(|b| (b'0'..=b'7').contains(&b)) => {
                format!(" --chmod={mode}")
            }
            Some(mode) => {
                return Err(Problem::invalid(format!("COPY: {mode:?} is no mode in octal digits")));
            }
            None => String::new(),
        };
        let words = json!([dollars(&source), dollars(to)]);
        self.lines.push(format!("COPY --from=files-{at} --chown={}{mode} {words}", name(by)?));
        Ok(())
    }

    /// The text of it, on the image `base`.
    pub fn dockerfile(&self, base: &str) -> String {
        let mut text = String::new();
        for at in 0..self.archives.len() {
            text += &format!("FROM scratch AS files-{at}\nADD {} /\n", archive_name(at));
        }
        text += &format!("FROM {base}\n");
        for line in &self.lines {
            text += line;
            text += "\n";
        }
        text
    }
}

fn check(word: &str) -> Result<()> {
    match word.len() > WORD_BYTES_MAX || word.contains('\0') {
        true => Err(Problem::invalid(format!(
            "a word of a step has a zero byte, or more than {WORD_BYTES_MAX} bytes"
        ))),
        false => Ok(()),
    }
}

/// A user, and perhaps a group.
fn name(text: &str) -> Result<&str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.:-".contains(c);
    match !text.is_empty() && text.len() <= 64 && text.chars().all(plain) && !text.starts_with('-')
    {
        true => Ok(text),
        false => Err(Problem::invalid(format!("{text:?} cannot be a user's name"))),
    }
}

/// A path that needs no quotes.
fn plain(text: &str) -> Result<&str> {
    let is_plain = |c: char| !c.is_control() && !c.is_whitespace() && !"\"'\\$#".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => Ok(text),
        false => Err(Problem::invalid(format!(
            "{text:?} cannot be a directory of a template: use no spaces, quotes, \\, $ and #"
        ))),
    }
}

fn variable(text: &str) -> Result<&str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    match text.chars().all(plain) && text.starts_with(|c: char| !c.is_ascii_digit()) {
        true => Ok(text),
        false => Err(Problem::invalid(format!("{text:?} cannot be a variable of a template"))),
    }
}

/// A value within quotes, in which nothing is put in.
fn quoted(text: &str) -> Result<String> {
    if text.chars().any(char::is_control) {
        return Err(Problem::invalid(
            "a variable of a template cannot hold a line break or the like",
        ));
    }
    let escaped: String = text
        .chars()
        .flat_map(|c| "\\\"$".contains(c).then_some('\\').into_iter().chain([c]))
        .collect();
    Ok(format!("\"{escaped}\""))
}

/// A word of COPY, in which no variable is put in.
fn dollars(text: &str) -> String {
    text.replace('\\', "\\\\").replace('$', "\\$")
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_cell::images::dockerfile::{self, Instruction};
    use proptest::prelude::*;

    fn steps(all: Value) -> Result<Recipe> {
        let wanted = json!({ "fromImage": "python:3", "steps": all, "startCmd": "go" });
        Recipe::read(&serde_json::from_value(wanted).unwrap())
    }

    #[test]
    fn steps_become_instructions() {
        let hash = "0".repeat(64);
        let recipe = steps(json!([
            { "type": "RUN", "args": ["echo 'a\nb' $HOME"] },
            { "type": "RUN", "args": ["apt-get update", "root"] },
            { "type": "ENV", "args": ["A", "b \"c\" $d", "E", ""] },
            { "type": "WORKDIR", "args": ["/srv"] },
            { "type": "COPY", "args": ["./app", "/srv/app", "", "755"], "filesHash": hash },
            { "type": "USER", "args": ["root"] },
        ]));
        let recipe = recipe.unwrap();
        assert_eq!((recipe.from.as_str(), recipe.archives.len()), ("python:3", 1));
        let label = |name: &str| recipe.labels.iter().find(|(own, _)| own == name).map(|it| &it.1);
        assert_eq!(label("exocell.e2b.start").unwrap(), "go");
        assert_eq!(label(LABEL_USER).unwrap(), "root");
        assert_eq!(label(LABEL_WORKDIR).unwrap(), "/srv");
        let text = recipe.dockerfile("sha256:0");
        assert!(text.contains("ENV A=\"b \\\"c\\\" \\$d\"\nENV E=\"\"\n"), "{text}");
        assert!(text.contains("USER root\nRUN [\"/bin/sh\""), "{text}");
        let copy = "COPY --from=files-0 --chown=user --chmod=755 [\"/app\",\"/srv/app\"]";
        assert!(text.contains(copy), "{text}");
        let read = dockerfile::read(&text).unwrap();
        assert_eq!(read.stages.len(), 2);
    }

    #[test]
    fn what_is_no_step_is_refused() {
        for step in [
            json!({ "type": "FROM", "args": ["x"] }),
            json!({ "type": "RUN", "args": [] }),
            json!({ "type": "USER", "args": ["a\nRUN x"] }),
            json!({ "type": "WORKDIR", "args": ["/a b"] }),
            json!({ "type": "ENV", "args": ["A B", "c"] }),
            json!({ "type": "ENV", "args": ["A", "b\nRUN x"] }),
            json!({ "type": "ENV", "args": ["A"] }),
            json!({ "type": "COPY", "args": ["../x", "/"] }),
            json!({ "type": "COPY", "args": ["x", "/", "", "rwx"] }),
            json!({ "type": "RUN", "args": ["a\0b"] }),
        ] {
            assert!(steps(json!([step])).is_err(), "{step}");
        }
        let both = json!({ "fromImage": "a", "fromTemplate": "b" });
        assert!(Recipe::read(&serde_json::from_value(both).unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn no_word_becomes_an_instruction(
            script: String, path in "[^\0]{0,20}", value in "[^\0]{0,20}",
        ) {
            let all = json!([
                { "type": "RUN", "args": [script.replace('\0', "")] },
                { "type": "WORKDIR", "args": [path] },
                { "type": "ENV", "args": ["A", value] },
                { "type": "COPY", "args": [path, path], "filesHash": "0" },
            ]);
            let one = |at: usize| steps(json!([all[at]]));
            for recipe in (0..4).filter_map(|at| one(at).ok()) {
                let text = recipe.dockerfile("sha256:0");
                prop_assert_eq!(text.lines().count() - 2 * recipe.archives.len(), 7, "{}", text);
                if let Ok(read) = dockerfile::read(&text) {
                    let last = read.stages.last().unwrap();
                    prop_assert!(last.steps.len() == 6, "{}", text);
                    let runs = last.steps.iter();
                    let runs = runs.filter(|it| matches!(it.instruction, Instruction::Run { .. }));
                    prop_assert!(runs.count() <= 2);
                }
            }
        }
    }
}
