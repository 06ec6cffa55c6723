//! What test runners print, read as verdicts: the log parsers that a dataset
//! names, for the runners of its Python repositories.

use std::collections::BTreeMap;

/// The verdict on one test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Passed,
    Failed,
    Skipped,
    Error,
    ExpectedFailure,
}

impl Status {
    const ALL: [(&'static str, Self); 5] = [
        ("PASSED", Self::Passed),
        ("FAILED", Self::Failed),
        ("SKIPPED", Self::Skipped),
        ("ERROR", Self::Error),
        ("XFAIL", Self::ExpectedFailure),
    ];

    fn of_word(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, status)| *status)
    }
}

/// The verdicts by test; of two on one test the later holds.
pub type Verdicts = BTreeMap<String, Status>;

/// Reads verdicts out of a log.
pub type Parser = fn(&str) -> Verdicts;

/// The parser that a dataset calls `name`.
pub fn find(name: &str) -> Option<Parser> {
    match name.strip_prefix("parse_log_")? {
        "pytest" | "astroid" | "flask" | "marshmallow" | "matplotlib" | "pvlib" | "pyvista"
        | "sqlfluff" | "xarray" => Some(match name {
            "parse_log_matplotlib" => matplotlib,
            _ => pytest,
        }),
        "pytest_options" | "pydicom" | "requests" | "pylint" => Some(pytest_options),
        "pytest_v2" | "astropy" | "scikit" | "sphinx" => Some(pytest_v2),
        "django" => Some(django),
        "seaborn" => Some(seaborn),
        "sympy" => Some(sympy),
        _ => None,
    }
}

/// The summary's lines: `PASSED path::test`.
fn pytest(log: &str) -> Verdicts {
    log.lines()
        .filter_map(|line| summary(line).map(|(name, status)| (name.to_owned(), status)))
        .collect()
}

/// A line of pytest's short summary. `SKIPPED [2] path` counts skipped tests
/// and names none.
fn summary(line: &str) -> Option<(&str, Status)> {
    let mut words = line.split_whitespace();
    let first = words.next()?;
    let status = Status::of_word(first).filter(|_| line.starts_with(first))?;
    let mut name = words.next()?;
    if status == Status::Failed && name == "-" {
        name = words.next()?;
    }
    (status != Status::Skipped || !is_count(name)).then_some((name, status))
}

/// `[12]`
fn is_count(word: &str) -> bool {
    let digits = word.strip_prefix('[').and_then(|word| word.strip_suffix(']'));
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// As pytest, but of a parameter that is a path only the last part counts.
fn pytest_options(log: &str) -> Verdicts {
    pytest(log).into_iter().map(|(name, status)| (without_folders(&name), status)).collect()
}

fn without_folders(name: &str) -> String {
    let parameter = name
        .split_once('[')
        .and_then(|(test, rest)| rest.rsplit_once(']').map(|(parameter, _)| (test, parameter)));
    match parameter {
        None => name.to_owned(),
        Some((test, path))
            if path.starts_with('/') && !path.starts_with("//") && !path.contains('*') =>
        {
            let last = path.rsplit('/').next().unwrap_or_default();
            format!("{test}[/{last}]")
        }
        Some((test, parameter)) => format!("{test}[{parameter}]"),
    }
}

/// Coloured summaries, names with spaces, and the lines of older releases,
/// which end with the verdict.
fn pytest_v2(log: &str) -> Verdicts {
    let mut found = Verdicts::new();
    for line in log.split('\n') {
        let line = without_colours(line);
        let begins = Status::ALL.iter().any(|(name, _)| line.starts_with(name));
        let line = match line.split_once(" - ") {
            Some((front, _)) if line.starts_with("FAILED") => front,
            _ => &line,
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        let (verdict, name) = match words.as_slice() {
            [verdict, name @ ..] if begins => (verdict, name),
            [name @ .., verdict] => (verdict, name),
            [] => continue,
        };
        match Status::of_word(verdict) {
            Some(Status::Skipped) if begins && name.first().is_some_and(|word| is_count(word)) => {}
            Some(status) if !name.is_empty() => {
                found.insert(name.join(" "), status);
            }
            _ => {}
        }
    }
    found
}

/// Without `[31m` and control characters.
fn without_colours(line: &str) -> String {
    let mut rest = line;
    let mut kept = String::new();
    while let Some(at) = rest.find('[') {
        let after = &rest[at + 1..];
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        kept.push_str(&rest[..at]);
        if digits > 0 && after[digits..].starts_with('m') {
            rest = &after[digits + 1..];
        } else {
            kept.push('[');
            rest = after;
        }
    }
    kept.push_str(rest);
    kept.retain(|c| !matches!(c, '\u{1}'..='\u{1f}'));
    kept
}

fn matplotlib(log: &str) -> Verdicts {
    pytest(&log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))
}

/// `FAILED test`, `PASSED test` and `test PASSED 10%`.
fn seaborn(log: &str) -> Verdicts {
    let verdict = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (first, second) = (words.first()?, words.get(1)?);
        if line.starts_with("FAILED") {
            Some((second.to_string(), Status::Failed))
        } else if line.contains(" PASSED ") {
            (*second == "PASSED").then(|| (first.to_string(), Status::Passed))
        } else {
            line.starts_with("PASSED").then(|| (second.to_string(), Status::Passed))
        }
    };
    log.lines().filter_map(verdict).collect()
}

/// `test_name ok`, and `____ path.py:test_name ____` above what failed.
fn sympy(log: &str) -> Verdicts {
    let headings = log.lines().filter_map(heading).map(|name| (name, Status::Failed));
    let mut found: Verdicts = headings.collect();
    for line in log.lines().map(str::trim).filter(|line| line.starts_with("test_")) {
        let status = match line.rsplit_once(' ').map(|(_, last)| last) {
            Some("E") => Status::Error,
            Some("F") => Status::Failed,
            Some("ok") => Status::Passed,
            _ => continue,
        };
        let name = line.split_whitespace().next().unwrap_or_default();
        found.insert(name.to_owned(), status);
    }
    found
}

fn heading(line: &str) -> Option<String> {
    let (_, rest) = line.split_once(' ')?;
    let (name, _) = rest.rsplit_once(' ')?;
    name.contains(".py:").then(|| name.to_owned())
}

/// `test (module) ... ok`, where the verdict may come lines later.
fn django(log: &str) -> Verdicts {
    let mut found = Verdicts::new();
    let mut before: Option<&str> = None;
    for line in log.lines().map(str::trim) {
        let mut set = |name: &str, status| found.insert(name.to_owned(), status);
        if line.contains("--version is equivalent to version") {
            set("--version is equivalent to version", Status::Passed);
        }
        if let Some((name, _)) = line.split_once(" ... ") {
            before = Some(name);
        }
        let passed =
            [" ... ok", " ... OK", " ...  OK"].iter().find_map(|end| line.strip_suffix(end));
        if let Some(name) = passed {
            // One test of a migration prints its name behind the migration's.
            let migration = name.strip_prefix("Applying sites.0002_alter_domain_unique...");
            set(
                migration.filter(|n| n.starts_with("test_no_migrations")).unwrap_or(name),
                Status::Passed,
            );
        }
        if let Some((name, _)) = line.split_once(" ... skipped") {
            set(name, Status::Skipped);
        }
        for (word, status) in [("FAIL", Status::Failed), ("ERROR", Status::Error)] {
            if let Some(name) = line.strip_suffix(word).and_then(|name| name.strip_suffix(" ... "))
            {
                set(name, status);
            }
            let heading = line.strip_prefix(word).and_then(|rest| rest.strip_prefix(':'));
            if let Some(name) = heading.and_then(|rest| rest.split_whitespace().next()) {
                set(name, status);
            }
        }
        if let Some(name) = before.filter(|_| line.starts_with("ok")) {
            set(name, Status::Passed);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn reads(parser: &str, log: &str, expected: &[(&str, Status)]) {
        let found = find(parser).expect("a parser")(log);
        let expected: Verdicts = expected.iter().map(|(n, s)| ((*n).to_owned(), *s)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn pytests_summary_is_read() {
        let log = "collected 3 items\nPASSED t.py::a\nFAILED t.py::b - assert 1 == 2\n\
                   SKIPPED [2] t.py:3: why\nXFAIL t.py::c\nERROR t.py::d - E\nPASSED\n\
                   PASSEDx t.py::e\n PASSED t.py::f\nFAILED t.py::p[/a/b]\n";
        let mut expected = vec![
            ("t.py::a", Status::Passed),
            ("t.py::b", Status::Failed),
            ("t.py::c", Status::ExpectedFailure),
            ("t.py::d", Status::Error),
            ("t.py::p[/a/b]", Status::Failed),
        ];
        reads("parse_log_pytest", log, &expected);
        expected[4].0 = "t.py::p[/b]";
        reads("parse_log_requests", log, &expected);
        reads("parse_log_matplotlib", "PASSED a[MouseButton.LEFT]", &[("a[1]", Status::Passed)]);
        let log = "PASSED a[//x/y]\nPASSED b[x*/y]tail\nPASSED c[";
        let plain =
            [("a[//x/y]", Status::Passed), ("b[x*/y]", Status::Passed), ("c[", Status::Passed)];
        reads("parse_log_pytest_options", log, &plain);
    }

    #[test]
    fn coloured_and_older_summaries_are_read() {
        let log = "\u{1b}[32mPASSED\u{1b}[0m t.py::a[x y]\nFAILED t.py::b - E\nt.py::c PASSED\n\
                   t.py::d xPASSED\nSKIPPED [1] t.py:3\nPASSED\nt.py::e[1]  ERROR\n";
        let expected = [
            ("t.py::a[x y]", Status::Passed),
            ("t.py::b", Status::Failed),
            ("t.py::c", Status::Passed),
            ("t.py::e[1]", Status::Error),
        ];
        reads("parse_log_sphinx", log, &expected);
    }

    #[test]
    fn other_runners_are_read() {
        let log = "test_a ok\ntest_b F\ntest_c E\nother ok\ntest_d  ok  [OK]\n\
                   ____ sympy/x/test_y.py:test_z ____\n";
        let expected = [
            ("test_a", Status::Passed),
            ("test_b", Status::Failed),
            ("test_c", Status::Error),
            ("sympy/x/test_y.py:test_z", Status::Failed),
        ];
        reads("parse_log_sympy", log, &expected);
        let log = "test_a (m.T) ... ok\ntest_b (m.T) ... FAIL\ntest_c (m.T) ... skipped 'why'\n\
                   ERROR: test_d (m.T)\ntest_e (m.T) ... printed\nok\n";
        let expected = [
            ("test_a (m.T)", Status::Passed),
            ("test_b (m.T)", Status::Failed),
            ("test_c (m.T)", Status::Skipped),
            ("test_d", Status::Error),
            ("test_e (m.T)", Status::Passed),
        ];
        reads("parse_log_django", log, &expected);
        let log = "FAILED t.py::a - E\nt.py::b PASSED [ 3%]\nPASSED t.py::c\nt.py::d x PASSED y\n";
        let expected =
            [("t.py::a", Status::Failed), ("t.py::b", Status::Passed), ("t.py::c", Status::Passed)];
        reads("parse_log_seaborn", log, &expected);
    }

    #[test]
    fn no_parser_stumbles_over_garbage() {
        for name in
            ["pytest", "pytest_options", "pytest_v2", "django", "seaborn", "sympy", "matplotlib"]
        {
            let parser = find(&format!("parse_log_{name}")).expect("a parser");
            for log in [
                "",
                "\0",
                "[",
                "]",
                "[[1m",
                "PASSED",
                "FAILED -",
                "ü[1m ü.py: ü",
                " .py: ",
                "FAIL:",
            ] {
                parser(log);
            }
        }
        assert!(find("parse_log_jest").is_none() && find("pytest").is_none());
    }
}
