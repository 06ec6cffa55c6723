//! Words of stacks and memories in few bytes.
//!
//! Most of such words are zero, small, or addresses near others. A region begins with a bit for
//! each line of eight words, set unless all are zero. Then, for each line that is not, two bits
//! a word, and what these stand for: nothing (zero), two bytes (the word), four bytes (the
//! distance from one of the last words that were written out), eight bytes (the word).

/// Words of a line.
const LINE: usize = 8;
/// Words written out that others are near to. Three bits say which.
const RECENT: usize = 8;
/// Bits of a distance.
const NEAR_BITS: u32 = 29;
const NEAR: i64 = 1 << (NEAR_BITS - 1);

const SMALL: u16 = 1;
const CLOSE: u16 = 2;
const WHOLE: u16 = 3;

/// The last words that were written out, the oldest overwritten first.
#[derive(Default)]
struct Recent {
    words: [u64; RECENT],
    next: usize,
}

impl Recent {
    fn add(&mut self, word: u64) {
        if let Some(place) = self.words.get_mut(self.next) {
            *place = word;
        }
        self.next = (self.next + 1) % RECENT;
    }

    /// Which of them is near, and how far.
    fn near(&self, word: u64) -> Option<u32> {
        let distance = |recent: &u64| word.wrapping_sub(*recent).cast_signed();
        let close = |recent: &u64| (-NEAR..NEAR).contains(&distance(recent));
        let which = self.words.iter().position(close)?;
        let far = u32::try_from(distance(self.words.get(which)?) + NEAR).ok()?;
        Some(u32::try_from(which).ok()? << NEAR_BITS | far)
    }

    fn word(&self, near: u32) -> Option<u64> {
        let distance = i64::from(near & ((1 << NEAR_BITS) - 1)) - NEAR;
        let recent = self.words.get((near >> NEAR_BITS) as usize)?;
        Some(recent.wrapping_add_signed(distance))
    }
}

/// Adds `words`, packed, to `bytes`.
pub(super) fn pack(words: &[u64], bytes: &mut Vec<u8>) {
    let mask_at = bytes.len();
    bytes.resize(mask_at + mask_bytes(words.len()), 0);
    let mut recent = Recent::default();
    for (index, line) in words.chunks(LINE).enumerate() {
        if line.iter().all(|word| *word == 0) {
            continue;
        }
        if let Some(mask) = bytes.get_mut(mask_at + index / 8) {
            *mask |= 1 << (index % 8);
        }
        pack_line(line, &mut recent, bytes);
    }
}

fn pack_line(line: &[u64], recent: &mut Recent, bytes: &mut Vec<u8>) {
    let tags_at = bytes.len();
    bytes.extend([0; 2]);
    let mut tags = 0;
    for (index, word) in line.iter().enumerate() {
        let tag = if *word == 0 {
            0
        } else if let Ok(small) = u16::try_from(*word) {
            bytes.extend(small.to_le_bytes());
            SMALL
        } else if let Some(near) = recent.near(*word) {
            bytes.extend(near.to_le_bytes());
            CLOSE
        } else {
            bytes.extend(word.to_le_bytes());
            recent.add(*word);
            WHOLE
        };
        tags |= tag << (2 * index);
    }
    if let Some(place) = bytes.get_mut(tags_at..tags_at + 2) {
        place.copy_from_slice(&tags.to_le_bytes());
    }
}

fn mask_bytes(words: usize) -> usize {
    words.div_ceil(LINE).div_ceil(8)
}

/// Fills `words` with what was packed, and answers with the bytes behind it; `None` if these are
/// not the packed words.
pub(super) fn unpack<'a>(bytes: &'a [u8], words: &mut [u64]) -> Option<&'a [u8]> {
    let (mask, mut bytes) = bytes.split_at_checked(mask_bytes(words.len()))?;
    let mut recent = Recent::default();
    for (index, line) in words.chunks_mut(LINE).enumerate() {
        if mask.get(index / 8)? & (1 << (index % 8)) == 0 {
            line.fill(0);
            continue;
        }
        let mut tags = u16::from_le_bytes(take(&mut bytes)?);
        for word in line {
            *word = match tags & 3 {
                SMALL => u64::from(u16::from_le_bytes(take(&mut bytes)?)),
                CLOSE => recent.word(u32::from_le_bytes(take(&mut bytes)?))?,
                WHOLE => {
                    let word = u64::from_le_bytes(take(&mut bytes)?);
                    recent.add(word);
                    word
                }
                _ => 0,
            };
            tags >>= 2;
        }
    }
    Some(bytes)
}

/// The next `N` bytes.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(words: &[u64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        pack(words, &mut bytes);
        bytes
    }

    #[test]
    fn what_is_zero_small_or_near_takes_few_bytes() {
        assert_eq!(packed(&[0; 512]).len(), 8);
        assert_eq!(packed(&[7, 0, 0, 0, 0, 0, 0, 0, 0]).len(), 1 + 2 + 2);
        let base = 0x5638_1f2c_ee6f_u64;
        let near = [base, base + 1, base - (1 << 28), base + (1 << 28) - 1, u64::MAX];
        assert_eq!(packed(&near).len(), 1 + 2 + 8 + 4 * 4);
        assert_eq!(packed(&[base, base + (1 << 28)]).len(), 1 + 2 + 8 + 8);
    }

    fn word() -> impl Strategy<Value = u64> {
        let base = prop::sample::select(vec![0, 1 << 16, 0x5638_1f2c_ee6f, 0x7fb0_5c54_c000]);
        let near = (base, any::<u32>()).prop_map(|(base, more): (u64, _)| base + u64::from(more));
        prop_oneof![4 => Just(0), 1 => 0u64..70_000, 2 => near, 1 => any::<u64>()]
    }

    proptest! {
        #[test]
        fn words_come_back(words in prop::collection::vec(word(), 0..700), more in any::<[u8; 3]>()) {
            let mut bytes = packed(&words);
            bytes.extend(more);
            let mut back = vec![u64::MAX; words.len()];
            prop_assert_eq!(unpack(&bytes, &mut back), Some(&more[..]));
            prop_assert_eq!(&back, &words);
        }

        #[test]
        fn other_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut words = [0; 100];
            let _ = unpack(&bytes, &mut words);
        }
    }
}
