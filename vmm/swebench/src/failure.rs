//! Why a run came to nothing, as far as its log tells: the machine's fault or
//! perhaps the patch's. It is advice; it changes no verdict.

/// Whose fault it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// No patch of sources causes it.
    Environment,
    /// The machine or the patch.
    Ambiguous,
}

/// A reason, and what a log says then; a pattern with `\n` on both sides is a
/// whole line. The first that fits is taken.
const SIGNS: [(&str, Tier, &[&str]); 7] = [
    (
        "browser_launch_failed",
        Tier::Environment,
        &["Failed to launch", "Failed to connect to the bus"],
    ),
    (
        "display_unavailable",
        Tier::Environment,
        &["cannot open display", "Missing X server", "unable to open X display"],
    ),
    (
        "out_of_memory",
        Tier::Environment,
        &["Cannot allocate memory", "OutOfMemoryError", "\nKilled\n"],
    ),
    (
        "container_unavailable",
        Tier::Environment,
        &["Error response from daemon", "Cannot connect to the Docker daemon"],
    ),
    (
        "network_unreachable",
        Tier::Environment,
        &["Could not resolve host", "Temporary failure in name resolution"],
    ),
    (
        "missing_module",
        Tier::Ambiguous,
        &["Cannot find module", "MODULE_NOT_FOUND", "ModuleNotFoundError"],
    ),
    ("no_tests_collected", Tier::Ambiguous, &["no tests ran", "collected 0 items"]),
];

/// The reason that `log` names.
pub fn classify(log: &str) -> Option<(&'static str, Tier)> {
    let lines = format!("\n{log}\n");
    let fits = |patterns: &[&str]| patterns.iter().any(|pattern| lines.contains(pattern));
    let found = SIGNS.iter().find(|(_, _, patterns)| fits(patterns));
    let found = found.map(|(reason, tier, _)| (*reason, *tier));
    found.or_else(|| timed_out(log).then_some(("tests_timed_out", Tier::Ambiguous)))
}

/// `Timeout error: 5 seconds exceeded`
fn timed_out(log: &str) -> bool {
    log.split("Timeout error: ").skip(1).any(|rest| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && rest[digits..].starts_with(" seconds exceeded")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_name_reasons() {
        for (log, reason) in [
            ("x\nKilled\ny", Some("out_of_memory")),
            ("not Killed here", None),
            ("ModuleNotFoundError: x\nCannot allocate memory", Some("out_of_memory")),
            ("Timeout error: 30 seconds exceeded.", Some("tests_timed_out")),
            ("Timeout error: x seconds exceeded.", None),
            ("collected 0 items", Some("no_tests_collected")),
        ] {
            assert_eq!(classify(log).map(|(reason, _)| reason), reason, "{log}");
        }
        assert_eq!(classify("Could not resolve host").unwrap().1, Tier::Environment);
    }
}
