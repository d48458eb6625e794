//! What becomes of a step that failed, and of its sequences.

use std::sync::atomic::Ordering;

use super::Decoder;
use crate::backend::{Backend, DecodeFailure};
use crate::error::{DecodeError, SampleError};
use crate::metrics::add;
use crate::protocol::Reply;
use crate::scheduler::{Failure, Part};

impl<B: Backend> Decoder<B> {
    /// Brings scheduler and memory together again after a decode that failed.
    pub(super) fn fail_step(&mut self, failure: &DecodeFailure) {
        if self.setup.stop.load(Ordering::Relaxed) {
            // The engine is being dropped, and has broken the step off: everybody hears that, and nothing else.
            return;
        }
        add(&self.setup.counters.decode_failures, 1);
        self.backend.synchronize();
        let thrown = matches!(failure, DecodeFailure::Thrown(_));
        for index in 0..self.scheduler.step().parts.len() {
            let part = self.scheduler.step().parts[index];
            let before = self.scheduler.positions(part.slot);
            let held = self.backend.positions(part.slot).end;
            // Finished rows of a prompt may stay; but a row whose logits are wanted has to be decoded again. After an
            // exception, rows that the memory holds may never have been computed.
            let finished = if part.prompt && !thrown { part.rows - u32::from(part.output) } else { 0 };
            let usable = before + finished;
            // A state that a broken step has touched is worth nothing, whatever position it claims; nor is a window, of which
            // an exception may have cost positions that its next one looks back on.
            let touched =
                (self.setup.one_state && held != before) || (self.setup.looks_back.is_some() && thrown);
            if touched || held < before || (held > usable && !self.cut(part.slot, usable)) {
                self.lose(part.slot, "the memory could not be rolled back after a failed step");
                continue;
            }
            let blame = *failure != DecodeFailure::Aborted;
            match self.scheduler.failed(part.slot, held.min(usable), blame) {
                Failure::Retry | Failure::Ahead => {}
                Failure::Fatal => {
                    let rows = part.rows as usize;
                    let error = match failure {
                        DecodeFailure::NoKvCells => DecodeError::NoKvCells { rows },
                        DecodeFailure::Aborted => {
                            DecodeError::Failed { rows, reason: "broken off".to_owned() }
                        }
                        DecodeFailure::Failed(reason) | DecodeFailure::Thrown(reason) => {
                            DecodeError::Failed { rows, reason: reason.clone() }
                        }
                    };
                    self.op_failed(part, error);
                }
            }
        }
        // llama.cpp makes room for a step of several by moving the states of those that sit out, and has failed to.
        let moved = self.scheduler.step().parts.len() > 1 && *failure != DecodeFailure::NoKvCells;
        if self.setup.one_state && moved {
            for slot in 0..self.sessions.len() as u32 {
                let part = self.scheduler.step().parts.iter().any(|part| part.slot == slot);
                if !part && self.sessions[slot as usize].is_some() && self.scheduler.positions(slot) > 0 {
                    self.lose(slot, "a failed step of others has cost its state");
                }
            }
        }
    }

    /// A sequence's memory is not what it should be: it is emptied, and its operation fails.
    pub(super) fn lose(&mut self, slot: u32, reason: &str) {
        let part = self.scheduler.step().parts.iter().find(|part| part.slot == slot).copied();
        let prompt = self.scheduler.is_prompting(slot);
        let part = part.unwrap_or(Part { slot, rows: 0, prompt, output: false });
        self.backend.remove(slot, 0);
        self.scheduler.void(slot);
        self.scheduler.set_positions(slot, 0);
        self.op_failed(part, DecodeError::Failed { rows: part.rows as usize, reason: reason.to_owned() });
    }

    pub(super) fn op_failed(&mut self, part: Part, error: DecodeError) {
        if part.prompt {
            self.reply(part.slot, |epoch| Reply::Prompt { epoch, result: Err(error.into()) });
        } else {
            self.sample_failed(part.slot, error.into());
        }
    }

    pub(super) fn sample_failed(&mut self, slot: u32, error: SampleError) {
        self.reply(slot, |epoch| Reply::SampleFailed { epoch, error });
    }
}
