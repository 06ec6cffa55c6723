//! Signed URLs of files: whoever has one may read or write one file, without the sandbox' token.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use exocell_cell::now_ms;
use sha2::{Digest, Sha256};

use crate::error::{Problem, Result};
use crate::http::Query;
use crate::keys;

/// What is signed: a path, what is done with it, and as whom.
pub struct Signed<'a> {
    pub path: &'a str,
    pub operation: &'static str,
    pub user: &'a str,
    signature: &'a str,
    /// Seconds since 1970.
    expires: Option<&'a str>,
}

impl<'a> Signed<'a> {
    /// What `query` says, if it has a signature.
    pub fn read(query: &'a Query, operation: &'static str) -> Option<Self> {
        Some(Self {
            path: query.get("path").unwrap_or_default(),
            operation,
            user: query.get("username").unwrap_or_default(),
            signature: query.get("signature")?,
            expires: query.get("signature_expiration"),
        })
    }

    /// Whether the sandbox with `token` has signed it.
    pub fn is_by(&self, token: &str) -> bool {
        let Self { path, operation, user, .. } = self;
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(expires) = self.expires {
            text = format!("{text}:{expires}");
        }
        let own = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())));
        keys::same(&own, self.signature.trim_end_matches('='))
    }

    /// # Errors
    /// 401: another has signed it, or its time is over.
    pub fn check(&self, token: &str) -> Result<()> {
        if !self.is_by(token) {
            return Err(Problem::unauthorized("invalid signature"));
        }
        let Some(expires) = self.expires else { return Ok(()) };
        match expires.parse::<u64>() {
            Ok(at) if at >= now_ms() / 1000 => Ok(()),
            _ => Err(Problem::unauthorized("signature is already expired")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: &str = "v1_other";

    fn query(expires: &str, signature: &str) -> Query {
        let more = if expires.is_empty() {
            String::new()
        } else {
            format!("&signature_expiration={expires}")
        };
        Query::read(&format!(
            "path=/a%20b&username=user&signature={}{more}",
            signature.replace('+', "%2B")
        ))
    }

    fn sign(text: &str) -> String {
        format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
    }

    #[test]
    fn a_signature_is_of_one_file_one_use_and_one_sandbox() {
        let own = sign("/a b:read:user:token");
        let check = |query: &Query, operation, token: &str| {
            Signed::read(query, operation).unwrap().check(token).is_ok()
        };
        let plain = query("", &own);
        assert!(check(&plain, "read", "token"));
        assert!(!check(&plain, "write", "token") && !check(&plain, "read", "another"));
        assert!(!check(&query("", OTHER), "read", "token"));
        assert!(!check(&query("99999999999", &own), "read", "token"));
        let late = sign("/a b:read:user:token:1");
        assert!(!check(&query("1", &late), "read", "token"));
        let early = sign("/a b:read:user:token:99999999999");
        assert!(check(&query("99999999999", &early), "read", "token"));
        let broken = sign("/a b:read:user:token:soon");
        assert!(!check(&query("soon", &broken), "read", "token"));
        assert!(Signed::read(&Query::read("path=/x"), "read").is_none());
    }
}
