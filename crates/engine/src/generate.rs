//! A completion as a stream of text.

use std::time::{Duration, Instant};

use flume::RecvTimeoutError;

use crate::config::SamplingConfig;
use crate::engine::Engine;
use crate::error::{DecodeError, GenerateError, PromptError, SampleError};
use crate::model::{Model, Token};
use crate::protocol::{ASK_AHEAD, Reply, Sample};
use crate::sequence::{Canceller, Event, Sequence};
use crate::text::TextStream;

/// What is to be completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text; the model's BOS goes before it where its metadata says so.
    Text(String),
    /// Tokens, as they are.
    Tokens(Vec<Token>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<Token>> for Prompt {
    fn from(tokens: Vec<Token>) -> Self {
        Self::Tokens(tokens)
    }
}

/// How a generation runs, and when it ends.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerateOptions {
    /// How tokens are chosen. `max_prediction_tokens` is set to `max_tokens`.
    pub sampling: SamplingConfig,
    /// Tokens at most. Default 256.
    pub max_tokens: u32,
    /// Texts that end it. They are not part of the result. Empty ones are ignored.
    pub stop: Vec<String>,
    /// Time for all of it, from the call on.
    pub deadline: Option<Duration>,
    /// Whether the text of control tokens in the prompt means these tokens, as in rendered chat templates.
    pub parse_special: bool,
    /// Whether the completion may not begin with whitespace.
    pub word_continuation: bool,
    /// Whether pieces come with their log-probability.
    pub logprobs: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            sampling: SamplingConfig::default(),
            max_tokens: 256,
            stop: Vec::new(),
            deadline: None,
            parse_special: false,
            word_continuation: false,
            logprobs: false,
        }
    }
}

/// A piece of a completion: whole characters, and never the begin of what may become a stop text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// The text. Bytes that are no UTF-8 are replaced by U+FFFD.
    pub text: String,
    /// The bytes as the model made them.
    pub bytes: Vec<u8>,
    /// Tokens that were sampled for it.
    pub tokens: u32,
    /// The sum of their log-probabilities; 0 unless asked for.
    pub logprob: f32,
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended it.
    EndOfGeneration,
    /// [`GenerateOptions::max_tokens`] were made.
    MaxTokens,
    /// One of [`GenerateOptions::stop`] came.
    StopText,
    /// [`GenerateOptions::deadline`] passed.
    Deadline,
    /// It was cancelled.
    Cancelled,
    /// The window is full.
    OutOfRoom,
    /// llama.cpp could not decode it.
    Failed(DecodeError),
    /// The decoder's queue was full.
    QueueFull,
    /// The engine was dropped.
    Shutdown,
}

/// How a generation ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// What a generation took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens that were taken; the one that ended generation is not counted.
    pub completion_tokens: u32,
    /// From the call until the first token was taken.
    pub time_to_first_token: Option<Duration>,
    /// From the call until the end.
    pub duration: Duration,
}

/// A whole completion.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// The text. Bytes that are no UTF-8 are replaced by U+FFFD.
    pub text: String,
    /// The bytes as the model made them.
    pub bytes: Vec<u8>,
    /// How it ended.
    pub outcome: Outcome,
}

/// A completion under way: an iterator of its pieces. The decoder works a bounded number of tokens ahead of it, and rests
/// while nobody takes them. Dropping it ends it.
#[derive(Debug)]
pub struct Generation {
    sequence: Option<Sequence>,
    canceller: Canceller,
    model: Model,
    text: TextStream,
    started: Instant,
    deadline: Option<Instant>,
    /// Tokens asked for, and taken.
    asked: u32,
    max_tokens: u32,
    usage: Usage,
    /// Tokens and log-probability since the last piece.
    since_piece: (u32, f32),
    bytes: Vec<u8>,
    outcome: Option<Outcome>,
}

impl Generation {
    pub(crate) fn start(
        engine: &Engine,
        prompt: Prompt,
        options: GenerateOptions,
    ) -> Result<Self, GenerateError> {
        let started = Instant::now();
        let model = engine.model().clone();
        let tokens = match prompt {
            Prompt::Text(text) => model.tokenize(text, true, options.parse_special)?,
            Prompt::Tokens(tokens) => tokens,
        };
        let mut sampling = options.sampling;
        sampling.max_prediction_tokens = options.max_tokens;
        let mut sequence = engine.create_sequence(sampling)?;
        sequence.set_force_word_continuation(options.word_continuation);
        sequence.set_compute_logprob(options.logprobs);
        sequence.submit_prompt(&tokens, 0)?;
        Ok(Self {
            canceller: sequence.canceller(),
            sequence: Some(sequence),
            model,
            text: TextStream::new(options.stop),
            started,
            // What is too far away for a clock never comes.
            deadline: options.deadline.and_then(|after| started.checked_add(after)),
            asked: 0,
            max_tokens: options.max_tokens,
            usage: Usage { prompt_tokens: tokens.len() as u32, ..Usage::default() },
            since_piece: (0, 0.0),
            bytes: Vec::new(),
            outcome: None,
        })
    }

    /// How it ended; `None` before that.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// What cancels it, from any thread.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    /// Takes all pieces. Blocks until it has ended.
    #[must_use]
    pub fn wait(mut self) -> Completion {
        let mut bytes = Vec::new();
        for piece in &mut self {
            bytes.extend(piece.bytes);
        }
        let outcome = self.outcome.take().unwrap_or_else(|| self.outcome_of(FinishReason::Shutdown));
        Completion { text: String::from_utf8_lossy(&bytes).into_owned(), bytes, outcome }
    }

    fn outcome_of(&self, reason: FinishReason) -> Outcome {
        Outcome { reason, usage: Usage { duration: self.started.elapsed(), ..self.usage } }
    }

    /// Whether there may be more to take; asks the decoder for it. Otherwise it has ended.
    fn prepare(&mut self) -> Result<(), FinishReason> {
        if self.usage.completion_tokens >= self.max_tokens {
            return Err(FinishReason::MaxTokens);
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(FinishReason::Deadline);
        }
        let pending = self.asked - self.usage.completion_tokens;
        let more = (self.max_tokens - self.asked).min(ASK_AHEAD - pending.min(ASK_AHEAD));
        if let (true, Some(sequence)) = (more > 0 && pending <= ASK_AHEAD / 2, &mut self.sequence) {
            sequence.ask(more).map_err(reason_of)?;
            self.asked += more;
        }
        Ok(())
    }

    /// Takes a reply in. `Some`: a piece is ready.
    fn take(&mut self, reply: Reply) -> Result<Option<Piece>, FinishReason> {
        let Some(sequence) = &mut self.sequence else { return Err(FinishReason::Shutdown) };
        match sequence.event_of(reply) {
            None | Some(Event::Prompt(Ok(()))) => Ok(None),
            Some(Event::Prompt(Err(error))) => Err(match error {
                PromptError::Decode(error) => FinishReason::Failed(error),
                PromptError::Cancelled => FinishReason::Cancelled,
                _ => FinishReason::Shutdown,
            }),
            Some(Event::Sample(result)) => {
                sequence.note(&result);
                self.take_sample(result.map_err(reason_of)?)
            }
        }
    }

    fn take_sample(&mut self, sample: Sample) -> Result<Option<Piece>, FinishReason> {
        self.usage.time_to_first_token.get_or_insert_with(|| self.started.elapsed());
        if sample.is_eog {
            return Err(FinishReason::EndOfGeneration);
        }
        self.usage.completion_tokens += 1;
        self.since_piece.0 += 1;
        self.since_piece.1 += sample.logprob;
        self.bytes.clear();
        if let Err(error) = self.model.llama.append_piece(sample.token, false, &mut self.bytes) {
            // It came from the model's own vocabulary; a token that cannot be rendered has no text.
            tracing::warn!(token = sample.token, %error, "a sampled token has no text");
        }
        let stopped = self.text.push(&self.bytes);
        if stopped {
            return Err(FinishReason::StopText);
        }
        Ok(self.piece())
    }

    /// What may be shown by now, if that is anything.
    fn piece(&mut self) -> Option<Piece> {
        let bytes = self.text.take()?;
        let (tokens, logprob) = std::mem::take(&mut self.since_piece);
        Some(Piece { text: String::from_utf8_lossy(&bytes).into_owned(), bytes, tokens, logprob })
    }

    /// Ends it; what was held back comes out.
    fn finish(&mut self, reason: FinishReason) -> Option<Piece> {
        self.outcome = Some(self.outcome_of(reason));
        // Frees the slot, and undoes what was sampled ahead.
        self.sequence = None;
        self.text.finish();
        self.piece()
    }

    fn receive(&self) -> Result<Reply, FinishReason> {
        let Some(sequence) = &self.sequence else { return Err(FinishReason::Shutdown) };
        let replies = sequence.replies();
        match self.deadline {
            None => replies.recv().map_err(|_| FinishReason::Shutdown),
            Some(deadline) => replies.recv_deadline(deadline).map_err(|error| match error {
                RecvTimeoutError::Timeout => FinishReason::Deadline,
                RecvTimeoutError::Disconnected => FinishReason::Shutdown,
            }),
        }
    }
}

impl Iterator for Generation {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        while self.outcome.is_none() {
            let taken = self.prepare().and_then(|()| self.receive()).and_then(|reply| self.take(reply));
            match taken {
                Ok(Some(piece)) => return Some(piece),
                Ok(None) => {}
                Err(reason) => return self.finish(reason),
            }
        }
        None
    }
}

#[cfg(feature = "async")]
impl Generation {
    /// As [`Iterator::next`], without blocking the thread; needs no particular runtime. A deadline is looked at when a
    /// token comes: once a step, but not before the prompt is decoded.
    pub async fn next_async(&mut self) -> Option<Piece> {
        while self.outcome.is_none() {
            if let Err(reason) = self.prepare() {
                return self.finish(reason);
            }
            let reply = match &self.sequence {
                Some(sequence) => sequence.replies().recv_async().await.unwrap_or(Reply::Shutdown),
                None => Reply::Shutdown,
            };
            match self.take(reply) {
                Ok(Some(piece)) => return Some(piece),
                Ok(None) => {}
                Err(reason) => return self.finish(reason),
            }
        }
        None
    }

    /// The pieces as an async stream.
    pub fn into_stream(self) -> impl futures_util::Stream<Item = Piece> {
        futures_util::stream::unfold(self, |mut generation| async move {
            generation.next_async().await.map(|piece| (piece, generation))
        })
    }
}

fn reason_of(error: SampleError) -> FinishReason {
    match error {
        SampleError::Cancelled => FinishReason::Cancelled,
        SampleError::OutOfRoom { .. } => FinishReason::OutOfRoom,
        SampleError::Decode(error) => FinishReason::Failed(error),
        SampleError::QueueFull { .. } => FinishReason::QueueFull,
        SampleError::NoPrompt | SampleError::Shutdown => FinishReason::Shutdown,
    }
}
