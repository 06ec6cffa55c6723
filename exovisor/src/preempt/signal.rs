//! The signal handler, the way back into interrupted code, and the worker's timer.

#![allow(unsafe_code)]

use crate::preempt::return_hijack::{hijack_return, hijacked_return};
use crate::preempt::{Allowance, HIJACKED_NS, NEVER, RETRY_NS, WasmContext};
use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::mem::{offset_of, zeroed};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};

/// Harmless when it comes unasked: ignored by default.
const SIGNAL: libc::c_int = libc::SIGURG;
/// Bytes below the stack pointer that code may use without moving it (System V ABI).
const RED_ZONE: usize = 128;
const NS_PER_S: u64 = 1_000_000_000;
/// A time slice that is over so soon is over now, in nanoseconds, and if that is so small a part of
/// the timer's period: to set the timer, to be interrupted by it and to come back takes longer
/// where the host is virtual itself.
const SOON_NS: u64 = 30_000;
const SOON_PART: u64 = 64;
/// Part of the timer's period: a time slice that is older at a tick is one of those that may run
/// out.
const JUST_BEGUN: u64 = 32;

/// What the handler finds on the thread that it interrupts.
struct Slot {
    wasm: AtomicPtr<WasmContext>,
    /// When the timer will fire.
    armed_ns: AtomicU64,
    /// When the guest's time slice began, its [`Allowance`], and whether the last tick found a time
    /// slice that had just begun.
    begun_ns: AtomicU64,
    hard_ns: AtomicU64,
    period_ns: AtomicU64,
    lazy: Cell<bool>,
    timer: Cell<Option<libc::timer_t>>,
    /// Whether the guest is on its way to the yield function, in code that is neither its own nor
    /// called by it.
    leaving: Cell<bool>,
    /// Whether the guest's time slice is just beginning.
    beginning: AtomicBool,
    /// Whether a signal came while the time slice began, or before there was an instance.
    missed: AtomicBool,
    /// Whether the last poll ended because the guest was preempted.
    left: Cell<bool>,
}

thread_local! {
    static SLOT: Slot = const {
        Slot {
            wasm: AtomicPtr::new(null_mut()),
            armed_ns: AtomicU64::new(NEVER),
            begun_ns: AtomicU64::new(NEVER),
            hard_ns: AtomicU64::new(NEVER),
            period_ns: AtomicU64::new(NEVER),
            lazy: Cell::new(false),
            timer: Cell::new(None),
            leaving: Cell::new(false),
            beginning: AtomicBool::new(false),
            missed: AtomicBool::new(false),
            left: Cell::new(false),
        }
    };
}

/// Installs the handler, once a process.
pub(crate) fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        // SAFETY: all-zero is a valid sigaction. The handler only does what signal-safety(7)
        // permits; a handler is the one way to interrupt code that was not instrumented.
        let result = unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(SIGNAL, &action, null_mut())
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
        }
    });
    done.map_err(io::Error::from_raw_os_error)
}

/// Lets the signal reach the calling thread.
pub(crate) fn unblock() -> io::Result<()> {
    let mut signals = nix::sys::signal::SigSet::empty();
    signals.add(nix::sys::signal::Signal::SIGURG);
    Ok(signals.thread_unblock()?)
}

/// The calling thread, as [`kick`] wants it.
pub(crate) fn this_thread() -> i32 {
    // SAFETY: it has no arguments and cannot fail; std does not tell the kernel's id.
    unsafe { libc::gettid() }
}

/// Interrupts a thread of this process, if it is still there.
pub(crate) fn kick(thread: i32) {
    // SAFETY: no memory is involved. A signal that reaches another thread than meant finds no
    // guest whose time is over, and does nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
}

/// Nanoseconds of CLOCK_MONOTONIC, which [`std::time::Instant`] counts too.
pub(crate) fn now_ns() -> u64 {
    // SAFETY: all-zero is a valid timespec, and the call writes nothing else. It is used instead
    // of `Instant` because the timer wants absolute times.
    let now = unsafe {
        let mut now: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        now
    };
    (now.tv_sec as u64).saturating_mul(NS_PER_S).saturating_add(now.tv_nsec as u64)
}

/// CPU time of the calling thread, in nanoseconds.
pub(crate) fn thread_cpu_ns() -> u64 {
    // SAFETY: as in `now_ns`.
    let used = unsafe {
        let mut used: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut used);
        used
    };
    (used.tv_sec as u64).saturating_mul(NS_PER_S).saturating_add(used.tv_nsec as u64)
}

/// The guest is leaving because it was preempted.
pub(crate) fn leave() {
    SLOT.with(|slot| slot.left.set(true));
}

/// The yield function has begun.
pub(super) fn arrived() {
    SLOT.with(|slot| slot.leaving.set(false));
}

/// Whether the guest left because it was preempted; asked once after each poll.
pub(crate) fn left() -> bool {
    SLOT.with(|slot| slot.left.replace(false))
}

/// This thread's preemption timer.
pub(crate) struct Timer(libc::timer_t);

impl Timer {
    /// Makes the timer of the calling thread. Without one, only [`kick`] preempts.
    pub fn new() -> io::Result<Self> {
        // SAFETY: all-zero is a valid sigevent, of which the needed fields are set; the kernel
        // writes the id. nix's timer cannot be set from a signal handler.
        let (result, id) = unsafe {
            let mut event: libc::sigevent = zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = SIGNAL;
            event.sigev_notify_thread_id = libc::gettid();
            let mut id: libc::timer_t = null_mut();
            (libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut id), id)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        SLOT.with(|slot| slot.timer.set(Some(id)));
        Ok(Self(id))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        SLOT.with(|slot| {
            slot.timer.set(None);
            slot.armed_ns.store(NEVER, Ordering::Relaxed);
        });
        // SAFETY: the id is ours, and the handler no longer finds it.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Whether a signal came in vain before there was an instance; asked once there is one.
pub(crate) fn missed() -> bool {
    SLOT.with(|slot| {
        let missed = slot.missed.load(Ordering::Relaxed);
        if missed {
            slot.missed.store(false, Ordering::Relaxed);
        }
        missed
    })
}

/// A guest's time on the calling thread.
pub(crate) struct TimeSlice<'a> {
    /// Whether it was shortened while it began, so that it is over already.
    pub is_over: bool,
    wasm: PhantomData<&'a WasmContext>,
}

impl<'a> TimeSlice<'a> {
    /// From now on a signal preempts `wasm`, and the timer sends one when its time is over.
    /// `now_ns` is the time of CLOCK_MONOTONIC.
    pub fn begin(wasm: &'a WasmContext, now_ns: u64, allowance: Allowance) -> Self {
        let is_over = SLOT.with(|slot| {
            slot.begun_ns.store(now_ns, Ordering::Relaxed);
            slot.hard_ns.store(allowance.hard_ns, Ordering::Relaxed);
            slot.period_ns.store(allowance.period_ns, Ordering::Relaxed);
            slot.leaving.set(false);
            slot.missed.store(false, Ordering::Relaxed);
            slot.beginning.store(true, Ordering::Relaxed);
            slot.wasm.store((wasm as *const WasmContext).cast_mut(), Ordering::Release);
            if wasm.is_shortened() {
                slot.lazy.set(false);
            }
            // Only here, or a time slice that is shortened meanwhile would last as long as it was
            // to.
            let due_ns = wasm.last_until(&allowance);
            set(slot, tick_ns(slot, now_ns, due_ns));
            slot.beginning.store(false, Ordering::Relaxed);
            // The handler sees that before this looks at what it left.
            compiler_fence(Ordering::SeqCst);
            missed() && is_over(slot, wasm)
        });
        Self { is_over, wasm: PhantomData }
    }
}

/// Whether the time slice was shortened and is over; if it is not, the timer is set for its end.
fn is_over(slot: &Slot, wasm: &WasmContext) -> bool {
    let now = now_ns();
    let due = wasm.due_ns.load(Ordering::Acquire);
    if wasm.is_shortened() {
        slot.lazy.set(false);
        // One that was ended learns of it in its time slice.
        if due <= soon(slot, now) && !wasm.is_preempt_requested() {
            return true;
        }
    }
    set(slot, tick_ns(slot, now, due));
    false
}

/// What is over by then is over now.
fn soon(slot: &Slot, now_ns: u64) -> u64 {
    now_ns.saturating_add(SOON_NS.min(slot.period_ns.load(Ordering::Relaxed) / SOON_PART))
}

/// When the timer has to look at a time slice that is over at `due_ns`.
fn tick_ns(slot: &Slot, now_ns: u64, due_ns: u64) -> u64 {
    let period = now_ns.saturating_add(slot.period_ns.load(Ordering::Relaxed));
    let exact = if slot.lazy.get() { NEVER } else { due_ns };
    period.min(exact).min(slot.hard_ns.load(Ordering::Relaxed))
}

impl Drop for TimeSlice<'_> {
    fn drop(&mut self) {
        SLOT.with(|slot| slot.wasm.store(null_mut(), Ordering::Release));
    }
}

/// Makes the timer fire at `at_ns`, unless it does so before that.
fn set(slot: &Slot, at_ns: u64) {
    if slot.armed_ns.load(Ordering::Relaxed) > at_ns {
        arm(slot, at_ns);
    }
}

/// Makes the timer fire at `at_ns`. Safe in a signal handler (timer_settime, clock_gettime and
/// thread-locals without initializer).
fn arm(slot: &Slot, at_ns: u64) {
    let Some(timer) = slot.timer.get() else { return };
    // Zero would disarm it; the beginning of time is as good for "at once".
    let at_ns = at_ns.clamp(1, i64::MAX as u64);
    let spec = libc::itimerspec {
        it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: libc::timespec {
            tv_sec: (at_ns / NS_PER_S) as libc::time_t,
            tv_nsec: (at_ns % NS_PER_S) as libc::c_long,
        },
    };
    slot.armed_ns.store(at_ns, Ordering::Relaxed);
    // SAFETY: the timer is this thread's and alive, since `Timer::drop` takes it out of the slot.
    unsafe { libc::timer_settime(timer, libc::TIMER_ABSTIME, &spec, null_mut()) };
}

extern "C" fn on_signal(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: errno is a thread's own word; the interrupted code may be about to read it.
    let errno = unsafe { *libc::__errno_location() };
    SLOT.with(|slot| {
        // SAFETY: the kernel passes a valid context to a handler with SA_SIGINFO.
        let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        interrupt(slot, &mut context.uc_mcontext.gregs);
    });
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn interrupt(slot: &Slot, registers: &mut [libc::greg_t; 23]) {
    let now = now_ns();
    if slot.armed_ns.load(Ordering::Relaxed) <= now {
        slot.armed_ns.store(NEVER, Ordering::Relaxed);
    }
    // SAFETY: `TimeSlice` borrows the guest for as long as the slot has it, and the handler runs on
    // the same thread, so in the middle of that.
    let Some(wasm) = (unsafe { slot.wasm.load(Ordering::Acquire).as_ref() }) else { return };
    if slot.beginning.load(Ordering::Relaxed) {
        // It looks at its end itself.
        return slot.missed.store(true, Ordering::Relaxed);
    }
    let hard = slot.hard_ns.load(Ordering::Relaxed);
    let due = wasm.due_ns.load(Ordering::Acquire).min(hard);
    if soon(slot, now) < due && !wasm.is_preempt_requested() {
        let age = now.saturating_sub(slot.begun_ns.load(Ordering::Relaxed));
        let just_begun = age <= slot.period_ns.load(Ordering::Relaxed) / JUST_BEGUN;
        // The thread that shortened the time slice relies on its end.
        slot.lazy.set(just_begun && !wasm.is_shortened());
        return set(slot, tick_ns(slot, now, due));
    }
    slot.lazy.set(false);
    if slot.leaving.get() {
        return;
    }
    let instance = wasm.instance.load(Ordering::Acquire);
    if instance.is_null() {
        // It looks when it has one, or ends.
        return slot.missed.store(true, Ordering::Relaxed);
    }
    let pc = registers[libc::REG_RIP as usize] as usize;
    if wasm.code.contains(pc) {
        slot.leaving.set(true);
        return redirect(registers, wasm, instance);
    }
    let stack_pointer = registers[libc::REG_RSP as usize] as usize;
    // SAFETY: the guest has an instance from before its call until after it (`WasmContext::enter`
    // and `exit`), and the call is this thread's as long as its time slice lasts.
    let hijacked = unsafe { hijack_return(wasm, instance, stack_pointer) };
    arm(slot, now + if hijacked { HIJACKED_NS } else { RETRY_NS });
}

/// What [`leave_wasm`] finds at its stack pointer, and [`leave_returning`] makes.
#[repr(C)]
struct Frame {
    wasm_call: usize,
    callee: usize,
    caller: usize,
    pc: usize,
}

/// Lets the interrupted code go on in [`leave_wasm`].
fn redirect(registers: &mut [libc::greg_t; 23], wasm: &WasmContext, instance: *mut u8) {
    let entry = &wasm.code.entry;
    let frame = Frame {
        wasm_call: entry.wasm_call,
        callee: entry.callee,
        caller: instance.addr(),
        pc: registers[libc::REG_RIP as usize] as usize,
    };
    let stack = registers[libc::REG_RSP as usize] as usize - RED_ZONE - size_of::<Frame>();
    // SAFETY: the code is a Wasm function's, so the stack pointer is into its fiber's stack, of
    // which `host_stack_bytes` below any Wasm frame are free and mapped.
    unsafe { (stack as *mut Frame).write(frame) };
    registers[libc::REG_RSP as usize] = stack as libc::greg_t;
    registers[libc::REG_RIP as usize] = leave_wasm as *const () as libc::greg_t;
}

/// Leaves: saves all that compiled code may use in the frame that lies below what `$prepare` made
/// room for, calls the yield function as compiled code does (callee's context in rdi, caller's in
/// rsi; no register survives the call), restores, and goes on at the frame's program counter.
macro_rules! leave {
    ($prepare:literal, $fill:literal, $return:literal, $($more:tt)*) => {
        core::arch::naked_asm!(
            $prepare,
            "pushfq",
            "push rax", "push rbx", "push rcx", "push rdx", "push rsi", "push rdi",
            "push r8", "push r9", "push r10", "push r11", "push r12", "push r13", "push r14",
            "push r15", "push rbp",
            "mov rbp, rsp",
            // 512 bytes for FXSAVE, aligned as it and the call want it, and the way back above.
            "sub rsp, 528",
            "and rsp, -16",
            "mov [rsp + 512], rbp",
            "fxsave64 [rsp]",
            "lea rdi, [rbp + {saved}]",
            $fill,
            "mov rax, [rbp + {saved} + {wasm_call}]",
            "mov rdi, [rbp + {saved} + {callee}]",
            "mov rsi, [rbp + {saved} + {caller}]",
            "call rax",
            "fxrstor64 [rsp]",
            "mov rsp, [rsp + 512]",
            "pop rbp",
            "pop r15", "pop r14", "pop r13", "pop r12", "pop r11", "pop r10", "pop r9", "pop r8",
            "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rbx", "pop rax",
            "popfq",
            // Takes the program counter from the frame, and the frame off the stack.
            "lea rsp, [rsp + {pc}]",
            $return,
            saved = const SAVED,
            wasm_call = const offset_of!(Frame, wasm_call),
            callee = const offset_of!(Frame, callee),
            caller = const offset_of!(Frame, caller),
            pc = const offset_of!(Frame, pc),
            $($more)*
        )
    };
}

/// The way out of interrupted code: the handler has put the frame below its red zone.
#[unsafe(naked)]
extern "C" fn leave_wasm() {
    leave!("", "", "ret {red_zone}", red_zone = const RED_ZONE)
}

/// The way out of a call of the host that was to return to the guest: the return address that
/// led here is off the stack already.
#[unsafe(naked)]
pub(super) extern "C" fn leave_returning() {
    leave!(
        "sub rsp, {frame}", "call {fill}", "ret",
        frame = const size_of::<Frame>(), fill = sym fill
    )
}

/// Makes the frame of [`leave_returning`], which goes on where the call was to return to.
///
/// # Safety
/// `frame` is room for a frame that ends at the stack pointer that the call left. Only
/// [`leave_returning`] calls this, on the thread whose time slice it is.
unsafe extern "C" fn fill(frame: *mut Frame) {
    let stack_pointer = frame.addr() + size_of::<Frame>();
    SLOT.with(|slot| {
        slot.leaving.set(true);
        // SAFETY: as in `interrupt`; guests run within time slices only.
        let wasm = unsafe { slot.wasm.load(Ordering::Acquire).as_ref() };
        let made = wasm.and_then(|wasm| {
            let (entry, instance) = (&wasm.code.entry, wasm.instance.load(Ordering::Acquire));
            // SAFETY: as in `interrupt`; the call of the host has only just returned.
            let pc = unsafe { hijacked_return(wasm, instance, stack_pointer) }?;
            Some(Frame {
                wasm_call: entry.wasm_call,
                callee: entry.callee,
                caller: instance.addr(),
                pc,
            })
        });
        // Without it there is no address to return to.
        let Some(made) = made else { std::process::abort() };
        // SAFETY: `leave_returning` made room for it on its own stack.
        unsafe { frame.write(made) };
    });
}

/// Bytes of the sixteen registers that [`leave!`] pushes.
const SAVED: usize = 16 * 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preempt::CodeMap;
    use crate::preempt::hook::tests::entry;
    use nix::sys::signal::{SigSet, SigmaskHow, Signal};
    use std::sync::Arc;
    use wasmtime::{Engine, Module};

    fn wasm() -> WasmContext {
        let engine = Engine::default();
        let module = Module::new(&engine, "(module)").unwrap();
        WasmContext::new(Arc::new(CodeMap::new(&module, &entry(&engine))))
    }

    #[test]
    fn the_end_of_a_shortened_turn_is_exact_whatever_signal_comes_before() {
        let wasm = wasm();
        wasm.shorten_slice(now_ns() + 3600 * NS_PER_S, true);
        SLOT.with(|slot| {
            slot.wasm.store((&raw const wasm).cast_mut(), Ordering::Release);
            for _ in 0..3 {
                slot.lazy.set(true);
                interrupt(slot, &mut [0; 23]);
                assert!(!slot.lazy.get());
            }
            wasm.prepare();
            interrupt(slot, &mut [0; 23]);
            assert!(slot.lazy.get());
            slot.wasm.store(null_mut(), Ordering::Release);
        });
    }

    #[test]
    fn a_turn_is_alone_until_another_waits_for_its_end() {
        let (wasm, hard_ns) = (wasm(), now_ns() + NS_PER_S);
        let allowance = |due_ns| Allowance { due_ns, hard_ns, period_ns: NEVER };
        assert!(!wasm.is_alone());
        for (due_ns, alone) in [(hard_ns, true), (hard_ns - 1, false)] {
            wasm.prepare();
            drop(TimeSlice::begin(&wasm, now_ns(), allowance(due_ns)));
            assert_eq!(wasm.is_alone(), alone);
        }
        // What comes before the time slice has begun counts.
        wasm.prepare();
        wasm.shorten_slice(hard_ns - 1, false);
        drop(TimeSlice::begin(&wasm, now_ns(), allowance(hard_ns)));
        assert!(!wasm.is_alone());
    }

    #[test]
    fn a_turn_that_is_not_young_at_a_tick_has_an_exact_end() {
        let wasm = wasm();
        SLOT.with(|slot| {
            slot.wasm.store((&raw const wasm).cast_mut(), Ordering::Release);
            slot.period_ns.store(NS_PER_S, Ordering::Relaxed);
            for (age_ns, lazy) in [(0, true), (NS_PER_S, false)] {
                slot.begun_ns.store(now_ns() - age_ns, Ordering::Relaxed);
                interrupt(slot, &mut [0; 23]);
                assert_eq!(slot.lazy.get(), lazy);
            }
            slot.wasm.store(null_mut(), Ordering::Release);
        });
    }

    #[test]
    fn a_signal_before_there_is_an_instance_is_not_lost() {
        let wasm = wasm();
        let _timer = Timer::new().unwrap();
        SLOT.with(|slot| {
            wasm.prepare();
            slot.hard_ns.store(now_ns(), Ordering::Relaxed);
            slot.wasm.store((&raw const wasm).cast_mut(), Ordering::Release);
            assert!(!missed());
            interrupt(slot, &mut [0; 23]);
            slot.wasm.store(null_mut(), Ordering::Release);
            // Were the timer set for an end that is past, the interrupted code would never go on.
            assert_eq!(slot.armed_ns.load(Ordering::Relaxed), NEVER);
            assert!(missed() && !missed());
        });
    }

    #[test]
    fn a_turn_that_is_shortened_while_it_begins_is_over_or_has_that_end() {
        // A timer that is set for a time that is past would change what the test looks at.
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGURG);
        let before = blocked.thread_swap_mask(SigmaskHow::SIG_BLOCK).unwrap();
        let _timer = Timer::new().unwrap();
        for (due_ns, is_over_now) in [(0, true), (SOON_NS / 2, true), (NS_PER_S, false)] {
            let wasm = wasm();
            wasm.prepare();
            SLOT.with(|slot| {
                slot.hard_ns.store(NEVER, Ordering::Relaxed);
                slot.period_ns.store(NS_PER_S, Ordering::Relaxed);
                slot.armed_ns.store(NEVER, Ordering::Relaxed);
                slot.wasm.store((&raw const wasm).cast_mut(), Ordering::Release);
                slot.beginning.store(true, Ordering::Relaxed);
                wasm.shorten_slice(now_ns() + due_ns, true);
                interrupt(slot, &mut [0; 23]);
                slot.beginning.store(false, Ordering::Relaxed);
                slot.wasm.store(null_mut(), Ordering::Release);
                assert!(missed());
                assert_eq!(is_over(slot, &wasm), is_over_now);
                assert_eq!(slot.armed_ns.load(Ordering::Relaxed) == NEVER, is_over_now);
                wasm.request_preempt();
                assert!(!is_over(slot, &wasm));
                assert_ne!(slot.armed_ns.load(Ordering::Relaxed), NEVER);
            });
        }
        before.thread_set_mask().unwrap();
    }
}
