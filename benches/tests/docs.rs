//! The documents (those at the root and the chapters of the book in `docs/`) against the
//! repository: paths, links and anchors lead somewhere, tests that promises name exist, every
//! verb is explained, every chapter is in the book, and old names of things stay out.
//!
//! What the documents show of the command line is held against the parser in
//! `vmm/cli/src/reference/tests.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Documents outside of the book.
const OUTSIDE: [&str; 6] = [
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "guest-kernel-patches/README.md",
];
const BOOK: &str = "docs/src";
const SUMMARY: &str = "docs/src/SUMMARY.md";
/// Where verbs are explained in words of our own; the command reference is generated.
const COMMANDS: &str = "docs/src/user/commands-by-task.md";
const README_BYTES_MAX: usize = 8192;

/// Names that the field has other words for (see the glossary). A path may have them.
const OLD_WORDS: &str = "apart<t> awake crew detour dormant furnish furnished give_back hurry \
    inheritance keeper lender onlooker rooms seat seats shelf shelves spares stopper unmade \
    unroll unrolled warmth";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn document(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn add_chapters(found: &mut Vec<String>, folder: &str) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true => add_chapters(found, &name),
            false if name.ends_with(".md") => found.push(name),
            false => {}
        }
    }
}

/// The files of the book, the table of contents among them.
fn chapters() -> Vec<String> {
    let mut found = Vec::new();
    add_chapters(&mut found, BOOK);
    found.sort();
    found
}

fn documents() -> Vec<String> {
    OUTSIDE.iter().map(ToString::to_string).chain(chapters()).collect()
}

/// The spans between single backticks, outside of fenced blocks.
fn code_spans(text: &str) -> Vec<&str> {
    let outside = text.split("```").step_by(2);
    outside.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

/// What is neither in a fenced block nor in a code span.
fn prose(text: &str) -> String {
    let outside = text.split("```").step_by(2);
    outside.flat_map(|part| part.split('`').step_by(2)).collect::<Vec<_>>().join(" ")
}

/// The targets of Markdown links that are not web addresses.
fn link_targets(text: &str) -> Vec<String> {
    let text = prose(text);
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The names by which the headings of `text` can be linked to, as mdBook and GitHub make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let outside: String = text.split("```").step_by(2).collect();
    let headings = outside.lines().filter(|line| line.starts_with('#'));
    let mut seen = BTreeMap::<String, usize>::new();
    let mut found = BTreeSet::new();
    for heading in headings {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let name = kept.collect::<String>().replace(' ', "-");
        let count = seen.entry(name.clone()).or_default();
        found.insert(if *count == 0 { name } else { format!("{name}-{count}") });
        *count += 1;
    }
    found
}

/// Where `target`, a link in `document`, leads, below the root; and the anchor there.
fn resolved<'a>(document: &str, target: &'a str) -> (String, Option<&'a str>) {
    let (path, anchor) = match target.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (target, None),
    };
    if path.is_empty() {
        return (document.to_owned(), anchor);
    }
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(name) => parts.push(name.to_str().unwrap()),
            _ => {}
        }
    }
    (parts.join("/"), anchor)
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
    for name in documents() {
        let text = document(&name);
        // A file may be named by where it is beside the document.
        let beside = |path: &str| exists(&resolved(&name, path).0);
        let spans = code_spans(&text).into_iter().filter(|span| is_path(span));
        for path in spans.filter(|path| !exists(path) && !beside(path)) {
            missing.push(format!("{name} names {path}, which does not exist"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn links_and_anchors_in_the_documents_lead_somewhere() {
    let mut dead = Vec::new();
    for name in documents() {
        for target in link_targets(&document(&name)) {
            let (path, anchor) = resolved(&name, &target);
            // What lies outside of the book is not there for who reads it as a site.
            let leaves = name.starts_with(BOOK) && !path.starts_with(BOOK);
            let leads = root().join(&path).is_file()
                && anchor.is_none_or(|anchor| anchors(&document(&path)).contains(anchor));
            if leaves || !leads {
                dead.push(format!("{name} links to {target}, which leads nowhere"));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

/// A promise names its test as `(test: FILE name)` or says `[no test yet]`.
#[test]
fn tests_in_the_documents_exist() {
    let mut seen = 0;
    for name in documents() {
        // A line may end within the words that name a test.
        let text = document(&name).split_whitespace().collect::<Vec<_>>().join(" ");
        for promise in text.split("(test: ").skip(1) {
            let promise = promise.split(')').next().unwrap_or_default().replace('`', "");
            let words: Vec<&str> = promise.split(' ').collect();
            let [file, tests @ ..] = words.as_slice() else { panic!("{name}: an empty promise") };
            let source = fs::read_to_string(root().join(file))
                .unwrap_or_else(|error| panic!("{name} names {file}: {error}"));
            for test in tests {
                let test = test.trim_matches(',');
                assert!(source.contains(&format!("fn {test}(")), "{name}: {file} has no {test}");
                seen += 1;
            }
        }
    }
    assert!(seen > 300, "only {seen} tests are named: were promises lost?");
}

/// Footnotes tie sentences to their tests.
#[test]
fn every_footnote_is_referred_to_and_there() {
    for name in documents() {
        let text = document(&name);
        let label = |rest: &str| rest.split(']').next().unwrap_or_default().to_owned();
        let (mut used, mut there) = (BTreeSet::new(), BTreeSet::new());
        for line in text.lines() {
            let own = line.strip_prefix("[^").filter(|rest| rest.contains("]: ")).map(label);
            let all = line.split("[^").skip(1).map(label);
            used.extend(all.skip(usize::from(own.is_some())));
            if let Some(own) = own {
                assert!(there.insert(own.clone()), "{name} has two footnotes {own}");
            }
        }
        assert_eq!(used, there, "{name}: footnotes that are used, and those that are there");
    }
}

/// The numbers of patches that documents name, which are those of the series.
#[test]
fn patches_in_the_documents_exist() {
    let series = document("guest-kernel-patches/series");
    let is_number = |word: &str| word.len() == 4 && word.chars().all(|c| c.is_ascii_digit());
    for name in documents() {
        let text = document(&name).split_whitespace().collect::<Vec<_>>().join(" ");
        for named in text.split("patch ").skip(1) {
            let number = named.get(..4).filter(|word| is_number(word));
            let is_there = |number| series.lines().any(|line| line.starts_with(number));
            assert!(number.is_none_or(is_there), "{name} names patch {number:?}");
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
fn the_book_explains_every_verb() {
    let explained = document(COMMANDS);
    let verbs = verbs();
    assert!(verbs.len() > 10, "the help was not understood: {verbs:?}");
    for verb in verbs {
        assert!(explained.contains(&format!("exocell {verb}")), "{COMMANDS} lacks exocell {verb}");
    }
}

#[test]
fn every_chapter_is_in_the_table_of_contents_once() {
    let listed = link_targets(&document(SUMMARY));
    let mut listed: Vec<String> = listed.iter().map(|target| resolved(SUMMARY, target).0).collect();
    listed.sort();
    let there: Vec<String> = chapters().into_iter().filter(|name| name != SUMMARY).collect();
    assert_eq!(listed, there, "chapters that {SUMMARY} lists, and those that are there");
}

#[test]
fn the_readme_is_short_and_names_the_two_commands() {
    let readme = document("README.md");
    let bytes = readme.len();
    assert!(bytes <= README_BYTES_MAX, "README.md has {bytes} bytes; the book takes the rest");
    for command in ["make demo", "make test"] {
        assert!(readme.lines().any(|line| line.starts_with(command)), "README.md lacks {command}");
    }
}

/// The old words in `text`; a code span may have them if it is a path.
fn old_words(text: &str) -> Vec<String> {
    let paths = code_spans(text).into_iter().filter(|span| span.contains('/'));
    let text = paths.fold(text.to_owned(), |text, path| text.replace(&format!("`{path}`"), ""));
    let text = text.to_lowercase();
    let words = text.split(|c: char| !(c.is_alphanumeric() || "_<>".contains(c)));
    words.filter(|word| OLD_WORDS.split(' ').any(|old| old == *word)).map(str::to_owned).collect()
}

#[test]
fn documents_call_things_by_the_names_of_the_field() {
    let mut found = Vec::new();
    for name in documents() {
        let old = old_words(&document(&name));
        if !old.is_empty() {
            found.push(format!("{name}: {}", old.join(", ")));
        }
    }
    assert!(found.is_empty(), "old names of things (see the glossary):\n{}", found.join("\n"));
}

#[test]
fn spans_paths_links_and_words_are_told_apart() {
    assert_eq!(code_spans("a `b` c\n```\n`no`\n```\n`d/e`"), ["b", "d/e"]);
    assert_eq!(link_targets("[a](b.md) [c](https://d) [e](#f) `[g](h)`"), ["b.md", "#f"]);
    assert!(is_path("vmm/cell") && is_path("deny.rs") && is_path("benches/tests/layers.rs"));
    assert!(!is_path("make demo") && !is_path("--rm") && !is_path("/var/lib/exocell"));
    assert!(!exists("vmm/no-such-file.rs"));
    assert_eq!(resolved("docs/src/a/b.md", "../c.md#d"), ("docs/src/c.md".to_owned(), Some("d")));
    assert_eq!(resolved("docs/src/a.md", "#d"), ("docs/src/a.md".to_owned(), Some("d")));
    let expected = ["one-two", "one-two-1", "a-b_c"].map(str::to_owned);
    assert_eq!(anchors("# One, two\n## `One two`\n```\n# no\n```\n### A b_c?"), expected.into());
    assert_eq!(old_words("A Keeper of `a/rooms` and `rooms`, not a_keeper"), ["keeper", "rooms"]);
}
