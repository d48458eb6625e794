//! Which tokens a sequence says, and what is known of them.
#![allow(missing_docs)]

mod common;

use std::collections::HashMap;

use common::{
    Subject, all, all_real, all_small, alone, assert_same, complete, full, greedy, hot, in_threads, next,
    prompt, rolls_back, samples, sequence, start, take, text, tokens, with,
};
use engine::{Engine, KvLayout, PromptError, SampleError, SamplingConfig, Token, TrimError};
use fixtures::vocabulary as vocab;

/// Tokens that are compared; real models take their time.
fn count(subject: &Subject) -> usize {
    if subject.real { 8 } else { 100 }
}

fn piece(engine: &Engine, token: Token) -> Vec<u8> {
    engine.model().token_text(token).unwrap_or_else(|error| panic!("{error}"))
}

fn has_line_break(piece: &[u8]) -> bool {
    piece.iter().any(|byte| b"\n\r".contains(byte))
}

/// Draws that depend on everything that may wrongly outlive a trim: the random stream and the penalty's history.
fn drawn(seed: u32) -> SamplingConfig {
    with(hot(seed), |config| config.repetition_penalty = 1.5)
}

#[test]
fn two_sequences_with_one_prompt_say_what_one_says_alone() {
    for subject in all() {
        for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
            for run_ahead in [0, 4] {
                let what = format!("{}, {kv_layout:?}, run_ahead {run_ahead}", subject.path.display());
                let engine = subject.load(|config| {
                    config.kv_layout = kv_layout;
                    config.run_ahead = run_ahead;
                });
                let (prompt, count) = (prompt(&engine, 0), count(&subject));
                let expected = alone(&engine, &prompt, count);

                let mut pair = [sequence(&engine, greedy()), sequence(&engine, greedy())];
                for sequence in &mut pair {
                    sequence.set_compute_logprob(true);
                    start(sequence, &prompt);
                }
                let mut said = [Vec::new(), Vec::new()];
                for _ in 0..count {
                    for (said, sequence) in said.iter_mut().zip(&mut pair) {
                        said.push(next(sequence));
                    }
                }
                for said in said {
                    assert_same(subject.real, &said, &expected, &format!("{what}, in alternation"));
                }
                drop(pair);

                let together = |_| samples(&mut sequence(&engine, greedy()), &prompt, count);
                for said in in_threads(2, together) {
                    assert_same(subject.real, &said, &expected, &format!("{what}, from two threads"));
                }
            }
        }
    }
}

/// The other tests compare the engine with itself; what follows here is known beforehand.
#[test]
fn the_first_token_is_the_seed_and_each_comes_once() {
    for subject in all_small() {
        let engine = subject.load(|_| {});
        let said = complete(&mut sequence(&engine, greedy()), &text(&engine, "x (three)"), 3);
        assert_eq!(said, [vocab::TWO, vocab::ONE, vocab::EOS], "{}", subject.path.display());
    }
}

#[test]
fn after_a_cancel_nothing_is_computed_until_a_trim() {
    for subject in all_small().into_iter().chain(all_real().into_iter().take(1)) {
        for run_ahead in [0, 4] {
            let engine = subject.load(|config| config.run_ahead = run_ahead);
            let prompt = prompt(&engine, 0);
            let mut sequence = sequence(&engine, greedy());
            let before = complete(&mut sequence, &prompt, 5);
            sequence.cancel();
            // A new sequence is made between two steps: what was under way is done then.
            drop(engine.create_sequence(greedy()).expect("there is a slot"));
            let metrics = engine.metrics();
            for _ in 0..3 {
                assert_eq!(sequence.sample_next(), Err(SampleError::Cancelled));
                assert_eq!(sequence.decode_prompt(&prompt, 0), Err(PromptError::Cancelled));
            }
            drop(engine.create_sequence(greedy()).expect("there is a slot"));
            assert_eq!(engine.metrics(), metrics, "{}, run_ahead {run_ahead}", subject.path.display());
            assert!(sequence.canceller().is_cancelled());

            sequence.trim(0).expect("everything can be forgotten");
            assert!(!sequence.canceller().is_cancelled());
            assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
            assert_eq!(complete(&mut sequence, &prompt, 5), before);
        }
    }
}

#[test]
fn a_seed_decides_the_draws_and_running_ahead_does_not() {
    for subject in all_small() {
        let draws = |run_ahead, seed| {
            let engine = subject.load(|config| config.run_ahead = run_ahead);
            complete(&mut sequence(&engine, drawn(seed)), &prompt(&engine, 2), 60)
        };
        let first = draws(0, 42);
        assert_eq!(draws(0, 42), first, "{}", subject.path.display());
        assert_eq!(draws(16, 42), first, "{}", subject.path.display());
        assert_ne!(draws(0, 43), first, "{}", subject.path.display());
        assert_ne!(draws(4, 0), draws(4, 0), "{}: seed 0 is a random one", subject.path.display());
    }
}

#[test]
fn a_token_decoded_again_after_a_trim_is_a_cold_start() {
    for subject in all_small() {
        for run_ahead in [0, 4] {
            let engine = subject.load(|config| config.run_ahead = run_ahead);
            let prompt = prompt(&engine, 1);
            let last = prompt.len() - 1;
            let cold = complete(&mut sequence(&engine, drawn(7)), &prompt, 80);
            let mut sequence = sequence(&engine, drawn(7));
            assert_eq!(complete(&mut sequence, &prompt, 50), cold[..50]);
            if rolls_back(&engine) {
                for abandoned in [80, 3, 0] {
                    sequence.trim(last as u32).expect("it can go back");
                    sequence.decode_prompt(&prompt[last..], last as u32).expect("it goes on");
                    assert_eq!(take(&mut sequence, 80), cold, "{}", subject.path.display());
                    sequence.trim(last as u32).expect("it can go back");
                    sequence.decode_prompt(&prompt[last..], last as u32).expect("it goes on");
                    take(&mut sequence, abandoned);
                }
            }
            sequence.trim(0).expect("everything can be forgotten");
            assert_eq!(complete(&mut sequence, &prompt, 80), cold, "{}", subject.path.display());
        }
    }
}

#[test]
fn a_real_model_starts_cold_after_a_trim_too() {
    for subject in all_real() {
        let engine = subject.load(|_| {});
        let prompt = prompt(&engine, 1);
        let last = prompt.len() - 1;
        let config = with(greedy(), |config| config.repetition_penalty = 1.3);
        let mut sequence = sequence(&engine, config);
        let cold = samples(&mut sequence, &prompt, 10);
        sequence.trim(last as u32).expect("it can go back");
        sequence.decode_prompt(&prompt[last..], last as u32).expect("it goes on");
        let again: Vec<_> = (0..10).map(|_| next(&mut sequence)).collect();
        assert_same(true, &again, &cold, &subject.path.display().to_string());
    }
}

#[test]
fn a_memory_that_cannot_go_back_refuses_and_goes_on() {
    for subject in all_small() {
        let engine = subject.load(|_| {});
        if rolls_back(&engine) {
            continue;
        }
        let prompt = prompt(&engine, 0);
        let expected = tokens(&alone(&engine, &prompt, 30));
        let mut sequence = sequence(&engine, greedy());
        let mut said = complete(&mut sequence, &prompt, 10);
        let held = prompt.len() as u32 + 9;
        for keep in [1, prompt.len() as u32, held - 1] {
            assert_eq!(sequence.trim(keep), Err(TrimError::Unsupported { keep, held }));
            assert_eq!(sequence.position_count(), held);
        }
        said.extend(take(&mut sequence, 20));
        assert_eq!(said, expected, "{}", subject.path.display());
    }
}

#[test]
fn positions_are_counted_as_the_host_sees_them() {
    for subject in all_small() {
        for run_ahead in [0, 4] {
            let engine = subject.load(|config| config.run_ahead = run_ahead);
            let prompt = prompt(&engine, 0);
            let length = prompt.len() as u32;
            let mut sequence = sequence(&engine, greedy());
            assert_eq!(sequence.position_count(), 0);
            start(&mut sequence, &prompt);
            for taken in 0..12 {
                assert_eq!(sequence.position_count(), length + u32::saturating_sub(taken, 1));
                next(&mut sequence);
            }
            let held = length + 11;
            sequence.trim(held + 100).expect("nothing to forget");
            assert_eq!(sequence.position_count(), held);
            let more = &prompt[1..];
            sequence.decode_prompt(more, held).expect("a prompt goes on");
            assert_eq!(sequence.position_count(), held + length - 1);
            let keep = if rolls_back(&engine) { 5 } else { 0 };
            sequence.trim(keep).expect("it can go back there");
            assert_eq!(sequence.position_count(), keep);
            sequence.cancel();
            assert_eq!(sequence.position_count(), keep);
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_distribution() {
    for subject in all_small().into_iter().chain(all_real()) {
        let engine = subject.load(|_| {});
        let prompt = prompt(&engine, 0);
        let best = alone(&engine, &prompt, 1)[0];
        assert!(best.logprob.is_finite() && best.logprob < 0.0, "{}", best.logprob);
        let draws = if subject.real { 6 } else { 400 };
        let mut likely = HashMap::new();
        for seed in 1..=draws {
            let mut sequence = sequence(&engine, with(hot(seed), |config| config.temperature = 5.0));
            let sample = samples(&mut sequence, &prompt, 1)[0];
            assert!(sample.logprob.is_finite() && sample.logprob <= best.logprob + 1e-4);
            assert_eq!(sample.token == best.token, (sample.logprob - best.logprob).abs() < 1e-4);
            likely.insert(sample.token, sample.logprob.exp());
        }
        likely.insert(best.token, best.logprob.exp());
        let sum: f32 = likely.values().sum();
        assert!(sum < 1.001, "{sum}");
        // The small models' draws find all the likely tokens, so that nothing is missing from the sum.
        assert!(subject.real || sum > 0.99, "{}: {} tokens have {sum}", subject.path.display(), likely.len());
    }
}

#[test]
fn log_probabilities_come_when_they_are_asked_for_and_change_nothing() {
    let engine = full().load(|_| {});
    let prompt = prompt(&engine, 3);
    let expected = alone(&engine, &prompt, 60);
    let mut sequence = sequence(&engine, greedy());
    start(&mut sequence, &prompt);
    for (index, expected) in expected.iter().enumerate() {
        // The seed comes with the prompt, when they were still off.
        let on = index % 7 > 3;
        sequence.set_compute_logprob(on);
        let sample = next(&mut sequence);
        assert_eq!(sample.token, expected.token, "token {index}");
        let wanted = if on { expected.logprob } else { 0.0 };
        assert!((sample.logprob - wanted).abs() < 1e-3, "token {index}: {} {wanted}", sample.logprob);
    }
}

#[test]
fn a_choice_that_would_end_generation_is_seen_whatever_is_drawn() {
    let engine = full().load(|_| {});
    let ending = text(&engine, "x (turn)");
    let sample = alone(&engine, &ending, 1)[0];
    assert!(sample.is_eog && sample.argmax_is_eog);
    assert_eq!(sample.token, vocab::EOT);
    let mut others = 0;
    for seed in 1..40 {
        let config = with(hot(seed), |config| config.temperature = 50.0);
        let sample = samples(&mut sequence(&engine, config), &ending, 1)[0];
        assert!(sample.argmax_is_eog);
        assert_eq!(sample.is_eog, engine.model().is_eog(sample.token));
        others += usize::from(!sample.is_eog);
    }
    assert!(others > 10, "only {others} of 39 draws were another token");
    let sample = alone(&engine, &prompt(&engine, 0), 1)[0];
    assert!(!sample.is_eog && !sample.argmax_is_eog);
}

#[test]
fn a_single_line_has_no_line_break() {
    let engine = full().load(|_| {});
    let prompt = prompt(&engine, 0);
    let broken = |config, single_line, count| {
        let mut sequence = sequence(&engine, with(config, |config| config.single_line = single_line));
        let said = complete(&mut sequence, &prompt, count);
        said.iter().any(|&token| has_line_break(&piece(&engine, token)))
    };
    for (config, count) in [(hot(5), 64), (greedy(), 300)] {
        assert!(broken(config, false, count), "without it there are some");
        assert!(!broken(config, true, count));
    }
}

#[test]
fn a_word_continuation_holds_for_one_seed() {
    for subject in [full()].into_iter().chain(all_real()) {
        let engine = subject.load(|_| {});
        let spaced = |token| piece(&engine, token).first().is_some_and(u8::is_ascii_whitespace);
        let mut found = false;
        for index in 0..5 {
            let prompt = prompt(&engine, index);
            let last = prompt.len() - 1;
            let mut sequence = sequence(&engine, greedy());
            let natural = complete(&mut sequence, &prompt, 1)[0];
            let again = |sequence: &mut engine::Sequence| {
                sequence.trim(last as u32).expect("it can go back");
                sequence.decode_prompt(&prompt[last..], last as u32).expect("it goes on");
                next(sequence).token
            };
            sequence.set_force_word_continuation(true);
            let forced = again(&mut sequence);
            assert!(!spaced(forced), "{} goes on with {forced}", subject.path.display());
            let after = again(&mut sequence);
            assert_eq!(spaced(after), spaced(natural), "{}", subject.path.display());
            found |= spaced(natural);
        }
        assert!(found, "{}: some completion begins with a space by itself", subject.path.display());
    }
}

#[test]
fn control_tokens_are_never_said_nor_line_breaks_on_a_single_line() {
    for subject in all() {
        let engine = subject.load(|_| {});
        let prompt = prompt(&engine, 0);
        for seed in 1..=if subject.real { 1 } else { 8 } {
            let config = with(hot(seed), |config| {
                config.temperature = 20.0;
                config.single_line = subject.real;
            });
            for token in complete(&mut sequence(&engine, config), &prompt, 64) {
                let text = piece(&engine, token);
                let shown = !text.is_empty() && !text.starts_with(b"<unused") && !text.starts_with(b"<|");
                assert!(shown || engine.model().is_eog(token), "{token} is {text:?}");
                assert!(!subject.real || !has_line_break(&text), "{token} is {text:?}");
            }
        }
    }
}
