//! A deterministic stand-in for a model: the next logits are a hash of all tokens of the slot, so that any mix-up of
//! slots, positions or order shows in the tokens. It checks what it is given, and fails as it is told.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Backend, DecodeFailure, Row};
use crate::model::Token;
use crate::random::Random;

/// Not a multiple of anything that loops go by.
pub(crate) const VOCABULARY: u32 = 61;

/// How a decode goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    NoKvCells,
    /// So many rows stay in the memory.
    Failed(usize),
    Aborted(usize),
    /// So many rows seem to be in the memory.
    Thrown(usize),
    Panic,
    /// It works, and then there are no logits.
    NoLogits,
}

/// Tokens that make trouble wherever they are.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Poison {
    /// A decode fails whenever this token is among its rows.
    pub(crate) fails: Option<Token>,
    /// The logits after this token are NaN.
    pub(crate) no_number: Option<Token>,
}

/// What the test and the backend share.
#[derive(Debug, Default)]
pub(crate) struct Script {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Decodes begun.
    calls: u64,
    /// The rows of each.
    steps: Vec<Vec<Row>>,
    /// By the number of the decode, from 1.
    faults: BTreeMap<u64, Fault>,
    /// For decodes of several sequences: how every second one goes wrong, and how many more do.
    shared_faults: Option<(Fault, u32)>,
    shared_calls: u64,
    /// Makes one in eight decodes fail in a way that must not show: those of several sequences in any way, those of one
    /// by an abort.
    flaky: Option<Random>,
    poison: Poison,
    /// Cells for all slots together; `None`: no bound.
    cells: Option<usize>,
    closed: bool,
    /// What a decode takes at least.
    step: Duration,
    /// No state can be loaded, and what the slot held is lost.
    refuses_states: bool,
    /// Decodes that the closed gate lets through.
    passes: u64,
}

impl Script {
    fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.with(|state| state.calls)
    }

    pub(crate) fn steps(&self) -> Vec<Vec<Row>> {
        self.with(|state| state.steps.clone())
    }

    /// Makes the `nth` decode from now go wrong; 1 is the next.
    pub(crate) fn fail(&self, nth: u64, fault: Fault) {
        self.with(|state| state.faults.insert(state.calls + nth, fault));
    }

    /// Makes the next decode of several sequences go wrong, the next but one after that, and so on, `times` in all.
    pub(crate) fn fail_shared(&self, times: u32, fault: Fault) {
        self.with(|state| state.shared_faults = Some((fault, times)));
    }

    pub(crate) fn flaky(&self, seed: u64) {
        self.with(|state| state.flaky = Some(Random(seed)));
    }

    pub(crate) fn set_poison(&self, poison: Poison) {
        self.with(|state| state.poison = poison);
    }

    pub(crate) fn set_cells(&self, cells: usize) {
        self.with(|state| state.cells = Some(cells));
    }

    /// Makes decodes take at least so long.
    pub(crate) fn slow_down(&self, step: Duration) {
        self.with(|state| state.step = step);
    }

    pub(crate) fn refuse_states(&self) {
        self.with(|state| state.refuses_states = true);
    }

    /// From now on decodes wait, but for the next `passes`.
    pub(crate) fn close_after(&self, passes: u64) {
        self.with(|state| (state.closed, state.passes) = (true, passes));
    }

    pub(crate) fn open(&self) {
        self.with(|state| state.closed = false);
    }

    /// Waits until `calls` decodes have begun.
    pub(crate) fn wait_for_calls(&self, calls: u64) {
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), Duration::from_secs(20), |state| state.calls < calls)
            .unwrap_or_else(PoisonError::into_inner);
        let (made, late) = (waited.0.calls, waited.1.timed_out());
        drop(waited);
        assert!(!late, "{made} decodes in 20 s, not {calls}");
    }

    /// Notes a decode, waits at the gate and says how it goes wrong. `Err`: it was told to give up meanwhile. Where a failure of
    /// several costs all their memory (not `rolls_back`), none comes by chance but for want of cells.
    fn enter(&self, rows: &[Row], abort: &dyn Fn() -> bool, rolls_back: bool) -> Result<Option<Fault>, ()> {
        let mut state = self.lock();
        state.calls += 1;
        state.steps.push(rows.to_vec());
        let call = state.calls;
        self.changed.notify_all();
        if state.closed && state.passes > 0 {
            state.passes -= 1;
        } else {
            while state.closed {
                if abort() {
                    return Err(());
                }
                let wait = self.changed.wait_timeout(state, Duration::from_millis(1));
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let shared = rows.first().map(|row| row.slot) != rows.last().map(|row| row.slot);
        state.shared_calls += u64::from(shared);
        let odd = shared && state.shared_calls % 2 == 1;
        let shared_fault =
            state.shared_faults.as_mut().filter(|(_, left)| odd && *left > 0).map(|(fault, left)| {
                *left -= 1;
                *fault
            });
        let flake = state.flaky.as_mut().and_then(|random| {
            let kept = random.below(rows.len() as u32 + 1) as usize;
            match random.below(if shared { 24 } else { 8 }) {
                0..=3 if shared && !rolls_back => Some(Fault::NoKvCells),
                0 => Some(Fault::Aborted(kept)),
                1 if shared => Some(Fault::Failed(kept)),
                2 if shared => Some(Fault::NoKvCells),
                3 if shared => Some(Fault::Thrown(kept)),
                _ => None,
            }
        });
        let poisoned = rows.iter().any(|row| Some(row.token) == state.poison.fails);
        Ok(state.faults.remove(&call).or(shared_fault).or(poisoned.then_some(Fault::Failed(0))).or(flake))
    }
}

/// The backend. It panics on a step that no scheduler may make.
pub(crate) struct Scripted {
    script: Arc<Script>,
    slots: Vec<Vec<Token>>,
    batch: usize,
    rolls_back: bool,
    logits: Vec<f32>,
}

impl Scripted {
    pub(crate) fn new(script: Arc<Script>, slots: u32, batch: u32, rolls_back: bool) -> Self {
        let slots = (0..slots).map(|_| Vec::new()).collect();
        Self { script, slots, batch: batch as usize, rolls_back, logits: Vec::new() }
    }

    fn check(&self, rows: &[Row]) {
        assert!(
            !rows.is_empty() && rows.len() <= self.batch,
            "{} rows in a batch of {}",
            rows.len(),
            self.batch
        );
        let sorted =
            rows.windows(2).all(|pair| (pair[0].slot, pair[0].position) < (pair[1].slot, pair[1].position));
        assert!(sorted, "rows are not sorted: {rows:?}");
        for rows in rows.chunk_by(|a, b| a.slot == b.slot) {
            let held = self.slots[rows[0].slot as usize].len() as u32;
            let follow = rows.iter().zip(held..).all(|(row, position)| row.position == position);
            assert!(follow, "positions do not follow the {held} that the memory holds: {rows:?}");
            let inner = &rows[..rows.len() - 1];
            assert!(!inner.iter().any(|row| row.output), "logits in mid-prompt: {rows:?}");
        }
    }

    fn keep(&mut self, rows: &[Row]) {
        for row in rows {
            self.slots[row.slot as usize].push(row.token);
        }
    }
}

impl Backend for Scripted {
    fn decode(&mut self, rows: &[Row], abort: &(dyn Fn() -> bool + Sync)) -> Result<(), DecodeFailure> {
        self.check(rows);
        self.logits.clear();
        let Ok(fault) = Arc::clone(&self.script).enter(rows, abort, self.rolls_back) else {
            return Err(DecodeFailure::Aborted);
        };
        std::thread::sleep(self.script.with(|state| state.step));
        let (cells, poison) = self.script.with(|state| (state.cells, state.poison));
        let held: usize = self.slots.iter().map(Vec::len).sum();
        if cells.is_some_and(|cells| held + rows.len() > cells) {
            return Err(DecodeFailure::NoKvCells);
        }
        // A memory that cannot go back would lose what it kept; llama.cpp's keeps nothing of a single ubatch.
        let kept = |kept: usize| if self.rolls_back { kept.min(rows.len()) } else { 0 };
        match fault {
            None | Some(Fault::NoLogits) => self.keep(rows),
            Some(Fault::NoKvCells) => return Err(DecodeFailure::NoKvCells),
            Some(Fault::Failed(count)) => {
                self.keep(&rows[..kept(count)]);
                return Err(DecodeFailure::Failed("as the script says".to_owned()));
            }
            Some(Fault::Aborted(count)) => {
                self.keep(&rows[..kept(count)]);
                return Err(DecodeFailure::Aborted);
            }
            Some(Fault::Thrown(count)) => {
                for row in &rows[..kept(count)] {
                    self.slots[row.slot as usize].push(NEVER_COMPUTED);
                }
                return Err(DecodeFailure::Thrown("as the script says".to_owned()));
            }
            Some(Fault::Panic) => panic!("as the script says"),
        }
        if fault.is_none() {
            for row in rows.iter().filter(|row| row.output) {
                self.logits.extend(logits_after(&self.slots[row.slot as usize], poison));
            }
        }
        Ok(())
    }

    fn logits(&mut self) -> &mut [f32] {
        &mut self.logits
    }

    fn synchronize(&mut self) {}

    fn positions(&self, slot: u32) -> Range<u32> {
        0..self.slots[slot as usize].len() as u32
    }

    fn remove(&mut self, slot: u32, from: u32) -> bool {
        let tokens = &mut self.slots[slot as usize];
        let possible = self.rolls_back || from == 0 || from as usize >= tokens.len();
        if possible {
            tokens.truncate(from as usize);
        }
        possible
    }

    fn save(&mut self, slot: u32) -> Option<Vec<u8>> {
        Some(self.slots[slot as usize].iter().flat_map(|token| token.to_ne_bytes()).collect())
    }

    fn load(&mut self, slot: u32, state: Vec<u8>) -> bool {
        let (tokens, _) = state.as_chunks();
        self.slots[slot as usize] = tokens.iter().map(|&token| Token::from_ne_bytes(token)).collect();
        let refused = self.script.with(|state| state.refuses_states);
        if refused {
            self.slots[slot as usize].clear();
        }
        !refused
    }

    fn set_threads(&mut self, _: u32) {}
}

/// What the memory holds in place of a token whose keys and values were never computed.
const NEVER_COMPUTED: Token = -1;

/// The logits after a sequence's tokens.
pub(crate) fn logits_after(tokens: &[Token], poison: Poison) -> Vec<f32> {
    if tokens.last().copied() == poison.no_number && !tokens.is_empty() {
        return vec![f32::NAN; VOCABULARY as usize];
    }
    let hash = tokens.iter().fold(1, |hash, &token| Random(hash ^ token as u64).next());
    let mut random = Random(hash);
    (0..VOCABULARY).map(|_| 16.0 * random.unit() - 8.0).collect()
}
