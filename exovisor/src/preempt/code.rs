//! Which addresses hold functions of a module.

use crate::preempt::hook::YieldEntry;
use std::ops::Range;
use std::sync::Arc;
use wasmtime::component::Component;
use wasmtime::{Module, ModuleFunction};

/// The function bodies of one module or component, by address. Holding it keeps the code mapped.
pub(crate) struct CodeMap {
    /// Ascending and apart.
    functions: Vec<Range<usize>>,
    pub(super) entry: Arc<YieldEntry>,
    _code: Code,
}

enum Code {
    Module(#[allow(dead_code, reason = "it is held")] Module),
    Component(#[allow(dead_code, reason = "it is held")] Component),
}

impl CodeMap {
    pub fn new(module: &Module, entry: &Arc<YieldEntry>) -> Self {
        let functions = bodies(module.text(), module.functions());
        Self { functions, entry: Arc::clone(entry), _code: Code::Module(module.clone()) }
    }

    /// The functions of all core modules in a component, those among them that the compiler makes
    /// to join others. What leads from them to the host is not among them.
    pub fn of_component(component: &Component, entry: &Arc<YieldEntry>) -> Self {
        let functions = bodies(component.text(), component.functions());
        Self { functions, entry: Arc::clone(entry), _code: Code::Component(component.clone()) }
    }

    /// Whether an instruction of a function is at `address`. Allocates nothing and takes no
    /// lock: a signal handler asks.
    pub fn contains(&self, address: usize) -> bool {
        find(&self.functions, address)
    }
}

fn bodies(text: &[u8], functions: impl Iterator<Item = ModuleFunction>) -> Vec<Range<usize>> {
    let text = text.as_ptr().addr();
    let range =
        |function: ModuleFunction| text + function.offset..text + function.offset + function.len;
    merged(functions.map(range).collect())
}

/// Sorted, empty ones dropped, neighbours joined.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn find(ranges: &[Range<usize>], address: usize) -> bool {
    let below = ranges.partition_point(|range| range.end <= address);
    ranges.get(below).is_some_and(|range| range.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_join_and_gaps_stay() {
        let ranges = merged(vec![20..30, 0..10, 10..12, 40..40]);
        assert_eq!(ranges, [0..12, 20..30]);
        for (address, inside) in [(0, true), (11, true), (12, false), (19, false), (29, true)] {
            assert_eq!(find(&ranges, address), inside, "{address}");
        }
        assert!(!find(&ranges, 30));
        assert!(!find(&[], 0));
    }

    proptest! {
        #[test]
        fn an_address_is_inside_when_any_range_has_it(
            starts in prop::collection::vec((0usize..1000, 0usize..50), 0..20),
            address in 0usize..1100,
        ) {
            let ranges: Vec<_> = starts.iter().map(|(start, len)| *start..start + len).collect();
            let inside = ranges.iter().any(|range| range.contains(&address));
            prop_assert_eq!(find(&merged(ranges), address), inside);
        }
    }
}
