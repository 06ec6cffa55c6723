//! From lines to instructions.

use std::collections::BTreeMap;

use super::lines::{self, Heredoc, Line};
use super::words::raw_words;
use super::{
    Check, Dockerfile, DockerfileError, Instruction, Mount, MountKind, Program, Stage, Step,
    Transfer,
};

type Result<T> = std::result::Result<T, String>;

/// Options of an instruction, and what is behind them.
struct Arguments<'a> {
    options: Vec<(String, String)>,
    rest: &'a str,
    heredocs: Vec<Heredoc>,
    escape: char,
}

pub(super) fn file(text: &str) -> std::result::Result<Dockerfile, DockerfileError> {
    let (directives, lines) = lines::read(text)?;
    let mut file =
        Dockerfile { globals: Vec::new(), stages: Vec::new(), escape: directives.escape };
    for line in lines {
        let number = line.number;
        add(&mut file, line).map_err(|why| DockerfileError::new(number, why))?;
    }
    match file.stages.is_empty() {
        true => Err(DockerfileError::new(0, "it has no FROM: name the image to begin with")),
        false => Ok(file),
    }
}

pub(super) fn alone(text: &str) -> std::result::Result<Step, DockerfileError> {
    let (directives, lines) = lines::read(text)?;
    let [line] = &lines[..] else {
        return Err(DockerfileError::new(1, "one instruction is wanted"));
    };
    step(line.clone(), directives.escape).map_err(|why| DockerfileError::new(1, why))
}

fn add(file: &mut Dockerfile, line: Line) -> Result<()> {
    let (name, rest) = split_name(&line.text);
    if name == "FROM" {
        let stage = stage(&line, rest, file.escape)?;
        file.stages.push(stage);
        return Ok(());
    }
    let step = step(line, file.escape)?;
    match (file.stages.last_mut(), &step.instruction) {
        (Some(stage), _) => stage.steps.push(step),
        (None, Instruction::Arg(_)) => file.globals.push(step),
        (None, _) => return Err(format!("{name} is before the first FROM; only ARG may be")),
    }
    Ok(())
}

/// The name of an instruction in capitals, and what is behind it.
fn split_name(text: &str) -> (String, &str) {
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (name.to_ascii_uppercase(), rest.trim())
}

fn stage(line: &Line, rest: &str, escape: char) -> Result<Stage> {
    let arguments = arguments(rest, Vec::new(), escape)?;
    let mut platform = None;
    for (name, value) in arguments.options {
        match name.as_str() {
            "platform" => platform = Some(value),
            other => return Err(format!("FROM has no option --{other}")),
        }
    }
    let words: Vec<&str> = arguments.rest.split_whitespace().collect();
    let (image, name) = match words[..] {
        [image] => (image, None),
        [image, as_, name] if as_.eq_ignore_ascii_case("AS") => (image, Some(name)),
        _ => return Err("FROM wants an image, and may have AS and a name".to_owned()),
    };
    let name = name.map(str::to_ascii_lowercase);
    let is_plain = |name: &String| {
        name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    if let Some(name) = name.as_ref().filter(|name| !is_plain(name)) {
        return Err(format!("{name:?} is no name of a stage; begin with a letter"));
    }
    Ok(Stage {
        line: line.number,
        text: line.text.clone(),
        image: image.to_owned(),
        name,
        platform,
        steps: Vec::new(),
    })
}

fn step(line: Line, escape: char) -> Result<Step> {
    let (name, rest) = split_name(&line.text);
    let wanted = || format!("{name} wants something behind it");
    if rest.is_empty() && !matches!(name.as_str(), "CMD" | "ENTRYPOINT") {
        return Err(wanted());
    }
    let arguments = arguments(rest, line.heredocs, escape)?;
    let none = |arguments: &Arguments<'_>| match arguments.options.first() {
        Some((option, _)) => Err(format!("{name} has no option --{option}")),
        None => Ok(()),
    };
    if !matches!(name.as_str(), "RUN" | "COPY" | "ADD" | "HEALTHCHECK") {
        none(&arguments)?;
    }
    let text = arguments.rest;
    let instruction = match name.as_str() {
        "RUN" => run(arguments)?,
        "COPY" => Instruction::Copy(transfer(arguments, true)?),
        "ADD" => Instruction::Add(transfer(arguments, false)?),
        "ENV" => Instruction::Env(pairs(text, escape, "ENV")?),
        "LABEL" => Instruction::Label(pairs(text, escape, "LABEL")?),
        "ARG" => Instruction::Arg(args(text, escape)?),
        "WORKDIR" => Instruction::Workdir(text.to_owned()),
        "USER" => Instruction::User(text.to_owned()),
        "EXPOSE" => Instruction::Expose(raw_words(text, escape)),
        "VOLUME" => Instruction::Volume(match json(text) {
            Some(words) => words,
            None => raw_words(text, escape),
        }),
        "ENTRYPOINT" => Instruction::Entrypoint(program(text)),
        "CMD" => Instruction::Cmd(program(text)),
        "SHELL" => match json(text) {
            Some(words) if !words.is_empty() => Instruction::Shell(words),
            _ => return Err("SHELL wants a list in JSON, like [\"/bin/sh\", \"-c\"]".to_owned()),
        },
        "STOPSIGNAL" => Instruction::StopSignal(text.to_owned()),
        "HEALTHCHECK" => Instruction::Healthcheck(check(arguments)?),
        "ONBUILD" => {
            let (inner, _) = split_name(text);
            if matches!(inner.as_str(), "ONBUILD" | "FROM" | "MAINTAINER") {
                return Err(format!("ONBUILD {inner} is not allowed"));
            }
            let number = line.number;
            step(Line { number, text: text.to_owned(), heredocs: arguments.heredocs }, escape)?;
            Instruction::OnBuild(text.to_owned())
        }
        "MAINTAINER" => Instruction::Maintainer(text.to_owned()),
        "FROM" => return Err("FROM is none of these".to_owned()),
        _ => return Err(format!("{name:?} is no instruction")),
    };
    Ok(Step { line: line.number, text: line.text, instruction })
}

/// Takes the options off: words that begin with two dashes, before anything else.
fn arguments(rest: &str, heredocs: Vec<Heredoc>, escape: char) -> Result<Arguments<'_>> {
    let mut options = Vec::new();
    let mut rest = rest.trim_start();
    while let Some(option) = rest.strip_prefix("--") {
        let end = option.find(char::is_whitespace).unwrap_or(option.len());
        let (word, after) = option.split_at(end);
        rest = after.trim_start();
        if word.is_empty() {
            break;
        }
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        options.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    Ok(Arguments { options, rest, heredocs, escape })
}

/// A list of words in JSON; `None` where it is none.
fn json(text: &str) -> Option<Vec<String>> {
    if !text.starts_with('[') {
        return None;
    }
    serde_json::from_str(text).ok()
}

fn program(text: &str) -> Program {
    json(text).map_or_else(|| Program::Line(text.to_owned()), Program::Words)
}

fn run(arguments: Arguments<'_>) -> Result<Instruction> {
    let (mut mounts, mut network) = (Vec::new(), None);
    for (name, value) in arguments.options {
        match name.as_str() {
            "mount" => mounts.push(mount(&value)?),
            "network" => match value.as_str() {
                "none" | "default" => network = Some(value),
                "host" => {
                    return Err("RUN --network=host: a cell has no part in the host's network; \
                                grant what it needs (--allow-net)"
                        .to_owned());
                }
                _ => return Err(format!("RUN --network={value}: none or default")),
            },
            "security" if value == "sandbox" => {}
            "security" => {
                return Err("RUN --security=insecure: a RUN is root of its own kernel as it is; \
                            leave it out"
                    .to_owned());
            }
            other => return Err(format!("RUN has no option --{other}")),
        }
    }
    if arguments.rest.is_empty() {
        return Err("RUN wants a command".to_owned());
    }
    let program = program(arguments.rest);
    Ok(Instruction::Run { program, heredocs: arguments.heredocs, mounts, network })
}

/// What each kind of mount knows.
const MOUNT_OPTIONS: [(MountKind, &str, &[&str]); 4] = [
    (MountKind::Bind, "bind", &["target", "source", "from", "readonly"]),
    (MountKind::Cache, "cache", &["target", "id", "readonly", "sharing", "mode", "uid", "gid"]),
    (MountKind::Tmpfs, "tmpfs", &["target", "size"]),
    (MountKind::Secret, "secret", &["target", "id", "required", "mode", "uid", "gid", "env"]),
];

fn mount(text: &str) -> Result<Mount> {
    let mut options = BTreeMap::new();
    for part in text.split(',') {
        let (name, value) = part.split_once('=').unwrap_or((part, "true"));
        let name = name.to_ascii_lowercase();
        let (name, value) = match name.as_str() {
            "dst" | "destination" => ("target", value),
            "src" => ("source", value),
            "ro" => ("readonly", value),
            "rw" | "readwrite" => ("readonly", if value == "false" { "true" } else { "false" }),
            other => (other, value),
        };
        if options.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(format!("RUN --mount={text}: {name} is said twice"));
        }
    }
    let kind = options.remove("type").unwrap_or_else(|| "bind".to_owned());
    if kind == "ssh" {
        return Err("RUN --mount=type=ssh: a cell reaches no agent of the host; give a key as a \
                    secret (--mount=type=secret)"
            .to_owned());
    }
    let known = MOUNT_OPTIONS.iter().find(|(_, name, _)| *name == kind);
    let Some((kind, name, known)) = known else {
        return Err(format!("RUN --mount: {kind} is no type; bind, cache, tmpfs or secret"));
    };
    if let Some(other) = options.keys().find(|option| !known.contains(&option.as_str())) {
        return Err(format!("RUN --mount=type={name} has no option {other}"));
    }
    if !options.contains_key("target") && *kind != MountKind::Secret {
        return Err(format!("RUN --mount=type={name} wants a target"));
    }
    Ok(Mount { kind: *kind, options })
}

fn transfer(arguments: Arguments<'_>, is_copy: bool) -> Result<Transfer> {
    let what = if is_copy { "COPY" } else { "ADD" };
    let mut transfer = Transfer { heredocs: arguments.heredocs, ..Transfer::default() };
    for (name, value) in arguments.options {
        match (name.as_str(), is_copy) {
            ("from", true) => transfer.from = Some(value),
            ("chown", _) => transfer.owner = Some(value),
            ("chmod", _) => transfer.mode = Some(value),
            // Layers are files of their own here in any case.
            ("link", _) if matches!(value.as_str(), "" | "true" | "false") => {}
            ("parents" | "exclude", _) => {
                return Err(format!(
                    "{what} --{name} is not done here; name the files, or list others in \
                     .dockerignore"
                ));
            }
            ("keep-git-dir" | "checksum" | "unpack", false) => {
                return Err(format!(
                    "ADD --{name} is for what is fetched, which ADD does not here"
                ));
            }
            (other, _) => return Err(format!("{what} has no option --{other}")),
        }
    }
    let mut words = match json(arguments.rest) {
        Some(words) => words,
        None => raw_words(arguments.rest, arguments.escape),
    };
    let to = words.pop().filter(|_| !words.is_empty());
    transfer.to = to.ok_or_else(|| format!("{what} wants files and where they go"))?;
    let is_document = |word: &String| lines::opening(word).is_some();
    transfer.sources = words.into_iter().filter(|word| !is_document(word)).collect();
    let is_fetched = |word: &&String| word.contains("://") || word.starts_with("git@");
    if let Some(address) = transfer.sources.iter().find(is_fetched) {
        return Err(format!(
            "{what} {address}: nothing is fetched on the host; fetch it in a RUN that may reach it \
             (--allow-net), or put the file into the context"
        ));
    }
    if transfer.from.is_some() && !transfer.heredocs.is_empty() {
        return Err(format!("{what} --from has no documents"));
    }
    Ok(transfer)
}

/// `NAME=VALUE ...`, or `NAME VALUE` of old files.
fn pairs(text: &str, escape: char, what: &str) -> Result<Vec<(String, String)>> {
    let words = raw_words(text, escape);
    let first = words.first().map_or("", String::as_str);
    if !first.contains('=') {
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        return match value.trim().is_empty() {
            true => Err(format!("{what} {name} has no value; write {what} {name}=VALUE")),
            false => Ok(vec![(name.to_owned(), value.trim().to_owned())]),
        };
    }
    let pair = |word: &String| match word.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("{what} {word} is not NAME=VALUE")),
    };
    words.iter().map(pair).collect()
}

fn args(text: &str, escape: char) -> Result<Vec<(String, Option<String>)>> {
    let one = |word: &String| {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.as_str(), None),
        };
        match name.is_empty() {
            true => Err(format!("ARG {word} has no name")),
            false => Ok((name.to_owned(), value)),
        }
    };
    raw_words(text, escape).iter().map(one).collect()
}

fn check(arguments: Arguments<'_>) -> Result<Option<Check>> {
    const OPTIONS: [&str; 5] = ["interval", "timeout", "start-period", "start-interval", "retries"];
    let mut options = BTreeMap::new();
    for (name, value) in arguments.options {
        if !OPTIONS.contains(&name.as_str()) {
            return Err(format!("HEALTHCHECK has no option --{name}"));
        }
        options.insert(name, value);
    }
    let (kind, rest) = split_name(arguments.rest);
    match (kind.as_str(), rest) {
        ("NONE", "") if options.is_empty() => Ok(None),
        ("NONE", _) => Err("HEALTHCHECK NONE has nothing else".to_owned()),
        ("CMD", "") => Err("HEALTHCHECK CMD wants a command".to_owned()),
        ("CMD", text) => Ok(Some(Check { program: program(text), options })),
        (other, _) => Err(format!("HEALTHCHECK {other}: CMD or NONE")),
    }
}
