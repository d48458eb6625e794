//! Four hosts at once, each with random prompts, samples, trims and cancels: what each hears is what it hears alone.
#![allow(missing_docs)]

mod common;
#[allow(dead_code)]
#[path = "../src/random.rs"]
mod random;

use std::time::Duration;

use common::{all_small, alone, greedy, in_threads, long_prompt, rolls_back, sequence, tokens};
use engine::{Engine, EngineConfig, KvLayout, PrefillContext, PromptError, SampleError, Sequence, Token};
use random::{Random, replayable, seeds};

const HOSTS: usize = 4;
/// Sequences of a host, one after the other.
const SEQUENCES: usize = 12;
const LENGTHS: [usize; 4] = [3, 20, 90, 200];
/// Tokens of a completion that are known.
const KNOWN: usize = 40;

/// A prompt, and what is said after it.
struct Known {
    prompt: Vec<Token>,
    said: Vec<Token>,
}

/// A host's calls on one sequence, from the start of a prompt; `true`: a cancel has ended them.
fn complete(sequence: &mut Sequence, known: &Known, random: &mut Random, goes_back: bool) -> bool {
    let length = known.prompt.len() as u32;
    let next = |sequence: &mut Sequence, index: usize| match sequence.sample_next() {
        Ok(sample) => {
            assert_eq!(sample.token, known.said[index], "token {index} after {length}");
            false
        }
        Err(SampleError::Cancelled) => true,
        Err(error) => panic!("{error}"),
    };
    let decoded = |result: Result<(), PromptError>| match result {
        Ok(()) => false,
        Err(PromptError::Cancelled) => true,
        Err(error) => panic!("{error}"),
    };
    if decoded(sequence.decode_prompt(&known.prompt, 0)) {
        return true;
    }
    let count = random.below(KNOWN as u32 - 5) as usize;
    for index in 0..count {
        if random.once_in(7) {
            sequence.set_compute_logprob(random.once_in(2));
        }
        if next(sequence, index) {
            return true;
        }
    }
    if count < 2 || !goes_back {
        return false;
    }
    // Back to anywhere, and on from there.
    let keep = random.below(length + count as u32 - 1);
    sequence.trim(keep).unwrap_or_else(|error| panic!("{error}"));
    let (rest, first) = match keep.checked_sub(length) {
        None => (&known.prompt[keep as usize..], 0),
        Some(back) => (&known.said[back as usize..=back as usize], back as usize + 1),
    };
    decoded(sequence.decode_prompt(rest, keep)) || (first..first + 5).any(|index| next(sequence, index))
}

fn run(engine: &Engine, seed: u64) {
    let goes_back = rolls_back(engine);
    let known: Vec<_> = LENGTHS
        .iter()
        .map(|&length| {
            let prompt = long_prompt(engine, length);
            Known { said: tokens(&alone(engine, &prompt, KNOWN)), prompt }
        })
        .collect();
    in_threads(HOSTS, |host| {
        let mut random = Random(seed + host as u64);
        for _ in 0..SEQUENCES {
            let mut sequence = sequence(engine, greedy());
            for _ in 0..=random.below(6) {
                let known = &known[random.below(LENGTHS.len() as u32) as usize];
                let delay = random.once_in(3).then(|| Duration::from_micros(random.below(3000).into()));
                std::thread::scope(|scope| {
                    if let Some(delay) = delay {
                        let canceller = sequence.canceller();
                        scope.spawn(move || {
                            std::thread::sleep(delay);
                            canceller.cancel();
                        });
                    }
                    let cancelled = complete(&mut sequence, known, &mut random, goes_back && delay.is_none());
                    assert!(!cancelled || delay.is_some(), "nobody has cancelled");
                });
                sequence.trim(0).unwrap_or_else(|error| panic!("{error}"));
            }
        }
    });
}

type Set = fn(&mut EngineConfig);

const SETS: [(&str, Set); 5] = [
    ("as it is", |_| {}),
    ("nothing ahead", |config| config.run_ahead = 0),
    ("one buffer, far ahead", |config| (config.kv_layout, config.run_ahead) = (KvLayout::Unified, 64)),
    ("a separate context", |config| config.prefill_context = PrefillContext::Separate),
    ("a forgetful window", |config| config.full_sliding_window = false),
];

#[test]
fn hosts_do_not_hear_each_other() {
    const SEED: &str = "ENGINE_CALLS_SEED";
    for subject in all_small() {
        for (name, set) in SETS {
            println!("{}, {name}", subject.path.display());
            let engine = subject.load(set);
            for seed in seeds(SEED, 1) {
                replayable(SEED, seed, |seed| run(&engine, seed));
            }
        }
    }
}
