//! What the decoder thread needs of a model: the seam between scheduling and llama.cpp.

use std::ops::Range;

use crate::model::Token;

/// One token of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    /// The sequence's slot (llama.cpp's `seq_id`).
    pub(crate) slot: u32,
    pub(crate) token: Token,
    pub(crate) position: u32,
    /// Whether its logits are wanted.
    pub(crate) output: bool,
}

/// Why a decode failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DecodeFailure {
    /// No cells for the rows; the memory is as it was.
    NoKvCells,
    /// It was told to give up.
    Aborted,
    /// Anything else that it has noticed: the status.
    Failed(String),
    /// An exception, with its text: the memory may hold rows that were never computed.
    Thrown(String),
}

/// A model with a memory for several sequences, driven from one thread.
pub(crate) trait Backend {
    /// Starts to compute `rows`, which are sorted by slot and by position, and returns when that is done or, on a
    /// device, under way. Asks `abort` every now and then, where it can, and gives up once that is true. After a failure
    /// the memory may hold some of the rows: ask [`Backend::positions`].
    fn decode(&mut self, rows: &[Row], abort: &(dyn Fn() -> bool + Sync)) -> Result<(), DecodeFailure>;

    /// Waits for the last decode, and returns the logits of its output rows, one after the other in the order of the
    /// rows. An empty slice: the device failed.
    fn logits(&mut self) -> &mut [f32];

    /// Waits for the last decode.
    fn synchronize(&mut self);

    /// The positions that the memory holds of a slot. The begin is above 0 where a window has moved on.
    fn positions(&self, slot: u32) -> Range<u32>;

    /// Forgets a slot's positions from `from` on. `false`: it cannot, and nothing has changed.
    fn remove(&mut self, slot: u32, from: u32) -> bool;

    /// All that the memory holds of a slot, in a form that [`Backend::load`] of another context of the same model takes.
    /// `None`: it cannot.
    fn save(&mut self, slot: u32) -> Option<Vec<u8>>;

    /// Puts what was saved into a slot, in place of what that held. `false`: it cannot; what the slot holds then, if
    /// anything, says [`Backend::positions`].
    fn load(&mut self, slot: u32, state: Vec<u8>) -> bool;

    /// Sets the CPU threads for the next decodes.
    fn set_threads(&mut self, threads: u32);
}

#[cfg(test)]
pub(crate) mod scripted;
