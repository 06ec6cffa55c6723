//! A capability handle: an integer that names one slot during one of its lives.

use core::fmt;

/// Slot index (low 32 bits) and generation (high 32 bits).
///
/// Generation 0 is never given out, so the all-zero handle is always dead.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(u64);

impl Handle {
    /// The handle that never names anything.
    pub const NULL: Handle = Handle(0);
    /// Bits by which the generation is shifted.
    pub const GENERATION_SHIFT: u32 = 32;

    /// Packs a slot index and its generation.
    #[must_use]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self(((generation as u64) << Self::GENERATION_SHIFT) | slot as u64)
    }

    /// Takes an integer that a guest supplied. Nothing is checked here: the table does.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The integer a guest holds.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Index of the slot.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.0 as u32
    }

    /// Life of the slot that this handle belongs to.
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0 >> Self::GENERATION_SHIFT) as u32
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot(), self.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_one_u64() {
        assert_eq!(size_of::<Handle>(), 8);
        assert_eq!(align_of::<Handle>(), 8);
    }

    #[test]
    fn slot_and_generation_do_not_touch() {
        let handle = Handle::new(u32::MAX, 7);
        assert_eq!((handle.slot(), handle.generation()), (u32::MAX, 7));
        assert_eq!(handle.raw(), 0x0000_0007_ffff_ffff);
        assert_eq!(Handle::from_raw(handle.raw()), handle);
    }

    #[test]
    fn null_has_the_dead_generation() {
        assert_eq!(Handle::NULL.generation(), 0);
    }
}
