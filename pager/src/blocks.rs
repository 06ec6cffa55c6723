//! Whether the host backs guest memory in pieces of 64 KB where it is asked to.
//!
//! Its own setting, off by default, says so (Documentation/admin-guide/mm/transhuge.rst of
//! the kernel). A page costs it a quarter then, to take and to give back.

use std::fs;
use std::path::Path;

/// "on" and "off" are taken instead of the host's setting.
pub const VARIABLE: &str = "EXOCELL_PAGER_BLOCKS";

/// The host's setting.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled";
const COST: &str = "with --pager a page that is new to a program costs twice as much";
const EXCESS: &str = "cells with --pager are backed beyond what they use";
/// What "inherit" there stands for.
const INHERITED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Whether guest kernels are to ask for such pieces.
///
/// # Errors
/// What of it is wrong, where the variable is neither.
pub fn wanted() -> Result<bool, String> {
    match std::env::var(VARIABLE).as_deref() {
        Ok("on") => Ok(true),
        Ok("off") => Ok(false),
        Ok(other) => Err(format!("{VARIABLE} is {other}; set it to on or off, or not at all")),
        Err(_) => Ok(offered().is_ok()),
    }
}

/// Whether the host gives them to who asks, and to nobody else: one that gives them to
/// all backs 64 KiB for a page that is touched.
///
/// # Errors
/// What it costs that it does not, and what helps.
pub fn offered() -> Result<String, String> {
    judge(&chosen(Path::new(SETTING)), || chosen(Path::new(INHERITED)))
}

fn judge(setting: &str, inherited: impl Fn() -> String) -> Result<String, String> {
    let word = match setting {
        "inherit" => &inherited(),
        word => word,
    };
    match word {
        "advise" => Ok("cells with --pager get memory in pieces of 64 KiB".to_owned()),
        "" => Err(format!("there is no {SETTING} (Linux 6.11); {COST}")),
        "never" | "deny" => Err(format!("{SETTING} is {word}; {COST}; echo advise > {SETTING}")),
        _ => Err(format!("{SETTING} is {word}; {EXCESS}; echo advise > {SETTING}")),
    }
}

/// The word in brackets; empty where there is no such setting.
fn chosen(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map(|(word, _)| word.to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_the_word_in_brackets() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, word) in [
            ("always inherit within_size [advise] never\n", "advise"),
            ("always inherit within_size advise [never]\n", "never"),
            ("", ""),
            ("[", ""),
        ] {
            fs::write(file.path(), text).unwrap();
            assert_eq!(chosen(file.path()), word);
        }
        assert_eq!(chosen(Path::new("/nowhere")), "");
    }

    #[test]
    fn what_is_inherited_counts_and_what_helps_is_said() {
        let judge = |setting: &str, inherited: &str| judge(setting, || inherited.to_owned());
        assert!(judge("advise", "never").is_ok() && judge("inherit", "advise").is_ok());
        for (setting, inherited) in
            [("never", "advise"), ("inherit", "never"), ("inherit", "always"), ("always", "never")]
        {
            let why = judge(setting, inherited).unwrap_err();
            assert!(why.contains(&format!("echo advise > {SETTING}")), "{why}");
        }
        assert!(judge("", "advise").unwrap_err().contains("Linux 6.11"));
    }
}
