//! Signed URLs of files: whoever has one may read or write one file, without the sandbox' token.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use exocell_cell::agent::files::PATH_BYTES_MAX;
use exocell_cell::now_ms;
use sha2::{Digest, Sha256};

use crate::error::{Problem, Result};
use crate::http::Query;

/// The longest user and time of a signature.
const WORD_BYTES_MAX: usize = 64;

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

    /// What is to be compared with what each sandbox would sign; `None` for what none has signed.
    pub fn wanted(&self) -> Option<Wanted<'a>> {
        let Self { path, operation, user, signature, expires } = self;
        let words = [*user, expires.unwrap_or_default(), *signature];
        if path.len() > PATH_BYTES_MAX || words.iter().any(|word| word.len() > WORD_BYTES_MAX) {
            return None;
        }
        let text = signature.strip_prefix("v1_")?.trim_end_matches('=');
        let digest = STANDARD_NO_PAD.decode(text).ok()?.try_into().ok()?;
        let begun = Sha256::new_with_prefix(format!("{path}:{operation}:{user}:"));
        Some(Wanted { begun, digest, expires: *expires })
    }

    /// Whether the sandbox with `token` has signed it.
    fn is_by(&self, token: &str) -> bool {
        self.wanted().is_some_and(|wanted| wanted.is_by(token))
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

/// A signature that is looked for.
pub struct Wanted<'a> {
    /// Of what comes before the token.
    begun: Sha256,
    digest: [u8; 32],
    expires: Option<&'a str>,
}

impl Wanted<'_> {
    /// Whether the sandbox with `token` has made it. How long the comparison takes
    /// does not depend on what differs.
    pub fn is_by(&self, token: &str) -> bool {
        let mut digest = self.begun.clone().chain_update(token);
        if let Some(expires) = self.expires {
            digest = digest.chain_update(":").chain_update(expires);
        }
        let own: [u8; 32] = digest.finalize().into();
        let differ = own.iter().zip(&self.digest).fold(0, |all, (one, other)| all | (one ^ other));
        differ == 0
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

    #[test]
    fn what_nobody_can_have_signed_is_compared_with_nothing() {
        let is_compared = |query: &str| {
            let query = Query::read(query);
            Signed::read(&query, "read").unwrap().wanted().is_some()
        };
        let own = sign("x").replace('+', "%2B");
        assert!(is_compared(&format!("path=/x&signature={own}")));
        assert!(is_compared(&format!("path=/x&signature={own}%3D")));
        let (path, word) = ("x".repeat(PATH_BYTES_MAX + 1), "x".repeat(WORD_BYTES_MAX + 1));
        for wrong in [
            format!("path={path}&signature={own}"),
            format!("path=/x&username={word}&signature={own}"),
            format!("path=/x&signature_expiration={word}&signature={own}"),
            "path=/x&signature=x".to_owned(),
            "path=/x&signature=v1_AAAA".to_owned(),
        ] {
            assert!(!is_compared(&wrong), "{wrong}");
        }
    }
}
