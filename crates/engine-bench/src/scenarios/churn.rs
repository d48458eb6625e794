//! Sequences come and go: in each phase another number of them is sampled, chosen at random from all slots, so that the
//! slots between them are empty, or held by sequences that are idle. Both are compared with the same number of sequences
//! in the first slots.

use std::time::Duration;

use engine::Engine;

use crate::error::BenchError;
use crate::raw::Token;
use crate::report::Outcome;
use crate::scenarios::engine_hosts::{SequenceHost, add_metrics, load, prompt};
use crate::scenarios::hosts::{Host, drive};
use crate::settings::Settings;

/// Changes of who is alive.
const PHASES: usize = 4;

/// What is between the sequences that are sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Between {
    Nothing,
    EmptySlots,
    IdleSequences,
}

const VARIANTS: [Between; 3] = [Between::Nothing, Between::EmptySlots, Between::IdleSequences];

/// Samples and their time.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    samples: usize,
    elapsed: Duration,
}

impl Tally {
    fn rate(self) -> f64 {
        self.samples as f64 / self.elapsed.as_secs_f64()
    }
}

pub(super) fn run(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let prompt = prompt(&engine, settings.prompt_tokens)?;
    let mut random = Random(u64::from(settings.sampling.seed) | 1);
    let before = engine.metrics();
    let mut tallies = [Tally::default(); VARIANTS.len()];
    let mut latencies = Vec::new();
    for phase in 0..PHASES {
        let slots = chosen(settings.num_sequences, &mut random);
        for turn in 0..VARIANTS.len() {
            // Another one first in each phase.
            let variant = (phase + turn) % VARIANTS.len();
            let outcome = run_phase(&engine, settings, &prompt, &slots, VARIANTS[variant])?;
            tallies[variant].samples += outcome.samples;
            tallies[variant].elapsed += outcome.elapsed;
            if VARIANTS[variant] == Between::EmptySlots {
                latencies.extend(outcome.latencies);
            }
        }
    }
    let [dense, holes, idle] = tallies.map(Tally::rate);
    let mut outcome = Outcome {
        elapsed: tallies[1].elapsed,
        samples: tallies[1].samples,
        figures: vec![
            ("dense_tokens_per_second", dense),
            ("holes_tokens_per_second", holes),
            ("idle_tokens_per_second", idle),
            ("holes_to_dense", holes / dense),
            ("idle_to_dense", idle / dense),
        ],
        latencies: Vec::new(),
        tokens: Vec::new(),
    };
    for (name, latency) in latencies {
        match outcome.latencies.iter_mut().find(|(kept, _)| *kept == name) {
            Some((_, kept)) => kept.add(&latency),
            None => outcome.latencies.push((name, latency)),
        }
    }
    add_metrics(&mut outcome, &engine, &before);
    Ok(outcome)
}

/// The slots that are sampled in a phase. From three sequences on there is a gap between them: without one nothing would be
/// compared.
fn chosen(count: u32, random: &mut Random) -> Vec<u32> {
    loop {
        let mut slots: Vec<u32> = (0..count).collect();
        random.shuffle(&mut slots);
        slots.truncate(1 + random.below(count as usize));
        slots.sort_unstable();
        if count < 3 || slots.windows(2).any(|pair| pair[0] + 1 < pair[1]) {
            return slots;
        }
    }
}

fn run_phase(
    engine: &Engine,
    settings: &Settings,
    prompt: &[Token],
    chosen: &[u32],
    between: Between,
) -> Result<Outcome, BenchError> {
    let count = if between == Between::Nothing { chosen.len() as u32 } else { settings.num_sequences };
    let mut sampled = Vec::new();
    let mut others = Vec::new();
    // All slots are free here, and the engine takes the first free one.
    for slot in 0..count {
        let mut host = SequenceHost::new(engine, settings, prompt, slot, 0)?;
        if between == Between::Nothing || chosen.contains(&slot) {
            sampled.push(host);
        } else {
            if between == Between::IdleSequences {
                host.prompt()?;
            }
            others.push(host);
        }
    }
    if between == Between::EmptySlots {
        others.clear();
    }
    drive(&mut sampled, settings.settle_samples() as usize, settings.timed_samples().div_ceil(PHASES))
}

/// xorshift64*: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }

    fn shuffle(&mut self, values: &mut [u32]) {
        for index in (1..values.len()).rev() {
            values.swap(index, self.below(index + 1));
        }
    }
}
