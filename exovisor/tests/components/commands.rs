//! Commands that are components: what they are given, and what ends them.

use exocell_exovisor::{
    Admission, AdmissionError, CancelReason, Metering, Outcome, Policy, Pool, Spec,
};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use crate::common::components::{admit_in, command, program, ready, run, run_with_streams, single};
use crate::common::{caps, caps_with, table};

const FOREVER: &str = "(loop $again (br $again)) (i32.const 0)";
const ARGUMENTS: &str = r#"
  (drop (call $args_sizes (i32.const 200) (i32.const 204)))
  (drop (call $args (i32.const 300) (i32.const 400)))
  (drop (call $bytes (i32.const 1) (i32.const 400) (i32.load (i32.const 204))))
  (drop (call $environ_sizes (i32.const 200) (i32.const 204)))
  (drop (call $environ (i32.const 300) (i32.const 400)))
  (drop (call $bytes (i32.const 1) (i32.const 400) (i32.load (i32.const 204))))"#;

#[test]
fn arguments_and_environment_are_given() {
    let spec = Spec {
        args: vec!["name".to_owned(), "two words".to_owned()],
        env: vec![("KEY".to_owned(), "value".to_owned())],
        ..Spec::default()
    };
    let (outcome, output) = run_with_streams(program(ARGUMENTS), &caps_with(""), spec, b"");
    assert_eq!(outcome, Outcome::Exited(0));
    assert_eq!(output, b"name\0two words\0KEY=value\0");
}

#[test]
fn streams_are_attached() {
    let echo = "(drop (call $say (i32.add (call $ask) (i32.const 1))))";
    let (outcome, output) = run_with_streams(program(echo), &caps_with(""), Spec::default(), b"a");
    assert_eq!((outcome, output.as_slice()), (Outcome::Exited(0), &b"b"[..]));
}

#[test]
fn without_stdio_output_is_swallowed_and_input_at_its_end() {
    let echo = "(call $exit (i32.or (call $say (i32.const 65)) (call $ask)))";
    let caps = caps("[memory]\nlimit = \"1M\"");
    let (outcome, output) = run_with_streams(program(echo), &caps, Spec::default(), b"a");
    assert_eq!((outcome, output.as_slice()), (Outcome::Exited(0), &b""[..]));
}

#[test]
fn the_exit_code_says_whether_it_succeeded() {
    let caps = caps_with("");
    assert_eq!(run(single("", "(i32.const 0)"), &caps), Outcome::Exited(0));
    assert_eq!(run(single("", "(i32.const 1)"), &caps), Outcome::Exited(1));
    assert_eq!(run(program("(call $exit (i32.const 0))"), &caps), Outcome::Exited(0));
    assert_eq!(run(program("(call $exit (i32.const 1))"), &caps), Outcome::Exited(1));
    assert!(matches!(run(single("", "unreachable"), &caps), Outcome::Trap(_)));
    let with_code = command(
        r#"(import "wasi:cli/exit@0.2.12" (instance $exit
             (export "exit-with-code" (func (param "status-code" u8)))))
           (core func $exit (canon lower (func $exit "exit-with-code")))
           (core module $m (import "" "exit" (func $exit (param i32)))
             (func (export "run") (result i32) (call $exit (i32.const 42)) unreachable))
           (core instance $main (instantiate $m (with "" (instance (export "exit" (func $exit))))))"#,
    );
    assert_eq!(run(with_code, &caps), Outcome::Exited(42));
}

#[test]
fn clocks_and_randomness_need_their_capabilities() {
    let time = program("(call $exit (call $time (i32.const 0) (i64.const 0) (i32.const 200)))");
    let random = program("(call $exit (call $random (i32.const 200) (i32.const 8)))");
    for (component, name) in [(&time, "clock"), (&random, "random")] {
        assert_eq!(run(component, &caps_with(&format!("[{name}]"))), Outcome::Exited(0));
        let Outcome::Trap(message) = run(component, &caps_with("")) else { panic!("{name}") };
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
}

#[test]
fn a_timeout_can_be_waited_for() {
    // One subscription: a clock, monotonic, in a millisecond.
    let wait = program(
        "(i32.store (i32.const 216) (i32.const 1)) (i64.store (i32.const 224) (i64.const 1000000))
         (call $exit (call $poll (i32.const 200) (i32.const 300) (i32.const 1) (i32.const 400)))",
    );
    assert_eq!(run(&wait, &caps_with("[clock]")), Outcome::Exited(0));
}

#[test]
fn all_memories_count_together() {
    // Two instances; the second one's memory is what the first asks for.
    let text = |first: u32, second: u32, grow: u32| {
        command(&format!(
            r#"(core module $m (memory {first}) (func (export "run") (result i32)
                 (i32.eq (memory.grow (i32.const {grow})) (i32.const -1))))
               (core module $other (memory {second}))
               (core instance (instantiate $other))
               (core instance $main (instantiate $m))"#
        ))
    };
    let caps = caps_with("");
    assert_eq!(run(text(4, 4, 8), &caps), Outcome::Exited(0));
    assert_eq!(run(text(4, 4, 9), &caps), Outcome::Exited(1));
    assert_eq!(run(text(9, 8, 0), &caps), Outcome::OutOfMemory { limit: 1 << 20 });
    let table = single("(table 200000 funcref)", "(i32.const 0)");
    assert_eq!(run(table, &caps), Outcome::OutOfMemory { limit: 1 << 20 });
}

#[test]
fn the_stack_ends() {
    let text = single("(func $f (call $f))", "(call $f) (i32.const 0)");
    let Outcome::Trap(message) = run(text, &caps_with("")) else { panic!("it goes on") };
    assert!(message.contains("stack"), "{message}");
}

#[test]
fn fuel_is_counted_in_all_instances() {
    let caps = caps_with("[fuel]\ninstructions = 100000");
    assert_eq!(run(single("", "(i32.const 0)"), &caps), Outcome::Exited(0));
    assert_eq!(run(single("", FOREVER), &caps), Outcome::OutOfFuel);
    assert_eq!(run(nested(FOREVER), &caps), Outcome::OutOfFuel);
}

/// Two components, of which one calls the other through an adapter that the compiler makes: it
/// passes a text of 4 bytes. `body` is what is done with it, in the other.
fn nested(body: &str) -> String {
    format!(
        r#"(component
        (component $taker
          (core module $m (memory (export "memory") 1)
            (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 64))
            (func (export "take") (param $at i32) (param $length i32) (result i32) {body}))
          (core instance $i (instantiate $m))
          (func (export "take") (param "text" string) (result u32)
            (canon lift (core func $i "take") (memory (core memory $i "memory"))
              (realloc (core func $i "realloc")))))
        (component $giver
          (import "take" (func $take (param "text" string) (result u32)))
          (core module $memory (memory (export "memory") 1) (data (i32.const 8) "text"))
          (core instance $memory (instantiate $memory))
          (core func $take (canon lower (func $take) (memory (core memory $memory "memory"))))
          (core module $m
            (import "" "take" (func $take (param i32 i32) (result i32)))
            (func (export "run") (result i32) (call $take (i32.const 8) (i32.const 4))))
          (core instance $main (instantiate $m (with "" (instance (export "take" (func $take))))))
          (func (export "run") (result (result)) (canon lift (core func $main "run"))))
        (instance $taker (instantiate $taker))
        (instance $giver (instantiate $giver (with "take" (func $taker "take"))))
        (instance $run (export "run" (func $giver "run")))
        (export "wasi:cli/run@0.2.0" (instance $run)))"#
    )
}

#[test]
fn components_in_components_call_one_another() {
    let is_text = "(i32.ne (i32.load (local.get $at)) (i32.const 0x74786574))";
    assert_eq!(run(nested(is_text), &caps_with("")), Outcome::Exited(0));
}

#[test]
fn a_deadline_ends_whatever_it_does() {
    let quiet = "(drop (call $say (i32.const 65)))";
    let writes = program(&format!("(loop $again {quiet} (br $again))"));
    let waits = program(
        "(i32.store (i32.const 216) (i32.const 1)) (i64.store (i32.const 224) (i64.const -1))
         (drop (call $poll (i32.const 200) (i32.const 300) (i32.const 1) (i32.const 400)))",
    );
    let starts = single("(func $f (loop $again (br $again))) (start $f)", "(i32.const 0)");
    let fills = single(
        "(memory 16)",
        "(loop $again (memory.fill (i32.const 0) (i32.const 1) (i32.const 1048576)) (br $again))
         (i32.const 0)",
    );
    let components = [
        single("", FOREVER).into_bytes(),
        nested(FOREVER).into_bytes(),
        starts.into_bytes(),
        fills.into_bytes(),
        writes,
        waits,
    ];
    // Fuel for years is no way around it.
    for more in ["", "[fuel]\ninstructions = 1000000000000000000"] {
        let caps = caps(&format!(
            "[memory]\nlimit = \"2M\"\n[stdio]\n[clock]\n[time]\ndeadline = \"20ms\"\n{more}"
        ));
        for (index, component) in components.iter().enumerate() {
            let outcome = run(component, &caps);
            assert_eq!(outcome, Outcome::Ended(CancelReason::Deadline), "{index} {more}");
        }
    }
}

#[test]
fn it_can_be_stopped_while_it_waits_for_input() {
    let component = program("(drop (call $say (i32.const 65))) (drop (call $ask))");
    let caps = caps_with("");
    let (stdin, _open) = std::io::pipe().unwrap();
    let (mut drain, stdout) = std::io::pipe().unwrap();
    let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
    let spec = Spec { stdin, stdout, ..Spec::default() };
    let isolate = ready(&component, &caps, &table(&caps), spec);
    let cancel = isolate.cancel_handle();
    let running = std::thread::spawn(move || isolate.run());
    drain.read_exact(&mut [0]).unwrap();
    cancel.request(CancelReason::Stopped);
    assert_eq!(running.join().unwrap(), Outcome::Ended(CancelReason::Stopped));
}

#[test]
fn revoking_stdio_acts_on_open_streams() {
    // Says a byte, waits for one, says another: its end is the errno's.
    let component = program(
        "(drop (call $say (i32.const 65))) (drop (call $ask))
         (call $exit (i32.ne (call $say (i32.const 66)) (i32.const 0)))",
    );
    for revoke in [false, true] {
        let caps = caps_with("");
        let mut table = table(&caps);
        let (stdin, mut feed) = std::io::pipe().unwrap();
        let (mut drain, stdout) = std::io::pipe().unwrap();
        let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
        let isolate = ready(&component, &caps, &table, Spec { stdin, stdout, ..Spec::default() });
        let running = std::thread::spawn(move || isolate.run());
        drain.read_exact(&mut [0]).unwrap();
        if revoke {
            let handle = table.find("isolate", "stdio").expect("it was installed");
            table.revoke(handle).unwrap();
        }
        feed.write_all(b"x").unwrap();
        let mut rest = Vec::new();
        drain.read_to_end(&mut rest).unwrap();
        let code = i32::from(revoke);
        assert_eq!(running.join().unwrap(), Outcome::Exited(code));
        assert_eq!(rest.len(), usize::from(!revoke));
    }
}

#[test]
fn revoking_a_clock_ends_who_asks_it() {
    let component = program(
        "(drop (call $time (i32.const 0) (i64.const 0) (i32.const 200)))
         (drop (call $say (i32.const 65))) (drop (call $ask))
         (drop (call $time (i32.const 0) (i64.const 0) (i32.const 200)))",
    );
    let caps = caps_with("[clock]");
    let mut table = table(&caps);
    let (stdin, mut feed) = std::io::pipe().unwrap();
    let (mut drain, stdout) = std::io::pipe().unwrap();
    let (stdin, stdout) = (Some(OwnedFd::from(stdin)), Some(OwnedFd::from(stdout)));
    let isolate = ready(&component, &caps, &table, Spec { stdin, stdout, ..Spec::default() });
    let running = std::thread::spawn(move || isolate.run());
    drain.read_exact(&mut [0]).unwrap();
    let handle = table.find("isolate", "clock").expect("it was installed");
    table.revoke(handle).unwrap();
    feed.write_all(b"x").unwrap();
    let Outcome::Trap(message) = running.join().unwrap() else { panic!("it goes on") };
    assert!(message.contains("`clock` was revoked"), "{message}");
}

#[test]
fn it_runs_in_a_pool_too() {
    let admit = |text: &str| {
        let policy = Policy::pooled(Pool { isolates: 10, stacks: 10, ..Pool::default() });
        admit_in(policy, text.as_bytes(), &caps_with("")).unwrap()
    };
    let admitted = admit(&nested("(i32.const 1)"));
    for _ in 0..20 {
        let table = table(&caps_with(""));
        let spec = Spec::default();
        let ready = exocell_exovisor::Isolate::prepare(&admitted, &table, "isolate", spec);
        assert_eq!(ready.unwrap().run(), Outcome::Exited(1));
    }
}

#[test]
fn its_functions_are_not_called_one_by_one() {
    let admission = Admission::new(Policy::default());
    let text = single("", "(i32.const 0)");
    let refused = admission.admit_for("a", text.as_bytes(), &caps_with(""), Metering::Time);
    assert!(matches!(refused.map(drop), Err(AdmissionError::Component)));
    let admitted = admission.admit(text.as_bytes(), &caps_with("")).unwrap();
    let refused = admitted.function("", "run").map(drop);
    assert!(matches!(refused, Err(AdmissionError::NoFunction { .. })));
}
