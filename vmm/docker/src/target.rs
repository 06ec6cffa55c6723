//! What a request line asks for: `/v1.44/containers/json?all=1`, taken apart.

use percent_encoding::percent_decode_str;

use crate::error::{ApiError, ApiResult};

/// The newest API version spoken, as its part after `1.`.
pub const VERSION_MAX: u32 = 47;
/// The oldest.
pub const VERSION_MIN: u32 = 24;
/// Parts of a path; image names have a handful.
const SEGMENTS_MAX: usize = 64;
/// Arguments of a query.
const ARGUMENTS_MAX: usize = 256;

/// A request line's target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The API version that the client speaks, as its part after `1.`.
    pub version: u32,
    /// The path below the version, decoded; none of them is empty.
    pub segments: Vec<String>,
    pub query: Query,
}

impl Target {
    /// Reads a path and what follows its question mark.
    ///
    /// # Errors
    /// 400 for a version that is not spoken and for what cannot be decoded.
    pub fn parse(path: &str, query: Option<&str>) -> ApiResult<Self> {
        let mut segments = Vec::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if segments.len() == SEGMENTS_MAX {
                return Err(ApiError::bad_request("the path has too many parts"));
            }
            segments.push(decode(part)?);
        }
        let version = match segments.first().map(|first| version(first)) {
            Some(Some(version)) => {
                segments.remove(0);
                check(version?)?
            }
            _ => VERSION_MAX,
        };
        Ok(Self { version, segments, query: Query::parse(query.unwrap_or_default())? })
    }
}

/// `v1.44`; `None` for what does not look like a version.
fn version(part: &str) -> Option<ApiResult<u32>> {
    let numbers = part.strip_prefix('v')?;
    let (major, minor) = numbers.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(major) || !digits(minor) {
        return None;
    }
    let minor = minor.parse().ok().filter(|_| major == "1");
    Some(minor.ok_or_else(|| ApiError::bad_request(format!("API version {numbers} is not known"))))
}

fn check(version: u32) -> ApiResult<u32> {
    if version > VERSION_MAX {
        return Err(ApiError::bad_request(format!(
            "client version 1.{version} is too new. Maximum supported API version is 1.{VERSION_MAX}"
        )));
    }
    if version < VERSION_MIN {
        return Err(ApiError::bad_request(format!(
            "client version 1.{version} is too old. Minimum supported API version is 1.{VERSION_MIN}, please upgrade your client to a newer version"
        )));
    }
    Ok(version)
}

fn decode(text: &str) -> ApiResult<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded
        .map(|text| text.into_owned())
        .ok()
        .filter(|text| !text.contains('\0'))
        .ok_or_else(|| ApiError::bad_request("the request line is not UTF-8"))
}

/// The arguments after a question mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query(Vec<(String, String)>);

impl Query {
    fn parse(text: &str) -> ApiResult<Self> {
        let mut pairs = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            if pairs.len() == ARGUMENTS_MAX {
                return Err(ApiError::bad_request("the query has too many arguments"));
            }
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            // A plus is a blank in a query, and only there.
            let plain = |text: &str| decode(&text.replace('+', " "));
            pairs.push((plain(name)?, plain(value)?));
        }
        Ok(Self(pairs))
    }

    /// The value of `name`, if it is there and not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.all(name).find(|value| !value.is_empty())
    }

    /// Has `name` be `value` and nothing else.
    pub fn set(&mut self, name: &str, value: &str) {
        self.0.retain(|(key, _)| key != name);
        self.0.push((name.to_owned(), value.to_owned()));
    }

    /// All names with their values.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Every value of `name`.
    pub fn all<'a, 'b>(&'a self, name: &'b str) -> impl Iterator<Item = &'a str> + use<'a, 'b> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Whether `name` is set; the API takes any word but these for true.
    pub fn flag(&self, name: &str) -> bool {
        self.flag_or(name, false)
    }

    /// As [`Query::flag`], with what an absent one means.
    pub fn flag_or(&self, name: &str, absent: bool) -> bool {
        let off = |value: &str| {
            matches!(value.trim().to_ascii_lowercase().as_str(), "" | "0" | "no" | "false" | "none")
        };
        self.all(name).next().map_or(absent, |value| !off(value))
    }

    /// The number that `name` is.
    ///
    /// # Errors
    /// 400 when it is none.
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> ApiResult<Option<T>> {
        let parse = |text: &str| {
            text.parse()
                .map_err(|_| ApiError::bad_request(format!("{name} is no number: {text:?}")))
        };
        self.get(name).map(parse).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segments(path: &str) -> (u32, Vec<String>) {
        let target = Target::parse(path, None).unwrap();
        (target.version, target.segments)
    }

    #[test]
    fn versions_and_paths_are_told_apart() {
        assert_eq!(segments("/v1.41/a/b"), (41, vec!["a".into(), "b".into()]));
        assert_eq!(segments("//a//"), (VERSION_MAX, vec!["a".into()]));
        assert_eq!(segments("/images/v1.x/json").1[1], "v1.x");
        assert_eq!(segments("/images/a%2Fb:c/json").1[1], "a/b:c");
        for (path, word) in [("/v1.99/info", "too new"), ("/v1.2/info", "too old")] {
            let error = Target::parse(path, None).unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.contains(word), "{error}");
        }
        for path in ["/v2.0/info", "/v1.99999999999/info", "/%ff", "/a%00b"] {
            assert_eq!(Target::parse(path, None).unwrap_err().status.as_u16(), 400, "{path}");
        }
        assert!(Target::parse(&"/a".repeat(65), None).is_err());
    }

    #[test]
    fn arguments_read_as_the_api_reads_them() {
        let query = Query::parse("a=1&b=&c=x+y%26z&d&e=False&a=2&t=-1").unwrap();
        assert_eq!(query.all("a").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!((query.get("b"), query.get("c")), (None, Some("x y&z")));
        assert!(query.flag("a") && !query.flag("d") && !query.flag("e") && !query.flag("none"));
        assert!(query.flag_or("stdout", true) && !query.flag_or("e", true));
        assert_eq!(query.number::<i64>("t").unwrap(), Some(-1));
        assert!(query.number::<u32>("c").is_err());
        assert!(Query::parse(&"a&".repeat(257)).is_err());
    }

    proptest! {
        #[test]
        fn no_target_is_a_panic(path in ".{0,200}", query in ".{0,200}") {
            if let Ok(target) = Target::parse(&path, Some(&query)) {
                prop_assert!(target.segments.iter().all(|part| !part.contains('\0')));
            }
        }
    }
}
