//! Config fragments: what they ask for, and whether the finished configuration holds it.

use std::collections::BTreeMap;

use crate::error::{KernelError, Lost};

/// The value of a symbol that is off or unknown, as `is not set` says.
const OFF: &str = "n";

/// What the fragments ask for: symbol -> value. A later line replaces an earlier one.
#[derive(Debug, Default)]
pub struct Wanted(BTreeMap<String, String>);

impl Wanted {
    /// Adds the assignments of one fragment.
    pub fn merge(&mut self, file: &str, text: &str) -> Result<(), KernelError> {
        for (index, line) in text.lines().enumerate() {
            match parse(line) {
                Line::Nothing => {}
                Line::Value(symbol, value) => {
                    self.0.insert(symbol.to_owned(), value.to_owned());
                }
                Line::Broken => {
                    let (file, text) = (file.to_owned(), line.to_owned());
                    return Err(KernelError::Fragment { file, line: index + 1, text });
                }
            }
        }
        Ok(())
    }

    /// Compares with a finished `.config`.
    ///
    /// # Errors
    /// Every symbol whose value differs, in both directions: lost, or set against our word.
    pub fn check(&self, dot_config: &str) -> Result<(), KernelError> {
        let mut finished = Self::default();
        finished.merge(".config", dot_config)?;
        let lost: Vec<Lost> = self
            .0
            .iter()
            .filter_map(|(symbol, wanted)| {
                let found = finished.0.get(symbol).map_or(OFF, String::as_str);
                (found != wanted).then(|| lost(symbol, wanted, found))
            })
            .collect();
        if lost.is_empty() { Ok(()) } else { Err(KernelError::LostSymbols(lost)) }
    }

    #[cfg(test)]
    pub(crate) fn asks_for(&self, symbol: &str, value: &str) -> bool {
        self.0.get(symbol).is_some_and(|found| found == value)
    }
}

fn lost(symbol: &str, wanted: &str, found: &str) -> Lost {
    Lost { symbol: symbol.to_owned(), wanted: wanted.to_owned(), found: found.to_owned() }
}

enum Line<'a> {
    Nothing,
    Value(&'a str, &'a str),
    Broken,
}

fn parse(line: &str) -> Line<'_> {
    let line = line.trim();
    if let Some(comment) = line.strip_prefix('#') {
        let off = comment.trim().strip_suffix(" is not set").filter(|symbol| is_symbol(symbol));
        return off.map_or(Line::Nothing, |symbol| Line::Value(symbol, OFF));
    }
    match line.split_once('=') {
        _ if line.is_empty() => Line::Nothing,
        Some((symbol, value)) if is_symbol(symbol) && !value.is_empty() => {
            Line::Value(symbol, value)
        }
        _ => Line::Broken,
    }
}

fn is_symbol(text: &str) -> bool {
    let name = text.strip_prefix("CONFIG_").unwrap_or_default();
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(text: &str) -> Wanted {
        let mut wanted = Wanted::default();
        wanted.merge("test.config", text).expect("valid fragment");
        wanted
    }

    fn lost_of(fragment: &str, dot_config: &str) -> Vec<String> {
        match wanted(fragment).check(dot_config) {
            Err(KernelError::LostSymbols(lost)) => lost.iter().map(Lost::to_string).collect(),
            other => panic!("expected lost symbols, found {other:?}"),
        }
    }

    #[test]
    fn what_survived_passes() {
        let fragment = "# a remark\n\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"x=1\"\n# CONFIG_D is not set\n";
        let finished = "CONFIG_A=y\nCONFIG_C=\"x=1\"\n# CONFIG_D is not set\nCONFIG_E=y\n";
        wanted(fragment).check(finished).expect("all survived");
    }

    #[test]
    fn both_directions_and_values_are_checked_and_all_are_listed() {
        let lost = lost_of(
            "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_N=16\nCONFIG_OFF=y\n",
            "CONFIG_B=y\nCONFIG_N=8\n# CONFIG_OFF is not set\n",
        );
        assert_eq!(
            lost,
            [
                "CONFIG_A: wanted y, found n",
                "CONFIG_B: wanted n, found y",
                "CONFIG_N: wanted 16, found 8",
                "CONFIG_OFF: wanted y, found n",
            ]
        );
    }

    #[test]
    fn a_later_line_wins() {
        assert!(wanted("CONFIG_A=y\nCONFIG_A=n\n").asks_for("CONFIG_A", "n"));
    }

    #[test]
    fn a_broken_line_is_refused_with_its_place() {
        for text in ["CONFIG_A", "A=y", "CONFIG_=y", "CONFIG_A=", "CONFIG_A B=y"] {
            let error =
                Wanted::default().merge("x.config", &format!("\n{text}\n")).expect_err(text);
            assert!(error.to_string().contains("x.config, line 2"), "{error}");
        }
    }
}
