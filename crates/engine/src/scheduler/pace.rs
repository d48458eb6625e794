//! How fast steps have been, and what follows: the size of a prompt's chunk, and how long a straggler is waited for.

use std::time::Duration;

use super::Limits;

/// Rows of a step that a prompt shares with others, before anything is measured. Also the least that a prompt gets alone:
/// llama.cpp's attention on a processor is much slower a row with fewer.
const FIRST_ROWS: u32 = 64;
/// The least rows that prompts get beside others.
const MIN_CHUNK: u32 = 16;
/// How long a step with nothing but prompts should take at most, if one beside others may not take longer: a sequence that
/// comes meanwhile waits for it.
const LONGEST_CHUNK: f32 = 0.2;
/// A step this much longer than it should be makes the next chunk smaller.
const TOO_LONG: f32 = 1.2;
/// A step this much shorter than it should be makes the next chunk larger.
const TOO_SHORT: f32 = 0.7;
/// The share of a new measurement in a mean.
const WEIGHT: f32 = 0.2;
/// Waiting for a straggler is worth this share of a step at most.
const STRAGGLER_SHARE: u32 = 8;
/// And never more than this many times the configured window.
const STRAGGLER_MAX: u32 = 10;

#[derive(Debug)]
pub(super) struct Pace {
    batch: u32,
    prefill_step: f32,
    prefill_stretch: f32,
    kv_per_sequence: bool,
    straggler_window: Duration,
    /// Mean seconds of a step with decode rows only.
    decode_step: Option<f32>,
    /// Mean seconds a row, in steps with prompts only.
    prompt_row: Option<f32>,
    /// Rows of a step with a prompt beside others, once one was measured. They change by large steps and seldom: a step
    /// with as many rows as the last reuses llama.cpp's graph.
    mixed_rows: Option<u32>,
}

impl Pace {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            batch: limits.batch,
            prefill_step: limits.prefill_step.as_secs_f32(),
            prefill_stretch: limits.prefill_stretch,
            kv_per_sequence: limits.kv_per_sequence,
            straggler_window: limits.straggler_window,
            decode_step: None,
            prompt_row: None,
            mixed_rows: None,
        }
    }

    /// The pace of steps that take so many times as long, before any of them is measured.
    pub(super) fn slowed(&self, times: u32) -> Self {
        let prompt_row = self.prompt_row.map(|row| row * times as f32);
        Self { prompt_row, decode_step: None, mixed_rows: None, ..*self }
    }

    /// The rows that prompts get in a step beside so many decode rows.
    pub(super) fn chunk(&self, decode_rows: u32) -> u32 {
        let room = self.batch - decode_rows.min(self.batch);
        let chunk = match decode_rows {
            0 => self.prompt_row.map_or(room, |row| {
                size_below((self.prefill_step.max(LONGEST_CHUNK) / row) as u32).max(FIRST_ROWS)
            }),
            // So that the ubatch with the prompt's rows has the size that was chosen: llama.cpp's ways with rows change at
            // powers of two.
            _ if self.kv_per_sequence => self.mixed_rows() + 1,
            _ => self.mixed_rows().saturating_sub(decode_rows).max(MIN_CHUNK),
        };
        chunk.min(room)
    }

    /// Rows of a step with a prompt beside others. Before one was measured, as many as a prompt alone would fill the time
    /// with: to grow from a few rows would take a good part of a prompt.
    fn mixed_rows(&self) -> u32 {
        self.mixed_rows.unwrap_or_else(|| {
            self.prompt_row.map_or(FIRST_ROWS, |row| self.sized((self.mixed_seconds() / row) as u32))
        })
    }

    /// Seconds that a step with a prompt beside others should take.
    fn mixed_seconds(&self) -> f32 {
        (self.prefill_stretch * self.decode_step.unwrap_or(0.0)).max(self.prefill_step)
    }

    fn sized(&self, rows: u32) -> u32 {
        size_below(rows).clamp(MIN_CHUNK, self.batch.max(MIN_CHUNK))
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
            (0, rows) if rows >= MIN_CHUNK => mix(&mut self.prompt_row, seconds / rows as f32),
            (0, _) => {}
            // Only a step that was as large as it might be says whether it may be larger.
            (decodes, rows) if rows >= self.chunk(decodes) => self.adapt(seconds),
            _ => {}
        }
    }

    fn adapt(&mut self, seconds: f32) {
        let rows = self.mixed_rows();
        let ratio = seconds / self.mixed_seconds();
        self.mixed_rows = Some(if ratio > TOO_LONG {
            self.sized(rows - 1)
        } else if ratio < TOO_SHORT {
            // 24 becomes 32, 32 becomes 48.
            self.sized(rows * 3 / 2)
        } else {
            rows
        });
    }
}

/// The largest of 16, 24, 32, 48, 64, 96 and so on that is not above `rows`; 16 below.
fn size_below(rows: u32) -> u32 {
    let power = 1 << rows.max(MIN_CHUNK).ilog2();
    if rows >= power + power / 2 { power + power / 2 } else { power }
}
