//! Instructions of a filter: a tree over the numbers of calls, and conditions on arguments.

use std::collections::BTreeMap;

use super::{Action, Argument, Op, Rule};

/// AUDIT_ARCH_X86_64.
pub(super) const ARCH: u32 = 0xc000_003e;
/// SECCOMP_RET_KILL_PROCESS.
pub(super) const KILL_PROCESS: Action = 0x8000_0000;

/// Codes of linux/bpf_common.h: load a word, jumps, and, return.
const LOAD: u16 = 0x20;
const EQUAL: u16 = 0x15;
const ABOVE: u16 = 0x25;
const AT_LEAST: u16 = 0x35;
const JUMP: u16 = 0x05;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;

/// Where things are in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

/// A place in the program that is not known yet.
#[derive(Clone, Copy)]
struct Label(usize);

/// Where a comparison leads.
#[derive(Clone, Copy)]
enum To {
    Next,
    Label(Label),
}

/// What becomes of the calls of one range.
enum Leaf<'a> {
    Always(Action),
    Rules(&'a [Rule]),
}

#[derive(Default)]
pub(super) struct Program {
    words: Vec<u64>,
    /// By label.
    places: Vec<usize>,
    /// Jumps, and where they lead.
    jumps: Vec<(usize, Label)>,
}

impl Program {
    /// The filter for the rules of `calls`, by their numbers, and `otherwise`.
    pub fn of(calls: &BTreeMap<u32, Vec<Rule>>, otherwise: Action) -> Vec<u64> {
        let mut program = Self::default();
        program.put(LOAD, ARCH_AT);
        let known = program.label();
        program.compare(EQUAL, ARCH, To::Label(known), To::Next);
        program.put(RETURN, KILL_PROCESS);
        program.bind(known);
        program.put(LOAD, NUMBER_AT);
        program.tree(&ranges(calls, otherwise), otherwise);
        program.finish()
    }

    fn put(&mut self, code: u16, k: u32) {
        self.words.push(u64::from(code) | u64::from(k) << 32);
    }

    fn label(&mut self) -> Label {
        self.places.push(0);
        Label(self.places.len() - 1)
    }

    /// `label` is here.
    fn bind(&mut self, label: Label) {
        let here = self.words.len();
        if let Some(place) = self.places.get_mut(label.0) {
            *place = here;
        }
    }

    fn jump(&mut self, to: To) {
        if let To::Label(label) = to {
            self.jumps.push((self.words.len(), label));
        }
        self.put(JUMP, 0);
    }

    /// A conditional jump reaches 255 instructions, one without a condition any.
    fn compare(&mut self, code: u16, k: u32, fits: To, otherwise: To) {
        self.words.push(u64::from(code) | 1 << 24 | u64::from(k) << 32);
        match otherwise {
            To::Next => self.jump(fits),
            To::Label(_) => {
                // Over the second jump.
                match fits {
                    To::Next => self.put(JUMP, 1),
                    To::Label(_) => self.jump(fits),
                }
                self.jump(otherwise);
            }
        }
    }

    fn tree(&mut self, ranges: &[(u32, Leaf<'_>)], otherwise: Action) {
        match ranges {
            [] => self.put(RETURN, otherwise),
            [(_, Leaf::Always(action))] => self.put(RETURN, *action),
            [(_, Leaf::Rules(rules))] => self.rules(rules, otherwise),
            _ => {
                let (low, high) = ranges.split_at(ranges.len() / 2);
                let above = self.label();
                let start = high.first().map_or(u32::MAX, |(start, _)| *start);
                self.compare(AT_LEAST, start, To::Label(above), To::Next);
                self.tree(low, otherwise);
                self.bind(above);
                self.tree(high, otherwise);
            }
        }
    }

    fn rules(&mut self, rules: &[Rule], otherwise: Action) {
        for rule in rules {
            let next = self.label();
            for condition in &rule.conditions {
                self.condition(condition, next);
            }
            self.put(RETURN, rule.action);
            self.bind(next);
            if rule.conditions.is_empty() {
                // Whatever comes after it is for no call.
                return;
            }
        }
        self.put(RETURN, otherwise);
    }

    /// Goes on where `condition` holds, else at `fails`. Words are of 32 bits, arguments of two.
    fn condition(&mut self, condition: &Argument, fails: Label) {
        let low_at = ARGUMENTS_AT + 8 * condition.index;
        let high_at = low_at + 4;
        let halves = |value: u64| ((value >> 32) as u32, value as u32);
        let (high, low) = halves(condition.value);
        let fails = To::Label(fails);
        let holds = self.label();
        let done = To::Label(holds);
        self.put(LOAD, high_at);
        match condition.op {
            Op::Equal => {
                self.compare(EQUAL, high, To::Next, fails);
                self.put(LOAD, low_at);
                self.compare(EQUAL, low, To::Next, fails);
            }
            Op::NotEqual => {
                self.compare(EQUAL, high, To::Next, done);
                self.put(LOAD, low_at);
                self.compare(EQUAL, low, fails, To::Next);
            }
            Op::Greater | Op::GreaterOrEqual => {
                self.compare(ABOVE, high, done, To::Next);
                self.compare(EQUAL, high, To::Next, fails);
                self.put(LOAD, low_at);
                let code = if condition.op == Op::Greater { ABOVE } else { AT_LEAST };
                self.compare(code, low, To::Next, fails);
            }
            Op::Less | Op::LessOrEqual => {
                self.compare(ABOVE, high, fails, To::Next);
                self.compare(EQUAL, high, To::Next, done);
                self.put(LOAD, low_at);
                let code = if condition.op == Op::Less { AT_LEAST } else { ABOVE };
                self.compare(code, low, fails, To::Next);
            }
            Op::Masked => {
                let (wanted_high, wanted_low) = halves(condition.value_two);
                self.put(AND, high);
                self.compare(EQUAL, wanted_high, To::Next, fails);
                self.put(LOAD, low_at);
                self.put(AND, low);
                self.compare(EQUAL, wanted_low, To::Next, fails);
            }
        }
        self.bind(holds);
    }

    /// Every jump gets its length.
    fn finish(mut self) -> Vec<u64> {
        for (at, Label(label)) in self.jumps {
            let place = self.places.get(label).copied().unwrap_or_default();
            // Labels are behind the jumps to them.
            let length = u32::try_from(place.saturating_sub(at + 1)).unwrap_or(u32::MAX);
            if let Some(word) = self.words.get_mut(at) {
                *word |= u64::from(length) << 32;
            }
        }
        self.words
    }
}

/// Where each range of numbers begins, and what becomes of its calls.
fn ranges(calls: &BTreeMap<u32, Vec<Rule>>, otherwise: Action) -> Vec<(u32, Leaf<'_>)> {
    let mut ranges: Vec<(u32, Leaf<'_>)> = Vec::new();
    let mut next = 0;
    for (number, rules) in calls {
        if *number > next {
            push(&mut ranges, next, Leaf::Always(otherwise));
        }
        let leaf = match rules.as_slice() {
            [Rule { conditions, action }, ..] if conditions.is_empty() => Leaf::Always(*action),
            rules => Leaf::Rules(rules),
        };
        push(&mut ranges, *number, leaf);
        next = number + 1;
    }
    push(&mut ranges, next, Leaf::Always(otherwise));
    ranges
}

/// What goes on as before is no range of its own.
fn push<'a>(ranges: &mut Vec<(u32, Leaf<'a>)>, start: u32, leaf: Leaf<'a>) {
    let same = match (ranges.last(), &leaf) {
        (Some((_, Leaf::Always(before))), Leaf::Always(action)) => before == action,
        _ => false,
    };
    if !same {
        ranges.push((start, leaf));
    }
}
