//! The file `KERNEL`: which source is built, and how each copy of it is checked.

use serde::Deserialize;

use crate::error::KernelError;

/// The content of `KERNEL`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The kernel's version, such as `7.2.13`.
    pub version: String,
    /// The tarballs that `EXOCELL_KERNEL_TARBALL` may name.
    #[serde(default)]
    pub tarball: Vec<Tarball>,
    /// The Debian package with the source.
    pub debian: Option<Debian>,
    /// The tarball as upstream publishes it.
    pub upstream: Option<Upstream>,
}

/// A tarball that is known by its hash.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tarball {
    /// Its usual file name.
    pub name: String,
    /// Its sha256 in lower-case hexadecimal.
    pub sha256: String,
}

/// A Debian package that holds the source.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Debian {
    /// The package's name.
    pub package: String,
    /// The suites that may have it.
    pub suites: Vec<String>,
    /// The pinned version.
    pub version: String,
    /// The pinned version's `.deb`, sha256.
    pub sha256: String,
    /// The tarball's path inside the package.
    pub tarball: String,
}

/// The upstream tarball; skipped where its hash is not known.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upstream {
    /// Where it is published.
    pub url: String,
    /// Its sha256, once somebody has checked its signature.
    pub sha256: Option<String>,
}

impl Pin {
    /// Reads the text of `KERNEL`.
    pub fn parse(text: &str) -> Result<Self, KernelError> {
        Ok(toml::from_str(text)?)
    }

    /// The known tarball with this hash.
    pub fn tarball_with(&self, sha256: &str) -> Option<&Tarball> {
        self.tarball.iter().find(|tarball| tarball.sha256 == sha256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_refused() {
        let error = Pin::parse("version = \"7.2\"\nmirror = \"x\"\n").expect_err("unknown key");
        assert!(error.to_string().contains("mirror"), "{error}");
    }

    #[test]
    fn a_tarball_is_found_by_its_hash_only() {
        let text = "version = \"7.2\"\n[[tarball]]\nname = \"a\"\nsha256 = \"00ff\"\n";
        let pin = Pin::parse(text).expect("valid");
        assert_eq!(pin.tarball_with("00ff").map(|tarball| tarball.name.as_str()), Some("a"));
        assert!(pin.tarball_with("00fe").is_none());
    }
}
