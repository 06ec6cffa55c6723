//! Messages of sessions, by their numbers in BuildKit's and fsutil's protocols.

use std::collections::BTreeMap;

use prost::Message;

/// What a [`Packet`] is (`Packet.PacketType`).
pub const STAT: i32 = 0;
pub const REQUEST: i32 = 1;
pub const DATA: i32 = 2;
pub const FINISH: i32 = 3;
pub const ERROR: i32 = 4;

/// `fsutil.types.Packet`
#[derive(Clone, PartialEq, Message)]
pub struct Packet {
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub stat: Option<Stat>,
    #[prost(uint32, tag = "3")]
    pub id: u32,
    #[prost(bytes = "vec", tag = "4")]
    pub data: Vec<u8>,
}

impl Packet {
    pub fn of(kind: i32, id: u32) -> Self {
        Self { kind, id, ..Self::default() }
    }
}

/// `fsutil.types.Stat`; names need not be UTF-8.
#[derive(Clone, PartialEq, Message)]
pub struct Stat {
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// As Go has it.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    #[prost(int64, tag = "5")]
    pub size: i64,
    /// In nanoseconds.
    #[prost(int64, tag = "6")]
    pub modified: i64,
    /// Of a symbolic link where it leads, of another name of a file its first one.
    #[prost(bytes = "vec", tag = "7")]
    pub link: Vec<u8>,
    #[prost(int64, tag = "8")]
    pub major: i64,
    #[prost(int64, tag = "9")]
    pub minor: i64,
    #[prost(btree_map = "string, bytes", tag = "10")]
    pub attributes: BTreeMap<String, Vec<u8>>,
}

/// `BytesMessage` of several services.
#[derive(Clone, PartialEq, Message)]
pub struct Chunk {
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
}

/// `secrets.v1.GetSecretRequest`
#[derive(Clone, PartialEq, Message)]
pub struct SecretId {
    #[prost(string, tag = "1")]
    pub id: String,
}

/// `secrets.v1.GetSecretResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Secret {
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
}

/// `filesync.v1.CredentialsRequest`
#[derive(Clone, PartialEq, Message)]
pub struct Host {
    #[prost(string, tag = "1")]
    pub host: String,
}

/// `filesync.v1.CredentialsResponse`
#[derive(Clone, PartialEq, Message)]
pub struct Credentials {
    #[prost(string, tag = "1")]
    pub username: String,
    #[prost(string, tag = "2")]
    pub secret: String,
}
