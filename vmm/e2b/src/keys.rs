//! Who may ask: the keys of tenants, of which only hashes are kept.
//!
//! ```toml
//! [[tenant]]
//! name = "ann"
//! key_sha256 = "…"            # printf %s "$KEY" | sha256sum
//! sandboxes = 20              # at once; the server's own bound where nothing is said
//! templates = ["base"]        # all where nothing is said
//! allow_net = ["pypi.org:443"] # of what the server may give; all of that where nothing is said
//! pool = { mine = 2 }         # so many of its template `mine` wait for it
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use exocell_cell::Layout;
use exocell_cell::granted::Links;
use exocell_cell::images::private;
use exocell_cell::xgate::Endpoint;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::ServeError;

const KEY_BYTES: usize = 32;
/// What E2B's keys begin with; hexadecimal digits follow.
const PREFIX: &str = "e2b_";
/// The tenant of a sandbox that waits in the pool: no tenant's name.
pub const POOL: &str = "";
/// The tenant of a server that has one key.
const ONLY: &str = "default";
/// The longest file of keys.
const FILE_BYTES_MAX: u64 = 4 << 20;
const TENANTS_MAX: usize = 10_000;

/// Whose sandboxes are whose.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    pub name: String,
    key_sha256: String,
    pub sandboxes: Option<usize>,
    pub templates: Option<Vec<String>>,
    pub allow_net: Option<Vec<String>>,
    /// How many sandboxes of a template wait for it, by the template's name.
    #[serde(default)]
    pub pool: BTreeMap<String, usize>,
}

impl Tenant {
    /// Who has what all have, and nothing of its own.
    pub fn nobody() -> Self {
        Self {
            name: String::new(),
            key_sha256: String::new(),
            sandboxes: None,
            templates: None,
            allow_net: None,
            pool: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Tenant>,
}

/// All tenants.
#[derive(Debug)]
pub struct Keys(Vec<Tenant>);

impl Keys {
    /// Those of the file at `path`.
    ///
    /// # Errors
    /// It cannot be read, a cell may write it, or it says what makes no sense.
    pub fn read(layout: &Layout, path: &Path, granted: &[String]) -> Result<Self, ServeError> {
        let shown = path.display();
        let text = Links::outside(layout)
            .untouched(path, FILE_BYTES_MAX)
            .map_err(ServeError::host(format!("cannot read the keys in {shown}")))?;
        Self::of(&text, granted).map_err(|why| ServeError::Usage(format!("{shown}: {why}")))
    }

    fn of(text: &str, granted: &[String]) -> Result<Self, String> {
        let File { tenant: mut all } =
            toml::from_str(text).map_err(|error| error.message().to_owned())?;
        if all.is_empty() || all.len() > TENANTS_MAX {
            return Err(format!("name 1 to {TENANTS_MAX} tenants ([[tenant]])"));
        }
        for at in 0..all.len() {
            let (before, rest) = all.split_at_mut(at);
            let Some(own) = rest.first_mut() else { break };
            own.key_sha256.make_ascii_lowercase();
            check(own, granted)?;
            if before.iter().any(|it| it.name == own.name || it.key_sha256 == own.key_sha256) {
                return Err(format!("the tenant {}: its name or key is another's too", own.name));
            }
        }
        Ok(Self(all))
    }

    /// The one key of a server without such a file, which lies in `folder` and is made at the
    /// first start; where it is.
    ///
    /// # Errors
    /// The host's.
    pub fn only(folder: &Path) -> Result<(Self, PathBuf), ServeError> {
        let path = folder.join("key");
        let failed = || ServeError::host(format!("cannot keep a key in {}", path.display()));
        let key = match fs::read_to_string(&path) {
            Ok(key) if key.trim().len() >= KEY_BYTES => key.trim().to_owned(),
            _ => {
                // In the form that clients of before 2.60 hold a key to.
                let key = format!("{PREFIX}{}", random().map_err(failed())?);
                private::replace(&path, format!("{key}\n").as_bytes()).map_err(failed())?;
                key
            }
        };
        let tenant = Tenant { name: ONLY.to_owned(), key_sha256: hash(&key), ..Tenant::nobody() };
        Ok((Self(vec![tenant]), path))
    }

    pub fn all(&self) -> &[Tenant] {
        &self.0
    }

    /// The tenant of a server that has one.
    pub fn only_one(&self) -> Option<&Tenant> {
        match self.0.as_slice() {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Whose `key` is. Hashes are compared, not keys, so the time it takes tells nothing.
    pub fn find(&self, key: &str) -> Option<&Tenant> {
        let hash = hash(key);
        self.0.iter().find(|tenant| tenant.key_sha256 == hash)
    }
}

fn check(tenant: &Tenant, granted: &[String]) -> Result<(), String> {
    let name = &tenant.name;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    // It is a part of images' names.
    let parts = name.split('-').all(|part| !part.is_empty());
    if name.len() > 63 || !parts || !name.chars().all(plain) {
        return Err(format!(
            "{name:?} is no tenant's name; use a-z, 0-9 and single - between, at most 63"
        ));
    }
    let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_hash(&tenant.key_sha256) {
        return Err(format!("the tenant {name}: key_sha256 is not 64 hexadecimal digits"));
    }
    for rule in tenant.allow_net.iter().flatten() {
        let wanted: Endpoint = rule.parse().map_err(|why| format!("the tenant {name}: {why}"))?;
        let covers = |own: &String| own.parse::<Endpoint>().is_ok_and(|own| own.contains(&wanted));
        if !granted.iter().any(covers) {
            return Err(format!(
                "the tenant {name}: {rule} is more than the server was granted (--allow-net)"
            ));
        }
    }
    Ok(())
}

/// 256 random bits in hexadecimal: a key, or a token of a sandbox.
///
/// # Errors
/// The host gives none.
pub fn random() -> std::io::Result<String> {
    let mut bytes = [0; KEY_BYTES];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(hex(&bytes))
}

/// In hexadecimal digits.
pub fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Whether two secrets are the same. Their hashes are compared, so the time it takes tells nothing.
pub fn same(one: &str, other: &str) -> bool {
    Sha256::digest(one.as_bytes()) == Sha256::digest(other.as_bytes())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_tenants() {
        let granted = ["example.org:443".to_owned()];
        let text = |more: &str| {
            format!("[[tenant]]\nname = \"ann\"\nkey_sha256 = \"{}\"\n{more}", hash("a key"))
        };
        let keys = Keys::of(&text("sandboxes = 2\n"), &granted).unwrap();
        let found = keys.find("a key").unwrap();
        assert_eq!((found.name.as_str(), found.sandboxes), ("ann", Some(2)));
        assert!(keys.find("another").is_none() && keys.find("").is_none());
        for wrong in [
            "",
            "[[tenant]]\nname = \"ann\"\nkey_sha256 = \"12\"\n",
            &text("allow_net = [\"example.org:80\"]\n"),
            &text("key = \"x\"\n"),
            &format!("{}{}", text(""), text("")),
            &text("").replace("ann", "../ann"),
        ] {
            assert!(Keys::of(wrong, &granted).is_err(), "{wrong}");
        }
        Keys::of(&text("allow_net = [\"example.org:443\"]\n"), &granted).unwrap();
    }

    #[test]
    fn a_server_without_a_file_keeps_one_key() {
        let folder = tempfile::tempdir().unwrap();
        let (_, path) = Keys::only(folder.path()).unwrap();
        let key = fs::read_to_string(path).unwrap();
        let digits = key.trim().strip_prefix(PREFIX).unwrap();
        assert!(digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let (keys, _) = Keys::only(folder.path()).unwrap();
        assert_eq!(keys.find(key.trim()).unwrap().name, ONLY);
        assert!(keys.find(&key).is_none());
    }

    #[test]
    fn secrets_are_the_same_or_not() {
        assert!(same("a", "a") && !same("a", "b") && !same("a", "") && same("", ""));
    }
}
