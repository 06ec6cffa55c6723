//! Landlock: the second lock on the file system, for when a mount or
//! namespace rule turns out to be wrong.

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use serde::{Deserialize, Serialize};

use super::JailError;

/// The newest Landlock interface whose rights we name.
const ABI_KNOWN: ABI = ABI::V6;

/// One file or directory that stays reachable.
#[derive(Debug, Clone, Copy)]
pub struct PathGrant<'fd> {
    pub at: BorrowedFd<'fd>,
    pub access: PathAccess,
}

/// What a [`PathGrant`] allows at and below its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PathAccess {
    Read,
    Execute,
    /// Read, write, create and remove, but not execute.
    Write,
    /// Only remove empty directories.
    RemoveDirectories,
}

impl PathAccess {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Self::Read => AccessFs::ReadFile | AccessFs::ReadDir,
            Self::Execute => AccessFs::ReadFile | AccessFs::Execute,
            Self::Write => AccessFs::from_all(ABI_KNOWN) & !BitFlags::from(AccessFs::Execute),
            Self::RemoveDirectories => AccessFs::RemoveDir.into(),
        }
    }
}

/// Denies the calling thread, and what it starts later, every path but
/// `grants`, all TCP, and signals and abstract sockets outside its domain.
/// Weaker on hosts with an older Landlock, absent where there is none.
pub fn restrict_paths(grants: &[PathGrant<'_>]) -> Result<(), JailError> {
    let network = AccessNet::from_all(ABI_KNOWN);
    restrict(ruleset()?.handle_access(network)?, grants)
}

/// The same with networks as they are.
pub fn restrict_to_sockets(grants: &[PathGrant<'_>]) -> Result<(), JailError> {
    restrict(ruleset()?, grants)
}

fn ruleset() -> Result<Ruleset, JailError> {
    Ok(Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI_KNOWN))?
        .scope(Scope::from_all(ABI_KNOWN))?)
}

fn restrict(rules: Ruleset, grants: &[PathGrant<'_>]) -> Result<(), JailError> {
    let mut rules = rules.create()?;
    for grant in grants {
        rules = rules.add_rule(PathBeneath::new(grant.at, grant.access.rights()))?;
    }
    rules.restrict_self()?;
    Ok(())
}

/// The host's Landlock interface version (landlock_create_ruleset(2)), `None`
/// where there is none.
pub fn landlock_abi() -> Option<u32> {
    const CREATE_RULESET_VERSION: u32 = 1;
    let no_attributes: *const libc::c_void = std::ptr::null();
    // SAFETY: with a null pointer, size 0 and the VERSION flag the call reads
    // no memory. Needed because the crate does not tell the version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            no_attributes,
            0usize,
            CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(version).ok().filter(|version| *version > 0)
}
