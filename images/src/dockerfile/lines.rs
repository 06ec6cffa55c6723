//! Lines of a Dockerfile: what a backslash joins, comments, and documents that follow a line.

use super::words::raw_words;
use super::{BYTES_MAX, DockerfileError, STEPS_MAX};

/// A document behind a line (`<<NAME`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heredoc {
    pub name: String,
    /// Without the line that ends it.
    pub content: String,
    /// Whether variables are put in: its name has no quotes.
    pub expands: bool,
    /// Whether tabs at the beginning of its lines are taken away.
    pub strips_tabs: bool,
}

/// One instruction as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// Its first line in the file, from 1.
    pub number: usize,
    pub text: String,
    pub heredocs: Vec<Heredoc>,
}

/// What the comments at the beginning say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Directives {
    pub escape: char,
}

/// Documents that one line may have.
const HEREDOCS_MAX: usize = 64;

/// `# name=value` before anything else.
fn directives(text: &str) -> Result<Directives, DockerfileError> {
    let mut found = Directives { escape: '\\' };
    let mut seen: Vec<String> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let Some((name, value)) =
            line.trim().strip_prefix('#').and_then(|comment| comment.split_once('='))
        else {
            break;
        };
        let name = name.trim().to_ascii_lowercase();
        let is_name = |c: char| c.is_ascii_alphanumeric();
        if name.is_empty() || !name.chars().all(is_name) {
            break;
        }
        if seen.contains(&name) {
            return Err(DockerfileError::new(at + 1, format!("{name}= is said twice")));
        }
        match (name.as_str(), value.trim()) {
            ("escape", "\\") => {}
            ("escape", "`") => found.escape = '`',
            ("escape", other) => {
                let why = format!("escape={other}: it must be \\ or `");
                return Err(DockerfileError::new(at + 1, why));
            }
            // Another front end, and rules of style: neither changes what is built here.
            ("syntax" | "check", _) => {}
            // A comment like any other, as whoever wrote it may mean.
            _ => break,
        }
        seen.push(name);
    }
    Ok(found)
}

/// The instructions of a file.
pub(super) fn read(text: &str) -> Result<(Directives, Vec<Line>), DockerfileError> {
    if text.len() as u64 > BYTES_MAX {
        return Err(DockerfileError::new(0, format!("it is longer than {BYTES_MAX} bytes")));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let directives = directives(text)?;
    let mut lines = Vec::new();
    let mut rest = text.lines().enumerate();
    while let Some((at, first)) = rest.next() {
        let first = first.trim_start();
        if first.is_empty() || first.starts_with('#') {
            continue;
        }
        if lines.len() == STEPS_MAX {
            let why = format!("there are more than {STEPS_MAX} instructions");
            return Err(DockerfileError::new(at + 1, why));
        }
        let mut joined = String::new();
        let mut goes_on = join(&mut joined, first, directives.escape);
        while goes_on {
            let Some((_, next)) = rest.next() else { break };
            let bare = next.trim_start();
            if bare.is_empty() || bare.starts_with('#') {
                continue;
            }
            goes_on = join(&mut joined, next, directives.escape);
        }
        let text = joined.trim_end().to_owned();
        let mut heredocs = openings(&text, directives.escape);
        if heredocs.len() > HEREDOCS_MAX {
            let why = format!("more than {HEREDOCS_MAX} documents follow one line");
            return Err(DockerfileError::new(at + 1, why));
        }
        for heredoc in &mut heredocs {
            read_document(heredoc, &mut rest).map_err(|why| DockerfileError::new(at + 1, why))?;
        }
        lines.push(Line { number: at + 1, text, heredocs });
    }
    Ok((directives, lines))
}

/// Adds a line without the escape at its end; whether there was one.
fn join(to: &mut String, line: &str, escape: char) -> bool {
    let bare = line.trim_end_matches([' ', '\t', '\r']);
    match bare.strip_suffix(escape) {
        Some(before) if !before.ends_with(escape) => {
            to.push_str(before);
            true
        }
        _ => {
            to.push_str(line.trim_end_matches('\r'));
            false
        }
    }
}

fn read_document<'a>(
    heredoc: &mut Heredoc,
    rest: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Result<(), String> {
    for (_, line) in rest {
        let line = match heredoc.strips_tabs {
            true => line.trim_start_matches('\t'),
            false => line,
        };
        if line == heredoc.name {
            return Ok(());
        }
        heredoc.content.push_str(line);
        heredoc.content.push('\n');
    }
    Err(format!("the document <<{} does not end", heredoc.name))
}

/// Instructions that documents may follow.
const WITH_DOCUMENTS: [&str; 3] = ["RUN", "COPY", "ADD"];

/// The documents that a line says will follow.
fn openings(text: &str, escape: char) -> Vec<Heredoc> {
    let (first, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let (second, after) = rest.trim_start().split_once(char::is_whitespace).unwrap_or(("", ""));
    let (name, rest) = match first.eq_ignore_ascii_case("ONBUILD") {
        true => (second, after),
        false => (first, rest),
    };
    if !WITH_DOCUMENTS.iter().any(|known| name.eq_ignore_ascii_case(known)) {
        return Vec::new();
    }
    raw_words(rest, escape).iter().filter_map(|word| opening(word)).collect()
}

/// `<<NAME`, `<<-NAME`, `3<<"NAME"`
pub(super) fn opening(word: &str) -> Option<Heredoc> {
    let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
    let (strips_tabs, quoted) = match rest.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    if quoted.is_empty() || quoted.contains(['<', '>', '$', '&', '|', ';', '(']) {
        return None;
    }
    let name: String = quoted.chars().filter(|c| !matches!(c, '"' | '\'' | '\\')).collect();
    let expands = name == quoted;
    let content = String::new();
    (!name.is_empty()).then_some(Heredoc { name, content, expands, strips_tabs })
}
