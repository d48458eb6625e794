//! Errors: a small enum an operation, the numbers in it.

use std::path::PathBuf;

use thiserror::Error;

/// A setting that cannot be.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A whole number outside its range.
    #[error("{name} is {value}, but must be {min} to {max}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// What it was set to.
        value: u64,
        /// The least that is allowed.
        min: u64,
        /// The most that is allowed.
        max: u64,
    },
    /// A number outside its range, or not a number.
    #[error("{name} is {value}, but must be a number from {min} to {max}")]
    OutOfRangeFloat {
        /// The setting.
        name: &'static str,
        /// What it was set to.
        value: f32,
        /// The least that is allowed.
        min: f32,
        /// The most that is allowed.
        max: f32,
    },
    /// llama.cpp cannot read quantized values without flash attention.
    #[error(
        "kv_type_v is quantized, which needs flash attention: set flash_attention to Auto or On, or kv_type_v to F16"
    )]
    QuantizedValuesWithoutFlashAttention,
}

/// Why a model could not be loaded.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no file, or it cannot be opened.
    #[error("cannot open the model {path}: {reason}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// The file does not begin with `GGUF`.
    #[error("{path} is not a GGUF model: it begins with {found:02x?}, not with \"GGUF\"")]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// Its first bytes, four at most.
        found: Vec<u8>,
    },
    /// The file is shorter than its tensors need.
    #[error("{path} is truncated: it has {actual} bytes, its tensors need {needed}")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the file has.
        actual: u64,
        /// Bytes that its metadata says it has.
        needed: u64,
    },
    /// The metadata cannot be read, or does not fit the tensors.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What llama.cpp says.
        reason: String,
    },
    /// A model of a kind that the pinned llama.cpp does not know.
    #[error("{path} has the architecture {architecture:?}, which this llama.cpp does not know")]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// `general.architecture` of the file.
        architecture: String,
    },
    /// The model is not one that completes text from left to right.
    #[error("{path} cannot complete text: {reason}")]
    NotGenerative {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        reason: &'static str,
    },
    /// The weights or the context do not fit into memory.
    #[error("no memory for a context of {sequences} sequences of {context_window} tokens: {reason}")]
    OutOfMemory {
        /// Sequences asked for.
        sequences: u32,
        /// Tokens a sequence asked for.
        context_window: u32,
        /// What llama.cpp says.
        reason: String,
    },
    /// llama.cpp makes no context as it was configured, or has no such device.
    #[error("llama.cpp refuses this configuration: {reason}")]
    Refused {
        /// What it says.
        reason: String,
    },
    /// The decoder thread could not be started.
    #[error("cannot start the decoder thread: {0}")]
    Thread(String),
}

/// Why there is no new sequence.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum CreateSequenceError {
    /// The sampling configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// All slots are taken.
    #[error("all {max_sequences} sequences are in use: drop one, or raise max_sequences")]
    NoFreeSlot {
        /// [`crate::EngineConfig::max_sequences`].
        max_sequences: u32,
    },
    /// The decoder's queue is full.
    #[error("the decoder's queue is full ({capacity} commands): try again later")]
    QueueFull {
        /// [`crate::EngineConfig::queue_capacity`].
        capacity: u32,
    },
    /// The engine was dropped.
    #[error("the engine was shut down")]
    Shutdown,
}

/// Why a prompt was not decoded. The sequence holds what [`crate::Sequence::position_count`] says; a
/// [`crate::Sequence::trim`] makes it usable again where a decode failed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PromptError {
    /// There are no tokens in it.
    #[error("the prompt is empty: at least one token is needed")]
    Empty,
    /// The prompt does not fit into the window.
    #[error("a prompt of {tokens} tokens at position {start} does not fit into a window of {window}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Position of the first.
        start: u32,
        /// [`crate::EngineConfig::context_window`].
        window: u32,
    },
    /// A prompt must go on where the sequence ends.
    #[error("the prompt starts at position {start}, but the sequence holds {held}: trim it, or start there")]
    PositionMismatch {
        /// The position that was asked for.
        start: u32,
        /// Positions that the sequence holds.
        held: u32,
    },
    /// A token that the model does not have.
    #[error("token {token} at index {index} is not in the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: i32,
        /// Where it is in the prompt.
        index: usize,
        /// Tokens in the vocabulary.
        vocabulary: u32,
    },
    /// The sequence was cancelled.
    #[error("the sequence was cancelled: trim it to use it again")]
    Cancelled,
    /// llama.cpp could not decode it.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The decoder's queue is full.
    #[error("the decoder's queue is full ({capacity} commands): try again later")]
    QueueFull {
        /// [`crate::EngineConfig::queue_capacity`].
        capacity: u32,
    },
    /// The engine was dropped.
    #[error("the engine was shut down")]
    Shutdown,
}

/// Why there is no next token.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SampleError {
    /// Nothing to go on from: no prompt yet, or it was trimmed, or it failed.
    #[error("the sequence has no prompt: call decode_prompt first")]
    NoPrompt,
    /// The window is full.
    #[error("the sequence is out of room: it holds {held} of {window} positions")]
    OutOfRoom {
        /// Positions that the sequence holds.
        held: u32,
        /// [`crate::EngineConfig::context_window`].
        window: u32,
    },
    /// The sequence was cancelled.
    #[error("the sequence was cancelled: trim it to use it again")]
    Cancelled,
    /// llama.cpp could not decode the last token.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The decoder's queue is full.
    #[error("the decoder's queue is full ({capacity} commands): try again later")]
    QueueFull {
        /// [`crate::EngineConfig::queue_capacity`].
        capacity: u32,
    },
    /// The engine was dropped.
    #[error("the engine was shut down")]
    Shutdown,
}

/// A step that llama.cpp could not compute for this sequence, even alone.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// No KV cells were left.
    #[error("llama.cpp found no KV cells for {rows} rows")]
    NoKvCells {
        /// Rows of this sequence in the step.
        rows: usize,
    },
    /// Anything else: `llama_decode`'s status, or the exception's text.
    #[error("llama.cpp could not decode {rows} rows: {reason}")]
    Failed {
        /// Rows of this sequence in the step.
        rows: usize,
        /// The status or the exception.
        reason: String,
    },
    /// The logits hold no number to choose by.
    #[error("the model's logits hold no finite value")]
    NotFinite,
}

/// Why a sequence was not trimmed. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum TrimError {
    /// The model's memory cannot go back there (recurrent and hybrid: only to 0; sliding-window without
    /// `full_sliding_window` or with a unified buffer: only within the window).
    #[error("the model's memory cannot be cut back from {held} to {keep} positions")]
    Unsupported {
        /// Positions to keep.
        keep: u32,
        /// Positions held.
        held: u32,
    },
    /// The engine was dropped.
    #[error("the engine was shut down")]
    Shutdown,
}

/// Why a text could not be turned into tokens, or back.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The text is longer than llama.cpp's counters reach.
    #[error("a text of {bytes} bytes is too long: {max} at most")]
    TooLong {
        /// Bytes in the text.
        bytes: usize,
        /// The most that is allowed.
        max: usize,
    },
    /// A token that the model does not have.
    #[error("token {token} is not in the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: i32,
        /// Tokens in the vocabulary.
        vocabulary: u32,
    },
    /// llama.cpp threw.
    #[error("llama.cpp could not do it: {0}")]
    Failed(String),
}

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// The model has no chat template.
    #[error("the model has no chat template")]
    None,
    /// llama.cpp does not know the template, or a text has a zero byte.
    #[error("the model's chat template could not be applied: {0}")]
    Failed(String),
}

/// Why a generation did not begin.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// No sequence for it.
    #[error(transparent)]
    Create(#[from] CreateSequenceError),
    /// The prompt could not be turned into tokens.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// The prompt could not be decoded.
    #[error(transparent)]
    Prompt(#[from] PromptError),
}
