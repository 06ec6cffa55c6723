//! Variables of a build: `ARG` and `ENV`, and which of them an instruction sees.

use std::collections::{BTreeMap, BTreeSet};

use exocell_cell::images::dockerfile::Scope;

/// Arguments that need no `ARG`: programs find their proxies by them, and no image keeps them.
const PROXIES: [&str; 5] = ["http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy"];
/// What the machine is for which it is built, and on which.
const MACHINES: [(&str, &str); 8] = [
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
    ("TARGETVARIANT", ""),
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("BUILDVARIANT", ""),
];

fn is_proxy(name: &str) -> bool {
    PROXIES.iter().any(|proxy| name.eq_ignore_ascii_case(proxy))
}

/// What the client gave, and what the file says before its first `FROM`.
#[derive(Debug, Clone, Default)]
pub struct Arguments {
    given: BTreeMap<String, String>,
    globals: BTreeMap<String, String>,
    used: BTreeSet<String>,
}

impl Arguments {
    pub fn new(given: BTreeMap<String, String>) -> Self {
        Self { given, ..Self::default() }
    }

    fn machine(name: &str) -> Option<String> {
        let found = MACHINES.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    }

    /// An `ARG` before the first `FROM`.
    ///
    /// # Errors
    /// Its default cannot be read.
    pub fn global(
        &mut self,
        name: &str,
        default: Option<&str>,
        escape: char,
    ) -> Result<(), String> {
        let default = default.map(|text| self.expand(text, escape)).transpose()?;
        self.used.insert(name.to_owned());
        let given = self.given.get(name).cloned();
        if let Some(value) = given.or(default).or_else(|| Self::machine(name)) {
            self.globals.insert(name.to_owned(), value);
        }
        Ok(())
    }

    /// A word of a `FROM`.
    ///
    /// # Errors
    /// A variable that must be set and is not.
    pub fn expand(&self, text: &str, escape: char) -> Result<String, String> {
        let variables =
            |name: &str| self.globals.get(name).cloned().or_else(|| Self::machine(name));
        Scope { variables: &variables, escape }.expand(text)
    }

    /// What the client gave and no `ARG` asked for.
    pub fn unused(&self) -> Vec<&str> {
        let unused = self.given.keys().filter(|name| !self.used.contains(*name));
        unused.filter(|name| !is_proxy(name)).map(String::as_str).collect()
    }
}

/// What one stage has declared.
#[derive(Debug, Clone, Default)]
pub struct Declared(BTreeMap<String, String>);

impl Declared {
    /// An `ARG` of the stage.
    pub fn declare(&mut self, arguments: &mut Arguments, name: &str, default: Option<String>) {
        arguments.used.insert(name.to_owned());
        let given = arguments.given.get(name).cloned();
        let global = || arguments.globals.get(name).cloned();
        match given.or(default).or_else(global).or_else(|| Arguments::machine(name)) {
            Some(value) => drop(self.0.insert(name.to_owned(), value)),
            None => drop(self.0.remove(name)),
        }
    }

    /// What `name` is in an instruction: the environment comes first.
    pub fn value(&self, env: &[String], name: &str) -> Option<String> {
        let of_env =
            env.iter().rev().find_map(|entry| entry.split_once('=').filter(|e| e.0 == name));
        of_env.map(|(_, value)| value.to_owned()).or_else(|| self.0.get(name).cloned())
    }

    /// What a program of a `RUN` finds in its environment beside the image's, and what of that
    /// the result depends on.
    pub fn of_program(&self, arguments: &Arguments, env: &[String]) -> (Vec<String>, Vec<String>) {
        let of_image: BTreeSet<&str> =
            env.iter().filter_map(|entry| entry.split('=').next()).collect();
        let visible = |(name, _): &(&String, &String)| !of_image.contains(name.as_str());
        let shown = |(name, value): (&String, &String)| format!("{name}={value}");
        let declared = || self.0.iter().filter(visible);
        let proxies = arguments.given.iter().filter(|(name, _)| is_proxy(name)).filter(visible);
        let all = proxies.map(shown).chain(declared().map(shown)).collect();
        let counted = declared().filter(|(name, _)| !is_proxy(name)).map(shown).collect();
        (all, counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(pairs: &[(&str, &str)]) -> Arguments {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Arguments::new(pairs.iter().map(own).collect())
    }

    #[test]
    fn arguments_are_seen_where_they_are_declared() {
        let mut all = given(&[("V", "2"), ("extra", "x"), ("HTTP_PROXY", "p")]);
        all.global("V", Some("1"), '\\').unwrap();
        all.global("W", Some("a$V"), '\\').unwrap();
        assert_eq!(all.expand("x:$V-${W}-$TARGETARCH-$none", '\\').unwrap(), "x:2-a2-amd64-");
        let mut stage = Declared::default();
        assert_eq!(stage.value(&[], "W"), None, "it is not declared here");
        stage.declare(&mut all, "W", None);
        stage.declare(&mut all, "X", Some("d".to_owned()));
        stage.declare(&mut all, "V", Some("d".to_owned()));
        let env = ["X=env".to_owned()];
        let seen = |name| stage.value(&env, name);
        assert_eq!(seen("W").as_deref(), Some("a2"));
        assert_eq!(seen("V").as_deref(), Some("2"));
        assert_eq!(seen("X").as_deref(), Some("env"), "the environment comes first");
        assert_eq!(all.unused(), ["extra"]);
        let (all, counted) = stage.of_program(&all, &env);
        assert_eq!(all, ["HTTP_PROXY=p", "V=2", "W=a2"]);
        assert_eq!(counted, ["V=2", "W=a2"]);
    }
}
