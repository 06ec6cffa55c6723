use super::*;
use proptest::prelude::*;
use wasmtime::{Engine, Instance, Memory, Store};

/// Each operation, on memories with short and with long addresses.
const TEXT: &str = r#"(module
  (memory $a (export "a") 1) (memory $b (export "b") i64 1)
  (data $a (i32.const 100) "some first content of the memory")
  (data $p "passive content, which is longer than a piece")
  (func (export "fill a") (param i32 i32 i32) (memory.fill $a (local.get 0) (local.get 1) (local.get 2)))
  (func (export "fill b") (param i32 i32 i32)
    (memory.fill $b (i64.extend_i32_u (local.get 0)) (local.get 1) (i64.extend_i32_u (local.get 2))))
  (func (export "copy a") (param i32 i32 i32) (memory.copy $a $a (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy b") (param i32 i32 i32)
    (memory.copy $b $b (i64.extend_i32_u (local.get 0)) (i64.extend_i32_u (local.get 1))
      (i64.extend_i32_u (local.get 2))))
  (func (export "copy a to b") (param i32 i32 i32)
    (memory.copy $b $a (i64.extend_i32_u (local.get 0)) (local.get 1) (local.get 2)))
  (func (export "init") (param i32 i32 i32) (memory.init $a $p (local.get 0) (local.get 1) (local.get 2)))
  (func (export "drop") (param i32 i32 i32) (data.drop $p)))"#;
const NAMES: [&str; 7] = ["fill a", "fill b", "copy a", "copy b", "copy a to b", "init", "drop"];
/// Bytes at the start and at the end of a memory that operations reach, and beyond it.
const REACH: u32 = 120;
const MEMORY_BYTES: u32 = 64 << 10;

/// Each operation's end, and what the memories hold after all.
fn run(binary: &[u8], operations: &[(usize, [u32; 3])]) -> (Vec<bool>, [Vec<u8>; 2]) {
    let engine = Engine::default();
    let module = wasmtime::Module::new(&engine, binary).unwrap();
    let mut store = Store::new(&engine, ());
    let instance = Instance::new(&mut store, &module, &[]).unwrap();
    let mut ends = Vec::new();
    for (name, [to, from, length]) in operations {
        let call = instance.get_typed_func::<(u32, u32, u32), ()>(&mut store, NAMES[*name]);
        ends.push(call.unwrap().call(&mut store, (*to, *from, *length)).is_ok());
    }
    let memories = ["a", "b"].map(|name| instance.get_memory(&mut store, name).unwrap());
    (ends, memories.map(|memory: Memory| memory.data(&store).to_vec()))
}

fn place() -> impl Strategy<Value = u32> {
    prop_oneof![0..REACH, MEMORY_BYTES - REACH..MEMORY_BYTES + REACH, u32::MAX - REACH..=u32::MAX]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn pieces_do_what_the_whole_does(
        piece_bytes in 1u32..40,
        operations in prop::collection::vec(
            (0..NAMES.len(), (place(), place(), prop_oneof![0..REACH, Just(u32::MAX)])
                .prop_map(|(to, from, length)| [to, from, length])),
            1..12,
        ),
    ) {
        let binary = wat::parse_str(TEXT).unwrap();
        let pieces = in_pieces(&binary, piece_bytes).unwrap().unwrap();
        prop_assert_eq!(run(&pieces, &operations), run(&binary, &operations));
    }
}

#[test]
fn short_operations_stay_as_they_are() {
    let pieces = |body: &str| {
        let text = format!("(module (memory 1) (func {body}))");
        in_pieces(&wat::parse_str(text).unwrap(), 1000).unwrap()
    };
    let fill =
        |bytes: i64| format!("(memory.fill (i32.const 0) (i32.const 1) (i32.const {bytes}))");
    assert!(pieces("nop").is_none());
    assert!(pieces(&fill(1000)).is_none());
    assert!(pieces(&fill(1001)).is_some());
    assert!(pieces(&fill(-1)).is_some());
}
