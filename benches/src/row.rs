//! The one form of every result.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use crate::Subject;

/// What the numbers of a row count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Microseconds.
    Us,
    Bytes,
}

/// One figure of one subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    pub bench: &'static str,
    pub subject: Subject,
    pub unit: Unit,
    pub min: u64,
    pub median: u64,
    /// Number of samples.
    pub n: usize,
    pub params: BTreeMap<&'static str, String>,
}

impl Row {
    /// The row of `samples`; `None` when there are none.
    pub fn of(
        bench: &'static str,
        subject: Subject,
        unit: Unit,
        samples: &[u64],
        params: &[(&'static str, String)],
    ) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        Some(Self {
            bench,
            subject,
            unit,
            min: *sorted.first()?,
            median: *sorted.get(sorted.len() / 2)?,
            n: sorted.len(),
            params: params.iter().cloned().collect(),
        })
    }
}

/// A number for people: milliseconds or MiB.
pub fn human(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Us => format!("{:.2} ms", value as f64 / 1e3),
        Unit::Bytes => format!("{:.2} MiB", value as f64 / f64::from(1 << 20)),
    }
}

/// Rows as a table; the ratio is that of the median to the `para-aspace` one.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<24} {:<12} {:>12} {:>12} {:>6} {:>8}\n",
        "BENCH", "SUBJECT", "MIN", "MEDIAN", "N", "RATIO"
    );
    for row in rows {
        let ours = rows.iter().find(|r| r.bench == row.bench && r.subject == Subject::ParaAspace);
        let ratio = ours.map_or_else(String::new, |ours| {
            format!("{:.2}", row.median as f64 / ours.median.max(1) as f64)
        });
        let (min, median) = (human(row.unit, row.min), human(row.unit, row.median));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<24} {:<12} {min:>12} {median:>12} {:>6} {ratio:>8}",
            row.bench, row.subject, row.n
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_minimum_and_the_median() {
        let row = Row::of("b", Subject::Native, Unit::Us, &[5, 1, 9], &[]).unwrap();
        assert_eq!((row.min, row.median, row.n), (1, 5, 3));
        assert_eq!(Row::of("b", Subject::Native, Unit::Us, &[], &[]), None);
    }

    #[test]
    fn json_has_the_fields_that_scripts_read() {
        let params = [("command", "true".to_owned())];
        let row = Row::of("b", Subject::ParaAspace, Unit::Bytes, &[7], &params).unwrap();
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            r#"{"bench":"b","subject":"para-aspace","unit":"bytes","min":7,"median":7,"n":1,"params":{"command":"true"}}"#
        );
    }

    #[test]
    fn ratios_are_to_our_own_median() {
        let row = |subject, value| Row::of("b", subject, Unit::Us, &[value], &[]).unwrap();
        let text = table(&[row(Subject::Native, 50), row(Subject::ParaAspace, 100)]);
        assert!(text.contains("0.50") && text.contains("1.00"), "{text}");
    }
}
