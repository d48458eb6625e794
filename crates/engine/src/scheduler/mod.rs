//! Which rows go into the next step. Pure: it knows no llama.cpp, no channel and no clock; durations come in as numbers,
//! and everything it decides is there to be looked at.
//!
//! A round is [`Scheduler::plan`], then the decode of [`Scheduler::step`], then [`Scheduler::commit`] and a
//! [`Scheduler::sampled`] for each output, or [`Scheduler::failed`] for each part.

mod pace;
mod slot;

use std::time::Duration;

use crate::backend::Row;
use crate::model::Token;
use pace::Pace;
use slot::{Prompt, Slot};

/// The bounds of all decisions.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Slots, and the most sequences alive.
    pub(crate) max_sequences: u32,
    /// Positions that a sequence can hold.
    pub(crate) window: u32,
    /// Rows that a step can have, at least `max_sequences`.
    pub(crate) batch: u32,
    /// Tokens sampled ahead of the host; 0 where the memory cannot be rolled back.
    pub(crate) run_ahead: u32,
    /// The wait for stragglers before a step has been measured; 0: never wait.
    pub(crate) straggler_window: Duration,
    /// A step with a prompt's chunk beside others should take this long, or
    pub(crate) prefill_step: Duration,
    /// this many times one without, if that is longer.
    pub(crate) prefill_stretch: f32,
    /// Whether each sequence has a KV buffer of its own: then the rows of a prompt, but for its first, are a ubatch of their
    /// own.
    pub(crate) kv_per_sequence: bool,
}

/// While a prompt is lent, a step has one thread in so many.
pub(crate) const LENT_THREADS: u32 = 4;
/// A prompt is lent if it is at least one token for so many that its sequence holds, all of which are copied there and back.
const LENT_SHARE: u32 = 8;

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Decode [`Scheduler::step`].
    Run,
    /// Somebody is expected: wait this long, or until a command comes, and plan again.
    Wait(Duration),
    /// There is nothing to do until a command comes.
    Idle,
}

/// The rows of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) slot: u32,
    pub(crate) rows: u32,
    /// Whether they are of a prompt, or the sequence's last token.
    pub(crate) prompt: bool,
    /// Whether the last of them has logits to sample from.
    pub(crate) output: bool,
}

/// Rows sorted by slot and position, so that llama.cpp can take the step as one ubatch.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) rows: Vec<Row>,
    pub(crate) parts: Vec<Part>,
    /// The parts with an output, in their order.
    pub(crate) outputs: Vec<Part>,
}

impl Step {
    fn clear(&mut self) {
        self.rows.clear();
        self.parts.clear();
        self.outputs.clear();
    }

    fn push(&mut self, part: Part) {
        self.parts.push(part);
        if part.output {
            self.outputs.push(part);
        }
    }
}

/// A sequence whose step failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Failure {
    /// It shared the step: it is tried again, alone.
    Retry,
    /// It was alone, but its host has not asked for this token, and may never do: it is tried again when it does.
    Ahead,
    /// It was alone: it is at fault, and its work is void.
    Fatal,
}

#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    slots: Vec<Option<Slot>>,
    step: Step,
    pace: Pace,
    /// The pace while a prompt is lent, which leaves a step fewer threads.
    lending_pace: Option<Pace>,
    /// Whether one is.
    lending: bool,
    arrivals: u64,
    /// The prompts of the step that is being planned: rows, arrival and slot.
    prompts: Vec<(u32, u64, usize)>,
}

impl Scheduler {
    pub(crate) fn new(limits: Limits) -> Self {
        assert!(
            limits.max_sequences > 0 && limits.batch >= limits.max_sequences,
            "the configuration was validated"
        );
        Self {
            slots: (0..limits.max_sequences).map(|_| None).collect(),
            step: Step::default(),
            pace: Pace::new(&limits),
            lending_pace: None,
            lending: false,
            arrivals: 0,
            prompts: Vec::new(),
            limits,
        }
    }

    /// Takes the lowest free slot. `budget`: tokens never sampled ahead past, 0 for none.
    pub(crate) fn create(&mut self, budget: u32) -> Option<u32> {
        let free = self.slots.iter().position(Option::is_none)?;
        self.slots[free] = Some(Slot::new(budget));
        Some(free as u32)
    }

    /// Frees a slot.
    pub(crate) fn destroy(&mut self, slot: u32) {
        self.slots[slot as usize] = None;
    }

    /// Positions of a sequence that are in the memory.
    pub(crate) fn positions(&self, slot: u32) -> u32 {
        self.slot(slot).positions
    }

    /// The completion's tokens so far.
    pub(crate) fn history(&self, slot: u32) -> &[Token] {
        &self.slot(slot).history
    }

    /// Tokens that the host has not asked for; the seed is not one of them.
    pub(crate) fn ahead(&self, slot: u32) -> u32 {
        let slot = self.slot(slot);
        (slot.history.len() as u32).saturating_sub(slot.asked.max(1))
    }

    /// Begins a prompt where the sequence ends. The tokens fit into the window and are not none.
    pub(crate) fn prompt(&mut self, slot: u32, tokens: Vec<Token>) {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let window = self.limits.window;
        let slot = self.slot_mut(slot);
        assert!(!tokens.is_empty() && slot.positions as usize + tokens.len() <= window as usize);
        slot.void();
        // Room for the whole completion, so that no step allocates; it is not touched before it is used.
        slot.history.reserve(window as usize - slot.positions as usize - tokens.len() + 1);
        slot.prompt = Some(Prompt { tokens, done: 0, arrival, lent: false });
    }

    /// The host asks for `count` more tokens. `false`: there is nothing to go on from.
    #[must_use]
    pub(crate) fn ask(&mut self, slot: u32, count: u32) -> bool {
        let slot = self.slot_mut(slot);
        slot.asked = slot.asked.saturating_add(count);
        slot.misses = 0;
        slot.prompt.is_some() || !slot.history.is_empty()
    }

    /// If the host waits for a token that the window has no room for: takes its demand back, and returns true.
    pub(crate) fn take_out_of_room(&mut self, slot: u32) -> bool {
        let window = self.limits.window;
        let slot = self.slot_mut(slot);
        let full = slot.positions >= window && slot.demanded();
        if full {
            slot.asked = slot.history.len() as u32;
        }
        full
    }

    /// Makes everything pending void: a cancel, a trim, a failure.
    pub(crate) fn void(&mut self, slot: u32) {
        self.slot_mut(slot).void();
    }

    /// Notes that the memory now holds `positions` of a sequence with nothing pending.
    pub(crate) fn set_positions(&mut self, slot: u32, positions: u32) {
        let slot = self.slot_mut(slot);
        assert!(slot.prompt.is_none() && slot.history.is_empty(), "positions change under pending work");
        slot.positions = positions;
    }

    /// Forgets the tokens after the first `consumed` of the completion. Returns the positions to keep in the memory, if
    /// it holds more.
    pub(crate) fn rewind(&mut self, slot: u32, consumed: u32) -> Option<u32> {
        let slot = self.slot_mut(slot);
        let undone = slot.history.len().saturating_sub(consumed.max(1) as usize);
        slot.history.truncate(slot.history.len() - undone);
        slot.asked = slot.asked.min(consumed);
        if undone > 0 {
            slot.ended = false;
            slot.positions -= undone as u32;
        }
        (undone > 0).then_some(slot.positions)
    }

    /// Lends a prompt out, to be decoded elsewhere: the first that would take more than one step beside those who stream.
    /// Returns its slot and arrival. It stays lent until it is [`Scheduler::returned`], [`Scheduler::take_back`] ends it, or
    /// it is void.
    pub(crate) fn lend(&mut self) -> Option<(u32, u64)> {
        let decodes = self.decodes();
        let chunk = self.pace.chunk(decodes);
        let long = |slot: &&mut Slot| {
            let pays = |left: u32| left > chunk + 1 && left >= slot.positions / LENT_SHARE;
            !slot.alone && slot.prompt.as_ref().is_some_and(|prompt| !prompt.lent && pays(prompt.left()))
        };
        let prompts = self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let prompt = slot.as_mut().filter(|slot| long(slot))?.prompt.as_mut()?;
            Some((index as u32, prompt))
        });
        let (slot, prompt) = prompts.min_by_key(|(_, prompt)| prompt.arrival).filter(|_| decodes > 0)?;
        prompt.lent = true;
        let arrival = prompt.arrival;
        self.lending = true;
        self.lending_pace.get_or_insert_with(|| self.pace.slowed(LENT_THREADS));
        Some((slot, arrival))
    }

    /// Nobody works on a lent prompt any more.
    pub(crate) fn end_lending(&mut self) {
        self.lending = false;
    }

    /// Whether somebody has a completion that may go on.
    pub(crate) fn is_streaming(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.is_streaming(&self.limits))
    }

    /// Sequences whose last token should be in the next step.
    fn decodes(&self) -> u32 {
        self.slots.iter().flatten().filter(|slot| slot.wants_token(&self.limits)).count() as u32
    }

    fn pace(&self) -> &Pace {
        self.lending_pace.as_ref().filter(|_| self.lending).unwrap_or(&self.pace)
    }

    /// What is to be decoded of a prompt that is lent: all but the last token, whose logits are wanted here.
    pub(crate) fn lent_tokens(&self, slot: u32) -> &[Token] {
        let prompt = self.slot(slot).prompt.as_ref().filter(|prompt| prompt.lent);
        prompt.map_or(&[], |prompt| &prompt.tokens[prompt.done..prompt.tokens.len() - 1])
    }

    /// Whether the prompt that came then is still lent. Its sequence may be gone.
    pub(crate) fn is_lent(&self, slot: u32, arrival: u64) -> bool {
        let prompt = self.slots[slot as usize].as_ref().and_then(|slot| slot.prompt.as_ref());
        prompt.is_some_and(|prompt| prompt.lent && prompt.arrival == arrival)
    }

    /// The memory holds all but the last token of a prompt that was lent.
    pub(crate) fn returned(&mut self, slot: u32) {
        let rows = self.lent_tokens(slot).len();
        let slot = self.slot_mut(slot);
        if let Some(prompt) = &mut slot.prompt {
            prompt.lent = false;
            prompt.done += rows;
            slot.positions += rows as u32;
        }
    }

    /// A prompt that was lent is decoded here after all.
    pub(crate) fn take_back(&mut self, slot: u32) {
        if let Some(prompt) = &mut self.slot_mut(slot).prompt {
            prompt.lent = false;
        }
    }

    /// Whether a prompt is under way.
    pub(crate) fn is_prompting(&self, slot: u32) -> bool {
        self.slot(slot).prompt.is_some()
    }

    /// The rows that [`Scheduler::plan`] has chosen.
    pub(crate) fn step(&self) -> &Step {
        &self.step
    }

    /// Chooses the rows of the next step. `waited`: how long the ready rows have waited for others already.
    pub(crate) fn plan(&mut self, waited: Duration) -> Decision {
        self.step.clear();
        if let Some(alone) = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|slot| slot.alone)) {
            return self.plan_alone(alone);
        }

        let limits = &self.limits;
        let decodes = self.decodes();
        self.prompts.clear();
        self.prompts.extend(self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let prompt = slot.as_ref()?.prompt.as_ref().filter(|prompt| !prompt.lent)?;
            Some((prompt.left(), prompt.arrival, index))
        }));
        if decodes == 0 && self.prompts.is_empty() {
            return Decision::Idle;
        }
        // Completions that begin together go on together: a step has as many rows as the one before.
        let begins = self.prompts.is_empty()
            && self.slots.iter().flatten().all(|slot| !slot.wants_token(limits) || slot.is_fresh());
        let is_expected =
            |slot: &Slot, limits| slot.is_expected(limits) || (begins && slot.is_beginning(limits));
        if self.slots.iter().flatten().any(|slot| is_expected(slot, limits)) {
            let window = self.pace().straggler_window();
            if let Some(left) = window.checked_sub(waited).filter(|left| !left.is_zero()) {
                return Decision::Wait(left);
            }
            for slot in self.slots.iter_mut().flatten() {
                if is_expected(slot, &self.limits) {
                    slot.misses += 1;
                }
            }
        }
        self.share_out_prompt_rows(decodes);
        self.collect_rows();
        Decision::Run
    }

    /// Sets each prompt's rows for this step: equal shares, and what the short ones leave goes to the others.
    fn share_out_prompt_rows(&mut self, decodes: u32) {
        let mut room = self.pace().chunk(decodes);
        let count = self.prompts.len() as u32;
        if room >= count {
            self.prompts.sort_unstable();
        } else {
            self.prompts.sort_unstable_by_key(|&(_, arrival, _)| arrival);
        }
        for (served, (rows, ..)) in self.prompts.iter_mut().enumerate() {
            let share = if room >= count { room / (count - served as u32) } else { room.min(1) };
            *rows = share.min(*rows);
            room -= *rows;
        }
    }

    /// Puts the rows together in the order of the slots. There is room for all: a batch holds a row a slot at least.
    fn collect_rows(&mut self) {
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            if slot.wants_token(&self.limits) {
                push_decode(&mut self.step, index, slot);
            } else if let Some(&(rows, ..)) = self.prompts.iter().find(|&&(_, _, prompt)| prompt == index) {
                push_prompt(&mut self.step, index, slot, rows);
            }
        }
    }

    fn plan_alone(&mut self, index: usize) -> Decision {
        let most = self.pace().chunk(0);
        if let Some(slot) = &self.slots[index] {
            if let Some(prompt) = &slot.prompt {
                push_prompt(&mut self.step, index, slot, prompt.left().min(most));
            } else if slot.wants_token(&self.limits) {
                push_decode(&mut self.step, index, slot);
            }
        }
        if self.step.parts.is_empty() {
            // It was voided meanwhile.
            self.slot_mut(index as u32).alone = false;
            return self.plan(Duration::ZERO);
        }
        Decision::Run
    }

    /// The step is in the memory; it took `elapsed`. Its parts with an output are to be sampled now, in their order.
    pub(crate) fn commit(&mut self, elapsed: Duration) {
        let prompt_rows = self.step.parts.iter().filter(|part| part.prompt).map(|part| part.rows).sum();
        let decode_rows = self.step.parts.iter().filter(|part| !part.prompt).count() as u32;
        let pace = self.lending_pace.as_mut().filter(|_| self.lending).unwrap_or(&mut self.pace);
        pace.note(decode_rows, prompt_rows, elapsed);
        for part in &self.step.parts {
            let Some(slot) = &mut self.slots[part.slot as usize] else { continue };
            slot.alone = false;
            slot.positions += part.rows;
            if let Some(prompt) = &mut slot.prompt {
                prompt.done += part.rows as usize;
                if part.output {
                    slot.prompt = None;
                }
            }
        }
    }

    /// A token was sampled for an output of the committed step; `ends`: it ends generation.
    pub(crate) fn sampled(&mut self, slot: u32, token: Token, ends: bool) {
        let slot = self.slot_mut(slot);
        slot.history.push(token);
        slot.ended = ends;
        if ends {
            // Of what was asked for in advance nothing is wanted past the end, until the host asks again.
            slot.asked = slot.asked.min(slot.history.len() as u32);
        }
    }

    /// The committed step gave no token for this sequence. If its host has not asked for it, it waits until that happens:
    /// returns the positions to keep in the memory.
    pub(crate) fn not_sampled(&mut self, slot: u32) -> Option<u32> {
        let slot = self.slot_mut(slot);
        if !slot.postpone() {
            slot.void();
            return None;
        }
        slot.positions -= 1;
        Some(slot.positions)
    }

    /// The step failed, and the memory holds `positions` of this sequence, no more than it should: rows of a prompt that
    /// were finished count. `blame`: the failure may be this sequence's own doing.
    pub(crate) fn failed(&mut self, slot: u32, positions: u32, blame: bool) -> Failure {
        let alone = self.step.parts.len() == 1;
        let slot = self.slot_mut(slot);
        if let Some(prompt) = &mut slot.prompt {
            prompt.done += (positions - slot.positions) as usize;
        }
        slot.positions = positions;
        if blame && alone {
            if slot.postpone() {
                return Failure::Ahead;
            }
            slot.void();
            return Failure::Fatal;
        }
        slot.alone = blame;
        Failure::Retry
    }

    fn slot(&self, slot: u32) -> &Slot {
        self.slots[slot as usize].as_ref().expect("commands come from live sequences only")
    }

    fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        self.slots[slot as usize].as_mut().expect("commands come from live sequences only")
    }
}

fn push_decode(step: &mut Step, index: usize, slot: &Slot) {
    let Some(&token) = slot.history.last() else { return };
    step.rows.push(Row { slot: index as u32, token, position: slot.positions, output: true });
    step.push(Part { slot: index as u32, rows: 1, prompt: false, output: true });
}

fn push_prompt(step: &mut Step, index: usize, slot: &Slot, rows: u32) {
    let Some(prompt) = slot.prompt.as_ref().filter(|_| rows > 0) else { return };
    let tokens = &prompt.tokens[prompt.done..prompt.done + rows as usize];
    let last = rows == prompt.left();
    step.rows.extend(tokens.iter().zip(slot.positions..).map(|(&token, position)| Row {
        slot: index as u32,
        token,
        position,
        output: last && position + 1 == slot.positions + rows,
    }));
    step.push(Part { slot: index as u32, rows, prompt: true, output: last });
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
