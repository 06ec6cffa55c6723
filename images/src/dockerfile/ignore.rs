//! `.dockerignore`: which files of a directory are no part of a build.
//!
//! The last line that is of a file, or of a directory above it, decides. Lines are patterns of
//! whole paths; `**` is any number of directories, `!` takes back.

use super::pattern::Pattern;

/// The longest file, and the most lines.
pub const BYTES_MAX: u64 = 1 << 20;
const LINES_MAX: usize = 10_000;

/// A file that is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ignore(Vec<Line>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    takes_back: bool,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// `**`
    Directories,
    Name(Pattern),
}

impl Ignore {
    /// Reads the lines of such a file.
    ///
    /// # Errors
    /// A line is malformed, or there are too many.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut lines = Vec::new();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (at, line) in text.lines().enumerate() {
            if line.starts_with('#') {
                continue;
            }
            let line = line.trim();
            let (takes_back, pattern) = match line.strip_prefix('!') {
                Some(rest) => (true, rest.trim()),
                None => (false, line),
            };
            let bad = |why: &str| format!(".dockerignore, line {}: {why}", at + 1);
            if pattern.is_empty() {
                if takes_back {
                    return Err(bad("nothing is behind the exclamation mark"));
                }
                continue;
            }
            let Some(parts) = parts(pattern) else { return Err(bad("the pattern is malformed")) };
            // `.` and what is above are of no file.
            if !parts.is_empty() {
                lines.push(Line { takes_back, parts });
            }
            if lines.len() > LINES_MAX {
                return Err(bad(&format!("there are more than {LINES_MAX} lines")));
            }
        }
        Ok(Self(lines))
    }

    /// Whether the file at `path`, relative to the directory, is left out.
    #[must_use]
    pub fn leaves_out(&self, path: &str) -> bool {
        let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
        let mut out = false;
        for line in &self.0 {
            if line.takes_back == out && line.is_of(&names) {
                out = !line.takes_back;
            }
        }
        out
    }

    /// Whether there is nothing below `path`, a directory that is left out, that is taken back.
    #[must_use]
    pub fn leaves_out_all_below(&self, path: &str) -> bool {
        // Which names a line may be of below is not looked into: the walk finds them.
        self.leaves_out(path) && !self.0.iter().any(|line| line.takes_back)
    }
}

/// The names of a path, cleaned of `.` and `..`.
fn parts(pattern: &str) -> Option<Vec<Part>> {
    let mut names: Vec<&str> = Vec::new();
    for name in pattern.split('/') {
        match name {
            "" | "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    let part = |name: &&str| match *name {
        "**" => Some(Part::Directories),
        name => Some(Part::Name(Pattern::new(name)))
            .filter(|part| matches!(part, Part::Name(pattern) if pattern.is_sound())),
    };
    names.iter().map(part).collect()
}

impl Line {
    /// Whether it is of `names` or of a directory above.
    fn is_of(&self, names: &[&str]) -> bool {
        (1..=names.len()).any(|count| is_of(&self.parts, &names[..count]))
    }
}

/// As a pattern of names goes over characters, this goes over names.
fn is_of(parts: &[Part], names: &[&str]) -> bool {
    let (mut part, mut at) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    loop {
        match (parts.get(part), names.get(at)) {
            (None, None) => return true,
            (Some(Part::Directories), _) => {
                // At the end it is of what is below, not of the directory itself.
                if part + 1 == parts.len() {
                    return at < names.len() || part == 0;
                }
                back = Some((part, at));
                part += 1;
                continue;
            }
            (Some(Part::Name(pattern)), Some(name)) if pattern.matches(name) => {
                (part, at) = (part + 1, at + 1);
                continue;
            }
            _ => {}
        }
        match back {
            Some((many, taken)) if taken < names.len() => {
                back = Some((many, taken + 1));
                (part, at) = (many + 1, taken + 1);
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out(text: &str, path: &str) -> bool {
        Ignore::read(text).unwrap().leaves_out(path)
    }

    #[test]
    fn lines_are_of_files_and_of_all_below() {
        for (text, path, is) in [
            ("", "a", false),
            ("a", "a", true),
            ("a", "a/b/c", true),
            ("a", "b/a", false),
            ("/a/", "a", true),
            ("./a", "a", true),
            ("x/../a", "a", true),
            ("*/temp*", "some/temporary.txt", true),
            ("*/temp*", "temporary.txt", false),
            ("*/*/temp*", "some/sub/temporary.txt", true),
            ("temp?", "tempa", true),
            ("temp?", "temp", false),
            ("**/*.go", "a.go", true),
            ("**/*.go", "a/b/c.go", true),
            ("**/b/**/d", "a/b/c/d", true),
            ("**/b/**/d", "b/d", true),
            ("a/**", "a", false),
            ("a/**", "a/b", true),
            ("**", "a/b", true),
            ("# a", "a", false),
            ("#a\n  b  ", "b", true),
            ("\u{feff}a", "a", true),
            ("*", ".git", true),
            (".", "a", false),
        ] {
            assert_eq!(out(text, path), is, "{text:?} {path}");
        }
    }

    #[test]
    fn the_last_line_decides() {
        assert!(!out("*.md\n!README.md", "README.md"));
        assert!(out("*.md\n!README*.md\nREADME-secret.md", "README-secret.md"));
        assert!(!out("*.md\nREADME-secret.md\n!README*.md", "README-secret.md"));
        assert!(!out("d\n!d/keep", "d/keep"));
        assert!(out("d\n!d/keep", "d/other"));
        assert!(out("**\n!**/*.rs\nt/**", "t/a.rs"));
    }

    #[test]
    fn what_is_malformed_is_refused() {
        for text in ["!", "a[", "ok\n[b"] {
            assert!(Ignore::read(text).is_err(), "{text}");
        }
        assert!(Ignore::read(&"a\n".repeat(LINES_MAX + 1)).is_err());
    }

    #[test]
    fn a_walk_skips_what_nothing_takes_back() {
        let read = |text: &str| Ignore::read(text).unwrap();
        assert!(read("d").leaves_out_all_below("d"));
        assert!(!read("d\n!d/keep").leaves_out_all_below("d"));
        assert!(!read("e").leaves_out_all_below("d"));
    }
}
