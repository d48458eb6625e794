//! A host's handle on one sequence.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use flume::{Receiver, Sender, TrySendError};

use crate::config::{MAX_RUN_AHEAD, SamplingConfig};
use crate::error::{CreateSequenceError, PromptError, SampleError, TrimError};
use crate::model::Token;
use crate::protocol::{ASK_AHEAD, Command, Reply, Sample, Shared, Unanswered, answer};

/// Replies that a sequence's channel holds: what can be sampled before the host takes it, in this epoch and the last,
/// and the answers to its operations.
const REPLIES: usize = 2 * (ASK_AHEAD + MAX_RUN_AHEAD) as usize + 16;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// One sequence: a prompt, its completion, and the KV cells of both.
///
/// Operations take `&mut self`, so there is one at a time; different sequences work at the same time from different
/// threads, and share steps. Dropping it frees its slot. It may outlive its engine: then every operation says so.
pub struct Sequence {
    id: u64,
    slot: u32,
    link: Link,
    replies: Receiver<Reply>,
    shared: Arc<Shared>,
    epoch: u32,
    state: State,
    /// Tokens that came while something else was waited for.
    stash: VecDeque<Result<Sample, SampleError>>,
    word_continuation: bool,
    logprob: bool,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence").field("id", &self.id).field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// What the host knows of its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It holds so many positions, and there is nothing to sample.
    Resting(u32),
    /// A prompt ends at `base`, and so many of its completion's tokens were taken.
    Sampling { base: u32, consumed: u32 },
    /// Something failed or was cancelled: the decoder has to be asked.
    Unknown,
}

/// What a host that waits learns.
pub(crate) enum Event {
    Prompt(Result<(), PromptError>),
    Sample(Result<Sample, SampleError>),
}

/// The decoder's queue has no room.
struct QueueFull;

/// What a sequence needs to know of its engine.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    pub(crate) commands: Sender<Command>,
    pub(crate) window: u32,
    pub(crate) vocabulary: u32,
    pub(crate) queue_capacity: u32,
    pub(crate) max_sequences: u32,
    /// Whether the memory can remove a sequence's last positions exactly.
    pub(crate) rolls_back: bool,
}

impl Sequence {
    pub(crate) fn create(sampling: SamplingConfig, link: Link) -> Result<Self, CreateSequenceError> {
        sampling.validate()?;
        let (sender, replies) = flume::bounded(REPLIES);
        let shared = Arc::new(Shared::new(sender));
        let (reply, created) = flume::bounded(1);
        let command = Command::Create { sampling, shared: Arc::clone(&shared), reply };
        link.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => CreateSequenceError::QueueFull { capacity: link.queue_capacity },
            TrySendError::Disconnected(_) => CreateSequenceError::Shutdown,
        })?;
        let slot = answer(&created, &link.commands).map_err(|unanswered| match unanswered {
            Unanswered::Shutdown => CreateSequenceError::Shutdown,
            Unanswered::Refused => CreateSequenceError::NoFreeSlot { max_sequences: link.max_sequences },
        })?;
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            slot,
            link,
            replies,
            shared,
            epoch: 0,
            state: State::Resting(0),
            stash: VecDeque::new(),
            word_continuation: false,
            logprob: false,
        })
    }

    /// Above 0, and never used twice in a process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Decodes `tokens` at `start_position`, which must be where the sequence ends ([`Sequence::position_count`]), and
    /// samples the seed token. Blocks until that is done; a step takes at most [`crate::EngineConfig::batch_size`] rows,
    /// so that others go on meanwhile. What was pending of an earlier completion is void.
    ///
    /// # Errors
    /// [`PromptError`] names each. The sequence keeps what it held, but for [`PromptError::Cancelled`] and
    /// [`PromptError::Decode`], after which it may hold a part of the prompt.
    pub fn decode_prompt(&mut self, tokens: &[Token], start_position: u32) -> Result<(), PromptError> {
        self.submit_prompt(tokens, start_position)?;
        self.await_prompt()
    }

    /// Sends a prompt off without waiting for it.
    pub(crate) fn submit_prompt(&mut self, tokens: &[Token], start: u32) -> Result<(), PromptError> {
        if self.shared.is_cancelled() {
            return Err(PromptError::Cancelled);
        }
        if tokens.is_empty() {
            return Err(PromptError::Empty);
        }
        if tokens.len() as u64 + u64::from(start) > u64::from(self.link.window) {
            return Err(PromptError::TooLong { tokens: tokens.len(), start, window: self.link.window });
        }
        let unknown = |&token: &Token| !u32::try_from(token).is_ok_and(|token| token < self.link.vocabulary);
        if let Some(index) = tokens.iter().position(unknown) {
            let (token, vocabulary) = (tokens[index], self.link.vocabulary);
            return Err(PromptError::UnknownToken { token, index, vocabulary });
        }
        let held = self.position_count();
        if start != held {
            return Err(if self.link.commands.is_disconnected() {
                PromptError::Shutdown
            } else {
                PromptError::PositionMismatch { start, held }
            });
        }
        let command = Command::Prompt {
            slot: self.slot,
            epoch: self.epoch.wrapping_add(1),
            tokens: tokens.to_vec(),
            start,
            word_continuation: self.word_continuation,
            logprob: self.logprob,
            sent: Instant::now(),
        };
        self.try_send(command).map_err(|error| match error {
            Some(QueueFull) => PromptError::QueueFull { capacity: self.link.queue_capacity },
            None => PromptError::Shutdown,
        })?;
        self.epoch = self.epoch.wrapping_add(1);
        self.word_continuation = false;
        self.stash.clear();
        self.state = State::Sampling { base: start + tokens.len() as u32, consumed: 0 };
        Ok(())
    }

    fn await_prompt(&mut self) -> Result<(), PromptError> {
        let result = loop {
            match self.receive() {
                Event::Prompt(result) => break result,
                Event::Sample(Err(SampleError::Cancelled)) => break Err(PromptError::Cancelled),
                Event::Sample(Err(SampleError::Shutdown)) => break Err(PromptError::Shutdown),
                Event::Sample(_) => {}
            }
        };
        if result.is_err() {
            self.state = State::Unknown;
        }
        result
    }

    /// The next token: the seed after a prompt, which is there already, and then one more each time. Blocks until it is
    /// there. After a token that ends generation it may be called on; most hosts do not.
    ///
    /// # Errors
    /// [`SampleError`] names each. After [`SampleError::Decode`] the sequence needs a new prompt.
    pub fn sample_next(&mut self) -> Result<Sample, SampleError> {
        self.ask(1)?;
        self.await_sample()
    }

    /// Tells the decoder that the host will take `count` more tokens.
    pub(crate) fn ask(&mut self, count: u32) -> Result<(), SampleError> {
        if self.shared.is_cancelled() {
            return Err(SampleError::Cancelled);
        }
        if !matches!(self.state, State::Sampling { .. }) {
            return Err(if self.link.commands.is_disconnected() {
                SampleError::Shutdown
            } else {
                SampleError::NoPrompt
            });
        }
        let command = Command::Ask { slot: self.slot, count, sent: Instant::now() };
        self.try_send(command).map_err(|error| match error {
            Some(QueueFull) => SampleError::QueueFull { capacity: self.link.queue_capacity },
            None => SampleError::Shutdown,
        })
    }

    fn await_sample(&mut self) -> Result<Sample, SampleError> {
        let result = self.stash.pop_front().unwrap_or_else(|| self.receive_sample());
        self.note(&result);
        result
    }

    /// Waits for the next token, not counted yet.
    fn receive_sample(&mut self) -> Result<Sample, SampleError> {
        loop {
            if let Event::Sample(result) = self.receive() {
                return result;
            }
        }
    }

    fn receive(&mut self) -> Event {
        loop {
            let reply = self.replies.recv().unwrap_or(Reply::Shutdown);
            if let Some(event) = self.event_of(reply) {
                return event;
            }
        }
    }

    /// What a reply means to a host that waits for a prompt or a token; `None`: nothing, it is not of this epoch.
    pub(crate) fn event_of(&self, reply: Reply) -> Option<Event> {
        let cancelled = self.shared.is_cancelled();
        match reply {
            Reply::Shutdown => Some(Event::Sample(Err(SampleError::Shutdown))),
            Reply::Token { .. } | Reply::Prompt { .. } | Reply::SampleFailed { .. } | Reply::Wake
                if cancelled =>
            {
                Some(Event::Sample(Err(SampleError::Cancelled)))
            }
            Reply::Prompt { epoch, result } if epoch == self.epoch => Some(Event::Prompt(result)),
            Reply::Token { epoch, sample } if epoch == self.epoch => Some(Event::Sample(Ok(sample))),
            Reply::SampleFailed { epoch, error } if epoch == self.epoch => Some(Event::Sample(Err(error))),
            _ => None,
        }
    }

    /// Brings the state up to date with a result that goes to the host.
    pub(crate) fn note(&mut self, result: &Result<Sample, SampleError>) {
        match (result, &mut self.state) {
            (Ok(_), State::Sampling { consumed, .. }) => *consumed += 1,
            (Err(SampleError::Decode(_) | SampleError::NoPrompt), state) => *state = State::Unknown,
            // A token that was decoded and not delivered cannot be undone.
            (Err(SampleError::Cancelled), state) if !self.link.rolls_back => *state = State::Unknown,
            _ => {}
        }
    }

    /// Keeps the first `keep_positions` positions (all, if it holds fewer), and makes what is pending void until the
    /// next prompt. Ends a cancellation. Blocks until the step under way is done.
    ///
    /// # Errors
    /// [`TrimError::Unsupported`]: the model's memory cannot go back there; nothing has changed.
    pub fn trim(&mut self, keep_positions: u32) -> Result<(), TrimError> {
        let epoch = self.epoch.wrapping_add(1);
        let visible = match self.state {
            State::Unknown => None,
            _ => Some(self.visible()),
        };
        let command = Command::Trim { slot: self.slot, epoch, keep: keep_positions, visible };
        self.link.commands.send(command).map_err(|_| TrimError::Shutdown)?;
        loop {
            match self.replies.recv() {
                Ok(Reply::Trim { epoch: of, result }) if of == epoch => {
                    let kept = result?;
                    self.epoch = epoch;
                    self.state = State::Resting(kept);
                    self.stash.clear();
                    self.shared.rearm();
                    return Ok(());
                }
                Ok(Reply::Shutdown) | Err(_) => return Err(TrimError::Shutdown),
                // A trim that is refused must leave what is pending.
                Ok(reply) => self.keep(reply),
            }
        }
    }

    fn keep(&mut self, reply: Reply) {
        match reply {
            Reply::Token { epoch, sample } if epoch == self.epoch => self.stash.push_back(Ok(sample)),
            Reply::SampleFailed { epoch, error } if epoch == self.epoch => self.stash.push_back(Err(error)),
            _ => {}
        }
    }

    /// Positions that the sequence holds, as its host sees it: what was sampled ahead is not there. After `k` tokens
    /// from a prompt that ended at position `n` it is `n + k - 1`, since the last token was not decoded yet. After a
    /// cancel or an error it waits for the step under way; 0 if the engine is gone then.
    pub fn position_count(&mut self) -> u32 {
        if self.state == State::Unknown {
            if self.link.commands.send(Command::Positions { slot: self.slot }).is_err() {
                return 0;
            }
            loop {
                match self.replies.recv() {
                    Ok(Reply::Positions(positions)) => {
                        self.state = State::Resting(positions);
                        break;
                    }
                    Ok(Reply::Shutdown) | Err(_) => return 0,
                    Ok(_) => {}
                }
            }
        }
        self.visible()
    }

    fn visible(&self) -> u32 {
        match self.state {
            State::Resting(positions) => positions,
            State::Sampling { base, consumed } => base + consumed.saturating_sub(1),
            State::Unknown => 0,
        }
    }

    /// What cancels this sequence, from any thread.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        Canceller { shared: Arc::clone(&self.shared) }
    }

    /// Cancels it: see [`Canceller::cancel`].
    pub fn cancel(&self) {
        self.shared.cancel();
    }

    /// Whether the next prompt's seed token may not begin with whitespace. It holds for one prompt.
    pub fn set_force_word_continuation(&mut self, on: bool) {
        self.word_continuation = on;
    }

    /// Whether tokens come with their log-probability from now on. Off, which is the default, it costs nothing.
    pub fn set_compute_logprob(&mut self, on: bool) {
        if self.logprob == on {
            return;
        }
        self.logprob = on;
        let State::Sampling { consumed, .. } = self.state else { return };
        if consumed == 0 && self.stash.is_empty() {
            // The seed was sampled as it was set before; it comes with the prompt, so it is there or about to be.
            let seed = self.receive_sample();
            self.stash.push_back(seed);
        }
        // What was sampled ahead becomes void. It is taken out, since the channel has room for two epochs' tokens only.
        self.replies.drain();
        let epoch = self.epoch.wrapping_add(1);
        let command = Command::Logprob { slot: self.slot, epoch, on, consumed };
        if self.link.commands.send(command).is_ok() {
            self.epoch = epoch;
        }
    }

    pub(crate) fn replies(&self) -> &Receiver<Reply> {
        &self.replies
    }

    /// `Some`: the queue is full; `None`: the engine is gone.
    fn try_send(&self, command: Command) -> Result<(), Option<QueueFull>> {
        self.link.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => Some(QueueFull),
            TrySendError::Disconnected(_) => None,
        })
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // A prompt that is being decoded is not waited for.
        self.shared.cancel();
        // Without a decoder there is no slot to free.
        let _ = self.link.commands.send(Command::Destroy { slot: self.slot });
    }
}

/// Cancels a sequence, from any thread, also while an operation of it is under way.
#[derive(Debug, Clone)]
pub struct Canceller {
    shared: Arc<Shared>,
}

impl Canceller {
    /// Cancels. Never blocks. A call that waits on the sequence returns at once; further ones say that it was cancelled,
    /// until a [`Sequence::trim`] succeeds. Other sequences are not disturbed.
    pub fn cancel(&self) {
        self.shared.cancel();
    }

    /// Whether it is cancelled, or its sequence is gone.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.shared.is_cancelled()
    }
}
