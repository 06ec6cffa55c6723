//! Memory, counted over all memories and tables of an isolate.

use wasmtime::ResourceLimiter;

/// Bytes that one table element stands for.
const ELEMENT_BYTES: usize = size_of::<usize>();

/// How much an isolate holds and how much it may.
#[derive(Debug)]
pub(crate) struct Limits {
    bytes: u64,
    bytes_max: u64,
    refused: bool,
}

impl Limits {
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes: 0, bytes_max, refused: false }
    }

    /// Of an isolate that holds something already.
    pub fn holding(bytes: u64, bytes_max: u64) -> Self {
        Self { bytes, ..Self::new(bytes_max) }
    }

    /// Whether something was ever refused.
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// What all memories and tables hold, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    fn grow(&mut self, current: usize, desired: usize, unit: usize) -> bool {
        let more = desired.saturating_sub(current).saturating_mul(unit);
        let bytes = u64::try_from(more).ok().and_then(|more| self.bytes.checked_add(more));
        match bytes.filter(|bytes| *bytes <= self.bytes_max) {
            Some(bytes) => {
                self.bytes = bytes;
                true
            }
            None => {
                self.refused = true;
                false
            }
        }
    }
}

impl ResourceLimiter for Limits {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        // Beyond the module's own maximum it fails whatever is answered, and is not our refusal.
        let beyond = maximum.is_some_and(|maximum| desired > maximum);
        Ok(!beyond && self.grow(current, desired, 1))
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let beyond = maximum.is_some_and(|maximum| desired > maximum);
        Ok(!beyond && self.grow(current, desired, ELEMENT_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memories_and_tables_share_one_limit() {
        let mut limits = Limits::new(1000);
        assert!(limits.memory_growing(0, 600, None).unwrap());
        assert!(limits.table_growing(0, 50, None).unwrap());
        assert!(!limits.refused());
        assert!(!limits.table_growing(50, 51, None).unwrap());
        assert!(limits.refused());
    }

    #[test]
    fn sums_do_not_wrap() {
        let mut limits = Limits::new(u64::MAX);
        assert!(limits.memory_growing(0, usize::MAX, None).unwrap());
        assert!(!limits.table_growing(0, usize::MAX, None).unwrap());
    }

    #[test]
    fn the_modules_own_maximum_is_not_our_refusal() {
        let mut limits = Limits::new(1000);
        assert!(!limits.memory_growing(0, 600, Some(500)).unwrap());
        assert!(!limits.refused());
    }
}
