//! Who gets which address of a network.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::Subnet;

/// The addresses of a network and the rule by which members get theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Addresses {
    pub subnet: Subnet,
    /// Nobody's: what answers there is the stack of whoever asks.
    pub gateway: Ipv4Addr,
    /// Who names no address gets one of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Subnet>,
    /// Others that nobody gets.
    #[serde(default, skip_serializing_if = "Reserved::is_empty")]
    pub reserved: Reserved,
}

/// Addresses that are set aside, a few.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved([Option<Ipv4Addr>; Self::MAX]);

impl Reserved {
    /// So many at most.
    pub const MAX: usize = 8;

    /// `None` where there are too many.
    #[must_use]
    pub fn of(addresses: &[Ipv4Addr]) -> Option<Self> {
        let mut own = Self::default();
        for (index, address) in addresses.iter().enumerate() {
            *own.0.get_mut(index)? = Some(*address);
        }
        Some(own)
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn contains(&self, address: Ipv4Addr) -> bool {
        self.0.contains(&Some(address))
    }
}

impl Addresses {
    /// Those of `subnet`, with its first address as the gateway unless another is named.
    ///
    /// # Errors
    /// In words for whoever named them: one is not the subnet's.
    pub fn new(
        subnet: Subnet,
        gateway: Option<Ipv4Addr>,
        range: Option<Subnet>,
    ) -> Result<Self, String> {
        let gateway = gateway.or_else(|| subnet.nth(1)).unwrap_or(subnet.base());
        let own = Self { subnet, gateway, range, reserved: Reserved::default() };
        if !own.is_usable(gateway) {
            return Err(format!("the gateway {gateway} is not an address of {subnet}"));
        }
        match range.filter(|range| !subnet.overlaps(*range) || range.prefix() < subnet.prefix()) {
            Some(range) => Err(format!("the range {range} is not part of {subnet}")),
            None => Ok(own),
        }
    }

    fn is_usable(&self, address: Ipv4Addr) -> bool {
        let subnet = self.subnet;
        subnet.contains(address) && address != subnet.base() && address != subnet.broadcast()
    }

    /// The address `wished` for, or else the first that nobody has.
    ///
    /// # Errors
    /// In words: it is somebody's, or not one of this network's; or there are no more.
    pub fn give(
        &self,
        wished: Option<Ipv4Addr>,
        is_taken: impl Fn(Ipv4Addr) -> bool,
    ) -> Result<Ipv4Addr, String> {
        let Self { subnet, gateway, .. } = self;
        match wished {
            Some(address) if !self.is_usable(address) => Err(format!(
                "{address} is not an address of the network, which has {subnet}; choose another"
            )),
            Some(address) if address == *gateway => {
                Err(format!("{address} is the network's gateway; choose another"))
            }
            Some(address) if is_taken(address) => {
                Err(format!("Address already in use: {address} is another cell's; choose another"))
            }
            Some(address) => Ok(address),
            None => {
                let range = self.range.unwrap_or(*subnet);
                let each = (0..).map_while(|offset| range.nth(offset));
                let mut free = each.filter(|address| {
                    self.is_usable(*address)
                        && address != gateway
                        && !self.reserved.contains(*address)
                        && !is_taken(*address)
                });
                free.next().ok_or_else(|| {
                    format!("no address of {range} is free; make a network with a larger subnet")
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_member_has_an_address_of_its_own() {
        let subnet: Subnet = "10.9.8.0/29".parse().unwrap();
        let addresses = Addresses::new(subnet, None, None).unwrap();
        let at = |last| Ipv4Addr::new(10, 9, 8, last);
        assert_eq!(addresses.gateway, at(1));
        let mut taken = Vec::new();
        for _ in 2..=6 {
            let next = addresses.give(None, |address| taken.contains(&address)).unwrap();
            assert!(!taken.contains(&next));
            taken.push(next);
        }
        assert_eq!(taken, [2, 3, 4, 5, 6].map(at));
        let is_taken = |address| taken.contains(&address);
        assert!(addresses.give(None, is_taken).unwrap_err().contains("no address"));
        for (wished, words) in
            [(0, "not an address"), (1, "gateway"), (2, "in use"), (7, "not an"), (8, "not an")]
        {
            let error = addresses.give(Some(at(wished)), is_taken).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        taken.clear();
        assert_eq!(addresses.give(Some(at(6)), |_| false), Ok(at(6)));
    }

    #[test]
    fn a_range_and_a_gateway_lie_within_their_subnet() {
        let subnet: Subnet = "10.9.0.0/16".parse().unwrap();
        let range: Subnet = "10.9.4.0/24".parse().unwrap();
        let gateway = Ipv4Addr::new(10, 9, 4, 0);
        let addresses = Addresses::new(subnet, Some(gateway), Some(range)).unwrap();
        assert_eq!(addresses.give(None, |_| false), Ok(Ipv4Addr::new(10, 9, 4, 1)));
        assert!(Addresses::new(subnet, Some(Ipv4Addr::new(10, 8, 0, 1)), None).is_err());
        assert!(Addresses::new(subnet, None, Some("10.0.0.0/8".parse().unwrap())).is_err());
        assert!(Addresses::new(subnet, None, Some("10.8.0.0/24".parse().unwrap())).is_err());
    }
}
