//! Every error of a loaded engine, tried; and beside each a sequence whose tokens do not change.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use common::{
    Subject, alone, beside_a_neighbour, complete, file, full, full_bytes, greedy, long_prompt, next, prompt,
    sequence, start, take, text, tokens,
};
use engine::{
    ChatMessage, ChatTemplateError, ConfigError, CreateSequenceError, DecodeError, FinishReason,
    GenerateError, GenerateOptions, KvLayout, PromptError, SampleError, SamplingConfig, TokenizeError,
    TrimError,
};
use fixtures::{SmallModel, vocabulary as vocab};

/// A copy in which a token's embedding is no number.
fn with_broken_token(token: i32) -> Vec<u8> {
    const ROW: usize = 128;
    let mut bytes = full_bytes();
    // Token 0's row of 16-bit floats: its nine bits are 1, then there is nothing until the constant at the end.
    let mut first = [0; ROW];
    first[..18].copy_from_slice(&[0x00, 0x3c].repeat(9));
    first[ROW - 1] = 0x5c;
    let embeddings = bytes.windows(ROW).position(|window| window == first).expect("the embeddings");
    let row = embeddings + ROW * token as usize;
    bytes[row..row + 18].copy_from_slice(&[0x00, 0x7e].repeat(9));
    bytes
}

#[test]
fn every_sampling_setting_out_of_its_range_is_named() {
    type Set = fn(&mut SamplingConfig);
    const FLOATS: [(&str, Set); 8] = [
        ("temperature", |c| c.temperature = f32::NAN),
        ("temperature", |c| c.temperature = f32::INFINITY),
        ("temperature", |c| c.temperature = 100.5),
        ("repetition_penalty", |c| c.repetition_penalty = f32::NAN),
        ("repetition_penalty", |c| c.repetition_penalty = 101.0),
        ("top_p", |c| c.top_p = f32::NAN),
        ("min_p", |c| c.min_p = 1.5),
        ("min_p", |c| c.min_p = f32::NAN),
    ];
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        for (wanted, set) in FLOATS {
            let mut options = GenerateOptions::default();
            set(&mut options.sampling);
            let error = engine.create_sequence(options.sampling).map(drop).expect_err(wanted);
            let CreateSequenceError::Config(ConfigError::OutOfRangeFloat { name, .. }) = &error else {
                panic!("{error:?}");
            };
            assert_eq!(*name, wanted);
            let generated = engine.generate("a", options).map(drop);
            assert!(matches!(generated, Err(GenerateError::Create(CreateSequenceError::Config(_)))));
        }
    });
}

#[test]
fn a_prompt_that_cannot_be_is_refused_and_the_completion_goes_on() {
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let prompt = prompt(&engine, 0);
        let expected = tokens(&alone(&engine, &prompt, 100));
        let mut sequence = sequence(&engine, greedy());
        let mut said = complete(&mut sequence, &prompt, 10);
        let long = long_prompt(&engine, 513);
        let vocabulary = vocab::SIZE as u32;
        let unknown = |token| PromptError::UnknownToken { token, index: 1, vocabulary };
        for case in 0..10 {
            let held = prompt.len() as u32 + 9 + case;
            let cases = [
                (&[][..], held, PromptError::Empty),
                (&long[..], 0, PromptError::TooLong { tokens: 513, start: 0, window: 512 }),
                (&long[..512], held, PromptError::TooLong { tokens: 512, start: held, window: 512 }),
                (&[5], u32::MAX, PromptError::TooLong { tokens: 1, start: u32::MAX, window: 512 }),
                (&[5], held + 1, PromptError::PositionMismatch { start: held + 1, held }),
                (&[5], held - 1, PromptError::PositionMismatch { start: held - 1, held }),
                (&[5], 0, PromptError::PositionMismatch { start: 0, held }),
                (&[5, vocab::SIZE as i32], held, unknown(vocab::SIZE as i32)),
                (&[5, -1], held, unknown(-1)),
                (&[5, i32::MIN], held, unknown(i32::MIN)),
            ];
            let (tokens, start, error) = cases[case as usize].clone();
            assert_eq!(sequence.decode_prompt(tokens, start), Err(error));
            assert_eq!(sequence.position_count(), held);
            said.push(next(&mut sequence).token);
        }
        said.extend(take(&mut sequence, 80));
        assert_eq!(said, expected);
    });
}

#[test]
fn the_next_token_needs_a_prompt() {
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let mut sequence = sequence(&engine, greedy());
        assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
        assert_eq!(sequence.decode_prompt(&[], 0), Err(PromptError::Empty));
        assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
        let prompt = prompt(&engine, 0);
        complete(&mut sequence, &prompt, 3);
        sequence.trim(2).expect("it can go back");
        assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
    });
}

#[test]
fn a_slot_too_many_is_refused() {
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let _others: Vec<_> = (0..3).map(|_| sequence(&engine, greedy())).collect();
        let full = CreateSequenceError::NoFreeSlot { max_sequences: 4 };
        for _ in 0..10 {
            assert_eq!(engine.create_sequence(greedy()).map(drop), Err(full.clone()));
            let generated = engine.generate("a", GenerateOptions::default()).map(drop);
            assert_eq!(generated, Err(GenerateError::Create(full.clone())));
        }
    });
}

#[test]
fn sequences_out_of_room_say_so_and_work_again_after_a_trim() {
    for kv_layout in [KvLayout::PerSequence, KvLayout::Unified] {
        for run_ahead in [0, 4] {
            let engine = full().load(|config| {
                config.kv_layout = kv_layout;
                config.run_ahead = run_ahead;
            });
            beside_a_neighbour(&engine, || {
                let (long, short) = (long_prompt(&engine, 500), prompt(&engine, 0));
                let expected = tokens(&alone(&engine, &short, 10));
                common::in_threads(3, |_| {
                    let mut sequence = sequence(&engine, greedy());
                    // The last token needs no room.
                    let said = complete(&mut sequence, &long, 13);
                    let error = SampleError::OutOfRoom { held: 512, window: 512 };
                    for _ in 0..3 {
                        assert_eq!(sequence.sample_next(), Err(error.clone()));
                        assert_eq!(sequence.position_count(), 512);
                    }
                    sequence.trim(505).expect("it can go back");
                    sequence.decode_prompt(&said[5..6], 505).expect("there is room");
                    assert_eq!(take(&mut sequence, 7), said[6..]);
                    assert_eq!(sequence.sample_next(), Err(error));
                    sequence.trim(0).expect("it can go back");
                    assert_eq!(complete(&mut sequence, &short, 10), expected);
                });
                // A prompt that fills the window has room for its seed.
                let mut sequence = sequence(&engine, greedy());
                start(&mut sequence, &long_prompt(&engine, 512));
                next(&mut sequence);
                assert!(matches!(sequence.sample_next(), Err(SampleError::OutOfRoom { .. })));
            });
        }
    }
}

#[test]
fn cancelling_one_sequence_leaves_the_others() {
    for run_ahead in [0, 4] {
        let engine = full().load(|config| config.run_ahead = run_ahead);
        beside_a_neighbour(&engine, || {
            let prompt = prompt(&engine, 0);
            let expected = tokens(&alone(&engine, &prompt, 20));
            let mut sequence = sequence(&engine, greedy());
            for cancelled_after in 0..20 {
                let said = complete(&mut sequence, &prompt, cancelled_after);
                assert_eq!(said, expected[..cancelled_after]);
                sequence.cancel();
                assert_eq!(sequence.sample_next(), Err(SampleError::Cancelled));
                assert_eq!(sequence.decode_prompt(&prompt, 0), Err(PromptError::Cancelled));
                sequence.trim(0).expect("it can go back");
            }
        });
    }
}

#[test]
fn logits_that_are_no_numbers_fail_their_own_sequence() {
    let path = file("broken-token", &with_broken_token(vocab::TWO));
    let broken = Subject { path: path.clone(), real: false };
    let engine = broken.load(|config| config.kv_layout = KvLayout::PerSequence);
    let _ = fs::remove_file(path);
    beside_a_neighbour(&engine, || {
        let mut sequence = sequence(&engine, greedy());
        let error = DecodeError::NotFinite;
        for _ in 0..3 {
            let prompt = text(&engine, "one (two)");
            assert_eq!(sequence.decode_prompt(&prompt, 0), Err(PromptError::Decode(error.clone())));
            assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
            sequence.trim(0).expect("it can go back");
            // The model's answer is `(two)`, which it then cannot read.
            assert_eq!(complete(&mut sequence, &text(&engine, "one (three)"), 1), [vocab::TWO]);
            assert_eq!(sequence.sample_next(), Err(SampleError::Decode(error.clone())));
            assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
            sequence.trim(0).expect("it can go back");
        }
        let good = prompt(&engine, 0);
        assert_eq!(complete(&mut sequence, &good, 20), tokens(&alone(&full().load(|_| {}), &good, 20)));
        for prompt in ["one (two)", "one (three)"] {
            let generation = engine.generate(prompt, GenerateOptions::default()).expect("it begins");
            assert_eq!(generation.wait().outcome.reason, FinishReason::Failed(error.clone()));
        }
    });
}

#[test]
fn a_full_queue_is_an_error_and_loses_nothing() {
    let engine = full().load(|config| {
        config.queue_capacity = 1;
        config.max_sequences = 5;
        config.context_window = 2048;
        config.batch_size = 512;
    });
    let (long, short) = (long_prompt(&engine, 2000), prompt(&engine, 0));
    let quiet = full().load(|config| config.context_window = 2048);
    let expected = tokens(&alone(&quiet, &short, 300));
    let expected_long = tokens(&alone(&quiet, &long, 1));
    let retry = |sequence: &mut engine::Sequence| {
        while let Err(error) = sequence.decode_prompt(&short, 0) {
            assert_eq!(error, PromptError::QueueFull { capacity: 1 });
            yield_now();
        }
    };
    let done = AtomicBool::new(false);
    let limit = Instant::now() + Duration::from_secs(60);
    // Each tries until its own call has met a full queue; then what it says must still be right.
    let mut prompting = sequence(&engine, greedy());
    let mut sampling = sequence(&engine, greedy());
    let mut restarting = sequence(&engine, greedy());
    std::thread::scope(|scope| {
        let threads = [
            scope.spawn(|| {
                retry(&mut sampling);
                let mut said = Vec::new();
                let mut full = 0;
                while said.len() < 300 || full == 0 {
                    assert!(Instant::now() < limit, "the queue was never full for a token");
                    match sampling.sample_next() {
                        Ok(sample) => said.push(sample.token),
                        Err(error) => {
                            assert_eq!(error, SampleError::QueueFull { capacity: 1 });
                            full += 1;
                            yield_now();
                        }
                    }
                    if said.len() == 1500 {
                        assert_eq!(said[..300], expected);
                        said.clear();
                        sampling.trim(0).expect("it can go back");
                        retry(&mut sampling);
                    }
                }
                assert_eq!(said[..300], expected);
            }),
            scope.spawn(|| {
                let mut full = 0;
                while full == 0 {
                    assert!(Instant::now() < limit, "the queue was never full for a prompt");
                    match restarting.decode_prompt(&short, 0) {
                        Ok(()) => restarting.trim(0).expect("it can go back"),
                        Err(error) => {
                            assert_eq!(error, PromptError::QueueFull { capacity: 1 });
                            assert_eq!(restarting.position_count(), 0);
                            full += 1;
                        }
                    }
                }
                retry(&mut restarting);
            }),
            scope.spawn(|| {
                loop {
                    assert!(Instant::now() < limit, "the queue was never full for a new sequence");
                    match engine.create_sequence(greedy()) {
                        Ok(sequence) => drop(sequence),
                        Err(error) => {
                            assert_eq!(error, CreateSequenceError::QueueFull { capacity: 1 });
                            break;
                        }
                    }
                }
            }),
        ];
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                match prompting.decode_prompt(&long, 0) {
                    Ok(()) => {
                        while let Err(error) =
                            prompting.sample_next().map(|s| assert_eq!(s.token, expected_long[0]))
                        {
                            assert_eq!(error, SampleError::QueueFull { capacity: 1 });
                            yield_now();
                        }
                        prompting.trim(0).expect("it can go back");
                    }
                    Err(error) => assert_eq!(error, PromptError::QueueFull { capacity: 1 }),
                }
            }
        });
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        for result in ended {
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

#[test]
fn a_generation_that_cannot_begin_says_why() {
    let engine = full().load(|_| {});
    beside_a_neighbour(&engine, || {
        let begin = |prompt: Vec<i32>| engine.generate(prompt, GenerateOptions::default()).map(drop);
        assert_eq!(begin(Vec::new()), Err(GenerateError::Prompt(PromptError::Empty)));
        let too_long = PromptError::TooLong { tokens: 513, start: 0, window: 512 };
        assert_eq!(begin(long_prompt(&engine, 513)), Err(GenerateError::Prompt(too_long)));
        let unknown = PromptError::UnknownToken { token: -1, index: 0, vocabulary: vocab::SIZE as u32 };
        for _ in 0..5 {
            assert_eq!(begin(vec![-1]), Err(GenerateError::Prompt(unknown.clone())));
        }
        // None of them keeps a slot.
        let _three: Vec<_> = (0..3).map(|_| sequence(&engine, greedy())).collect();
    });
}

#[test]
fn texts_and_tokens_that_cannot_be_turned_are_refused() {
    let engine = full().load(|_| {});
    let model = engine.model();
    beside_a_neighbour(&engine, || {
        let vocabulary = vocab::SIZE as u32;
        for token in [-1, vocab::SIZE as i32, i32::MAX, i32::MIN] {
            let unknown = TokenizeError::UnknownToken { token, vocabulary };
            assert_eq!(model.token_piece(token), Err(unknown.clone()));
            assert_eq!(model.token_text(token), Err(unknown.clone()));
            assert_eq!(model.detokenize(&[vocab::BOS, token]), Err(unknown));
            assert!(!model.is_eog(token));
        }
        // Zeros that nobody reads take no memory.
        let bytes = i32::MAX as usize / 2 + 1;
        let too_long = TokenizeError::TooLong { bytes, max: bytes - 1 };
        assert_eq!(model.tokenize(vec![0; bytes], true, true), Err(too_long));

        let zero = [ChatMessage { role: "user", content: "a\0b" }];
        assert!(matches!(model.apply_chat_template(&zero, true), Err(ChatTemplateError::Failed(_))));
        let hybrid = Subject::small(SmallModel::Hybrid).load(|_| {});
        assert!(!hybrid.model().has_chat_template());
        let hello = [ChatMessage { role: "user", content: "hello" }];
        assert_eq!(hybrid.model().apply_chat_template(&hello, true), Err(ChatTemplateError::None));
        let rendered = model.apply_chat_template(&hello, true).expect("it has a template");
        assert_eq!(rendered, b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
    });
}

#[test]
fn a_trim_that_a_memory_cannot_do_changes_nothing() {
    let engine = Subject::small(SmallModel::Recurrent).load(|_| {});
    let (a, b) = (prompt(&engine, 0), prompt(&engine, 1));
    let (expected_a, expected_b) = (tokens(&alone(&engine, &a, 60)), tokens(&alone(&engine, &b, 60)));
    let mut pair = [sequence(&engine, greedy()), sequence(&engine, greedy())];
    start(&mut pair[0], &a);
    start(&mut pair[1], &b);
    let mut said = [Vec::new(), Vec::new()];
    for _ in 0..60 {
        for (sequence, said) in pair.iter_mut().zip(&mut said) {
            let refused = sequence.trim(3);
            assert!(matches!(refused, Err(TrimError::Unsupported { keep: 3, .. })), "{refused:?}");
            said.push(next(sequence).token);
        }
    }
    assert_eq!(said, [expected_a, expected_b]);
}
