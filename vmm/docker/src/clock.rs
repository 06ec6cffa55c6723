//! Times as the API writes them.

/// Days from 0000-03-01 to 1970-01-01 in the proleptic Gregorian calendar.
const DAYS_TO_EPOCH: u64 = 719_468;
/// Days of 400 years.
const ERA_DAYS: u64 = 146_097;
/// What the API calls never.
pub const NEVER: &str = "0001-01-01T00:00:00Z";

/// Milliseconds since 1970 in the form of RFC 3339; 0 is [`NEVER`].
pub fn rfc3339_ms(time_ms: u64) -> String {
    if time_ms == 0 {
        return NEVER.to_owned();
    }
    let (seconds, millis) = (time_ms / 1000, time_ms % 1000);
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}000000Z")
}

/// Year, month and day of the day so many days after 1970-01-01. Years begin
/// in March here, so that a leap day is the last of its year.
fn date(days: u64) -> (u64, u64, u64) {
    let day = days + DAYS_TO_EPOCH;
    let (era, of_era) = (day / ERA_DAYS, day % ERA_DAYS);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (time_ms, text) in [
            (0, NEVER),
            (1, "1970-01-01T00:00:00.001000000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000000000Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999000000Z"),
            (1_735_689_600_000, "2025-01-01T00:00:00.000000000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000000000Z"),
        ] {
            assert_eq!(rfc3339_ms(time_ms), text);
        }
    }
}
