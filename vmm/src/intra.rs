//! What stands between a guest's programs and its kernel.

use serde::{Deserialize, Serialize};

/// The isolation inside a `vm` cell. The cell's boundary to the host is the same in
/// every mode: the jail of [`crate::jail`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Intra {
    /// Programs run in host processes of their own, each with its address space.
    #[default]
    Aspace,
    /// Programs share an address space with the guest kernel, and can do what it can
    /// (`fused` on its command line, arch/um/os-Linux/skas/aspace.c of the patched
    /// kernel).
    None,
    /// As [`Self::None`], but protection keys of the processor keep programs from the
    /// guest kernel's memory (`fused=mpk`, arch/x86/um/aspace_keys_64.S).
    Mpk,
}

impl Intra {
    pub const ALL: [Self; 3] = [Self::Aspace, Self::Mpk, Self::None];

    /// Names the mode of cells that do not say otherwise.
    pub const VARIABLE: &str = "EXOCELL_INTRA";

    /// The mode of cells that do not say otherwise: that of [`Self::VARIABLE`], where
    /// the environment has it; else `aspace`, which runs every program. With `mpk` pages of code
    /// that hold the bytes of a key's change within other instructions are not executed.
    ///
    /// # Errors
    ///
    /// The variable's value is no mode, or none that this host can have; the text
    /// names it.
    pub fn preferred() -> Result<Self, String> {
        match std::env::var(Self::VARIABLE) {
            Ok(mode) => mode
                .parse::<Self>()
                .and_then(|mode| mode.check().map(|()| mode))
                .map_err(|why| format!("{}: {why}", Self::VARIABLE)),
            Err(_) => Ok(Self::Aspace),
        }
    }

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aspace => "aspace",
            Self::None => "none",
            Self::Mpk => "mpk",
        }
    }

    /// What tells the guest kernel, if it must be told.
    pub fn argument(self) -> Option<&'static str> {
        match self {
            Self::Aspace => None,
            Self::None => Some("fused"),
            Self::Mpk => Some("fused=mpk"),
        }
    }

    /// Whether this host has what the mode needs.
    ///
    /// # Errors
    ///
    /// It has not; the text says what is missing and what to choose instead.
    pub fn check(self) -> Result<(), String> {
        match self {
            Self::Aspace | Self::None => Ok(()),
            Self::Mpk => crate::host::protection_keys()
                .map(|_| ())
                .map_err(|why| format!("--intra mpk: {why}; choose aspace (see `exocell doctor`)")),
        }
    }
}

impl std::fmt::Display for Intra {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Intra {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| {
            format!("{text} is no isolation inside a cell; choose aspace, mpk or none")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written_and_others_refused() {
        for mode in Intra::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("kvm".parse::<Intra>().unwrap_err().contains("choose aspace, mpk or none"));
    }
}
