//! A specification's seccomp profile (`linux.seccomp`) as a filter for the guest's kernel.
//!
//! ```text
//! ld arch ── not x86-64 ──> kill
//! ld nr ──> a tree of ranges ──> one action, or the call's rules, the first that fits, else the default
//! ```
//! The guest's init installs it where the runtimes of containers do: before the program has its
//! rights alone, or with `noNewPrivileges` right before execve(2). Names that x86-64 does not have
//! are left out, as libseccomp leaves them out. The format of the program: seccomp(2), linux/filter.h.

mod names;
mod program;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Result, ShimError};
use crate::refusal::refused;
use program::Program;

/// The errno that a call fails with where a profile names none (EPERM).
const ERRNO_DEFAULT: u32 = 1;
/// Arguments of a call.
const ARGUMENTS: u32 = 6;
/// The most instructions of a filter (BPF_MAXINSNS).
const INSTRUCTIONS_MAX: usize = 4096;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Profile {
    default_action: String,
    #[serde(default)]
    default_errno_ret: Option<u32>,
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    flags: Option<Vec<String>>,
    #[serde(default)]
    syscalls: Option<Vec<Entry>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    names: Vec<String>,
    action: String,
    #[serde(default)]
    errno_ret: Option<u32>,
    #[serde(default)]
    args: Option<Vec<Argument>>,
}

/// A condition: argument `index` is in relation `op` to `value`; masked with it, it is `value_two`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Argument {
    index: u32,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Op {
    #[serde(rename = "SCMP_CMP_NE")]
    NotEqual,
    #[serde(rename = "SCMP_CMP_LT")]
    Less,
    #[serde(rename = "SCMP_CMP_LE")]
    LessOrEqual,
    #[serde(rename = "SCMP_CMP_EQ")]
    Equal,
    #[serde(rename = "SCMP_CMP_GE")]
    GreaterOrEqual,
    #[serde(rename = "SCMP_CMP_GT")]
    Greater,
    #[serde(rename = "SCMP_CMP_MASKED_EQ")]
    Masked,
}

/// What becomes of a call: what the filter returns.
type Action = u32;

/// All of the conditions hold, then the action.
#[derive(Debug)]
struct Rule {
    conditions: Vec<Argument>,
    action: Action,
}

/// The filter of `profile`, an instruction a number: its 8 bytes as the kernel has them.
///
/// # Errors
/// Names what of it cannot be carried out.
pub fn compile(profile: Value) -> Result<Vec<u64>> {
    let profile: Profile = serde_json::from_value(profile).map_err(|error| {
        ShimError::invalid(format!("linux.seccomp: a cell does not carry out all of it: {error}"))
    })?;
    check(&profile)?;
    let otherwise = action(&profile.default_action, profile.default_errno_ret)?;
    let mut calls: BTreeMap<u32, Vec<Rule>> = BTreeMap::new();
    for entry in profile.syscalls.into_iter().flatten() {
        let action = action(&entry.action, entry.errno_ret)?;
        let conditions = entry.args.unwrap_or_default();
        if let Some(bad) = conditions.iter().find(|condition| condition.index >= ARGUMENTS) {
            let index = bad.index;
            return Err(ShimError::invalid(format!("linux.seccomp: there is no argument {index}")));
        }
        for number in entry.names.iter().filter_map(|name| names::number(name)) {
            let rules = calls.entry(number).or_default();
            rules.extend(
                apart(&conditions).into_iter().map(|conditions| Rule { conditions, action }),
            );
        }
    }
    let filter = Program::of(&calls, otherwise);
    match filter.len() <= INSTRUCTIONS_MAX {
        true => Ok(filter),
        false => Err(ShimError::invalid(format!(
            "linux.seccomp: the profile takes {} instructions; a filter has {INSTRUCTIONS_MAX} or \
             less",
            filter.len()
        ))),
    }
}

fn check(profile: &Profile) -> Result<()> {
    let architectures = profile.architectures.iter().flatten();
    if architectures.clone().count() > 0
        && !architectures.clone().any(|name| name == "SCMP_ARCH_X86_64")
    {
        return Err(refused("linux.seccomp without SCMP_ARCH_X86_64", "a cell is of x86-64"));
    }
    // Of one thread, and on a machine without speculation of its own, these change nothing.
    let idle = ["SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"];
    match profile.flags.iter().flatten().find(|flag| !idle.contains(&flag.as_str())) {
        None => Ok(()),
        Some(flag) => Err(refused(format_args!("linux.seccomp with {flag}"), "leave the flag out")),
    }
}

/// Conditions that hold together; as libseccomp's users have it, two on one argument are two rules.
fn apart(conditions: &[Argument]) -> Vec<Vec<Argument>> {
    let twice = (0..ARGUMENTS)
        .any(|index| conditions.iter().filter(|condition| condition.index == index).count() > 1);
    match twice {
        true => conditions.iter().map(|condition| vec![condition.clone()]).collect(),
        false => vec![conditions.to_vec()],
    }
}

fn action(name: &str, errno: Option<u32>) -> Result<Action> {
    let errno = errno.unwrap_or(ERRNO_DEFAULT);
    if errno > 4095 {
        return Err(ShimError::invalid(format!("linux.seccomp: there is no errno {errno}")));
    }
    Ok(match name {
        "SCMP_ACT_KILL_PROCESS" => program::KILL_PROCESS,
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => 0,
        "SCMP_ACT_TRAP" => 0x0003_0000,
        "SCMP_ACT_ERRNO" => 0x0005_0000 | errno,
        "SCMP_ACT_TRACE" => 0x7ff0_0000 | errno,
        "SCMP_ACT_LOG" => 0x7ffc_0000,
        "SCMP_ACT_ALLOW" => 0x7fff_0000,
        other => {
            return Err(refused(
                format_args!("linux.seccomp with {other}"),
                "ask for an action that the kernel carries out by itself",
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ALLOW: u32 = 0x7fff_0000;

    /// What the kernel's machine says of call `number` with `arguments`.
    fn run(filter: &[u64], arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(arch.to_le_bytes());
        data.extend(0u64.to_le_bytes());
        arguments.iter().for_each(|own| data.extend(own.to_le_bytes()));
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let word = filter[at];
            let (code, k) = (word as u16, (word >> 32) as u32);
            let (jt, jf) = ((word >> 16) as u8 as usize, (word >> 24) as u8 as usize);
            at += 1;
            let mut jump = |taken: bool| at += if taken { jt } else { jf };
            match code {
                0x20 => {
                    let bytes = &data[k as usize..][..4];
                    accumulator = u32::from_le_bytes(bytes.try_into().unwrap());
                }
                0x54 => accumulator &= k,
                0x15 => jump(accumulator == k),
                0x25 => jump(accumulator > k),
                0x35 => jump(accumulator >= k),
                0x05 => at += k as usize,
                0x06 => return k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn said(filter: &[u64], name: &str, arguments: &[u64]) -> u32 {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        run(filter, program::ARCH, names::number(name).unwrap(), all)
    }

    #[test]
    fn calls_are_allowed_by_name_and_by_their_arguments() {
        let filter = compile(json!({
            "defaultAction": "SCMP_ACT_ERRNO",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
            "flags": ["SECCOMP_FILTER_FLAG_SPEC_ALLOW"],
            "syscalls": [
                { "names": ["read", "write", "close", "exit_group", "of_no_machine"],
                  "action": "SCMP_ACT_ALLOW" },
                { "names": ["personality"], "action": "SCMP_ACT_ALLOW",
                  "args": [{ "index": 0, "value": 8, "op": "SCMP_CMP_EQ" }] },
                { "names": ["personality"], "action": "SCMP_ACT_ALLOW",
                  "args": [{ "index": 0, "value": 0xffff_ffff_u64, "op": "SCMP_CMP_EQ" }] },
                { "names": ["clone"], "action": "SCMP_ACT_ALLOW",
                  "args": [{ "index": 0, "value": 0x7e02_0000, "valueTwo": 0,
                             "op": "SCMP_CMP_MASKED_EQ" }] },
                { "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38 },
                { "names": ["kill"], "action": "SCMP_ACT_KILL_PROCESS" },
            ],
        }))
        .unwrap();
        let refused = 0x0005_0001;
        for (name, arguments, wanted) in [
            ("read", &[][..], ALLOW),
            ("exit_group", &[], ALLOW),
            ("open", &[], refused),
            ("mseal", &[], refused),
            ("personality", &[8], ALLOW),
            ("personality", &[0xffff_ffff], ALLOW),
            ("personality", &[0x1_0000_0008], refused),
            ("clone", &[0x11], ALLOW),
            ("clone", &[0x0002_0011], refused),
            ("clone3", &[], 0x0005_0026),
            ("kill", &[], program::KILL_PROCESS),
        ] {
            assert_eq!(said(&filter, name, arguments), wanted, "{name} {arguments:?}");
        }
        assert_eq!(run(&filter, program::ARCH, 0x4000_0000, [0; 6]), refused);
        assert_eq!(run(&filter, 0x4000_0003, 3, [0; 6]), program::KILL_PROCESS);
    }

    #[test]
    fn numbers_are_compared_with_all_of_their_bits() {
        let far = 0x1_0000_0005_u64;
        for (op, fits, others) in [
            ("NE", &[5, 0, u64::MAX][..], &[far][..]),
            ("LT", &[0, 5, far - 1], &[far, far + 1, u64::MAX]),
            ("LE", &[0, far - 1, far], &[far + 1, 0x2_0000_0000]),
            ("EQ", &[far], &[5, 0x1_0000_0004]),
            ("GE", &[far, far + 1, 0x2_0000_0000], &[0, 6, far - 1]),
            ("GT", &[far + 1, 0x2_0000_0000], &[far, 9]),
        ] {
            let filter = compile(json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{ "names": ["mkdir"], "action": "SCMP_ACT_KILL",
                    "args": [{ "index": 1, "value": far, "op": format!("SCMP_CMP_{op}") }] }],
            }));
            let filter = filter.unwrap();
            for value in fits {
                assert_eq!(said(&filter, "mkdir", &[0, *value]), 0, "{op} {value:#x}");
            }
            for value in others {
                assert_eq!(said(&filter, "mkdir", &[0, *value]), ALLOW, "{op} {value:#x}");
            }
        }
    }

    #[test]
    fn conditions_hold_together_unless_they_are_on_one_argument() {
        let of = |second: u32| {
            let one = json!({ "index": 0, "value": 1, "op": "SCMP_CMP_EQ" });
            let other = json!({ "index": second, "value": 2, "op": "SCMP_CMP_EQ" });
            compile(json!({
                "defaultAction": "SCMP_ACT_KILL",
                "syscalls": [{ "names": ["dup3"], "action": "SCMP_ACT_ALLOW", "args": [one, other] }],
            }))
            .unwrap()
        };
        assert_eq!(said(&of(1), "dup3", &[1, 2]), ALLOW);
        assert_eq!(said(&of(1), "dup3", &[1, 3]), 0);
        assert_eq!(said(&of(0), "dup3", &[2, 9]), ALLOW);
    }

    #[test]
    fn what_the_kernel_does_not_do_by_itself_is_refused_by_name() {
        for (name, value) in [
            ("SCMP_ACT_NOTIFY", json!({ "defaultAction": "SCMP_ACT_NOTIFY" })),
            ("listenerPath", json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/s" })),
            (
                "X86_64",
                json!({ "defaultAction": "SCMP_ACT_KILL", "architectures": ["SCMP_ARCH_ARM"] }),
            ),
            (
                "FLAG_LOG",
                json!({ "defaultAction": "SCMP_ACT_KILL", "flags": ["SECCOMP_FILTER_FLAG_LOG"] }),
            ),
            (
                "argument 6",
                json!({ "defaultAction": "SCMP_ACT_KILL", "syscalls": [{ "names": ["read"],
                    "action": "SCMP_ACT_ALLOW",
                    "args": [{ "index": 6, "value": 0, "op": "SCMP_CMP_EQ" }] }] }),
            ),
        ] {
            let error = compile(value).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }
}
