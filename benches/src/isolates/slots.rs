//! How linear memories lie: guarded slots, which share their guards where the processor has
//! protection keys (ColorGuard), compact slots, and the slots of wasmtime's pool, each with a
//! guard of its own. What a slot takes of the address space, how many of them it has room for,
//! and what calls and loops cost in them.

use std::fs;

use exocell_exovisor::{Admission, Metering, Policy, Pool, Slots};
use exocell_xgate::CapabilitySet;

use super::live::kilobytes;
use super::ours::Ours;
use super::plain::{Allocator, Plain};
use super::{ColorguardArgs, OURS, POOLING, SLICE, clock, guests, used_ns, with_peers};
use crate::BenchError;
use crate::row::{Row, Unit};

const COMPACT: &str = "exocell-compact";
/// Slots of which the address space is counted.
const SLOTS: u32 = 1000;
/// Nobody wants more at once, and each is some hundred bytes of bookkeeping.
const SLOTS_MAX: u32 = 1 << 20;
/// The largest memory of a slot.
const MEMORY_BYTES: usize = 64 << 20;
/// A turn of calls.
const CALLS: u64 = 20_000;
/// Rows and columns of the matrices.
const ORDER: i32 = 192;

/// Makes a pool of so many slots and keeps it.
type Make = fn(u32) -> Result<Box<dyn std::any::Any>, BenchError>;

/// All rows of `exocell bench colorguard`.
pub fn measure(args: &ColorguardArgs) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    let mut pools: Vec<(&str, Make)> = vec![
        (OURS, |slots| ours(Slots::Guarded, slots)),
        (COMPACT, |slots| ours(Slots::Compact, slots)),
    ];
    if with_peers(&args.options) {
        pools.push((POOLING, plain));
    }
    for (subject, make) in pools {
        let bytes = address_bytes(make)?;
        rows.extend(row("colorguard_address_bytes", subject, Unit::Bytes, &[bytes]));
        let most = f64::from(most(|slots| make(slots).is_ok()));
        rows.extend(row("colorguard_slots", subject, Unit::Count, &[most]));
    }
    rows.extend(calls(args)?);
    rows.extend(loops(args)?);
    Ok(rows)
}

fn row(bench: &str, subject: &str, unit: Unit, samples: &[f64]) -> Option<Row> {
    let keys = subject == OURS && Slots::share_guards();
    Row::of(bench, subject, unit, samples, &[("keys", if keys { "yes" } else { "no" }.to_owned())])
}

fn pool(slots: Slots, isolates: u32) -> Pool {
    // What a stack takes is no matter of slots.
    Pool { isolates, stacks: 1, memory_bytes: MEMORY_BYTES, slots, ..Pool::default() }
}

fn ours(slots: Slots, isolates: u32) -> Result<Box<dyn std::any::Any>, BenchError> {
    let failed = |why| BenchError::Subject { subject: OURS.to_owned(), why };
    let admission = Admission::new(Policy::pooled(pool(slots, isolates)));
    let text = guests::TOUCH.as_bytes();
    let admitted = admission.admit_for("bench", text, &CapabilitySet::nothing(), Metering::Time);
    admitted.map_err(|error| failed(error.to_string()))?;
    Ok(Box::new(admission))
}

fn plain(isolates: u32) -> Result<Box<dyn std::any::Any>, BenchError> {
    Ok(Box::new(Plain::new(guests::TOUCH, Allocator::Pooling { isolates })?))
}

/// What a slot takes of this process's address space.
fn address_bytes(make: Make) -> Result<f64, BenchError> {
    let before = size_bytes()?;
    let kept = make(SLOTS)?;
    let after = size_bytes()?;
    drop(kept);
    Ok(after.saturating_sub(before) as f64 / f64::from(SLOTS))
}

fn size_bytes() -> Result<u64, BenchError> {
    let file = "/proc/self/status";
    let status = fs::read_to_string(file).map_err(BenchError::host(file))?;
    Ok(kilobytes(&status, "VmSize:").unwrap_or(0) << 10)
}

/// The largest count up to [`SLOTS_MAX`] that can be made.
fn most(can: impl Fn(u32) -> bool) -> u32 {
    let (mut yes, mut no) = (0, SLOTS_MAX + 1);
    // To a thousandth: where it ends is a matter of what else is mapped.
    while no - yes > (yes / 1000).max(1) {
        let middle = yes + (no - yes) / 2;
        if can(middle) {
            yes = middle;
        } else {
            no = middle;
        }
    }
    yes
}

fn with(slots: Slots, text: &str) -> Result<Ours, BenchError> {
    Ours::with(text, Metering::Time, 1, 1, SLICE, |policy| {
        policy.pool = Some(Pool { stacks: 16, ..pool(slots, 16) });
    })
}

/// CPU time of a call that writes to its memory.
fn calls(args: &ColorguardArgs) -> Result<Vec<Row>, BenchError> {
    let ours = [
        (OURS, with(Slots::Guarded, guests::TOUCH)?),
        (COMPACT, with(Slots::Compact, guests::TOUCH)?),
    ];
    let plain = Plain::new(guests::TOUCH, Allocator::Pooling { isolates: 16 })?;
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..args.options.rounds {
        for ((_, ours), samples) in ours.iter().zip(&mut samples) {
            samples.push(used_ns(|| ours.serve(CALLS, 1))? / CALLS as f64);
        }
        if with_peers(&args.options) {
            samples[2].push(used_ns(|| plain.serve(1, CALLS, 1))? / CALLS as f64);
        }
    }
    Ok(rows("colorguard_call", &samples))
}

/// CPU time of a product of matrices, whose loads are checked where there is no guard.
fn loops(args: &ColorguardArgs) -> Result<Vec<Row>, BenchError> {
    let ours = [with(Slots::Guarded, guests::MATMUL)?, with(Slots::Compact, guests::MATMUL)?];
    let plain = Plain::new(guests::MATMUL, Allocator::Pooling { isolates: 16 })?;
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..args.options.rounds {
        for (ours, samples) in ours.iter().zip(&mut samples) {
            samples.push(ours.call(ORDER)?.cpu.as_nanos() as f64);
        }
        if with_peers(&args.options) {
            let before = clock::thread_cpu_ns();
            plain.call(ORDER)?;
            samples[2].push(clock::thread_cpu_ns().saturating_sub(before) as f64);
        }
    }
    Ok(rows("colorguard_matmul", &samples))
}

fn rows(bench: &str, samples: &[Vec<f64>; 3]) -> Vec<Row> {
    let subjects = [OURS, COMPACT, POOLING].into_iter().zip(samples);
    subjects.filter_map(|(subject, samples)| row(bench, subject, Unit::Ns, samples)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_is_found() {
        for limit in [0, 1, 2, 700] {
            assert_eq!(most(|slots| slots <= limit), limit);
        }
        let found = most(|slots| slots <= 123_456);
        assert!((123_300..=123_456).contains(&found), "{found}");
        assert!(most(|_| true) > SLOTS_MAX - SLOTS_MAX / 500);
    }
}
