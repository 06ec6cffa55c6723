//! The page itself: files of this program, which say nothing of any cell.

use hyper::Method;

use crate::reply::{Reply, text};

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");
const SCREEN: &str = include_str!("page/screen.js");

/// The file at `path`; `None` where there is none.
pub fn file(method: &Method, path: &str) -> Option<Reply> {
    if method != Method::GET {
        return None;
    }
    let script = "text/javascript; charset=utf-8";
    match path {
        "/" => Some(text("text/html; charset=utf-8", PAGE)),
        "/page.css" => Some(text("text/css; charset=utf-8", STYLE)),
        "/page.js" => Some(text(script, SCRIPT)),
        "/screen.js" => Some(text(script, SCREEN)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy forbids it, and a browser that knows none is not to be led into it.
    #[test]
    fn the_page_makes_no_markup_of_text_and_asks_no_other_server() {
        for (name, text) in [("page", PAGE), ("style", STYLE), ("page", SCRIPT), ("screen", SCREEN)]
        {
            for word in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
                assert!(!text.contains(word), "{name}: {word}");
            }
            assert!(!text.contains("://"), "{name}: another server");
        }
        for word in ["<style", " style=", " onclick", "javascript:"] {
            assert!(!PAGE.contains(word), "{word}");
        }
        // What is before the first is none.
        let scripts: Vec<&str> = PAGE.split("<script").skip(1).collect();
        assert!(scripts.iter().all(|script| script.contains(" src=\"/")), "one is written inline");
    }
}
