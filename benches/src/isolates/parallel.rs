//! One C source as a sequential and as a parallel module, and as a native program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Metering, Outcome, Policy, Pool, Priority, Scheduler,
    SchedulerConfig, Tenant, Value,
};
use exocell_xgate::CapabilitySet;

use super::ParallelArgs;
use crate::BenchError;
use crate::row::{Row, Unit};

const SOURCE: &str = include_str!("../../guests/kernels.c");
const HEADER: &str = include_str!("../../../exovisor/guest/exocell.h");
const NATIVE_HEADER: &str = include_str!("../../guests/native.h");

/// What clang does for x86 without being asked, and for Wasm only when it is.
const INTERLEAVE: [&str; 2] = ["-mllvm", "-force-vector-interleave=2"];
const MODULE: [&str; 6] = [
    "--target=wasm32",
    "-O2",
    "-mbulk-memory",
    "-msimd128",
    "-nostdlib",
    "-Wl,--no-entry,--initial-memory=16777216",
];
const PARALLEL: [&str; 2] =
    ["-matomics", "-Wl,--shared-memory,--import-memory,--max-memory=67108864"];
const NATIVE: [&str; 3] = ["-O2", "-fno-math-errno", "-DNATIVE"];
const THREADS: [&str; 2] = ["-DTHREADS", "-pthread"];

/// Kernels and their sizes.
const KERNELS: [(&str, i32); 6] =
    [("matmul", 128), ("kmeans", 10_000), ("svd", 64), ("svd", 128), ("svd", 256), ("svd", 512)];
/// As `often` numbers them.
const KERNEL_NAMES: [&str; 3] = ["matmul", "kmeans", "svd"];
/// Times that a kernel is called in one isolate and in one process, to compare what it does and
/// not what begins it: both means have the first touch of the memory in them, and the start of
/// threads.
const TIMES: i32 = 10;
/// Threads that `thread_spawn` starts, one after the other.
const SPAWNS: i32 = 2_000;

/// Threads of a call that may have some.
const THREADS_MAX: u32 = 16;

const TENANT: &str = "bench";

fn failed(why: impl ToString) -> BenchError {
    BenchError::Subject { subject: "exocell".to_owned(), why: why.to_string() }
}

/// Sequential against parallel, ours and native, by the wall clock; sequential against native, by
/// CPU time.
pub fn measure(args: &ParallelArgs) -> Result<Vec<Row>, BenchError> {
    let programs = Programs::compile()?;
    let subject = Subject::new(&programs)?;
    let mut rows = Vec::new();
    for (kernel, size) in KERNELS {
        rows.extend(subject.kernel(kernel, size, &programs, args)?);
    }
    let spawn = subject.function(&subject.parallel, "spawn")?;
    let mut samples = Vec::new();
    for _ in 0..args.options.rounds {
        samples.push(subject.call(&spawn, &[SPAWNS], THREADS_MAX)?.wall_ns / f64::from(SPAWNS));
    }
    rows.extend(Row::of("thread_spawn", "exocell", Unit::Ns, &samples, &[]));
    Ok(rows)
}

/// What the compiler made of the source.
struct Programs {
    _directory: tempfile::TempDir,
    sequential: PathBuf,
    parallel: PathBuf,
    native: PathBuf,
    /// The same over the host's threads.
    native_threads: PathBuf,
}

impl Programs {
    fn compile() -> Result<Self, BenchError> {
        let directory = tempfile::tempdir().map_err(failed)?;
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("kernels.c"), SOURCE).map_err(failed)?;
        std::fs::write(path("exocell.h"), HEADER).map_err(failed)?;
        std::fs::write(path("native.h"), NATIVE_HEADER).map_err(failed)?;
        let compile = |flags: &[&str], name: &str| {
            let flags = [flags, &INTERLEAVE[..]].concat();
            compile(&path("kernels.c"), &flags, &path(name)).map(|()| path(name))
        };
        let sequential = compile(&MODULE, "sequential.wasm")?;
        let parallel = compile(&[&MODULE[..], &PARALLEL[..]].concat(), "parallel.wasm")?;
        let native = compile(&NATIVE, "native")?;
        let native_threads = compile(&[&NATIVE[..], &THREADS[..]].concat(), "native-threads")?;
        Ok(Self { _directory: directory, sequential, parallel, native, native_threads })
    }
}

fn compile(source: &Path, flags: &[&str], into: &Path) -> Result<(), BenchError> {
    let compiler = Command::new("clang").args(flags).arg(source).arg("-o").arg(into).output();
    let output = compiler.map_err(|error| failed(format!("clang cannot be run: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(format!("clang: {}", String::from_utf8_lossy(&output.stderr))))
}

/// A scheduler with a worker for each core, and both modules.
struct Subject {
    scheduler: Scheduler,
    tenant: Tenant,
    admission: Admission,
    sequential: Vec<u8>,
    parallel: Vec<u8>,
}

/// What a call took.
#[derive(Clone, Copy)]
struct Took {
    result: i32,
    wall_ns: f64,
    cpu_ns: f64,
}

impl Subject {
    fn new(programs: &Programs) -> Result<Self, BenchError> {
        let scheduler = Scheduler::new(&SchedulerConfig::default()).map_err(failed)?;
        let tenant = scheduler.tenant(TENANT, 1, Priority::Normal);
        let admission = Admission::new(Policy::pooled(Pool::default()));
        let sequential = std::fs::read(&programs.sequential).map_err(failed)?;
        let parallel = std::fs::read(&programs.parallel).map_err(failed)?;
        Ok(Self { scheduler, tenant, admission, sequential, parallel })
    }

    fn function(&self, module: &[u8], name: &str) -> Result<Function, BenchError> {
        self.admission
            .admit_for(TENANT, module, &CapabilitySet::default(), Metering::Time)
            .and_then(|admitted| admitted.function(TENANT, name))
            .map_err(failed)
    }

    fn call(&self, function: &Function, words: &[i32], threads: u32) -> Result<Took, BenchError> {
        let limits = CallLimits {
            memory_bytes: 64 << 20,
            deadline: Some(Instant::now() + Duration::from_secs(600)),
            cpu_ns: None,
            threads,
            fuel: 0,
        };
        let (send, ended) = mpsc::channel();
        let done = move |report| drop(send.send((report, Instant::now())));
        let words: Vec<Value> = words.iter().copied().map(Value::I32).collect();
        let call = Call::new(function, &words, limits);
        let begun = Instant::now();
        self.scheduler.submit(&self.tenant, call, done).map_err(failed)?;
        let (report, end) = ended.recv().map_err(failed)?;
        match (&report.outcome, &report.results[..]) {
            (Outcome::Exited(0), [Value::I32(result)]) => Ok(Took {
                result: *result,
                wall_ns: end.duration_since(begun).as_nanos() as f64,
                cpu_ns: report.cpu.as_nanos() as f64,
            }),
            (other, _) => Err(failed(format!("{other:?}"))),
        }
    }

    fn kernel(
        &self,
        kernel: &str,
        size: i32,
        programs: &Programs,
        args: &ParallelArgs,
    ) -> Result<Vec<Row>, BenchError> {
        let sequential = self.function(&self.sequential, kernel)?;
        let parallel = self.function(&self.parallel, kernel)?;
        let [often, parallel_often] =
            [&self.sequential, &self.parallel].map(|module| self.function(module, "often"));
        let (often, parallel_often) = (often?, parallel_often?);
        let which = KERNEL_NAMES.iter().position(|name| *name == kernel).unwrap_or(0) as i32;
        let mut samples: [Vec<f64>; 11] = Default::default();
        for _ in 0..args.options.rounds {
            let alone = self.call(&sequential, &[size], 0)?;
            let together = self.call(&parallel, &[size], THREADS_MAX)?;
            let single = self.call(&parallel, &[size], 0)?;
            let many = self.call(&often, &[which, size, TIMES], 0)?;
            let many_together = self.call(&parallel_often, &[which, size, TIMES], THREADS_MAX)?;
            let native = native(&programs.native, kernel, size)?;
            let threads = self::native(&programs.native_threads, kernel, size)?;
            // k-means adds in another order with threads; all else is the same to the last bit.
            let in_order = [alone.result, single.result, many.result];
            let in_threads = [together.result, many_together.result, threads.result];
            let same = |results: [i32; 3]| results == [native.result; 3];
            if !same(in_order) || !(same(in_threads) || kernel == "kmeans") {
                return Err(failed(format!("{kernel} of {size} comes out differently")));
            }
            let each = |ns: f64| ns / f64::from(TIMES);
            let took = [
                alone.wall_ns,
                together.wall_ns,
                single.wall_ns,
                native.least_wall_ns,
                threads.least_wall_ns,
                each(many.wall_ns),
                each(many_together.wall_ns),
                native.mean_wall_ns,
                threads.mean_wall_ns,
                each(many.cpu_ns),
                native.cpu_ns,
            ];
            samples.iter_mut().zip(took).for_each(|(samples, took)| samples.push(took));
        }
        let (wall, cpu) = (format!("parallel_{kernel}"), format!("native_{kernel}"));
        let often = format!("parallel_often_{kernel}");
        let params = [("n", size.to_string())];
        let rows = [
            (&wall, "exocell-sequential"),
            (&wall, "exocell-parallel"),
            // The parallel module without threads: what a memory that could be shared costs.
            (&wall, "exocell-parallel-alone"),
            (&wall, "native-sequential"),
            (&wall, "native-parallel"),
            (&often, "exocell-sequential"),
            (&often, "exocell-parallel"),
            (&often, "native-sequential"),
            (&often, "native-parallel"),
            (&cpu, "exocell-sequential"),
            (&cpu, "native"),
        ];
        let row = |((bench, subject), samples): ((&String, &str), &Vec<f64>)| {
            Row::of(bench, subject, Unit::Ns, samples, &params)
        };
        let times = rows.into_iter().zip(&samples).filter_map(row);
        // Of each round, because one phase of a shared machine is not like the next. Numbers are
        // places in `rows`.
        let speedup = format!("speedup_{kernel}");
        let pairs = [("exocell", [0, 1]), ("exocell-often", [5, 6]), ("native", [7, 8])];
        let ratios = pairs.into_iter().filter_map(|(subject, pair)| {
            let [sequential, parallel] = pair.map(|index| &samples[index]);
            let ratios = sequential.iter().zip(parallel).map(|(one, many)| one / many);
            let ratios: Vec<f64> = ratios.collect();
            Row::of(&speedup, subject, Unit::Times, &ratios, &params)
        });
        Ok(times.chain(ratios).collect())
    }
}

/// What the native program says of its calls.
struct Native {
    result: i32,
    /// Of a call.
    cpu_ns: f64,
    least_wall_ns: f64,
    mean_wall_ns: f64,
}

fn native(program: &Path, kernel: &str, size: i32) -> Result<Native, BenchError> {
    let (size, times) = (size.to_string(), TIMES.to_string());
    let output = Command::new(program).args([kernel, &size, &times]).output();
    let output = String::from_utf8(output.map_err(failed)?.stdout).map_err(failed)?;
    let mut words = output.split_whitespace();
    let result = words.next().and_then(|word| word.parse().ok());
    let times: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
    match (result, &times[..]) {
        (Some(result), &[cpu_ns, least_wall_ns, mean_wall_ns]) => {
            Ok(Native { result, cpu_ns, least_wall_ns, mean_wall_ns })
        }
        _ => Err(failed("the native program said nothing")),
    }
}
