//! Lines over time and distributions, as SVG documents.

use std::fmt::Write;

use super::run::Run;

const LEFT_PX: f64 = 60.0;
const TOP_PX: f64 = 30.0;
const WIDTH_PX: f64 = 640.0;
const HEIGHT_PX: f64 = 300.0;
const COLOURS: [&str; 6] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#555555"];
pub const MIB: f64 = (1 << 20) as f64;

/// As (x, y), none negative.
pub type Points = Vec<(f64, f64)>;

/// What each subject held under one load, and what was used in the first of them.
pub fn over_time(runs: &[Run]) -> String {
    let mut lines: Vec<(&str, Points)> = Vec::new();
    for run in runs {
        let held = run.samples.iter().map(|sample| (run.seconds(sample), sample.held / MIB));
        lines.push((run.subject, held.collect()));
    }
    if let Some(run) = runs.first() {
        let used = run.samples.iter().map(|sample| (run.seconds(sample), sample.used / MIB));
        lines.push(("used", used.collect()));
    }
    let title = runs.first().map_or("", |run| run.load.as_str());
    lines_of(&format!("{title}: MiB held by the host, over seconds"), &lines)
}

/// Each line with its name, from (0, 0) to the largest values of all.
pub fn lines_of(title: &str, lines: &[(&str, Points)]) -> String {
    draw(title, lines, |value| value)
}

/// Which share of all samples has no more than an overhead, for each subject.
pub fn distribution(runs: &[Run]) -> String {
    let mut overheads: Vec<(&str, Vec<f64>)> = Vec::new();
    for run in runs {
        match overheads.iter_mut().find(|(subject, _)| *subject == run.subject) {
            Some((_, values)) => values.extend(run.overheads()),
            None => overheads.push((run.subject, run.overheads())),
        }
    }
    let lines: Vec<(&str, Points)> =
        overheads.into_iter().map(|(subject, values)| (subject, cumulated(values))).collect();
    draw(
        "share of samples in percent, over the overhead in percent (1 + it, logarithmic)",
        &lines,
        |x| (1.0 + x.max(0.0)).log10(),
    )
}

fn cumulated(mut values: Vec<f64>) -> Points {
    values.sort_unstable_by(f64::total_cmp);
    let count = values.len() as f64;
    let share = |(at, value)| (value, (at + 1) as f64 / count * 100.0);
    values.into_iter().enumerate().map(share).collect()
}

/// Draws `lines`, with `scale` along the x axis.
fn draw(title: &str, lines: &[(&str, Points)], scale: impl Fn(f64) -> f64) -> String {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let x_max = points().map(|(x, _)| *x).fold(f64::MIN_POSITIVE, f64::max);
    let y_max = points().map(|(_, y)| *y).fold(f64::MIN_POSITIVE, f64::max);
    let at = |(x, y): (f64, f64)| {
        let right = scale(x) / scale(x_max) * WIDTH_PX;
        (LEFT_PX + right, TOP_PX + (1.0 - y / y_max) * HEIGHT_PX)
    };
    let mut body = String::new();
    text(&mut body, LEFT_PX, TOP_PX - 12.0, "#000000", title);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        grid(&mut body, at((0.0, y_max * share)).1, &format!("{:.0}", y_max * share));
    }
    text(&mut body, LEFT_PX, TOP_PX + HEIGHT_PX + 16.0, "#000000", "0");
    let last = format!("{x_max:.1}");
    text(&mut body, LEFT_PX + WIDTH_PX - 40.0, TOP_PX + HEIGHT_PX + 16.0, "#000000", &last);
    for (index, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        line(&mut body, points.iter().map(|point| at(*point)), colour);
        text(
            &mut body,
            LEFT_PX + WIDTH_PX + 10.0,
            TOP_PX + 16.0 * (index + 1) as f64,
            colour,
            name,
        );
    }
    document(&body)
}

// Writing to a string cannot fail.
fn grid(body: &mut String, y: f64, label: &str) {
    let right = LEFT_PX + WIDTH_PX;
    let _ = writeln!(
        body,
        "<line x1=\"{LEFT_PX}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>"
    );
    text(body, 10.0, y + 4.0, "#000000", label);
}

fn line(body: &mut String, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
    let mut path = String::new();
    for (x, y) in points {
        let _ = write!(path, "{x:.1},{y:.1} ");
    }
    let _ = writeln!(
        body,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>",
        path.trim_end()
    );
}

fn text(body: &mut String, x: f64, y: f64, colour: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{words}</text>");
}

fn document(body: &str) -> String {
    let (width, height) = (LEFT_PX + WIDTH_PX + 110.0, TOP_PX + HEIGHT_PX + 30.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::run::tests::run;
    use super::*;

    #[test]
    fn a_line_goes_from_corner_to_corner() {
        let chart = over_time(&[run("pager", &[(MIB, 0.0), (0.0, MIB)])]);
        // Held falls from the top to the bottom; used does the opposite.
        assert!(chart.contains("points=\"60.0,30.0 700.0,330.0\""), "{chart}");
        assert!(chart.contains("points=\"60.0,330.0 700.0,30.0\""), "{chart}");
        assert!(chart.contains(">pager<") && chart.contains(">used<"), "{chart}");
    }

    #[test]
    fn a_distribution_has_all_samples_of_a_subject() {
        let runs = [run("a<b", &[(1.0, 1.0), (10.0, 1.0)]), run("a<b", &[(1.0, 1.0), (1.0, 1.0)])];
        let chart = distribution(&runs);
        assert_eq!(chart.matches("<polyline").count(), 1);
        // Three of four at no overhead, the last at 900 percent.
        assert!(chart.contains("60.0,105.0 700.0,30.0\""), "{chart}");
        assert!(chart.contains("a&lt;b"), "{chart}");
    }
}
