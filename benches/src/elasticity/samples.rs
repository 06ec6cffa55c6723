//! Two series of samples, one taken in the cell and one on the host, joined by
//! the time stamp counter that both read.

use std::collections::VecDeque;

const PAGE_BYTES: u64 = 4096;

/// What the guest says at one moment, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watched {
    pub stamp: u64,
    /// On the allocator's lists of free memory.
    pub free: u64,
    /// Free, but on a CPU's list.
    pub idle: u64,
    /// Used, by files that programs have read or written.
    pub cache: u64,
}

/// What the host has allocated for the guest's memory file, or would have with
/// another grain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    pub stamp: u64,
    pub bytes: u64,
}

/// Both at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub stamp: u64,
    pub held: f64,
    pub used: f64,
    /// The part of `used` that is page cache.
    pub cache: f64,
}

impl Sample {
    /// What is held over what is used, in percent of that.
    pub fn overhead_percent(&self) -> f64 {
        (self.held - self.used) / self.used * 100.0
    }
}

/// Lines of numbers; a line that is cut off is left out.
fn numbers<const N: usize>(text: &str) -> impl Iterator<Item = [u64; N]> {
    text.lines().filter_map(|line| {
        let numbers: Option<Vec<u64>> = line.split(' ').map(|word| word.parse().ok()).collect();
        numbers?.try_into().ok()
    })
}

pub fn watched(text: &str) -> Vec<Watched> {
    let sample = |[stamp, free, idle, cache]: [u64; 4]| Watched { stamp, free, idle, cache };
    numbers(text).map(sample).collect()
}

/// All samples of the host, page for page.
pub fn held(text: &str) -> Vec<Held> {
    let page_for_page =
        |line: &str| numbers(line).map(|[stamp, bytes]| Held { stamp, bytes }).next();
    let first_two = |line: &str| {
        let end = line.match_indices(' ').nth(1).map_or(line.len(), |(at, _)| at);
        page_for_page(&line[..end])
    };
    text.lines().filter_map(first_two).collect()
}

/// The samples that say what blocks of 2 MiB would hold.
pub fn held_in_blocks(text: &str) -> Vec<Held> {
    numbers(text).map(|[stamp, _, bytes]| Held { stamp, bytes }).collect()
}

/// Guest memory that is in use since before the allocator was there: the
/// kernel's image, which is not in the file, and what was reserved and never
/// touched. It is what the file has fewer of than the allocator is short of,
/// while a cell with the Pager rests (all else in use is then held).
pub fn never_held_bytes(file_bytes: u64, watched: &[Watched], held: &[Held]) -> Option<f64> {
    let mut missing: Vec<f64> = joined(watched, held)
        .map(|(watched, held)| file_bytes as f64 - (watched.free * PAGE_BYTES) as f64 - held)
        .collect();
    missing.sort_unstable_by(f64::total_cmp);
    missing.get(missing.len() / 2).copied()
}

/// The samples of a run; what the CPUs' lists hold counts as not used.
pub fn join(file_bytes: u64, never_held: f64, watched: &[Watched], held: &[Held]) -> Vec<Sample> {
    let used = |sample: &Watched| {
        file_bytes as f64 - ((sample.free + sample.idle) * PAGE_BYTES) as f64 - never_held
    };
    joined(watched, held)
        .map(|(sample, held)| Sample {
            stamp: sample.stamp,
            held,
            used: used(sample),
            cache: (sample.cache * PAGE_BYTES) as f64,
        })
        .filter(|sample| sample.used > 0.0)
        .collect()
}

/// Each guest sample with what the host held then, between its two nearest samples.
fn joined<'a>(
    watched: &'a [Watched],
    held: &'a [Held],
) -> impl Iterator<Item = (&'a Watched, f64)> {
    let mut ahead: VecDeque<&Held> = held.iter().collect();
    watched.iter().filter_map(move |sample| {
        while ahead.get(1).is_some_and(|next| next.stamp <= sample.stamp) {
            ahead.pop_front();
        }
        let (before, after) = (ahead.front()?, ahead.get(1)?);
        if before.stamp > sample.stamp {
            return None;
        }
        let share = (sample.stamp - before.stamp) as f64 / (after.stamp - before.stamp) as f64;
        let grown = after.bytes as f64 - before.bytes as f64;
        Some((sample, before.bytes as f64 + share * grown))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_a_cut_line_is_left_out() {
        let sample = Watched { stamp: 5, free: 7, idle: 9, cache: 2 };
        assert_eq!(watched("5 7 9 2\n6 8\n"), [sample]);
        let held_at = |stamp, bytes| Held { stamp, bytes };
        assert_eq!(held("5 7\nx 8\n6 9 12\n7"), [held_at(5, 7), held_at(6, 9)]);
        assert_eq!(held_in_blocks("5 7\nx 8\n6 9 12\n7"), [held_at(6, 12)]);
    }

    #[test]
    fn overhead_is_what_is_held_beyond_what_is_used() {
        let guest = watched("100 10 1 5\n150 0 0 0\n");
        let host = held("100 327680\n200 409600\n");
        // 100 pages, 10 free, 80 held at rest: 10 were never there.
        let never = never_held_bytes(409_600, &guest[..1], &host).unwrap();
        assert_eq!(never, 40_960.0);
        let samples = join(409_600, never, &guest, &host);
        assert_eq!((samples[0].used, samples[0].cache), (79.0 * 4096.0, 5.0 * 4096.0));
        assert!((samples[0].overhead_percent() - 100.0 / 79.0).abs() < 1e-9);
        assert_eq!((samples[1].held, samples[1].used), (90.0 * 4096.0, 90.0 * 4096.0));
    }

    #[test]
    fn samples_that_the_host_did_not_take_are_left_out() {
        let host = held("100 1\n200 1\n");
        assert!(join(1 << 20, 0.0, &watched("99 0 0 0\n201 0 0 0\n"), &host).is_empty());
    }
}
