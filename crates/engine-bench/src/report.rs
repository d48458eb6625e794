//! A scenario's result, as the line of JSON that it becomes.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::BenchError;
use crate::latency::{Latency, Percentiles};
use crate::scenarios::Scenario;
use crate::settings::{Layout, Settings};

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
pub struct Report<'a> {
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
    variant: String,
    kv_layout: &'static str,
    threads: u32,
    gpu_layers: i32,
    batch_size: u32,
    ctx_size: u32,
    #[serde(flatten)]
    figures: Map<String, Value>,
    latency_ms: std::collections::BTreeMap<&'static str, Percentiles>,
    machine: &'a Machine,
}

impl<'a> Report<'a> {
    /// Puts a result together; `settings` are those of [`Scenario::settings`], `run` counts the repeats from 1.
    #[must_use]
    pub fn new(
        scenario: Scenario,
        settings: &Settings,
        run: u32,
        outcome: &Outcome,
        machine: &'a Machine,
    ) -> Self {
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
            variant: variant(scenario, settings),
            kv_layout: match settings.kv_layout {
                Layout::Auto => "auto",
                Layout::Unified => "unified",
                Layout::PerSequence => "per_sequence",
            },
            threads: settings.thread_count(),
            gpu_layers: settings.gpu_layers,
            batch_size: settings.batch_size,
            ctx_size: settings.ctx_size,
            figures: outcome.figures.iter().map(|&(name, figure)| (name.to_owned(), figure.into())).collect(),
            latency_ms: outcome
                .latencies
                .iter()
                .map(|(name, latency)| (*name, latency.percentiles()))
                .collect(),
            machine,
        }
    }

    /// Samples a second, all sequences together.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.aggregate_tokens_per_second
    }
}

impl fmt::Display for Report<'_> {
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

/// The settings that are not as the scenario has them by default, but for those that are members of their own.
fn variant(scenario: Scenario, settings: &Settings) -> String {
    let default = scenario.settings(&Settings::new(settings.model.clone(), settings.num_sequences));
    let mut changed = Vec::new();
    let mut compare = |name: &str, value: String, default: String| {
        if value != default {
            changed.push(format!("{name} {value}"));
        }
    };
    let (config, usual) = (settings.engine_config(), default.engine_config());
    let (sampling, greedy) = (&settings.sampling, &default.sampling);
    compare("kv", format!("{:?}", config.kv_layout), format!("{:?}", usual.kv_layout));
    if scenario.runs_engine() {
        compare("run-ahead", config.run_ahead.to_string(), usual.run_ahead.to_string());
        let window = |config: &engine::EngineConfig| format!("{:?}", config.straggler_window);
        compare("straggler-window", window(&config), window(&usual));
        let prefill = |config: &engine::EngineConfig| format!("{:?}", config.prefill_step);
        compare("prefill-step", prefill(&config), prefill(&usual));
        let context = |config: &engine::EngineConfig| format!("{:?}", config.prefill_context);
        compare("prefill-context", context(&config), context(&usual));
        let threads = |config: &engine::EngineConfig| format!("{:?}", config.sampling_threads);
        compare("sampling-threads", threads(&config), threads(&usual));
        compare("logprobs", sampling.logprobs.to_string(), greedy.logprobs.to_string());
    }
    if scenario.has_long_prompt() {
        compare(
            "long-prompt",
            settings.long_prompt_tokens.to_string(),
            default.long_prompt_tokens.to_string(),
        );
    }
    if scenario.samples() {
        compare("temperature", sampling.temperature.to_string(), greedy.temperature.to_string());
        compare("top-k", sampling.top_k.to_string(), greedy.top_k.to_string());
        compare("top-p", sampling.top_p.to_string(), greedy.top_p.to_string());
        compare("min-p", sampling.min_p.to_string(), greedy.min_p.to_string());
        compare("penalty", sampling.repetition_penalty.to_string(), greedy.repetition_penalty.to_string());
    }
    changed.join(", ")
}

/// Where, and of what, results are.
#[derive(Debug, Serialize)]
pub struct Machine {
    os: &'static str,
    architecture: &'static str,
    cores: usize,
    devices: Vec<String>,
    /// Programs that ran or waited for a core in the minute before; only where the system tells.
    load_before: Option<f64>,
    engine: &'static str,
    llama_cpp_sys: &'static str,
    commit: &'static str,
}

/// The version of the crate that brings llama.cpp, as the workspace pins it.
const LLAMA_CPP_SYS: &str = "0.1.161";

impl Machine {
    /// This machine as it is now, before the runs load it.
    #[must_use]
    pub fn this() -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            os: std::env::consts::OS,
            architecture: std::env::consts::ARCH,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            devices: crate::raw::devices(),
            load_before: load.and_then(|load| load.split(' ').next()?.parse().ok()),
            engine: env!("CARGO_PKG_VERSION"),
            llama_cpp_sys: LLAMA_CPP_SYS,
            commit: option_env!("ENGINE_BENCH_COMMIT").unwrap_or("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_llama_cpp_is_the_one_that_is_pinned() {
        let workspace = include_str!("../../../Cargo.toml");
        assert!(workspace.contains(&format!("llama-cpp-sys-2 = {{ version = \"={LLAMA_CPP_SYS}\"")));
    }

    #[test]
    fn a_line_begins_with_the_members_of_the_spike() {
        let mut settings = Settings::new("models/some.gguf".into(), 4);
        settings.sampling.temperature = 0.5;
        let (scenario, machine) = (Scenario::SharedContext, Machine::this());
        let outcome = Outcome { elapsed: Duration::from_secs(2), samples: 796, ..Outcome::default() };
        let line = Report::new(scenario, &scenario.settings(&settings), 1, &outcome, &machine).to_string();
        let raw = Report::new(Scenario::RAW_LOOP, &settings, 1, &outcome, &machine);
        assert_eq!(raw.variant, "", "it takes the arg-max at any temperature");
        let members = "{\"scenario\":\"b_shared_context\",\"num_sequences\":4,\"prompt_tokens\":256,\
            \"sample_tokens\":200,\"elapsed_seconds\":2.0,\"total_tokens_sampled\":796,\
            \"aggregate_tokens_per_second\":398.0,\"per_sequence_tokens_per_second\":99.5,\
            \"model\":\"some\",\"run\":1,\"variant\":\"temperature 0.5\"";
        assert!(line.starts_with(members), "{line}");
    }

    #[test]
    fn a_failure_has_its_name_first() {
        let failure = Failure::new("x", &BenchError::UnknownScenario).to_string();
        assert!(failure.starts_with("{\"scenario\":\"x\",\"error\":\"unknown"), "{failure}");
    }
}
