//! What is refused before anything runs, and with which words.

mod common;

use common::{admit, caps, caps_with};
use exocell_exovisor::{Admission, ModuleLimits, Policy};
use exocell_xgate::CapabilitySet;

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
fn unknown_imports_are_named() {
    let message =
        refusal(&format!(r#"(module (import "env" "system" (func)) {START})"#), &caps_with(""));
    assert!(message.starts_with("import `env.system` is not known"), "{message}");
    let memory = format!(r#"(module (import "env" "memory" (memory 1)) {START})"#);
    assert!(refusal(&memory, &caps_with("")).contains("`env.memory`"));
    assert!(refusal(&importing("fd_frobnicate", ""), &caps_with("")).contains("fd_frobnicate"));
}

#[test]
fn an_import_of_another_type_is_refused() {
    let message = refusal(&importing("fd_write", "(param i64)"), &caps_with(""));
    assert!(
        message.starts_with("an import has the wrong type") && message.contains("fd_write"),
        "{message}"
    );
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
fn threads_and_shared_memories_are_refused() {
    let text = format!("(module (memory 1 1 shared) {START})");
    assert!(refusal(&text, &caps_with("")).contains("does not compile"));
}

#[test]
fn requirements_are_listed_without_a_grant() {
    let text = importing("path_open", "") + "";
    let listed = Admission::requirements(text.as_bytes(), &ModuleLimits::default()).unwrap();
    let import = listed[0].import.expect("it is known");
    assert_eq!((listed[0].name.as_str(), import.needs_text().as_str()), ("path_open", "folder"));
}
