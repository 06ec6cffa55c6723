//! WASI-NN: models from the capability table, and what guests may do with them.

#[path = "../../models/tests/onnx/mod.rs"]
mod onnx;

use exocell_exovisor::{
    Admission, AdmissionError, Call, CallLimits, CancelReason, Isolate, Metering, ModuleLimits,
    Outcome, Policy, Report, Scheduler, SchedulerConfig, Spec, Tenant, Value,
};
use exocell_models::Model;
use exocell_xgate::{CapabilitySet, Table};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

use crate::common::{caps_with, ready, table};

const INVALID_ARGUMENT: i32 = 1;
const MISSING_MEMORY: i32 = 3;
const UNSUPPORTED_OPERATION: i32 = 6;
const TOO_LARGE: i32 = 7;
const NOT_FOUND: i32 = 8;

/// The tensor at 64 is two floats; outputs come to 256.
const PRELUDE: &str = r#"(module
  (import "wasi_ephemeral_nn" "load" (func $load (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "load_by_name" (func $load_by_name (param i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "init_execution_context" (func $init (param i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "set_input" (func $set_input (param i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "compute" (func $compute (param i32) (result i32)))
  (import "wasi_ephemeral_nn" "get_output" (func $get_output (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "layer")
  (data (i32.const 16) "other")
  ;; Dimensions [1, 2] at 96, type f32, data at 104, 8 bytes.
  (data (i32.const 64) "\60\00\00\00\02\00\00\00\01\00\00\00\68\00\00\00\08\00\00\00")
  (data (i32.const 96) "\01\00\00\00\02\00\00\00\00\00\80\3f\00\00\00\40")
  (func $begin (result i32)
    (if (call $load_by_name (i32.const 0) (i32.const 5) (i32.const 32)) (then unreachable))
    (if (call $init (i32.load (i32.const 32)) (i32.const 36)) (then unreachable))
    (i32.load (i32.const 36)))
"#;

/// The layer's result for [1, 2] is [2.25, 0, 6].
const INFER: &str = "(local $c i32)
  (local.set $c (call $begin))
  (if (call $set_input (local.get $c) (i32.const 0) (i32.const 64)) (then unreachable))
  (if (call $compute (local.get $c)) (then unreachable))
  (if (call $get_output (local.get $c) (i32.const 0) (i32.const 256) (i32.const 12) (i32.const 40)) (then unreachable))
  (if (i32.ne (i32.load (i32.const 40)) (i32.const 12)) (then unreachable))
  (call $exit (i32.add
    (i32.trunc_f32_s (f32.mul (f32.load (i32.const 256)) (f32.const 4)))
    (i32.mul (i32.const 10) (i32.trunc_f32_s (f32.load (i32.const 264))))))";

struct World {
    _dir: TempDir,
    caps: CapabilitySet,
    table: Table,
}

fn grant(file: &Path) -> CapabilitySet {
    caps_with(&format!("[[model]]\nname = \"layer\"\nfile = \"{}\"", file.display()))
}

fn world(model: &[u8]) -> World {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("layer.onnx");
    std::fs::write(&file, model).unwrap();
    let caps = grant(&file);
    World { table: table(&caps), _dir: dir, caps }
}

fn module(body: &str) -> String {
    format!("{PRELUDE} (func (export \"_start\") {body}))")
}

fn exit_code(world: &World, body: &str) -> i32 {
    match ready(&module(body), &world.caps, &world.table, Spec::default()).run() {
        Outcome::Exited(code) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_granted_model_is_computed() {
    let world = world(&onnx::layer());
    assert_eq!(exit_code(&world, INFER), 9 + 60);
}

#[test]
fn guests_bring_no_models_and_name_no_others() {
    let world = world(&onnx::layer());
    let load = "(call $exit (call $load (i32.const 0) (i32.const 1) (i32.const 1) (i32.const 0) (i32.const 40)))";
    assert_eq!(exit_code(&world, load), UNSUPPORTED_OPERATION);
    let other = "(call $exit (call $load_by_name (i32.const 16) (i32.const 5) (i32.const 32)))";
    assert_eq!(exit_code(&world, other), NOT_FOUND);
    let long = "(call $exit (call $load_by_name (i32.const 0) (i32.const -1) (i32.const 32)))";
    assert_eq!(exit_code(&world, long), NOT_FOUND);
}

#[test]
fn without_the_capability_the_imports_are_refused() {
    let bare = caps_with("");
    let refused = crate::common::admit(&module(""), &bare);
    let Err(AdmissionError::NotGranted { name: "load", needs }) = refused.map(drop) else {
        panic!("it is admitted");
    };
    assert_eq!(needs, "model");
    let text = module("");
    let found = Admission::requirements(text.as_bytes(), &ModuleLimits::default()).unwrap();
    let of_nn: Vec<_> = found.iter().filter(|one| one.module == "wasi_ephemeral_nn").collect();
    assert_eq!(of_nn.len(), 6);
    assert!(of_nn.iter().all(|one| one.import.is_some_and(|import| import.tier.name() == "2'")));
}

#[test]
fn what_does_not_fit_is_refused() {
    let world = world(&onnx::layer());
    let set = |change: &str| {
        exit_code(
            &world,
            &format!(
                "(local $c i32) (local.set $c (call $begin)) {change}
              (call $exit (call $set_input (local.get $c) (i32.const 0) (i32.const 64)))"
            ),
        )
    };
    assert_eq!(set(""), 0);
    for (change, errno) in [
        ("(i32.store (i32.const 96) (i32.const 2))", INVALID_ARGUMENT),
        ("(i32.store (i32.const 68) (i32.const 1))", INVALID_ARGUMENT),
        ("(i32.store (i32.const 68) (i32.const -1))", INVALID_ARGUMENT),
        ("(i32.store8 (i32.const 72) (i32.const 2))", INVALID_ARGUMENT),
        ("(i32.store (i32.const 80) (i32.const 4))", INVALID_ARGUMENT),
        ("(i32.store (i32.const 76) (i32.const -4))", MISSING_MEMORY),
        ("(i32.store (i32.const 64) (i32.const -4))", MISSING_MEMORY),
    ] {
        assert_eq!(set(change), errno, "{change}");
    }
    for (call, errno) in [
        ("(call $init (i32.const 7) (i32.const 36))", INVALID_ARGUMENT),
        ("(call $set_input (i32.const 7) (i32.const 0) (i32.const 64))", INVALID_ARGUMENT),
        ("(call $set_input (call $begin) (i32.const 1) (i32.const 64))", INVALID_ARGUMENT),
        ("(call $set_input (call $begin) (i32.const 0) (i32.const -4))", MISSING_MEMORY),
        ("(call $compute (i32.const -1))", INVALID_ARGUMENT),
        ("(call $compute (call $begin))", INVALID_ARGUMENT),
        (
            "(call $get_output (call $begin) (i32.const 0) (i32.const 256) (i32.const 12) (i32.const 40))",
            INVALID_ARGUMENT,
        ),
    ] {
        assert_eq!(exit_code(&world, &format!("(call $exit {call})")), errno, "{call}");
    }
    let small = INFER.replace(
        "(i32.const 12) (i32.const 40)) (then unreachable)",
        "(i32.const 11) (i32.const 40)) (then (call $exit (i32.const 77)))",
    );
    assert_eq!(exit_code(&world, &small), 77);
}

#[test]
fn contexts_and_graphs_are_bounded() {
    let world = world(&onnx::layer());
    let contexts = "(local $n i32) (drop (call $begin))
      (loop $more (br_if $more (i32.eqz (local.tee $n (call $init (i32.const 0) (i32.const 36))))))
      (call $exit (local.get $n))";
    assert_eq!(exit_code(&world, contexts), TOO_LARGE);
    let graphs = "(local $n i32)
      (loop $more (br_if $more (i32.eqz (local.tee $n (call $load_by_name (i32.const 0) (i32.const 5) (i32.const 32))))))
      (call $exit (local.get $n))";
    assert_eq!(exit_code(&world, graphs), TOO_LARGE);
}

#[test]
fn a_model_that_cannot_be_had_is_named() {
    for (model, words) in [(&b"garbage"[..], "not an ONNX model"), (&[][..], "layer.onnx")] {
        let world = world(model);
        if model.is_empty() {
            std::fs::remove_file(world._dir.path().join("layer.onnx")).unwrap();
        }
        let admitted = crate::common::admit(&module(""), &world.caps).unwrap();
        let error = Isolate::prepare(&admitted, &world.table, "isolate", Spec::default());
        let error = error.err().expect("it is refused").to_string();
        assert!(error.contains(words) && error.contains("model:layer"), "{error}");
    }
}

/// Work for about a second: 200 products, one after the other.
fn heavy() -> Vec<u8> {
    products(200)
}

/// So many products, one after the other.
fn products(count: usize) -> Vec<u8> {
    let square = [400, 400];
    let name = |index: usize| if index == 0 { "x".to_owned() } else { format!("v{index}") };
    let nodes: Vec<Vec<u8>> = (0..count)
        .map(|index| onnx::node("MatMul", &[&name(index), "w"], &name(index + 1), &[]))
        .collect();
    let weights = onnx::tensor("w", onnx::F32, &square, &vec![0; 640_000]);
    let (x, y) = (onnx::value("x", onnx::F32, &square), onnx::value(&name(count), onnx::F32, &[]));
    onnx::model(&nodes, &[weights], &[x], &[y])
}

/// Computes it once; the tensor's data is the first 640,000 bytes.
const COMPUTE: &str = "(local $c i32)
  (drop (memory.grow (i32.const 9)))
  (local.set $c (call $begin))
  (i32.store (i32.const 96) (i32.const 400)) (i32.store (i32.const 100) (i32.const 400))
  (i32.store (i32.const 76) (i32.const 0)) (i32.store (i32.const 80) (i32.const 640000))
  (if (call $set_input (local.get $c) (i32.const 0) (i32.const 64)) (then unreachable))
  (if (call $compute (local.get $c)) (then unreachable))";

#[test]
fn a_deadline_ends_a_computation() {
    let world = world(&heavy());
    let caps = CapabilitySet::parse(
        &world.caps.to_json().replacen('{', "{\"time\": {\"deadline\": \"50ms\"},", 1),
        Path::new("/"),
    )
    .unwrap();
    let ended = ready(&module(COMPUTE), &caps, &table(&caps), Spec::default()).run();
    assert_eq!(ended, Outcome::Ended(CancelReason::Deadline));
    assert_eq!(exit_code(&world, &format!("{COMPUTE} (call $exit (i32.const 5))")), 5);
}

#[test]
fn revoking_acts_on_a_graph_that_is_loaded_and_a_computation_frees_its_worker() {
    let mut world = world(&heavy());
    let config = SchedulerConfig { workers: 1, ..SchedulerConfig::default() };
    let scheduler = Scheduler::new(&config).unwrap();
    let admission = Admission::new(Policy::default());
    let text = format!(
        "{PRELUDE} (func (export \"compute\") {COMPUTE})
        (func (export \"begin\") (param i32) (result i32)
          (call $load_by_name (i32.const 0) (i32.const 5) (i32.const 32))))"
    );
    let one = scheduler.tenant("one", 1, exocell_exovisor::Priority::Normal);
    let other = scheduler.tenant("other", 1, exocell_exovisor::Priority::Normal);
    let function = |owner: &str, name: &str| {
        let module = admission.admit_for(owner, text.as_bytes(), &world.caps, Metering::Time);
        module.unwrap().function(owner, name).unwrap()
    };
    let limits = || {
        let deadline = Some(Instant::now() + Duration::from_secs(120));
        CallLimits { memory_bytes: 1 << 20, deadline, cpu_ns: None, threads: 0, fuel: 0 }
    };
    let (compute, begin) = (function("one", "compute"), function("other", "begin"));
    let attach = |table: &Table| scheduler.attach(table, "isolate", Spec::default()).unwrap();
    let (send, ended) = std::sync::mpsc::channel();
    let call = Call::new(&compute, &[], limits()).with(attach(&world.table));
    scheduler.submit(&one, call, move |report| drop(send.send(report))).unwrap();
    // Its worker serves others meanwhile, to whom the model is revoked.
    let handle = world.table.find("isolate", "model:layer").unwrap();
    let attached = attach(&world.table);
    world.table.revoke(handle).unwrap();
    let call = Call::new(&begin, &[Value::I32(0)], limits()).with(attached);
    let report = scheduler.run(&other, call).unwrap();
    assert_eq!(report.results, [Value::I32(NOT_FOUND)], "{report:?}");
    let computed = ended.recv().unwrap().outcome;
    assert!(matches!(computed, Outcome::Exited(0) | Outcome::Trap(_)), "{computed:?}");
}

/// CPU time of this thread.
fn thread_cpu() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    Duration::from(time)
}

#[test]
fn what_a_model_computes_is_the_calls_and_the_tenants_cpu_time() {
    const PRODUCTS: usize = 40;
    const SPIN: Duration = Duration::from_millis(20);
    let model = products(PRODUCTS);
    let plain = Model::read(&model).unwrap();
    let begun = thread_cpu();
    plain.run(&[vec![0; 640_000]], || false).unwrap();
    let of_model = thread_cpu() - begun;

    let world = world(&model);
    let config = SchedulerConfig { workers: 1, ..SchedulerConfig::default() };
    let scheduler = Scheduler::new(&config).unwrap();
    let admission = Admission::new(Policy::default());
    let text = format!(
        "{PRELUDE} (func (export \"compute\") {COMPUTE})
        (func (export \"spin\") (loop $again (br $again))))"
    );
    let [one, other] =
        ["one", "other"].map(|name| scheduler.tenant(name, 1, exocell_exovisor::Priority::Normal));
    let call = |tenant: &Tenant, name: &str, cpu: Option<Duration>| {
        let owner = tenant.name();
        let module = admission.admit_for(owner, text.as_bytes(), &world.caps, Metering::Time);
        let function = module.unwrap().function(owner, name).unwrap();
        let deadline = Some(Instant::now() + Duration::from_secs(120));
        let cpu_ns = cpu.map(|cpu| cpu.as_nanos() as u64);
        let limits = CallLimits { memory_bytes: 1 << 20, deadline, cpu_ns, threads: 0, fuel: 0 };
        let attached = scheduler.attach(&world.table, "isolate", Spec::default()).unwrap();
        Call::new(&function, &[], limits).with(attached)
    };
    // Of the call and of the tenant, though no worker computed it.
    let report = scheduler.run(&one, call(&one, "compute", None)).unwrap();
    assert_eq!(report.outcome, Outcome::Exited(0));
    assert!(report.cpu > of_model / 2, "{:?}, the model alone {of_model:?}", report.cpu);

    // It is ahead of another by that much: what both begin, the other ends first.
    let (send, ended) = std::sync::mpsc::channel();
    // To admit a module may take longer than one spins, so that comes before.
    let calls = [&one, &other].map(|tenant| (tenant, call(tenant, "spin", Some(SPIN))));
    for (tenant, call) in calls {
        let (send, name) = (send.clone(), tenant.name().to_owned());
        let done = move |report: Report| drop(send.send((name, report.outcome)));
        scheduler.submit(tenant, call, done).unwrap();
    }
    let out_of_time = Outcome::Ended(CancelReason::CpuTime);
    assert_eq!(ended.recv().unwrap(), ("other".to_owned(), out_of_time.clone()));
    assert_eq!(ended.recv().unwrap(), ("one".to_owned(), out_of_time.clone()));
    let stats = scheduler.stats();
    let cpu_ns = |name: &str| stats.iter().find(|(of, _)| of == name).unwrap().1.cpu_ns;
    assert!(cpu_ns("one") > (of_model / 2).as_nanos() as u64 + cpu_ns("other") / 2);

    // A limit ends it between two operators.
    let limit = Some(of_model / 8);
    let report = scheduler.run(&one, call(&one, "compute", limit)).unwrap();
    assert_eq!(report.outcome, out_of_time);
}
