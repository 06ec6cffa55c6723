//! Words, quotes and variables in the arguments of instructions.

use super::pattern::Pattern;

/// Bytes that one argument may become: no program takes a longer one (Linux: MAX_ARG_STRLEN).
const EXPANDED_BYTES_MAX: usize = 128 << 10;
/// Bytes that all words of one line may become, or the text of a file.
const FILLED_BYTES_MAX: usize = 1 << 20;
/// Variables in the words of variables.
const DEPTH_MAX: usize = 16;

/// What variables are, and what the file's escape is.
#[derive(Clone, Copy)]
pub struct Scope<'a> {
    pub variables: &'a dyn Fn(&str) -> Option<String>,
    pub escape: char,
}

impl Scope<'_> {
    /// One argument without its quotes, its variables put in.
    ///
    /// # Errors
    /// A quote or a variable that does not end, a variable that must be set and is not.
    pub fn expand(&self, text: &str) -> Result<String, String> {
        Ok(self.words(text, false)?.pop().unwrap_or_default())
    }

    /// The same of an argument that may become several: blanks of variables end words, quoted
    /// ones do not.
    ///
    /// # Errors
    /// As of [`Self::expand`].
    pub fn split(&self, text: &str) -> Result<Vec<String>, String> {
        self.words(text, true)
    }

    /// The text of a file: variables are put in, and quotes stay.
    ///
    /// # Errors
    /// As of [`Self::expand`].
    pub fn fill(&self, text: &str) -> Result<String, String> {
        let mut reading = Reading::new(self, text, 0);
        while let Some(char) = reading.next() {
            match char {
                '$' => {
                    let value = reading.variable()?;
                    reading.push_str(&value);
                }
                char if char == self.escape => match reading.peek() {
                    Some(next) if next == '$' || next == self.escape => {
                        reading.next();
                        reading.word.push(next);
                    }
                    _ => reading.word.push(char),
                },
                char => reading.word.push(char),
            }
            if reading.word.len() > FILLED_BYTES_MAX {
                return Err(format!("a file becomes longer than {FILLED_BYTES_MAX} bytes"));
            }
        }
        Ok(reading.word)
    }

    fn words(&self, text: &str, splits: bool) -> Result<Vec<String>, String> {
        self.words_at(text, splits, 0)
    }

    fn words_at(&self, text: &str, splits: bool, depth: usize) -> Result<Vec<String>, String> {
        let mut reading = Reading::new(self, text, depth);
        reading.splits = splits;
        while let Some(char) = reading.next() {
            match char {
                '\'' => reading.single()?,
                '"' => reading.double()?,
                '$' => {
                    let value = reading.variable()?;
                    reading.put(&value);
                }
                char if char == self.escape => match reading.next() {
                    Some(next) => reading.keep(next),
                    None => reading.keep(char),
                },
                char if splits && char.is_whitespace() => reading.end(),
                char => reading.keep(char),
            }
            reading.bound()?;
        }
        if !splits {
            reading.has_word = true;
        }
        reading.end();
        Ok(reading.words)
    }
}

struct Reading<'a> {
    scope: &'a Scope<'a>,
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    splits: bool,
    words: Vec<String>,
    words_bytes: usize,
    word: String,
    has_word: bool,
    depth: usize,
}

impl<'a> Reading<'a> {
    fn new(scope: &'a Scope<'a>, text: &'a str, depth: usize) -> Self {
        Self {
            scope,
            rest: text.chars().peekable(),
            splits: false,
            words: Vec::new(),
            words_bytes: 0,
            word: String::new(),
            has_word: false,
            depth,
        }
    }

    fn next(&mut self) -> Option<char> {
        self.rest.next()
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().copied()
    }

    fn keep(&mut self, char: char) {
        self.has_word = true;
        self.word.push(char);
    }

    fn push_str(&mut self, text: &str) {
        self.word.push_str(text);
    }

    /// What a variable is, outside of quotes.
    fn put(&mut self, value: &str) {
        for char in value.chars() {
            match self.splits && char.is_whitespace() {
                true => self.end(),
                false => self.keep(char),
            }
        }
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.has_word) {
            self.words_bytes += self.word.len() + size_of::<String>();
            self.words.push(std::mem::take(&mut self.word));
        }
    }

    fn bound(&self) -> Result<(), String> {
        if self.word.len() > EXPANDED_BYTES_MAX {
            return Err(format!("an argument becomes longer than {EXPANDED_BYTES_MAX} bytes"));
        }
        match self.words_bytes > FILLED_BYTES_MAX {
            true => Err(format!("a line becomes longer than {FILLED_BYTES_MAX} bytes")),
            false => Ok(()),
        }
    }

    fn single(&mut self) -> Result<(), String> {
        self.has_word = true;
        loop {
            match self.next() {
                Some('\'') => return Ok(()),
                Some(char) => self.word.push(char),
                None => return Err("a single quote does not end".to_owned()),
            }
        }
    }

    fn double(&mut self) -> Result<(), String> {
        self.has_word = true;
        loop {
            match self.next() {
                Some('"') => return Ok(()),
                Some('$') => {
                    let value = self.variable()?;
                    self.push_str(&value);
                }
                Some(char) if char == self.scope.escape => match self.peek() {
                    Some(next) if matches!(next, '"' | '$') || next == self.scope.escape => {
                        self.next();
                        self.word.push(next);
                    }
                    _ => self.word.push(char),
                },
                Some(char) => self.word.push(char),
                None => return Err("a double quote does not end".to_owned()),
            }
            self.bound()?;
        }
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        // One digit or sign is a name of its own.
        if let Some(char) =
            self.rest.next_if(|char| char.is_ascii_digit() || "@*#?".contains(*char))
        {
            return char.to_string();
        }
        while let Some(char) =
            self.rest.next_if(|char| char.is_ascii_alphanumeric() || *char == '_')
        {
            name.push(char);
        }
        name
    }

    /// What is behind a dollar sign.
    fn variable(&mut self) -> Result<String, String> {
        if self.rest.next_if_eq(&'{').is_none() {
            let name = self.name();
            return Ok(match name.is_empty() {
                true => "$".to_owned(),
                false => (self.scope.variables)(&name).unwrap_or_default(),
            });
        }
        let name = self.name();
        if name.is_empty() {
            return Err("${ has no name behind it".to_owned());
        }
        let unended = || format!("${{{name} does not end");
        let value = (self.scope.variables)(&name);
        match self.next().ok_or_else(unended)? {
            '}' => Ok(value.unwrap_or_default()),
            ':' => {
                let how = self.next().ok_or_else(unended)?;
                let word = self.word_to_brace(&name)?;
                self.chosen(&name, how, word, value.filter(|value| !value.is_empty()))
            }
            how @ ('-' | '+' | '?') => {
                let word = self.word_to_brace(&name)?;
                self.chosen(&name, how, word, value)
            }
            how @ ('#' | '%') => {
                let greedy = self.rest.next_if_eq(&how).is_some();
                let pattern = self.raw_to_brace(&name)?;
                cut(&value.unwrap_or_default(), &pattern, how == '#', greedy)
            }
            '/' => {
                let all = self.rest.next_if_eq(&'/').is_some();
                let word = self.raw_to_brace(&name)?;
                let (pattern, with) = word.split_once('/').unwrap_or((&word, ""));
                replace(&value.unwrap_or_default(), pattern, with, all)
            }
            other => Err(format!("${{{name}{other}: no such form of a variable")),
        }
    }

    fn chosen(
        &self,
        name: &str,
        how: char,
        word: String,
        value: Option<String>,
    ) -> Result<String, String> {
        match (how, value) {
            ('-', value) => Ok(value.unwrap_or(word)),
            ('+', Some(_)) => Ok(word),
            ('+', None) => Ok(String::new()),
            ('?', Some(value)) => Ok(value),
            ('?', None) if word.is_empty() => Err(format!("{name} is not set")),
            ('?', None) => Err(format!("{name}: {word}")),
            (other, _) => Err(format!("${{{name}:{other}: no such form of a variable")),
        }
    }

    /// What is up to the brace, as it is.
    fn raw_to_brace(&mut self, name: &str) -> Result<String, String> {
        let (mut raw, mut open) = (String::new(), 0);
        while let Some(char) = self.next() {
            match char {
                '}' if open == 0 => return Ok(raw),
                '}' => open -= 1,
                '{' if raw.ends_with('$') => open += 1,
                char if char == self.scope.escape => {
                    raw.push(char);
                    raw.extend(self.next());
                    continue;
                }
                _ => {}
            }
            raw.push(char);
        }
        Err(format!("${{{name} does not end"))
    }

    fn word_to_brace(&mut self, name: &str) -> Result<String, String> {
        let raw = self.raw_to_brace(name)?;
        if self.depth >= DEPTH_MAX {
            return Err(format!("${{{name}: variables are too deep in each other"));
        }
        let words = self.scope.words_at(&raw, false, self.depth + 1)?;
        Ok(words.into_iter().next().unwrap_or_default())
    }
}

/// `value` without a beginning, or an end, that is as the pattern says.
fn cut(value: &str, pattern: &str, begins: bool, greedy: bool) -> Result<String, String> {
    searchable(value)?;
    let pattern = Pattern::new(pattern);
    let mut edges: Vec<usize> = value.char_indices().map(|(at, _)| at).collect();
    edges.push(value.len());
    // The shortest first, or the longest.
    if begins == greedy {
        edges.reverse();
    }
    let found = edges.into_iter().find(|at| match begins {
        true => pattern.matches(&value[..*at]),
        false => pattern.matches(&value[*at..]),
    });
    Ok(match (found, begins) {
        (None, _) => value.to_owned(),
        (Some(at), true) => value[at..].to_owned(),
        (Some(at), false) => value[..at].to_owned(),
    })
}

/// Values that are searched for a pattern: each of their parts is compared with it.
const SEARCHED_BYTES_MAX: usize = 512;

fn searchable(value: &str) -> Result<(), String> {
    match value.len() > SEARCHED_BYTES_MAX {
        true => Err(format!("a value of more than {SEARCHED_BYTES_MAX} bytes is not searched")),
        false => Ok(()),
    }
}

fn replace(value: &str, pattern: &str, with: &str, all: bool) -> Result<String, String> {
    searchable(value)?;
    let pattern = Pattern::new(pattern);
    let (mut out, mut rest, mut done) = (String::new(), value, false);
    'value: while let Some(char) = rest.chars().next() {
        let mut ends: Vec<usize> = rest.char_indices().skip(1).map(|(at, _)| at).collect();
        ends.push(rest.len());
        for end in ends.into_iter().rev().filter(|_| all || !done) {
            if pattern.matches(&rest[..end]) {
                out.push_str(with);
                (rest, done) = (&rest[end..], true);
                continue 'value;
            }
        }
        out.push(char);
        rest = &rest[char.len_utf8()..];
    }
    Ok(out)
}

/// The words of a line with their quotes, as they are written.
#[must_use]
pub fn raw_words(text: &str, escape: char) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), String::new());
    let mut quote: Option<char> = None;
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match (quote, char) {
            (None, char) if char.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            (None, '\'' | '"') => quote = Some(char),
            (Some(open), char) if open == char => quote = None,
            (Some('\''), _) => {}
            (_, char) if char == escape => {
                word.push(char);
                word.extend(chars.next());
                continue;
            }
            _ => {}
        }
        word.push(char);
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(name: &str) -> Option<String> {
        let found = match name {
            "a" => "one",
            "two" => "x y",
            "empty" => "",
            "path" => "/usr/lib/lib.so.1",
            _ => return None,
        };
        Some(found.to_owned())
    }

    fn expand(text: &str) -> Result<String, String> {
        Scope { variables: &value, escape: '\\' }.expand(text)
    }

    #[test]
    fn variables_are_put_in() {
        for (text, is) in [
            ("$a", "one"),
            ("${a}b", "oneb"),
            ("$ab", ""),
            (r"\$a", "$a"),
            ("'$a'", "$a"),
            ("\"$a\"", "one"),
            ("\"a\\\"b\"", "a\"b"),
            ("a b", "a b"),
            ("$two", "x y"),
            ("${none:-d}", "d"),
            ("${none:-$a}", "one"),
            ("${none:-${none:-x}}", "x"),
            ("${empty:-d}", "d"),
            ("${empty-d}", ""),
            ("${none-d}", "d"),
            ("${a:+set}", "set"),
            ("${empty:+set}", ""),
            ("${empty+set}", "set"),
            ("${a:?}", "one"),
            ("${path##*/}", "lib.so.1"),
            ("${path#*/}", "usr/lib/lib.so.1"),
            ("${path%.*}", "/usr/lib/lib.so"),
            ("${path%%.*}", "/usr/lib/lib"),
            ("${path/lib/x}", "/usr/x/lib.so.1"),
            ("${path//lib/x}", "/usr/x/x.so.1"),
            ("$", "$"),
            ("a$", "a$"),
            ("$1", ""),
        ] {
            assert_eq!(expand(text).as_deref(), Ok(is), "{text}");
        }
    }

    #[test]
    fn what_does_not_end_is_refused() {
        for text in ["'a", "\"a", "${a", "${", "${}", "${a:", "${none:?}", "${none?no}", "${a&b}"] {
            assert!(expand(text).is_err(), "{text}");
        }
        let deep = "${none:-".repeat(40) + &"}".repeat(40);
        assert!(expand(&deep).is_err());
    }

    #[test]
    fn what_becomes_too_long_is_refused_before_it_is() {
        let long = |name: &str| (name == "long").then(|| "x ".repeat(40 << 10));
        let scope = Scope { variables: &long, escape: '\\' };
        for text in ["$long$long", "${long##*y}", "${long%y*}", "${long//y/z}", "'a'$long$long"] {
            assert!(scope.expand(text).unwrap_err().contains("bytes"), "{text}");
        }
        assert!(scope.split(&"$long ".repeat(2)).unwrap_err().contains("a line becomes"));
        assert!(scope.fill(&"$long".repeat(20)).unwrap_err().contains("a file becomes"));
    }

    #[test]
    fn words_end_at_blanks_that_are_not_quoted() {
        let scope = Scope { variables: &value, escape: '\\' };
        assert_eq!(scope.split("$two \"$two\" c").unwrap(), ["x", "y", "x y", "c"]);
        assert_eq!(scope.split("  ").unwrap(), [""; 0]);
        assert_eq!(raw_words(r#"a="b c" d\ e 'f g'"#, '\\'), [r#"a="b c""#, r"d\ e", "'f g'"]);
    }

    #[test]
    fn files_keep_their_quotes() {
        let scope = Scope { variables: &value, escape: '\\' };
        assert_eq!(scope.fill(r#"x="$a" \$a '$a' \n"#).unwrap(), r#"x="one" $a 'one' \n"#);
    }
}
