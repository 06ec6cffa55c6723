//! Where isolates lie in memory, and how their pages go back to the host.
//!
//! Nothing here knows of calls, tenants or modules.

pub(crate) mod call_arena;
pub(crate) mod compact_pool;
pub(crate) mod dirty_pages;
pub(crate) mod hibernation;
pub(crate) mod zero;
