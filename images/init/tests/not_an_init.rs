//! The binary where it is not PID 1.

use std::process::Command;

#[test]
fn it_refuses_to_run_as_an_ordinary_process() {
    let output = Command::new(env!("CARGO_BIN_EXE_exocell-init")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("exocell run"), "{message}");
}
