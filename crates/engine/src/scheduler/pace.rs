//! How fast steps have been, and what follows: the size of a prompt's chunk, and how long a straggler is waited for.

use std::time::Duration;

use super::Limits;

/// A prompt's chunk before anything is measured, beside others that stream. Also the least that a prompt gets alone.
const FIRST_CHUNK: u32 = 64;
/// The least rows a step that a prompt gets beside others.
const MIN_CHUNK: f32 = 16.0;
/// How long a step with nothing but prompts should take at most: a sequence that comes meanwhile waits for it.
const LONGEST_CHUNK: f32 = 0.2;
/// The share of a new measurement in a mean.
const WEIGHT: f32 = 0.2;
/// Waiting for a straggler is worth this share of a step at most.
const STRAGGLER_SHARE: u32 = 8;
/// And never more than this many times the configured window.
const STRAGGLER_MAX: u32 = 10;

#[derive(Debug)]
pub(super) struct Pace {
    batch: u32,
    stretch: f32,
    straggler_window: Duration,
    /// Mean seconds of a step with decode rows only.
    decode_step: Option<f32>,
    /// Mean seconds a row, in steps with prompts only.
    prompt_row: Option<f32>,
    /// Rows of a prompt beside others. A fraction, so that it can grow slowly.
    mixed_chunk: f32,
}

impl Pace {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            batch: limits.batch,
            stretch: limits.prefill_stretch,
            straggler_window: limits.straggler_window,
            decode_step: None,
            prompt_row: None,
            mixed_chunk: FIRST_CHUNK as f32,
        }
    }

    /// The rows that prompts get in a step; `mixed`: others decode in it.
    pub(super) fn chunk(&self, mixed: bool) -> u32 {
        let alone = self.prompt_row.map_or(self.batch, |row| (LONGEST_CHUNK / row) as u32);
        let alone = alone.max(FIRST_CHUNK).min(self.batch);
        if mixed { alone.min(self.mixed_chunk as u32) } else { alone }
    }

    pub(super) fn straggler_window(&self) -> Duration {
        match self.decode_step {
            None => self.straggler_window,
            Some(step) => {
                (Duration::from_secs_f32(step) / STRAGGLER_SHARE).min(self.straggler_window * STRAGGLER_MAX)
            }
        }
    }

    pub(super) fn note(&mut self, decode_rows: u32, prompt_rows: u32, elapsed: Duration) {
        let seconds = elapsed.as_secs_f32().max(1e-6);
        let mix = |mean: &mut Option<f32>, value: f32| {
            *mean = Some(mean.map_or(value, |mean| mean + WEIGHT * (value - mean)));
        };
        match (decode_rows, prompt_rows) {
            (_, 0) => mix(&mut self.decode_step, seconds),
            // A handful of rows says nothing about the speed of many.
            (0, rows) if rows >= MIN_CHUNK as u32 => mix(&mut self.prompt_row, seconds / rows as f32),
            (0, _) => {}
            (_, rows) => {
                // Only a step that was as large as it might be says whether it may be larger.
                if let Some(step) = self.decode_step.filter(|_| rows + 1 >= self.mixed_chunk as u32) {
                    let change = (self.stretch * step / seconds).clamp(0.5, 1.5);
                    self.mixed_chunk = (self.mixed_chunk * change).max(MIN_CHUNK).min(self.batch as f32);
                }
            }
        }
    }
}
