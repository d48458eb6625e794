//! The driver of all scenarios with a host thread a sequence: prompts, a barrier, some samples to settle, then the clock.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::latency::{Latency, mean};
use crate::raw::Token;
use crate::report::Outcome;

/// What a host thread does.
pub(super) trait Host: Send {
    /// Decodes the prompt, or has it decoded already, and takes the seed sample.
    fn prompt(&mut self) -> Result<Token, BenchError>;
    /// Takes one more sample.
    fn next(&mut self) -> Result<Token, BenchError>;
}

/// One host's part of a run.
struct HostRun {
    tokens: Vec<Token>,
    first_token: Duration,
    inter_token: Vec<Duration>,
    started: Instant,
}

impl HostRun {
    /// Samples a second between `start` and `end`, by those that began and ended in that time; `None`: there are none.
    fn rate_between(&self, start: Instant, end: Instant) -> Option<f64> {
        let (mut time, mut samples, mut elapsed) = (self.started, 0_u32, Duration::ZERO);
        for &interval in &self.inter_token {
            if time >= start && time + interval <= end {
                samples += 1;
                elapsed += interval;
            }
            time += interval;
        }
        (!elapsed.is_zero()).then(|| f64::from(samples) / elapsed.as_secs_f64())
    }
}

/// Runs each host on a thread of its own. The clock runs while all of them are sampled: from when the last has settled
/// until the first is done. Hosts that had taken more or fewer tokens before cannot add to it, nor take from it. The time
/// of the outcome is what all samples take at the rate of that time.
pub(super) fn drive<H: Host>(hosts: &mut [H], settle: usize, timed: usize) -> Result<Outcome, BenchError> {
    let barrier = Barrier::new(hosts.len());
    let failed = AtomicBool::new(false);
    let (barrier, failed) = (&barrier, &failed);
    let runs: Vec<HostRun> = std::thread::scope(|scope| {
        let threads: Vec<_> = hosts
            .iter_mut()
            .map(|host| scope.spawn(move || drive_one(host, barrier, failed, settle, timed)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            // A host that fails is the reason for those that only gave up with it.
            .collect::<Result<Vec<_>, _>>()
            .map(|runs| runs.into_iter().flatten().collect())
    })?;
    if runs.is_empty() {
        return Err(BenchError::Settings("there are no sequences to drive".to_owned()));
    }
    let inter_token: Vec<_> = runs.iter().flat_map(|run| run.inter_token.iter().copied()).collect();
    Ok(Outcome {
        elapsed: time_of_all(&runs),
        samples: inter_token.len(),
        latencies: vec![
            ("first_token", Latency::each(runs.iter().map(|run| run.first_token))),
            ("inter_token", Latency::paced(inter_token.iter().copied(), mean(&inter_token))),
        ],
        figures: Vec::new(),
        tokens: runs.into_iter().map(|run| run.tokens).collect(),
    })
}

/// The time that all samples take at the rates that the hosts have while every one of them is sampled. Hosts that have no such
/// time, because they were done too soon: from the first's start to the last's end.
fn time_of_all(runs: &[HostRun]) -> Duration {
    let starts = || runs.iter().map(|run| run.started);
    let ends = || runs.iter().map(|run| run.started + run.inter_token.iter().sum::<Duration>());
    let (Some(start), Some(end)) = (starts().max(), ends().min()) else { return Duration::ZERO };
    let rate: Option<f64> = runs.iter().map(|run| run.rate_between(start, end)).sum();
    let Some(rate) = rate else {
        return ends().max().zip(starts().min()).map_or(Duration::ZERO, |(end, start)| end - start);
    };
    let all: usize = runs.iter().map(|run| run.inter_token.len()).sum();
    Duration::from_secs_f64(all as f64 / rate)
}

/// `None`: another host failed before the clock started.
fn drive_one(
    host: &mut impl Host,
    barrier: &Barrier,
    failed: &AtomicBool,
    settle: usize,
    timed: usize,
) -> Result<Option<HostRun>, BenchError> {
    let asked = Instant::now();
    let seed = host.prompt();
    let first_token = asked.elapsed();
    if seed.is_err() {
        failed.store(true, Ordering::Relaxed);
    }
    // A host whose prompt failed comes here as well, else the others would wait for ever; the barrier orders the flag.
    barrier.wait();
    let mut tokens = Vec::with_capacity(1 + settle + timed);
    tokens.push(seed?);
    if failed.load(Ordering::Relaxed) {
        return Ok(None);
    }
    for _ in 0..settle {
        tokens.push(host.next()?);
    }
    let mut inter_token = Vec::with_capacity(timed);
    let started = Instant::now();
    let mut last = started;
    for _ in 0..timed {
        tokens.push(host.next()?);
        let now = Instant::now();
        inter_token.push(now - last);
        last = now;
    }
    Ok(Some(HostRun { tokens, first_token, inter_token, started }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(epoch: Instant, begins_micros: u64, step_micros: u64, samples: usize) -> HostRun {
        HostRun {
            tokens: Vec::new(),
            first_token: Duration::ZERO,
            inter_token: vec![Duration::from_micros(step_micros); samples],
            started: epoch + Duration::from_micros(begins_micros),
        }
    }

    #[test]
    fn hosts_in_step_take_the_time_of_their_steps() {
        let epoch = Instant::now();
        // Each hears of a step a little later than the one before it.
        let runs: Vec<_> = (0..16).map(|host| run(epoch, 3 * host, 1000, 50)).collect();
        let error = time_of_all(&runs).as_secs_f64() / 0.05 - 1.0;
        assert!(error.abs() < 1e-6, "{error}");
    }

    #[test]
    fn what_one_host_takes_alone_does_not_count() {
        let epoch = Instant::now();
        let mut early = run(epoch, 0, 1000, 100);
        // Before the other begins it is twice as fast.
        early.inter_token[..50].fill(Duration::from_micros(500));
        let late = run(epoch, 25_000, 1000, 100);
        // Two thousand a second together.
        assert_eq!(time_of_all(&[early, late]).as_millis(), 100);
        let apart = [run(epoch, 0, 1000, 5), run(epoch, 9000, 1000, 5)];
        assert_eq!(time_of_all(&apart).as_millis(), 14, "they never run together");
    }
}
