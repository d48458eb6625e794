//! Completions as async streams.
#![allow(missing_docs)]

mod common;

use common::full;
use engine::{FinishReason, GenerateOptions};
use futures_executor::{block_on, block_on_stream};

const PROMPTS: [&str; 3] = ["The quick brown fox", "a", "Hello world, never or not"];

fn options() -> GenerateOptions {
    let mut options = GenerateOptions::default();
    options.max_tokens = 100;
    options
}

#[test]
fn next_async_gives_what_next_gives() {
    let engine = full().load(|_| {});
    let begin = |prompt: &&str| engine.generate(*prompt, options()).expect("it begins");
    let expected: Vec<_> = PROMPTS.iter().map(|prompt| begin(prompt).wait()).collect();
    let mut generations: Vec<_> = PROMPTS.iter().map(begin).collect();
    let mut said = vec![String::new(); 3];
    block_on(async {
        while generations.iter().any(|generation| generation.outcome().is_none()) {
            for (generation, said) in generations.iter_mut().zip(&mut said) {
                if let Some(piece) = generation.next_async().await {
                    said.push_str(&piece.text);
                }
            }
        }
    });
    for ((generation, said), expected) in generations.iter().zip(said).zip(expected) {
        assert_eq!(said, expected.text);
        let outcome = generation.outcome().expect("it has ended");
        assert_eq!(outcome.reason, FinishReason::MaxTokens);
        assert_eq!(outcome.usage.completion_tokens, 100);
    }
}

#[test]
fn a_stream_gives_all_pieces_and_frees_its_slot_when_it_is_dropped() {
    let engine = full().load(|config| config.max_sequences = 1);
    let expected = engine.generate(PROMPTS[0], options()).expect("it begins").wait().text;
    for taken in [0, 1, 7, usize::MAX] {
        let stream =
            Box::pin(engine.generate(PROMPTS[0], options()).expect("the slot is free").into_stream());
        let said: String = block_on_stream(stream).take(taken).map(|piece| piece.text).collect();
        assert!(expected.starts_with(&said));
        assert_eq!(said == expected, taken == usize::MAX);
    }
}

#[test]
fn cancels_deadlines_and_the_end_of_the_engine_are_seen() {
    let engine = full().load(|config| config.context_window = 4096);
    let mut endless = options();
    endless.max_tokens = 4000;
    let mut cancelled = engine.generate(PROMPTS[0], endless.clone()).expect("it begins");
    let mut late = endless.clone();
    late.deadline = Some(std::time::Duration::from_millis(30));
    let mut late = engine.generate(PROMPTS[1], late).expect("it begins");
    let mut orphan = engine.generate(PROMPTS[2], endless).expect("it begins");
    block_on(async {
        assert!(cancelled.next_async().await.is_some());
        cancelled.canceller().cancel();
        while cancelled.next_async().await.is_some() {}
        while late.next_async().await.is_some() {}
        assert!(orphan.next_async().await.is_some());
        drop(engine);
        while orphan.next_async().await.is_some() {}
    });
    let reason = |generation: &engine::Generation| generation.outcome().map(|outcome| outcome.reason.clone());
    assert_eq!(reason(&cancelled), Some(FinishReason::Cancelled));
    assert_eq!(reason(&late), Some(FinishReason::Deadline));
    assert_eq!(reason(&orphan), Some(FinishReason::Shutdown));
}
