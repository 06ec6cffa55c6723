//! What docker's `run` has and a cell has in another way, or not at all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use exocell_cell::granted::{Links, TEXT_BYTES_MAX};
use exocell_cell::platform::PlatformKind;
use exocell_cell::{CellError, Layout};

use crate::args::RunArgs;

/// What a command names of the platforms of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    Nothing,
    Platform(PlatformKind),
    Auto,
}

/// What `--platform` says. In docker's words it is that of an image, and cells run one.
///
/// # Errors
/// It is neither.
pub fn platform(args: &RunArgs) -> Result<Named, CellError> {
    match args.platform.as_deref() {
        None | Some("linux/amd64" | "linux/x86_64" | "linux") => Ok(Named::Nothing),
        Some("auto") => Ok(Named::Auto),
        Some(other) => other.parse().map(Named::Platform).map_err(|_| {
            CellError::Usage(format!(
                "--platform {other} is not there: cells run linux/amd64, on para or kvm (or auto)"
            ))
        }),
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
