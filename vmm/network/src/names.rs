//! Addresses that stand for names: what the guest dials when it means a name.
//!
//! The guest never learns where a name really leads, so neither an old nor a
//! forged answer can send a connection elsewhere.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::link;

/// Names that have addresses at once; the oldest gives its own up.
pub const NAMES_MAX: usize = 4096;

/// Which address stands for which name.
#[derive(Debug, Default)]
pub struct Names {
    by_name: HashMap<String, usize>,
    by_index: Vec<String>,
    next: usize,
}

impl Names {
    /// The addresses that stand for `name`, which must be in lower case.
    pub fn addresses(&mut self, name: &str) -> (Ipv4Addr, Ipv6Addr) {
        if name == link::HOST_NAME {
            return (link::HOST_V4, link::HOST_V6);
        }
        let index = match self.by_name.get(name) {
            Some(index) => *index,
            None => self.place(name),
        };
        let v4 = link::NAMES_V4.to_bits() + index as u32;
        let v6 = link::NAMES_V6.to_bits() + index as u128;
        (v4.into(), v6.into())
    }

    fn place(&mut self, name: &str) -> usize {
        let index = self.next;
        self.next = (index + 1) % NAMES_MAX;
        match self.by_index.get_mut(index) {
            Some(old) => {
                self.by_name.remove(old);
                name.clone_into(old);
            }
            None => self.by_index.push(name.to_owned()),
        }
        self.by_name.insert(name.to_owned(), index);
        index
    }

    /// The name that `address` stands for.
    pub fn name(&self, address: IpAddr) -> Option<&str> {
        if address == link::HOST_V4 || address == link::HOST_V6 {
            return Some(link::HOST_NAME);
        }
        let index = match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits().checked_sub(link::NAMES_V4.to_bits())?),
            IpAddr::V6(v6) => v6.to_bits().checked_sub(link::NAMES_V6.to_bits())?,
        };
        self.by_index.get(usize::try_from(index).ok()?).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_addresses_until_too_many_came() {
        let mut names = Names::default();
        let first = names.addresses("a.test");
        assert_eq!(first, names.addresses("a.test"));
        assert_eq!(names.name(first.0.into()), Some("a.test"));
        assert_eq!(names.name(first.1.into()), Some("a.test"));
        assert_ne!(first, names.addresses("b.test"));
        for index in 0..NAMES_MAX {
            names.addresses(&format!("{index}.test"));
        }
        assert_eq!(names.by_index.len(), NAMES_MAX);
        assert_eq!(names.by_name.len(), NAMES_MAX);
        assert_ne!(names.name(first.0.into()), Some("a.test"));
    }

    #[test]
    fn the_host_has_addresses_of_its_own() {
        let mut names = Names::default();
        assert_eq!(names.name(link::HOST_V4.into()), Some(link::HOST_NAME));
        assert_eq!(names.addresses(link::HOST_NAME), (link::HOST_V4, link::HOST_V6));
        assert!(names.by_index.is_empty());
    }

    #[test]
    fn other_addresses_stand_for_nothing() {
        let mut names = Names::default();
        names.addresses("a.test");
        for text in ["198.18.0.1", "198.18.1.1", "1.1.1.1", "::1", "ff02::1", "255.255.255.255"] {
            assert_eq!(names.name(text.parse().unwrap()), None, "{text}");
        }
    }
}
