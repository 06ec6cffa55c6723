//! Health checks: a program that is run in a cell now and then, and what its ends say of the cell.
//!
//! The words, the defaults and the rules are docker's. A cell is `starting` until a check ends
//! with 0, which makes it `healthy`; so many failures in a row make it `unhealthy`. Failures within
//! the start period do not count while it is starting.

use std::collections::VecDeque;
use std::time::Duration;

use exocell_agent::{Exec, REQUEST_BYTES_MAX, Request};
use exocell_images::Healthcheck;
use serde::{Deserialize, Serialize};

/// What is taken where neither the operator nor the image says.
const INTERVAL: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(30);
const START_INTERVAL: Duration = Duration::from_secs(5);
const RETRIES: u32 = 3;
/// Checks that are remembered, and how much of what each wrote, in bytes.
const LOG_MAX: usize = 5;
pub(crate) const OUTPUT_BYTES_MAX: usize = 4096;
/// The shortest time that docker takes, in nanoseconds.
const NANOS_MIN: i64 = 1_000_000;
/// The exit code of a check that could not be run, or not to its end.
pub(crate) const NO_EXIT_CODE: i32 = -1;

/// What the last checks say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    #[default]
    Starting,
    Healthy,
    Unhealthy,
}

impl Condition {
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }

    /// As docker shows it behind how long a container is up.
    pub fn shown(self) -> &'static str {
        match self {
            Self::Starting => "health: starting",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// One check that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Milliseconds since the epoch.
    pub start_ms: u64,
    pub end_ms: u64,
    pub exit_code: i32,
    pub output: String,
}

/// What is known of a cell's health.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub status: Condition,
    pub failing_streak: u32,
    /// The newest last.
    pub log: VecDeque<Probe>,
}

impl Health {
    /// Takes the outcome of a check that began so long after the program; whether that changes the
    /// status.
    pub(crate) fn add(&mut self, check: &Check, probe: Probe, since_start: Duration) -> bool {
        let before = self.status;
        let forgiven = before == Condition::Starting && since_start < check.start_period;
        match probe.exit_code {
            0 => (self.status, self.failing_streak) = (Condition::Healthy, 0),
            _ if forgiven => {}
            _ => {
                self.failing_streak = self.failing_streak.saturating_add(1);
                if self.failing_streak >= check.retries {
                    self.status = Condition::Unhealthy;
                }
            }
        }
        if self.log.len() == LOG_MAX {
            self.log.pop_front();
        }
        self.log.push_back(probe);
        self.status != before
    }

    /// Whether it says what `before` said, but for the times.
    pub(crate) fn is_as(&self, before: &Self) -> bool {
        let said = |health: &Self| {
            let newest = health.log.back().map(|probe| (probe.exit_code, probe.output.clone()));
            (health.status, health.failing_streak, health.log.len(), newest)
        };
        said(self) == said(before)
    }
}

/// What happens with the checks of a cell, as it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum News {
    Began,
    Ended { exit_code: i32 },
    Became(Condition),
}

/// A check that is carried out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    pub exec: Exec,
    pub interval: Duration,
    pub timeout: Duration,
    pub start_period: Duration,
    pub start_interval: Duration,
    pub retries: u32,
}

impl Check {
    /// The check that `wanted` asks for, as a program like `beside`; its line goes to `shell`.
    ///
    /// # Errors
    /// What makes no check.
    pub(crate) fn new(
        wanted: &Healthcheck,
        shell: &[String],
        beside: Exec,
    ) -> Result<Option<Self>, String> {
        validate(wanted)?;
        let args = match wanted.test.split_first() {
            None => return Ok(None),
            Some((kind, _)) if kind == "NONE" => return Ok(None),
            Some((kind, words)) if kind == "CMD" => words.to_vec(),
            Some((_, lines)) => [&shell_of(shell), lines].concat(),
        };
        let nanos = |nanos: i64, default| match u64::try_from(nanos) {
            Ok(nanos @ 1..) => Duration::from_nanos(nanos),
            _ => default,
        };
        let exec = Exec { args, tty: None, stdin: false, ..beside };
        let length = serde_json::to_vec(&Request::Exec(exec.clone())).map_or(0, |text| text.len());
        if length > REQUEST_BYTES_MAX {
            return Err(format!(
                "the health check and its environment are {length} bytes long, and a cell takes \
                 {REQUEST_BYTES_MAX}"
            ));
        }
        Ok(Some(Self {
            exec,
            interval: nanos(wanted.interval, INTERVAL),
            timeout: nanos(wanted.timeout, TIMEOUT),
            start_period: nanos(wanted.start_period, Duration::ZERO),
            start_interval: nanos(wanted.start_interval, START_INTERVAL),
            retries: u32::try_from(wanted.retries).ok().filter(|n| *n > 0).unwrap_or(RETRIES),
        }))
    }

    /// How long to wait before the next check, so long after the program's start.
    pub(crate) fn pause(&self, status: Condition, since_start: Duration) -> Duration {
        match status {
            Condition::Starting if since_start < self.start_period => self.start_interval,
            _ => self.interval,
        }
    }
}

/// What a line of words is handed to.
pub fn shell_of(shell: &[String]) -> Vec<String> {
    match shell {
        [] => ["/bin/sh", "-c"].map(str::to_owned).to_vec(),
        own => own.to_vec(),
    }
}

/// What an operator asks for, with the image's where he says nothing.
pub fn merged(own: Option<&Healthcheck>, image: Option<&Healthcheck>) -> Option<Healthcheck> {
    let (Some(own), Some(image)) = (own, image) else { return own.or(image).cloned() };
    if own.test == ["NONE"] {
        // Whatever else the image says.
        return Some(own.clone());
    }
    let number = |own: i64, image: i64| if own == 0 { image } else { own };
    Some(Healthcheck {
        test: if own.test.is_empty() { image.test.clone() } else { own.test.clone() },
        interval: number(own.interval, image.interval),
        timeout: number(own.timeout, image.timeout),
        start_period: number(own.start_period, image.start_period),
        start_interval: number(own.start_interval, image.start_interval),
        retries: number(own.retries, image.retries),
    })
}

/// Whether `wanted` can be carried out.
///
/// # Errors
/// In docker's words, what cannot.
pub fn validate(wanted: &Healthcheck) -> Result<(), String> {
    match wanted.test.split_first() {
        None => {}
        Some((kind, [])) if kind == "NONE" => {}
        Some((kind, [_, ..])) if kind == "CMD" => {}
        Some((kind, [_])) if kind == "CMD-SHELL" => {}
        Some((kind, rest)) => {
            return Err(format!(
                "a health check's Test is NONE, CMD with words or CMD-SHELL with one line; it is \
                 {kind} with {} words",
                rest.len()
            ));
        }
    }
    if wanted.test.iter().any(|word| word.contains('\0')) {
        return Err("a word of the health check holds a NUL byte; remove it".to_owned());
    }
    let times = [
        ("Interval", wanted.interval),
        ("Timeout", wanted.timeout),
        ("StartPeriod", wanted.start_period),
        ("StartInterval", wanted.start_interval),
    ];
    if let Some((name, _)) = times.iter().find(|(_, t)| *t != 0 && *t < NANOS_MIN) {
        return Err(format!("{name} in Healthcheck cannot be less than 1ms"));
    }
    match wanted.retries < 0 {
        true => Err("Retries in Healthcheck cannot be negative".to_owned()),
        false => Ok(()),
    }
}

/// Reads a time as docker's flags have it, in nanoseconds: `1m30s`, `1.5s`, `500ms`; a number
/// alone is seconds.
///
/// # Errors
/// A sentence that says what a time looks like.
pub fn read_time(text: &str) -> Result<i64, String> {
    let wrong = || format!("`{text}` is not a duration; write digits and a unit, like \"30s\"");
    let units = [
        ("ns", 1),
        ("us", 1000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("m", 60_000_000_000),
        ("h", 3_600_000_000_000_i64),
    ];
    let (mut rest, mut nanos) = (text, 0_i64);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, behind) = rest.split_at(end);
        let end = behind.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(end);
        let bare = unit.is_empty() && number.len() == text.len();
        let known = units.iter().find(|(name, _)| *name == if bare { "s" } else { unit });
        let (_, factor) = known.ok_or_else(wrong)?;
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || part.len() > 9 {
            return Err(wrong());
        }
        let parsed = |digits: &str| digits.parse::<i64>().map_err(|_| wrong());
        let part = parsed(&format!("{part:0<9}"))?;
        let part = i128::from(part) * i128::from(*factor) / 1_000_000_000;
        let sum = i128::from(parsed(whole)?) * i128::from(*factor) + part + i128::from(nanos);
        nanos = i64::try_from(sum).map_err(|_| wrong())?;
        rest = behind;
    }
    if text.is_empty() { Err(wrong()) } else { Ok(nanos) }
}

/// What a check wrote, as far as it is kept.
pub(crate) fn output(bytes: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    let end = text.floor_char_boundary(OUTPUT_BYTES_MAX);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn wanted(test: &str) -> Healthcheck {
        Healthcheck { test: words(test), ..Healthcheck::default() }
    }

    fn check(wanted: &Healthcheck) -> Check {
        Check::new(wanted, &[], Exec::default()).unwrap().unwrap()
    }

    fn probe(exit_code: i32) -> Probe {
        Probe { start_ms: 0, end_ms: 0, exit_code, output: String::new() }
    }

    #[test]
    fn a_check_that_ends_as_the_one_before_says_nothing_new() {
        let probe = |exit_code, output: &str, at| Probe {
            start_ms: at,
            end_ms: at + 1,
            exit_code,
            output: output.to_owned(),
        };
        let of = |probes: &[Probe]| Health {
            log: probes.iter().cloned().collect(),
            ..Health::default()
        };
        let before = of(&[probe(0, "", 1), probe(0, "a", 2)]);
        assert!(of(&[probe(0, "a", 2), probe(0, "a", 3)]).is_as(&before));
        assert!(!of(&[probe(0, "a", 2), probe(0, "b", 3)]).is_as(&before));
        assert!(!of(&[probe(0, "a", 2), probe(1, "a", 3)]).is_as(&before));
        assert!(!of(&[probe(0, "a", 2)]).is_as(&before));
        assert!(!Health { failing_streak: 1, ..before.clone() }.is_as(&before));
    }

    #[test]
    fn so_many_failures_in_a_row_are_unhealthy_and_one_success_is_healthy() {
        let check = check(&Healthcheck { retries: 2, ..wanted("CMD x") });
        let mut health = Health::default();
        let mut add = |code| health.add(&check, probe(code), Duration::ZERO);
        assert_eq!(
            [add(1), add(7), add(1), add(0), add(1), add(0)].map(u8::from),
            [0, 1, 0, 1, 0, 0]
        );
        assert_eq!((health.status, health.failing_streak), (Condition::Healthy, 0));
        assert_eq!(health.log.len(), LOG_MAX);
        assert_eq!(health.log[0].exit_code, 7);
    }

    #[test]
    fn failures_of_the_start_period_count_only_once_it_was_well() {
        let period = 1_000_000_000;
        let check = check(&Healthcheck { retries: 1, start_period: period, ..wanted("CMD x") });
        let mut health = Health::default();
        assert!(!health.add(&check, probe(1), Duration::from_millis(999)));
        assert_eq!(health.failing_streak, 0);
        assert!(health.add(&check, probe(0), Duration::ZERO));
        assert!(health.add(&check, probe(1), Duration::ZERO));
        assert_eq!(health.status, Condition::Unhealthy);
        let mut late = Health::default();
        assert!(late.add(&check, probe(NO_EXIT_CODE), Duration::from_secs(1)));
        assert_eq!(check.pause(Condition::Starting, Duration::ZERO), START_INTERVAL);
        assert_eq!(check.pause(Condition::Healthy, Duration::ZERO), INTERVAL);
        assert_eq!(check.pause(Condition::Starting, Duration::from_secs(1)), INTERVAL);
    }

    #[test]
    fn an_operator_says_what_the_image_does_not_or_takes_it_away() {
        let image = Healthcheck { interval: 5, retries: 9, ..wanted("CMD image") };
        let own = Healthcheck { interval: 7_000_000, ..Healthcheck::default() };
        let both = merged(Some(&own), Some(&image)).unwrap();
        assert_eq!((both.test, both.interval, both.retries), (words("CMD image"), 7_000_000, 9));
        assert_eq!(merged(None, Some(&image)), Some(image.clone()));
        let none = merged(Some(&wanted("NONE")), Some(&image)).unwrap();
        let valid = Healthcheck { interval: 0, ..none };
        assert_eq!(Check::new(&valid, &[], Exec::default()), Ok(None));
        let line = Healthcheck { test: vec!["CMD-SHELL".into(), "a b".into()], ..own };
        assert_eq!(check(&line).exec.args, ["/bin/sh", "-c", "a b"]);
        let by_image = Check::new(&line, &words("bash -ec"), Exec::default()).unwrap().unwrap();
        assert_eq!(by_image.exec.args, ["bash", "-ec", "a b"]);
    }

    #[test]
    fn what_makes_no_check_is_refused() {
        for (test, word) in [("curl x", "curl"), ("CMD", "0 words"), ("CMD-SHELL a b", "2 words")] {
            assert!(validate(&wanted(test)).unwrap_err().contains(word), "{test}");
        }
        let short = Healthcheck { timeout: 999_999, ..wanted("CMD x") };
        assert_eq!(validate(&short).unwrap_err(), "Timeout in Healthcheck cannot be less than 1ms");
        let negative = Healthcheck { retries: -1, ..wanted("CMD x") };
        assert!(validate(&negative).is_err() && validate(&wanted("CMD a\0")).is_err());
    }

    #[test]
    fn times_are_read_as_dockers_are() {
        for (text, nanos) in [
            ("30s", 30_000_000_000),
            ("1m30s", 90_000_000_000),
            ("1.5s", 1_500_000_000),
            ("500ms", 500_000_000),
            ("2", 2_000_000_000),
            ("0", 0),
            ("1h", 3_600_000_000_000),
        ] {
            assert_eq!(read_time(text), Ok(nanos), "{text}");
        }
        for text in ["", "s", "-1s", "1x", "1s2", "1..2s", "99999999999h", ".5s"] {
            assert!(read_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_a_check_wrote_is_cut_between_two_letters() {
        let long = output("é".repeat(5000).as_bytes());
        assert_eq!(long.len(), OUTPUT_BYTES_MAX);
        assert!(output(&[0xff; 5000]).len() <= OUTPUT_BYTES_MAX);
    }
}
