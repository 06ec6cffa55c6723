//! What is known not to pass, held against what did not.

use std::collections::{BTreeMap, BTreeSet};

/// Reasons as headings, names below them. A name of a script may be followed by the lines of
/// what does not pass in it: `NAME:LINE,LINE`; without them it is any of its lines.
const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suites/not-passed.txt");

/// Where in a test something did not pass, and how: line 0 for all of it.
pub(super) type Failures = BTreeMap<u32, String>;

/// Fails unless what did not pass of a suite, by test, is what the list says of names that begin
/// with `prefix`.
pub(super) fn compare(prefix: &str, found: &BTreeMap<String, Failures>) {
    let list = std::fs::read_to_string(LIST).expect("the list is there");
    let differences = differences(&listed(&list, prefix), found);
    assert!(differences.is_empty(), "not-passed.txt is not right:\n{}", differences.join("\n"));
}

/// The names that begin with `prefix`, with their lines.
fn listed(list: &str, prefix: &str) -> BTreeMap<String, BTreeSet<u32>> {
    let lines = list.lines().map(str::trim);
    let names = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entry = |name: &str| match name.rsplit_once(':') {
        Some((name, lines)) => {
            let line = |line: &str| line.parse().unwrap_or_else(|_| panic!("{name}: {line}?"));
            (name.to_owned(), lines.split(',').map(line).collect())
        }
        None => (name.to_owned(), BTreeSet::new()),
    };
    names.map(entry).filter(|(name, _)| name.starts_with(prefix)).collect()
}

fn differences(
    listed: &BTreeMap<String, BTreeSet<u32>>,
    found: &BTreeMap<String, Failures>,
) -> Vec<String> {
    let mut out = Vec::new();
    let nothing = Failures::new();
    for (name, lines) in listed {
        let found = found.get(name).unwrap_or(&nothing);
        if lines.is_empty() && found.is_empty() {
            out.push(format!("{name} passes, and is listed"));
        }
        for line in lines.iter().filter(|line| !found.contains_key(line)) {
            out.push(format!("{name}:{line} passes, and is listed"));
        }
    }
    for (name, failures) in found {
        let lines = listed.get(name);
        for (line, how) in failures {
            if lines.is_none_or(|lines| !lines.is_empty() && !lines.contains(line)) {
                out.push(format!("{name}:{line} does not pass, and is not listed: {how}"));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(entries: &[(&str, &[u32])]) -> BTreeMap<String, Failures> {
        let failures = |lines: &[u32]| lines.iter().map(|line| (*line, String::new())).collect();
        entries.iter().map(|(name, lines)| ((*name).to_owned(), failures(lines))).collect()
    }

    #[test]
    fn both_ways_of_being_wrong_are_seen() {
        let list = listed("# why\na/one\na/two:3,7\nb/other\n", "a/");
        assert!(differences(&list, &found(&[("a/one", &[5]), ("a/two", &[3, 7])])).is_empty());
        let wrong = [
            found(&[("a/two", &[3, 7])]),
            found(&[("a/one", &[5]), ("a/two", &[3])]),
            found(&[("a/one", &[5]), ("a/two", &[3, 7, 8])]),
            found(&[("a/one", &[5]), ("a/two", &[3, 7]), ("a/new", &[0])]),
        ];
        for found in &wrong {
            assert_eq!(differences(&list, found).len(), 1, "{found:?}");
        }
    }
}
