//! What a scenario runs with. One struct serves the command line, the criterion benches and the tests.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use engine::{EngineConfig, FlashAttention, KvLayout, PrefillContext, SamplingConfig};

use crate::error::BenchError;

/// Tokens that a generation of the engine asks for at a time.
const GENERATION_WINDOW: u32 = 8;
/// The sentence that prompts are made of.
const SENTENCE: &str = "The quick brown fox jumps over the lazy dog. ";

/// Settings of one run of one scenario.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// The model, a GGUF file.
    #[arg(skip)]
    pub model: PathBuf,
    /// Sequences, all alive at once.
    #[arg(skip = 2u32)]
    pub num_sequences: u32,
    /// Tokens of each sequence's prompt.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub prompt_tokens: u32,
    /// Samples of each sequence; the first one, the seed, is not timed.
    #[arg(long, default_value_t = 200, value_name = "N")]
    pub sample_tokens: u32,
    /// Layers on a GPU; -1: all.
    #[arg(long, default_value_t = -1, allow_negative_numbers = true, value_name = "N")]
    pub gpu_layers: i32,
    /// The most rows in one decode.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub batch_size: u32,
    /// Tokens that each sequence can hold.
    #[arg(long, default_value_t = 2048, value_name = "N")]
    pub ctx_size: u32,
    /// Threads of a step; default: the machine's cores.
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU32>,
    /// KV cells of scenarios with one context.
    #[arg(long, value_enum, default_value_t, value_name = "LAYOUT")]
    pub kv_layout: Layout,
    /// Tokens of the prompt that interferes, or is cancelled.
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub long_prompt_tokens: u32,
    /// Tokens that the engine may sample ahead of its host; default: the engine's.
    #[arg(long, value_name = "N")]
    pub run_ahead: Option<u32>,
    /// The engine's wait for stragglers, at most, in µs; default: the engine's.
    #[arg(long, value_name = "MICROS")]
    pub straggler_window: Option<u64>,
    /// What a step with a prompt's chunk should take while others stream, in ms; default: the engine's.
    #[arg(long, value_name = "MILLIS")]
    pub prefill_step: Option<u64>,
    /// Where the engine decodes a long prompt while others stream.
    #[arg(long, value_enum, default_value_t, value_name = "CONTEXT")]
    pub prefill_context: Prefill,
    /// The engine's threads that choose tokens; default: the engine's.
    #[arg(long, value_name = "N")]
    pub sampling_threads: Option<NonZeroU32>,
    /// Take a token that ends a generation for one like any other.
    #[arg(long)]
    pub ignore_eog: bool,
    /// Show llama.cpp's and the engine's logs.
    #[arg(long)]
    pub verbose: bool,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: RandomSampling,
}

/// Sampling beyond greedy. Scenarios with `argmax` in their names do not look at it.
#[derive(Debug, Clone, Args)]
pub struct RandomSampling {
    /// 0: greedy.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub temperature: f32,
    /// The most likely tokens to keep; 0: all. Without a temperature it has no effect, as the next two.
    #[arg(long, default_value_t = 40, value_name = "K")]
    pub top_k: u32,
    /// The share to keep.
    #[arg(long, default_value_t = 0.95, value_name = "P")]
    pub top_p: f32,
    /// The least likelihood against the most likely token.
    #[arg(long, default_value_t = 0.05, value_name = "P")]
    pub min_p: f32,
    /// Penalty on the last 64 tokens; 1: none.
    #[arg(long, default_value_t = 1.0, value_name = "PENALTY")]
    pub repetition_penalty: f32,
    /// Seed of the draws.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub seed: u32,
    /// Have the engine compute log-probabilities.
    #[arg(long)]
    pub logprobs: bool,
}

impl Default for RandomSampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repetition_penalty: 1.0,
            seed: 1,
            logprobs: false,
        }
    }
}

/// How KV cells are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Layout {
    /// As the engine chooses for this number of sequences.
    #[default]
    Auto,
    /// One buffer.
    Unified,
    /// A buffer a sequence.
    PerSequence,
}

/// Where the engine decodes a long prompt while others stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Prefill {
    /// As the engine chooses for the device.
    #[default]
    Auto,
    /// In the steps of those who stream.
    Shared,
    /// In a context of its own.
    Separate,
}

impl Settings {
    /// The command line's defaults.
    #[must_use]
    pub fn new(model: PathBuf, num_sequences: u32) -> Self {
        Self {
            model,
            num_sequences,
            prompt_tokens: 256,
            sample_tokens: 200,
            gpu_layers: -1,
            batch_size: 512,
            ctx_size: 2048,
            threads: None,
            kv_layout: Layout::Auto,
            long_prompt_tokens: 4096,
            run_ahead: None,
            straggler_window: None,
            prefill_step: None,
            prefill_context: Prefill::Auto,
            sampling_threads: None,
            ignore_eog: false,
            verbose: false,
            sampling: RandomSampling::default(),
        }
    }

    /// Threads of a step.
    #[must_use]
    pub fn thread_count(&self) -> u32 {
        self.threads.map_or_else(
            || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
            NonZeroU32::get,
        )
    }

    /// The engine's settings for this run. Raw scenarios take theirs from it too, so that both have the same context.
    #[must_use]
    pub fn engine_config(&self) -> EngineConfig {
        let mut config = EngineConfig::default();
        config.max_sequences = self.num_sequences;
        config.context_window = self.ctx_size;
        config.batch_size = self.batch_size;
        config.gpu_layers = u32::try_from(self.gpu_layers).ok();
        config.threads = NonZeroU32::new(self.thread_count());
        config.flash_attention = FlashAttention::Auto;
        config.kv_layout = match self.kv_layout {
            Layout::Auto => KvLayout::Auto,
            Layout::Unified => KvLayout::Unified,
            Layout::PerSequence => KvLayout::PerSequence,
        };
        config.run_ahead = self.run_ahead.unwrap_or(config.run_ahead);
        config.prefill_step = self.prefill_step.map(Duration::from_millis);
        config.prefill_context = match self.prefill_context {
            Prefill::Auto => PrefillContext::Auto,
            Prefill::Shared => PrefillContext::Shared,
            Prefill::Separate => PrefillContext::Separate,
        };
        config.sampling_threads = self.sampling_threads;
        config.straggler_window =
            self.straggler_window.map_or(config.straggler_window, Duration::from_micros);
        config
    }

    /// The engine's sampling for this run; `max_tokens` as its [`SamplingConfig::max_prediction_tokens`].
    #[must_use]
    pub fn engine_sampling(&self, max_tokens: u32) -> SamplingConfig {
        let mut sampling = SamplingConfig::default();
        sampling.max_prediction_tokens = max_tokens;
        sampling.temperature = self.sampling.temperature;
        sampling.top_k = self.sampling.top_k;
        sampling.top_p = self.sampling.top_p;
        sampling.min_p = self.sampling.min_p;
        sampling.repetition_penalty = self.sampling.repetition_penalty;
        sampling.seed = self.sampling.seed;
        sampling
    }

    /// Rows that llama.cpp computes at once.
    #[must_use]
    pub fn ubatch_size(&self) -> u32 {
        self.engine_config().ubatch()
    }

    /// Samples of a sequence that are timed.
    #[must_use]
    pub fn timed_samples(&self) -> usize {
        self.sample_tokens as usize - 1
    }

    /// Samples of a sequence between the seed and the clock's start: twice what the engine can have sampled ahead while
    /// its hosts waited for each other, in every scenario.
    #[must_use]
    pub fn settle_samples(&self) -> u32 {
        2 * (GENERATION_WINDOW + self.engine_config().run_ahead.max(4))
    }

    /// Checks what a scenario takes for granted. `extra` positions are needed beside prompt and samples.
    pub(crate) fn check(&self, extra: u32) -> Result<(), BenchError> {
        let fail = |text: String| Err(BenchError::Settings(text));
        if !(1..=engine::MAX_SEQUENCES).contains(&self.num_sequences) {
            return fail(format!(
                "--num-sequences is {}, but must be 1 to {}",
                self.num_sequences,
                engine::MAX_SEQUENCES
            ));
        }
        if self.batch_size < self.num_sequences || self.batch_size > 1 << 20 {
            return fail(format!(
                "--batch-size is {}, but must be --num-sequences ({}) to {}",
                self.batch_size,
                self.num_sequences,
                1 << 20
            ));
        }
        if self.sample_tokens < 2 || self.prompt_tokens < 1 {
            return fail("--sample-tokens must be at least 2, and --prompt-tokens at least 1".to_owned());
        }
        let needed = u64::from(self.prompt_tokens) + u64::from(self.sample_tokens) + u64::from(extra);
        if needed > u64::from(self.ctx_size) {
            return fail(format!("--ctx-size is {}, but prompt and samples need {needed}", self.ctx_size));
        }
        if u64::from(self.ctx_size) * u64::from(self.num_sequences) > u64::from(engine::MAX_CONTEXT_TOKENS) {
            return fail(format!(
                "--ctx-size ({}) times --num-sequences ({}) must be at most {}",
                self.ctx_size,
                self.num_sequences,
                engine::MAX_CONTEXT_TOKENS
            ));
        }
        Ok(())
    }

    /// A prompt of exactly `tokens` tokens: the sentence, repeated until there are enough.
    pub(crate) fn prompt(
        tokens: u32,
        tokenize: impl Fn(&str) -> Result<Vec<i32>, BenchError>,
    ) -> Result<Vec<i32>, BenchError> {
        let (_, mut prompt) = Self::sentences(tokens, tokenize)?;
        prompt.truncate(tokens as usize);
        Ok(prompt)
    }

    /// The text of at least `tokens` tokens that prompts are cut from, and all its tokens.
    pub(crate) fn sentences(
        tokens: u32,
        tokenize: impl Fn(&str) -> Result<Vec<i32>, BenchError>,
    ) -> Result<(String, Vec<i32>), BenchError> {
        let tokens = tokens as usize;
        // A sentence has at least one token, and about ten in most vocabularies.
        for repeats in [tokens / 10 + 1, tokens / 4 + 1, tokens] {
            let text = SENTENCE.repeat(repeats);
            let prompt = tokenize(&text)?;
            if prompt.len() >= tokens {
                return Ok((text, prompt));
            }
        }
        Err(BenchError::Settings(format!(
            "the model has no tokens for the prompt \"{}\"",
            SENTENCE.trim_end()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_exactly_as_many_tokens_as_asked_for() {
        for tokens in [1, 9, 256, 4096] {
            for bytes_a_token in [1, 5, 45] {
                let tokenize = |text: &str| Ok(vec![7; text.len() / bytes_a_token]);
                let prompt = Settings::prompt(tokens, tokenize).expect("there are tokens");
                assert_eq!(prompt.len(), tokens as usize);
            }
        }
        Settings::prompt(1, |_| Ok(Vec::new())).expect_err("no vocabulary");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        let mut settings = Settings::new(PathBuf::new(), 2);
        assert!(settings.check(0).is_ok());
        settings.ctx_size = 455;
        let error = settings.check(0).expect_err("456 positions are needed").to_string();
        assert!(error.contains("455") && error.contains("456"), "{error}");
        settings.num_sequences = 0;
        assert!(settings.check(0).is_err());
    }
}
