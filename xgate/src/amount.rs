//! Sizes ("256M") and durations ("30s") as people write them.

use std::time::Duration;

const UNITS: [(&str, u64); 5] =
    [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("B", 1)];

/// Reads a size in bytes: digits and an optional unit of B, K, M, G or T (powers of 1024;
/// `k`, `KB` and `KiB` mean the same).
///
/// # Errors
/// A sentence that says what a size looks like.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write digits and a unit, like \"256M\"");
    let (digits, unit) = split(text);
    let unit = unit.to_ascii_uppercase();
    let unit = match unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')) {
        Some("") | None => unit.as_str(),
        Some(short) => short,
    };
    let factor = match unit {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1,
    };
    let count: u64 = digits.parse().map_err(|_| wrong())?;
    count.checked_mul(factor).ok_or_else(|| format!("`{text}` is more bytes than 64 bits hold"))
}

/// Reads a duration: digits and one of ms, s, m, h (plain digits are seconds).
///
/// # Errors
/// A sentence that says what a duration looks like.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a duration; write digits and a unit, like \"30s\"");
    let (digits, unit) = split(text);
    let count: u64 = digits.parse().map_err(|_| wrong())?;
    let millis_per_unit = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    // A deadline must fit the nanoseconds of a quota.
    let millis = count.checked_mul(millis_per_unit).filter(|millis| *millis <= MILLIS_MAX);
    millis.map(Duration::from_millis).ok_or_else(|| format!("`{text}` is longer than 500 years"))
}

const MILLIS_MAX: u64 = u64::MAX / 1_000_000;

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    (digits, unit.trim_start())
}

/// Writes a size in the largest unit that divides it.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let unit = UNITS.iter().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
    match unit {
        Some((name, factor)) => format!("{}{name}", bytes / factor),
        None => "0B".to_owned(),
    }
}

/// Writes a duration so that [`parse_duration`] reads the same back (to the millisecond).
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, factor) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis > 0 && millis.is_multiple_of(factor) {
            return format!("{}{unit}", millis / factor);
        }
    }
    format!("{millis}ms")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("7B", 7),
            ("1k", 1024),
            ("256M", 256 << 20),
            ("2GiB", 2 << 30),
            ("3 MB", 3 << 20),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in
            ["", "M", "-1", "1.5G", "10Q", "1e3", "16777216T", "99999999999999999999", "1iB", "١M"]
        {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_read() {
        for (text, millis) in
            [("250ms", 250), ("30s", 30_000), ("30", 30_000), ("2m", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_duration_is_refused() {
        for text in ["", "s", "-1s", "1.5s", "10d", "18446744073709551615h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn sizes_survive_a_round_trip(bytes: u64) {
            prop_assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes));
        }

        #[test]
        fn durations_survive_a_round_trip(millis in 0..MILLIS_MAX) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = parse_bytes(&text);
            let _ = parse_duration(&text);
        }
    }
}
