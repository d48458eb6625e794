//! What crosses the channels between hosts and the decoder thread.
//!
//! A sequence has one operation under way at a time. Each operation that makes pending tokens void carries a new epoch,
//! and replies carry the epoch that they belong to, so that a host passes over what was sampled before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flume::{Receiver, RecvTimeoutError, Sender};

use crate::config::SamplingConfig;
use crate::error::{PromptError, SampleError, TrimError};
use crate::metrics::Timings;
use crate::model::Token;
use crate::prefill::Prefilled;

/// Tokens that a generation asks for at a time.
pub(crate) const ASK_AHEAD: u32 = 8;

/// A token, and what the host learns of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The token.
    pub token: Token,
    /// Whether it ends generation.
    pub is_eog: bool,
    /// Its log-probability (natural logarithm) under the model's raw distribution; 0 unless it was asked for.
    pub logprob: f32,
    /// Whether the most likely token of the raw distribution ends generation.
    pub argmax_is_eog: bool,
}

pub(crate) enum Command {
    Create {
        sampling: SamplingConfig,
        shared: Arc<Shared>,
        reply: Sender<u32>,
    },
    Prompt {
        slot: u32,
        epoch: u32,
        tokens: Vec<Token>,
        start: u32,
        word_continuation: bool,
        logprob: bool,
        sent: Instant,
    },
    Ask {
        slot: u32,
        count: u32,
        sent: Instant,
    },
    Trim {
        slot: u32,
        epoch: u32,
        keep: u32,
        visible: Option<u32>,
    },
    Logprob {
        slot: u32,
        epoch: u32,
        on: bool,
        consumed: u32,
    },
    Positions {
        slot: u32,
    },
    Destroy {
        slot: u32,
    },
    Timings {
        reply: Sender<Timings>,
    },
    /// From the prefill thread.
    Prefilled(Prefilled),
    Shutdown,
}

/// How long is waited for an answer before it is looked whether the decoder is still there.
const ANSWER_POLL: Duration = Duration::from_millis(50);

/// Why a command has no answer.
pub(crate) enum Unanswered {
    /// The decoder has ended.
    Shutdown,
    /// It has let go of the reply.
    Refused,
}

/// Waits for the answer to a command that was sent.
pub(crate) fn answer<T>(answers: &Receiver<T>, commands: &Sender<Command>) -> Result<T, Unanswered> {
    loop {
        match answers.recv_timeout(ANSWER_POLL) {
            Ok(answer) => return Ok(answer),
            // A command that was still in the queue when the decoder ended is never answered.
            Err(_) if commands.is_disconnected() => return Err(Unanswered::Shutdown),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Unanswered::Refused),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Reply {
    Prompt {
        epoch: u32,
        result: Result<(), PromptError>,
    },
    Token {
        epoch: u32,
        sample: Sample,
    },
    SampleFailed {
        epoch: u32,
        error: SampleError,
    },
    Trim {
        epoch: u32,
        result: Result<u32, TrimError>,
    },
    Positions(u32),
    /// The sequence was cancelled: look at the flag.
    Wake,
    Shutdown,
}

/// What a sequence's handle, its cancellers and the decoder share.
#[derive(Debug)]
pub(crate) struct Shared {
    cancelled: AtomicBool,
    pub(crate) replies: Sender<Reply>,
}

impl Shared {
    pub(crate) fn new(replies: Sender<Reply>) -> Self {
        Self { cancelled: AtomicBool::new(false), replies }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    pub(crate) fn cancel(&self) {
        if !self.cancelled.swap(true, Ordering::AcqRel) {
            // A full channel has something to wake the host already.
            let _ = self.replies.try_send(Reply::Wake);
        }
    }

    pub(crate) fn rearm(&self) {
        self.cancelled.store(false, Ordering::Release);
    }
}
