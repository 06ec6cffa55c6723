//! What docker's `run` has and a cell has in another way, or not at all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use exocell_cell::granted::{Links, TEXT_BYTES_MAX};
use exocell_cell::{CellError, Layout};

use crate::args::RunArgs;

/// Refuses what can only be taken as it is without.
pub fn check(args: &RunArgs) -> Result<(), CellError> {
    let refused = |flag: &str, value: &str, words: &str| {
        Err(CellError::Usage(format!("{flag} {value} is not there: {words}")))
    };
    match args.platform.as_deref() {
        None | Some("linux/amd64" | "linux/x86_64" | "linux") => Ok(()),
        Some(other) => refused("--platform", other, "cells run linux/amd64"),
    }
}

/// Files first; what is said in words wins.
pub fn labels(
    layout: &Layout,
    words: &[String],
    files: &[PathBuf],
) -> Result<BTreeMap<String, String>, CellError> {
    let mut lines = Vec::new();
    for path in files {
        let (text, _) = Links::outside(layout)
            .text(path, TEXT_BYTES_MAX)
            .map_err(CellError::host(format!("cannot read {} (--label-file)", path.display())))?;
        let own = text.lines().map(str::trim);
        lines.extend(own.filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned));
    }
    let pair = |text: &String| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        match name.is_empty() {
            true => Err(CellError::Usage(format!("--label: `{text}` has no name"))),
            false => Ok((name.to_owned(), value.to_owned())),
        }
    };
    lines.iter().chain(words).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_come_from_files_and_words() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# comment\na=file\nb=file\n\n").unwrap();
        let words = ["a=word=x".to_owned(), "plain".to_owned()];
        let layout = Layout::new("/nowhere");
        let found = labels(&layout, &words, &[file.path().to_owned()]).unwrap();
        let found: Vec<_> = found.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(found, [("a", "word=x"), ("b", "file"), ("plain", "")]);
        labels(&layout, &["=x".to_owned()], &[]).unwrap_err();
    }
}
