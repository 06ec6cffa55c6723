//! Medians as horizontal bars, one group a benchmark, each on its own scale.

use std::fmt::Write;

use crate::Row;
use crate::row::human;

const LABEL_PX: u64 = 140;
const BAR_MAX_PX: u64 = 420;
const LINE_PX: u64 = 20;
const WIDTH_PX: u64 = LABEL_PX + BAR_MAX_PX + 120;

/// The plot of `rows` as an SVG document.
pub fn svg(rows: &[Row]) -> String {
    let (mut body, mut y) = (String::new(), 10);
    for group in rows.chunk_by(|a, b| a.bench == b.bench) {
        let longest = group.iter().map(|row| row.median).fold(f64::MIN_POSITIVE, f64::max);
        y += LINE_PX;
        if let Some(first) = group.first() {
            text(&mut body, 10, y, "bold", &first.bench);
        }
        for row in group {
            y += LINE_PX;
            bar(&mut body, y, row, longest);
        }
    }
    let height = y + LINE_PX;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH_PX}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

fn bar(body: &mut String, y: u64, row: &Row, longest: f64) {
    let length = ((row.median / longest * BAR_MAX_PX as f64) as u64).max(1);
    text(body, 10, y, "normal", &row.subject);
    // Writing to a string cannot fail.
    let _ = writeln!(
        body,
        "<rect x=\"{LABEL_PX}\" y=\"{}\" width=\"{length}\" height=\"14\" fill=\"#4477aa\"/>",
        y - 11
    );
    text(body, LABEL_PX + length + 6, y, "normal", &human(row.unit, row.median));
}

fn text(body: &mut String, x: u64, y: u64, weight: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" font-weight=\"{weight}\">{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unit;

    #[test]
    fn the_longest_bar_has_the_full_length_and_the_others_their_share() {
        let row =
            |subject, value| Row::of("a<b", subject, Unit::Us, &[f64::from(value)], &[]).unwrap();
        let plot = svg(&[row("native", 10), row("other", 20)]);
        assert!(plot.contains("width=\"420\"") && plot.contains("width=\"210\""), "{plot}");
        assert!(plot.contains("a&lt;b") && plot.ends_with("</svg>\n"));
    }
}
