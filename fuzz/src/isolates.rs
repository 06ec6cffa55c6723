//! Modules that a tenant brings, and what their code says to the host.

use crate::Input;
use exocell_exovisor::{
    Admission, AdmissionError, Admitted, Call, CallLimits, Metering, ModuleLimits, Policy, Pool,
    Priority, Scheduler, SchedulerConfig, Tenant, Value,
};
use exocell_xgate::CapabilitySet;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const TENANT: &str = "fuzz";

fn everything() -> CapabilitySet {
    let text = "version = 1\n[memory]\nlimit = \"1M\"\n[processes]\nmax = 8\n[stdio]\n[clock]";
    CapabilitySet::parse(text, Path::new("/")).expect("the grant is well-formed")
}

fn gate() -> &'static Admission {
    static ADMISSION: OnceLock<Admission> = OnceLock::new();
    ADMISSION.get_or_init(|| {
        let modules = ModuleLimits {
            bytes: 64 << 10,
            entries: 1_000,
            body_bytes: 4 << 10,
            depth: 8,
            instances: 32,
            items: 10_000,
            ..ModuleLimits::default()
        };
        let pool = Pool { isolates: 32, stacks: 32, ..Pool::default() };
        Admission::new(Policy { modules, ..Policy::pooled(pool) })
    })
}

fn admit(bytes: &[u8]) -> Result<Admitted, AdmissionError> {
    gate().admit_for(TENANT, bytes, &everything(), Metering::Time)
}

/// Bytes that are to be a module or a component: scanned, rewritten, compiled, linked.
pub fn admission(bytes: &[u8]) {
    // What comes of it does not matter.
    if let Err(AdmissionError::Component) = admit(bytes) {
        let _ = gate().admit(bytes, &everything());
    }
}

/// Modules with all that admission rewrites, and components with all that it counts.
pub fn admission_seeds() -> Vec<Vec<u8>> {
    let start = r#"(module (memory 1) (data (i32.const 8) "x") (func $f) (start $f)
      (export "_start" (func $f)))"#;
    let hosted = r#"(module (import "env" "__linear_memory" (memory 1))
      (import "env" "__stack_pointer" (global (mut i32)))
      (import "env" "__indirect_function_table" (table 2 funcref))
      (import "env" "unknown" (func (param i64) (result f32)))
      (elem (i32.const 0) $f) (func $f (global.set 0 (global.get 0)))
      (func (export "run") (call_indirect (i32.const 0))))"#;
    let recursive = r#"(module (func $f (export "run") (param i32) (result i32) (local i64)
      (block $out (loop $again
        (if (i32.lt_s (local.get 0) (i32.const 2)) (then (return (local.get 0))))
        (br_if $out (i64.eqz (local.tee 1 (i64.extend_i32_u
          (call $f (i32.sub (local.get 0) (i32.const 1)))))))))
      (call $f (i32.sub (local.get 0) (i32.const 2)))))"#;
    let texts = [start, hosted, recursive, THREADS, COMPONENT];
    let binaries = texts.iter().filter_map(|text| wat::parse_str(text).ok());
    binaries.chain(texts.iter().map(|text| text.as_bytes().to_vec())).collect()
}

/// Components in a component, types in types, aliases that lead outwards, what WASI has and what
/// nobody has, and a call from one to the other that an adapter translates.
const COMPONENT: &str = r#"(component
  (import "wasi:cli/exit@0.2.0" (instance $exit
    (export "exit" (func (param "status" (result))))))
  (import "acme:rockets/launch@1.0.0" (instance
    (type (component (type (instance (export "t" (type (sub resource)))))))
    (export "missile" (type $missile (sub resource)))
    (export "launch" (func (param "count" u32) (result (own $missile))))))
  (core module $empty)
  (component $taker
    (alias outer 1 $empty (core module $again))
    (core instance (instantiate $again))
    (core module $m (memory (export "memory") 1) (table 2 funcref)
      (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 64))
      (func (export "take") (param i32 i32) (result i32) (local.get 1)))
    (core instance $i (instantiate $m))
    (func (export "take") (param "text" string) (result u32)
      (canon lift (core func $i "take") (memory (core memory $i "memory"))
        (realloc (core func $i "realloc")))))
  (component $giver
    (import "take" (func $take (param "text" string) (result u32)))
    (core module $memory (memory (export "memory") 1) (data (i32.const 8) "text"))
    (core instance $memory (instantiate $memory))
    (core func $take (canon lower (func $take) (memory (core memory $memory "memory"))))
    (core module $m (import "" "take" (func $take (param i32 i32) (result i32)))
      (func (export "run") (result i32) (call $take (i32.const 8) (i32.const 4))))
    (core instance $main (instantiate $m (with "" (instance (export "take" (func $take))))))
    (func (export "run") (result (result)) (canon lift (core func $main "run"))))
  (instance $taker (instantiate $taker))
  (instance $giver (instantiate $giver (with "take" (func $taker "take"))))
  (instance $run (export "run" (func $giver "run")))
  (export "wasi:cli/run@0.2.0" (instance $run)))"#;

/// Does what it is told: `op` with two words. `found` tells what earlier calls left behind.
const THREADS: &str = r#"(module
  (import "env" "memory" (memory 1 4 shared))
  (import "wasi" "thread-spawn" (func $spawn (param i32) (result i32)))
  (import "env" "malloc" (func $malloc (param i32) (result i32)))
  (import "env" "free" (func $free (param i32)))
  (import "env" "realloc" (func $realloc (param i32 i32) (result i32)))
  (import "env" "memmove" (func $memmove (param i32 i32 i32) (result i32)))
  (global $word (mut i32) (i32.const 0))
  (func $do (export "do") (param $op i32) (param $a i32) (param $b i32) (result i32)
    (block $8 (block $7 (block $6 (block $5 (block $4 (block $3 (block $2 (block $1 (block $0
      (br_table $0 $1 $2 $3 $4 $5 $6 $7 $8 (local.get $op)))
      (return (call $spawn (local.get $a))))
      (return (memory.atomic.wait32 (local.get $a) (local.get $b) (i64.const 1000))))
      (return (memory.atomic.wait64 offset=8 (local.get $a) (i64.const 0) (i64.const 1000))))
      (return (memory.atomic.notify (local.get $a) (local.get $b))))
      (return (call $malloc (local.get $a))))
      (call $free (local.get $a)) (return (i32.const 0)))
      (return (call $realloc (local.get $a) (local.get $b))))
      (return (call $memmove (local.get $a) (local.get $b) (local.get $op))))
    (i32.store (i32.and (local.get $a) (i32.const 0xffff)) (local.get $b))
    (global.set $word (local.get $b))
    (local.get $b))
  (func (export "found") (result i32) (local $at i32) (local $found i32)
    (local.set $found (global.get $word))
    (loop $more
      (local.set $found (i32.or (local.get $found) (i32.load (local.get $at))))
      (br_if $more (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 4)))
        (i32.shl (memory.size) (i32.const 16)))))
    (local.get $found))
  (func (export "wasi_thread_start") (param i32 i32)
    (drop (call $do (i32.and (local.get 1) (i32.const 15)) (local.get 1) (local.get 0)))))"#;

/// Threads are started, addresses waited for and memory written to and freed with words of
/// anyone's choice; nothing of it is there in the next call.
pub fn threads(bytes: &[u8]) {
    static WORLD: OnceLock<(Scheduler, Tenant, Admitted)> = OnceLock::new();
    let (scheduler, tenant, admitted) = WORLD.get_or_init(|| {
        let config = SchedulerConfig { workers: 2, ..SchedulerConfig::default() };
        let scheduler = Scheduler::new(&config).expect("a scheduler");
        let tenant = scheduler.tenant(TENANT, 1, Priority::Normal);
        (scheduler, tenant, admit(THREADS.as_bytes()).expect("the module is admitted"))
    });
    let function = |name| admitted.function(TENANT, name).expect("it is exported");
    let (does, found) = (function("do"), function("found"));
    let mut input = Input::new(bytes);
    for _ in 0..4 {
        if input.is_empty() {
            break;
        }
        let words = [u32::from(input.u8() & 15), input.u32(), input.u32()];
        let arguments = words.map(|word| Value::I32(word as i32));
        let limits = |seconds| CallLimits {
            memory_bytes: 1 << 20,
            deadline: Some(Instant::now() + Duration::from_secs(seconds)),
            cpu_ns: None,
            threads: 4,
            fuel: 0,
        };
        let report = scheduler.run(tenant, Call::new(&does, &arguments, limits(1)));
        assert!(report.is_ok(), "the call was not taken");
        let report = scheduler.run(tenant, Call::new(&found, &[], limits(60)));
        assert_eq!(report.expect("it is taken").results, [Value::I32(0)], "it was not as new");
    }
}

/// Each operation, with words that fit and words that do not.
pub fn thread_seeds() -> Vec<Vec<u8>> {
    let call = |op: u8, a: u32, b: u32| [&[op][..], &a.to_le_bytes(), &b.to_le_bytes()].concat();
    let fits = |ops: std::ops::Range<u8>| ops.flat_map(|op| call(op, 64, 1)).collect();
    let outside =
        |ops: std::ops::Range<u8>| ops.flat_map(|op| call(op, u32::MAX - 3, u32::MAX)).collect();
    vec![fits(0..4), fits(4..9), outside(0..4), outside(4..9)]
}
