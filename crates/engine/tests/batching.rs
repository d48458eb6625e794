//! Sequences share steps, and do not disturb each other.
#![allow(missing_docs)]

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{
    Subject, all, all_real, all_small, alone, assert_same, complete, full, greedy, in_threads, long_prompt,
    prompt, rolls_back, samples, sequence, start, take, text, tokens,
};
use engine::{Engine, GenerateOptions, KvLayout, Metrics, PromptError, SampleError};
use fixtures::{SLIDING_WINDOW, SmallModel, vocabulary as vocab};

/// Four threads that sample at the same time, after their prompts.
fn sample_from_four_threads(engine: &Engine) -> Metrics {
    const COUNT: usize = 200;
    let ready = Barrier::new(5);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|index| {
                let ready = &ready;
                scope.spawn(move || {
                    let mut sequence = sequence(engine, greedy());
                    start(&mut sequence, &prompt(engine, index));
                    ready.wait();
                    take(&mut sequence, COUNT);
                    sequence
                })
            })
            .collect();
        ready.wait();
        let before = engine.metrics();
        // They are kept until all are done, so that what was sampled ahead is the same for all.
        let _sequences: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        engine.metrics().since(&before)
    })
}

#[test]
fn four_threads_fill_the_steps() {
    // A machine that is busy with something else may leave one of the threads out for longer than it is ahead.
    const ATTEMPTS: usize = 10;
    for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
        let engine = full().load(|config| config.kv_layout = kv_layout);
        let mut attempts = (0..ATTEMPTS).map(|_| sample_from_four_threads(&engine));
        let mut seen = Vec::new();
        let full = attempts.any(|metrics| {
            assert_eq!(metrics.steps, metrics.decode_steps);
            seen.push(metrics.mean_rows());
            metrics.mean_rows() > 3.9
        });
        assert!(full, "{kv_layout:?}: {seen:?} rows a step");
    }
}

#[test]
fn every_step_and_every_call_is_timed() {
    let engine = full().load(|_| {});
    let mut sequence = sequence(&engine, greedy());
    sequence.decode_prompt(&prompt(&engine, 0), 0).expect("the prompt is decoded");
    take(&mut sequence, 5);
    // Nothing is sampled ahead any more when the decoder has heard of it.
    drop(sequence);
    let timings = engine.timings().expect("the decoder is alive");
    assert_eq!(timings.queue_wait.len(), 6, "a prompt and five requests");
    assert_eq!(timings.step.len(), engine.metrics().steps);
    let limits = 1..=engine::Timings::MAX_MICROS;
    assert!(limits.contains(&timings.step.max()) && timings.step.min() <= timings.step.max());
}

#[test]
fn one_thread_has_a_row_a_step_and_waits_for_nobody() {
    const COUNT: usize = 100;
    for run_ahead in [0, 4] {
        let window = Duration::from_secs(1);
        let engine = full().load(|config| {
            config.run_ahead = run_ahead;
            config.straggler_window = window;
        });
        // Others are alive, but nobody asks for their tokens.
        let _idle: Vec<_> = (0..3).map(|_| sequence(&engine, greedy())).collect();
        let mut sequence = sequence(&engine, greedy());
        start(&mut sequence, &prompt(&engine, 0));
        let (before, began) = (engine.metrics(), Instant::now());
        take(&mut sequence, COUNT);
        let elapsed = began.elapsed();
        let metrics = engine.metrics().since(&before);
        assert_eq!((metrics.rows, metrics.decode_rows), (metrics.steps, metrics.decode_steps));
        let steps = COUNT as u64 - 1;
        assert!((steps..=steps + u64::from(run_ahead) + 1).contains(&metrics.steps), "{metrics:?}");
        assert!(elapsed < window, "{COUNT} tokens took {elapsed:?}");
    }
}

#[test]
fn a_long_prompt_does_not_stop_a_stream() {
    let engine = full().load(|config| config.context_window = 2048);
    let long = long_prompt(&engine, 1500);
    let short = prompt(&engine, 0);
    let expected = tokens(&alone(&engine, &long, 20));
    let (taken, done) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let mut options = GenerateOptions::default();
        options.max_tokens = 1900;
        let mut streaming = engine.generate(short, options).expect("it begins");
        let (taken, done) = (&taken, &done);
        scope.spawn(move || {
            for piece in streaming.by_ref() {
                taken.fetch_add(piece.tokens, Ordering::Relaxed);
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
            panic!("the stream has ended first: {:?}", streaming.outcome());
        });
        while taken.load(Ordering::Relaxed) < 20 {
            std::thread::yield_now();
        }
        let mut other = sequence(&engine, greedy());
        let (before, taken_before) = (engine.metrics(), taken.load(Ordering::Relaxed));
        start(&mut other, &long);
        let (metrics, taken) =
            (engine.metrics().since(&before), taken.load(Ordering::Relaxed) - taken_before);
        done.store(true, Ordering::Relaxed);
        assert!(metrics.steps >= 1500 / 128, "a step has {} rows at most", engine.config().batch_size);
        assert!(metrics.decode_steps * 2 > metrics.steps, "the stream was left out: {metrics:?}");
        assert!(u64::from(taken) * 2 > metrics.steps, "{taken} tokens came during {metrics:?}");
        assert_eq!(take(&mut other, 20), expected);
    });
}

#[test]
fn a_prompt_of_any_length_around_the_batch_is_taken() {
    for subject in all_small() {
        let whole = subject.load(|config| config.batch_size = 512);
        for batch_size in [4, 32] {
            let engine = subject.load(|config| config.batch_size = batch_size);
            for length in [batch_size - 1, batch_size, batch_size + 1, 2 * batch_size + 1] {
                let prompt = long_prompt(&engine, length as usize);
                let expected = tokens(&alone(&whole, &prompt, 10));
                let before = engine.metrics();
                let said = tokens(&alone(&engine, &prompt, 10));
                assert_eq!(said, expected, "{}, {length} in {batch_size}", subject.path.display());
                let metrics = engine.metrics().since(&before);
                assert_eq!(metrics.prompt_rows, u64::from(length));
                assert_eq!(metrics.steps - metrics.decode_steps, u64::from(length.div_ceil(batch_size)));
            }
            // Rows of prompts and of completions together keep to the batch as well.
            beside_others(&subject, &engine, batch_size as usize + 1);
        }
    }
}

fn beside_others(subject: &Subject, engine: &Engine, length: usize) {
    let prompts: Vec<_> = (0..4).map(|index| long_prompt(engine, length + index)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(engine, prompt, 20))).collect();
    let said = in_threads(4, |index| complete(&mut sequence(engine, greedy()), &prompts[index], 20));
    assert_eq!(said, expected, "{}, prompts of {length}", subject.path.display());
}

#[test]
fn a_cancel_stops_a_prompt_and_the_next_one_works() {
    const LENGTH: usize = 1900;
    for subject in all_small() {
        let engine = subject.load(|config| {
            config.context_window = 2048;
            config.batch_size = 16;
        });
        let (long, short) = (long_prompt(&engine, LENGTH), prompt(&engine, 0));
        let (expected, expected_long) =
            (tokens(&alone(&engine, &short, 20)), tokens(&alone(&engine, &long, 20)));
        let mut stopped = 0;
        for attempt in 0..100 {
            let mut sequence = sequence(&engine, greedy());
            let canceller = sequence.canceller();
            let before = engine.metrics();
            let result = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while engine.metrics().since(&before).prompt_rows < 100 + attempt {
                        std::thread::yield_now();
                    }
                    canceller.cancel();
                });
                sequence.decode_prompt(&long, 0)
            });
            let held = sequence.position_count();
            // A state that a broken chunk has touched is given up; it cannot go back.
            let given_up = held == 0 && !rolls_back(&engine);
            if result.is_ok() {
                // The cancel came too late.
                continue;
            }
            assert_eq!(result, Err(PromptError::Cancelled));
            assert_eq!(sequence.sample_next(), Err(SampleError::Cancelled));
            if !given_up {
                assert!(held >= 96 && (held as usize) < LENGTH, "{held} positions are held");
                assert_eq!(engine.metrics().since(&before).prompt_rows, u64::from(held));
            }
            if stopped % 2 == 0 {
                sequence.trim(held).expect("it stays where it is");
                sequence.decode_prompt(&long[held as usize..], held).expect("it goes on");
                assert_eq!(take(&mut sequence, 20), expected_long, "{}", subject.path.display());
            } else {
                sequence.trim(0).expect("everything can be forgotten");
                assert_eq!(complete(&mut sequence, &short, 20), expected, "{}", subject.path.display());
            }
            stopped += 1;
            if stopped == 4 {
                break;
            }
        }
        assert_eq!(stopped, 4, "{}: the cancels came too late", subject.path.display());
    }
}

#[test]
fn a_cancel_reaches_into_a_chunk_on_the_processor() {
    for subject in all_real() {
        let engine = subject.load(|config| {
            config.gpu_layers = Some(0);
            config.batch_size = 512;
        });
        let short = prompt(&engine, 0);
        let expected = alone(&engine, &short, 3);
        let mut sequence = sequence(&engine, greedy());
        let canceller = sequence.canceller();
        let before = engine.metrics();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                canceller.cancel();
            });
            sequence.decode_prompt(&long_prompt(&engine, 500), 0)
        });
        assert_eq!(result, Err(PromptError::Cancelled));
        assert_eq!(sequence.position_count(), 0);
        let metrics = engine.metrics().since(&before);
        assert_eq!((metrics.decode_failures, metrics.steps), (1, 0), "{}", subject.path.display());
        sequence.trim(0).expect("it can go back");
        assert_same(true, &samples(&mut sequence, &short, 3), &expected, &subject.path.display().to_string());
    }
}

#[test]
fn a_sequence_has_the_same_logits_alone_and_among_others() {
    for subject in all() {
        let count = if subject.real { 5 } else { 60 };
        for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
            let engine = subject.load(|config| config.kv_layout = kv_layout);
            let prompts: Vec<_> = (0..4).map(|index| prompt(&engine, index)).collect();
            let expected: Vec<_> = prompts.iter().map(|prompt| alone(&engine, prompt, count)).collect();
            for others in if subject.real { 3..4 } else { 1..4 } {
                let together = in_threads(others + 1, |index| {
                    samples(&mut sequence(&engine, greedy()), &prompts[index], count)
                });
                for (index, (said, expected)) in together.iter().zip(&expected).enumerate() {
                    let what = format!("{}, {kv_layout:?}, {index} of {others}", subject.path.display());
                    assert_same(subject.real, said, expected, &what);
                }
            }
        }
    }
}

#[test]
fn many_sequences_of_any_memory_come_and_go_together() {
    const SEQUENCES: usize = 12;
    for subject in all_small() {
        for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
            let engine = subject.load(|config| {
                config.max_sequences = SEQUENCES as u32;
                config.kv_layout = kv_layout;
            });
            let prompts: Vec<_> = (0..5).map(|index| prompt(&engine, index)).collect();
            let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(&engine, prompt, 60))).collect();
            let said = in_threads(SEQUENCES, |thread| {
                (0..4)
                    .map(|round| {
                        let prompt = &prompts[(thread + round) % 5];
                        complete(&mut sequence(&engine, greedy()), prompt, 60 - 10 * round)
                    })
                    .collect::<Vec<_>>()
            });
            for (thread, rounds) in said.iter().enumerate() {
                for (round, said) in rounds.iter().enumerate() {
                    let what = format!("{}, {kv_layout:?}, thread {thread}", subject.path.display());
                    assert_eq!(said[..], expected[(thread + round) % 5][..said.len()], "{what}");
                }
            }
        }
    }
}

#[test]
fn idle_sequences_between_the_others_change_nothing() {
    let engine = full().load(|config| {
        config.max_sequences = 8;
        config.kv_layout = KvLayout::PerSequence;
    });
    let prompts: Vec<_> = (0..5).map(|index| prompt(&engine, index)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(&engine, prompt, 40))).collect();
    let mut alive: Vec<_> = (0..8).map(|_| sequence(&engine, greedy())).collect();
    for (index, sequence) in alive.iter_mut().enumerate() {
        start(sequence, &prompts[index % 5]);
    }
    let said = std::thread::scope(|scope| {
        let threads: Vec<_> = alive
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| index % 3 != 1)
            .map(|(index, sequence)| (index, scope.spawn(move || take(sequence, 40))))
            .collect();
        threads
            .into_iter()
            .map(|(index, thread)| (index, thread.join().expect("no panic")))
            .collect::<Vec<_>>()
    });
    for (index, said) in said {
        assert_eq!(said, expected[index % 5], "slot {index}");
    }
    for index in [1, 4, 7] {
        assert_eq!(take(&mut alive[index], 40), expected[index % 5], "slot {index}");
    }
}

#[test]
fn rolling_back_one_sequence_leaves_the_others() {
    for subject in all_small() {
        for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
            let engine = subject.load(|config| config.kv_layout = kv_layout);
            let prompts: Vec<_> = (0..4).map(|index| prompt(&engine, index)).collect();
            let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(&engine, prompt, 80))).collect();
            let mut alive: Vec<_> = (0..4).map(|_| sequence(&engine, greedy())).collect();
            let mut said = vec![Vec::new(); 4];
            for (sequence, prompt) in alive.iter_mut().zip(&prompts) {
                start(sequence, prompt);
            }
            for round in 0..20 {
                for (sequence, said) in alive.iter_mut().zip(&mut said) {
                    said.extend(take(sequence, 2));
                }
                let back = round % 4;
                let keep = if rolls_back(&engine) { prompts[back].len() - 1 } else { 0 };
                alive[back].trim(keep as u32).expect("it can go back");
                alive[back].decode_prompt(&prompts[back][keep..], keep as u32).expect("it goes on");
                let again = take(&mut alive[back], said[back].len());
                assert_eq!(again, said[back], "{}, {kv_layout:?}", subject.path.display());
            }
            for (index, (said, expected)) in said.iter().zip(&expected).enumerate() {
                assert_eq!(
                    *said,
                    expected[..said.len()],
                    "{}, {kv_layout:?}, {index}",
                    subject.path.display()
                );
            }
        }
    }
}

#[test]
fn a_sliding_window_that_has_gone_on_is_cut_back_rightly_or_not_at_all() {
    const HELD: usize = 1000;
    let window = SLIDING_WINDOW as usize;
    for (full_sliding_window, kv_layout) in [
        (true, KvLayout::Auto),
        (true, KvLayout::PerSequence),
        (true, KvLayout::Unified),
        (false, KvLayout::PerSequence),
        (false, KvLayout::Unified),
    ] {
        let engine = Subject::small(SmallModel::Sliding).load(|config| {
            config.kv_layout = kv_layout;
            config.full_sliding_window = full_sliding_window;
            config.context_window = 2048;
        });
        let long = long_prompt(&engine, HELD);
        let stays = tokens(&alone(&engine, &long, 20));
        let mut neighbour = sequence(&engine, greedy());
        start(&mut neighbour, &long);
        let mut said = Vec::new();
        let (mut refused, mut right) = (0, 0);
        for keep in
            [HELD - 1, HELD - 5, HELD - window / 2, HELD - window, HELD - window - 5, 900, 500, 100, 3]
        {
            let expected = tokens(&alone(&engine, &long[..=keep], 20));
            let mut sequence = sequence(&engine, greedy());
            start(&mut sequence, &long);
            if sequence.trim(keep as u32).is_ok() {
                right += 1;
                assert_eq!(sequence.position_count(), keep as u32);
                sequence.decode_prompt(&long[keep..=keep], keep as u32).expect("it goes on");
                assert_eq!(take(&mut sequence, 20), expected, "cut back to {keep}");
            } else {
                refused += 1;
                assert_eq!(sequence.position_count(), HELD as u32);
                assert_eq!(take(&mut sequence, 20), stays, "not cut back to {keep}");
            }
            said.extend(take(&mut neighbour, 2));
        }
        assert_eq!(said, stays[..said.len()], "the neighbour's tokens");
        if rolls_back(&engine) {
            assert_eq!(refused, 0);
        } else {
            assert!(right > 0 && (full_sliding_window || refused > 0), "{refused} refused, {right} right");
        }
    }
}

#[test]
fn there_is_never_a_second_bos() {
    for subject in [full()].into_iter().chain(all_real()) {
        let engine = subject.load(|_| {});
        let model = engine.model();
        let plain = text(&engine, "hello");
        let without = model.tokenize("hello", false, false).expect("tokens");
        if plain == without {
            // This model's metadata asks for none.
            continue;
        }
        assert_eq!(plain[1..], without, "{}", subject.path.display());
        let bos = String::from_utf8(model.token_piece(plain[0]).expect("bytes")).expect("its text");
        let templated = model.tokenize(format!("{bos}hello"), true, true).expect("tokens");
        assert_eq!(templated, plain, "{}", subject.path.display());
        // Read as text it is text, and a continued prompt gets none.
        assert_ne!(model.tokenize(format!("{bos}hello"), true, false).expect("tokens")[1], plain[0]);
        assert!(!without.contains(&plain[0]));
    }
    let engine = full().load(|_| {});
    assert_eq!(text(&engine, "hello")[0], vocab::BOS);
}

#[test]
fn tokens_give_the_text_back() {
    let texts =
        ["", " ", "Hello, world", "  two  spaces ", "\n\n\t", "Café 日本語 😀 👩‍👩‍👧", "<|im_end|>", "\0 zero"];
    for subject in all() {
        let engine = subject.load(|_| {});
        let model = engine.model();
        let back = |bytes: &[u8]| {
            let tokens = model.tokenize(bytes, false, false).expect("tokens");
            let pieces = tokens.iter().flat_map(|&token| model.token_piece(token).expect("a piece"));
            pieces.collect::<Vec<u8>>()
        };
        for text in texts {
            assert_eq!(back(text.as_bytes()), text.as_bytes(), "{}: {text:?}", subject.path.display());
        }
        let mut state = 1_u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        for _ in 0..50 {
            // llama.cpp marks spaces before it looks at characters, and then loses one in a character that is cut short.
            let bytes: Vec<u8> = (0..50).map(|_| noise()).filter(|&byte| byte != b' ').collect();
            let given = back(&bytes);
            // Without a token for each byte, what is no text becomes U+FFFD; it must not crash.
            assert!(subject.real || given == bytes, "{bytes:?}");
        }
    }
}
