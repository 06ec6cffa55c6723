//! What others wrote, made fit for a terminal or for a log that somebody reads.
//!
//! A guest chooses its file names, its process names, its kernel's messages and the host names that
//! it asks for. Raw, such text can move a terminal's cursor, hide or reorder what stands beside it,
//! or begin a line of its own. All that Exocell says itself goes through [`printable`] or
//! [`printable_lines`]; what a program writes to its own streams does not.

use std::borrow::Cow;
use std::fmt::Write;

/// Characters that are not seen, or that change how their neighbours are seen: soft hyphen, marks
/// and overrides of direction, separators of lines, joiners, variation selectors, tags (Unicode 16, general
/// categories Cf, Zl and Zp, and what a terminal shows as nothing).
const UNSEEN: [(char, char); 14] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{600}', '\u{605}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{6dd}', '\u{6dd}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

fn is_plain(c: char) -> bool {
    !c.is_control() && !UNSEEN.iter().any(|(first, last)| (*first..=*last).contains(&c))
}

/// `text` on one line, with every character that is not seen as itself written as JSON would
/// (`\n`, `\u001b`), so that JSON stays JSON.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_plain)
}

/// As [`printable`], for text of several lines.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c == '\n' || is_plain(c))
}

fn escaped(text: &str, is_plain: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.chars().all(&is_plain) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if is_plain(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to memory cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_moves_hides_or_reorders_is_left() {
        let hostile =
            "a\x1b[2J\u{9b}31m\x07\r\n\t\x7f\u{202e}b\u{2066}\u{200b}\u{2028}\u{e0041}c\0";
        let shown = printable(hostile);
        assert_eq!(
            shown,
            "a\\u001b[2J\\u009b31m\\u0007\\r\\n\\t\\u007f\\u202eb\\u2066\\u200b\\u2028\\udb40\\udc41c\\u0000"
        );
        assert!(shown.chars().all(is_plain));
        assert!(shown.is_ascii());
    }

    #[test]
    fn what_is_seen_as_itself_stays_and_is_not_copied() {
        let plain = "é नमस्ते 日本 😀 \"quoted\" C:\\x";
        assert!(matches!(printable(plain), Cow::Borrowed(same) if same == plain));
        assert_eq!(printable_lines("one\ntwo\x1b"), "one\ntwo\\u001b");
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = serde_json::json!({ "host": "a\u{9b}\u{202e}\u{e0041}\u{7f}.b" });
        let shown = printable(&value.to_string()).into_owned();
        assert!(shown.is_ascii());
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).ok(), Some(value));
    }
}
