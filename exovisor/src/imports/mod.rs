//! The one table of what a module may import, and what each name needs.
//!
//! The tiers are those of Khronos (table I). Names and signatures of tier 1' and 3 are those of
//! WASI preview 1 (`wasi_snapshot_preview1.witx`), WasmEdge's sockets and wasi-threads, the
//! builtins those of the C standard library, the language runtime those of the Itanium C++ ABI,
//! inference that of WASI-NN (`wasi-nn.witx`).

pub(crate) mod interfaces;

use exocell_xgate::{CapabilitySet, Kind};

/// Module part of WASI preview 1.
pub(crate) const WASI: &str = "wasi_snapshot_preview1";
/// Module part of what C and C++ programs leave for their host.
pub(crate) const ENV: &str = "env";
/// Module part of wasi-threads.
pub(crate) const THREADS: &str = "wasi";
/// Module part of WASI-NN.
pub(crate) const NN: &str = "wasi_ephemeral_nn";
/// What no export of a module may begin with.
pub(crate) const RESERVED: &str = "\0exocell";
/// Module part of the names of the host functions that stand for instructions.
pub(crate) const ATOMICS: &str = "\0exocell atomics";
/// Their field parts, in the order in which they are imported.
pub(crate) const ATOMIC_NAMES: [&str; 4] = ["wait32", "wait64", "notify", "clear"];

/// Which layer of the interface a name belongs to (Khronos, table I).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// What a compiled language needs to start: memory, stack, table, C++ runtime.
    Language,
    /// WASI preview 1 without the names that reach files or peers.
    Wasi,
    /// Functions of the C library that reach nothing but the isolate's memory.
    Builtin,
    /// Inference: models that are computed by the host.
    Inference,
    /// Data parallelism: threads and the loops over them.
    Intrinsic,
    /// Files and sockets.
    Gated,
}

/// What a call does to the world outside the isolate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is learned and nothing changes.
    Pure,
    /// Something outside is learned.
    Read,
    /// Something outside changes.
    Write,
    /// A peer outside is reached.
    Crossing,
}

/// What is imported under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// A function.
    Function,
    /// A memory, the isolate's own or shared by its threads.
    Memory,
    /// A table of functions.
    Table,
    /// A mutable 32-bit integer.
    Global,
    /// All functions of an interface, which only a component imports.
    Interface,
}

/// One importable name.
#[derive(Debug)]
pub struct Import {
    /// Module part of the name.
    pub module: &'static str,
    /// Field part of the name.
    pub name: &'static str,
    /// What it is.
    pub item: Item,
    /// Which layer it belongs to.
    pub tier: Tier,
    /// What a call does outside.
    pub effect: Effect,
    /// The kinds of which at least one must be granted; none are needed if this is empty.
    pub needs: &'static [Kind],
    /// Which arguments are descriptors.
    pub(crate) descriptors: &'static [usize],
}

impl Tier {
    /// Its name in the paper.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Language => "1",
            Self::Wasi => "1'",
            Self::Builtin => "2",
            Self::Inference => "2'",
            Self::Intrinsic => "intrinsic",
            Self::Gated => "3",
        }
    }
}

impl Effect {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::Read => "read",
            Self::Write => "write",
            Self::Crossing => "crossing",
        }
    }
}

impl Import {
    /// Every importable name.
    #[must_use]
    pub fn all() -> &'static [Import] {
        IMPORTS
    }

    /// Finds a name.
    #[must_use]
    pub fn find(module: &str, name: &str) -> Option<&'static Import> {
        IMPORTS.iter().find(|import| import.module == module && import.name == name)
    }

    /// Whether `caps` grants what it needs.
    #[must_use]
    pub fn is_granted(&self, caps: &CapabilitySet) -> bool {
        self.needs.is_empty() || self.needs.iter().any(|kind| caps.grants(*kind))
    }

    /// The kinds it needs, in words.
    #[must_use]
    pub fn needs_text(&self) -> String {
        let names: Vec<&str> = self.needs.iter().map(|kind| kind.name()).collect();
        names.join(" or ")
    }

    const fn in_tier(self, tier: Tier) -> Self {
        Self { tier, ..self }
    }

    const fn of(self, module: &'static str, item: Item) -> Self {
        Self { module, item, ..self }
    }
}

const FILES: &[Kind] = &[Kind::Folder];
const STREAMS: &[Kind] = &[Kind::Stdio, Kind::Folder];
const CLOCK: &[Kind] = &[Kind::Clock];
/// A program with a network waits for it.
const WAITS: &[Kind] = &[Kind::Clock, Kind::Network];
const RANDOM: &[Kind] = &[Kind::Random];
const SOCKETS: &[Kind] = &[Kind::Network];
const MODELS: &[Kind] = &[Kind::Model];
const PROCESSES: &[Kind] = &[Kind::Processes];

const fn wasi(
    name: &'static str,
    effect: Effect,
    needs: &'static [Kind],
    descriptors: &'static [usize],
) -> Import {
    let (module, item, tier) = (WASI, Item::Function, Tier::Wasi);
    Import { module, name, item, tier, effect, needs, descriptors }
}

/// A name of WASI that acts on the isolate itself.
const fn own(name: &'static str) -> Import {
    wasi(name, Pure, &[], &[])
}

/// A name of WASI that reaches files or peers.
const fn gated(
    name: &'static str,
    effect: Effect,
    needs: &'static [Kind],
    descriptors: &'static [usize],
) -> Import {
    wasi(name, effect, needs, descriptors).in_tier(Tier::Gated)
}

const fn env(name: &'static str, tier: Tier) -> Import {
    own(name).of(ENV, Item::Function).in_tier(tier)
}

const fn builtin(name: &'static str) -> Import {
    env(name, Tier::Builtin)
}

const fn inference(name: &'static str) -> Import {
    Import { needs: MODELS, ..own(name).of(NN, Item::Function).in_tier(Tier::Inference) }
}

const fn intrinsic(name: &'static str) -> Import {
    Import { needs: PROCESSES, ..env(name, Tier::Intrinsic) }
}

use Effect::{Crossing, Pure, Read, Write};

/// Makes [`Wasi`] and the table, in one order: functions of WASI first, then the other names.
macro_rules! imports {
    (wasi { $($name:ident: $kind:ident($($argument:expr),*);)* } others { $($other:expr,)* }) => {
        /// A function of WASI preview 1, or of the sockets beside it. Names are WASI's own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types)]
        pub(crate) enum Wasi {
            $($name,)*
        }

        static IMPORTS: &[Import] = &[
            $($kind(stringify!($name), $($argument),*),)*
            $($other,)*
        ];
    };
}

imports! {
    wasi {
        args_get: own();
        args_sizes_get: own();
        environ_get: own();
        environ_sizes_get: own();
        proc_exit: own();
        proc_raise: own();
        sched_yield: own();
        // Closing and describing what is held gives nothing that was not there.
        fd_close: own();
        fd_fdstat_get: own();
        fd_fdstat_set_flags: own();
        fd_fdstat_set_rights: own();
        fd_prestat_get: own();
        fd_prestat_dir_name: own();
        fd_renumber: own();
        fd_tell: own();
        clock_res_get: wasi(Read, CLOCK, &[]);
        clock_time_get: wasi(Read, CLOCK, &[]);
        poll_oneoff: wasi(Read, WAITS, &[]);
        random_get: wasi(Read, RANDOM, &[]);
        fd_read: wasi(Read, STREAMS, &[0]);
        fd_write: wasi(Write, STREAMS, &[0]);
        fd_seek: wasi(Pure, STREAMS, &[0]);
        fd_filestat_get: wasi(Read, STREAMS, &[0]);
        fd_advise: gated(Pure, FILES, &[0]);
        fd_allocate: gated(Write, FILES, &[0]);
        fd_datasync: gated(Write, FILES, &[0]);
        fd_filestat_set_size: gated(Write, FILES, &[0]);
        fd_filestat_set_times: gated(Write, FILES, &[0]);
        fd_pread: gated(Read, FILES, &[0]);
        fd_pwrite: gated(Write, FILES, &[0]);
        fd_readdir: gated(Read, FILES, &[0]);
        fd_sync: gated(Write, FILES, &[0]);
        path_create_directory: gated(Write, FILES, &[0]);
        path_filestat_get: gated(Read, FILES, &[0]);
        path_filestat_set_times: gated(Write, FILES, &[0]);
        path_link: gated(Write, FILES, &[0, 4]);
        path_open: gated(Write, FILES, &[0]);
        path_readlink: gated(Read, FILES, &[0]);
        path_remove_directory: gated(Write, FILES, &[0]);
        path_rename: gated(Write, FILES, &[0, 3]);
        path_symlink: gated(Write, FILES, &[2]);
        path_unlink_file: gated(Write, FILES, &[0]);
        sock_accept: gated(Crossing, SOCKETS, &[0]);
        sock_recv: gated(Crossing, SOCKETS, &[0]);
        sock_send: gated(Crossing, SOCKETS, &[0]);
        sock_shutdown: gated(Crossing, SOCKETS, &[0]);
        sock_open: gated(Pure, SOCKETS, &[]);
        sock_bind: gated(Pure, SOCKETS, &[0]);
        sock_listen: gated(Crossing, SOCKETS, &[0]);
        sock_connect: gated(Crossing, SOCKETS, &[0]);
        sock_recv_from: gated(Crossing, SOCKETS, &[0]);
        sock_send_to: gated(Crossing, SOCKETS, &[0]);
        sock_getaddrinfo: gated(Crossing, SOCKETS, &[]);
        sock_getpeeraddr: gated(Read, SOCKETS, &[0]);
        sock_getlocaladdr: gated(Pure, SOCKETS, &[0]);
        sock_getsockopt: gated(Read, SOCKETS, &[0]);
        sock_setsockopt: gated(Pure, SOCKETS, &[0]);
    }
    others {
        env("memory", Tier::Language).of(ENV, Item::Memory),
        env("__linear_memory", Tier::Language).of(ENV, Item::Memory),
        env("__stack_pointer", Tier::Language).of(ENV, Item::Global),
        env("__indirect_function_table", Tier::Language).of(ENV, Item::Table),
        env("_Znwm", Tier::Language),
        env("_Znam", Tier::Language),
        env("_ZdlPv", Tier::Language),
        env("_ZdaPv", Tier::Language),
        env("_ZdlPvm", Tier::Language),
        env("_ZdaPvm", Tier::Language),
        env("__cxa_allocate_exception", Tier::Language),
        env("__cxa_throw", Tier::Language),
        env("__cxa_pure_virtual", Tier::Language),
        env("_ZSt9terminatev", Tier::Language),
        builtin("memcpy"),
        builtin("memmove"),
        builtin("memset"),
        builtin("memcmp"),
        builtin("strlen"),
        builtin("malloc"),
        builtin("calloc"),
        builtin("realloc"),
        builtin("free"),
        builtin("abort"),
        builtin("sin"),
        builtin("cos"),
        builtin("tan"),
        builtin("asin"),
        builtin("acos"),
        builtin("atan"),
        builtin("atan2"),
        builtin("exp"),
        builtin("exp2"),
        builtin("log"),
        builtin("log2"),
        builtin("log10"),
        builtin("pow"),
        builtin("fmod"),
        inference("load"),
        inference("load_by_name"),
        inference("init_execution_context"),
        inference("set_input"),
        inference("compute"),
        inference("get_output"),
        intrinsic("MAP"),
        intrinsic("REDUCTION"),
        intrinsic("CILK_REDUCE_T_TO_R"),
        intrinsic("CILK_REDUCE_R_TO_R"),
        intrinsic("THREADS"),
        intrinsic("thread-spawn").of(THREADS, Item::Function),
    }
}

impl Wasi {
    /// Its entry in the table.
    pub fn import(self) -> &'static Import {
        // The table begins with these, in this order.
        &IMPORTS[self as usize]
    }

    /// Whether its first argument is a descriptor that it acts on.
    pub fn is_on_descriptor(self) -> bool {
        self.import().name.starts_with("fd_")
    }

    /// Whether it acts on a path below a descriptor.
    pub fn is_on_path(self) -> bool {
        self.import().name.starts_with("path_")
    }

    /// Whether it is a function of sockets.
    pub fn is_of_sockets(self) -> bool {
        self.import().name.starts_with("sock_")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn functions_of_wasi_have_their_own_entries() {
        for (call, name) in [
            (Wasi::args_get, "args_get"),
            (Wasi::fd_read, "fd_read"),
            (Wasi::path_rename, "path_rename"),
            (Wasi::sock_setsockopt, "sock_setsockopt"),
        ] {
            assert_eq!((call.import().module, call.import().name), (WASI, name));
        }
        assert!(Wasi::fd_read.is_on_descriptor() && !Wasi::fd_read.is_on_path());
        assert!(Wasi::path_open.is_on_path() && Wasi::sock_open.is_of_sockets());
    }

    #[test]
    fn names_are_unique_and_gated_ones_need_something() {
        let names: BTreeSet<_> =
            IMPORTS.iter().map(|import| (import.module, import.name)).collect();
        assert_eq!(names.len(), IMPORTS.len());
        let is_free = |tier| matches!(tier, Tier::Language | Tier::Builtin);
        for import in IMPORTS {
            let needs = !import.needs.is_empty();
            assert!(!(is_free(import.tier) && needs), "{}", import.name);
            assert!(
                needs || !matches!(import.tier, Tier::Gated | Tier::Inference | Tier::Intrinsic)
            );
        }
    }

    #[test]
    fn nothing_granted_leaves_only_what_acts_on_the_isolate() {
        for import in IMPORTS {
            let pure = import.effect == Effect::Pure && import.needs.is_empty();
            assert_eq!(import.is_granted(&CapabilitySet::nothing()), pure, "{}", import.name);
        }
    }

    #[test]
    fn other_modules_have_no_names() {
        assert!(Import::find(WASI, "fd_write").is_some());
        assert!(Import::find(ENV, "fd_write").is_none());
        assert!(Import::find(WASI, "fd_writ").is_none());
    }
}
