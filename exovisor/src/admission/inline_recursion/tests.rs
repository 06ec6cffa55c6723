use super::*;
use wasmtime::{Engine, Instance, Store};

/// Recursive functions of one number: the usual one, one whose arguments are calls, one with a
/// variable that has to be zero at each call, one that returns early from within blocks and a
/// loop, and one that answers nothing and counts in a global.
const TEXTS: [&str; 5] = [
    r#"(module (func $f (export "run") (param i32) (result i32)
      (if (result i32) (i32.lt_s (local.get 0) (i32.const 2))
        (then (local.get 0))
        (else (i32.add (call $f (i32.sub (local.get 0) (i32.const 1)))
          (call $f (i32.sub (local.get 0) (i32.const 2))))))))"#,
    r#"(module (func $a (param $m i32) (param $n i32) (result i32)
        (if (i32.eqz (local.get $m)) (then (return (i32.add (local.get $n) (i32.const 1)))))
        (if (i32.eqz (local.get $n)) (then
          (return (call $a (i32.sub (local.get $m) (i32.const 1)) (i32.const 1)))))
        (call $a (i32.sub (local.get $m) (i32.const 1))
          (call $a (local.get $m) (i32.sub (local.get $n) (i32.const 1)))))
      (func (export "run") (param i32) (result i32)
        (call $a (i32.const 2) (i32.and (local.get 0) (i32.const 7)))))"#,
    r#"(module (func $f (export "run") (param i32) (result i32) (local $sum i32) (local f64)
      (if (i32.eqz (local.get 0)) (then (return (i32.const 1))))
      (loop $again
        (local.set 2 (f64.add (local.get 2) (f64.const 1.5)))
        (local.set $sum (i32.add (local.get $sum) (call $f (i32.shr_u (local.get 0) (i32.const 1)))))
        (local.set 0 (i32.sub (local.get 0) (i32.const 3)))
        (br_if $again (i32.gt_s (local.get 0) (i32.const 0))))
      (i32.add (local.get $sum) (i32.trunc_f64_s (local.get 2)))))"#,
    r#"(module (func $f (export "run") (param i32) (result i32)
      (block $out (block
        (br_if $out (i32.gt_u (local.get 0) (i32.const 20)))
        (loop $l
          (if (i32.lt_u (local.get 0) (i32.const 2)) (then (return (i32.const 5))))
          (br_if 3 (i32.const 9) (i32.eq (local.get 0) (i32.const 7)))
          (drop)
          (br 2))))
      (i32.add (i32.const 1) (call $f (i32.div_u (local.get 0) (i32.const 2))))))"#,
    r#"(module (global $count (mut i32) (i32.const 0))
      (func $f (param i32)
        (global.set $count (i32.add (global.get $count) (i32.const 1)))
        (if (local.get 0) (then (call $f (i32.sub (local.get 0) (i32.const 1))))))
      (func (export "run") (param i32) (result i32)
        (call $f (local.get 0)) (global.get $count)))"#,
];

fn binary(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

fn results(binary: &[u8]) -> Vec<i32> {
    let module = wasmtime::Module::new(&Engine::default(), binary).unwrap();
    let mut store = Store::new(module.engine(), ());
    let instance = Instance::new(&mut store, &module, &[]).unwrap();
    let run = instance.get_typed_func::<i32, i32>(&mut store, "run").unwrap();
    (0..24).map(|argument| run.call(&mut store, argument).unwrap()).collect()
}

#[test]
fn what_is_inlined_answers_the_same() {
    for text in TEXTS {
        let whole = binary(text);
        let inlined = inlined(&whole).unwrap().unwrap_or_else(|| panic!("{text}"));
        assert!(inlined.len() > whole.len());
        assert_eq!(results(&inlined), results(&whole), "{text}");
    }
}

#[test]
fn what_is_not_short_and_simple_stays_as_it_is() {
    let stays = |text: &str| inlined(&binary(text)).unwrap().is_none();
    let long = "(drop (i32.const 1))".repeat(OPERATORS_MAX);
    let locals = "i32 ".repeat(LOCALS_MAX + 1);
    for text in [
        "(module (func))",
        "(module (func $f (call $g)) (func $g (call $f)))",
        "(module (func $f (return_call $f)))",
        "(module (func $f (param funcref) (call $f (local.get 0))))",
        "(module (func $f (result i32 i32) (call $f)))",
        &format!("(module (func $f {long} (call $f)))"),
        &format!("(module (func $f (local {locals}) (call $f)))"),
    ] {
        assert!(stays(text), "{text}");
    }
    assert!(!stays("(module (func $f (call $f)))"));
}

#[test]
fn what_is_not_valid_does_not_become_so() {
    for body in [
        "(param i32) (call $f (local.get 1))",
        "(param i32) (call $f (i64.const 1))",
        "(param i32) (call $f)",
        "(result i32) (call $f) (br 1)",
        "(local i32) (call $f) (local.set 3 (i32.const 1))",
        "(result i64) (i32.add (call $f) (i32.const 1)) (drop) (i64.const 1)",
    ] {
        let whole = binary(&format!("(module (func $f {body}))"));
        let after = inlined(&whole).unwrap().unwrap_or_else(|| whole.clone());
        for binary in [whole, after] {
            assert!(wasmtime::Module::validate(&Engine::default(), &binary).is_err(), "{body}");
        }
    }
}

#[test]
fn a_module_grows_no_further() {
    let text: String =
        (0..3000).map(|index| format!("(func (call {index}) (call {index}))")).collect();
    let whole = binary(&format!("(module {text})"));
    let grown = inlined(&whole).unwrap().unwrap();
    // A block, a call and two ends, of two bytes at most.
    assert!(grown.len() < whole.len() + 3 * GROWTH_MAX, "{}", grown.len());
}
