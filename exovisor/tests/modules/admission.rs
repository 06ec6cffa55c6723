//! What is refused before anything runs, and with which words.

use exocell_exovisor::{Admission, ModuleLimits, Outcome, Policy};
use exocell_xgate::CapabilitySet;

use crate::common::{admit, caps, caps_with, run};

const START: &str = r#"(func (export "_start"))"#;

fn refusal(text: &str, caps: &CapabilitySet) -> String {
    match admit(text, caps) {
        Ok(_) => panic!("{text} was admitted"),
        Err(error) => error.to_string(),
    }
}

fn importing(name: &str, signature: &str) -> String {
    format!("(module (import \"wasi_snapshot_preview1\" \"{name}\" (func {signature})) {START})")
}

#[test]
fn an_import_that_was_not_granted_names_the_capability() {
    let random = importing("random_get", "(param i32 i32) (result i32)");
    let message = refusal(&random, &caps_with(""));
    assert_eq!(message, "import `random_get` needs the capability `random`, which is not granted");
    assert!(admit(&random, &caps_with("[random]")).is_ok());
}

#[test]
fn either_of_two_capabilities_is_enough() {
    let write = importing("fd_write", "(param i32 i32 i32 i32) (result i32)");
    assert!(refusal(&write, &caps("[random]")).contains("`stdio or folder`"));
    let folder = "[[folder]]\nhost = \"/\"\nguest = \"/\"\nrights = [\"read\"]";
    assert!(admit(&write, &caps(folder)).is_ok());
    assert!(admit(&write, &caps("[stdio]")).is_ok());
}

#[test]
fn unknown_functions_trap_when_they_are_called() {
    let text = r#"(module (import "env" "system" (func $system (param i64) (result f32)))
      (func (export "_start") (drop (call $system (i64.const 1)))))"#;
    let outcome = run(text, &caps_with(""));
    let Outcome::Trap(why) = outcome else { panic!("{outcome:?}") };
    assert_eq!(why, "import `env.system` is not known");
    let unused = format!(r#"(module (import "env" "system" (func)) {START})"#);
    assert_eq!(run(&unused, &caps_with("")), Outcome::Exited(0));
}

#[test]
fn unknown_things_other_than_functions_are_refused() {
    for (name, what) in [
        (r#""env" "heap" (memory 1)"#, "memory"),
        (r#""env" "table" (table 1 funcref)"#, "table"),
        (r#""env" "__stack_pointer" (global i32)"#, "global"),
        (r#""env" "__stack_pointer" (global (mut i64))"#, "global"),
        (r#""env" "memory" (global (mut i32))"#, "global"),
    ] {
        let message = refusal(&format!("(module (import {name}) {START})"), &caps_with(""));
        assert!(message.ends_with(&format!("the host has no such {what}")), "{message}");
    }
}

#[test]
fn a_shared_memory_may_have_any_name() {
    let text = format!("(module (import \"a\" \"b\" (memory 1 2 shared)) {START})");
    assert_eq!(run(&text, &caps_with("")), Outcome::Exited(0));
}

#[test]
fn what_compiled_programs_want_from_their_host_is_there() {
    let text = r#"(module
      (import "env" "__linear_memory" (memory 1))
      (import "env" "__stack_pointer" (global $sp (mut i32)))
      (import "env" "__indirect_function_table" (table 2 funcref))
      (import "env" "malloc" (func $malloc (param i32) (result i32)))
      (import "env" "free" (func $free (param i32)))
      (import "env" "memset" (func $memset (param i32 i32 i32) (result i32)))
      (import "env" "strlen" (func $strlen (param i32) (result i32)))
      (import "env" "pow" (func $pow (param f64 f64) (result f64)))
      (import "env" "MAP" (func $map (param i32 i32 i32 i32)))
      (import "env" "REDUCTION" (func $reduce (param i32 i32 i32 i32 i32)))
      (global $own i32 (i32.const 5))
      (data (i32.const 70000) "abc")
      (elem (i32.const 0) $double $add)
      (export "__indirect_function_table" (table 0))
      (func $double (param i32) (i32.store (local.get 0) (i32.mul (i32.load (local.get 0)) (i32.const 2))))
      (func $add (param i32 i32)
        (i32.store (local.get 0) (i32.add (i32.load (local.get 0)) (i32.load (local.get 1)))))
      (func $check (param i32) (if (i32.eqz (local.get 0)) (then unreachable)))
      (func (export "_start") (local $block i32)
        ;; The stack lies above the data, and in memory.
        (call $check (i32.gt_u (global.get $sp) (i32.const 70003)))
        (i32.store (i32.sub (global.get $sp) (i32.const 4)) (global.get $own))
        (call $check (i32.eq (call $strlen (i32.const 70000)) (i32.const 3)))
        (call $check (f64.eq (call $pow (f64.const 2) (f64.const 10)) (f64.const 1024)))
        (local.set $block (call $malloc (i32.const 400)))
        (call $check (i32.ge_u (local.get $block) (global.get $sp)))
        (drop (call $memset (local.get $block) (i32.const 1) (i32.const 400)))
        (call $map (i32.const 0) (local.get $block) (i32.const 100) (i32.const 4))
        (i32.store (i32.const 16) (i32.const 0))
        (call $reduce (i32.const 1) (local.get $block) (i32.const 100) (i32.const 4) (i32.const 16))
        (call $check (i32.eq (i32.load (i32.const 16)) (i32.mul (i32.const 100) (i32.const 0x02020202))))
        (call $free (local.get $block))))"#;
    let caps = caps("[memory]\nlimit = \"4M\"\n[processes]\nmax = 1");
    assert_eq!(run(text, &caps), Outcome::Exited(0));
}

#[test]
fn a_loop_of_the_host_is_not_called_from_within_one() {
    let text = r#"(module
      (import "env" "MAP" (func $map (param i32 i32 i32 i32)))
      (table (export "__indirect_function_table") 1 funcref) (elem (i32.const 0) $again)
      (func $again (param i32) (call $map (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 1)))
      (func (export "_start") (call $again (i32.const 0))))"#;
    let caps = caps("[memory]\nlimit = \"4M\"\n[processes]\nmax = 1");
    let outcome = run(text, &caps);
    assert!(
        matches!(&outcome, Outcome::Trap(why) if why.contains("from within one")),
        "{outcome:?}"
    );
}

#[test]
fn an_import_of_another_type_is_refused() {
    let message = refusal(&importing("fd_write", "(param i64)"), &caps_with(""));
    assert!(
        message.starts_with("an import has the wrong type") && message.contains("fd_write"),
        "{message}"
    );
}

/// The engine has no garbage collector, and would end the process when the call asks whether one
/// type is another's.
#[test]
fn subtypes_of_functions_are_refused() {
    let text = r#"(module (type $t (sub (func))) (type $u (sub $t (func)))
      (table funcref (elem $f)) (func $f (type $u))
      (func (export "_start") (call_indirect (type $t) (i32.const 0))))"#;
    let message = refusal(text, &caps_with(""));
    assert!(message.contains("gc proposal"), "{message}");
}

#[test]
fn what_is_not_a_module_is_refused() {
    assert!(
        refusal("#!/bin/sh\necho hi\n", &caps_with("")).starts_with("this is not a Wasm module")
    );
    assert!(refusal("(module (func", &caps_with("")).starts_with("this Wasm module is malformed"));
    assert!(
        refusal("(module (func (export \"_start\") i32.add))", &caps_with(""))
            .contains("does not compile")
    );
    assert!(refusal("(module)", &caps_with("")).contains("exports no function `_start`"));
    assert!(refusal("(component)", &caps_with("")).contains("component"));
}

#[test]
fn a_binary_cut_anywhere_is_refused() {
    let caps = caps_with("");
    let binary = wat::parse_str(format!("(module {START})")).unwrap();
    let admission = Admission::new(Policy::default());
    assert!(admission.admit(&binary, &caps).is_ok());
    for length in 0..binary.len() {
        assert!(admission.admit(&binary[..length], &caps).is_err(), "{length}");
    }
}

#[test]
fn requirements_are_listed_without_a_grant() {
    let text = importing("path_open", "") + "";
    let listed = Admission::requirements(text.as_bytes(), &ModuleLimits::default()).unwrap();
    let import = listed[0].import.expect("it is known");
    assert_eq!((listed[0].name.as_str(), import.needs_text().as_str()), ("path_open", "folder"));
}
