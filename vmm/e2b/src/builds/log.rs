//! What a build has said: its first lines and its last ones, within a bound.
//!
//! ```text
//! first lines (1 MiB) │ "goes on" │ while it runs, kept apart: the last 1 MiB
//!                                 └── at its end: │ "N lines were left out" │ those
//! ```
//! Clients ask for lines by their number, so what was told once stays where it is.

use std::collections::VecDeque;

use exocell_cell::agent::printable_lines;
use exocell_cell::now_ms;

use crate::bounds::Share;

/// Bytes of the first lines, and of the last.
const FIRST_BYTES_MAX: u64 = 1 << 20;
const LAST_BYTES_MAX: u64 = 1 << 20;
/// Bytes of one line.
const LINE_BYTES_MAX: usize = 4096;
/// What a line takes beside its text.
const LINE_COST: u64 = 64;

/// When, and what.
pub type Line = (u64, String);

/// See the module's head.
pub struct Log {
    /// Those that clients are told.
    lines: Vec<Line>,
    first_bytes: u64,
    last: VecDeque<Line>,
    last_bytes: u64,
    left_out: u64,
    is_long: bool,
    /// The end of what a program has written, before its line is whole.
    rest: Vec<u8>,
    /// Of what its tenant's builds may say.
    held: Share,
}

impl Log {
    pub fn new(held: Share) -> Self {
        Self {
            lines: Vec::new(),
            first_bytes: 0,
            last: VecDeque::new(),
            last_bytes: 0,
            left_out: 0,
            is_long: false,
            rest: Vec::new(),
            held,
        }
    }

    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// What a program has written.
    pub fn output(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            for part in piece.chunks(LINE_BYTES_MAX) {
                self.rest.extend(part);
                if part.ends_with(b"\n") || self.rest.len() > LINE_BYTES_MAX {
                    self.flush();
                }
            }
        }
    }

    /// Takes what has come of a line for all of it.
    pub fn flush(&mut self) {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.say(&String::from_utf8_lossy(&rest));
        }
    }

    pub fn say(&mut self, line: &str) {
        let mut line = printable_lines(line.trim_end()).to_string();
        if line.len() > LINE_BYTES_MAX {
            let end = (0..=LINE_BYTES_MAX).rev().find(|at| line.is_char_boundary(*at));
            line.truncate(end.unwrap_or(0));
            line.shrink_to_fit();
        }
        let cost = line.len() as u64 + LINE_COST;
        if !self.is_long && self.first_bytes + cost <= FIRST_BYTES_MAX && self.held.grow(cost) {
            self.first_bytes += cost;
            self.lines.push((now_ms(), line));
            return;
        }
        if !self.is_long {
            self.is_long = true;
            let told = "the log is long: the last of what follows is shown when the build ends";
            self.lines.push((now_ms(), told.to_owned()));
        }
        while self.last_bytes + cost > LAST_BYTES_MAX || !self.held.grow(cost) {
            self.left_out += 1;
            let Some((_, first)) = self.last.pop_front() else { return };
            let freed = first.len() as u64 + LINE_COST;
            self.last_bytes -= freed;
            self.held.shrink(freed);
        }
        self.last_bytes += cost;
        self.last.push_back((now_ms(), line));
    }

    /// The build has ended.
    pub fn end(&mut self) {
        self.flush();
        if self.left_out > 0 {
            self.lines.push((now_ms(), format!("{} lines were left out", self.left_out)));
        }
        self.lines.extend(std::mem::take(&mut self.last));
        self.lines.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Shares;

    fn bytes(log: &Log) -> usize {
        log.lines.iter().chain(&log.last).map(|(_, line)| line.len()).sum()
    }

    #[test]
    fn of_a_long_log_the_first_and_the_last_are_kept_and_it_is_said() {
        let shares = Shares::new(64 << 20);
        let mut log = Log::new(shares.none("ann"));
        let line = "x".repeat(4000);
        for number in 0..1500 {
            log.output(format!("{number} {line}\n").as_bytes());
        }
        assert!(bytes(&log) <= 2 << 20, "{}", bytes(&log));
        let before = log.lines().to_vec();
        assert!(before[0].1.starts_with("0 x") && before.last().unwrap().1.contains("is long"));
        log.output(b"the end");
        log.end();
        let after = log.lines();
        assert_eq!(after[..before.len()], before, "what was told stays where it is");
        assert!(
            after[before.len()].1.ends_with("lines were left out"),
            "{:?}",
            after[before.len()]
        );
        assert_eq!(after.last().unwrap().1, "the end");
        let left_out: usize = after[before.len()].1.split(' ').next().unwrap().parse().unwrap();
        // Beside the lines of the log's own.
        assert_eq!(after.len() - 2 + left_out, 1501);
        drop(log);
        assert!(shares.take("ann", 32 << 20).is_some(), "it is given back");
    }

    #[test]
    fn a_log_keeps_to_its_tenants_share() {
        let mut log = Log::new(Shares::new(2000).none("ann"));
        for number in 0..100 {
            log.say(&format!("line {number}"));
        }
        log.end();
        assert!(bytes(&log) < 1500);
        assert_eq!(log.lines().first().unwrap().1, "line 0");
    }

    #[test]
    fn what_has_no_line_ends_is_cut_into_lines() {
        let mut log = Log::new(Shares::new(64 << 20).none("ann"));
        log.output(&vec![b'y'; 1 << 20]);
        log.end();
        assert!(log.lines().iter().all(|(_, line)| line.len() <= LINE_BYTES_MAX));
        assert!(log.lines().len() > 1);
    }
}
