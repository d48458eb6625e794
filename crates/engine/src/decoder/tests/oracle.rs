//! What a sequence must do, without threads, batches or anything sampled ahead.

use super::{Options, masks};
use crate::backend::scripted::logits_after;
use crate::config::SamplingConfig;
use crate::error::{DecodeError, PromptError, SampleError, TrimError};
use crate::model::Token;
use crate::protocol::Sample;
use crate::sampling::{Mask, Masks, Request, Scratch, choose};

pub(super) struct Oracle {
    sampling: SamplingConfig,
    options: Options,
    masks: Masks,
    /// What the memory holds, as the host sees it.
    tokens: Vec<Token>,
    history: Vec<Token>,
    /// The seed, until it is taken.
    seed: Option<Sample>,
    pub(super) cancelled: bool,
    pub(super) logprob: bool,
    pub(super) word_continuation: bool,
}

impl Oracle {
    pub(super) fn new(options: &Options, sampling: SamplingConfig) -> Self {
        Self {
            sampling,
            options: options.clone(),
            masks: masks(options.is_eog),
            tokens: Vec::new(),
            history: Vec::new(),
            seed: None,
            cancelled: false,
            logprob: false,
            word_continuation: false,
        }
    }

    pub(super) fn positions(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Chooses the token after the ones that are held. `None`: the logits are no numbers.
    fn choose(&mut self, word_continuation: bool) -> Option<Sample> {
        let mut row = logits_after(&self.tokens, self.options.poison);
        let request = Request {
            config: &self.sampling,
            seed: self.sampling.seed.into(),
            history: &self.history,
            mask: Mask { single_line: self.sampling.single_line, word_continuation },
            logprob: self.logprob,
        };
        let choice = choose(&mut row, &request, &self.masks, &mut Scratch::default())?;
        self.history.push(choice.token);
        let (token, logprob) = (choice.token, choice.logprob);
        let is_eog = self.options.is_eog;
        Some(Sample { token, is_eog: is_eog(token), logprob, argmax_is_eog: is_eog(choice.argmax) })
    }

    pub(super) fn prompt(&mut self, tokens: &[Token], start: u32) -> Result<(), PromptError> {
        if self.cancelled {
            return Err(PromptError::Cancelled);
        }
        if tokens.is_empty() {
            return Err(PromptError::Empty);
        }
        if tokens.len() as u32 + start > self.options.window {
            return Err(PromptError::TooLong { tokens: tokens.len(), start, window: self.options.window });
        }
        let held = self.positions();
        if start != held {
            return Err(PromptError::PositionMismatch { start, held });
        }
        self.tokens.extend_from_slice(tokens);
        self.history.clear();
        let word_continuation = std::mem::take(&mut self.word_continuation);
        self.seed = self.choose(word_continuation);
        if self.seed.is_none() {
            return Err(PromptError::Decode(DecodeError::NotFinite));
        }
        Ok(())
    }

    pub(super) fn sample(&mut self) -> Result<Sample, SampleError> {
        if self.cancelled {
            return Err(SampleError::Cancelled);
        }
        if let Some(seed) = self.seed.take() {
            return Ok(seed);
        }
        let last = *self.history.last().ok_or(SampleError::NoPrompt)?;
        let held = self.positions();
        if held >= self.options.window {
            return Err(SampleError::OutOfRoom { held, window: self.options.window });
        }
        let error = if self.options.poison.fails == Some(last) {
            DecodeError::Failed { rows: 1, reason: "as the script says".to_owned() }
        } else {
            self.tokens.push(last);
            match self.choose(false) {
                Some(sample) => return Ok(sample),
                None => DecodeError::NotFinite,
            }
        };
        self.history.clear();
        Err(error.into())
    }

    pub(super) fn trim(&mut self, keep: u32) -> Result<(), TrimError> {
        let held = self.positions();
        let keep = keep.min(held);
        if !self.options.rolls_back && keep != 0 && keep != held {
            return Err(TrimError::Unsupported { keep, held });
        }
        self.tokens.truncate(keep as usize);
        self.history.clear();
        self.seed = None;
        self.cancelled = false;
        Ok(())
    }
}
