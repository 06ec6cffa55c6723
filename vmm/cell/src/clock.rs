//! Times as people and Docker's API write them.

use std::time::Duration;

use exocell_xgate::parse_duration;

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

/// Days from 1970-01-01 to a day of the calendar; `None` for none, and for one before.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let shifted = if month > 2 { month - 3 } else { month.checked_add(9)? };
    let year = year.checked_sub(u64::from(month <= 2))?;
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * shifted + 2) / 5 + day.checked_sub(1)?;
    let day_of_era = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    let days = (era * ERA_DAYS + day_of_era).checked_sub(DAYS_TO_EPOCH)?;
    // What the calendar does not have (February 30) is another day of it.
    let is_there = year < 9999 && date(days) == (year + u64::from(month <= 2), month, day);
    is_there.then_some(days)
}

/// Reads a point in time, in milliseconds since 1970: seconds since then, RFC 3339 (a date alone,
/// or one without a zone, is of UTC), or so long before `now_ms`, like 10m or 1h30m.
///
/// # Errors
/// A sentence that says what a time looks like.
pub fn parse_ms(text: &str, now_ms: u64) -> Result<u64, String> {
    let found = seconds(text).or_else(|| rfc3339(text)).or_else(|| before(text, now_ms));
    found.ok_or_else(|| {
        format!(
            "`{text}` is no time; write 10m for ten minutes ago, 2025-01-31T12:00:00Z, or seconds since 1970"
        )
    })
}

fn seconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let whole = number(whole)?.checked_mul(1000)?;
    whole.checked_add(millis(fraction)?)
}

/// Digits and nothing else.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// The first three digits of a fraction.
fn millis(fraction: &str) -> Option<u64> {
    number(fraction)?;
    number(&format!("{fraction:0<3}")[..3])
}

fn rfc3339(text: &str) -> Option<u64> {
    let (date, time) = text.split_once(['T', 't', ' ']).unwrap_or((text, ""));
    let [year, month, day] = numbers(date, '-')?;
    let days_ms = days(year, month, day)?.checked_mul(86_400_000)?;
    if time.is_empty() {
        return (date.len() == text.len()).then_some(days_ms);
    }
    let zone = time.find(['Z', 'z', '+', '-']).unwrap_or(time.len());
    let (time, zone) = time.split_at(zone);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] =
        numbers(time, ':').or_else(|| numbers(&format!("{time}:00"), ':'))?;
    if hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let of_day_ms = ((hour * 60 + minute) * 60 + second) * 1000 + millis(fraction)?;
    let local_ms = days_ms.checked_add(of_day_ms)?;
    let (sign, east) = match zone.split_at_checked(1) {
        None | Some(("Z" | "z", "")) => return Some(local_ms),
        Some((sign, east)) => (sign, east.split_once(':')?),
    };
    let east_ms = (number(east.0)? * 60 + number(east.1)?).checked_mul(60_000)?;
    if sign == "+" { local_ms.checked_sub(east_ms) } else { local_ms.checked_add(east_ms) }
}

fn numbers(text: &str, between: char) -> Option<[u64; 3]> {
    let all: Option<Vec<u64>> =
        text.split(between).map(|part| number(part).filter(|n| *n < 10_000)).collect();
    all?.try_into().ok()
}

/// Durations one behind the other.
fn before(text: &str, now_ms: u64) -> Option<u64> {
    let mut rest = text.trim();
    let mut ago = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let unit = &rest[digits..];
        let end = digits + unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
        ago += parse_duration(&rest[..end]).ok()?;
        rest = &rest[end..];
    }
    let ago = u64::try_from(ago.as_millis()).ok()?;
    (!text.is_empty()).then(|| now_ms.saturating_sub(ago))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_the_forms_that_people_write() {
        const NOW: u64 = 1_735_689_600_000;
        for (text, time_ms) in [
            ("12", 12_000),
            ("12.5", 12_500),
            ("1735689600.1239", NOW + 123),
            ("2025-01-01", NOW),
            ("2025-01-01T00:00:00Z", NOW),
            ("2025-01-01T01:00:00.25+01:00", NOW + 250),
            ("2024-12-31T19:30:00-04:30", NOW),
            ("2025-01-01T00:01", NOW + 60_000),
            ("2000-02-29T00:00:00.000000000Z", 951_782_400_000),
            ("10m", NOW - 600_000),
            ("1h30m", NOW - 5_400_000),
        ] {
            assert_eq!(parse_ms(text, NOW), Ok(time_ms), "{text}");
        }
        for bad in ["", "x", "-1", "1.x", "2025-02-30", "2025-13-01", "2025-01-01T25:00:00Z", "1d"]
        {
            assert!(parse_ms(bad, NOW).is_err(), "{bad}");
        }
        for time_ms in [1, 951_782_400_000, 1_709_251_199_999, 4_107_542_400_000] {
            assert_eq!(parse_ms(&rfc3339_ms(time_ms), NOW), Ok(time_ms));
        }
    }

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
