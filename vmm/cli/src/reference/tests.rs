//! The documents beside the parser: the reference is what it says, and command lines that
//! they show are command lines.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::{commands, markdown};
use crate::args::{Cli, command};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn add(found: &mut Vec<PathBuf>, folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => add(found, &path),
            false if path.extension().is_some_and(|end| end == "md") => found.push(path),
            false => {}
        }
    }
}

/// Documents at the root and chapters of the book, with their text.
fn documents() -> Vec<(PathBuf, String)> {
    let top = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name));
    let mut found = top.to_vec();
    add(&mut found, &root().join("docs/src"));
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        (path, text)
    };
    found.into_iter().map(read).collect()
}

#[test]
fn the_reference_is_what_the_parser_says() {
    let path = root().join("docs/src/reference/commands.md");
    let told = fs::read_to_string(&path).unwrap_or_default();
    let remedy = "run: exocell man --markdown > docs/src/reference/commands.md";
    assert!(told == markdown(command()), "{} is out of date; {remedy}", path.display());
}

#[test]
fn every_command_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    clap_mangen::generate_to(command(), folder.path()).unwrap();
    for inner in commands(&command()) {
        let page = folder.path().join(format!("exocell-{}.1", inner.get_name()));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page:?}: {error}"));
        assert!(text.contains(".SH SYNOPSIS"), "{page:?} has no synopsis");
    }
}

/// A word of a script, or what stands between commands.
#[derive(Debug, PartialEq)]
enum Token {
    Word(String),
    Between,
    /// What comes next is a file, not an argument.
    Redirect,
}

/// Reads `script` as a shell does, but for what documents do not show: no expansions.
fn tokens(script: &str) -> Vec<Token> {
    let (mut found, mut word) = (Vec::new(), None::<String>);
    let mut chars = script.chars().peekable();
    while let Some(one) = chars.next() {
        let ends = matches!(one, ' ' | '\t' | '\n' | '|' | '&' | ';' | '<' | '>' | '(' | ')');
        if ends {
            found.extend(word.take().map(Token::Word));
        }
        match one {
            '\'' | '"' => {
                let inner = chars.by_ref().take_while(|next| *next != one);
                word.get_or_insert_default().extend(inner);
            }
            '\\' => word.get_or_insert_default().extend(chars.next().filter(|next| *next != '\n')),
            '#' if word.is_none() => while chars.next_if(|next| *next != '\n').is_some() {},
            '<' | '>' => found.push(Token::Redirect),
            ' ' | '\t' => {}
            _ if ends => found.push(Token::Between),
            _ => word.get_or_insert_default().push(one),
        }
        // A backslash at the end of a line alone is no word.
        word = word.filter(|word| !word.is_empty() || matches!(one, '\'' | '"'));
    }
    found.extend(word.map(Token::Word));
    found
}

/// The command lines of `script` that call `exocell`.
fn calls(script: &str) -> Vec<Vec<String>> {
    let all = tokens(script);
    let words = |tokens: &[Token]| {
        let mut is_file = false;
        let mut words = Vec::new();
        for token in tokens {
            match token {
                Token::Word(word) if !std::mem::take(&mut is_file) => words.push(word.clone()),
                Token::Redirect => is_file = true,
                _ => {}
            }
        }
        words
    };
    let is_before = |word: &String| {
        let assigns = word.split_once('=').is_some_and(|(name, _)| {
            name.chars().all(|one| one.is_ascii_uppercase() || one == '_')
        });
        assigns || word == "$"
    };
    let lines = all.split(|token| *token == Token::Between).map(words);
    let lines = lines.map(|line| line.into_iter().skip_while(is_before).collect::<Vec<_>>());
    let ours = |line: &Vec<String>| {
        line.first().is_some_and(|first| first.rsplit('/').next() == Some("exocell"))
    };
    lines.filter(ours).collect()
}

/// The fenced blocks of `text` that are scripts.
fn scripts(text: &str) -> Vec<&str> {
    let blocks = text.split("\n```").skip(1).step_by(2);
    let script = |block: &'static str| move |text: &&str| text.lines().next() == Some(block);
    let (sh, console) = (script("sh"), script("console"));
    let scripts = blocks.filter(|block| sh(block) || console(block));
    scripts.filter_map(|block| block.split_once('\n')).map(|(_, script)| script).collect()
}

/// The spans between single backticks, outside of fenced blocks.
fn spans(text: &str) -> Vec<&str> {
    let outside = text.split("```").step_by(2);
    outside.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn command_lines_of_the_documents_are_understood() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (path, text) in documents() {
        for line in scripts(&text).into_iter().flat_map(calls) {
            seen += 1;
            if let Err(error) = Cli::try_parse_from(&line) {
                let shown =
                    matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
                if !shown {
                    wrong.push(format!("{}: {}\n{error}", path.display(), line.join(" ")));
                }
            }
        }
    }
    assert!(seen > 50, "only {seen} command lines were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whether a command line lacks something but has nothing that is not known.
fn only_lacks(error: &clap::Error) -> bool {
    match error.kind() {
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion => true,
        // A flag whose value is not said.
        ErrorKind::InvalidValue => {
            let value = error.get(ContextKind::InvalidValue);
            matches!(value, Some(ContextValue::String(value)) if value.is_empty())
        }
        _ => false,
    }
}

/// A command that is named inside a sentence may lack what it needs.
#[test]
fn commands_that_sentences_name_are_understood() {
    let mut wrong = Vec::new();
    for (path, text) in documents() {
        let named = spans(&text).into_iter().filter(|span| span.starts_with("exocell "));
        for span in named.filter(|span| !span.contains('…')) {
            for line in calls(&span.replace('\n', " ")) {
                let error = Cli::try_parse_from(&line).err();
                if let Some(error) = error.filter(|error| !only_lacks(error)) {
                    wrong.push(format!("{}: {span}\n{error}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn scripts_are_read_as_a_shell_reads_them() {
    let script = "A=b exocell run --allow-net '*.a:1' \\\n  image sh -c \"x | y\" > f & # exocell no\n\
                  tar c | target/release/exocell cp - job:/x && echo exocell\n";
    let found = calls(script);
    let expected = [
        vec!["exocell", "run", "--allow-net", "*.a:1", "image", "sh", "-c", "x | y"],
        vec!["target/release/exocell", "cp", "-", "job:/x"],
    ];
    assert_eq!(found, expected);
    assert_eq!(scripts("a\n```sh\nexocell ps\n```\nb\n```text\nexocell no\n```\n"), ["exocell ps"]);
    assert_eq!(spans("`a b` and\n```sh\n`c`\n```\n"), ["a b"]);
}
