//! System call filters: one list per thread class, each rule with its reason.
//!
//! What is not listed answers ENOSYS instead of killing. In stubs the guest
//! kernel is notified of guest system calls, by a filter of its own, and the
//! stricter action wins (seccomp(2), "the action values, in order of
//! precedence"): for the guest kernel's class that leaves only the action of a
//! tracer, which answers ENOSYS too where there is none.
//!
//! A guest kernel's list is for its set-up; [`steady`] has what is left of it then.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule,
    sock_filter,
};

use super::JailError;

/// The kinds of thread in a cell, each with its own list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadClass {
    /// The guest kernel process, its vCPU threads and its stubs.
    GuestKernel,
    /// The process of a virtual machine ([`crate::kvm`]): its processors' threads.
    Machine,
    /// The supervisor's loop that serves the virtio devices.
    Device,
    /// The supervisor's thread with the network device and its stack.
    Network,
    /// The process that dials, in the host's network.
    Dialer,
    /// The process that passes packets on between the members of a network ([`super::stage`]).
    Switch,
    /// The process that serves one host folder to a guest.
    Folder,
    /// The process that connects to one socket of the host for a guest.
    Door,
    /// The supervisor's thread that grants its guest memory.
    Credit,
    /// The supervisor's control loop and its sessions.
    Control,
    /// The supervisor of an isolate: its control loop and the module.
    Isolate,
    /// The same before its module is loaded: until then it may make memory executable.
    Loading,
    /// A process that turns given bytes into others ([`super::stage`]).
    Stage,
    /// Such a process that compiles modules, and links what it has compiled.
    Compile,
    /// Such a process that asks servers in the host's network for what it gives.
    Fetch,
    /// Such a process that makes files below a directory that it was given.
    Extract,
    /// Such a process that lets a service's clients in and hands their requests on.
    Front,
    /// Such a process that runs modules for a service: all of its threads but one.
    Worker,
    /// That one, which loads what was compiled.
    WorkerLoading,
}

impl ThreadClass {
    pub const ALL: [Self; 19] = [
        Self::GuestKernel,
        Self::Machine,
        Self::Device,
        Self::Network,
        Self::Dialer,
        Self::Switch,
        Self::Folder,
        Self::Door,
        Self::Credit,
        Self::Control,
        Self::Isolate,
        Self::Loading,
        Self::Stage,
        Self::Compile,
        Self::Fetch,
        Self::Extract,
        Self::Front,
        Self::Worker,
        Self::WorkerLoading,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::GuestKernel => "guest-kernel",
            Self::Machine => "machine",
            Self::Device => "device",
            Self::Network => "network",
            Self::Dialer => "dialer",
            Self::Switch => "switch",
            Self::Folder => "folder",
            Self::Door => "door",
            Self::Credit => "credit",
            Self::Control => "control",
            Self::Isolate => "isolate",
            Self::Loading => "loading",
            Self::Stage => "stage",
            Self::Compile => "compile",
            Self::Fetch => "fetch",
            Self::Extract => "extract",
            Self::Front => "front",
            Self::Worker => "worker",
            Self::WorkerLoading => "worker-loading",
        }
    }

    /// The rules of this class: what it may call and why.
    pub fn rules(self) -> Vec<&'static Rule> {
        let mut rules: Vec<&Rule> = Vec::new();
        for rule in self.lists().iter().copied().flatten() {
            // What an earlier list says of a call holds.
            if rules.iter().all(|known| known.number != rule.number) {
                rules.push(rule);
            }
        }
        rules
    }

    fn lists(self) -> &'static [&'static [Rule]] {
        match self {
            // Processes of their own.
            Self::GuestKernel => &[GUEST_KERNEL],
            Self::Machine => &[MACHINE],
            Self::Dialer => &[DIALER],
            Self::Switch => &[SWITCH, STAGE],
            Self::Stage => &[STAGE],
            Self::Device => &[SUPERVISOR, DEVICE],
            Self::Network => &[SUPERVISOR, NETWORK],
            Self::Folder => &[SHARE, SUPERVISOR, FOLDER],
            Self::Door => &[DOOR],
            Self::Credit => &[SUPERVISOR, CREDIT],
            Self::Control => &[SUPERVISOR, CONTROL],
            Self::Isolate => &[SUPERVISOR, CONTROL, FOLDER, TURNS, PAIRS],
            Self::Loading => &[NARROWER, CODE, SUPERVISOR, CONTROL, FOLDER, TURNS, PAIRS],
            Self::Compile => &[CODE, STAGE],
            Self::Fetch => &[FETCH, STAGE],
            Self::Extract => &[EXTRACT, STAGE],
            Self::Front => &[SUPERVISOR, FRONT],
            Self::Worker => &[WORKER, SUPERVISOR, FOLDER, TURNS, PAIRS],
            Self::WorkerLoading => &[NARROWER, CODE, WORKER, SUPERVISOR, FOLDER, TURNS, PAIRS],
        }
    }
}

/// One permitted call.
#[derive(Debug)]
pub struct Rule {
    pub name: &'static str,
    pub number: i64,
    pub pin: Pin,
    pub why: &'static str,
}

/// What a rule demands of the call's register arguments.
#[derive(Debug, Clone, Copy)]
pub enum Pin {
    None,
    /// Argument `.0` has none of the bits `.1`.
    Without(u8, u64),
    /// Argument `.0` (32 bits) is one of `.1`.
    OneOf(u8, &'static [u64]),
    /// Argument `.0` is the descriptor of guest memory, or one of `.1`.
    Memory(u8, &'static [u64]),
    /// The same, or one of the image's files, of which the first is one of `.2`.
    Mapped(u8, &'static [u64], &'static [u64]),
    /// All of them.
    All(&'static [Pin]),
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({}): {}", self.name, self.pin, self.why)
    }
}

/// Arguments are counted from 0.
impl std::fmt::Display for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::Without(argument, bits) => write!(f, "{argument}: none of {bits:#x}"),
            Self::OneOf(argument, values) => {
                let values: Vec<String> = values.iter().map(|one| format!("{one:#x}")).collect();
                write!(f, "{argument}: {}", values.join(" "))
            }
            Self::Memory(argument, others) => {
                write!(f, "{argument}: guest memory")?;
                others.iter().try_for_each(|one| write!(f, " {one:#x}"))
            }
            Self::Mapped(argument, others, files) => {
                write!(f, "{argument}: guest memory")?;
                others.iter().try_for_each(|one| write!(f, " {one:#x}"))?;
                files.iter().try_for_each(|one| write!(f, ", the image's files from {one:#x} on"))
            }
            Self::All(pins) => {
                let pins: Vec<String> = pins.iter().map(Self::to_string).collect();
                f.write_str(&pins.join(", "))
            }
        }
    }
}

type Alternatives = Vec<Vec<SeccompCondition>>;

/// What a guest may map.
#[derive(Debug, Clone, Copy)]
pub struct Mappable {
    /// The descriptor of its memory.
    pub memory: RawFd,
    /// How many files its image has there; their descriptors follow on each other.
    pub image_files: usize,
}

impl Mappable {
    const NOTHING: Self = Self { memory: -1, image_files: 0 };
}

impl Pin {
    fn rules(self, files: Mappable) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        match self {
            Self::None => Ok(Vec::new()),
            pin => pin.alternatives(files)?.into_iter().map(SeccompRule::new).collect(),
        }
    }

    /// Conditions that must all hold, once for each way to fulfil it.
    fn alternatives(self, files: Mappable) -> Result<Alternatives, seccompiler::BackendError> {
        use SeccompCmpArgLen::{Dword, Qword};
        let equal = |argument, value| {
            SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value).map(|one| vec![one])
        };
        match self {
            Self::None => Ok(vec![Vec::new()]),
            Self::Without(argument, bits) => {
                let masked = SeccompCmpOp::MaskedEq(bits);
                Ok(vec![vec![SeccompCondition::new(argument, Qword, masked, 0)?]])
            }
            Self::OneOf(argument, values) => {
                values.iter().map(|value| equal(argument, *value)).collect()
            }
            Self::Memory(argument, others) => {
                std::iter::once(u64::from(files.memory.cast_unsigned()))
                    .chain(others.iter().copied())
                    .map(|value| equal(argument, value))
                    .collect()
            }
            Self::Mapped(argument, others, firsts) => {
                let mut ways = Self::Memory(argument, others).alternatives(files)?;
                for first in firsts.iter().filter(|_| files.image_files > 0) {
                    let end = first + files.image_files as u64;
                    let bound = |op, value| SeccompCondition::new(argument, Dword, op, value);
                    ways.push(vec![
                        bound(SeccompCmpOp::Ge, *first)?,
                        bound(SeccompCmpOp::Lt, end)?,
                    ]);
                }
                Ok(ways)
            }
            Self::All(pins) => {
                let mut so_far: Alternatives = vec![Vec::new()];
                for pin in pins {
                    let more = pin.alternatives(files)?;
                    so_far = so_far
                        .iter()
                        .flat_map(|one| more.iter().map(move |with| [&one[..], with].concat()))
                        .collect();
                }
                Ok(so_far)
            }
        }
    }
}

/// What a virtual processor does: `_IO(0xae, 0x80)` of linux/kvm.h.
const KVM_RUN: u64 = 0xae80;

/// Of a listener for calls that a filter reports (seccomp_unotify(2)).
const NOTIF_RECV: u64 = 0xc050_2100;
const NOTIF_SEND: u64 = 0xc018_2101;
const NOTIF_SET_FLAGS: u64 = 0x4008_2104;

/// fallocate(2) modes.
const KEEP_SIZE: u64 = libc::FALLOC_FL_KEEP_SIZE as u64;
const PUNCH_HOLE: u64 = libc::FALLOC_FL_PUNCH_HOLE as u64;

/// clone(2) flags that make namespaces.
const NEW_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Mode bits by which a file acts as its owner, and those that only devices have of all kinds of
/// files that mknod(2) makes.
const SET_USER_ID: u64 = libc::S_ISUID as u64;
const SET_ID: u64 = (libc::S_ISUID | libc::S_ISGID) as u64;
const DEVICE_NODE: u64 = libc::S_IFCHR as u64;

/// prctl(2) PR_SET_SYSCALL_USER_DISPATCH, which libc does not name.
const SYSCALL_USER_DISPATCH: u64 = 59;

/// Pages of the usual size: those of hugetlbfs are reserved for who asked for them, and no
/// control group of memory counts them.
const SMALL_PAGES: Pin = Without(3, libc::MAP_HUGETLB as u64);
const NO_CODE: Pin = Pin::All(&[Without(2, libc::PROT_EXEC as u64), SMALL_PAGES]);

/// fcntl(2) commands that libc does not name for every target.
const F_SETSIG: u64 = 10;
const F_ADD_SEALS: u64 = 1033;

/// mremap(2) flags of a move to a given address.
const MOVE_FIXED: &[u64] = &[(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64];

macro_rules! rules {
    ($($call:ident $pin:expr, $why:literal;)*) => {
        &[$(Rule { name: stringify!($call), number: numbers::$call, pin: $pin, why: $why }),*]
    };
}

pub mod steady;

/// The libc numbers under the calls' own names.
#[allow(non_upper_case_globals)]
mod numbers {
    macro_rules! name {
        ($($call:ident = $number:ident),* $(,)?) => {
            $(pub const $call: i64 = libc::$number;)*
        };
    }
    name! {
        accept4 = SYS_accept4, access = SYS_access, arch_prctl = SYS_arch_prctl, bind = SYS_bind,
        brk = SYS_brk, capget = SYS_capget, capset = SYS_capset,
        clock_getres = SYS_clock_getres, clock_gettime = SYS_clock_gettime,
        clock_nanosleep = SYS_clock_nanosleep, clone = SYS_clone,
        close = SYS_close, close_range = SYS_close_range, connect = SYS_connect,
        copy_file_range = SYS_copy_file_range, dup2 = SYS_dup2,
        dup3 = SYS_dup3, epoll_create = SYS_epoll_create, epoll_create1 = SYS_epoll_create1,
        epoll_ctl = SYS_epoll_ctl, epoll_wait = SYS_epoll_wait, eventfd2 = SYS_eventfd2,
        execve = SYS_execve, execveat = SYS_execveat, fanotify_init = SYS_fanotify_init,
        fanotify_mark = SYS_fanotify_mark, name_to_handle_at = SYS_name_to_handle_at, exit = SYS_exit, exit_group = SYS_exit_group,
        fallocate = SYS_fallocate, fchmod = SYS_fchmod, fchmodat = SYS_fchmodat,
        fchmodat2 = SYS_fchmodat2, fchown = SYS_fchown, fchownat = SYS_fchownat, fcntl = SYS_fcntl,
        fdatasync = SYS_fdatasync, fgetxattr = SYS_fgetxattr, flock = SYS_flock,
        fstat = SYS_fstat, fstatfs = SYS_fstatfs, fsync = SYS_fsync,
        ftruncate = SYS_ftruncate, futex = SYS_futex,
        getdents64 = SYS_getdents64, getpeername = SYS_getpeername,
        getpid = SYS_getpid, getppid = SYS_getppid, getrandom = SYS_getrandom,
        getsockname = SYS_getsockname, getxattr = SYS_getxattr,
        listxattr = SYS_listxattr, mknodat = SYS_mknodat, removexattr = SYS_removexattr,
        setxattr = SYS_setxattr, getsockopt = SYS_getsockopt, gettid = SYS_gettid,
        ioctl = SYS_ioctl, kill = SYS_kill, linkat = SYS_linkat, lseek = SYS_lseek,
        madvise = SYS_madvise, memfd_create = SYS_memfd_create, mincore = SYS_mincore,
        mkdir = SYS_mkdir, mkdirat = SYS_mkdirat, mmap = SYS_mmap, mprotect = SYS_mprotect,
        mremap = SYS_mremap, munmap = SYS_munmap, nanosleep = SYS_nanosleep,
        newfstatat = SYS_newfstatat, openat = SYS_openat, openat2 = SYS_openat2,
        personality = SYS_personality, pkey_alloc = SYS_pkey_alloc,
        pkey_mprotect = SYS_pkey_mprotect, pipe2 = SYS_pipe2, poll = SYS_poll,
        ppoll = SYS_ppoll, prctl = SYS_prctl, pread64 = SYS_pread64, preadv = SYS_preadv,
        prlimit64 = SYS_prlimit64, pwrite64 = SYS_pwrite64, pwritev = SYS_pwritev,
        read = SYS_read, readlinkat = SYS_readlinkat, readv = SYS_readv,
        recvfrom = SYS_recvfrom, recvmsg = SYS_recvmsg, rename = SYS_rename,
        renameat = SYS_renameat, renameat2 = SYS_renameat2,
        restart_syscall = SYS_restart_syscall, rseq = SYS_rseq,
        rt_sigaction = SYS_rt_sigaction, rt_sigprocmask = SYS_rt_sigprocmask,
        rt_sigreturn = SYS_rt_sigreturn,
        rt_tgsigqueueinfo = SYS_rt_tgsigqueueinfo, sched_getaffinity = SYS_sched_getaffinity,
        sched_setaffinity = SYS_sched_setaffinity, sched_yield = SYS_sched_yield,
        seccomp = SYS_seccomp, sendmmsg = SYS_sendmmsg, sendmsg = SYS_sendmsg, sendto = SYS_sendto,
        set_robust_list = SYS_set_robust_list, set_tid_address = SYS_set_tid_address,
        setsockopt = SYS_setsockopt, shutdown = SYS_shutdown,
        sigaltstack = SYS_sigaltstack, signalfd4 = SYS_signalfd4, socket = SYS_socket,
        socketpair = SYS_socketpair, statx = SYS_statx, symlinkat = SYS_symlinkat,
        tgkill = SYS_tgkill, timer_create = SYS_timer_create, timer_delete = SYS_timer_delete,
        timer_settime = SYS_timer_settime, timerfd_settime = SYS_timerfd_settime,
        uname = SYS_uname, unlink = SYS_unlink, unlinkat = SYS_unlinkat, utimensat = SYS_utimensat,
        wait4 = SYS_wait4, waitid = SYS_waitid, write = SYS_write, writev = SYS_writev,
    }
}

use Pin::{None as Any, OneOf, Without};

/// arch/um: arch/um/os-Linux and its static libc.
const GUEST_KERNEL: &[Rule] = rules! {
    rt_sigprocmask Any, "guest interrupts on and off";
    rt_sigreturn Any, "return from host signals, in the guest kernel and in stubs";
    rt_sigaction Any, "signal handlers of vCPUs and stubs";
    sigaltstack Any, "alternate signal stacks";
    rt_tgsigqueueinfo Any, "interrupts to another vCPU thread";
    futex Any, "hand-off between guest kernel and stub; idle vCPUs";
    timer_create Any, "a vCPU's clock events";
    timer_settime Any, "a vCPU's clock events";
    clock_nanosleep Any, "idle vCPUs sleep; the boot check of seccomp itself";
    nanosleep Any, "short waits of the device probe";
    kill Any, "ends stubs; the pid namespace bounds what it can reach";
    wait4 Any, "reaps stubs";
    waitid Any, "whether a stub that does not answer is dead";
    clone Without(0, NEW_NAMESPACES), "stubs and vCPU threads; never a namespace";
    execve Any, "starts the guest kernel; it runs itself again without address randomisation";
    execveat Any, "starts the stub executable from memory";
    exit Any, "ends a thread or stub";
    exit_group Any, "ends the guest kernel process";
    mmap SMALL_PAGES, "guest physical memory, guest user mappings in stubs";
    munmap Any, "guest user mappings in stubs";
    mremap OneOf(3, MOVE_FIXED), "a stub moves the host's vDSO to where guest programs find it";
    mprotect Any, "the guest kernel's read-only data";
    pkey_alloc OneOf(0, &[0]), "keys for the guest kernel's memory";
    pkey_mprotect Any, "keys for the guest kernel's memory";
    madvise Any, "guest memory that goes back to the host";
    brk Any, "libc start-up";
    memfd_create Without(1, libc::MFD_HUGETLB as u64), "the stub executable";
    ftruncate Any, "sizes the stub executable";
    fallocate OneOf(1, &[KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE]),
        "takes guest memory from the host and gives it back; never resizes its file";
    read Any, "device messages, pipes between helper threads";
    write Any, "device messages, console";
    pread64 Any, "the initramfs";
    pwrite64 Any, "a stub's mapper tells in guest memory how far it came; the Pager's zeros";
    lseek Any, "writes the stub page into the memory file";
    openat Any, "the initramfs; the root holds nothing else";
    close Any, "descriptors handed to stubs and back";
    close_range Any, "a stub drops what it must not hold";
    fcntl OneOf(1, &[
        libc::F_DUPFD_CLOEXEC as u64,
        libc::F_GETFD as u64,
        libc::F_SETFD as u64,
        libc::F_GETFL as u64,
        libc::F_SETFL as u64,
        libc::F_SETOWN as u64,
        F_SETSIG,
        F_ADD_SEALS,
    ]), "notification of device sockets; seals the stub executable; no locks, no leases";
    dup2 Any, "a stub's descriptors";
    dup3 Any, "a stub's descriptors";
    fstat Any, "size of the memory file and initramfs";
    newfstatat Any, "size of the initramfs";
    access Any, "looks for a directory of its own and finds none";
    mkdir Any, "tries to make a directory of its own; the root is read-only";
    unlink Any, "clears that directory";
    ioctl OneOf(1, &[
        libc::TCGETS,
        libc::TIOCGWINSZ,
        libc::FIOASYNC,
        NOTIF_RECV,
        NOTIF_SEND,
        NOTIF_SET_FLAGS,
    ]), "is the console a terminal? guest system calls";
    pipe2 Any, "wake-ups of the notification thread; what a stub starts with";
    socket OneOf(0, &[libc::AF_UNIX as u64]), "device sockets; the network namespace is empty";
    connect Any, "to device sockets; the root holds no others";
    socketpair OneOf(0, &[libc::AF_UNIX as u64]), "on which stubs hand their listeners over";
    setsockopt OneOf(2, &[libc::SO_RCVTIMEO as u64]), "the wait for a listener is bounded";
    sendmsg Any, "device messages; the listener of a stub's thread";
    recvmsg Any, "device messages; the listener of a stub's thread";
    epoll_create Any, "device notification";
    epoll_create1 Any, "device notification";
    epoll_ctl Any, "device notification";
    epoll_wait Any, "device notification";
    poll Any, "the notification thread";
    ppoll Any, "the notification thread";
    eventfd2 Any, "device doorbells";
    signalfd4 Any, "devices' signals where there are no stubs; idle vCPUs of the stock kernel";
    seccomp OneOf(0, &[
        libc::SECCOMP_SET_MODE_FILTER as u64,
        libc::SECCOMP_GET_ACTION_AVAIL as u64,
        libc::SECCOMP_GET_NOTIF_SIZES as u64,
    ]), "stubs confine themselves further";
    prctl OneOf(0, &[
        libc::PR_SET_NAME as u64,
        libc::PR_SET_PDEATHSIG as u64,
        libc::PR_SET_NO_NEW_PRIVS as u64,
        SYSCALL_USER_DISPATCH,
    ]), "a stub names and confines itself; calls of user code beside the guest kernel stop";
    arch_prctl Any, "thread-local storage of guest threads";
    personality Any, "no address randomisation";
    set_tid_address Any, "libc start-up";
    set_robust_list Any, "libc thread start-up";
    rseq Any, "libc thread start-up";
    prlimit64 OneOf(0, &[0]), "its own stack and core limits";
    getrandom Any, "libc start-up; early guest entropy";
    getpid Any, "addresses signals";
    gettid Any, "addresses signals";
    getppid Any, "start-up checks";
    uname Any, "libc start-up";
    tgkill Any, "stops a stub's thread; aborts itself";
    clock_gettime Any, "guest time where the vDSO does not answer";
    sched_yield Any, "spinning vCPUs";
    sched_getaffinity Any, "CPUs to choose from";
    sched_setaffinity Any, "a vCPU and the stub threads that it runs stay together";
    restart_syscall Any, "resumes sleeps after a stop";
};

/// What every thread of the supervisor needs: the Rust runtime and libc.
const SUPERVISOR: &[Rule] = rules! {
    futex Any, "locks and thread ends";
    mmap NO_CODE, "heap, thread stacks, guest memory; never executable";
    munmap Any, "heap, guest memory";
    mremap Any, "heap growth";
    madvise Any, "heap and thread stacks given back";
    mprotect Without(2, libc::PROT_EXEC as u64), "thread stack guards; never executable";
    brk Any, "heap";
    read Any, "sockets, eventfds, files";
    write Any, "sockets, eventfds, files";
    readv Any, "vectored reads";
    writev Any, "vectored writes";
    close Any, "descriptors";
    fcntl Any, "descriptor flags";
    fstat Any, "kinds and sizes of descriptors";
    statx Any, "kinds and sizes of descriptors";
    newfstatat Any, "kinds and sizes of descriptors";
    recvmsg Any, "messages with descriptors";
    sendmsg Without(2, libc::MSG_FASTOPEN as u64), "messages with descriptors; connects nothing";
    recvfrom Any, "stream sockets";
    sendto Without(3, libc::MSG_FASTOPEN as u64), "stream sockets; connects nothing";
    shutdown Any, "half-closes streams";
    getsockopt Any, "the kind of a socket handed over";
    poll Any, "waits";
    ppoll Any, "waits";
    eventfd2 Any, "wakes other threads";
    getrandom Any, "hash seeds";
    clock_gettime Any, "time where the vDSO does not answer";
    clock_nanosleep Any, "short waits";
    sigaltstack Any, "thread start and end";
    rt_sigprocmask Any, "thread start and end";
    rt_sigreturn Any, "returns from handlers";
    set_robust_list Any, "thread start";
    rseq Any, "thread start";
    gettid Any, "thread names, panics";
    getpid Any, "panics";
    tgkill Any, "stops a stub's thread; aborts itself";
    sched_getaffinity Any, "runtime start of threads";
    sched_yield Any, "spinning locks";
    restart_syscall Any, "resumes sleeps after a stop";
    prctl OneOf(0, &[libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64]), "thread and heap names";
    exit Any, "thread end";
    exit_group Any, "ends the cell";
};

/// A virtual machine that is made: its devices are connected, its processors have their state.
const MACHINE: &[Rule] = rules! {
    ioctl OneOf(1, &[KVM_RUN]), "runs a processor; nothing of the machine is made or changed";
    sendmsg Without(2, libc::MSG_FASTOPEN as u64), "queues, to the devices' back ends";
    recvmsg Any, "their answers";
    write Any, "the kernel's first words; the allocator's last";
    clone Without(0, NEW_NAMESPACES), "a thread for each processor; never a namespace";
    futex Any, "locks and thread ends";
    mmap NO_CODE, "heap, thread stacks; never executable";
    munmap Any, "heap, thread stacks";
    mremap Any, "heap growth";
    madvise Any, "heap and thread stacks given back";
    mprotect Without(2, libc::PROT_EXEC as u64), "thread stack guards; never executable";
    brk Any, "heap";
    close Any, "descriptors";
    fcntl OneOf(1, &[libc::F_DUPFD_CLOEXEC as u64]), "the console, for each thread";
    getrandom Any, "hash seeds";
    sigaltstack Any, "thread start and end";
    rt_sigprocmask Any, "thread start and end";
    rt_sigreturn Any, "returns from handlers";
    set_robust_list Any, "thread start";
    rseq Any, "thread start";
    prctl OneOf(0, &[libc::PR_SET_NAME as u64, libc::PR_SET_VMA as u64]), "thread and heap names";
    gettid Any, "thread names, panics";
    getpid Any, "panics";
    tgkill Any, "aborts itself; the pid namespace bounds it";
    sched_getaffinity Any, "runtime start of threads";
    sched_yield Any, "spinning locks";
    restart_syscall Any, "resumes waits after a stop";
    exit Any, "thread end";
    exit_group Any, "the machine's end";
};

const DEVICE: &[Rule] = rules! {
    epoll_create1 Any, "the event loop";
    epoll_ctl Any, "the event loop";
    epoll_wait Any, "the event loop";
    accept4 Any, "the guest kernel connects to its devices";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    socketpair OneOf(0, &[libc::AF_UNIX as u64]), "host ends of vsock streams";
    lseek Any, "sizes of guest memory and disks; whether a place of a disk takes room";
    fstatfs Any, "what a disk that grows leaves of the host's";
    preadv Any, "block reads into guest memory";
    pwritev Any, "block writes from guest memory";
    fallocate Any, "block discard and write zeroes";
    fdatasync Any, "block flush";
};

/// Holds connected sockets of the host's network, which it can neither connect
/// to anyone else nor bind.
const NETWORK: &[Rule] = rules! {
    epoll_ctl Any, "the event loop";
    epoll_wait Any, "the event loop";
    accept4 Any, "the guest kernel connects to its device; callers of published ports";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    lseek Any, "the size of guest memory";
    timerfd_settime Any, "timers of streams";
};

/// ip(7); libc has no name for it.
const IP_LOCAL_PORT_RANGE: u64 = 51;

/// The only list with `connect` to the host's network. It opens no file and
/// starts nothing.
const DIALER: &[Rule] = rules! {
    socket OneOf(0, &[libc::AF_INET as u64, libc::AF_INET6 as u64]), "streams, datagrams, echoes";
    connect Any, "what the policy permits, and the host's name servers";
    bind Any, "finds out whether an address is the host's own";
    setsockopt OneOf(2, &[
        libc::TCP_NODELAY as u64, libc::SO_SNDBUF as u64, libc::SO_RCVBUF as u64,
        IP_LOCAL_PORT_RANGE,
    ]),
        "the guest decides when to send; what waits is bounded; half of the host's ports are not for cells";
    getsockopt Any, "how a connection that was begun ended; whether a way leaves the host";
    poll Any, "the loop";
    recvfrom Any, "requests of the stack, datagrams, answers of name servers";
    sendto Without(3, libc::MSG_FASTOPEN as u64), "answers to the stack, datagrams, questions";
    sendmsg Without(2, libc::MSG_FASTOPEN as u64), "sockets of streams for the stack";
    close Any, "descriptors";
    getrandom Any, "numbers of questions; hash seeds";
    mmap NO_CODE, "heap; never executable";
    munmap Any, "heap";
    mremap Any, "heap growth";
    madvise Any, "heap given back";
    brk Any, "heap";
    clock_gettime Any, "time where the vDSO does not answer";
    futex Any, "locks of the runtime";
    rt_sigreturn Any, "returns from handlers";
    restart_syscall Any, "resumes waits after a stop";
    exit_group Any, "its end";
};

const FOLDER: &[Rule] = rules! {
    openat Any, "opens below the folder";
    openat2 Any, "opens below the folder, links refused";
    fstatfs Any, "free space";
    getdents64 Any, "directory listing";
    lseek Any, "directory position";
    pread64 Any, "reads";
    pwrite64 Any, "writes";
    preadv Any, "reads";
    pwritev Any, "writes";
    fsync Any, "flush";
    fdatasync Any, "flush";
    ftruncate Any, "truncation";
    fchmod Any, "modes";
    fchmodat Any, "modes";
    fchmodat2 Any, "modes";
    fchown Any, "owners";
    fchownat Any, "owners";
    utimensat Any, "times";
    mkdirat Any, "new directories";
    unlinkat Any, "removal";
    renameat Any, "renames";
    renameat2 Any, "renames that do not replace";
    linkat Any, "hard links";
    symlinkat Any, "symbolic links";
    readlinkat Any, "symbolic links";
};

/// Events by handles and names, without descriptors and without a say in what happens.
const LISTENS: &[u64] = &[(libc::FAN_CLASS_NOTIF
    | libc::FAN_CLOEXEC
    | libc::FAN_NONBLOCK
    | libc::FAN_REPORT_FID
    | libc::FAN_REPORT_DFID_NAME) as u64];

/// A folder is the process's root: what a path of it leads to is the folder's.
const SHARE: &[Rule] = rules! {
    epoll_ctl Any, "the event loop";
    epoll_wait Any, "the event loop";
    accept4 Any, "the guest kernel connects to its device";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    openat Without(3, SET_ID), "opens what is held, and makes files; never with set-id bits";
    mkdirat Without(2, SET_ID), "new directories; never with set-id bits";
    mknodat Without(2, SET_ID | DEVICE_NODE), "new fifos, sockets and empty files; never devices";
    fchmodat Without(2, SET_USER_ID), "modes; the group bit is for directories";
    fallocate Any, "room that is taken and given back";
    copy_file_range Any, "copies within the folder";
    flock Any, "locks that hold on the host too";
    getxattr Any, "attributes of files; owners that the host cannot keep";
    setxattr Any, "attributes of files";
    listxattr Any, "attributes of files";
    removexattr Any, "attributes of files";
    fgetxattr Any, "whether a file has capabilities, which end when it changes";
    name_to_handle_at Any, "what a file is called where it is told what happens to it";
    fanotify_init OneOf(0, LISTENS), "hears what others do to files that the guest watches";
    fanotify_mark Any, "which files those are; all that it can name is the folder's";
    getpid Any, "which of these changes were its own";
    capget Any, "before capset";
    capset Any, "the group bit of directories, for as long as it is set";
};

/// What names a file and gives nothing of it.
const NAME_ONLY: &[u64] = &[(libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64];

/// A process that has one directory, of which it reads nothing, and connects to one socket there.
const DOOR: &[Rule] = rules! {
    read Any, "that it is to connect";
    write Any, "why there is no connection";
    sendmsg Without(2, libc::MSG_FASTOPEN as u64), "connections, for the supervisor";
    openat OneOf(2, NAME_ONLY), "finds the socket by its name; opens nothing, follows no link";
    socket OneOf(0, &[libc::AF_UNIX as u64]), "its end of a connection";
    setsockopt OneOf(2, &[libc::SO_SNDTIMEO as u64]), "the wait for a server is bounded";
    bind Any, "the name by which a server knows it; without paths no socket can be made elsewhere";
    connect Any, "to the socket; the network namespace is empty";
    close Any, "descriptors";
    mmap NO_CODE, "heap; never executable";
    munmap Any, "heap";
    mremap Any, "heap growth";
    madvise Any, "heap given back";
    brk Any, "heap";
    rt_sigreturn Any, "returns from handlers";
    restart_syscall Any, "resumes waits after a stop";
    exit_group Any, "its end";
};

/// The budget is a file that it holds open.
const CREDIT: &[Rule] = rules! {
    pread64 Any, "the budget and its cells";
    pwrite64 Any, "the cell's own place in the budget";
    kill Any, "ends a guest kernel that takes more than its credit; the pid namespace bounds it";
};

/// An isolate: threads of its own, and a large memory that goes back.
const TURNS: &[Rule] = rules! {
    clock_getres Any, "resolution of clocks that modules ask for; who asks takes no refusal";
    mincore Any, "how much of an isolate's memory is there to be given back";
    timer_create Any, "ends the turns of an isolate's threads";
    timer_settime Any, "ends the turns of an isolate's threads";
    timer_delete Any, "ends the turns of an isolate's threads";
};

/// An isolate's network, which holds connected sockets of the host's and makes none.
const PAIRS: &[Rule] = rules! {
    socketpair OneOf(0, &[libc::AF_UNIX as u64]), "an isolate's ends of its connections";
};

const CONTROL: &[Rule] = rules! {
    accept4 Any, "operators connect to the control socket";
    clone Without(0, NEW_NAMESPACES), "session threads; never a namespace";
    epoll_create1 Any, "the control loop";
    epoll_ctl Any, "the control loop";
    epoll_wait Any, "the control loop";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    setsockopt OneOf(2, &[libc::SO_RCVTIMEO as u64, libc::SO_SNDTIMEO as u64]),
        "the wait for the guest's orderly end is bounded";
    socketpair OneOf(0, &[libc::AF_UNIX as u64]), "streams into the guest";
    kill Any, "ends the guest kernel; the pid namespace bounds what it can reach";
    wait4 Any, "reaps the guest kernel and its orphans";
    openat Any, "the cell's own record";
    getdents64 Any, "removes the cell's own record";
    lseek Any, "the cell's log; how the host's memory stands";
    pread64 Any, "what the files of another container's image say of themselves";
    ftruncate Any, "the cell's log is bounded";
    rename Any, "replaces the cell's status and log";
    unlink Any, "removes the cell's control socket";
    unlinkat Any, "removes the cell's own record";
    fsync Any, "the cell's status";
    rt_sigaction Any, "no handlers are inherited by session threads";
};

/// Lets clients in and speaks with workers. It opens nothing and connects to nobody.
const FRONT: &[Rule] = rules! {
    accept4 Any, "clients";
    clone Without(0, NEW_NAMESPACES), "its threads; never a namespace";
    epoll_create1 Any, "the event loop";
    epoll_ctl Any, "the event loop";
    epoll_wait Any, "the event loop";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    getpeername Any, "who a client is";
    socketpair OneOf(0, &[libc::AF_UNIX as u64]), "by which its event loop wakes itself";
    rt_sigaction Any, "no handlers are inherited by threads; an abort's default action";
};

/// Runs modules for others; commands read and write files in memory.
const WORKER: &[Rule] = rules! {
    clone Without(0, NEW_NAMESPACES), "its threads; never a namespace";
    epoll_create1 Any, "waits for streams";
    epoll_ctl Any, "waits for streams";
    epoll_wait Any, "waits for streams";
    ioctl OneOf(1, &[libc::FIONBIO]), "non-blocking streams";
    memfd_create Without(1, libc::MFD_HUGETLB as u64), "standard streams; a memory's first contents";
    rename Any, "the log of a module's network is bounded";
    rt_sigaction Any, "traps of modules and ends of turns";
};

/// A narrower list follows.
const NARROWER: &[Rule] = rules! {
    seccomp OneOf(0, &[libc::SECCOMP_SET_MODE_FILTER as u64]), "confines itself further";
    prctl OneOf(0, &[
        libc::PR_SET_NAME as u64,
        libc::PR_SET_VMA as u64,
        libc::PR_SET_NO_NEW_PRIVS as u64,
        libc::PR_SET_SECCOMP as u64,
    ]), "thread and heap names; confines itself further";
};

/// Compiled code becomes part of the process.
const CODE: &[Rule] = rules! {
    mmap SMALL_PAGES, "where compiled code comes to lie";
    mprotect Any, "compiled code becomes executable when it is written";
};

/// Finds servers and talks to them. It has no files but those that say how names are found.
const FETCH: &[Rule] = rules! {
    socket OneOf(0, &[libc::AF_INET as u64, libc::AF_INET6 as u64]), "streams; name servers";
    connect Any, "servers, name servers";
    bind Any, "the resolver, before it asks which address is nearest";
    getsockname Any, "the resolver orders addresses by who would ask";
    getpeername Any, "who is at the other end of a stream";
    getsockopt Any, "how a connection that was begun ended";
    setsockopt Any, "timeouts, no delay";
    sendto Any, "questions, requests";
    sendmmsg Any, "the resolver's two questions";
    recvmsg Any, "answers of name servers";
    ioctl OneOf(1, &[libc::FIONREAD, libc::FIONBIO]), "the length of an answer; streams";
    openat Any, "the files that were shown";
    uname Any, "the resolver's search list";
};

/// Its members come by a socket that it was given.
const SWITCH: &[Rule] = rules! {
    accept4 Any, "members";
};

/// Below the directory that it was given; Landlock keeps it there.
const EXTRACT: &[Rule] = rules! {
    openat Any, "opens below the directory, links refused";
    mkdirat Any, "new directories";
    unlinkat Any, "what an earlier entry made";
    linkat Any, "hard links";
    symlinkat Any, "symbolic links";
    fchmod Any, "modes";
    utimensat Any, "times";
};

/// Opens nothing, connects nothing, starts nothing: reads what it was given and writes what it is
/// to give.
const STAGE: &[Rule] = rules! {
    read Any, "what it was given";
    write Any, "its output, its answer, its last words";
    readv Any, "vectored reads";
    writev Any, "vectored writes; the allocator's last words";
    sendto Without(3, libc::MSG_FASTOPEN as u64), "its answer, to its caller";
    recvfrom Any, "what its caller says";
    pread64 Any, "reads at a place";
    pwrite64 Any, "writes at a place";
    lseek Any, "positions in what it was given";
    ftruncate Any, "the length of its output, within its limit of one";
    fallocate OneOf(1, &[KEEP_SIZE | PUNCH_HOLE]), "what it wrote and does not need is given back";
    fstatfs Any, "how full the disk is that its output is on";
    close Any, "descriptors";
    fcntl Any, "descriptor flags; seals of its output";
    fstat Any, "kinds and sizes of descriptors";
    statx Any, "kinds and sizes of descriptors";
    newfstatat Any, "kinds and sizes of descriptors";
    poll Any, "waits";
    mmap NO_CODE, "heap, descriptors' contents; never executable";
    munmap Any, "heap";
    mremap Any, "heap growth";
    madvise Any, "heap given back";
    mprotect Without(2, libc::PROT_EXEC as u64), "heap growth; never executable";
    brk Any, "heap";
    futex Any, "locks of the runtime";
    getrandom Any, "hash seeds";
    clock_gettime Any, "time where the vDSO does not answer";
    clock_nanosleep Any, "short waits";
    sched_getaffinity Any, "how many processors there are";
    sched_yield Any, "spinning locks";
    sigaltstack Any, "thread end";
    rt_sigaction Any, "an abort's default action";
    rt_sigprocmask Any, "an abort is not blocked";
    rt_sigreturn Any, "returns from handlers";
    restart_syscall Any, "resumes waits after a stop";
    gettid Any, "panics, aborts";
    getpid Any, "panics, aborts";
    tgkill Any, "aborts itself; the pid namespace holds nobody else";
    exit Any, "its end";
    exit_group Any, "its end";
};

/// Confines the calling thread, and what it starts, to `class`'s list, and
/// forbids new privileges (prctl(2) PR_SET_NO_NEW_PRIVS).
pub fn restrict_calls(class: ThreadClass) -> Result<(), JailError> {
    let program = compile(class)?;
    seccompiler::apply_filter(&program)
        .map_err(|error| JailError::Filter { class: class.name(), reason: error.to_string() })
}

fn compile(class: ThreadClass) -> Result<BpfProgram, JailError> {
    let refused = match class {
        ThreadClass::GuestKernel => SeccompAction::Trace(0),
        _ => SeccompAction::Errno(libc::ENOSYS as u32),
    };
    // No list for set-up asks for guest memory.
    assemble(&class.rules(), refused, Mappable::NOTHING)
        .map_err(|error| JailError::Filter { class: class.name(), reason: error.to_string() })
}

/// The program that lets the calls of `rules` pass and answers others with `refused`.
fn assemble(
    rules: &[&Rule],
    refused: SeccompAction,
    files: Mappable,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let (allow, refuse) = (answer(SeccompAction::Allow), answer(refused));
    let mut calls: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for rule in rules {
        calls.entry(rule.number).or_default().extend(rule.pin.rules(files)?);
    }
    let checks: Vec<(u32, BpfProgram)> = calls
        .into_iter()
        .map(|(number, rules)| {
            let check = if rules.is_empty() {
                vec![allow.clone()]
            } else {
                let each = rules.into_iter().map(BpfProgram::from);
                // What is not as a rule wants it goes on behind its answer.
                let each = each.flat_map(|rule| rule.into_iter().chain([allow.clone()]));
                each.chain([refuse.clone()]).collect()
            };
            (number as u32, check)
        })
        .collect();
    let mut program = vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, ARCHITECTURE_AT, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ, ARCHITECTURE, 1, 0),
        answer(SeccompAction::KillProcess),
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, NUMBER_AT, 0, 0),
    ];
    program.extend(search(&checks, &refuse));
    // seccompiler's rules have a jump, never taken, to behind the last of a call.
    program.push(refuse);
    Ok(program)
}

/// Finds a call's check by halves: those of a guest pass through three such programs.
fn search(checks: &[(u32, BpfProgram)], refuse: &sock_filter) -> BpfProgram {
    match checks {
        [] => vec![refuse.clone()],
        [(number, check)] => {
            let mut found =
                vec![step(libc::BPF_JMP | libc::BPF_JEQ, *number, 1, 0), refuse.clone()];
            found.extend_from_slice(check);
            found
        }
        more => {
            let (low, high) = more.split_at(more.len() / 2);
            let first = high.first().map_or(0, |(number, _)| *number);
            let low = search(low, refuse);
            let mut found = vec![
                step(libc::BPF_JMP | libc::BPF_JGE, first, 0, 1),
                step(libc::BPF_JMP | libc::BPF_JA, low.len() as u32, 0, 0),
            ];
            found.extend(low);
            found.extend(search(high, refuse));
            found
        }
    }
}

/// Of `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
/// AUDIT_ARCH_X86_64, which libc does not name.
const ARCHITECTURE: u32 = 0xc000_003e;

fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

fn answer(action: SeccompAction) -> sock_filter {
    step(libc::BPF_RET, action.into(), 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intra::Intra;
    use std::collections::HashSet;

    /// As the host's kernel checks it (bpf_check_classic): no jump leads out.
    fn check(program: &[sock_filter]) {
        for (at, step) in program.iter().enumerate() {
            let ways = match u32::from(step.code) {
                code if code == libc::BPF_JMP | libc::BPF_JA => vec![step.k as usize],
                code if code & 7 == libc::BPF_JMP => vec![step.jt.into(), step.jf.into()],
                _ => Vec::new(),
            };
            assert!(ways.iter().all(|way| at + 1 + way < program.len()), "step {at}: {step:?}");
        }
        let last = program.last().unwrap();
        assert_eq!(u32::from(last.code), libc::BPF_RET);
    }

    #[test]
    fn lists_for_programs_that_run_compile_with_and_without_the_pager() {
        for (intra, calls) in [(Intra::None, 16), (Intra::Mpk, 21), (Intra::Aspace, 38)] {
            for pager in [false, true] {
                let rules = steady::rules(intra, pager);
                assert_eq!(rules.len(), calls + usize::from(pager));
                for image_files in [0, 1, 32] {
                    let files = Mappable { memory: 3, image_files };
                    check(&assemble(&rules, SeccompAction::Trace(0), files).unwrap());
                }
            }
        }
    }

    #[test]
    fn every_class_compiles_and_every_rule_has_a_reason() {
        for class in ThreadClass::ALL {
            check(&compile(class).unwrap());
            let mut seen = HashSet::new();
            for rule in class.rules() {
                assert!(!rule.why.is_empty(), "{}: {} has no reason", class.name(), rule.name);
                assert!(seen.insert(rule.number), "{}: {} twice", class.name(), rule.name);
            }
        }
    }
}
