//! libFuzzer's driver: EXOCELL_FUZZ_TARGET names the target.
#![no_main]

use std::sync::LazyLock;

use exocell_fuzz::Target;

/// Calls of isolates lie in pages of their own.
#[global_allocator]
static ALLOCATOR: exocell_exovisor::Allocator = exocell_exovisor::Allocator;

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("EXOCELL_FUZZ_TARGET").unwrap_or_default();
    exocell_fuzz::target(&name)
        .unwrap_or_else(|| panic!("EXOCELL_FUZZ_TARGET names no target: {name:?}"))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
