//! What a guest kernel may still call when its first program is about to run.
//!
//! The supervisor writes the list and the guest kernel loads it (`calls_fd=`,
//! arch/um/os-Linux/skas/host_calls.c of the patched kernel), on top of the list of
//! [`ThreadClass::GuestKernel`](super::ThreadClass), for itself and every process that
//! it makes from then on. Nothing here makes a descriptor or opens a path, so those of
//! set-up are all there are.
//!
//! In stub mode each address space is a process that sets itself up by calls of its own,
//! under the same list. `mpk` has the list of `none`, and five calls more for keys, signal
//! stacks and stopped calls.

use std::os::fd::RawFd;

use seccompiler::SeccompAction;

use super::Pin::{All, Mapped, Memory, None as Any, OneOf, Without};
use super::{
    JailError, KEEP_SIZE, MOVE_FIXED, Mappable, NOTIF_RECV, NOTIF_SEND, NOTIF_SET_FLAGS,
    PUNCH_HOLE, Pin, Rule, SYSCALL_USER_DISPATCH, assemble, numbers,
};
use crate::intra::Intra;

/// What mmap(2) may do to guest memory: share it, at a given place.
const SHARED: u64 = (libc::MAP_SHARED | libc::MAP_FIXED) as u64;
const POPULATED: u64 = SHARED | libc::MAP_POPULATE as u64;
/// All but read, write and execute: no growing, no keys.
const NO_PROT: u64 = !7;

/// What IPIs of the guest are: the first that libc leaves to programs.
const IPI: u64 = 34;

/// A host process of an address space, by the first one or by another.
const ASPACE: u64 = (libc::CLONE_FILES | libc::CLONE_FS | libc::SIGCHLD) as u64;
const SIBLING: u64 = ASPACE | libc::CLONE_PARENT as u64;
/// A thread of such a process.
const THREAD: u64 = (libc::CLONE_VM
    | libc::CLONE_FILES
    | libc::CLONE_FS
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM) as u64;
const CARRIER: u64 = THREAD | libc::CLONE_PARENT_SETTID as u64;
/// A stub, until it executes its own program.
const STUB: u64 = (libc::CLONE_VFORK | libc::CLONE_VM | libc::SIGCHLD) as u64;

const BACKING: Pin = All(&[Memory(0, &[]), OneOf(1, &[KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE])]);
const WAITS: &[u64] = &[
    libc::FUTEX_WAIT as u64,
    libc::FUTEX_WAKE as u64,
    (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64,
    (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64,
];
/// In a stub guest memory has this descriptor (STUB_MEMORY_FD of the patched kernel).
const STUBS_MEMORY: u64 = 1;
/// The image's first file, in the guest kernel and in a stub (IMAGE_FIRST_FD and STUB_IMAGE_FD of
/// the patched kernel).
pub const IMAGE: RawFd = 256;
const STUBS_IMAGE: u64 = 2;
/// Of memory and of gates (KERNEL_KEY and GATE_KEY of the patched kernel).
const OUR_KEYS: &[u64] = &[1, 2];
/// PR_SYS_DISPATCH_ON of prctl(2), and ARCH_SET_GS of arch_prctl(2).
const DISPATCH_ON: u64 = 1;
const SET_GS: u64 = 0x1001;
const MASKS: &[u64] = &[0, 1, 2];
const WHOLE: u64 = u32::MAX as u64;

/// Programs in the address space of their guest kernel.
const FUSED: &[Rule] = rules! {
    mmap All(&[Without(2, NO_PROT), OneOf(3, &[SHARED, POPULATED]), Mapped(4, &[], &[IMAGE as u64])]),
        "the pages of programs, in their place; nothing but guest memory and the image";
    munmap Any, "what programs no longer have";
    futex OneOf(1, WAITS), "CPUs go from process to process; idle CPUs wait";
    rt_sigprocmask OneOf(0, MASKS), "no signal while a CPU goes over";
    rt_sigreturn Any, "back from a handler; a thread's first signal stack";
    timer_settime OneOf(1, &[0, libc::TIMER_ABSTIME as u64]), "a CPU's clock";
    timer_create OneOf(0, &[libc::CLOCK_MONOTONIC as u64]), "that clock, once in a process";
    tgkill OneOf(2, &[
        libc::SIGIO as u64,
        libc::SIGUSR2 as u64,
        IPI,
        libc::SIGKILL as u64,
        libc::SIGABRT as u64,
    ]), "interrupts to where a CPU is; ends processes; the pid namespace bounds it";
    sched_setaffinity OneOf(0, &[0]), "a thread moves itself to where its CPU stays";
    sched_yield Any, "waits for another CPU, or for its own";
    read Any, "interrupts of devices, signals, credit";
    write Any, "doorbells of devices, credit, last words";
    epoll_wait OneOf(3, &[0, WHOLE]), "which device it was";
    clone OneOf(0, &[ASPACE, SIBLING, CARRIER]), "processes and threads of address spaces";
    wait4 All(&[OneOf(0, &[WHOLE]), OneOf(2, &[libc::__WALL as u64])]), "those that have ended";
    exit_group Any, "the end";
};

/// The same, with protection keys.
const KEYED: &[Rule] = rules! {
    pkey_mprotect All(&[Without(2, NO_PROT | libc::PROT_EXEC as u64), OneOf(3, OUR_KEYS)]),
        "keys for what the guest kernel maps; nothing of its own becomes code";
    sigaltstack Any, "the signal stack of a thread, each time a program has stopped";
    prctl All(&[OneOf(0, &[SYSCALL_USER_DISPATCH]), OneOf(1, &[DISPATCH_ON])]),
        "a new thread's calls are stopped while a program runs";
    arch_prctl OneOf(0, &[SET_GS]), "which CPU a thread is, where no instruction may say so";
    gettid Any, "which thread it is, once a program has cleared that";
};

const PAGER: &[Rule] = rules! {
    fallocate BACKING, "takes guest memory from the host and gives it back";
};

/// Guest kernel and stubs.
const STUBS: &[Rule] = rules! {
    ioctl OneOf(1, &[NOTIF_RECV, NOTIF_SEND, NOTIF_SET_FLAGS]), "programs' calls, and answers";
    futex OneOf(1, WAITS), "mappers wait; idle CPUs wait";
    mmap All(&[
        Without(2, NO_PROT),
        OneOf(3, &[SHARED, POPULATED]),
        Mapped(4, &[STUBS_MEMORY], &[IMAGE as u64, STUBS_IMAGE]),
    ]), "pages of programs and stubs; nothing but guest memory and the image";
    munmap Any, "what programs no longer have";
    pwrite64 Any, "a mapper tells in guest memory how far it came; the Pager's zeros";
    rt_sigprocmask OneOf(0, MASKS), "signals of guest kernel and stubs";
    rt_sigreturn Any, "back from a handler";
    rt_sigaction Any, "handlers of a new stub";
    sigaltstack Any, "signal stacks of a stub's threads";
    timer_settime OneOf(1, &[0, libc::TIMER_ABSTIME as u64]), "a CPU's clock";
    clock_gettime Any, "CPU time of a stub that does not stop";
    rt_tgsigqueueinfo OneOf(2, &[IPI]), "interrupts to another CPU";
    getpid Any, "addresses those";
    tgkill OneOf(2, &[libc::SIGIO as u64, libc::SIGALRM as u64, libc::SIGABRT as u64]),
        "interrupts programs; devices' signals";
    kill OneOf(1, &[libc::SIGKILL as u64]), "ends stubs; the pid namespace bounds it";
    sched_setaffinity Any, "a CPU and the stub that it runs stay together";
    sched_yield Any, "gives the CPU to the stub; waits for another CPU";
    read Any, "interrupts of devices, credit; what a stub starts with";
    write Any, "doorbells of devices, credit, last words; what a stub starts with";
    epoll_wait OneOf(3, &[0, WHOLE]), "which device it was";
    clone OneOf(0, &[STUB, THREAD]), "stubs and their threads";
    execveat OneOf(4, &[libc::AT_EMPTY_PATH as u64]), "the stub's program, from a descriptor";
    pipe2 OneOf(1, &[0]), "what a stub starts with";
    close Any, "that; listeners";
    close_range Any, "a stub drops what it must not hold";
    dup2 Any, "a stub's descriptors";
    dup3 Any, "a stub's descriptors";
    fcntl OneOf(1, &[libc::F_SETFD as u64]), "a stub's descriptors";
    prctl OneOf(0, &[
        libc::PR_SET_NAME as u64,
        libc::PR_SET_PDEATHSIG as u64,
        libc::PR_SET_NO_NEW_PRIVS as u64,
    ]), "a stub names and confines itself";
    seccomp OneOf(0, &[libc::SECCOMP_SET_MODE_FILTER as u64]), "a stub confines itself";
    mremap OneOf(3, MOVE_FIXED), "a stub moves the host's vDSO";
    arch_prctl Any, "thread-local storage of programs, by the processor's age";
    sendmsg Any, "the listener of a stub's thread";
    recvmsg Any, "the listener of a stub's thread";
    wait4 Any, "stubs that have ended";
    waitid Any, "whether a stub that does not answer is dead";
    exit Any, "ends a stub's thread";
    exit_group Any, "ends a stub; the end";
};

/// The rules of a mode, with the Pager's or without.
pub fn rules(intra: Intra, pager: bool) -> Vec<&'static Rule> {
    let lists: &[&'static [Rule]] = match intra {
        Intra::None => &[FUSED],
        Intra::Mpk => &[FUSED, KEYED],
        Intra::Aspace => &[STUBS],
    };
    let pagers: &'static [Rule] = if pager { PAGER } else { &[] };
    lists.iter().copied().flatten().chain(pagers).collect()
}

/// The list as the guest kernel loads it, an array of `struct sock_filter`.
pub fn program(intra: Intra, pager: bool, files: Mappable) -> Result<Vec<u8>, JailError> {
    let program = assemble(&rules(intra, pager), SeccompAction::Trace(0), files)
        .map_err(|error| JailError::Filter { class: "guest-kernel", reason: error.to_string() })?;
    let bytes = program.iter().flat_map(|step| {
        let [code, k] = [u32::from(step.code), step.k].map(u32::to_ne_bytes);
        [code[0], code[1], step.jt, step.jf, k[0], k[1], k[2], k[3]]
    });
    Ok(bytes.collect())
}
