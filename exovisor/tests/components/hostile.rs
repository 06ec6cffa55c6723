//! Components that are made to break their host, before and while they run.

use exocell_exovisor::{Admission, AdmissionError, ModuleLimits, Policy};
use proptest::prelude::*;
use std::sync::LazyLock;

use crate::common::caps_with;
use crate::common::components::{admit_in, command, program, single};

fn refused(component: impl AsRef<[u8]>) -> AdmissionError {
    match admit_in(Policy::default(), component.as_ref(), &caps_with("")) {
        Ok(_) => panic!("it is admitted"),
        Err(error) => error,
    }
}

/// Components in one another, each of which holds the next one twice.
fn doubling(levels: usize) -> String {
    (0..levels).fold("(component $c)".to_owned(), |inner, _| {
        format!("(component $c {inner} (instance (instantiate $c)) (instance (instantiate $c)))")
    })
}

#[test]
fn what_doubles_is_counted() {
    let error = refused(doubling(28));
    assert!(matches!(error, AdmissionError::TooLarge { found: 1_000_000.., .. }), "{error}");
    let instances = "(core instance (instantiate $m))".repeat(257);
    let error = refused(format!("(component (core module $m) {instances})"));
    assert!(matches!(error, AdmissionError::TooLarge { what: "instances", .. }), "{error}");
    // By another name, from further out, it is the same.
    let again = "(alias outer 1 $m (core module $again)) (core instance (instantiate $again))
        (export $more \"m\" (core module $again)) (core instance (instantiate $more))";
    let twice = "(instance (instantiate $c))".repeat(129);
    let text = format!("(component (core module $m) (component $c {again}) {twice})");
    let error = refused(text);
    assert!(matches!(error, AdmissionError::TooLarge { found: 258, .. }), "{error}");
}

#[test]
fn each_limit_refuses() {
    let text = single("(func nop nop nop)", "(i32.const 0)");
    let admit = |modules: ModuleLimits| {
        let policy = Policy { modules, ..Policy::default() };
        admit_in(policy, text.as_bytes(), &caps_with("")).map(drop)
    };
    let limits = ModuleLimits::default;
    admit(limits()).unwrap();
    for modules in [
        ModuleLimits { bytes: 20, ..limits() },
        ModuleLimits { entries: 1, ..limits() },
        ModuleLimits { body_bytes: 3, ..limits() },
        ModuleLimits { depth: 1, ..limits() },
        ModuleLimits { instances: 0, ..limits() },
        ModuleLimits { items: 10, ..limits() },
    ] {
        let error = admit(modules.clone()).unwrap_err();
        assert!(matches!(error, AdmissionError::TooLarge { .. }), "{modules:?}: {error}");
    }
}

#[test]
fn deep_types_are_refused_and_take_no_stack() {
    // A type section of a million instance types in one another.
    let levels = 1_000_000;
    let mut section = vec![1];
    for _ in 0..levels {
        section.extend([0x42, 1, 1]);
    }
    section.extend([0x42, 0]);
    let mut binary = b"\0asm\x0d\0\x01\0\x07".to_vec();
    let mut length = section.len();
    while length >= 0x80 {
        binary.push(length as u8 | 0x80);
        length >>= 7;
    }
    binary.push(length as u8);
    binary.extend(section);
    let error = refused(&binary);
    assert!(error.to_string().contains("deep"), "{error}");
    assert!(Admission::requirements(&binary, &ModuleLimits::default()).is_err());
}

#[test]
fn memories_are_not_shared() {
    for memory in ["(memory 1 1 shared)", r#"(import "" "m" (memory 1 1 shared))"#] {
        let error = refused(format!("(component (core module $m {memory}))"));
        assert!(matches!(error, AdmissionError::Malformed { .. }), "{error}");
    }
}

#[test]
fn what_is_broken_is_one_error() {
    let typed = r#"(core module $m (func (export "run") (result i64) (i64.const 0)))
        (core instance $main (instantiate $m))"#;
    let nothing = "(core module $m) (core instance $main (instantiate $m))";
    for text in [command(typed), command(nothing)] {
        let error = refused(text);
        assert!(
            matches!(error, AdmissionError::Compile { .. } | AdmissionError::Malformed { .. }),
            "{error}"
        );
    }
    let import = r#"(component (import "wasi:cli/exit@0.2.0" (instance
        (export "exit" (func (param "status" string))))))"#;
    let error = refused(import);
    assert!(matches!(error, AdmissionError::ImportType { .. }), "{error}");
}

static SEED: LazyLock<Vec<u8>> = LazyLock::new(|| program("(drop (call $ask))"));

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic_the_scan(at in 0usize..100_000, byte: u8, cut in 0usize..100_000) {
        let mut binary = SEED.clone();
        let length = binary.len();
        binary[at % length] = byte;
        binary.truncate(length - cut % length / 8);
        let _ = Admission::requirements(&binary, &ModuleLimits::default());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn no_changed_byte_panics_the_compiler(at in 0usize..100_000, byte: u8) {
        let mut binary = single("(memory 1) (table 1 funcref)", "(i32.const 0)");
        binary = binary.replace("(component", "(component $name");
        let mut binary = wat::parse_str(binary).unwrap();
        let length = binary.len();
        binary[at % length] = byte;
        let _ = admit_in(Policy::default(), &binary, &caps_with("")).map(drop);
    }
}
