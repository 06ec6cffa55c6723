//! What a network's switch and those who connect to it say to each other. Each message is one of
//! the socket's (unix(7), SOCK_SEQPACKET): an IP packet as it is, or [`NEWS`] and JSON.

use std::net::Ipv4Addr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first byte of what is no packet: the first four bits of a packet are its version.
pub(crate) const NEWS: u8 = 0;
/// Bytes of the longest message that is no packet: a member with as many names as one may have.
pub(crate) const MESSAGE_BYTES_MAX: usize = 32 << 10;
/// Names of one member.
const NAMES_MAX: usize = 64;
/// Bytes of one name (RFC 1035).
const NAME_BYTES_MAX: usize = 253;

/// What a connection wants; its first message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Ask {
    Join(Join),
    /// Who is there; [`Answer::End`] comes last.
    List,
    /// What the others may call a cell from now on, in lower case; [`Answer::End`] comes when they
    /// know.
    Rename {
        cell: String,
        names: Vec<String>,
    },
}

/// A cell that wants to be a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The cell's id.
    pub cell: String,
    /// What the others may call it, in lower case.
    pub names: Vec<String>,
    /// The address that it wants; any without one.
    pub address: Option<Ipv4Addr>,
}

/// What the switch says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answer {
    Joined { address: Ipv4Addr },
    Refused { message: String },
    Member(Member),
    Gone { address: Ipv4Addr },
    End,
}

/// A cell in a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// The cell's id.
    pub cell: String,
    pub address: Ipv4Addr,
    /// What the others may call it, in lower case.
    pub names: Vec<String>,
}

/// `said` as one message.
pub(super) fn message(said: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![NEWS];
    // What has only strings and addresses always has a form as JSON.
    bytes.extend(serde_json::to_vec(said).unwrap_or_default());
    bytes
}

/// What `bytes` say, if they are such a message.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match bytes {
        [NEWS, text @ ..] if bytes.len() <= MESSAGE_BYTES_MAX => serde_json::from_slice(text).ok(),
        _ => None,
    }
}

/// Where an IPv4 packet comes from and goes to (RFC 791); no more is looked at.
pub(crate) fn ends_of(packet: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let at = |first: usize| {
        let octets: [u8; 4] = packet.get(first..first + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets))
    };
    (packet.first()? >> 4 == 4).then(|| Some((at(12)?, at(16)?)))?
}

/// Whether a member may have these names.
pub(super) fn check_names(names: &[String]) -> Result<(), String> {
    if names.len() > NAMES_MAX {
        return Err(format!("a cell has at most {NAMES_MAX} names in a network"));
    }
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
    let is_name =
        |name: &&String| (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain);
    match names.iter().find(|name| !is_name(name)) {
        Some(name) => Err(format!(
            "`{name}` is no name in a network; use letters, digits, - _ . and at most \
             {NAME_BYTES_MAX} of them"
        )),
        None => Ok(()),
    }
}
