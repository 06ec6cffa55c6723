//! What the holder of a capability may do with it.

use core::fmt;

bitflags::bitflags! {
    /// A set of rights. Deriving a capability can only take bits away.
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Rights: u32 {
        /// Look at what is there.
        const READ = 1 << 0;
        /// Change what is there.
        const WRITE = 1 << 1;
        /// Run what is there.
        const EXECUTE = 1 << 2;
        /// Open a connection to a peer.
        const CONNECT = 1 << 3;
        /// Accept connections.
        const LISTEN = 1 << 4;
        /// Turn a name into addresses.
        const RESOLVE = 1 << 5;
        /// Consume the resource, up to its quota.
        const USE = 1 << 6;
        /// Change a private layer over what is there.
        const OVERLAY = 1 << 7;
        /// Be in a network with others.
        const JOIN = 1 << 8;
    }
}

impl fmt::Display for Rights {
    /// Lower-case names joined by commas; `none` for the empty set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (index, (name, _)) in self.iter_names().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            for letter in name.chars() {
                write!(f, "{}", letter.to_ascii_lowercase())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    #[test]
    fn rights_are_one_u32() {
        assert_eq!(size_of::<Rights>(), 4);
    }

    #[test]
    fn display_names_each_right() {
        assert_eq!((Rights::READ | Rights::EXECUTE).to_string(), "read,execute");
        assert_eq!(Rights::empty().to_string(), "none");
    }
}
