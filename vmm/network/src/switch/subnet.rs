//! Ranges of IPv4 addresses, as networks have them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A range of addresses that share their first bits: `172.18.0.0/16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet {
    base: Ipv4Addr,
    prefix: u8,
}

impl Subnet {
    /// Its number of leading bits: with fewer it would be larger than any network, with more there
    /// would be no room for two members.
    const PREFIXES: std::ops::RangeInclusive<u8> = 8..=29;

    /// The subnet of `prefix` bits around `address`; `None` if that is no size for one.
    #[must_use]
    pub fn around(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        let base = Ipv4Addr::from_bits(address.to_bits() & mask(prefix));
        Self::PREFIXES.contains(&prefix).then_some(Self { base, prefix })
    }

    /// The number of leading bits.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Its lowest address, which is nobody's.
    #[must_use]
    pub fn base(self) -> Ipv4Addr {
        self.base
    }

    /// Its highest, which is everybody's.
    #[must_use]
    pub fn broadcast(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.base.to_bits() | !mask(self.prefix))
    }

    /// The address `offset` after its lowest, if that is one of its own.
    #[must_use]
    pub fn nth(self, offset: u32) -> Option<Ipv4Addr> {
        let address = Ipv4Addr::from_bits(self.base.to_bits().checked_add(offset)?);
        self.contains(address).then_some(address)
    }

    /// Whether `address` is in it.
    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.prefix) == self.base.to_bits()
    }

    /// Whether any address is in both.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other.base) || other.contains(self.base)
    }
}

fn mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0)
}

impl FromStr for Subnet {
    type Err = String;

    /// Reads `172.18.0.0/16`; bits behind the prefix are zero.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not a range of IPv4 addresses with a prefix of {} to {} bits, like \
                 172.28.0.0/16",
                Self::PREFIXES.start(),
                Self::PREFIXES.end()
            )
        };
        let (base, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let (base, prefix): (Ipv4Addr, u8) =
            (base.parse().map_err(|_| wrong())?, prefix.parse().map_err(|_| wrong())?);
        Self::around(base, prefix).filter(|subnet| subnet.base == base).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Subnet {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Subnet> for String {
    fn from(subnet: Subnet) -> Self {
        subnet.to_string()
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_are_read_and_hold_their_own_addresses() {
        let subnet: Subnet = "172.18.0.0/16".parse().unwrap();
        assert_eq!(subnet.to_string(), "172.18.0.0/16");
        assert_eq!(subnet.nth(2), Some(Ipv4Addr::new(172, 18, 0, 2)));
        assert_eq!(subnet.nth(1 << 16), None);
        assert_eq!(subnet.broadcast(), Ipv4Addr::new(172, 18, 255, 255));
        assert!(subnet.contains(Ipv4Addr::new(172, 18, 9, 9)));
        assert!(!subnet.contains(Ipv4Addr::new(172, 19, 0, 0)));
        let small: Subnet = "172.18.4.0/24".parse().unwrap();
        assert!(subnet.overlaps(small) && small.overlaps(subnet));
        assert!(!small.overlaps("172.18.5.0/24".parse().unwrap()));
        let text = "172.18.0.1/16 172.18.0.0 172.18.0.0/7 10.0.0.0/30 fd00::/64 x/16 10.0.0.0/x /";
        for wrong in text.split(' ') {
            assert!(wrong.parse::<Subnet>().unwrap_err().contains("like 172.28.0.0/16"), "{wrong}");
        }
    }
}
