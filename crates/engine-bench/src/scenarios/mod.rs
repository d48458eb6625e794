//! The scenarios, and how one is run.

mod cancel;
mod churn;
mod engine_hosts;
mod hosts;
mod interference;
mod phase1;
mod separate;
mod shared;
mod typing;

use std::path::PathBuf;
use std::str::FromStr;

use crate::error::BenchError;
use crate::raw::{Context, Model, Sampler, Token, argmax};
use crate::report::Outcome;
use crate::settings::{Layout, Settings};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// N contexts with a thread each, every context with all cores.
    TwoContexts,
    /// As above, the cores shared out.
    TwoContextsSharedCores,
    /// As above, the arg-max taken straight from the logits.
    TwoContextsSharedCoresArgmax,
    /// One context, one loop, sampling by `llama_sampler_sample`.
    SharedContext,
    /// One context, one loop, the arg-max taken straight from the logits: the raw loop.
    SharedContextArgmax,
    /// One context, one loop, nothing sampled: what `llama-batched-bench` measures, to compare it with.
    SharedContextUnsampled,
    /// The engine's first design: a decoder thread, one request a call, a fixed window.
    Phase1Loop,
    /// The engine, a host thread a sequence, token by token.
    EngineThreaded,
    /// The engine's own generation loop, streamed to a host thread a sequence.
    EngineGenerate,
    /// One sequence streams while another decodes a long prompt.
    PrefillInterference,
    /// Ten keystrokes, each a prompt one character longer.
    TypingSession,
    /// Cancelling in the middle of a long prompt and of a token.
    CancelLatency,
    /// Sequences come and go, and leave holes in the slots.
    Churn,
}

/// Positions that a typing session needs beyond `--prompt-tokens`: the rest of a sentence, and ten characters.
const KEYSTROKE_ROOM: u32 = 64;

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::TwoContexts,
        Self::TwoContextsSharedCores,
        Self::TwoContextsSharedCoresArgmax,
        Self::SharedContext,
        Self::SharedContextArgmax,
        Self::SharedContextUnsampled,
        Self::Phase1Loop,
        Self::EngineThreaded,
        Self::EngineGenerate,
        Self::PrefillInterference,
        Self::TypingSession,
        Self::CancelLatency,
        Self::Churn,
    ];

    /// What everything is measured against.
    pub const RAW_LOOP: Self = Self::SharedContextArgmax;

    /// Its name on the command line and in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TwoContexts => "a_two_contexts",
            Self::TwoContextsSharedCores => "a_two_contexts_shared_cores",
            Self::TwoContextsSharedCoresArgmax => "a_two_contexts_shared_cores_argmax",
            Self::SharedContext => "b_shared_context",
            Self::SharedContextArgmax => "b_shared_context_argmax",
            Self::SharedContextUnsampled => "b_shared_context_unsampled",
            Self::Phase1Loop => "p_phase1_loop",
            Self::EngineThreaded => "c_engine_threaded",
            Self::EngineGenerate => "d_engine_generate",
            Self::PrefillInterference => "prefill_interference",
            Self::TypingSession => "typing_session",
            Self::CancelLatency => "cancel_latency",
            Self::Churn => "churn",
        }
    }

    /// The settings that it runs with: some take the number of sequences into their own hands, or need a longer window.
    #[must_use]
    pub fn settings(self, wanted: &Settings) -> Settings {
        let mut settings = wanted.clone();
        match self {
            Self::TypingSession => settings.num_sequences = 1,
            _ if self.has_long_prompt() => {
                settings.num_sequences = if self == Self::CancelLatency { 1 } else { 2 };
                // They stream for as long as the prompt takes: what is streamed does not matter, and must not end it.
                settings.ignore_eog = true;
                let streamed = settings.prompt_tokens.saturating_add(settings.sample_tokens);
                let long = settings.long_prompt_tokens.saturating_add(streamed).saturating_add(512);
                settings.ctx_size = settings.ctx_size.max(long);
            }
            // A context a sequence has nothing to unify, and the first design left llama.cpp's default.
            Self::TwoContexts
            | Self::TwoContextsSharedCores
            | Self::TwoContextsSharedCoresArgmax
            | Self::Phase1Loop => settings.kv_layout = Layout::PerSequence,
            _ => {}
        }
        settings
    }

    /// Whether it runs the engine, and not llama.cpp alone.
    #[must_use]
    pub fn runs_engine(self) -> bool {
        matches!(self, Self::EngineThreaded | Self::EngineGenerate | Self::TypingSession | Self::Churn)
            || self.has_long_prompt()
    }

    /// Whether it chooses tokens by [`Settings::sampling`].
    #[must_use]
    pub fn samples(self) -> bool {
        use Scenario::{SharedContextArgmax, SharedContextUnsampled, TwoContextsSharedCoresArgmax};
        !matches!(self, SharedContextArgmax | SharedContextUnsampled | TwoContextsSharedCoresArgmax)
    }

    /// Whether it decodes [`Settings::long_prompt_tokens`].
    #[must_use]
    pub fn has_long_prompt(self) -> bool {
        matches!(self, Self::PrefillInterference | Self::CancelLatency)
    }

    /// Runs it once. `settings` are those of [`Scenario::settings`].
    ///
    /// # Errors
    /// Anything that keeps it from having taken every sample that it is to take.
    pub fn run(self, models: &mut Models, settings: &Settings) -> Result<Outcome, BenchError> {
        let room = if self == Self::TypingSession { KEYSTROKE_ROOM } else { 0 };
        settings.check(settings.settle_samples() + room)?;
        let cores = settings.thread_count();
        let shared_out = (cores / settings.num_sequences).max(1);
        match self {
            Self::TwoContexts => separate::run(models.raw(settings)?, settings, Selection::Chain, cores),
            Self::TwoContextsSharedCores => {
                separate::run(models.raw(settings)?, settings, Selection::Chain, shared_out)
            }
            Self::TwoContextsSharedCoresArgmax => {
                separate::run(models.raw(settings)?, settings, Selection::Argmax, shared_out)
            }
            Self::SharedContext => shared::run(models.raw(settings)?, settings, Selection::Chain),
            Self::SharedContextArgmax => shared::run(models.raw(settings)?, settings, Selection::Argmax),
            Self::SharedContextUnsampled => shared::run(models.raw(settings)?, settings, Selection::Nothing),
            Self::Phase1Loop => phase1::run(models.raw(settings)?, settings),
            Self::EngineThreaded => engine_hosts::threaded(settings),
            Self::EngineGenerate => engine_hosts::generate(settings),
            Self::PrefillInterference => interference::run(settings),
            Self::TypingSession => typing::run(settings),
            Self::CancelLatency => cancel::run(settings),
            Self::Churn => churn::run(settings),
        }
    }
}

impl FromStr for Scenario {
    type Err = BenchError;

    fn from_str(name: &str) -> Result<Self, BenchError> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == name).ok_or(BenchError::UnknownScenario)
    }
}

/// The model of the raw scenarios, loaded at the first of them and kept. The engine loads its own.
#[derive(Debug, Default)]
pub struct Models {
    raw: Option<(PathBuf, i32, Model)>,
}

impl Models {
    fn raw(&mut self, settings: &Settings) -> Result<&Model, BenchError> {
        let kept = matches!(&self.raw, Some((path, layers, _))
            if *path == settings.model && *layers == settings.gpu_layers);
        if !kept {
            // The old one goes first, so that two are never in memory.
            self.raw = None;
        }
        let load = || Model::load(&settings.model, settings.gpu_layers, settings.verbose);
        let loaded = match self.raw.take() {
            Some(loaded) => loaded,
            None => (settings.model.clone(), settings.gpu_layers, load()?),
        };
        Ok(&self.raw.insert(loaded).2)
    }
}

/// How a raw scenario chooses tokens.
#[derive(Debug, Clone, Copy)]
enum Selection {
    /// `llama_sampler_sample`.
    Chain,
    /// The arg-max, straight from the logits.
    Argmax,
    /// Any, and the logits are not looked at.
    Nothing,
}

/// A [`Selection`] at work, one a sequence.
enum Selector {
    Chain(Sampler),
    Argmax,
    /// The state of a generator of random numbers. One token again and again would have its embedding in the cache.
    Nothing(u32),
}

impl Selector {
    fn new(selection: Selection, model: &Model, settings: &Settings, sequence: u32) -> Self {
        match selection {
            Selection::Chain => Self::Chain(Sampler::new(model, &settings.sampling)),
            Selection::Argmax => Self::Argmax,
            Selection::Nothing => Self::Nothing(sequence + 1),
        }
    }

    fn select(&mut self, context: &Context<'_>, row: i32) -> Token {
        match self {
            Self::Chain(sampler) => sampler.sample(context, row),
            Self::Argmax => argmax(context.logits(row)),
            Self::Nothing(state) => {
                // xorshift32 (Marsaglia, 2003).
                *state ^= *state << 13;
                *state ^= *state >> 17;
                *state ^= *state << 5;
                (*state as usize % context.vocabulary_size()) as Token
            }
        }
    }
}

/// Fails if a sequence has too few samples, or one that ends a generation.
fn check_samples(
    tokens: &[Vec<Token>],
    settings: &Settings,
    is_eog: impl Fn(Token) -> bool,
) -> Result<(), BenchError> {
    let wanted = 1 + settings.settle_samples() as usize + settings.timed_samples();
    for (sequence, tokens) in tokens.iter().enumerate() {
        let end = tokens.iter().enumerate().find(|&(_, &token)| !settings.ignore_eog && is_eog(token));
        if let Some((got, &token)) = end {
            return Err(BenchError::EndOfGeneration { sequence, got, token });
        }
        if tokens.len() < wanted {
            let reason = "it was not sampled further".to_owned();
            return Err(BenchError::StoppedEarly { sequence, got: tokens.len(), wanted, reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_found_again() {
        for scenario in Scenario::ALL {
            assert_eq!(scenario.name().parse::<Scenario>().ok(), Some(scenario));
        }
        "b".parse::<Scenario>().expect_err("a part of a name");
    }

    #[test]
    fn a_sequence_that_ends_early_is_no_result() {
        let mut settings = Settings::new(PathBuf::new(), 2);
        let wanted = 1 + settings.settle_samples() as usize + settings.timed_samples();
        let is_eog = |token| token == 9;
        let full = vec![7; wanted];
        check_samples(&[full.clone(), full.clone()], &settings, is_eog).expect("all are there");

        let short = vec![7; wanted - 1];
        let error = check_samples(&[full.clone(), short], &settings, is_eog).expect_err("one is missing");
        assert!(matches!(error, BenchError::StoppedEarly { sequence: 1, .. }), "{error}");

        let mut ended = full.clone();
        ended[3] = 9;
        let error = check_samples(&[full.clone(), ended.clone()], &settings, is_eog).expect_err("it ended");
        assert!(matches!(error, BenchError::EndOfGeneration { sequence: 1, got: 3, token: 9 }), "{error}");
        settings.ignore_eog = true;
        check_samples(&[full, ended], &settings, is_eog).expect("it is to be ignored");
    }
}
