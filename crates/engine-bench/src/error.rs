//! Why a scenario has no result.

use std::path::PathBuf;

use thiserror::Error;

/// A scenario that failed. A result that is not whole is none.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A setting that the scenario cannot run with.
    #[error("{0}")]
    Settings(String),
    /// No scenario of this name.
    #[error("unknown scenario: `--scenario list` prints all")]
    UnknownScenario,
    /// The model is missing, or cannot be used.
    #[error("cannot use the model {path}: {reason}")]
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// llama.cpp did not make a context.
    #[error(
        "llama.cpp could not make a context of {n_ctx} tokens for {n_seq_max} sequences; --verbose shows its log"
    )]
    Context {
        /// Tokens.
        n_ctx: u32,
        /// Sequences.
        n_seq_max: u32,
    },
    /// `llama_decode` failed.
    #[error("llama_decode failed on {rows} rows with status {status}")]
    Decode {
        /// Rows in the batch.
        rows: usize,
        /// What it returned.
        status: i32,
    },
    /// A sequence ended before it had all its samples.
    #[error("sequence {sequence} ended after {got} of {wanted} samples: {reason}")]
    StoppedEarly {
        /// Which one, from 0.
        sequence: usize,
        /// Samples that it has.
        got: usize,
        /// Samples that it must have.
        wanted: usize,
        /// What ended it.
        reason: String,
    },
    /// A sequence ended its generation.
    #[error(
        "sequence {sequence} ended its generation with token {token} after {got} samples; --ignore-eog goes on"
    )]
    EndOfGeneration {
        /// Which one, from 0.
        sequence: usize,
        /// Samples before it.
        got: usize,
        /// The token.
        token: i32,
    },
    /// A call to the engine failed.
    #[error("{call}: {reason}")]
    Engine {
        /// The call.
        call: &'static str,
        /// What it answered.
        reason: String,
    },
    /// What was to be measured did not happen.
    #[error("{0}")]
    Missed(String),
    /// A file could not be written.
    #[error("cannot write {path}: {reason}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
}

impl BenchError {
    /// For `map_err` on a call to the engine.
    pub(crate) fn engine<E: std::fmt::Display>(call: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Engine { call, reason: error.to_string() }
    }
}
