//! A scenario's result, as the line of JSON that it becomes.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::BenchError;
use crate::latency::{Latency, Percentiles};
use crate::scenarios::Scenario;
use crate::settings::Settings;

/// What a scenario hands back.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The timed part.
    pub elapsed: Duration,
    /// Samples taken in the timed part, all sequences together.
    pub samples: usize,
    /// Latencies by name.
    pub latencies: Vec<(&'static str, Latency)>,
    /// Figures of this scenario alone.
    pub figures: Vec<(&'static str, f64)>,
    /// The tokens of each sequence, the seed first. Some scenarios keep none.
    pub tokens: Vec<Vec<i32>>,
}

/// One line of JSON. The first eight members are the spike's.
#[derive(Debug, Serialize)]
pub struct Report {
    scenario: &'static str,
    num_sequences: u32,
    prompt_tokens: u32,
    sample_tokens: u32,
    elapsed_seconds: f64,
    total_tokens_sampled: usize,
    aggregate_tokens_per_second: f64,
    per_sequence_tokens_per_second: f64,
    model: String,
    run: u32,
    kv_layout: &'static str,
    threads: u32,
    gpu_layers: i32,
    batch_size: u32,
    ctx_size: u32,
    run_ahead: u32,
    straggler_window_us: u64,
    temperature: f32,
    logprobs: bool,
    #[serde(flatten)]
    figures: Map<String, Value>,
    latency_ms: std::collections::BTreeMap<&'static str, Percentiles>,
    machine: Machine,
}

impl Report {
    /// Puts a result together; `settings` are those of [`Scenario::settings`], `run` counts the repeats from 1.
    #[must_use]
    pub fn new(scenario: Scenario, settings: &Settings, run: u32, outcome: &Outcome) -> Self {
        let config = settings.engine_config();
        let rate = outcome.samples as f64 / outcome.elapsed.as_secs_f64();
        Self {
            scenario: scenario.name(),
            num_sequences: settings.num_sequences,
            prompt_tokens: settings.prompt_tokens,
            sample_tokens: settings.sample_tokens,
            elapsed_seconds: outcome.elapsed.as_secs_f64(),
            total_tokens_sampled: outcome.samples,
            aggregate_tokens_per_second: rate,
            per_sequence_tokens_per_second: rate / f64::from(settings.num_sequences),
            model: settings.model.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            run,
            kv_layout: if config.unified_kv() { "unified" } else { "per_sequence" },
            threads: settings.thread_count(),
            gpu_layers: settings.gpu_layers,
            batch_size: settings.batch_size,
            ctx_size: settings.ctx_size,
            run_ahead: config.run_ahead,
            straggler_window_us: config.straggler_window.as_micros() as u64,
            temperature: settings.sampling.temperature,
            logprobs: settings.sampling.logprobs,
            figures: outcome.figures.iter().map(|&(name, figure)| (name.to_owned(), figure.into())).collect(),
            latency_ms: outcome
                .latencies
                .iter()
                .map(|(name, latency)| (*name, latency.percentiles()))
                .collect(),
            machine: Machine::this(),
        }
    }

    /// Samples a second, all sequences together.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.aggregate_tokens_per_second
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(self, out)
    }
}

/// The line of a failure.
#[derive(Debug, Serialize)]
pub struct Failure<'a> {
    scenario: &'a str,
    error: String,
}

impl<'a> Failure<'a> {
    /// `scenario` is the name as it was given: there may be no such scenario.
    #[must_use]
    pub fn new(scenario: &'a str, error: &BenchError) -> Self {
        Self { scenario, error: error.to_string() }
    }
}

impl fmt::Display for Failure<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(self, out)
    }
}

fn line(value: &impl Serialize, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    out.write_str(&serde_json::to_string(value).map_err(|_| fmt::Error)?)
}

/// Where, and of what, a result is.
#[derive(Debug, Clone, Serialize)]
struct Machine {
    os: &'static str,
    architecture: &'static str,
    cores: usize,
    devices: Vec<String>,
    engine: &'static str,
    llama_cpp_sys: &'static str,
    commit: &'static str,
}

impl Machine {
    fn this() -> Self {
        Self {
            os: std::env::consts::OS,
            architecture: std::env::consts::ARCH,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            devices: crate::raw::devices(),
            engine: env!("CARGO_PKG_VERSION"),
            llama_cpp_sys: "0.1.161",
            commit: option_env!("ENGINE_BENCH_COMMIT").unwrap_or("unknown"),
        }
    }
}
