//! What a capability is a capability to.

use core::fmt;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $name:ident = $number:literal, $text:literal;)*) => {
        /// The kind of a capability. Numbers are stable.
        #[repr(u32)]
        #[non_exhaustive]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($(#[doc = $doc])* $name = $number,)*
        }

        impl Kind {
            /// Every kind, by rising number.
            pub const ALL: &'static [Kind] = &[$(Kind::$name),*];

            /// The name used in files and messages.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Kind::$name => $text,)*
                }
            }
        }
    };
}

kinds! {
    /// A tree of files of the host, shown at a path of the guest.
    Folder = 1, "folder";
    /// Connections to, listening for and resolving of named peers.
    Network = 2, "network";
    /// Bytes of memory.
    Memory = 3, "memory";
    /// Virtual processors and their weight against other cells.
    Cpu = 4, "cpu";
    /// Bytes of private writable storage.
    Disk = 5, "disk";
    /// Processes and threads alive at once.
    Processes = 6, "processes";
    /// Wall time from start to the end, in nanoseconds.
    Time = 7, "time";
    /// Reading clocks and sleeping.
    Clock = 8, "clock";
    /// Random bytes.
    Random = 9, "random";
    /// The three standard streams.
    Stdio = 10, "stdio";
    /// A named device.
    Device = 11, "device";
    /// Starting isolates or cells inside.
    Spawn = 12, "spawn";
    /// Instructions an isolate may execute, counted deterministically.
    Fuel = 13, "fuel";
    /// A model that may be computed, by name.
    Model = 14, "model";
}

impl Kind {
    /// The kind with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as u32 == number)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_from_one_without_a_gap() {
        for (index, kind) in Kind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, index + 1, "{kind}");
            assert_eq!(Kind::from_number(*kind as u32), Some(*kind));
        }
    }

    #[test]
    fn numbers_without_a_kind_are_refused() {
        assert_eq!(Kind::from_number(0), None);
        assert_eq!(Kind::from_number(Kind::ALL.len() as u32 + 1), None);
    }

    #[test]
    fn a_kind_is_four_bytes() {
        assert_eq!(size_of::<Kind>(), 4);
    }
}
