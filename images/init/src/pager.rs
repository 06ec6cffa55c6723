//! The guest kernel's Pager: its figures and its limit.

use exocell_agent::PagerStats;

use crate::error::{Context, InitError};
use crate::own_proc;
use crate::stats::{PAGE_BYTES, number};

/// The guest kernel's file in /proc (drivers/pager/limit.c of the patched kernel).
const FILE: &str = "pager";

/// Its figures; `None` where the guest kernel runs without it.
pub fn stats() -> Option<PagerStats> {
    Some(own_proc::read(FILE)).filter(|text| !text.is_empty()).map(|text| parse(&text))
}

/// Has the guest kernel use no more than `bytes` of memory.
pub fn set_limit(bytes: u64) -> Result<(), InitError> {
    if own_proc::open(FILE).is_err() {
        return Err(InitError::invalid(
            "the cell's memory was fixed when it started; run cells whose memory is to change with --pager eager or credit",
        ));
    }
    own_proc::try_write(FILE, &format!("limit {bytes}")).context(|| "writing /proc/pager")
}

/// Has the guest kernel give back `bytes` of its credit, as far as no program uses it.
pub fn give_back(bytes: u64) -> Result<(), InitError> {
    own_proc::try_write(FILE, &format!("return {bytes}")).context(|| "writing /proc/pager")
}

/// Lines of a name and a number; one that is absent is 0.
fn parse(text: &str) -> PagerStats {
    let number = |name| number(text, name);
    let bytes = |name| number(name).saturating_mul(PAGE_BYTES);
    PagerStats {
        bound_bytes: bytes("bound"),
        peak_bytes: bytes("peak"),
        idle_bytes: bytes("per_cpu"),
        credit_bytes: bytes("credit"),
        withheld_bytes: bytes("withheld"),
        withheld_target_bytes: bytes("wanted"),
        bind_bytes: bytes("bind_pages"),
        bind_count: number("binds"),
        bind_ns: number("bind_ns"),
        unbind_bytes: bytes("unbind_pages"),
        unbind_count: number("unbinds"),
        unbind_ns: number("unbind_ns"),
        refused_count: number("failures"),
        known_zero_bytes: bytes("zero"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let stats = parse("mode eager\nbound 3\nbinds 7\nbind_pages 9\nbind_ns 11\nwanted x\n");
        assert_eq!((stats.bound_bytes, stats.bind_count), (3 * 4096, 7));
        assert_eq!((stats.bind_bytes, stats.bind_ns), (9 * 4096, 11));
        assert_eq!(stats.withheld_target_bytes, 0);
        assert_eq!(parse(""), PagerStats::default());
    }
}
