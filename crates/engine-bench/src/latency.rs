//! Latencies: collected as plain durations, kept as hdrhistograms of microseconds.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::error::BenchError;

/// The longest latency that a histogram tells from a longer one, as in the engine's own.
const MAX_MICROS: u64 = engine::Timings::MAX_MICROS;
/// Significant decimal digits of a latency.
const DIGITS: u8 = 3;
/// Values that a bucket of hdrhistogram tells apart at that many digits: the next power of two after 2 * 10^3.
const SUB_BUCKETS: u32 = 2048;

/// Latencies of one kind.
#[derive(Debug, Clone)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        Self(
            Histogram::new_with_bounds(1, MAX_MICROS, DIGITS)
                .expect("the bounds are constants that it accepts"),
        )
    }
}

impl Latency {
    /// Each duration as it is: for what happens when it happens.
    #[must_use]
    pub fn each(durations: impl IntoIterator<Item = Duration>) -> Self {
        let mut latency = Self::default();
        for duration in durations {
            latency.0.saturating_record(micros(duration));
        }
        latency
    }

    /// Without coordinated omission: who had to wait for several intervals would have asked several times in them, and
    /// each of those askers is counted with the wait that was left to it.
    #[must_use]
    pub fn paced(durations: impl IntoIterator<Item = Duration>, interval: Duration) -> Self {
        let mut latency = Self::default();
        for duration in durations {
            let (mut left, interval) = (micros(duration).min(MAX_MICROS), micros(interval));
            latency.0.saturating_record(left);
            while left >= 2 * interval {
                left -= interval;
                latency.0.saturating_record(left);
            }
        }
        latency
    }

    /// What somebody else has recorded, in microseconds.
    #[must_use]
    pub fn of(histogram: Histogram<u64>) -> Self {
        Self(histogram)
    }

    /// Takes in another one's records.
    pub fn add(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    /// The mean of what was recorded.
    #[must_use]
    pub fn mean(&self) -> Duration {
        Duration::from_secs_f64(self.0.mean() / 1e6)
    }

    /// Its percentiles, in milliseconds.
    #[must_use]
    pub fn percentiles(&self) -> Percentiles {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        Percentiles {
            count: self.0.len(),
            mean: self.0.mean() / 1e3,
            min: self.0.min() as f64 / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.0.max() as f64 / 1e3,
        }
    }

    /// Writes the percentile distribution as an `.hgrm` file, in milliseconds, as the histogram plotters read it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_hgrm(&self, path: &Path) -> Result<(), BenchError> {
        let fail =
            |error: std::io::Error| BenchError::Write { path: path.to_owned(), reason: error.to_string() };
        let mut out = Vec::new();
        self.hgrm(&mut out).map_err(fail)?;
        std::fs::write(path, out).map_err(fail)
    }

    fn hgrm(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(
            out,
            "{:>12} {:>14} {:>10} {:>14}\n",
            "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
        )?;
        let mut total = 0;
        for step in self.0.iter_quantiles(5) {
            total += step.count_since_last_iteration();
            let (value, quantile) = (step.value_iterated_to() as f64 / 1e3, step.quantile_iterated_to());
            write!(out, "{value:12.3} {quantile:14.12} {total:10}")?;
            if quantile < 1.0 { writeln!(out, " {:14.2}", 1.0 / (1.0 - quantile))? } else { writeln!(out)? }
        }
        let (mean, deviation) = (self.0.mean() / 1e3, self.0.stdev() / 1e3);
        writeln!(out, "#[Mean    = {mean:12.3}, StdDeviation   = {deviation:12.3}]")?;
        writeln!(
            out,
            "#[Max     = {:12.3}, Total count    = {:12}]",
            self.0.max() as f64 / 1e3,
            self.0.len()
        )?;
        writeln!(out, "#[Buckets = {:12}, SubBuckets     = {SUB_BUCKETS:12}]", self.0.buckets())
    }
}

/// What a report says of a latency, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Percentiles {
    pub count: u64,
    pub mean: f64,
    pub min: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// The middle one of some durations, or the mean of the two; zero of none.
#[must_use]
pub fn median(durations: &[Duration]) -> Duration {
    Duration::from_secs_f64(middle(durations.iter().map(Duration::as_secs_f64)).unwrap_or_default())
}

/// The middle one of some values, or the mean of the two; `None` of none.
#[must_use]
pub fn middle(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<_> = values.into_iter().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    Some(if sorted.len() % 2 == 1 { upper } else { sorted[half - 1].midpoint(upper) })
}

/// The mean of some durations; zero of none. The interval of [`Latency::paced`]: what is sampled ahead is handed over in
/// bursts, so that a typical wait is far shorter than the pace.
#[must_use]
pub fn mean(durations: &[Duration]) -> Duration {
    durations.iter().sum::<Duration>() / durations.len().max(1) as u32
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros().try_into().unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_stall_counts_for_all_who_would_have_asked_in_it() {
        let mut durations = vec![MS; 99];
        durations.push(100 * MS);
        let (plain, paced) = (Latency::each(durations.clone()), Latency::paced(durations, MS));
        assert_eq!(plain.percentiles().count, 100);
        // The stall of 100 intervals hides 99 askers.
        assert_eq!(paced.percentiles().count, 199);
        assert!(plain.percentiles().p90 < 1.1, "{:?}", plain.percentiles());
        assert!(paced.percentiles().p90 > 75.0, "{:?}", paced.percentiles());
    }

    #[test]
    fn an_hgrm_ends_with_the_whole_count() {
        let mut latency = Latency::each((1..=1000).map(|n| n * MS));
        latency.add(&Latency::each([2 * MS]));
        let mut out = Vec::new();
        latency.hgrm(&mut out).expect("a Vec takes everything");
        let text = String::from_utf8(out).expect("it is ASCII");
        let last = text.lines().rfind(|line| !line.starts_with('#')).expect("there is a table");
        let columns: Vec<_> = last.split_whitespace().collect();
        assert_eq!(columns[1..], ["1.000000000000", "1001"], "{text}");
        assert!(text.contains("#[Max     =     1000."), "{text}");
    }

    #[test]
    fn middle_and_mean_of_durations() {
        let durations = [9 * MS, MS, 2 * MS];
        assert_eq!((median(&durations), mean(&durations)), (2 * MS, 4 * MS));
        assert_eq!((median(&[]), mean(&[])), (Duration::ZERO, Duration::ZERO));
    }
}
