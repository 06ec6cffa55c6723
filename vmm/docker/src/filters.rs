//! The `filters` argument: JSON, `{"label": ["a=b"]}` or the older
//! `{"label": {"a=b": true}}`.

use std::collections::BTreeMap;

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

    /// The values of `name`; none when it does not filter.
    pub fn values(&self, name: &str) -> &[String] {
        self.0.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether `name` filters nothing out, or `fits` one of its values.
    pub fn any(&self, name: &str, fits: impl Fn(&str) -> bool) -> bool {
        let values = self.values(name);
        values.is_empty() || values.iter().any(|value| fits(value))
    }

    /// Whether `labels` has each `NAME` and `NAME=VALUE` of the filter `label`.
    pub fn labels(&self, labels: &BTreeMap<String, String>) -> bool {
        self.values("label").iter().all(|wanted| match wanted.split_once('=') {
            Some((name, value)) => labels.get(name).is_some_and(|own| own == value),
            None => labels.contains_key(wanted),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
