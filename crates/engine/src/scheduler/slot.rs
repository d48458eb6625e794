//! What the scheduler knows of one sequence.

use super::Limits;
use crate::model::Token;

/// Steps that may run without a sequence that was expected, before it is expected no more.
const MAX_MISSES: u8 = 2;

#[derive(Debug)]
pub(super) struct Slot {
    /// Positions in the memory.
    pub(super) positions: u32,
    /// The prompt that is being decoded.
    pub(super) prompt: Option<Prompt>,
    /// Tokens sampled since the prompt. All but the last are in the memory.
    pub(super) history: Vec<Token>,
    /// Tokens that the host has asked for since the prompt.
    pub(super) asked: u32,
    /// Tokens never sampled ahead past; 0: no bound.
    budget: u32,
    /// Whether the last token ends generation, or could not be gone on from. It is not unless the host asks.
    pub(super) ended: bool,
    /// Steps that ran without it since its host asked last.
    pub(super) misses: u8,
    /// Whether its next step is its own, because one that it shared has failed.
    pub(super) alone: bool,
}

#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<Token>,
    /// Tokens in the memory.
    pub(super) done: usize,
    /// When it came, as a count.
    pub(super) arrival: u64,
    /// Whether it is decoded elsewhere.
    pub(super) lent: bool,
}

impl Prompt {
    pub(super) fn left(&self) -> u32 {
        (self.tokens.len() - self.done) as u32
    }
}

impl Slot {
    pub(super) fn new(budget: u32) -> Self {
        Self {
            positions: 0,
            prompt: None,
            history: Vec::new(),
            asked: 0,
            budget,
            ended: false,
            misses: 0,
            alone: false,
        }
    }

    pub(super) fn void(&mut self) {
        self.prompt = None;
        self.history.clear();
        self.asked = 0;
        self.ended = false;
        self.misses = 0;
        self.alone = false;
    }

    /// Leaves a token that the host has not asked for until it does. `false`: the host waits.
    pub(super) fn postpone(&mut self) -> bool {
        let ahead = self.prompt.is_none() && !self.history.is_empty() && !self.demanded();
        if ahead {
            self.ended = true;
            self.alone = false;
        }
        ahead
    }

    fn sampled(&self) -> u32 {
        self.history.len() as u32
    }

    /// Whether the host waits for a token that has yet to be decoded.
    pub(super) fn demanded(&self) -> bool {
        self.prompt.is_none() && !self.history.is_empty() && self.asked > self.sampled()
    }

    /// Whether its last token should be in the next step.
    pub(super) fn wants_token(&self, limits: &Limits) -> bool {
        let ahead = self.asked > 0
            && !self.ended
            && self.sampled() < self.asked.saturating_add(limits.run_ahead)
            && (self.budget == 0 || self.sampled() < self.budget);
        self.prompt.is_none()
            && !self.history.is_empty()
            && self.positions < limits.window
            && (self.asked > self.sampled() || ahead)
    }

    /// Whether its completion may go on.
    pub(super) fn is_streaming(&self, limits: &Limits) -> bool {
        self.prompt.is_none()
            && !self.history.is_empty()
            && self.asked > 0
            && !self.ended
            && self.positions < limits.window
    }

    /// Whether nobody has gone on yet from its completion's first token.
    pub(super) fn is_fresh(&self) -> bool {
        self.prompt.is_none() && self.sampled() == 1
    }

    /// Whether its host has its first token, and is likely to begin with it at once.
    pub(super) fn is_beginning(&self, limits: &Limits) -> bool {
        self.is_fresh()
            && self.asked == 0
            && !self.ended
            && self.positions < limits.window
            && self.misses < MAX_MISSES
    }

    /// Whether its host has its last token, and is likely to ask for the next at once.
    pub(super) fn is_expected(&self, limits: &Limits) -> bool {
        limits.run_ahead == 0
            && self.is_streaming(limits)
            && self.asked == self.sampled()
            && self.misses < MAX_MISSES
    }
}
