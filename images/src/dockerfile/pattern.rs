//! Patterns of names: `*`, `?`, `[a-z]`, `[^a]` and a backslash before what is meant as it is.

/// Whether `name` says more than one name.
#[must_use]
pub fn is_pattern(name: &[u8]) -> bool {
    name.iter().any(|byte| matches!(byte, b'*' | b'?' | b'[' | b'\\'))
}

/// One thing that a pattern asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    One(char),
    Any,
    Many,
    Class { not: bool, ranges: Vec<(char, char)> },
}

/// A pattern that is read; one that is malformed is of nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(Option<Vec<Part>>);

impl Pattern {
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(parts(text))
    }

    /// Whether it is well formed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.0.is_some()
    }

    /// Whether all of `name` is as it says.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        self.0.as_deref().is_some_and(|parts| all(parts, &name))
    }
}

/// Whether the pattern `pattern` is of `name`. What is no UTF-8 is only of itself.
#[must_use]
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (std::str::from_utf8(pattern), std::str::from_utf8(name)) {
        (Ok(pattern), Ok(name)) => Pattern::new(pattern).matches(name),
        _ => pattern == name,
    }
}

fn parts(text: &str) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        parts.push(match char {
            '*' => {
                if parts.last() == Some(&Part::Many) {
                    continue;
                }
                Part::Many
            }
            '?' => Part::Any,
            '\\' => Part::One(chars.next()?),
            '[' => {
                let not = chars.next_if(|next| matches!(next, '^' | '!')).is_some();
                let mut ranges = Vec::new();
                loop {
                    let mut one = || match chars.next()? {
                        '\\' => chars.next(),
                        char => Some(char),
                    };
                    let low = match one()? {
                        ']' if !ranges.is_empty() => break,
                        low => low,
                    };
                    let high = match chars.next_if_eq(&'-') {
                        Some(_) => match chars.next()? {
                            '\\' => chars.next()?,
                            high => high,
                        },
                        None => low,
                    };
                    ranges.push((low, high));
                }
                Part::Class { not, ranges }
            }
            char => Part::One(char),
        });
    }
    Some(parts)
}

/// Goes back to the last star and lets it take one more: no pattern takes long.
fn all(parts: &[Part], name: &[char]) -> bool {
    let (mut part, mut at) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        let is_of = match (parts.get(part), name.get(at)) {
            (None, None) => return true,
            (Some(Part::Many), _) => {
                star = Some((part, at));
                part += 1;
                continue;
            }
            (Some(part), Some(char)) => match part {
                Part::One(one) => one == char,
                Part::Any | Part::Many => true,
                Part::Class { not, ranges } => {
                    ranges.iter().any(|(low, high)| (low..=high).contains(&char)) != *not
                }
            },
            _ => false,
        };
        if is_of {
            (part, at) = (part + 1, at + 1);
            continue;
        }
        match star {
            Some((many, taken)) if taken < name.len() => {
                star = Some((many, taken + 1));
                (part, at) = (many + 1, taken + 1);
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_of_names() {
        for (pattern, name, is) in [
            ("*", "", true),
            ("*.go", "a.go", true),
            ("*.go", "a.gox", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            (r"\*", "*", true),
            (r"\*", "a", false),
            ("*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false),
            ("é*", "éa", true),
            ("[", "[", false),
            ("a[", "a[", false),
            (r"a\", "a", false),
            ("[]a]", "a", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), is, "{pattern} {name}");
        }
    }
}
