//! Text completion on one shared llama.cpp context.
//!
//! Each [`Sequence`] is a prompt and its completion. A decoder thread takes the next token of every sequence that wants
//! one into a single `llama_decode`, and fills the step with chunks of prompts; so several hosts pay for little more than
//! one. It samples a few tokens ahead of its hosts, so that a fast device never waits for them.
//!
//! ```no_run
//! use engine::{Engine, EngineConfig, GenerateOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::load("model.gguf", EngineConfig::default())?;
//! let mut generation = engine.generate("The capital of France is", GenerateOptions::default())?;
//! for piece in &mut generation {
//!     print!("{}", piece.text);
//! }
//! println!("\n{:?}", generation.outcome());
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised of the output
//! The same model, prompt, configuration and seed give the same tokens on the same machine as long as a sequence shares
//! its steps with the same others. A step with another number of rows may use other kernels, whose results differ in the
//! last bits of the logits; where two tokens are nearly equally likely, that can change the choice, also at temperature 0.
//! Sampling ahead, cancelling or trimming one sequence never changes another by any other way.

mod backend;
mod config;
mod decoder;
mod engine;
mod error;
mod generate;
mod llama;
mod metrics;
mod model;
mod prefill;
mod protocol;
#[cfg(test)]
mod random;
mod sampling;
mod scheduler;
mod sequence;
mod text;

pub use config::{
    EngineConfig, FlashAttention, KvLayout, KvType, MAX_CONTEXT_TOKENS, MAX_RUN_AHEAD, MAX_SEQUENCES,
    PENALTY_WINDOW, PrefillContext, SamplingConfig, SplitMode,
};
pub use engine::Engine;
pub use error::{
    ChatTemplateError, ConfigError, CreateSequenceError, DecodeError, GenerateError, LoadError, PromptError,
    SampleError, TokenizeError, TrimError,
};
pub use generate::{Completion, FinishReason, GenerateOptions, Generation, Outcome, Piece, Prompt, Usage};
pub use metrics::{Metrics, Timings};
pub use model::{ChatMessage, MemoryKind, Model, Token};
pub use protocol::Sample;
pub use sequence::{Canceller, Sequence};
