//! Which networks between cells a guest is in, as its supervisor knows it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use exocell_network::stack::Changer;
use exocell_network::switch::{PORTS_MAX, Port};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A network at a place.
struct Place {
    network: String,
    address: Ipv4Addr,
    /// The same as the stack's: whether the switch lives.
    socket: Option<OwnedFd>,
}

/// The networks of one guest, each at its place, and who is told of changes.
#[derive(Default)]
pub(super) struct Joined {
    changer: Option<Changer>,
    places: Mutex<Vec<Option<Place>>>,
}

impl Joined {
    /// Those that a guest begins with, in the order of its ports.
    pub fn new(changer: Changer, ports: &[Port]) -> Self {
        let places = ports.iter().map(|port| Some(Place::of(port))).collect();
        Self { changer: Some(changer), places: Mutex::new(places) }
    }

    fn places(&self) -> MutexGuard<'_, Vec<Option<Place>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the guest into a network, in the stead of an earlier end of it there; at which place.
    pub fn join(&self, port: Port) -> Result<u32, String> {
        let changer = self.changer.as_ref().ok_or("it is in no networks between cells")?;
        let mut places = self.places();
        let is_same = |place: &Option<Place>| {
            place.as_ref().is_some_and(|place| place.network == port.network())
        };
        let same = places.iter().position(is_same);
        let place = same.or_else(|| places.iter().position(Option::is_none));
        let place = place.unwrap_or(places.len());
        if place >= PORTS_MAX {
            return Err(format!("a cell is in at most {PORTS_MAX} networks"));
        }
        if places.len() <= place {
            places.resize_with(place + 1, || None);
        }
        if let Some(own) = places.get_mut(place) {
            *own = Some(Place::of(&port));
        }
        changer.change_port(place, Some(port));
        Ok(place as u32)
    }

    /// Takes the guest out of a network; at which place it was.
    pub fn leave(&self, network: &str) -> Option<u32> {
        let is_it = |place: &Option<Place>| {
            place.as_ref().is_some_and(|place| place.network.eq_ignore_ascii_case(network))
        };
        let place = self.places().iter().position(is_it)?;
        self.leave_place(place as u32);
        Some(place as u32)
    }

    pub fn leave_place(&self, place: u32) {
        if let Some(own) = self.places().get_mut(place as usize) {
            *own = None;
        }
        if let Some(changer) = &self.changer {
            changer.change_port(place as usize, None);
        }
    }

    pub fn leave_all(&self) {
        let count = self.places().len() as u32;
        (0..count).for_each(|place| self.leave_place(place));
    }

    /// The networks whose switch has ended, and the guest's address in each.
    pub fn lost(&self) -> BTreeMap<String, Ipv4Addr> {
        let places = self.places();
        let lost = places.iter().flatten().filter(|place| place.is_over());
        lost.map(|place| (place.network.clone(), place.address)).collect()
    }
}

impl Place {
    fn of(port: &Port) -> Self {
        let socket = port.as_fd().try_clone_to_owned().ok();
        Self { network: port.network().to_owned(), address: port.address(), socket }
    }

    fn is_over(&self) -> bool {
        let Some(socket) = &self.socket else { return true };
        let mut polled = [PollFd::new(socket.as_fd(), PollFlags::empty())];
        let told = poll(&mut polled, PollTimeout::ZERO);
        told.is_err() || polled[0].any().unwrap_or(true)
    }
}
