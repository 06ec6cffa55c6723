//! The top-level modules of a crate, and which of them import each other in a circle. What is read
//! is the source: tests and comments do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Top-level modules, each with those that it imports.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// The top-level modules of the crate whose root is `root`.
///
/// # Panics
/// When a module has no file.
pub fn graph(root: &Path) -> Graph {
    let source = Source::read(root);
    let folder = root.parent().expect("a file is in a folder");
    let modules = source.modules();
    let exports = source.exports(&modules);
    let imports = |name: &String| {
        let mut found = BTreeSet::new();
        collect(&file_of(folder, name), folder, &mut vec![name.clone()], &mut found);
        let resolved = found.into_iter().filter_map(|first| match modules.contains(&first) {
            true => Some(first),
            false => exports.get(&first).cloned(),
        });
        resolved.filter(|other| other != name).collect()
    };
    modules.iter().map(|name| (name.clone(), imports(name))).collect()
}

/// The modules of a graph that can be reached from themselves.
pub fn in_cycles(graph: &Graph) -> BTreeSet<String> {
    let reaches_itself = |start: &&String| {
        let mut seen = BTreeSet::new();
        let mut next: Vec<&String> = graph.get(*start).into_iter().flatten().collect();
        while let Some(module) = next.pop() {
            if seen.insert(module) {
                next.extend(graph.get(module).into_iter().flatten());
            }
        }
        seen.contains(start)
    };
    graph.keys().filter(reaches_itself).cloned().collect()
}

/// Adds the first names of all paths from the crate's root in a module and what is below it.
/// `module` is its path, and `folder` where the modules beside it lie.
fn collect(file: &Path, folder: &Path, module: &mut Vec<String>, found: &mut BTreeSet<String>) {
    let source = Source::read(file);
    found.extend(source.paths_from_root(module));
    let Some(name) = module.last() else { return };
    let folder = folder.join(name);
    for inner in source.modules() {
        let file = file_of(&folder, &inner);
        module.push(inner);
        collect(&file, &folder, module, found);
        module.pop();
    }
}

fn file_of(folder: &Path, module: &str) -> PathBuf {
    let single = folder.join(format!("{module}.rs"));
    if single.exists() { single } else { folder.join(module).join("mod.rs") }
}

/// What a file consists of: names, `::`, and single characters.
struct Source(Vec<String>);

impl Source {
    fn read(file: &Path) -> Self {
        let text =
            fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        Self::of(&text)
    }

    fn of(text: &str) -> Self {
        Self(without_tests(tokens(text)))
    }

    fn at(&self, index: usize) -> &str {
        self.0.get(index).map_or("", String::as_str)
    }

    /// The modules that have files of their own.
    fn modules(&self) -> BTreeSet<String> {
        let declared = |index: &usize| self.at(*index) == "mod" && self.at(index + 2) == ";";
        (0..self.0.len()).filter(declared).map(|index| self.at(index + 1).to_owned()).collect()
    }

    /// What the crate's root exports of its modules: the names, and whose they are.
    fn exports(&self, modules: &BTreeSet<String>) -> BTreeMap<String, String> {
        let uses = (0..self.0.len()).filter(|index| self.at(*index) == "use");
        let paths = uses.flat_map(|index| self.tree(index + 1));
        let from_module = paths.filter_map(|path| {
            let own = path.iter().find(|name| !["crate", "self"].contains(&name.as_str()))?;
            Some((path.last()?.clone(), own.clone()))
        });
        from_module.filter(|(_, module)| modules.contains(module)).collect()
    }

    /// The first names of all paths from the crate's root, as `module` writes them.
    fn paths_from_root(&self, module: &[String]) -> Vec<String> {
        let begins = |index: &usize| {
            ["crate", "super"].contains(&self.at(*index))
                && self.at(index + 1) == "::"
                && index.checked_sub(1).is_none_or(|before| self.at(before) != "::")
        };
        let paths = (0..self.0.len()).filter(begins).flat_map(|index| self.tree(index));
        paths.filter_map(|path| first_from_root(&path, module)).collect()
    }

    /// All paths of the tree that begins at a token.
    fn tree(&self, at: usize) -> Vec<Vec<String>> {
        let mut paths = Vec::new();
        self.branch(at, Vec::new(), &mut paths);
        paths
    }

    /// Adds the paths of a branch, each behind `path`; answers with the token after it.
    fn branch(&self, at: usize, mut path: Vec<String>, paths: &mut Vec<Vec<String>>) -> usize {
        if self.at(at) == "{" {
            let mut next = at + 1;
            while !["}", ""].contains(&self.at(next)) {
                next = match self.at(next) {
                    "," => next + 1,
                    _ => self.branch(next, path.clone(), paths),
                };
            }
            return next + 1;
        }
        path.push(self.at(at).to_owned());
        match (self.at(at + 1), self.at(at + 2)) {
            ("::", _) => self.branch(at + 2, path, paths),
            ("as", alias) => {
                path.push(alias.to_owned());
                paths.push(path);
                at + 3
            }
            _ => {
                paths.push(path);
                at + 1
            }
        }
    }
}

/// The first name of `path` from the root, as `module` writes it.
fn first_from_root(path: &[String], module: &[String]) -> Option<String> {
    let (first, mut rest) = path.split_first()?;
    if first == "crate" {
        return rest.first().cloned();
    }
    let mut above = module.len().checked_sub(1)?;
    while let Some((next, further)) = rest.split_first().filter(|(next, _)| *next == "super") {
        debug_assert_eq!(next, "super");
        (above, rest) = (above.checked_sub(1)?, further);
    }
    module.get(..above)?.iter().chain(rest).next().cloned()
}

/// The tokens of a text, without comments and what is in quotes.
fn tokens(text: &str) -> Vec<String> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let length = match skipped(rest) {
            Some(length) => length,
            None if is_name(first) => {
                let length = rest.find(|next| !is_name(next)).unwrap_or(rest.len());
                tokens.push(rest[..length].to_owned());
                length
            }
            None if rest.starts_with("::") => {
                tokens.push("::".to_owned());
                2
            }
            None => {
                tokens.push(first.to_string());
                first.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    tokens
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// How long what begins a text is if it counts for nothing: space, a comment, something in quotes.
fn skipped(text: &str) -> Option<usize> {
    if let Some(space) = text.chars().next().filter(|first| first.is_whitespace()) {
        return Some(space.len_utf8());
    }
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(text.find("*/").map_or(text.len(), |end| end + 2));
    }
    let quoted = |begin: usize, end: &str| {
        let inner = text.get(begin..)?;
        Some(inner.find(end).map_or(text.len(), |at| begin + at + end.len()))
    };
    let hashes =
        text.strip_prefix('r').map_or(0, |raw| raw.len() - raw.trim_start_matches('#').len());
    if text.starts_with('r') && text.get(1 + hashes..)?.starts_with('"') {
        return quoted(2 + hashes, &format!("\"{}", "#".repeat(hashes)));
    }
    match text.as_bytes() {
        [b'"', ..] => Some(string_length(text)),
        // A lifetime has no second quote.
        [b'\'', b'\\', ..] => quoted(3, "'"),
        [b'\'', ..] => {
            let (at, _) = text.char_indices().nth(2)?;
            text.get(at..)?.starts_with('\'').then_some(at + 1)
        }
        _ => None,
    }
}

/// How long the string is that begins a text.
fn string_length(text: &str) -> usize {
    let mut escaped = true;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' if !escaped => return at + 1,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

/// Leaves out what is compiled for tests only.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    const TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut rest) = (Vec::new(), &tokens[..]);
    while let Some((first, further)) = rest.split_first() {
        if rest.len() >= TEST.len() && rest.iter().zip(TEST).all(|(token, test)| token == test) {
            rest = &rest[TEST.len() + item_length(&rest[TEST.len()..])..];
            continue;
        }
        kept.push(first.clone());
        rest = further;
    }
    kept
}

/// How many tokens the item has that comes first.
fn item_length(tokens: &[String]) -> usize {
    let mut open = 0;
    for (index, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" => open += 1,
            "}" if open == 1 => return index + 1,
            "}" => open -= 1,
            ";" if open == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The graph of a crate with these files.
    fn of(files: &[(&str, &str)]) -> Graph {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        graph(&folder.path().join("lib.rs"))
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_circle_of_modules_is_found_however_it_is_written() {
        let graph = of(&[
            ("lib.rs", "mod a; mod b; mod c; mod d; pub use c::{self as other, Third as Renamed};"),
            ("a.rs", "use crate::{b::One, d};"),
            ("b/mod.rs", "mod inner; const QUOTE: char = '\"';"),
            ("b/inner.rs", "fn f<'a>(_: &'a str) { super::super::Renamed::new(\"crate::d\"); }"),
            ("c.rs", "fn f() { let text = r#\"crate::d \" crate::d\"#; super::a::f(text) }"),
            ("d.rs", "use std::fs; // crate::a\n/* crate::a */"),
        ]);
        assert_eq!(graph["a"], set(&["b", "d"]));
        assert_eq!(graph["b"], set(&["c"]));
        assert_eq!(graph["c"], set(&["a"]));
        assert_eq!(in_cycles(&graph), set(&["a", "b", "c"]));
    }

    #[test]
    fn tests_do_not_count() {
        let graph = of(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod suite;"),
            ("a.rs", "use crate::b; #[cfg(test)] fn f() { if true { crate::b::f() } } mod c;"),
            ("a/c.rs", "#[cfg(test)] mod tests { use super::*; use crate::b; } fn g() {}"),
            ("b.rs", "#[cfg(test)] use crate::a;\n#[cfg(test)]\nmod tests;\nfn f() {}"),
        ]);
        assert_eq!(graph.keys().cloned().collect::<BTreeSet<_>>(), set(&["a", "b"]));
        assert_eq!((graph["a"].clone(), graph["b"].clone()), (set(&["b"]), set(&[])));
        assert!(in_cycles(&graph).is_empty());
    }
}
