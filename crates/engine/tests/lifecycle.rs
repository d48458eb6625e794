//! Engines and sequences come and go.
#![allow(missing_docs)]

mod common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{
    Subject, all_small, alone, complete, config, full, greedy, in_threads, long_prompt, next, prompt,
    sequence, start, take, tokens,
};
use engine::{
    CreateSequenceError, Engine, FinishReason, GenerateOptions, MemoryKind, PromptError, SampleError,
    Sequence, TrimError,
};
use fixtures::{SLIDING_WINDOW, SmallModel};

#[test]
fn engines_load_and_go_and_know_their_models() {
    for _ in 0..10 {
        for small in SmallModel::ALL {
            let mut shares = Vec::new();
            let engine =
                Engine::load_with_progress(fixtures::small(small), config(), |share| shares.push(share));
            let engine = engine.unwrap_or_else(|error| panic!("{error}"));
            assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{shares:?}");
            let expected = match small {
                SmallModel::Full => MemoryKind::Full,
                SmallModel::Sliding => MemoryKind::SlidingWindow { window: SLIDING_WINDOW },
                SmallModel::Recurrent => MemoryKind::Recurrent,
                SmallModel::Hybrid => MemoryKind::Hybrid,
            };
            assert_eq!(engine.model().memory_kind(), expected);
            assert_eq!(engine.thread_count(), 1);
            assert_eq!(engine.model().vocabulary_size() as usize, fixtures::vocabulary::SIZE);
        }
    }
}

#[test]
fn several_engines_work_side_by_side() {
    let expected = |subject: &Subject| {
        let engine = subject.load(|_| {});
        tokens(&alone(&engine, &prompt(&engine, 0), 40))
    };
    let subjects = all_small();
    let alone: Vec<_> = subjects.iter().map(expected).collect();
    assert_eq!(in_threads(4, |index| expected(&subjects[index])), alone);
}

/// Works until the engine is gone, and returns whether it was told so.
fn sample_until_the_end(mut sequence: Sequence, prompt: &[i32], steps: &AtomicUsize) -> bool {
    let length = prompt.len() as u32;
    let mut begun = sequence.decode_prompt(prompt, 0);
    loop {
        match begun {
            Ok(()) => {}
            Err(error) => return error == PromptError::Shutdown,
        }
        for _ in 0..100 {
            if let Err(error) = sequence.sample_next() {
                return error == SampleError::Shutdown;
            }
            steps.fetch_add(1, Ordering::Relaxed);
        }
        if let Err(error) = sequence.trim(0) {
            return error == TrimError::Shutdown;
        }
        begun = sequence.decode_prompt(prompt, 0);
        assert!(begun.is_err() || sequence.position_count() == length);
    }
}

fn prompt_until_the_end(mut sequence: Sequence, prompt: &[i32], steps: &AtomicUsize) -> bool {
    loop {
        if let Err(error) = sequence.decode_prompt(prompt, 0) {
            return error == PromptError::Shutdown;
        }
        steps.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = sequence.trim(0) {
            return error == TrimError::Shutdown;
        }
    }
}

#[test]
fn dropping_an_engine_ends_what_is_in_flight() {
    for subject in all_small() {
        for round in 0..3 {
            let engine = subject.load(|config| {
                config.context_window = 1024;
                config.batch_size = 64;
            });
            let (short, long) = (prompt(&engine, round), long_prompt(&engine, 1000));
            let (sampled, prompted) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let told = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|index| {
                        let sequence = sequence(&engine, greedy());
                        let (short, long, sampled, prompted) = (&short, &long, &sampled, &prompted);
                        scope.spawn(move || match index % 2 {
                            0 => sample_until_the_end(sequence, short, sampled),
                            _ => prompt_until_the_end(sequence, long, prompted),
                        })
                    })
                    .collect();
                while sampled.load(Ordering::Relaxed) < 20 || prompted.load(Ordering::Relaxed) < round {
                    std::thread::yield_now();
                }
                drop(engine);
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
            });
            assert_eq!(told, [true; 4], "{}, round {round}", subject.path.display());
        }
    }
}

#[test]
fn handles_outlive_their_engine() {
    let engine = full().load(|_| {});
    let prompt = prompt(&engine, 0);
    let model = engine.model().clone();
    let mut fresh = sequence(&engine, greedy());
    let mut sampling = sequence(&engine, greedy());
    complete(&mut sampling, &prompt, 5);
    let mut stopped = sequence(&engine, greedy());
    complete(&mut stopped, &prompt, 5);
    let canceller = stopped.canceller();
    canceller.cancel();
    let mut generation = engine.generate("Hello", GenerateOptions::default()).expect("it begins");
    assert!(generation.next().is_some());
    drop(engine);

    for _ in 0..3 {
        for sequence in [&mut fresh, &mut sampling] {
            sequence.set_compute_logprob(true);
            assert_eq!(sequence.sample_next(), Err(SampleError::Shutdown));
            let start = sequence.position_count();
            assert_eq!(sequence.decode_prompt(&prompt, start), Err(PromptError::Shutdown));
            assert_eq!(sequence.trim(0), Err(TrimError::Shutdown));
            sequence.set_compute_logprob(false);
        }
        assert_eq!(stopped.sample_next(), Err(SampleError::Cancelled));
        assert_eq!(stopped.trim(0), Err(TrimError::Shutdown));
        canceller.cancel();
    }
    // What was sampled already may still come.
    let completion = generation.wait();
    assert_eq!(completion.outcome.reason, FinishReason::Shutdown);
    let bytes = model.detokenize(&model.tokenize("Hello world", false, false).expect("tokens"));
    assert_eq!(bytes.expect("bytes"), b"Hello world");
}

#[test]
fn slots_are_used_again_for_ever() {
    for subject in all_small() {
        for max_sequences in [1, 4] {
            let engine = subject.load(|config| config.max_sequences = max_sequences);
            let prompts: Vec<_> = (0..5).map(|index| prompt(&engine, index)).collect();
            let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(&engine, prompt, 6))).collect();
            let mut ids = HashSet::new();
            let mut alive: Vec<Sequence> = Vec::new();
            for round in 0..100 {
                if alive.len() == max_sequences as usize {
                    let refused = engine.create_sequence(greedy()).map(|sequence| sequence.id());
                    assert_eq!(refused, Err(CreateSequenceError::NoFreeSlot { max_sequences }));
                    // Another one each time, so that slots are freed in any order.
                    drop(alive.swap_remove(round * 7 % max_sequences as usize));
                }
                let mut sequence = sequence(&engine, greedy());
                assert!(sequence.id() > 0 && ids.insert(sequence.id()), "id {} again", sequence.id());
                let (prompt, expected) = (&prompts[round % 5], &expected[round % 5]);
                let what = format!("{}, {max_sequences} at most, round {round}", subject.path.display());
                assert_eq!(complete(&mut sequence, prompt, 6), *expected, "{what}");
                alive.push(sequence);
            }
        }
    }
}

#[test]
fn threads_that_create_and_destroy_do_not_disturb_each_other() {
    let engine = full().load(|config| config.max_sequences = 3);
    let prompts: Vec<_> = (0..5).map(|index| prompt(&engine, index)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| tokens(&alone(&engine, prompt, 12))).collect();
    let ids = in_threads(3, |thread| {
        let mut ids = Vec::new();
        for round in 0..40 {
            let index = (thread + round) % 5;
            let mut sequence = sequence(&engine, greedy());
            assert_eq!(complete(&mut sequence, &prompts[index], 12), expected[index], "thread {thread}");
            ids.push(sequence.id());
        }
        ids
    });
    assert_eq!(ids.iter().flatten().collect::<HashSet<_>>().len(), 120);
}

#[test]
fn a_sequence_may_go_in_the_middle_of_a_completion() {
    let engine = full().load(|_| {});
    let (a, b) = (prompt(&engine, 0), prompt(&engine, 1));
    let expected = tokens(&alone(&engine, &b, 100));
    let mut stays = sequence(&engine, greedy());
    start(&mut stays, &b);
    for expected in expected.chunks(2) {
        let mut goes = sequence(&engine, greedy());
        start(&mut goes, &a);
        next(&mut goes);
        assert_eq!(take(&mut stays, 1)[0], expected[0]);
        drop(goes);
        assert_eq!(take(&mut stays, 1)[0], expected[1]);
    }
}
