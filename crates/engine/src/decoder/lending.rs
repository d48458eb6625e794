//! The decoder's side of [`crate::prefill`]: which prompt is decoded elsewhere, and what comes back.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Decoder, share_of_cores};
use crate::backend::Backend;
use crate::metrics::add;
use crate::prefill::{Job, Prefilled, Prefiller};
use crate::scheduler::LENT_THREADS;

/// A prompt that is decoded elsewhere.
pub(super) struct Lent {
    pub(super) slot: u32,
    /// Which prompt of the slot it is.
    arrival: u64,
    pub(super) unwanted: Arc<AtomicBool>,
}

impl<B: Backend> Decoder<B> {
    /// Has a long prompt decoded elsewhere, if somebody streams here.
    pub(super) fn lend(&mut self) {
        let pays = |prefiller: &&Prefiller| self.threads() >= prefiller.from_threads;
        let Some(prefiller) = self.prefiller.as_ref().filter(|_| self.lent.is_none()).filter(pays) else {
            return;
        };
        let Some((slot, arrival)) = self.scheduler.lend() else { return };
        let start = self.scheduler.positions(slot);
        let state = if start > 0 { self.backend.save(slot) } else { Some(Vec::new()) };
        let session = self.sessions[slot as usize].as_ref();
        let unwanted = Arc::new(AtomicBool::new(false));
        let job = state.zip(session).map(|(state, session)| Job {
            start,
            state,
            tokens: self.scheduler.lent_tokens(slot).to_vec(),
            shared: Arc::clone(&session.shared),
            unwanted: Arc::clone(&unwanted),
        });
        prefiller.set_threads(self.threads() - self.own_threads());
        if job.is_some_and(|job| prefiller.send(job)) {
            self.lent = Some(Lent { slot, arrival, unwanted });
        } else {
            self.stop_lending("the state could not be handed over");
            self.scheduler.end_lending();
            self.scheduler.take_back(slot);
        }
    }

    /// Goes on with a prompt that was lent, if it is still wanted.
    pub(super) fn take_prefilled(&mut self, prefilled: Prefilled) {
        let Some(Lent { slot, arrival, .. }) = self.lent.take() else { return };
        self.scheduler.end_lending();
        let wanted = self.scheduler.is_lent(slot, arrival);
        match prefilled {
            Ok(Some(state)) if wanted => {
                let rows = self.scheduler.lent_tokens(slot).len() as u32;
                let before = self.scheduler.positions(slot);
                let loaded = self.backend.load(slot, state);
                let held = self.backend.positions(slot).end;
                if loaded && held == before + rows {
                    add(&self.setup.counters.separate_prompt_rows, u64::from(rows));
                    return self.scheduler.returned(slot);
                }
                self.stop_lending("the context took no state");
                self.scheduler.take_back(slot);
                if held != before {
                    self.lose(slot, "the memory could not be restored after a prompt was decoded elsewhere");
                }
            }
            // If it was cancelled, that is seen next.
            Ok(None) if wanted => self.scheduler.take_back(slot),
            Ok(_) => {}
            Err(reason) => {
                self.stop_lending(&reason);
                if wanted {
                    self.scheduler.take_back(slot);
                }
            }
        }
    }

    /// From now on every prompt is decoded here.
    fn stop_lending(&mut self, reason: &str) {
        tracing::warn!(reason, "prompts are no longer decoded in a context of their own");
        self.prefiller = None;
    }

    /// CPU threads that this engine may have.
    fn threads(&self) -> u32 {
        self.setup.threads.unwrap_or_else(|| share_of_cores(self.setup.cores))
    }

    /// CPU threads for a step beside a prompt that is decoded elsewhere: a token waits for memory more than for arithmetic, a
    /// prompt the other way round.
    fn own_threads(&self) -> u32 {
        (self.threads() / LENT_THREADS).max(1)
    }

    /// Shares the threads out, and returns those of the next step.
    pub(super) fn share_threads(&self) -> u32 {
        let threads = self.threads();
        let Some(prefiller) = self.prefiller.as_ref().filter(|_| self.lent.is_some()) else { return threads };
        let own = self.own_threads();
        prefiller.set_threads(threads - own);
        own
    }

    /// With nothing to do here, and nobody who might ask for something, a lent prompt gets all threads.
    pub(super) fn leave_threads(&self) {
        if let Some(prefiller) = self.prefiller.as_ref().filter(|_| !self.scheduler.is_streaming()) {
            prefiller.set_threads(self.threads());
        }
    }
}
