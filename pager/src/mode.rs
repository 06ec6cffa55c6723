//! How a guest's memory comes and goes.

use serde::{Deserialize, Serialize};

/// What the guest kernel's page allocator does with the host's memory
/// (`pager=` on its command line, drivers/pager of the patched kernel).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The host backs what the guest touches, and gets it back at the end.
    Off,
    /// Pages are backed when the allocator hands them out and given back when
    /// it takes them in. Where the host has none left, the allocation fails.
    Eager,
    /// The same, and pages of files that nobody reads go by and by, slower where
    /// programs have to wait for memory.
    Cold,
    /// The guest kernel hands pages out within a credit and the host backs each when
    /// it is touched; what is freed goes back as with [`Self::Eager`].
    #[default]
    Credit,
    /// Not the Pager but free page reporting, some seconds later, of every free
    /// page: to compare the Pager with. A host without memory kills the cell.
    Report0,
    /// The same, of free blocks of 2 MiB.
    Report9,
}

impl Mode {
    pub const ALL: [Self; 6] =
        [Self::Off, Self::Eager, Self::Cold, Self::Credit, Self::Report0, Self::Report9];

    /// Its name on command lines, the guest kernel's included.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Eager => "eager",
            Self::Cold => "cold",
            Self::Credit => "credit",
            Self::Report0 => "report0",
            Self::Report9 => "report9",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| {
            format!(
                "{text} is no way to handle memory; choose off, eager, cold, credit, report0 or report9"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written_and_others_refused() {
        for mode in Mode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("lazy".parse::<Mode>().unwrap_err().contains("choose off, eager,"));
    }
}
