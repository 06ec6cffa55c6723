//! The `filters` argument: JSON, `{"label": ["a=b"]}` or the older
//! `{"label": {"a=b": true}}`.

use std::collections::BTreeMap;

use exocell_cell::images::ImageRecord;
use exocell_cell::{clock, now_ms};
use serde::Deserialize;

use crate::error::{ApiError, ApiResult};
use crate::target::Query;

/// Values of one call, all in all.
const VALUES_MAX: usize = 1024;

#[derive(Deserialize)]
#[serde(untagged)]
enum Values {
    List(Vec<String>),
    Set(BTreeMap<String, bool>),
}

/// What a list is narrowed to: of each name one value must fit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filters(BTreeMap<String, Vec<String>>);

impl Filters {
    /// The filters of a call; `known` are the names it understands.
    ///
    /// # Errors
    /// 400 for other names, and for what is not in the form above.
    pub fn of(query: &Query, known: &[&str]) -> ApiResult<Self> {
        match query.get("filters") {
            None => Ok(Self::default()),
            Some(text) => Self::parse(text, known),
        }
    }

    /// As [`Filters::of`], from the argument's text.
    pub fn parse(text: &str, known: &[&str]) -> ApiResult<Self> {
        let parsed: BTreeMap<String, Values> = serde_json::from_str(text)
            .map_err(|error| ApiError::bad_request(format!("invalid filters: {error}")))?;
        let mut found = BTreeMap::new();
        let mut count = 0;
        for (name, values) in parsed {
            if !known.contains(&name.as_str()) {
                return Err(ApiError::bad_request(format!("invalid filter '{name}'")));
            }
            let values: Vec<String> = match values {
                Values::List(list) => list,
                Values::Set(set) => set.into_iter().filter(|(_, on)| *on).map(|(v, _)| v).collect(),
            };
            count += values.len();
            found.insert(name, values);
        }
        if count > VALUES_MAX {
            return Err(ApiError::bad_request("the filters have too many values"));
        }
        Ok(Self(found))
    }

    /// As the command line has them: `NAME=VALUE` each.
    ///
    /// # Errors
    /// A sentence that says what a filter looks like, and which there are.
    pub fn of_words(words: &[String], known: &[&str]) -> Result<Self, String> {
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for word in words {
            let pair = word.split_once('=').filter(|(name, _)| known.contains(name));
            let (name, value) = pair.ok_or_else(|| {
                format!("`{word}` is no filter; write NAME=VALUE with one of {}", known.join(", "))
            })?;
            found.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        Ok(Self(found))
    }

    /// Whether filters that take only certain words have those; `numbers` take numbers.
    ///
    /// # Errors
    /// A sentence that names the first that has not.
    pub fn check(&self, known: &[(&str, &[&str])], numbers: &[&str]) -> Result<(), String> {
        for (name, words) in known {
            if let Some(value) = self.values(name).iter().find(|own| !words.contains(&own.as_str()))
            {
                return Err(format!(
                    "invalid filter '{name}={value}': there are {}",
                    words.join(", ")
                ));
            }
        }
        for name in numbers {
            if let Some(value) = self.values(name).iter().find(|own| own.parse::<i64>().is_err()) {
                return Err(format!("invalid filter '{name}={value}': give a number"));
            }
        }
        Ok(())
    }

    /// The values of `name`; none when it does not filter.
    pub fn values(&self, name: &str) -> &[String] {
        self.0.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether `name` filters nothing out, or `fits` one of its values.
    pub fn any(&self, name: &str, fits: impl Fn(&str) -> bool) -> bool {
        let values = self.values(name);
        values.is_empty() || values.iter().any(|value| fits(value))
    }

    /// Whether `own` has a part that the filter `name` names: with `^` before it, and a `/` as
    /// docker has it, its beginning; with `$` behind it, its end.
    pub fn names(&self, name: &str, own: &str) -> bool {
        self.any(name, |wanted| {
            let (begins, rest) = match wanted.strip_prefix('^') {
                Some(rest) => (true, rest),
                None => (false, wanted),
            };
            let rest = rest.strip_prefix('/').unwrap_or(rest);
            match (begins, rest.strip_suffix('$')) {
                (true, Some(whole)) => own == whole,
                (true, None) => own.starts_with(rest),
                (false, Some(end)) => own.ends_with(end),
                (false, None) => own.contains(rest),
            }
        })
    }

    /// Whether `labels` has each `NAME` and `NAME=VALUE` of the filter `label`, and none of `label!`.
    pub fn labels(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |wanted: &String| match wanted.split_once('=') {
            Some((name, value)) => labels.get(name).is_some_and(|own| own == value),
            None => labels.contains_key(wanted),
        };
        self.values("label").iter().all(has) && !self.values("label!").iter().any(has)
    }

    /// Before when something has to have been made, by the filter `until`: milliseconds since 1970.
    ///
    /// # Errors
    /// 400 for what is no time.
    pub fn until_ms(&self) -> ApiResult<Option<u64>> {
        let times = self.values("until").iter();
        let times = times.map(|text| clock::parse_ms(text, now_ms()));
        let times: Result<Vec<u64>, String> = times.collect();
        let times = times.map_err(|why| ApiError::bad_request(format!("invalid filter: {why}")))?;
        Ok(times.into_iter().min())
    }
}

/// Whether `text` is `pattern`, in which a star stands for anything but `/`.
pub fn fits(text: &str, pattern: &str) -> bool {
    let (text, pattern) = (text.as_bytes(), pattern.as_bytes());
    let (mut at, mut next) = (0, 0);
    // What comes after the last star, and up to where that stands for the text. What stars before
    // it stand for need not be tried again: the least is the best.
    let mut star = None;
    while let Some(byte) = text.get(at) {
        match pattern.get(next) {
            Some(b'*') => {
                next += 1;
                star = Some((next, at));
            }
            Some(other) if other == byte => (at, next) = (at + 1, next + 1),
            _ => match star {
                Some((after, end)) if text.get(end).is_some_and(|byte| *byte != b'/') => {
                    (at, next) = (end + 1, after);
                    star = Some((after, end + 1));
                }
                _ => return false,
            },
        }
    }
    pattern.iter().skip(next).all(|byte| *byte == b'*')
}

/// What lists of images may be narrowed by.
pub const OF_IMAGES: [&str; 3] = ["dangling", "label", "reference"];

/// Whether `image` is one of those that are wanted.
pub fn image_passes(image: &ImageRecord, filters: &Filters) -> bool {
    let named = |wanted: &str| {
        image.tags.iter().any(|tag| {
            tag == wanted
                || tag.rsplit_once(':').is_some_and(|(name, _)| fits(name, wanted))
                || fits(tag, wanted)
        })
    };
    filters.any("reference", named)
        && filters.any("dangling", |wanted| matches!(wanted, "1" | "true") == image.tags.is_empty())
        && filters.labels(&image.config.labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_filtered_by_its_parts_or_as_a_whole() {
        let passes = |wanted: &str| {
            let filters = Filters::of_words(&[format!("name={wanted}")], &["name"]).unwrap();
            filters.names("name", "web-proxy-1")
        };
        for wanted in ["proxy", "^web", "1$", "^web-proxy-1$", "^/web-proxy-1$", "/web", ""] {
            assert!(passes(wanted), "{wanted}");
        }
        for wanted in ["db", "^proxy", "proxy$", "^web$"] {
            assert!(!passes(wanted), "{wanted}");
        }
    }

    #[test]
    fn stars_stand_for_anything_but_a_slash() {
        assert!(fits("exocell/base", "exocell/*") && fits("a", "*") && fits("aXbYc", "a*b*c"));
        assert!(!fits("exocell/base", "exo*") && !fits("a", "b*") && !fits("ab", "a"));
        assert!(fits("aba/c", "*a*/c") && fits("abab", "*ab") && fits("a/b/c", "*/*/*"));
        assert!(!fits("a/ab", "*a*b") && fits("", "**") && !fits("", "*a"));
    }

    #[test]
    fn many_stars_are_tried_in_one_reading() {
        let (name, stars) = ("a".repeat(10_000), "*a".repeat(1_000));
        assert!(fits(&name, &stars));
        assert!(!fits(&name, &format!("{stars}b")));
    }

    #[test]
    fn words_are_read_and_unknown_names_are_refused() {
        let words = ["label=a=b".to_owned(), "label=c".to_owned()];
        let read = Filters::of_words(&words, &["label"]).unwrap();
        assert_eq!(read.values("label"), ["a=b", "c"]);
        for bad in ["label", "x=y", ""] {
            let refused = Filters::of_words(&[bad.to_owned()], &["label", "name"]).unwrap_err();
            assert!(refused.contains("one of label, name"), "{refused}");
        }
    }

    #[test]
    fn both_forms_are_read_and_unknown_names_are_refused() {
        let list = Filters::parse(r#"{"label":["a=b","c"]}"#, &["label"]).unwrap();
        let set = Filters::parse(r#"{"label":{"a=b":true,"c":true,"d":false}}"#, &["label"]);
        assert_eq!(set.unwrap(), list);
        let labels = BTreeMap::from([("a".into(), "b".into()), ("c".into(), "x".into())]);
        assert!(list.labels(&labels) && !list.labels(&BTreeMap::new()));
        assert!(list.any("name", |_| false) && !list.any("label", |_| false));
        for text in ["", "[]", r#"{"label":1}"#, r#"{"nolabel":[]}"#] {
            assert_eq!(
                Filters::parse(text, &["label"]).unwrap_err().status.as_u16(),
                400,
                "{text}"
            );
        }
    }
}
