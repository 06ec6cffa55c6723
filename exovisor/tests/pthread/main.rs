//! C programs over POSIX threads (`exovisor/guest/pthread.h`), compiled by clang.

use exocell_exovisor::{
    Admission, Call, CallLimits, Metering, Outcome, Policy, Pool, Priority, Scheduler,
    SchedulerConfig, Value,
};
use exocell_xgate::CapabilitySet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const FLAGS: [&str; 6] = [
    "--target=wasm32",
    "-matomics",
    "-mbulk-memory",
    "-nostdlib",
    "-Werror",
    "-Wl,--no-entry,--shared-memory,--import-memory,--max-memory=4194304",
];
/// What the header has room for, and one thread that has ended and is not gone yet.
const THREADS_MAX: u32 = 17;
const WORKERS: usize = 2;

fn compile(level: &str) -> Vec<u8> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().unwrap();
    let module = directory.path().join("program.wasm");
    let compiler = Command::new("clang")
        .args(FLAGS)
        .args([level, "-Wall", "-Wextra", "-I"])
        .arg(here.join("guest"))
        .arg(here.join("tests/pthread/program.c"))
        .arg("-o")
        .arg(&module)
        .output()
        .expect("clang and lld are there; scripts/setup installs them");
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    std::fs::read(module).unwrap()
}

/// The program's exports, and what each comes to.
const PROGRAMS: [(&str, i32); 8] = [
    ("joined", 140),
    ("counted", 16_000),
    ("met", 20_160),
    ("turns", 40),
    ("kept", 128_108),
    ("most", 16),
    ("detached", 48),
    ("refused", 0),
];

#[test]
fn programs_over_posix_threads_run() {
    let config = SchedulerConfig {
        workers: WORKERS,
        slice: Duration::from_micros(200),
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::new(&config).unwrap();
    let tenant = scheduler.tenant("t", 1, Priority::Normal);
    let pool = Pool { isolates: 200, stacks: 200, ..Pool::default() };
    let admission = Admission::new(Policy::pooled(pool));
    let caps = CapabilitySet::parse("version = 1\n[processes]\nmax = 64", Path::new("/")).unwrap();
    for level in ["-O0", "-O2"] {
        let module = compile(level);
        let admitted = admission.admit_for("t", &module, &caps, Metering::Time).unwrap();
        for (name, result) in PROGRAMS {
            let function = admitted.function("t", name).unwrap();
            for _ in 0..5 {
                let limits = CallLimits {
                    memory_bytes: 4 << 20,
                    deadline: None,
                    cpu_ns: Some(60_000_000_000),
                    threads: THREADS_MAX,
                    fuel: 0,
                };
                let report = scheduler.run(&tenant, Call::new(&function, &[], limits)).unwrap();
                assert_eq!(
                    (report.outcome, report.results),
                    (Outcome::Exited(0), vec![Value::I32(result)]),
                    "{name} {level}"
                );
            }
        }
    }
}
