//! The one table of what a module may import, and what each name needs.
//!
//! The tiers are those of Khronos (table I). Names and signatures of tier 1' and 3 are those of
//! WASI preview 1 (`wasi_snapshot_preview1.witx`), WasmEdge's sockets and wasi-threads, the builtins those of the C
//! standard library, the language runtime those of the Itanium C++ ABI,
//! inference that of WASI-NN (`wasi-nn.witx`).

use crate::nn::NN;
use crate::scan::Asked;
use exocell_xgate::{CapabilitySet, Kind};
use wasmparser::{RefType, ValType};

/// Module part of WASI preview 1.
pub(crate) const WASI: &str = "wasi_snapshot_preview1";
/// Module part of what C and C++ programs leave for their host.
pub(crate) const ENV: &str = "env";
/// Module part of wasi-threads.
pub(crate) const THREADS: &str = "wasi";

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

    /// Whether a module that asks for this item can be given it.
    pub(crate) fn is(&self, asked: Asked) -> bool {
        match asked {
            Asked::Function => self.item == Item::Function,
            Asked::SharedMemory | Asked::Memory(_) => self.item == Item::Memory,
            Asked::Table(table) => {
                self.item == Item::Table && table.element_type == RefType::FUNCREF
            }
            Asked::Global(global) => {
                self.item == Item::Global && global.mutable && global.content_type == ValType::I32
            }
            Asked::Other => false,
        }
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
/// Who has a network waits for it.
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

static IMPORTS: &[Import] = &[
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
    own("args_get"),
    own("args_sizes_get"),
    own("environ_get"),
    own("environ_sizes_get"),
    own("proc_exit"),
    own("proc_raise"),
    own("sched_yield"),
    // Closing and describing what is held gives nothing that was not there.
    own("fd_close"),
    own("fd_fdstat_get"),
    own("fd_fdstat_set_flags"),
    own("fd_fdstat_set_rights"),
    own("fd_prestat_get"),
    own("fd_prestat_dir_name"),
    own("fd_renumber"),
    own("fd_tell"),
    wasi("clock_res_get", Read, CLOCK, &[]),
    wasi("clock_time_get", Read, CLOCK, &[]),
    wasi("poll_oneoff", Read, WAITS, &[]),
    wasi("random_get", Read, RANDOM, &[]),
    wasi("fd_read", Read, STREAMS, &[0]),
    wasi("fd_write", Write, STREAMS, &[0]),
    wasi("fd_seek", Pure, STREAMS, &[0]),
    wasi("fd_filestat_get", Read, STREAMS, &[0]),
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
    gated("fd_advise", Pure, FILES, &[0]),
    gated("fd_allocate", Write, FILES, &[0]),
    gated("fd_datasync", Write, FILES, &[0]),
    gated("fd_filestat_set_size", Write, FILES, &[0]),
    gated("fd_filestat_set_times", Write, FILES, &[0]),
    gated("fd_pread", Read, FILES, &[0]),
    gated("fd_pwrite", Write, FILES, &[0]),
    gated("fd_readdir", Read, FILES, &[0]),
    gated("fd_sync", Write, FILES, &[0]),
    gated("path_create_directory", Write, FILES, &[0]),
    gated("path_filestat_get", Read, FILES, &[0]),
    gated("path_filestat_set_times", Write, FILES, &[0]),
    gated("path_link", Write, FILES, &[0, 4]),
    gated("path_open", Write, FILES, &[0]),
    gated("path_readlink", Read, FILES, &[0]),
    gated("path_remove_directory", Write, FILES, &[0]),
    gated("path_rename", Write, FILES, &[0, 3]),
    gated("path_symlink", Write, FILES, &[2]),
    gated("path_unlink_file", Write, FILES, &[0]),
    gated("sock_accept", Crossing, SOCKETS, &[0]),
    gated("sock_recv", Crossing, SOCKETS, &[0]),
    gated("sock_send", Crossing, SOCKETS, &[0]),
    gated("sock_shutdown", Crossing, SOCKETS, &[0]),
    gated("sock_open", Pure, SOCKETS, &[]),
    gated("sock_bind", Pure, SOCKETS, &[0]),
    gated("sock_listen", Crossing, SOCKETS, &[0]),
    gated("sock_connect", Crossing, SOCKETS, &[0]),
    gated("sock_recv_from", Crossing, SOCKETS, &[0]),
    gated("sock_send_to", Crossing, SOCKETS, &[0]),
    gated("sock_getaddrinfo", Crossing, SOCKETS, &[]),
    gated("sock_getpeeraddr", Read, SOCKETS, &[0]),
    gated("sock_getlocaladdr", Pure, SOCKETS, &[0]),
    gated("sock_getsockopt", Read, SOCKETS, &[0]),
    gated("sock_setsockopt", Pure, SOCKETS, &[0]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

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
