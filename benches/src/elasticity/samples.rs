//! Two series of samples, one taken in the cell and one on the host, joined by
//! the time stamp counter that both read.

use std::collections::VecDeque;

const PAGE_BYTES: u64 = 4096;

/// What the guest says at one moment, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watched {
    pub at: Moment,
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
    pub at: Moment,
    pub bytes: u64,
}

/// When one began to look, and when one had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub begin: u64,
    pub end: u64,
}

impl Moment {
    fn middle(self) -> u64 {
        self.begin.midpoint(self.end)
    }
}

/// Both at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub stamp: u64,
    pub held: f64,
    /// What was held all the while, from the host's last sample before to its first after.
    /// In a millisecond memory comes and goes by megabytes, so `held` is not so certain.
    pub held_throughout: f64,
    pub used: f64,
    /// The part of `used` that is page cache.
    pub cache: f64,
}

impl Sample {
    /// What is held over what is used, in percent of that.
    pub fn overhead_percent(&self) -> f64 {
        (self.held - self.used) / self.used * 100.0
    }

    /// What is held for as long as it takes the host to sample twice, over what is used.
    pub fn lasting_overhead_percent(&self) -> f64 {
        (self.held_throughout - self.used) / self.used * 100.0
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
    let sample = |[begin, end, free, idle, cache]: [u64; 5]| {
        let at = Moment { begin, end };
        Watched { at, free, idle, cache }
    };
    numbers(text).map(sample).collect()
}

/// All samples of the host, page for page.
pub fn held(text: &str) -> Vec<Held> {
    let page_for_page = |line: &str| {
        let held = |[begin, end, bytes]: [u64; 3]| Held { at: Moment { begin, end }, bytes };
        numbers(line).map(held).next()
    };
    let first_three = |line: &str| {
        let end = line.match_indices(' ').nth(2).map_or(line.len(), |(at, _)| at);
        page_for_page(&line[..end])
    };
    text.lines().filter_map(first_three).collect()
}

/// The samples that say what blocks of 2 MiB would hold.
pub fn held_in_blocks(text: &str) -> Vec<Held> {
    let held = |[begin, end, _, bytes]: [u64; 4]| Held { at: Moment { begin, end }, bytes };
    numbers(text).map(held).collect()
}

/// Guest memory that is in use since before the allocator was there: the
/// kernel's image, which is not in the file, and what was reserved and never
/// touched. It is what the file has fewer of than the allocator is short of,
/// while a cell with the Pager rests (all else in use is then held).
pub fn never_held_bytes(file_bytes: u64, watched: &[Watched], held: &[Held]) -> Option<f64> {
    let mut missing: Vec<f64> = joined(watched, held)
        .map(|(watched, held)| file_bytes as f64 - (watched.free * PAGE_BYTES) as f64 - held.then)
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
            stamp: sample.at.middle(),
            held: held.then,
            held_throughout: held.throughout,
            used: used(sample),
            cache: (sample.cache * PAGE_BYTES) as f64,
        })
        .filter(|sample| sample.used > 0.0)
        .collect()
}

/// What the host held around a guest's sample, in bytes.
struct Around {
    /// At that time, if it changed evenly between the host's samples.
    then: f64,
    /// At least, in all of the host's samples around.
    throughout: f64,
}

/// Each guest sample that has samples of the host on both sides.
fn joined<'a>(
    watched: &'a [Watched],
    held: &'a [Held],
) -> impl Iterator<Item = (&'a Watched, Around)> {
    let mut ahead: VecDeque<&Held> = held.iter().collect();
    watched.iter().filter_map(move |sample| {
        while ahead.get(1).is_some_and(|next| next.at.end <= sample.at.begin) {
            ahead.pop_front();
        }
        let before = ahead.front().filter(|before| before.at.end <= sample.at.begin)?;
        let between = ahead.range(1..).take_while(|held| held.at.begin < sample.at.end);
        let after = ahead.get(1 + between.count())?;
        let around = ahead.iter().take_while(|held| held.at.begin <= after.at.begin);
        let throughout = around.map(|held| held.bytes).min()?;
        let [from, to] = [before, after].map(|held| held.at.middle());
        let share = (sample.at.middle() - from) as f64 / (to - from) as f64;
        let grown = after.bytes as f64 - before.bytes as f64;
        let then = before.bytes as f64 + share * grown;
        Some((sample, Around { then, throughout: throughout as f64 }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(stamp: u64) -> Moment {
        Moment { begin: stamp, end: stamp }
    }

    #[test]
    fn lines_are_read_and_a_cut_line_is_left_out() {
        let sample = Watched { at: Moment { begin: 5, end: 6 }, free: 7, idle: 9, cache: 2 };
        assert_eq!(watched("5 6 7 9 2\n6 8\n"), [sample]);
        let held_at = |begin, bytes| Held { at: Moment { begin, end: begin + 1 }, bytes };
        assert_eq!(held("5 6 7\nx 8\n6 7 9 12\n7"), [held_at(5, 7), held_at(6, 9)]);
        assert_eq!(held_in_blocks("5 6 7\nx 8\n6 7 9 12\n7"), [held_at(6, 12)]);
    }

    #[test]
    fn overhead_is_what_is_held_beyond_what_is_used() {
        let guest = watched("100 100 10 1 5\n140 160 0 0 0\n");
        let host = held("100 100 327680\n200 200 409600\n");
        // 100 pages, 10 free, 80 held at rest: 10 were never there.
        let never = never_held_bytes(409_600, &guest[..1], &host).unwrap();
        assert_eq!(never, 40_960.0);
        let samples = join(409_600, never, &guest, &host);
        assert_eq!((samples[0].used, samples[0].cache), (79.0 * 4096.0, 5.0 * 4096.0));
        assert!((samples[0].overhead_percent() - 100.0 / 79.0).abs() < 1e-9);
        assert_eq!((samples[1].held, samples[1].used), (90.0 * 4096.0, 90.0 * 4096.0));
    }

    #[test]
    fn only_what_all_samples_around_hold_lasts() {
        let guest = Watched { at: Moment { begin: 15, end: 25 }, free: 0, idle: 0, cache: 0 };
        let host: Vec<Held> = [(10, 900), (20, 500), (24, 700), (30, 800), (40, 100)]
            .map(|(stamp, bytes)| Held { at: at(stamp), bytes })
            .to_vec();
        let samples = join(400, 0.0, &[guest], &host);
        assert_eq!((samples[0].held, samples[0].held_throughout), (850.0, 500.0));
        assert_eq!(samples[0].lasting_overhead_percent(), 25.0);
    }

    #[test]
    fn samples_that_the_host_did_not_take_are_left_out() {
        let host = held("100 100 1\n200 200 1\n");
        let guest = watched("99 99 0 0 0\n201 201 0 0 0\n");
        assert!(join(1 << 20, 0.0, &guest, &host).is_empty());
    }
}
