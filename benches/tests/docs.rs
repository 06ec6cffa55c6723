//! README.md, ARCHITECTURE.md and SECURITY.md against the repository: paths exist, tests
//! that promises name exist, and every verb is explained.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const DOCUMENTS: [&str; 3] = ["README.md", "ARCHITECTURE.md", "SECURITY.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn document(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The spans between single backticks, outside of fenced blocks.
fn code_spans(text: &str) -> Vec<&str> {
    let outside = text.split("```").step_by(2);
    outside.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

/// The targets of Markdown links that are not web addresses.
fn link_targets(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://") && !target.starts_with('#')).collect()
}

/// Whether `span` reads as a path of the repository: it starts in one of the
/// top-level folders, or is a file that ends like one of ours.
fn is_path(span: &str) -> bool {
    if span.starts_with("target/") {
        return false; // what the build makes, not what the repository holds
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-*".contains(c);
    if !span.chars().all(plain) || span.starts_with(['/', '.', '-']) {
        return false;
    }
    let first = span.split('/').next().unwrap_or_default();
    let folder = span.contains('/') && root().join(first).is_dir();
    folder || [".rs", ".md", ".sh"].iter().any(|end| span.ends_with(end))
}

fn exists(path: &str) -> bool {
    match path.split_once('*') {
        Some((before, _)) => root().join(before).parent().is_some_and(Path::exists),
        None => root().join(path).exists(),
    }
}

#[test]
fn paths_in_the_documents_exist() {
    let mut missing = Vec::new();
    for name in DOCUMENTS {
        let text = document(name);
        let spans = code_spans(&text).into_iter().filter(|span| is_path(span));
        for path in spans.chain(link_targets(&text)).filter(|path| !exists(path)) {
            missing.push(format!("{name} names {path}, which does not exist"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// A promise names its test as `(test: FILE name)` or says `[no test yet]`.
#[test]
fn tests_in_the_documents_exist() {
    for name in DOCUMENTS {
        let text = document(name);
        for promise in text.split("(test: ").skip(1) {
            let promise = promise.split(')').next().unwrap_or_default().replace('`', "");
            let words: Vec<&str> = promise.split_whitespace().collect();
            let [file, tests @ ..] = words.as_slice() else { panic!("{name}: an empty promise") };
            let source = fs::read_to_string(root().join(file))
                .unwrap_or_else(|error| panic!("{name} names {file}: {error}"));
            for test in tests {
                let test = test.trim_matches(',');
                assert!(source.contains(&format!("fn {test}(")), "{name}: {file} has no {test}");
            }
        }
    }
}

/// The verbs of `exocell --help`.
fn verbs() -> Vec<String> {
    let program = std::env::var("EXOCELL_TEST_BIN")
        .expect("EXOCELL_TEST_BIN names no exocell; run: make test");
    let help = Command::new(program).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned))
        .filter(|verb| !verb.is_empty() && verb != "help")
        .collect()
}

#[test]
fn the_readme_shows_every_verb() {
    let readme = document("README.md");
    let verbs = verbs();
    assert!(verbs.len() > 10, "the help was not understood: {verbs:?}");
    for verb in verbs {
        assert!(readme.contains(&format!("exocell {verb}")), "README.md lacks exocell {verb}");
    }
}

#[test]
fn spans_and_paths_are_told_apart() {
    assert_eq!(code_spans("a `b` c\n```\n`no`\n```\n`d/e`"), ["b", "d/e"]);
    assert_eq!(link_targets("[a](b.md) [c](https://d) [e](#f)"), ["b.md"]);
    assert!(is_path("vmm/cell") && is_path("deny.rs") && is_path("benches/tests/layers.rs"));
    assert!(!is_path("make demo") && !is_path("--rm") && !is_path("/var/lib/exocell"));
    assert!(!exists("vmm/no-such-file.rs"));
}
