//! The one form of every result.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Serialize, Serializer};

/// What the numbers of a row count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Ns,
    /// Microseconds.
    #[serde(rename = "us")]
    Us,
    #[serde(rename = "bytes")]
    Bytes,
    /// Millions of bytes a second; more is better.
    #[serde(rename = "MB/s")]
    MbPerSecond,
    /// Thousands of millions of bytes a second; more is better.
    #[serde(rename = "GB/s")]
    GbPerSecond,
    /// How many times as fast; more is better.
    #[serde(rename = "x")]
    Times,
    /// Hundredths of what is right.
    #[serde(rename = "%")]
    Percent,
    /// So many; more is better.
    #[serde(rename = "count")]
    Count,
}

impl Unit {
    /// Whether larger values are better ones.
    pub fn more_is_better(self) -> bool {
        matches!(self, Self::MbPerSecond | Self::GbPerSecond | Self::Times | Self::Count)
    }
}

/// The parameter that says what was best where more is better.
const MAX: &str = "max";

/// One figure of one subject.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub bench: String,
    pub subject: String,
    pub unit: Unit,
    #[serde(serialize_with = "number")]
    pub min: f64,
    #[serde(serialize_with = "number")]
    pub median: f64,
    /// Number of samples.
    pub n: usize,
    /// What else is to know: how it was run, and `max` where more is better.
    pub params: BTreeMap<&'static str, String>,
}

/// Whole numbers without a fraction, others with as many digits as mean something.
fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    let rounded = (value * 1000.0).round() / 1000.0;
    if rounded.fract() == 0.0 && rounded.abs() < 1e15 {
        serializer.serialize_i64(rounded as i64)
    } else {
        serializer.serialize_f64(rounded)
    }
}

impl Row {
    /// The row of `samples`; `None` when there are none.
    pub fn of(
        bench: impl Into<String>,
        subject: impl ToString,
        unit: Unit,
        samples: &[f64],
        params: &[(&'static str, String)],
    ) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let mut params: BTreeMap<_, _> = params.iter().cloned().collect();
        if unit.more_is_better() {
            params.insert(MAX, format!("{:.3}", sorted.last()?));
        }
        Some(Self {
            bench: bench.into(),
            subject: subject.to_string(),
            unit,
            min: *sorted.first()?,
            median: *sorted.get(sorted.len() / 2)?,
            n: sorted.len(),
            params,
        })
    }

    /// The value that the least disturbed round gave.
    fn best(&self) -> f64 {
        let max = self.params.get(MAX).and_then(|text| text.parse().ok());
        max.unwrap_or(self.min)
    }
}

/// A number for people.
pub fn human(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Us => human(Unit::Ns, value * 1e3),
        Unit::Ns if value < 1e4 => format!("{value:.0} ns"),
        Unit::Ns if value < 1e6 => format!("{:.1} us", value / 1e3),
        Unit::Ns => format!("{:.2} ms", value / 1e6),
        Unit::Bytes if value < 1e5 => format!("{value:.0} B"),
        Unit::Bytes => format!("{:.2} MiB", value / f64::from(1 << 20)),
        Unit::MbPerSecond => format!("{value:.0} MB/s"),
        Unit::GbPerSecond => format!("{value:.2} GB/s"),
        Unit::Times => format!("{value:.2} x"),
        Unit::Percent => format!("{value:.2} %"),
        Unit::Count => format!("{value:.0}"),
    }
}

/// Rows as a table; the ratio is that of a row's best to the first subject's under the same load.
pub fn table(rows: &[Row]) -> String {
    let names: Vec<String> = rows.iter().map(|row| name(row, rows)).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max(24);
    let mut text = format!(
        "{:<width$} {:<23} {:>12} {:>12} {:>6} {:>8}\n",
        "BENCH", "SUBJECT", "BEST", "MEDIAN", "N", "RATIO"
    );
    // By benches, the subject that others are compared with.
    let mut first: BTreeMap<&str, &Row> = BTreeMap::new();
    for (row, name) in rows.iter().zip(&names) {
        let first = first.entry(&row.bench).or_insert(row);
        if row.subject == first.subject {
            // It comes again with the next load.
            *first = row;
        }
        let first = first.best();
        let ratio = if first > 0.0 { format!("{:.2}", row.best() / first) } else { String::new() };
        let (best, median) = (human(row.unit, row.best()), human(row.unit, row.median));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{name:<width$} {:<23} {best:>12} {median:>12} {:>6} {ratio:>8}",
            row.subject, row.n
        );
    }
    text
}

/// A row's bench, and what tells it from others of its bench and subject.
fn name(row: &Row, rows: &[Row]) -> String {
    let alike = |other: &&Row| other.bench == row.bench && other.subject == row.subject;
    let mut name = row.bench.clone();
    for (key, value) in row.params.iter().filter(|(key, _)| **key != MAX) {
        let differs = |other: &Row| other.params.get(key).is_some_and(|other| other != value);
        if rows.iter().filter(alike).any(differs) {
            // As above.
            let _ = write!(name, " {key}={value}");
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_minimum_and_the_median() {
        let row = Row::of("b", "native", Unit::Us, &[5.0, 1.0, 9.0], &[]).unwrap();
        assert_eq!((row.min, row.median, row.n), (1.0, 5.0, 3));
        assert_eq!(Row::of("b", "native", Unit::Us, &[], &[]), None);
    }

    #[test]
    fn json_has_the_fields_that_scripts_read() {
        let params = [("command", "true".to_owned())];
        let row = Row::of("b", "para-aspace", Unit::Bytes, &[7.0], &params).unwrap();
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            r#"{"bench":"b","subject":"para-aspace","unit":"bytes","min":7,"median":7,"n":1,"params":{"command":"true"}}"#
        );
        let row = Row::of("b", "native", Unit::Times, &[1.2345, 2.0], &[]).unwrap();
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            r#"{"bench":"b","subject":"native","unit":"x","min":1.235,"median":2,"n":2,"params":{"max":"2.000"}}"#
        );
    }

    #[test]
    fn ratios_are_of_the_best_to_the_first_subject() {
        let row = |subject, unit, values: &[f64]| Row::of("b", subject, unit, values, &[]).unwrap();
        let times = [row("native", Unit::Us, &[50.0, 90.0]), row("other", Unit::Us, &[100.0])];
        assert!(table(&times).contains("2.00"), "{}", table(&times));
        let rates = [row("native", Unit::Times, &[1.0, 2.0]), row("other", Unit::Times, &[1.0])];
        assert!(table(&rates).contains("0.50"), "{}", table(&rates));
    }

    #[test]
    fn ratios_are_of_one_load_which_the_table_names() {
        let row = |bench, subject, n: &str, value: f64| {
            Row::of(bench, subject, Unit::Us, &[value], &[("n", n.to_owned()), ("of", "2".into())])
                .unwrap()
        };
        let rows = [
            row("b", "native", "64", 10.0),
            row("b", "other", "64", 15.0),
            row("c", "native", "64", 9.0),
            row("b", "native", "128", 20.0),
            row("b", "other", "128", 50.0),
        ];
        let table = table(&rows);
        let (heads, lines) = table.split_once('\n').unwrap();
        assert!(heads.starts_with("BENCH") && heads.ends_with("RATIO"), "{heads}");
        let lines: Vec<Vec<&str>> =
            lines.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), rows.len());
        let names = ["b n=64", "b n=64", "c native", "b n=128", "b n=128"];
        for ((words, name), ratio) in
            lines.iter().zip(names).zip(["1.00", "1.50", "1.00", "1.00", "2.50"])
        {
            assert_eq!(words[..2].join(" "), name);
            assert_eq!(words.last(), Some(&ratio), "{words:?}");
        }
    }

    #[test]
    fn numbers_are_shown_in_the_unit_that_fits() {
        let shown = |ns| human(Unit::Ns, ns);
        assert_eq!([shown(97.4), shown(17_300.0), shown(2.5e6)], ["97 ns", "17.3 us", "2.50 ms"]);
        assert_eq!(human(Unit::Us, 1500.0), "1.50 ms");
        assert_eq!([5e3, 5e6].map(|bytes| human(Unit::Bytes, bytes)), ["5000 B", "4.77 MiB"]);
    }
}
