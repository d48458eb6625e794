//! Counters of the decoder thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// What the decoder thread has done since the model was loaded.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Metrics {
            $($(#[$doc])* pub $name: u64,)+
            /// Time in steps, from the launch of the decode until its logits are there.
            pub step_time: Duration,
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)+
            pub(crate) step_nanoseconds: AtomicU64,
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Metrics {
                Metrics {
                    $($name: self.$name.load(Ordering::Relaxed),)+
                    step_time: Duration::from_nanos(self.step_nanoseconds.load(Ordering::Relaxed)),
                }
            }
        }

        impl Metrics {
            /// What was added since an `earlier` snapshot of the same engine.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self {
                    $($name: self.$name.saturating_sub(earlier.$name),)+
                    step_time: self.step_time.saturating_sub(earlier.step_time),
                }
            }
        }
    };
}

counters! {
    /// Decodes that succeeded.
    steps,
    /// Rows in them.
    rows,
    /// Steps with at least one sequence's last token in them.
    decode_steps,
    /// Rows that were a sequence's last token.
    decode_rows,
    /// Rows that were part of a prompt, without those of `separate_prompt_rows`.
    prompt_rows,
    /// Rows of prompts that were decoded in a context of their own, in no step. See
    /// [`PrefillContext`](crate::PrefillContext).
    separate_prompt_rows,
    /// Tokens sampled.
    sampled,
    /// Tokens sampled ahead of the host, and undone.
    discarded,
    /// Decodes that failed, or were broken off.
    decode_failures,
}

impl Metrics {
    /// Mean sequences a decode step; 0 before the first.
    #[must_use]
    pub fn mean_rows(&self) -> f64 {
        if self.decode_steps == 0 { 0.0 } else { self.decode_rows as f64 / self.decode_steps as f64 }
    }
}

/// How long the decoder thread's work and its hosts' calls have taken since the model was loaded, in microseconds: from 1
/// to [`Timings::MAX_MICROS`], to three significant digits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Timings {
    /// Steps, from the launch of the decode until its logits are there.
    pub step: Histogram<u64>,
    /// Prompts, and requests for tokens, from the host's call until the decoder takes them up, which it does before each
    /// step. A token that was sampled ahead is there already and waits for none of it.
    pub queue_wait: Histogram<u64>,
}

impl Timings {
    /// What is longer counts as this: ten minutes.
    pub const MAX_MICROS: u64 = 600_000_000;

    pub(crate) fn new() -> Self {
        let histogram = || {
            Histogram::new_with_bounds(1, Self::MAX_MICROS, 3)
                .expect("the bounds are constants that it accepts")
        };
        Self { step: histogram(), queue_wait: histogram() }
    }
}

/// Records a duration; it never allocates.
pub(crate) fn record(histogram: &mut Histogram<u64>, duration: Duration) {
    histogram.saturating_record(duration.as_micros().try_into().unwrap_or(u64::MAX));
}

/// Adds to a counter that only one thread writes.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed) + value, Ordering::Relaxed);
}
