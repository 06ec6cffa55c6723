//! `WWW-Authenticate` challenges and their answers.

use serde::Deserialize;

use super::Credentials;
use crate::error::{ImageError, Result};

/// What a registry asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

impl Challenge {
    /// Reads one header value (RFC 9110 section 11.6.1).
    pub fn parse(value: &str) -> Option<Self> {
        let (scheme, rest) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
        match scheme.to_ascii_lowercase().as_str() {
            "basic" => Some(Self::Basic),
            "bearer" => Some(Self::Bearer {
                realm: parameter(rest, "realm")?,
                service: parameter(rest, "service"),
            }),
            _ => None,
        }
    }
}

/// The quoted value of a parameter.
fn parameter(text: &str, name: &str) -> Option<String> {
    let mut rest = text;
    while let Some((key, after)) = rest.split_once("=\"") {
        let (value, after) = after.split_once('"')?;
        if key.trim_matches([',', ' ']).eq_ignore_ascii_case(name) {
            return Some(value.to_owned());
        }
        rest = after;
    }
    None
}

#[derive(Deserialize)]
struct TokenDocument {
    token: Option<String>,
    access_token: Option<String>,
}

/// The token in a token server's answer.
pub(super) fn token(text: &[u8]) -> Result<String> {
    let document: TokenDocument = serde_json::from_slice(text)
        .map_err(|error| ImageError::malformed("the login token", error))?;
    let token = document.token.or(document.access_token);
    token.ok_or_else(|| ImageError::malformed("the login token", "there is none in the answer"))
}

/// The `Authorization` header of a user (RFC 7617).
pub(super) fn basic(credentials: &Credentials) -> String {
    let plain = format!("{}:{}", credentials.username, credentials.password);
    format!("Basic {}", base64(plain.as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let word = group.iter().fold(0u32, |word, byte| (word << 8) | u32::from(*byte))
            << (8 * (3 - group.len()));
        for digit in 0..4 {
            let shown = digit <= group.len();
            let index = (word >> (18 - 6 * digit)) as usize % 64;
            text.push(if shown { char::from(DIGITS[index]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let bearer = r#"Bearer realm="https://a.example/token",service="r",scope="x,y""#;
        let expected = Challenge::Bearer {
            realm: "https://a.example/token".into(),
            service: Some("r".into()),
        };
        assert_eq!(Challenge::parse(bearer), Some(expected));
        assert_eq!(Challenge::parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(Challenge::parse("Negotiate"), None);
        assert_eq!(Challenge::parse("Bearer scope=\"x\""), None);
    }

    #[test]
    fn basic_is_base64() {
        let user = Credentials { username: "Aladdin".into(), password: "open sesame".into() };
        assert_eq!(basic(&user), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert!(!format!("{user:?}").contains("sesame"));
    }

    #[test]
    fn tokens_have_two_names() {
        assert_eq!(token(br#"{"token":"a"}"#).unwrap(), "a");
        assert_eq!(token(br#"{"access_token":"b"}"#).unwrap(), "b");
        assert!(token(b"{}").is_err());
    }
}
