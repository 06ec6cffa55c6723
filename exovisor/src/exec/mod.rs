//! How a function of an admitted module is run: its instance, its call, its threads and its end.

pub(crate) mod call;
pub(crate) mod drive;
pub(crate) mod module;
pub(crate) mod outcome;
pub(crate) mod reclaim;
pub(crate) mod reuse;
pub(crate) mod threads;
