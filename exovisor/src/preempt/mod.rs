//! Preemption without instrumentation.
//!
//! ```text
//!  worker: TimeSlice::begin ──> Wasm code runs ─────────────────────> yield host function
//!             │ arms             │ SIGURG                                  ^      │ Pending
//!             v                  v                                         │      v
//!           timer ──────> signal handler: is the program counter     leave_wasm   fiber is
//!                         in this guest's functions, is its time     saves all    suspended;
//!                         over? then the return address becomes ───> registers    worker goes on
//! ```
//!
//! The interrupted code behaves as if it had called an imported function: [`Hook`] holds that
//! function in the form in which wasmtime's compiled code calls imports, with the guest's own
//! instance as the caller. The function waits once, which suspends the fiber like any other
//! asynchronous host function; the next poll, on whatever thread, returns to the interrupted
//! instruction.
//!
//! What it rests on:
//! - Only program counters in function bodies are taken ([`CodeMap`]). Entry and exit
//!   trampolines and host code, where the engine's own state changes, are left alone; host code
//!   that the guest called comes back by another way ([`return_hijack`]), and the signal comes
//!   again `RETRY_NS` or `HIJACKED_NS` later. What comes while a time slice begins, or before there
//!   is an instance, the worker looks at itself ([`TimeSlice::begin`], [`missed`]): to set a timer
//!   costs a virtual machine as much as a short call takes.
//! - Wasm code keeps `host_stack_bytes` of the fiber's stack free (the engine's stack limit), so
//!   the frame for the way back always fits.
//! - Compiled code uses the general registers and xmm0 to xmm15, nothing wider. The handler runs
//!   on the signal stack, so the frame holds 512 bytes of FXSAVE state and no signal frame.
//! - Return addresses on a guest's stack can be changed: no shadow stack is in use.
//! - No stack is walked: backtraces are off, there is no garbage collector.
//!
//! Rules of the process: nothing else may handle SIGURG or block it in a worker, and a fork
//! must be followed by exec (timers and workers are not inherited).

pub(crate) mod cancel;

mod code;
mod hook;
mod return_hijack;
mod signal;

pub(crate) use code::CodeMap;
pub(crate) use hook::{Hook, Preemptible, instantiate};
pub(crate) use signal::{
    TimeSlice, Timer, install, kick, leave, left, missed, now_ns, this_thread, thread_cpu_ns,
    unblock,
};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

/// How long after a signal in host code it comes again, in nanoseconds.
pub(crate) const RETRY_NS: u64 = 50_000;

/// How long after host code was given another way back the signal comes again, in nanoseconds:
/// meanwhile it may have called back into the guest.
const HIJACKED_NS: u64 = 1_000_000;

/// A time that does not come.
pub(crate) const NEVER: u64 = u64::MAX;

/// How long a time slice may last and how closely that is watched. A timer's interrupt and its
/// signal cost 20 to 25 us where the host is virtual itself, as much as a short call, so the timer
/// is exact only where time slices really run out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    /// When the time slice is over.
    pub due_ns: u64,
    /// When it is over even if the timer is not exact: a deadline.
    pub hard_ns: u64,
    /// How often the timer looks, while time slices end long before it does.
    pub period_ns: u64,
}

impl Allowance {
    /// Only a kick ends the time slice.
    pub const ENDLESS: Self = Self { due_ns: NEVER, hard_ns: NEVER, period_ns: NEVER };
}

/// What the signal handler must know of the guest that is on the CPU.
pub(crate) struct WasmContext {
    code: Arc<CodeMap>,
    /// The instance's context, once there is an instance.
    instance: AtomicPtr<u8>,
    /// When it has to leave, in nanoseconds of CLOCK_MONOTONIC.
    due_ns: AtomicU64,
    /// Whether it is to leave before that.
    preempt_requested: AtomicBool,
    /// Whether its time slice was shortened to an exact time.
    shortened: AtomicBool,
    /// Whether nothing else wants its worker.
    alone: AtomicBool,
    hijacks: return_hijack::ReturnHijacks,
}

impl WasmContext {
    pub fn new(code: Arc<CodeMap>) -> Self {
        Self {
            code,
            instance: AtomicPtr::default(),
            due_ns: AtomicU64::new(NEVER),
            preempt_requested: AtomicBool::new(false),
            shortened: AtomicBool::new(false),
            alone: AtomicBool::new(false),
            hijacks: return_hijack::ReturnHijacks::default(),
        }
    }

    /// Makes code of this guest preemptible: `func` is a function of its instance.
    pub fn enter(&self, func: &wasmtime::Func, store: impl wasmtime::AsContextMut) {
        if let Some(instance) = hook::instance_of(func, store) {
            self.instance.store(instance.as_ptr(), Ordering::Release);
        }
    }

    /// Its instance is about to go, or to be another's.
    pub fn exit(&self) {
        self.instance.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// From now on the guest leaves at the next signal.
    pub fn request_preempt(&self) {
        self.preempt_requested.store(true, Ordering::Release);
    }

    /// A new time slice is to come, as long as it likes. From here on it may be shortened.
    pub fn prepare(&self) {
        self.due_ns.store(NEVER, Ordering::Release);
        self.shortened.store(false, Ordering::Release);
        self.alone.store(true, Ordering::Release);
    }

    /// Shortens the time slice it has, if that ends later. The timer may only notice at its next
    /// tick, unless it is to be exact: then the next signal sets the timer to it.
    pub fn shorten_slice(&self, due_ns: u64, exactly: bool) {
        self.due_ns.fetch_min(due_ns, Ordering::AcqRel);
        self.alone.store(false, Ordering::Release);
        if exactly {
            // Either the worker sees this when its time slice begins, or the thread that kicks
            // after this sees the worker's thread
            // ([`crate::preempt::cancel::CancelHandle::runs_on`]).
            self.shortened.store(true, Ordering::SeqCst);
        }
    }

    /// Whether its time slice is over.
    pub fn is_due(&self, now_ns: u64) -> bool {
        self.due_ns.load(Ordering::Acquire) <= now_ns
    }

    /// Whether nothing has come so far that waits for the end of its time slice.
    pub fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Acquire)
    }

    /// How long the time slice lasts that begins.
    fn last_until(&self, allowance: &Allowance) -> u64 {
        if allowance.due_ns < allowance.hard_ns {
            self.alone.store(false, Ordering::Release);
        }
        self.due_ns.fetch_min(allowance.due_ns, Ordering::AcqRel).min(allowance.due_ns)
    }

    fn is_shortened(&self) -> bool {
        self.shortened.load(Ordering::SeqCst)
    }

    fn is_preempt_requested(&self) -> bool {
        self.preempt_requested.load(Ordering::Acquire)
    }
}
