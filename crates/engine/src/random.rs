//! Numbers for tests, from a seed that a failure prints.

/// `SplitMix64` (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `bound`, which is above 0.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound)) as u32
    }

    /// True once in `times`.
    pub(crate) fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// From 0 to below 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }
}

/// The seeds to try: the one in the environment's `variable`, which replays a failure, or else `0..count`.
pub(crate) fn seeds(variable: &str, count: u64) -> std::ops::Range<u64> {
    match std::env::var(variable) {
        Ok(text) => {
            let seed = text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, not a whole number"));
            seed..seed + 1
        }
        Err(_) => 0..count,
    }
}

/// Runs `test`; if it panics, says with which `seed`, and how to do that again.
pub(crate) fn replayable(variable: &str, seed: u64, test: impl FnOnce(u64)) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(seed))) {
        eprintln!("the seed was {seed}: {variable}={seed} replays it");
        std::panic::resume_unwind(panic);
    }
}
