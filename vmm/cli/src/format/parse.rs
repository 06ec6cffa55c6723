//! Templates in Go's form (text/template, "Actions" and "Pipelines"), read into a tree.

use exocell_cell::CellError;

/// Actions and parentheses in each other.
const DEPTH_MAX: usize = 32;

/// A part of a template.
#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    Text(String),
    Show(Pipe),
    /// `{{$name := pipe}}`, and `{{$name = pipe}}`.
    Set(String, Pipe),
    /// `if`: what is shown where it holds, and where not.
    If(Pipe, Vec<Self>, Vec<Self>),
    /// `with`: the same, with the dot moved.
    With(Pipe, Vec<Self>, Vec<Self>),
    /// `range`: the names of the key and the value, what is shown for each, and where there is none.
    Range {
        names: Vec<String>,
        of: Pipe,
        each: Vec<Self>,
        none: Vec<Self>,
    },
}

/// Calls, each with what the one before said as its last argument.
pub type Pipe = Vec<Vec<Term>>;

#[derive(Debug, Clone, PartialEq)]
pub enum Term {
    /// `.A.B`: of the dot.
    Field(Vec<String>),
    /// `$name.A`; `$` is the whole row.
    Variable(String, Vec<String>),
    /// `(pipe).A`
    Group(Pipe, Vec<String>),
    Text(String),
    Number(i64),
    Truth(bool),
    /// A function's name.
    Word(String),
}

/// # Errors
/// It is no template; in words.
pub fn read(text: &str) -> Result<Vec<Node>, CellError> {
    let mut parser = Parser { pieces: pieces(text)?, at: 0, depth: 0 };
    let (nodes, end) = parser.nodes()?;
    match end {
        None => Ok(nodes),
        Some(words) => Err(refused(&format!("`{}` ends nothing", words.join(" ")))),
    }
}

pub fn refused(why: &str) -> CellError {
    CellError::Usage(format!("--format: {why}; take --json and jq for more than templates can"))
}

/// Text, and what stands between braces.
enum Piece {
    Text(String),
    Action(Vec<String>),
}

fn pieces(text: &str) -> Result<Vec<Piece>, CellError> {
    let (mut pieces, mut rest, mut trims) = (Vec::new(), text, false);
    while let Some((before, behind)) = rest.split_once("{{") {
        let before = if trims { before.trim_start() } else { before };
        let (behind, before) = match behind.strip_prefix('-') {
            Some(inner) if inner.starts_with(char::is_whitespace) => (inner, before.trim_end()),
            _ => (behind, before),
        };
        pieces.push(Piece::Text(unescaped(before)));
        let missing = || refused(&format!("`{{{{{behind}` has no end"));
        let end = end_of(behind).ok_or_else(missing)?;
        let inside = &behind[..end];
        rest = &behind[end + 2..];
        let inside = match inside.strip_suffix('-') {
            Some(shorter) if shorter.ends_with(char::is_whitespace) => {
                trims = true;
                shorter
            }
            _ => {
                trims = false;
                inside
            }
        };
        let comment = inside.trim();
        if !(comment.starts_with("/*") && comment.ends_with("*/")) {
            pieces.push(Piece::Action(tokens(inside)?));
        }
    }
    pieces.push(Piece::Text(unescaped(if trims { rest.trim_start() } else { rest })));
    Ok(pieces)
}

/// Where the action ends that `text` begins with: at braces that are no part of a string.
fn end_of(text: &str) -> Option<usize> {
    let (mut quote, mut escaped) = (None, false);
    for (at, letter) in text.char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some('"') if letter == '\\' => escaped = true,
            Some(open) if letter == open => quote = None,
            Some(_) => {}
            None if matches!(letter, '"' | '`') => quote = Some(letter),
            None if text[at..].starts_with("}}") => return Some(at),
            None => {}
        }
    }
    None
}

/// What shells pass on as two letters.
fn unescaped(text: &str) -> String {
    text.replace("\\t", "\t").replace("\\n", "\n")
}

/// The words of an action; a string begins with `"`, and has no end mark.
fn tokens(text: &str) -> Result<Vec<String>, CellError> {
    let (mut found, mut rest) = (Vec::new(), text.trim_start());
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '(' | ')' | '|' | ',' => 1,
            ':' if rest.starts_with(":=") => 2,
            '"' | '`' => {
                let (string, length) = string(rest, first)?;
                found.push(format!("\"{string}"));
                rest = rest[length..].trim_start();
                continue;
            }
            _ => rest
                .find(|c: char| c.is_whitespace() || "()|,\"`".contains(c))
                .unwrap_or(rest.len()),
        };
        found.push(rest[..length].to_owned());
        rest = &rest[length..];
        // `(…).A` is one term, `(…) .A` are two.
        if found.last().is_some_and(|last| last == ")") && rest.starts_with('.') {
            found.push("of".to_owned());
        }
        rest = rest.trim_start();
    }
    Ok(found)
}

/// The string that `text` begins with, and how much of that it takes.
fn string(text: &str, quote: char) -> Result<(String, usize), CellError> {
    // Behind the quote that it begins with.
    let (mut value, mut letters) = (String::new(), text.char_indices().skip(1));
    while let Some((at, letter)) = letters.next() {
        match letter {
            _ if letter == quote => return Ok((value, at + 1)),
            '\\' if quote == '"' => match letters.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, 't')) => value.push('\t'),
                Some((_, other)) => value.push(other),
                None => break,
            },
            _ => value.push(letter),
        }
    }
    Err(refused(&format!("the string {text} has no end")))
}

struct Parser {
    pieces: Vec<Piece>,
    at: usize,
    depth: usize,
}

/// How a list of parts ended: with the words of an `else`, or of an `end`.
type End = Option<Vec<String>>;

impl Parser {
    fn nodes(&mut self) -> Result<(Vec<Node>, End), CellError> {
        let mut nodes = Vec::new();
        while let Some(piece) = self.pieces.get_mut(self.at) {
            self.at += 1;
            match piece {
                Piece::Text(text) if text.is_empty() => {}
                Piece::Text(text) => nodes.push(Node::Text(std::mem::take(text))),
                Piece::Action(words) => {
                    let words = std::mem::take(words);
                    let first = words.first().map_or("", String::as_str);
                    match first {
                        "end" | "else" => return Ok((nodes, Some(words))),
                        "if" | "with" | "range" => nodes.push(self.block(&words)?),
                        _ => nodes.push(plain(&words)?),
                    }
                }
            }
        }
        Ok((nodes, None))
    }

    fn block(&mut self, words: &[String]) -> Result<Node, CellError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(refused("the template is too deep"));
        }
        let (kind, head) = words.split_first().ok_or_else(|| refused("an action is empty"))?;
        let (mut names, mut head) = (Vec::new(), head);
        if let Some(at) = head.iter().position(|word| word == ":=") {
            names = head[..at].iter().filter(|word| *word != ",").cloned().collect();
            head = &head[at + 1..];
        }
        let is_fine = names.len() <= if kind == "range" { 2 } else { 0 };
        if !is_fine || !names.iter().all(|name| name.starts_with('$')) {
            return Err(refused(&format!("`{}` sets what it cannot", words.join(" "))));
        }
        let of = pipe(head)?;
        let (then, end) = self.nodes()?;
        let endless = || refused(&format!("`{kind}` has no end"));
        let end = end.ok_or_else(endless)?;
        let other = match end.split_first() {
            Some((word, [])) if word == "end" => Vec::new(),
            Some((word, [])) if word == "else" => match self.nodes()? {
                (other, Some(end)) if end == ["end"] => other,
                _ => return Err(endless()),
            },
            // `else if …` is an `if` in the `else`, whose end is this one's.
            Some((word, more))
                if word == "else" && more.first().is_some_and(|word| word == "if") =>
            {
                vec![self.block(more)?]
            }
            _ => return Err(endless()),
        };
        self.depth -= 1;
        Ok(match kind.as_str() {
            "if" => Node::If(of, then, other),
            "with" => Node::With(of, then, other),
            _ => Node::Range { names, of, each: then, none: other },
        })
    }
}

fn plain(words: &[String]) -> Result<Node, CellError> {
    match words {
        [name, set, rest @ ..] if name.starts_with('$') && matches!(set.as_str(), ":=" | "=") => {
            Ok(Node::Set(name.clone(), pipe(rest)?))
        }
        _ => Ok(Node::Show(pipe(words)?)),
    }
}

fn pipe(words: &[String]) -> Result<Pipe, CellError> {
    let mut words = words.iter().map(String::as_str).peekable();
    let pipe = calls(&mut words, 0)?;
    match words.next() {
        None => Ok(pipe),
        Some(_) => Err(refused("a `)` closes nothing")),
    }
}

fn calls<'a, I: Iterator<Item = &'a str>>(
    words: &mut std::iter::Peekable<I>,
    depth: usize,
) -> Result<Pipe, CellError> {
    if depth > DEPTH_MAX {
        return Err(refused("the template is too deep"));
    }
    let (mut pipe, mut call) = (Vec::new(), Vec::new());
    while let Some(word) = words.next_if(|word| *word != ")") {
        match word {
            "|" => pipe.push(std::mem::take(&mut call)),
            "(" => {
                let group = calls(words, depth + 1)?;
                if words.next() != Some(")") {
                    return Err(refused("a `(` has no end"));
                }
                let path = match words.next_if_eq(&"of") {
                    Some(_) => path(words.next().unwrap_or_default())?,
                    None => Vec::new(),
                };
                call.push(Term::Group(group, path));
            }
            word => call.push(term(word)?),
        }
    }
    pipe.push(call);
    match pipe.iter().any(Vec::is_empty) {
        true => Err(refused("an action, or a part of one, is empty")),
        false => Ok(pipe),
    }
}

fn term(word: &str) -> Result<Term, CellError> {
    if let Some(string) = word.strip_prefix('"') {
        return Ok(Term::Text(string.to_owned()));
    }
    if word.starts_with('.') {
        return Ok(Term::Field(path(word)?));
    }
    if let Some(variable) = word.strip_prefix('$') {
        let end = variable.find('.').unwrap_or(variable.len());
        return Ok(Term::Variable(format!("${}", &variable[..end]), path(&variable[end..])?));
    }
    if let Ok(number) = word.parse() {
        return Ok(Term::Number(number));
    }
    Ok(match word {
        "true" | "false" => Term::Truth(word == "true"),
        word => Term::Word(word.to_owned()),
    })
}

/// `.A.B`; `.` and nothing is what it is of.
fn path(word: &str) -> Result<Vec<String>, CellError> {
    let plain = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let parts = word.split('.').filter(|part| !part.is_empty());
    match parts.clone().all(plain) && (word.is_empty() || word.starts_with('.')) {
        true => Ok(parts.map(str::to_owned).collect()),
        false => Err(refused(&format!("`{word}` is no field; write .NAME or .NAME.NAME"))),
    }
}
