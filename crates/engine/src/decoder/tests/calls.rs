//! Random calls from several hosts: each must answer what the oracle says, whatever is sampled ahead, whoever shares the
//! steps, and whatever goes wrong with a step that can be made good.

use super::oracle::Oracle;
use super::{Options, Rig, in_time};
use crate::backend::scripted::{Poison, VOCABULARY};
use crate::config::{MAX_RUN_AHEAD, SamplingConfig};
use crate::model::Token;
use crate::random::{Random, replayable, seeds};
use crate::sequence::Sequence;

const SEED: &str = "ENGINE_CALLS_SEED";
const CALLS: usize = 80;
const FAILS: Token = 7;
const NO_NUMBER: Token = 11;

fn random_sampling(random: &mut Random) -> SamplingConfig {
    SamplingConfig {
        max_prediction_tokens: if random.once_in(2) { 0 } else { random.below(20) },
        temperature: if random.once_in(3) { 0.0 } else { 0.2 + 2.0 * random.unit() },
        top_k: random.below(50),
        top_p: if random.once_in(3) { 1.0 } else { random.unit().max(0.01) },
        min_p: if random.once_in(2) { 0.0 } else { 0.2 * random.unit() },
        repetition_penalty: if random.once_in(2) { 1.0 } else { 1.0 + random.unit() },
        seed: 1 + random.below(1000),
        single_line: random.once_in(4),
    }
}

/// Tokens that decode.
fn random_prompt(random: &mut Random, longest: u32) -> Vec<Token> {
    let tokens = 0..=random.below(longest);
    tokens
        .map(|_| random.below(VOCABULARY) as Token)
        .map(|token| if token == FAILS || token == NO_NUMBER { 0 } else { token })
        .collect()
}

/// One host: `CALLS` random calls on a sequence, and now and then another sequence.
fn host(rig: &Rig, options: &Options, mut random: Random) {
    let sampling = random_sampling(&mut random);
    let make = |sampling: SamplingConfig| -> (Sequence, Oracle) {
        let sequence = rig.create(sampling).expect("a slot a host");
        (sequence, Oracle::new(options, sampling))
    };
    let (mut sequence, mut oracle) = make(sampling);
    for _ in 0..CALLS {
        match random.below(20) {
            0..=9 => {
                for _ in 0..=random.below(8) {
                    assert_eq!(sequence.sample_next(), oracle.sample());
                }
            }
            10..=13 => {
                let start = oracle.positions() + if random.once_in(8) { 1 + random.below(3) } else { 0 };
                let prompt = random_prompt(&mut random, 40);
                assert_eq!(sequence.decode_prompt(&prompt, start), oracle.prompt(&prompt, start));
            }
            14 | 15 => {
                let keep = if random.once_in(3) { 0 } else { random.below(options.window + 9) };
                assert_eq!(sequence.trim(keep), oracle.trim(keep));
            }
            16 => {
                sequence.cancel();
                oracle.cancelled = true;
            }
            17 => {
                oracle.logprob = !oracle.logprob;
                sequence.set_compute_logprob(oracle.logprob);
            }
            18 => {
                oracle.word_continuation = true;
                sequence.set_force_word_continuation(true);
            }
            _ if random.once_in(3) => {
                drop(sequence);
                (sequence, oracle) = make(random_sampling(&mut random));
            }
            _ => std::thread::yield_now(),
        }
        if random.once_in(3) {
            assert_eq!(sequence.position_count(), oracle.positions());
        }
    }
}

fn run(seed: u64) {
    let mut random = Random(seed);
    let hosts = 1 + random.below(4);
    let rolls_back = !random.once_in(4);
    // Where it cannot go back, a step that fails costs everybody's memory, not only that of who is at fault.
    let poison = Poison { fails: rolls_back.then_some(FAILS), no_number: Some(NO_NUMBER) };
    let options = Options {
        max_sequences: hosts,
        window: 96,
        batch: hosts + random.below(24),
        run_ahead: [0, 1, 2, 3, 8, MAX_RUN_AHEAD][random.below(6) as usize],
        rolls_back,
        asynchronous: random.once_in(2),
        sampling_threads: 1 + random.below(3) as usize,
        separate_chunk: if rolls_back { random.below(3) * (1 + random.below(12)) } else { 0 },
        poison: if random.once_in(2) { poison } else { Poison::default() },
        is_eog: |token| token % 20 == 3,
        ..Options::default()
    };
    let rig = Rig::new(&options);
    if random.once_in(2) {
        rig.script.flaky(random.next());
        rig.prefill_script.flaky(random.next());
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..hosts)
            .map(|_| {
                let random = Random(random.next());
                scope.spawn(|| host(&rig, &options, random))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

#[test]
fn every_call_answers_what_the_oracle_says() {
    for seed in seeds(SEED, 150) {
        replayable(SEED, seed, |seed| in_time(move || run(seed)));
    }
}
