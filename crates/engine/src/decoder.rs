//! The one thread that owns the context: it takes commands, plans a step, decodes it, samples and answers.

mod failures;
mod lending;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use flume::{Receiver, RecvTimeoutError};

use crate::backend::{Backend, DecodeFailure};
use crate::error::{DecodeError, PromptError, SampleError, TrimError};
use crate::metrics::{Counters, Timings, add, record};
use crate::model::Token;
use crate::prefill::Prefiller;
use crate::protocol::{Command, Reply, Sample, Shared};
use crate::sampling::{Choice, Mask, Masks, Request, Sampler, completion_seed};
use crate::scheduler::{Decision, Limits, Part, Scheduler, Step};

/// Engines of this process that are loaded: they share the processor's cores out.
pub(crate) static ENGINES: AtomicU32 = AtomicU32::new(0);

/// An engine's share of the processor's cores, one at least.
pub(crate) fn share_of_cores(cores: u32) -> u32 {
    (cores / ENGINES.load(Ordering::Relaxed).max(1)).max(1)
}

/// What the decoder is told once.
pub(crate) struct Setup {
    pub(crate) limits: Limits,
    /// Whether a decode returns before the device is done.
    pub(crate) asynchronous: bool,
    /// Whether a sequence's memory is, at least in part, one state that each step overwrites.
    pub(crate) one_state: bool,
    /// Positions that a sliding window looks back on.
    pub(crate) looks_back: Option<u32>,
    /// Whether a step of several sequences may be broken off.
    pub(crate) aborts_shared: bool,
    /// CPU threads; `None`: as many as `cores` allow.
    pub(crate) threads: Option<u32>,
    pub(crate) cores: u32,
    /// Threads that choose tokens.
    pub(crate) sampling_threads: usize,
    pub(crate) is_eog: Box<dyn Fn(Token) -> bool + Send>,
    pub(crate) vocabulary_size: usize,
    pub(crate) masks: Masks,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) counters: Arc<Counters>,
}

pub(crate) struct Decoder<B: Backend> {
    backend: B,
    setup: Setup,
    scheduler: Scheduler,
    sessions: Vec<Option<Session>>,
    commands: Receiver<Command>,
    /// Where long prompts are decoded while others stream.
    prefiller: Option<Prefiller>,
    /// The job that it has.
    lent: Option<lending::Lent>,
    /// Replies that wait for the next launch, so that waking hosts costs no device time.
    outbox: Vec<(Arc<Shared>, Reply)>,
    sampler: Sampler,
    timings: Timings,
    stopping: bool,
}

/// A live sequence.
struct Session {
    shared: Arc<Shared>,
    config: crate::config::SamplingConfig,
    epoch: u32,
    /// The completion's random stream.
    seed: u64,
    /// For the next seed token.
    word_continuation: bool,
    logprob: bool,
}

impl<B: Backend> Drop for Decoder<B> {
    /// Tells everybody, also when the thread ends by a panic.
    fn drop(&mut self) {
        self.flush();
        // First nobody can send any more, then everybody hears why: so who has heard it never waits for an answer.
        self.commands = flume::bounded(0).1;
        for session in self.sessions.iter().flatten() {
            let _ = session.shared.replies.try_send(Reply::Shutdown);
        }
    }
}

impl<B: Backend> Decoder<B> {
    pub(crate) fn new(
        backend: B,
        setup: Setup,
        commands: Receiver<Command>,
        prefiller: Option<Prefiller>,
    ) -> Self {
        let slots = setup.limits.max_sequences as usize;
        Self {
            scheduler: Scheduler::new(setup.limits.clone()),
            sessions: (0..slots).map(|_| None).collect(),
            outbox: Vec::with_capacity(2 * slots),
            sampler: Sampler::new(slots),
            timings: Timings::new(),
            stopping: false,
            lent: None,
            backend,
            setup,
            commands,
            prefiller,
        }
    }

    /// Runs until it is told to stop, or nobody can give it commands any more. On a thread of the sampler's pool, if it
    /// has one: so a step that is sampled wakes helpers only, and is not handed over itself.
    pub(crate) fn run(self)
    where
        B: Send,
    {
        let threads = self.setup.sampling_threads.min(self.setup.limits.max_sequences as usize);
        match crate::sampling::pool(threads) {
            Some(pool) => pool.install(|| self.run_here()),
            None => self.run_here(),
        }
    }

    fn run_here(mut self) {
        let mut waiting_since: Option<Instant> = None;
        while !self.stopping {
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
            }
            self.drop_cancelled();
            if self.stopping {
                break;
            }
            self.lend();
            let waited = waiting_since.map_or(Duration::ZERO, |since| since.elapsed());
            let received = match self.scheduler.plan(waited) {
                Decision::Run => {
                    waiting_since = None;
                    self.step();
                    continue;
                }
                Decision::Wait(left) => {
                    waiting_since.get_or_insert_with(Instant::now);
                    self.flush();
                    self.commands.recv_timeout(left)
                }
                Decision::Idle => {
                    waiting_since = None;
                    self.flush();
                    self.leave_threads();
                    self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
            };
            match received {
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.stopping = true,
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Create { sampling, shared, reply } => {
                // Without a free slot `reply` is dropped, which says so.
                if let Some(slot) = self.scheduler.create(sampling.max_prediction_tokens) {
                    self.sessions[slot as usize] = Some(Session {
                        shared,
                        config: sampling,
                        epoch: 0,
                        seed: 1,
                        word_continuation: false,
                        logprob: false,
                    });
                    let _ = reply.send(slot);
                }
            }
            Command::Prompt { slot, epoch, tokens, start, word_continuation, logprob, sent } => {
                record(&mut self.timings.queue_wait, sent.elapsed());
                if let Some(session) = &mut self.sessions[slot as usize] {
                    session.epoch = epoch;
                    session.seed = completion_seed(session.config.seed);
                    session.word_continuation = word_continuation;
                    session.logprob = logprob;
                }
                self.begin_prompt(slot, tokens, start);
            }
            Command::Ask { slot, count, sent } => {
                record(&mut self.timings.queue_wait, sent.elapsed());
                if self.scheduler.ask(slot, count) {
                    self.refuse_without_room(slot);
                } else {
                    self.sample_failed(slot, SampleError::NoPrompt);
                }
            }
            Command::Trim { slot, epoch, keep, visible } => self.trim(slot, epoch, keep, visible),
            Command::Logprob { slot, epoch, on, consumed } => {
                self.rewind(slot, consumed);
                if let Some(session) = &mut self.sessions[slot as usize] {
                    session.epoch = epoch;
                    session.logprob = on;
                }
            }
            Command::Positions { slot } => {
                let positions = self.scheduler.positions(slot);
                self.reply(slot, |_| Reply::Positions(positions));
            }
            Command::Destroy { slot } => {
                self.discard(slot);
                self.backend.remove(slot, 0);
                self.scheduler.destroy(slot);
                self.sessions[slot as usize] = None;
            }
            Command::Prefilled(prefilled) => self.take_prefilled(prefilled),
            Command::Timings { reply } => drop(reply.send(self.timings.clone())),
            Command::Shutdown => self.stopping = true,
        }
    }

    fn begin_prompt(&mut self, slot: u32, tokens: Vec<Token>, start: u32) {
        self.discard(slot);
        let held = self.scheduler.positions(slot);
        // What is beyond the start was sampled ahead of the host.
        if held > start && self.cut(slot, start) {
            self.scheduler.set_positions(slot, start);
        }
        let held = self.scheduler.positions(slot);
        if held == start {
            self.scheduler.prompt(slot, tokens);
        } else {
            let result = Err(PromptError::PositionMismatch { start, held });
            self.reply(slot, |epoch| Reply::Prompt { epoch, result });
        }
    }

    fn trim(&mut self, slot: u32, epoch: u32, keep: u32, visible: Option<u32>) {
        let held = self.scheduler.positions(slot);
        let keep = keep.min(visible.unwrap_or(held)).min(held);
        let done = keep == held || self.cut(slot, keep);
        let result = if done {
            self.discard(slot);
            self.scheduler.set_positions(slot, keep);
            if let Some(session) = &mut self.sessions[slot as usize] {
                session.epoch = epoch;
            }
            Ok(keep)
        } else {
            Err(TrimError::Unsupported { keep, held })
        };
        self.reply(slot, |_| Reply::Trim { epoch, result });
    }

    /// Makes what is pending void.
    fn discard(&mut self, slot: u32) {
        add(&self.setup.counters.discarded, u64::from(self.scheduler.ahead(slot)));
        self.scheduler.void(slot);
        if let Some(lent) = self.lent.as_ref().filter(|lent| lent.slot == slot) {
            lent.unwanted.store(true, Ordering::Relaxed);
        }
    }

    /// Undoes what was sampled beyond the first `consumed` tokens, and goes on from there.
    fn rewind(&mut self, slot: u32, consumed: u32) {
        let before = self.scheduler.history(slot).len();
        let Some(keep) = self.scheduler.rewind(slot, consumed) else { return };
        add(&self.setup.counters.discarded, (before - self.scheduler.history(slot).len()) as u64);
        self.roll_back(slot, keep);
    }

    /// Removes a sequence's positions from `keep` on. `false`: the memory no longer holds all that the next position would
    /// look back on, or cannot; nothing has changed.
    fn cut(&mut self, slot: u32, keep: u32) -> bool {
        let remembered = self.setup.looks_back.is_none_or(|window| {
            let first = self.backend.positions(slot).start;
            keep == 0 || first == 0 || first + window <= keep
        });
        remembered && self.backend.remove(slot, keep)
    }

    /// Takes back what was decoded ahead of the host.
    fn roll_back(&mut self, slot: u32, keep: u32) {
        if !self.cut(slot, keep) {
            // It runs ahead only where this cannot be.
            self.lose(slot, "the memory could not be rolled back");
        }
    }

    fn drop_cancelled(&mut self) {
        for slot in 0..self.sessions.len() {
            let Some(session) = &self.sessions[slot] else { continue };
            if session.shared.is_cancelled() {
                self.discard(slot as u32);
            }
        }
    }

    fn step(&mut self) {
        let threads = self.share_threads();
        self.backend.set_threads(threads);
        if !self.setup.asynchronous {
            self.flush();
        }
        let started = Instant::now();
        let step = self.scheduler.step();
        // A prompt that nobody wants any more is broken off, and so is everything on shutdown. The rows of others are
        // decoded again then, which not every memory allows.
        let alone = step.parts.len() == 1;
        let unwanted = |part: &Part| {
            (alone || part.prompt)
                && self.sessions[part.slot as usize]
                    .as_ref()
                    .is_some_and(|session| session.shared.is_cancelled())
        };
        let may_abort = self.setup.aborts_shared || alone;
        let abort =
            || may_abort && (self.setup.stop.load(Ordering::Relaxed) || step.parts.iter().any(unwanted));
        let launched = self.backend.decode(&step.rows, &abort);
        if self.setup.asynchronous {
            self.flush();
        }
        match launched {
            Ok(()) => self.finish_step(started),
            Err(failure) => self.fail_step(&failure),
        }
    }

    fn finish_step(&mut self, started: Instant) {
        let outputs = self.scheduler.step().outputs.len();
        let logits = if outputs == 0 {
            self.backend.synchronize();
            &mut []
        } else {
            self.backend.logits()
        };
        if logits.len() != outputs * self.setup.vocabulary_size {
            return self.fail_step(&DecodeFailure::Failed("the device gave no logits".to_owned()));
        }
        let elapsed = started.elapsed();
        count(&self.setup.counters, self.scheduler.step(), elapsed);
        record(&mut self.timings.step, elapsed);
        self.scheduler.commit(elapsed);
        if outputs == 0 {
            return;
        }

        let (scheduler, sessions) = (&self.scheduler, &self.sessions);
        let request = |output: usize| {
            let part = scheduler.step().outputs[output];
            let session = sessions[part.slot as usize].as_ref().expect("a step's sequences are alive");
            Request {
                config: &session.config,
                seed: session.seed,
                history: scheduler.history(part.slot),
                mask: Mask {
                    single_line: session.config.single_line,
                    word_continuation: part.prompt && session.word_continuation,
                },
                logprob: session.logprob,
            }
        };
        self.sampler.sample(logits, self.setup.vocabulary_size, request, &self.setup.masks);
        for output in 0..outputs {
            self.deliver(self.scheduler.step().outputs[output], self.sampler.choices()[output]);
        }
    }

    fn deliver(&mut self, part: Part, choice: Option<Choice>) {
        let Some(session) = &mut self.sessions[part.slot as usize] else { return };
        if session.shared.is_cancelled() {
            self.scheduler.void(part.slot);
            return;
        }
        let Some(choice) = choice else {
            return match self.scheduler.not_sampled(part.slot) {
                None => self.op_failed(part, DecodeError::NotFinite),
                Some(keep) => self.roll_back(part.slot, keep),
            };
        };
        let is_eog = (self.setup.is_eog)(choice.token);
        let sample = Sample {
            token: choice.token,
            is_eog,
            logprob: choice.logprob,
            argmax_is_eog: if choice.argmax == choice.token {
                is_eog
            } else {
                (self.setup.is_eog)(choice.argmax)
            },
        };
        if part.prompt {
            session.word_continuation = false;
            self.reply(part.slot, |epoch| Reply::Prompt { epoch, result: Ok(()) });
        }
        add(&self.setup.counters.sampled, 1);
        self.scheduler.sampled(part.slot, choice.token, is_eog);
        self.reply(part.slot, |epoch| Reply::Token { epoch, sample });
        self.refuse_without_room(part.slot);
    }

    fn refuse_without_room(&mut self, slot: u32) {
        if self.scheduler.take_out_of_room(slot) {
            let error = SampleError::OutOfRoom {
                held: self.scheduler.positions(slot),
                window: self.setup.limits.window,
            };
            self.sample_failed(slot, error);
        }
    }

    fn reply(&mut self, slot: u32, make: impl FnOnce(u32) -> Reply) {
        if let Some(session) = &self.sessions[slot as usize] {
            self.outbox.push((Arc::clone(&session.shared), make(session.epoch)));
        }
    }

    fn flush(&mut self) {
        for (shared, reply) in self.outbox.drain(..) {
            // Channels hold more than can be under way; a host that is gone needs no answer.
            if let Err(flume::TrySendError::Full(reply)) = shared.replies.try_send(reply) {
                tracing::error!(?reply, "a sequence's channel is full, which its bound should rule out");
            }
        }
    }
}

fn count(counters: &Counters, step: &Step, elapsed: Duration) {
    let decode_rows = step.parts.iter().filter(|part| !part.prompt).count() as u64;
    add(&counters.steps, 1);
    add(&counters.rows, step.rows.len() as u64);
    add(&counters.decode_steps, u64::from(decode_rows > 0));
    add(&counters.decode_rows, decode_rows);
    add(&counters.prompt_rows, step.rows.len() as u64 - decode_rows);
    add(&counters.step_nanoseconds, elapsed.as_nanos() as u64);
}

#[cfg(test)]
mod tests;
