//! A bounded table whose numbers carry a generation: a number that was given back is nobody's, not
//! somebody else's.

use rustix::io::Errno;

/// Slots by number; the low half of a number is the slot's index plus one.
#[derive(Debug)]
pub struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    used: usize,
    max: usize,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Table<T> {
    pub fn new(max: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), used: 0, max }
    }

    pub fn max(&self) -> usize {
        self.max
    }

    pub fn is_full(&self) -> bool {
        self.used >= self.max
    }

    /// The number of the new value; the first of all is 1.
    ///
    /// # Errors
    /// ENFILE where the table is full.
    pub fn insert(&mut self, value: T) -> Result<u64, Errno> {
        if self.is_full() {
            return Err(Errno::NFILE);
        }
        self.used += 1;
        if let Some(index) = self.free.pop() {
            let slot = self.slots.get_mut(index as usize).ok_or(Errno::NFILE)?;
            slot.value = Some(value);
            return Ok(number(slot.generation, index));
        }
        let index = u32::try_from(self.slots.len()).map_err(|_| Errno::NFILE)?;
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Ok(number(0, index))
    }

    fn index(&self, number: u64) -> Option<usize> {
        let index = (number as u32).checked_sub(1)? as usize;
        let slot = self.slots.get(index)?;
        (u64::from(slot.generation) == number >> 32).then_some(index)
    }

    pub fn get(&self, number: u64) -> Option<&T> {
        self.slots.get(self.index(number)?)?.value.as_ref()
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let index = self.index(number)?;
        self.slots.get_mut(index)?.value.as_mut()
    }

    /// Slots that are or were somebody's.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// What is in a slot, and its number.
    pub fn in_slot(&mut self, index: usize) -> Option<(u64, &mut T)> {
        let slot = self.slots.get_mut(index)?;
        let number = number(slot.generation, u32::try_from(index).ok()?);
        slot.value.as_mut().map(|value| (number, value))
    }

    pub fn remove(&mut self, number: u64) -> Option<T> {
        let index = self.index(number)?;
        let slot = self.slots.get_mut(index)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
        self.used -= 1;
        Some(value)
    }

    pub fn clear(&mut self) {
        *self = Self::new(self.max);
    }
}

fn number(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_given_back_is_nobodys() {
        let mut table = Table::new(2);
        assert_eq!(table.insert('a'), Ok(1));
        let second = table.insert('b').unwrap();
        assert_eq!(table.insert('c'), Err(Errno::NFILE));
        assert_eq!(table.remove(second), Some('b'));
        let third = table.insert('c').unwrap();
        assert_ne!(second, third);
        assert_eq!((table.get(second), table.get(third)), (None, Some(&'c')));
        assert_eq!(table.remove(second), None);
        assert_eq!((table.get(0), table.get(u64::MAX), table.used), (None, None, 2));
    }
}
