//! Who is compared: ways in which a guest's memory goes back to the host.

use exocell_cell::pager::Mode;

/// With eager binding first: it says how much of the file is never held.
pub const MODES: [Mode; 6] =
    [Mode::Eager, Mode::Credit, Mode::Cold, Mode::Report0, Mode::Report9, Mode::Off];
/// What the host would hold in the run with the Pager if it gave and took 2 MiB at a time.
pub const IN_BLOCKS: &str = "pager-2m";

/// The name of a mode in results.
pub fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Eager => "pager",
        Mode::Credit => "pager-credit",
        Mode::Cold => "pager-cold",
        Mode::Report0 => "reporting-0",
        Mode::Report9 => "reporting-9",
        Mode::Off => "no-return",
    }
}
