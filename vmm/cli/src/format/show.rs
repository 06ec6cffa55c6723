//! What a template says of a row: Go's rules (text/template), and docker's functions beside.

use std::collections::BTreeMap;

use exocell_cell::CellError;
use serde_json::{Value, json};

use super::parse::{Node, Pipe, Term, refused};

/// The longest line of one row, in bytes, and the widest field that is padded.
const LINE_BYTES_MAX: usize = 16 << 20;
const WIDTH_MAX: usize = 4096;
/// Maps whose keys are anybody's: one that is missing is no mistake.
const FREE: [&str; 7] =
    ["labels", "networks", "ports", "options", "driveropts", "sysctls", "annotations"];

/// A value by exocell's names, and the same by docker's where there is such a one.
#[derive(Debug, Clone)]
pub struct Item {
    own: Option<Value>,
    other: Option<Value>,
}

impl Item {
    pub fn new(own: Value, other: Option<Value>) -> Self {
        Self { own: Some(own), other }
    }

    fn of(own: Value) -> Self {
        Self { own: Some(own), other: None }
    }

    fn value(&self) -> &Value {
        self.own.as_ref().or(self.other.as_ref()).unwrap_or(&Value::Null)
    }

    fn into_value(self) -> Value {
        self.own.or(self.other).unwrap_or(Value::Null)
    }

    /// The field `path` of it.
    fn field(&self, path: &[String]) -> Result<Self, CellError> {
        let mut at = self.clone();
        for (index, name) in path.iter().enumerate() {
            let step = |from: &Option<Value>| from.as_ref().and_then(|from| one(from, name));
            let next = Self { own: step(&at.own), other: step(&at.other) };
            let is_free = index > 0 && FREE.contains(&folded(&path[index - 1]).as_str());
            if next.own.is_none() && next.other.is_none() && !is_free {
                return Err(missing(&path[..=index], at.value()));
            }
            at = next;
        }
        Ok(at)
    }
}

fn missing(path: &[String], at: &Value) -> CellError {
    let names: Vec<&str> =
        at.as_object().into_iter().flat_map(|o| o.keys()).map(String::as_str).collect();
    let there = match names.is_empty() {
        true => "that is no group of fields".to_owned(),
        false => format!("there are {}", names.join(", ")),
    };
    CellError::Usage(format!("--format: there is no {}; {there}", path.join(".")))
}

/// Names are read without their case and their `_`.
fn one(from: &Value, name: &str) -> Option<Value> {
    let fields = from.as_object()?;
    let same =
        || fields.iter().find(|(own, _)| folded(own) == folded(name)).map(|(_, value)| value);
    fields.get(name).or_else(same).cloned()
}

fn folded(name: &str) -> String {
    name.replace('_', "").to_ascii_lowercase()
}

/// The line of `row`.
pub fn line(nodes: &[Node], row: &Item) -> Result<String, CellError> {
    let mut shown = Shown { row, variables: BTreeMap::new(), line: String::new() };
    shown.nodes(nodes, row)?;
    Ok(shown.line)
}

struct Shown<'a> {
    row: &'a Item,
    variables: BTreeMap<String, Item>,
    line: String,
}

impl Shown<'_> {
    fn nodes(&mut self, nodes: &[Node], dot: &Item) -> Result<(), CellError> {
        for node in nodes {
            if self.line.len() > LINE_BYTES_MAX {
                return Err(refused("the line is too long"));
            }
            match node {
                Node::Text(text) => self.line.push_str(text),
                Node::Show(pipe) => {
                    let text = plain(self.pipe(pipe, dot)?.value());
                    self.line.push_str(&text);
                }
                Node::Set(name, pipe) => {
                    let value = self.pipe(pipe, dot)?;
                    self.variables.insert(name.clone(), value);
                }
                Node::If(pipe, then, other) => {
                    let holds = is_true(self.pipe(pipe, dot)?.value());
                    self.nodes(if holds { then } else { other }, dot)?;
                }
                Node::With(pipe, then, other) => {
                    let value = self.pipe(pipe, dot)?;
                    match is_true(value.value()) {
                        true => self.nodes(then, &value)?,
                        false => self.nodes(other, dot)?,
                    }
                }
                Node::Range { names, of, each, none } => {
                    let pairs = pairs(self.pipe(of, dot)?)?;
                    if pairs.is_empty() {
                        self.nodes(none, dot)?;
                    }
                    for (key, value) in pairs {
                        match names.as_slice() {
                            [one] => drop(self.variables.insert(one.clone(), value.clone())),
                            [first, second] => {
                                self.variables.insert(first.clone(), key);
                                self.variables.insert(second.clone(), value.clone());
                            }
                            _ => {}
                        }
                        self.nodes(each, &value)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn pipe(&self, pipe: &Pipe, dot: &Item) -> Result<Item, CellError> {
        let mut before: Option<Item> = None;
        for call in pipe {
            let (first, rest) = call.split_first().ok_or_else(|| refused("an action is empty"))?;
            let mut arguments: Vec<Item> =
                rest.iter().map(|term| self.term(term, dot)).collect::<Result<_, _>>()?;
            arguments.extend(before.take());
            before = Some(match first {
                Term::Word(name) => {
                    Item::of(function(name, arguments.into_iter().map(Item::into_value).collect())?)
                }
                term if arguments.is_empty() => self.term(term, dot)?,
                _ => return Err(refused("what is no function is given arguments")),
            });
        }
        before.ok_or_else(|| refused("an action is empty"))
    }

    fn term(&self, term: &Term, dot: &Item) -> Result<Item, CellError> {
        match term {
            Term::Field(path) => dot.field(path),
            Term::Variable(name, path) if name == "$" => self.row.field(path),
            Term::Variable(name, path) => match self.variables.get(name) {
                Some(value) => value.field(path),
                None => Err(refused(&format!("{name} is set nowhere"))),
            },
            Term::Group(pipe, path) => self.pipe(pipe, dot)?.field(path),
            Term::Text(text) => Ok(Item::of(json!(text))),
            Term::Number(number) => Ok(Item::of(json!(number))),
            Term::Truth(truth) => Ok(Item::of(json!(truth))),
            Term::Word(name) => Ok(Item::of(function(name, Vec::new())?)),
        }
    }
}

/// What `range` goes through: keys beside values, both in their order.
fn pairs(item: Item) -> Result<Vec<(Item, Item)>, CellError> {
    let other = item.other.clone();
    let beside = |key: &Value| {
        let other = other.as_ref()?;
        match key {
            Value::String(name) => other.get(name),
            key => other.get(usize::try_from(key.as_u64()?).ok()?),
        }
        .cloned()
    };
    let pair = |key: Value, value: Value| {
        let other = beside(&key);
        (Item::of(key), Item::new(value, other))
    };
    match item.into_value() {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => {
            Ok(list.into_iter().enumerate().map(|(at, value)| pair(json!(at), value)).collect())
        }
        Value::Object(map) => {
            Ok(map.into_iter().map(|(name, value)| pair(json!(name), value)).collect())
        }
        other => Err(refused(&format!("range goes through lists and maps, not {other}"))),
    }
}

fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(truth) => *truth,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// As Go prints it: `[a b]`, `map[k:v]`.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Array(list) => {
            format!("[{}]", list.iter().map(plain).collect::<Vec<_>>().join(" "))
        }
        Value::Object(map) => {
            let pairs = map.iter().map(|(name, value)| format!("{name}:{}", plain(value)));
            format!("map[{}]", pairs.collect::<Vec<_>>().join(" "))
        }
        other => other.to_string(),
    }
}

fn function(name: &str, arguments: Vec<Value>) -> Result<Value, CellError> {
    let wrong = || refused(&format!("{name} is given what it cannot take"));
    let text = |value: &Value| plain(value);
    Ok(match (name, arguments.as_slice()) {
        ("json", [value]) => json!(value.to_string()),
        ("len", [Value::String(text)]) => json!(text.len()),
        ("len", [Value::Array(list)]) => json!(list.len()),
        ("len", [Value::Object(map)]) => json!(map.len()),
        ("len", [Value::Null]) => json!(0),
        ("index", [value, keys @ ..]) => keys.iter().try_fold(value.clone(), index)?,
        ("join", [Value::Null, _]) => json!(""),
        ("join", [Value::Array(list), between]) => {
            json!(list.iter().map(text).collect::<Vec<_>>().join(&text(between)))
        }
        ("split", [value, between]) => {
            let (value, between) = (text(value), text(between));
            json!(value.split(between.as_str()).collect::<Vec<_>>())
        }
        ("lower", [value]) => json!(text(value).to_lowercase()),
        ("upper", [value]) => json!(text(value).to_uppercase()),
        ("title", [value]) => json!(title(&text(value))),
        ("truncate", [value, Value::Number(length)]) => {
            let length = length.as_u64().and_then(|length| usize::try_from(length).ok());
            json!(text(value).chars().take(length.ok_or_else(wrong)?).collect::<String>())
        }
        ("pad", [value, before, after]) => {
            let blanks = |count: &Value| {
                let count = count.as_u64().and_then(|count| usize::try_from(count).ok());
                count.filter(|count| *count <= WIDTH_MAX).map(|count| " ".repeat(count))
            };
            match text(value) {
                value if value.is_empty() => json!(value),
                value => {
                    let (before, after) = (blanks(before), blanks(after));
                    json!(before.ok_or_else(wrong)? + &value + &after.ok_or_else(wrong)?)
                }
            }
        }
        ("print", all) => json!(all.iter().map(text).collect::<String>()),
        ("println", all) => json!(all.iter().map(text).collect::<Vec<_>>().join(" ") + "\n"),
        ("printf", [Value::String(form), rest @ ..]) => json!(printf(form, rest)?),
        ("not", [value]) => json!(!is_true(value)),
        ("and", all @ [_, ..]) => first(all, false),
        ("or", all @ [_, ..]) => first(all, true),
        ("eq", [one, rest @ ..]) if !rest.is_empty() => {
            json!(rest.iter().any(|other| text(one) == text(other)))
        }
        ("ne", [one, other]) => json!(text(one) != text(other)),
        ("lt" | "le" | "gt" | "ge", [one, other]) => {
            let order = match (one.as_f64(), other.as_f64()) {
                (Some(one), Some(other)) => one.partial_cmp(&other).ok_or_else(wrong)?,
                _ => text(one).cmp(&text(other)),
            };
            json!(match name {
                "lt" => order.is_lt(),
                "le" => order.is_le(),
                "gt" => order.is_gt(),
                _ => order.is_ge(),
            })
        }
        (
            "json" | "len" | "index" | "join" | "split" | "lower" | "upper" | "title" | "truncate"
            | "pad" | "printf" | "not" | "and" | "or" | "eq" | "ne" | "lt" | "le" | "gt" | "ge",
            _,
        ) => return Err(wrong()),
        _ => {
            return Err(refused(&format!(
                "`{name}` is no function; there are json, index, join, len, split, lower, upper, \
                 title, truncate, pad, print, printf, println, and, or, not, eq, ne, lt, le, gt, ge"
            )));
        }
    })
}

/// The first that is as true as `wanted`, else the last.
fn first(all: &[Value], wanted: bool) -> Value {
    let found = all.iter().find(|value| is_true(value) == wanted);
    found.or(all.last()).cloned().unwrap_or_default()
}

/// As in Go, what a map does not have is nothing, and what a list does not have a mistake.
fn index(of: Value, key: &Value) -> Result<Value, CellError> {
    match (&of, key) {
        (Value::Null, _) => Ok(Value::Null),
        (Value::Object(map), key) => Ok(map.get(&plain(key)).cloned().unwrap_or_default()),
        (Value::Array(list), key) => {
            let at = key.as_u64().and_then(|at| usize::try_from(at).ok());
            let found = at.and_then(|at| list.get(at)).cloned();
            found.ok_or_else(|| {
                refused(&format!("index {} of a list of {}", plain(key), list.len()))
            })
        }
        _ => Err(refused("index is for lists and maps")),
    }
}

fn title(text: &str) -> String {
    let mut begins = true;
    let letters = text.chars().map(|letter| {
        let shown = if begins { letter.to_ascii_uppercase() } else { letter };
        begins = letter.is_whitespace();
        shown
    });
    letters.collect()
}

/// `%s`, `%v`, `%d`, `%t` and `%q`, with a width.
fn printf(form: &str, values: &[Value]) -> Result<String, CellError> {
    let (mut line, mut values) = (String::new(), values.iter());
    let mut letters = form.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            line.push(letter);
            continue;
        }
        let rest = letters.as_str();
        let end = rest.find(|c: char| !(c == '-' || c.is_ascii_digit())).unwrap_or(rest.len());
        let (width, verb) = (&rest[..end], rest[end..].chars().next());
        let shown = match verb {
            Some('%') => "%".to_owned(),
            Some('s' | 'v' | 'd' | 't') => values.next().map(plain).unwrap_or_default(),
            Some('q') => {
                values.next().map(|value| json!(plain(value)).to_string()).unwrap_or_default()
            }
            _ => return Err(refused(&format!("printf has %s, %v, %d, %t and %q, not `%{rest}`"))),
        };
        let wide = match width {
            "" => 0,
            width => width.trim_start_matches('-').parse().unwrap_or(usize::MAX),
        };
        if wide > WIDTH_MAX {
            return Err(refused("a field is too wide"));
        }
        line.push_str(&match width.starts_with('-') {
            true => format!("{shown:<wide$}"),
            false => format!("{shown:>wide$}"),
        });
        letters = rest[end + 1..].chars();
    }
    Ok(line)
}
