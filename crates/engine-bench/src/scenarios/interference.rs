//! One sequence streams while another decodes a long prompt: what the streaming one's tokens have to wait for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::latency::{Latency, mean};
use crate::report::Outcome;
use crate::scenarios::engine_hosts::{SequenceHost, load, prompt};
use crate::scenarios::hosts::Host;
use crate::settings::Settings;

pub(super) fn run(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let long_prompt = prompt(&engine, settings.long_prompt_tokens)?;
    let short_prompt = &long_prompt[..long_prompt.len().min(settings.prompt_tokens as usize)];
    let mut streaming = SequenceHost::new(&engine, settings, short_prompt, 0, 0)?;
    let mut other = SequenceHost::new(&engine, settings, &long_prompt, 1, 1)?;

    streaming.prompt()?;
    for _ in 0..settings.settle_samples() {
        streaming.next()?;
    }
    let mut quiet = Vec::new();
    for _ in 0..settings.timed_samples() {
        quiet.push(timed_next(&mut streaming)?);
    }

    let done = AtomicBool::new(false);
    let started = Instant::now();
    let (busy, prefill) = std::thread::scope(|scope| {
        let prefill = scope.spawn(|| {
            let seed = other.prompt();
            let first_token = started.elapsed();
            done.store(true, Ordering::Release);
            seed.map(|_| first_token)
        });
        let mut busy = Vec::new();
        let mut streamed = Ok(());
        while !done.load(Ordering::Acquire) {
            match timed_next(&mut streaming) {
                Ok(latency) => busy.push(latency),
                Err(error) => {
                    streamed = Err(error);
                    break;
                }
            }
        }
        let prefill = prefill.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (streamed.map(|()| busy), prefill)
    });
    let (busy, prefill) = (busy?, prefill?);
    if busy.is_empty() {
        return Err(BenchError::Missed("no token was streamed while the prompt was decoded".to_owned()));
    }
    let interval = mean(&quiet);
    let quiet_rate = quiet.len() as f64 / quiet.iter().sum::<Duration>().as_secs_f64();
    Ok(Outcome {
        elapsed: prefill,
        samples: busy.len(),
        figures: vec![
            ("quiet_tokens_per_second", quiet_rate),
            ("prefill_tokens", long_prompt.len() as f64),
            ("prefill_tokens_per_second", long_prompt.len() as f64 / prefill.as_secs_f64()),
        ],
        latencies: vec![
            ("inter_token_quiet", Latency::paced(quiet, interval)),
            ("inter_token", Latency::paced(busy, interval)),
            ("first_token", Latency::each([prefill])),
        ],
        tokens: Vec::new(),
    })
}

fn timed_next(host: &mut SequenceHost<'_>) -> Result<Duration, BenchError> {
    let asked = Instant::now();
    host.next()?;
    Ok(asked.elapsed())
}
