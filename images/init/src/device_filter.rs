//! Which devices the programs of a container may use: a BPF program at its control group, as runc
//! makes one (kernel: Documentation/admin-guide/cgroup-v2.rst, "Device controller").
//!
//! Nodes are no wall: default capabilities hold CAP_MKNOD, and behind numbers that a program makes
//! up lie the disk with every container's files, and the loop devices with their images. So the
//! kernel asks at each open(2) and mknod(2):
//!
//! ```text
//! kind, numbers, access ──> last rule that fits ── no ──> the one before it ──> ... ──> refused
//!                               └─ allowed: that access is granted; all of it? ──> allowed
//!                               └─ forbidden: any of it? ──> refused
//! ```
//! Docker's rules come last: any node may be made, and what every program has may be used.

use exocell_agent::oci::{DeviceKinds, DeviceRule};

use crate::nodes;
use crate::sys::bpf::Instruction;

/// `BPF_DEVCG_*` (linux/bpf.h).
const BLOCK: i32 = 1;
const CHARACTER: i32 = 2;
const MAKE: i32 = 1;
const READ: i32 = 2;
const WRITE: i32 = 4;
/// Major number of terminals (admin-guide/devices.txt), and what makes one.
const TERMINALS: i64 = 136;
const NEW_TERMINAL: (i64, i64) = (5, 2);

/// The context, and what was read from it.
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;
const ANSWER: u8 = 0;

/// Opcodes (kernel: Documentation/bpf/standardization/instruction-set.rst).
const LOAD_WORD: u8 = 0x61;
const AND: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
const MOVE: u8 = 0xb7;
const JUMP: u8 = 0x05;
const JUMP_IF_NOT: u8 = 0x56;
const JUMP_IF_ANY: u8 = 0x46;
const EXIT: u8 = 0x95;

/// The program that allows what `rules` do, and what every program may; `None` where that is
/// everything.
///
/// # Errors
/// Says which rule means nothing.
pub fn program(rules: &[DeviceRule]) -> Result<Option<Vec<Instruction>>, String> {
    let rules = rules.iter().map(Rule::read).collect::<Result<Vec<_>, _>>()?;
    if rules.last().is_some_and(Rule::allows_everything) {
        return Ok(None);
    }
    let mut made = vec![
        load(KIND, 0),
        load(ACCESS, 0),
        by_number(AND, KIND, 0, 0xffff),
        by_number(SHIFT_RIGHT, ACCESS, 0, 16),
        load(MAJOR, 4),
        load(MINOR, 8),
    ];
    for rule in rules.iter().chain(&of_every_program()).rev() {
        rule.append(&mut made);
    }
    made.extend(answer(false));
    Ok(Some(made))
}

/// Docker's, without the console, which is no program's here.
fn of_every_program() -> Vec<Rule> {
    let all = MAKE | READ | WRITE;
    let any =
        |kind, access| Rule { allow: true, kind: Some(kind), access, major: None, minor: None };
    let one = |major, minor| Rule { major: Some(major), minor, ..any(CHARACTER, all) };
    let nodes = nodes::numbers().map(|(major, minor)| one(major.into(), Some(minor.into())));
    let (major, minor) = NEW_TERMINAL;
    let made = [any(CHARACTER, MAKE), any(BLOCK, MAKE)];
    made.into_iter().chain([one(TERMINALS, None), one(major, Some(minor))]).chain(nodes).collect()
}

struct Rule {
    allow: bool,
    kind: Option<i32>,
    major: Option<i64>,
    minor: Option<i64>,
    access: i32,
}

impl Rule {
    fn read(rule: &DeviceRule) -> Result<Self, String> {
        let mut access = 0;
        for letter in rule.access.chars() {
            access |= match letter {
                'r' => READ,
                'w' => WRITE,
                'm' => MAKE,
                _ => return Err(format!("a rule for devices: no access {letter:?}; give r, w, m")),
            };
        }
        let number = |number: Option<i64>| number.filter(|number| *number >= 0);
        let (major, minor) = (number(rule.major), number(rule.minor));
        if [major, minor].into_iter().flatten().any(|number| u32::try_from(number).is_err()) {
            return Err("a rule for devices: its number is larger than any".to_owned());
        }
        Ok(Self {
            allow: rule.allow,
            kind: match rule.kind {
                DeviceKinds::All => None,
                DeviceKinds::Block => Some(BLOCK),
                DeviceKinds::Character => Some(CHARACTER),
            },
            major,
            minor,
            access: if rule.access.is_empty() { MAKE | READ | WRITE } else { access },
        })
    }

    fn allows_everything(&self) -> bool {
        self.allow
            && self.access == MAKE | READ | WRITE
            && self.kind.is_none()
            && self.major.is_none()
            && self.minor.is_none()
    }

    fn append(&self, made: &mut Vec<Instruction>) {
        let then = match self.allow {
            true => [by_number(AND, ACCESS, 0, !self.access), by_number(JUMP_IF_NOT, ACCESS, 2, 0)],
            false => [by_number(JUMP_IF_ANY, ACCESS, 1, self.access), by_number(JUMP, 0, 2, 0)],
        };
        let then: Vec<_> = then.into_iter().chain(answer(self.allow)).collect();
        // The bits of a number, whatever its sign is.
        let bits = |number: i64| number as u32 as i32;
        let fits = [
            self.kind.map(|kind| (KIND, kind)),
            self.major.map(|major| (MAJOR, bits(major))),
            self.minor.map(|minor| (MINOR, bits(minor))),
        ];
        let fits: Vec<_> = fits.into_iter().flatten().collect();
        for (place, (register, wanted)) in (1..).zip(&fits) {
            let past = fits.len() - place + then.len();
            made.push(by_number(JUMP_IF_NOT, *register, past as i16, *wanted));
        }
        made.extend(then);
    }
}

fn by_number(code: u8, register: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: register, offset, immediate }
}

fn load(register: u8, offset: i16) -> Instruction {
    by_number(LOAD_WORD, register | CONTEXT << 4, offset, 0)
}

fn answer(allow: bool) -> [Instruction; 2] {
    [by_number(MOVE, ANSWER, 0, allow.into()), by_number(EXIT, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with the program.
    fn is_allowed(
        program: &[Instruction],
        kind: i32,
        (major, minor): (u32, u32),
        access: i32,
    ) -> bool {
        let context = [(access << 16 | kind) as u32, major, minor];
        let (mut registers, mut at) = ([0_u32; 6], 0);
        loop {
            let now = program[at];
            let (to, by) = (usize::from(now.registers & 15), now.immediate as u32);
            let jumps = match now.code {
                LOAD_WORD => {
                    registers[to] = context[now.offset as usize / 4];
                    false
                }
                AND => {
                    registers[to] &= by;
                    false
                }
                SHIFT_RIGHT => {
                    registers[to] >>= by;
                    false
                }
                MOVE => {
                    registers[to] = by;
                    false
                }
                JUMP => true,
                JUMP_IF_NOT => registers[to] != by,
                JUMP_IF_ANY => registers[to] & by != 0,
                EXIT => return registers[0] == 1,
                code => panic!("{code:x}"),
            };
            at += 1 + if jumps { now.offset as usize } else { 0 };
        }
    }

    /// As `allow b 7 3 rwm`.
    fn rule(text: &str) -> DeviceRule {
        let words: Vec<&str> = text.split(' ').collect();
        let number = |word: &str| word.parse().ok();
        DeviceRule {
            allow: words[0] == "allow",
            kind: match words[1] {
                "b" => DeviceKinds::Block,
                "c" => DeviceKinds::Character,
                _ => DeviceKinds::All,
            },
            major: number(words[2]),
            minor: number(words[3]),
            access: words[4].to_owned(),
        }
    }

    fn made(rules: &[&str]) -> Vec<Instruction> {
        let rules: Vec<_> = rules.iter().map(|text| rule(text)).collect();
        program(&rules).unwrap().unwrap()
    }

    #[test]
    fn every_program_may_make_nodes_and_use_what_is_there() {
        let none = made(&[]);
        let all = READ | WRITE;
        for numbers in [(1, 3), (1, 9), (5, 0), (5, 2), (136, 7), (10, 229), (10, 200)] {
            assert!(is_allowed(&none, CHARACTER, numbers, all), "{numbers:?}");
            assert!(!is_allowed(&none, BLOCK, numbers, READ), "{numbers:?}");
        }
        // The disks, a loop device, memory, consoles, the loop devices' maker, page faults.
        for (kind, numbers) in [
            (BLOCK, (254, 16)),
            (BLOCK, (7, 512)),
            (CHARACTER, (1, 1)),
            (CHARACTER, (1, 11)),
            (CHARACTER, (5, 1)),
            (CHARACTER, (229, 0)),
            (CHARACTER, (10, 237)),
            (CHARACTER, (10, 256)),
        ] {
            assert!(is_allowed(&none, kind, numbers, MAKE), "{numbers:?}");
            for access in [READ, WRITE, all, MAKE | READ] {
                assert!(!is_allowed(&none, kind, numbers, access), "{numbers:?}");
            }
        }
    }

    #[test]
    fn the_later_rule_counts_for_each_access() {
        let asked = made(&["allow b 7 3 rwm", "allow c 10 237 r", "allow c 10 237 w"]);
        assert!(is_allowed(&asked, BLOCK, (7, 3), READ | WRITE));
        assert!(!is_allowed(&asked, BLOCK, (7, 4), READ));
        assert!(!is_allowed(&asked, CHARACTER, (7, 3), READ));
        assert!(is_allowed(&asked, CHARACTER, (10, 237), READ | WRITE));
        let most = made(&["allow a * * rwm", "deny b 7 * w"]);
        assert!(is_allowed(&most, BLOCK, (254, 0), READ | WRITE));
        assert!(is_allowed(&most, BLOCK, (7, 9), READ));
        assert!(!is_allowed(&most, BLOCK, (7, 9), READ | WRITE));
        // As `runc spec` has it.
        let none = made(&["deny a * * rwm"]);
        assert!(is_allowed(&none, CHARACTER, (1, 3), READ));
        assert!(!is_allowed(&none, BLOCK, (8, 0), READ));
    }

    #[test]
    fn everything_needs_no_filter_and_nonsense_is_refused() {
        assert!(program(&[rule("allow a * * rwm")]).unwrap().is_none());
        assert!(program(&[DeviceRule { allow: true, ..DeviceRule::default() }]).unwrap().is_none());
        assert!(program(&[rule("allow a * * x")]).unwrap_err().contains("'x'"));
        assert!(program(&[rule("allow b 4294967296 0 r")]).is_err());
    }
}
