//! What one subject held and used under one load, and the rows of that.

use super::samples::Sample;
use super::subject;
use crate::Row;
use crate::options::ElasticityArgs;
use crate::row::Unit;

pub struct Run {
    pub load: String,
    pub subject: &'static str,
    pub samples: Vec<Sample>,
    /// Of the stamps.
    pub ticks_per_second: f64,
}

impl Run {
    /// Seconds from the first sample to `sample`.
    pub fn seconds(&self, sample: &Sample) -> f64 {
        let first = self.samples.first().map_or(sample.stamp, |first| first.stamp);
        (sample.stamp - first) as f64 / self.ticks_per_second
    }

    /// All samples, a line each.
    pub fn csv(&self) -> String {
        let mut text =
            "t_s,held_bytes,held_throughout_bytes,used_bytes,page_cache_bytes\n".to_owned();
        for sample in &self.samples {
            let Sample { held, held_throughout, used, cache, .. } = sample;
            let seconds = self.seconds(sample);
            text += &format!("{seconds:.6},{held:.0},{held_throughout:.0},{used:.0},{cache:.0}\n");
        }
        text
    }

    pub fn mean(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        self.samples.iter().map(of).sum::<f64>() / self.samples.len().max(1) as f64
    }

    /// All overheads that last in percent, the smallest first.
    pub fn overheads(&self) -> Vec<f64> {
        let overheads = self.samples.iter().map(Sample::lasting_overhead_percent);
        let mut overheads: Vec<f64> = overheads.collect();
        overheads.sort_unstable_by(f64::total_cmp);
        overheads
    }

    /// The overhead that `share` of the samples do not exceed.
    fn quantile(&self, share: f64) -> f64 {
        let overheads = self.overheads();
        let index = (overheads.len() as f64 * share) as usize;
        overheads.get(index.min(overheads.len().saturating_sub(1))).copied().unwrap_or(0.0)
    }

    /// The same with the first sample of each second: at 1 Hz, what lasts for less is
    /// mostly not seen.
    fn each_second(&self) -> Self {
        let mut next = 0.0;
        let first = |sample: &&Sample| {
            let at = self.seconds(sample);
            let is_first = at >= next;
            next = if is_first { at.floor() + 1.0 } else { next };
            is_first
        };
        let samples = self.samples.iter().filter(first).copied().collect();
        let Self { load, subject, ticks_per_second, .. } = self;
        Self { load: load.clone(), subject, samples, ticks_per_second: *ticks_per_second }
    }
}

/// Mean of the overhead, highest and 99th percentile of what of it lasts, the same at 1 Hz,
/// what is held and used, and what the Pager saves against the others; a sample of a row is
/// a run.
pub fn rows(group: &str, runs: &[Run], args: &ElasticityArgs) -> Vec<Row> {
    let mut subjects: Vec<&str> = Vec::new();
    for run in runs {
        if !subjects.contains(&run.subject) {
            subjects.push(run.subject);
        }
    }
    subjects.iter().flat_map(|subject| rows_of(group, subject, runs, args)).collect()
}

fn rows_of(group: &str, subject: &str, runs: &[Run], args: &ElasticityArgs) -> Vec<Row> {
    let own: Vec<&Run> = runs.iter().filter(|run| run.subject == subject).collect();
    let params = [
        ("memory", format!("{} MiB", args.memory_mib)),
        ("period", format!("{} ms", args.period_ms)),
        ("samples", own.iter().map(|run| run.samples.len()).sum::<usize>().to_string()),
    ];
    let row = |name: &str, unit, of: &dyn Fn(&Run) -> f64| {
        let values: Vec<f64> = own.iter().map(|run| of(run)).collect();
        Row::of(format!("{group}/{name}"), subject, unit, &values, &params)
    };
    let mut rows = vec![
        row("overhead_mean_percent", Unit::Percent, &|run| run.mean(Sample::overhead_percent)),
        row("overhead_p99_percent", Unit::Percent, &|run| run.quantile(0.99)),
        row("overhead_max_percent", Unit::Percent, &|run| run.quantile(1.0)),
        row("overhead_mean_1hz_percent", Unit::Percent, &|run| {
            run.each_second().mean(Sample::overhead_percent)
        }),
        row("overhead_p99_1hz_percent", Unit::Percent, &|run| run.each_second().quantile(0.99)),
        row("overhead_max_1hz_percent", Unit::Percent, &|run| run.each_second().quantile(1.0)),
        row("held_mean", Unit::Bytes, &|run| run.mean(|sample| sample.held)),
        row("used_mean", Unit::Bytes, &|run| run.mean(|sample| sample.used)),
        row("page_cache_mean", Unit::Bytes, &|run| run.mean(|sample| sample.cache)),
    ];
    if subject != subject::name(subject::MODES[0]) {
        rows.push(row("saved_by_pager_percent", Unit::Percent, &|run| saved(run, runs)));
    }
    rows.into_iter().flatten().collect()
}

/// How much less the Pager held than `other` under the same load, in percent.
fn saved(other: &Run, runs: &[Run]) -> f64 {
    let pager = subject::name(subject::MODES[0]);
    let same = runs.iter().find(|run| run.load == other.load && run.subject == pager);
    let held = |run: &Run| run.mean(|sample| sample.held);
    same.map_or(0.0, |pager| (1.0 - held(pager) / held(other)) * 100.0)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn run(subject: &'static str, held_and_used: &[(f64, f64)]) -> Run {
        let sample = |(at, &(held, used))| {
            let (stamp, held_throughout) = (100 + at as u64, held);
            Sample { stamp, held, held_throughout, used, cache: 1.0 }
        };
        let samples = held_and_used.iter().enumerate().map(sample).collect();
        Run { load: "load".to_owned(), subject, samples, ticks_per_second: 2.0 }
    }

    #[test]
    fn samples_become_lines_with_seconds() {
        let csv = run("pager", &[(8.0, 4.0), (4.0, 4.0)]).csv();
        assert_eq!(
            csv,
            "t_s,held_bytes,held_throughout_bytes,used_bytes,page_cache_bytes\n\
             0.000000,8,8,4,1\n0.500000,4,4,4,1\n"
        );
    }

    #[test]
    fn one_sample_of_each_second_is_the_first() {
        let seconds = |run: Run| -> Vec<f64> {
            let all = run.each_second();
            all.samples.iter().map(|sample| all.seconds(sample)).collect()
        };
        // Two a second, and none in the third.
        let mut run = run("pager", &[(1.0, 1.0); 7]);
        run.samples.drain(4..6);
        assert_eq!(seconds(run), [0.0, 1.0, 3.0]);
    }

    #[test]
    fn overheads_and_savings_are_percents() {
        let other = run("reporting-9", &[(8.0, 4.0), (4.0, 4.0)]);
        assert_eq!((other.quantile(0.5), other.mean(Sample::overhead_percent)), (100.0, 50.0));
        let runs = [run("pager", &[(4.5, 4.0), (4.5, 4.0)]), other];
        assert_eq!(saved(&runs[1], &runs), 25.0);
    }
}
