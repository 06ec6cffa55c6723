//! Secrets that a cell may use and never sees: it has a placeholder, and the
//! host puts the value into the heads of requests to one server.
//!
//! ```text
//! guest: Authorization: Bearer exocell-secret-… ──> stack, for HOST:PORT alone
//!                                    Authorization: Bearer VALUE ──> HOST
//! ```
//! Plain HTTP is read, and TLS where the secret says so ([`crate::authority`]). What the server
//! sends back is passed on as it is: one that repeats a field gives its value away. So values go
//! only into fields that are for credentials, by their names: others are repeated by ordinary
//! servers (`Origin`, `X-Request-Id`), and all of them by TRACE (RFC 9110, 9.3.8), which gets none.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Bytes of a value.
pub const VALUE_BYTES_MAX: usize = 8 << 10;
/// Secrets of one cell.
pub const SECRETS_MAX: usize = 64;
/// Places in one head that values are put into: what a guest sends may not
/// grow without end.
pub const PLACES_MAX: usize = 32;
/// What the names of fields for credentials have in them.
const OF_CREDENTIALS: [&str; 8] =
    ["auth", "cookie", "credential", "key", "pass", "secret", "session", "token"];
/// How the names of fields begin that have it too, but come back by what standards say
/// (RFC 6455, 4.2.2; Fetch, 3.3).
const REPEATED: [&str; 3] = ["access-control-", "idempotency-", "sec-"];
/// Methods whose answers are the requests.
const ECHOES: [&[u8]; 2] = [b"TRACE", b"TRACK"];
/// The ports where none is said, of plain HTTP and over TLS.
const PORT: u16 = 80;
const PORT_OF_TLS: u16 = 443;

/// A value for the requests to one server.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// The variable that holds the placeholder.
    pub name: String,
    /// In lower case.
    pub host: String,
    pub port: u16,
    /// Whether it goes over TLS, and over nothing else; else over plain HTTP alone.
    pub tls: bool,
    /// What the cell has.
    pub placeholder: String,
    value: Vec<u8>,
}

/// Shows all but the value.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} for {}:{})", self.name, self.host, self.port)
    }
}

/// Why there can be no such secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    // The text may hold the value: it is not repeated.
    #[error(
        "a secret is NAME=VALUE@HOST[:PORT] or NAME=VALUE@https://HOST[:PORT], \
         or NAME@HOST for the value of that variable"
    )]
    Form,
    #[error("{0} is no name of a variable; use letters, digits and _")]
    Name(String),
    #[error("the secret {0} has no value; set the variable {0}, or say {0}=VALUE@HOST")]
    NoValue(String),
    #[error("the value of the secret {0} is empty, too long, or has characters that no header has")]
    Value(String),
    #[error("the secret {0} needs a host with a name, as in {0}@api.example.org")]
    Host(String),
}

impl Secret {
    /// Reads `NAME=VALUE@HOST[:PORT]` or `NAME@HOST[:PORT]`, whose value
    /// `variable` knows. The port is 80 where none is said, with `https://`
    /// before the host 443. The cell gets `placeholder`, which must not be
    /// guessable.
    pub fn read(
        text: &str,
        placeholder: String,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SecretError> {
        let (front, server) = text.rsplit_once('@').ok_or(SecretError::Form)?;
        let (name, value) = match front.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (front, None),
        };
        if !is_variable(name) {
            // Without a `=` this may be the value.
            return Err(match value {
                Some(_) => SecretError::Name(name.to_owned()),
                None => SecretError::Form,
            });
        }
        let name = name.to_owned();
        let value = value.or_else(|| variable(&name));
        let value = value.ok_or_else(|| SecretError::NoValue(name.clone()))?.into_bytes();
        let fits = |byte: &u8| matches!(byte, b'\t' | 0x20..=0x7e | 0x80..);
        if value.is_empty() || value.len() > VALUE_BYTES_MAX || !value.iter().all(fits) {
            return Err(SecretError::Value(name));
        }
        let (server, tls) = match server.strip_prefix("https://") {
            Some(server) => (server, true),
            None => (server.strip_prefix("http://").unwrap_or(server), false),
        };
        match server_of(server, if tls { PORT_OF_TLS } else { PORT }) {
            Some((host, port)) => Ok(Self { name, host, port, tls, placeholder, value }),
            None => Err(SecretError::Host(name)),
        }
    }
}

fn is_variable(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(first) && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A name with a port; addresses are none, for nobody vouches for who is there.
fn server_of(text: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, port.parse().ok().filter(|port| *port > 0)?),
        None => (text, default),
    };
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_name = host.contains(|c: char| c.is_ascii_alphabetic())
        && host.chars().all(plain)
        && host.split('.').all(|label| !label.is_empty() && label.len() <= 63);
    (is_name && host.len() <= 253).then_some((host, port))
}

/// The secrets that one stream's requests may get.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Arc<[Secret]>);

/// A head with its values in place.
#[derive(Debug, PartialEq, Eq)]
pub struct Filled {
    pub head: Vec<u8>,
    /// The names of the secrets that it holds.
    pub names: Vec<String>,
}

/// More places in one head than [`PLACES_MAX`].
#[derive(Debug, PartialEq, Eq)]
pub struct TooMany;

impl Secrets {
    pub fn new(secrets: Vec<Secret>) -> Self {
        Self(secrets.into())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Secret> {
        self.0.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those for `host` and `port`, over TLS or over plain HTTP.
    pub fn of(&self, host: &str, port: u16, tls: bool) -> Self {
        if self.0.is_empty() {
            return self.clone();
        }
        let fits = |own: &&Secret| own.host == host && own.port == port && own.tls == tls;
        Self(self.iter().filter(fits).cloned().collect())
    }

    /// Puts values in the place of placeholders in `head`, a whole head of a
    /// request, in the fields for credentials; also in those of the scheme Basic
    /// (RFC 7617). `None` where there is nothing to put in.
    pub fn fill(&self, head: &[u8]) -> Result<Option<Filled>, TooMany> {
        let (first, fields) = request_line(head);
        if self.0.is_empty() || is_echo(first, fields) {
            return Ok(None);
        }
        let mut filled = Filled { head: first.to_vec(), names: Vec::new() };
        let mut places = PLACES_MAX;
        for line in fields.split_inclusive(|byte| *byte == b'\n') {
            let line = match basic(line) {
                Some((start, credentials)) => {
                    let put = self.put(&credentials, &mut filled.names, &mut places)?;
                    match put == credentials {
                        true => line.to_vec(),
                        false => [start, STANDARD.encode(put).as_bytes(), b"\r\n"].concat(),
                    }
                }
                None => {
                    let (name, value) = field(line).unwrap_or((line, &[]));
                    let put = match is_for_credentials(name) {
                        true => self.put(value, &mut filled.names, &mut places)?,
                        false => value.to_vec(),
                    };
                    [name, &put].concat()
                }
            };
            filled.head.extend_from_slice(&line);
        }
        Ok((!filled.names.is_empty()).then_some(filled))
    }

    fn put(
        &self,
        mut bytes: &[u8],
        names: &mut Vec<String>,
        places: &mut usize,
    ) -> Result<Vec<u8>, TooMany> {
        let mut out = Vec::with_capacity(bytes.len());
        while let Some((byte, rest)) = bytes.split_first() {
            let fits = |secret: &&Secret| bytes.starts_with(secret.placeholder.as_bytes());
            let Some(secret) = self.iter().find(fits) else {
                out.push(*byte);
                bytes = rest;
                continue;
            };
            *places = places.checked_sub(1).ok_or(TooMany)?;
            out.extend_from_slice(&secret.value);
            if !names.contains(&secret.name) {
                names.push(secret.name.clone());
            }
            bytes = bytes.get(secret.placeholder.len()..).unwrap_or_default();
        }
        Ok(out)
    }
}

/// The first line, with the empty ones that may stand before it, and the rest.
fn request_line(head: &[u8]) -> (&[u8], &[u8]) {
    let start = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
    let mut rest = head.iter().skip(start);
    let end = rest.position(|byte| *byte == b'\n').map_or(head.len(), |end| start + end + 1);
    head.split_at_checked(end).unwrap_or((head, &[]))
}

/// A field's name with its colon, and the rest of its line.
fn field(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    line.split_at_checked(colon + 1)
}

fn is_for_credentials(name: &[u8]) -> bool {
    let name = String::from_utf8_lossy(name).to_ascii_lowercase().replace('_', "-");
    OF_CREDENTIALS.iter().any(|part| name.contains(part))
        && !REPEATED.iter().any(|start| name.starts_with(start))
}

/// Whether the answer may be the request: by its method, or one that a field puts in its place.
fn is_echo(first: &[u8], fields: &[u8]) -> bool {
    let is_one = |text: &[u8]| ECHOES.iter().any(|own| own.eq_ignore_ascii_case(text));
    let method = first.trim_ascii_start().split(|byte| *byte == b' ').next();
    let mut named = fields.split(|byte| *byte == b'\n').filter_map(field);
    method.is_some_and(is_one)
        || named.any(|(name, value)| {
            let name = String::from_utf8_lossy(name).to_ascii_lowercase();
            name.contains("method") && is_one(value.trim_ascii())
        })
}

/// The line of Basic credentials up to them, and what they say.
fn basic(line: &[u8]) -> Option<(&[u8], Vec<u8>)> {
    let (name, value) = field(line)?;
    let is_it = [&b"authorization:"[..], b"proxy-authorization:"];
    if !is_it.iter().any(|own| own.eq_ignore_ascii_case(name)) {
        return None;
    }
    let value = value.trim_ascii();
    let (scheme, encoded) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"Basic ") {
        return None;
    }
    let credentials = STANDARD.decode(encoded.trim_ascii()).ok()?;
    let at = line.windows(encoded.len()).position(|part| part == encoded)?;
    Some((line.get(..at)?, credentials))
}

#[cfg(test)]
mod tests;
