//! What a host may set, each with its unit, its range and its default. Checked once, when a model is loaded or a
//! sequence is created.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::error::ConfigError;
use crate::model::MemoryKind;

/// The most sequences that one llama.cpp context can hold (`LLAMA_MAX_SEQ` of the pinned version).
pub const MAX_SEQUENCES: u32 = 256;
/// The most tokens that a context can hold, of all its sequences together. llama.cpp touches some 50 bytes of bookkeeping
/// for each before it allocates their keys and values: without a bound a mistyped window would exhaust the machine, not fail.
pub const MAX_CONTEXT_TOKENS: u32 = 1 << 25;
/// Tokens that the repetition penalty looks back on.
pub const PENALTY_WINDOW: usize = 64;
/// The most tokens that the engine samples ahead of its host, whatever [`EngineConfig::run_ahead`] says.
pub const MAX_RUN_AHEAD: u32 = 64;

/// Sequences up to which [`KvLayout::Auto`] is one buffer for all.
const UNIFIED_UP_TO: u32 = 16;

/// How an engine is set up. `EngineConfig::default()` suits a desktop app that completes text in up to four places.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Sequences that can be alive at once, 1 to [`MAX_SEQUENCES`]. Default 4.
    pub max_sequences: u32,
    /// Tokens that each sequence can hold, prompt and completion together, at least 8, and for all sequences together at
    /// most [`MAX_CONTEXT_TOKENS`]. Default 2,048. The context takes
    /// `context_window * max_sequences` tokens of KV memory, rounded up to 256 by llama.cpp.
    pub context_window: u32,
    /// The most rows that go into one step (`n_batch`), from `max_sequences` up. Default 512. A longer prompt is decoded
    /// in chunks.
    pub batch_size: u32,
    /// The most rows that llama.cpp computes at once (`n_ubatch`), from `max_sequences` to `batch_size`. `None`: as
    /// `batch_size`, at most 512.
    pub ubatch_size: Option<u32>,
    /// Layers to keep on a GPU; `None`: all of them. Without a GPU backend it makes no difference. Default `None`.
    pub gpu_layers: Option<u32>,
    /// The GPU that holds the model when [`SplitMode::None`] is chosen, as llama.cpp numbers them. Default 0.
    pub main_device: u32,
    /// How several GPUs share the model. Default [`SplitMode::Layer`].
    pub split_mode: SplitMode,
    /// CPU threads for a step, those of a separate prompt ([`PrefillContext::Separate`]) included. `None`: the machine's
    /// physical cores, shared out among the engines of this process.
    pub threads: Option<NonZeroU32>,
    /// Threads that choose tokens when a step's rows are enough work for more than one, the decoder's own included. `None`: up
    /// to eight cores where a GPU does the model's work, else one.
    pub sampling_threads: Option<NonZeroU32>,
    /// How the sequences' KV cells are laid out. Default [`KvLayout::Auto`].
    pub kv_layout: KvLayout,
    /// Element type of the cached keys. Default [`KvType::F16`].
    pub kv_type_k: KvType,
    /// Element type of the cached values. Default [`KvType::F16`]. A quantized one needs flash attention.
    pub kv_type_v: KvType,
    /// Flash attention. Default [`FlashAttention::Auto`].
    pub flash_attention: FlashAttention,
    /// Whether sliding-window layers keep the whole context window, so that a trim is exact everywhere. Default `true`;
    /// `false` takes less memory, but then a trim to before the window is refused and nothing is sampled ahead. The same
    /// holds with [`KvLayout::Unified`].
    pub full_sliding_window: bool,
    /// Tokens that the engine may sample before the host asks for them, 0 to [`MAX_RUN_AHEAD`]; 0 turns it off. Default
    /// 4. It is off by itself for a memory that cannot be rolled back (recurrent, hybrid).
    pub run_ahead: u32,
    /// How long a step waits for sequences that are about to ask for a token, before any step was measured; then it is
    /// an eighth of a step, at most ten times this. Default 200 µs; 0: never. It is waited only if somebody is expected: a
    /// host that has its last token where nothing is sampled ahead, or its first one where no completion has gone on yet.
    pub straggler_window: Duration,
    /// Commands that may wait for the decoder thread, at least 1. Default 1,024. A sequence puts one in for each token that
    /// its host takes, so one that holds `run_ahead + 4` for each sequence is never full with the handles of this crate.
    pub queue_capacity: u32,
    /// While somebody streams, a prompt's chunk is sized so that a step with it takes about this long, 1 ms to a minute;
    /// it has 16 tokens at least. `None`: four times a step without a prompt, so that the prompt gets three quarters of
    /// the time, or 50 ms where a GPU does the model's work, 400 ms elsewhere, if that is more: with less a prompt beside
    /// others is decoded far more slowly than alone.
    pub prefill_step: Option<Duration>,
    /// Where a long prompt is decoded while somebody streams. Default [`PrefillContext::Auto`].
    pub prefill_context: PrefillContext,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_sequences: 4,
            context_window: 2048,
            batch_size: 512,
            ubatch_size: None,
            gpu_layers: None,
            main_device: 0,
            split_mode: SplitMode::Layer,
            threads: None,
            sampling_threads: None,
            kv_layout: KvLayout::Auto,
            kv_type_k: KvType::F16,
            kv_type_v: KvType::F16,
            flash_attention: FlashAttention::Auto,
            full_sliding_window: true,
            run_ahead: 4,
            straggler_window: Duration::from_micros(200),
            queue_capacity: 1024,
            prefill_step: None,
            prefill_context: PrefillContext::Auto,
        }
    }
}

impl EngineConfig {
    /// Rows that llama.cpp computes at once, after the default is filled in.
    #[must_use]
    pub fn ubatch(&self) -> u32 {
        self.ubatch_size.unwrap_or_else(|| self.batch_size.min(512))
    }

    /// Whether all sequences of a model with this memory share one KV buffer. `offloaded`: a GPU does its work.
    #[must_use]
    pub fn unified_kv(&self, memory: MemoryKind, offloaded: bool) -> bool {
        match self.kv_layout {
            KvLayout::PerSequence => false,
            KvLayout::Unified => true,
            KvLayout::Auto => {
                offloaded
                    && self.max_sequences <= UNIFIED_UP_TO
                    && !matches!(memory, MemoryKind::SlidingWindow { .. })
            }
        }
    }

    /// Whether sliding-window layers keep all that they have seen. In a shared buffer llama.cpp gives cells that a window
    /// has passed to other sequences, however large it is.
    pub(crate) fn keeps_sliding_window(&self) -> bool {
        self.full_sliding_window && self.kv_layout != KvLayout::Unified
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let range = |name, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::OutOfRange { name, value, min, max })
            }
        };
        let sequences = u64::from(self.max_sequences);
        range("max_sequences", sequences, 1, u64::from(MAX_SEQUENCES))?;
        range("context_window", self.context_window.into(), 8, u64::from(MAX_CONTEXT_TOKENS) / sequences)?;
        range("batch_size", self.batch_size.into(), sequences, 1 << 20)?;
        range("ubatch_size", self.ubatch().into(), sequences, self.batch_size.into())?;
        range("main_device", self.main_device.into(), 0, 1023)?;
        range("threads", self.threads.map_or(1, |n| n.get().into()), 1, 512)?;
        range("sampling_threads", self.sampling_threads.map_or(1, |n| n.get().into()), 1, 64)?;
        range("run_ahead", self.run_ahead.into(), 0, MAX_RUN_AHEAD.into())?;
        range("queue_capacity", self.queue_capacity.into(), 1, 1 << 20)?;
        range("straggler_window in µs", self.straggler_window.as_micros() as u64, 0, 1_000_000)?;
        let micros = |duration: Duration| duration.as_micros().try_into().unwrap_or(u64::MAX);
        range("prefill_step in µs", self.prefill_step.map_or(1000, micros), 1000, 60_000_000)?;
        if self.kv_type_v.is_quantized() && self.flash_attention == FlashAttention::Off {
            return Err(ConfigError::QuantizedValuesWithoutFlashAttention);
        }
        Ok(())
    }
}

/// How several GPUs share a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SplitMode {
    /// Everything on [`EngineConfig::main_device`].
    None,
    /// Whole layers, and their KV, on one GPU or the other.
    #[default]
    Layer,
    /// Rows of the weights across the GPUs.
    Row,
}

/// Where a prompt that takes more than one step is decoded while another sequence streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PrefillContext {
    /// [`PrefillContext::Separate`] where the processor does the model's work and the engine has four threads or more at the
    /// time, else [`PrefillContext::Shared`].
    #[default]
    Auto,
    /// In the steps of those who stream, a chunk of it in each, which makes these steps longer: see
    /// [`EngineConfig::prefill_step`].
    Shared,
    /// In a second llama.cpp context, on a thread of its own with three quarters of the CPU threads; then its keys and values
    /// are copied, which the streams wait for. Meanwhile they go on with a quarter of the threads, one at least. It takes the
    /// memory of one more sequence, from the first such prompt on, and as much again while it copies. One prompt at a time;
    /// further ones are decoded as with [`PrefillContext::Shared`] on the streams' threads, and so are all with a model that
    /// has more than full attention ([`MemoryKind::Full`]), those of a few tokens for a sequence that holds many, and all after
    /// the second context has failed.
    Separate,
}

/// How the KV cells of the sequences are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KvLayout {
    /// [`KvLayout::Unified`] on a GPU for up to 16 sequences, [`KvLayout::PerSequence`] for more, on a processor, for sliding
    /// windows, and for models with `LongRoPE`, whose rotation depends on the length of a context, which one buffer makes that of
    /// all sequences. See ARCHITECTURE.md for the measurements behind it.
    #[default]
    Auto,
    /// A buffer a sequence. Attention looks at a sequence's own cells only; a step is one ubatch only if its sequences
    /// are neighbours.
    PerSequence,
    /// One buffer for all. Any set of rows is one ubatch; attention pays for everybody's cells.
    Unified,
}

/// Element type of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KvType {
    /// 32 bits.
    F32,
    /// 16 bits.
    #[default]
    F16,
    /// bfloat16.
    Bf16,
    /// 8.5 bits.
    Q8_0,
    /// 5.5 bits.
    Q5_0,
    /// 4.5 bits.
    Q4_0,
}

impl KvType {
    fn is_quantized(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q5_0 | Self::Q4_0)
    }
}

/// Whether flash attention is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FlashAttention {
    /// Where the backend supports it.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How a sequence's tokens are chosen. The order is: masks, repetition penalty, then, with `temperature > 0`,
/// temperature, top-k, min-p, top-p and a seeded draw; with `temperature == 0` the most likely token.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SamplingConfig {
    /// Tokens that the host means to take from one prompt at most; 0: unknown. The engine does not sample ahead past it.
    /// It does not end a completion: [`crate::GenerateOptions::max_tokens`] does. Default 0.
    pub max_prediction_tokens: u32,
    /// 0 and below: greedy. Otherwise the logits are divided by it. At most 100. Default 0.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0: all. Default 40.
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this share, above 0; 1 and above: all. Default 0.95.
    pub top_p: f32,
    /// Keep tokens at least this likely against the most likely one, 0 to 1; 0: all. Default 0.05.
    pub min_p: f32,
    /// Logits of the last [`PENALTY_WINDOW`] tokens of this completion are divided (positive) or multiplied (negative)
    /// by it; 1 and below: off. At most 100. Default 1.
    pub repetition_penalty: f32,
    /// Seed of the draws; 0: a random one for each prompt. Default 0.
    pub seed: u32,
    /// Never sample a token with a line break in it. Default `false`.
    pub single_line: bool,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            max_prediction_tokens: 0,
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repetition_penalty: 1.0,
            seed: 0,
            single_line: false,
        }
    }
}

impl SamplingConfig {
    /// The most likely token, always.
    #[must_use]
    pub fn greedy() -> Self {
        Self::default()
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let finite = |name, value: f32, max: f32| {
            if value.is_finite() && value <= max {
                Ok(())
            } else {
                Err(ConfigError::OutOfRangeFloat { name, value, min: f32::MIN, max })
            }
        };
        finite("temperature", self.temperature, 100.0)?;
        finite("repetition_penalty", self.repetition_penalty, 100.0)?;
        finite("top_p", self.top_p, f32::MAX)?;
        finite("min_p", self.min_p, 1.0)
    }
}
