//! What can go wrong: in the table, and in reading a grant.

use crate::{Handle, Kind, Status};

/// A failed table operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Every slot is taken, or used up.
    #[error("the capability table is full ({capacity} slots); revoke what is no longer used")]
    Full {
        /// Slots the table was made with.
        capacity: u32,
    },
    /// The handle names nothing: never given out, or revoked since.
    #[error("handle {handle} names no capability; it was revoked or never given out")]
    NotPresent {
        /// The handle as it was presented.
        handle: Handle,
    },
    /// The handle names a capability of another kind.
    #[error("handle {handle} is a {found} capability, not a {expected} one")]
    WrongKind {
        /// The handle as it was presented.
        handle: Handle,
        /// The kind the request needs.
        expected: Kind,
        /// The kind it has.
        found: Kind,
    },
    /// The capability is there and does not cover the request.
    #[error(transparent)]
    Denied(Box<Denial>),
}

impl TableError {
    /// The number a guest gets.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Self::Full { .. } => Status::Full,
            Self::NotPresent { .. } => Status::NotPresent,
            Self::WrongKind { .. } => Status::WrongKind,
            Self::Denied(_) => Status::Denied,
        }
    }
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("capability `{capability}` of {holder} refuses this: {rule}")]
pub struct Denial {
    /// Name of the capability that was asked.
    pub capability: String,
    /// Who holds it.
    pub holder: String,
    /// The rule that was broken, in words.
    pub rule: String,
}

/// A grant that cannot be used as it was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapsError {
    /// The text is not TOML or JSON of the right shape.
    #[error("capability file, line {line}: {message}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// The file is larger than any grant needs to be.
    #[error("the capability file has {bytes} bytes; the limit is {max}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The file is for another version of this program.
    #[error("capability file version {found} is not known; write `version = 1`")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// One value is out of range or contradicts another.
    #[error("{key}: {message}")]
    Value {
        /// The key in the file, or the flag.
        key: String,
        /// What is wrong and what to write.
        message: String,
    },
    /// A flag asks for more than the capability file grants.
    #[error(
        "{flag} asks for {asked}, but the capability file grants {granted} ({capability}); flags can only narrow it"
    )]
    Exceeds {
        /// The flag as a person typed it.
        flag: String,
        /// The capability it exceeds.
        capability: String,
        /// What was asked for.
        asked: String,
        /// What there is.
        granted: String,
    },
    /// An isolate in a `vm` cell asks for more than the cell has.
    #[error(
        "the isolate asks for {asked}, but the cell that it is in has {granted} ({capability}); ask for less, or grant the cell more when it starts"
    )]
    Beyond {
        /// The capability.
        capability: String,
        /// What was asked for.
        asked: String,
        /// What there is.
        granted: String,
    },
    /// Something needs a capability that the grant lacks.
    #[error("capability `{capability}` is not granted; add {remedy}")]
    Missing {
        /// The capability.
        capability: String,
        /// The lines to add to the file.
        remedy: String,
    },
}
