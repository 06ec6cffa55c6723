//! What the cells of a run used, drawn: a panel for each instance, all on the
//! same scales.

use std::fmt::Write;

use crate::trace::{Sample, Usage};

const WIDTH_PX: f64 = 720.0;
const PANEL_PX: f64 = 90.0;
/// Above a panel, for its words.
const HEAD_PX: f64 = 34.0;
const LEFT_PX: f64 = 10.0;
type Figure = fn(&Sample) -> u64;
const LINES: [(&str, Figure); 2] =
    [("#bb5566", |sample| sample.host_bytes), ("#4477aa", |sample| sample.guest_used_bytes)];

/// The plot of `runs`, by instance, as an SVG document.
pub fn svg(runs: &[(String, Usage)]) -> String {
    let most = |of: fn(&Usage) -> u64| runs.iter().map(|(_, usage)| of(usage)).max();
    let (ms_max, bytes_max) = (most(|u| u.wall_ms), most(|u| u.host_bytes_max));
    let scale = Scale {
        ms: ms_max.unwrap_or(0).max(1) as f64,
        bytes: bytes_max.unwrap_or(0).max(1) as f64,
    };
    let height = HEAD_PX + runs.len() as f64 * (HEAD_PX + PANEL_PX) + 10.0;
    let mut body = String::new();
    let legend = "memory over time: red what the host holds, blue what the guest uses";
    text(&mut body, 18.0, &format!("{legend}; {:.0} s wide", scale.ms / 1e3));
    for (at, (id, usage)) in runs.iter().enumerate() {
        panel(&mut body, HEAD_PX + at as f64 * (HEAD_PX + PANEL_PX), id, usage, &scale);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH_PX}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// What the width and the height of a panel stand for.
struct Scale {
    ms: f64,
    bytes: f64,
}

fn panel(body: &mut String, top: f64, id: &str, usage: &Usage, scale: &Scale) {
    text(body, top + 24.0, &format!("{id}: {}", words(usage)));
    let bottom = top + HEAD_PX + PANEL_PX;
    let width = WIDTH_PX - 2.0 * LEFT_PX;
    for (colour, of) in LINES {
        let mut points = String::new();
        for sample in &usage.samples {
            let x = LEFT_PX + sample.at_ms as f64 / scale.ms * width;
            let y = bottom - of(sample) as f64 / scale.bytes * PANEL_PX;
            // Writing to a string cannot fail.
            let _ = write!(points, "{x:.1},{y:.1} ");
        }
        let points = points.trim_end();
        let _ = writeln!(
            body,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
    }
    let right = LEFT_PX + width;
    let _ =
        writeln!(body, "<path d=\"M{LEFT_PX} {bottom}H{right}\" stroke=\"#999\" fill=\"none\"/>");
}

/// A usage in a line.
fn words(usage: &Usage) -> String {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let mut words = format!(
        "up in {:.2} s, {:.1} s in all, {:.1} s of CPU, {:.0} MiB at most",
        seconds(usage.start_ms),
        seconds(usage.wall_ms),
        seconds(usage.cpu_ms),
        usage.host_bytes_max as f64 / f64::from(1 << 20),
    );
    if let Some(percent) = usage.overhead_percent {
        let _ = write!(words, ", {percent:.2} % over what it used");
    }
    words
}

fn text(body: &mut String, y: f64, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, "<text x=\"{LEFT_PX}\" y=\"{y}\">{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_largest_run_fills_its_panel() {
        let sample = |at_ms, host_bytes| Sample {
            at_ms,
            host_bytes,
            guest_used_bytes: host_bytes / 2,
            held_bytes: 0,
            free: None,
            cpu_ns: 0,
        };
        let run = |most| Usage::of(vec![sample(0, 0), sample(1000, most)], 5, 1000);
        let plot = svg(&[("a<b".into(), run(100)), ("half".into(), run(50))]);
        assert!(plot.contains("a&lt;b") && plot.ends_with("</svg>\n"));
        // Heads of 34 and panels of 90: the first from 158 up to 68, the second to 237.
        assert!(plot.contains("points=\"10.0,158.0 710.0,68.0\""), "{plot}");
        assert!(plot.contains("points=\"10.0,282.0 710.0,237.0\""), "{plot}");
        assert!(svg(&[]).contains("</svg>"));
    }
}
