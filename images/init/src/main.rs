//! The binary of [`exocell_init`].
//!
//! It has a C `main` of its own: the standard library's start-up aborts when the
//! standard streams are closed and there is no /dev/null to open instead, and
//! that is how a guest kernel without a console device starts its init.
#![no_main]

// SAFETY: the C library calls `main` once, at the start, with this signature.
// Needed as said above.
#[unsafe(no_mangle)]
extern "C" fn main(_count: i32, _arguments: *const *const u8) -> i32 {
    exocell_init::run();
    0
}
