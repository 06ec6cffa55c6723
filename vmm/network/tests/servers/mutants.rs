//! Variants of seeds, the same ones every time.

/// No mutant becomes longer than this, in bytes.
const BYTES_MAX: usize = 2000;

/// An endless supply of them.
pub struct Mutants {
    /// xorshift64* (S. Vigna, 2014).
    state: u64,
    seeds: Vec<Vec<u8>>,
    words: &'static [&'static str],
}

impl Mutants {
    /// Of seeds that are not too long; parts of them are replaced by `words` now and then.
    pub fn new(mut seeds: Vec<Vec<u8>>, words: &'static [&'static str]) -> Self {
        seeds.retain(|seed| seed.len() < BYTES_MAX);
        Self { state: 0x9e37_79b9_7f4a_7c15, seeds, words }
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let number = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        number as usize % limit.max(1)
    }

    /// A seed with one to three changes, of bytes, lines or words.
    pub fn next_mutant(&mut self) -> Vec<u8> {
        let at = self.below(self.seeds.len());
        let mut bytes = self.seeds[at].clone();
        for _ in 0..=self.below(3) {
            self.change(&mut bytes);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() + 1);
        let end = (at + 1 + self.below(4)).min(bytes.len());
        match self.below(8) {
            0 => drop(bytes.drain(at..end.max(at))),
            1 => bytes.insert(at, self.below(256) as u8),
            2 if at < bytes.len() => bytes[at] = self.below(256) as u8,
            3 if at < bytes.len() => bytes[at] ^= 0x20,
            4 | 5 => {
                let word = self.words[self.below(self.words.len())];
                bytes.splice(at..at, word.bytes());
            }
            6 => self.lines(bytes),
            _ => {
                let word = self.words[self.below(self.words.len())];
                let line = line_at(bytes, at);
                bytes.splice(line, word.bytes());
            }
        }
    }

    /// Takes a line away, or puts it elsewhere too.
    fn lines(&mut self, bytes: &mut Vec<u8>) {
        let (from, to) = (self.below(bytes.len() + 1), self.below(bytes.len() + 1));
        let line = line_at(bytes, from);
        let copy = bytes[line.clone()].to_vec();
        match self.below(2) {
            0 => drop(bytes.drain(line)),
            _ => {
                let start = line_at(bytes, to).start;
                bytes.splice(start..start, copy);
            }
        }
    }
}

/// The line around `at`, with its end.
fn line_at(bytes: &[u8], at: usize) -> std::ops::Range<usize> {
    let start = bytes[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let end =
        bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| at + end + 1);
    start..end
}
