//! How long a caller waits for its answer after a cancel, in the middle of a long prompt and in the middle of a token.

use std::time::{Duration, Instant};

use engine::{PromptError, SampleError};

use crate::error::BenchError;
use crate::latency::Latency;
use crate::report::Outcome;
use crate::scenarios::engine_hosts::{SequenceHost, load, prompt};
use crate::scenarios::hosts::Host;
use crate::settings::Settings;

/// Cancels of each kind, at as many different moments.
const CANCELS: u32 = 10;
/// Tries at them: some work is done before its cancel comes.
const TRIES: u32 = 4 * CANCELS;

pub(super) fn run(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let long_prompt = prompt(&engine, settings.long_prompt_tokens)?;
    let started = Instant::now();

    let mut host = SequenceHost::new(&engine, settings, &long_prompt, 0, 0)?;
    let asked = Instant::now();
    host.prompt()?;
    let whole_prompt = asked.elapsed();
    let in_prompt = cancel_at_moments(&mut host, whole_prompt, SequenceHost::trim, |host| {
        match host.sequence.decode_prompt(host.prompt, 0) {
            Err(PromptError::Cancelled) => Ok(Some(Instant::now())),
            Err(error) => Err(BenchError::engine("decode_prompt")(error)),
            Ok(()) => Ok(None),
        }
    })?;

    // Until what was sampled ahead is used up, a token comes at once.
    let settle = |host: &mut SequenceHost<'_>| {
        host.trim()?;
        host.prompt()?;
        (0..settings.settle_samples()).try_for_each(|_| host.next().map(drop))
    };
    host.prompt = &long_prompt[..long_prompt.len().min(settings.prompt_tokens as usize)];
    settle(&mut host)?;
    let asked = Instant::now();
    let timed = settings.timed_samples();
    (0..timed).try_for_each(|_| host.next().map(drop))?;
    let token = asked.elapsed() / timed as u32;
    let in_token = cancel_at_moments(&mut host, token, settle, |host| {
        loop {
            match host.sequence.sample_next() {
                Ok(_) => {}
                Err(SampleError::Cancelled) => return Ok(Some(Instant::now())),
                Err(error) => return Err(BenchError::engine("sample_next")(error)),
            }
        }
    })?;

    Ok(Outcome {
        elapsed: started.elapsed(),
        samples: timed,
        figures: vec![
            ("whole_prompt_ms", 1e3 * whole_prompt.as_secs_f64()),
            ("token_ms", 1e3 * token.as_secs_f64()),
            ("cancels_in_prompt", in_prompt.len() as f64),
            ("cancels_in_token", in_token.len() as f64),
        ],
        latencies: vec![
            ("cancel_in_prompt", Latency::each(in_prompt)),
            ("cancel_in_token", Latency::each(in_token)),
        ],
        tokens: Vec::new(),
    })
}

/// Has `work` done on a thread, cancels it at moments spread evenly over `length`, and measures from the cancel to the
/// answer. Work that was done before the cancel came does not count, and shows how long it takes now.
fn cancel_at_moments<'p>(
    host: &mut SequenceHost<'p>,
    mut length: Duration,
    prepare: impl Fn(&mut SequenceHost<'p>) -> Result<(), BenchError>,
    work: impl Fn(&mut SequenceHost<'p>) -> Result<Option<Instant>, BenchError> + Sync,
) -> Result<Vec<Duration>, BenchError> {
    let mut latencies = Vec::new();
    let handle = host.sequence.canceller();
    for _ in 0..TRIES {
        let cancel = latencies.len() as u32;
        if cancel == CANCELS {
            break;
        }
        prepare(host)?;
        let (cancelled, answered, took) = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let begun = Instant::now();
                work(host).map(|answered| (answered, begun.elapsed()))
            });
            std::thread::sleep(length * (2 * cancel + 1) / (2 * CANCELS));
            let cancelled = Instant::now();
            handle.cancel();
            let (answered, took) = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok::<_, BenchError>((cancelled, answered, took))
        })?;
        match answered {
            Some(answered) => latencies.push(answered.saturating_duration_since(cancelled)),
            None => length = length.min(took),
        }
    }
    if latencies.len() < CANCELS as usize {
        return Err(BenchError::Missed(format!(
            "only {} of {TRIES} cancels came before what they were to cancel was done, {CANCELS} should have",
            latencies.len()
        )));
    }
    Ok(latencies)
}
