//! The engine through its public API: token by token from a host thread a sequence, and its own generation loop.

use engine::{Engine, FinishReason, GenerateOptions, Generation, Prompt, Sequence};

use crate::error::BenchError;
use crate::latency::Latency;
use crate::raw::Token;
use crate::report::Outcome;
use crate::scenarios::check_samples;
use crate::scenarios::hosts::{Host, drive};
use crate::settings::Settings;

/// Loads the engine with the run's settings.
pub(super) fn load(settings: &Settings) -> Result<Engine, BenchError> {
    Engine::load(&settings.model, settings.engine_config())
        .map_err(|error| BenchError::Model { path: settings.model.clone(), reason: error.to_string() })
}

/// The run's prompt, of `tokens` tokens.
pub(super) fn prompt(engine: &Engine, tokens: u32) -> Result<Vec<Token>, BenchError> {
    Settings::prompt(tokens, |text| tokenize(engine, text))
}

pub(super) fn tokenize(engine: &Engine, text: &str) -> Result<Vec<Token>, BenchError> {
    engine.model().tokenize(text, true, false).map_err(BenchError::engine("tokenize"))
}

/// A sequence, and the prompt that it begins with.
pub(super) struct SequenceHost<'p> {
    pub(super) sequence: Sequence,
    pub(super) prompt: &'p [Token],
    /// Which one, from 0.
    index: usize,
    taken: usize,
    ignore_eog: bool,
}

impl<'p> SequenceHost<'p> {
    /// `max_tokens`: as [`Settings::engine_sampling`].
    pub(super) fn new(
        engine: &Engine,
        settings: &Settings,
        prompt: &'p [Token],
        index: u32,
        max_tokens: u32,
    ) -> Result<Self, BenchError> {
        let mut sequence = engine
            .create_sequence(settings.engine_sampling(max_tokens))
            .map_err(BenchError::engine("create_sequence"))?;
        sequence.set_compute_logprob(settings.sampling.logprobs);
        Ok(Self { sequence, prompt, index: index as usize, taken: 0, ignore_eog: settings.ignore_eog })
    }

    /// Forgets everything, which re-arms the sequence after a cancel.
    pub(super) fn trim(&mut self) -> Result<(), BenchError> {
        self.sequence.trim(0).map_err(BenchError::engine("trim"))
    }
}

impl Host for SequenceHost<'_> {
    fn prompt(&mut self) -> Result<Token, BenchError> {
        self.taken = 0;
        self.sequence.decode_prompt(self.prompt, 0).map_err(BenchError::engine("decode_prompt"))?;
        self.next()
    }

    fn next(&mut self) -> Result<Token, BenchError> {
        let sample = self.sequence.sample_next().map_err(BenchError::engine("sample_next"))?;
        if sample.is_eog && !self.ignore_eog {
            let (sequence, got, token) = (self.index, self.taken, sample.token);
            return Err(BenchError::EndOfGeneration { sequence, got, token });
        }
        self.taken += 1;
        Ok(sample.token)
    }
}

pub(super) fn threaded(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let prompt = prompt(&engine, settings.prompt_tokens)?;
    // No limit, so that what is sampled ahead costs at the end what it has saved at the start.
    let mut hosts = (0..settings.num_sequences)
        .map(|index| SequenceHost::new(&engine, settings, &prompt, index, 0))
        .collect::<Result<Vec<_>, _>>()?;
    let before = engine.metrics();
    let mut outcome = drive(&mut hosts, settings.settle_samples() as usize, settings.timed_samples())?;
    add_metrics(&mut outcome, &engine, &before);
    check_samples(&outcome.tokens, settings, |token| engine.model().is_eog(token))?;
    Ok(outcome)
}

/// What the engine counted since `before`, and what it timed since it was loaded, prompts and settling included.
pub(super) fn add_metrics(outcome: &mut Outcome, engine: &Engine, before: &engine::Metrics) {
    let metrics = engine.metrics().since(before);
    outcome
        .figures
        .extend([("mean_rows", metrics.mean_rows()), ("discarded_samples", metrics.discarded as f64)]);
    if let Some(timings) = engine.timings() {
        outcome.latencies.push(("step", Latency::of(timings.step)));
        outcome.latencies.push(("queue_wait", Latency::of(timings.queue_wait)));
    }
}

struct GenerateHost<'e> {
    engine: &'e Engine,
    prompt: &'e [Token],
    options: GenerateOptions,
    generation: Option<Generation>,
    /// Which one, from 0.
    index: usize,
    /// Tokens of the last piece that are not taken yet.
    pending: u32,
    taken: u32,
}

/// Tokens that a generation may have beyond those wanted: a piece can hold several, and the last one may come late.
const PIECE_SLACK: u32 = 16;

pub(super) fn generate(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let prompt = prompt(&engine, settings.prompt_tokens)?;
    let settle = settings.settle_samples();
    let mut options = GenerateOptions::default();
    options.max_tokens = settle + settings.sample_tokens + PIECE_SLACK;
    options.sampling = settings.engine_sampling(options.max_tokens);
    options.logprobs = settings.sampling.logprobs;
    let mut hosts: Vec<_> = (0..settings.num_sequences)
        .map(|index| GenerateHost {
            engine: &engine,
            prompt: &prompt,
            options: options.clone(),
            generation: None,
            index: index as usize,
            pending: 0,
            taken: 0,
        })
        .collect();
    let before = engine.metrics();
    let mut outcome = drive(&mut hosts, settle as usize, settings.timed_samples())?;
    add_metrics(&mut outcome, &engine, &before);
    // Pieces are text; there are no tokens to look at, and a generation that ends early has failed its host.
    outcome.tokens.clear();
    Ok(outcome)
}

impl Host for GenerateHost<'_> {
    fn prompt(&mut self) -> Result<Token, BenchError> {
        let prompt = Prompt::Tokens(self.prompt.to_vec());
        let generation =
            self.engine.generate(prompt, self.options.clone()).map_err(BenchError::engine("generate"))?;
        self.generation = Some(generation);
        self.next()
    }

    /// The token itself is not known, only that it has come.
    fn next(&mut self) -> Result<Token, BenchError> {
        const UNKNOWN: Token = -1;
        let generation = self.generation.as_mut().expect("the prompt came first");
        while self.pending == 0 {
            let Some(piece) = generation.next() else {
                let reason = match generation.outcome().map(|outcome| &outcome.reason) {
                    Some(FinishReason::Failed(error)) => error.to_string(),
                    reason => format!("{reason:?}"),
                };
                return Err(BenchError::StoppedEarly {
                    sequence: self.index,
                    got: self.taken as usize,
                    wanted: (self.options.max_tokens - PIECE_SLACK) as usize,
                    reason,
                });
            };
            self.pending = piece.tokens;
        }
        self.pending -= 1;
        self.taken += 1;
        Ok(UNKNOWN)
    }
}
