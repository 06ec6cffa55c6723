//! Instructions that change an image's configuration alone: of builds and of commits.

use exocell_cell::CellSpec;
use exocell_cell::health;
use exocell_cell::images::dockerfile::{self, Check, Instruction, Program, Scope};
use exocell_cell::signal::Signal;
use serde_json::{Value, json};

use super::document::Document;
use super::stage::absolute;
use super::{BuildError, Result};
use crate::wire::Config;

/// What commits may change: as docker has it.
const OF_COMMITS: &str =
    "CMD, ENTRYPOINT, ENV, EXPOSE, HEALTHCHECK, LABEL, STOPSIGNAL, USER, VOLUME and WORKDIR";

/// Bytes of all variables, or labels, of one instruction.
const PAIRS_BYTES_MAX: usize = 1 << 20;

/// A document that is being changed.
pub struct Configuring<'a> {
    pub document: &'a mut Document,
    /// Whether what the program is given was said since the image below.
    pub says_cmd: &'a mut bool,
    /// What a variable is, beside the environment.
    pub variables: &'a dyn Fn(&[String], &str) -> Option<String>,
    pub escape: char,
}

impl Configuring<'_> {
    fn scoped<T>(&self, read: impl Fn(&Scope<'_>) -> std::result::Result<T, String>) -> Result<T> {
        let env = self.document.env();
        let variables = |name: &str| (self.variables)(&env, name);
        read(&Scope { variables: &variables, escape: self.escape }).map_err(BuildError::Refused)
    }

    fn expand(&self, text: &str) -> Result<String> {
        self.scoped(|scope| scope.expand(text))
    }

    fn pairs(&self, pairs: &[(String, String)]) -> Result<Vec<(String, String)>> {
        let mut bytes = 0;
        let pair = |(name, value): &(String, String)| {
            let pair = (self.expand(name)?, self.expand(value)?);
            bytes += pair.0.len() + pair.1.len();
            match bytes > PAIRS_BYTES_MAX {
                true => Err(BuildError::Refused(format!(
                    "the variables or labels of an instruction have at most {PAIRS_BYTES_MAX} bytes"
                ))),
                false => Ok(pair),
            }
        };
        pairs.iter().map(pair).collect()
    }

    /// Changes the document; how the history tells of it.
    ///
    /// # Errors
    /// What makes no sense, instructions that change more than a document, and what becomes too
    /// long for one.
    pub fn carry_out(&mut self, instruction: &Instruction) -> Result<String> {
        let told = self.change(instruction)?;
        match self.document.is_too_long() {
            true => Err(BuildError::Refused(
                "the image's configuration becomes too long: fewer or shorter variables, labels \
                 and ports are needed"
                    .to_owned(),
            )),
            false => Ok(told),
        }
    }

    fn change(&mut self, instruction: &Instruction) -> Result<String> {
        Ok(match instruction {
            Instruction::Env(own) => {
                let own = self.pairs(own)?;
                own.iter().for_each(|(name, value)| self.document.set_env(name, value));
                told("ENV", &own)
            }
            Instruction::Label(own) => {
                let own = self.pairs(own)?;
                for (name, value) in &own {
                    self.document.add("Labels", name, json!(value));
                }
                told("LABEL", &own)
            }
            Instruction::User(user) => self.word("USER", "User", user)?,
            Instruction::StopSignal(name) => {
                self.expand(name)?.parse::<Signal>()?;
                self.word("STOPSIGNAL", "StopSignal", name)?
            }
            Instruction::Workdir(path) => {
                let path = self.expand(path)?;
                let path = directory(self.document, &path);
                self.document.set("WorkingDir", json!(path));
                format!("WORKDIR {path}")
            }
            Instruction::Expose(ports) => self.expose(ports)?,
            Instruction::Volume(paths) => self.volume(paths)?,
            Instruction::Cmd(program) => {
                *self.says_cmd = true;
                self.program("CMD", "Cmd", program)
            }
            Instruction::Entrypoint(program) => {
                // What the image below said is for another program.
                if !*self.says_cmd {
                    self.document.set("Cmd", Value::Null);
                }
                self.program("ENTRYPOINT", "Entrypoint", program)
            }
            Instruction::Shell(words) => {
                self.document.set("Shell", json!(words));
                format!("SHELL {}", json!(words))
            }
            Instruction::Healthcheck(check) => {
                let health = healthcheck(check.as_ref())?;
                self.document.set("Healthcheck", health.clone());
                format!("HEALTHCHECK {health}")
            }
            Instruction::OnBuild(text) => {
                let mut triggers = self.document.words("OnBuild");
                triggers.push(text.clone());
                self.document.set("OnBuild", json!(triggers));
                format!("ONBUILD {text}")
            }
            Instruction::Maintainer(author) => {
                self.document.set_author(author);
                format!("MAINTAINER {author}")
            }
            Instruction::Run { .. }
            | Instruction::Copy(_)
            | Instruction::Add(_)
            | Instruction::Arg(_) => {
                return Err(BuildError::Refused(format!("a change is one of {OF_COMMITS}")));
            }
        })
    }

    fn word(&mut self, name: &str, field: &str, text: &str) -> Result<String> {
        let text = self.expand(text)?;
        self.document.set(field, json!(text));
        Ok(format!("{name} {text}"))
    }

    fn program(&mut self, name: &str, field: &str, program: &Program) -> String {
        let words = self.document.program(program);
        self.document.set(field, json!(words));
        format!("{name} {}", json!(words))
    }

    fn expose(&mut self, ports: &[String]) -> Result<String> {
        // Words of variables are words of their own.
        let ports = ports.iter().map(|text| self.scoped(|scope| scope.split(text)));
        let ports = ports.collect::<Result<Vec<_>>>()?.concat();
        for text in &ports {
            for port in numbered(text)? {
                self.document.add("ExposedPorts", &port, json!({}));
            }
        }
        Ok(format!("EXPOSE {}", ports.join(" ")))
    }

    fn volume(&mut self, paths: &[String]) -> Result<String> {
        let paths = paths.iter().map(|path| self.expand(path)).collect::<Result<Vec<_>>>()?;
        if paths.iter().any(|path| path.trim().is_empty()) {
            return Err(BuildError::Refused("VOLUME: a path is empty".to_owned()));
        }
        for path in &paths {
            self.document.add("Volumes", path, json!({}));
        }
        Ok(format!("VOLUME {}", json!(paths)))
    }
}

fn told(name: &str, pairs: &[(String, String)]) -> String {
    let told = pairs.iter().map(|(name, value)| format!(" {name}={value}"));
    format!("{name}{}", told.collect::<String>())
}

/// The working directory that `path` names, from the one before.
pub fn directory(document: &Document, path: &str) -> String {
    match absolute(document, path).trim_end_matches('/') {
        "" => "/".to_owned(),
        path => path.to_owned(),
    }
}

/// `80`, `80/udp`, `8000-8010`
fn numbered(text: &str) -> Result<Vec<String>> {
    let bad = || BuildError::Refused(format!("EXPOSE {text}: give PORT, PORT/tcp or PORT/udp"));
    let (ports, by) = text.split_once('/').unwrap_or((text, "tcp"));
    let by = by.to_ascii_lowercase();
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(bad);
    let (first, last) = (number(first)?, number(last)?);
    match ["tcp", "udp", "sctp"].contains(&by.as_str()) && first <= last {
        true => Ok((first..=last).map(|port| format!("{port}/{by}")).collect()),
        false => Err(bad()),
    }
}

fn healthcheck(check: Option<&Check>) -> Result<Value> {
    let Some(check) = check else { return Ok(json!({ "Test": ["NONE"] })) };
    let test = match &check.program {
        dockerfile::Program::Words(words) => [&["CMD".to_owned()][..], words].concat(),
        dockerfile::Program::Line(line) => vec!["CMD-SHELL".to_owned(), line.clone()],
    };
    let mut found = json!({ "Test": test });
    let refused = |option: &str, text: &str, why: &str| {
        BuildError::Refused(format!("HEALTHCHECK --{option}={text}: {why}"))
    };
    for (option, field) in [
        ("interval", "Interval"),
        ("timeout", "Timeout"),
        ("start-period", "StartPeriod"),
        ("start-interval", "StartInterval"),
    ] {
        if let Some(text) = check.options.get(option) {
            let nanos = health::read_time(text).map_err(|why| refused(option, text, &why))?;
            found[field] = json!(nanos);
        }
    }
    if let Some(text) = check.options.get("retries") {
        let retries = text.parse::<u32>().map_err(|_| refused("retries", text, "give a number"))?;
        found["Retries"] = json!(retries);
    }
    Ok(found)
}

/// Has a document say how a cell was started whose image it describes, as a commit does.
pub fn as_started(document: &str, spec: &CellSpec) -> Result<String> {
    as_configured(document, &Config::of_spec(spec))
}

/// The same of a container. What `config` does not say stays as the image has it.
pub(crate) fn as_configured(document: &str, config: &Config) -> Result<String> {
    let mut document = Document::read(document).map_err(BuildError::Refused)?;
    let own = |words: &Vec<String>| match words.is_empty() {
        true => Value::Null,
        false => json!(words),
    };
    let cmd = config.cmd.as_ref().map_or(Value::Null, own);
    match &config.entrypoint {
        Some(entrypoint) => {
            document.set("Entrypoint", own(entrypoint));
            document.set("Cmd", cmd);
        }
        None if !cmd.is_null() => document.set("Cmd", cmd),
        None => {}
    }
    for (name, value) in config.env.iter().filter_map(|entry| entry.split_once('=')) {
        document.set_env(name, value);
    }
    for (name, text) in [("User", &config.user), ("WorkingDir", &config.working_dir)] {
        if !text.is_empty() {
            document.set(name, json!(text));
        }
    }
    for (name, value) in &config.labels {
        document.add("Labels", name, json!(value));
    }
    for (field, names) in [("ExposedPorts", &config.exposed_ports), ("Volumes", &config.volumes)] {
        names.keys().for_each(|name| document.add(field, name, json!({})));
    }
    if let Some(signal) = &config.stop_signal {
        document.set("StopSignal", json!(signal));
    }
    if let Some(check) = &config.healthcheck {
        document.set("Healthcheck", json!(check));
    }
    match document.is_too_long() {
        true => Err(BuildError::Refused("what the container was given is too long".to_owned())),
        false => Ok(document.text()),
    }
}

/// Makes the changes of a commit to a document, each an instruction.
///
/// # Errors
/// What is no instruction, or changes more than a document.
pub fn changed(document: &str, changes: &[String]) -> Result<String> {
    let mut document = Document::read(document).map_err(BuildError::Refused)?;
    let mut says_cmd = false;
    let variables = |env: &[String], name: &str| {
        env.iter()
            .find_map(|entry| entry.split_once('=').filter(|pair| pair.0 == name))
            .map(|pair| pair.1.to_owned())
    };
    for change in changes {
        let step = dockerfile::instruction(change)?;
        let configuring = &mut Configuring {
            document: &mut document,
            says_cmd: &mut says_cmd,
            variables: &variables,
            escape: '\\',
        };
        if matches!(step.instruction, Instruction::OnBuild(_) | Instruction::Maintainer(_)) {
            return Err(BuildError::Refused(format!("a change is one of {OF_COMMITS}")));
        }
        configuring.carry_out(&step.instruction)?;
    }
    Ok(document.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_made_longer_where_the_image_names_none() {
        let before = r#"{"architecture":"amd64","os":"linux"}"#;
        let after = changed(before, &["ENV PATH=/opt/bin:$PATH".to_owned()]).unwrap();
        let after: Value = serde_json::from_str(&after).unwrap();
        let path = after["config"]["Env"][0].as_str().unwrap();
        assert!(path.starts_with("PATH=/opt/bin:/usr/local/sbin:"), "{path}");
        assert_eq!(after["config"]["Env"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn an_image_of_a_container_is_started_as_that_was() {
        let before = r#"{"architecture":"amd64","os":"linux","config":{"Env":["A=1","B=2"],
            "Entrypoint":["e"],"Cmd":["c"],"User":"u","Labels":{"l":"1"}}}"#;
        let made = |config: &Config| -> Value {
            serde_json::from_str(&as_configured(before, config).unwrap()).unwrap()
        };
        let kept = made(&Config::default());
        assert_eq!(kept["config"]["Cmd"], json!(["c"]));
        let config = Config {
            env: vec!["B=3".to_owned(), "C=a=b".to_owned()],
            entrypoint: Some(Vec::new()),
            cmd: Some(vec!["d".to_owned()]),
            working_dir: "/w".to_owned(),
            labels: [("m".to_owned(), "2".to_owned())].into(),
            exposed_ports: [("80/tcp".to_owned(), json!({}))].into(),
            ..Config::default()
        };
        let wanted = json!({
            "Env": ["A=1", "B=3", "C=a=b"], "Cmd": ["d"], "User": "u", "WorkingDir": "/w",
            "Labels": { "l": "1", "m": "2" }, "ExposedPorts": { "80/tcp": {} },
        });
        assert_eq!(made(&config)["config"], wanted);
        let command = Config { cmd: Some(vec!["d".to_owned()]), ..Config::default() };
        assert_eq!(made(&command)["config"]["Entrypoint"], json!(["e"]));
        assert_eq!(made(&command)["config"]["Cmd"], json!(["d"]));
    }

    #[test]
    fn a_configuration_stays_as_short_as_an_images() {
        let before = r#"{"architecture":"amd64","os":"linux"}"#;
        let doubled = ["ENV A=0123456789abcdef".to_owned()];
        let doubled: Vec<String> =
            doubled.into_iter().chain(vec!["ENV A=$A$A".to_owned(); 12]).collect();
        let with = |more: Vec<String>| changed(before, &[doubled.clone(), more].concat());
        with(Vec::new()).unwrap();
        let many =
            |word: &str| (0..40).fold(word.to_owned(), |line, n| line + &format!(" v{n}=$A"));
        for word in ["ENV", "LABEL"] {
            let refused = with(vec![many(word)]).unwrap_err().to_string();
            assert!(refused.contains("at most"), "{refused}");
            let singly = (0..80).map(|n| format!("{word} v{n}=$A")).collect();
            let refused = with(singly).unwrap_err().to_string();
            assert!(refused.contains("too long"), "{refused}");
        }
        changed(before, &["EXPOSE 1-65535".to_owned()]).unwrap();
    }

    #[test]
    fn changes_are_made_one_after_the_other() {
        let before = r#"{"architecture":"amd64","os":"linux","config":{"Cmd":["a"],"Env":["P=/bin"]},
            "rootfs":{"type":"layers","diff_ids":[]}}"#;
        let make = |changes: &[&str]| {
            let changes: Vec<_> = changes.iter().map(|text| (*text).to_owned()).collect();
            changed(before, &changes).map(|text| serde_json::from_str::<Value>(&text).unwrap())
        };
        let after = make(&[
            "ENV P=$P:/x Q='a b'",
            "ENTRYPOINT [\"e\"]",
            "CMD c d",
            "EXPOSE 80-81 53/udp",
            "LABEL l=v",
            "USER u",
            "WORKDIR /w",
            "WORKDIR x/../y",
            "VOLUME /v",
            "STOPSIGNAL INT",
            "HEALTHCHECK --interval=2s --retries=3 CMD [\"t\"]",
        ]);
        let config = &after.unwrap()["config"];
        assert_eq!(config["Env"], json!(["P=/bin:/x", "Q=a b"]));
        assert_eq!(
            (&config["Entrypoint"], &config["Cmd"]),
            (&json!(["e"]), &json!(["/bin/sh", "-c", "c d"]))
        );
        assert_eq!(config["ExposedPorts"], json!({ "80/tcp": {}, "81/tcp": {}, "53/udp": {} }));
        assert_eq!((&config["User"], &config["WorkingDir"]), (&json!("u"), &json!("/w/y")));
        assert_eq!(
            config["Healthcheck"],
            json!({ "Test": ["CMD", "t"], "Interval": 2_000_000_000, "Retries": 3 })
        );
        // Another entry point is for another program.
        assert!(make(&["ENTRYPOINT e"]).unwrap()["config"]["Cmd"].is_null());
        for (change, word) in [
            ("RUN x", "one of CMD"),
            ("COPY a /b", "one of CMD"),
            ("ONBUILD RUN x", "one of CMD"),
            ("NOPE", "NOPE"),
            ("EXPOSE 0", "EXPOSE 0"),
            ("EXPOSE 9-8", "EXPOSE"),
            ("EXPOSE 80/x", "EXPOSE"),
            ("STOPSIGNAL NOPE", "NOPE"),
            ("HEALTHCHECK --interval=x CMD y", "interval"),
            ("VOLUME \"\"", "VOLUME"),
        ] {
            let why = make(&[change]).unwrap_err().to_string();
            assert!(why.contains(word), "{change}: {why}");
        }
    }
}
