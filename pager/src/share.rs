//! Who gets how much of a budget: pure arithmetic, in bytes.
//!
//! What cells are guaranteed is set aside, used or not, so that a guarantee never
//! depends on what another guest does. The rest is lent: to whoever asks while there
//! is some, and in equal parts once there is not.

/// What one cell has of the budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    pub guarantee: u64,
    /// Its credit, with what it has taken.
    pub granted: u64,
    /// What it asked for of late and did not get.
    pub short: u64,
    /// What it may take of the host beside its memory, which is not of the budget.
    pub beside: u64,
}

/// What a guest kernel needs to boot: it has a table of all memory, 64 bytes for a
/// page, and asks for credit when that is there.
pub fn guarantee_bytes_min(memory_bytes: u64) -> u64 {
    memory_bytes.min((24 << 20) + memory_bytes / 32)
}

impl Share {
    /// What nobody else can have.
    pub fn held(&self) -> u64 {
        self.guarantee.max(self.granted)
    }

    /// What was lent to it.
    fn lent(&self) -> u64 {
        self.granted.saturating_sub(self.guarantee)
    }

    /// What it is short of and has a right to before others are lent more.
    fn due(&self, part: u64) -> u64 {
        self.short.min(part.saturating_sub(self.lent()))
    }
}

/// What is neither set aside nor lent.
pub fn left(budget: u64, shares: &[Share]) -> u64 {
    budget.saturating_sub(shares.iter().map(Share::held).sum())
}

/// An equal part of what can be lent, for each cell that has or wants some, `asks`
/// among them.
fn part(budget: u64, shares: &[Share], asks: Option<usize>) -> u64 {
    let wants =
        |(at, share): &(usize, &Share)| share.lent() > 0 || share.short > 0 || Some(*at) == asks;
    let cells = shares.iter().enumerate().filter(wants).count() as u64;
    let guaranteed: u64 = shares.iter().map(|share| share.guarantee).sum();
    budget.saturating_sub(guaranteed) / cells.max(1)
}

/// Of the `want` bytes that cell `at` asks for, what it gets.
pub fn grant(budget: u64, shares: &[Share], at: usize, want: u64) -> u64 {
    let Some(own) = shares.get(at) else { return 0 };
    let within = want.min(own.guarantee.saturating_sub(own.granted));
    let part = part(budget, shares, Some(at));
    let left = left(budget, shares);
    let others: u64 = others(shares, at).map(|share| share.due(part)).sum();
    // Up to its part nobody comes before it; beyond, who is short of his does.
    let own_part = left.min(part.saturating_sub(own.lent()));
    within + (want - within).min(own_part.max(left.saturating_sub(others)))
}

/// Whether cell `at` has less than its part while others have more than theirs.
pub fn is_due(budget: u64, shares: &[Share], at: usize) -> bool {
    let part = part(budget, shares, Some(at));
    shares.get(at).is_some_and(|own| own.lent() < part)
        && others(shares, at).any(|share| share.lent() > part)
}

/// What cell `at` should give back, so that others get their part.
pub fn wanted_back(budget: u64, shares: &[Share], at: usize) -> u64 {
    let part = part(budget, shares, None);
    let beyond = |share: &Share| share.lent().saturating_sub(part);
    let Some(own) = shares.get(at).map(beyond).filter(|own| *own > 0) else { return 0 };
    let due: u64 = others(shares, at).map(|share| share.due(part)).sum();
    let missing = due.saturating_sub(left(budget, shares));
    let all: u64 = shares.iter().map(beyond).sum();
    // In proportion, rounded up, so that together it is enough.
    let asked = (u128::from(missing) * u128::from(own)).div_ceil(u128::from(all));
    own.min(u64::try_from(asked).unwrap_or(u64::MAX))
}

fn others(shares: &[Share], at: usize) -> impl Iterator<Item = &Share> {
    shares.iter().enumerate().filter(move |(other, _)| *other != at).map(|(_, share)| share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(guarantee: u64, granted: u64, short: u64) -> Share {
        Share { guarantee, granted, short, beside: 0 }
    }

    #[test]
    fn a_guarantee_is_there_whatever_others_have() {
        let shares = [share(30, 10, 0), share(30, 70, 50)];
        assert_eq!(left(100, &shares), 0);
        assert_eq!(grant(100, &shares, 0, 25), 20);
        assert_eq!(grant(100, &shares, 1, 1), 0);
    }

    #[test]
    fn what_is_left_is_lent_to_whoever_asks() {
        let shares = [share(10, 10, 0), share(10, 0, 0), share(10, 30, 0)];
        assert_eq!(grant(100, &shares, 0, 40), 40);
        assert_eq!(grant(100, &shares, 0, 60), 50);
        assert_eq!(grant(100, &shares, 7, 60), 0);
    }

    #[test]
    fn who_has_its_part_waits_for_who_has_not() {
        // 80 to lend, 40 each; 10 of it are left.
        let shares = [share(10, 60, 0), share(10, 30, 30)];
        assert_eq!(grant(100, &shares, 0, 10), 0);
        assert_eq!(grant(100, &shares, 1, 30), 10);
    }

    #[test]
    fn who_has_more_than_its_part_is_asked_for_what_others_are_due() {
        let shares = [share(10, 90, 0), share(10, 10, 30)];
        assert_eq!(wanted_back(100, &shares, 0), 30);
        assert_eq!(wanted_back(100, &shares, 1), 0);
        // Not below its own part, and not for what is left anyway.
        assert_eq!(wanted_back(100, &[share(10, 90, 0), share(10, 10, 70)], 0), 40);
        assert_eq!(wanted_back(110, &[share(10, 90, 0), share(10, 10, 5)], 0), 0);
        // Two that have more share it.
        let shares = [share(0, 45, 0), share(0, 45, 0), share(0, 10, 20)];
        assert_eq!(wanted_back(100, &shares, 0), 10);
    }

    #[test]
    fn nothing_is_lent_twice() {
        // Sequences of asks and returns, drawn by a generator of our own.
        let mut state = 88_172_645_463_325_252_u64;
        let mut draw = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let mut shares = [share(20, 0, 0), share(30, 0, 0), share(0, 0, 0), share(10, 0, 0)];
        for _ in 0..100_000 {
            let at = draw(4) as usize;
            if draw(3) > 0 {
                let want = draw(50);
                let granted = grant(200, &shares, at, want);
                assert!(granted <= want);
                let within = shares[at].guarantee.saturating_sub(shares[at].granted).min(want);
                assert!(granted >= within);
                shares[at].granted += granted;
                shares[at].short = want - granted;
            } else {
                shares[at].granted -= draw(shares[at].granted + 1);
                shares[at].short = 0;
            }
            assert!(shares.iter().map(Share::held).sum::<u64>() <= 200, "{shares:?}");
        }
    }
}
