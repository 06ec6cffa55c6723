//! Capability sets by the names that a specification has for them (capabilities(7)).

use exocell_agent::oci::{CAPABILITIES, Capabilities};

use crate::error::InitError;

/// How many there are.
pub const COUNT: u32 = CAPABILITIES.len() as u32;

/// The five sets of a process, a bit for each capability.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sets {
    pub bounding: u64,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub ambient: u64,
}

impl Sets {
    /// # Errors
    /// A name that no capability has.
    pub fn read(named: &Capabilities) -> Result<Self, InitError> {
        Ok(Self {
            bounding: set(&named.bounding)?,
            effective: set(&named.effective)?,
            permitted: set(&named.permitted)?,
            inheritable: set(&named.inheritable)?,
            ambient: set(&named.ambient)?,
        })
    }

    /// What an ordinary user has of them: what a program may still give (execve(2)).
    #[must_use]
    pub fn of_ordinary_user(self) -> Self {
        Self { bounding: self.bounding, ..Self::default() }
    }
}

fn set(names: &[String]) -> Result<u64, InitError> {
    names.iter().try_fold(0, |set, name| Ok(set | 1 << number(name)?))
}

fn number(name: &str) -> Result<usize, InitError> {
    let plain = name.strip_prefix("CAP_").unwrap_or(name);
    let at = CAPABILITIES.iter().position(|known| *known == plain);
    at.ok_or_else(|| InitError::invalid(format!("no capability {name}; see capabilities(7)")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_bits_of_the_kernel() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let docker = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FSETID CAP_FOWNER CAP_MKNOD CAP_NET_RAW \
                      CAP_SETGID CAP_SETUID CAP_SETFCAP CAP_SETPCAP CAP_NET_BIND_SERVICE \
                      CAP_SYS_CHROOT CAP_KILL CAP_AUDIT_WRITE";
        assert_eq!(set(&words(docker)).unwrap(), 0xa804_25fb);
        assert_eq!(set(&words("CAP_CHECKPOINT_RESTORE")).unwrap(), 1 << 40);
        assert!(set(&words("CAP_ALL")).is_err());
        let sets = Sets { bounding: 3, effective: 3, permitted: 3, inheritable: 1, ambient: 1 };
        assert_eq!(sets.of_ordinary_user(), Sets { bounding: 3, ..Sets::default() });
    }
}
