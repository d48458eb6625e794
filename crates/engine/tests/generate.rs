//! Completions as streams of text.
#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::{
    Subject, all_small, alone, assert_same, complete, full, greedy, in_threads, long_prompt, prompt,
    sequence, text, tokens,
};
use engine::{Completion, Engine, FinishReason, GenerateOptions, Generation, Piece};
use fixtures::vocabulary as vocab;

const FILL: &str = "The quick brown fox jumps over the lazy dog. ";

fn options(max_tokens: u32) -> GenerateOptions {
    let mut options = GenerateOptions::default();
    options.max_tokens = max_tokens;
    options
}

fn begin(engine: &Engine, prompt: &str, options: GenerateOptions) -> Generation {
    engine.generate(prompt, options).unwrap_or_else(|error| panic!("{error}"))
}

fn generate(engine: &Engine, prompt: &str, options: GenerateOptions) -> Completion {
    begin(engine, prompt, options).wait()
}

/// The bytes of a greedy completion of so many tokens, one after the other.
fn expected(engine: &Engine, prompt: &str, count: usize) -> Vec<Vec<u8>> {
    let said = complete(&mut sequence(engine, greedy()), &text(engine, prompt), count);
    said.into_iter().map(|token| engine.model().token_text(token).expect("it has a text")).collect()
}

#[test]
fn text_comes_in_whole_characters_and_bytes_as_they_are() {
    for subject in all_small() {
        let engine = subject.load(|_| {});
        let bytes = expected(&engine, FILL, 400).concat();
        let text = String::from_utf8(bytes.clone()).expect("the last character is whole, by chance");
        assert!(text.contains(['€', '😀', 'é']), "{text:?} has no character of several tokens");
        let mut generation = begin(&engine, FILL, options(400));
        let pieces: Vec<Piece> = generation.by_ref().collect();
        for piece in &pieces {
            assert!(!piece.text.is_empty() && !piece.text.contains('\u{fffd}'), "{piece:?}");
            assert_eq!(piece.text.as_bytes(), piece.bytes);
        }
        assert_eq!(pieces.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
        assert_eq!(pieces.iter().map(|piece| piece.tokens).sum::<u32>(), 400);
        assert!(pieces.iter().any(|piece| piece.tokens > 1));
        let completion = generate(&engine, FILL, options(400));
        assert_eq!((completion.text, completion.bytes), (text, bytes));
    }
}

#[test]
fn bytes_that_are_no_text_come_out_all_the_same() {
    let engine = full().load(|_| {});
    let completion = generate(&engine, "x (broken)", options(2));
    assert_eq!(completion.bytes[0], 0xff);
    assert!(completion.text.starts_with('\u{fffd}'), "{:?}", completion.text);
    // A character that the budget cuts in two.
    let cut = engine.generate(vec![vocab::BOS, vocab::FIRST_BYTE + 0xf0], options(2)).expect("it begins");
    assert_eq!(cut.wait().bytes, [0x9f, 0x98]);
}

#[test]
fn usage_counts_the_prompt_and_what_was_taken() {
    let engine = full().load(|_| {});
    let completion = generate(&engine, FILL, options(20));
    let usage = completion.outcome.usage;
    assert_eq!(completion.outcome.reason, FinishReason::MaxTokens);
    assert_eq!(usage.prompt_tokens as usize, text(&engine, FILL).len());
    assert_eq!(usage.completion_tokens, 20);
    assert!(usage.time_to_first_token.expect("there is one") <= usage.duration);
    // No more is sampled than was asked for.
    assert_eq!(engine.metrics().sampled, 20);

    let nothing = generate(&engine, FILL, options(0));
    assert_eq!((nothing.text.as_str(), &nothing.outcome.reason), ("", &FinishReason::MaxTokens));
    assert_eq!(
        (nothing.outcome.usage.completion_tokens, nothing.outcome.usage.time_to_first_token),
        (0, None)
    );
}

#[test]
fn a_generation_ends_where_the_model_ends_it() {
    for subject in all_small() {
        let engine = subject.load(|_| {});
        let completion = generate(&engine, "x (three)", options(100));
        assert_eq!(completion.outcome.reason, FinishReason::EndOfGeneration);
        assert_eq!((completion.text.as_str(), completion.outcome.usage.completion_tokens), ("(two)(one)", 2));
        let nothing = generate(&engine, "x (turn)", options(100));
        assert_eq!(nothing.outcome.reason, FinishReason::EndOfGeneration);
        assert_eq!((nothing.text.as_str(), nothing.outcome.usage.completion_tokens), ("", 0));
    }
}

#[test]
fn a_stop_text_ends_it_also_across_tokens() {
    let engine = full().load(|_| {});
    let tokens = expected(&engine, FILL, 60);
    let text = String::from_utf8_lossy(&tokens.concat()).into_owned();
    let offset: usize = tokens[..30].iter().map(Vec::len).sum();
    for (from, to) in [(offset - 1, offset + 1), (offset - 3, offset + 4), (offset, offset + 1), (0, 2)] {
        let from = (0..=from).rfind(|&at| text.is_char_boundary(at)).expect("0 is one");
        let to = (to..=text.len()).find(|&at| text.is_char_boundary(at)).expect("the end is one");
        let stop = &text[from..to];
        let at = text.find(stop).expect("it is in the text");
        let mut options = options(60);
        options.stop = vec!["never to be seen".to_owned(), String::new(), stop.to_owned()];
        let mut generation = begin(&engine, FILL, options);
        let said: String = generation.by_ref().map(|piece| piece.text).collect();
        assert_eq!(said, text[..at], "stopped by {stop:?}");
        let outcome = generation.outcome().expect("it has ended");
        assert_eq!(outcome.reason, FinishReason::StopText);
        assert!(outcome.usage.completion_tokens <= 60 && generation.next().is_none());
    }
    let mut options = options(60);
    options.stop = vec![format!("{text}x")];
    let completion = generate(&engine, FILL, options);
    assert_eq!((completion.text, completion.outcome.reason), (text, FinishReason::MaxTokens));
}

#[test]
fn a_deadline_ends_it() {
    let engine = full().load(|config| config.context_window = 4096);
    let mut at_once = options(10);
    at_once.deadline = Some(Duration::ZERO);
    let completion = generate(&engine, FILL, at_once);
    assert_eq!((completion.text.as_str(), completion.outcome.reason), ("", FinishReason::Deadline));

    let mut never = options(5);
    never.deadline = Some(Duration::MAX);
    assert_eq!(generate(&engine, "Hello", never).outcome.reason, FinishReason::MaxTokens);
    let deadline = Duration::from_millis(60);
    let mut soon = options(u32::MAX);
    soon.deadline = Some(deadline);
    let completion = generate(&engine, FILL, soon);
    assert_eq!(completion.outcome.reason, FinishReason::Deadline);
    assert!(completion.outcome.usage.duration >= deadline);
    let count = completion.outcome.usage.completion_tokens as usize;
    let whole = expected(&engine, FILL, count).concat();
    assert_eq!(completion.bytes, whole);
}

#[test]
fn a_cancel_ends_it_and_frees_its_slot() {
    let engine = full().load(|config| config.max_sequences = 1);
    let whole = expected(&engine, FILL, 300).concat();
    for taken in 0..20 {
        let mut generation = begin(&engine, FILL, options(300));
        let canceller = generation.canceller();
        let mut said: Vec<u8> = generation.by_ref().take(taken).flat_map(|piece| piece.bytes).collect();
        canceller.cancel();
        said.extend(generation.by_ref().flat_map(|piece| piece.bytes));
        assert!(whole.starts_with(&said), "{said:?}");
        assert_eq!(generation.outcome().expect("it has ended").reason, FinishReason::Cancelled);
    }
}

#[test]
fn a_dropped_generation_frees_its_slot() {
    for subject in all_small() {
        let engine = subject.load(|config| config.max_sequences = 1);
        let whole = expected(&engine, FILL, 40).concat();
        for taken in 0..30 {
            let generation = begin(&engine, FILL, options(300));
            let said: Vec<u8> = generation.take(taken).flat_map(|piece| piece.bytes).collect();
            assert_eq!(said, whole[..said.len()], "{}", subject.path.display());
        }
    }
}

#[test]
fn a_full_window_ends_it() {
    let engine = full().load(|_| {});
    let generation = engine.generate(long_prompt(&engine, 500), options(100)).expect("it begins");
    let completion = generation.wait();
    assert_eq!(completion.outcome.reason, FinishReason::OutOfRoom);
    assert_eq!(completion.outcome.usage.completion_tokens, 13);
}

#[test]
fn the_end_of_the_engine_ends_it() {
    let engine = full().load(|config| config.context_window = 4096);
    let mut generation = begin(&engine, FILL, options(4000));
    assert!(generation.next().is_some());
    drop(engine);
    assert_eq!(generation.wait().outcome.reason, FinishReason::Shutdown);
}

#[test]
fn several_at_once_say_what_each_says_alone() {
    const TEXTS: [&str; 4] = [FILL, "a", "Hello world, never or not", "(x) stone 12 river 34"];
    for subject in all_small() {
        for run_ahead in [0, 4] {
            let engine = subject.load(|config| config.run_ahead = run_ahead);
            let alone: Vec<_> =
                TEXTS.iter().map(|prompt| generate(&engine, prompt, options(150)).bytes).collect();
            let together = in_threads(4, |index| generate(&engine, TEXTS[index], options(150)).bytes);
            assert_eq!(together, alone, "{}, run_ahead {run_ahead}", subject.path.display());
            // One thread that takes a piece of each in turn.
            let mut generations: Vec<_> =
                TEXTS.iter().map(|prompt| begin(&engine, prompt, options(150))).collect();
            let mut said = vec![Vec::new(); 4];
            while generations.iter().any(|generation| generation.outcome().is_none()) {
                for (generation, said) in generations.iter_mut().zip(&mut said) {
                    said.extend(generation.next().into_iter().flat_map(|piece| piece.bytes));
                }
            }
            assert_eq!(said, alone, "{}, run_ahead {run_ahead}", subject.path.display());
        }
    }
}

#[test]
fn real_models_complete_text() {
    for subject in common::all_real() {
        let engine = subject.load(|_| {});
        let prompt = prompt(&engine, 0);
        let expected = alone(&engine, &prompt, 10);
        let mut with_logprobs = options(10);
        with_logprobs.logprobs = true;
        let completion = engine.generate(prompt.clone(), with_logprobs).expect("it begins").wait();
        let again = alone(&engine, &prompt, 10);
        assert_same(true, &again, &expected, &subject.path.display().to_string());
        let bytes = engine.model().detokenize(&tokens(&expected)).expect("its own tokens");
        assert_eq!(completion.bytes, bytes, "{}", subject.path.display());
        assert_eq!(completion.outcome.usage.completion_tokens, 10);
    }
}

#[test]
fn pieces_come_with_their_log_probability() {
    let engine = full().load(|_| {});
    let expected: f32 = alone(&engine, &text(&engine, FILL), 100).iter().map(|sample| sample.logprob).sum();
    let mut options = options(100);
    options.logprobs = true;
    let sum: f32 = begin(&engine, FILL, options).map(|piece| piece.logprob).sum();
    assert!((sum - expected).abs() < 1e-2, "{sum} {expected}");
}

#[test]
fn the_prompt_is_read_as_the_options_say() {
    let engine = full().load(|_| {});
    let prompt = "<|im_start|>user\nhello";
    let mut special = options(30);
    special.parse_special = true;
    let plain = generate(&engine, prompt, options(30));
    let parsed = generate(&engine, prompt, special);
    assert!(parsed.outcome.usage.prompt_tokens < plain.outcome.usage.prompt_tokens);
    assert_ne!(parsed.bytes, plain.bytes);

    let spaced = |word_continuation, prompt| {
        let mut options = options(5);
        options.word_continuation = word_continuation;
        generate(&engine, prompt, options).text.starts_with(char::is_whitespace)
    };
    let prompts = ["a", "ab", "abc", "b", "bc", "c", "d", "e"];
    assert!(prompts.iter().any(|prompt| spaced(false, prompt)));
    assert!(!prompts.iter().any(|prompt| spaced(true, prompt)));
}

#[test]
fn a_stream_that_nobody_takes_rests() {
    let engine = Subject::load(&full(), |config| config.run_ahead = 4);
    let mut generation = begin(&engine, FILL, options(400));
    let first = generation.next().expect("a piece").tokens;
    // What is ahead of the host is bounded, so the decoder comes to rest; it is the other's alone then.
    let other = generate(&engine, FILL, options(200));
    let before = engine.metrics();
    assert!(before.sampled < 200 + 40, "{}", before.sampled);
    assert_eq!(other.outcome.usage.completion_tokens, 200);
    assert_eq!(engine.metrics(), before);
    let rest: u32 = generation.map(|piece| piece.tokens).sum();
    assert_eq!(first + rest, 400);
}
