//! Why what is said on a stream does not go on.

use super::SILENCE_MAX;

/// What does not fit the granted name, or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unlike {
    #[error("TLS asks for the server {0}")]
    ServerName(String),
    #[error("TLS asks for no server, or for two")]
    NoServerName,
    #[error("TLS hides the server that it asks for (encrypted_client_hello)")]
    HiddenServerName,
    #[error("HTTP asks for the host {0}")]
    Host(String),
    #[error("HTTP asks for no host, or for two")]
    NoHost,
    #[error(
        "{0} is the granted name in another spelling, which servers take differently; \
         spell it in lower case and without a dot at its end"
    )]
    Spelling(String),
    #[error("HTTP asks for a tunnel (CONNECT)")]
    Tunnel,
    #[error("HTTP/2 without TLS cannot be checked")]
    Http2,
    #[error("HTTP asks for more secrets than one request has")]
    Secrets,
    #[error("{0} cannot be checked")]
    Unreadable(&'static str),
    #[error("it is neither HTTP/1 nor TLS; a rule HOST:PORT/raw permits other protocols")]
    Foreign,
    #[error("it is not TLS, over which alone there is a secret for this host and port")]
    NotTls,
    #[error("it is not HTTP/1, which is all that may be spoken in TLS that is opened")]
    NotHttp,
    #[error(
        "the server spoke first, as in neither HTTP/1 nor TLS; \
         a rule HOST:PORT/raw permits other protocols"
    )]
    ServerFirst,
    #[error(
        "nothing that could be checked was said for {} seconds; \
         a rule HOST:PORT/raw permits protocols that wait for the server", SILENCE_MAX.as_secs()
    )]
    Silence,
    /// In opened TLS.
    #[error("TLS of the host cannot be trusted: {0}")]
    Server(String),
    #[error("TLS of the cell ended: {0}")]
    Guest(String),
}

/// For the log: short, and without surprises.
pub fn printable(text: &[u8]) -> String {
    let plain = text.iter().filter(|byte| byte.is_ascii_graphic());
    plain.take(100).map(|byte| char::from(*byte)).collect()
}
