//! A small deterministic mutator, for where there is no coverage to guide.

/// Values that are more often wrong than others.
const NUMBERS: [u32; 12] =
    [0, 1, 7, 0x7f, 0xff, 0x100, 0x7fff, 0xffff, 0x1_0000, 0x7fff_ffff, 0xffff_fff0, u32::MAX];
/// No input becomes longer than this, in bytes.
const BYTES_MAX: usize = 64 << 10;

/// An endless supply of variants of some seeds; the same one every time.
pub struct Mutator {
    /// xorshift64* (S. Vigna, 2014).
    state: u64,
    seeds: Vec<Vec<u8>>,
}

impl Mutator {
    /// Without seeds there is only the empty input to vary.
    #[must_use]
    pub fn new(seeds: Vec<Vec<u8>>) -> Self {
        let seeds = if seeds.is_empty() { vec![Vec::new()] } else { seeds };
        Self { state: 0x9e37_79b9_7f4a_7c15, seeds }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let number = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        number as usize % limit.max(1)
    }

    /// The next variant: a seed with one to six changes.
    pub fn next_variant(&mut self) -> Vec<u8> {
        let seed = self.below(self.seeds.len());
        let mut bytes = self.seeds[seed].clone();
        for _ in 0..=self.below(6) {
            self.change(&mut bytes);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len());
        let length = 1 + self.below(16);
        let end = (at + length).min(bytes.len());
        match self.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = self.below(256) as u8,
            2 => self.number(bytes, at),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let fresh: Vec<u8> = (0..length).map(|_| self.below(256) as u8).collect();
                bytes.splice(at..at, fresh);
            }
            5 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => {
                let other = self.below(self.seeds.len());
                let from = self.below(self.seeds[other].len());
                bytes.truncate(at);
                bytes.extend_from_slice(&self.seeds[other][from..]);
            }
        }
    }

    /// Writes one of [`NUMBERS`] as 1, 2 or 4 bytes, in either order.
    fn number(&mut self, bytes: &mut [u8], at: usize) {
        let number = NUMBERS[self.below(NUMBERS.len())];
        let mut raw = number.to_le_bytes();
        let width = 1 << self.below(3);
        if self.below(2) == 0 {
            raw[..width].reverse();
        }
        for (to, from) in bytes[at..].iter_mut().zip(&raw[..width]) {
            *to = *from;
        }
    }
}
