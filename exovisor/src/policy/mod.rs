//! What the operator decides once a process: sizes of the pool, of stacks and of modules.

mod modules;

pub use modules::{ComplexityLimits, ModuleLimits};

use exocell_xgate::CapabilitySet;
use serde::{Deserialize, Serialize};
use wasmtime::PoolingAllocationConfig;

/// How running code is kept from running for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Metering {
    /// CPU time, taken away by a signal. The code carries no instrumentation.
    Time,
    /// The code looks at a counter in each loop and call, which the host advances. For hosts
    /// where the signal cannot be used.
    Epoch,
    /// Each instruction is counted: the same work costs the same everywhere.
    Fuel,
}

impl Metering {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Time, Self::Epoch, Self::Fuel];

    /// Fuel if that is granted, else CPU time.
    #[must_use]
    pub fn of(caps: &CapabilitySet) -> Self {
        if caps.fuel().is_some() { Self::Fuel } else { Self::Time }
    }

    /// The word for it in flags and results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Epoch => "epoch",
            Self::Fuel => "fuel",
        }
    }
}

/// How linear memories lie in the pool's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Slots {
    /// 4 GiB and a guard region each: bounds checks cost nothing, page tables 8 KB a slot.
    /// Where the processor has protection keys, slots share guards (ColorGuard).
    Guarded,
    /// As large as the largest memory, side by side in one mapping, and stacks in another: dense,
    /// and no matter of vm.max_map_count, but each access is checked, and first contents are
    /// copied.
    Compact,
}

impl Slots {
    /// Whether guarded slots share their guards on this machine (ColorGuard): the engine does so
    /// on Intel processors with protection keys.
    #[must_use]
    pub fn share_guards() -> bool {
        PoolingAllocationConfig::are_memory_protection_keys_available()
    }

    /// The word for how they lie on this machine: `guarded`, `colorguard` (guards are shared) or
    /// `compact`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Guarded if Self::share_guards() => "colorguard",
            Self::Guarded => "guarded",
            Self::Compact => "compact",
        }
    }
}

/// A pool of slots that are made once and used again and again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pool {
    /// Isolates alive at once.
    pub isolates: u32,
    /// Isolates inside a call at once; each holds a stack.
    pub stacks: u32,
    /// The largest linear memory, in bytes.
    pub memory_bytes: usize,
    /// The largest table, in elements.
    pub table_elements: usize,
    /// How slots lie.
    pub slots: Slots,
    /// Bytes of a memory that are zeroed by hand when its isolate goes, rather than given back
    /// to the host and faulted in again. Slots keep so much once they were used; but what is
    /// given back costs a system call, and all processors that run isolates are told of it.
    pub keep_resident_bytes: usize,
    /// Instances that are kept when their calls have returned, made as new, for the next calls of
    /// the same modules; at most half of `isolates`. Only in guarded slots.
    pub kept: u32,
}

impl Pool {
    /// How many instances are kept at most.
    pub(crate) fn kept_max(&self) -> u32 {
        match self.slots {
            Slots::Guarded if self.keep_resident_bytes > 0 => self.kept.min(self.isolates / 2),
            _ => 0,
        }
    }
}

impl Default for Pool {
    /// 1,000 isolates of up to 64 MiB in guarded slots, which keep one page of Wasm, and half of
    /// them kept for next calls.
    fn default() -> Self {
        Self {
            isolates: 1_000,
            stacks: 1_000,
            memory_bytes: 64 << 20,
            table_elements: 20_000,
            slots: Slots::Guarded,
            keep_resident_bytes: 64 << 10,
            kept: 500,
        }
    }
}

/// The sizes a process is set up with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Policy {
    /// The pool; without one each isolate maps its own memory.
    pub pool: Option<Pool>,
    /// Longest stack of Wasm frames, in bytes.
    pub wasm_stack_bytes: usize,
    /// What a host function may use below it, in bytes.
    pub host_stack_bytes: usize,
    /// Whether a memory's first content is mapped from a memory file, copied on write. It needs
    /// memfd_create(2) when the module first runs.
    pub copy_on_write: bool,
    /// Whether short recursive functions do several of their calls at a time. Modules that are
    /// metered by fuel stay as they are: their instructions are counted.
    pub inline_recursion: bool,
    /// How large modules may be.
    pub modules: ModuleLimits,
}

impl Default for Policy {
    /// Without a pool; 512 KiB of Wasm stack; no memory files.
    fn default() -> Self {
        Self {
            pool: None,
            wasm_stack_bytes: 512 << 10,
            host_stack_bytes: 512 << 10,
            copy_on_write: false,
            inline_recursion: true,
            modules: ModuleLimits::default(),
        }
    }
}

impl Policy {
    /// A fiber's whole stack.
    pub(crate) fn stack_bytes(&self) -> usize {
        self.wasm_stack_bytes.saturating_add(self.host_stack_bytes)
    }

    /// For many isolates in one process.
    #[must_use]
    pub fn pooled(pool: Pool) -> Self {
        Self {
            pool: Some(pool),
            wasm_stack_bytes: 128 << 10,
            host_stack_bytes: 128 << 10,
            copy_on_write: true,
            ..Self::default()
        }
    }
}
